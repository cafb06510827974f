"""The same results of Python, and the same graphs and guards of `torch.compile`, in less time, for tests."""

from __future__ import annotations

import gc
import logging

import torch


def hasten_compilation() -> None:
    """Skip work of `torch.compile` whose results only its logs show, up to a quarter of the time of a compilation.

    Call it once per process, before `torch._dynamo` is imported.
    """
    # pytest attaches its handlers to loggers that do not propagate, and torch writes its trace whenever it has one.
    logging.getLogger("torch.__trace").propagate = True
    # After each compilation torch evicts the CPU's caches, then measures how long the guards take.
    guards = torch._C._dynamo.guards
    assert callable(guards.profile_guard_manager)
    guards.profile_guard_manager = lambda *args: 0.0


def collect_seldom() -> None:
    """Let the garbage collector visit young objects after 50,000 new ones, not after 700.

    Dynamo and Triton's interpreter allocate millions that reference counts free; the visits took a tenth of their time.
    """
    gc.set_threshold(50_000, 10, 10)
