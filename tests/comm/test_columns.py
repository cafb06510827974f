"""Pooled columns and rows of tables on their way, there and back, by every codec."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.comm.definitions import ColumnsCase, columns_cases, rounded
from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import IdExchange, IdRoute
from tritonemb.comm.output_exchange import ExchangePrecision, PooledExchange, SequenceExchange
from tritonemb.types import CODECS

UNSHRUNK = [Phase.explicit, Phase.generate]  # a smaller case takes as long, as every rank must run it


def exchange(rank, cases):
    results = []
    for case in cases:
        group = RankGroup.world()
        precision = ExchangePrecision(case.forward, case.backward)
        columns = PooledExchange(group, case.runs, case.width, precision, average=group.size)
        matrix = case.matrix(rank).requires_grad_()
        result = columns(matrix, case.rows)
        result.backward(case.gradient(rank))
        sent = {kind: tuple(sizes) for kind, sizes in group.traffic.by_kind().items()}
        results.append((result.detach(), matrix.grad, sent, sum(codec.saturated() for codec in columns.codecs)))
    return results


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.more)])
def test_columns_reach_the_ranks_of_their_samples(ranks, world):
    """Bit for bit what the definition says, for every codec that rounds each element by itself."""

    @settings(max_examples=2, phases=UNSHRUNK)
    @given(
        st.lists(columns_cases(world), min_size=12, max_size=12),
        st.lists(columns_cases(world, ("fp32", "fp32")), min_size=4, max_size=4),
    )
    def run(mixed, exact):
        cases = mixed + exact
        actual = ranks(world).run(exchange, cases)
        for number, case in enumerate(cases):
            if world == 1:  # nothing crosses, so nothing is rounded
                case = case._replace(forward="fp32", backward="fp32")
            scale = ExchangePrecision(case.forward, case.backward).scale(sum(case.rows))
            for rank in range(world):
                result, grad, sent, saturated = actual[rank][number]
                assert torch.equal(result, case.forwarded(rank)), (rank, case)
                assert torch.equal(grad, case.back(rank, world, scale)), (rank, case)
                assert saturated == 0, case
                assert sent == bytes_of(case, rank), case

    run()


def bytes_of(case: ColumnsCase, rank: int) -> dict[str, tuple[int, int]]:
    """`columns · code size` for each sample and each other rank that has a share in its vector; one sends nothing."""
    widths = [sum(size for _, size in runs) for runs in case.runs]
    peers = [other for other in range(len(widths)) if other != rank]
    remote = sum(case.rows[other] * widths[rank] for other in peers) * CODECS[case.forward].dtype.itemsize
    back = sum(case.rows[rank] * widths[other] for other in peers) * CODECS[case.backward].dtype.itemsize
    return {"pooled": (remote, 0), "pooled gradients": (back, 0)} if peers else {}


HALVES = (((0, 8),), ((8, 8),))


def test_what_is_too_large_is_kept_at_the_largest_and_counted(ranks):
    case = ColumnsCase(HALVES, 16, (3, 2), "fp16", "fp32", 1, large=True)
    actual = ranks(2).run(exchange, [case])
    for rank in range(2):
        result, _, _, saturated = actual[rank][0]
        assert torch.equal(result, case.forwarded(rank))
        assert result.abs().max() == 65504.0
        assert saturated == int((case.matrix(rank).abs() > 65504).sum())


def test_int8_is_as_near_as_a_row_of_a_table_is_wide(ranks):
    """Half a step of 1/255 of the range of a row of one table, and float32's rounding."""
    case = ColumnsCase((((0, 16), (32, 8)), ((16, 16),)), 40, (5, 4), "int8", "int8", 2)
    actual = ranks(2).run(exchange, [case])
    runs = [(0, 16), (16, 16), (32, 8)]
    for rank in range(2):
        result, grad, sent, saturated = actual[rank][0]
        exact = case._replace(forward="fp32", backward="fp32")
        near(result, exact.forwarded(rank), runs)
        local = [(0, 16), (16, 8)] if rank == 0 else [(0, 16)]
        near(grad, exact.back(rank, 2, 1.0), local)
        assert saturated == 0
        # A code an element, and a scale and an offset, 8 bytes, for each row of a table.
        columns, pieces = ((24, 2), (16, 1))[rank]
        assert sent["pooled"][0] == case.rows[1 - rank] * (columns + 8 * pieces)


