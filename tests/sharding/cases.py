"""Trainings of one collection by several ranks, and by one process on the batches of all of them."""

from collections.abc import Generator, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tritonemb as te
from tests.helpers import make_collection, output_of
from tests.ranks import KEPT
from tests.sharding.models import whole_state
from tests.strategies import rows_of
from tritonemb.data.protocol import Prefetcher
from tritonemb.optim import OPTIMIZERS, Optimizer
from tritonemb.sharding import (
    ColumnWise,
    DataParallel,
    ExchangePrecision,
    Grid,
    RowWise,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    Sharding,
    ShardingPlan,
    TableColumnWise,
    TableRowWise,
    TableWise,
)
from tritonemb.sharding.placement import ShardGroups
from tritonemb.tables.table_set import PrefetchedFeatures

EXACT = ExchangePrecision("fp32", "fp32")


@dataclass(frozen=True)
class Case:
    """Training case: tables, shardings, optimizer and batches.

    Args:
        sizes: for each step, and each micro-batch of it, the samples of every rank.
        copies: of the tables, each on as many ranks as the others.
        weighted: whether ids have weights.
        rates: the learning rate of each step; the optimizer's where there is none.
        spare: whether batches have a key that no table knows, before the others.
        wild: whether some ids are out of range, and ignored.
        bad_at: the step whose gradients have some NaN and infinities.
        size: of gradients.
    """

    tables: tuple[te.TableConfig, ...]
    shardings: tuple[Sharding, ...]
    optimizer: Optimizer
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    pooled: bool = True
    local: int = 0
    copies: int = 1
    precision: ExchangePrecision = EXACT
    weighted: bool = False
    rates: tuple[float, ...] = ()
    spare: bool = False
    wild: bool = False
    bad_at: int = -1
    size: float = 1.0
    id_dtype: torch.dtype = torch.int64
    max_length: int = 4
    seed: int = 0
    title: str = field(default="", compare=False)

    @property
    def world(self) -> int:
        return len(self.sizes[0][0])

    def collection(self) -> Any:
        bounds = "ignore" if self.wild else "raise"
        return make_collection(self.tables, self.optimizer, self.pooled, bounds_check=bounds)

    def plan(self) -> ShardingPlan:
        by_table = {table.name: sharding for table, sharding in zip(self.tables, self.shardings, strict=True)}
        return ShardingPlan(by_table, self.world // self.copies, self.local)

    def sharded(self, groups: ShardGroups) -> Any:
        kind = ShardedEmbeddingBagCollection if self.pooled else ShardedEmbeddingCollection
        return kind(self.collection(), self.plan(), groups, self.precision, torch.device("cpu"))

    def batches(self, step: int) -> list[list[te.KeyedJaggedTensor]]:
        """Batches by micro-batch, then by rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        rows = rows_of(self.tables)
        keys = [*(["spare"] if self.spare else []), *sorted(rows)]  # each table names its features in this order
        batches = []
        for sizes in self.sizes[step]:
            parts = []
            for size in sizes:
                lengths = torch.randint(0, self.max_length + 1, (len(keys), size), generator=generator)
                values = [
                    self._ids(rows.get(k, 9), int(n.sum()), generator) for k, n in zip(keys, lengths, strict=True)
                ]
                flat = torch.cat(values).to(self.id_dtype)
                weights = torch.rand(flat.shape, generator=generator) if self.weighted else None
                parts.append(te.KeyedJaggedTensor(keys, flat, weights, lengths=lengths))
            batches.append(parts)
        return batches

    def _ids(self, rows: int, count: int, generator: torch.Generator) -> Tensor:
        ids = torch.randint(0, rows, (count,), generator=generator)
        few = torch.rand(count, generator=generator) < 0.5
        ids = torch.where(few, ids % 3, ids)
        if self.wild:
            ids = torch.where(torch.rand(count, generator=generator) < 0.1, ids + 1000 * (1 - 2 * (ids % 2)), ids)
        return ids

    def gradient(self, step: int, shape: tuple[int, ...]) -> Tensor:
        """Outputs of a step's samples, by micro-batch, then by rank."""
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(77 * self.seed + step)) * self.size
        if step == self.bad_at and grad.numel():
            grad.view(-1)[:: max(1, grad.numel() // 3)] = float("inf")
            grad.view(-1)[:: max(1, grad.numel() // 2)] = float("nan")
        return grad / max(1, sum(sum(sizes) for sizes in self.sizes[step]))


def tables(pooled: bool, count: int, dtype: torch.dtype = torch.float32) -> tuple[te.TableConfig, ...]:
    dims = [16, 8, 24, 16, 40, 3] if pooled and dtype == torch.float32 else [16] * 6
    return tuple(
        te.TableConfig(
            f"table{index}",
            (11, 37, 5, 64, 2, 90)[index],
            dims[index],
            features=[f"a{index}", f"b{index}"] if index % 2 else [f"a{index}"],
            pooling=("sum", "mean")[index % 2] if pooled else "none",
            dtype=dtype,
        )
        for index in range(count)
    )


UNEVEN = {
    1: ((4,), (0,), (3,)),
    2: ((4, 4), (3, 0), (0, 5)),
    4: ((4, 4, 4, 4), (3, 0, 5, 2), (0, 0, 0, 0), (0, 1, 0, 7)),
}


def sizes(world: int, steps: int, micro: int = 1) -> tuple[tuple[tuple[int, ...], ...], ...]:
    sample_counts = UNEVEN[world]
    return tuple(
        tuple(sample_counts[(step + part) % len(sample_counts)] for part in range(micro)) for step in range(steps)
    )


class Trained(NamedTuple):
    """Results for each step's samples, as `Case.gradient` orders them, and what tables and states are in the end."""

    outputs: list[Tensor]
    state: dict[str, Tensor]
    skipped: dict[str, int]


def alone(case: Case) -> Trained:
    """One process, and one batch of all samples a step."""
    collection, outputs = case.collection(), []
    for step in range(len(case.sizes)):
        if step < len(case.rates):
            collection.set_learning_rate(case.rates[step])
        parts = [part for micro in case.batches(step) for part in micro]
        whole = te.KeyedJaggedTensor.stack(parts)
        output = output_of(collection, whole)
        if not case.pooled:
            output = output[_places(parts)]
        output.backward(case.gradient(step, output.shape).to(output.dtype))
        outputs.append(output.detach())
    state = {name: tensor.detach().clone() for name, tensor in collection.state_dict().items()}
    return Trained(outputs, state, collection.skipped_rows())


def together(rank: int, cases: list[Case], times: int = 1, look_ahead: int | None = None) -> list[list[Trained]]:
    """The same by all ranks, each case several times. Tables are those of rank 0 only; outputs are this rank's.

    Args:
        look_ahead: micro-batches that are sent in a thread before they are trained; None to send none at all.
    """
    return [[_train(case, rank, look_ahead) for _ in range(times)] for case in cases]


def _train(case: Case, rank: int, look_ahead: int | None = None) -> Trained:
    groups = groups_of(case.local or None, case.copies)
    collection = case.sharded(groups)
    outputs = train_steps(case, collection, rank, range(len(case.sizes)), look_ahead)
    state = whole_state(collection, groups.world)
    return Trained(outputs, state if rank == 0 else {}, collection.skipped_rows())


def train_steps(
    case: Case, collection: Any, rank: int, steps: Iterable[int], look_ahead: int | None = None
) -> list[Tensor]:
    """Results of some steps of a case for this rank's samples."""
    outputs, steps = [], list(steps)

    def coming() -> Generator[Any, None, None]:
        for step in steps:
            for micro in case.batches(step):
                batch = micro[rank]
                yield (
                    batch
                    if look_ahead is None
                    else PrefetchedFeatures(batch, {id(collection): collection.prefetch(batch)})
                )

    prefetched = Prefetcher(coming(), look_ahead, "look-ahead", collective=True) if look_ahead else closing(coming())
    with prefetched as ahead:
        for step in steps:
            if step < len(case.rates):
                collection.fused_optimizer.param_groups[0]["lr"] = case.rates[step]
            micros = len(case.sizes[step])
            with collection.accumulate() if micros > 1 else nullcontext():
                parts = []
                for number in range(micros):
                    output = output_of(collection, next(ahead))
                    grad = _local_gradient(case, step, number, rank, output)
                    # Rounded first: small float16 numbers would be lost.
                    output.backward(grad.to(output.dtype) * case.world)
                    parts.append(output.detach())
                outputs.append(torch.cat(parts))
    return outputs


def _local_gradient(case: Case, step: int, micro: int, rank: int, output: Tensor) -> Tensor:
    sizes = rows_of_parts(case, step)
    place = micro * case.world + rank
    whole = case.gradient(step, (sum(sizes), *output.shape[1:]))
    return whole.split(sizes)[place]


def rows_of_parts(case: Case, step: int) -> list[int]:
    """Rows of the result for every micro-batch and rank."""
    parts = [part for micro in case.batches(step) for part in micro]
    return [part.stride() if case.pooled else part.values().shape[0] for part in parts]


def own_outputs(case: Case, whole: Trained, rank: int) -> list[Tensor]:
    """Return one rank's slice of the output of one process."""
    outputs = []
    for step, output in enumerate(whole.outputs):
        parts = output.split(rows_of_parts(case, step))
        outputs.append(torch.cat(parts[rank :: case.world]))
    return outputs


def _places(parts: list[te.KeyedJaggedTensor]) -> Tensor:
    """Positions in a stacked batch of the values of each part."""
    counts = [part.values().shape[0] for part in parts]
    numbers = torch.arange(sum(counts)).split(counts)
    numbered = [
        te.KeyedJaggedTensor(part.keys(), number, lengths=part.lengths())
        for part, number in zip(parts, numbers, strict=True)
    ]
    return torch.argsort(te.KeyedJaggedTensor.stack(numbered).values())


_GROUPS: dict[Any, ShardGroups] = {}


def groups_of(local: int | None = None, copies: int = 1) -> ShardGroups:
    """The groups of this process's job, made once: every group takes connections."""
    if (local, copies) not in _GROUPS:
        mesh = None
        if copies > 1:
            mesh = init_device_mesh("cpu", (copies, torch.distributed.get_world_size() // copies))
        groups = _GROUPS[local, copies] = ShardGroups.create(mesh, local)
        KEPT.update(group.process_group for group in groups if group.process_group is not None)
    return _GROUPS[local, copies]


# What hypothesis draws.


@st.composite
def cases(draw: st.DrawFn, world: int, steps: int = 3) -> Case:
    """Any tables, any way to cut each of them, any optimizer."""
    pooled = draw(st.booleans())
    local = draw(st.sampled_from([size for size in (1, 2, 3, 4) if world % size == 0]))
    tables = draw(tables_of(pooled))
    shardings = tuple(draw(sharding_of(table, world, local)) for table in tables)
    sizes = tuple(
        tuple(
            tuple(draw(st.sampled_from((0, 1, 3, 8))) for _ in range(world))
            for _ in range(draw(st.sampled_from((1, 1, 2))))
        )
        for _ in range(steps)
    )
    return Case(
        tables,
        shardings,
        draw(optimizers()),
        sizes,
        pooled,
        local,
        weighted=draw(st.booleans()),
        rates=draw(st.sampled_from(((), (0.1, 0.03)))),
        spare=draw(st.booleans()),
        wild=draw(st.sampled_from((False, False, True))),
        id_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def tables_of(draw: st.DrawFn, pooled: bool) -> tuple[te.TableConfig, ...]:
    """Features are named in one order by all tables: sums over features of a table have the order of the batch."""
    number = draw(st.integers(1, 3))
    dim = draw(st.sampled_from((4, 16, 24)))
    features = [f"feature{index}" for index in range(2 * number + 1)]
    tables = []
    for index in range(number):
        if pooled:
            chosen = draw(st.sets(st.sampled_from(features), min_size=1, max_size=3))
            table_features = [feature for feature in features if feature in chosen]
            dim = draw(st.sampled_from((1, 3, 8, 16, 24, 40)))
        else:
            table_features = features[2 * index : 2 * index + draw(st.integers(1, 2))]
        tables.append(
            te.TableConfig(
                f"table{index}",
                draw(st.sampled_from((1, 2, 5, 11, 64))),
                dim,
                features=table_features,
                pooling=draw(st.sampled_from(("sum", "mean"))) if pooled else "none",
                dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))),
            )
        )
    return tuple(tables)


@st.composite
def sharding_of(draw: st.DrawFn, table: te.TableConfig, world: int, local: int) -> Sharding:
    rank, node = st.integers(0, world - 1), st.integers(0, world // local - 1)
    widths = st.none()
    if table.embedding_dim in (16, 24, 40):
        widths = st.sampled_from(([8, table.embedding_dim - 8], [table.embedding_dim]))
    columns, rows = draw(widths), table.num_embeddings or 1
    blocks = len(columns) if columns else 1
    ranks = draw(st.lists(rank, min_size=blocks, max_size=blocks))
    kinds: list[st.SearchStrategy[Sharding]] = [
        st.builds(TableWise, rank),
        st.just(RowWise()),
        st.permutations(range(world)).map(lambda order: RowWise(order[: max(1, world - 1)])),
        st.just(RowWise([world - 1, 0], [1, rows - 1]) if min(world, rows) > 1 else RowWise()),
        st.just(ColumnWise()),
        st.just(ColumnWise(ranks, columns)),
        st.builds(TableRowWise, node),
        st.builds(TableColumnWise, node, st.just(columns)),
        st.just(Grid()),
        st.just(Grid([r // local for r in ranks], columns)),
        st.just(DataParallel()),
    ]
    return draw(st.one_of(kinds))


@st.composite
def optimizers(draw: st.DrawFn) -> Optimizer:
    kind = OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))]
    return kind(
        lr=0.05,
        weight_decay=draw(st.sampled_from((0.0, 0.01))),
        max_norm=draw(st.sampled_from((None, None, 0.7))),
        max_gradient=draw(st.sampled_from((None, None, 0.05))),
        on_nonfinite=draw(st.sampled_from(("ignore", "skip"))),
    )


# What must be the same.


def is_summed(sharding: Sharding) -> bool:
    """Return whether several ranks have rows of the same columns."""
    return isinstance(sharding, RowWise | TableRowWise | Grid)


def same_outputs(case: Case) -> bool:
    """Return whether outputs are bitwise identical to one process: no sum has another order."""
    whole_rows = TableWise | ColumnWise | TableColumnWise
    same = all(same_tables(case, table) for table in range(len(case.tables)))
    return same and case.precision == EXACT and all(isinstance(sharding, whole_rows) for sharding in case.shardings)


def same_tables(case: Case, table: int) -> bool:
    """Return whether a table's gradients are added in the same order."""
    sharding, config = case.shardings[table], case.tables[table]
    if isinstance(sharding, DataParallel) or case.copies > 1 or case.world == 3:  # a mean over 3 ranks is rounded
        return False
    in_16_bits = config.dtype.itemsize == 2 and len({other.dtype for other in case.tables}) == 1
    if in_16_bits and case.optimizer.max_gradient is not None:
        return False  # one process clamps the 16-bit gradients of 16-bit results to a bound of 16 bits
    return not is_summed(sharding) or (case.pooled and config.pooling == "sum")


def differences(case: Case, whole: Trained, trained: list[Trained]) -> list[str]:
    """Return differences from the training of one process that exceed the tolerance.

    Where sums are added in another order, each is off by at most the rounding of float32, 6e-8 of the sum of its
    magnitudes, a few times a step, and what has been learnt from it after 20 steps by less than 1e-6 of the
    tensor's largest magnitude. A 16-bit table may be rounded the other way each time.
    """
    title = f"{case}\n"
    wrong: list[str] = []
    for rank in range(case.world):
        for step, (output, expected) in enumerate(
            zip(trained[rank].outputs, own_outputs(case, whole, rank), strict=True)
        ):
            label = f"{title}output of step {step} on rank {rank}"
            wrong += _differ(label, output, expected, same_outputs(case), _coarsest(case))
    by_name = {table.name: number for number, table in enumerate(case.tables)}
    assert trained[0].state.keys() == whole.state.keys()
    for name, expected in whole.state.items():
        table = by_name.get(name.partition(".")[0])
        exact = table is None or same_tables(case, table)
        tolerance = 0.0 if table is None else _tolerance(case.tables[table].dtype)
        wrong += _differ(f"{title}{name} in the end", trained[0].state[name], expected, exact, tolerance)
    return wrong


def _tolerance(dtype: torch.dtype) -> float:
    """float32: as above; 16 bits: one step of the dtype, twice."""
    return 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps


def _coarsest(case: Case) -> float:
    return max(_tolerance(table.dtype) for table in case.tables)


def _differ(label: str, actual: Tensor, expected: Tensor, exact: bool, tolerance: float) -> list[str]:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return [f"{label}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"]
    if torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.nan_to_num(), expected.nan_to_num()):
        return []
    finite = expected.double()[expected.isfinite()].abs()
    bound = 0.0 if exact else tolerance * max(1e-3, float(finite.max()) if finite.numel() else 0.0)
    off = (actual.double() - expected.double()).abs()
    if exact or bool((off > bound).any()) or not torch.equal(actual.isnan(), expected.isnan()):
        return [f"{label}: off by {float(off.nan_to_num().max())}, allowed {bound}"]
    return []
