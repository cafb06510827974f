"""`te.nn.EmbeddingBag(None, ..)` and `te.nn.Embedding(None, ..)`: bitwise the static modules of the same rows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.nn.test_dynamic_tables import IDS

DIM = 6


def pair(kind: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """A module of any ids; and one with a row for each of `IDS` and the same initial values."""
    dynamic = kind(None, DIM, capacity=200, optimizer=optimizer, **options)
    if options.get("padding_idx") is not None:
        options["padding_idx"] = IDS.tolist().index(options["padding_idx"])
    static = kind(len(IDS), DIM, optimizer=optimizer, **options)
    static.weight.data.copy_(dynamic.table.lookup(IDS))
    return dynamic, static


def step(module: Any, *args: Any) -> Tensor:
    out: Tensor = module(*args)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach()


def compare(dynamic: Any, static: Any, padding: int | None = None) -> None:
    known = torch.isin(IDS, dynamic.table.ids())
    assert 0 < int(known.sum()) < len(IDS) + (padding is None)
    assert padding not in dynamic.table.ids().tolist()
    assert torch.equal(dynamic.table.lookup(IDS)[known], static.weight[known])
    reference = static.optimizer_states()
    for name, state in dynamic.optimizer_states().items():
        assert torch.equal(state, reference[name] if name == "step" else reference[name][known]), name


def bags(form: str, seed: int) -> tuple[Tensor, ...]:
    """Numbers of ids in `IDS`, and offsets where the form has some."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(len(IDS), (24,), generator=generator)
    if form == "2-D":
        return (flat.view(6, 4),)
    offsets = torch.tensor([0, 3, 3, 10, 19, 24][: 6 if form == "last" else 5])
    return flat, offsets if form != "int32" else offsets.int()


@pytest.mark.parametrize("padding", [None, -1, 2**31])
@pytest.mark.parametrize(("form", "mode"), [("2-D", "mean"), ("offsets", "sum"), ("last", "mean"), ("int32", "sum")])
def test_bags_are_bitwise_those_of_a_static_module(form, mode, padding):
    options = {"mode": mode, "include_last_offset": form == "last", "padding_idx": padding}
    dynamic, static = pair(te.nn.EmbeddingBag, te.optim.Adam(lr=0.1), **options)
    for seed in range(3):
        numbers, *offsets = bags(form, seed)
        weights = torch.randn(numbers.shape) if mode == "sum" else None
        inputs = [*offsets, weights] if offsets else [None, weights]
        with torch.no_grad():
            torch.testing.assert_close(dynamic(IDS[numbers], *inputs), static(numbers, *inputs))
        actual, expected = step(dynamic, IDS[numbers], *inputs), step(static, numbers, *inputs)
        torch.testing.assert_close(actual, expected)
        if mode == "sum" or padding is None:  # with padding the static module divides sums, and this one scales rows
            compare(dynamic, static, padding)
    assert dynamic.weight.grad is None


def test_jagged_ids():
    dynamic, static = pair(te.nn.EmbeddingBag, te.optim.SGD(lr=0.1), mode="sum")
    numbers = torch.nested.nested_tensor([torch.tensor([1, 5, 1]), torch.tensor([7])], layout=torch.jagged)
    ids = torch.nested.nested_tensor_from_jagged(IDS[numbers.values()], numbers.offsets())
    assert torch.equal(step(dynamic, ids), step(static, numbers))
    compare(dynamic, static)


