"""Whole models in parallel: what they learn, and what their state is called, is the plain model's."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.ranks import start_process
from tests.sharding.cases import EXACT
from tests.sharding.models import KEYS, batch, dcn, dlrm, loss_of, part, plan, tables, train, whole_state
from tritonemb.comm.group import RankGroup
from tritonemb.memory import empty_result
from tritonemb.sharding import ColumnWise, DataParallel, ExchangePrecision, RowWise, ShardingPlan, TableWise


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if not name.startswith("embeddings")]


def train_alone(model: nn.Module, steps: int, world: int, micro: int = 1) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(micro * step + m, world) for m in range(micro)]
        dense, labels = (torch.cat([p[n] for p in parts]) for n in (0, 2))
        loss_of(model, dense, te.KeyedJaggedTensor.stack([p[1] for p in parts]), labels).backward()
        optimizer.step()
    return model.state_dict()


def trained(rank, world, cases):
    """Each case: model, its device, how the dense part is, copies of the tables, ids ahead or not, a node's ranks."""
    states = []
    for kind, device, dense, copies, ahead, local in cases:
        mesh = None
        if copies > 1:
            mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("replicate", "shard"))
        options = {"dense": dense, "exchange": EXACT, "local_world_size": local or None}
        parallel = te.HybridParallel(kind(device), plan(world // copies, local), mesh, **options)
        losses = train(parallel, rank, world, ahead=ahead)
        states.append((losses, whole_state(parallel)))
    return states


CASES = [
    (dlrm, None, "ddp", 1, False, 0),
    (dlrm, None, "fsdp", 1, True, 0),
    (dcn, None, "ddp", 1, True, 0),
    (dlrm, None, "ddp", 2, False, 0),
    (dlrm, None, "fsdp", 2, True, 0),
]
NODES = [(dlrm, None, "ddp", 1, True, 2), (dcn, None, "fsdp", 1, False, 2)]


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Means over ranks are added in another order than means over samples: some roundings of float32 a step."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.few(1)
def test_models_train_as_one_process_on_all_samples(ranks, world):
    cases = CASES + (NODES if world == 4 else [])
    results = ranks(world).run(trained, world, cases)
    for number, case in enumerate(cases):
        expected = train_alone(case[0](), 3, world)
        for rank in range(world):
            assert_near(results[rank][number][1], expected)
            assert_same_bits(results[rank][number][1], results[0][number][1], f"{case}")  # and all ranks are alike


@pytest.mark.parametrize("exchange", [EXACT, None, ExchangePrecision("int8", "fp8_e5m2")])
def test_without_a_job_nothing_changes(exchange):
    """One process, without torch.distributed: the plain model's bits."""
    parallel = te.HybridParallel(dlrm(), exchange=exchange)
    train(parallel, 0, 1, 5, ahead=True)
    expected = train_alone(dlrm(), 5, 1)
    state = whole_state(parallel)
    assert list(state) == list(expected)
    assert_same_bits(state, expected)


def in_parts(rank, world, kind, number, compiled):
    torch._dynamo.reset()
    parallel = te.HybridParallel(kind(), plan(world), exchange=EXACT, pipeline=number)
    function = torch.compile(parallel, fullgraph=True, backend="aot_eager") if compiled else parallel
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        dense, sparse, labels = part(batch(step, world), rank)
        loss = loss_of(function, dense, parallel.prefetch(sparse) if compiled else sparse, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch._dynamo.reset()
    return whole_state(parallel)


@pytest.mark.parametrize(
    ("world", "number", "compiled"),
    [
        (2, 2, False),
        (1, 4, False),
        (2, 7, False),
        pytest.param(2, 2, True, marks=pytest.mark.more),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 2, True), (2, 7, True))),
    ],
)
@pytest.mark.parametrize("kind", [dlrm, pytest.param(dcn, marks=pytest.mark.slow)])
def test_sub_batches_train_as_the_whole_batch(ranks, world, number, compiled, kind):
    """Seven are more than there are samples."""
    expected = train_alone(kind(), 3, world)
    for state in ranks(world).run(in_parts, world, kind, number, compiled):
        assert_near(state, expected)


FREEZES = {
    "model": lambda model: model.embeddings.requires_grad_(False),
    "collections": lambda parallel: [collection.requires_grad_(False) for collection in parallel.collections],
    "wrapper": lambda parallel: parallel.requires_grad_(False),
}


