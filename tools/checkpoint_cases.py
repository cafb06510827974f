"""What `checkpoint_bits.py` trains: a name, a number of ranks, and a function that returns digests of tensors.

Nine optimizers x device, host and disk x one and two ranks, each some steps of `te.Trainer`, and some of what those
leave out: dtypes, options, codecs, shardings, fused and compiled `torch.nn` models, logs. Caches are far smaller than
their tables, so rows are evicted and written back; steps are prefetched. A checkpoint is read back into a plain model
on the device, whose state dict and dense optimizer are hashed tensor by tensor.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import tritonemb as te

BATCH = 64  # samples a step, of all ranks together
ROWS = 25 * BATCH - 10  # training rows: two epochs, whose last batches are smaller
DIGITS = 16  # of each SHA-256 that is kept
PLACEMENTS = ("device", "host", "disk")
OPTIMIZERS: dict[str, te.optim.Optimizer] = {
    "sgd": te.optim.SGD(lr=0.5),
    "row_wise_adagrad": te.optim.RowWiseAdagrad(lr=0.05),
    "adagrad": te.optim.Adagrad(lr=0.05, weight_decay=1e-3),
    "adam": te.optim.Adam(lr=0.01),
    "partial_row_wise_adam": te.optim.PartialRowWiseAdam(lr=0.01),
    "lamb": te.optim.LAMB(lr=0.01, weight_decay=1e-2),
    "partial_row_wise_lamb": te.optim.PartialRowWiseLAMB(lr=0.01),
    "lars_sgd": te.optim.LARSSGD(lr=1.0, eta=0.1),
    "ftrl": te.optim.FTRL(lr=0.1, l1=1e-3),
}
Digests = dict[str, str]
Make = Callable[[str], nn.Module]  # with its tables on this placement


@dataclass(frozen=True)
class Case:
    """`run` is called with an empty folder on every rank, and again on rank zero, if it returns a function."""

    name: str
    ranks: int
    run: Callable[[Path], Any]


class Clicks(nn.Module):
    """Tables of several dims and poolings, pooled and not, below one MLP."""

    def __init__(self, placed: Callable[[te.TableConfig], te.TableConfig], optimizer: te.optim.Optimizer) -> None:
        super().__init__()
        table = te.TableConfig
        pooled = [
            table("member", 2_000, 16, features=["user", "item"]),
            table("advertiser", 200, 12),
            table("site", 100, 20, pooling="mean"),
            table("device", 10, 5),
            table("tags", 50, 16, pooling="mean"),
            table("tag_sums", 50, 12, features=["tags"]),
        ]
        unpooled = [
            table("history", 50, 8, features=["tags"], pooling="none"),
            table("visit", 2_000, 8, features=["user"], pooling="none"),
        ]
        self.embeddings = te.nn.EmbeddingBagCollection([placed(item) for item in pooled], optimizer)
        self.sequences = te.nn.EmbeddingCollection([placed(item) for item in unpooled], optimizer)
        self.dense = nn.Sequential(nn.Linear(4 + 97 + 16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        pooled, rows = self.embeddings(sparse), self.sequences(sparse)
        tags, users = rows["tags"], rows["user"]
        history = torch.segment_reduce(tags.values(), "sum", lengths=tags.lengths().long(), initial=0.0)
        return self.dense(torch.cat([dense, pooled, history, users.values()], 1)).squeeze(1)


def cached(placement: str, **options: Any) -> Callable[[te.TableConfig], te.TableConfig]:
    """Places tables, whose caches hold one or two sets of 32 rows; those of sequences evict by frequency."""

    def placed(table: te.TableConfig) -> te.TableConfig:
        policy = "lfu" if table.pooling == "none" else "lru"
        config = te.CacheConfig(rows=64 if table.num_embeddings > 500 else 16, policy=policy, **options)
        return replace(table, placement=placement, cache=config)

    return placed


def clicks(optimizer: te.optim.Optimizer, dtype: torch.dtype = torch.float32, **options: Any) -> Make:
    """What makes the model on a placement."""

    def make(placement: str) -> Clicks:
        placed = cached(placement, **(options if placement == "disk" else {}))
        return Clicks(lambda table: placed(replace(table, dtype=dtype)), optimizer)

    return make


def ready_made(kind: type[nn.Module], **options: Any) -> Make:
    """What makes a DLRM or DCNv2 on a placement."""

    def make(placement: str) -> nn.Module:
        tables = [cached(placement)(table) for table in data().tables(16)]
        return kind(tables, 4, optimizer=OPTIMIZERS["row_wise_adagrad"], **options)

    return make


def on_meta(make: Make) -> Make:
    """The model without memory where it is sharded."""

    def made(placement: str) -> nn.Module:
        with torch.device("meta" if dist.is_initialized() else "cpu"):
            return make(placement)

    return made


@cache
def data() -> Any:
    from tritonemb.data import make_synthetic

    return make_synthetic(num_train=ROWS, num_test=64)


def plan(local_world_size: int = 0, **others: te.sharding.Sharding) -> te.sharding.ShardingPlan:
    """A table of each common sharding for two ranks; `others` replace some."""
    kinds = te.sharding
    shardings = {
        "member": kinds.RowWise(),
        "advertiser": kinds.ColumnWise(columns=[8, 4]),
        "site": kinds.TableWise(1),
        "device": kinds.DataParallel(),
        "tags": kinds.ColumnWise(),
        "tag_sums": kinds.DataParallel(),
        "history": kinds.RowWise(),
        "visit": kinds.TableWise(0),
    }
    return kinds.ShardingPlan(shardings | others, 2, local_world_size)


def trained(
    folder: Path,
    steps: int,
    make: Make,
    placement: str,
    resume_at: int | None = None,
    checkpoints: Mapping[str, Any] | None = None,
    mesh: tuple[int, ...] = (),
    trainer: Mapping[str, Any] | None = None,
    **parallel: Any,
) -> Callable[[], Digests]:
    """Train; the function that reads the checkpoint back."""
    options = {"dense_optimizer": torch.optim.Adam, **(trainer or {})}  # the default differs between trees
    if checkpoints:
        from tritonemb.training import CheckpointOptions

        options["checkpoints"] = CheckpointOptions(**checkpoints)
    size = dist.get_world_size() if dist.is_initialized() else 1
    batch_size = BATCH // size // options.get("accumulate", 1)

    def made(placed: str, max_steps: int, size: int) -> te.Trainer:
        torch.manual_seed(0)
        model = make(placed)
        if size > 1:
            shape = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))} if mesh else {}
            model = te.HybridParallel(model, **parallel, **shape)
        return te.Trainer(
            model, data(), batch_size=batch_size, epochs=1_000, max_steps=max_steps, folder=folder / "run",
            verbose=False, **prefetch_depth(), **options,
        )  # fmt: skip

    first = made(placement, resume_at or steps, size)
    first.fit()
    if resume_at:
        first = made(placement, steps, size)
        if first.resume() is None:
            raise AssertionError("there is no checkpoint to resume from")
        first.fit()
    live = digests(first.model, first.dense_optimizer) if size == 1 else None

    def read() -> Digests:
        again = made("device", steps, size=1)
        if again.resume() is None:
            raise AssertionError("there is no checkpoint to read")
        stored = digests(again.model, again.dense_optimizer)
        if live is not None and stored != live:
            raise AssertionError(f"the checkpoint is not the model: {differing(live, stored)}")
        return stored

    return read


def prefetch_depth() -> dict[str, int]:
    """The trainer's option, by the name that it has."""
    known = inspect.signature(te.Trainer).parameters
    return {name: 3 for name in ("prefetch_depth", "look_ahead") if name in known}


