"""Data loader workers: processes of `torch.utils.data.DataLoader` that read shards of the data.

A worker serves one stream at a time: the loader's sampler yields the request to read. Processes are spawned, so that
they inherit no threads of Numba or OpenMP. Batches are passed in shared memory.
"""

import atexit
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tritonemb.data import prefetch, protocol
from tritonemb.data.loader import ShardState, read_shards
from tritonemb.data.protocol import Data, PositionedBatch, Stream
from tritonemb.flight import decode_error, encode_error
from tritonemb.utils import Closeable

POLL_SECONDS = 0.5  # seconds between checks that the worker is alive and its stream is open
REQUESTS = 2  # requests queued per worker
PREFETCH_DEPTH = 2  # batches prefetched in this process, in addition to those in the worker
SERIAL, PID = range(2)  # slots shared with a worker: serial number of the current request, and the process id
Request = tuple[int, Sequence[ShardState], Mapping[str, Any]]  # serial number, shards, arguments of `Data.open`


class DataLoaderWorkers(Closeable):
    """Worker processes of this host that read `data` for this process.

    They end with `close`, when this object is collected, and when this process ends for any reason. They ignore SIGINT
    and SIGTERM, which launchers send to all processes of a job, so that trainers can finish their step.

    Args:
        data: pickled once per worker; all workers share its tensors in shared memory. Workers import the main program,
            so guard its code by `if __name__ == "__main__":`.
        num_workers: workers that divide the shards of one stream, at least 1. Streams that are open at the same time
            have separate workers.
    """

    def __init__(self, data: Data, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"the number of data loader workers must be at least 1, got {num_workers}")
        self._data, self._num_workers = data, num_workers
        self._workers: list[_Worker] = []
        self._close = weakref.finalize(self, _close, self._workers, os.getpid())
        atexit.register(self._close)  # before the handlers of torch and multiprocessing, which wait for the workers

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that have been started."""
        return tuple(worker.pid for worker in self._workers if worker.pid)

    def open(self, shards: Sequence[ShardState], options: Mapping[str, Any], pin_memory: bool) -> None:
        """Open and attach the stream of each shard; see `tritonemb.data.loader.open_shards`. Raise RuntimeError, here
        or in `next`, if a worker could not start or has ended; raise TypeError if the data set cannot be pickled.
        Exceptions in the worker are raised as their nearest built-in type."""
        worker_shards = [shards[first :: self._num_workers] for first in range(min(self._num_workers, len(shards)))]
        with ExitStack() as stack:
            streams = [_WorkerStream(self, local_shards, options, pin_memory) for local_shards in worker_shards]
            for stream in streams:
                stack.callback(Stream.close, stream)
            for stream, local_shards in zip(streams, worker_shards, strict=True):
                for shard in local_shards:
                    stream.begin(shard)
            stack.pop_all()

    def close(self) -> None:
        """End the processes; open streams then raise a RuntimeError."""
        self._close()

    def free_worker(self) -> "_Worker":
        """Return a worker without a stream, a new one if there is none."""
        if not self._close.alive:
            raise RuntimeError("these data loader workers have been closed")
        idle_worker = next((worker for worker in self._workers if worker.idle), None)
        if idle_worker is None:
            idle_worker = _Worker(self._data, len(self._workers), self._num_workers)
            self._workers.append(idle_worker)
        return idle_worker


def _close(workers: "list[_Worker]", owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked process, which does not own them
        return
    for worker in workers:
        worker.close()
    worker_pids = {worker.pid for worker in workers}
    for process in multiprocessing.active_children():
        if process.pid in worker_pids:  # busy with a batch; it ignored the loader's SIGTERM
            process.kill()
            process.join()


class _Worker:
    """One worker process and its `DataLoader`, which is iterated only outside the main thread: in the main thread
    its handler of SIGCHLD would raise exceptions anywhere in the program."""

    def __init__(self, data: Data, number: int, num_workers: int) -> None:
        self.idle, self._closed = True, False
        self._number, self._data_type = number, type(data).__name__
        with torch.inference_mode(False):  # so that threads outside inference mode can modify it
            shared = torch.zeros(2, dtype=torch.int64).share_memory_()
            # An array: the collector may call close inside a functional transform, which forbids modifying tensors.
            self._shared = shared.numpy()
        self._request: Request = (0, (), {})
        self._lock = threading.RLock()  # reentrant: the collector may call close in any thread
        self._loader: DataLoader[Any] = DataLoader(
            _ShardReader(data, shared), batch_size=None, sampler=self, num_workers=1, prefetch_factor=REQUESTS,
            collate_fn=tuple,  # keeps the tuple as it is
            worker_init_fn=partial(_initialize, num_workers * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
            multiprocessing_context="spawn", timeout=POLL_SECONDS,
        )  # fmt: skip
        self._responses: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Request]:
        while True:
            yield self._request

    @property
    def pid(self) -> int:
        return int(self._shared[PID])

    @property
    def name(self) -> str:
        return f"data loader worker {self._number}" + (f" (pid {self.pid})" if self.pid else "")

    def request(self, shards: Sequence[ShardState], options: Mapping[str, Any]) -> int:
        serial = self._request[0] + 1
        self._request = (serial, [replace(shard) for shard in shards], options)
        self.idle, self._shared[SERIAL] = False, serial
        return serial

    def cancel(self, serial: int) -> None:
        if self._shared[SERIAL] == serial:
            self._shared[SERIAL] = 0

    def items(self, serial: int, pin_memory: bool) -> Generator[PositionedBatch, None, None]:
        try:
            self._start()
            while self._shared[SERIAL] == serial:
                if (response := self._next_response()) is None or response[0] != serial:  # of an earlier request
                    continue
                if (item := response[1]) is None:
                    break
                if isinstance(item, dict):
                    raise decode_error(item, self.name)
                yield replace(item, batch=item.batch.pin_memory()) if pin_memory and item.batch is not None else item
                del response, item  # free them while the next batch is read
            if self._closed:
                raise RuntimeError(f"{self.name} has ended: its DataLoaderWorkers have been closed")
        finally:
            self.cancel(serial)
            with suppress(RuntimeError):
                self._next_response()  # refills the request queue of the idle worker
            self.idle = not self._closed

    def _start(self) -> None:
        with self._lock:
            try:
                if self._responses is None and not self._closed:
                    self._responses = iter(self._loader)
            except (TypeError, AttributeError, ValueError) as error:
                raise TypeError(
                    f"data loader workers need a data set that can be pickled; {self._data_type} cannot: {error}"
                ) from error

    def _next_response(self) -> Any:
        """Return the next response; None if there is none within `POLL` seconds, or no process."""
        with self._lock:
            try:
                return None if self._responses is None else next(self._responses)
            except RuntimeError as error:
                if "timed out" in str(error):
                    return None
                self._responses = None
                raise RuntimeError(
                    f"{self.name} has ended while reading its shards ({error}); if it was killed because memory "
                    "ran out, use fewer workers, or smaller chunks and shuffle buffers"
                ) from error

    def close(self) -> None:
        self.idle, self._closed = False, True
        self._shared[SERIAL] = 0
        with self._lock:
            self._responses = None  # the loader ends its process


class _WorkerStream(Stream):
    """Stream of the batches of one worker's shards, round-robin; closed when all of them are closed."""

    def __init__(
        self, workers: DataLoaderWorkers, shards: Sequence[ShardState], options: Mapping[str, Any], pin_memory: bool
    ) -> None:
        self.workers = workers  # keeps them alive while they have streams
        self.worker = workers.free_worker()
        self._num_open = len(shards)
        serial = self.worker.request(shards, options)
        items, stop = self.worker.items(serial, pin_memory), partial(self.worker.cancel, serial)
        super().__init__(items, {}, on_stop=stop, depth=PREFETCH_DEPTH)

    def begin(self, shard: ShardState) -> None:
        first = next(self._batches)
        self.position, self.report = first.position, first.report
        shard.attach(self)

    def close(self) -> None:
        self._num_open -= 1
        if self._num_open <= 0:
            super().close()


class _ShardReader(Dataset[Any]):
    """Data set in a worker: returns a request's serial number and the next item of its shards, None at the end."""

    def __init__(self, data: Data, shared: Tensor) -> None:
        self.data, self.shared = data, shared
        self._serial = 0
        self._items: Iterator[Any] = iter(())

    def __getitem__(self, request: Request) -> tuple[int, Any]:
        serial, shards, options = request
        if serial != self.shared[SERIAL]:
            self._items = iter(())  # closes the streams
        elif serial != self._serial:
            self._serial, self._items = serial, self._read(shards, options)
        return serial, next(self._items, None)

    def _read(self, shards: Sequence[ShardState], options: Mapping[str, Any]) -> Iterator[Any]:
        try:
            yield from read_shards(self.data, shards, options)
        except Exception as error:
            yield encode_error(error)


def _initialize(processes: int, _worker: int) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    protocol.reading_processes = processes
    torch.utils.data.get_worker_info().dataset.shared[PID] = os.getpid()  # type: ignore[union-attr]
    atexit.register(_exit)


def _exit() -> None:
    """End this worker without finalizing Python, which aborts if it stops the loader's daemon thread in C++ code."""
    prefetch.end_all()
    os._exit(0)
