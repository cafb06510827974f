"""Models to offload, and a few steps of training them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonemb as te


def mlp() -> nn.Module:
    layers = [module for _ in range(6) for module in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return nn.Sequential(nn.Linear(70, 64), nn.ReLU(), *layers, nn.Linear(64, 1))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.layers = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.layers(self.second(x))


class Transformer(nn.Module):
    """With a tied output layer, and blocks that may be checkpointed."""

    def __init__(
        self, checkpointed: str = "", dim: int = 32, blocks: int = 3, words: int = 50, tied: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.output = nn.Linear(dim, words, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant") if self.checkpointed else block(x)
        return self.output(x)


def checkpointed() -> nn.Module:
    return Transformer("again")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(50, 16, padding_idx=0), nn.LSTM(16, 32, 2, batch_first=True)
        self.norm, self.output = nn.BatchNorm1d(32), nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.norm(self.lstm(self.embedding(ids))[0][:, -1]))


def dlrm() -> nn.Module:
    """With fused tables, which are not offloaded, and towers that are."""
    torch.manual_seed(5)
    tables = [te.TableConfig(f"t{n}", 40, 16) for n in range(3)]
    return te.nn.DLRM(tables, 5, [64, 16], [96, 64], te.optim.RowWiseAdagrad(lr=0.05))


class Trained(NamedTuple):
    losses: list[float]
    weights: list[Tensor]
    model: nn.Module
    optimizer: Any


def steps(
    model: nn.Module, optimizer: Any, number: int, *, seed: int = 1, accumulate: int = 1, clip: float = 0.0
) -> list[float]:
    """Train; the losses."""
    random, losses = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        for _ in range(accumulate):
            loss = loss_of(model, random)
            loss.backward()
        if clip and any(p.grad is not None for p in model.parameters()):
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        elif clip:  # gradients are not in `.grad`
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_of(model: nn.Module, random: torch.Generator, rank: int = 0, ranks: int = 1) -> Tensor:
    dtype = next(p.dtype for p in model.parameters())
    if isinstance(model, te.nn.DLRM):
        ids = torch.randint(40, (3 * 24,), generator=random)
        batch = te.KeyedJaggedTensor.from_lengths(["t0", "t1", "t2"], ids, torch.ones(72, dtype=torch.int64))
        dense = torch.randn(24, 5, generator=random).to(dtype)
        return (model(dense, batch).float().sigmoid() - 0.3).pow(2).mean()
    if isinstance(model, Transformer) or hasattr(model, "blocks"):
        ids = torch.randint(50, (8, 12), generator=random)[rank * 8 // ranks : (rank + 1) * 8 // ranks]
        return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flip(1).flatten())
    if isinstance(model, Recurrent):
        return model(torch.randint(50, (20, 7), generator=random)).pow(2).mean()
    x = torch.randn(33, 70, generator=random).to(dtype)
    return (model(x) - x.sum(1, keepdim=True)).float().pow(2).mean()


def train(
    make: Callable[[], nn.Module], folder: Path, number: int = 5, *, optimizer: Any = None,
    dtype: torch.dtype = torch.float32, offload: dict[str, Any] | None = None, accumulate: int = 1, clip: float = 0.0,
) -> Trained:  # fmt: skip
    """A model trained from one seed, offloaded as `offload` says; not at all if it is None."""
    torch.manual_seed(0)
    model = make().to(dtype)
    fused = {p for m in model.modules() if isinstance(m, te.nn.EmbeddingBagCollection) for p in m.parameters()}
    params = [p for p in model.parameters() if p not in fused]
    stepped = (optimizer or adam)(params)
    if offload is not None:
        model, stepped = te.offload(model, stepped, path=folder, **offload)
    losses = steps(model, stepped, number, accumulate=accumulate, clip=clip)
    return Trained(losses, weights_of(model), model, stepped)


def weights_of(model: nn.Module) -> list[Tensor]:
    with te.gather_parameters(model):
        return [p.detach().clone() for p in model.parameters()]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, fused=True)


def assert_same(trained: Trained, expected: Trained) -> None:
    """Bit by bit: the tier moves bytes, it does no arithmetic."""
    assert trained.losses == expected.losses
    for one, other in zip(trained.weights, expected.weights, strict=True):
        assert torch.equal(one, other)


TIERS = ("device", "host", "disk")
ARENA = {mlp: 76_000, Transformer: 100_000, Recurrent: 90_000, dlrm: 110_000}  # less than the parameters, no tiles
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
}


def on(make: Any, params: str = "device", states: str = "device", **more: Any) -> dict[str, Any]:
    """Options for an arena of this size: with states on disk it is half of the budget."""
    arena = ARENA.get(make, ARENA[Transformer])
    return {"params": params, "states": states, "budget": arena * (2 if states == "disk" else 1), **more}


def build(
    kind: Any = mlp, optimizer: Any = adam, folder: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Any]:
    """A model made from one seed, and its optimizer; offloaded if there are options."""
    torch.manual_seed(0)
    model = kind().to(dtype)
    stepped = optimizer(model.parameters())
    return te.offload(model, stepped, path=folder, **options) if options else (model, stepped)


def channels_last():
    layers = nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(1), nn.Linear(8 * 36, 1)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)
