"""`load_state_dict(assign=True)`, and modules that were on the meta device."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.public

IDS = torch.tensor([[1, 2], [3, 1]])
BATCH = te.KeyedJaggedTensor.from_lists({"user": [[1, 2], [3, 1]], "genre": [[4], [0, 4]]})
OPTIMIZER = te.optim.Adam(lr=0.1, on_nonfinite="skip")


def collection(**options: Any) -> nn.Module:
    configs = [te.TableConfig("user", 7, 8), te.TableConfig("genre", 5, 4)]
    return te.nn.EmbeddingBagCollection(configs, OPTIMIZER, **options)


def bag(**options: Any) -> nn.Module:
    return te.nn.EmbeddingBag(7, 8, mode="sum", optimizer=OPTIMIZER, **options)


def rows(**options: Any) -> nn.Module:
    return te.nn.Embedding(7, 8, optimizer=OPTIMIZER, **options)


def fused(**options: Any) -> nn.Module:
    """Module whose states are not in its `state_dict`."""
    module = nn.Embedding(7, 8, **options)
    te.optim.fused(module, OPTIMIZER)
    return module


def dynamic(**options: Any) -> nn.Module:
    return te.nn.Embedding(None, 8, capacity=64, optimizer=OPTIMIZER, **options)


kinds = pytest.mark.parametrize("make", [collection, bag, rows, fused])


def step(module: nn.Module, scale: float = 1.0) -> Tensor:
    output = module(BATCH if isinstance(module, te.nn.EmbeddingBagCollection) else IDS)
    output.backward(scale * torch.cos(torch.arange(output.numel())).view_as(output).to(output.dtype))
    return output


def trained(make: Callable[..., nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A module after a step and one that is skipped, and a copy of its state."""
    module = make()
    step(module)
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        step(module, torch.nan)
    return module, {name: tensor.clone() for name, tensor in module.state_dict().items()}


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "unchanged": lambda tensor: tensor,
    "half": lambda tensor: tensor.half() if tensor.is_floating_point() else tensor,
    "double": lambda tensor: tensor.double(),
    "int32": lambda tensor: tensor if tensor.is_floating_point() else tensor.int(),
    "strided": lambda tensor: tensor.t().contiguous().t(),
    "parameter": lambda tensor: nn.Parameter(tensor.t().contiguous().t()) if tensor.dim() == 2 else tensor,
}


