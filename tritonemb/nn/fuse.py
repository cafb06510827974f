"""`fuse`: the embeddings of an existing model, each where it is, become members of a group that is updated together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from tritonemb.nn.embedding import Embedding
from tritonemb.nn.embedding_bag import EmbeddingBag
from tritonemb.nn.single_table import SERVED_DEVICES, SERVED_DTYPES, FusedModules, SingleTable, checked, why_not_fused
from tritonemb.optimizers import Optimizer
from tritonemb.tables.fused_update import FusedGroup
from tritonemb.tables.optimizer import FusedOptimizer

_OURS: dict[type[nn.Module], type[SingleTable]] = {
    nn.EmbeddingBag: EmbeddingBag,
    nn.Embedding: Embedding,
    EmbeddingBag: EmbeddingBag,
    Embedding: Embedding,
}


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` did.

    Attributes:
        fused: paths of the modules that are fused now.
        left_alone: paths of the embeddings that are not, and why.
        optimizer: the fused optimizer as a `torch.optim.Optimizer`; None without one, or if nothing was fused.
    """

    fused: tuple[str, ...]
    left_alone: dict[str, str]
    optimizer: FusedOptimizer | None

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} embeddings fused, {len(self.left_alone)} left alone"]
        lines += [f"  fused       {path or '(the model)'}" for path in self.fused]
        lines += [f"  left alone  {path or '(the model)'}: {reason}" for path, reason in self.left_alone.items()]
        return "\n".join(lines)


def fuse(model: nn.Module, optimizer: Optimizer | None = None, *, by_step: bool = False) -> FuseReport:
    """Let every `torch.nn.EmbeddingBag` and `torch.nn.Embedding` of `model` be served by tritonemb's kernels, in place.

    Modules keep their identity, path, parameters, hooks and `state_dict`; only their class changes, to that of
    `tritonemb.nn` of the same name. With an optimizer, backward passes update their weights, all tables of a pass
    together when it ends, and `weight.grad` stays None; a weight that several embeddings share is one table. The
    optimizer's state is in `state_dict` of the returned report's `optimizer`, not of the model.

    Under `torch.compile(backend="tritonemb")` lookups of a graph are one launch, updates too. By another backend each
    lookup has an update of its own; look a table up once a graph there.

    Args:
        model: changed in place.
        optimizer: one of `tritonemb.optim`; None for ordinary gradients.
        by_step: tables are updated by `step` of the report's optimizer, from all gradients since `zero_grad`, instead
            of at the end of each backward pass. In eager mode only: under `torch.compile` lookups are graph breaks.

    Returns:
        What was fused, and what was left alone, with the reason: subclasses and modules with a `forward` of their own,
        computed weights, and, with an optimizer, what has no fused update: frozen weights, weights that other modules
        use too, `mode="max"`, `scale_grad_by_freq`, float64.

    Raises:
        TypeError: for something else than a module or an optimizer of tables.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse expects a torch.nn.Module, got {type(model).__name__}")
    group = None if optimizer is None else FusedGroup(checked(optimizer), by_step)
    embeddings = {path: module for path, module in model.named_modules() if _is_embedding(module)}
    reasons = {path: _why_not(module, group is not None) for path, module in embeddings.items()}
    left_alone = {path: reason for path, reason in reasons.items() if reason is not None}
    if group is not None:
        _leave_shared_alone(model, embeddings, left_alone)
    fused = [(path, module) for path, module in embeddings.items() if path not in left_alone]
    holders: dict[Tensor, SingleTable] = {}
    for path, module in fused:
        _convert(module, _OURS[type(module)])
        table = cast(SingleTable, module)
        if group is not None:
            table._join(group, path or "weight", holders.get(table.weight))
            holders.setdefault(table.weight, table)
    view = None
    if group is not None and holders:
        tables = FusedModules(group, [(table._name, table) for table in holders.values()])
        view = FusedOptimizer(tables, tables if by_step else None)
        group.watch(view)
    return FuseReport(tuple(path for path, _ in fused), left_alone, view)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: modules are of the class again that they had, with ordinary gradients; optimizer state is dropped.

    Gradients that wait for `step` are forgotten.

    Raises:
        RuntimeError: in a block of `accumulate`, whose gradients would be lost; nothing has been changed then.
        ValueError: for a part of a model whose weight another part shares; nothing has been changed then.
    """
    unfuse_all([module for module in model.modules() if "_fused_from" in module.__dict__])


