"""Padding left out: ids of a batch with -1 in place of a table's padding row.

Lookups and gradients that do not check their ids leave out what is not in the table, so such a position has no part in
a sum, nor in a gradient. Ids out of range are found here, before they could be taken for padding.

Bytes: `8 · N` of ids read and written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.kernels import errors
from tritonemb.kernels.error_word import BAD_ID, error_word, names_of, poll, report
from tritonemb.kernels.floats import last_at_most
from tritonemb.kernels.language import cdiv, jit, launch, tl
from tritonemb.kernels.layout import Layout

BLOCK = 1024  # ids of a program
NO_POSITION = tl.constexpr(2**62)


@jit(varying=["padding", "num_rows", "num_values", "num_bags"])
def _drop_padding_kernel(
    values, offsets, out, lock, record, names, padding, num_rows, num_values, num_bags, BLOCK: tl.constexpr
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = position < num_values
    value = tl.load(values + position, mask=live, other=0)
    tl.store(out + position, tl.where(value == padding, -1, value).to(out.dtype.element_ty), mask=live)
    where = tl.min(tl.where(live & ((value < 0) | (value >= num_rows)), position, NO_POSITION))
    if where != NO_POSITION:
        bag = last_at_most(offsets, num_bags, where)
        report(lock, record, BAD_ID, names, where, tl.load(values + where), 0, 0, bag, num_rows)


def drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, layout: Layout) -> Tensor:
    """One launch. Arguments and result as in the reference.

    An id out of range is raised at once where kernels are interpreted, and on a GPU by the next lookup or update, or by
    `check_errors`.
    """
    device = values.device
    poll(device)
    values, offsets = values.contiguous(), offsets.contiguous()
    out = torch.empty_like(values)
    launch(
        _drop_padding_kernel, (cdiv(values.numel(), BLOCK),), values, offsets, out, *error_word(device),
        names_of(layout, device), padding_idx, layout.num_rows, values.numel(), offsets.numel() - 1, BLOCK=BLOCK,
    )  # fmt: skip
    if device.type != "cuda":
        poll(device)
    return out


def drop_padding_reference(values: Tensor, offsets: Tensor, padding_idx: int, layout: Layout) -> Tensor:
    """`values` `[N]`, of one table, with -1 where they equal `padding_idx`.

    Raises:
        ValueError: for an id out of range.
    """
    if values.numel():
        least, most = values.aminmax()
        if least < 0 or most >= layout.num_rows:
            bad = (values < 0) | (values >= layout.num_rows)
            raise errors.bad_id(int(bad.nonzero()[0]), values, offsets, layout)
    return values.masked_fill(values == padding_idx, -1)
