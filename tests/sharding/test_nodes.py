"""Traffic between nodes: table-row-wise sharding sends one vector per sample of other nodes."""

import pytest

import tritonemb as te
from tests.sharding.cases import Case, alone, differences, groups_of, together
from tritonemb.sharding import Grid, RowWise, TableRowWise

SIZES = (1, 2, 3, 4)
DIM = 16


def case_of(sharding) -> Case:
    return Case((te.TableConfig("t", 40, DIM),), (sharding,), te.optim.SGD(lr=0.1), ((SIZES,),), local=2, seed=8)


def sent(rank, case):
    """Bytes to all others and to other nodes, by kind, of one forward and backward."""
    groups = groups_of(2)
    collection = case.sharded(groups)
    groups.world.traffic.reset()
    result = collection(case.batches(0)[0][rank])
    result.sum().backward()
    return {kind: tuple(sizes) for kind, sizes in groups.world.traffic.by_kind().items()}


def across_nodes(traffic, back: bool) -> int:
    """Bytes of pooled vectors, or of their gradients, of all ranks."""
    return sum(
        sizes[1]
        for of_rank in traffic
        for kind, sizes in of_rank.items()
        if kind.startswith("pooled") and kind.endswith("gradients") == back
    )


@pytest.mark.parametrize(
    ("sharding", "vectors", "flat", "flat_vectors"),
    [
        # 7 samples on the second node. Each of the two ranks that have rows would send it a part of their vectors.
        (TableRowWise(0), 7 * DIM, RowWise([0, 1]), 2 * 7 * DIM),
        (TableRowWise(1), 3 * DIM, RowWise([2, 3]), 2 * 3 * DIM),
        # Half of the columns of every sample come from the other node; or parts of all columns from its two ranks.
        (Grid(), 10 * DIM // 2, RowWise(), 2 * 10 * DIM),
    ],
)
@pytest.mark.few(1)
def test_one_vector_a_sample_leaves_a_node(ranks, sharding, vectors, flat, flat_vectors):
    traffic = ranks(4).run(sent, case_of(sharding))
    for back in (False, True):
        assert across_nodes(traffic, back) == 4 * vectors
        assert across_nodes(ranks(4).run(sent, case_of(flat)), back) == 4 * flat_vectors
    assert all("pooled" not in kinds for kinds in traffic)
    assert all(kinds["pooled inside a node"][1] == 0 for kinds in traffic)


def test_what_is_summed_inside_a_node(ranks):
    """A rank sends its neighbour its part for the samples of the ranks in the neighbour's place on every node."""
    traffic = ranks(4).run(sent, case_of(TableRowWise(0)))
    assert traffic[0]["pooled inside a node"] == (4 * DIM * (SIZES[1] + SIZES[3]), 0)
    assert traffic[1]["pooled inside a node"] == (4 * DIM * (SIZES[0] + SIZES[2]), 0)
    assert traffic[0]["pooled across nodes"] == (4 * DIM * SIZES[2],) * 2
    assert traffic[1]["pooled across nodes"] == (4 * DIM * SIZES[3],) * 2
    assert traffic[2]["pooled across nodes"] == traffic[3]["pooled inside a node"] == (0, 0)
    assert traffic[2]["pooled across nodes gradients"] == (4 * DIM * SIZES[2],) * 2


def test_both_ways_train_alike(ranks):
    cases = [case_of(sharding) for sharding in (TableRowWise(0), Grid(), RowWise())]
    results = ranks(4).run(together, cases)
    for number, case in enumerate(cases):
        assert not differences(case, alone(case), [of_rank[number][0] for of_rank in results])