def digests(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Digests:
    """Of every tensor of a state dict, and one of all that the optimizer keeps."""
    result = {name: digest([value]) for name, value in model.state_dict().items()}
    if optimizer is not None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        retained = {
            f"{names[parameter]}.{key}": value
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        result["(optimizer)"] = digest(retained[name] for name in sorted(retained))
    return dict(sorted(result.items()))


def digest(tensors: Iterable[Tensor]) -> str:
    """Of dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:DIGITS]


def differing(expected: Digests, found: Digests) -> list[str]:
    """Names whose digests differ, or that only one has."""
    return [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]


# What te.Trainer does not drive: loops over torch.nn models, single tables and weighted ids, and the command.


class Bags(nn.Module):
    """A model of torch.nn alone."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(500, 16, mode="sum")
        self.genre = nn.EmbeddingBag(20, 12, mode="mean")
        self.item = nn.Embedding(300, 20)
        self.top = nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: Tensor, genre: Tensor, item: Tensor) -> Tensor:
        return self.top(torch.cat([self.user(user), self.genre(genre), self.item(item)], 1)).squeeze(1)


class Singles(nn.Module):
    """`te.nn.EmbeddingBag` and `te.nn.Embedding`, with and without a fused optimizer."""

    def __init__(self) -> None:
        super().__init__()
        lamb, adam = OPTIMIZERS["lamb"], OPTIMIZERS["partial_row_wise_adam"]
        self.user = te.nn.EmbeddingBag(500, 16, mode="sum", padding_idx=3, optimizer=lamb)
        self.genre = te.nn.EmbeddingBag(20, 12, mode="mean", dtype=torch.bfloat16, optimizer=adam)
        self.item = te.nn.Embedding(300, 20, optimizer=lamb)
        self.plain = te.nn.EmbeddingBag(500, 8, mode="sum")
        self.top = nn.Linear(56, 1)

    def forward(self, user: Tensor, genre: Tensor, item: Tensor) -> Tensor:
        parts = [self.user(user), self.genre(genre).float(), self.item(item), self.plain(user)]
        return self.top(torch.cat(parts, 1)).squeeze(1)


def batches(steps: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Ids of two bags and an item, and labels."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        user, genre = (torch.randint(rows, (BATCH, n), generator=draw) for rows, n in ((500, 3), (20, 2)))
        item = torch.randint(300, (BATCH,), generator=draw, dtype=torch.int32)
        yield [user, genre, item], (user[:, 0] % 2).float()


def looped(_: Path, steps: int, model: type[nn.Module] = Bags, how: str = "plain", compiled: bool = False) -> Digests:
    """Train a model of torch.nn in a loop: `how` its tables are updated."""
    torch.manual_seed(0)
    trained = model()
    dense = partial(torch.optim.Adam, lr=1e-3)
    if how == "fused":
        optimizer: Any = te.optim.fused(trained, OPTIMIZERS["row_wise_adagrad"], dense=dense)
    else:
        if how == "fuse":
            te.fuse(trained)
        optimizer = dense([parameter for name, parameter in trained.named_parameters() if needs_dense(trained, name)])
    called, loss_of = trained, nn.BCEWithLogitsLoss()
    if compiled:
        import tritonemb.compiler  # noqa: F401  makes the backend known in a checkout

        called = torch.compile(trained, backend="tritonemb")
    for number, (ids, labels) in enumerate(batches(steps)):
        optimizer.zero_grad()
        if how == "fused" and not compiled and number % 5 == 0:
            with optimizer.accumulate():
                for part in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
                    (loss_of(called(*(item[part] for item in ids)), labels[part]) / 2).backward()
        else:
            loss_of(called(*ids), labels).backward()
        optimizer.step()
    return digests(trained, optimizer)


def needs_dense(model: nn.Module, name: str) -> bool:
    """Whether a parameter has an ordinary gradient."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return getattr(owner, "optimizer", None) is None


def weighted(_: Path, steps: int) -> Digests:
    """Per-sample weights, int64 ids, empty bags, clamped gradients and norms, through a collection alone."""
    torch.manual_seed(0)
    options = {"weight_decay": 1e-2, "max_norm": 0.2, "max_gradient": 0.05, "on_nonfinite": "skip"}
    tables = [te.TableConfig("a", 300, 7), te.TableConfig("b", 90, 16, features=["b", "c"], dtype=torch.float16)]
    collection = te.nn.EmbeddingBagCollection(tables, te.optim.RowWiseAdagrad(lr=0.1, **options))
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        lengths = torch.randint(0, 4, (3 * BATCH,), generator=draw)
        count = int(lengths.sum())
        ids = torch.randint(90, (count,), generator=draw)
        weights = torch.rand(count, generator=draw)
        batch = te.KeyedJaggedTensor.from_lengths(["a", "b", "c"], ids, lengths, weights)
        pooled = collection(batch).float()
        factors = torch.randn(pooled.shape, generator=draw)
        if step % 10 == 3:
            factors[0] = float("nan")
        (pooled * factors).sum().backward()
    return digests(collection)


def logged(folder: Path, steps: int, kind: str, rows: int, *options: str) -> Digests:
    """`tritonemb train` on a log, and what the checkpoint's own files hold."""
    path = folder / ("log.parquet" if kind == "parquet" else "log.txt")
    (write_parquet if kind == "parquet" else write_tsv)(path, rows)
    if kind == "parquet":
        options = (
            *options,
            *["--label", "clicked", "--dense", "price", "--log-transform", "true", "--sparse", "user", "item", "tags"],
        )
    command = [sys.executable, "-m", "tritonemb", "train", "--data", path, "--max-steps", steps, "--epochs", 2]
    command += ["--batch-size", 32, "--num-embeddings", 400, "--embedding-dim", 8, "--bottom-mlp", 16]
    command += ["--top-mlp", 16, "--threads", torch.get_num_threads(), "--out", folder / "run", *options]
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{process.stdout}{process.stderr}")
    (stored,) = (folder / "run" / "checkpoints").glob(f"step-{steps}")
    entries = dcp.FileSystemReader(stored).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in sorted(entries.items())
        if name.startswith(("model.", "optimizer."))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process, and it knows
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(stored), no_dist=True)
    tables = {name: digest([value]) for name, value in tensors.items() if name.startswith("model.embeddings.")}
    dense = digest(value for name, value in tensors.items() if name not in tables)
    return {"(tables)": digest_of(tables), "(others)": dense}


def digest_of(digests: Digests) -> str:
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:DIGITS]


