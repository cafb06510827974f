"""`tritonemb::row_groups`: distinct rows of a batch, and the positions of each; see `kernels/row_groups.py`."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from tritonemb.layout import Layout
from tritonemb.ops.registry import SHARED_ARGUMENTS, define, plain_eager

ID_DTYPES = (torch.int32, torch.int64)
_streams: dict[torch.device, torch.cuda.Stream] = {}


class RowGroups(NamedTuple):
    """Distinct rows of a batch; `N` is the number of values times the maximal number of lookups per key.

    Attributes:
        rows: int64 `[N]`, ascending linear rows; the first `num_groups` are valid.
        starts: int32 `[N + 1]`, offsets of the segments of `order`, one per row.
        order: int32 `[N]`, positions sorted by row, stable.
        num_groups: int64 `[]`, on the device.
    """

    rows: Tensor
    starts: Tensor
    order: Tensor
    num_groups: Tensor


def ungrouped(ids: Tensor) -> RowGroups:
    """Wrap ids `[N]` that the update will group: `rows` are the ids, the other fields are None."""
    return RowGroups(ids, *[None] * 3)  # type: ignore[arg-type]


def row_groups(values: Tensor, offsets: Tensor, layout: Layout) -> RowGroups:
    """Group a batch's ids `[N]` by row. Ids out of range are omitted; the lookup reports them.

    Raise TypeError or ValueError for ids of another dtype than int32 or int64, or of another shape.
    """
    check_ids(values, layout.multiplicity)
    return RowGroups(*_group(values, offsets, layout))


def row_groups_async(values: Tensor, offsets: Tensor, layout: Layout) -> RowGroups | None:
    """Group the ids for the backward's update. On a GPU, a side stream does so concurrently with the forward.

    The update must call `wait_for_groups` before it reads the groups. Values and offsets must not change until then.
    Returns None during the capture of a CUDA graph: see `UngroupedIds`.
    """
    if not values.is_cuda or not plain_eager(values, offsets):
        return row_groups(values, offsets, layout)
    if torch.cuda.is_current_stream_capturing():
        return None
    groups = _group_on_side_stream(values, offsets, layout, torch.cuda.current_stream(values.device).record_event())
    for tensor in (values, offsets):
        tensor.record_stream(_streams[values.device])
    return groups


def _group_on_side_stream(values: Tensor, offsets: Tensor, layout: Layout, start: torch.cuda.Event) -> RowGroups:
    """Group on the side stream after the event `start`; the current stream will use the result."""
    if values.device not in _streams:
        _streams[values.device] = torch.cuda.Stream(values.device)
    _streams[values.device].wait_event(start)
    with torch.cuda.stream(_streams[values.device]):
        groups = row_groups(values, offsets, layout)
    for tensor in groups:
        tensor.record_stream(torch.cuda.current_stream(values.device))
    return groups


class UngroupedIds(NamedTuple):
    """Ids that the backward will group: in a CUDA graph capture, with the event of the lookup.

    A capture must not end while a side stream is forked, and a forward may be captured without its backward. So the
    backward forks and joins the side stream. The fork waits only for the lookup's event: a graph schedules nodes by
    their dependencies, not in the order of capture.
    """

    fork_point: tuple[torch.cuda.Event, int] | None  # event, and the id of the capture

    @classmethod
    def record(cls, values: Tensor) -> Self:
        fork_point = None
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(values.device)
            capture = capture_id(stream)
            fork_point = None if capture is None else (stream.record_event(), capture)
        return cls(fork_point)

    def group(self, values: Tensor, offsets: Tensor, layout: Layout) -> RowGroups:
        """Group concurrently with nodes captured since the lookup; outside of that capture, on the current stream."""
        if self.fork_point is None or capture_id(torch.cuda.current_stream(values.device)) != self.fork_point[1]:
            return row_groups(values, offsets, layout)
        groups = _group_on_side_stream(values, offsets, layout, self.fork_point[0])
        torch.cuda.current_stream(values.device).wait_stream(_streams[values.device])
        return groups


def capture_id(stream: torch.cuda.Stream) -> int | None:
    """Return the driver's id of the capture of `stream`; None if there is no capture, or no driver bindings."""
    try:
        from cuda.bindings import driver  # PyTorch for CUDA requires them, PyTorch for ROCm lacks them
    except ImportError:
        return None
    _, status, capture, *_ = driver.cuStreamGetCaptureInfo(stream.cuda_stream)
    return int(capture) if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE else None


def wait_for_groups(device: torch.device) -> None:
    """Make the current stream wait for the groups of `row_groups_async`."""
    if device in _streams and not torch.cuda.is_current_stream_capturing():  # the device is idle when a capture starts
        torch.cuda.current_stream(device).wait_stream(_streams[device])


def check_ids(values: Tensor, multiplicity: int = 1) -> None:
    """Raise unless dtype, shape and size of `values` are valid for ids, each looking up `multiplicity` rows."""
    if values.dtype not in ID_DTYPES:
        raise TypeError(f"ids must be int32 or int64, got {values.dtype}; convert them with .to(torch.int64)")
    if values.dim() != 1:
        raise ValueError(f"ids must be 1-D, got shape {tuple(values.shape)}")
    if not torch.compiler.is_compiling() and values.shape[0] * multiplicity >= 2**31:
        raise ValueError(f"a batch may look up at most {2**31 - 1} rows, got {values.shape[0] * multiplicity}")


def _shapes(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    capacity = values.shape[0] * layout.multiplicity
    return (
        values.new_empty(capacity, dtype=torch.int64),
        values.new_empty(capacity + 1, dtype=torch.int32),
        values.new_empty(capacity, dtype=torch.int32),
        values.new_empty((), dtype=torch.int64),
    )


SHARED_ARGUMENTS["*RowGroups"] = RowGroups, "Tensor rows, Tensor starts, Tensor order, Tensor num_groups"
SHARED_ARGUMENTS["*IdsOrGroups"] = RowGroups, "Tensor rows, Tensor? starts, Tensor? order, Tensor? num_groups"
_group = define("row_groups", "(Tensor values, Tensor offsets, *Layout) -> (Tensor, Tensor, Tensor, Tensor)", _shapes)
