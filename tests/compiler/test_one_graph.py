"""The table of docs/compile.md: what is one graph, bitwise identical to the uncompiled model, and what raises."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tritonemb as te
from tests.docs.blocks import ROOT
from tests.helpers import assert_same_bits
from tests.server.jobs import local_servers
from tests.sharding.models import whole_state
from tritonemb.server import attach, flush
from tritonemb.sharding import ColumnWise, DataParallel, Grid, RowWise, ShardingPlan, TableRowWise, TableWise

PAGE = (ROOT / "docs/compile.md").read_text().split("## Models that compile to one graph")[1].split("\n## ")[0]
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
CELLS = CELLS[2:]  # without the head of the table
ERRORS = {
    number: " ".join(text.split())
    for number, text in re.findall(r"^(\d+)\. \"(.+?)\"$", PAGE, flags=re.MULTILINE | re.DOTALL)
}
KEYS = ("a", "b", "c", "d")
Case = Callable[[], AbstractContextManager[nn.Module]]


class Model(nn.Module):
    """Embeddings, and a dense layer behind them."""

    def __init__(self, embeddings: nn.Module, width: int, top: nn.Module | None = None) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.top = nn.Linear(width, 3) if top is None else top

    def forward(self, features: Any) -> Tensor:
        rows = self.embeddings(features)
        return self.top(rows.values() if isinstance(rows, te.KeyedJaggedTensor) else rows)


def tables(dynamic: bool = False, pooled: bool = True, placements: tuple[str, ...] = ("device",)) -> list[Any]:
    configs = []
    for n, key in enumerate(KEYS):
        placement = placements[n % len(placements)]
        options: dict[str, Any] = {"placement": placement, "pooling": ("sum", "mean")[n % 2] if pooled else "none"}
        if dynamic and n == 0:
            options |= {"capacity": 200, "admission": te.AdmissionConfig(appearances=2)}
        if placement != "device":
            options["cache"] = te.CacheConfig(rows=64)
        configs.append(te.TableConfig(key, None if dynamic and n == 0 else (300, 40)[n // 2], 8, **options))
    return configs


def model(dynamic: bool = False, pooled: bool = True, placements: tuple[str, ...] = ("device",)) -> Model:
    torch.manual_seed(3)
    kind = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
    return Model(kind(tables(dynamic, pooled, placements), te.optim.RowWiseAdagrad(lr=0.1)), 32 if pooled else 8)


def local(*args: Any) -> Case:
    @contextmanager
    def case() -> Iterator[nn.Module]:
        yield model(*args)

    return case


def served(staleness: int, dynamic: bool) -> Case:
    @contextmanager
    def case() -> Iterator[nn.Module]:
        with local_servers(2) as servers:
            served_model = model(dynamic, True, ("server",))
            attach(served_model, servers, staleness)
            yield served_model

    return case


def hybrid(*args: Any, dense: Any = "ddp") -> Case:
    shardings = [RowWise(), ColumnWise(), DataParallel(), TableRowWise(0)]
    if args[:1] == (True,):
        shardings[1] = TableWise(1)
    elif args[1:2] == (True,):
        shardings[0] = Grid([0])

    @contextmanager
    def case() -> Iterator[nn.Module]:
        plan = ShardingPlan(dict(zip(KEYS, shardings, strict=True)), 2, 2)
        yield te.HybridParallel(model(*args), plan, dense=dense)

    return case


@contextmanager
def sharded_layer() -> Iterator[nn.Module]:
    whole = model()
    fully_shard(whole.top, mesh=init_device_mesh("cpu", (2,)))
    yield whole


class Single(nn.Module):
    """Modules of one table."""

    def __init__(self, num_rows: int | None, **options: Any) -> None:
        super().__init__()
        self.bag = te.nn.EmbeddingBag(num_rows, 8, **options)
        self.row = te.nn.Embedding(300, 8, optimizer=options["optimizer"])

    def forward(self, features: te.KeyedJaggedTensor) -> Tensor:
        rows = self.row(features.offsets()[:-1])
        return self.bag(features.values(), features.offsets()[:-1]) * rows


def module(num_rows: int | None, options: dict[str, Any], by_step: bool = False) -> Case:
    @contextmanager
    def case() -> Iterator[nn.Module]:
        optimizer = te.optim.Adagrad(lr=0.1)
        single = Single(num_rows, optimizer=None if by_step else optimizer, **options)
        if by_step:
            te.optim.fused(single, optimizer, update="step")
        yield single

    return case


LOCAL: dict[str, Case] = {
    "`EmbeddingBagCollection`": local(),
    "`EmbeddingCollection`": local(False, False),
    "in host memory or on disk": local(False, True, ("host", "disk", "device")),
    "dynamic": local(True),
    "dynamic, in host memory or on disk": local(True, False, ("disk", "host", "device")),
    "on servers, `staleness=0`": served(0, False),
    "on servers, `staleness=0`, dynamic": served(0, True),
    "on servers, `staleness=1`": served(1, False),
    "on servers, `staleness=1`, dynamic": served(1, True),
}
MODULES: dict[str, Case] = {
    "`te.nn.EmbeddingBag`, `te.nn.Embedding`": module(300, {}),
    "`te.nn.EmbeddingBag` with `optimizer` and `max_norm`": module(300, {"max_norm": 1.0}),
    "`te.nn.EmbeddingBag(None, ...)`": module(None, {"capacity": 200}),
    '`te.optim.fused(..., update="step")`': module(300, {}, by_step=True),
}
OFFLOADED = {"`te.offload` of a compiled model": "after", "`te.offload`, compiled afterwards": "before"}
SHARDED: dict[str, Case] = {
    "`HybridParallel`, each sharding": hybrid(False, True),
    "`HybridParallel`, in host memory or on disk": hybrid(False, True, ("host", "disk")),
    "`HybridParallel` of an `EmbeddingCollection`": hybrid(False, False),
    "`HybridParallel`, dynamic, on disk": hybrid(True, True, ("disk",)),
    '`HybridParallel(dense="fsdp")`': hybrid(dense="fsdp"),
    "`fully_shard` without `HybridParallel`": sharded_layer,
}


def batches(sizes: Sequence[int], rank: int = 0, weighted: bool = False) -> Iterator[te.KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    for size in sizes:
        lengths = torch.randint(0, 5, (4 * size,), generator=generator)
        ids = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator) if weighted else None
        yield te.KeyedJaggedTensor(KEYS, ids, weights, lengths=lengths)


def trained(
    case: Case, prefetched: bool, compiled: bool, rank: int = 0, offload: str = "", accumulate: bool = False
) -> dict[str, Tensor]:
    """Results of three steps and an evaluation, and the state after them; `offload`: "before" or "after" compiling.

    With `accumulate` the first two are micro-batches of one step, and bags have per-sample weights.
    """
    torch._dynamo.reset()
    torch.manual_seed(1)
    results: dict[str, Tensor] = {}
    with case() as created, ExitStack() as block:
        parameters = [parameter for name, parameter in created.named_parameters() if name.startswith("top.")]
        optimizer: Any = torch.optim.SGD(parameters or [torch.zeros(1)], lr=0.1)
        if offload == "before":
            optimizer = te.offload(created, optimizer, params="host", activations="host", budget="8MiB")[1]
        if compiled:
            created.compile(fullgraph=True, backend="aot_eager")
        if offload == "after":
            optimizer = te.offload(created, optimizer, params="host", activations="host", budget="8MiB")[1]
        prefetch = (
            created.prefetch if isinstance(created, te.HybridParallel) else lambda batch: te.nn.prefetch(created, batch)
        )
        for collection in getattr(created, "collections", [created.embeddings]) if accumulate else ():
            block.enter_context(collection.accumulate())
        for step, batch in enumerate(batches([6] * 4, rank, accumulate)):
            with torch.set_grad_enabled(step < 3):
                output = created(prefetch(batch) if prefetched else batch)
            results[f"output {step}"] = output.detach().clone()
            if step == 3:
                break
            (output.square() + output).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                block.close()
        flush(created)
        results |= whole_state(created)
    torch._dynamo.reset()
    return results


def error_of(case: Case, *args: Any) -> str | None:
    """The error of a compiled model; None if it is one graph, which trains like the model uncompiled."""
    try:
        compiled = trained(case, args[0], True, *args[1:])
    except torch._dynamo.exc.Unsupported as error:
        return " ".join(str(error).split())
    assert_same_bits(compiled, trained(case, args[0], False, *args[1:]))
    return None


def graphs(model: nn.Module, rank: int = 0) -> int:
    """Number of graphs of a model that is trained with batches of any size."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch in batches([6, 6, 4, 1 + rank, 1], rank):
        prefetched = model.prefetch(batch) if isinstance(model, te.HybridParallel) else te.nn.prefetch(model, batch)
        with te.compiler.dynamic_batch(prefetched):
            compiled(prefetched).sum().backward()
    torch._dynamo.reset()
    return counter.frame_count


