"""Tables cut at random into rectangles that ranks hold, the same on all of them."""

import random
from itertools import pairwise
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from tritonemb.sharding.sharded_tensor import LocalShard, TableShards


class Cut(NamedTuple):
    """A rectangle and the ranks that hold it; the first of them saves it, unless it is one more copy."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    ranks: tuple[int, ...]
    is_copy: bool = False


def draw_cuts(shape: tuple[int, ...], world: int, seed: int) -> list[Cut]:
    """A grid of random cuts, or, column block by column block, other rows in each; a rank may get nothing."""
    chance = random.Random(seed)
    shape = shape or (1,)
    allowed = chance.sample(range(world), chance.randint(1, world))
    columns = shape[1] if len(shape) == 2 else 1
    same = chance.random() < 0.5
    rows = _cut(shape[0], chance)
    cuts = []
    for block in _cut(columns, chance):
        for band in rows if same else _cut(shape[0], chance):
            copies = chance.randint(1, 3) if len(shape) == 1 else chance.choice((1, 1, 1, 2))
            cuts.append(Cut(band, block, tuple(chance.choice(allowed) for _ in range(copies))))
    for _ in range(chance.randint(0, 2)):  # copies that are cut otherwise
        band, block = chance.choice(_cut(shape[0], chance)), chance.choice(_cut(columns, chance))
        cuts.append(Cut(band, block, (chance.choice(allowed),), is_copy=True))
    chance.shuffle(cuts)
    return cuts


def shards_of(rank: int, whole: torch.Tensor, cuts: list[Cut], value: float | None = None) -> TableShards:
    """Shards of a rank: copies of a tensor's rectangles, or filled with `value`."""
    local_shards = []
    for cut in cuts:
        part = whole[(slice(*cut.rows), slice(*cut.columns))[: whole.dim()]]
        first = [cut.rows[0], cut.columns[0] if whole.dim() == 2 else 0]
        for number, holder in enumerate(cut.ranks):
            if holder == rank:
                tensor = part.clone() if value is None else torch.full_like(part, value)
                local_shards.append(LocalShard(tensor, *first, is_primary=number == 0 and not cut.is_copy))
    return TableShards(whole.shape, whole.dtype, local_shards)


def holds(rank: int, shards: TableShards, whole: torch.Tensor) -> bool:
    """Return whether every shard has the values of the full tensor."""
    for tensor, row, column, _ in shards.shards:
        starts_and_sizes = zip((row, column), tensor.shape, strict=False)
        if not torch.equal(tensor, whole[tuple(slice(start, start + size) for start, size in starts_and_sizes)]):
            return False
    return True


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits of a dtype that say NaN nowhere."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.one_of(
        st.tuples(st.integers(1, 40), st.integers(1, 9)),
        st.tuples(st.integers(1, 40)),
        st.just(()),
    )


def _cut(size: int, chance: random.Random) -> list[tuple[int, int]]:
    edges = sorted({0, size, *(chance.randint(0, size) for _ in range(chance.randint(0, 4)))})
    return list(pairwise(edges))
