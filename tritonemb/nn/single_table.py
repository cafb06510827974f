"""What `EmbeddingBag` and `Embedding` share: one table that PyTorch's modules hold, and its fused update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tritonemb import ops
from tritonemb.kernels.cpu.hugepages import advise_huge_pages
from tritonemb.kernels.layout import Layout, make_layout
from tritonemb.nn.fused_optimizer import FusedOptimizer
from tritonemb.ops.bag import Bags, bag, explained, serves_sparse
from tritonemb.optim import Optimizer
from tritonemb.types import TRAINABLE_DTYPES, TableConfig

SERVED_DTYPES = (*TRAINABLE_DTYPES, torch.float64)
SERVED_DEVICES = ("cpu", "cuda", "meta")


class SingleTable(nn.Module):
    """Beside `torch.nn.EmbeddingBag` or `torch.nn.Embedding`, which own `weight` and the options.

    With an optimizer it has the buffers `step` (updates so far), the optimizer's states by their names, and, not in
    `state_dict`, `learning_rate`, `skipped` and `pending`.
    """

    weight: Tensor
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    scale_grad_by_freq: bool
    sparse: bool
    step: Tensor
    skipped: Tensor
    learning_rate: Tensor
    pending: Tensor
    optimizer: Optimizer | None = None
    _fused_optimizer: FusedOptimizer | None
    _configs: tuple[TableConfig, ...]  # pooled by sum and by mean
    _layouts: dict[tuple[bool, torch.device], Layout]

    def reset_parameters(self) -> None:
        """Draw the weight anew, as PyTorch's module does; zero the optimizer's states."""
        super().reset_parameters()  # type: ignore[misc]
        if self.optimizer is not None:
            self.set_learning_rate(self.optimizer.lr)
            for name in ("step", "skipped", "pending", *(state.name for state in self.optimizer.states)):
                getattr(self, name).zero_()

    @property
    def fused_optimizer(self) -> FusedOptimizer | None:
        """The fused optimizer as a `torch.optim.Optimizer`, or None for an ordinary parameter."""
        if self.optimizer is None:
            return None
        if self._fused_optimizer is None:
            self._fused_optimizer = FusedOptimizer(cast(Any, _View(self)))
        return self._fused_optimizer

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the fused optimizer; nothing is recompiled.

        Raises:
            ValueError: without a fused optimizer, or for a negative or non-finite rate.
        """
        if self.optimizer is None:
            raise ValueError("this module has no fused optimizer; set the learning rate of the one you made")
        if not 0.0 <= lr < float("inf"):
            raise ValueError(f"the learning rate must lie in [0, inf), got {lr}")
        self._learning_rate = float(lr)
        self.learning_rate.fill_(lr)
        if self._fused_optimizer is not None:
            dict.__setitem__(self._fused_optimizer.param_groups[0], "lr", float(lr))

    @property
    def current_learning_rate(self) -> float:
        """What the fused optimizer's learning rate was last set to; the update reads the tensor `learning_rate`."""
        return self._learning_rate

    def _fuse(self, optimizer: Optimizer | None) -> None:
        """Let the backward update the weight from now on."""
        self.optimizer = optimizer
        self._fused_optimizer = None
        self._layouts = {}
        self._learning_rate = 0.0
        if optimizer is None:
            return
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be one of tritonemb.optim, e.g. te.optim.RowWiseAdagrad(lr=0.02), got {optimizer!r}"
            )
        weight = self.weight
        if weight.dtype not in TRAINABLE_DTYPES:
            raise ValueError(f"an optimizer can be fused for a weight of {TRAINABLE_DTYPES}, got {weight.dtype}")
        if self.scale_grad_by_freq:
            raise ValueError("scale_grad_by_freq=True has no fused update; leave one of them out")
        if 0 in weight.shape:
            raise ValueError(f"there is nothing to update in a weight of shape {list(weight.shape)}")
        if not weight.is_contiguous():
            self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=weight.requires_grad)
        size = self.num_embeddings, self.embedding_dim
        self._configs = tuple(TableConfig("weight", *size, ["input"], pooling) for pooling in ("sum", "mean"))
        device = "cpu" if weight.is_meta else weight.device  # counters wait there for a meta module to be moved
        self._learning_rate = optimizer.lr
        rate = torch.tensor(optimizer.lr, dtype=torch.float32, device=device)
        self.register_buffer("learning_rate", rate, persistent=False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("skipped", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("pending", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        for spec in optimizer.states:
            shape = weight.shape if spec.per_element else weight.shape[:1]
            state = torch.empty(shape, dtype=torch.float32, device=weight.device)
            advise_huge_pages(state)
            self.register_buffer(spec.name, state.zero_())

    def _is_served(self, *tensors: Tensor | None) -> bool:
        """Whether tritonemb's kernels can look this table up; else PyTorch's module must."""
        weight = self.weight
        plain = (
            weight.dtype in SERVED_DTYPES
            and weight.device.type in SERVED_DEVICES
            and weight.dim() == 2
            and 0 not in weight.shape
            and weight.is_contiguous()
            and not self.scale_grad_by_freq
            and all(tensor is None or tensor.device == weight.device for tensor in tensors)
        )
        if self.optimizer is not None:  # whose states have this shape
            plain = plain and tuple(weight.shape) == (self.num_embeddings, self.embedding_dim)
        served = plain and (torch.compiler.is_compiling() or _are_ordinary(weight, *tensors))
        if self.optimizer is None and self.sparse and torch.is_grad_enabled():
            return served and serves_sparse(weight, *tensors)
        if self.optimizer is not None and torch.is_grad_enabled() and (not served or _under_transform()):
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
        if self.optimizer is None or not torch.is_grad_enabled():
            return bag(self.weight, values, sample_weights, bags, trained, self.sparse, dtype)
        layout = self._layout(bags, values.device)
        if torch.compiler.is_compiling():
            return self._update_in_backward(values, trained, sample_weights, bags, layout, dtype)
        try:
            return self._update_in_backward(values, trained, sample_weights, bags, layout, dtype)
        except ValueError as error:
            raise explained(error, values, self.weight.shape[0], bags.pooled) from None

    def _update_in_backward(
        self, values: Tensor, trained: Tensor, sample_weights: Tensor | None, bags: Bags, layout: Layout,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        spec = self.optimizer
        assert spec is not None
        fused = ops.Fused(
            [self.weight], [getattr(self, state.name) for state in spec.states], self.step, self.skipped,
            self.learning_rate, self.pending, spec.name, list(spec.hyperparameters),
        )  # fmt: skip
        groups = ops.row_groups(trained, bags.offsets, layout)
        return ops.embedding_bag_fused(fused, values, bags.offsets, sample_weights, groups, layout, bags.checked, dtype)

    def _layout(self, bags: Bags, device: torch.device) -> Layout:
        found = self._layouts.get((bags.mean, device))
        if found is None:
            tables = [self._configs[bags.mean]]
            if torch.compiler.is_compiling():
                return make_layout(tables, ["input"], bags.pooled, device)
            with torch.inference_mode(False):  # it is kept, for training too
                found = make_layout(tables, ["input"], bags.pooled, device)
            self._layouts[bags.mean, device] = found
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SingleTable:
        """Casting a module to 16 bits casts the weight; optimizer state and learning rate stay float32."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            original = before[name]
            if buffer is not None and original is not None and buffer.dtype != original.dtype:
                self._buffers[name] = original.to(buffer.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own optimizer view and layouts when it needs them."""
        return {**self.__dict__, "_fused_optimizer": None, "_layouts": {}}

    def extra_repr(self) -> str:
        text: str = super().extra_repr()
        return text if self.optimizer is None else f"{text}, optimizer={self.optimizer}"


def new_weight(
    num_embeddings: int, embedding_dim: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """An empty table, in huge pages where there are any."""
    weight = torch.empty((num_embeddings, embedding_dim), device=device, dtype=dtype)
    advise_huge_pages(weight)
    return weight


def _are_ordinary(*tensors: Tensor | None) -> bool:
    """Neither tensor subclasses, which PyTorch's own ops know, nor under `vmap` or forward-mode differentiation."""
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


@dataclass(frozen=True)
class _View:
    """A module as `FusedOptimizer` looks at collections: the one table of a collection of its own."""

    module: SingleTable

    @property
    def optimizer(self) -> Optimizer | None:
        return self.module.optimizer

    @property
    def tables(self) -> list[_View]:
        return [self]

    @property
    def config(self) -> TableConfig:
        return self.module._configs[0]

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def step(self) -> Tensor:
        return self.module.step

    @property
    def current_learning_rate(self) -> float:
        return self.module.current_learning_rate

    def set_learning_rate(self, lr: float) -> None:
        self.module.set_learning_rate(lr)

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        optimizer = self.module.optimizer
        assert optimizer is not None
        return [(state.name, getattr(self.module, state.name)) for state in optimizer.states]
