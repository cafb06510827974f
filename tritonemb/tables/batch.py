"""A batch as a collection looks it up: its keys, its rows as kernels read them, and the sums of their gradients."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.errors import find_invalid_id
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.layout import FIRST_ROW, ROW_DIM, Layout
from tritonemb.ops.row_groups import ID_DTYPES, check_ids
from tritonemb.types import TableConfig


class RowBatch(NamedTuple):
    """A batch of rows as kernels read it."""

    values: Tensor  # int32 or int64 `[N]`, rows of the tables' memory, which are slots of cached tables
    offsets: Tensor  # int32 or int64 `[K * B + 1]`
    sample_weights: Tensor | None  # float32 `[N]`
    groups: Any  # `ops.RowGroups`, distinct rows with their positions
    layout: Layout  # of the batch's keys over the tables


class AssignedRows(NamedTuple):
    """A batch whose ids of dynamic tables were replaced by rows."""

    # The batch with rows instead of ids, -1 for ids without a row, and one key per lookup if a feature feeds several
    # tables.
    features: KeyedJaggedTensor
    groups: ops.RowGroups | None  # distinct rows, if grouped ahead
    unknown_ids: "UnknownIds | None"  # how ids without a row are read, if there are any
    training: bool  # whether new ids were assigned rows
    # Of the tables: clock of the first one, sums of generations and of epochs; see `DenseIndex`.
    version: tuple[int, int, int]


class UnknownIds(NamedTuple):
    """Samples with unknown ids, and temporary tables by which they are read: known rows, then initial values."""

    # By table number: rows of the samples' known ids in the table's memory, and initial values of the unknown ones.
    rows: dict[int, Tensor]
    initial: dict[int, Tensor]
    # The samples over these temporary tables.
    features: KeyedJaggedTensor
    layout: Layout
    # int64: positions of their values in the batch, and their rows in its output.
    positions: Tensor
    outputs: Tensor


def row_sums(
    grad: Tensor | Sequence[Tensor], batch: RowBatch, max_gradient: float | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the distinct rows of each table, ascending, and the sums of their gradients. Waits for the device."""
    layout, groups = batch.layout, batch.groups
    first_rows = layout.tables[:, FIRST_ROW].contiguous()
    rows = groups.rows[: int(groups.num_groups)]
    starts = torch.searchsorted(rows, first_rows)
    counts = torch.diff(starts, append=starts.new_tensor([rows.shape[0]]))
    sizes = counts.tolist()
    dims, bound = layout.tables[:, ROW_DIM].tolist(), torch.inf if max_gradient is None else max_gradient
    num_values = [n * dim for n, dim in zip(sizes, dims, strict=True)]
    # One after the other: see `concat`.
    parts = torch.zeros(sum(num_values), dtype=torch.float32, device=rows.device).split(num_values)
    sums = [part.view(-1, dim) for part, dim in zip(parts, dims, strict=True)]
    gradient = ops.BatchGradient(grad, batch.offsets, batch.sample_weights, groups, layout)
    ops.row_gradients_(sums, gradient, compact=True, max_gradient=bound)
    local_rows = (rows - first_rows.repeat_interleave(counts, output_size=rows.shape[0])).split(sizes)
    return list(local_rows), sums


def checked_batch(features: Features) -> KeyedJaggedTensor:
    """Convert features; for errors see `unpack_features` and `check_ids`."""
    if not getattr(features, "is_checked", False):
        keys, values, offsets, weights = unpack_features(features)
        features = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    assert isinstance(features, KeyedJaggedTensor)
    values = features._values
    if values.numel() and (values.dtype not in ID_DTYPES or values.dim() != 1):  # `torch.tensor([])` is a float
        check_ids(values)
    return features


def find_invalid(configs: Sequence[TableConfig], batch: KeyedJaggedTensor) -> ValueError | None:
    """Return the error for the first id that is out of range of a static table; None if all are valid."""
    static = [config for config in configs if not config.is_dynamic]
    lookups = [(key, c.name, c.num_embeddings) for key in batch.keys() for c in static if key in c.feature_names]  # noqa: SIM118
    return find_invalid_id(batch, lookups)


def find_positions(batch: KeyedJaggedTensor, keys: Mapping[int, list[int]]) -> dict[int, Any]:
    """Return the positions of each table's values in a batch: a slice, or int64 `[n]` for several keys."""
    size = batch.stride()
    ends = batch.offsets()[::size].tolist() if size else [0] * (len(batch.keys()) + 1)
    slices = {number: [slice(ends[key], ends[key + 1]) for key in of] for number, of in keys.items()}
    return {
        number: of[0] if len(of) == 1 else torch.cat([torch.arange(s.start, s.stop) for s in of])
        for number, of in slices.items()
    }


def configs_for_keys(configs: Sequence[TableConfig], keys: Sequence[str]) -> Sequence[TableConfig]:
    """Return table configs for a batch with these keys, or with one key per lookup; ValueError for missing keys."""
    missing = [feature for config in configs for feature in config.feature_names if feature not in keys]
    if not missing:
        return configs
    names = [[f"{config.name}.{feature}" for feature in config.feature_names] for config in configs]
    if any(name not in keys for table_names in names for name in table_names):
        raise ValueError(f"the batch lacks the features {[*dict.fromkeys(missing)]}; it has the keys {list(keys)}")
    sizes = [((0, config.num_embeddings), (0, config.embedding_dim)) for config in configs]
    return [c.shard(c.name, *size, features) for c, size, features in zip(configs, sizes, names, strict=True)]
