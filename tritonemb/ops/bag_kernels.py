"""One table's lookup and its derivatives, by the kernels of the tensors' device: no autograd, no dispatcher."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.layout import SEED, Layout, lines_of, make_layout
from tritonemb.ops.registry import REFERENCE, choose, kernel
from tritonemb.ops.row_groups import RowGroups
from tritonemb.types import TableConfig, seed_of


class BagTable(NamedTuple):
    """A table as its lookups see it, and a name for error messages, which also seeds its stochastic rounding."""

    num_rows: int
    dim: int
    mean: bool = False
    name: str = "weight"

    @classmethod
    def of(cls, weight: Tensor, mean: bool = False, name: str = "weight") -> BagTable:
        """The table that holds `weight` `[rows, dim]`."""
        num_rows, dim = weight.shape
        return cls(num_rows, dim, mean, name)


@functools.lru_cache(maxsize=1024)
def layout_of(tables: tuple[BagTable, ...], pooled: bool, device: torch.device) -> Layout:
    """Of one key for each table; kept, so that nothing is sent to the device again."""
    configs = [
        TableConfig(f"{place}", table.num_rows, table.dim, pooling="mean" if table.mean else "sum")
        for place, table in enumerate(tables)
    ]
    names = lines_of(table.name for table in tables)
    with torch.inference_mode(False):
        layout = make_layout(configs, [config.name for config in configs], pooled)
        layout.tables[:, SEED] = torch.tensor([seed_of(table.name) for table in tables])
        return layout._replace(
            tables=layout.tables.to(device),
            lookups=layout.lookups.to(device),
            key_starts=layout.key_starts.to(device),
            table_names=names,
            feature_names=names,
        )


def look_up(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, pooled: bool, mean: bool,
    checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    layout = layout_of((BagTable.of(weight, mean),), pooled, values.device)
    look_up = kernel("embedding_bag", values.device, [weight])
    serving = choose("embedding_bag", values.device, [weight])
    if serving == REFERENCE:
        _check_offsets(values, offsets)
    try:
        if serving == "cpu" and not pooled and checked and sample_weights is None and dtype == weight.dtype:
            return weight.index_select(0, values)  # rows as they are: PyTorch copies them as well as anyone
        return look_up([weight], values, offsets, sample_weights, layout, checked, dtype)
    except (ValueError, IndexError) as error:
        raise explained(error, values, weight.shape[0], pooled) from None


def _check_offsets(values: Tensor, offsets: Tensor) -> None:
    """What a reference takes for granted, and kernels find out by themselves."""
    first, last, num_values = int(offsets[0]), int(offsets[-1]), values.shape[0]
    if first != 0 or last != num_values or bool((offsets.diff() < 0).any()):
        raise RuntimeError(f"offsets must ascend from 0 to {num_values}, the number of ids; got {first} to {last}")


def explained(error: Exception, values: Tensor, num_rows: int, pooled: bool) -> Exception:
    """What a CPU kernel found wrong with a batch, as the exception that PyTorch's module raises for it.

    On a GPU the finding may be another module's, and stays as it is.
    """
    if values.device.type != "cpu":
        return error
    kind = RuntimeError if pooled else IndexError
    bad = ((values < 0) | (values >= num_rows)).nonzero()
    if not bad.numel():
        return kind(str(error))
    place = int(bad[0])
    return kind(f"input[{place}] is {int(values[place])}, which is out of range; valid ids are 0 to {num_rows - 1}")


def drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    layout = layout_of((BagTable(num_rows, 1),), True, values.device)
    try:
        return kernel("drop_padding", values.device)(values, offsets, padding_idx, layout)
    except ValueError as error:
        raise explained(error, values, num_rows, True) from None


def _grouped(
    grad: Tensor, values: Tensor, offsets: Tensor, num_rows: int, pooled: bool, mean: bool
) -> tuple[RowGroups, Layout]:
    if values.shape[0] >= 2**31:
        raise ValueError(f"one call may look up at most {2**31 - 1} ids, got {values.shape[0]}")
    layout = layout_of((BagTable(num_rows, grad.shape[1], mean),), pooled, values.device)
    return RowGroups(*kernel("row_groups", values.device)(values, offsets, layout)), layout


def _zeros(grad: Tensor, num_rows: int) -> Tensor:
    """What sums are written into."""
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.new_zeros(num_rows, grad.shape[1], dtype=dtype)


def derive_weight(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    groups, layout = _grouped(grad, values, offsets, num_rows, pooled, mean)
    out = _zeros(grad, num_rows)
    kernel("bag_gradient_", out.device, [out])(out, grad, offsets, sample_weights, groups, layout, False)
    return out.to(dtype)


def derive_weight_sparsely(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The gradient of a table as a sparse COO tensor `[num_rows, dim]`, rows ascending.

    On the CPU it is coalesced: one entry for each distinct row. On a GPU nobody may wait for the number of distinct
    rows, so there are as many entries as values; those behind the last distinct row repeat it, with zeros.
    """
    groups, layout = _grouped(grad, values, offsets, num_rows, pooled, mean)
    exact = grad.device.type == "cpu"
    count = int(groups.num_groups) if exact else values.shape[0]
    out = _zeros(grad, count)
    kernel("bag_gradient_", out.device, [out])(out, grad, offsets, sample_weights, groups, layout, True)
    rows = groups.rows[:count].clone() if exact else places_of(groups)
    shape = (num_rows, grad.shape[1])
    return torch.sparse_coo_tensor(rows.unsqueeze(0), out.to(dtype), shape, check_invariants=False, is_coalesced=exact)


def places_of(groups: RowGroups) -> Tensor:
    """int64 `[N]`: the distinct rows, then the last of them again and again; row 0 if there is none."""
    rows = groups.rows
    if rows.numel() == 0:
        return rows
    behind = torch.arange(rows.numel(), device=rows.device) >= groups.num_groups
    return rows.minimum(rows.masked_fill(behind, 0).amax())


def derive_sample_weights(
    grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
) -> Tensor:
    layout = layout_of((BagTable.of(weight, mean),), pooled, values.device)
    dots = kernel("sample_weight_gradient", grad.device, [weight])
    return dots([weight.contiguous()], values, offsets, grad, layout).to(dtype)
