"""Tables of other libraries in ours."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as ForeignShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tritonemb as te
from tests.sharding.cuts import values
from tritonemb.sharding.interop import load_tables
from tritonemb.sharding.sharded_tensor import TableShards

USER, ITEM = values((6, 4), torch.float32, 1), values((9, 4), torch.float32, 2)


def collection(*names: str) -> te.nn.EmbeddingBagCollection:
    rows = {"user": 6, "item": 9}
    return te.nn.EmbeddingBagCollection(
        [te.TableConfig(name, rows.get(name, 3), 4) for name in names], optimizer=te.optim.SGD(lr=0.1)
    )


class Model(nn.Module):
    """Two tables somewhere inside, and a dense part."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.sparse = nn.Sequential(collection(*(names or ("user", "item"))))
        self.over = nn.Linear(4, 1)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("weight")}


@pytest.mark.parametrize(
    "prefixes",
    [
        ("", ""),  # a dict of torch.nn.EmbeddingBag
        ("tables.", "other."),
        ("ebc.embedding_bags.", "ebc.embedding_bags."),  # TorchRec's
        ("module.ec.embeddings.", "module.ec.embeddings."),
        ("sparse.0.", "sparse.0."),  # ours
    ],
)
def test_tables_are_found_by_their_names(prefixes):
    model = Model()
    dense = model.over.weight.clone()
    keys = [f"{prefixes[0]}user.weight", f"{prefixes[1]}item.weight"]
    state = {keys[0]: USER, keys[1]: ITEM, "over.weight": torch.ones(1, 4), "over.bias": torch.ones(1)}
    assert load_tables(model, state) == {"sparse.0.user": keys[0], "sparse.0.item": keys[1]}
    loaded = weights(model)
    assert torch.equal(loaded["sparse.0.user.weight"], USER)
    assert torch.equal(loaded["sparse.0.item.weight"], ITEM)
    assert torch.equal(loaded["over.weight"], dense)


def test_torch_modules_fill_ours():
    modules = nn.ModuleDict({"user": nn.EmbeddingBag(6, 4), "item": nn.Embedding(9, 4)})
    model = Model()
    load_tables(model, nn.ModuleDict({"embedding_bags": modules}).state_dict())
    assert torch.equal(weights(model)["sparse.0.user.weight"], modules["user"].weight)
    unpooled = te.nn.EmbeddingCollection([te.TableConfig("item", 9, 4)])
    load_tables(unpooled, modules.state_dict())
    assert torch.equal(unpooled.state_dict()["item.weight"], modules["item"].weight)


def test_torchrec_collections_fill_ours():
    torchrec = pytest.importorskip("torchrec")
    configs = [
        torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name])
        for name, rows in (("user", 6), ("item", 9))
    ]
    collection = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    model = Model()
    load_tables(model, nn.ModuleDict({"sparse": collection}).state_dict())
    for name in ("user", "item"):
        assert torch.equal(weights(model)[f"sparse.0.{name}.weight"], collection.embedding_bags[name].weight)


def test_keys_that_do_not_follow_from_the_name_are_given():
    model = Model()
    state = {"emb_l.0.weight": USER, "emb_l.1.weight": ITEM}
    keys = {"user": "emb_l.0.weight", "sparse.0.item": "emb_l.1.weight"}
    assert load_tables(model, state, keys) == {"sparse.0.user": "emb_l.0.weight", "sparse.0.item": "emb_l.1.weight"}
    assert torch.equal(weights(model)["sparse.0.item.weight"], ITEM)


def test_the_same_name_in_two_collections():
    model = nn.ModuleDict({"a": collection("user"), "b": collection("user")})
    load_tables(model, {"a.user.weight": USER, "b.user.weight": USER + 1})  # the whole path decides
    assert torch.equal(weights(model)["b.user.weight"], USER + 1)
    with pytest.raises(ValueError, match=r"tables a\.user and b\.user would both be filled from user\.weight"):
        load_tables(model, {"user.weight": USER})
    load_tables(model, {"x": USER, "y": USER + 2}, {"a.user": "x", "b.user": "y"})
    assert torch.equal(weights(model)["b.user.weight"], USER + 2)


def test_all_that_is_wrong_is_listed_and_nothing_copied():
    model = Model("user", "item", "shop", "city", "twice")
    initial = {name: tensor.clone() for name, tensor in weights(model).items()}
    state = {
        "ebc.embedding_bags.user.weight": USER,
        "ebc.embedding_bags.unknown.weight": USER,
        "item.weight": torch.zeros(9, 5),
        "shop.weight": torch.zeros(3, 4, dtype=torch.float16),
        "a.twice.weight": torch.zeros(3, 4),
        "b.twice.weight": torch.zeros(3, 4),
    }
    with pytest.raises(ValueError, match="the tables cannot be loaded") as caught:
        load_tables(model, state, {"nobody": "user.weight"})
    assert str(caught.value).splitlines()[1:] == [
        "  table sparse.0.city has no key, such as city.weight; pass its key as keys={'city': ...}",
        "  table sparse.0.twice has several keys, a.twice.weight, b.twice.weight; pass its key as keys={'twice': ...}",
        "  keys has 'nobody', which is not a table of the model",
        "  ebc.embedding_bags.unknown.weight is a TorchRec table that this model does not have",
        "  item.weight is float32 [9, 5], table sparse.0.item is float32 [9, 4]",
        "  shop.weight is float16 [3, 4], table sparse.0.shop is float32 [3, 4]; convert it first",
    ]
    assert all(torch.equal(tensor, initial[name]) for name, tensor in weights(model).items())


