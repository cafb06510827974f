"""The folder of a run: what stands where, and that one process at a time writes there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tritonemb.training.checkpoint import CheckpointFolder


class RunFolder:
    """`checkpoints/`, `log.jsonl`, `report.html`, `config.toml`, `trace.json`, `tensorboard/` of one run."""

    def __init__(self, path: str | Path, keep: int = 3, incremental: bool = False) -> None:
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path / "checkpoints", keep, incremental)
        self.log = self.path / "log.jsonl"
        self.report = self.path / "report.html"
        self.config = self.path / "config.toml"
        self.trace = self.path / "trace.json"
        self.tensorboard = self.path / "tensorboard"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder, and keep other processes out of it; a killed process keeps nobody out.

        Raises:
            ValueError: another process trains there, or nothing can be written there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"another process trains in {self.path}; wait for it, or choose another folder") from error
        except OSError as error:
            raise ValueError(f"nothing can be written to {self.path}: {error}") from error
        try:
            yield
        finally:
            lock.release()
