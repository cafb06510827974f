"""AUC of a follower and bytes of publications, by the rows per table that a publication may have.

A DLRM is trained on MovieLens-100K. In its second epoch it is published 20 times to followers: all changed rows, or
those that differ most from what was published. After each publication the AUC on held-out rows is compared with that of
the trainer. Bytes are those of rows; dense layers, which each publication has, are small beside large tables. Usage:

    python -m benchmarks.studies.freshness [--seeds 3]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tritonemb as te
from benchmarks.measuring.report import publish
from tritonemb.data import Dataset, open_dataset
from tritonemb.server.snapshot import read_snapshot
from tritonemb.serving import ModelFollower, Publisher
from tritonemb.training import Callback
from tritonemb.training.callbacks import StepEnd
from tritonemb.training.config import TrainConfig, preset
from tritonemb.training.metrics import binary_metrics
from tritonemb.training.model import build_model

PUBLICATIONS = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {}, "all, int8": {"rows": "int8"}, **{f"top {k}": {"priority": k} for k in (200, 100, 50)},
    "top 200, int8": {"priority": 200, "rows": "int8"}, "top 100, int8": {"priority": 100, "rows": "int8"},
}  # fmt: skip
MAX_SHARE, MAX_LOSS = 1 / 13, 0.0005  # of the bytes of a full snapshot of fp32 rows; of AUC


def row_bytes(path: Path) -> int:
    """Bytes of ids and rows in a file."""
    records = (tensors for values, tensors in read_snapshot(path) if values.get("kind") in ("rows", "removed"))
    return sum(tensor.nbytes for tensors in records for tensor in tensors)


@torch.no_grad()
def auc(model: torch.nn.Module, data: Dataset) -> float:
    model.eval()
    logits = torch.cat([model(batch.dense, batch.sparse) for batch in data.open("test", 8192)])
    return binary_metrics(logits, data.test.labels).auc


class Publications(Callback):
    """Publish by all variants every so many steps of the second epoch, and measure the followers."""

    def __init__(self, model: torch.nn.Module, data: Dataset, folder: Path, interval: int) -> None:
        self._data, self._interval, self._folder = data, interval, folder
        self._publishers = {name: Publisher(folder / name, most=100, **args) for name, args in VARIANTS.items()}
        self._models = {name: copy.deepcopy(model) for name in VARIANTS}
        self._followers: dict[str, ModelFollower] = {}
        self.losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
        self.bytes: dict[str, list[int]] = {name: [] for name in VARIANTS}

    def on_step(self, step: StepEnd) -> None:
        if step.epoch < 1 or step.step % self._interval:
            return
        expected = auc(self.model, self._data)
        for name, publisher in self._publishers.items():
            before = set((self._folder / name).glob("*.update"))
            publisher.publish(self.model, step.step)
            (path,) = set((self._folder / name).glob("*.update")) - before
            self.bytes[name].append(row_bytes(path))
            if name not in self._followers:
                self._followers[name] = ModelFollower(self._models[name], self._folder / name, poll=None)
            self._followers[name].refresh()
            self._followers[name].apply()
            self.losses[name].append(expected - auc(self._models[name], self._data))
        self.model.train()


def measure(config: TrainConfig, data: Dataset, folder: Path) -> Publications:
    torch.manual_seed(config.seed)
    model = build_model(config, data.features, data.num_dense)
    interval = max(1, len(data.train) // config.batch_size // PUBLICATIONS)
    publications = Publications(model, data, folder, interval)
    options = {name: getattr(config, name) for name in ("batch_size", "dense_lr", "seed")}
    te.Trainer(model, data, verbose=False, epochs=2, callbacks=[publications], **options).fit()
    return publications


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments, data, results = parser.parse_args(), open_dataset("movielens-100k"), []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            results.append(measure(replace(preset(data.name), embedding_dim=64, seed=seed), data, Path(folder)))
    rows = []
    for name in VARIANTS:
        losses = [loss for result in results for loss in result.losses[name][1:]]
        full = statistics.fmean(result.bytes["all"][0] for result in results)
        share = statistics.fmean(size for result in results for size in result.bytes[name][1:]) / full
        row = {"rows": name, "publications": len(losses), "auc_loss": statistics.fmean(losses), "bytes_share": share}
        print("{rows}: loss of AUC {auc_loss:+.5f}, {bytes_share:.1%} of a full snapshot".format(**row), flush=True)
        rows.append({**row, "largest_auc_loss": max(losses), "seeds": arguments.seeds})
    good = [row for row in rows if row["bytes_share"] <= MAX_SHARE and row["auc_loss"] <= MAX_LOSS]
    publish("freshness-accuracy", rows, [f"no variant has {MAX_SHARE:.1%} of the bytes"] * (not good))


if __name__ == "__main__":
    main()
