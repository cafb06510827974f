"""`te.fuse`, `te.unfuse` and `te.optim.fused`: an existing model trains as it did, by fused updates."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import tritonemb as te
from tests.formulas import custom
from tests.helpers import assert_same_bits, fewer

pytestmark = pytest.mark.public

# Losses and weights are of size 1, sums of at most 40 terms: a few units in the last place of float32.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Towers(nn.Module):
    """Bags and rows, a table that two modules share, and a module that is called twice."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        shapes = {"genre": (7, 4, "mean"), "tags": (11, 3, "sum")}
        bags = {key: nn.EmbeddingBag(rows, dim, mode=mode, sparse=sparse) for key, (rows, dim, mode) in shapes.items()}
        self.bags = nn.ModuleDict(bags)
        self.item = nn.Embedding(13, 4, padding_idx=0, sparse=sparse)
        self.candidate = nn.EmbeddingBag(13, 4, mode="sum", padding_idx=0, sparse=sparse)
        self.candidate.weight = self.item.weight
        self.top = nn.Linear(4 + 3 + 4 + 4 + 4, 1)

    def forward(self, ids: Tensor, history: Tensor) -> Tensor:
        offsets = torch.arange(0, ids.numel(), 5)
        parts = [
            self.bags["genre"](ids.flatten() % 7, offsets),
            self.bags["tags"](ids % 11),
            self.item(history).mean(1),
            self.item(ids[:, 0]),
            self.candidate(ids.flatten(), offsets, torch.linspace(0.5, 1.5, ids.numel())),
        ]
        return self.top(torch.cat(parts, 1)).squeeze(1)


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        ids, history = (torch.randint(13, (6, size), generator=generator) for size in (5, 3))
        result.append((ids, history, torch.randn(6, generator=generator)))
    return result


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps, schedules=()) -> list[float]:
    losses = []
    for ids, history, target in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(ids, history) - target).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(float(loss.detach()))
    return losses


def pair() -> tuple[Towers, Towers]:
    torch.manual_seed(0)
    model = Towers()
    return model, copy.deepcopy(model)


SPECS = {
    "sgd": (te.optim.SGD(lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01)),
    "adagrad": (te.optim.Adagrad(lr=0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10)),
}


