"""Gradients in host memory and on disk: the bits of `.grad`, whatever happens between backward and step."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tritonemb as te
from tests.offloading.models import (
    TIERS,
    Transformer,
    adam,
    assert_same,
    build,
    channels_last,
    dlrm,
    loss_of,
    mlp,
    on,
    steps,
    train,
    weights_of,
)
from tests.offloading.test_tiers import damage
from tritonemb.storage import StorageError

STORED = ("host", "disk")


def offloaded(folder, kind=mlp, **options):
    return build(kind, folder=folder, **{"budget": 200_000} | options)


def clip(model, optimizer, max_norm, **options):
    if hasattr(optimizer, "clip_grad_norm_"):
        return optimizer.clip_grad_norm_(max_norm, **options)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, **options)


def gradients(model, optimizer):
    return [optimizer.read_gradient(p) if hasattr(optimizer, "read_gradient") else p.grad for p in model.parameters()]


@pytest.mark.few(6)
@pytest.mark.parametrize("make", [mlp, Transformer, dlrm])
@pytest.mark.parametrize("grads", STORED)
@pytest.mark.parametrize("params", TIERS)
@pytest.mark.parametrize("states", TIERS)
def test_a_gradient_tier_changes_no_bit(make, params, states, grads, tmp_path):
    options = {"accumulate": 2, "clip": 0.1, "number": 4}
    expected = train(make, tmp_path, **options)
    trained = train(make, tmp_path, offload=on(make, params, states, grads=grads), **options)
    assert_same(trained, expected)
    assert all(p.grad is None for p in trained.model.parameters())
    assert te.offloading.report(trained.model).moved[grads][1] > 0
    te.offloading.close(trained.model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("params", TIERS)
def test_a_gradient_is_stored_as_soon_as_its_backward_ends(params, tmp_path):
    model, optimizer = offloaded(tmp_path, params=params, grads="disk")
    last, stored = model[-1].weight, []
    model[0].register_full_backward_hook(lambda *_: stored.append((last.grad, optimizer.read_gradient(last))))
    loss_of(model, torch.Generator().manual_seed(1)).backward()
    ((grad, gradient),) = stored
    assert grad is None
    other, _ = build()
    loss_of(other, torch.Generator().manual_seed(1)).backward()
    assert torch.equal(gradient, other[-1].weight.grad)


@pytest.mark.parametrize("grads", TIERS)
def test_backward_clip_and_step_in_any_order(grads, tmp_path):
    """Accumulation after a clip, two clips, two steps with one gradient, and gradients that are set to zero."""
    params, budget = ("disk", 152_000) if grads == "device" else ("device", 60_000)
    results = []
    for model, optimizer in (build(), offloaded(tmp_path, params=params, states="disk", grads=grads, budget=budget)):
        random, values = torch.Generator().manual_seed(1), []
        loss_of(model, random).backward()
        values.append(clip(model, optimizer, 0.5))
        loss_of(model, random).backward()
        values += [clip(model, optimizer, 0.4), clip(model, optimizer, 0.3, norm_type=torch.inf)]
        optimizer.step()
        optimizer.step()
        values += [gradient.clone() for gradient in gradients(model, optimizer)]
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, random).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        values += [gradient.clone() for gradient in gradients(model, optimizer)]
        optimizer.zero_grad()
        optimizer.step()
        assert gradients(model, optimizer) == [None] * len(list(model.parameters()))
        results.append([*values, *weights_of(model)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("grads", STORED)
def test_zero_grad_of_the_model_discards_stored_gradients(grads, tmp_path):
    """Hugging Face's Trainer calls it, and not that of the optimizer."""
    results = []
    for model, optimizer in (build(), offloaded(tmp_path, states="host", grads=grads)):
        random = torch.Generator().manual_seed(1)
        for _ in range(3):
            loss_of(model, random).backward()
            optimizer.step()
            model.zero_grad()
        assert gradients(model, optimizer) == [None] * len(list(model.parameters()))
        results.append(weights_of(model))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("grads", STORED)
