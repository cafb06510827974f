"""`te.offload`: the same bits on every tier, within the budget; and what it refuses."""

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.offloading.models import (
    Recurrent,
    Trained,
    Transformer,
    adam,
    assert_same,
    checkpointed,
    dlrm,
    loss_of,
    mlp,
    steps,
    train,
    weights_of,
)

TIERS = ("device", "host", "disk")
ARENA = {mlp: 76_000, Transformer: 100_000, Recurrent: 90_000, dlrm: 110_000}  # less than the parameters, no tiles


def on(make, params="device", states="device", **more):
    """Options for an arena of this size: with states on disk it is half of the budget."""
    arena = ARENA.get(make, ARENA[Transformer])
    return {"params": params, "states": states, "budget": arena * (2 if states == "disk" else 1), **more}


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("make", ARENA)
@pytest.mark.parametrize("params", TIERS)
@pytest.mark.parametrize("states", TIERS)
def test_a_tier_changes_no_bit(make, params, states, tmp_path):
    expected = train(make, tmp_path)
    trained = train(make, tmp_path, offload=on(make, params, states))
    assert_same(trained, expected)
    report = te.offloading.report(trained.model)
    if params != "device":
        assert min(report.moved[params]) > 0
        assert 0 < report.arena_peak <= report.arena_bytes <= ARENA[make]
    if states == "disk" and len(trained.optimizer.store.groups) > trained.optimizer.store.buffers.num_buffers:
        assert min(report.moved["disk"]) > 0
    te.offloading.close(trained.model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("params", TIERS)
@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize(("checkpointed", "clip"), [("", 0.1), ("again", 0.0), ("reentrant", 0.1)])
@pytest.mark.few(1)
def test_a_tier_changes_no_bit_of_16_bit_models(params, states, clip, checkpointed, tmp_path):
    options = {"dtype": torch.bfloat16, "clip": clip, "accumulate": 2}
    expected = train(lambda: Transformer(checkpointed), tmp_path, offload={}, **options)
    trained = train(
        lambda: Transformer(checkpointed),
        tmp_path,
        offload=on(Transformer, params, states),
        **options,
    )
    assert_same(trained, expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [*ARENA, checkpointed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_fifty_steps_of_every_combination(make, dtype, accumulate, tmp_path):
    options = {"dtype": dtype, "accumulate": accumulate, "clip": 0.5, "number": 50}
    expected = train(make, tmp_path, offload={}, **options)
    for params in TIERS:
        for states in TIERS:
            offload = on(make, params, states)
            trained = train(make, tmp_path, offload=offload, **options)
            assert_same(trained, expected)
            te.offloading.close(trained.model)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("states", TIERS)
def test_every_element_wise_optimizer(name, states, tmp_path):
    expected = train(mlp, tmp_path, optimizer=OPTIMIZERS[name])
    trained = train(mlp, tmp_path, optimizer=OPTIMIZERS[name], offload={"states": states, "budget": 150_000})
    assert_same(trained, expected)


@pytest.mark.parametrize("activations", ["host", "disk"])
@pytest.mark.parametrize("params", ["device", "disk"])
@pytest.mark.parametrize("checkpointed", ["", "again", "reentrant"])
@pytest.mark.few(1)
def test_activations_come_back_as_they_were(activations, params, checkpointed, tmp_path, monkeypatch):
    monkeypatch.setattr("tritonemb.offloading.dispatch.MIN_BYTES", 1_000)
    expected = train(lambda: Transformer(checkpointed), tmp_path)
    offload = on(Transformer, params, activations=activations)
    trained = train(lambda: Transformer(checkpointed), tmp_path, offload=offload)
    assert_same(trained, expected)
    assert min(te.offloading.report(trained.model).moved[activations]) > 0


@pytest.mark.more
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("offload", [{"params": "disk", "states": "host"}, {"params": "host", "activations": "disk"}])
def test_compiled_blocks(wrapped, offload, tmp_path, dynamo, monkeypatch):
    monkeypatch.setattr("tritonemb.offloading.dispatch.MIN_BYTES", 1_000)

    def make():
        model = Transformer(blocks=2)
        for number, block in enumerate(model.blocks):
            if wrapped:
                model.blocks[number] = torch.compile(block, fullgraph=True)
            else:
                block.compile(fullgraph=True)
        return model

    expected = train(make, tmp_path)
    assert_same(train(make, tmp_path, offload=offload | {"budget": 200_000}), expected)


@pytest.mark.filterwarnings("error:Dynamo does not know")
@pytest.mark.parametrize("way", ["wrapped", "in place", pytest.param("layers", marks=pytest.mark.more)])
@pytest.mark.few(1)
def test_a_model_that_is_compiled_afterwards(way, tmp_path, dynamo):
    """Graph breaks where parameters are fetched."""
    expected = train(mlp, tmp_path, 2)
    torch.manual_seed(0)
    model = mlp()
    options = {"params": "disk", "states": "host", "activations": "host", "path": tmp_path}
    model, optimizer = te.offload(model, adam(model.parameters()), **options, budget=400_000)
    if way == "wrapped":
        model = torch.compile(model, backend="aot_eager")
    for module in [model] if way == "in place" else model if way == "layers" else []:
        module.compile(backend="aot_eager")
    assert steps(model, optimizer, 2) == expected.losses


def test_half_the_states_may_stay_in_memory(tmp_path):
    expected = train(Transformer, tmp_path)
    written = []
    for ratio in (0.0, 0.5, 1.0):
        trained = train(Transformer, tmp_path, offload={"states": "disk", "budget": 60_000, "ratio": ratio})
        assert_same(trained, expected)
        written.append(te.offloading.report(trained.model).moved["disk"][1])
        te.offloading.close(trained.model)
    assert written[0] > written[1] > written[2] == 0


@pytest.mark.parametrize("budget", [60_000, 200_000])
def test_sub_groups_that_were_stepped_last_are_neither_read_nor_written(budget, tmp_path):
    one = train(Transformer, tmp_path, 2, offload={"states": "disk", "budget": budget})
    groups, num_cached = one.optimizer.store.groups, one.optimizer.store.buffers.num_buffers
    assert len(groups) > num_cached
    most = (len(groups) - num_cached) * one.optimizer.store.buffers.buffer_bytes
    for _ in range(3):
        initial = te.offloading.report(one.model).moved["disk"]
        steps(one.model, one.optimizer, 1)
        moved = te.offloading.report(one.model).moved["disk"]
        assert 0 < moved[0] - initial[0] <= most
        assert 0 < moved[1] - initial[1] <= most


def test_a_parameter_without_a_gradient_stays(tmp_path):
    def make():
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model

    expected = train(make, tmp_path)
    trained = train(make, tmp_path, offload=on(mlp, "host", "disk"))
    assert_same(trained, expected)


def test_parameters_used_in_another_order_still_work_and_are_reported(tmp_path):
    class Shuffled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.calls = nn.ModuleList(nn.Linear(70, 70) for _ in range(5)), 0

        def forward(self, x):
            self.calls += 1
            for number in torch.randperm(5, generator=torch.Generator().manual_seed(self.calls)).tolist():
                x = self.layers[number](x)
            return x

    expected = train(Shuffled, tmp_path)
    trained = train(Shuffled, tmp_path, offload={"params": "disk", "budget": 84_000})
    assert_same(trained, expected)
    assert te.offloading.report(trained.model).unexpected > 0


def test_evaluation_and_inference(tmp_path):
    plain, trained = train(Recurrent, tmp_path), train(Recurrent, tmp_path, offload=on(Recurrent, "disk"))
    ids = torch.randint(50, (4, 7))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(trained.model.eval()(ids), plain.model.eval()(ids))
    with pytest.raises(IndexError):
        trained.model(torch.full((3, 3), 99))
    assert steps(trained.model.train(), trained.optimizer, 2) == steps(plain.model.train(), plain.optimizer, 2)


def test_schedulers_and_scalers_work_on_it(tmp_path):
    def run(offload):
        torch.manual_seed(0)
        model = mlp()
        optimizer = adam(model.parameters())
        if offload:
            model, optimizer = te.offload(model, optimizer, path=tmp_path, **offload)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
        random, losses = torch.Generator().manual_seed(1), []
        for step in range(6):
            loss = loss_of(model, random)
            scaler.scale(loss * (1e30 if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
            losses.append((loss.item(), scaler.get_scale(), schedule.get_last_lr()))
        return losses

    expected = run(None)
    assert expected[2][1] < expected[1][1], "the scaler must have skipped a step"
    for params, states in (("disk", "disk"), ("device", "host"), ("host", "device")):
        assert run(on(mlp, params, states)) == expected


def test_its_own_clipping_is_that_of_torch(tmp_path):
    norms = []
    for offload in (None, on(mlp, "disk", "disk")):
        torch.manual_seed(0)
        model = mlp()
        optimizer = adam(model.parameters())
        if offload:
            model, optimizer = te.offload(model, optimizer, path=tmp_path, **offload)
        loss_of(model, torch.Generator().manual_seed(1)).backward()
        norm = optimizer.clip_grad_norm_(0.1) if offload else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append((norm, [p.grad for p in model.parameters()]))
    (one, grads), (other, other_grads) = norms
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))


def test_a_closure_and_parameter_groups(tmp_path):
    def run(offload):
        torch.manual_seed(0)
        model = mlp()
        groups = [
            {"params": [*model[0].parameters()], "lr": 0.1, "weight_decay": 0.1},
            {"params": [*model[3].parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
        if offload:
            model, optimizer = te.offload(model, optimizer, path=tmp_path, **offload)
        random = torch.Generator().manual_seed(1)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, random)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(4)]

    assert run(on(mlp, "host", "disk")) == run(None)


def test_a_state_dict_goes_both_ways(tmp_path):
    plain = train(Transformer, tmp_path, 3)
    trained = train(Transformer, tmp_path, 3, offload=on(Transformer, "disk", "disk"))
    state, of_optimizer = trained.model.state_dict(), trained.optimizer.state_dict()
    expected = plain.model.state_dict()
    assert [*state] == [*expected]
    assert all(type(state[key]) is torch.Tensor and torch.equal(state[key], expected[key]) for key in expected)
    assert of_optimizer["param_groups"][0]["lr"] == 1e-2
    new = Transformer()
    optimizer = adam(new.parameters())
    new.load_state_dict(state)
    optimizer.load_state_dict(of_optimizer)
    other = Transformer()
    other, stepped = te.offload(other, adam(other.parameters()), params="host", states="disk", path=tmp_path / "b")
    other.load_state_dict(plain.model.state_dict())
    stepped.load_state_dict(plain.optimizer.state_dict())
    losses = [
        steps(m, o, 2, seed=3) for m, o in ((new, optimizer), (other, stepped), (trained.model, trained.optimizer))
    ]
    assert losses[0] == losses[1] == losses[2]


def test_states_of_a_warm_optimizer_go_on(tmp_path):
    plain, warm = train(mlp, tmp_path, 3), train(mlp, tmp_path, 3)
    model, optimizer = te.offload(warm.model, warm.optimizer, path=tmp_path, **on(mlp, "disk", "disk"))
    assert steps(model, optimizer, 3, seed=2) == steps(plain.model, plain.optimizer, 3, seed=2)


def test_models_on_meta_are_materialised_into_their_tier(tmp_path):
    def init(module):
        for p in module.parameters(recurse=False):
            nn.init.normal_(p, std=0.1)

    losses = []
    for params in TIERS:
        with torch.device("meta"):
            model = Transformer()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        offload = on(Transformer, params, "disk", path=tmp_path / params)
        losses.append(steps(*te.offload(model, optimizer, **offload, init=init), 3))
    assert losses[0] == losses[1] == losses[2]
    with torch.device("meta"):
        model = Transformer()
    with pytest.raises(
        ValueError, match=r"module 'blocks.0.attention' .* has no reset_parameters; pass init= to te.offload"
    ):
        te.offload(model, adam(model.parameters()), params="host")
    assert model.output.weight.is_meta


def test_whole_parameters_can_be_read_and_changed(tmp_path):
    plain = train(mlp, tmp_path, 2)
    trained = train(mlp, tmp_path, 2, dtype=torch.float32, offload=on(mlp, "disk", "host"))
    for model in (plain.model, trained.model):
        with te.gather_parameters(model, modify=True), torch.no_grad():
            model[0].weight.mul_(0.5)
    with te.gather_parameters(trained.model[0]) as layer, torch.no_grad():
        layer.bias.zero_()  # not to be kept
    assert steps(trained.model, trained.optimizer, 2) == steps(plain.model, plain.optimizer, 2)


def test_masters_follow_what_is_written(tmp_path):
    results = []
    for params in ("device", "disk"):
        trained = train(mlp, tmp_path / params, 2, dtype=torch.bfloat16, offload=on(mlp, params))
        trained.model.load_state_dict({k: torch.ones_like(v) for k, v in trained.model.state_dict().items()})
        trained.optimizer.load_state_dict(
            trained.optimizer.state_dict() if params == "disk" else _without_masters(trained)
        )
        steps(trained.model, trained.optimizer, 1)
        results.append(weights_of(trained.model))
    assert all((p.float() - 1).abs().max() < 0.05 for p in results[1])


def _without_masters(trained: Trained):
    state = trained.optimizer.state_dict()
    for param_state in state["state"].values():
        param_state.pop("master", None)
    return state


@pytest.mark.parametrize("params", ["host", "disk"])
def test_access_outside_names_the_parameter(params, tmp_path):
    model = train(mlp, tmp_path, 1, offload=on(mlp, params)).model
    weight = model[0].weight
    for use in (
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.mul_(2),
        lambda: model.to(torch.float64),
        weight.tolist,
    ):
        with pytest.raises(RuntimeError, match=r"parameter '0.weight' is offloaded.*te.gather_parameters"):
            use()
    assert weight.shape == (64, 70)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in mlp().parameters())


@pytest.mark.parametrize("change", ["embedding", "item", "method"])
def test_a_forward_that_changes_a_parameter_is_refused(change, tmp_path):
    """Only the copy would change; whatever the operator is called, its schema says that it writes."""

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        @torch.no_grad()
        def forward(self, ids):
            if change == "embedding":
                return nn.functional.embedding(ids, self.weight, max_norm=0.1)
            if change == "item":
                self.weight[0] = 3
            else:
                torch.ops.aten.mul_.Scalar(self.weight, 2)
            return ids

    model = Changing()
    model, _ = te.offload(model, adam(model.parameters()), params="host", budget=40_000)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 'weight' is offloaded.*cannot change it in place"):
            model(torch.arange(3))
    assert torch.equal(model.state_dict()["weight"], torch.ones(8, 4))
    assert model.weight.shape == (8, 4)


def test_a_parameter_that_changes_between_forward_and_backward_is_refused(tmp_path):
    trained = train(mlp, tmp_path, 1, offload=on(mlp, "host"))
    loss = loss_of(trained.model, torch.Generator())
    loss.backward(retain_graph=True)
    trained.optimizer.step()
    with pytest.raises(RuntimeError, match="was changed between this forward and its backward"):
        loss.backward()


def test_memory_that_somebody_reads_is_not_reused(tmp_path):
    trained = train(mlp, tmp_path, 1, offload=on(mlp, "host"))
    seen = []
    handle = trained.model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.t()))
    expected = weights_of(trained.model)[0]
    with torch.no_grad():
        for _ in range(2):
            loss_of(trained.model, torch.Generator())
    handle.remove()
    assert all(torch.equal(weight.t(), expected) for weight in seen)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": "cpu"}, "params must be one of .'device', 'host', 'disk'., got 'cpu'"),
        ({"states": "disk", "path": None}, "pass path="),
        ({"states": "host", "ratio": 2}, "ratio must be between 0 and 1, got 2"),
        ({"params": "host", "budget": "8 gigs"}, "a budget must be a positive number of bytes, or a string like"),
        ({"params": "host", "budget": -1}, "a budget must be a positive number of bytes"),
    ],
)
def test_wrong_arguments_are_named(options, text, tmp_path):
    model = mlp()
    optimizer = adam(model.parameters())
    with pytest.raises(ValueError, match=text):
        te.offload(model, optimizer, **{"path": tmp_path, **options})
    steps(model, optimizer, 1)  # nothing was changed


