"""Definition of ops, and the choice of the kernel that implements an op for a device and dtype.

Kernel NAME is in `kernels/FILE.py` (Triton) and in `kernels/cpu/FILE.py` (CPU), both called NAME. Triton kernels run on
GPUs, and on the CPU under `TRITON_INTERPRET=1`, where Triton interprets them. Dtypes that neither supports fall back to
`kernels/by_torch.py`: float64, and float8 tables on the CPU. The slow reference in `kernels/FILE.py`, called NAME with
`_reference` before a trailing underscore, is the oracle of tests, and the CPU kernel where PyTorch's operators are as
fast; `use_kernels` selects it. Kernels are imported at their first use, so that importing tritonemb does not load a
compiler.
"""

import functools
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from tritonemb.layout import Layout, TensorList
from tritonemb.types import TABLE_DTYPES, TRAINABLE_DTYPES

P = ParamSpec("P")
R = TypeVar("R")
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
        "quantized_bag": ("quantized_bag",),
    }.items()
    for name in names
}
_BY_TORCH = ("embedding_bag", "row_update", "interaction", "cross")  # files whose ops `by_torch.py` implements
_CPU_BY_TORCH = ("cross",)  # files whose CPU kernels and references are PyTorch's operators
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
_forced: str | None = None  # name of the kernels that `use_kernels` selects


def choose(op: str, device: torch.device, dtypes: Collection[torch.dtype] = ()) -> str | None:
    """Choose the kernel of `op` on `device` for tables of `dtypes`: "triton", "cpu", "torch", or None if there is none.

    Return "reference" only if `use_kernels` selects it.
    """
    if _forced is not None:
        return _forced if _forced in kernels_of(op) else REFERENCE
    if device.type not in (CPU, "cuda"):
        return None
    name = TRITON if _HAS_TRITON and (device.type == "cuda" or _INTERPRETING) else CPU
    if all(dtype in _DTYPES[name] for dtype in dtypes):
        return name if name == TRITON or device.type == CPU else None
    supported = all(dtype in (*TABLE_DTYPES, torch.float64) for dtype in dtypes)
    return TORCH if supported and _FILES[op] in _BY_TORCH else None


def explain_choice(op: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """Return the name of the kernel of `op` on `device` for tables of `dtype`, and the reason for it."""
    name = choose(op, device, [dtype])
    if name is None:
        return "none", "Triton is not installed" if device.type == "cuda" and not _HAS_TRITON else "not implemented"
    by_torch = name == CPU and load(op, CPU) is load(op, REFERENCE)
    reasons = {
        TRITON: "a GPU" if device.type == "cuda" else "TRITON_INTERPRET=1: interpreted, slow",
        CPU: "PyTorch's own operators" if by_torch else "compiled for the CPU by Numba",
        TORCH: f"PyTorch's own operators, for {str(dtype).removeprefix('torch.')}",
        REFERENCE: "forced",
    }
    return name, reasons[name]


def ops() -> tuple[str, ...]:
    return tuple(_FILES)


def kernels_of(op: str) -> tuple[str, ...]:
    return (REFERENCE, CPU, TRITON, TORCH) if _FILES[op] in _BY_TORCH else (REFERENCE, CPU, TRITON)


choose_cached = functools.cache(choose)  # under Dynamo, which traces through caches and warns, call `choose`


@functools.cache
def kernel(op: str, device: torch.device, dtypes: Hashable = ()) -> Callable[..., Any]:
    """Return the kernel of `op` on `device` for tables of `dtypes`, a tuple or frozenset. Raise TypeError if
    there is none."""
    name = choose(op, device, dtypes)  # type: ignore[arg-type]
    if name is None:
        raise TypeError(
            f"{op} is not implemented on {device} for {', '.join(map(str, dtypes)) or 'any dtype'}; "  # type: ignore[call-overload]
            "use float32, float16, bfloat16 or float64 on the CPU, or on a CUDA GPU with Triton installed"
        )
    return load(op, name)


@contextmanager
def use_kernels(name: str) -> Iterator[None]:
    """Use the kernels called `name` for all ops, or an op's reference if it has no such kernel; for tests and
    bisection."""
    if name not in (REFERENCE, CPU, TRITON, TORCH):
        raise ValueError(f"unknown kernels {name!r}; expected one of {[CPU, REFERENCE, TORCH, TRITON]}")
    previous = _forced
    _force(name)
    try:
        yield
    finally:
        _force(previous)


def _force(name: str | None) -> None:
    global _forced
    _forced = name
    choose_cached.cache_clear()
    kernel.cache_clear()


@functools.cache
def load(op: str, name: str) -> Callable[..., Any]:
    function = op
    if name == REFERENCE or (name == CPU and _FILES[op] in _CPU_BY_TORCH):
        name = REFERENCE
        function = f"{op[:-1]}_reference_" if op.endswith("_") else f"{op}_reference"
    file = {CPU: f"cpu.{_FILES[op]}", TORCH: "by_torch"}.get(name, _FILES[op])
    return getattr(importlib.import_module(f"tritonemb.kernels.{file}"), function)


# Arguments that several ops share, by their name in the schemas of `define`: a NamedTuple, which is passed flat, or
# None for single arguments; and the schema of its fields.
SHARED_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "*Layout": (
        Layout,
        "Tensor tables, Tensor lookups, Tensor key_starts, str table_names, str feature_names, SymInt multiplicity, "
        "SymInt num_rows, SymInt width, bool pooled",
    ),
    "*Batch": (None, "Tensor values, Tensor offsets, Tensor? sample_weights"),
}
# Ops that do work on the host, which a replay of a CUDA graph would skip.
_EXCHANGES = "start_exchange", "finish_exchange", "broadcast_buffers"
_HOST_OPS = "pinned_lookup", "pinned_update", "shared_update", "accumulate_", *_EXCHANGES
_EFFECTFUL = "pinned_update", "shared_update"  # no compiler may remove them when their results are unused
_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))
_library = torch.library.Library("tritonemb", "FRAGMENT")
_handles = itertools.count()
objects: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by handle, a number that represents them in graphs
Run = Callable[..., Any]


