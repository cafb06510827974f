"""Processes of their own that read and parse, so that a trainer's process does not have to."""

from __future__ import annotations

from tritonemb.data.readers.processes import ReaderProcesses
from tritonemb.data.readers.stream import RemoteStream

__all__ = ["ReaderProcesses", "RemoteStream"]
