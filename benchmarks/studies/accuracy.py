"""Train one network twice, with fused embeddings and in plain `torch.nn`, and compare their AUC on held-out rows.

Both start from the same weights, see the same batches and follow the same optimizer formula; only float32 rounding may
tell them apart. The mean over the seeds must agree within 0.003. Usage:

    python -m benchmarks.studies.accuracy --criteo train.txt --adult folder_of_adult
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tritonemb as te
from benchmarks.measuring.report import publish
from tritonemb.data import ClickLog, Dataset, LogOptions, Rows, Schema, build_vocabulary, open_dataset
from tritonemb.data.batch import concat_rows
from tritonemb.training.config import TrainConfig, preset
from tritonemb.training.metrics import binary_metrics
from tritonemb.training.model import build_model, build_optimizer

TOLERANCE = 0.003
MIN_COUNT = 10


def fused_auc(config: TrainConfig, data: Dataset, model: te.nn.DLRM) -> float:
    """Test AUC after training with the library's own trainer."""
    options = {name: getattr(config, name) for name in ("batch_size", "epochs", "dense_lr", "seed")}
    trainer = te.Trainer(model, data, verbose=False, **options)
    trainer.fit()
    return trainer.evaluate("test").auc


def plain_auc(config: TrainConfig, data: Dataset, model: PlainDLRM) -> float:
    """Test AUC after training with torch alone."""
    spec: Any = build_optimizer(config)
    kind = PlainRowWiseAdagrad if isinstance(spec, te.optim.RowWiseAdagrad) else torch.optim.Adagrad
    optimizers = [
        torch.optim.Adam(model.dense_parameters(), lr=config.dense_lr),
        kind(model.tables(), lr=spec.lr, eps=spec.eps),
    ]
    for epoch in range(config.epochs):
        for batch in data.open("train", config.batch_size, seed=config.seed, epoch=epoch, shuffle=True):
            loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    with torch.no_grad():
        logits = [model(batch.dense, batch.sparse) for batch in data.open("test", config.batch_size)]
    return binary_metrics(torch.cat(logits), data.test.labels).auc


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def paired(aucs: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """Means over the seeds; the difference is paired with `reference`, the AUC of each seed of what it is met with."""
    differences = [one - other for one, other in zip(aucs, reference, strict=True)]
    return {
        "auc": statistics.fmean(aucs), "auc_of_each_seed": aucs, "difference": statistics.fmean(differences),
        "standard_error": standard_error(differences), "difference_of_each_seed": differences,
    }  # fmt: skip


def seen_share(data: Dataset) -> float:
    """Share of the test rows that a model has already seen, label and all, among the training rows.

    Where it is high, the AUC says how well rows were memorised; the two networks can still be compared.
    """
    seen = set(_fingerprints(data.train))
    return statistics.fmean(row in seen for row in _fingerprints(data.test))


def _fingerprints(rows: Rows) -> list[bytes]:
    """Everything that a model is given of each row, and the label, as bytes."""
    parts = [[value.tobytes() for value in rows.dense.numpy()], [value.tobytes() for value in rows.labels.numpy()]]
    for column in rows.columns:
        offsets = range(len(column) + 1) if column.offsets is None else column.offsets.tolist()
        values = column.values.numpy()
        parts.append([values[first:last].tobytes() for first, last in itertools.pairwise(offsets)])
    return [b"|".join(row) for row in zip(*parts, strict=True)]


def compare(config: TrainConfig, data: Dataset, seeds: Sequence[int]) -> dict[str, Any]:
    """Mean AUC of both networks over the seeds."""
    fused, plain = [], []
    for seed in seeds:
        seeded = replace(config, seed=seed)
        torch.manual_seed(seed)
        model: Any = build_model(seeded, data.features, data.num_dense)
        twin = PlainDLRM(data.tables(config.embedding_dim), data.num_dense, config.bottom_mlp, config.top_mlp)
        twin.copy_weights(model)
        fused.append(fused_auc(seeded, data, model))
        plain.append(plain_auc(seeded, data, twin))
    row = paired(fused, plain)
    return {
        "data": data.name, "optimizer": config.embedding_optimizer, "seeds": len(seeds), "test_rows": len(data.test),
        "test_rows_seen_in_training": seen_share(data), "tritonemb_auc": row["auc"],
        "torch_auc": statistics.fmean(plain), "difference": row["difference"],
        "largest_difference_of_a_seed": max(map(abs, row["difference_of_each_seed"])),
        "deviation_between_seeds": statistics.stdev(plain) if len(plain) > 1 else 0.0,
        "within_tolerance": abs(row["difference"]) <= TOLERANCE,
    }  # fmt: skip


def criteo(path: str) -> Dataset:
    """A file in Criteo's format, in memory; a category with fewer than `MIN_COUNT` train rows counts as missing."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocabulary.parquet"
        build_vocabulary(ClickLog(path), vocabulary, min_count=MIN_COUNT)
        log = ClickLog(path, LogOptions(schema=Schema(vocabulary=vocabulary)))
        train, test = (
            concat_rows([block.rows for block in log.scan(split, log.encode)]) for split in ("train", "test")
        )
        return Dataset(log.name, log.features, train, test)


def data_sets(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[Any]:
    """Those of these names that are there; a file's name is not ours to publish, so that of its kind stands for it."""
    for name in names:
        path = getattr(arguments, name, None)
        if path is None and name != "movielens-100k":
            print(f"{name}: skipped, no --{name} given")
        else:
            yield replace(criteo(path) if name == "criteo" else open_dataset(name, path), name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", metavar="FILE", help="a file in Criteo's format; its last sixth is held out")
    parser.add_argument("--adult", metavar="FOLDER", help="the folder of UCI's adult.data and adult.test")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    arguments = parser.parse_args()
    rows = []
    for data in data_sets(arguments, ("movielens-100k", "criteo", "adult")):
        for optimizer in ("row_wise_adagrad", "adagrad"):
            row = compare(replace(preset(data.name), embedding_optimizer=optimizer), data, range(arguments.seeds))
            print(
                "{data}, {optimizer}: tritonemb {tritonemb_auc:.4f}, torch.nn {torch_auc:.4f}, "
                "difference {difference:+.5f}".format(**row)
            )
            rows.append(row)
    wrong = not all(row["within_tolerance"] for row in rows)
    publish("accuracy", rows, [f"a difference is larger than {TOLERANCE}"] * wrong)


class PlainRowWiseAdagrad(torch.optim.Optimizer):
    """`m += mean(g²)` a row, `w -= lr · g / (sqrt(m) + eps)`, on dense gradients of [rows, D] parameters.

    A row without a gradient has `g = 0`, which changes neither `m` nor `w`, so no row needs to be singled out.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not used here"
        for group in self.param_groups:
            for weight in group["params"]:
                total = self.state[weight].setdefault("sum", torch.zeros(weight.shape[0]))
                total += weight.grad.square().mean(dim=1)
                weight -= group["lr"] * weight.grad / (total.sqrt() + group["eps"]).unsqueeze(1)


class PlainDLRM(nn.Module):
    """The network of `te.nn.DLRM` with one `torch.nn.EmbeddingBag` a table, which is looked up by the table's name."""

    def __init__(
        self, tables: Sequence[te.TableConfig], num_dense: int, bottom_mlp: Sequence[int], top_mlp: Sequence[int]
    ) -> None:
        super().__init__()
        dim, self.num_vectors = tables[0].embedding_dim, len(tables) + 1
        self.keys = [table.name for table in tables]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(table.num_embeddings, dim, mode=table.pooling, include_last_offset=True) for table in tables
        )
        self.bottom = _linears([num_dense, *bottom_mlp, dim])
        self.top = _linears([dim + self.num_vectors * (self.num_vectors - 1) // 2, *top_mlp, 1])

    def tables(self) -> list[nn.Parameter]:
        return list(self.bags.parameters())

    def dense_parameters(self) -> list[nn.Parameter]:
        return [*self.bottom.parameters(), *self.top.parameters()]

    @torch.no_grad()
    def copy_weights(self, model: te.nn.DLRM) -> None:
        """Start where `model` starts."""
        state = model.state_dict()
        sources = [state[f"embeddings.{key}.weight"] for key in self.keys]
        sources += [*model.bottom.parameters(), *model.top.parameters()]
        for target, source in zip([*self.tables(), *self.dense_parameters()], sources, strict=True):
            target.copy_(source)

    def forward(self, dense: Tensor, sparse: te.KeyedJaggedTensor) -> Tensor:
        vector = dense
        for layer in self.bottom:
            vector = torch.relu(layer(vector))
        vectors = torch.stack([vector, *self._pooled(sparse)], dim=1)
        rows, columns = torch.tril_indices(self.num_vectors, self.num_vectors, offset=-1)
        products = torch.einsum("bid,bjd->bij", vectors, vectors)[:, rows, columns]
        hidden = torch.cat([vector, products], dim=1)
        for layer in self.top[:-1]:
            hidden = torch.relu(layer(hidden))
        logits: Tensor = self.top[-1](hidden)
        return logits.squeeze(1)

    def _pooled(self, sparse: te.KeyedJaggedTensor) -> list[Tensor]:
        batch_size, pooled = (sparse.offsets().numel() - 1) // len(sparse.keys()), []
        for key, bag in zip(self.keys, self.bags, strict=True):
            first = list(sparse.keys()).index(key) * batch_size
            offsets = sparse.offsets()[first : first + batch_size + 1]
            values = sparse.values()[int(offsets[0]) : int(offsets[-1])]
            pooled.append(bag(values, (offsets - offsets[0]).to(values.dtype)))
        return pooled


def _linears(widths: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(widths))


if __name__ == "__main__":
    main()