def test_some_tables_only():
    model = Model()
    initial = weights(model)["sparse.0.item.weight"].clone()
    state = {"x.embedding_bags.user.weight": USER, "x.embedding_bags.other.weight": ITEM}
    assert list(load_tables(model, state, strict=False)) == ["sparse.0.user"]
    assert torch.equal(weights(model)["sparse.0.user.weight"], USER)
    assert torch.equal(weights(model)["sparse.0.item.weight"], initial)


def test_what_is_no_whole_tensor_is_refused():
    part = TableShards((6, 4), torch.float32, [])
    with pytest.raises(TypeError, match=r"user\.weight is a TableShards, .* gather it into a full tensor first"):
        load_tables(Model("user"), {"user.weight": part})
    with pytest.raises(TypeError, match=r"user\.weight is a list; expected a tensor, float32 \[6, 4\]"):
        load_tables(Model("user"), {"user.weight": USER.tolist()})
    with pytest.raises(ValueError, match="has no tables"):
        load_tables(nn.Linear(1, 1), {"user.weight": USER})
    with pytest.raises(ValueError, match="user is on the meta device"):
        load_tables(Model("user").to("meta"), {"user.weight": USER})


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_tables_off_the_device_are_filled_and_their_cached_rows_with_them(placement, sharded):
    configs = [te.TableConfig("user", 6, 4, placement=placement)]
    model: nn.Module = nn.Sequential(te.nn.EmbeddingBagCollection(configs, te.optim.SGD(lr=0.1)))
    if sharded:
        model = te.HybridParallel(model, te.sharding.ShardingPlan({"user": te.sharding.TableWise(0)}, 1))
    for value in (USER, USER + 1):
        load_tables(model, {"user.weight": value})
        with torch.no_grad():
            pooled = model(te.KeyedJaggedTensor.from_lists({"user": [[0], [5]]}))
        assert torch.equal(pooled, value[[0, 5]])


def test_tables_whose_rows_have_no_numbers_are_refused():
    dynamic = te.nn.EmbeddingBagCollection([te.TableConfig("user", None, 4, capacity=6)], te.optim.SGD(lr=0.1))
    rows = dynamic["user"].weight.shape[0]
    for model in (dynamic, te.HybridParallel(dynamic, te.sharding.ShardingPlan({"user": te.sharding.RowWise()}, 1))):
        with pytest.raises(ValueError, match=r"user is dynamic; insert rows by te\.interop\.from_vocabulary"):
            load_tables(model, {"user.weight": torch.zeros(rows, 4)})


def fill_hybrid(rank: int, kind: str, sharding: tuple[Any, Any]) -> bool:
    """Fill a model that has a table of the same name in two collections."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": collection("user", "item"), "b": collection("user"), "over": nn.Linear(4, 1)})
    plan = te.sharding.ShardingPlan(dict(zip(("user", "item"), sharding, strict=True)), 2)
    hybrid = te.HybridParallel(model, plan)
    tensors = {"a.user.weight": USER, "b.user.weight": USER + 1, "item.weight": ITEM}
    if kind == "dtensor":
        mesh = init_device_mesh("cpu", (2,))
        tensors = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in tensors.items()}
    keys = load_tables(hybrid, tensors)
    state = hybrid.state_dict()
    expected = {"a.user.weight": USER, "b.user.weight": USER + 1, "a.item.weight": ITEM}
    group = hybrid.group
    return len(keys) == 3 and all(torch.equal(state[key].gather(group), value) for key, value in expected.items())


@pytest.mark.parametrize("kind", ["whole", "dtensor"])
@pytest.mark.parametrize(
    "sharding",
    [
        (te.sharding.ColumnWise(columns=(3, 1)), te.sharding.RowWise(rows=(2, 7))),
        (te.sharding.TableWise(1), te.sharding.RowWise(rows=(8, 1))),
        (te.sharding.DataParallel(), te.sharding.ColumnWise(columns=(2, 2))),
    ],
)
def test_sharded_tables_are_filled_on_every_rank(ranks, kind, sharding):
    assert ranks(2).run(fill_hybrid, kind, sharding) == [True, True]


def fill_from_sharded_tensor(rank: int) -> str:
    half = ForeignShard.from_tensor_and_offsets(torch.zeros(3, 4), [3 * rank, 0], rank)
    value = init_from_local_shards([half], 6, 4)
    with pytest.raises(TypeError) as caught:
        load_tables(Model("user"), {"embedding_bags.user.weight": value})
    return str(caught.value)


def test_a_sharded_tensor_is_refused_with_what_to_do(ranks):
    for message in ranks(2).run(fill_from_sharded_tensor):
        assert "is a ShardedTensor" in message
        assert "gather it into a full tensor first" in message
