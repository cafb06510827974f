"""Ranking models beside those of FuxiCTR, DeepCTR-Torch and torch-rechub, on the same rows and ids.

All models of a cell have the same tables, widths, initial distributions, batches in the same order, Adam (ours of the
batch's rows only), learning rate and stop: training ends after two epochs without a larger AUC of the validation rows,
and the test metrics of the epoch with the largest one count. Then new models of all train on some rows in turns, on one
thread, and the median ratio of their CPU seconds counts: of ours by `te.Trainer` with its loader, of a peer by plain
train steps on gathered batches ("steps") and by its own loader and loop ("loop").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.board import Cell
from benchmarks.board.peers import PEERS, Options, Peer, initialize
from benchmarks.measuring.result_files import version_of
from tritonemb.data import Dataset, Feature, Split, load_adult, load_movielens_100k
from tritonemb.data.batch import Column, Rows
from tritonemb.data.encode import encode_categories
from tritonemb.data.schema import CATEGORIES
from tritonemb.models import DIN, DCNv2, DeepFM, FinalMLP
from tritonemb.training.metrics import binary_metrics

LIBRARY = "tritonemb"  # name in timings
TURNS, TIMED_ROWS = 2, 20_480  # short epochs of each in turns, per seed
MIN_COUNT = 24  # copies of two rows: occurrences in Criteo's training rows from which on a category has an id


class Contender(Protocol):
    """Model that trains by epochs."""

    def train_epoch(self) -> None: ...

    def predict(self, split: Split) -> Tensor: ...


class TrainedModel:
    """Model of `te.models`, trained by `te.Trainer`."""

    def __init__(self, data: Dataset, options: Options, seed: int) -> None:
        arguments = {"optimizer": te.optim.Adam(lr=options.lr), "top_mlp": options.mlp}
        tables = data.tables(options.dim)
        if options.model == "deepfm":  # the first column of a row is its weight
            model = DeepFM(data.tables(options.dim + 1), data.num_dense, **arguments)
        elif options.model == "dcnv2":
            model = DCNv2(tables, data.num_dense, options.num_cross_layers, **arguments)
        elif options.model == "finalmlp":
            model = FinalMLP(tables, data.num_dense, **arguments)
        else:
            model = DIN(tables, data.num_dense, options.attention_mlp, **arguments)
        initialize(model, seed)
        self.trainer = te.Trainer(
            model, data, dense_lr=options.lr, epochs=1, batch_size=options.batch_size, seed=seed, verbose=False
        )

    def train_epoch(self) -> None:
        self.trainer.fit()

    def predict(self, split: Split) -> Tensor:
        return self.trainer.predict(split)


def metrics(contender: Contender, data: Dataset, split: Split) -> dict[str, float]:
    """Return AUC and log loss of a split, of probabilities of at least 1e-7."""
    logits = torch.logit(contender.predict(split).double(), 1e-7)
    values = binary_metrics(logits, data.rows(split).labels)
    return {"AUC": values.auc, "log loss": values.log_loss}


def fit(contender: Contender, data: Dataset, options: Options) -> dict[str, Any]:
    """Train until the AUC of the validation rows has not grown for some epochs; return the test metrics of the best."""
    best, best_epoch, result = 0.0, 0, dict[str, Any]()
    for epoch in range(1, options.max_epochs + 1):
        contender.train_epoch()
        if (auc := metrics(contender, data, "validation")["AUC"]) > best:
            best, best_epoch = auc, epoch
            result = {"metrics": metrics(contender, data, "test"), "validation AUC": auc, "epochs": epoch}
        elif epoch - best_epoch >= options.patience:
            break
    return result


def seconds_in_turns(data: Dataset, options: Options, libraries: Sequence[str], seed: int) -> dict[str, list[float]]:
    """Return the CPU seconds of short epochs of new models, in turns of alternating order."""
    model, epochs = TrainedModel(data, options, seed), dict[str, Callable[[], object]]()
    epochs[LIBRARY] = model.train_epoch
    for name in libraries:
        peer = Peer(name, data, options, seed)
        epochs[f"{name} steps"] = peer.train_epoch
        if (loop := peer.library_epoch()) is not None:
            epochs[f"{name} loop"] = loop
    seconds = {name: list[float]() for name in epochs}
    for turn in range(TURNS):
        for name, epoch in list(epochs.items())[:: -1 if turn % 2 else 1]:
            start = time.process_time()
            epoch()
            seconds[name].append(round(time.process_time() - start, 4))
    return seconds


def movielens(_: Path, __: int) -> Dataset:
    """Return MovieLens-100K without histories, by its fixed random split."""
    return drop_features(load_movielens_100k(), "liked", "disliked")


def movielens_history(_: Path, __: int) -> Dataset:
    """Return MovieLens-100K with the last movies that the user has liked before, which share the table of movies."""
    data = drop_features(load_movielens_100k(), "disliked")
    return replace(
        data, features=tuple(replace(f, table="movie_id") if f.name == "liked" else f for f in data.features)
    )


def drop_features(data: Dataset, *names: str) -> Dataset:
    """Return a data set without these features."""
    indices = [index for index, feature in enumerate(data.features) if feature.name not in names]
    splits = {split: data.rows(split) for split in data.splits()}
    splits = {s: replace(rows, columns=tuple(rows.columns[i] for i in indices)) for s, rows in splits.items()}
    return replace(data, features=tuple(data.features[i] for i in indices), **splits)


def adult(folder: Path, _: int) -> Dataset:
    """Return Adult with the last sixth of the training rows as validation rows."""
    data = load_adult(folder)
    num_rows = len(data.train) - len(data.train) // 6
    return replace(data, train=data.train.slice(0, num_rows), validation=data.train.slice(num_rows, len(data.train)))


def criteo(folder: Path, seed: int) -> Dataset:
    """Return the sample of Criteo's log by a random split of its distinct rows: 60 % train, 20 % validation, 20 % test.

    It has 900 distinct rows, each of them 12 times; the copies are in the same split."""
    path = folder / "criteo_kaggle_10800.tsv"
    lines = np.array(path.read_text().splitlines())
    distinct, copies = np.unique(lines, return_inverse=True)
    split_rank = np.random.RandomState(seed).permutation(len(distinct))[copies]
    order = np.argsort(split_rank, kind="stable")
    num_train, test_start = (int((split_rank < share * len(distinct)).sum()) for share in (0.6, 0.8))
    fields = np.array([line.split("\t") for line in lines[order].tolist()]).T
    # Numbers: log(1 + x) of those above 0, standardized as the training rows.
    dense = np.log1p(np.maximum(np.where(fields[1:14] == "", "0", fields[1:14]).astype(np.float64), 0)).T
    dense = (dense - dense[:num_train].mean(axis=0)) / dense[:num_train].std(axis=0)
    categories = [pa.array([value or None for value in column.tolist()]) for column in fields[14:]]
    encoded = [encode_categories(column, num_train, MIN_COUNT) for column in categories]
    features = tuple(Feature(name, size) for name, (_, size) in zip(CATEGORIES, encoded, strict=True))
    labels = torch.from_numpy(fields[0].astype(np.float32))
    rows = Rows(torch.from_numpy(dense.astype(np.float32)), tuple(Column(ids) for ids, _ in encoded), labels)
    train, validation = rows.slice(0, num_train), rows.slice(num_train, test_start)
    return Dataset("criteo-sample", features, train, rows.slice(test_start, len(rows)), validation)


def run(
    options: Options, libraries: Sequence[str], load: Callable[[Path, int], Dataset], folder: Path, _: Path, seed: int
) -> dict[str, Any]:
    """Return the test metrics of our model and of each peer, their epochs, and CPU seconds of epochs in turns."""
    torch.set_num_threads(1)
    data = load(folder, seed)
    peers, model = {name: Peer(name, data, options, seed) for name in libraries}, TrainedModel(data, options, seed)
    result = fit(model, data, options)
    outcomes = {
        name: {"version": version_of(PEERS[name].distribution), **fit(peer, data, options)}
        for name, peer in peers.items()
    }
    part = replace(data, train=data.train.slice(0, min(TIMED_ROWS, len(data.train))))
    timings = {"timed_rows": len(part.train), "cpu_seconds": seconds_in_turns(part, options, libraries, seed)}
    return {**result, "peers": outcomes, **timings, "options": asdict(options)}


DATA = {
    "movielens": ("MovieLens-100K", movielens), "adult": ("Adult", adult), "criteo": ("Criteo sample", criteo),
    "movielens-history": ("MovieLens-100K, liked movies", movielens_history),
}  # fmt: skip
MODELS = {"deepfm": "DeepFM", "dcnv2": "DCNv2", "finalmlp": "FinalMLP", "din": "DIN"}
LISTS = {"FuxiCTR": "weights of lists are summed, not averaged"}  # MovieLens alone has lists
NOTES = {  # what differs in the model of a library
    "deepfm": {
        "FuxiCTR": "",
        "DeepCTR-Torch": "numbers enter the linear part and the MLP, not the pairs",
        "torch-rechub": "the linear part is of the rows, ours has a weight per id; numbers enter the MLP only",
    },
    "dcnv2": {
        "FuxiCTR": "a learned factor per number",
        "torch-rechub": "the bias of a cross layer is not multiplied by the input",
    },
    "finalmlp": {"FuxiCTR": "a learned factor per number; constant gates are those of an MLP"},
    "din": {"FuxiCTR": "a learned factor per number", "DeepCTR-Torch": ""},
}
CELLS = [
    Cell(
        f"{data}-{model}", DATA[data][0], MODELS[model], partial(run, Options(model), tuple(notes), DATA[data][1]),
        seeds=5, peers=notes | (LISTS if (data, model) == ("movielens", "deepfm") else {}),
    )
    for data in DATA for model, notes in NOTES.items()
    if (model == "din") == (data == "movielens-history")
]  # fmt: skip
