"""The same graphs and guards of `torch.compile` in less time, for tests."""

from __future__ import annotations

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