def test_gradients_that_are_not_finite(grads, tmp_path):
    results = []
    for model, optimizer in (build(), offloaded(tmp_path, states="host", grads=grads)):
        (loss_of(model, torch.Generator().manual_seed(1)) * torch.tensor([1.0, torch.nan])[1]).backward()
        norm = clip(model, optimizer, 1.0)
        if hasattr(optimizer, "scale_gradients"):
            assert not optimizer.scale_gradients(1.0)
        optimizer.step()
        results.append([norm, *weights_of(model)])
    assert results[0][0].isnan()
    assert all(torch.equal(one.isnan(), other.isnan()) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("grads", STORED)
@pytest.mark.few(1)
def test_states_are_saved_and_loaded_with_gradients_pending(grads, tmp_path):
    model, optimizer = offloaded(tmp_path, params="disk", states="disk", grads=grads, budget=152_000)
    other, its_optimizer = build()
    random, its_random = (torch.Generator().manual_seed(1) for _ in range(2))
    for _ in range(2):
        loss_of(model, random).backward()
        loss_of(other, its_random).backward()
        state, expected = optimizer.state_dict(), its_optimizer.state_dict()
        for number, values in expected["state"].items():
            assert all(torch.equal(state["state"][number][name], value) for name, value in values.items())
        optimizer.load_state_dict(state)
        for gradient, p in zip(gradients(model, optimizer), other.parameters(), strict=True):
            assert torch.equal(gradient, p.grad)
        optimizer.step()
        its_optimizer.step()
        optimizer.zero_grad()
        its_optimizer.zero_grad()
    loss_of(model, random).backward()
    te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
    optimizer.step()
    expected = weights_of(model)
    te.offloading.load_checkpoint(model, optimizer, tmp_path / "saved")
    optimizer.step()
    assert all(map(torch.equal, weights_of(model), expected))


def test_a_gradient_from_before_offload_is_added(tmp_path):
    results = []
    for params in TIERS:
        model, optimizer = build()
        random = torch.Generator().manual_seed(1)
        loss_of(model, random).backward()
        options: Any = {"path": tmp_path / params, "budget": 200_000, "grads": "disk", "params": params}
        model, optimizer = te.offload(model, optimizer, **options)
        loss_of(model, random).backward()
        optimizer.step()
        results.append(weights_of(model))
    model, optimizer = build()
    steps(model, optimizer, 1, accumulate=2)
    assert all(torch.equal(one, p) for result in results for one, p in zip(result, model.parameters(), strict=True))


@pytest.mark.parametrize("params", ["device", "host"])
def test_strides_of_gradients(params, tmp_path):
    results = []
    for model, optimizer in (build(channels_last), offloaded(tmp_path, channels_last, params=params, grads="disk")):
        for seed in range(2):
            x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(seed))
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
        results.append(gradients(model, optimizer))
        optimizer.step()
        results.append(weights_of(model))
    assert [g.stride() for g in results[0]] == [g.stride() for g in results[2]]
    assert all(
        torch.equal(one, other) for one, other in zip(results[0] + results[1], results[2] + results[3], strict=True)
    )


@pytest.mark.parametrize("grads", STORED)
def test_a_factor_that_changes_after_scaling_is_not_applied_again(grads, tmp_path):
    model, optimizer = offloaded(tmp_path, lambda: nn.Linear(4, 4), grads=grads)
    model(torch.ones(1, 4)).sum().backward()
    factor = torch.tensor(0.5)
    optimizer.scale_gradients(factor)
    factor.fill_(8.0)
    assert torch.equal(optimizer.read_gradient(model.weight), torch.full((4, 4), 0.5))


