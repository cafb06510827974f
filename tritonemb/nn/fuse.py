"""`fuse` and `optim.fused`: replace the embeddings of an existing model in place, with updates in the backward."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tritonemb.nn.collections import FusedModule
from tritonemb.nn.embeddings import DynamicModule, Embedding, EmbeddingBag
from tritonemb.nn.single_table import SERVED_DEVICES, SERVED_DTYPES, SingleTable, reason_not_fusable
from tritonemb.optimizers import SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad
from tritonemb.tables.optimizer import FusedGroup, FusedOptimizer, check_optimizer, hooked_where_needed
from tritonemb.utils import on_error

_OURS: dict[type[nn.Module], type[SingleTable]] = {
    nn.modules.sparse.EmbeddingBag: EmbeddingBag,  # not from `nn`, which may be patched
    nn.modules.sparse.Embedding: Embedding,
    EmbeddingBag: EmbeddingBag,
    Embedding: Embedding,
}
UpdateTime = Literal["backward", "step"]
Dense = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class FuseReport:
    """Result of `fuse`.

    Attributes:
        fused: paths of the fused modules.
        left_alone: paths of the other embeddings, with the reason.
        optimizer: the fused optimizer as a `torch.optim.Optimizer`; None if there is none, or if nothing was fused.
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
    """Let every `torch.nn.EmbeddingBag` and `torch.nn.Embedding` of `model` use tritonemb's kernels, in place.

    Modules keep their identity, path, parameters, hooks and `state_dict`; only their class changes, to that of
    `tritonemb.nn` of the same name. With an optimizer, a backward pass updates the weights of all its tables at its
    end, and `weight.grad` stays None; a weight that several embeddings share is one table. The optimizer's state is in
    `state_dict` of the returned report's `optimizer`, not of the model.

    Under `torch.compile(backend="tritonemb")` all lookups of a graph are one launch, and so are the updates. With
    another backend each lookup has its own update; look up a table only once per graph.

    Args:
        optimizer: one of `tritonemb.optim`; None for ordinary gradients.
        by_step: whether `step` of the report's optimizer updates the tables, from all gradients since `zero_grad`,
            instead of each backward pass. In eager mode only: under `torch.compile` lookups are graph breaks.

    Returns:
        Report of the fused modules and of the others, with the reason: subclasses and modules with a replaced
        `forward`, computed weights, and, with an optimizer, modules without a fused update: frozen weights, weights
        that other modules use too, `mode="max"`, `scale_grad_by_freq`, float64.

    TypeError for other arguments than a module and an optimizer of tables.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse expects a torch.nn.Module, got {type(model).__name__}")
    group = None if optimizer is None else FusedGroup(check_optimizer(optimizer), by_step)
    embeddings: dict[str, Any] = {p: module for p, module in model.named_modules() if isinstance(module, tuple(_OURS))}
    reasons = {path: _reason_not_fusable(module, group is not None) for path, module in embeddings.items()}
    left_alone = {path: reason for path, reason in reasons.items() if reason}
    if group is not None:
        _exclude_shared(model, embeddings, left_alone)
    fused = {path: module for path, module in embeddings.items() if path not in left_alone}
    owners: dict[Tensor, SingleTable] = {}
    for path, module in fused.items():
        module.__dict__["_fused_from"] = type(module)
        module.__class__ = _OURS[type(module)]
        module._finish_init()
        module._name = path or "weight"
        if group is not None:
            module._attach_optimizer(group, module._name, owners.get(module.weight))
            owners.setdefault(module.weight, module)
    view = None
    if group is not None and owners:
        view = group.view(lambda: [states for table in owners.values() for states in table._states()], all_tables=True)
    return FuseReport(tuple(fused), left_alone, view)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: restore the classes of modules, with ordinary gradients; optimizer state is dropped.

    Modules of `tritonemb.nn` that were constructed with an optimizer keep their class and lose the optimizer. Gradients
    that `step` would apply are discarded.

    Raises:
        RuntimeError: in a block of `accumulate`, whose gradients would be lost; the model is unchanged.
        ValueError: if a module outside of `model` shares a weight, or if all tables are collections or dynamic tables;
            the model is unchanged.
    """
    tables = [m for m in model.modules() if isinstance(m, FusedModule) and m.optimizer is not None]
    created = [m for m in tables if isinstance(m, SingleTable) and not isinstance(m, DynamicModule)]
    fused = [m for m in model.modules() if "_fused_from" in m.__dict__ or m in created]
    if tables and not fused:
        raise ValueError("cannot remove the optimizer of collections and dynamic tables; construct them without one")
    unfuse_all(fused)


