"""Next item of Amazon reviews (Beauty, Sports, Toys; 5-core): leave-one-out, ranked among all items.

Files `Beauty.txt.xz`, `Sports_and_Outdoors.txt.xz` and `Toys_and_Games.txt.xz`: a user per line, then items in time
order, those of S3-Rec's repository. The last item of a user is that of the test rows, the one before it that of the
validation rows; training has the others. Items that the user has had are not ranked, as in both sources. Training ends
when the hit rate of validation rows has not improved for `patience` epochs; its best epoch is tested, once.

Of eSASRec (its repository and RecTools, on which it stands) these are the same: split, items not ranked, monitored
metric, batch of 128 users, windows of 50 items with positions from their end, blocks, initial values, Adam with
betas (0.9, 0.98) for all rows in all steps. eSASRec differs from these cells: its attention also reads the zeros of
padding, each position has 256 negatives of its own, it evaluates after each epoch, and its HSTU has times, which the
files here do not have. Its README says 64 columns for these data, its committed configuration 256. With sampled softmax
SASRec stays 11 % below its figure on Beauty, 22 % on Sports and 15 % on Toys, HSTU 13 % on Beauty and 8 % on Toys; no
other recipe was tried. On Beauty the hit rate of validation rows has no trend after epoch 20, and is 1.2 times that of
the test rows.

With binary cross-entropy these are those of S3-Rec's scripts: two blocks and heads, dropout 0.5, batch of 256 users, a
negative per position, Adam with betas (0.9, 0.999), rows that begin with a standard deviation of 0.02. They differ in
their layers: normalized embeddings, residuals normalized at their end, GELU of four times the width, dropout of the
attention's results. They never draw an item of the user, nor that of the test row, as a negative; give the items that
the user has had the score 0 instead of leaving them out; and monitor NDCG@20 with a patience of 10. Initial rows
matter: with Xavier's, 0.0128 for items beside 0.13 for positions, the hit rate of Beauty's validation rows was 0.0662
at best, and with dropout 0.2, batches of 128 and betas (0.9, 0.98) that of the test rows 0.0558, and 0.0248 on Sports.

Floor of an epoch of Beauty, 128,029 positions: 4 GFLOP of the block's layers, 50 GFLOP of scores of 1,024 negatives and
their gradients; 1.1 s at 50 GFLOP/s of one core. Adam of 774,528 parameters in 175 steps moves 3.8 GB: 0.4 s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tritonemb as te
from benchmarks.board import Cell
from tritonemb.data import Column, Split, keep_last, leave_one_out, read_sequences, take_rows
from tritonemb.models.losses import sampled_softmax
from tritonemb.models.sequence import SequenceModel
from tritonemb.training import RankingMetrics, top_items

FILES = {"Beauty": "Beauty.txt.xz", "Sports": "Sports_and_Outdoors.txt.xz", "Toys": "Toys_and_Games.txt.xz"}


@dataclass(frozen=True)
class Recipe:
    """Options of a cell.

    Args:
        model: `SASRec` or `HSTU`.
        num_negatives: negatives of a position; 1 for the binary cross-entropy of SASRec's paper.
        num_shared: uniform negatives that a batch shares: one product scores them for all positions. With weights
            `num_negatives / num_shared` their sum estimates that of negatives of each position.
        max_epochs, evaluate_every, patience: epochs at most; between evaluations; without a better hit rate.
        std: standard deviation of the initial rows of items and positions; None for Xavier's.
        beta2: decay of Adam's second moment.
    """

    model: Callable[..., SequenceModel]
    dim: int = 64
    length: int = 50
    blocks: int = 1
    heads: int = 1
    dropout: float = 0.2
    lr: float = 1e-3
    batch_size: int = 128
    num_negatives: int = 256
    num_shared: int = 1024
    max_epochs: int = 200
    evaluate_every: int = 5
    patience: int = 50
    std: float | None = None
    beta2: float = 0.98

    def loss(self, queries: Tensor, positives: Tensor, negatives: Tensor, **ids: Tensor) -> Tensor:
        """Return the mean loss of the positions."""
        if self.num_negatives == 1:
            positive, negative = ((queries * rows).sum(1) for rows in (positives, negatives.flatten(0, -2)))
            return (F.softplus(-positive) + F.softplus(negative)).mean()
        weights = queries.new_full((len(negatives),), math.log(len(negatives) / self.num_negatives))
        return sampled_softmax(queries, positives, negatives, **ids, log_q=(queries.new_zeros(len(queries)), weights))


def jagged(key: str, sequences: Column) -> te.KeyedJaggedTensor:
    return te.KeyedJaggedTensor.from_offsets([key], sequences.values, sequences.offsets)


def batches(size: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    yield from torch.randperm(size, generator=torch.Generator().manual_seed(seed)).split(batch_size)


@torch.no_grad()
def evaluate(model: SequenceModel, sequences: Column, split: Split) -> dict[str, float]:
    """Rank all items but those that the user has had, and 0, which is no item."""
    model.eval()
    metrics, (histories, targets) = RankingMetrics((10,)), leave_one_out(sequences, split)
    items = model.embeddings.tables[0].weight.detach()
    for users in torch.arange(len(targets)).split(1024):
        seen = take_rows(histories, users)
        states = model(jagged(model.key, keep_last(seen, model.max_length)))[:, -1]
        rows = torch.arange(len(users))
        pairs = torch.cat([rows.repeat_interleave(seen.offsets.diff()), rows]), F.pad(seen.values, (0, len(users)))
        metrics.update(top_items(states, items, 10, pairs)[1], targets[users], torch.arange(len(users) + 1))
    model.train()
    figures = metrics.compute()
    return {"HR@10": figures["hit_rate@10"], "NDCG@10": figures["ndcg@10"]}


def build(recipe: Recipe, num_items: int, seed: int) -> SequenceModel:
    """Build the model. Its table has ordinary gradients: sources apply Adam to all rows in each step."""
    torch.manual_seed(seed)
    normal = partial(nn.init.normal_, std=recipe.std or math.sqrt(2 / (num_items + recipe.dim)))  # Xavier's
    table = te.TableConfig("item", num_items, recipe.dim, init=normal)
    model = recipe.model(table, recipe.length, recipe.blocks, recipe.heads, recipe.dropout)
    if recipe.std is not None:
        nn.init.normal_(model.positions.weight, std=recipe.std)
    return model


def run(recipe: Recipe, file: str, data: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Train, resuming from the folder, with the bits of a run without interruption; test the best epoch."""
    sequences = read_sequences(data / file)
    num_items, training = int(sequences.values.max()) + 1, keep_last(sequences, recipe.length + 1, drop=2)
    model = build(recipe, num_items, seed)
    next_item = te.models.NextItem(model, recipe.loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr, betas=(0.9, recipe.beta2), fused=True)
    sampler = te.data.NegativeSampler(torch.arange(1, num_items), seed=seed)
    state: dict[str, Any] = {"epoch": 0, "step": 0, "best": {"HR@10": -1.0}, "best_epoch": 0, "history": [], "cpu": 0.0}
    if (path := folder / "state.pt").exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    start = time.process_time() - state["cpu"]
    while state["epoch"] < recipe.max_epochs and state["epoch"] - state["best_epoch"] < recipe.patience:
        state["epoch"] += 1
        torch.manual_seed(seed * 100_003 + state["epoch"])  # of dropout
        total, num_batches = torch.zeros(()), 0
        for users in batches(len(training), recipe.batch_size, seed * 100_003 + state["epoch"]):
            batch = jagged(model.key, take_rows(training, users))
            num_targets = len(batch.values()) - len(users)
            shape = (num_targets, 1) if recipe.num_negatives == 1 else (recipe.num_shared,)
            loss = next_item(batch, sampler.sample(shape, state["step"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, num_batches, state["step"] = total + loss.detach(), num_batches + 1, state["step"] + 1
        if state["epoch"] % recipe.evaluate_every == 0:
            validation = evaluate(model, sequences, "validation")
            state["history"].append({"epoch": state["epoch"], "loss": float(total) / num_batches, **validation})
            print(folder.name, state["history"][-1], flush=True)
            if validation["HR@10"] > state["best"]["HR@10"]:
                weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                state |= {"best": validation, "best_epoch": state["epoch"], "weights": weights}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["cpu"] = time.process_time() - start
            torch.save(state, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
    model.load_state_dict(state["weights"])
    metrics, options = evaluate(model, sequences, "test"), asdict(recipe) | {"model": recipe.model.__name__}
    history = {name: state[name] for name in ("best", "best_epoch", "epoch", "history")}
    return {"metrics": metrics, **history, "cpu_seconds": round(time.process_time() - start), "options": options}


S3REC = "[TIGER](https://arxiv.org/abs/2305.05065)'s SASRec"
ESASREC = "[eSASRec](https://arxiv.org/abs/2508.06450)"
ROWS = [
    ("sasrec", "SASRec, binary cross-entropy", S3REC,
     Recipe(te.models.SASRec, blocks=2, heads=2, num_negatives=1, dropout=0.5, batch_size=256, std=0.02, beta2=0.999),
     {"Beauty": (0.0605, 0.0318), "Sports": (0.0350, 0.0192), "Toys": (0.0675, 0.0374)}, "a negative per position"),
    ("sasrec-sampled", "SASRec, sampled softmax", ESASREC, Recipe(te.models.SASRec),
     {"Beauty": (0.0921, 0.0531), "Sports": (0.0569, 0.0314), "Toys": (0.0970, 0.0580)},
     "256 negatives per position, estimated by 1,024 per batch"),
    ("hstu", "HSTU, sampled softmax", ESASREC, Recipe(te.models.HSTU, blocks=2),
     {"Beauty": (0.0788, 0.0439), "Sports": (0.0437, 0.0243), "Toys": (0.0778, 0.0450)},
     "256 negatives per position, estimated by 1,024 per batch; no times"),
]  # fmt: skip
CELLS = [
    Cell(
        f"{data.lower()}-{name}", data, model, partial(run, recipe, FILES[data]),
        dict(zip(("HR@10", "NDCG@10"), figures, strict=True)), source, notes=notes,
    )
    for name, model, source, recipe, published, notes in ROWS
    for data, figures in published.items()
]  # fmt: skip