class TestTraining:
    @pytest.mark.parametrize("name", SPECS)
    def test_a_fused_model_trains_as_pytorch_does(self, name):
        """Rows that are not in a batch have no gradient, and neither SGD nor Adagrad moves them."""
        spec, plain = SPECS[name]
        model, reference = pair()
        optimizer = te.optim.fused(model, spec)
        steps = batches(8)
        losses = train(model, [optimizer], steps)
        expected = train(reference, [plain(reference.parameters())], steps)
        torch.testing.assert_close(losses, expected, **CLOSE)
        torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), **CLOSE)
        assert model.item.weight.grad is None
        assert model.item.weight is model.candidate.weight

    def test_adam_is_sparse_adam(self):
        model, reference = pair()
        for module in reference.modules():
            if hasattr(module, "sparse"):
                module.sparse = True
        optimizer = te.optim.fused(model, te.optim.Adam(lr=0.05))
        tables = [p for name, p in reference.named_parameters() if not name.startswith("top")]
        both = [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.Adam(reference.top.parameters(), lr=0.05)]
        steps = batches(6)
        # Its steps are about ±lr whatever a gradient's size, so where one is near zero its rounding counts in full.
        losses = train(reference, both, steps)
        torch.testing.assert_close(train(model, [optimizer], steps), losses, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("update", ["backward", "step"])
    def test_a_custom_optimizer_trains_as_the_built_in_one(self, update):
        """Tables count their own steps: the one that a pass leaves out stays behind."""
        model, reference = pair()
        optimizers = [
            te.optim.fused(item, spec, dense=lambda remainder: torch.optim.SGD(remainder, lr=0.1), update=update)
            for item, spec in ((model, custom("adagrad", lr=0.1)), (reference, te.optim.Adagrad(lr=0.1)))
        ]
        for entry, optimizer in zip((model, reference), optimizers, strict=True):
            train(entry, [optimizer], batches(3))
            optimizer.zero_grad()
            entry.item(torch.tensor([3, 5])).sum().backward()
            optimizer.step()
            train(entry, [optimizer], batches(2, seed=1))
        assert {int(item.step) for item in (model.item, model.bags["tags"])} == {5, 6}
        assert_same_bits(dict(model.state_dict()), dict(reference.state_dict()))
        file = io.BytesIO()
        torch.save(optimizers[0].state_dict(), file)  # no function in it
        file.seek(0)
        optimizers[0].load_state_dict(torch.load(file))

    def test_without_an_optimizer_gradients_are_ordinary(self):
        model, reference = pair()
        report = te.fuse(model)
        assert report.optimizer is None
        ids, history, target = batches(1)[0]
        for item in (model, reference):
            (item(ids, history) - target).square().mean().backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, **CLOSE)

    def test_a_table_that_is_looked_up_twice_is_updated_once(self):
        weight = torch.randn(5, 3)
        model = nn.ModuleList([nn.Embedding(5, 3, _weight=nn.Parameter(weight.clone()))])
        report = te.fuse(model, te.optim.Adagrad(lr=0.1))
        module = model[0]
        (module(torch.tensor([1, 2])).sum() + 2 * module(torch.tensor([[2]])).sum()).backward()
        assert int(module.step) == 1
        gradient = torch.tensor([0.0, 1.0, 3.0, 0.0, 0.0]).unsqueeze(1).expand(5, 3)
        torch.testing.assert_close(module.sum, gradient.square())
        assert report.optimizer.state[module.weight]["sum"] is module.sum

    def test_one_update_for_a_backward(self, monkeypatch):
        from tritonemb import ops

        calls, row_update_ = [], ops.row_update_
        monkeypatch.setattr(ops, "row_update_", lambda *args: calls.append(args) or row_update_(*args))
        model = nn.ModuleList([nn.EmbeddingBag(9, dim, mode="sum") for dim in (4, 4, 8)])
        te.fuse(model, te.optim.RowWiseAdagrad())
        ids = torch.randint(9, (6, 2))
        torch.cat([module(ids) for module in model], 1).sum().backward()
        assert len(calls) == 1
        assert torch.equal(calls[0][1].groups, ids.reshape(-1).repeat(3)), "which groups the ids of all tables together"

    def test_only_what_a_backward_reaches_is_updated(self):
        model = nn.ModuleList([nn.Embedding(5, 3), nn.Embedding(5, 3)])
        te.fuse(model, te.optim.SGD(lr=1.0))
        first, second = (module(torch.tensor([1])) for module in model)
        first.sum().backward()
        assert [int(module.step) for module in model] == [1, 0]
        second.sum().backward()
        assert [int(module.step) for module in model] == [1, 1]

    def test_a_backward_that_fails_updates_nothing_and_leaves_nothing_behind(self):
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise ZeroDivisionError("here")

        model = nn.ModuleList([nn.Embedding(5, 3), nn.Embedding(5, 3)])
        te.fuse(model, te.optim.SGD(lr=1.0))
        initial = copy.deepcopy(model.state_dict())
        one, two = model[0](torch.tensor([1])), model[1](torch.tensor([1]))
        with pytest.raises(ZeroDivisionError):
            (Fails.apply(one).sum() * 1.0 + two.sum()).backward()
        assert_same_bits(model.state_dict(), initial)
        assert not model[0]._optimized._open_passes
        two = model[1](torch.tensor([2])).sum()
        two.backward()
        assert torch.equal(initial["1.weight"][1], model[1].weight[1])
        assert [int(module.step) for module in model] == [0, 1]

    def test_accumulating_is_one_step_on_all_samples(self):
        model = nn.ModuleDict({"bag": nn.EmbeddingBag(13, 3, mode="sum"), "item": nn.Embedding(13, 4)})
        other, (ids, *_) = copy.deepcopy(model), batches(1)[0]
        optimizer, _ = (te.optim.fused(item, te.optim.Adagrad(lr=0.1)) for item in (model, other))

        def loss(entry, part):
            return entry["bag"](ids[part]).sum() + entry["item"](ids[part]).square().sum()

        with optimizer.accumulate():
            for part in (slice(0, 4), slice(4, 6)):
                loss(model, part).backward()
            assert int(model["item"].step) == 0
        loss(other, slice(6)).backward()
        assert int(model["item"].step) == int(other["item"].step) == 1
        assert_same_bits(model.state_dict(), other.state_dict())

    def test_16_bit_tables_have_streams_of_their_own(self):
        model = nn.ModuleList([nn.Embedding(64, 8, dtype=torch.bfloat16) for _ in range(2)])
        model[1].weight.data.copy_(model[0].weight.data)
        te.fuse(model, te.optim.SGD(lr=1e-3))
        ids = torch.arange(64)
        (model[0](ids).float().sum() + model[1](ids).float().sum()).backward()
        assert not torch.equal(model[0].weight, model[1].weight)


