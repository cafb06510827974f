"""`fuse` and `optim.fused`: the embeddings of an existing model, in place, are updated together in the backward."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tritonemb.nn.collections import FusedModule
from tritonemb.nn.dynamic_modules import DynamicModule
from tritonemb.nn.embeddings import Embedding, EmbeddingBag
from tritonemb.nn.single_table import SERVED_DEVICES, SERVED_DTYPES, SingleTable, why_not_fused
from tritonemb.optimizers import SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad
from tritonemb.tables.fused_update import FusedGroup
from tritonemb.tables.optimizer import FusedOptimizer, check_optimizer, hooked_where_needed
from tritonemb.utils import on_error

_OURS: dict[type[nn.Module], type[SingleTable]] = {
    nn.modules.sparse.EmbeddingBag: EmbeddingBag,  # of `nn` others may have been put in their place
    nn.modules.sparse.Embedding: Embedding,
    EmbeddingBag: EmbeddingBag,
    Embedding: Embedding,
}
UpdateTime = Literal["backward", "step"]
Dense = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


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
    """Run every `torch.nn.EmbeddingBag` and `torch.nn.Embedding` of `model` by tritonemb's kernels, in place.

    Modules keep their identity, path, parameters, hooks and `state_dict`; only their class changes, to that of
    `tritonemb.nn` of the same name. With an optimizer, backward passes update their weights, all tables of a pass
    together when it ends, and `weight.grad` stays None; a weight that several embeddings share is one table. The
    optimizer's state is in `state_dict` of the returned report's `optimizer`, not of the model.

    Under `torch.compile(backend="tritonemb")` lookups of a graph are one launch, updates too. By another backend each
    lookup has an update of its own; look a table up once a graph there.

    Args:
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
    group = None if optimizer is None else FusedGroup(check_optimizer(optimizer), by_step)
    embeddings: dict[str, Any] = {p: module for p, module in model.named_modules() if isinstance(module, tuple(_OURS))}
    left_alone = {path: why for path, module in embeddings.items() if (why := _why_not(module, group is not None))}
    if group is not None:
        _leave_shared_alone(model, embeddings, left_alone)
    fused = {path: module for path, module in embeddings.items() if path not in left_alone}
    owners: dict[Tensor, SingleTable] = {}
    for path, module in fused.items():
        module.__dict__["_fused_from"] = type(module)
        module.__class__ = _OURS[type(module)]
        module._begin()
        module._name = path or "weight"
        if group is not None:
            module._join(group, module._name, owners.get(module.weight))
            owners.setdefault(module.weight, module)
    view = None
    if group is not None and owners:
        view = group.view(lambda: [states for table in owners.values() for states in table._states()], all_tables=True)
    return FuseReport(tuple(fused), left_alone, view)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: modules are of the class again that they had, with ordinary gradients; optimizer state is dropped.

    Those of `tritonemb.nn` that were made with an optimizer keep their class and lose the optimizer. Gradients that
    `step` would apply are discarded.

    Raises:
        RuntimeError: in a block of `accumulate`, whose gradients would be lost; nothing has been changed then.
        ValueError: for a part of a model whose weight another part shares, and where all are collections or dynamic
            tables; nothing has been changed then.
    """
    tables = [m for m in model.modules() if isinstance(m, FusedModule) and m.optimizer is not None]
    made = [m for m in tables if isinstance(m, SingleTable) and not isinstance(m, DynamicModule)]
    fused = [m for m in model.modules() if "_fused_from" in m.__dict__ or m in made]
    if tables and not fused:
        raise ValueError("collections and dynamic tables keep the optimizer they were made with; make them without")
    unfuse_all(fused)


def unfuse_all(fused: list[Any]) -> None:
    """`unfuse` for these modules."""
    for module in fused:
        group = module._optimized
        if group is not None and group.accumulator.is_open and not group.by_step:
            raise RuntimeError("unfuse() in a block of accumulate() would lose its gradients; leave the block first")
        left = [other for other in module._state_users if other not in fused]
        if left:
            raise ValueError(
                f"the weight of {module._name!r} is also that of {left[0]._name!r}, and so is its optimizer's state; "
                "unfuse the model that has both"
            )
    for module in fused:
        module._leave()
        module.__class__ = module.__dict__.pop("_fused_from", type(module))


def _why_not(module: Any, updated: bool) -> str | None:
    if type(module) not in _OURS:
        return f"it is a {type(module).__name__}, a class of its own"
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


def _leave_shared_alone(model: nn.Module, embeddings: Mapping[str, nn.Module], left_alone: dict[str, str]) -> None:
    """A weight can be updated in the backward only if all that use it are updated so, as one table."""
    users: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
    placed = [w for w in users if type(w) is nn.Parameter and w.device.type != "meta" and w.numel()]
    spans: dict[Any, tuple[int, int]] = {w: (w.data_ptr(), w.data_ptr() + w.nbytes) for w in placed}
    for path, module in embeddings.items():
        weight = module._parameters.get("weight")
        begin, end = spans.get(weight, (0, 0))
        near = [other for other in placed if spans[other][0] < end and begin < spans[other][1]]
        others = [users[other][0] for other in near if other is not weight]
        if others and path not in left_alone:
            left_alone[path] = f"its weight shares memory with {' and '.join(others)}"
    ours = {f"{path}.weight" if path else "weight": path for path in embeddings if path not in left_alone}
    for path in ours.values():
        others_too = [user for user in users[embeddings[path]._parameters["weight"]] if user not in ours]  # type: ignore[index]
        if others_too:
            left_alone[path] = f"its weight is also {' and '.join(others_too)}, which needs an ordinary gradient"


class ModelOptimizer(torch.optim.Optimizer):
    """The parameter groups of a dense optimizer, and behind them one with the fused tables.

    `step` is the dense optimizer's. Learning rates of all groups may be set by hand or by schedulers. `state_dict` has
    the layout of PyTorch's optimizers. `torch.amp.GradScaler` is refused: it scales the loss, and the update in the
    backward would be scaled with it; train in bfloat16, or with `tritonemb.Trainer`, which scales float16 rightly.
    `report` says what was fused, `dense` is the optimizer of the other parameters, or None if there are none.
    """

    _step_supports_amp_scaling = True  # tells GradScaler to hand its scale to `step`, which can then refuse it
    _made = False

    def __init__(self, model: nn.Module, report: FuseReport, make: Dense, by_step: bool = False) -> None:
        assert report.optimizer is not None
        self.report, self._tables = report, report.optimizer
        weights = {weight for group in self._tables.param_groups for weight in group["params"]}
        rest = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in weights]
        self.dense = make(rest) if rest else None
        self._parts = [self._tables] if self.dense is None else [self.dense, self._tables]
        if isinstance(self.dense, torch.optim.LBFGS) and not by_step:
            raise ValueError(
                'LBFGS calls backward several times a step, and each updates the tables; use update="step"'
            )
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._made = True
        self._link()

    __getstate__ = FusedOptimizer.__getstate__

    def _link(self) -> None:
        self._tables.refresh()
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self.state.clear()
        for part in self._parts:
            self.state.update(part.state)

    @hooked_where_needed
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the dense parameters, and the tables if the backward has not. Returns the closure's result.

        Warns as `FusedOptimizer.step` does. ValueError from a `GradScaler`.
        """
        scaled = [self.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(value is not None for value in scaled):
            raise ValueError(
                "GradScaler scales the loss, so the backward updated the tables by scaled gradients; use bfloat16, "
                "which needs no scaling, or tritonemb.Trainer"
            )
        if self.dense is None or closure is None:
            result = self._tables.step(closure)  # first: it may refuse a gradient
            return result if self.dense is None else self.dense.step()
        result = self.dense.step(closure)
        self._tables.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the dense parameters' gradients, and those of tables that wait for `step`."""
        for part in self._parts:
            part.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add dense parameters."""
        if not self._made:  # by the constructor, which adds the groups that there are
            super().add_param_group(param_group)
            return
        if self.dense is None:
            raise ValueError("the model had no dense parameters, so there is no optimizer to add some to")
        self.dense.add_param_group(param_group)
        self._link()

    def accumulate(self) -> AbstractContextManager[None]:
        """Accumulate the tables' gradients of several backward passes and apply them once, when the block ends.

        Dense gradients add up by themselves: call `step` once, behind the block. Not for a compiled model.
        """
        return self._tables.accumulate()

    def state_dict(self) -> dict[str, Any]:
        self._link()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; ValueError if groups, sizes or states differ, before anything changes."""
        *dense_groups, tables_group = state_dict["param_groups"]
        ours = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in state_dict["param_groups"]]
        if ours != given:
            raise ValueError(f"the parameter groups must have {ours} parameters, got {given}")
        first, states = sum(given[:-1]), state_dict["state"]
        tables_states = {index - first: state for index, state in states.items() if index >= first}
        self._tables.load_state_dict({"state": tables_states, "param_groups": [tables_group]})
        if self.dense is not None:
            dense_states = {index: state for index, state in states.items() if index < first}
            self.dense.load_state_dict({"state": dense_states, "param_groups": dense_groups})
        self._link()