def check(cell: str, error: str | None) -> None:
    if cell == "one graph":
        assert error is None, error
    else:
        assert error is not None
        assert ERRORS[cell.removeprefix("error ")] in error, error


def on_rank(rank: int, name: str, prefetched: bool) -> str | None:
    torch._dynamo.reset()
    return error_of(SHARDED[name], prefetched, rank)


def cells(cases: dict[str, Any], quick: tuple[str, ...] = ()) -> Any:
    """One parameter per cell of the table; only those of `quick` with prefetched features run in `make test`."""
    results = [(name, column, cells[column]) for name, *cells in CELLS if name in cases for column in (0, 1)]
    chosen = [cell for cell in results if cell[2] not in ("", "-")]
    marks = {True: (), False: pytest.mark.more}
    return [
        pytest.param(*cell, marks=marks[cell[0] in quick and cell[1] == 1], id=f"{cell[0]}-{cell[2]}")
        for cell in chosen
    ]


QUICK = "on servers, `staleness=1`, dynamic", "dynamic, in host memory or on disk"
QUICK_SHARDED = ("`HybridParallel`, dynamic, on disk",)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(("name", "column", "cell"), cells(LOCAL | MODULES, QUICK))
def test_tables_of_one_process(name, column, cell):
    check(cell, error_of((LOCAL | MODULES)[name], column == 1))