def near(actual, exact, runs):
    for start, size in runs:
        a, b = actual[:, start : start + size], exact[:, start : start + size]
        step = (b.amax(1) - b.amin(1)) / 255
        assert bool(((a - b).abs().amax(1) <= step / 2 * 1.001 + 1e-7).all())
        assert not torch.equal(a, b)


def test_gradients_of_a_mean_over_many_samples_survive_8_bits(ranks):
    """By default they are scaled by the number of samples of all ranks, else they would vanish."""
    case = ColumnsCase(HALVES, 16, (300, 212), "fp8_e4m3", "fp8_e5m2", 3)
    (_, grad, _, saturated), (_, other, _, _) = (result[0] for result in ranks(2).run(exchange, [case]))
    exact = case._replace(backward="fp32").back(0, 2, 1.0)
    assert saturated == 0
    assert bool(((grad - exact).abs() <= exact.abs() * 2.0**-3 + 2.0**-16 / 512).all())
    assert (grad == 0).float().mean() < 0.01
    assert other.abs().max() > 0


LANES = (IdRoute("a", "t", 40, (0, 20), (1, 0)), IdRoute("b", "u", 7, (0,), (1,)))


def batch_of(rank: int) -> te.KeyedJaggedTensor:
    ids = {"a": [[3 + rank, 39], [], [20, 19, 0]], "b": [[6], [rank], []]}
    if rank == 3:
        ids = {"a": [], "b": []}
    return te.KeyedJaggedTensor.from_lists(ids)


def rows_case(rank, codecs, once):
    group = RankGroup.world()
    features, _, ids = IdExchange(group, LANES, deduplicate=once, returns_rows=True)(batch_of(rank))
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(features.values().shape[0], 8, generator=generator).requires_grad_()
    rows = SequenceExchange(group, 8, ExchangePrecision(*codecs, gradient_scale=2.0), average=4)
    back = rows(values, ids)
    grad = torch.randn(back.shape, generator=generator)
    back.backward(grad)
    parts = {kind: tuple(sizes) for kind, sizes in group.traffic.by_kind().items()}
    places = ids.positions[ids.inverse] if once else ids.positions
    return back.detach(), values.detach(), values.grad, grad, ids.sent, ids.received, places, ids.source, parts


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("fp16", "bf16"), ("fp8_e4m3", "fp8_e5m2")])
def test_rows_come_back_to_the_ids_that_asked(ranks, codecs, once):
    """In messages, rank by rank, row `places[i]` of what a rank gets is for its id `i`; `source` tells it to owners."""
    result = ranks(4).run(rows_case, codecs, once)
    first = [[sum(result[r][4][:other]) for other in range(4)] for r in range(4)]  # of what is for each in a message
    for rank in range(4):
        back, _, _, grad, sent, _, places, _, parts = result[rank]
        assert sorted(places.tolist()) == list(range(back.shape[0]))
        owners = [next(o for o in range(3, -1, -1) if first[rank][o] <= p and sent[o]) for p in places.tolist()]
        for i, (owner, place) in enumerate(zip(owners, places.tolist(), strict=True)):
            _, values, values_grad, _, _, received, _, source, _ = result[owner]
            at = sum(received[:rank]) + place - first[rank][owner]
            row = source.tolist().index(at)
            assert torch.equal(back[i], rounded(values[row], codecs[0]))
            assert torch.equal(values_grad[row], rounded(grad[i] * 2.0, codecs[1]) / 8.0)
        local = result[rank][5][rank]
        size, size_back = CODECS[codecs[0]].dtype.itemsize, CODECS[codecs[1]].dtype.itemsize
        assert parts["rows"] == ((sum(result[rank][5]) - local) * 8 * size, 0)
        assert parts["rows gradients"] == ((back.shape[0] - local) * 8 * size_back, 0)