class TestConversion:
    def test_paths_parameters_hooks_and_state_dict_stay(self):
        model, plain = pair()
        weights = dict(model.named_parameters())
        seen = []
        model.item.register_forward_hook(lambda *_: seen.append(1))
        modules = dict(model.named_modules())
        report = te.fuse(model, te.optim.Adam())
        assert report.fused == ("bags.genre", "bags.tags", "item", "candidate")
        assert not report.left_alone
        assert all(model.get_submodule(path) is module for path, module in modules.items())
        assert all(model.get_parameter(name) is weight for name, weight in weights.items())
        assert list(model.state_dict()) == list(plain.state_dict())
        model(*batches(1)[0][:2])
        assert seen == [1, 1]
        assert isinstance(model.item, te.nn.Embedding)

    def test_unfusing_goes_back(self):
        model, plain = pair()
        te.fuse(model, te.optim.Adam())
        te.unfuse(model)
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
        assert [sorted(m.__dict__) for m in model.modules()] == [sorted(m.__dict__) for m in plain.modules()]
        assert [sorted(m._buffers) for m in model.modules()] == [sorted(m._buffers) for m in plain.modules()]
        optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, plain)]
        assert train(model, optimizers[:1], batches(2)) == train(plain, optimizers[1:], batches(2))
        fused = nn.ModuleList([te.nn.Embedding(4, 2)])
        te.fuse(fused, te.optim.SGD())
        te.unfuse(fused)
        assert type(fused[0]) is te.nn.Embedding
        assert fused[0].optimizer is None

    def test_a_module_that_was_made_with_an_optimizer_loses_it(self):
        model = nn.ModuleDict({
            "bag": te.nn.EmbeddingBag(9, 2, mode="sum", optimizer=te.optim.Adam()),
            "any": te.nn.Embedding(None, 2, capacity=9, optimizer=te.optim.SGD()),
        })  # fmt: skip
        te.unfuse(model)
        assert model["bag"].optimizer is None
        assert type(model["bag"]) is te.nn.EmbeddingBag
        assert [*model["bag"].state_dict()] == ["weight"]
        assert model["any"].optimizer == te.optim.SGD()
        model["bag"](torch.tensor([[1, 2]])).sum().backward()
        assert model["bag"].weight.grad[:, 0].nonzero().flatten().tolist() == [1, 2]
        assert te.fuse(model, te.optim.SGD()).fused == ("bag",)

    @pytest.mark.parametrize("kind", ["any", "tables"])
    def test_what_cannot_lose_its_optimizer_says_so(self, kind):
        tables = te.nn.EmbeddingBagCollection([te.TableConfig("t", 9, 2)], te.optim.SGD())
        model = {"any": te.nn.EmbeddingBag(None, 2, capacity=9, optimizer=te.optim.SGD()), "tables": tables}[kind]
        with pytest.raises(ValueError, match="cannot remove the optimizer of collections and dynamic tables"):
            te.unfuse(nn.ModuleDict({"inner": model, "top": nn.Linear(2, 1)}))
        assert model.optimizer is not None
        te.unfuse(nn.Linear(2, 1))

    def test_unfusing_while_gradients_wait_is_refused(self):
        model, _ = pair()
        optimizer = te.optim.fused(model, te.optim.SGD())
        with optimizer.accumulate(), pytest.raises(RuntimeError, match="call it after the block"):
            te.unfuse(model)
        assert isinstance(model.item, te.nn.Embedding)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_train_apart(self, copied):
        model, _ = pair()
        te.fuse(model, te.optim.Adagrad(lr=0.1))
        other = copied(model)
        assert other.item.weight is other.candidate.weight
        initial = copy.deepcopy(model.state_dict())
        ids, history, _ = batches(1)[0]
        other(ids, history).sum().backward()
        assert_same_bits(model.state_dict(), initial)
        assert int(other.item.step) == 1
        assert int(model.item.step) == 0
        assert other.candidate.optimizer_states()["sum"] is other.item.sum


