"""Matrix factorization on Gowalla, LightGCN's split, with three losses: two towers that have ids only, of 64 columns.

The number of epochs is chosen on the validation file; then the model is trained anew on training and validation rows,
which together are the published training rows, and the test rows are ranked once, over all items that the user has no
training row of.

Floor of an epoch of 810,128 pairs with 1,024 negatives per batch: 320 GFLOP of scores and their gradients, 6.4 s at 50
GFLOP/s of one core; 810,128 batch rows of each tower with two states, read and written: 2.5 GB, 0.3 s.

On the validation file, 10 epochs of the sampled softmax: recall 0.173 with 256 negatives per batch of 1,024, 0.188 with
1,024 per batch of 2,048; 0.155 at temperature 0.2; 0.133 with dot products.

BPR with 128 negatives per batch of 4,096: 6 epochs 0.100 with a learning rate of 0.005, 0.090 with decoupled weight
decay of 0.5, 0.039 with 3; 12 epochs 0.101 with 0.002; 20 epochs 0.137 with 0.005. Cosine contrastive loss, 20 epochs:
0.174 with 256 negatives per batch of 2,048, 0.174 with 512 per batch of 512 and dropout.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tritonemb as te
from benchmarks.board import Cell
from tritonemb.models.losses import bpr, cosine_contrastive, sampled_softmax
from tritonemb.models.two_tower import TwoTower
from tritonemb.training import RankingMetrics, top_items

NUM_USERS, NUM_ITEMS, DIM, K = 29_858, 40_981, 64, 20
SOURCE = "[SimpleX](https://arxiv.org/abs/2109.12613), matrix factorization"
Pairs = tuple[Tensor, Tensor]  # users and items, sorted by user


@dataclass(frozen=True)
class Recipe:
    """Options of a cell.

    Args:
        loss: function of vectors of users, positives and negatives.
        lr: learning rate of Adam.
        num_negatives: uniform items, sampled per step for all users of the batch.
        cosine: whether items are ranked by cosine.
        dropout: probability to drop a column of a user's vector in training, before the loss.
        decay: whether the learning rate decays linearly to 0 over `max_epochs`.
        omit_hits: whether negatives that are the positive of their user are left out.
        max_epochs, evaluate_every, patience: epochs at most; between evaluations; evaluations without a better recall
            of validation rows after which training stops.
    """

    loss: Callable[..., Tensor]
    lr: float = 1e-3
    num_negatives: int = 1024
    cosine: bool = False
    batch_size: int = 2048
    weight_decay: float = 0.0
    dropout: float = 0.0
    decay: bool = False
    omit_hits: bool = True
    max_epochs: int = 60
    evaluate_every: int = 5
    patience: int = 2


def read_pairs(data: Path, *names: str) -> Pairs:
    """Read users and items of these files, sorted by user."""
    users, items = list[int](), list[int]()
    for name in names:
        with lzma.open(data / f"gowalla_{name}.txt.xz", "rt") as file:
            for line in file:
                user, *row = map(int, line.split())
                users += [user] * len(row)
                items += row
    order = torch.tensor(users).argsort(stable=True)
    return torch.tensor(users)[order], torch.tensor(items)[order]


def bags(name: str, ids: Tensor) -> te.KeyedJaggedTensor:
    return te.KeyedJaggedTensor.from_lengths([name], ids, torch.ones_like(ids))


def build(recipe: Recipe, seed: int) -> TwoTower:
    torch.manual_seed(seed)
    tables = [te.TableConfig("user", NUM_USERS, DIM), te.TableConfig("item", NUM_ITEMS, DIM)]
    optimizer = te.optim.Adam(lr=recipe.lr, weight_decay=recipe.weight_decay)
    return TwoTower(tables, 0, ["user"], (), temperature=1.0 if recipe.cosine else None, optimizer=optimizer)


def train_epoch(model: TwoTower, pairs: Pairs, recipe: Recipe, seed: int, epoch: int) -> float:
    """Train one epoch, whose order and negatives depend on seed and epoch alone; return the mean loss."""
    order = torch.randperm(len(pairs[0]), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    torch.manual_seed(seed * 1_000_003 + epoch)  # of dropout
    sampler, total, batches = te.data.NegativeSampler(NUM_ITEMS, seed=seed), 0.0, order.split(recipe.batch_size)
    for step, rows in enumerate(batches):
        if recipe.decay:
            rate = recipe.lr * (1 - (epoch - 1 + step / len(batches)) / recipe.max_epochs)
            for tower in (model.users, model.items):
                tower.embeddings.set_learning_rate(rate)
        users, positives = pairs[0][rows], pairs[1][rows]
        negatives = sampler.sample(recipe.num_negatives, step, stream=epoch)
        items = torch.cat([positives, negatives])
        user_vectors, vectors = model(None, bags("user", users), bags("item", items))
        user_vectors = F.dropout(user_vectors, recipe.dropout)
        positive, negative = vectors.split([len(rows), len(negatives)])
        ids = {"positive_ids": positives, "negative_ids": negatives} if recipe.omit_hits else {}
        loss = recipe.loss(user_vectors, positive, negative, **ids)
        loss.backward()
        total += loss.item() * len(rows) / len(order)
    return total


@torch.no_grad()
def evaluate(model: TwoTower, seen: Pairs, relevant: Pairs) -> dict[str, float]:
    """Rank all items but those of `seen` for each user, and return Recall and NDCG of the relevant ones."""
    items = model.items(bags("item", torch.arange(NUM_ITEMS)))
    starts, stops = (torch.searchsorted(pairs[0], torch.arange(NUM_USERS + 1)) for pairs in (seen, relevant))
    metrics = RankingMetrics((K,))
    for first in range(0, NUM_USERS, 1024):
        last = min(first + 1024, NUM_USERS)
        rows = slice(int(starts[first]), int(starts[last]))
        vectors = model.users(bags("user", torch.arange(first, last)))
        ranked = top_items(vectors, items, K, (seen[0][rows] - first, seen[1][rows]))[1]
        offsets = stops[first : last + 1]
        metrics.update(ranked, relevant[1][offsets[0] : offsets[-1]], offsets - offsets[0])
    return {name: value for name, value in metrics.compute().items() if "recall" in name or "ndcg" in name}


def run(recipe: Recipe, data: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Choose the number of epochs by the validation recall, train anew on all training rows, and rank the test rows."""
    train, valid, test = read_pairs(data, "train"), read_pairs(data, "valid"), read_pairs(data, "test")
    chosen, history = fit(build(recipe, seed), train, valid, recipe, folder / "choose.pt", seed)
    model = build(recipe, seed)
    both = read_pairs(data, "train", "valid")
    fit(model, both, None, replace(recipe, max_epochs=chosen), folder / "train.pt", seed)
    loss = recipe.loss if isinstance(recipe.loss, partial) else partial(recipe.loss)
    options = asdict(recipe) | {"loss": loss.func.__name__, **loss.keywords, "epochs": chosen}
    return {"metrics": evaluate(model, both, test), "validation": history, "options": options}


