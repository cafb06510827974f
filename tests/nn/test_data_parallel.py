"""Fused updates under `DistributedDataParallel`: refused, as it would let the processes' tables drift apart."""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tritonemb as te


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.top = nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, 1)

    def forward(self, ids):
        return self.top(self.bag(ids))


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = te.nn.EmbeddingBagCollection([te.TableConfig("item", 7, 4)], te.optim.SGD())
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        batch = te.KeyedJaggedTensor.from_lengths(["item"], ids.flatten(), torch.full((len(ids),), ids.shape[1]))
        return self.top(self.bags(batch))


def _run(rank: int, size: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.distributed.init_process_group("gloo")
    ids = torch.arange(6).view(3, 2)
    try:
        fused = Model()
        te.fuse(fused, te.optim.SGD())
        for model, name in ((fused, "bag"), (Collected(), "item")):
            before = copy.deepcopy(model.state_dict())
            parallel = DistributedDataParallel(model)
            if size == 1:
                parallel(ids).sum().backward()
                continue
            with pytest.raises(RuntimeError, match=f"'{name}' has a fused optimizer, so Dist"):
                parallel(ids)
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        plain = Model()
        te.fuse(plain)
        parallel = DistributedDataParallel(plain)
        parallel(ids + rank).sum().backward()
        whole = Model()
        (sum(whole(ids + number).sum() for number in range(size)) / size).backward()
        # Means of two gradients, taken in another order.
        torch.testing.assert_close(plain.bag.weight.grad, whole.bag.weight.grad, rtol=1e-6, atol=1e-6)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.more
def test_fused_updates_are_refused_where_they_would_drift(size):
    torch.multiprocessing.spawn(_run, (size, _free_port()), nprocs=size)