def unfuse_all(fused: list[Any]) -> None:
    for module in fused:
        group = module._optimized
        if group is not None:
            group.accumulator.check_closed("unfuse()")
        remaining_users = [other for other in module._state_users if other not in fused]
        if remaining_users:
            raise ValueError(
                f"the weight of {module._name!r} is also that of {remaining_users[0]._name!r}, and so is its "
                "optimizer's state; unfuse the model that has both"
            )
    for module in fused:
        module._detach_optimizer()
        module.__class__ = module.__dict__.pop("_fused_from", type(module))


def _reason_not_fusable(module: Any, updated: bool) -> str | None:
    if type(module) not in _OURS:
        return f"it is a {type(module).__name__}, a subclass"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        return "its weight is not an ordinary parameter"
    if weight.dtype not in SERVED_DTYPES or weight.device.type not in SERVED_DEVICES:
        return f"no kernels for a weight of {weight.dtype} on {weight.device}"
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
    return reason_not_fusable(module)


def _exclude_shared(model: nn.Module, embeddings: Mapping[str, nn.Module], left_alone: dict[str, str]) -> None:
    """Exclude weights with other users or aliases: a fused update needs all uses of a weight to be one table."""
    users: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
    materialized = [w for w in users if type(w) is nn.Parameter and w.device.type != "meta" and w.numel()]
    spans: dict[Any, tuple[int, int]] = {w: (w.data_ptr(), w.data_ptr() + w.nbytes) for w in materialized}
    for path, module in embeddings.items():
        weight = module._parameters.get("weight")
        begin, end = spans.get(weight, (0, 0))
        overlapping = [other for other in materialized if spans[other][0] < end and begin < spans[other][1]]
        sharing = [users[other][0] for other in overlapping if other is not weight]
        if sharing and path not in left_alone:
            left_alone[path] = f"its weight shares memory with {' and '.join(sharing)}"
    paths = {f"{path}.weight" if path else "weight": path for path in embeddings if path not in left_alone}
    for path in paths.values():
        other_users = [user for user in users[embeddings[path]._parameters["weight"]] if user not in paths]  # type: ignore
        if other_users:
            left_alone[path] = f"its weight is also {' and '.join(other_users)}, which needs an ordinary gradient"


