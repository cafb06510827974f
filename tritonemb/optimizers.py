"""Optimizers of embedding tables: frozen dataclasses that define the update of a row.

An optimizer is applied once per distinct row and step to `g`, the sum of the row's gradients in a fixed order;
gradients are clamped to ±`max_gradient` before they are summed. With `cow_clip`, the sum is then scaled down to the
norm `n · max(cow_clip · ‖w‖, cow_clip_floor)`, where `n` is the number of the row's occurrences in the batch (Zheng et
al., AAAI 2023, algorithm 1). Arithmetic is float32 for any dtype of the table; `t` counts steps from 1; `D` is the
embedding dim; sums and norms are over one row. The kernels are in `kernels/row_update.py`.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args
from weakref import WeakValueDictionary

WeightDecayMode = Literal["none", "l2", "decoupled"]
NonFinite = Literal["ignore", "raise", "skip"]
DECAY_MODES = (*get_args(WeightDecayMode), "trust_ratio")  # in kernels; "trust_ratio": the ratio includes the decay
_DECAYS = ("beta1", "beta2")
_LIMITS = ("max_gradient", "max_norm", "cow_clip")  # None for no limit
_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "eta", "beta", "l1", "l2", *_LIMITS, "cow_clip_floor", *_DECAYS)


class StateSpec(NamedTuple):
    """State of an optimizer: its name in `state_dict`, and whether it has one value per element or per row."""

    name: str
    per_element: bool


class Hyperparameters(NamedTuple):
    """Constants of all optimizers in one fixed order, the argument of the kernels. Unused ones are zero."""

    weight_decay: float = 0.0
    weight_decay_mode: float = 0.0  # index into DECAY_MODES
    max_gradient: float = math.inf
    max_norm: float = math.inf
    stochastic_rounding: float = 1.0
    on_nonfinite: float = 0.0  # index into NonFinite
    eps: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    momentum: float = 0.0
    eta: float = 0.0
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    cow_clip: float = math.inf
    cow_clip_floor: float = 0.0


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimizers.

    Args:
        lr: learning rate, at least 0; change it later with the module's `set_learning_rate`.
        weight_decay: decay factor, at least 0. Only rows in the batch decay.
        weight_decay_mode: "l2" adds `weight_decay · w` to `g`; "decoupled" subtracts `lr · weight_decay · w` from `w`
            in addition to the step (inside the trust ratio for the LAMB family, as in its paper); "none" forbids decay.
        max_gradient: each element of the incoming gradient is clamped to ±max_gradient before rows are summed.
        max_norm: after the step, a row with a larger L2 norm is scaled down to it.
        cow_clip: ratio of CowClip, which keeps the quality of small batches in large ones: a row's gradient, without
            weight decay, is scaled down to the norm `n · max(cow_clip · ‖w‖, cow_clip_floor)`. `n` counts the row's
            occurrences in the step's batch over all features, micro-batches and ranks, whatever their weights.
        cow_clip_floor: least bound of a gradient's norm per occurrence with `cow_clip`, at least 0.
        stochastic_rounding: for 16-bit tables, round up or down at random in proportion to the distance, by a
            counter-based generator keyed on (table, row, step, element), so that small steps are not lost.
        on_nonfinite: action for a NaN or infinity in a row's gradient: "skip" the row, count it and warn; "raise"
            before any table is changed; or "ignore" and write the result.

    Raises:
        ValueError: the message names the optimizer, the field and its range.
    """

    lr: float = 0.01
    weight_decay: float = field(default=0.0, kw_only=True)
    weight_decay_mode: WeightDecayMode = field(default="l2", kw_only=True)
    max_gradient: float | None = field(default=None, kw_only=True)
    max_norm: float | None = field(default=None, kw_only=True)
    cow_clip: float | None = field(default=None, kw_only=True)
    cow_clip_floor: float = field(default=1e-5, kw_only=True)
    stochastic_rounding: bool = field(default=True, kw_only=True)
    on_nonfinite: NonFinite = field(default="skip", kw_only=True)

    name: ClassVar[str]
    states: ClassVar[tuple[StateSpec, ...]] = ()
    reads_whole_rows: ClassVar[bool] = False  # the update of an element depends on other elements of its row
    reads_squares: ClassVar[bool] = False  # the update depends on them only by the mean of squared gradients
    trust_ratio_decay: ClassVar[WeightDecayMode | None] = None  # decay mode that the trust ratio includes, if any
    corrects_bias: ClassVar[bool] = False  # the step divides by 1 - beta1^t and 1 - beta2^t

    def __new__(cls, *values: Any, **_: Any) -> Self:
        if values and hasattr(values[0], "__iter__") and not isinstance(values[0], str):
            call = f"te.optim.fused(model, te.optim.{cls.__name__}(lr=0.01)) creates the optimizer of a model"
            raise TypeError(f"{cls.__name__} takes no parameters; {call}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        class_name = type(self).__name__
        for name in (spec.name for spec in fields(self) if spec.name in _NUMBERS):
            value, optional, high = getattr(self, name), name in _LIMITS, 1.0 if name in _DECAYS else math.inf
            if optional and value is None:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"{class_name}: {name} must be a number, got {value!r}")
            if not (value > 0.0 if optional else value >= 0.0) or not value < high:
                raise ValueError(
                    f"{class_name}: {name} must lie in {'(' if optional else '['}0.0, {high}), got {value}"
                )
        for name, choices in (("weight_decay_mode", get_args(WeightDecayMode)), ("on_nonfinite", get_args(NonFinite))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{class_name}: {name} must be one of {choices}, got {getattr(self, name)!r}")
        if not isinstance(self.stochastic_rounding, bool):
            raise TypeError(f"{class_name}: stochastic_rounding must be a bool, got {self.stochastic_rounding!r}")
        if self.weight_decay and self.weight_decay_mode == "none":
            raise ValueError(
                f"{class_name}: weight_decay is {self.weight_decay} but weight_decay_mode is 'none'; "
                "choose 'l2' or 'decoupled', or leave weight_decay at 0"
            )

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Constants in the order that the kernels expect, without the learning rate, which is a tensor."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        mode = "trust_ratio" if self.weight_decay_mode == self.trust_ratio_decay else self.weight_decay_mode
        values["weight_decay_mode"] = DECAY_MODES.index(mode)
        values["on_nonfinite"] = get_args(NonFinite).index(self.on_nonfinite)
        values |= {name: math.inf for name in _LIMITS if values[name] is None}
        return Hyperparameters(**{name: float(values[name]) for name in Hyperparameters._fields if name in values})


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w -= lr · g`."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row: `s += mean(g²)`, `w -= lr · g / (sqrt(s) + eps)`.

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD; Mudigere et al., ISCA 2022, section 4.1.4.
    """

    eps: float = 1e-8
    name: ClassVar[str] = "row_wise_adagrad"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("sum", False),)
    reads_whole_rows: ClassVar[bool] = True
    reads_squares: ClassVar[bool] = True


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad: `s += g²`, `w -= lr · g / (sqrt(s) + eps)`, element by element.

    Source: Duchi et al., JMLR 2011; FBGEMM's EXACT_ADAGRAD.
    """

    eps: float = 1e-8
    name: ClassVar[str] = "adagrad"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("sum", True),)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam on the rows of the batch (Kingma & Ba, ICLR 2015; FBGEMM's ADAM, whose decay is decoupled).

    `m = β₁m + (1-β₁)g`, `v = β₂v + (1-β₂)g²`, `w -= lr · (m / (1-β₁ᵗ)) / (sqrt(v / (1-β₂ᵗ)) + eps)`.
    `m` and `v` of rows outside the batch do not change; `t` is the step of the module, not of the row.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay_mode: WeightDecayMode = field(default="decoupled", kw_only=True)
    name: ClassVar[str] = "adam"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("exp_avg", True), StateSpec("exp_avg_sq", True))
    corrects_bias: ClassVar[bool] = True


@dataclass(frozen=True)
class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row: `v = β₂v + (1-β₂)·mean(g²)` (FBGEMM's PARTIAL_ROWWISE_ADAM)."""

    name: ClassVar[str] = "partial_row_wise_adam"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("exp_avg", True), StateSpec("exp_avg_sq", False))
    reads_whole_rows: ClassVar[bool] = True
    reads_squares: ClassVar[bool] = True


@dataclass(frozen=True)
class LAMB(Adam):
    """Adam's direction scaled by a trust ratio per row (You et al., ICLR 2020; FBGEMM's LAMB).

    `r = (m / (1-β₁ᵗ)) / (sqrt(v / (1-β₂ᵗ)) + eps) + weight_decay · w`, `w -= lr · (‖w‖ / ‖r‖) · r`. The ratio is
    1 if either norm is 0, as in the paper's own implementation, so that a row of zeros can leave zero.
    """

    name: ClassVar[str] = "lamb"
    reads_whole_rows: ClassVar[bool] = True
    trust_ratio_decay: ClassVar[WeightDecayMode | None] = "decoupled"


@dataclass(frozen=True)
class PartialRowWiseLAMB(LAMB):
    """LAMB with one second moment per row: `v = β₂v + (1-β₂)·mean(g²)` (FBGEMM's PARTIAL_ROWWISE_LAMB)."""

    name: ClassVar[str] = "partial_row_wise_lamb"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("exp_avg", True), StateSpec("exp_avg_sq", False))


@dataclass(frozen=True)
class LARSSGD(Optimizer):
    """Momentum SGD with a learning rate per row (You et al., arXiv:1708.03888; FBGEMM's LARS_SGD).

    `a = lr · eta · ‖w‖ / (‖g‖ + weight_decay · ‖w‖)` (0 where the divisor is 0),
    `m = momentum · m + a · (g + weight_decay · w)`, `w -= m`. By this formula a row of zeros stays zero; initialize
    tables to other values.
    """

    momentum: float = 0.9
    eta: float = 0.001
    name: ClassVar[str] = "lars_sgd"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("momentum_buffer", True),)
    reads_whole_rows: ClassVar[bool] = True
    trust_ratio_decay: ClassVar[WeightDecayMode | None] = "l2"


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularized leader, element by element (McMahan et al., KDD 2013, algorithm 1).

    `σ = (sqrt(n + g²) - sqrt(n)) / lr`, `z += g - σw`, `n += g²`; `w = 0` where `|z| ≤ l1`, else
    `w = -(z - sign(z)·l1) / ((beta + sqrt(n)) / lr + l2)`. `z` starts at 0, as in the paper, whose
    weights start at 0, too: a row's initial weights contribute through `σw` only, and fully with `beta = 0`.
    A learning rate of 0 leaves rows unchanged. As `w` follows from `z`, decoupled weight decay acts through `σw` only:
    use `l2`, or the decay mode "l2".
    """

    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    name: ClassVar[str] = "ftrl"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("linear", True), StateSpec("sum", True))


@dataclass(frozen=True)
class Custom(Optimizer):
    """User-defined optimizer: `rows, states = step(rows, states, g, lr, t)`, all float32, without autograd.

    Args:
        step: function of `rows` and `g` `[U, D]`, any rows of any tables of one dim; their states by name, `[U]` or
            `[U, D]`; `lr` `[]`; and `t`, int64 `[]`. It returns tensors like `rows` and `states`. Rows must be updated
            independently, and equal rows bitwise identically. It may be a `torch.compile`d function.
        states: name and size of each state: "row", one value per row, or "element", one per element; initially zero.
        whole_row: whether the update of an element depends on other elements of its row. If not, column-wise shards
            exchange less.

    Weight decay, clamping, `cow_clip`, `max_norm` and rounding are applied around the function, as for SGD.
    """

    step: Callable[..., Any] = field(kw_only=True)
    states: Any = field(default=(), kw_only=True)  # type: ignore[misc]  # a mapping becomes `StateSpec`s
    whole_row: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.step) or not isinstance(self.states, Mapping | tuple):
            expected = 'step must be a function of rows, states, g, lr and t, and states a dict like {"sum": "element"}'
            raise TypeError(f"Custom: {expected}, got {self.step!r} and {self.states!r}")
        for name, size in dict(self.states).items():
            if not str(name).isidentifier() or name in ("weight", "step", "skipped") or size not in _SIZES:
                expected = '"row" or "element", by names that are identifiers other than "weight", "step" and "skipped"'
                raise ValueError(f"Custom: states must be {expected}, got {name!r}: {size!r}")
            if not self.whole_row and size in _SIZES[:2]:
                raise ValueError(f"Custom: state {name!r} has one value per row, which needs whole_row=True")
        states = (StateSpec(name, size in _SIZES[2:]) for name, size in dict(self.states).items())
        self.__setstate__({"states": tuple(states), "reads_whole_rows": self.whole_row})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields of a copy, with a new unique name: kernels look the function up by it."""
        vars(self).update(state, name=f"custom_{next(_custom_numbers)}")
        customs[self.name] = self


_SIZES = ("row", False, "element", True)  # sizes of a state, and `per_element` of a `StateSpec`, which a copy passes
_custom_numbers = itertools.count()
customs: WeakValueDictionary[str, Custom] = WeakValueDictionary()  # by name
OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.name: kind
    for kind in (SGD, RowWiseAdagrad, Adagrad, Adam, PartialRowWiseAdam, LAMB, PartialRowWiseLAMB, LARSSGD, FTRL)
}
# Numbers of the kernels' optimizers. "assign": a row becomes its gradient; "place": row i of the table is group i.
KINDS = {name: kind for kind, name in enumerate([*OPTIMIZERS, "assign", "place"])}