def fit(
    model: TwoTower, pairs: Pairs, valid: Pairs | None, recipe: Recipe, path: Path, seed: int
) -> tuple[int, list[dict[str, float]]]:
    """Train, resuming from `path`; with validation rows stop early, and return the best epoch and all evaluations."""
    history = list[dict[str, float]]()
    epoch = 0
    if path.exists():
        state = torch.load(path)
        epoch, history = state["epoch"], state["history"]
        model.load_state_dict(state["model"])
    while epoch < recipe.max_epochs:
        best = max(history, key=lambda entry: entry["recall@20"], default=None)
        if best is not None and epoch - best["epoch"] >= recipe.patience * recipe.evaluate_every:
            break
        epoch += 1
        loss = train_epoch(model, pairs, recipe, seed, epoch)
        if valid is not None and epoch % recipe.evaluate_every == 0:
            history.append({"epoch": epoch, "loss": loss, **evaluate(model, pairs, valid)})
            print(path.parent.name, history[-1], flush=True)
        torch.save({"epoch": epoch, "history": history, "model": model.state_dict()}, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)
    best = max(history, key=lambda entry: entry["recall@20"], default={"epoch": epoch})
    return int(best["epoch"]), history


def cell(loss: str, recipe: Recipe, recall: float, ndcg: float, notes: str) -> Cell:
    published = {"recall@20": recall, "ndcg@20": ndcg}
    model = f"matrix factorization, {loss.replace('-', ' ')}"
    return Cell(
        f"gowalla-{loss}", "Gowalla", model, partial(run, recipe), published, SOURCE, tolerance=0.02, notes=notes
    )


NEGATIVES = "{} uniform negatives, shared by a batch of {}; {} epochs at most"
# Large batches with few negatives make the rare gradients of negatives as large as all others of a row together.
SHORT = Recipe(bpr, num_negatives=512, batch_size=512, decay=True, omit_hits=False, max_epochs=20, evaluate_every=10)
PAIRS = replace(SHORT, lr=5e-3, num_negatives=128, batch_size=4096)
CCL = partial(cosine_contrastive, margin=0.9, negative_weight=150.0)
CELLS = [
    cell("sampled-softmax", Recipe(partial(sampled_softmax, temperature=0.1), cosine=True), 0.1754, 0.1473,
         NEGATIVES.format("1,024", "2,048", 60)
         + "; cosines, temperature 0.1; the source's is YouTubeNet, whose users have histories"),
    cell("bpr", PAIRS, 0.1627, 0.1378, NEGATIVES.format(128, "4,096", 20)),
    cell("cosine-contrastive", replace(SHORT, loss=CCL, cosine=True, dropout=0.1), 0.1837, 0.1493,
         NEGATIVES.format(512, 512, 20) + "; margin 0.9, weight 150, dropout 0.1"),
]  # fmt: skip
