"""The reader processes of a host, as the one process has them that starts them."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tritonemb.data.readers import main, packing, wire
from tritonemb.data.readers.address import Address, Place
from tritonemb.data.source import Data

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PATIENCE = 2.0  # seconds for a reader to end by itself


class ReaderProcesses:
    """`count` processes of this host that read `data` for whoever of the host knows the `address`.

    They end with `close`, when this object is dropped, and when this process ends in whatever way. Signals to end
    (SIGINT, SIGTERM) they ignore, as those often go to all processes of a job, whose trainers then still have to finish
    a step. Arrays and tensors that `data` holds in memory lie in one file in the folder for temporary files, of which
    all readers share the memory.

    Args:
        data: is pickled and sent to them once. If its class is defined in the main program, each reader runs that
            again, without what is behind `if __name__ == "__main__":`.
        count: at least 1.

    Attributes:
        address: plain text, for `RemoteStream` and `open_shares` in any process of the host and the same user.

    Raises:
        ValueError, TypeError: no readers are asked for; the data set can not be sent.
        RuntimeError: a reader did not start.
    """

    def __init__(self, data: Data, count: int) -> None:
        if count < 1:
            raise ValueError(f"the number of readers must be at least 1, got {count}")
        if main.running:
            raise RuntimeError(
                "a reader process ran the main program again, for what it defines is part of the data set; "
                'put what the program does behind `if __name__ == "__main__":`'
            )
        folder = Path(tempfile.mkdtemp(prefix="tritonemb-"))  # nobody else may enter it
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._processes, folder, os.getpid())
        try:
            packed = packing.pack(data, folder / "arrays")
            token = secrets.token_hex(32)
            for number in range(count):
                settings = {
                    "folder": str(folder),
                    "name": str(number),
                    "readers": count,
                    "token": token,
                    "data": packed,
                }
                self._processes.append(_started(settings))
            places = [_place(process, folder, number) for number, process in enumerate(self._processes)]
            if os.name == "posix":
                (folder / "arrays").unlink()  # all have mapped it; elsewhere it can not go before them
        except BaseException:
            self.close()
            raise
        self.address = Address(token, tuple(places)).to_text()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def close(self) -> None:
        """End the processes; streams that are still open get a RuntimeError."""
        self._end()

    def __enter__(self) -> ReaderProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _started(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = os.environ | dict.fromkeys(THREADS, "1")
    process = subprocess.Popen([sys.executable, "-c", main.COMMAND], stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(sys.path).encode() + b"\n")
        pickle.dump(settings, process.stdin)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended; whoever waits for it tells how
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _place(process: subprocess.Popen[bytes], folder: Path, number: int) -> Place:
    """Wait until a reader says where it listens."""
    file = folder / f"{number}.json"
    while not file.exists():
        if process.poll() is not None and not file.exists():
            raise RuntimeError(f"reader process {number} ended with exit status {process.returncode} as it started")
        time.sleep(0.01)
    values = json.loads(file.read_text())
    if "error" in values:
        raise RuntimeError(f"reader process {number} could not start: {values['error']['message']}") from wire.rebuilt(
            values["error"], f"reader process {number}"
        )
    return Place(**values["place"])


def _end(processes: list[subprocess.Popen[bytes]], folder: Path, starter: int) -> None:
    if os.getpid() != starter:  # a process forked off, to which they do not belong
        return
    for process in processes:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)
