"""Shards that live in host memory or on disk train as whole tables on the device of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.sharding.cases import Case, alone, differences, groups_of, together
from tests.sharding.test_collections import sizes, tables
from tritonemb.optim import OPTIMIZERS
from tritonemb.sharding import ColumnWise, DataParallel, RowWise, TableColumnWise, TableRowWise, TableWise
from tritonemb.types import CacheConfig

SMALLEST = CacheConfig(rows=1)


def placed(case: Case, *placements: str) -> Case:
    """The same with its tables placed in turn as told."""
    return replace(
        case,
        tables=tuple(
            replace(table, placement=placements[number % len(placements)], cache=SMALLEST)
            for number, table in enumerate(case.tables)
        ),
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("placements", [("host",), ("disk",), ("disk", "device", "host")], ids="-".join)
def test_shards_elsewhere_train_as_one_process_on_the_device(ranks, world, placements):
    by_rows = [TableWise(world - 1), RowWise(), TableRowWise(0)]
    by_columns = [ColumnWise(), RowWise(), TableColumnWise(0)]
    given = [
        Case(
            tables(pooled, 3),
            tuple(by_rows if optimizer in ("row_wise_adagrad", "lamb") else by_columns),
            OPTIMIZERS[optimizer](lr=0.05),
            sizes(world, 6, 1 + (optimizer == "adam")),
            pooled,
            world,
            weighted=pooled,
            seed=21,
        )
        for pooled in (True, False)
        for optimizer in ("row_wise_adagrad", "lamb", "adam", "sgd")
    ]
    found = ranks(world).run(together, [placed(case, *placements) for case in given])
    for number, case in enumerate(given):
        assert not differences(case, alone(case), [of_rank[number][0] for of_rank in found])


def reload(rank: int, case: Case, elsewhere: Case) -> list[dict[str, torch.Tensor]]:
    """State of a trained collection, and of others that have loaded it: from the device elsewhere, and back."""
    groups = groups_of(case.local)
    trained, there, back = case.sharded(groups), elsewhere.sharded(groups), case.sharded(groups)
    for step in range(2):
        trained(case.batches(step)[0][rank]).sum().backward()
    whole = {name: shards.gather(groups.world) for name, shards in trained.state_dict().items()}
    there(case.batches(0)[0][rank]).sum().backward()  # rows are on the device when others are loaded
    there.load_state_dict(whole)
    found = {name: shards.gather(groups.world) for name, shards in there.state_dict().items()}
    back.load_state_dict(found)
    last = {name: shards.gather(groups.world) for name, shards in back.state_dict().items()}
    outputs = [collection(case.batches(1)[0][rank]).detach() for collection in (trained, there, back)]
    return [whole, found, last, *[{"output": output} for output in outputs]]


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_state_is_loaded_wherever_shards_live(ranks, placement):
    cuts = (TableWise(1), RowWise(), ColumnWise())
    case = Case(tables(True, 3), cuts, te.optim.Adam(lr=0.1), sizes(2, 2), True, 2, seed=22)
    for found in ranks(2).run(reload, case, placed(case, placement)):
        whole, there, back, *outputs = found
        assert_same_bits(there, whole)
        assert_same_bits(back, whole)
        assert_same_bits(outputs[1], outputs[0])
        assert_same_bits(outputs[2], outputs[0])


def drawn(rank: int, placement: str) -> dict[str, torch.Tensor]:
    """First values of shards of a model that nobody has made whole."""
    torch.manual_seed(5)
    config = te.TableConfig("t", 70, 16, placement=placement, cache=SMALLEST)
    model = te.nn.EmbeddingBagCollection([config], te.optim.SGD(lr=0.1), device="meta")
    plan = te.sharding.ShardingPlan({"t": RowWise()}, 2)
    sharded = te.HybridParallel(model, plan, device="cpu")
    return {name: shards.gather(sharded.group) for name, shards in sharded.module.state_dict().items()}


def test_first_values_are_the_same_wherever_shards_live(ranks):
    expected = ranks(2).run(drawn, "device")
    assert float(expected[0]["t.weight"].abs().max()) > 0
    for placement in ("host", "disk"):
        for found, one in zip(ranks(2).run(drawn, placement), expected, strict=True):
            assert_same_bits(found, one)


def refused(rank: int, case: Case) -> str:
    with pytest.raises(ValueError, match="is placed on 'host', and") as caught:
        case.sharded(groups_of(case.local or None, case.copies))
    return str(caught.value)


@pytest.mark.parametrize(
    ("sharding", "optimizer", "copies", "why"),
    [
        (DataParallel(), "sgd", 1, "every rank has it"),
        (ColumnWise(), "row_wise_adagrad", 1, "it is cut by columns, and row_wise_adagrad looks at whole rows"),
        (TableWise(0), "sgd", 2, "there are copies of it"),
    ],
    ids=["data-parallel", "column-wise", "copies"],
)
def test_gathered_gradients_are_for_tables_on_the_device(ranks, sharding, optimizer, copies, why):
    case = Case(tables(True, 1), (sharding,), OPTIMIZERS[optimizer](lr=0.1), sizes(2, 1), True, 0, copies)
    for message in ranks(2).run(refused, placed(case, "host")):
        assert f"table 'table0' is placed on 'host', and {why}" in message
        assert "place it there, or give it to one rank or cut it by rows" in message