class Loud(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def odd_modules() -> nn.ModuleDict:
    computed = nn.Embedding(4, 2)
    parametrize.register_parametrization(computed, "weight", Doubled())
    patched = nn.Embedding(4, 2)
    patched.forward = lambda input: input
    frozen = nn.Embedding.from_pretrained(torch.zeros(4, 2))
    head = nn.Linear(2, 4)
    tied, also = nn.Embedding(4, 2), nn.EmbeddingBag(4, 2, mode="sum")
    tied.weight = also.weight = head.weight
    memory = torch.randn(6, 2)
    one, other = nn.Embedding(4, 2, _weight=memory[:4]), nn.Embedding(4, 2, _weight=memory[2:])
    return nn.ModuleDict(
        {
            "subclass": Loud(4, 2), "computed": computed, "patched": patched, "frozen": frozen, "head": head,
            "tied": tied, "also": also, "one": one, "other": other, "max": nn.EmbeddingBag(4, 2, mode="max"),
            "frequency": nn.Embedding(4, 2, scale_grad_by_freq=True), "wide": nn.Embedding(4, 2, dtype=torch.float64),
            "own": te.nn.Embedding(4, 2, optimizer=te.optim.SGD()), "good": nn.Embedding(4, 2, max_norm=1.0),
        }
    )  # fmt: skip


class TestLeftAlone:
    def test_each_is_named_with_its_reason(self):
        model = odd_modules()
        kinds = {path: type(module) for path, module in model.named_modules()}
        report = te.fuse(model, te.optim.SGD())
        reasons = {
            "subclass": "a Loud", "computed": "Parametrized", "patched": "forward was replaced", "frozen": "frozen",
            "tied": r"head\.weight", "also": r"head\.weight", "one": r"memory with other\.weight",
            "other": r"memory with one\.weight", "max": "max", "frequency": "scale_grad_by_freq",
            "wide": "float64", "own": "already",
        }  # fmt: skip
        assert report.fused == ("good",)
        assert set(report.left_alone) == set(reasons)
        for path, reason in reasons.items():
            assert re.search(reason, report.left_alone[path]), report.left_alone[path]
            assert type(model[path]) is kinds[path]
            assert f"{path}: {report.left_alone[path]}" in str(report)

    def test_without_an_optimizer_only_what_has_other_code(self):
        model = odd_modules()
        report = te.fuse(model)
        assert set(report.left_alone) == {"subclass", "computed", "patched", "own"}
        model["tied"](torch.tensor([1, 1])).sum().backward()
        assert model["head"].weight.grad[1].tolist() == [2.0, 2.0]

    def test_fusing_twice_changes_nothing(self):
        model, _ = pair()
        te.fuse(model, te.optim.SGD())
        again = te.fuse(model, te.optim.Adam())
        assert again.fused == ()
        assert set(again.left_alone.values()) == {"it is fused already"}
        assert model.item.optimizer == te.optim.SGD()

    def test_wrong_arguments(self):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
            te.fuse([nn.Embedding(3, 2)])
        model = nn.Embedding(3, 2)
        with pytest.raises(TypeError, match=r"tritonemb\.optim"):
            te.fuse(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert type(model) is nn.Embedding
        with pytest.raises(ValueError, match="frozen"):
            te.optim.fused(nn.Embedding.from_pretrained(torch.zeros(3, 2)), te.optim.SGD())


class TestModelOptimizer:
    def test_it_is_an_optimizer_with_the_groups_of_both(self):
        model, _ = pair()
        optimizer = te.optim.fused(model, te.optim.RowWiseAdagrad(lr=0.1))
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(optimizer.dense, torch.optim.Adagrad)
        dense, tables = optimizer.param_groups
        assert {id(p) for p in dense["params"]} == {id(p) for p in model.top.parameters()}
        assert {id(p) for p in tables["params"]} == {id(p) for n, p in model.named_parameters() if "top" not in n}

    def test_schedules_set_both_learning_rates(self):
        model, reference = pair()
        optimizer = te.optim.fused(model, te.optim.SGD(lr=0.1))
        other = torch.optim.SGD(reference.parameters(), lr=0.1)
        schedules = [torch.optim.lr_scheduler.StepLR(item, 2, 0.5) for item in (optimizer, other)]
        steps = batches(6)
        losses = train(model, [optimizer], steps, schedules[:1])
        torch.testing.assert_close(losses, train(reference, [other], steps, schedules[1:]), **CLOSE)
        assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.0125)] * 2
        assert float(model.item.learning_rate) == pytest.approx(0.0125)

    @pytest.mark.parametrize("spec", [te.optim.Adam(lr=0.05), te.optim.RowWiseAdagrad(lr=0.1)])
    def test_state_goes_on_where_it_was(self, spec):
        model, _ = pair()
        optimizer = te.optim.fused(model, spec)
        train(model, [optimizer], batches(3))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        expected = train(model, [optimizer], batches(3, seed=1))
        file.seek(0)
        weights, states = torch.load(file, weights_only=True)
        other = Towers()
        resumed = te.optim.fused(other, spec)
        other.load_state_dict(weights)
        resumed.load_state_dict(states)
        assert train(other, [resumed], batches(3, seed=1)) == expected
        assert_same_bits(other.state_dict(), model.state_dict())

    def test_states_that_do_not_fit_change_nothing(self):
        model, _ = pair()
        optimizer = te.optim.fused(model, te.optim.Adagrad(lr=0.1))
        train(model, [optimizer], batches(2))
        good = copy.deepcopy(optimizer.state_dict())
        bad = copy.deepcopy(good)
        bad["state"][len(optimizer.dense.param_groups[0]["params"])]["sum"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"'bags\.genre': state 'sum'"):
            optimizer.load_state_dict(bad)
        del bad["param_groups"][0]["params"][0]
        with pytest.raises(ValueError, match="parameters"):
            optimizer.load_state_dict(bad)
        torch.testing.assert_close(optimizer.state_dict()["state"], good["state"], rtol=0, atol=0)
        assert optimizer.state_dict()["param_groups"] == good["param_groups"]

    def test_the_dense_optimizer_can_be_chosen(self):
        model, _ = pair()
        optimizer = te.optim.fused(model, te.optim.FTRL(lr=0.1), dense=lambda p: torch.optim.AdamW(p, lr=0.01))
        assert isinstance(optimizer.dense, torch.optim.AdamW)
        initial = model.top.weight.detach().clone()
        train(model, [optimizer], batches(1))
        assert not torch.equal(model.top.weight, initial)

    @pytest.mark.parametrize(
        ("spec", "options", "message"),
        [
            *((spec, {}, "dense=") for spec in (te.optim.FTRL(), te.optim.LAMB(), te.optim.SGD(max_norm=1.0))),
            (te.optim.SGD(), {"dense": lambda p: torch.optim.Adam(p, lr=-1)}, "learning rate"),
            (te.optim.SGD(), {"dense": torch.optim.LBFGS}, 'use update="step"'),
            (te.optim.SGD(), {"update": "never"}, "update must be one of"),
        ],
    )
    def test_what_is_refused_leaves_the_model_as_it_was(self, spec, options, message):
        model, _ = pair()
        with pytest.raises(ValueError, match=message):
            te.optim.fused(model, spec, **options)
        assert type(model.item) is nn.Embedding

    @pytest.mark.parametrize("update", ["backward", "step"])
    def test_a_closure_is_evaluated_once(self, update):
        model, reference = pair()
        ids, history, target = batches(1)[0]
        optimizer = te.optim.fused(model, te.optim.SGD(lr=0.1), update=update)
        other = torch.optim.SGD(reference.parameters(), lr=0.1)
        for item, by in ((model, optimizer), (reference, other)):

            def closure(item=item, by=by):
                by.zero_grad()
                loss = (item(ids, history) - target).square().mean()
                loss.backward()
                return loss

            assert by.step(closure).item() > 0
        torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), **CLOSE)

    def test_dense_parameters_can_be_added(self):
        model, _ = pair()
        optimizer = te.optim.fused(model, te.optim.SGD(lr=0.1))
        extra = nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        extra.sum().backward()
        optimizer.step()
        assert extra.tolist() == [0.5, 0.5]
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 3]


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_follows_its_learning_rate():
    """From its first call on: the rate is a tensor that the graph reads."""
    model = nn.Embedding(5, 3)
    optimizer = te.optim.fused(model, te.optim.SGD(lr=1.0))
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    for lr in (1.0, 0.25, 2.0):
        optimizer.param_groups[-1]["lr"] = lr
        initial = model.weight.detach().clone()
        forward(torch.tensor([1])).sum().backward()
        torch.testing.assert_close(initial[1] - model.weight[1], torch.full((3,), lr), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.usefixtures("dynamo")
@pytest.mark.few(1)
def test_accumulating_is_not_for_a_compiled_model(fullgraph):
    model = nn.Embedding(5, 3)
    optimizer = te.optim.fused(model, te.optim.SGD(lr=1.0))
    initial = model.weight.detach().clone()
    forward = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match="call the uncompiled model"), optimizer.accumulate():
        forward(torch.tensor([1])).sum().backward()
    assert torch.equal(model.weight, initial)
    forward(torch.tensor([1])).sum().backward()
    assert not torch.equal(model.weight, initial)