@pytest.mark.parametrize("padding", [None, -1])
@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (), (0, 3)])
def test_rows_are_bitwise_those_of_a_static_module(shape, padding):
    dynamic, static = pair(te.nn.Embedding, te.optim.RowWiseAdagrad(lr=0.1), padding_idx=padding)
    known = [number for number, id in enumerate(IDS.tolist()) if id != padding]
    if padding is not None:
        static.weight.data[IDS.tolist().index(padding)] = 0
    for seed in range(3):
        numbers = torch.randint(len(IDS), shape, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(step(dynamic, IDS[numbers]), step(static, numbers))
        assert torch.equal(dynamic.table.lookup(IDS)[known], static.weight[known])
    assert padding not in dynamic.table.ids().tolist()
    assert bool(dynamic.table.num_rows) == (0 not in shape)


def test_the_index_may_move_to_shared_memory():
    """As it does when a process sends the module to another one."""
    module: Any = te.nn.EmbeddingBag(None, DIM, capacity=99, optimizer=te.optim.SGD(lr=0.1))
    step(module, IDS[:12].view(3, 4))
    twin = copy.deepcopy(module)
    for tensor in module.table.index.tensors:
        tensor.share_memory_()
    for other in (module, twin):
        step(other, IDS[:12].view(3, 4) + 1)
    assert_same_bits(module.state_dict(), twin.state_dict())


@pytest.mark.parametrize("kind", [te.nn.EmbeddingBag, te.nn.Embedding])
def test_a_resumed_module_is_the_same_to_the_bit(kind):
    """By a `state_dict`, a copy and a pickle; after other steps of Adam than the table has had, too."""
    ids = IDS[:12].view(3, 4)

    def make() -> nn.Sequential:
        return nn.Sequential(kind(None, DIM, capacity=99, optimizer=te.optim.Adam(lr=0.1)))

    def again(model: nn.Sequential) -> dict[str, Tensor]:
        step(model, ids + 1)
        return {key: value.clone() for key, value in model.state_dict().items()}

    first = make()
    with first[0].accumulate():
        step(first, ids)
        step(first, ids[:2])
    saved = first.state_dict()
    states = ["ids", "weight", "exp_avg", "exp_avg_sq", "step", "count", "clock", "seed", "updates"]
    assert [*saved] == [f"0.{name}" for name in states]
    assert (int(saved["0.clock"]), int(saved["0.updates"])) == (2, 1)
    loaded = make()
    loaded.load_state_dict(saved)
    copies = [loaded, copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    expected = again(first)
    for other in copies:
        assert [*other.parameters()] == [other[0].table.weight]
        assert_same_bits(again(other), expected)
    first.load_state_dict(saved)
    assert_same_bits(again(first), expected)
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.updates"'):
        make().load_state_dict({key: value for key, value in saved.items() if key != "0.updates"})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0.momentum"'):
        make().load_state_dict({**saved, "0.momentum": torch.zeros(3)})


def test_what_surrounds_a_module():
    module = te.nn.EmbeddingBag(None, DIM, mode="sum", capacity=30, optimizer=te.optim.SGD(lr=0.5))
    assert isinstance(module, te.nn.EmbeddingBag)
    assert repr(module).startswith("DynamicEmbeddingBag(None, 6, mode='sum', optimizer=SGD(lr=0.5")
    initial = module.table.lookup([3])
    module.set_learning_rate(0.25)
    assert (float(module.learning_rate), module.fused_optimizer.param_groups[0]["lr"]) == (0.25, 0.25)
    torch.compile(module, backend="aot_eager")(torch.tensor([[3, 3]])).sum().backward()
    assert torch.equal(module.table.lookup([3]), initial - 0.5)
    assert module.skipped_rows() == 0
    assert te.fuse(nn.Sequential(module)).left_alone == {"0": "it is a DynamicEmbeddingBag, a subclass"}
    module.bfloat16()
    assert module.weight.dtype == module.table.weight.dtype == torch.bfloat16
    assert torch.equal(module.table.lookup([4, 3])[1:], module.table.lookup([3]))  # 4 has no row
    module.reset_parameters()
    assert module.table.num_rows == 0
    assert te.nn.Embedding(None, DIM, capacity=9, dtype=torch.float16, init_bound=0.5).weight.dtype == torch.float16


def test_without_an_optimizer_a_module_is_evaluated_only():
    module = te.nn.EmbeddingBag(None, DIM, mode="sum", capacity=30)
    module.table.insert([5], torch.ones(1, DIM))
    ids = torch.tensor([[5, 5], [5, 8]])
    with pytest.raises(ValueError, match="'EmbeddingBag' is dynamic, where only a fused optimizer can train it"):
        module(ids)
    with torch.no_grad():
        expected = torch.stack([torch.full((DIM,), 2.0), 1 + module.table.lookup([8])[0]])
        assert torch.equal(module(ids), expected)
    assert not module.requires_grad_(False)(ids).requires_grad
    assert module.optimizer_states() == {}
    with pytest.raises(AttributeError, match="learning_rate"):
        _ = module.learning_rate


class Mine(te.nn.Embedding):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (te.nn.EmbeddingBag, {}, ValueError, "either capacity"),
        (te.nn.EmbeddingBag, {"max_norm": 1.0}, ValueError, "max_norm conflicts with num_embeddings=None"),
        (te.nn.EmbeddingBag, {"mode": "max"}, ValueError, "mode='max' conflicts"),
        (te.nn.EmbeddingBag, {"mode": "none"}, ValueError, "mode='none' conflicts"),
        (te.nn.EmbeddingBag, {"sparse": True, "scale_grad_by_freq": True}, ValueError, "scale_grad_by_freq, sparse"),
        (te.nn.Embedding, {"_weight": torch.zeros(3, DIM)}, ValueError, "_weight conflicts"),
        (te.nn.Embedding, {"_freeze": True}, ValueError, "_freeze conflicts"),
        (te.nn.Embedding, {"sizes": 3}, TypeError, "unexpected keyword argument 'sizes'"),
        (Mine, {}, TypeError, "Mine is a subclass"),
    ],
)
def test_options_that_do_not_go_with_any_ids(kind, options, error, message):
    capacity = {} if "either capacity" in message else {"capacity": 9}
    with pytest.raises(error, match=message):
        kind(None, DIM, **options, **capacity)


@pytest.mark.parametrize("option", [{"capacity": 9}, {"init_bound": 0.5}, {"eviction": te.EvictionConfig(protect=2)}])
def test_options_that_go_with_any_ids_alone(option):
    with pytest.raises(ValueError, match=r"num_embeddings=(None|9)"):
        te.nn.Embedding(9, DIM, **option)


def test_inputs_that_are_refused_change_nothing():
    bag = te.nn.EmbeddingBag(None, DIM, capacity=9, optimizer=te.optim.SGD())
    row = te.nn.Embedding(None, DIM, capacity=9, optimizer=te.optim.SGD())
    ids = torch.tensor([1, 2])
    for error, message, call in (
        (ValueError, "expected int32 or int64", lambda: bag([[1]])),
        (ValueError, "expected int32 or int64", lambda: bag(ids)),
        (ValueError, "got .*float32", lambda: bag(torch.ones(1, 2))),
        (ValueError, "with mode='sum'", lambda: bag(ids[None], None, torch.ones(1, 2))),
        (ValueError, "ascend", lambda: bag(ids, torch.tensor([0, 2, 1]))),
        (ValueError, "start with 0", lambda: bag(ids, torch.tensor([1, 2]))),
        (ValueError, "10 new ids", lambda: bag(torch.arange(10)[None])),
        (TypeError, "dense tensor", lambda: row([1])),
        (TypeError, "int32 or int64", lambda: row(torch.ones(1))),
    ):
        with pytest.raises(error, match=message):
            call()
    assert bag.table.num_rows == row.table.num_rows == 0
