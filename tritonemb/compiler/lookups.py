"""The lookups of a graph, whoever wrote them: each becomes one `Lookup`, or a reason why it stays as it is."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonemb import ops as _ops  # registers torch.ops.tritonemb
from tritonemb.compiler.values import is_tensor, module_path, source_path, value_of
from tritonemb.ops.row_groups import ID_DTYPES
from tritonemb.types import TRAINABLE_DTYPES

DEVICES = ("cpu", "cuda")
FUSED_BAGS = (torch.ops.tritonemb.bag_fused, torch.ops.tritonemb.bag_fused.default)
_MODES = ("sum", "mean", "max")
assert _ops


@dataclass(frozen=True)
class Optimizer:
    """What a lookup with a fused optimizer updates.

    Attributes:
        states, step, skipped, learning_rate: of the table, nodes.
        name, hyperparameters: of the optimizer.
        seed_name: what the table's stochastic rounding is seeded with.
    """

    states: tuple[Node, ...]
    step: Node
    skipped: Node
    learning_rate: Node
    name: str
    hyperparameters: tuple[float, ...]
    seed_name: str


@dataclass(frozen=True)
class Lookup:
    """One use of one table.

    Attributes:
        node: the call.
        results: the nodes that have its result: `node`, or items of a tuple.
        feature, table: what users call them.
        weight: `[rows, dim]`.
        ids: integers; `[B, L]` or `[N]` for bags, of any shape for single rows.
        offsets: of a bag's 1-D ids, `[B]`, or `[B + 1]` if `has_last_offset`; else None.
        sample_weights: of the ids' shape, or None.
        trained: ids that the gradient goes to, `[N]`, if others; -1 for none.
        single: a row for each id, instead of one for each bag.
        mean: of a bag, instead of the sum.
        padding_idx: an id that has no part in a bag; of single rows, that is not trained.
        checked: an id out of range is an error, not a zero.
        dtype: of the result.
        optimizer: None for a weight with an ordinary gradient.
    """

    node: Node
    results: tuple[Node, ...]
    feature: str
    table: str
    weight: Node
    ids: Node
    offsets: Node | None = None
    has_last_offset: bool = False
    sample_weights: Node | None = None
    trained: Node | None = None
    single: bool = False
    mean: bool = False
    padding_idx: int | None = None
    checked: bool = True
    dtype: torch.dtype = torch.float32
    optimizer: Optimizer | None = None

    @property
    def dim(self) -> int:
        return int(value_of(self.weight).shape[1])

    @property
    def num_rows(self) -> int:
        return int(value_of(self.weight).shape[0])


class _NotServed(Exception):
    """Says why."""


def recognise(node: Node, grad_enabled: bool) -> Lookup | str | None:
    """The lookup that a node is; a reason if it is one that stays as it is; None if it is something else."""
    if node.op != "call_function":
        return None
    read = _READERS.get(node.target)
    if read is None:
        return None
    try:
        lookup = read(node, grad_enabled)
        _check(lookup)
        return lookup
    except _NotServed as reason:
        return str(reason)


def kind_of(node: Node) -> str:
    """What users call a lookup's function or module."""
    _, module = module_path(node)
    if module is not None and issubclass(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        package = "te.nn" if module.__module__.startswith("tritonemb.") else "nn"
        return f"{package}.{module.__name__}"
    return getattr(node.target, "__name__", str(node.target))


def feature_name(node: Node) -> str:
    """The module's path, or for a function its name in the graph, behind the path of the module that calls it."""
    path, module = module_path(node)
    if module is not None and issubclass(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return path or node.name
    return f"{path}.{node.name}" if path else node.name


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _NotServed(reason)


def _check(lookup: Lookup) -> None:
    """What every kind of lookup must have to be served."""
    weight, ids = value_of(lookup.weight), value_of(lookup.ids)
    _require(
        lookup.weight.op in ("placeholder", "get_attr"), "its weight is computed in the graph, not a parameter or input"
    )
    _require(
        weight.dim() == 2 and weight.is_contiguous() and not is_traceable_wrapper_subclass(weight),
        "its weight is not an ordinary contiguous matrix",
    )
    _require(all(isinstance(size, int) for size in weight.shape), "its weight's shape differs from call to call")
    _require(0 not in weight.shape, f"its weight is empty: {list(weight.shape)}")
    _require(weight.dtype in TRAINABLE_DTYPES, f"there is no fast kernel for {weight.dtype} tables")
    _require(weight.device.type in DEVICES, f"there are no kernels for {weight.device}")
    _require(ids.dtype in ID_DTYPES, f"its ids are {ids.dtype}, not int32 or int64")
    _require(not is_traceable_wrapper_subclass(ids) and not ids.is_nested, "its ids are not an ordinary tensor")
    others = [lookup.ids, lookup.offsets, lookup.sample_weights, lookup.trained]
    devices = {value_of(node).device for node in others if node is not None} | {weight.device}
    _require(len(devices) == 1, f"its weight, ids and offsets are on different devices: {sorted(map(str, devices))}")
    if lookup.sample_weights is not None:
        _require(value_of(lookup.sample_weights).shape == ids.shape, "per_sample_weights have not the ids' shape")
    if not lookup.single:
        if lookup.offsets is None:
            _require(ids.dim() == 2, "its ids are neither 2-D nor have offsets")
            _require(not _is(ids.shape[1], 0), "its bags have no ids")
        else:
            _require(ids.dim() == 1 and value_of(lookup.offsets).dim() == 1, "its ids or offsets are not 1-D")
            _require(value_of(lookup.offsets).dtype in ID_DTYPES, "its offsets are not int32 or int64")
    _require(not _is(num_bags(lookup), 0), "the batch is empty")


def num_bags(lookup: Lookup) -> Any:
    """Rows of the result if it is pooled, a number or a symbolic one."""
    if lookup.offsets is None:
        ids = value_of(lookup.ids)
        return ids.numel() if lookup.single else ids.shape[0]
    count = value_of(lookup.offsets).shape[0]
    return count - 1 if lookup.has_last_offset else count


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _wrapped(padding_idx: int | None, num_rows: Any) -> int | None:
    """A padding row counted from the start."""
    if padding_idx is None:
        return None
    _require(isinstance(num_rows, int), "its weight's shape differs from call to call")
    return padding_idx + num_rows if padding_idx < 0 else padding_idx


def _embedding_bag_arguments(
    weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
    per_sample_weights: Any = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> None:  # fmt: skip
    """The signature of `torch.embedding_bag`, which is written in C."""


def _embedding_arguments(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> None:
    """The signature of `torch.embedding`, which is written in C."""


def _bound(signature: Callable[..., Any], node: Node) -> dict[str, Any]:
    bound = inspect.signature(signature).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _read_functional_bag(node: Node, grad_enabled: bool) -> Lookup:
    found = _bound(F.embedding_bag, node)
    return _bag(node, (node,), found, found["input"], str(found["mode"]), grad_enabled)


def _read_torch_bag(node: Node, grad_enabled: bool) -> Lookup:
    found = _bound(_embedding_bag_arguments, node)
    mode = found["mode"]
    _require(mode in (0, 1, 2), f"its mode is {mode!r}")
    whole = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    _require(whole, "more than the pooled rows is used of what torch.embedding_bag returns")
    return _bag(node, tuple(node.users), found, found["indices"], _MODES[mode], grad_enabled)


def _bag(
    node: Node, results: tuple[Node, ...], found: dict[str, Any], ids: Any, mode: str, grad_enabled: bool
) -> Lookup:
    _require(mode in ("sum", "mean"), f'mode="{mode}" has no fused kernel')
    lookup = _of_torch(node, results, found, ids, grad_enabled)
    offsets, sample_weights = found["offsets"], found["per_sample_weights"]
    for name, value in (("offsets", offsets), ("per_sample_weights", sample_weights)):
        _require(value is None or is_tensor(value), f"its {name} are not a tensor of the graph")
    if sample_weights is not None:
        _require(mode == "sum", "per_sample_weights go with the sum only")
        _require(value_of(sample_weights).dtype == lookup.dtype, "per_sample_weights have not the weight's dtype")
    return replace(
        lookup,
        offsets=offsets,
        has_last_offset=offsets is not None and bool(found["include_last_offset"]),
        sample_weights=sample_weights,
        mean=mode == "mean",
        padding_idx=_wrapped(found["padding_idx"], value_of(lookup.weight).shape[0]),
    )


def _read_functional_embedding(node: Node, grad_enabled: bool) -> Lookup:
    found = _bound(F.embedding, node)
    lookup = _of_torch(node, (node,), found, found["input"], grad_enabled)
    padding_idx = _wrapped(found["padding_idx"], value_of(lookup.weight).shape[0])
    return replace(lookup, single=True, padding_idx=padding_idx)


def _read_torch_embedding(node: Node, grad_enabled: bool) -> Lookup:
    found = _bound(_embedding_arguments, node)
    lookup = _of_torch(node, (node,), found, found["indices"], grad_enabled)
    return replace(lookup, single=True, padding_idx=None if found["padding_idx"] < 0 else found["padding_idx"])


def _of_torch(node: Node, results: tuple[Node, ...], found: dict[str, Any], ids: Any, grad_enabled: bool) -> Lookup:
    """What bags and single rows of PyTorch's have in common."""
    weight = found["weight"]
    _require(is_tensor(weight) and is_tensor(ids), "its weight or its ids are not a tensor of the graph")
    trained = grad_enabled and value_of(weight).requires_grad
    _require(found.get("max_norm") is None, "max_norm changes rows of the weight in the forward")
    _require(not (found["scale_grad_by_freq"] and trained), "scale_grad_by_freq=True has no fused gradient")
    _require(
        not (found["sparse"] and trained),
        "sparse=True gives sparse gradients, a fused lookup gives dense ones; leave out sparse, or fuse the optimizer "
        "(te.nn.EmbeddingBag(.., optimizer=..))",
    )
    return Lookup(node, results, feature_name(node), source_path(weight), weight, ids, dtype=value_of(weight).dtype)


def _read_bag(node: Node, grad_enabled: bool) -> Lookup:
    return _of_ours(node, list(node.args), None)


def _read_fused(node: Node, grad_enabled: bool) -> Lookup:
    weight, states, step, skipped, learning_rate, name, hyperparameters, seed_name, *batch = node.args
    optimizer: Any = (tuple(states), step, skipped, learning_rate, name, tuple(hyperparameters), seed_name)  # type: ignore[arg-type]
    return _of_ours(node, [weight, *batch], Optimizer(*optimizer))


def _of_ours(node: Node, args: list[Any], optimizer: Optimizer | None) -> Lookup:
    """Arguments as of `torch.ops.tritonemb.bag`."""
    _require(not node.kwargs and len(args) == 9, "it is not called as tritonemb's modules call it")
    weight, values, offsets, sample_weights, trained, pooled, mean, checked, dtype = args
    _require(all(map(is_tensor, (weight, values, offsets))), "its weight, ids or offsets are not tensors of the graph")
    return Lookup(
        node, (node,), feature_name(node), source_path(weight), weight, values, offsets if pooled else None,
        has_last_offset=pooled, sample_weights=sample_weights, trained=trained, single=not pooled, mean=mean,
        checked=checked, dtype=dtype, optimizer=optimizer,
    )  # fmt: skip


_READERS: dict[Any, Callable[[Node, bool], Lookup]] = {
    F.embedding_bag: _read_functional_bag,
    torch.embedding_bag: _read_torch_bag,
    F.embedding: _read_functional_embedding,
    torch.embedding: _read_torch_embedding,
    torch.ops.tritonemb.bag: _read_bag,
    torch.ops.tritonemb.bag.default: _read_bag,
    **dict.fromkeys(FUSED_BAGS, _read_fused),
}
