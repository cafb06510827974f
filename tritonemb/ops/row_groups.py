"""`tritonemb::row_groups`: a batch's distinct rows and the positions that use each; see `kernels/row_groups.py`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tritonemb.layout import Layout, TensorList
from tritonemb.ops.registry import LAYOUT, define, kernel

ID_DTYPES = (torch.int32, torch.int64)
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_streams: dict[torch.device, torch.cuda.Stream] = {}


class RowGroups(NamedTuple):
    """Distinct rows of a batch; `N` is the number of values times the most tables that one key feeds.

    Attributes:
        rows: int64 `[N]`, ascending linear rows; the first `num_groups` are valid.
        starts: int32 `[N + 1]`, segment of `order` that belongs to each row.
        order: int32 `[N]`, positions sorted by row, stable.
        num_groups: int64 `[]`, on the device.
    """

    rows: Tensor
    starts: Tensor
    order: Tensor
    num_groups: Tensor

    @property
    def is_complete(self) -> bool:
        """Whether there are groups: `ungrouped` has ids alone."""
        return self.starts is not None


def ungrouped(ids: Tensor) -> RowGroups:
    """Ids `[N]` that the update is to group: they are the `rows`, and all else is None."""
    return RowGroups(ids, *[None] * 3)  # type: ignore[arg-type]


def row_groups(values: Tensor, offsets: Tensor, layout: Layout) -> RowGroups:
    """Group a batch's ids `[N]` by row. Ids out of range are left out; the lookup is what reports them.

    TypeError, ValueError for ids of another dtype than int32 or int64, or of another shape.
    """
    check_ids(values, layout.multiplicity)
    if plain_eager(values, offsets):
        return RowGroups(*kernel("row_groups", values.device)(values, offsets, layout))
    return RowGroups(*torch.ops.tritonemb.row_groups(values, offsets, *layout))


def row_groups_beside(values: Tensor, offsets: Tensor, layout: Layout) -> RowGroups | None:
    """`row_groups` for an update in the backward: a GPU groups on a stream of its own, beside lookup and dense network.

    Whoever reads the groups calls `wait_for_groups` first. Values and offsets must stay as they are until then.
    None while a CUDA graph is captured: see `UngroupedIds`.
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
    """Groups that a stream of their own makes, behind `start`, for the current stream."""
    if values.device not in _streams:
        _streams[values.device] = torch.cuda.Stream(values.device)
    _streams[values.device].wait_event(start)
    with torch.cuda.stream(_streams[values.device]):
        groups = row_groups(values, offsets, layout)
    for tensor in groups:
        tensor.record_stream(torch.cuda.current_stream(values.device))
    return groups


class UngroupedIds(NamedTuple):
    """What a lookup leaves of ids that its backward groups: their version, and where a CUDA graph has captured it.

    A capture must not end while a stream is forked from it, and one of a forward alone never comes to an update. So the
    backward forks and joins, but from the lookup's event: what a graph runs at once follows from what its nodes wait
    for, not from when they were captured.
    """

    version: int
    point: tuple[torch.cuda.Event, int] | None  # and the number of the capture

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """For a lookup that is made now."""
        point, version = None, 0 if values.is_inference() else values._version
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(values.device)
            number = capture_number(stream)
            point = None if number is None else (stream.record_event(), number)
        return cls(version, point)

    def group(self, values: Tensor, offsets: Tensor, layout: Layout) -> RowGroups:
        """Groups made beside what was captured since the lookup; in another capture, or none, on this stream."""
        if self.point is None or capture_number(torch.cuda.current_stream(values.device)) != self.point[1]:
            return row_groups(values, offsets, layout)
        groups = _group_on_side_stream(values, offsets, layout, self.point[0])
        torch.cuda.current_stream(values.device).wait_stream(_streams[values.device])
        return groups


def capture_number(stream: torch.cuda.Stream) -> int | None:
    """The driver's number of the capture that `stream` takes part in; None without one, or without its bindings."""
    try:
        from cuda.bindings import driver  # PyTorch for CUDA requires them, PyTorch for ROCm lacks them
    except ImportError:
        return None
    _, status, number, *_ = driver.cuStreamGetCaptureInfo(stream.cuda_stream)
    return int(number) if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE else None


def wait_for_groups(device: torch.device) -> None:
    """Have the current stream wait for what `row_groups_beside` has begun."""
    if device in _streams and not torch.cuda.is_current_stream_capturing():  # capturing began when nothing ran
        torch.cuda.current_stream(device).wait_stream(_streams[device])


def plain_eager(*tensors: Tensor | None, tables: Sequence[Tensor] = ()) -> bool:
    """Whether a kernel may be called at once: nothing is being traced and these are ordinary tensors.

    Of a `TensorList` that is known.

    The dispatcher, which tracing needs, costs a custom op with lists of tables up to half a millisecond a call.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level()
    ):
        return False
    return _PLAIN.issuperset(map(type, tensors if isinstance(tables, TensorList) else (*tensors, *tables)))


def check_ids(values: Tensor, multiplicity: int = 1) -> None:
    """Raise unless `values` can be ids by dtype and shape, with so many rows each."""
    if values.dtype not in ID_DTYPES:
        raise TypeError(f"ids must be int32 or int64, got {values.dtype}; convert them with .to(torch.int64)")
    if values.dim() != 1:
        raise ValueError(f"ids must be 1-D, got shape {tuple(values.shape)}")
    if not torch.compiler.is_compiling() and values.shape[0] * multiplicity >= 2**31:
        raise ValueError(f"a batch may look up at most {2**31 - 1} rows, got {values.shape[0] * multiplicity}")


def _shapes(values: Tensor, offsets: Tensor, *layout: Any) -> tuple[Tensor, ...]:
    capacity = values.shape[0] * Layout(*layout).multiplicity
    return (
        values.new_empty(capacity, dtype=torch.int64),
        values.new_empty(capacity + 1, dtype=torch.int32),
        values.new_empty(capacity, dtype=torch.int32),
        values.new_empty((), dtype=torch.int64),
    )


define(
    "row_groups",
    f"(Tensor values, Tensor offsets, {LAYOUT}) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda values, offsets, *layout: kernel("row_groups", values.device)(values, offsets, Layout(*layout)),
    _shapes,
)
