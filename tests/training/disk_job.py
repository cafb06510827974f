"""Training with tables on disk, in this process or in one that may be killed: `python -m tests.training.disk_job`.

What tests of their checkpoints share.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tritonemb as te
from tests.helpers import living
from tests.sharding.models import whole_state
from tests.training.jobs import planted
from tritonemb.comm.group import RankGroup
from tritonemb.data import Dataset
from tritonemb.storage import DiskRows
from tritonemb.training import Callback, CheckpointOptions
from tritonemb.training.checkpoint import CheckpointFolder, load_tensors, read_manifest, stored_tensors
from tritonemb.training.train_state import model_tensors

LAST_STEP = 60
OPTIMIZER = te.optim.RowWiseAdagrad(lr=0.05)


def model_of(
    data: Dataset, placement: str, folder: Path | None = None, optimizer: te.optim.Optimizer = OPTIMIZER
) -> te.nn.DLRM:
    """Tables whose caches hold few rows; "mixed" places them in turn; "dynamic" ones are on disk, too."""
    torch.manual_seed(0)
    cache = te.CacheConfig(rows=32, folder=folder)
    places = ["disk", "device", "host"] if placement == "mixed" else [placement]
    if placement.startswith("dynamic"):
        few: dict[str, Any] = {"capacity": 400, "eviction": te.EvictionConfig("lfu", protect=2), "cache": cache}
        few["placement"] = "disk" if placement == "dynamic" else "device"
        tables = [replace(table, num_embeddings=None, **few) for table in data.tables(4)]
    else:
        tables = [living(table, places[number % len(places)], cache) for number, table in enumerate(data.tables(4))]
    return te.nn.DLRM(tables, data.num_dense, bottom_mlp=(4,), top_mlp=(4,), optimizer=optimizer)


def make_trainer(
    data: Dataset,
    folder: Path | None = None,
    placement: str = "disk",
    *,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> te.Trainer:
    settings = {"batch_size": 50, "epochs": 2, "verbose": False, "log_every": 4} | options
    live = None if folder is None else folder.parent / "live"
    return te.Trainer(model_of(data, placement, live), data, folder=folder, callbacks=list(callbacks), **settings)


def sharded(
    rank: int,
    folder: Path,
    placement: str,
    plan: str,
    epochs: int,
    checkpoints: CheckpointOptions,
    resume: bool = False,
    only_load: bool = False,
    adam: bool = False,
) -> dict[str, Tensor]:
    """A trainer's whole state after it has trained, on this rank of a job or in one process if there is no `plan`."""
    data, kinds = planted(600, validation=False), te.sharding
    optimizer = te.optim.Adam(lr=0.01) if adam else OPTIMIZER
    model: Any = model_of(data, placement, folder.parent / f"live{rank}", optimizer)
    group = RankGroup()
    if plan:
        group = RankGroup.world()
        ways = {
            "rows": [kinds.RowWise()],
            "uneven rows": [kinds.RowWise([1, 0], [300, 1700]), *[kinds.RowWise()] * (len(data.features) - 1)],
            "columns": [kinds.ColumnWise()],
            "mixed": [kinds.RowWise(), kinds.TableWise(1), kinds.TableWise(0)],
            "everywhere": [kinds.DataParallel(), kinds.ColumnWise(columns=[1, 3])],
            "copies": [kinds.TableWise(0)],
        }[plan]
        cuts = {feature.name: ways[number % len(ways)] for number, feature in enumerate(data.features)}
        exchange = kinds.ExchangePrecision("fp32", "fp32")
        shards = 1 if plan == "copies" else group.size
        mesh = init_device_mesh("cpu", (group.size, shards)) if plan == "copies" else None
        local = 1 if plan == "copies" else None
        model = te.HybridParallel(
            model, kinds.ShardingPlan(cuts, shards), mesh, exchange=exchange, local_world_size=local
        )
    trainer = te.Trainer(
        model, data, folder=folder, batch_size=50, epochs=epochs, verbose=False, checkpoints=checkpoints
    )  # fmt: skip
    if resume:
        assert trainer.resume() is not None
    if not only_load:
        trainer.fit()
    return whole_state(trainer.model, group)


def bits(trainer: te.Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def in_memory(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    actual = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in stored_tensors(path).items()}
    load_tensors(path, actual)
    return actual


def table_files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.suffix in (".rows", ".changes"))


class Probe:
    """A table on disk whose every row is written, and its checkpoints."""

    def __init__(self, folder: Path, rows: int = 3000, **options: Any) -> None:
        table = te.TableConfig("t", rows, 8, placement="disk", cache=te.CacheConfig(rows=32))
        self.collection = te.nn.EmbeddingBagCollection([table], optimizer=te.optim.SGD(lr=1.0))
        self.folder = CheckpointFolder(folder, **options)
        self.rows = rows
        self.write(0, rows)

    @property
    def store(self) -> DiskRows:
        return self.collection.tables[0].rows.store

    def write(self, first: int, last: int) -> None:
        records = torch.randn(last - first, 8).view(torch.uint8)
        self.store.write(torch.arange(first, last), records).wait()

    def save(self, step: int) -> list[str]:
        self.folder.save(step, model_tensors(self.collection), {})
        return [name.partition(".")[2] for name in table_files(self.folder.path(step))]

    def values(self) -> Tensor:
        return self.collection.state_dict()["t.weight"].clone()

    def saved(self, step: int) -> Tensor:
        read_manifest(self.folder.path(step))
        return in_memory(self.folder.path(step))["model.t.weight"]


def main(folder: str, kind: str, placement: str) -> None:
    torch.set_num_threads(1)
    every = CheckpointOptions(checkpoint_steps=2, keep=2, checkpoint_incremental=True, checkpoint_async=kind == "async")
    trainer = make_trainer(planted(600, validation=False), Path(folder), placement, epochs=5, checkpoints=every)
    trainer.resume("auto")
    assert trainer.fit().steps == LAST_STEP


if __name__ == "__main__":
    main(*sys.argv[1:])