def changed_by_training(rank, world, cases):
    """Names of the tensors that two steps change, by case."""
    results = []
    for when, kind, device, dense, ahead in cases:
        model = kind(device)
        if when == "model":
            FREEZES[when](model)
        parallel = te.HybridParallel(model, plan(world), dense=dense, exchange=EXACT)
        if when != "model":
            FREEZES[when](parallel)
        for parameter in parallel.parameters():
            parameter.requires_grad_()
        initial = whole_state(parallel)
        train(parallel, rank, world, 2, ahead=ahead)
        trained_state = whole_state(parallel)
        results.append([name for name in trained_state if not torch.equal(trained_state[name], initial[name])])
    return results


def test_frozen_tables_are_trained_on_no_rank(ranks):
    """Four shardings: a rank without shards skips the backward that other ranks skip."""
    cases = [("model", dlrm, None, "ddp", False), ("model", dcn, "meta", "fsdp", True)]
    cases += [("collections", dlrm, "meta", "ddp", True), ("wrapper", dcn, None, "ddp", False)]
    for results in ranks(2).run(changed_by_training, 2, cases):
        for names in results:
            assert names
            assert not [name for name in names if name.startswith("embeddings")]


@pytest.mark.parametrize("when", FREEZES)
@pytest.mark.parametrize("options", [{}, {"placement": "host"}, {"placement": "disk"}, {"capacity": 100}], ids=str)
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.few(2)
def test_frozen_tables_stay_on_every_tier(when, options, pooled):
    collection = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
    cache = {"cache": te.CacheConfig(rows=32)} if "placement" in options else {}
    rows, pooling = None if "capacity" in options else 20, "sum" if pooled else "none"
    table = te.TableConfig("t", rows, 8, pooling=pooling, **options, **cache)
    model = nn.ModuleDict({"embeddings": collection([table], te.optim.Adam(lr=0.1))})
    model.forward = lambda sparse: model.embeddings(sparse)
    if when == "model":
        FREEZES[when](model)
    parallel = te.HybridParallel(model)
    if when != "model":
        FREEZES[when](parallel)
    initial, scale = whole_state(parallel), torch.ones((), requires_grad=True)
    sparse = te.KeyedJaggedTensor(["t"], torch.tensor([1, 2, 15]), lengths=torch.tensor([2, 1]))
    for features in (sparse, parallel.prefetch(sparse)):
        output = parallel(features)
        ((output if pooled else output.values()) * scale).sum().backward()
    assert_same_bits(whole_state(parallel), initial)
    parallel.requires_grad_(True)
    output = parallel(sparse)
    (output if pooled else output.values()).sum().backward()
    assert not torch.equal(whole_state(parallel)["embeddings.step"], initial["embeddings.step"])


def placed_by_rank_zero(rank, cases):
    """Dense values of a model that each rank initializes by another seed: before, and in parallel."""
    results = []
    for dense, trains in cases:
        torch.manual_seed(rank)
        model = te.nn.DLRM(tables(), 4, (16,), (16,), optimizer=te.optim.SGD(lr=0.1))
        model.register_buffer("shift", torch.rand(3))
        model.over_arch = nn.Linear(3, 5)
        if dense == "ddp":  # FSDP2 takes contiguous parameters only
            model.over_arch.weight = nn.Parameter(torch.rand(3, 5).T)
        for parameter in dense_parameters(model):
            parameter.requires_grad_(trains)
        state = {name: value.clone() for name, value in model.state_dict().items() if "embeddings" not in name}
        results.append((state, whole_state(te.HybridParallel(model, plan(2), dense=dense, exchange=EXACT))))
    return results


def test_dense_values_are_those_of_rank_zero(ranks):
    cases = [(dense, trains) for dense in ("ddp", "fsdp") for trains in (True, False)]
    first, second = ranks(2).run(placed_by_rank_zero, cases)
    for case, (values, state), (other_values, other_state) in zip(cases, first, second, strict=True):
        assert not torch.equal(values["shift"], other_values["shift"])
        for name, value in values.items():
            assert torch.equal(state[name], value), (case, name)
            assert torch.equal(other_state[name], value), (case, name)


def test_a_collection_that_is_frozen_in_part_cannot_be_sharded():
    model = dlrm()
    model.embeddings["t1"].requires_grad_(False)
    with pytest.raises(ValueError, match=r"tables \['t1'\] do not require gradients but others"):
        te.HybridParallel(model)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = te.nn.EmbeddingBagCollection(tables(), te.optim.SGD(lr=0.1))

    def forward(self, sparse):
        return self.embeddings(sparse).sum()


