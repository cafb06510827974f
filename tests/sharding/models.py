"""Models of four tables, each sharded in another way, their batches, and the state of sharded models."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tritonemb as te
from tritonemb.comm.group import RankGroup
from tritonemb.sharding import ColumnWise, DataParallel, RowWise, ShardingPlan, TableRowWise, TableWise
from tritonemb.sharding.sharded_tensor import TableShards

KEYS = [f"t{n}" for n in range(4)]
BATCH = 6


def tables() -> list[te.TableConfig]:
    return [te.TableConfig(key, 50 + n, 8, pooling=("sum", "mean")[n % 2]) for n, key in enumerate(KEYS)]


def dlrm(device: str | None = None, optimizer=te.optim.RowWiseAdagrad(lr=0.1)) -> te.nn.DLRM:  # noqa: B008
    torch.manual_seed(1)
    return te.nn.DLRM(tables(), 4, (16,), (16,), optimizer=optimizer, device=device)


def dcn(device: str | None = None) -> te.nn.DCNv2:
    torch.manual_seed(1)
    return te.nn.DCNv2(tables(), 4, 2, None, (16,), te.optim.Adam(lr=0.01), device)


def plan(world: int, local: int = 0) -> ShardingPlan:
    shardings = {"t0": TableWise(world - 1), "t1": RowWise(), "t2": ColumnWise(), "t3": DataParallel()}
    if local and local < world:
        shardings["t1"] = TableRowWise(1)
    return ShardingPlan(shardings, world, local)


def batch(step: int, world: int) -> tuple[torch.Tensor, te.KeyedJaggedTensor, torch.Tensor]:
    """Return the batch of all ranks."""
    generator = torch.Generator().manual_seed(step)
    size = BATCH * world
    dense = torch.randn(size, 4, generator=generator)
    ids = torch.randint(0, 50, (4, 2 * size), generator=generator)
    lengths = torch.full((4, size), 2)
    return (
        dense,
        te.KeyedJaggedTensor(KEYS, ids.flatten(), lengths=lengths),
        torch.rand(size, generator=generator).round(),
    )


def part(whole, rank: int):
    dense, sparse, labels = whole
    rows = slice(rank * BATCH, (rank + 1) * BATCH)
    ids = sparse.values().reshape(4, -1)[:, 2 * rows.start : 2 * rows.stop]
    return dense[rows], te.KeyedJaggedTensor(KEYS, ids.flatten(), lengths=torch.full((4, BATCH), 2)), labels[rows]


def loss_of(model, dense, sparse, labels):
    return F.binary_cross_entropy_with_logits(model(dense, sparse), labels)


def whole_state(model: Any, group: RankGroup | None = None) -> dict[str, Tensor]:
    """Copies of a model's whole tensors on every rank of its group, whichever of them are sharded."""
    state, group = {}, group or getattr(model, "group", None)
    for name, value in model.state_dict().items():
        if isinstance(value, TableShards):
            state[name] = value.gather(group)
        else:
            state[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return state


def train(parallel, rank, world, steps=3, first=0, ahead=False):
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        dense, sparse, labels = part(batch(step, world), rank)
        loss = loss_of(parallel, dense, parallel.prefetch(sparse) if ahead else sparse, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        parallel.end_step()
        losses.append(float(loss.detach()))
    return losses
