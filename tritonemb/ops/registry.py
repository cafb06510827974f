"""Which kernel serves an op, by a rule of names, and how ops are declared.

Kernel NAME is in `kernels/FILE.py` (Triton) and in `kernels/cpu/FILE.py` (CPU), both called NAME. Triton's serve GPUs,
and the CPU under `TRITON_INTERPRET=1`, where Triton interprets them. What neither has a dtype for is served by
`kernels/by_torch.py`: float64, and float8 tables on the CPU. The slow reference in `kernels/FILE.py`, called NAME with
`_reference` before a last underscore, is what kernels are tested against; it serves where it is `forced` to. Kernels
are imported when they are first used, so that importing tritonemb does not load a compiler.
"""

import functools
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import Layout
from tritonemb.types import TABLE_DTYPES, TRAINABLE_DTYPES

REFERENCE, CPU, TRITON, TORCH = "reference", "cpu", "triton", "torch"
_DTYPES = {CPU: TRAINABLE_DTYPES, TRITON: TABLE_DTYPES}
_FILES = {  # op -> file
    name: file
    for file, names in {
        "row_groups": ("row_groups",),
        "embedding_bag": ("embedding_bag", "sample_weight_gradient"),
        "row_update": ("row_update_", "row_gradients_"),
        "random": ("initialize_rows_",),
        "row_cache": ("row_cache_look_up_", "row_cache_allocate_", "row_cache_translate", "move_rows_"),
        "dynamic_index": tuple(
            f"dynamic_{name}" for name in ("find_", "begin_insert", "room", "commit_insert_", "remove_")
        ),
        "interaction": ("interaction", "interaction_gradient"),
        "cross": ("cross", "cross_gradient"),
        "jagged": ("jagged_permute", "block_bucketize", "drop_padding"),
        "quantize": ("quantize_pack", "quantize_unpack"),
    }.items()
    for name in names
}
_BY_TORCH = ("embedding_bag", "row_update", "interaction", "cross")  # files whose ops `by_torch.py` has, too
_CPU_BY_TORCH = ("cross", "jagged", "quantize")  # files whose CPU kernels are PyTorch's operators, and the references
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
_forced: str | None = None


def choose(op: str, device: torch.device, dtypes: Collection[torch.dtype] = ()) -> str | None:
    """The name of the kernel that serves `op` on `device` for tables of `dtypes`: "triton", "cpu" or "torch".

    "reference" only where it is forced; None if there is no kernel.
    """
    if _forced is not None:
        return _forced if _forced in kernels_of(op) else REFERENCE
    if device.type not in (CPU, "cuda"):
        return None
    name = TRITON if _HAS_TRITON and (device.type == "cuda" or _INTERPRETING) else CPU
    if all(dtype in _DTYPES[name] for dtype in dtypes):
        return name if name == TRITON or device.type == CPU else None
    known = all(dtype in (*TABLE_DTYPES, torch.float64) for dtype in dtypes)
    return TORCH if known and _FILES[op] in _BY_TORCH else None


