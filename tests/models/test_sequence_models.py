"""SASRec and HSTU: formulas against loops, training on the next item, and tables of every kind."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.server.jobs import local_servers
from tests.sharding.cases import EXACT
from tests.sharding.models import whole_state
from tritonemb.models.hstu import BUCKET_WIDTH, HSTU, NUM_BUCKETS, TimedHSTU
from tritonemb.models.losses import bpr, sampled_softmax
from tritonemb.models.sasrec import SASRec
from tritonemb.models.sequence import NextItem, SequenceModel, Windows
from tritonemb.training import top_items

DIM, LENGTH, ITEMS = 8, 20, 12
MODELS = {"sasrec": SASRec, "hstu": HSTU}


@pytest.fixture(params=sorted(MODELS))
def name(request) -> str:
    return request.param


def make_model(
    name: str, seed: int = 0, dropout: float = 0.0, optimizer: Any = None, with_times: bool = False, **table: Any
) -> SequenceModel:
    torch.manual_seed(seed)
    sizes = table or {"num_embeddings": ITEMS, "init": torch.nn.init.normal_}
    optimizer = optimizer or te.optim.Adam(lr=0.02)
    config = te.TableConfig("item", embedding_dim=DIM, **sizes)
    kind = TimedHSTU if with_times and name == "hstu" else MODELS[name]
    return kind(config, LENGTH, 2, 2, dropout, optimizer)


def make_batch(lengths=(3, 1, 20, 7, 12), seed=0) -> tuple[te.KeyedJaggedTensor, torch.Tensor]:
    """Sequences in which item i + 1 follows item i, and their times."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(ITEMS, (len(lengths),), generator=generator).tolist()
    lists = [[(start + i) % ITEMS for i in range(n)] for start, n in zip(starts, lengths, strict=True)]
    gaps = torch.randint(1, 100_000, (sum(lengths),), generator=generator)
    return te.KeyedJaggedTensor.from_lists({"item": lists}), gaps.cumsum(0)


def norm(module, x):
    return F.layer_norm(x, (DIM,), module.weight, module.bias)


def sasrec_of_one(model: SASRec, rows: torch.Tensor) -> torch.Tensor:
    x = rows + torch.stack([model.positions.weight[len(rows) - 1 - i] for i in range(len(rows))])
    for block in model.blocks:
        q, attention = norm(block.attention_norm, x), block.attention
        mixed = torch.zeros_like(x)
        for i in range(len(x)):
            for head in (slice(0, 4), slice(4, 8)):
                query = attention.query(q[i])[head]
                scores = torch.stack([query @ attention.key(x[j])[head] / math.sqrt(4) for j in range(i + 1)])
                for j, weight in enumerate(scores.softmax(0)):
                    mixed[i, head] += weight * attention.value(x[j])[head]
        f = norm(block.feed_forward_norm, q + attention.out(mixed))
        x = f + block.feed_forward[3](block.feed_forward[0](f).relu())
    return norm(model.norm, x)


def hstu_of_one(model: HSTU, rows: torch.Tensor, times: torch.Tensor | None) -> torch.Tensor:
    x = rows
    for block in model.blocks:
        u, v, q, k = F.silu(block.projection(norm(block.norm, x))).split(DIM, dim=1)
        mixed = torch.zeros_like(x)
        for i in range(len(x)):
            for j in range(i + 1):
                bias = block.bias.positions[i - j]
                if times is not None:
                    bucket = int((times[i] - times[j]).clamp(min=1).log() / BUCKET_WIDTH)
                    bias = bias + block.bias.times[min(bucket, NUM_BUCKETS - 1)]
                for head in (slice(0, 4), slice(4, 8)):
                    mixed[i, head] += F.silu(q[i, head] @ k[j, head] + bias) / LENGTH * v[j, head]
        x = x + block.out(norm(block.attention_norm, mixed) * u)
    return norm(model.norm, x)