@pytest.mark.parametrize(("name", "column", "cell"), cells(SHARDED, QUICK_SHARDED))
def test_tables_of_two_ranks(ranks, name, column, cell):
    for error in ranks(2).run(on_rank, name, column == 1):
        check(cell, error)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(("name", "column", "cell"), cells(OFFLOADED))
def test_offloaded_layers(name, column, cell):
    check(cell, error_of(local(), column == 1, 0, OFFLOADED[name]))


ACCUMULATED = ("in host memory or on disk", "dynamic", "on servers, `staleness=1`, dynamic")


@pytest.mark.usefixtures("dynamo")
@pytest.mark.more
@pytest.mark.parametrize("name", ACCUMULATED)
def test_micro_batches_are_accumulated(name):
    assert error_of(LOCAL[name], True, 0, "", True) is None


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("pooled", [True, pytest.param(False, marks=pytest.mark.more)])
def test_one_graph_serves_all_sizes_of_prefetched_batches(pooled):
    assert graphs(model(True, pooled, ("device", "host"))) == 1


def graphs_on_rank(rank: int) -> int:
    """Graphs of a model whose rows have one owner; the other rank looks up nothing."""
    plan = ShardingPlan(dict.fromkeys(KEYS, TableWise(1)), 2, 2)
    return graphs(te.HybridParallel(model(False, False, ("host",)), plan), rank)


@pytest.mark.more
def test_few_graphs_serve_all_sizes_on_two_ranks(ranks):
    """Numbers of samples and of ids that ranks receive are no sizes of tensors: each becomes dynamic once."""
    assert ranks(2).run(graphs_on_rank) == [3, 3]


def test_the_table_has_these_rows():
    assert {cells[0] for cells in CELLS} == {*LOCAL, *MODULES, *SHARDED, *OFFLOADED}