@kinds
@pytest.mark.parametrize("cast", CASTS)
def test_assigned_tensors_train_as_copied_ones(make, cast):
    """A weight stays the tensor that was passed, unless kernels need another layout; states are float32."""
    source, state = trained(make)
    state = {name: CASTS[cast](tensor) for name, tensor in state.items()}
    module, twin = make(), make()
    module.load_state_dict(state, assign=True)
    weights = [name for name in state if name.endswith("weight")]
    twin.to(state[weights[0]].dtype).load_state_dict(state)
    for name in weights:
        assert (module.get_parameter(name).data_ptr() == state[name].data_ptr()) == state[name].is_contiguous()
        assert module.get_parameter(name).is_leaf
    for _ in range(2):
        assert torch.equal(step(module), step(twin))
    assert_same_bits(dict(module.state_dict()), dict(twin.state_dict()))
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in module.buffers())
    if cast == "unchanged" and make is not fused:
        step(source), step(source)
        assert_same_bits(dict(module.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("make", [collection, bag, rows])
def test_a_module_without_memory_gets_the_state_that_is_assigned(make):
    source, state = trained(make)
    with torch.device("meta"):
        modules = [make(), make(device="meta")]
    for module in modules:
        module.load_state_dict(copy.deepcopy(state), assign=True)
        assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        assert module.learning_rate == OPTIMIZER.lr
    step(source)
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        step(source, torch.nan)
    for module in modules:
        step(module)
        step(module, torch.nan)
        assert_same_bits(dict(module.state_dict()), dict(source.state_dict()))
        skipped = {"user": 3, "genre": 2} if make is collection else 3
        assert module.skipped_rows() == skipped


@pytest.mark.parametrize("make", [collection, bag, rows, dynamic])
@pytest.mark.usefixtures("poisoned")
def test_counters_of_a_module_that_gets_memory_have_values(make):
    """Also with a device by `with`, and where a module that has memory gets other memory."""
    source, state = trained(make)
    with torch.device("meta"):
        modules = [make(), make(device="meta")]
    modules += [make(), make().to("meta")]
    for module in modules:
        if make is dynamic:
            module = module if not module.table.weight.is_meta else module.to_empty(device="cpu")
        else:
            module.to_empty(device="cpu")
        module.load_state_dict(state)
        counters = getattr(module, "_collection", module)
        assert float(counters.learning_rate) == pytest.approx(OPTIMIZER.lr)
        assert not counters.skipped.any()
        assert not getattr(counters, "pending", torch.zeros(1)).any()
        step(module)
    step(source)
    for module in modules:
        assert_same_bits(dict(module.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("make", [collection, bag, rows])
def test_tensors_that_kernels_cannot_read_are_named(make):
    _, state = trained(make)
    prefix = "user." if make is collection else ""
    for name, dtype in (("weight", torch.complex64), ("weight", torch.int64), ("exp_avg", torch.complex64)):
        module = make()
        with pytest.raises(ValueError, match=rf"{prefix}{name}: expected .*torch\.float32.*, got {dtype}"):
            module.load_state_dict(state | {f"{prefix}{name}": state[f"{prefix}{name}"].to(dtype)}, assign=True)
    # States that are not loaded, or replaced.
    partial = {name: tensor for name, tensor in state.items() if not name.endswith("exp_avg_sq")}
    on_meta, replaced = make(device="meta"), make()
    on_meta.load_state_dict(partial, strict=False, assign=True)
    table = replaced["user"] if make is collection else replaced
    table.exp_avg = table.exp_avg.half()
    title = "table 'user'" if make is collection else "table 'weight'"
    for module, problem in ((on_meta, "float32 on meta"), (replaced, "float16 on cpu")):
        with pytest.raises(ValueError, match=rf"{title}: a state of its optimizer is torch\.{problem}"):
            step(module)


def test_all_tables_of_a_collection_are_checked_before_one_is_loaded():
    _, state = trained(collection)
    module, initial = collection(), {name: tensor.clone() for name, tensor in collection().state_dict().items()}
    module.load_state_dict(initial)
    tensors = dict(module.state_dict())
    last = [*module.configs][-1].name
    with pytest.raises(ValueError, match=rf"{last}\.weight: expected .*got torch\.int64"):
        module.load_state_dict(state | {f"{last}.weight": state[f"{last}.weight"].long()}, assign=True)
    assert_same_bits(dict(module.state_dict()), initial)
    assert all(tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in module.state_dict().items())


def test_weights_that_are_not_shared_any_more_are_refused():
    """Both would use the states of one."""
    model = nn.ModuleList([nn.Embedding(7, 4), nn.Embedding(7, 4)])
    model[1].weight = model[0].weight
    te.optim.fused(model, te.optim.Adagrad(lr=0.1))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    (model[0](IDS) + model[1](IDS)).sum().backward()
    model.load_state_dict(state, assign=True)
    model[0](IDS).sum().backward()
    with pytest.raises(RuntimeError, match="weight of '1' was shared with '0' when it was fused, and is not any more"):
        model[1](IDS)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, None], ids=["fused", "ordinary"])
@pytest.mark.parametrize("kind", [te.nn.EmbeddingBagCollection, te.nn.EmbeddingCollection])
@pytest.mark.parametrize("rows", [torch.ones(3, 8), torch.ones(9, 8), torch.ones(7, 4), torch.ones(8, 7).t()])
def test_a_weight_of_another_shape_is_refused(kind, optimizer, rows):
    """It is neither read nor written beyond its end, whether its parameter or its data is replaced."""
    for replace_data in (False, True):
        tables = kind([te.TableConfig("user", 7, 8), te.TableConfig("genre", 5, 8)], optimizer)
        tables(BATCH)
        if replace_data:
            tables["user"].weight.data = rows
        else:
            tables["user"].weight = nn.Parameter(rows)
        for training in (True, False):
            with torch.set_grad_enabled(training), pytest.raises(ValueError, match="'user': the weight must be a cont"):
                tables(BATCH)
        tables["user"].weight = nn.Parameter(torch.ones(7, 8))
        tables(BATCH)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, None], ids=["fused", "ordinary"])
def test_a_collection_is_freed_without_a_collector(optimizer):
    """Cached facts of its weights do not refer to it."""
    tables = te.nn.EmbeddingBagCollection([te.TableConfig("user", 7, 8), te.TableConfig("genre", 5, 4)], optimizer)
    tables(BATCH).sum().backward()
    alive = weakref.ref(tables.table_set)
    gc.disable()
    try:
        del tables
        assert alive() is None
    finally:
        gc.enable()


def test_computed_weights_and_ordinary_gradients_are_refused():
    """The update of a temporary tensor, or a gradient of a use outside of lookups, would be lost."""
    tables = collection()
    with pytest.raises(RuntimeError, match="'user' is computed"):
        torch.func.functional_call(tables, {"user.weight": torch.ones(7, 8, requires_grad=True) * 2}, (BATCH,))
    for module, batch, name in ((tables, BATCH, "genre"), (bag(), IDS, "weight")):
        parameters = dict(module.named_parameters())
        weight = parameters[name if name in parameters else f"{name}.weight"]
        (module(batch).sum() + weight.square().sum()).backward()
        with pytest.raises(RuntimeError, match=f"table '{name}' has a fused optimizer, and an ordinary gradient"):
            module(batch)
        with torch.no_grad():
            module(batch)
        weight.grad = None
        module(batch).sum().backward()
        (gradient,) = torch.autograd.grad(weight.square().sum(), weight)
        assert torch.equal(gradient, 2 * weight)
        module(batch)