def register(item: Any) -> int:
    """Return a new handle, by which ops find the object."""
    handle = next(_handles)
    objects[handle] = item
    return handle


def define(
    name: str, schema: str, fake: Run, run: Run | None = None, backward: Run | None = None, save: Run | None = None
) -> Run:
    """Define `tritonemb::name`, with less overhead than `torch.library.custom_op`: 140 µs per call of a long schema.

    Return a function that calls the op with NamedTuples; without the dispatcher in plain eager mode, if no gradient is
    recorded.

    Args:
        schema: arguments, `SHARED_ARGUMENTS` among them, and results; alias annotations mark the arguments that the op
            mutates.
        fake: function that returns results without values, for tracing.
        run: implementation for all devices; by default the kernel of that name for the device of the last tensor.
        backward, save: autograd formula `backward(ctx, *grads)`, after `save(ctx, inputs, output)`, which sets
            `ctx.inputs` by default. The formula returns the gradients of all arguments, or those that it has by name;
            without one the op is not differentiable.
    """
    arguments, _, results = schema.removeprefix("(").partition(") -> ")
    shared = [SHARED_ARGUMENTS.get(argument, (None, argument)) for argument in arguments.split(", ")]
    kinds = [kind for kind, text in shared for _ in range(1 if kind else text.count(",") + 1)]
    host_tags = (torch.Tag.cudagraph_unsafe,) * (name in _HOST_OPS)
    flat_schema = f"{name}({', '.join(text for _, text in shared)}) -> {results}"
    _library.define(flat_schema, tags=(torch.Tag.pt2_compliant_tag, *host_tags))
    op = getattr(torch.ops.tritonemb, name).default
    names = [argument.name for argument in op._schema.arguments]
    is_mutated = [argument.alias_info is not None for argument in op._schema.arguments]
    run_kernel, mutates = functools.partial(_run_kernel, name) if run is None else run, any(is_mutated)

    def increment_versions(flat: Sequence[Any]) -> None:
        mutated: list[Tensor] = []
        for argument in itertools.compress(flat, is_mutated):
            mutated += [argument] if isinstance(argument, Tensor) else argument
        torch.autograd.graph.increment_version([tensor for tensor in mutated if not tensor.is_inference()])

    def run_flat(*flat: Any) -> Any:
        result = run_kernel(*unflatten(flat, *kinds))
        increment_versions(flat)
        return result

    def run_fake(*args: Any) -> Any:
        if torch.__version__ < "2.13":
            _allow_update_in_backward()
        if host_tags:
            _partition_at(op.name())
        return fake(*unflatten(args, *kinds))

    def run_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if save is not None:
            save(ctx, unflatten(inputs, *kinds), output)
        elif backward is not None:
            ctx.inputs = unflatten(inputs, *kinds)

    def run_backward(ctx: Any, *grads: Any) -> Any:
        if backward is None:
            raise RuntimeError(f"{op} has no autograd formula")
        gradients = backward(ctx, *grads)
        if not isinstance(gradients, dict):
            return gradients
        nones = [[None] * len(needed) if isinstance(needed, list) else None for needed in ctx.needs_input_grad]
        return tuple(gradients.get(argument, none) for argument, none in zip(names, nones, strict=True))

    def call(*args: Any) -> Any:
        run_eagerly = False
        if not torch.compiler.is_compiling():
            tensors = _tensors(args)
            check_no_tangents(tensors)
            needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            run_eagerly = not needs_gradient and plain_eager(*tensors) and not tensors[0].is_meta
        if run_eagerly and not mutates:
            return run_kernel(*args)
        flat: list[Any] = []
        for kind, argument in zip(kinds, args, strict=True):
            flat += [argument] if kind is None else argument
        if not run_eagerly:
            return op(*flat)
        result = run_kernel(*args)
        increment_versions(flat)
        return result

    _library.impl(name, graph_break("implementation of an op")(run_flat), "CompositeExplicitAutograd")
    torch.library.register_fake(op, run_fake, lib=_library)
    if not mutates:
        torch.library.register_autograd(op, run_backward, setup_context=run_save, lib=_library)
    if name in _EFFECTFUL:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _register_effectful_op(op, _EffectType.ORDERED)
    return call


