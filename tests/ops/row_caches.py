"""A row cache of three tables for tests of its ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import tritonemb as te
from tritonemb import ops
from tritonemb.layout import DirectoryTensors, make_layout


class Cache(NamedTuple):
    """The arguments that ops share: three tables, the second not cached, and some rows of each."""

    directory: DirectoryTensors
    rows: Tensor
    now: Tensor
    policy: str


def make_cache(policy: str = "lru") -> Cache:
    configs = [te.TableConfig("a", 100, 4), te.TableConfig("b", 7, 4), te.TableConfig("c", 300, 4)]
    size, first_slots, num_sets = 32 + 70, torch.tensor([0, 32, 32]), torch.tensor([1, 0, 2])
    tags, used, pins = torch.full((size,), -1), torch.zeros(size).long(), torch.zeros(size).int()
    tables = make_layout(configs, ["a", "b", "c"], True).tables
    directory = DirectoryTensors(tags, used, pins, first_slots, tables, num_sets)
    return Cache(directory, torch.tensor([3, 50, 102, 110, 111, 400]), torch.tensor(9), policy)


def serve(cache: Cache) -> tuple[Tensor, Tensor]:
    """Slots of all rows, and what was evicted."""
    slots = ops.row_cache_look_up_(*cache)
    evicted = ops.row_cache_allocate_(cache.directory, cache.rows, slots, cache.now, cache.policy)
    return slots, evicted
