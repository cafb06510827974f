"""Rows and sums of their gradients gathered from all ranks, and blocks of columns that become whole rows."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.comm.definitions import rounded
from tritonemb.comm.gradient_exchange import ColumnBlock, RowSums, SumsExchange, all_gather_rows, exchange_columns
from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.types import CODECS

UNSHRUNK = [Phase.explicit, Phase.generate]  # a smaller case takes as long, as every rank must run it


class SumsCase(NamedTuple):
    """For each rank the rows that it has of each table; the tables' dims and rows; the codec."""

    counts: list[list[int]]
    dims: list[int]
    seed: int
    codec: str = "fp32"
    table_rows: int = 2**33 + 90
    size: float = 1.0  # of the values

    def sums_of(self, rank: int) -> RowSums:
        generator = torch.Generator().manual_seed(self.seed * 8 + rank)
        local = [*zip(self.counts[rank], self.dims, strict=True)]
        first = self.table_rows - 90
        rows = [torch.randperm(90, generator=generator)[:n].sort().values + first for n, _ in local]
        return RowSums(rows, [torch.randn(n, dim, generator=generator) * self.size for n, dim in local])


def gathered(rank, cases):
    results = []
    for case in cases:
        group = RankGroup.world()
        precision = ExchangePrecision(backward=case.codec)
        exchange = SumsExchange(group, precision, [(case.table_rows, dim) for dim in case.dims])
        sums = exchange(case.sums_of(rank))
        sent = {kind: sent.total for kind, sent in group.traffic.by_kind().items()}
        results.append((sums, sent, sum(codec.saturated() for codec in exchange.codecs)))
    return results


@st.composite
def sums_cases(draw, world):
    dims = draw(st.lists(st.sampled_from((1, 3, 4, 16)), min_size=1, max_size=3))
    counts = [[draw(st.sampled_from((0, 0, 1, 5, 33))) for _ in dims] for _ in range(world)]
    codec = draw(st.sampled_from(sorted(CODECS)))
    table_rows = draw(st.sampled_from((90, 2**31 - 1, 2**31, 2**33)))
    size = draw(st.sampled_from((1.0, 1e-9, 1e9, 1e-44)))
    return SumsCase(counts, dims, draw(st.integers(0, 99)), codec, table_rows, size)


def crossed(case: SumsCase, rank: int, table: int) -> torch.Tensor:
    """A rank's sums in a power of two of their own, so that the largest of them is as large as its codec allows."""
    local = case.sums_of(rank).sums
    if not case.codec.startswith("fp") or case.codec == "fp32":
        return rounded(local[table], case.codec)
    largest = max([float(sums.abs().max()) for sums in local if sums.numel()], default=0.0)
    top = {"fp16": 15, "fp8_e4m3": 8, "fp8_e5m2": 15}[case.codec]
    scale = 2.0 ** (top - max(-100, math.frexp(largest)[1]))
    return rounded(local[table] * scale, case.codec) * (1.0 / scale)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.more)])
