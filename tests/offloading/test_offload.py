"""`te.offload`: the same bits on every tier, within the budget."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import tritonemb as te
from tests.offloading.models import (
    ARENA,
    OPTIMIZERS,
    TIERS,
    Recurrent,
    Transformer,
    adam,
    assert_same,
    build,
    checkpointed,
    loss_of,
    mlp,
    on,
    steps,
    train,
    weights_of,
)


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
@pytest.mark.parametrize("grads", TIERS)
@pytest.mark.parametrize(("checkpointed", "clip"), [("", 0.1), ("again", 0.0), ("reentrant", 0.1)])
@pytest.mark.few(2)
def test_a_tier_changes_no_bit_of_16_bit_models(params, states, grads, clip, checkpointed, tmp_path):
    def make():
        return Transformer(checkpointed)

    options = {"dtype": torch.bfloat16, "clip": clip, "accumulate": 2}
    expected = train(make, tmp_path, offload={}, **options)
    assert_same(train(make, tmp_path, offload=on(Transformer, params, states, grads=grads), **options), expected)


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
@pytest.mark.parametrize("tiers", ["device", "host", "disk", "disk host", "disk disk"])
def test_every_element_wise_optimizer(name, tiers, tmp_path):
    """On tiers of its states, and of the gradients."""
    expected = train(mlp, tmp_path, optimizer=OPTIMIZERS[name])
    offload = dict(zip(("states", "grads"), tiers.split(), strict=False), budget=150_000)
    assert_same(train(mlp, tmp_path, optimizer=OPTIMIZERS[name], offload=offload), expected)


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
    options = {"params": "disk", "states": "host", "activations": "host", "budget": 400_000}
    model, optimizer = build(mlp, folder=tmp_path, **options)
    if way == "wrapped":
        model = torch.compile(model, backend="aot_eager")
    for module in [model] if way == "in place" else model if way == "layers" else []:
        module.compile(backend="aot_eager")
    assert steps(model, optimizer, 2) == expected.losses


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
    def run(**offload):
        model, optimizer = build(mlp, folder=tmp_path, **offload)
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

    expected = run()
    assert expected[2][1] < expected[1][1], "the scaler must have skipped a step"
    for params, states in (("disk", "disk"), ("device", "host"), ("host", "device")):
        assert run(**on(mlp, params, states)) == expected


def test_a_closure_and_parameter_groups(tmp_path):
    def adamw(parameters):
        first, second, third, fourth, *_ = parameters
        groups = [{"params": [first, second], "lr": 0.1, "weight_decay": 0.1}, {"params": [third, fourth]}]
        return torch.optim.AdamW(groups, lr=1e-3, fused=True)

    def run(**offload):
        model, optimizer = build(mlp, adamw, tmp_path, **offload)
        random = torch.Generator().manual_seed(1)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, random)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(4)]

    assert run(**on(mlp, "host", "disk")) == run()


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
    options = {"params": "disk", "states": "disk", "activations": activations, "budget": "1MiB"}
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid())  # noqa: E731
    model, optimizer = build(make, folder=tmp_path, **options)
    model(torch.ones(2, 4))
    dropped = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert dropped() is None
    assert not list(tmp_path.iterdir())


def test_hooks_of_the_optimizer_are_called_once_a_step():
    model = mlp()
    optimizer, calls = adam(model.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    handle = register_optimizer_step_post_hook(lambda stepped, *_: calls.append(type(stepped).__name__))
    model, optimizer = te.offload(model, optimizer, states="host", budget=200_000)
    steps(model, optimizer, 1)
    handle.remove()
    assert calls == ["before", "after", "OffloadedOptimizer"]


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


def test_conjugates_that_autograd_saves():
    class Conjugates(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

        def forward(self, x):
            y = (x @ self.weight).conj()
            return (y * self.weight.conj() * y.imag).real.sum()

    gradients = []
    for options in ({}, {"activations": "host"}, {"params": "host"}):
        model, optimizer = build(Conjugates, torch.optim.SGD, dtype=torch.complex64, **options)
        generator = torch.Generator().manual_seed(1)
        model(torch.randn(64, 64, dtype=torch.complex64, generator=generator)).backward()
        gradients.append(optimizer.read_gradient(model.weight) if options else model.weight.grad)
    assert torch.equal(gradients[1], gradients[0])
    assert torch.equal(gradients[2], gradients[0])


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
    model, optimizer = build(lambda: nn.Linear(64, 64), params="host", states=states, budget="1MiB")
    with torch.inference_mode():
        model(torch.ones(2, 64))
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
    initial = weights_of(model)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, weights_of(model), initial))


def test_a_layer_in_two_places_is_not_tiled():
    layer = nn.Linear(64, 64)
    model = nn.Sequential(nn.Sequential(layer), nn.GELU(), nn.Sequential(layer))
    model, _ = te.offload(model, adam(model.parameters()), params="host", budget=60_000)
    assert model[0][0] is model[2][0] is layer
    assert model(torch.ones(2, 64)).isfinite().all()
