"""What `EmbeddingBag` and `Embedding` share: one table, the weight of PyTorch's module, and its fused update."""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.memory import MIN_REUSED_BYTES
from tritonemb.nn.collections import FusedModule
from tritonemb.ops.bag import Bags, as_torch_error, bag, weight_gradient
from tritonemb.ops.registry import CPU, chosen
from tritonemb.ops.row_groups import ID_DTYPES, plain_eager
from tritonemb.optimizers import Optimizer
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.fused_update import FusedGroup
from tritonemb.tables.optimizer import States, check_optimizer
from tritonemb.tables.table import keep_dtypes, new_states
from tritonemb.tables.table_set import check_not_data_parallel
from tritonemb.types import TRAINABLE_DTYPES

SERVED_DTYPES = (*TRAINABLE_DTYPES, torch.float64)
SERVED_DEVICES = ("cpu", "cuda", "meta")
FEW_ELEMENTS = 1 << 18  # that are looked up: from here on our backward is the faster one


class SingleTable(FusedModule):
    """Beside `torch.nn.EmbeddingBag` or `torch.nn.Embedding`, which own `weight` and the options.

    With an optimizer it has buffers: `step` (updates so far), its states by name and, not in `state_dict`, `skipped`.
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
    table: DynamicTable  # with num_embeddings=None alone
    _torchs_op: Callable[..., Tensor]  # of the weight and a batch
    _trained: Callable[..., tuple[Tensor, Bags]]  # the ids [N] that a batch's gradient goes to, and their bags
    _optimized: FusedGroup | None = None
    _name: str = "weight"
    _state_owner: tuple[Self, ...] = ()  # another module with the same weight, which has the states
    _state_users: tuple[Self, ...] = ()  # modules with the same weight, whose states this one has

    def reset_parameters(self) -> None:
        """Draw the weight anew, as PyTorch's module does; zero the optimizer's states."""
        super().reset_parameters()  # type: ignore[misc]
        if self._optimized is not None:
            self.set_learning_rate(self._optimized.optimizer.lr)
            for tensor in (self.skipped, *self.optimizer_states().values()):
                tensor.zero_()

    def _states(self) -> States:
        return [(self._name, self.weight, self.optimizer_states())]

    @property
    def learning_rate(self) -> Tensor:
        """The fused optimizer's learning rate, float32 `[]`; AttributeError without a fused optimizer."""
        if self._optimized is None:
            raise AttributeError("this module has no fused optimizer, and so no learning rate")
        return self._optimized.rate_on(self.weight.device)

    def skipped_rows(self) -> int:
        """For `on_nonfinite="skip"`: how many row updates have been skipped so far."""
        return 0 if self._optimized is None else int(self.skipped)

    def optimizer_states(self) -> dict[str, Tensor]:
        """`step` and the optimizer's states by name; none without a fused optimizer."""
        if self._optimized is None:
            return {}
        buffers = self._owner._buffers
        names = ("step", *(state.name for state in self._optimized.optimizer.states))
        return {name: cast(Tensor, buffers[name]) for name in names}

    @property
    def _owner(self) -> Self:
        return self._state_owner[0] if self._state_owner else self

    def _begin(self, optimizer: Optimizer | None = None, draw: bool = False) -> Self:
        # NumPy's integers are tensors to a tracer, and break its graph.
        names = "num_embeddings", "embedding_dim", "padding_idx"
        sizes: dict[str, Any] = {name: vars(self).get(name) for name in names}
        vars(self).update({name: size.__index__() for name, size in sizes.items() if hasattr(size, "__index__")})
        if draw:
            self.reset_parameters()
        if optimizer is not None:
            self._join(FusedGroup(check_optimizer(optimizer)), persistent=True)
        return self

    def _join(
        self, group: FusedGroup, name: str = "weight", owner: Self | None = None, persistent: bool = False
    ) -> None:
        """Become a table of `group`; states are those of `owner`, or buffers of this module."""
        reason = why_not_fused(self)
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

    def _leave(self) -> None:
        if self._optimized is not None:
            self._optimized.accumulator.pop_all()
            for name in () if self._state_owner else ("skipped", *self.optimizer_states()):
                delattr(self, name)
        for name in ("_optimized", "_name", "_state_owner", "_state_users", "_fused_optimizer"):
            self.__dict__.pop(name, None)

    def _few_elements(self, input: Any, num_rows: int | None = None) -> bool | None:
        """Whether a call looks up so little that PyTorch's op is the faster one, its backward too.

        False: in the forward alone. None: not even there, for other tables than float32 on the CPU, for results whose
        memory ours keeps (`num_rows`, or one an id), or while something traces or transforms the call. What is traced
        is PyTorch's without an optimizer: a backend merges it, or compiles it as it is.
        """
        weight = self._parameters.get("weight")
        if weight is None or type(input) is not Tensor or input.is_sparse or weight.dtype != torch.float32:
            return None
        elements, fused = input.numel() * self.embedding_dim, self._optimized is not None
        few = elements < FEW_ELEMENTS and not fused
        if torch.compiler.is_compiling():
            return True if few and weight.device.type == "cpu" else None
        if chosen("embedding_bag", weight.device, (torch.float32,)) != CPU:
            return None
        if few:
            return True
        if fused:
            ours = not (torch.is_grad_enabled() and weight.requires_grad and weight.is_contiguous())
            ours = ours or tuple(weight.shape) != (self.num_embeddings, self.embedding_dim)
        else:
            ours = self.sparse or self.scale_grad_by_freq
        size = elements if num_rows is None else num_rows * self.embedding_dim
        ours = ours or 4 * size >= MIN_REUSED_BYTES or not elements
        ours = ours or self.max_norm is not None or torch.autograd.forward_ad._current_level >= 0
        return None if ours or not plain_eager(weight) else False

    def _by_torch(self, few: bool, simple: bool, input: Tensor, *batch: Tensor | None) -> Tensor:
        weight: Any = self._parameters["weight"]
        if few:
            if simple and not torch.compiler.is_compiling():
                return self._torchs_op(weight, input, *batch)
            return super().forward(input, *batch)
        if self._optimized is not None:
            self._check_trainable()
        return ByTorch.apply(weight, self, input, *batch)

    def _called(self, look_up: Callable[..., Tensor], input: Tensor, *batch: Tensor | None) -> Tensor:
        """`look_up(input, *batch)`, whose errors name the path that `fuse` knows, and the sample."""
        if torch.compiler.is_compiling():
            return look_up(input, *batch)
        try:
            return look_up(input, *batch)
        except (IndexError, RuntimeError) as error:
            if not isinstance(input, Tensor) or input.layout != torch.strided or input.dtype not in ID_DTYPES:
                raise
            offsets, name = (*batch, None)[0], "" if self._name == "weight" else self._name
            found = as_torch_error(error, input, self.weight.shape[0], hasattr(self, "mode"), offsets, name)
            if type(found) is not type(error) or str(found) == str(error):
                raise
            raise found from None

    def _is_served(self, *tensors: Tensor | None) -> bool:
        """Whether tritonemb's kernels look this table up; else PyTorch's module does."""
        weight = self.weight
        if self._optimized is None and self.sparse:
            return False  # its gradients are as fast as they get
        plain = (
            weight.dtype in SERVED_DTYPES
            and weight.device.type in SERVED_DEVICES
            and weight.dim() == 2
            and 0 not in weight.shape
            and weight.is_contiguous()
            and not self.scale_grad_by_freq
            and all(tensor is None or tensor.device == weight.device for tensor in tensors)
        )
        if self._optimized is not None:  # whose states have this shape
            plain = plain and tuple(weight.shape) == (self.num_embeddings, self.embedding_dim)
        served = plain and (torch.compiler.is_compiling() or _are_ordinary(weight, *tensors))
        if self._optimized is not None and torch.is_grad_enabled() and (not served or _under_transform()):
            raise RuntimeError(
                "the fused optimizer updates, by backward(), an ordinary contiguous weight of the shape it was made "
                "for, on the CPU or CUDA device of its batch; it goes neither with tensor subclasses nor with "
                "torch.func or forward-mode differentiation"
            )
        return served

    def _look_up(
        self, values: Tensor, trained: Tensor, sample_weights: Tensor | None, bags: Bags, dtype: torch.dtype
    ) -> Tensor:
        """`[B, dim]` or `[N, dim]`; its backward makes a gradient, or updates if there is an optimizer."""
        if self._optimized is None or not torch.is_grad_enabled() or not self.weight.requires_grad:
            return bag(self.weight, values, sample_weights, bags, trained, dtype)
        group = self._optimized
        self._check_trainable()
        look_up = _look_up_untraced if group.by_step and torch.compiler.is_compiling() else ops.bag_fused
        return look_up(self._table(), self._name, values, sample_weights, bags, trained, dtype, group.receiver)

    def _check_trainable(self) -> None:
        check_not_data_parallel(self._name)
        weight, step = self.weight, cast(Tensor, self._owner._buffers["step"])
        if self._parameters.get("weight") is not weight or not isinstance(weight, nn.Parameter):
            raise RuntimeError(
                f"the weight of {self._name!r} is computed or was put in place of the module's parameter "
                "(parametrize, prune, functional_call), so the fused optimizer would update a passing tensor; "
                "te.unfuse the module first"
            )
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

    def _renormalise(self, values: Tensor) -> None:
        """Scale rows of a call down to `max_norm`, if there is one."""
        if self.max_norm is not None:
            untraced = self._optimized is not None and torch.compiler.is_compiling()
            renormalise = _renormalise_untraced if untraced else torch.embedding_renorm_
            renormalise(self.weight.detach(), values, self.max_norm, self.norm_type)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        keep_dtypes(self._buffers, before)
        if self._optimized is not None:
            self._optimized.rate_on(self.weight.device)
        return self

    def extra_repr(self) -> str:
        text: str = super().extra_repr()
        return text if self._optimized is None else f"{text}, optimizer={self._optimized.optimizer}"