def test_gradients_that_cannot_be_stored_are_named():
    for options in ({"grads": "host"}, {"states": "host"}, {"params": "host"}):
        model, optimizer = build(lambda: nn.Embedding(50, 8, sparse=True), partial(torch.optim.SGD, lr=0.1), **options)
        weight = model.state_dict()["weight"].clone()

        def closure(model=model):
            model(torch.arange(3)).sum().backward()

        with pytest.raises(ValueError, match=r"\(50, 8\) has a torch.sparse_coo gradient.*sparse=False"):
            optimizer.step(closure)
        optimizer.zero_grad()
        optimizer.step()  # nothing was changed, so it can go on
        assert torch.equal(model.state_dict()["weight"], weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("compiles_first", [True, False])
def test_compiled_layers(compiles_first, tmp_path, dynamo):
    def compile_layers(model):
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    plain = partial(Transformer, blocks=2)
    expected = train(lambda: compile_layers(plain()), tmp_path, 2)
    options = {"params": "host", "states": "disk", "grads": "disk", "budget": 400_000}
    make = (lambda: compile_layers(plain())) if compiles_first else plain
    model, optimizer = build(make, folder=tmp_path, **options)
    model = model if compiles_first else compile_layers(model)
    assert steps(model, optimizer, 2) == expected.losses


# Faults.


def state_of(model, optimizer):
    return [*weights_of(model), *(v for s in optimizer.state_dict()["state"].values() for v in s.values())]


@pytest.mark.parametrize(("call", "accumulate"), [("pwritev", 1), ("preadv", 2), ("pwritev", 2)])  # 1: nothing is read
def test_an_error_of_the_disk_in_the_backward_changes_nothing(call, accumulate, tmp_path, failing_disk):
    """Step is then possible with another gradient: neither parameters nor states have changed."""
    model, optimizer = offloaded(tmp_path, states="host", grads="disk")
    other, its_optimizer = build()
    steps(model, optimizer, 2)
    steps(other, its_optimizer, 2)
    initial = state_of(model, optimizer)
    with pytest.raises(StorageError, match="Input/output error"), failing_disk(call):
        steps(model, optimizer, 1, accumulate=accumulate)
    if call == "pwritev":
        with pytest.raises(StorageError, match="Input/output error"):
            optimizer.step()
    assert all(map(torch.equal, state_of(model, optimizer), initial))
    optimizer.zero_grad()
    assert steps(model, optimizer, 2, seed=3) == steps(other, its_optimizer, 2, seed=3)


@pytest.mark.parametrize("kind", ["cut", "changed"])
def test_a_gradient_that_was_damaged_is_noticed(kind, tmp_path):
    model, optimizer = offloaded(tmp_path, grads="disk")
    loss_of(model, torch.Generator()).backward()
    optimizer._gradients.wait()
    damage(tmp_path, kind)
    with pytest.raises(StorageError, match="resume from a checkpoint"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(StorageError, match="resume from a checkpoint"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="an earlier step or load has failed"):
        optimizer.step()


# Ranks.


def on_ranks(rank: int, folder: str, offload: dict[str, Any], max_norm: float, accumulate: int) -> list[Any]:
    """Losses, norms, gradients and parameters."""
    torch.manual_seed(0)
    model: Any = Transformer(dim=20, blocks=2, words=51, tied=False)  # whose words no number of ranks divides
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer: Any = adam(model.parameters())
    if offload:
        model, optimizer = te.offload(model, optimizer, path=folder, **offload)
    random, values = torch.Generator().manual_seed(1), []
    for step in range(4):
        for micro_batch in range(accumulate):
            if step % 2:  # gradients are reduced with the last micro-batch only
                model.set_requires_gradient_sync(micro_batch == accumulate - 1)
            loss = loss_of(model, random, rank, dist.get_world_size())
            loss.backward()
            values.append(loss.detach())
        norm = clip(model, optimizer, max_norm, norm_type=(2.0, torch.inf, 1.0, 3.0)[step])
        values.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if offload.get("grads", "device") != "device":
            assert all(p.grad is None or not p.grad._local_tensor.numel() for p in model.parameters())
        values += [gradient.full_tensor() for gradient in gradients(model, optimizer)]
        optimizer.step()
        optimizer.zero_grad()
    with te.gather_parameters(model):
        values += [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    if offload:
        te.offloading.close(model)
    return values


def same_on_ranks(rank: int, folder: str, offload: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    expected, values = (on_ranks(rank, folder, options, 0.1, 2) for options in ({}, offload | {"budget": 400_000}))
    assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


@pytest.mark.parametrize(
    "offload",
    [
        {"params": "disk", "states": "disk", "grads": "disk"},
        pytest.param({"states": "host", "grads": "disk", "activations": "disk"}, marks=pytest.mark.more),
        pytest.param({"params": "host", "grads": "host", "activations": "host"}, marks=pytest.mark.more),
    ],
)
def test_gradients_of_two_ranks_change_no_bit(ranks, offload, tmp_path):
    ranks(2).run(same_on_ranks, str(tmp_path), offload)
