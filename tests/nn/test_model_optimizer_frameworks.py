"""`te.optim.fused` as training frameworks use it: with a `GradScaler`, and by their own rules."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tritonemb as te

pytestmark = pytest.mark.public


def test_a_refused_gradient_scaler_leaves_the_optimizer_usable():
    """GradScaler puts its scale on the optimizer, and does not take it away again when `step` raises."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    optimizer = te.optim.fused(model, te.optim.SGD(lr=0.1))
    ids = torch.tensor([1, 2])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(ids).sum()).backward()
    with pytest.raises(ValueError, match="GradScaler"):
        scaler.step(optimizer)
    initial = model[1].weight.detach().clone()
    optimizer.zero_grad()
    model(ids).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, initial)


@pytest.mark.parametrize("with_dense", [True, False])
def test_the_usual_loop_of_accumulation_is_warned_once(with_dense):
    model = nn.Sequential(nn.Embedding(5, 3), *([nn.Linear(3, 1)] if with_dense else []))
    optimizer = te.optim.fused(model, te.optim.SGD(lr=0.1))
    ids = torch.tensor([1, 2])

    def step(passes: int, closure: bool = False) -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            model(ids).sum().backward()
        optimizer.step((lambda: model(ids).sum().backward()) if closure else None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(1)
        step(0, closure=True)
        with optimizer.accumulate():
            model(ids).sum().backward()
            model(ids).sum().backward()
        optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        step(3)
        step(2)
    (warning,) = caught
    assert "several backward passes since step() have each updated the tables; use accumulate()" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.unfuse(model)
        waiting = te.optim.fused(model, te.optim.SGD(lr=0.1), update="step")
        model(ids).sum().backward()
        model(ids).sum().backward()
        waiting.step()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["fused", "collection", "cached"])
def test_accumulation_is_warned_of_in_collections_and_compiled_models(kind, compiled):
    """Whatever looks a table up, and however often in a pass."""
    ids, spec = torch.tensor([1, 2]), te.optim.SGD(lr=0.1)
    if kind == "fused":
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
        optimizer, batch = te.optim.fused(model, spec), ids
    else:
        cached = {"placement": "host", "cache": te.CacheConfig(rows=32)} if kind == "cached" else {}
        model = te.nn.EmbeddingBagCollection([te.TableConfig("a", 2000, 4, **cached)], spec)
        optimizer, batch = model.fused_optimizer, te.KeyedJaggedTensor.from_lengths(["a"], ids, torch.tensor([1, 1]))
    called = torch.compile(model, backend="aot_eager") if compiled else model

    def step(passes: int, lookups: int = 1) -> None:
        for _ in range(passes):
            sum(called(batch).sum() for _ in range(lookups)).backward()
        optimizer.step()

    called(batch).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(1)
        step(1)
        if not compiled:
            step(1, lookups=2)
            with optimizer.accumulate():
                model(batch).sum().backward()
                model(batch).sum().backward()
            optimizer.step()
    with pytest.warns(UserWarning, match=r"several backward passes since step\(\) have each updated the tables"):
        step(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(1)
