"""A row cache of three tables for tests of its ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import tritonemb as te
from tritonemb import ops
from tritonemb.layout import make_layout


class Cache(NamedTuple):
    """The arguments that ops share: three tables, the second not cached, and some rows of each."""

    tags: list[Tensor]
    used: list[Tensor]
    pins: list[Tensor]
    rows: Tensor
    tables: Tensor
    num_sets: Tensor
    now: Tensor
    policy: str

    @property
    def parts(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return self.tags, self.used, self.pins

    @property
    def rest(self) -> tuple[Tensor, Tensor, Tensor, str]:
        return self[4:]


def make_cache(policy: str = "lru") -> Cache:
    configs = [te.TableConfig("a", 100, 4), te.TableConfig("b", 7, 4), te.TableConfig("c", 300, 4)]
    num_sets, sizes = torch.tensor([1, 0, 2]), (32, 0, 70)
    return Cache(
        [torch.full((n,), -1) for n in sizes],
        [torch.zeros(n, dtype=torch.int64) for n in sizes],
        [torch.zeros(n, dtype=torch.int32) for n in sizes],
        torch.tensor([3, 50, 102, 110, 111, 400]),
        make_layout(configs, ["a", "b", "c"], True).tables,
        num_sets,
        torch.tensor(9),
        policy,
    )


def serve(cache: Cache) -> tuple[Tensor, Tensor]:
    """Slots of all rows, and what was evicted."""
    slots = ops.row_cache_look_up_(*cache)
    evicted = ops.row_cache_allocate_(*cache.parts, cache.rows, slots, *cache.rest)
    return slots, evicted
