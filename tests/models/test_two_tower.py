"""The two-tower model: scores, vectors, and training by sampled items with tables of every kind."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import tritonemb as te
from tests.helpers import assert_same_bits
from tritonemb.models import TwoTower
from tritonemb.models.losses import sampled_softmax
from tritonemb.models.two_tower import Tower
from tritonemb.training import top_items

USERS, ITEMS, DIM, NUM_NEGATIVES = 12, 20, 8, 16


def make_model(seed: int = 0, top_mlp: tuple[int, ...] = (), device: str = "cpu", **sizes) -> TwoTower:
    torch.manual_seed(seed)
    tables = [te.TableConfig("user", USERS, DIM), te.TableConfig("item", ITEMS, DIM)]
    if sizes:
        tables = [te.TableConfig(table.name, embedding_dim=DIM, **sizes) for table in tables]
    optimizer = te.optim.RowWiseAdagrad(lr=0.3)
    return TwoTower(tables, 0, ["user"], top_mlp, temperature=0.2, optimizer=optimizer, device=device)


def bags(name: str, ids: torch.Tensor) -> te.KeyedJaggedTensor:
    return te.KeyedJaggedTensor.from_lengths([name], ids, torch.ones_like(ids))


def train(model, steps: int = 30, rank: int = 0, world: int = 1, compiled: bool = False) -> list[float]:
    """Train users to like the item of their number plus 3; return the losses."""
    sampler, losses = te.data.NegativeSampler(ITEMS, seed=1), []
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    towers = model.module if isinstance(model, te.HybridParallel) else model
    for step in range(steps):
        users = torch.arange(USERS)[rank::world]
        positives = users + 3
        negatives = sampler.sample(NUM_NEGATIVES, step)
        batches = bags("user", users), bags("item", torch.cat([positives, negatives]))
        if compiled:
            batches = [te.nn.prefetch(t, b) for t, b in zip((towers.users, towers.items), batches, strict=True)]
        vectors, items = forward(None, *batches)
        loss = sampled_softmax(
            vectors, items[: len(users)], items[len(users) :], positive_ids=positives, negative_ids=negatives,
            temperature=0.2,
        )  # fmt: skip
        loss.backward()
        losses.append(loss.item())
    return losses


def table_of(model, tower: str) -> torch.Tensor:
    return model.state_dict()[f"{tower}s.embeddings.{tower}.weight"]


def test_without_layers_it_is_matrix_factorization():
    model = make_model()
    users, items = table_of(model, "user"), table_of(model, "item")
    ids = torch.tensor([3, 0]), torch.tensor([7, 19])
    both = te.KeyedJaggedTensor.from_lengths(["user", "item"], torch.cat(ids), torch.ones(4, dtype=torch.int64))
    expected = torch.stack([F.cosine_similarity(users[u], items[i], dim=0) / 0.2 for u, i in zip(*ids, strict=True)])
    torch.testing.assert_close(model(None, both), expected)
    vectors, of_items = model(None, bags("user", ids[0]), bags("item", torch.arange(5)))
    torch.testing.assert_close(vectors, F.normalize(users[ids[0]]))
    torch.testing.assert_close(of_items, F.normalize(items[:5]))


def test_towers_have_their_features_and_layers():
    tables = [
        te.TableConfig("u", 5, 4, features=["user", "friend"]),
        te.TableConfig("item", 5, 4),
        te.TableConfig("brand", 5, 2),
    ]
    model = TwoTower(tables, 3, ["friend", "user"], (7, 6))
    sparse = te.KeyedJaggedTensor.from_lengths(
        ["brand", "user", "item", "friend"], torch.tensor([1, 2, 3, 4, 0, 1, 2, 3]), torch.ones(8, dtype=torch.int64)
    )
    dense = torch.randn(2, 3)
    state = {name.split(".")[2]: tensor for name, tensor in model.state_dict().items() if "embeddings" in name}
    assert set(state) >= {"u", "item", "brand"}
    u, item, brand = (module.embeddings for module in (model.users, model.items, model.items))
    user_rows = u["u"].weight[torch.tensor([[3, 2], [4, 3]])].flatten(1)
    item_rows = torch.cat([item["item"].weight[torch.tensor([0, 1])], brand["brand"].weight[torch.tensor([1, 2])]], 1)
    expected = (model.users.mlp(torch.cat([dense, user_rows], 1)) * model.items.mlp(item_rows)).sum(1)
    torch.testing.assert_close(model(dense, sparse), expected)
    for tower in (model.users, Tower(tables, 3)):
        with pytest.raises(ValueError, match=r"the tower has 3 dense features; pass dense \[B, 3\]"):
            tower(sparse)


@pytest.mark.parametrize("top_mlp", [(), (16, 8)])
def test_sampled_softmax_ranks_the_positives_first(top_mlp):
    model = make_model(top_mlp=top_mlp)
    losses = train(model, 60 if top_mlp else 30)
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        vectors, items = model(None, bags("user", torch.arange(USERS)), bags("item", torch.arange(ITEMS)))
    if not top_mlp:  # layers need an optimizer of their own
        assert torch.equal(top_items(vectors, items, 1)[1][:, 0], torch.arange(USERS) + 3)


def test_dynamic_tables_train_alike_and_count_positives_and_negatives():
    dynamic = make_model(num_embeddings=None, capacity=64)
    losses = train(dynamic)
    assert losses[-1] < 0.5 * losses[0]
    state = dynamic.state_dict()
    counts = dict(zip(state["items.embeddings.item.ids"].tolist(), state["items.embeddings.item.count"], strict=True))
    sampler = te.data.NegativeSampler(ITEMS, seed=1)
    expected = torch.cat([torch.cat([torch.arange(USERS) + 3, sampler.sample(NUM_NEGATIVES, s)]) for s in range(30)])
    assert counts == dict(enumerate(expected.bincount(minlength=ITEMS)))


@pytest.mark.more
@pytest.mark.usefixtures("dynamo")
def test_the_compiled_model_trains_alike():
    plain, compiled = make_model(), make_model()
    torch.testing.assert_close(train(plain), train(compiled, compiled=True))
    torch.testing.assert_close(table_of(compiled, "item"), table_of(plain, "item"))


@pytest.mark.more
def test_tables_on_servers_train_alike():
    plain = make_model(num_embeddings=None, capacity=64)
    remote = make_model(num_embeddings=None, capacity=64, placement="server")
    with te.server.start(2) as servers:
        te.server.attach(remote, servers)
        assert train(remote) == train(plain)


def train_shards(rank: int, world: int, top_mlp: tuple[int, ...]):
    """Train a rank's users on shards of the tables; return losses and vectors of all items."""
    torch.manual_seed(0)
    model = te.HybridParallel(
        make_model(top_mlp=top_mlp, device="meta"), exchange=te.sharding.ExchangePrecision("fp32", "fp32")
    )
    losses = train(model, 10, rank, world)
    with torch.no_grad():
        return losses, model(None, bags("user", torch.arange(2)), bags("item", torch.arange(ITEMS)))[1]


@pytest.mark.more
def test_shards_of_two_ranks_train(ranks):
    for top_mlp in ((), (16, 8)):
        (first, items), (second, other_items) = ranks(2).run(train_shards, 2, top_mlp)
        assert_same_bits({"items": items}, {"items": other_items})
        assert sum(first[-3:] + second[-3:]) < 0.7 * sum(first[:3] + second[:3]), top_mlp


def test_bad_input():
    tables = [te.TableConfig("user", 5, 8), te.TableConfig("item", 5, 4, features=["item", "liked"])]
    with pytest.raises(ValueError, match="user_features has 'age', which no table has: user, item, liked"):
        TwoTower(tables, user_features=["age"])
    with pytest.raises(ValueError, match="table 'item' has features of both towers"):
        TwoTower(tables, user_features=["user", "liked"])
    for features in ([], ["user", "item", "liked"]):
        with pytest.raises(ValueError, match="user_features must be some but not all of user, item, liked"):
            TwoTower(tables, user_features=features)
    with pytest.raises(ValueError, match="without top_mlp both towers need one width, got 9 and 8"):
        TwoTower(tables, 1, ["user"], ())
    with pytest.raises(ValueError, match="num_dense must be at least 0, got -1"):
        Tower(tables, -1)
