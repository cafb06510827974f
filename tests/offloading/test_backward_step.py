"""Steps inside the backward: the bits of a step after it on every tier; refusals; and the state after a failure."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import tritonemb as te
from tests.offloading.models import OPTIMIZERS, TIERS, Transformer, adam, build, loss_of, mlp, on, weights_of
from tritonemb.offloading import tiers
from tritonemb.storage import StorageError
from tritonemb.storage.aio import IoBuffer


class Shared(nn.Module):
    """One layer in several blocks with reentrant checkpointing, which give it several gradients per backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(70, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda y: self.shared(y).tanh(), x, use_reentrant=True)
        return self.last(x)


class Branches(nn.Module):
    """Layers of which each batch uses others, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.random = nn.ModuleList(nn.Linear(70, 70) for _ in range(8)), torch.Generator().manual_seed(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in torch.randperm(8, generator=self.random)[:6].tolist():
            x = x + self.layers[number](x).tanh()
        return x


def backward(model: Any, random: torch.Generator) -> torch.Tensor:
    loss = loss_of(model, random)
    loss.backward()
    return loss.detach()


def run(model: Any, optimizer: Any, number: int = 4, accumulate: int = 1, seed: int = 1) -> list[Any]:
    """Losses, numbers of sub-groups that were stepped in the backward, and states."""
    random, losses, stepped = torch.Generator().manual_seed(seed), [], []
    offloaded = isinstance(optimizer, te.offloading.OffloadedOptimizer)

    def closure() -> torch.Tensor:
        loss = backward(model, random)
        stepped.append(len(optimizer._backward_step.stepped) if offloaded else 0)
        return loss

    for _ in range(number):
        optimizer.zero_grad()
        for _ in range(accumulate - 1):
            backward(model, random)
        losses.append(optimizer.step(closure, **{"in_backward": True} if offloaded else {}))
    return [losses, stepped, [*weights_of(model), *states_of(optimizer)]]


def states_of(optimizer: Any) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return [states[p][name] for p in sorted(states) for name in sorted(states[p]) if name != "master"]


def same(one: list[Any], other: list[Any]) -> bool:
    return one[0] == other[0] and len(one[2]) == len(other[2]) and all(map(torch.equal, one[2], other[2]))


@pytest.mark.few(3)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("grads", TIERS)
@pytest.mark.parametrize("params", TIERS)
@pytest.mark.parametrize("states", TIERS)
def test_a_step_in_the_backward_changes_no_bit(params, states, grads, accumulate, tmp_path):
    expected = run(*build(), accumulate=accumulate)
    model, optimizer = build(folder=tmp_path, **on(mlp, params, states, grads=grads))
    result = run(model, optimizer, accumulate=accumulate)
    assert same(result, expected)
    assert result[1][0] == 0  # the order is unknown
    if "disk" not in (params, states, grads):  # else it depends on the disk
        assert min(result[1][1:]) == len(optimizer.store.groups)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("states", ["host", "disk"])
def test_every_element_wise_optimizer(name, states, tmp_path):
    options: Any = {"states": states, "grads": "disk", "budget": 100_000}
    assert same(run(*build(mlp, OPTIMIZERS[name], tmp_path, **options)), run(*build(mlp, OPTIMIZERS[name])))


@pytest.mark.parametrize(
    "kind", [Branches, Shared, Transformer, pytest.param(lambda: Transformer("reentrant"), marks=pytest.mark.more)]
)
def test_shared_unused_and_reordered_layers(kind, tmp_path):
    expected = run(*build(kind), number=6)
    for params in ("device", "disk"):
        model, optimizer = build(kind, folder=tmp_path / params, params=params, states="disk", budget=300_000)
        result = run(model, optimizer, number=6)
        assert same(result, expected)
        if kind is Shared:
            groups = {chunk.group for chunk in optimizer.store.chunks(*model.shared.parameters())}
            assert groups == optimizer._backward_step._repeated


def test_master_weights_follow_writes_between_steps(tmp_path):
    results = []
    for in_backward in (False, True):
        model, optimizer = build(mlp, folder=tmp_path / str(in_backward), dtype=torch.bfloat16, states="host")
        random = torch.Generator().manual_seed(1)
        for _ in range(4):
            optimizer.zero_grad()
            optimizer.step(lambda m=model, r=random: backward(m, r), in_backward=in_backward)
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        results.append([*weights_of(model), *(s["master"] for s in optimizer.state_dict()["state"].values())])
    assert all(map(torch.equal, *results))


def test_a_pass_moves_no_more_than_what_buffers_lack(tmp_path):
    """Sub-groups that the backward reaches last remain in buffers, but for those that are read ahead."""
    model, optimizer = build(folder=tmp_path, states="disk", budget=150_000)
    run(model, optimizer)
    groups, num_buffers = optimizer.store.groups, optimizer.store.buffers.num_buffers
    size = max(group.buffer_bytes for group in groups)
    initial = te.offloading.report(model).moved["disk"]
    run(model, optimizer, number=3)
    read, written = (now - then for now, then in zip(te.offloading.report(model).moved["disk"], initial, strict=True))
    assert 0 < read <= 3 * size * (len(groups) - num_buffers + 4) + size * num_buffers  # and a state dict
    assert 0 < written <= 3 * size * (len(groups) - num_buffers + 4) + size * num_buffers


def clip_by_torch(model: Any, _: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (clip_by_torch, "was changed after its step in the backward, by clipping perhaps"),
        (lambda _, optimizer: optimizer.clip_grad_norm_(0.1), "cannot read or change gradients and states"),
        (lambda _, optimizer: optimizer.zero_grad(), "cannot read or change gradients and states"),
        (lambda _, optimizer: optimizer.step(), "cannot read or change gradients and states"),
        (lambda _, optimizer: optimizer.state_dict(), "cannot read or change gradients and states"),
        (lambda model, _: backward(model, torch.Generator()), "got another gradient after its step"),
    ],
)
def test_a_closure_that_uses_gradients_is_refused(call, message, tmp_path):
    model, optimizer = build(folder=tmp_path, states="host")
    run(model, optimizer, number=2)

    def closure() -> None:
        optimizer.zero_grad()
        backward(model, torch.Generator())
        call(model, optimizer)

    with pytest.raises(RuntimeError, match=message):
        optimizer.step(closure, in_backward=True)
    with pytest.raises(RuntimeError, match="an earlier step or load has failed"):
        optimizer.step()
    with pytest.raises(ValueError, match="needs a closure"):
        optimizer.step(in_backward=True)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, StorageError])
def test_a_backward_that_fails_leaves_no_optimizer_that_steps(kind, tmp_path):
    model, optimizer = build(folder=tmp_path, params="disk", states="host", grads="host", budget=200_000)
    fails = False

    def fail(*_: Any) -> None:
        if fails:
            raise kind("in the backward")

    model[0].register_full_backward_hook(fail)
    # Nothing was stepped: the optimizer can go on.
    fails = True
    with pytest.raises(kind, match="in the backward"):
        run(model, optimizer, number=1)
    fails = False
    run(model, optimizer, number=3)
    te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
    expected = run(model, optimizer, number=2, seed=4)
    # Some are stepped: it cannot, until a checkpoint is loaded.
    fails = True
    with pytest.raises(kind, match="in the backward"):
        run(model, optimizer, number=1)
    fails = False
    for call in (optimizer.step, optimizer.state_dict, lambda: run(model, optimizer, number=1)):
        with pytest.raises(RuntimeError, match="an earlier step or load has failed"):
            call()
    te.offloading.load_checkpoint(model, optimizer, tmp_path / "saved")
    optimizer.zero_grad()
    assert same(run(model, optimizer, number=2, seed=4), expected)


def on_ranks(rank: int, folder: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    results = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model: Any = Transformer(dim=20, blocks=2, words=51, tied=False)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model, optimizer = te.offload(model, adam(model.parameters()), path=f"{folder}/{in_backward}", **options)
        random, values = torch.Generator().manual_seed(1 + rank), []
        for _ in range(4):
            optimizer.zero_grad()
            step = lambda m=model, r=random: backward(m, r)  # noqa: E731
            values.append(optimizer.step(step, in_backward=in_backward))
        assert bool(in_backward) == bool(
            getattr(optimizer, "_backward_step", None) and optimizer._backward_step.stepped
        )
        values += [value.full_tensor() for value in states_of(optimizer) if hasattr(value, "full_tensor")]
        with te.gather_parameters(model):
            values += [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
        results.append(values)
        te.offloading.close(model)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.more
@pytest.mark.parametrize(
    "options",
    [{"params": "disk", "states": "disk", "grads": "disk", "budget": 400_000}, {"states": "host", "grads": "device"}],
)
def test_two_ranks(ranks, options, tmp_path):
    ranks(2).run(on_ranks, str(tmp_path), options)


def test_writes_in_the_closure_are_kept():
    """Writes to a parameter with master weights after its step are in the next one."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    model, optimizer = te.offload(model, torch.optim.SGD(model.parameters(), lr=0.0), states="host")

    def closure() -> torch.Tensor:
        loss = model(torch.ones(3, 8).bfloat16()).float().square().mean()
        loss.backward()
        with torch.no_grad():
            model.weight.zero_()
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(closure, in_backward=True)
    assert not model.weight.any()
    optimizer.step()
    assert not model.weight.any()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "compiled"])
