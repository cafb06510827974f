"""Train tables on an embedding server with batches that miss the updates of more and more steps; compare test AUC.

*adult* is Persia's public example: its columns and network, one epoch of batches of 128, SGD for the dense layers and
Adagrad for tables of 8 columns with small initial values. Unlike there, numbers are standardised, capital gain and loss
as log(1 + x), train rows are shuffled, and Adagrad's accumulators start at 0. Persia has recorded 0.8929; the mean
must reach 0.8925 without staleness, and change by 0.001 at most where batches miss 9 steps, which is Persia's default.
*movielens-100k* is trained as its preset says. *hot ids* is synthetic data with a known ground truth, read once: a
fifth of a feature's ids are the same one, whose row SGD moves by the same gradient again until it sees its own update.

The server is a thread of this process. Its messages take `--delay` each way, so that staleness can save time; with an
exact staleness the rows that a batch reads do not depend on the delay. Seconds are those of training, without the
evaluations. An evaluation reads rows as the next batch would, without the last updates; only the last evaluation sees
all updates. Usage:

    python -m benchmarks.studies.staleness --adult folder_of_adult
    python -m benchmarks.studies.staleness --draw

The picture is `docs/staleness.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import tritonemb as te
from benchmarks.measuring import result_files
from benchmarks.measuring.clock import OtherLoad
from benchmarks.measuring.report import draw_if_possible, publish, save
from benchmarks.studies.accuracy import paired, standard_error
from tritonemb.data import Column, Dataset, Feature, Rows, load_adult, load_movielens_100k
from tritonemb.data.datasets import NUMERIC_FIELDS
from tritonemb.data.protocol import Split, Stream
from tritonemb.server import AtMost, Servers
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.transport import Channel, LocalTransport, Message, Reply, Transport
from tritonemb.training.callbacks import Callback, Evaluation, Log
from tritonemb.training.config import TrainConfig, preset
from tritonemb.training.loop import FitResult
from tritonemb.training.metrics import binary_metrics
from tritonemb.training.model import build_optimizer
from tritonemb.types import TableConfig

PICTURE, DRAWS = Path(__file__).parents[2] / "docs/staleness.png", "python -m benchmarks.studies.staleness --draw"
POINTS = 10  # of a curve
LARGE_BATCH = 4_096  # of an evaluation
LEAST_AUC, TOLERANCE = 0.8925, 0.001  # of adult
Arms = dict[str, int | AtMost | None]  # staleness, by name
EXACT: Arms = {str(steps): steps for steps in (0, 1, 4, 9, 32)}
PREFETCHED = 32  # steps, where nothing else bounds them
LOOSE: Arms = {"at most 9": AtMost(9), "unbounded": None}
COLORS = {
    "0": "#000000", "1": "#1f77b4", "4": "#17becf", "9": "#2ca02c", "32": "#d62728", "at most 9": "#bcbd22",
    "unbounded": "#ff9896",
}  # fmt: skip


class Line:
    """One direction of a slow network, a channel: a thread delivers each message so many seconds after it was sent."""

    def __init__(self, seconds: float, deliver: Reply, closes: Sequence[Channel] = ()) -> None:
        self._seconds, self._deliver, self._closes = seconds, deliver, closes
        self._queue: queue.SimpleQueue[tuple[float, Message] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="slow-network").start()

    def send(self, message: Message) -> None:
        self._queue.put((time.monotonic() + self._seconds, message))

    def close(self) -> None:
        self._queue.put(None)
        for channel in self._closes:
            channel.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            due, message = item
            time.sleep(max(0.0, due - time.monotonic()))
            with suppress(ConnectionError):  # of what is under way when the servers are closed
                self._deliver(message)


class SlowTransport:
    """Another transport, behind a network on which a message takes so many seconds each way."""

    def __init__(self, transport: Transport, seconds: float) -> None:
        self.address, self._transport, self._seconds = transport.address, transport, seconds

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        back = Line(self._seconds, receive)
        channel = self._transport.open(back.send, lost)
        return Line(self._seconds, channel.send, (back, channel))


class Measured(Dataset):
    """Data whose test rows are measured during training too, in large batches."""

    def open(self, split: Split, batch_size: int, **how: Any) -> Stream:
        return super().open(split, batch_size if split == "train" else LARGE_BATCH, **how)


class PersiaNetwork(nn.Module):
    """As in Persia's example: linear layers and batch norm, and nothing between them."""

    def __init__(self, tables: Sequence[TableConfig], num_dense: int, optimizer: Any) -> None:
        super().__init__()
        self.embeddings = te.nn.EmbeddingBagCollection(tables, optimizer)
        width = sum(table.embedding_dim for table in tables)
        self.dense = nn.Sequential(nn.Linear(num_dense, 16), nn.BatchNorm1d(16))
        self.sparse = nn.Sequential(nn.Linear(width, 128), nn.BatchNorm1d(128))
        self.top = nn.Sequential(nn.Linear(128 + 16, 256), nn.Linear(256, 128), nn.Linear(128, 1))

    def forward(self, dense: Tensor, sparse: te.KeyedJaggedTensor) -> Tensor:
        result = torch.cat([self.sparse(self.embeddings(sparse).flatten(1)), self.dense(dense)], 1)
        logits: Tensor = self.top(result)[:, 0]
        return logits


