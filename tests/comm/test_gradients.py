"""Sums of rows' gradients gathered from all ranks, and blocks of columns that become whole rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tritonemb.comm.gradient_exchange import ColumnBlock, RowSums, all_gather_sums, exchange_columns
from tritonemb.comm.group import RankGroup

UNSHRUNK = [Phase.explicit, Phase.generate]  # a smaller case takes as long, as every rank must run it


def sums_of(rank: int, case) -> RowSums:
    """`case`: for each rank the rows of each table, and the tables' dims."""
    counts, dims, seed = case
    generator = torch.Generator().manual_seed(seed * 8 + rank)
    rows = [torch.randperm(90, generator=generator)[:n].sort().values + 2**33 for n in counts[rank]]
    return RowSums(rows, [torch.randn(n, dim, generator=generator) for n, dim in zip(counts[rank], dims, strict=True)])


def gathered(rank, cases):
    found = []
    for case in cases:
        group = RankGroup.world()
        sums = all_gather_sums(group, sums_of(rank, case))
        found.append((sums, {kind: sent.total for kind, sent in group.traffic.by_kind().items()}))
    return found


@st.composite
def sums_cases(draw, world):
    dims = draw(st.lists(st.sampled_from((1, 3, 4, 16)), min_size=1, max_size=3))
    counts = [[draw(st.sampled_from((0, 0, 1, 5, 33))) for _ in dims] for _ in range(world)]
    return counts, dims, draw(st.integers(0, 99))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_has_all_sums_in_the_order_of_ranks(ranks, world):
    @settings(max_examples=2, phases=UNSHRUNK)
    @given(st.lists(sums_cases(world), min_size=15, max_size=15))
    def run(cases):
        cases = [*cases, ([[0, 0]] * world, [3, 4], 0)]  # nobody has anything
        found = ranks(world).run(gathered, cases)
        for number, case in enumerate(cases):
            own = [sums_of(rank, case) for rank in range(world)]
            for rank in range(world):
                sums, sent = found[rank][number]
                for table in range(len(case[1])):
                    assert torch.equal(sums.rows[table], torch.cat([each.rows[table] for each in own]))
                    assert torch.equal(sums.sums[table], torch.cat([each.sums[table] for each in own]))
                # A gather sends as much from every rank: as the one that has most.
                most = max(sum(n * (8 + 4 * dim) for n, dim in zip(mine, case[1], strict=True)) for mine in case[0])
                assert sent.get("row gradients", 0) == -(-most // 8) * 8 * (world - 1)

    run()


BLOCKS = (
    ColumnBlock(0, 0, 0, 8), ColumnBlock(0, 1, 8, 8), ColumnBlock(0, 3, 16, 3),
    ColumnBlock(5, 2, 4, 4), ColumnBlock(5, 1, 0, 4),
    ColumnBlock(7, 3, 0, 5), ColumnBlock(7, 3, 5, 2),
)  # fmt: skip
ROWS = {0: 6, 5: 0, 7: 3}


def whole_of(table: int) -> torch.Tensor:
    dim = sum(block.num_columns for block in BLOCKS if block.table == table)
    return torch.randn(ROWS[table], dim, generator=torch.Generator().manual_seed(table))


def columns(rank):
    group = RankGroup.world()
    mine = [block for block in BLOCKS if block.rank == rank][::-1]
    own = [whole_of(b.table)[:, b.first_column : b.first_column + b.num_columns] for b in mine]
    return exchange_columns(group, BLOCKS, mine, own), group.traffic.by_kind()["row columns"].total


def test_blocks_of_columns_become_whole_rows(ranks):
    found = ranks(4).run(columns)
    for rank, (tables, sent) in enumerate(found):
        assert set(tables) == {block.table for block in BLOCKS if block.rank == rank}
        for table, rows in tables.items():
            assert torch.equal(rows, whole_of(table))
        expected = 0
        for block in BLOCKS:
            if block.rank == rank:
                holders = {other.rank for other in BLOCKS if other.table == block.table} - {rank}
                expected += 4 * ROWS[block.table] * block.num_columns * len(holders)
        assert sent == expected
