"""Base of `EmbeddingBag` and `Embedding`: the weight of PyTorch's module as a table with an optional fused update."""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from tritonemb import ops
from tritonemb.errors import unused_gradient
from tritonemb.memory import MIN_REUSED_BYTES
from tritonemb.nn.collections import FusedModule
from tritonemb.ops.bag import Bags, as_torch_error, bag, weight_gradient
from tritonemb.ops.registry import CPU, choose_cached, graph_break, plain_eager
from tritonemb.ops.row_groups import ID_DTYPES
from tritonemb.optimizers import Optimizer
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.lookup_tables import check_not_data_parallel
from tritonemb.tables.optimizer import FusedGroup, States, check_optimizer
from tritonemb.tables.table import check_not_fully_sharded, convert_assigned, keep_dtypes, new_states
from tritonemb.types import TRAINABLE_DTYPES

SERVED_DTYPES = (*TRAINABLE_DTYPES, torch.float64)
SERVED_DEVICES = ("cpu", "cuda", "meta")
FEW_ELEMENTS = 1 << 18  # of a lookup, below which PyTorch's backward is faster than the kernels of `ops`


class SingleTable(FusedModule):
    """Mixin for `torch.nn.EmbeddingBag` or `torch.nn.Embedding`, which have `weight` and the options.

    With an optimizer it has buffers: `step` (number of updates), states by name and, not in `state_dict`, `skipped`.
    """

    weight: Tensor
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    step: Tensor
    skipped: Tensor
    table: DynamicTable  # only with num_embeddings=None
    _torch_op: Callable[..., Tensor]  # PyTorch's op, called with the weight and a batch
    _trained_ids: Callable[..., tuple[Tensor, Bags]]  # ids [N] of the rows that get gradients, and their bags
    _optimized: FusedGroup | None = None
    _name: str = "weight"
    _state_owner: tuple[Self, ...] = ()  # module with the same weight that has the states
    _state_users: tuple[Self, ...] = ()  # modules with the same weight that use the states of this one

    def reset_parameters(self) -> None:
        """Initialize the weight like PyTorch's module, and zero the optimizer's states."""
        super().reset_parameters()  # type: ignore[misc]
        if self._optimized is not None:
            self.set_learning_rate(self._optimized.optimizer.lr)
            for tensor in (self.skipped, *self.optimizer_states().values()):
                tensor.zero_()

    def _states(self) -> States:
        return [(self._name, self.weight, self.optimizer_states())]

    @property
    def learning_rate(self) -> Tensor:
        """Learning rate of the fused optimizer, float32 `[]`; raise AttributeError if there is none."""
        if self._optimized is None:
            raise AttributeError("this module has no fused optimizer, and so no learning_rate")
        return self._optimized.rate_on(self.weight.device)

    def skipped_rows(self) -> int:
        """Number of skipped row updates, with `on_nonfinite="skip"`."""
        return 0 if self._optimized is None else int(self.skipped)

    def optimizer_states(self) -> dict[str, Tensor]:
        """`step` and the optimizer's states by name; empty without a fused optimizer."""
        if self._optimized is None:
            return {}
        buffers = self._owner._buffers
        names = ("step", *(state.name for state in self._optimized.optimizer.states))
        return {name: cast(Tensor, buffers[name]) for name in names}

    @property
    def _owner(self) -> Self:
        return self._state_owner[0] if self._state_owner else self

    def _finish_init(self, optimizer: Optimizer | None = None, draw: bool = False) -> Self:
        # Convert NumPy's integers, which cause graph breaks.
        names = "num_embeddings", "embedding_dim", "padding_idx"
        sizes: dict[str, Any] = {name: vars(self).get(name) for name in names}
        vars(self).update({name: size.__index__() for name, size in sizes.items() if hasattr(size, "__index__")})
        if draw:
            self.reset_parameters()
        if optimizer is not None:
            self._attach_optimizer(FusedGroup(check_optimizer(optimizer)), persistent=True)
        return self

    def _attach_optimizer(
        self, group: FusedGroup, name: str = "weight", owner: Self | None = None, persistent: bool = False
    ) -> None:
        """Add this table to `group`, with the states of `owner`, or new buffers of this module."""
        reason = reason_not_fusable(self)
        if reason is not None:
            raise ValueError(reason)
        weight = self.weight
        if not weight.is_contiguous():
            self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=weight.requires_grad)
        self._optimized, self._name = group, name
        group.rate_on(weight.device)
        self.weight.grad = None
        if owner is not None:
            self._state_owner = (owner,)
            owner._state_users += (self,)
            return
        with torch.inference_mode(False):
            step, skipped = (torch.zeros(size, dtype=torch.int64, device=weight.device) for size in ((), (1,)))
            self.register_buffer("step", step, persistent)
            self.register_buffer("skipped", skipped, persistent=False)
            for state, values in new_states(self.weight, group.optimizer.states).items():
                self.register_buffer(state, values, persistent)

    def _detach_optimizer(self) -> None:
        if self._optimized is not None:
            self._optimized.accumulator.pop_all()
            for name in () if self._state_owner else ("skipped", *self.optimizer_states()):
                delattr(self, name)
        for name in ("_optimized", "_name", "_state_owner", "_state_users", "_fused_optimizer"):
            self.__dict__.pop(name, None)

    def _prefers_torch(self, input: Any, num_rows: int | None = None) -> bool | None:
        """Return whether a small call is faster with PyTorch's op in forward and backward.

        False: only in the forward. None: in neither, for tables other than float32 on the CPU, for results in reused
        memory (of `num_rows`, or one per id), or under a trace or transform. Under tracing without an optimizer, True:
        the backend merges PyTorch's op, or compiles it.
        """
        weight = self._parameters.get("weight")
        if weight is None or type(input) is not Tensor or input.is_sparse or weight.dtype != torch.float32:
            return None
        elements, fused = input.numel() * self.embedding_dim, self._optimized is not None
        is_small = not fused and elements < FEW_ELEMENTS  # in this order: a trace would guard the size
        if torch.compiler.is_compiling():
            return True if is_small and weight.device.type == "cpu" else None
        if choose_cached("embedding_bag", weight.device, (torch.float32,)) != CPU:
            return None
        if is_small:
            return True
        if fused:
            needs_kernels = not (torch.is_grad_enabled() and weight.requires_grad and weight.is_contiguous())
            needs_kernels = needs_kernels or tuple(weight.shape) != (self.num_embeddings, self.embedding_dim)
        else:
            needs_kernels = self.sparse or self.scale_grad_by_freq
        size = elements if num_rows is None else num_rows * self.embedding_dim
        needs_kernels = needs_kernels or 4 * size >= MIN_REUSED_BYTES or not elements
        needs_kernels = needs_kernels or self.max_norm is not None or torch.autograd.forward_ad._current_level >= 0
        return None if needs_kernels or not plain_eager(weight) else False

    def _by_torch(self, is_small: bool, is_plain: bool, input: Tensor, *batch: Tensor | None) -> Tensor:
        weight: Any = self._parameters["weight"]
        if is_small:
            if is_plain and not torch.compiler.is_compiling():
                return self._torch_op(weight, input, *batch)
            return super().forward(input, *batch)
        if self._optimized is not None:
            self._check_trainable()
        return TorchForward.apply(weight, self, input, *batch)

    def _call_with_context(self, look_up: Callable[..., Tensor], input: Tensor, *batch: Tensor | None) -> Tensor:
        """Call `look_up(input, *batch)`; errors name the path of the module, if `fuse` set it, and the sample."""
        if torch.compiler.is_compiling():
            return look_up(input, *batch)
        try:
            return look_up(input, *batch)
        except (IndexError, RuntimeError) as error:
            if not isinstance(input, Tensor) or input.layout != torch.strided or input.dtype not in ID_DTYPES:
                raise
            offsets, name = (*batch, None)[0], "" if self._name == "weight" else self._name
            converted = as_torch_error(error, input, self.weight.shape[0], hasattr(self, "mode"), offsets, name)
            if type(converted) is not type(error) or str(converted) == str(error):
                raise
            raise converted from None

    def _is_served(self, *tensors: Tensor | None) -> bool:
        """Return whether tritonemb's kernels support this call; else PyTorch's module runs."""
        weight = self.weight
        if self._optimized is None and self.sparse:
            return False  # PyTorch's sparse gradients are as fast
        is_supported = (
            weight.dtype in SERVED_DTYPES
            and weight.device.type in SERVED_DEVICES
            and weight.dim() == 2
            and 0 not in weight.shape
            and weight.is_contiguous()
            and not self.scale_grad_by_freq
            and all(tensor is None or tensor.device == weight.device for tensor in tensors)
        )
        if self._optimized is not None:  # the states have this shape
            is_supported = is_supported and tuple(weight.shape) == (self.num_embeddings, self.embedding_dim)
        is_served = is_supported and (torch.compiler.is_compiling() or _are_plain(weight, *tensors))
        if self._optimized is not None and torch.is_grad_enabled() and (not is_served or _under_transform()):
            raise RuntimeError(
                "the fused optimizer needs a contiguous weight of its original shape, on the CPU or CUDA device of the "
                "batch, and backward(); it does not support tensor subclasses, torch.func or forward-mode "
                "differentiation"
            )
        return is_served

    def _look_up(
        self, values: Tensor, trained_ids: Tensor, sample_weights: Tensor | None, bags: Bags, dtype: torch.dtype
    ) -> Tensor:
        """Look up `[B, dim]` or `[N, dim]`; the backward computes a gradient or updates with the optimizer."""
        if self._optimized is None or not torch.is_grad_enabled() or not self.weight.requires_grad:
            return bag(self.weight, values, sample_weights, bags, trained_ids, dtype)
        group = self._optimized
        self._check_trainable()
        look_up = _look_up_untraced if group.by_step and torch.compiler.is_compiling() else ops.bag_fused
        return look_up(self._table(), self._name, values, sample_weights, bags, trained_ids, dtype, group.receiver)

    def _check_trainable(self) -> None:
        check_not_data_parallel(self._name)
        weight, step = self.weight, cast(Tensor, self._owner._buffers["step"])
        if self._parameters.get("weight") is not weight or not isinstance(weight, nn.Parameter):
            raise RuntimeError(
                f"the weight of {self._name!r} is computed or replaces the module's parameter (parametrize, prune, "
                "functional_call), so the fused optimizer would update a temporary tensor; te.unfuse the module first"
            )
        if self._state_owner and self._owner.weight is not weight:
            raise RuntimeError(
                f"the weight of {self._name!r} was shared with {self._owner._name!r} when it was fused, and is not any "
                "more, but the optimizer's states are; te.unfuse the model, and fuse it again"
            )
        if not torch.compiler.is_compiling() and weight.grad is not None:
            raise unused_gradient(self._name)
        if step.device != weight.device:
            raise RuntimeError(
                f"the weight of {self._name!r} is on {weight.device}, its optimizer state on {step.device}; "
                "move the module as a whole, or fuse after loading"
            )

    def _table(self) -> ops.FusedTables:
        weight, buffers, group = self.weight, cast(dict[str, Tensor], self._owner._buffers), self._optimized
        assert group is not None
        return ops.FusedTables(
            [weight], [buffers[state.name] for state in group.optimizer.states], [buffers["step"]],
            [buffers["skipped"]], group.rate_on(weight.device), group.optimizer.name, group.hyperparameters,
        )  # fmt: skip

    def _renormalize(self, values: Tensor) -> None:
        """Scale rows of a call down to `max_norm`, if set."""
        if self.max_norm is not None:
            is_untraced = self._optimized is not None and torch.compiler.is_compiling()
            renormalize = _renormalize_untraced if is_untraced else torch.embedding_renorm_
            renormalize(self.weight.detach(), values, self.max_norm, self.norm_type)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._optimized is not None:
            check_not_fully_sharded(self._name, name, value)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, *args: Any) -> None:
        if self._optimized is not None:
            self._optimized.accumulator.check_closed("load_state_dict()")
            convert_assigned(self, *args)
        super()._load_from_state_dict(*args)
        if self._optimized is not None and not self._state_owner:
            device, skipped = self.weight.device, self.skipped  # not in the `state_dict`
            self.skipped = torch.zeros_like(skipped, device=device) if skipped.is_meta else skipped.to(device)
            self._optimized.rate_on(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        previous = dict(self._buffers)
        super()._apply(fn, recurse)
        keep_dtypes(self._buffers, previous)
        if self._optimized is not None:
            self._optimized.rate_on(self.weight.device)
        return self

    def extra_repr(self) -> str:
        text: str = super().extra_repr()
        return text if self._optimized is None else f"{text}, optimizer={self._optimized.optimizer}"


class TorchForward(torch.autograd.Function):
    """PyTorch's op in the forward, our kernels in the backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, module: SingleTable, *batch: Tensor | None) -> Tensor:
        ctx.module, ctx.num_rows = module, weight.shape[0]
        ctx.gather = None if module._optimized is None else module._optimized.receiver
        ctx.save_for_backward(*batch)
        return module._torch_op(weight, *batch)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        module: SingleTable = ctx.module
        batch = ctx.saved_tensors
        values, bags = module._trained_ids(*batch)
        grad = grad.reshape(-1, grad.shape[-1])
        if ctx.gather is None:
            gradient = weight_gradient(grad, values, bags, ctx.num_rows)
        else:
            gradient = ctx.gather(ops.BagGradient(module._table(), module._name, values, None, bags, grad))
        return gradient, None, *[None] * len(batch)


# Graph breaks.
_look_up_untraced = graph_break(
    'update="step" collects the gradients of several backward passes on the host; for one graph fuse with '
    'update="backward"'
)(ops.bag_fused)
_renormalize_untraced = graph_break(
    "max_norm changes rows in the forward that the backward of the same graph updates, for which the compiler would "
    "copy the table; for one graph use max_norm of the optimizer instead, as in te.optim.SGD(max_norm=1.0)"
)(lambda *args: torch.embedding_renorm_(*args))


def reason_not_fusable(module: Any) -> str | None:
    """Return why no optimizer can be fused into an `EmbeddingBag` or `Embedding`, PyTorch's or tritonemb's; None if it
    can."""
    weight: Tensor = module.weight
    if getattr(module, "mode", None) == "max":
        return 'mode="max" has no fused update; use "sum" or "mean", or omit the optimizer'
    if weight.dtype not in TRAINABLE_DTYPES:
        return f"a fused optimizer needs a weight of {TRAINABLE_DTYPES}, got {weight.dtype}"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True has no fused update; omit it or the optimizer"
    if 0 in weight.shape:
        return f"its weight of shape {list(weight.shape)} is empty"
    return None


def _are_plain(*tensors: Tensor | None) -> bool:
    """Return whether there is no `vmap`, forward-mode AD, or tensor subclass, which only PyTorch's ops support."""
    fake = torch._subclasses.FakeTensor
    if not all(tensor is None or type(tensor) in (Tensor, nn.Parameter, fake) for tensor in tensors):
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    if not _under_transform():
        return True
    reverse = torch._C._functorch.TransformType.Grad
    stack = torch._C._functorch.get_interpreter_stack() or []
    return all(interpreter.key() == reverse for interpreter in stack)


def _under_transform() -> bool:
    return not torch.compiler.is_compiling() and bool(torch._C._functorch.maybe_current_level())