def test_every_rank_has_all_sums_in_the_order_of_ranks(ranks, world):
    """As the codec has rounded them, its own too: nothing is too large for it, and the exchange counts what it says."""

    @settings(max_examples=2, phases=UNSHRUNK)
    @given(st.lists(sums_cases(world), min_size=20, max_size=20))
    def run(cases):
        cases = [*cases, SumsCase([[0, 0]] * world, [3, 4], 0)]  # nobody has anything
        result = ranks(world).run(gathered, cases)
        for number, case in enumerate(cases):
            for table in range(len(case.dims)):
                local = [case.sums_of(rank) for rank in range(world)]
                rows = torch.cat([item.rows[table] for item in local])
                exact = torch.cat([item.sums[table] for item in local])
                first = result[0][number][0].sums[table]
                if world == 1:
                    assert torch.equal(first, exact)
                elif case.codec == "int8":  # half a step of 1/255 of a row's range, and roundings
                    step = (exact.amax(1) - exact.amin(1)) / 255
                    assert bool(((first - exact).abs().amax(1) <= step / 2 * 1.001 + case.size * 1e-6 + 1e-36).all())
                else:
                    assert torch.equal(first, torch.cat([crossed(case, rank, table) for rank in range(world)])), case
                for rank in range(world):
                    sums, _, saturated = result[rank][number]
                    assert torch.equal(sums.rows[table], rows)
                    assert torch.equal(sums.sums[table], first)
                    assert saturated == 0
            # A gather sends as much from every rank: as the one that has most.
            most = max(
                sum(n * bytes_of_row(case, dim) for n, dim in zip(count, case.dims, strict=True))
                for count in case.counts
            )
            for rank in range(world):
                assert result[rank][number][1].get("row gradients", 0) == -(-most // 8) * 8 * (world - 1)

    run()


def bytes_of_row(case: SumsCase, dim: int) -> int:
    number = 8 if case.table_rows >= 2**31 else 4
    return number + (8 - dim // -4 * 4 if case.codec == "int8" else dim * CODECS[case.codec].dtype.itemsize)


def too_large(rank):
    exchange = SumsExchange(RankGroup.world(), ExchangePrecision("fp16", "fp16", gradient_scale=1e6), [(9, 2)])
    row = torch.tensor([[0.25, 1.0 - rank]])
    sums = exchange(RowSums([torch.tensor([rank])], [row]))
    return sums.sums[0], exchange.codecs[0].saturated()


def test_a_scale_of_the_users_may_saturate_and_is_counted(ranks):
    for rank, (sums, saturated) in enumerate(ranks(2).run(too_large)):
        assert torch.equal(sums, torch.tensor([[65504.0, 65504.0], [65504.0, 0.0]]) * (1 / torch.tensor(1e6)))
        assert saturated == 2 - rank


CODED = [codec for codec in CODECS if codec != "fp32"]
SUMS = torch.tensor([[3.0, -1e-3, 2.0], [5e-4, 7.0, 1.0]])


def not_finite(rank: int) -> list[tuple[RowSums, RowSums, int]]:
    """With, and without, a row that is not finite, of another table and of the same one; on rank 1."""
    results = []
    for codec in CODED:
        for bad in (torch.inf, -torch.inf, torch.nan):
            exchange = SumsExchange(RankGroup.world(), ExchangePrecision(backward=codec), [(9, 3), (9, 2)])
            rows = [torch.tensor([2, 5, 7]), torch.tensor([1])]
            sums = [torch.cat([SUMS, torch.tensor([[1.0, bad * rank, 1.0]])]), torch.tensor([[bad * rank, 1.0]])]
            finite = exchange(RowSums([rows[0][:2], rows[1][:0]], [SUMS, sums[1][:0]]))
            results.append((exchange(RowSums(rows, sums)), finite))
    return results


def test_a_sum_that_is_not_finite_does_not_set_the_scale_of_others(ranks):
    """All that is finite arrives as if it were not there, and by what is infinite or NaN it is known."""
    for results in ranks(2).run(not_finite):
        for number, (result, finite) in enumerate(results):
            codec = CODED[number // 3]
            assert torch.equal(result.sums[0][[0, 1, 3, 4]], finite.sums[0]), codec
            for rows in (result.sums[0][5], result.sums[1][1]):
                assert not rows.isfinite().all(), codec
            assert result.rows[0].tolist() == [2, 5, 7] * 2


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
    local = [block for block in BLOCKS if block.rank == rank][::-1]
    owned = [whole_of(b.table)[:, b.first_column : b.first_column + b.num_columns] for b in local]
    return exchange_columns(group, BLOCKS, local, owned), group.traffic.by_kind()["row columns"].total


def test_blocks_of_columns_become_whole_rows(ranks):
    actual = ranks(4).run(columns)
    for rank, (tables, sent) in enumerate(actual):
        assert set(tables) == {block.table for block in BLOCKS if block.rank == rank}
        for table, rows in tables.items():
            assert torch.equal(rows, whole_of(table))
        expected = 0
        for block in BLOCKS:
            if block.rank == rank:
                holders = {other.rank for other in BLOCKS if other.table == block.table} - {rank}
                expected += 4 * ROWS[block.table] * block.num_columns * len(holders)
        assert sent == expected


ROWS_OF_RANKS = [([[1, 5, 7], [5, 6]], [1, 5, 6, 7]), ([[], [2**40, 2**40 + 1]], [2**40, 2**40 + 1]), ([[], []], [])]


def gathered_rows(rank: int) -> list[list[int]]:
    group = RankGroup.world()
    results = []
    for by_rank, _ in ROWS_OF_RANKS:
        rows = all_gather_rows(group, torch.tensor(by_rank[rank], dtype=torch.int64))
        assert rows.dtype == torch.int64
        results.append(rows.tolist())
    return results


def test_every_rank_gets_the_rows_of_all_once_in_ascending_order(ranks):
    for actual in ranks(2).run(gathered_rows):
        assert actual == [expected for _, expected in ROWS_OF_RANKS]


def test_one_rank_keeps_its_own():
    rows = torch.tensor([3, 9])
    assert torch.equal(all_gather_rows(RankGroup(), rows), rows)
    with pytest.raises(ValueError, match="as wanted"):
        all_gather_rows(RankGroup(), rows, ValueError("as wanted"))


def refused(rank: int) -> tuple[str, list[int]]:
    group, rows = RankGroup.world(), torch.tensor([rank])
    with pytest.raises(RuntimeError if rank == 0 else ValueError) as caught:
        all_gather_rows(group, rows, ValueError("as wanted") if rank == 1 else None)
    return str(caught.value), all_gather_rows(group, rows).tolist()


def test_a_rank_that_refuses_its_batch_is_named_to_the_others(ranks):
    (messages, first), (local, second) = ranks(2).run(refused)
    assert messages == "rank 1 rejected its batch; see the error on that rank"
    assert local == "as wanted"
    assert first == second == [0, 1]