def write_tsv(path: Path, rows: int) -> None:
    """Criteo's format: a label, 13 integers, 26 categories; some are missing."""
    chance = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            integers = [str(chance.randrange(-1, 100)) if chance.random() < 0.8 else "" for _ in range(13)]
            ids = [chance.randrange(4 if place < 3 else 900) for place in range(26)]
            texts = [f"{id * 2_654_435_761 % 2**32:08x}" if chance.random() < 0.95 else "" for id in ids]
            label = int(chance.random() < (0.1, 0.3, 0.5, 0.9)[ids[0]])
            file.write("\t".join([str(label), *integers, *texts]) + "\n")


def write_parquet(path: Path, rows: int) -> None:
    """Numbers, strings, lists and nulls."""
    import pyarrow as pa
    from pyarrow import parquet

    chance = random.Random(0)
    columns = {
        "clicked": pa.array([int(chance.random() < 0.4) for _ in range(rows)], pa.int8()),
        "price": pa.array([chance.choice([None, 1.5, 20.0, 300.25]) for _ in range(rows)], pa.float64()),
        "user": pa.array([chance.randrange(2_000) for _ in range(rows)], pa.int64()),
        "item": [f"item-{chance.randrange(900)}" for _ in range(rows)],
        "tags": [[f"tag-{chance.randrange(60)}" for _ in range(chance.randrange(4))] for _ in range(rows)],
    }
    parquet.write_table(pa.table(columns), path, row_group_size=500)