def _tensors(args: Iterable[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, (list, tuple)) and arg and not isinstance(arg[0], int):
            tensors += _tensors(arg)
    return tensors


def _run_kernel(name: str, *args: Any) -> Any:
    tensors, by_dtype = _tensors(args), _FILES[name] in _BY_TORCH
    return kernel(name, tensors[-1].device, frozenset([t.dtype for t in tensors]) if by_dtype else ())(*args)


def check_tensor(
    name: str, tensor: Tensor, dtypes: Collection[torch.dtype], shape: Sequence[int | None], device: torch.device
) -> None:
    """Raise TypeError or ValueError unless the tensor is as required; None in `shape` is any size."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    sizes = zip(shape, tensor.shape, strict=False)
    if tensor.dim() != len(shape) or any(n is not None and n != size for n, size in sizes):
        text = str(tuple(shape)).replace("None", "N")
        raise ValueError(f"{name} must have shape {text}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, got {tensor.device}; move one with .to()")


def check_no_tangents(tensors: Sequence[Tensor], sample_weights: Tensor | None = None) -> None:
    """Raise NotImplementedError for dual tensors of forward-mode differentiation: kernels would drop their tangents."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    all_tensors = [*tensors, *(() if sample_weights is None else (sample_weights,))]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in all_tensors):
        raise NotImplementedError(
            "tritonemb's kernels do not support forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad); use "
            "backward() or torch.autograd.grad, or for single tables te.nn.Embedding"
        )


def plain_eager(*tensors: Tensor | None, tables: Sequence[Tensor] = ()) -> bool:
    """Return whether a kernel can be called without the dispatcher: no trace, no transform, no tensor subclass.

    The dispatcher takes up to half a millisecond per call of a custom op with lists of tables. The tensors of a
    `TensorList` are known to be plain.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level()
    ):
        return False
    return _PLAIN_TYPES.issuperset(map(type, tensors if isinstance(tables, TensorList) else (*tensors, *tables)))


@functools.cache
def _partition_at(op_name: str) -> None:
    """Exclude an op from Inductor's CUDA graphs, which does not see the tags of ops with effects."""
    from torch._inductor import config

    config.custom_should_partition_ops.append(op_name)


@functools.cache
def _allow_update_in_backward() -> None:
    """Allow a backward to update a parameter, which PyTorch 2.11 rejects (pytorch/pytorch#177213)."""
    from torch._functorch._aot_autograd import graph_capture_wrappers

    tag = graph_capture_wrappers.set_partitioner_tag_must_be_in_backward

    @contextmanager
    def tag_untracked() -> Iterator[None]:
        with tag(), torch.no_grad():
            yield

    graph_capture_wrappers.set_partitioner_tag_must_be_in_backward = tag_untracked


def graph_break(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Exclude a function from graphs, like `torch.compiler.disable`, which imports the compiler: a second.

    `reason` says why, and what to do for one graph: the error of `fullgraph=True` quotes it.
    """

    def exclude(function: Callable[P, R]) -> Callable[P, R]:
        disabled: Any = _disable_dynamo(function)  # imports the compiler when it is called
        disabled._torchdynamo_disable, disabled._torchdynamo_disable_msg = True, reason  # read by a trace

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            has_compiler = torch.compiler.is_compiling() or "torch._dynamo" in sys.modules
            result: R = (disabled if has_compiler else function)(*args, **kwargs)
            return result

        return call

    return exclude


def unflatten(args: Sequence[Any], *kinds: Any) -> list[Any]:
    """Rebuild the NamedTuples among an op's flat arguments; a kind is a NamedTuple type, or None for one argument."""
    arguments, position = [], 0
    for kind in kinds:
        size = 1 if kind is None else len(kind._fields)
        arguments.append(args[position] if kind is None else kind(*args[position : position + size]))
        position += size
    assert position == len(args)
    return arguments


def check_errors(device: torch.device | str | None = None) -> None:
    """Synchronize with `device` (default: the current CUDA device), and raise the errors that its kernels recorded.

    Otherwise the next lookup or update on a GPU raises them. On the CPU errors are raised immediately, and the call
    does nothing.

    Raises:
        ValueError: the message names table, feature, sample, position and value of an id out of range; the table and
            row of a gradient that is not finite; or the feature and sample whose offsets do not ascend.
    """
    gpu = torch.device("cuda" if device is None else device)
    if gpu.type != "cuda" or not torch.cuda.is_available():
        return
    from tritonemb.kernels.triton_utils import poll  # loads the compiler

    torch.cuda.synchronize(gpu)
    poll(torch.device("cuda", torch.cuda.current_device() if gpu.index is None else gpu.index))
