"""States of an offloaded optimizer: those of the plain one, master weights, settings, and what does not fit."""

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.offloading.models import (
    TIERS,
    Trained,
    Transformer,
    adam,
    assert_same,
    build,
    channels_last,
    mlp,
    on,
    steps,
    train,
    weights_of,
)


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
    other.load_state_dict(plain.model.state_dict(), assign=True)
    stepped.load_state_dict(plain.optimizer.state_dict())
    losses = [
        steps(m, o, 2, seed=3) for m, o in ((new, optimizer), (other, stepped), (trained.model, trained.optimizer))
    ]
    assert losses[0] == losses[1] == losses[2]


def test_states_of_a_warm_optimizer_go_on(tmp_path):
    plain, warm = train(mlp, tmp_path, 3), train(mlp, tmp_path, 3)
    model, optimizer = te.offload(warm.model, warm.optimizer, path=tmp_path, **on(mlp, "disk", "disk"))
    assert steps(model, optimizer, 3, seed=2) == steps(plain.model, plain.optimizer, 3, seed=2)


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
    assert all((p.float() - 1).abs().max() < 0.05 for weights in results for p in weights)


def _without_masters(trained: Trained):
    state = trained.optimizer.state_dict()
    for param_state in state["state"].values():
        param_state.pop("master", None)
    return state


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


class Counting(torch.optim.Optimizer):
    """Sums in float64 and counts in int64, whatever the dtype of the parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p, dtype=torch.float64)
                    state["count"] = torch.full_like(p, 1 << 24, dtype=torch.int64)
                state["sum"] += p.grad.double() / 3
                state["count"] += p.grad > 0
                p -= (group["lr"] * state["sum"]).to(p.dtype)


def test_states_keep_a_dtype_other_than_that_of_the_parameter(tmp_path):
    results = []
    for options in ({}, {"states": "disk", "path": tmp_path}):
        torch.manual_seed(0)
        model = nn.Linear(40, 40)
        optimizer = Counting(model.parameters())
        if options:
            model, optimizer = te.offload(model, optimizer, budget="1MiB", **options)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 40)).sin().sum().backward()
            optimizer.step()
        results.append([model.weight, *optimizer.state_dict()["state"][0].values()])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_a_loop_that_was_chosen_is_used(name):
    """`foreach=False` chooses torch's loop over parameters, whose last bits differ from those of the fused step."""
    results = []
    for options in ({}, {"states": "host"}):
        torch.manual_seed(0)
        model = nn.Linear(40, 130)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
        if options:
            model, optimizer = te.offload(model, optimizer, **options)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 40)).sin().sum().backward()
            optimizer.step()
        results.append(model.weight)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_complex_parameters(name):
    """Fused steps do not support them."""
    results = []
    for options in ({}, {"states": "host"}):
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(9, dtype=torch.complex64)), nn.Parameter(torch.randn(9))])
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, foreach=False)
        if options:
            optimizer.param_groups[0]["foreach"] = None
            model, optimizer = te.offload(model, optimizer, **options)
        for _ in range(3):
            optimizer.zero_grad()
            (model[0] * model[1]).abs().sum().backward()
            optimizer.step()
        results.append(list(model))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_loaded_learning_rate_is_a_copy():
    def make():
        model = nn.Linear(8, 4)
        return te.offload(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5)), states="host")[1]

    optimizer, other = make(), make()
    optimizer.load_state_dict(other.state_dict())
    other.param_groups[0]["lr"].fill_(2.0)  # as schedulers do
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


def test_a_state_that_the_options_no_longer_use_is_dropped():
    model = nn.Linear(8, 4)
    warm = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 8)).sum().backward()
    warm.step()
    warm.param_groups[0]["momentum"] = 0.0
    _, optimizer = te.offload(model, warm, states="host")
    assert "momentum_buffer" not in optimizer.state_dict()["state"].get(0, {})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.few(1)
def test_parameters_that_are_not_always_stepped(seed, tmp_path):
    """Passes over sub-groups that begin and end anywhere, with states loaded in between."""

    def make():
        return nn.ModuleList(nn.Linear(70, 64) for _ in range(12))

    def run(folder="", **offload):
        model, optimizer = build(make, folder=tmp_path / folder, **offload)
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

    expected = run()
    for params in ("device", "disk"):
        trained = run(params, params=params, states="disk", budget=150_000)
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


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("states", ["device", "disk"])
@pytest.mark.parametrize("params", TIERS)
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
    fresh.load_state_dict(its_adam.state_dict())
    again, loaded = make_model(2)
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    assert losses(other, fresh) == losses(model, optimizer) == losses(again, loaded) == losses(plain, its_adam)