def why(op: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """The name of the kernel that serves `op` on `device` for tables of `dtype`, and the reason in words."""
    name = choose(op, device, [dtype])
    if name is None:
        return "none", "Triton is not installed" if device.type == "cuda" and not _HAS_TRITON else "there is no kernel"
    reasons = {
        TRITON: "a GPU" if device.type == "cuda" else "TRITON_INTERPRET=1: interpreted, slow",
        CPU: "PyTorch's own operators" if _FILES[op] in _CPU_BY_TORCH else "compiled for the CPU by Numba",
        TORCH: f"PyTorch's own operators, for {str(dtype).removeprefix('torch.')}",
        REFERENCE: "forced",
    }
    return name, reasons[name]


def ops() -> tuple[str, ...]:
    """The ops that have kernels."""
    return tuple(_FILES)


def kernels_of(op: str) -> tuple[str, ...]:
    """The kernels that there are for an op."""
    return (REFERENCE, CPU, TRITON, TORCH) if _FILES[op] in _BY_TORCH else (REFERENCE, CPU, TRITON)


chosen = functools.cache(choose)  # not for what Dynamo traces, which looks through caches and warns


@functools.cache
def kernel(op: str, device: torch.device, dtypes: Hashable = ()) -> Callable[..., Any]:
    """The function that serves `op` on `device` for tables of `dtypes`, a tuple or frozenset; TypeError without one."""
    name = choose(op, device, dtypes)  # type: ignore[arg-type]
    if name is None:
        raise TypeError(
            f"no kernel serves {op} on {device} for {', '.join(map(str, dtypes)) or 'any dtype'}; "  # type: ignore[call-overload]
            "use float32, float16, bfloat16 or float64 on the CPU, or on a CUDA GPU with Triton installed"
        )
    return load(op, name)


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Serve every op by its kernel called `name`, or its reference if it has none: for tests, to find a wrong one."""
    if name not in (REFERENCE, CPU, TRITON, TORCH):
        raise ValueError(f"no kernels are called {name!r}; there are {[CPU, REFERENCE, TORCH, TRITON]}")
    before = _forced
    _force(name)
    try:
        yield
    finally:
        _force(before)


def _force(name: str | None) -> None:
    global _forced
    _forced = name
    chosen.cache_clear()
    kernel.cache_clear()


@functools.cache
def load(op: str, name: str) -> Callable[..., Any]:
    """The kernel called `name` of an op."""
    function = op
    if name == REFERENCE:
        function = f"{op[:-1]}_reference_" if op.endswith("_") else f"{op}_reference"
    file = {CPU: f"cpu.{_FILES[op]}", TORCH: "by_torch"}.get(name, _FILES[op])
    return getattr(importlib.import_module(f"tritonemb.kernels.{file}"), function)


# The pieces that schemas of several ops share. NamedTuples travel flat; `unflatten` makes them again.
LAYOUT = (
    "Tensor tables, Tensor lookups, Tensor key_starts, str table_names, str feature_names, SymInt multiplicity, "
    "SymInt num_rows, SymInt width, bool pooled"
)
GROUPS = "Tensor rows, Tensor starts, Tensor order, Tensor num_groups"
IDS_OR_GROUPS = "Tensor rows, Tensor? starts, Tensor? order, Tensor? num_groups"  # see `ungrouped`
BATCH = "Tensor values, Tensor offsets, Tensor? sample_weights"

assert [part.split()[-1] for part in LAYOUT.split(", ")] == list(Layout._fields)


# Their work on the host would be missing when a CUDA graph is replayed.
_EXCHANGES = "start_exchange", "finish_exchange", "broadcast_buffers"
_HOST_OPS = "pinned_lookup", "pinned_update", "shared_update", "accumulate_", *_EXCHANGES
_library = torch.library.Library("tritonemb", "FRAGMENT")
eager: dict[str, Callable[..., Any]] = {}  # by op: what it calls, for who needs no dispatcher


def define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None, save: Callable[..., None] | None = None,
) -> Any:  # fmt: skip
    """Declare `tritonemb::name`. `torch.library.custom_op` would do, but a call of a long schema costs it 140 µs.

    `schema` marks what the op changes; `fake` makes the shapes of the result, for tracing; `backward` is called with
    `(ctx, *grads)`, after `save(ctx, inputs, output)`: without them the op has no derivative.
    """
    unsafe = (torch.Tag.cudagraph_unsafe,) * (name in _HOST_OPS)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *unsafe))
    op = getattr(torch.ops.tritonemb, name).default
    is_changed = [argument.alias_info is not None for argument in op._schema.arguments]

    def call(*args: Any) -> Any:
        result, changed = run(*args), list[Tensor]()
        for argument in itertools.compress(args, is_changed):
            changed += [argument] if isinstance(argument, Tensor) else argument
        torch.autograd.graph.increment_version([tensor for tensor in changed if not tensor.is_inference()])
        return result

    def traced(*args: Any) -> Any:
        if torch.__version__ < "2.13":
            _let_backwards_update()
        if unsafe:
            _partition_at(op.name())
        return fake(*args)

    def no_derivative(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{op} has no autograd formula")

    eager[name] = call if any(is_changed) else run
    of_call: Any = torch._disable_dynamo(eager[name])  # type: ignore[attr-defined]
    _library.impl(name, of_call, "CompositeExplicitAutograd")
    torch.library.register_fake(op, traced, lib=_library)
    if not any(is_changed):
        torch.library.register_autograd(op, backward or no_derivative, setup_context=save, lib=_library)
    return op


def keep(op: Any) -> None:
    """Let no compiler leave such an op out though nobody uses its result."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(op, _EffectType.ORDERED)


@functools.cache
def _partition_at(op_name: str) -> None:
    """Keep an op out of Inductor's CUDA graphs: of ops that `keep` has wrapped in an effect it sees no tag."""
    from torch._inductor import config

    config.custom_should_partition_ops.append(op_name)


@functools.cache
def _let_backwards_update() -> None:
    """PyTorch 2.11 tracks, and so refuses, the update of a parameter in a backward (pytorch/pytorch#177213)."""
    from torch._functorch._aot_autograd import graph_capture_wrappers

    tag = graph_capture_wrappers.set_partitioner_tag_must_be_in_backward

    @contextmanager
    def tag_untracked() -> Iterator[None]:
        with tag(), torch.no_grad():
            yield

    graph_capture_wrappers.set_partitioner_tag_must_be_in_backward = tag_untracked


def unflatten(args: Sequence[Any], *kinds: Any) -> list[Any]:
    """An op's flat arguments, each NamedTuple type of `kinds` made of as many as it has fields; None stands for one."""
    found, place = [], 0
    for kind in kinds:
        size = 1 if kind is None else len(kind._fields)
        found.append(args[place] if kind is None else kind(*args[place : place + size]))
        place += size
    assert place == len(args)
    return found


def check_errors(device: torch.device | str | None = None) -> None:
    """Wait for `device` (default: the current CUDA device) and raise what its kernels have found wrong since.

    Lookups and updates on a GPU raise such findings by themselves, but at the next lookup or update. On the CPU they
    are raised at once, and there is nothing to wait for.

    Raises:
        ValueError: naming table, feature, sample, position and value of an id out of range; the table and row of a
            gradient that is not finite; or the feature and sample where offsets do not ascend.
    """
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda" or not torch.cuda.is_available():
        return
    from tritonemb.kernels.triton_utils import poll  # loads the compiler

    torch.cuda.synchronize(chosen)
    poll(torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index))