def test_what_cannot_be_computed_in_sub_batches_is_refused():
    with pytest.raises(ValueError, match="pipeline must be at least 1, got 0"):
        te.HybridParallel(dlrm(), pipeline=0)
    with pytest.raises(ValueError, match='pipeline=2 is for pooled collections and dense="ddp"'):
        te.HybridParallel(dlrm(), pipeline=2, dense="fsdp")
    dense, sparse, _ = batch(0, 1)
    with pytest.raises(TypeError, match="must return tensors with a row per sample"):
        te.HybridParallel(Scalar(), pipeline=2)(sparse)
    with pytest.raises(ValueError, match="pipeline=2 needs one argument with features, got 0"):
        te.HybridParallel(dlrm(), pipeline=2)(dense, None)


def over(rank, world, network, kind):
    """Losses and state, and the bytes of ids that crossed each network."""
    parallel = te.HybridParallel(kind(), plan(world), exchange=EXACT, ids_over=network)
    over_device, groups = [], parallel.groups
    all_to_all = groups.ids_network.all_to_all
    groups.ids_network.all_to_all = lambda *args: over_device.append(args[-1]) or all_to_all(*args)
    losses = train(parallel, rank, world, 2)
    return losses, whole_state(parallel), over_device, groups.ids_network is groups.ids


def default_network(rank, backend, placement, network):
    """Whether ids cross the device's network, and a thread may prefetch; the tables' device has a faked backend."""
    with mock.patch.object(RankGroup, "backend_of", return_value=backend):
        tables = [replace(table, placement=placement) for table in dlrm().embeddings.configs]
        model = te.nn.EmbeddingBagCollection(tables, te.optim.SGD(lr=0.1))
        parallel = te.HybridParallel(model, ids_over=network)
    return parallel.groups.ids_network is not parallel.groups.ids, parallel.prefetches_in_thread


@pytest.mark.parametrize(
    ("backend", "placement", "network", "expected"),
    [
        ("gloo", "device", None, (False, True)),
        ("nccl", "device", None, (True, False)),
        ("nccl", "host", None, (False, True)),
        ("nccl", "device", "cpu", (False, True)),
        ("nccl", "host", "device", (True, False)),
        ("gloo", "device", "device", (True, True)),
    ],
)
def test_ids_cross_the_devices_network_by_default_if_it_has_one(ranks, backend, placement, network, expected):
    assert ranks(2).run(default_network, backend, placement, network) == [expected] * 2


def backends(rank):
    world = RankGroup.world()
    devices = [torch.device(name) for name in ("cpu", "meta")]
    return [group.backend_of(device) for group in (world, world.duplicate("gloo"), RankGroup()) for device in devices]


def test_a_group_names_the_backend_of_a_device(ranks):
    assert ranks(2).run(backends) == [["gloo", "", "gloo", "", "", ""]] * 2


def test_ids_cross_the_network_of_the_device_if_they_are_to(ranks):
    for (losses, state, _, one), (other_losses, other, crossed, both) in zip(
        *(ranks(2).run(over, 2, network, dlrm) for network in ("cpu", "device")), strict=True
    ):
        assert (one, both) == (True, False)
        assert set(crossed) == {"ids"}  # sizes, which the host reads, do not
        assert losses == other_losses
        assert_same_bits(other, state)
    with pytest.raises(ValueError, match="ids_over must be 'cpu' or 'device', got 'gpu'"):
        te.HybridParallel(dlrm(), ids_over="gpu")


def drawn(rank, world, other_plan):
    """The state of a model made on the meta device, which can be trained."""
    torch.manual_seed(11)
    model = te.nn.DLRM(tables(), 4, (16,), (16,), optimizer=te.optim.SGD(lr=0.1), device="meta")
    parallel = te.HybridParallel(model, None if other_plan else plan(world), exchange=EXACT)
    state = whole_state(parallel)
    train(parallel, rank, world, 1)
    return state


def test_models_made_on_meta_have_the_same_tables_however_they_are_cut(ranks):
    expected = drawn(0, 1, True)
    bound = 50**-0.5
    for world, other in ((2, False), (4, True)):
        for state in ranks(world).run(drawn, world, other):
            for key in KEYS:
                weight = state[f"embeddings.{key}.weight"]
                assert torch.equal(weight, expected[f"embeddings.{key}.weight"]), (world, key)
                assert weight.abs().max() <= bound
                assert weight.std() > bound / 3  # uniform: bound / 1.73
            assert all(tensor.isfinite().all() for tensor in state.values())


