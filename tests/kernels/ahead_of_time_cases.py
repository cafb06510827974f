"""Small problems that take every launcher through its specialisations: dtypes, dims, alignments, options.

They are recorded and compiled ahead of time on the CPU; on a GPU they are compared with the references and run under
`compute-sanitizer`, so their data is valid. The core cases are the shapes that users bring most; the others are every
option with every other.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import tritonemb as te
from tests.strategies import ID_DTYPES, random_batch
from tritonemb.kernels.quantized_bag import quantize_rows
from tritonemb.kernels.row_groups import row_groups_reference
from tritonemb.layout import (
    ADDRESS_BITS,
    DISTINCT,
    INDEXED,
    NUM_ROWS,
    BatchGradient,
    DirectoryTensors,
    DynamicIndex,
    FusedTables,
    Layout,
    dynamic_rows,
    make_index,
    make_layout,
)
from tritonemb.ops.registry import TRITON, load
from tritonemb.optim import OPTIMIZERS
from tritonemb.tables.index import expired_ids
from tritonemb.types import CODECS

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BOTH = (False, True)
POOLINGS: tuple[te.types.Pooling, ...] = ("sum", "mean", "none")


class Case(NamedTuple):
    """A name of its own, and what makes the launches on a device. `core` cases run by default, and return results."""

    name: str
    call: Callable[[], Sequence[Tensor | None] | None]
    core: bool


_device = torch.device("cpu")
_kernels = TRITON


@contextmanager
def on(device: torch.device | str, kernels: str = TRITON) -> Iterator[None]:
    """Make the problems of cases that are called inside on `device`, the same on each, and serve them by `kernels`."""
    global _device, _kernels
    initial, _device, _kernels = (_device, _kernels), torch.device(device), kernels
    torch.manual_seed(0)
    try:
        yield
    finally:
        _device, _kernels = initial


class Problem(NamedTuple):
    """Tables of some dims and dtype with a batch of ids for them."""

    weights: list[Tensor]
    batch: te.KeyedJaggedTensor
    layout: Layout

    @property
    def num_outputs(self) -> int:
        return self.batch.stride() if self.layout.pooled else self.batch.values().numel()

    @property
    def sample_weights(self) -> Tensor | None:
        return self.batch.weights_or_none()


def problem(
    dims: Sequence[int] = (128, 128),
    dtype: torch.dtype = torch.float32,
    pooling: te.types.Pooling = "sum",
    weighted: bool = False,
    ids: torch.dtype = torch.int64,
    num_rows: int = 48,
    longest: int = 5,
) -> Problem:
    """A table a dim with bags of up to `longest` ids; offsets have the ids' dtype."""
    configs = [te.TableConfig(f"t{i}", num_rows, dim, pooling=pooling) for i, dim in enumerate(dims)]
    names = [config.name for config in configs]
    batch = random_batch(dict.fromkeys(names, num_rows), names, 16, longest, weighted, ids, ids).to(_device)
    weights = [torch.randn(num_rows, dim).to(_device, dtype) for dim in dims]
    return Problem(weights, batch, make_layout(configs, names, pooling != "none", _device))


def look_up(p: Problem, output_dtype: torch.dtype = torch.float32, check_bounds: bool = True) -> list[Tensor]:
    out = load("embedding_bag", _kernels)(
        p.weights, p.batch.values(), p.batch.offsets(), p.sample_weights, p.layout, check_bounds,
        output_dtype=output_dtype,
    )  # fmt: skip
    return [out]


