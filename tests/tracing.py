"""`torch.compile` with the same graphs and guards in less time, for tests."""

from __future__ import annotations

import logging

import torch


def hasten_compilation() -> None:
    """Leave out what torch computes for its logs alone, once per process: a quarter of the time that it takes."""
    # pytest attaches its handlers to loggers that do not propagate, and torch writes its trace whenever it has one.
    logging.getLogger("torch.__trace").propagate = True
    # It evicts the CPU's caches after each compilation, then measures how long the guards take.
    torch._C._dynamo.guards.profile_guard_manager = lambda *args: 0.0