class ModelOptimizer(torch.optim.Optimizer):
    """Optimizer of a model: the parameter groups of a dense optimizer, followed by one with the fused tables.

    `step` is the dense optimizer's. Learning rates of all groups may be set manually or by schedulers. `state_dict` has
    the layout of PyTorch's optimizers. `torch.amp.GradScaler` is not supported: it scales the loss, and so the update
    in the backward; train in bfloat16, or with `tritonemb.Trainer`, which supports float16.

    Attributes:
        report: fused and other embeddings.
        dense: optimizer of the other parameters, or None if there is none.
    """

    _step_supports_amp_scaling = True  # makes GradScaler pass its scale to `step`, which raises
    _is_initialized = False

    def __init__(self, model: nn.Module, report: FuseReport, make: Dense, by_step: bool = False) -> None:
        assert report.optimizer is not None
        self.report, self._tables = report, report.optimizer
        weights = {weight for group in self._tables.param_groups for weight in group["params"]}
        dense_parameters = [p for p in model.parameters() if p.requires_grad and p not in weights]
        self.dense = make(dense_parameters) if dense_parameters else None
        self._optimizers = [self._tables] if self.dense is None else [self.dense, self._tables]
        if isinstance(self.dense, torch.optim.LBFGS) and not by_step:
            raise ValueError(
                'LBFGS calls backward several times per step, and each call updates the tables; use update="step"'
            )
        super().__init__([group for optimizer in self._optimizers for group in optimizer.param_groups], {})
        self._is_initialized = True
        self._link()

    __getstate__ = FusedOptimizer.__getstate__

    def _link(self) -> None:
        self._tables.refresh()
        self.param_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self.state.clear()
        for optimizer in self._optimizers:
            self.state.update(optimizer.state)

    @hooked_where_needed
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the dense parameters, and the tables unless the backward did; return the closure's result.

        Warns as `FusedOptimizer.step` does. Raise ValueError from a `GradScaler`.
        """
        scaled = [self.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(value is not None for value in scaled):
            raise ValueError(
                "GradScaler scales the loss, so the backward updated the tables with scaled gradients; use bfloat16, "
                "which needs no scaling, or tritonemb.Trainer"
            )
        if self.dense is None or closure is None:
            result = self._tables.step(closure)  # first, as it may raise for a gradient
            return result if self.dense is None else self.dense.step()
        result = self.dense.step(closure)
        self._tables.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of dense parameters, and those of tables for `step`."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add dense parameters."""
        if not self._is_initialized:  # called by the constructor for the existing groups
            super().add_param_group(param_group)
            return
        if self.dense is None:
            raise ValueError("cannot add parameters: the model had no dense parameters, and so has no dense optimizer")
        self.dense.add_param_group(param_group)
        self._link()

    def accumulate(self) -> AbstractContextManager[None]:
        """Accumulate the tables' gradients of several backward passes, and apply them once at the end of the block.

        Dense gradients accumulate in `.grad`: call `step` once, after the block. Not for a compiled model.
        """
        return self._tables.accumulate()

    def state_dict(self) -> dict[str, Any]:
        self._link()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`; raise ValueError if groups, sizes or states differ, before any change."""
        *dense_groups, tables_group = state_dict["param_groups"]
        expected = [len(group["params"]) for group in self.param_groups]
        loaded = [len(group["params"]) for group in state_dict["param_groups"]]
        if expected != loaded:
            raise ValueError(f"the parameter groups must have {expected} parameters, got {loaded}")
        first, states = sum(loaded[:-1]), state_dict["state"]
        tables_states = {index - first: state for index, state in states.items() if index >= first}
        self._tables.load_state_dict({"state": tables_states, "param_groups": [tables_group]})
        if self.dense is not None:
            dense_states = {index: state for index, state in states.items() if index < first}
            self.dense.load_state_dict({"state": dense_states, "param_groups": dense_groups})
        self._link()


def fused(
    model: nn.Module, tables: Optimizer, dense: Dense | None = None, *, update: UpdateTime = "backward"
) -> ModelOptimizer:
    """Fuse `tables` into the embeddings of `model`, and create an optimizer of the other parameters.

    The training loop of `zero_grad`, `backward` and `step` does not change: each backward pass updates the embeddings,
    `step` the other parameters. For one update after several backward passes, see `ModelOptimizer.accumulate`.

    Args:
        model: model whose embeddings are fused in place, see `fuse`.
        tables: optimizer of the embeddings.
        dense: creates the optimizer of the other parameters, e.g. `lambda p: torch.optim.AdamW(p, lr=1e-3)`. By default
            the counterpart of `tables` in `torch.optim` with the same settings: SGD, Adagrad (for RowWiseAdagrad too),
            or Adam (AdamW with decay; for PartialRowWiseAdam too).
        update: "backward": each backward pass updates the embeddings, at the least cost. "step": `step` does, from all
            gradients since `zero_grad`, for loops and frameworks that call `backward` several times per step, or skip
            steps; under `torch.compile` lookups are graph breaks then.

    Raises:
        ValueError: for an unknown `update`; if `model` has no embedding to fuse, with the reasons; without a
            counterpart if `dense` is not passed. After any error, including those of `dense`, the model is unchanged.
    """
    if update not in get_args(UpdateTime):
        raise ValueError(f"update must be one of {get_args(UpdateTime)}, got {update!r}")
    make = _counterpart(check_optimizer(tables)) if dense is None else dense
    report = fuse(model, tables, by_step=update == "step")
    if report.optimizer is None:
        raise ValueError(f"the model has no embedding that can be fused:\n{report}")
    with on_error(lambda: unfuse_all([model.get_submodule(path) for path in report.fused])):
        return ModelOptimizer(model, report, make, update == "step")


def _counterpart(spec: Optimizer) -> Dense:
    decoupled = spec.weight_decay > 0 and spec.weight_decay_mode == "decoupled"
    common: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if spec.max_gradient is None and spec.max_norm is None and spec.cow_clip is None:
        if type(spec) is SGD and not decoupled:
            return partial(torch.optim.SGD, **common)
        if isinstance(spec, Adagrad | RowWiseAdagrad) and not decoupled:
            return partial(torch.optim.Adagrad, eps=spec.eps, **common)
        if isinstance(spec, Adam) and type(spec) in (Adam, PartialRowWiseAdam):
            adam = torch.optim.AdamW if decoupled else torch.optim.Adam
            return partial(adam, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
    raise ValueError(
        f"torch.optim has no counterpart of {spec}; pass an optimizer of the other parameters, e.g. "
        "dense=lambda p: torch.optim.Adam(p, lr=1e-3)"
    )