def fused(
    model: nn.Module, tables: Optimizer, dense: Dense | None = None, *, update: UpdateTime = "backward"
) -> ModelOptimizer:
    """Fuse `tables` into the embeddings of `model`, and make an optimizer of the other parameters.

    A loop of `zero_grad`, `backward` and `step` stays as it is: each backward pass updates the embeddings, `step` the
    rest. To update the embeddings once for several backward passes, see `ModelOptimizer.accumulate`.

    Args:
        model: its embeddings are fused in place, see `fuse`.
        tables: the optimizer of the embeddings.
        dense: makes the other parameters' optimizer, e.g. `lambda p: torch.optim.AdamW(p, lr=1e-3)`. If not given, the
            counterpart of `tables` in `torch.optim` with the same settings: SGD, Adagrad (for RowWiseAdagrad too), or
            Adam (AdamW with decay; for PartialRowWiseAdam too).
        update: "backward": each backward pass updates the embeddings, at the least cost. "step": `step` does, from all
            gradients since `zero_grad`, for loops and frameworks that call `backward` several times for a step, or
            leave steps out; under `torch.compile` lookups are graph breaks then.

    Raises:
        ValueError: for another `update`; if `model` has no embedding to fuse, with the reasons; if there is no
            counterpart and `dense` is not given. After any error, `dense`'s own too, the model is as it was.
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
    if spec.max_gradient is None and spec.max_norm is None:
        if type(spec) is SGD and not decoupled:
            return partial(torch.optim.SGD, **common)
        if isinstance(spec, Adagrad | RowWiseAdagrad) and not decoupled:
            return partial(torch.optim.Adagrad, eps=spec.eps, **common)
        if isinstance(spec, Adam) and type(spec) in (Adam, PartialRowWiseAdam):
            made = torch.optim.AdamW if decoupled else torch.optim.Adam
            return partial(made, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
    raise ValueError(
        f"torch.optim has no counterpart of {spec}; say what trains the other parameters, e.g. "
        "dense=lambda p: torch.optim.Adam(p, lr=1e-3)"
    )