class TestByStep:
    def test_several_backward_passes_are_one_step(self):
        model, reference = pair()
        optimizer = te.optim.fused(model, te.optim.Adagrad(lr=0.1, eps=1e-10), update="step")
        other = torch.optim.Adagrad(reference.parameters(), lr=0.1)
        for first, second, left_out in zip(*[iter(batches(9))] * 3, strict=True):
            for item, by in ((model, optimizer), (reference, other)):
                for ids, history, target in (left_out,):  # a step that is never made
                    (item(ids, history) - target).square().mean().backward()
                by.zero_grad()
                for ids, history, target in (first, second):
                    (item(ids, history) - target).square().mean().backward()
                by.step()
            torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), **CLOSE)
        assert int(model.item.step) == 3

    @pytest.mark.more
    @pytest.mark.usefixtures("dynamo")
    def test_compiled_it_breaks_the_graph_and_waits_all_the_same(self):
        model = nn.Embedding(5, 3)
        optimizer = te.optim.fused(model, te.optim.SGD(lr=1.0), update="step")
        initial = model.weight.detach().clone()
        forward = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            forward(torch.tensor([1])).sum().backward()
        assert torch.equal(model.weight, initial)
        optimizer.step()
        torch.testing.assert_close(initial[1] - model.weight[1], torch.full((3,), 2.0), rtol=1e-6, atol=1e-6)
        optimizer.step()
        torch.testing.assert_close(initial[1] - model.weight[1], torch.full((3,), 2.0), rtol=1e-6, atol=1e-6)

    def test_the_view_of_one_module_leaves_the_other_tables_alone(self):
        model = nn.ModuleDict({name: nn.Embedding(5, 3) for name in ("a", "b")})
        report = te.fuse(model, te.optim.SGD(lr=1.0), by_step=True)
        initial = model["b"].weight.detach().clone()
        model["b"](torch.tensor([1])).sum().backward()
        model["a"].fused_optimizer.step()
        assert torch.equal(model["b"].weight, initial)
        model["a"].fused_optimizer.zero_grad()
        report.optimizer.step()
        torch.testing.assert_close(initial[1] - model["b"].weight[1], torch.ones(3), rtol=1e-6, atol=1e-6)

    def test_lbfgs_takes_tables_that_wait_and_no_blocks(self):
        optimizer = te.optim.fused(pair()[0], te.optim.SGD(), dense=torch.optim.LBFGS, update="step")
        with pytest.raises(RuntimeError, match=r"accumulated until step\(\)"), optimizer.accumulate():
            pass