def test_an_optimizer_that_is_not_element_wise_is_refused_and_nothing_changed(tmp_path):
    model = mlp()
    for make in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ValueError, match=make.__name__):
            te.offload(model, make(model.parameters()), params="disk", states="disk", path=tmp_path)
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match="the model lacks 1 of the optimizer"):
        te.offload(model, strange, states="host")
    assert not list(tmp_path.iterdir())
    steps(model, adam(model.parameters()), 1)


def test_the_old_optimizer_and_a_second_offload_are_refused(tmp_path):
    model = mlp()
    old = adam(model.parameters())
    model, new = te.offload(model, old, states="host")
    with pytest.raises(RuntimeError, match=r"step the one that te.offload returned"):
        old.step()
    with pytest.raises(ValueError, match="offloaded already"):
        te.offload(model, new, states="host")
    with pytest.raises(ValueError, match="added to the optimizer before"):
        new.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_budget_that_is_too_small_names_the_layer(tmp_path):
    trained = train(mlp, tmp_path, 0, offload=on(mlp, "host"))
    assert trained.losses == []
    model = Transformer(dim=64, tied=False)
    model, optimizer = te.offload(model, adam(model.parameters()), params="host", budget=40_000)
    with pytest.raises(
        ValueError, match=r"budget: 36,864 bytes .* cannot hold .*blocks.0.attention.in_proj_weight 49,152"
    ):
        steps(model, optimizer, 1)


