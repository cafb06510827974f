"""Train one small DLRM on a vocabulary's tables and on dynamic tables of raw ids, and compare AUC on held-out rows.

With the same initial values both must be the same in every bit: losses of all steps, and logits of the test rows. With
initial values of their own, the mean difference over the seeds must lie within two standard errors. Then large tables
get rows for a quarter of their ids: ids are evicted, or hashed into as many rows, or those that are most frequent in
the train rows have one each but the last, which all others share. MovieLens is also read once in order of time, and its
AUC is that of predictions made before a row is trained. The ids of MovieLens all come often; most of `zipf` come once.
Usage:

    python -m benchmarks.studies.dynamic_tables --criteo train.txt
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.measuring.report import publish
from benchmarks.studies.accuracy import paired, seen_share
from tritonemb.data import Column, Dataset, Feature, Rows, load_movielens_100k
from tritonemb.data.batch import concat_rows
from tritonemb.data.datasets import FILES
from tritonemb.data.protocol import Split, Stream
from tritonemb.kernels.row_cache import set_of
from tritonemb.nn import DynamicTable
from tritonemb.training.callbacks import Log
from tritonemb.training.config import TrainConfig, preset
from tritonemb.training.metrics import binary_metrics, predict_logits
from tritonemb.training.model import build_optimizer
from tritonemb.types import AdmissionConfig, EvictionConfig, TableConfig
from tritonemb.utils import cache_dir

ODD = int(np.uint64(0x9E3779B97F4A7C15).astype(np.int64))  # times this, small numbers are ids of 64 bits
HISTORY = 3  # of each history of MovieLens: rows of two batches must fit into a quarter
MISSING = -(2**63)
STANDARD_ERRORS = 2
RAW = ("user_id", "movie_id")
REFERENCE, SAME, OWN = "vocabulary", "vocabulary, dynamic's values", "dynamic"
HASHED, FREQUENT = "a quarter, hashed", "a quarter, most frequent"
LATE = EvictionConfig("lfu", protect=1, half_life=100), AdmissionConfig(appearances=10)
# Policies, and the share of a large table's rows that are fallback rows.
EVICTED = {
    "a quarter, lru": (EvictionConfig(protect=1), AdmissionConfig(), 0.0),
    "a quarter, lfu": (EvictionConfig("lfu", protect=1), AdmissionConfig(), 0.0),
    "a quarter, lfu, admission": (*LATE, 0.0),
    "a quarter, lfu, admission, fallback": (LATE[0], AdmissionConfig(appearances=20), 0.9),
}

Ids = dict[str, Tensor]  # int64, the distinct ones of all splits by feature, ascending


class InOrder(Dataset):
    """Train rows come as they are stored, and are predicted just before each batch is trained."""

    def open(self, split: Split, batch_size: int, **how: Any) -> Stream:
        return super().open(split, batch_size, **how | {"shuffle": False})


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses of all steps, and logits of the test rows, or of the train rows where they come in order."""

    losses: list[float]
    logits: Tensor
    auc: float


Arm = Callable[[TrainConfig], Run]


def ids_of(raw: Dataset) -> Ids:
    splits = (raw.train, raw.test)
    return {
        feature.name: torch.cat([rows.columns[index].values for rows in splits]).unique()
        for index, feature in enumerate(raw.features)
    }


def numbered(raw: Dataset, ids: Ids, rows_of: dict[str, int]) -> Dataset:
    """For static tables: ids by their place among `ids`, others have the last one; or hashed where `rows_of` has a
    table's rows."""
    features = [
        Feature(feature.name, rows_of.get(feature.name, len(ids[feature.name])), feature.multi_hot)
        for feature in raw.features
    ]

    def numbers(rows: Rows) -> Rows:
        columns = []
        for feature, column in zip(features, rows.columns, strict=True):
            if feature.name in rows_of:
                result = set_of(column.values, feature.num_embeddings)
            else:
                known = ids[feature.name]
                result = torch.searchsorted(known, column.values)
                result[known[result] != column.values] = len(known) - 1
            columns.append(Column(result, column.offsets))
        return Rows(rows.dense, tuple(columns), rows.labels)

    return type(raw)(raw.name, tuple(features), numbers(raw.train), numbers(raw.test))