@pytest.mark.parametrize("with_times", [False, True])
def test_hidden_states_are_those_of_each_sequence_alone(name, with_times):
    model = make_model(name, with_times=with_times)
    batch, times = make_batch()
    hidden = model(batch, times if with_times else None)
    assert hidden.shape == (5, LENGTH, DIM)
    weight, start = model.embeddings["item"].weight, 0
    for row, ids in enumerate(batch.to_lists()["item"]):
        own_times = times[start : start + len(ids)] if with_times else None
        start += len(ids)
        rows = weight[torch.tensor(ids)]
        expected = sasrec_of_one(model, rows) if name == "sasrec" else hstu_of_one(model, rows, own_times)
        torch.testing.assert_close(hidden[row, LENGTH - len(ids) :], expected, rtol=1e-4, atol=1e-5)
        assert not hidden[row, : LENGTH - len(ids)].any()
        # Equally long sequences need no jagged tensor.
        alone = model(torch.tensor([ids]), own_times)
        torch.testing.assert_close(alone[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_times", [False, True])
def test_gradients_are_deterministic_with_several_threads(name, with_times):
    ids = torch.randint(ITEMS, (200, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    times = torch.arange(ids.numel()).view_as(ids) ** 2 if with_times else None

    def gradients() -> dict[str, torch.Tensor]:
        model = make_model(name, with_times=with_times)
        NextItem(model)(ids, torch.arange(ITEMS), times).backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    torch.set_num_threads(4)
    expected = gradients()
    for _ in range(5):
        assert_same_bits(gradients(), expected)


def test_a_later_item_changes_no_earlier_state(name):
    model = make_model(name)
    ids = torch.arange(9)[None]
    changed = ids.clone()
    changed[0, 6:] = 2
    hidden, other = model(ids), model(changed)
    assert torch.equal(hidden[:, :6], other[:, :6])
    assert not torch.isclose(hidden[:, 6:], other[:, 6:]).all(dim=2).any()


@pytest.mark.parametrize("per_position", [False, True])
def test_the_loss_of_the_next_item_is_that_of_loops(name, per_position):
    model, loss = make_model(name), bpr if per_position else sampled_softmax
    batch, _ = make_batch((3, 1, 6))
    negatives = torch.randint(ITEMS, (7, 4) if per_position else (5,), generator=torch.Generator().manual_seed(1))
    value = NextItem(model, loss)(batch, negatives)
    queries, targets = [], []
    for ids in batch.to_lists()["item"]:
        if ids[:-1]:
            queries.append(model(torch.tensor([ids[:-1]]))[0])
            targets += ids[1:]
    weight = model.embeddings["item"].weight
    expected = loss(
        torch.cat(queries), weight[torch.tensor(targets)], weight[negatives], positive_ids=torch.tensor(targets),
        negative_ids=negatives,
    )  # fmt: skip
    torch.testing.assert_close(value, expected)


def train(
    model: Any,
    steps: int,
    rank: int = 0,
    world: int = 1,
    compiled: bool = False,
    dense_optimizer: Any = torch.optim.Adam,
) -> list[float]:
    """Train on the next item; each rank on its part of the batches."""
    module = next(module for module in model.modules() if isinstance(module, SequenceModel))
    dense = [p for n, p in module.named_parameters() if not n.startswith("embeddings.")]
    optimizer, sampler = dense_optimizer(dense, lr=0.01), te.data.NegativeSampler(ITEMS)
    function = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    losses = []
    for step in range(steps):
        lists = make_batch((5, 9, 9, 5), seed=step)[0].to_lists()["item"]
        sequences = te.KeyedJaggedTensor.from_lists({"item": lists[rank::world]})
        loss = function(sequences, sampler.sample(6, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_learns_what_comes_next_and_its_state_can_be_loaded(name):
    model = make_model(name, dropout=0.1)
    losses = train(NextItem(model), 120)
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5]), (losses[:5], losses[-5:])
    items = model.eval().embeddings["item"].weight
    sequences = (torch.arange(ITEMS)[:, None] + torch.arange(4)) % ITEMS
    predicted = top_items(model(sequences)[:, -1], items, 1)[1].squeeze(1)
    assert (predicted == (sequences[:, -1] + 1) % ITEMS).float().mean() > 0.7  # by chance 1 of 12
    twin = make_model(name, seed=1).eval()
    twin.load_state_dict(model.state_dict())
    assert_same_bits(dict(twin.state_dict()), dict(model.state_dict()))
    assert torch.equal(twin(torch.arange(4)[None]), model(torch.arange(4)[None]))


def test_a_dynamic_table_trains(name):
    losses = train(NextItem(make_model(name, num_embeddings=None, capacity=100)), 60)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_tables_on_servers_have_the_bits_of_local_ones(name):
    model, local = (make_model(name, num_embeddings=None, capacity=100, placement=p) for p in ("server", "device"))
    local.load_state_dict(dict(local.state_dict()))
    expected = train(NextItem(local), 5)
    with local_servers(2) as servers:
        te.server.attach(model, servers, 0)
        assert train(NextItem(model), 5) == expected


def trained_on_ranks(rank: int, world: int, name: str) -> dict[str, torch.Tensor]:
    parallel = te.HybridParallel(NextItem(make_model(name, optimizer=te.optim.SGD(lr=0.1))), exchange=EXACT)
    train(parallel, 3, rank, world, dense_optimizer=torch.optim.SGD)
    return whole_state(parallel)


def test_ranks_train_as_one_process_on_all_samples(ranks, name):
    single = NextItem(make_model(name, optimizer=te.optim.SGD(lr=0.1)))
    train(single, 3, dense_optimizer=torch.optim.SGD)
    for state in ranks(2).run(trained_on_ranks, 2, name):
        # Means over ranks are added in another order than means over samples.
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=1e-4, atol=1e-5)


def test_a_model_on_the_meta_device_has_the_initial_values_of_its_kind(name):
    config = te.TableConfig("item", 100, 32)
    model, on_meta = (MODELS[name](config, optimizer=te.optim.SGD(lr=0.1), device=device) for device in (None, "meta"))
    matrices = {key: p.detach() for key, p in model.named_parameters() if p.dim() > 1 and "embeddings" not in key}
    parameters = dict(te.HybridParallel(NextItem(on_meta), device="cpu").module.model.named_parameters())
    assert len(matrices) >= 4
    for key, matrix in matrices.items():  # of 1,024 values or more: within 10 standard errors
        assert parameters[key].detach().std().item() == pytest.approx(matrix.std().item(), rel=0.25), key


def trained_without_targets(rank: int, world: int, name: str) -> list[float]:
    """In the first step no item of rank 0 has a next one, in the second one it has no sequences."""
    parallel = te.HybridParallel(NextItem(make_model(name)), exchange=EXACT)
    optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.1), []
    for lists in ([[[1], [2]], [[3, 4, 5]]], [[], [[6, 7]]], [[[1, 2]], [[3, 4, 5]]]):
        loss = parallel(te.KeyedJaggedTensor.from_lists({"item": lists[rank]}), torch.arange(6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_rank_without_targets_trains_with_the_others(ranks, name):
    first, second = ranks(2).run(trained_without_targets, 2, name)
    assert first[:2] == [0, 0]
    assert min(first[2], *second) > 0


@pytest.mark.usefixtures("dynamo")
@pytest.mark.more
def test_training_is_one_graph(name):
    compiled, eager = (make_model(name) for _ in range(2))
    torch.testing.assert_close(
        train(NextItem(compiled), 3, compiled=True), train(NextItem(eager), 3), rtol=1e-4, atol=1e-5
    )


def test_bad_input(name):
    model = make_model(name)
    with pytest.raises(ValueError, match="a sequence has 21 items, expected at most 20: keep its last 20"):
        model(te.KeyedJaggedTensor.from_lists({"item": [[1] * 21]}))
    with pytest.raises(ValueError, match="sequences have 21 items"):
        model(torch.ones(1, 21, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected sequences with the key 'item', got"):
        model(te.KeyedJaggedTensor.from_lists({"user": [[1]]}))
    if name == "hstu":
        with pytest.raises(ValueError, match="TimedHSTU needs the times"):
            make_model(name, with_times=True)(torch.ones(1, 2, dtype=torch.int64))
    next_item = NextItem(model)
    histories = te.KeyedJaggedTensor.from_lists({"item": [[1, 2, 3], [4, 5]]})
    for call in (partial(next_item, histories, torch.arange(2)), partial(model, histories)):
        with pytest.raises(ValueError, match=r"those of the 5 ids, without padding, got shape \[2, 3\]"):
            call(times=torch.arange(6).view(2, 3))
    weighted = te.KeyedJaggedTensor(["item"], torch.arange(3), torch.ones(3), lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match="sequences of 'item' have weights, which the model does not use"):
        model(weighted)
    assert next_item(torch.tensor([[1], [2]]), torch.arange(2)).item() == 0  # no item has a next one
    rows_of = torch.compile(lambda lengths: Windows(lengths, 9, 4).rows, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="a sequence has more than 4 items"):
        rows_of(torch.tensor([3, 6]))
    with pytest.raises(ValueError, match="a sequence is empty"):
        next_item(te.KeyedJaggedTensor.from_lists({"item": [[1, 2], []]}), torch.arange(2))
    with pytest.raises(ValueError, match="negatives are of 3 targets, but the sequences have 1"):
        next_item(torch.tensor([[1, 2]]), torch.ones(3, 2, dtype=torch.int64))
    for num_heads in (3, 0):
        with pytest.raises(ValueError, match=f"num_heads must divide the embedding_dim, 8, got {num_heads}"):
            MODELS[name](te.TableConfig("item", 5, DIM), num_heads=num_heads)
    with pytest.raises(ValueError, match="expected one: its sequences"):
        MODELS[name](te.TableConfig("item", 5, DIM, features=["a", "b"]))