def test_a_refused_gradient_changes_no_table_of_any_batch_size():
    model = nn.ModuleDict({"a": nn.Embedding(5, 3), "b": nn.EmbeddingBag(5, 3, mode="sum"), "c": nn.EmbeddingBag(5, 3)})
    te.fuse(model, te.optim.SGD(lr=1.0, on_nonfinite="raise"))
    initial = copy.deepcopy(model.state_dict())
    for bad, row in (("a", 1), ("b", 2), ("c", 4)):
        outputs = {
            "a": model["a"](torch.tensor([[1, 3]])),
            "b": model["b"](torch.tensor([3, 2]), torch.tensor([0, 0, 1])),
            "c": model["c"](torch.tensor([[4, 4]])),
        }
        with pytest.raises(ValueError, match=rf"'{bad}': the gradient of row {row}"):
            sum(out[-1:].sum() * (torch.inf if name == bad else 1.0) for name, out in outputs.items()).backward()
        assert_same_bits(model.state_dict(), initial)


@pytest.mark.parametrize("weights", [[torch.nan, 1.0], [1.0, -torch.inf], [3e38, 3e38]])
def test_a_refused_sum_of_weighted_gradients_changes_no_table_of_any_batch_size(weights):
    """Each gradient is finite; the table whose update comes first is the one that was looked up last."""
    model = nn.ModuleDict({"a": nn.Embedding(5, 3), "b": nn.EmbeddingBag(5, 3, mode="sum")})
    te.fuse(model, te.optim.SGD(lr=1.0, on_nonfinite="raise"))
    initial = copy.deepcopy(model.state_dict())
    pooled = model["b"](torch.tensor([[3, 3]]), per_sample_weights=torch.tensor([weights]))
    outputs = [pooled, model["a"](torch.tensor([1]))]
    with pytest.raises(ValueError, match="'b': the gradient of row 3"):
        torch.autograd.backward(outputs, [*map(torch.ones_like, outputs)])
    assert_same_bits(model.state_dict(), initial)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1.0), (torch.float16, 2.0**17)])
def test_a_gradient_that_is_clamped_is_not_refused_beside_another_batch_size(dtype, limit):
    model = nn.ModuleDict({"a": nn.Embedding(5, 3), "b": nn.EmbeddingBag(5, 3, mode="sum")}).to(dtype)
    te.fuse(model, te.optim.SGD(lr=1.0 / limit, max_gradient=limit, on_nonfinite="raise", stochastic_rounding=False))
    initial = model["a"].weight.detach().clone()
    (torch.inf * model["a"](torch.tensor([1])).sum() + model["b"](torch.tensor([[2, 3]])).sum()).backward()
    torch.testing.assert_close(model["a"].weight[1], initial[1] - 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_gradients_of_means_are_clamped_before_they_are_divided(padding_idx, compiled):
    """With padding as without, and beside sums of the same table."""
    torch._dynamo.reset()
    model = nn.ModuleList([nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding_idx) for mode in ("mean", "sum")])
    if not compiled:  # a compiled graph cannot merge different lookups of a table
        model[1].weight = model[0].weight
    te.fuse(model, te.optim.SGD(lr=1.0, max_gradient=0.5))
    initial, grad = model[0].weight.detach().clone(), torch.tensor([[8.0, -0.2, -3.0]])
    call = torch.compile(model[0], backend="tritonemb") if compiled else model[0]
    outputs = [call(torch.tensor([[1, 2, 3, 4]])), *([] if compiled else [model[1](torch.tensor([[4]]))])]
    torch.autograd.backward(outputs, [grad] * len(outputs))
    change = grad.clamp(-0.5, 0.5) * torch.tensor([0, 0.25, 0.25, 0.25, 0.25 if compiled else 1.25]).unsqueeze(1)
    torch.testing.assert_close(model[0].weight, initial - change)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_long_bags_have_exact_counts_beside_another_pooling(dtype):
    """70,000 is infinite in float16 and inexact in bfloat16; 259 is inexact there too: the row would be -7.97."""
    count = fewer(70_000, 259)
    model = nn.ModuleDict({"a": nn.EmbeddingBag(3, 2, mode="mean"), "b": nn.Embedding(3, 2)}).to(dtype)
    model["b"].weight = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    model["a"].weight = model["b"].weight
    te.fuse(model, te.optim.SGD(lr=1.0, stochastic_rounding=False))
    (8 * model["a"](torch.zeros(1, count, dtype=torch.int64)).sum() + model["b"](torch.tensor([2])).sum()).backward()
    assert model["a"].weight.tolist() == [[-8.0, -8.0], [0.0, 0.0], [-1.0, -1.0]]