def look_up_quantized(p: Problem, bits: int) -> list[Tensor]:
    """A lookup in rows of `bits` bits, or by their addresses, of 8 and of 4 bits in turn."""
    counts = [(8, 4)[number % 2] if bits == INDEXED else bits for number in range(len(p.weights))]
    tables = [quantize_rows(weight, count, False) for weight, count in zip(p.weights, counts, strict=True)]
    values, all_bits = p.batch.values(), [bits] * len(tables)
    if bits == INDEXED:
        by_table = zip(p.batch.keys(), tables, counts, strict=True)
        values = torch.cat([
            p.batch[key].values() * rows.shape[1] + (rows.data_ptr() | count << ADDRESS_BITS)
            for key, rows, count in by_table
        ])  # fmt: skip
    batch, layout = (values, p.batch.offsets(), p.sample_weights), p.layout._replace(tables=p.layout.tables.clone())
    layout.tables[:, NUM_ROWS] = 2**63 - 1 if bits == INDEXED else layout.tables[:, NUM_ROWS]
    return [load("quantized_bag", _kernels)(tables, all_bits, batch, layout, True, torch.float32)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(_device, dtype)


def sample_weight_gradient(p: Problem, grad_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    gradient, grad = load("sample_weight_gradient", _kernels), normal(p.num_outputs, p.layout.width, dtype=grad_dtype)
    return [gradient(p.weights, p.batch.values(), p.batch.offsets(), grad, p.layout)]


def group(p: Problem) -> tuple[Tensor, ...]:
    return load("row_groups", _kernels)(p.batch.values(), p.batch.offsets(), p.layout)


def update(
    p: Problem, optimizer: te.optim.Optimizer, grad_dtype: torch.dtype = torch.float32, own_steps: bool = False
) -> list[Tensor]:
    """One update; with `own_steps` each table has a step of its own."""
    states = [
        torch.zeros(weight.shape if spec.per_element else weight.shape[:1], device=_device)
        for spec in optimizer.states
        for weight in p.weights
    ]
    skipped = torch.zeros(len(p.weights), dtype=torch.int64, device=_device)
    step = torch.zeros(len(p.weights) if own_steps else (), dtype=torch.int64, device=_device)
    grad = normal(p.num_outputs, p.layout.width, dtype=grad_dtype)
    groups = row_groups_reference(p.batch.values(), p.batch.offsets(), p.layout)
    rate = torch.tensor(0.1, device=_device)
    load("row_update_", _kernels)(
        FusedTables(p.weights, states, step, skipped, rate, optimizer.name, optimizer.hyperparameters),
        BatchGradient(grad, p.batch.offsets(), p.sample_weights, groups, p.layout),
    )
    return [*p.weights, *states, step, skipped]


def row_gradients(p: Problem, compact: bool, grad_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The gradient of the problem's only table, dense or compact."""
    grad = normal(p.num_outputs, p.layout.width, dtype=grad_dtype)
    groups = row_groups_reference(p.batch.values(), p.batch.offsets(), p.layout)
    out = torch.zeros(groups[0].numel() if compact else p.layout.num_rows, p.layout.width, device=_device)
    batch = BatchGradient(grad, p.batch.offsets(), p.sample_weights, groups, p.layout)
    load("row_gradients_", _kernels)([out], batch, compact)
    return [out]


def drop_padding(p: Problem) -> list[Tensor]:
    return [load("drop_padding", _kernels)(p.batch.values(), p.batch.offsets(), 3, p.layout)]


def interact(num_features: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    dense, sparse = normal(8, dim, dtype=dtype), normal(8, num_features * dim, dtype=dtype)
    grad = normal(8, dim + num_features * (num_features + 1) // 2, dtype=dtype)
    out = load("interaction", _kernels)(dense, sparse)
    return [out, *load("interaction_gradient", _kernels)(grad, dense, sparse)]


def cross_layer(num_rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    inputs, product, crossed, grad = (normal(num_rows, width, dtype=dtype) for _ in range(4))
    bias = normal(width, dtype=dtype)
    out = load("cross", _kernels)(inputs, product, bias, crossed)
    return [out, *load("cross_gradient", _kernels)(grad, inputs, product, bias)]


def exchange(codec: str, dtype: torch.dtype, dims: Sequence[int], scaled: bool, mapped: bool) -> list[Tensor]:
    """Pack and unpack for two ranks, tables in turn; with a loss scale, with a permutation of rows."""
    from tritonemb.kernels.packing import make_packing

    ends = list(itertools.accumulate(dims))
    runs = [(end - dim, dim) for end, dim in zip(ends, dims, strict=True)]
    packing = make_packing([runs[::2], runs[1::2]], ends[-1], codec, _device)
    saturated = torch.zeros((), dtype=torch.int64, device=_device)
    scale = torch.tensor(8.0, device=_device) if scaled else None
    rows = torch.randperm(32).to(_device) if mapped else None
    matrix = normal(32, ends[-1], dtype=dtype)
    message = load("quantize_pack", _kernels)(matrix, packing, saturated, scale, rows)
    return [message, load("quantize_unpack", _kernels)(message, packing, dtype, saturated, scale, rows), saturated]


def jagged(weighted: bool, ids: torch.dtype) -> list[Tensor | None]:
    batch = problem((4, 4, 4), weighted=weighted, ids=ids).batch
    order = torch.tensor([2, 0, 1], device=_device)
    values, offsets, weights = batch.values(), batch.offsets(), batch.weights_or_none()
    permuted = load("jagged_permute", _kernels)(values, offsets, order, weights, 3, values.numel())
    sizes = torch.tensor([16, 16, 16], device=_device)
    return [*permuted, *load("block_bucketize", _kernels)(values, offsets, sizes, weights, 4)]


def row_cache(policy: str, num_sets: Sequence[int]) -> list[Tensor]:
    """Two batches of a cache whose tables have these numbers of sets, the second with other rows."""
    p, result = problem([16] * len(num_sets), num_rows=200), []
    size, sets, now = sum(num_sets) * 32, torch.tensor(num_sets, device=_device), torch.tensor(5, device=_device)
    tags, used = torch.full((size,), -1, device=_device), torch.zeros(size, dtype=torch.int64, device=_device)
    pins, first_slots = torch.zeros(size, dtype=torch.int32, device=_device), (sets.cumsum(0) - sets) * 32
    directory = DirectoryTensors(tags, used, pins, first_slots, p.layout.tables, sets)
    for ids in (p.batch.values(), p.batch.values() // 2):
        rows, starts, order, num_groups = row_groups_reference(ids, p.batch.offsets(), p.layout)
        distinct = rows[: int(num_groups)]
        slots = load("row_cache_look_up_", _kernels)(directory, distinct, now, policy)
        evicted = load("row_cache_allocate_", _kernels)(directory, distinct, slots, now, policy)
        by_group = torch.full_like(rows, -1)
        by_group[: slots.numel()] = slots
        result += [slots, evicted, load("row_cache_translate", _kernels)(by_group, starts, order, num_groups)]
    return [*result, tags, used, pins]


def dynamic_index(capacity: int, num_partitions: int, half_life: int) -> list[Tensor]:
    """Two batches of an index, the second with more new ids than there are rows."""
    index = make_index(capacity, _device, num_partitions)
    assert index.num_sets.numel() == num_partitions
    ids = torch.randint(-(2**63), 2**63 - 1, (capacity * 3 // 2,)).unique().to(_device)
    first, second = (part[: capacity * 3 // 5] for part in (ids[::2], ids[1::2]))
    result, halves = several_indexes([index], first, [0], 1, half_life), torch.cat([first[:20], second, first[:20]])
    result += several_indexes([index], halves, [0], 2, half_life)
    result.append(load("dynamic_remove_", _kernels)(index, ids[::3]))
    for step in (3, 4):
        indexes = [index, make_index(60, _device, 1)]
        result += several_indexes(indexes, ids[30 * (step - 3) :][:60], [0, -1, 1], step, half_life)
    ids, rows = dynamic_rows(index)
    return [*result, expired_ids(index, 0, 1), ids, rows, index.uses[rows], *index[4:]]


def several_indexes(indexes: list[DynamicIndex], values: Tensor, of_key: list[int], step: int, half_life: int):
    """A batch of tables, whose keys have equally many ids; of those of the last step not all are admitted."""
    bounds, num_tables = torch.arange(len(of_key) + 1, device=_device) * (len(values) // len(of_key)), len(indexes)
    rows, _, keys = load("dynamic_find_", _kernels)(indexes, values, bounds, of_key, [step] * num_tables)
    new = load("dynamic_begin_insert", _kernels)(indexes, values, keys)
    if step == 4:
        new.admitted[:] = new.ids % 4 > 0
    rules = [(step, step - 1, half_life * (number == 0)) for number in range(num_tables)]
    counts = torch.zeros(num_tables, 5, dtype=torch.int64, device=_device)
    starts = load("dynamic_room", _kernels)(indexes, new, rules, counts)
    inserted = load("dynamic_commit_insert_", _kernels)(indexes, new, starts, rules, rows)[0]
    size = int(counts[:, DISTINCT].sum())
    new = new._replace(ids=new.ids[:size], tables=new.tables[:size])
    shapes = [(index.ids.numel(), dim) for index, dim in zip(indexes, (7, 5), strict=False)]
    weights = [torch.zeros(shape, device=_device) for shape in shapes]
    states = [torch.ones(shape[:1], device=_device) for shape in shapes] + [weight + 1 for weight in weights]
    place = new.ids, inserted[:size], new.tables
    load("initialize_rows_", _kernels)(weights, states, [(5, 0.5), (2**62, 2.0)][:num_tables], *place)
    return [rows, counts, *weights, *states, load("dynamic_find_", _kernels)(indexes, values, bounds, of_key)[0]]


def move_rows(rows_of: Sequence[tuple[torch.dtype, int, int]], tables: Sequence[int] = ()) -> list[Tensor]:
    """Pairs of these dtypes, widths and numbers of elements between rows, of tables of 40 moves together."""
    tensors = []
    for rows in (40, 60):
        parts = [torch.randint(100, (rows, width + gap)).to(_device, dtype)[:, :width] for dtype, width, gap in rows_of]
        tensors.append([tensor[:, 0] if tensor.shape[1] == 1 else tensor for tensor in parts])
    rows = torch.arange(40, device=_device)
    starts = torch.tensor([0, 3, 40, 40], device=_device) if tables else None
    load("move_rows_", _kernels)(*tensors, rows, rows - 1, starts, tables)
    return tensors[0]


def short(dtype: torch.dtype) -> str:
    """ "float16" for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def sweep(call: Callable[..., object], *values: Sequence[Any]) -> Callable[[], None]:
    """A call with every combination of arguments."""

    def call_all() -> None:
        for args in itertools.product(*values):
            call(*args)

    return call_all


def forward_cases() -> Iterator[Case]:
    for dim in (1, 3, 4, 60, 64, 100, 128, 257, 512, 1024):
        core = dim in (3, 64, 128, 257, 1024)
        yield Case(f"forward-dim{dim}", lambda dim=dim: look_up(problem((dim, dim))), core)
    yield Case("forward-mixed", lambda: look_up(problem((3, 128, 64), pooling="mean", weighted=True)), True)
    for dtype in (*FLOATS[1:], *FLOAT8):
        yield Case(f"forward-{short(dtype)}", lambda dtype=dtype: look_up(problem(dtype=dtype), torch.float16), True)
    for pooling in POOLINGS[1:]:
        yield Case(f"forward-{pooling}", lambda pooling=pooling: look_up(problem(pooling=pooling)), True)
    for dtype, dim in itertools.product((torch.float32, torch.bfloat16), (64, 128, 256)):
        call = functools.partial(_look_up, dtype, "sum", False, torch.int64, dim, longest=40)
        yield Case(f"forward-long-bags-{short(dtype)}-dim{dim}", call, True)
    for bits, pooling in itertools.product((8, 4, 2, INDEXED), ("mean", "none")):

        def call_quantized(bits: int = bits, pooling: te.types.Pooling = pooling) -> list[Tensor]:
            return look_up_quantized(problem((64, 64) if pooling == "none" else (64, 19), pooling=pooling), bits)

        name = "by-address" if bits == INDEXED else f"int{bits}"
        yield Case(f"forward-quantized-{name}-{pooling}", call_quantized, True)
    yield Case("forward-int32", lambda: look_up(problem(ids=torch.int32, weighted=True), torch.bfloat16), True)
    for dtype in (*FLOATS, *FLOAT8):
        values = [dtype], ["sum"], BOTH, ID_DTYPES, (16, 64, 128, 1024), [torch.float32], BOTH, [40]
        yield Case(f"forward-long-{short(dtype)}", sweep(_look_up, *values), False)
    for pooling, dtype in itertools.product(POOLINGS, (*FLOATS, *FLOAT8)):
        values = [dtype], [pooling], BOTH, ID_DTYPES, (100, 128), FLOATS, BOTH
        yield Case(f"forward-all-{pooling}-{short(dtype)}", sweep(_look_up, *values), False)


def _look_up(dtype, pooling, weighted, ids, dim, output_dtype=torch.float32, check_bounds=True, longest=5):
    return look_up(problem((dim, dim), dtype, pooling, weighted, ids, longest=longest), output_dtype, check_bounds)


def sample_weight_cases() -> Iterator[Case]:
    for pooling in POOLINGS:
        call = functools.partial(_sample_weight_gradient, torch.float32, (128, 128), pooling)
        yield Case(f"sample_weights-{pooling}", call, pooling == "mean")
    for dtype, dim in itertools.product(FLOATS, (3, 128, 1024)):
        call = sweep(_sample_weight_gradient, [dtype], [(dim,)], POOLINGS, FLOATS)
        yield Case(f"sample_weights-all-{short(dtype)}-dim{dim}", call, False)


def _sample_weight_gradient(dtype, dims, pooling, grad_dtype=torch.float32):
    return sample_weight_gradient(problem(dims, dtype, pooling, True), grad_dtype)


def group_cases() -> Iterator[Case]:
    for ids in (torch.int32, torch.int64):
        yield Case(f"group-{short(ids)}", lambda ids=ids: group(problem(ids=ids)), True)
    # More rows mean more bits of a key: past 2^16, and past 2^31 by the layout alone.
    yield Case("group-many-rows", lambda: group(_with_rows(problem((16,)), 1 << 20)), True)
    yield Case("group-beyond-int32", lambda: group(_with_rows(problem((16,)), 1 << 33)), True)
    yield Case("group-scanned", _group_scanned, True)


def _group_scanned() -> list[Tensor]:
    """As of so many blocks that their counts are scanned."""
    with mock.patch.object(importlib.import_module("tritonemb.kernels.row_groups"), "SCANNED_BLOCKS", 1):
        return group(problem((16,)))


def _with_rows(p: Problem, num_rows: int) -> Problem:
    """The same batch for tables that say they have this many rows each."""
    names = p.batch.keys()
    configs = [te.TableConfig(name, num_rows, weight.shape[1]) for name, weight in zip(names, p.weights, strict=True)]
    return p._replace(layout=make_layout(configs, names, p.layout.pooled, _device))


def update_cases() -> Iterator[Case]:
    for name, kind in OPTIMIZERS.items():
        yield Case(f"update-{name}", functools.partial(_update, kind(lr=0.1)), True)
    adagrad = te.optim.RowWiseAdagrad(lr=0.1)
    for dim in (1, 3, 4, 60, 64, 100, 257, 512, 1024):
        yield Case(f"update-dim{dim}", functools.partial(_update, adagrad, (dim, dim)), dim in (3, 64, 1024))
    for dtype in FLOATS[1:]:
        for stochastic in (True, False):
            spec = te.optim.RowWiseAdagrad(lr=0.1, stochastic_rounding=stochastic)
            rounding = "stochastic" if stochastic else "nearest"
            case = functools.partial(_update, spec, (128,), dtype, "mean", True, dtype)
            yield Case(f"update-{short(dtype)}-{rounding}", case, stochastic)
    yield Case("update-mixed", functools.partial(_update, adagrad, (3, 128, 64), torch.float32, "mean", True), True)
    yield Case("update-none", functools.partial(_update, adagrad, (128,), torch.float32, "none"), True)
    clipped = te.optim.Adam(lr=0.1, weight_decay=0.1, max_gradient=1.0, max_norm=1.0, on_nonfinite="skip")
    yield Case("update-clipped", functools.partial(_update, clipped), True)
    yield Case("update-cow-clip", functools.partial(_update, te.optim.Adam(lr=0.1, cow_clip=1.0)), True)
    for name, dtype in (("adam", torch.float32), ("partial_row_wise_lamb", torch.bfloat16)):
        case = functools.partial(_update, OPTIMIZERS[name](lr=0.1), dtype=dtype, own_steps=True)
        yield Case(f"update-own-steps-{name}-{short(dtype)}", case, True)
    for (name, kind), dtype in itertools.product(OPTIMIZERS.items(), FLOATS):
        few, everything, title = [kind(lr=0.1)], [_everything(kind)], f"{name}-{short(dtype)}"
        dims, own_steps = [(dim,) for dim in (3, 100, 128, 512, 1024)], (["sum"], [False], [torch.float32], [True])
        yield Case(f"update-own-steps-all-{title}", sweep(_update, few + everything, dims, [dtype], *own_steps), False)
        yield Case(f"update-all-{title}", sweep(_update, few, dims[1:3], [dtype], POOLINGS, BOTH, FLOATS), False)
        yield Case(f"update-everything-{title}", sweep(_update, everything, [(3,), *dims[3:]], [dtype]), False)


def _everything(kind: type[te.optim.Optimizer]) -> te.optim.Optimizer:
    """An optimizer with every option that all have."""
    decay = {"weight_decay": 0.1, "weight_decay_mode": "decoupled"}
    return kind(lr=0.1, max_gradient=1, max_norm=1, on_nonfinite="skip", cow_clip=1, **decay)


def _update(optimizer, dims=(128, 128), dtype=torch.float32, pooling="sum", weighted=False, *args, **options):
    return update(problem(dims, dtype, pooling, weighted), optimizer, *args, **options)


def row_gradients_cases() -> Iterator[Case]:
    for dim, compact in itertools.product((3, 128), (False, True)):
        name = f"row_gradients-dim{dim}{'-compact' if compact else ''}"
        yield Case(name, lambda dim=dim, compact=compact: row_gradients(problem((dim,)), compact), dim == 128)
    for grad_dtype in FLOATS:

        def call(grad_dtype: torch.dtype = grad_dtype) -> None:
            for dim, pooling, weighted in itertools.product((64, 100, 1024), POOLINGS, (False, True)):
                row_gradients(problem((dim,), pooling=pooling, weighted=weighted), False, grad_dtype)

        yield Case(f"row_gradients-all-{short(grad_dtype)}", call, False)


def padding_cases() -> Iterator[Case]:
    for ids in (torch.int32, torch.int64):
        yield Case(f"padding-{short(ids)}", lambda ids=ids: drop_padding(problem((16,), ids=ids)), True)


def interaction_cases() -> Iterator[Case]:
    for num_features, dim, dtype in itertools.product((3, 26, 60, 130), (16, 60, 64, 128, 256), FLOATS):
        core = (num_features, dim) in ((26, 128), (3, 16)) and dtype != torch.float16
        name = f"interaction-{num_features}x{dim}-{short(dtype)}"
        yield Case(name, functools.partial(interact, num_features, dim, dtype), core)


def cross_cases() -> Iterator[Case]:
    for width, dtype in itertools.product((7, 64, 3456), FLOATS):
        core = width == 3456 and dtype != torch.float16
        yield Case(f"cross-{width}-{short(dtype)}", functools.partial(cross_layer, 64, width, dtype), core)


def exchange_cases() -> Iterator[Case]:
    for codec in CODECS:
        case = functools.partial(exchange, codec, torch.float32, (128, 128, 64, 128), False, False)
        yield Case(f"exchange-{codec}", case, True)
    for codec, dtype in itertools.product(CODECS, FLOATS):
        call = sweep(exchange, [codec], [dtype], ((128, 64), (3, 7, 100), (1024,)), BOTH, BOTH)
        yield Case(f"exchange-all-{codec}-{short(dtype)}", call, False)


def jagged_cases() -> Iterator[Case]:
    for weighted, ids in itertools.product((False, True), (torch.int32, torch.int64)):
        name = f"jagged-{short(ids)}{'-weighted' if weighted else ''}"
        yield Case(name, functools.partial(jagged, weighted, ids), weighted == (ids == torch.int32))


def row_cache_cases() -> Iterator[Case]:
    for policy, (name, num_sets) in itertools.product(("lru", "lfu"), (("one", (2,)), ("several", (3, 0, 4)))):
        yield Case(f"row_cache-{policy}-{name}", functools.partial(row_cache, policy, num_sets), True)
    float32, float16, uint8 = (torch.float32, torch.float16, torch.uint8)
    kinds: dict[str, tuple[tuple[torch.dtype, int, int], ...]] = {
        "wide": ((float32, 128, 0), (float16, 64, 0)),
        "longer": ((float32, 1024, 0),),
        "records": ((float32, 128, 1), (float32, 1, 128)),
        "mixed": ((float32, 128, 0), (float32, 1, 0), (float16, 64, 64)),
        "odd": ((float16, 3, 0), (float32, 64, 0)),
        "bytes": ((uint8, 7, 0), (float16, 128, 0)),
        "longs": ((torch.int64, 1, 0), (torch.int64, 3, 0)),
    }
    for name, rows_of in kinds.items():
        yield Case(f"move_rows-{name}", functools.partial(move_rows, rows_of), True)
    tables = functools.partial(move_rows, [*kinds["mixed"], *kinds["longer"], *kinds["odd"]], [0, 0, 2, 1, 1, 2])
    yield Case("move_rows-tables", tables, True)


def dynamic_cases() -> Iterator[Case]:
    for name, capacity, num_partitions, half_life in (("one", 60, 1, 0), ("several", 150, 3, 4)):
        call = functools.partial(dynamic_index, capacity, num_partitions, half_life)
        yield Case(f"dynamic_index-{name}", call, True)


def initial_cases() -> Iterator[Case]:
    for dim, named in itertools.product((3, 128, 1030), (False, True)):
        name = f"initial-dim{dim}{'-named' if named else ''}"
        yield Case(name, functools.partial(draw_rows, dim, named), True)


def draw_rows(dim: int, named: bool) -> list[Tensor]:
    """First values of rows, neighbours or named."""
    out, rows = torch.empty(3, dim, device=_device), torch.tensor([5, 2**33, 0], device=_device) if named else None
    load("initialize_rows_", _kernels)([out], [], [(2**62 + 1, 0.5)], rows, None, None, (2**33, 2))
    return [out]


CASES = [
    *forward_cases(),
    *sample_weight_cases(),
    *group_cases(),
    *update_cases(),
    *row_gradients_cases(),
    *padding_cases(),
    *interaction_cases(),
    *cross_cases(),
    *exchange_cases(),
    *jagged_cases(),
    *row_cache_cases(),
    *dynamic_cases(),
    *initial_cases(),
]
assert len({case.name for case in CASES}) == len(CASES)