def test_data_of_a_parameter_with_master_weights(graph):
    """`.data` may be set in inference mode, and read in one graph."""
    model = nn.Linear(8, 4).bfloat16()
    model, optimizer = te.offload(model, torch.optim.SGD(model.parameters(), lr=0.0), states="host")
    with torch.inference_mode():
        model.weight.data = torch.full((4, 8), 0.5, dtype=torch.bfloat16)
    model(torch.ones(3, 8).bfloat16()).sum().backward()
    optimizer.step()
    assert (model.weight == 0.5).all()
    assert optimizer.state_dict()["state"] is not None

    def read() -> torch.Tensor:
        return model.weight.data * 2

    assert (torch.compile(read, backend="eager", fullgraph=True)() if graph else read()).eq(1.0).all()


def test_options_without_a_truth_value_are_left_alone():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["scales"] = torch.ones(3).numpy()
    model, optimizer = te.offload(model, optimizer, states="host")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["scales"].shape == (3,)


def test_a_write_waits_for_reads_of_its_span(tmp_path, monkeypatch):
    """A read in the other thread must not see the bytes of a later write."""
    tier, started = tiers.DiskTier(tmp_path), threading.Event()
    first, second = (torch.full((4096,), value, dtype=torch.uint8) for value in (1, 2))
    span, out = tier.reserve(4096), torch.from_numpy(IoBuffer(4096).array)
    buffer = torch.from_numpy(IoBuffer(4096).array)
    span.write(buffer.copy_(first)).wait()
    move = tiers.DiskTier._move

    def slow(self: Any, span: Any, values: torch.Tensor, write: bool) -> None:
        started.set()
        time.sleep(0 if write else 0.2)  # the disk is busy with another request
        move(self, span, values, write)

    monkeypatch.setattr(tiers.DiskTier, "_move", slow)
    read = span.read(out)
    started.wait()
    write = span.write(buffer.copy_(second))
    read.wait()
    write.wait()
    assert torch.equal(out, first)
    tier.close()
