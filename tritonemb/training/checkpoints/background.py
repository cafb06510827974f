"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

from tritonemb.comm.group import RankGroup
from tritonemb.training.checkpoints.folder import Begun, CheckpointFolder
from tritonemb.training.checkpoints.options import CheckpointError
from tritonemb.training.checkpoints.staging import HostCopies
from tritonemb.training.checkpoints.tables_out import tables_of
from tritonemb.training.checkpoints.together import alone, together


class Saved(NamedTuple):
    """A checkpoint that has been written.

    Args:
        step: of which.
        size: in bytes, of all ranks.
        stopped: seconds that training waited for it.
        seconds: until it was on the disk.
    """

    step: int
    size: int
    stopped: float
    seconds: float


class AsyncSave:
    """Writes one checkpoint at a time in a thread: training stops only while the tensors are copied to host memory.

    Tables on disk are not copied there: they are asked for a snapshot, which what training reads and writes of them
    afterwards has to wait for, and which takes no time where the file system makes copy-on-write clones.

    The thread has a process group of its own. The end of the process waits for it; a process that is killed leaves the
    last checkpoint whole, as `CheckpointFolder` does.

    All ranks make it, start it and wait for it together, in the same order. Whether it is `done` is of one rank alone:
    ranks that are to do something about a failure together must `wait` together, where all get the same answer.

    Args:
        folder: where checkpoints go.
        group: ranks that write them together; None for this process alone.
        timeout: how long a rank waits for the slowest one to have written; torch's default if not given.
    """

    def __init__(
        self, folder: CheckpointFolder, group: RankGroup | None = None, timeout: timedelta | None = None
    ) -> None:
        self.folder = folder
        self._group = None if group is None or alone(group) else group.duplicate(backend="gloo", timeout=timeout)
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._failure: BaseException | None = None
        atexit.register(_finish, weakref.ref(self))

    def start(
        self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], best: bool = False
    ) -> Saved | None:
        """Begin to write the checkpoint of this moment; waits for the one before.

        Args:
            best: mark it as the best one when it is written.

        Returns:
            the one before, if nobody has asked for it yet.

        Raises:
            CheckpointError, ValueError: the one before could not be written, or there is no memory for this one on some
                rank, or there are tables on disk and its folder cannot be made; this one has not begun then. Where the
                ranks could not be reached, the error is that of the exchange.
            StorageError: what was trained could not be written to a table on disk.
        """
        plain, tables = tables_of(tensors)
        before = self.wait()
        begin = time.perf_counter()
        kept: dict[str, Any] = {}
        copies: dict[str, Tensor] = {}

        def keep() -> bool:
            nonlocal kept, copies
            kept = json.loads(json.dumps(manifest))
            try:
                copies = self._copies.copy(plain)
            except (MemoryError, RuntimeError) as error:
                raise CheckpointError(f"step {step} could not be copied to host memory to be saved: {error}") from error
            return bool(tables)

        has_tables = any(together(self._group, keep))
        # What is no copy must be asked for now; all else can be begun in the thread.
        begun = self.folder.begin(step, tensors, self._group) if has_tables else None
        stopped = time.perf_counter() - begin
        self._thread = threading.Thread(
            target=self._write,
            args=(step, begun, copies, kept, best, begin, stopped),
            name=f"checkpoint of step {step}",
            daemon=True,  # the end of the process waits in `_finish`
        )
        self._thread.start()
        return before

    def done(self) -> bool:
        """Whether nothing is being written on this rank.

        Raises:
            as `start`, once.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        self._raise_failure()
        return True

    def wait(self) -> Saved | None:
        """Wait until it is written; what was written since the last call.

        Raises:
            as `start`, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()
        saved, self._saved = self._saved, None
        return saved

    def _write(
        self,
        step: int,
        begun: Begun | None,
        tensors: Mapping[str, Tensor],
        manifest: Mapping[str, Any],
        best: bool,
        begin: float,
        stopped: float,
    ) -> None:
        try:
            if begun is None:
                begun = self.folder.begin(step, tensors, self._group)
            size = self.folder.finish(begun, tensors, manifest, self._group)
            if best:
                self.folder.mark_best(step, self._group)
            self._saved = Saved(step, size, stopped, time.perf_counter() - begin)
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _finish(save: weakref.ref[AsyncSave]) -> None:
    """The process ends: what is being written is written first, and a failure that nobody has asked for is told."""
    found = save()
    try:
        if found is not None:
            found.wait()
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
