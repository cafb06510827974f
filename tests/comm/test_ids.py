"""Ids go to the owners of their rows, and what owners send back comes to where it was asked for."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.comm.definitions import FEATURES, IdsCase, ids_cases, lists_of
from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import IdExchange, IdRoute
from tritonemb.comm.output_exchange import EXACT, SequenceExchange

UNSHRUNK = [Phase.explicit, Phase.generate]  # a smaller case takes as long, as every rank must run it
DIM = 3


def row_of(lane: int, value: int) -> list[float]:
    """What a table holds for an id; nothing for one that it does not have."""
    return [1.0 + lane, float(value % 1009), float(value // 1009 % 1009)]


def exchange(rank, cases):
    """For each case: what arrived, and the rows that came back for what was asked."""
    results = []
    for case in cases:
        group = RankGroup.world()
        ids = IdExchange(group, case.lanes, case.check, case.once, returns_rows=True)
        features, sizes, routes = ids(case.batch(rank))
        narrow = all(lane.max_rows < 2**31 - 1 for lane in case.lanes)
        assert features.values().dtype == (torch.int32 if narrow else torch.int64)
        lists = lists_of(features, 2**31 - 1 if narrow else 2**40 - 1)
        rows = []
        for key, bags in lists.items():
            lane = case.lanes[int(key)]
            first = lane.first_rows[lane.owners.index(rank)]
            rows += [[0.0] * DIM if row is None else row_of(int(key), first + row) for bag in bags for row, _ in bag]
        local = torch.tensor(rows).reshape(-1, DIM).requires_grad_()
        back = SequenceExchange(group, DIM, EXACT)(local, routes)
        (back * torch.arange(1, back.shape[0] + 1).unsqueeze(1)).sum().backward()
        bytes_sent = {kind: sent.total for kind, sent in group.traffic.by_kind().items()}
        results.append((lists, routes.samples, sizes, back.tolist(), float(local.grad.double().sum()), bytes_sent))
    return results


def check(ranks, world: int, cases: list[IdsCase]) -> None:
    actual = ranks(world).run(exchange, cases)
    for number, case in enumerate(cases):
        samples = [len(batch[FEATURES[0]]) for batch in case.ids]
        given_back = received = 0.0
        for rank in range(world):
            lists, total, sizes, rows, grad_sum, bytes_sent = actual[rank][number]
            expected = case.arriving(rank)
            assert lists == expected, case
            assert total == sum(samples)
            if expected or not case.once:
                assert sizes == ([1] * world if case.once else samples)
            requests = case.requests(rank)
            assert rows == [row_of(n, v) if case.is_inside(n, v) else [0.0] * DIM for n, v in requests], case
            given_back += grad_sum
            received += DIM * len(requests) * (len(requests) + 1) / 2
            assert bytes_sent.get("ids", 0) == ids_bytes(case, rank, world, actual, number), case
            assert bytes_sent["sizes"] == 40 * (world - 1)
        assert given_back == received  # every rank's gradients came to some owner, once


def ids_bytes(case: IdsCase, rank: int, world: int, messages, number: int) -> int:
    """Lengths of bags, ids and weights, to every other rank."""
    wide = 4 if all(lane.max_rows < 2**31 - 1 for lane in case.lanes) else 8
    weighted = case.weights is not None and not case.once and any(v for b in case.ids for v in b.values() if any(v))
    bags = [1 if case.once else len(batch[FEATURES[0]]) for batch in case.ids]
    total, first = 0, sum(bags[:rank])
    for other in range(world):
        if other == rank:
            continue
        to = messages[other][number][0]
        for of_lane in to.values():
            local = of_lane[first : first + bags[rank]]
            total += 4 * len(local) + sum(len(bag) for bag in local) * (wide + 4 * weighted)
    return total


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.more)])
def test_ids_reach_their_owners(ranks, world):
    @settings(max_examples=2, phases=UNSHRUNK)
    @given(
        st.lists(ids_cases(world), min_size=15, max_size=15), st.lists(ids_cases(world, True), min_size=5, max_size=5)
    )
    def run(inputs, wild):
        check(ranks, world, inputs + wild)

    run()


LANES = (IdRoute("b", "user", 10, (0, 5), (0, 1)), IdRoute("a", "item", 3, (0,), (1,)))


def refused(rank, bad_rank, once):
    """A batch out of range on one rank, then a good one."""
    group = RankGroup.world()
    exchange = IdExchange(group, LANES, deduplicate=once)
    a, b = [[0, 2], [1]], [[9], [0, 5, 4]]
    bad = [[9], [0, 10, 4]]
    message = None
    try:
        exchange(te.KeyedJaggedTensor.from_lists({"a": a, "b": bad if rank == bad_rank else b}))
    except (ValueError, RuntimeError) as error:
        message = (type(error).__name__, str(error))
    features, _, _ = exchange(te.KeyedJaggedTensor.from_lists({"a": a, "b": b}))
    return message, features.to_lists()


@pytest.mark.parametrize("once", [False, True])
def test_an_id_out_of_range_is_told_by_the_rank_that_has_it(ranks, once):
    result = ranks(4).run(refused, 2, once)
    kind, message = result[2][0]
    assert kind == "ValueError"
    for part in ("user", "'b'", "sample 1", "position 5", "10", "9"):  # table, feature, sample, position, value, range
        assert part in message, message
    for rank in (0, 1, 3):
        kind, message = result[rank][0]
        assert kind == "RuntimeError"
        assert "rank 2 rejected its batch" in message
    assert result[0][1]["0"][:2] == ([[], [0, 4]] if not once else [[0, 4], [0, 4]])  # and the next batch is exchanged


def some_weighted(rank, ids):
    """A batch whose ids have weights on rank 1 alone; `ids` are those of rank 0."""
    lists = {"a": [[0] if rank else ids], "b": [[0] if rank else ids]}
    weights = {"a": [[1.0]], "b": [[1.0]]} if rank else None
    try:
        IdExchange(RankGroup.world(), LANES)(te.KeyedJaggedTensor.from_lists(lists, weights))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("ids", "message"), [([0], "ids have weights on some ranks only; ranks without weights: [0]"), ([], None)]
)
def test_weights_on_some_ranks_only(ranks, ids, message):
    assert ranks(2).run(some_weighted, ids) == [message] * 2