def averaged(rank, world, every):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    parallel = te.HybridParallel(
        dlrm(optimizer=te.optim.SGD(lr=0.1)), plan(world // 2), mesh, exchange=EXACT, average_every=every
    )
    states = []
    for step in range(4):
        train(parallel, rank, world, 1, first=step)
        states.append([s.tensor.clone() for w in parallel.table_weights().values() for s in w.shards])
    return states


def test_copies_of_tables_train_apart_until_they_are_averaged(ranks):
    results = ranks(4).run(averaged, 4, 2)
    for step in range(4):
        for rank in (0, 1):
            same = [torch.equal(a, b) for a, b in zip(results[rank][step], results[rank + 2][step], strict=True)]
            # Data-parallel tables are one over all ranks; others part between averages.
            assert all(same) == (step % 2 == 1), (step, rank, same)


def accumulated(rank, world, dense, micro):
    parallel = te.HybridParallel(dlrm(), plan(world), dense=dense, exchange=EXACT)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        with ExitStack() as stack:
            for collection in parallel.collections:
                stack.enter_context(collection.accumulate())
            for number in range(micro):
                local_batch = part(batch(micro * step + number, world), rank)
                with parallel.no_sync() if number < micro - 1 else ExitStack():
                    (loss_of(parallel, *local_batch) / micro).backward()
            with pytest.raises(RuntimeError, match=r"load_state_dict\(\) in a block of accumulate"):
                parallel.load_state_dict(parallel.state_dict())
        optimizer.step()
    return whole_state(parallel)


@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
def test_micro_batches_are_one_large_batch(ranks, dense):
    expected = train_alone(dlrm(), 2, 2, micro=3)
    for state in ranks(2).run(accumulated, 2, dense, 3):
        assert_near(state, expected)


def loaded(rank, world, dense, state, bad):
    parallel = te.HybridParallel(dlrm(), plan(world), dense=dense, exchange=EXACT)
    initial = whole_state(parallel)
    messages = []
    for broken in bad:
        with pytest.raises(RuntimeError) as raised:
            parallel.load_state_dict(broken)
        messages.append(str(raised.value))
        assert_same_bits(whole_state(parallel), initial)
    with pytest.raises(ValueError, match="assign=True would replace the parameters whose gradients the ranks average"):
        parallel.load_state_dict(state, assign=True)
    parallel.load_state_dict(state)
    first = whole_state(parallel)
    parallel.load_state_dict(parallel.state_dict())  # its own
    parallel.load_state_dict({name: state[name] for name in list(state)[:3]}, strict=False)
    assert_same_bits(whole_state(parallel), first)
    train(parallel, rank, world, 1)
    return messages, first, list(parallel.state_dict())


@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
def test_the_state_of_a_plain_model(ranks, dense):
    plain = dlrm()
    train_alone(plain, 2, 2)
    state = plain.state_dict()
    bad = [
        {name: tensor for name, tensor in state.items() if name != "embeddings.t1.sum"},
        {name: tensor for name, tensor in state.items() if not name.startswith("top")},
        {**state, "embeddings.t9.weight": torch.ones(1)},
        {**state, "elsewhere": torch.ones(1)},
        {**state, "embeddings.t1.weight": torch.ones(3, 3)},
        {**state, "bottom.0.weight": torch.ones(3, 3)},
        {**state, "embeddings.t1.weight": state["embeddings.t1.weight"].half()},
    ]
    for messages, first, names in ranks(2).run(loaded, 2, dense, state, bad):
        assert names == list(state)
        assert_same_bits(first, state)
        assert "embeddings.t1.sum" in messages[0]
        assert "top" in messages[1]
        assert "embeddings.t9.weight" in messages[2]
        assert "elsewhere" in messages[3]
        assert "embeddings.t1.weight" in messages[4]
        assert "float16" in messages[-1]


def traffic(rank, precisions):
    results = []
    for codecs in precisions:
        model = te.nn.DLRM(tables(), 4, (16,), (16,), optimizer=te.optim.SGD(lr=0.1))
        parallel = te.HybridParallel(model, plan(2), exchange=ExchangePrecision(*codecs))
        parallel.group.traffic.reset()
        train(parallel, rank, 2, 2)
        results.append({kind: sent.total for kind, sent in parallel.group.traffic.by_kind().items()})
    return results


def test_16_bits_halve_what_crosses(ranks):
    for full, half, other in ranks(2).run(traffic, [("fp32", "fp32"), ("fp16", "bf16"), ("bf16", "fp16")]):
        for kind in ("pooled", "pooled gradients"):
            assert full[kind] > 0
            assert half[kind] * 2 == other[kind] * 2 == full[kind]
        assert half["ids"] == full["ids"]


class Frozen(nn.Module):
    """A collection with a fused optimizer, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = te.nn.EmbeddingBagCollection([te.TableConfig("a", 9, 4)], te.optim.SGD(lr=0.1))
        self.plain = te.nn.EmbeddingBagCollection([te.TableConfig("b", 9, 4)])

    def forward(self, features):
        return torch.cat([self.fused(features), self.plain(features)], dim=1)


def with_plain(rank):
    torch.manual_seed(3)
    parallel = te.HybridParallel(Frozen(), ShardingPlan({"a": RowWise()}, 2), exchange=EXACT)
    assert isinstance(parallel.module.plain, te.nn.EmbeddingBagCollection)
    assert [name for name, _ in parallel.named_parameters()] == ["plain.b.weight"]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    lists = {"a": [[rank, 8], [3]], "b": [[1 + rank], [7, 7]]}
    parallel(te.KeyedJaggedTensor.from_lists(lists)).square().mean().backward()
    optimizer.step()
    return whole_state(parallel)


def test_collections_without_a_fused_optimizer_stay_ordinary(ranks):
    torch.manual_seed(3)
    model = Frozen()
    optimizer = torch.optim.SGD(model.plain.parameters(), lr=0.1)
    model(
        te.KeyedJaggedTensor.from_lists({"a": [[0, 8], [3], [1, 8], [3]], "b": [[1], [7, 7], [2], [7, 7]]})
    ).square().mean().backward()
    optimizer.step()
    for state in ranks(2).run(with_plain):
        assert_near(state, model.state_dict())


class Hashes(nn.Module):
    """Changes its features before it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = te.nn.EmbeddingBagCollection([te.TableConfig("a", 9, 4)], te.optim.SGD(lr=0.1))

    def forward(self, features):
        ids = features.values() % 9
        return self.embeddings(te.KeyedJaggedTensor(features.keys(), ids, offsets=features.offsets()))


def test_features_that_have_been_sent_cannot_be_changed():
    parallel = te.HybridParallel(Hashes())
    features = te.KeyedJaggedTensor.from_lists({"a": [[10, 3], []]})
    small = te.KeyedJaggedTensor.from_lists({"a": [[1, 3], []]})
    assert parallel(features).shape == (2, 4)
    sent = parallel.prefetch(small)
    assert (sent.keys(), sent.stride()) == (["a"], 2)
    with pytest.raises(AttributeError, match=r"has no 'values': its ids have been consumed.*changes its features"):
        parallel(sent)
    with pytest.raises(ValueError, match="another model has prefetched these features"):
        te.HybridParallel(dlrm())(torch.ones(2, 4), sent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense": "zero"}, r"dense must be one of \('ddp', 'fsdp'\), got 'zero'"),
        ({"average_every": 0}, "average_every must be at least 1, got 0"),
        ({"plan": ShardingPlan({"t0": RowWise()}, 2)}, "the plan is for 2 ranks"),
        ({"plan": ShardingPlan({"t0": RowWise()}, 1)}, r"lacks the tables \['t1', 't2', 't3'\]"),
        ({"plan": ShardingPlan({key: TableWise(1) for key in KEYS}, 1)}, "table 't0': rank 1"),
        ({"plan": ShardingPlan({key: RowWise() for key in (*KEYS, "t9")}, 1)}, "that the model does not have: t9"),
    ],
)
def test_what_the_constructor_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        te.HybridParallel(dlrm(), **options)


