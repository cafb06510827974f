"""`module.fused_optimizer` as schedulers and frameworks use it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import tritonemb as te
from tests.helpers import assert_same_bits, configurations, contents, make_collection, random_steps, train

pytestmark = pytest.mark.public


def make(optimizer: te.optim.Optimizer | None = None) -> te.nn.EmbeddingBagCollection:
    return make_collection([te.TableConfig("a", 9, 4), te.TableConfig("b", 5, 3)], optimizer or te.optim.SGD(lr=0.5))


def test_it_is_one_optimizer_and_its_step_does_nothing():
    collection = make()
    optimizer = collection.fused_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert collection.fused_optimizer is optimizer
    assert make(te.optim.SGD(lr=0.1)).fused_optimizer.param_groups[0]["lr"] == 0.1
    assert [list(group["params"]) for group in optimizer.param_groups] == [[t.weight for t in collection.tables]]
    train(collection, random_steps(collection, 1))
    initial = contents(collection)
    optimizer.step()
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    optimizer.zero_grad()
    assert_same_bits(contents(collection), initial)


def make_bag() -> te.nn.EmbeddingBag:
    return te.nn.EmbeddingBag(9, 4, mode="sum", optimizer=te.optim.SGD(lr=0.5))


modules = pytest.mark.parametrize("make", [make, make_bag], ids=["collection", "bag"])


def step_size(module: torch.nn.Module) -> float:
    """Return the change of a weight by the next backward, with SGD and a gradient of 1."""
    weight = next(module.parameters())
    initial = weight.detach()[0].clone()
    is_bag = isinstance(module, te.nn.EmbeddingBag)
    batch = torch.tensor([[0]]) if is_bag else te.KeyedJaggedTensor.from_lists({"a": [[0]], "b": [[0]]})
    module(batch).sum().backward()
    return float((initial - weight[0]).mean())


# The weights are of size 1, so a difference of weights has an error of about 1e-7.
near = {"rel": 1e-6, "abs": 3e-7}
SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.7, total_steps=8, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[3]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


@modules
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_the_rate_of_the_next_backward(name, make):
    collection = make()
    fused = collection.fused_optimizer
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (fused, plain)]
    rates = []
    for _ in range(7):
        expected = plain.param_groups[0]["lr"]
        rates.append(expected)
        assert fused.param_groups[0]["lr"] == pytest.approx(expected)
        assert float(collection.learning_rate) == pytest.approx(expected)
        assert step_size(collection) == pytest.approx(expected, **near)
        for optimizer, scheduler in zip((fused, plain), schedulers, strict=True):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(set(rates)) > 2


@modules
def test_a_rate_may_be_set_from_either_side(make):
    module, other = make(), make()
    module.set_learning_rate(0.3)  # which float32 rounds
    assert module.fused_optimizer.param_groups[0]["lr"] == 0.3
    assert float(module.learning_rate) == pytest.approx(0.3)
    module.set_learning_rate(0.125)
    assert module.fused_optimizer.param_groups[0]["lr"] == 0.125
    assert step_size(module) == pytest.approx(0.125, **near)
    module.fused_optimizer.param_groups[0]["lr"] = 0.75
    assert step_size(module) == pytest.approx(0.75, **near)
    module.fused_optimizer.param_groups[0].update(lr=torch.tensor(0.25))
    assert step_size(module) == pytest.approx(0.25, **near)
    other.fused_optimizer.load_state_dict(module.fused_optimizer.state_dict())
    assert float(other.learning_rate) == 0.25


@modules
@pytest.mark.parametrize("lr", [-0.1, float("inf"), float("nan")])
def test_a_bad_rate_is_refused_and_nothing_changes(lr, make):
    module = make()
    with pytest.raises(ValueError, match="learning rate must lie in"):
        module.set_learning_rate(lr)
    with pytest.raises(ValueError, match="learning rate must lie in"):
        module.fused_optimizer.param_groups[0]["lr"] = lr
    assert module.fused_optimizer.param_groups[0]["lr"] == 0.5
    assert float(module.learning_rate) == 0.5


@pytest.mark.parametrize("module", [make_collection([te.TableConfig("a", 9, 4)], None), te.nn.EmbeddingBag(3, 2)])
def test_without_a_fused_optimizer_there_is_no_rate(module):
    assert module.fused_optimizer is None
    with pytest.raises(ValueError, match="no fused optimizer"):
        module.set_learning_rate(0.1)


@pytest.mark.parametrize("optimizer", configurations(), ids=lambda optimizer: optimizer.name)
def test_its_state_dict_restores_states_and_rate(optimizer):
    collection, other = make(optimizer), make(optimizer)
    steps = random_steps(collection, 6)
    train(collection, steps[:3])
    collection.set_learning_rate(0.02)
    saved = copy.deepcopy(collection.fused_optimizer.state_dict())
    # torch.optim's rule: the optimizer's state dict has states, the model's has weights.
    with torch.no_grad():
        for actual, expected in zip(collection.tables, other.tables, strict=True):
            expected.weight.copy_(actual.weight)
    other.fused_optimizer.load_state_dict(saved)
    assert float(other.learning_rate) == float(collection.learning_rate)
    train(collection, steps[3:])
    train(other, steps[3:])
    assert_same_bits(contents(other), contents(collection), optimizer.name)


def test_states_of_dynamic_tables_are_in_the_state_dict_of_the_model_alone():
    """Ids may get other rows when that is loaded, so a state of row 0 would become that of another id."""
    collection, other = (
        te.nn.EmbeddingBagCollection([te.TableConfig("a", None, 4, capacity=20)], te.optim.Adagrad(lr=0.5))
        for _ in range(2)
    )
    for ids in ([50, 7], [99, 1], [3, 50]):
        collection(te.KeyedJaggedTensor.from_lists({"a": [[id] for id in ids]})).square().sum().backward()
    collection.set_learning_rate(0.02)
    saved = collection.state_dict(), copy.deepcopy(collection.fused_optimizer.state_dict())
    assert list(saved[1]["state"][0]) == ["step"]
    other.load_state_dict(saved[0])
    other.fused_optimizer.load_state_dict(saved[1])
    assert float(other.learning_rate) == float(collection.learning_rate)
    assert_same_bits(other.state_dict(), saved[0])


def test_a_state_dict_that_does_not_fit_changes_nothing():
    collection = make(te.optim.Adam())
    train(collection, random_steps(collection, 1))
    saved = copy.deepcopy(collection.fused_optimizer.state_dict())
    initial = contents(collection)
    saved["state"][0]["exp_avg"] += 1
    saved["state"][1]["exp_avg"] = torch.zeros(5, 2)
    with pytest.raises(ValueError, match=r"table 'b': state 'exp_avg' must have shape \(5, 3\), got \(5, 2\)"):
        collection.fused_optimizer.load_state_dict(saved)
    del saved["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match=r"table 'b': state 'exp_avg' .* got nothing"):
        collection.fused_optimizer.load_state_dict(saved)
    saved["state"][1] = copy.deepcopy(collection.fused_optimizer.state_dict()["state"][1])
    for lr in (-1.0, torch.inf):
        saved["param_groups"][0]["lr"] = lr
        with pytest.raises(ValueError, match="learning rate must lie in"):
            collection.fused_optimizer.load_state_dict(saved)
    saved["param_groups"][0] |= {"lr": 0.5, "params": [0, 1, 2]}
    with pytest.raises(ValueError, match=r"one parameter group of 2 tables, got groups of \[3\]"):
        collection.fused_optimizer.load_state_dict(saved)
    saved["param_groups"] = [{**saved["param_groups"][0], "params": [index]} for index in range(2)]
    with pytest.raises(ValueError, match=r"got groups of \[1, 1\]"):
        collection.fused_optimizer.load_state_dict(saved)
    assert_same_bits(contents(collection), initial)


def test_it_stays_true_when_the_collection_is_moved():
    """`Module.to` may replace tensors; the optimizer must show the new ones."""
    collection = make(te.optim.Adam())
    optimizer = collection.fused_optimizer
    collection.to(torch.bfloat16)
    train(collection, random_steps(collection, 2))
    assert all(a is b.weight for a, b in zip(optimizer.param_groups[0]["params"], collection.tables, strict=True))
    for index, table in enumerate(collection.tables):
        state = collection.fused_optimizer.state_dict()["state"][index]
        assert torch.equal(state["exp_avg"], table.exp_avg)
        assert state["exp_avg"].any()
        assert int(state["step"]) == 2


@pytest.mark.parametrize("whole_model", [False, True])
def test_hooks_and_profilers_see_its_steps(whole_model):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 1))
    optimizer = te.optim.fused(model, te.optim.SGD()) if whole_model else make().fused_optimizer
    parts = [te.tables.optimizer.FusedOptimizer, torch.optim.SGD] if whole_model else []
    seen = []
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda item, *_: seen.append(type(item))),
    ]
    for _ in range(2):
        optimizer.step()
        assert seen == ["before", *parts, type(optimizer)]
        seen.clear()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    assert not seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert f"Optimizer.step#{type(optimizer).__name__}.step" in {event.key for event in profile.key_averages()}