class ByTorch(torch.autograd.Function):
    """A call by PyTorch's op, whose backward is ours."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, module: SingleTable, *batch: Tensor | None) -> Tensor:
        ctx.module, ctx.num_rows = module, weight.shape[0]
        ctx.gather = None if module._optimized is None else module._optimized.receiver
        ctx.save_for_backward(*batch)
        return module._torchs_op(weight, *batch)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        module: SingleTable = ctx.module
        batch = ctx.saved_tensors
        values, bags = module._trained(*batch)
        grad = grad.reshape(-1, grad.shape[-1])
        if ctx.gather is None:
            gradient = weight_gradient(grad, values, bags, ctx.num_rows)
        else:
            gradient = ctx.gather(ops.BagGradient(module._table(), module._name, values, None, bags, grad))
        return gradient, None, *[None] * len(batch)


# Graph breaks. Unlike `torch.compiler.disable`, this loads no compiler before one is used.
_look_up_untraced = _disable_dynamo(ops.bag_fused)  # with `update="step"` gradients are kept in eager mode
_renormalise_untraced = _disable_dynamo(lambda *args: torch.embedding_renorm_(*args))  # of rows that the graph updates


def why_not_fused(module: Any) -> str | None:
    """Why no optimizer can be fused into an `EmbeddingBag` or `Embedding`, PyTorch's or ours; None if one can."""
    weight: Tensor = module.weight
    if getattr(module, "mode", None) == "max":
        return 'mode="max" has no fused update; use "sum" or "mean", or leave out the optimizer'
    if weight.dtype not in TRAINABLE_DTYPES:
        return f"an optimizer can be fused for a weight of {TRAINABLE_DTYPES}, got {weight.dtype}"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True has no fused update; leave one of them out"
    if 0 in weight.shape:
        return f"there is nothing to update in a weight of shape {list(weight.shape)}"
    return None


def _are_ordinary(*tensors: Tensor | None) -> bool:
    """Whether there is no tensor subclass, which PyTorch's own ops know, no `vmap` and no forward-mode derivative."""
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