class TestWhatWouldGoWrongUnseen:
    """Each of these trained something else than was asked for, or nothing, without a word."""

    @pytest.mark.parametrize("weighted", [False, True])
    def test_a_table_that_is_frozen_later_stays_as_it_is(self, weighted):
        model = nn.EmbeddingBag(5, 3, mode="sum")
        te.fuse(model, te.optim.SGD(lr=1.0))
        model.weight.requires_grad_(False)
        initial = model.weight.clone()
        weights = torch.ones(1, 2, requires_grad=True)
        out = model(torch.tensor([[1, 2]]), per_sample_weights=weights if weighted else None)
        if weighted:
            out.sum().backward()
            torch.testing.assert_close(weights.grad, initial[1:3].sum(1)[None])
        assert not weighted or torch.equal(model.weight, initial)
        assert out.requires_grad == weighted

    @pytest.mark.parametrize("update", ["backward", "step"])
    def test_gradients_that_wait_are_nobody_elses_memory(self, update):
        """A parameter's `grad` may be the very tensor that a lookup's backward got; ids may lie in a reused buffer."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb, self.bias = nn.Embedding(5, 3), nn.Parameter(torch.zeros(1, 3))

            def forward(self, ids):
                return self.emb(ids) + self.bias.view(1, 3)

        model = Model()
        optimizer = te.optim.fused(model, te.optim.SGD(lr=1.0), update=update)
        initial, ids = model.emb.weight.detach().clone(), torch.tensor([1])
        with optimizer.accumulate() if update == "backward" else contextlib.nullcontext():
            model(ids).sum().backward()
            model.bias.grad.zero_()
            ids.fill_(2)
            model(ids).sum().backward()
            ids.fill_(3)
        optimizer.step()
        torch.testing.assert_close((initial - model.emb.weight)[:, 0], torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointed_regions(self, reentrant):
        """Each region's backward is one within the outer one; the table changes when that has ended."""

        class Model(nn.Module):
            def __init__(self, regions):
                super().__init__()
                self.emb, self.mix, self.regions = nn.Embedding(5, 4), nn.Linear(4, 4), regions

            def forward(self, x, ids):
                def part(x):
                    return torch.tanh(self.mix(x) + self.emb(ids))

                for _ in range(3):
                    x = checkpoint(part, x, use_reentrant=reentrant) if self.regions else part(x)
                return x.square().sum()

        torch.manual_seed(0)
        model, reference = Model(regions=True), Model(regions=False)
        reference.load_state_dict(model.state_dict())
        optimizer = te.optim.fused(model, te.optim.Adagrad(lr=0.1, eps=1e-10))
        other = torch.optim.Adagrad(reference.parameters(), lr=0.1)
        for _ in range(2):
            for item, by in ((model, optimizer), (reference, other)):
                by.zero_grad()
                item(torch.ones(2, 4, requires_grad=True), torch.tensor([1, 3])).backward()
                by.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), **CLOSE)
        assert int(model.emb.step) == 2

    @pytest.mark.parametrize("changed", ["ids", "offsets", "weights"])
    def test_a_batch_that_is_changed_before_its_backward_is_refused(self, changed):
        model = nn.EmbeddingBag(5, 3, mode="sum")
        te.fuse(model, te.optim.SGD(lr=1.0))
        initial = model.weight.detach().clone()
        parts = {"ids": torch.tensor([1, 2]), "offsets": torch.tensor([0, 1]), "weights": torch.ones(2)}
        out = model(parts["ids"], parts["offsets"], parts["weights"])
        parts[changed].mul_(2)
        if changed == "offsets":  # without the last offset, they are copied
            out.sum().backward()
            torch.testing.assert_close(initial[1] - model.weight[1], torch.ones(3))
            return
        with pytest.raises(RuntimeError, match="changed in place"):
            out.sum().backward()
        assert torch.equal(model.weight, initial)

    def test_a_weight_that_is_computed_later_is_refused(self):
        model = nn.Embedding(5, 3)
        te.fuse(model, te.optim.SGD(lr=1.0))
        with pytest.raises(RuntimeError, match="replaces the module's parameter"):
            torch.func.functional_call(model, {"weight": torch.zeros(5, 3, requires_grad=True)}, (torch.tensor([1]),))

    def test_a_weight_with_another_use_is_refused_by_step(self):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
        optimizer = te.optim.fused(model, te.optim.SGD(lr=1.0))
        (model(torch.tensor([1])).sum() + model[0].weight.square().sum()).backward()
        with pytest.raises(RuntimeError, match="outside of its lookups"):
            optimizer.step()

    def test_gradients_from_before_are_forgotten(self):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
        model(torch.tensor([1])).sum().backward()
        optimizer = te.optim.fused(model, te.optim.SGD(lr=1.0))
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert model[0].weight.grad is None
        assert int(model[0].step) == 1

    def test_states_of_a_module_that_was_on_the_meta_device(self):
        model = nn.Embedding(5, 3, device="meta")
        te.fuse(model, te.optim.Adagrad(lr=0.1))
        model.to_empty(device="cpu")
        assert (model.sum == 0).all()
        assert int(model.step) == 0
        other = nn.Embedding(5, 3, device="meta")
        te.fuse(other, te.optim.Adagrad(lr=0.1))
        other.load_state_dict({"weight": torch.zeros(5, 3)}, assign=True)
        with pytest.raises(RuntimeError, match="fuse after loading"):
            other(torch.tensor([1]))

    def test_settings_that_cannot_change_are_refused(self):
        model, _ = pair()
        optimizer = te.optim.fused(model, te.optim.Adagrad(lr=0.1))
        tables = optimizer.param_groups[-1]
        with pytest.raises(ValueError, match=r"weight_decay is 0\.0 and cannot become 0\.5"):
            tables["weight_decay"] = 0.5
        tables |= {"lr": 0.5}
        assert float(model.item.learning_rate) == 0.5
        other = pair()[0]
        for spec in (te.optim.Adagrad(lr=0.1, eps=1e-3), te.optim.SGD(lr=0.1), te.optim.Adam(lr=0.1)):
            te.unfuse(other)
            wrong = te.fuse(other, spec).optimizer
            with pytest.raises(ValueError, match=r"another optimizer|cannot become|must have shape"):
                wrong.load_state_dict(optimizer._tables.state_dict())

    @pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
    def test_an_optimizer_is_not_copied(self, copied):
        model, _ = pair()
        optimizer = te.optim.fused(model, te.optim.SGD(lr=0.1))
        for item in (optimizer, optimizer.report.optimizer):
            with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
                copied(item)

    @pytest.mark.more
    @pytest.mark.usefixtures("dynamo")
    def test_max_norm_compiled_breaks_the_graph(self):
        model = nn.Embedding(5, 3, max_norm=1.0)
        te.fuse(model, te.optim.SGD(lr=1.0))
        other = copy.deepcopy(model)
        forward = torch.compile(model, backend="aot_eager")
        for item in (forward, other):
            item(torch.tensor([1, 2])).sum().backward()
        assert torch.equal(model.weight, other.weight)

    def test_a_part_whose_states_others_use_is_not_unfused(self):
        model, _ = pair()
        te.fuse(model, te.optim.SGD(lr=0.1))
        with pytest.raises(ValueError, match="'item' is also that of 'candidate'"):
            te.unfuse(model.item)
        te.unfuse(model)
        assert type(model.item) is nn.Embedding

    def test_weights_that_are_tied_afterwards_are_refused(self):
        model = nn.ModuleList([nn.Embedding(5, 3), nn.Embedding(5, 3)])
        te.fuse(model, te.optim.Adagrad(lr=0.1))
        model[1].weight = model[0].weight
        initial = model[0].weight.detach().clone()
        with pytest.raises(RuntimeError, match="fused separately"):
            (model[0](torch.tensor([1])).sum() + model[1](torch.tensor([1])).sum()).backward()
        assert torch.equal(model[0].weight, initial)

    def test_fused_in_inference_mode_it_is_trained_all_the_same(self):
        model = nn.Embedding(5, 3)
        with torch.inference_mode():
            assert te.fuse(model, te.optim.Adagrad(lr=0.1)).fused == ("",)
        model(torch.tensor([1])).sum().backward()
        assert int(model.step) == 1


def test_weights_that_overlap_are_left_alone_and_neighbours_are_fused():
    memory = np.zeros((40, 4), dtype=np.float32)
    model = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))
    for module, first in zip(model, (0, 5, 15), strict=True):
        module.weight = nn.Parameter(torch.from_numpy(memory[first : first + 10]))
    report = te.fuse(model, te.optim.SGD(lr=0.1))
    assert (report.fused, set(report.left_alone)) == (("2",), {"0", "1"})
    assert report.left_alone["0"] == "its weight shares memory with 1.weight"