@dataclasses.dataclass(frozen=True)
class Study:
    """Data, how a network of it is made and trained, and the staleness of each arm."""

    data: Measured
    config: TrainConfig
    arms: Arms
    network: Callable[..., nn.Module]
    dense_optimizer: Any = torch.optim.Adam
    init_bound: float | None = None

    def model(self, seed: int, **options: Any) -> nn.Module:
        """The network, with tables on servers; `options` are other ones of all `TableConfig`s."""
        torch.manual_seed(seed)
        options = {"placement": "server", "init_bound": self.init_bound} | options
        tables = [dataclasses.replace(table, **options) for table in self.data.tables(self.config.embedding_dim)]
        return self.network(tables, self.data.num_dense, optimizer=build_optimizer(self.config))

    @property
    def num_steps(self) -> int:
        return -(-len(self.data.train) // self.config.batch_size) * self.config.epochs


@dataclasses.dataclass(frozen=True)
class Run:
    """Steps, seconds and AUC of the points of a curve, and the staleness that batches had, on average."""

    curve: list[tuple[int, float, float]]
    staleness: float

    @property
    def auc(self) -> float:
        return self.curve[-1][2]

    @property
    def seconds(self) -> float:
        return self.curve[-1][1]


class Curve(Callback):
    def __init__(self) -> None:
        self.found: list[tuple[int, float, float]] = []
        self._seconds = 0.0

    def on_log(self, log: Log) -> None:
        self._seconds = log.seconds

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.found.append((evaluation.step, self._seconds, evaluation.metrics.auc))


def fit(
    study: Study, model: nn.Module, seed: int, curve: Curve, batch_size: int | None = None, **options: Any
) -> FitResult:
    """Train and test, with `options` of the trainer; the curve gets its last point when all updates are applied."""
    config, every = study.config, max(1, study.num_steps // POINTS)
    result = te.Trainer(
        model, study.data, seed=seed, callbacks=[curve], batch_size=batch_size or config.batch_size,
        epochs=config.epochs, evaluate_every=every, log_every=every, dense_optimizer=study.dense_optimizer,
        dense_lr=config.dense_lr, verbose=False, **options,
    ).fit(test=True)  # fmt: skip
    assert result.test is not None
    curve.found = [point for point in curve.found if point[0] < result.steps]
    curve.found.append((result.steps, result.seconds, result.test.auc))
    return result


def trained(study: Study, staleness: int | AtMost | None, seed: int, delay: float, max_steps: int | None = None) -> Run:
    """Train with a server of its own, whose messages take `delay` seconds each way."""
    curve, server = Curve(), EmbeddingServer()
    with Servers([SlowTransport(LocalTransport(server), delay)], [server]) as servers:
        fit(
            study, study.model(seed), seed, curve, servers=servers, staleness=staleness, max_steps=max_steps,
            prefetch_depth=PREFETCHED if staleness is None else None,
        )  # fmt: skip
        histogram = servers.statistics()[0]["collections"]["embeddings"]["staleness"]
    total = sum(int(steps) * count for steps, count in histogram.items())
    return Run(curve.found, total / max(1, sum(histogram.values())))  # 0 pulls where the trainer has the rows


def compare(study: Study, seeds: Sequence[int], delay: float) -> list[dict[str, Any]]:
    """A row for each staleness: its AUC, how that differs from the AUC without, and its mean curve."""
    runs: dict[str, list[Run]] = {name: [] for name in study.arms}
    trained(study, 0, 0, delay, max_steps=3)  # kernels are compiled, or loaded
    with OtherLoad() as load:
        for seed, name in itertools.product(seeds, study.arms):
            run = trained(study, study.arms[name], seed, delay)
            print(
                f"{study.data.name}, seed {seed}, staleness {name}: AUC {run.auc:.4f}, {run.seconds:.1f} s", flush=True
            )
            runs[name].append(run)
    config, reference = study.config, [run.auc for run in runs["0"]]
    shared = {
        "data": study.data.name, "seeds": len(seeds), "optimizer": config.embedding_optimizer,
        "embedding_lr": config.embedding_lr, "dense_optimizer": study.dense_optimizer.__name__,
        "dense_lr": config.dense_lr, "embedding_dim": config.embedding_dim, "batch_size": config.batch_size,
        "epochs": config.epochs, "steps": study.num_steps, "train_rows": len(study.data.train),
        "test_rows": len(study.data.test), "best_auc": study.data.best_auc,
        "delay_ms": 1000 * delay, "other_load_percent": load.percent,
    }  # fmt: skip
    return [summary(name, of_arm, reference) | shared for name, of_arm in runs.items()]


def summary(name: str, runs: Sequence[Run], reference: Sequence[float]) -> dict[str, Any]:
    """Means over the seeds; `reference` is the AUC of each seed without staleness."""
    aucs = [run.auc for run in runs]
    points = [zip(*of_point, strict=True) for of_point in zip(*(run.curve for run in runs), strict=True)]
    steps, seconds, curve = zip(*([statistics.fmean(values) for values in point] for point in points), strict=True)
    return {
        "staleness": name, "mean_staleness": statistics.fmean(run.staleness for run in runs),
        "auc_standard_error": standard_error(aucs), **paired(aucs, reference),
        "seconds": statistics.fmean(run.seconds for run in runs), "seconds_of_each_seed": [run.seconds for run in runs],
        "curve_steps": [int(step) for step in steps], "curve_seconds": list(seconds), "curve_auc": list(curve),
    }  # fmt: skip


def measured(data: Dataset) -> Measured:
    """All test rows are also those of the curves."""
    return Measured(data.name, data.features, data.train, data.test, data.test, data.best_auc)


def adult(folder: str | Path) -> Study:
    """Persia's example, without "fnlwgt", which it leaves out."""
    data = load_adult(folder)
    columns = [place for place, name in enumerate(NUMERIC_FIELDS) if name != "fnlwgt"]
    train, test = (Rows(rows.dense[:, columns], rows.columns, rows.labels) for rows in (data.train, data.test))
    config = dataclasses.replace(
        preset("adult"), embedding_dim=8, embedding_optimizer="adagrad", embedding_lr=0.01, dense_lr=0.1,
        batch_size=128, epochs=1,
    )  # fmt: skip
    data = Dataset(data.name, data.features, train, test)
    return Study(measured(data), config, EXACT, PersiaNetwork, torch.optim.SGD, 0.01)


def movielens() -> Study:
    config = preset("movielens-100k")
    return Study(measured(load_movielens_100k()), config, EXACT, dlrm(config))


def dlrm(config: TrainConfig) -> Callable[..., nn.Module]:
    return functools.partial(te.nn.DLRM, bottom_mlp=config.bottom_mlp, top_mlp=config.top_mlp)


def hot_ids(
    optimizer: Literal["sgd", "adagrad"], lr: float, arms: Arms, num_train: int = 64_000, num_test: int = 16_000,
    num_features: int = 6, num_ids: int = 10_000,
) -> Study:  # fmt: skip
    """Ids drawn by Zipf's law with exponent 1.2. The label's logit is the sum of effects of the ids, normal with
    deviation 0.7."""
    draw, num_rows = np.random.default_rng(0), num_train + num_test
    weights = np.arange(1, num_ids + 1) ** -1.2
    bounds, columns, logits = np.cumsum(weights / weights.sum())[:-1], [], np.zeros(num_rows)
    for _ in range(num_features):
        ids = np.searchsorted(bounds, draw.random(num_rows), side="right")
        logits += draw.normal(0, 0.7, num_ids)[ids]
        columns.append(Column(torch.from_numpy(ids)))
    labels = torch.from_numpy((draw.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(np.float32))
    rows = Rows(torch.zeros(num_rows, 1), tuple(columns), labels)
    train, test = rows.slice(0, num_train), rows.slice(num_train, num_rows)
    best = binary_metrics(torch.from_numpy(logits[num_train:]), test.labels).auc
    features = tuple(Feature(f"id_{index}", num_ids) for index in range(num_features))
    config = dataclasses.replace(
        preset("synthetic"), embedding_dim=8, bottom_mlp=(16,), top_mlp=(32,), embedding_optimizer=optimizer,
        embedding_lr=lr, dense_lr=1e-3, batch_size=128, epochs=1,
    )  # fmt: skip
    data = Dataset(f"hot ids, {optimizer}", features, train, test, best_auc=best)
    return Study(measured(data), config, arms, dlrm(config))


def draw(results: dict[str, Any], path: Path) -> None:
    """AUC against steps above, and against seconds below; a column per data set, a line per staleness."""
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["data"] for row in results["rows"]))
    figure, panels = pyplot.subplots(2, len(names), figsize=(5 * len(names), 7), layout="constrained", squeeze=False)
    for name, (above, below) in zip(names, zip(*panels, strict=True), strict=True):
        rows = [row for row in results["rows"] if row["data"] == name]
        for row in rows:
            for axes, along in ((above, "curve_steps"), (below, "curve_seconds")):
                axes.plot(row[along], row["curve_auc"], color=COLORS[row["staleness"]], marker=".", linewidth=1)
        for axes, label in ((above, "steps"), (below, "seconds")):
            # Where curves have left the steep part, or nothing else would be seen.
            axes.set_ylim(bottom=min(row["curve_auc"][len(row["curve_auc"]) // 4] for row in rows))
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        above.set_title(f"{name}: mean of {rows[0]['seeds']} seeds", fontsize=11)
    for axes in panels[:, 0]:
        axes.set_ylabel("test AUC")
    handles = [pyplot.Line2D([], [], color=color, marker=".") for color in COLORS.values()]
    labels = [f"staleness {name}" for name in COLORS]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLORS), frameon=False)
    save(figure, path)


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What adult's rows miss of the goal."""
    result = {row["staleness"]: row for row in rows if row["data"] == "adult"}
    if not result:
        return []
    missed = []
    if result["0"]["auc"] < LEAST_AUC:
        missed.append(f"adult: AUC {result['0']['auc']:.4f} without staleness is less than {LEAST_AUC}")
    if abs(result["9"]["difference"]) > TOLERANCE:
        missed.append(f"adult: AUC with staleness 9 differs by more than {TOLERANCE}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adult", metavar="FOLDER", help="the folder of UCI's adult.data and adult.test")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; two more of adult")
    parser.add_argument("--delay", type=float, default=5.0, help="of a message, in milliseconds")
    parser.add_argument("--draw", action="store_true", help="draw the newest results instead")
    arguments = parser.parse_args()
    if arguments.draw:
        draw_if_possible(draw, result_files.read(result_files.newest("accuracy-staleness")), PICTURE, DRAWS)
        return
    torch.set_num_threads(1)
    rows = []
    studies = [movielens(), hot_ids("sgd", 1.0, EXACT | LOOSE), hot_ids("adagrad", 0.1, EXACT)]
    if arguments.adult:
        studies.insert(0, adult(arguments.adult))
    else:
        print("adult: skipped, no --adult given")
    for study in studies:
        seeds = arguments.seeds + 2 * (study.data.name == "adult")
        for row in compare(study, range(seeds), arguments.delay / 1000):
            print(
                "{data}, staleness {staleness}: AUC {auc:.4f} ± {auc_standard_error:.4f}, difference {difference:+.4f} "
                "± {standard_error:.4f}, {seconds:.1f} s".format(**row)
            )
            rows.append(row)
    draw_if_possible(draw, {"rows": rows}, PICTURE, DRAWS)
    publish("accuracy-staleness", rows, problems(rows))


if __name__ == "__main__":
    main()
