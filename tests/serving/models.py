"""A model with tables of a kind, what trains it, and what its published files say."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

import tritonemb as te
from tests.training.jobs import make_trainer, planted
from tritonemb.server.snapshot import read_snapshot
from tritonemb.serving.publisher import PUBLISHED, Publisher
from tritonemb.sharding import TableShards
from tritonemb.utils import read_sealed

KINDS = ("device", "host", "disk", "dynamic", "dynamic-host", "server")


class Model(nn.Module):
    """Two static tables, one of them with an odd width, and perhaps a dynamic one that evicts; a dense layer."""

    def __init__(self, kind: str = "device", folder: Path | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        placement = kind.removeprefix("dynamic").removeprefix("-") or "device"
        place = {"placement": placement}
        if placement in ("host", "disk"):
            place["cache"] = te.CacheConfig(rows=64, folder=folder if placement == "disk" else None)
        tables = [te.TableConfig("a", 300, 8, **place), te.TableConfig("b", 900, 3, **place)]
        if kind.startswith("dynamic"):
            eviction = te.EvictionConfig(protect=1)
            more = {} if place.get("cache") is None else {"cache": te.CacheConfig(rows=64)}
            tables[1] = te.TableConfig(
                "b", None, 3, capacity=64, eviction=eviction, fallback_rows=4, **{"placement": placement, **more}
            )
        self.tables = te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.Adagrad(lr=0.1))
        self.dense = nn.Linear(11, 1)

    def forward(self, batch):
        return self.dense(self.tables(batch)).squeeze(1)


def batch(step: int, size: int = 16) -> te.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 3, (2 * size,), generator=generator)
    ids = torch.randint(0, 40, (int(lengths.sum()),), generator=generator) + 7 * step % 200
    return te.KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)


def train(model: Model, step: int) -> None:
    model.train()
    output = model(batch(step))
    (output.square() + output).sum().backward()
    with torch.no_grad():
        for parameter in model.dense.parameters():
            parameter -= 0.05 * parameter.grad
            parameter.grad = None


@torch.no_grad()
def scores(model: nn.Module) -> torch.Tensor:
    model.eval()
    return torch.cat([model(batch(step, 64)) for step in range(0, 40, 3)])


def published_rows(folder: Path) -> tuple[dict[str, Tensor], dict[str, dict[int, Tensor]]]:
    """Dense tensors, and rows by table and id: all records of all ranks' files, one after another."""
    dense, tables = {}, {}
    for chain in json.loads(read_sealed(folder / PUBLISHED))["model"]:
        for name in chain["files"]:
            for values, tensors in read_snapshot(folder / name):
                rows = tables.setdefault(values["table"], {}) if "table" in values else {}
                if values.get("kind") == "dense":
                    dense = dict(zip(values["names"], tensors, strict=True))
                elif values.get("kind") == "removed":
                    for id in tensors[0].tolist():
                        del rows[id]
                elif values.get("kind") == "rows":
                    for id, row in zip(tensors[0].tolist(), tensors[1], strict=True):
                        rows.setdefault(id, {})[values["column"]] = row
    return dense, {
        name: {id: torch.cat([row for _, row in sorted(columns.items())]) for id, columns in rows.items()}
        for name, rows in tables.items()
    }


def publish(rank: int, folder: Path) -> dict[str, Tensor]:
    """Train 5 steps on the ranks of this job and publish; return the model's weights and dense tensors."""
    trainer = make_trainer(planted(), callbacks=[Publisher(folder, steps=2)], max_steps=5)
    trainer.fit()
    tensors = {}
    for name, value in trainer.model.state_dict().items():
        if name.endswith(".weight") or not name.startswith("embeddings"):
            is_shard = isinstance(value, TableShards)
            tensors[name] = value.gather(trainer.model.group) if is_shard else value.detach().clone()
    return tensors