def unfuse_all(fused: list[Any]) -> None:
    """`unfuse` for these modules."""
    for module in fused:
        group = module._group if isinstance(module, SingleTable) else None
        if group is not None and group.accumulating:
            raise RuntimeError("unfuse() in a block of accumulate() would lose its gradients; leave the block first")
        left = [other for other in getattr(module, "_borrowers", ()) if other not in fused]
        if left:
            raise ValueError(
                f"the weight of {module._name!r} is also that of {left[0]._name!r}, and so is its optimizer's state; "
                "unfuse the model that has both"
            )
    for module in fused:
        if isinstance(module, SingleTable) and module._group is not None:
            module._group.discard()
        cast(SingleTable, module)._leave()
        module.__class__ = module.__dict__.pop("_fused_from")


def _convert(module: nn.Module, kind: type[SingleTable]) -> None:
    module.__dict__["_fused_from"] = type(module)
    module.__class__ = kind


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.EmbeddingBag | nn.Embedding)


def _why_not(module: Any, updated: bool) -> str | None:
    """Why this embedding cannot be fused, or None."""
    if type(module) not in _OURS:
        return f"it is a {type(module).__name__}, whose code is its own"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        return "its weight is not an ordinary parameter"
    if weight.dtype not in SERVED_DTYPES or weight.device.type not in SERVED_DEVICES:
        return f"no kernels serve a weight of {weight.dtype} on {weight.device}"
    if weight.dim() != 2 or 0 in weight.shape or not weight.is_contiguous():
        return f"its weight, of shape {list(weight.shape)}, is not a contiguous matrix"
    if "_fused_from" in module.__dict__ or (isinstance(module, SingleTable) and module.optimizer is not None):
        return "it is fused already"
    if not updated:
        return None
    if not weight.requires_grad:
        return "its weight is frozen"
    if tuple(weight.shape) != (module.num_embeddings, module.embedding_dim):
        return f"its weight has another shape, {list(weight.shape)}, than its sizes say"
    return why_not_fused(module)


def _leave_shared_alone(model: nn.Module, embeddings: dict[str, nn.Module], left_alone: dict[str, str]) -> None:
    """A weight can be updated in the backward only if all that use it are updated so, as one table."""
    users: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
    overlapping = _overlapping(list(users))
    for path, module in embeddings.items():
        others = overlapping.get(module._parameters.get("weight"))  # type: ignore[arg-type]
        if others and path not in left_alone:
            left_alone[path] = f"its weight shares memory with {' and '.join(users[o][0] for o in others)}"
    while True:
        ours = {f"{path}.weight" if path else "weight": path for path in embeddings if path not in left_alone}
        found = {}
        for path in ours.values():
            others_too = [user for user in users[embeddings[path]._parameters["weight"]] if user not in ours]  # type: ignore[index]
            if others_too:
                found[path] = f"its weight is also {' and '.join(others_too)}, which needs an ordinary gradient"
        if not found:
            return
        left_alone.update(found)


def _overlapping(tensors: list[Tensor]) -> dict[Tensor, list[Tensor]]:
    """The tensors that share memory with others, and which."""
    placed = [t for t in tensors if type(t) is nn.Parameter and t.device.type != "meta" and t.numel()]
    placed.sort(key=lambda tensor: (str(tensor.device), tensor.data_ptr()))
    found: dict[Tensor, list[Tensor]] = {}
    reach = placed[:1]  # the tensor that reaches furthest so far
    for tensor in placed[1:]:
        if tensor.device == reach[0].device and tensor.data_ptr() < _end(reach[0]):
            found.setdefault(reach[0], []).append(tensor)
            found.setdefault(tensor, []).append(reach[0])
        if _end(tensor) > _end(reach[0]):
            reach = [tensor]
    return found


def _end(tensor: Tensor) -> int:
    """The address behind a tensor that is dense in memory."""
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()