def cases(steps: int) -> list[Case]:
    """All of them; names are those of the record."""
    results = []
    for ranks in (1, 2):
        for name, optimizer in OPTIMIZERS.items():
            for placement in PLACEMENTS:
                parallel = {"plan": plan()} if ranks > 1 else {}
                run = partial(trained, steps=steps, make=clicks(optimizer), placement=placement, **parallel)
                results.append(Case(f"{name}/{placement}/{ranks}", ranks, run))
    results += [Case(f"more/{name}/1", 1, run) for name, run in more_alone(steps).items()]
    return results + [Case(f"more/{name}/2", 2, run) for name, run in more_on_ranks(steps).items()]


def more_alone(steps: int) -> dict[str, Callable[[Path], Any]]:
    run = partial(trained, steps=steps)
    adam, adagrad = OPTIMIZERS["adam"], OPTIMIZERS["row_wise_adagrad"]
    limited = te.optim.Adagrad(lr=0.1, max_norm=0.3, max_gradient=1e-3, weight_decay=1e-2)
    every = {"checkpoint_steps": 7, "checkpoint_incremental": True}
    result: dict[str, Callable[[Path], Any]] = {}
    for placement in PLACEMENTS:
        at = partial(run, placement=placement)
        result[f"bfloat16/{placement}"] = partial(at, make=clicks(adam, torch.bfloat16))
        result[f"limits/{placement}"] = partial(at, make=clicks(limited))
        result[f"accumulate/{placement}"] = partial(at, make=clicks(adam), trainer={"accumulate": 2})
    disk = partial(run, placement="disk")
    result |= {
        "float16/disk": partial(disk, make=clicks(adagrad, torch.float16)),
        "host_rows/disk": partial(disk, make=clicks(adam, host_rows=96)),
        "resumed/disk": partial(disk, make=clicks(adam), resume_at=max(1, steps // 2), checkpoints=every),
        "async/disk": partial(disk, make=clicks(adam), checkpoints={**every, "checkpoint_async": True}),
        "no_pipeline/disk": partial(disk, make=clicks(adam), trainer={"pipeline": False}),
        "dlrm/device": partial(run, placement="device", make=ready_made(te.nn.DLRM, bottom_mlp=(16,), top_mlp=(16,))),
        "dcnv2/host": partial(
            run, placement="host", make=ready_made(te.nn.DCNv2, num_cross_layers=2, top_mlp=(16,)),
            trainer={"precision": "bf16"},
        ),
        "weighted": partial(weighted, steps=steps),
        "single_tables": partial(looped, steps=steps, model=Singles),
        "fuse": partial(looped, steps=steps, how="fuse"),
        "fused": partial(looped, steps=steps, how="fused"),
        "compiled": partial(looped, steps=steps, compiled=True),
        "compiled_fused": partial(looped, steps=steps, how="fused", compiled=True),
        "log/tsv": partial(logged, steps=steps, kind="tsv", rows=max(500, 40 * steps)),
        "log/tsv_two_epochs": partial(logged, steps=steps, kind="tsv", rows=max(500, 20 * steps)),
        "log/parquet": partial(logged, steps=steps, kind="parquet", rows=max(500, 20 * steps)),
    }  # fmt: skip
    return result


def more_on_ranks(steps: int) -> dict[str, Callable[[Path], Any]]:
    kinds = te.sharding
    adagrad, adam = clicks(OPTIMIZERS["row_wise_adagrad"]), clicks(OPTIMIZERS["adam"])
    device = partial(trained, steps=steps, placement="device", plan=plan())
    disk = partial(trained, steps=steps, placement="disk", plan=plan())
    nodes = plan(
        1, member=kinds.Grid(), advertiser=kinds.TableRowWise(1), site=kinds.TableColumnWise(0), tags=kinds.Grid()
    )
    copies = kinds.ShardingPlan({name: kinds.TableWise(0) for name in plan().tables}, 1)
    codecs = {"fp32": ("fp32", "fp32"), "int8": ("int8", "int8"), "fp8": ("fp8_e4m3", "fp8_e5m2")}
    result: dict[str, Callable[[Path], Any]] = {
        f"{name}/device": partial(device, make=adagrad, exchange=kinds.ExchangePrecision(*codec))
        for name, codec in codecs.items()
    }
    return result | {
        "bfloat16/disk": partial(
            disk, make=clicks(OPTIMIZERS["adam"], torch.bfloat16), plan=plan(advertiser=kinds.RowWise())
        ),
        "host_rows/disk": partial(disk, make=clicks(OPTIMIZERS["lamb"], host_rows=96)),
        "accumulate/device": partial(device, make=adam, trainer={"accumulate": 2}),
        "fsdp/device": partial(device, make=adagrad, dense="fsdp"),
        "nodes/device": partial(device, make=adagrad, plan=nodes),
        "nodes/disk": partial(disk, make=adam, plan=nodes),
        "copies/device": partial(device, make=adam, plan=copies, mesh=(2, 1)),
        "copies/disk": partial(disk, make=adam, plan=copies, mesh=(2, 1)),
        "averaged/device": partial(device, make=adam, plan=copies, mesh=(2, 1), average_every=4),
        "chosen/device": partial(device, make=adam, plan=None),
        "meta/device": partial(device, make=on_meta(adam)),
        "meta/disk": partial(disk, make=on_meta(adagrad)),
        "resumed/disk": partial(
            disk, make=adam, resume_at=max(1, steps // 2),
            checkpoints={"checkpoint_steps": 7, "checkpoint_incremental": True},
        ),
    }  # fmt: skip