def test_a_layer_larger_than_the_budget_is_tiled(tmp_path):
    """Train in float64: split inputs change rounding, which Adam turns into full steps of tiny gradients."""

    def make():
        return nn.Sequential(nn.Linear(70, 600), nn.ReLU(), nn.Linear(600, 1))

    plain = train(make, tmp_path, dtype=torch.float64)
    size = 70 * 600 * 8
    offload = {"params": "disk", "states": "disk", "budget": size // 4}
    trained = train(make, tmp_path, dtype=torch.float64, offload=offload)
    assert isinstance(trained.model[0], te.nn.TiledLinear)
    assert te.offloading.report(trained.model).arena_peak <= size // 8
    assert trained.losses == pytest.approx(plain.losses, rel=1e-6)  # which are float32
    weights = trained.model.state_dict()
    assert weights["0.weight"].shape == (600, 70)
    torch.testing.assert_close(weights["0.weight"], plain.model[0].weight.detach(), rtol=1e-6, atol=1e-9)


def test_a_model_that_is_dropped_leaves_nothing(tmp_path):
    trained = train(mlp, tmp_path, 1, offload=on(mlp, "disk", "disk", activations="disk"))
    assert [path.name for path in tmp_path.iterdir()] == ["swap-0.bin"]
    model = weakref.ref(trained.model)
    del trained
    gc.collect()
    assert model() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("activations", ["device", "disk"])
def test_a_forward_without_a_backward_keeps_nothing(activations, tmp_path):
    """The hooks of saved tensors must not tie the result of an operation that saves it to its own graph."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = te.offload(
        model, optimizer, params="disk", states="disk", activations=activations, path=tmp_path, budget="1MiB"
    )  # fmt: skip
    model(torch.ones(2, 4))
    dropped = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert dropped() is None
    assert not list(tmp_path.iterdir())


def test_only_models_that_are_offloaded_have_a_report():
    with pytest.raises(ValueError, match=r"is not offloaded; pass the model that te.offload returned"):
        te.offloading.report(mlp())


def test_what_offloading_needs_is_estimated(tmp_path: Path):
    machine = te.offloading.Machine(device=80e9, host=3e12, disk=28e12)
    options = {"activation_bytes": 1e9, "batch_tokens": 4_096}
    best = te.estimate_offload(10**12, machine=machine, **options).best
    assert (best.params, best.states, best.grads) == ("host", "disk", "disk"), "parameters are read twice"
    assert 2e12 <= best.host <= 3e12
    assert best.disk + best.host >= 16e12, "16 bytes a parameter are somewhere"
    assert te.estimate_offload(10**13, machine=machine).best is None
    # More and less host memory: for gradients, too, or not for parameters either.
    larger, smaller = (
        te.estimate_offload(10**12, machine=replace(machine, host=host), **options).best for host in (5e12, 1.5e12)
    )
    assert (larger.params, larger.grads, smaller.params, smaller.grads) == ("host", "host", "disk", "disk")
    assert best.written - larger.written == smaller.written - best.written == 2e12
    assert smaller.step > best.step > larger.step
    small = te.estimate_offload(mlp(), path=tmp_path)
    assert small.best.params == small.best.states == "device"
    assert f"{sum(p.numel() for p in mlp().parameters()):,} parameters" in str(small)
    disk = next(setting for setting in small.settings if (setting.params, setting.states) == ("device", "disk"))
    assert disk.disk == disk.written == 8 * small.parameters
    with pytest.raises(ValueError, match="at least one parameter and one rank"):
        te.estimate_offload(nn.ReLU())
    # One tier of two on the device: master weights of fp32 parameters, and buffers of parameters on disk.
    settings = te.estimate_offload(10**6, dtype=torch.float32, machine=machine).settings
    by_tier = {(s.params, s.states): s for s in settings if s.grads == s.params and s.activations == "device"}
    assert by_tier["host", "host"].host == (4 + 4 + 8) * 1e6
    states = next(s for s in settings if (s.params, s.states, s.grads) == ("device", "host", "host"))
    assert states.host == (4 + 8 + 4) * 1e6
    assert by_tier["disk", "device"].host == 3 * 12e6
    # Layers that do not fit: linear ones are split, and others are not.
    machine = te.offloading.Machine(device=1e6, host=1e9)
    with torch.device("meta"):
        linear, embedding = nn.Linear(1_000, 1_000), nn.Embedding(1_000, 1_000)
    assert te.estimate_offload(linear, machine=machine).best.device == 0.5e6
    assert te.estimate_offload(embedding, machine=machine).best is None


def test_the_models_of_the_paper_fit():
    """1 T parameters on one GPU, and 32 T on 512, of 32 GB, with 1.5 TB of memory and 28 TB of NVMe per 16 GPUs."""
    one = te.offloading.Machine(32e9, 1.5e12, 28e12)
    node = te.offloading.Machine(32e9, 1.5e12 / 16, 28e12 / 16)
    for machine, parameters, ranks, activations in ((one, 10**12, 1, 54e9), (node, 32 * 10**12, 512, 268e9)):
        estimates = te.estimate_offload(parameters, ranks, machine=machine, activation_bytes=activations)
        assert estimates.best.grads == estimates.best.states == "disk"
        assert not any(setting.fits for setting in estimates.settings if setting.grads == "host")


def test_masters_follow_what_is_written_to_parameters_on_the_device(tmp_path):
    def written(params, rewritten):
        trained = train(mlp, tmp_path / params, 2, dtype=torch.bfloat16, offload=on(mlp, params, "host"))
        with te.gather_parameters(trained.model, modify=True), torch.no_grad():
            for p in trained.model.parameters():
                p.copy_(p.clone() if rewritten else torch.full_like(p, 0.125))
        return steps(trained.model, trained.optimizer, 2), weights_of(trained.model)

    (of_device, on_device), (of_host, on_host) = (written(params, False) for params in ("device", "host"))
    assert of_device == of_host
    assert all(map(torch.equal, on_device, on_host))
    assert all((p.float() - 0.125).abs().max() < 0.05 for p in on_device)
    # What is written as it was keeps its masters.
    plain = train(mlp, tmp_path / "plain", 2, dtype=torch.bfloat16, offload=on(mlp, "device", "host"))
    expected = steps(plain.model, plain.optimizer, 2)
    assert written("device", True)[0] == written("host", True)[0] == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["in place", "set", "set twice", "vector", "kept"])
def test_masters_follow_writes_through_data(way, tmp_path):
    model = nn.Linear(8, 4).bfloat16()
    model, optimizer = te.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), states="host", budget="1MiB")
    whole = model.weight.data

    def step(factor):
        optimizer.zero_grad()
        (model(torch.ones(2, 8, dtype=torch.bfloat16)) * factor).sum().backward()
        optimizer.step()

    step(1.0)
    if way == "vector":
        nn.utils.vector_to_parameters(torch.zeros(36, dtype=torch.bfloat16), model.parameters())
    elif way == "in place":
        model.weight.data.view(-1).zero_()
    elif way == "kept":
        whole.zero_()
    else:
        for value in (1.0, 0.0) if way == "set twice" else (0.0,):
            model.weight.data = torch.full_like(model.weight, value)
            step(0.0)
            assert (model.weight == value).all()
    # A checkpoint has them, too.
    te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
    te.offloading.load_checkpoint(model, optimizer, tmp_path / "saved")
    step(0.0)
    assert not model.weight.any()


def test_an_optimizer_with_a_scheduler_is_refused():
    model = mlp()
    optimizer = adam(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match="make schedulers of the optimizer that te"):
        te.offload(model, optimizer, states="host")


def test_hooks_of_the_optimizer_are_called_once_a_step():
    model = mlp()
    optimizer, calls = adam(model.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model, optimizer = te.offload(model, optimizer, states="host")
    steps(model, optimizer, 1)
    assert calls == ["before", "after"]


def test_parameters_with_gaps_are_refused():
    model = nn.Linear(12, 10)
    model.weight = nn.Parameter(torch.randn(10, 24)[:, :12])
    with pytest.raises(ValueError, match=r"of shape \(10, 12\) has the strides \(24, 1\), with gaps"):
        te.offload(model, adam(model.parameters()), states="host")


def test_states_of_another_optimizer_are_refused():
    model = mlp()
    other = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    model, optimizer = te.offload(model, adam(model.parameters()), states="host")
    steps(model, optimizer, 1)
    initial = optimizer.state_dict()
    with pytest.raises(ValueError, match="has no 'exp_avg', 'exp_avg_sq' of a parameter"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["state"][0]["step"] == initial["state"][0]["step"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_states_of_an_optimizer_with_more_options_are_refused(way, tmp_path):
    def make(**options):
        model = nn.Linear(8, 4)
        return te.offload(model, torch.optim.AdamW(model.parameters(), **options), states="host", budget="1MiB")

    def step(model, optimizer):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    model, optimizer = make(amsgrad=True)
    step(model, optimizer)
    other, stepped = make()
    if way == "state dict":
        with pytest.raises(ValueError, match=r"has a 'max_exp_avg_sq' of a parameter .* which this AdamW lacks"):
            stepped.load_state_dict(optimizer.state_dict())
    else:
        te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
        with pytest.raises(ValueError, match=r"has '(bias|weight)\.max_exp_avg_sq', which this optimizer lacks"):
            te.offloading.load_checkpoint(other, stepped, tmp_path / "saved")
    step(other, stepped)
    assert not stepped.param_groups[0]["amsgrad"]


def test_an_option_that_needs_another_state_is_refused():
    def make(**options):
        model = nn.Linear(8, 4)
        model, optimizer = te.offload(model, torch.optim.SGD(model.parameters(), lr=0.1, **options), states="host")
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        model(torch.ones(2, 8)).sum().backward()
        return model.weight, optimizer, schedule

    weight, optimizer, _ = make()
    initial = weight.detach().clone()
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"momentum of parameter group 0 was set .* without memory for 'momentum_buffer'"
        ):
            optimizer.step()
    assert torch.equal(weight, initial)
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.step()
    assert not torch.equal(weight, initial)
    _, optimizer, _ = make(momentum=0.5)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].shape == (4, 8)


def test_a_state_that_the_options_no_longer_use_is_dropped():
    model = nn.Linear(8, 4)
    warm = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 8)).sum().backward()
    warm.step()
    warm.param_groups[0]["momentum"] = 0.0
    _, optimizer = te.offload(model, warm, states="host")
    assert "momentum_buffer" not in optimizer.state_dict()["state"].get(0, {})


@pytest.mark.parametrize("init", [None, nn.Linear.reset_parameters])
@pytest.mark.parametrize("params", ["device", "host"])
def test_hooks_of_gradients_move_to_the_new_parameters(params, init):
    with torch.device("cpu" if init is None else "meta"):
        model, accumulated = nn.Linear(8, 4), []
    mask = model.weight.register_hook(lambda gradient: gradient * 0)
    model.bias.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.shape))
    options = {"params": params, "states": "host", "budget": "1MiB", "init": init}
    model, optimizer = te.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    initial, *_ = weights_of(model)
    for is_masked in (True, False):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert torch.equal(weights_of(model)[0], initial) == is_masked
        mask.remove()
        optimizer.zero_grad()
    assert accumulated == [(4,), (4,)]


@pytest.mark.parametrize("hook", ["forward", "pre", "gradient", "method"])
def test_a_layer_with_hooks_is_not_tiled(hook):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.ones(2, 64)
    layer = model[0]
    if hook == "forward":
        layer.register_forward_hook(lambda module, inputs, output: output * 2)
    elif hook == "pre":
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    elif hook == "gradient":
        layer.weight.register_hook(lambda gradient: gradient * 0)
    else:
        layer.forward = lambda x: x
    expected = model(x).detach()
    model, _ = te.offload(model, adam(model.parameters()), params="host", budget=60_000)
    assert model[0] is layer
    assert torch.equal(model(x), expected)


def test_fused_tables_are_not_moved():
    def run(params):
        torch.manual_seed(0)
        model = nn.Sequential(te.nn.EmbeddingBag(50, 4, mode="sum", optimizer=te.optim.SGD(lr=0.1)), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        model, optimizer = te.offload(model, optimizer, params=params, states="host", budget="1MiB")
        for _ in range(2):
            model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
            optimizer.step()
        return model[0].weight.detach(), weights_of(model)[1]

    assert all(map(torch.equal, run("device"), run("host")))


@pytest.mark.parametrize("states", ["device", "host"])
def test_inference_before_training(states):
    model = nn.Linear(64, 64)
    model, optimizer = te.offload(model, adam(model.parameters()), params="host", states=states, budget="1MiB")
    with torch.inference_mode():
        model(torch.ones(2, 64))
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
    initial = weights_of(model)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, weights_of(model), initial))


@pytest.mark.parametrize("tiered", ["params", "states", "grads", "activations"])
@pytest.mark.parametrize("copy_of", [copy.deepcopy, torch.optim.swa_utils.AveragedModel])
def test_an_offloaded_model_is_not_copied(tiered, copy_of):
    model = nn.Sequential(nn.Linear(8, 4))
    model, _ = te.offload(model, adam(model.parameters()), budget="1MiB", **{tiered: "host"})
    with pytest.raises(TypeError, match=r"cannot be copied or pickled; load its state_dict\(\) into another model"):
        copy_of(model)


def test_a_layer_in_two_places_is_not_tiled():
    layer = nn.Linear(64, 64)
    model = nn.Sequential(nn.Sequential(layer), nn.GELU(), nn.Sequential(layer))
    model, _ = te.offload(model, adam(model.parameters()), params="host", budget=60_000)
    assert model[0][0] is model[2][0] is layer
    assert model(torch.ones(2, 64)).isfinite().all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.few(1)
def test_parameters_that_are_not_always_stepped(seed, tmp_path):
    """Passes over sub-groups that begin and end anywhere, with states loaded in between."""

    def run(offload):
        torch.manual_seed(0)
        model: Any = nn.ModuleList(nn.Linear(70, 64) for _ in range(12))
        optimizer: Any = adam(model.parameters())
        if offload:
            model, optimizer = te.offload(model, optimizer, path=tmp_path / str(offload), **offload)
        random, losses = torch.Generator().manual_seed(seed), []
        for number in range(12):
            used = [layer for layer in model if torch.rand(1, generator=random) < 0.4] or [model[0]]
            x = torch.randn(3, 70, generator=random)
            sum(layer(x).square().mean() for layer in used).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 4 == 3:
                optimizer.load_state_dict(optimizer.state_dict())
            losses.append(weights_of(model))
        return losses

    expected = run(None)
    for params in ("device", "disk"):
        trained = run({"params": params, "states": "disk", "budget": 150_000})
        for one, other in zip(trained, expected, strict=True):
            assert all(map(torch.equal, one, other))


PLAIN = {
    "sgd": lambda params, **options: torch.optim.SGD(params, lr=0.1, **options),
    "momentum": lambda params, **options: torch.optim.SGD(params, lr=0.1, momentum=0.9, **options),
    "adam": lambda params, **options: torch.optim.Adam(params, lr=0.1, **options),
    "adamw": lambda params, **options: torch.optim.AdamW(params, lr=0.1, **options),
    "adagrad": lambda params, **options: torch.optim.Adagrad(params, lr=0.1, **options),
}


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}], ids=str
)
@pytest.mark.parametrize("name", PLAIN)
def test_a_state_dict_has_the_settings_of_the_plain_optimizer(name, options):
    """Layers without state yet are covered, too."""

    def make():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        return model, PLAIN[name](model.parameters(), **options)

    def step(layers, optimizer):
        optimizer.zero_grad()
        nn.Sequential(*layers)(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    plain, its_optimizer = make()
    model, optimizer = te.offload(*make(), states="host", budget="16MiB")
    for layers, stepped in ((plain, its_optimizer), (model, optimizer)):
        step(layers[:1], stepped)
    expected, actual = its_optimizer.state_dict(), optimizer.state_dict()
    assert actual["param_groups"] == expected["param_groups"]
    other, fresh = make()
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(actual)
    if (name, options) == ("momentum", {"fused": True}):
        return  # torch's own: it cannot begin a momentum beside others
    step(other, fresh)
    step(plain, its_optimizer)
    for one, expected_parameter in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, expected_parameter)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 64).t())
        self.order = nn.Parameter(torch.randn(3, 5, 7).permute(2, 0, 1))
        self.gaps = nn.Parameter(torch.randn(10, 6)[::2, ::3])

    def forward(self, x):
        return (x @ self.weight).sum(1) + self.order.sum() * (self.gaps @ self.gaps.t()).mean()


def channels_last():
    layers = nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(1), nn.Linear(8 * 36, 1)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("states", ["device", "disk"])
@pytest.mark.parametrize("params", ["host", "disk"])
@pytest.mark.parametrize("make", [Transposed, channels_last])
def test_a_parameter_keeps_its_strides(make, params, states, tmp_path, monkeypatch):
    monkeypatch.setattr("tritonemb.offloading.checkpoint.BLOCK_BYTES", 100)

    def make_model(seed, **offload):
        torch.manual_seed(seed)
        model = make()
        if make is Transposed:
            model.gaps.requires_grad_(False)  # it is offloaded, but not stepped
        optimizer = adam(p for p in model.parameters() if p.requires_grad)
        return te.offload(model, optimizer, budget="1MiB", **offload) if offload else (model, optimizer)

    def losses(model, optimizer):
        x, values = torch.Generator().manual_seed(1), []
        for _ in range(3):
            optimizer.zero_grad()
            shape = (32, 64) if make is Transposed else (4, 8, 8, 8)
            batch = torch.randn(shape, generator=x)
            loss = model(batch if make is Transposed else batch.to(memory_format=torch.channels_last)).square().mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values

    def strides(tensors):
        return [tensor.stride() for tensor in tensors if tensor.dim() > 1]

    plain, its_adam = make_model(0)
    model, optimizer = make_model(0, params=params, states=states, path=tmp_path / "a")
    assert losses(model, optimizer) == losses(plain, its_adam)
    expected = [p for name, p in plain.named_parameters() if name != "gaps"]
    stored = [value for name, value in model.state_dict().items() if name != "gaps"]
    assert strides(stored) == strides(expected) == strides(p for name, p in model.named_parameters() if name != "gaps")
    assert all(torch.equal(one, other) for one, other in zip(stored, expected, strict=True))
    for number, state in its_adam.state_dict()["state"].items():
        param_state = optimizer.state_dict()["state"][number]
        assert strides(param_state.values()) == strides(state.values())
        assert all(torch.equal(param_state[name], value) for name, value in state.items())
    te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
    other, fresh = make_model(1, params=params, states=states, path=tmp_path / "b")
    te.offloading.load_checkpoint(other, fresh, tmp_path / "saved")
    with te.gather_parameters(other, modify=True):
        assert all(torch.equal(p, value) for p, value in zip(other.parameters(), plain.parameters(), strict=True))
    again, loaded = make_model(2)
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    assert losses(other, fresh) == losses(model, optimizer) == losses(again, loaded) == losses(plain, its_adam)