def test_models_that_have_nothing_to_cut():
    for model in (nn.Linear(2, 2), te.nn.EmbeddingBagCollection(tables())):
        with pytest.raises(ValueError, match="no embedding collection with a fused optimizer"):
            te.HybridParallel(model)


def test_mode_hooks_shared_weights_and_buffers_stay():
    """They are those of the model, whose collection is replaced and whose "meta" tensors are allocated."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(1, device="meta"))
            self.register_buffer("shift", torch.arange(3.0))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale)

    collection = te.nn.EmbeddingBagCollection([te.TableConfig("item", 9, 4)], te.optim.SGD(lr=0.1))
    layers = [nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"), Shift()]
    layers[1].weight = layers[0].weight
    calls = []
    collection.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    model = te.HybridParallel(nn.Sequential(collection, *layers).eval(), device="cpu")
    assert not any(module.training for module in model.modules())
    collection, first, second, shift = model.module
    assert isinstance(collection, te.sharding.ShardedEmbeddingBagCollection)
    assert collection(te.KeyedJaggedTensor.from_lists({"item": [[1], [3, 4]]})).shape == calls[0] == (2, 4)
    assert first.weight is second.weight
    assert first.bias is not second.bias
    assert not first.weight.is_meta
    assert torch.equal(shift.shift, torch.arange(3.0))
    assert torch.equal(shift.scale.detach(), torch.ones(1))


def test_a_layer_on_meta_that_cannot_fill_itself():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, device="meta"))

    model = nn.Sequential(te.nn.EmbeddingBagCollection(tables(), te.optim.SGD(lr=0.1), device="meta"), Scale())
    with pytest.raises(ValueError, match=r"Scale is on the meta device and has no reset_parameters"):
        te.HybridParallel(model)


def refused(rank):
    messages = []
    for mesh, local in (((4,), 3), ((1, 2, 2), None), ((2, 2), 4)):
        try:
            device_mesh = init_device_mesh("cpu", mesh)
            te.HybridParallel(dlrm(), mesh=device_mesh, local_world_size=local)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_meshes_and_nodes_that_do_not_fit(ranks):
    for uneven, deep, small in ranks(4).run(refused):
        assert "4 ranks of a replica of the tables cannot be split into nodes of 3 ranks" in uneven
        assert "must have all 4 ranks in 1 dimension (shards) or 2" in deep
        assert small == ""  # both copies on one node


def train_and_leave(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for job in range(10):
        dist.init_process_group("gloo", f"file://{folder}/{job}", rank=rank, world_size=2)
        model = te.HybridParallel(dlrm(), plan(2))
        dense, sparse, labels = batch(rank, 2)
        loss_of(model, dense, sparse, labels).backward()
        dist.destroy_process_group()
        del model  # not before the group, as in a script whose model is a global variable


@pytest.mark.skipif(sys.platform == "win32", reason="gloo has file URLs of another form there")
@pytest.mark.usefixtures("ranks")
def test_a_model_may_outlive_its_process_group(tmp_path):
    """A model of plain DDP hangs in 3 of 4 runs: its reducer frees the group while it holds the GIL."""
    processes = [start_process(train_and_leave, rank, str(tmp_path)) for rank in range(2)]
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


def under_default_device(rank, world, device):
    """State after a step with another default device of torch than that of batch and tables."""
    configs = [te.TableConfig(name, 20, 16) for name in "abc"] + [te.TableConfig("d", None, 16, capacity=40)]
    torch.manual_seed(0)
    model = te.nn.EmbeddingBagCollection(configs, te.optim.RowWiseAdagrad(lr=0.1))
    shardings = {"a": TableWise(0), "b": ColumnWise(), "c": DataParallel(), "d": RowWise()}
    parallel = te.HybridParallel(model, ShardingPlan(shardings, world), exchange=EXACT)
    features = te.KeyedJaggedTensor.from_lists({name: [[rank, 3, 3], [7]] for name in "abcd"})
    with torch.device(device):
        assert {empty_result((size,), torch.float32).device.type for size in (4, 9 << 20)} == {"cpu"}
        (parallel(features) * 1.5).sum().backward()
    return whole_state(parallel)


def test_the_default_device_of_torch_changes_nothing(ranks):
    for actual, expected in zip(*(ranks(2).run(under_default_device, 2, d) for d in ("meta", "cpu")), strict=True):
        assert_same_bits(actual, expected)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = te.TableConfig("item", 7, 4)
        self.user = self.item = te.nn.EmbeddingBagCollection([config], te.optim.SGD(lr=0.1))

    def forward(self, features):
        return (self.user(features) * self.item(features)).sum()


def test_a_collection_under_two_names_stays_one():
    features = te.KeyedJaggedTensor.from_lists({"item": [[1], [3, 4]]})
    models = TwoNames(), te.HybridParallel(TwoNames())
    for model in models:
        model(features).backward()
    assert models[1].module.user is models[1].module.item
    torch.testing.assert_close(whole_state(models[1]), models[0].state_dict(), rtol=0, atol=0)