def most_frequent(raw: Dataset, ids: Ids, rows_of: dict[str, int]) -> Ids:
    """Of the tables in `rows_of`, one id less than rows, and then the largest number in the place of all others."""
    result = dict(ids)
    for feature, column in zip(raw.features, raw.train.columns, strict=True):
        if feature.name in rows_of:
            item, counts = column.values.unique(return_counts=True)
            most = item[counts.argsort(descending=True, stable=True)[: rows_of[feature.name] - 1]].sort().values
            result[feature.name] = torch.cat([most, torch.tensor([torch.iinfo(torch.int64).max])])
    return result


def quarters(ids: Ids, batch_size: int) -> dict[str, int]:
    """Rows for a quarter of the ids of each large table: those that have room for an id of each sample of two batches,
    as the rows of the batch before are not evicted."""
    return {name: len(result) // 4 for name, result in ids.items() if len(result) // 4 >= 2 * batch_size}


def dynamic_tables(
    raw: Dataset, ids: Ids, dim: int, rows_of: dict[str, int], eviction: EvictionConfig, admission: AdmissionConfig,
    fallback_share: float = 0.0,
) -> list[TableConfig]:  # fmt: skip
    """With room for all ids, but for large tables with `rows_of` rows, of which a share are fallback rows."""
    shared = {name: int(rows * fallback_share) for name, rows in rows_of.items()}
    large = {
        name: {"capacity": rows - shared[name], "fallback_rows": shared[name], "admission": admission}
        for name, rows in rows_of.items()
    }
    return [
        dataclasses.replace(table, eviction=eviction, **large.get(table.name, {"capacity": len(ids[table.name])}))
        for table in raw.tables(dim)
    ]


def static_tables(data: Dataset, dim: int) -> list[TableConfig]:
    """With the scale of initial values that dynamic tables have."""
    return [dataclasses.replace(table, init_bound=dim**-0.5) for table in data.tables(dim)]


def model_of(config: TrainConfig, tables: Sequence[TableConfig], num_dense: int) -> te.nn.DLRM:
    """Its dense layers follow from the seed alone."""
    torch.manual_seed(config.seed)
    options: dict[str, Any] = {"bottom_mlp": config.bottom_mlp, "top_mlp": config.top_mlp}
    one_row = [TableConfig(table.name, 1, table.embedding_dim, pooling=table.pooling) for table in tables]
    dense = te.nn.DLRM(one_row, num_dense, **options).state_dict()
    model = te.nn.DLRM(tables, num_dense, optimizer=build_optimizer(config), **options)
    model.load_state_dict({k: v for k, v in dense.items() if not k.startswith("embeddings.")}, strict=False)
    return model


def trained(config: TrainConfig, data: Dataset, model: te.nn.DLRM) -> Run:
    losses = list[float]()

    class Losses(te.training.Callback):
        def on_log(self, log: Log) -> None:
            losses.append(log.loss)

    trainer = te.Trainer(
        model, data, batch_size=config.batch_size, epochs=config.epochs, dense_lr=config.dense_lr, seed=config.seed,
        verbose=False, log_every=1, callbacks=[Losses()], pipeline=False,
    )  # fmt: skip
    if isinstance(data, InOrder):
        results: list[Tensor] = []
        with model.register_forward_hook(lambda _model, _inputs, logits: results.append(logits.detach().clone())):
            trainer.fit()
        logits, labels = torch.cat(results), data.train.labels
    else:
        trainer.fit()
        logits, labels = predict_logits(model, data.open("test", 1024), torch.device("cpu"))
    return Run(losses, logits, binary_metrics(logits, labels).auc)


def arms(config: TrainConfig, raw: Dataset) -> dict[str, Callable[[TrainConfig], Run]]:
    """What is trained, by name."""
    ids, dim = ids_of(raw), config.embedding_dim
    quarter = quarters(ids, config.batch_size)
    whole = dynamic_tables(raw, ids, dim, {}, EvictionConfig(protect=1), AdmissionConfig())
    vocabulary = numbered(raw, ids, {})

    def static(data: Dataset) -> Arm:
        tables = static_tables(data, dim)
        return lambda seeded: trained(seeded, data, model_of(seeded, tables, raw.num_dense))

    def dynamic(tables: Sequence[TableConfig]) -> Arm:
        return lambda seeded: trained(seeded, raw, model_of(seeded, tables, raw.num_dense))

    def same_values(seeded: TrainConfig) -> Run:
        static = model_of(seeded, static_tables(vocabulary, dim), raw.num_dense)
        dynamic = model_of(seeded, whole, raw.num_dense)
        for table in static.embeddings.tables:
            twin = dynamic.embeddings[table.config.name]
            assert isinstance(twin, DynamicTable)
            table.weight.data.copy_(twin.initial_values(ids[table.config.name]))
        return trained(seeded, vocabulary, static)

    result = {REFERENCE: static(vocabulary), SAME: same_values, OWN: dynamic(whole)}
    for name, policies in EVICTED.items():
        result[name] = dynamic(dynamic_tables(raw, ids, dim, quarter, *policies))
    frequent = numbered(raw, most_frequent(raw, ids, quarter), {})
    return result | {HASHED: static(numbered(raw, ids, quarter)), FREQUENT: static(frequent)}


def compare(config: TrainConfig, raw: Dataset, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each arm: its AUC, and how that differs from the vocabulary's."""
    aucs: dict[str, list[float]] = {}
    same_bits = True
    for seed in seeds:
        seeded = dataclasses.replace(config, seed=seed)
        runs = {name: train(seeded) for name, train in arms(config, raw).items()}
        same_bits &= same(runs[SAME], runs[OWN])
        for name, run in runs.items():
            aucs.setdefault(name, []).append(run.auc)
    ids = ids_of(raw)
    shared = {
        "data": raw.name, "seeds": len(seeds), "optimizer": config.embedding_optimizer,
        "batch_size": config.batch_size, "epochs": config.epochs, "train_rows": len(raw.train),
        "test_rows": None if isinstance(raw, InOrder) else len(raw.test),
        "test_rows_seen_in_training": None if isinstance(raw, InOrder) else seen_share(raw),
        "ids": {name: len(v) for name, v in ids.items()}, "rows_of_a_quarter": quarters(ids, config.batch_size),
    }  # fmt: skip
    return [summary(name, auc, aucs[REFERENCE], same_bits) | shared for name, auc in aucs.items()]


def same(one: Run, other: Run) -> bool:
    """Whether two runs agree in every bit."""
    return one.losses == other.losses and torch.equal(one.logits.view(torch.int32), other.logits.view(torch.int32))


def summary(name: str, aucs: list[float], reference: list[float], same_bits: bool) -> dict[str, Any]:
    row = {"arm": name} | paired(aucs, reference)
    if name == SAME:
        row["bitwise_equal_to_dynamic"] = same_bits
    if name == OWN:
        row["within_two_standard_errors"] = abs(row["difference"]) <= STANDARD_ERRORS * row["standard_error"]
    return row


def movielens(in_order: bool = False) -> Dataset:
    """MovieLens-100K with ids of 64 bits: of users and movies the raw numbers times an odd constant, of the rest the
    data set's own. Ids of the test rows that no training row has are ids like others. `in_order` of time, all rows
    are train rows."""
    data = load_movielens_100k()
    ratings = pyarrow.parquet.read_table(cache_dir() / next(iter(FILES))).to_pydict()
    order = np.random.RandomState(0).permutation(len(ratings["rating"]))  # as it is split
    users, movies = (torch.from_numpy(np.asarray(ratings[key])[order].astype(np.int64)) for key in RAW)
    rows = concat_rows([data.train, *([data.validation] if data.validation else ()), data.test])
    raw_of = torch.zeros(data.features[1].num_embeddings, dtype=torch.int64)
    raw_of[rows.columns[1].values.long()] = movies
    columns = []
    for feature, column in zip(data.features, rows.columns, strict=True):
        values, offsets = column.values.long(), column.offsets
        if feature.name in ("liked", "disliked"):
            values, offsets = last_ones(raw_of[values], offsets, HISTORY)
        elif feature.name in RAW:
            values = (users, movies)[RAW.index(feature.name)]
        columns.append(Column(values * ODD, offsets))
    rows = Rows(rows.dense, tuple(columns), rows.labels)
    features = tuple(dataclasses.replace(feature, dynamic=True) for feature in data.features)
    if in_order:
        rows = concat_rows([rows], np.argsort(np.asarray(ratings["timestamp"])[order], kind="stable"))
        return InOrder(f"{data.name}, in order of time", features, rows, rows.slice(0, 1))
    train, test = rows.slice(0, len(data.train)), rows.slice(len(rows) - len(data.test), len(rows))
    return Dataset(data.name, features, train, test)


def zipf(num_rows: int = 100_000) -> Dataset:
    """Four ids a row, drawn by Zipf's law with exponent 1.3: three of four occur once. The label's logit is the sum of
    effects of the ids, normal with deviation 0.8; of the rows, in random order, the last fifth is held out."""
    draw, columns, logits = np.random.RandomState(0), [], np.zeros(num_rows)
    for _ in range(4):
        result, places = np.unique(draw.zipf(1.3, num_rows), return_inverse=True)
        logits += draw.normal(0, 0.8, len(result))[places]
        columns.append(Column(torch.from_numpy(result[places]) * ODD))
    labels = torch.from_numpy((draw.uniform(size=num_rows) < 1 / (1 + np.exp(-logits))).astype(np.float32))
    rows, held_out = Rows(torch.zeros(num_rows, 1), tuple(columns), labels), num_rows - num_rows // 5
    features = tuple(Feature(f"id_{index}", 1, dynamic=True) for index in range(4))
    return Dataset("zipf", features, rows.slice(0, held_out), rows.slice(held_out, num_rows))


def last_ones(values: Tensor, offsets: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
    """The last ids of each bag."""
    assert offsets is not None
    ends = offsets[1:].repeat_interleave(offsets.diff())
    retained = torch.arange(len(values)) >= ends - number
    lengths = offsets.diff().clamp(max=number)
    return values[retained], torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def criteo(path: str | Path) -> Dataset:
    """A file in Criteo's format; categories are the integers that their hexadecimal digits say. Of equal rows one is
    kept, and of these the last sixth is held out."""
    lines = [line.split("\t") for line in dict.fromkeys(Path(path).read_text().splitlines())]
    labels = torch.tensor([float(line[0]) for line in lines])
    dense = torch.tensor([[math.log1p(max(0, int(field or 0))) for field in line[1:14]] for line in lines])
    categories = torch.tensor([[int(field, 16) if field else MISSING for field in line[14:40]] for line in lines])
    columns = tuple(Column(categories[:, index].contiguous()) for index in range(26))
    rows, held_out = Rows(dense, columns, labels), len(lines) - len(lines) // 6
    features = tuple(Feature(f"C{index + 1}", 1, dynamic=True) for index in range(26))
    return Dataset("criteo", features, rows.slice(0, held_out), rows.slice(held_out, len(lines)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", metavar="FILE", help="a file in Criteo's format")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    config = dataclasses.replace(preset("movielens-100k"), batch_size=64, dense_lr=1e-3, epochs=1)
    few = max(2, arguments.seeds // 4)
    studies = [(movielens(), config, arguments.seeds), (movielens(in_order=True), config, few), (zipf(), config, few)]
    if arguments.criteo:
        small = dataclasses.replace(config, batch_size=16, epochs=4)
        studies.append((criteo(arguments.criteo), small, arguments.seeds))
    for raw, options, seeds in studies:
        for row in compare(options, raw, range(seeds)):
            print(
                "{data}, {arm}: AUC {auc:.4f}, difference {difference:+.4f}, "
                "standard error {standard_error:.4f}".format(**row)
            )
            rows.append(row)
    wrong = {
        "bitwise_equal_to_dynamic": "dynamic tables and a vocabulary with the same initial values differ",
        "within_two_standard_errors": "dynamic tables with initial values of their own differ by two standard errors",
    }
    publish("accuracy-dynamic", rows, [text for key, text in wrong.items() if not all(row.get(key, 1) for row in rows)])


if __name__ == "__main__":
    main()
