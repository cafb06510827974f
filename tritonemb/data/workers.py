"""Data loader workers: processes of `torch.utils.data.DataLoader` that read shards of the data.

A worker is started once, and serves one stream after the other: the loader's sampler names what to read. Processes are
spawned, so none inherits threads of Numba or OpenMP. Batches come through shared memory.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tritonemb.data import protocol
from tritonemb.data.batch import Batch, BatchLayout
from tritonemb.data.loader import ShardState, in_turn, open_here
from tritonemb.data.prefetch import Prefetcher, end_all
from tritonemb.data.protocol import Closing, Data, Position, ReadReport
from tritonemb.flight import decode_error, encode_error

POLL = 0.5  # seconds after which a waiting thread looks whether its worker lives and its stream is wanted
REQUESTS = 2  # that a worker has beforehand
PREFETCH_DEPTH = 2  # batches in this process; the worker's streams prefetch more


class DataLoaderWorkers(Closing):
    """Processes of this host that read `data` for this process.

    They end with `close`, when this object is dropped, and when this process ends in whatever way. They ignore SIGINT
    and SIGTERM, which often go to all processes of a job, whose trainers then still finish a step.

    Args:
        data: is pickled and sent to each worker once; tensors go to shared memory, which all workers have in common.
            The workers import the main program, so what it runs belongs behind `if __name__ == "__main__":`.
        count: at most so many read one stream, whose shards they divide among them. A stream that is opened while
            another one is read has its own.

    Raises:
        ValueError: `count` is below 1.
    """

    def __init__(self, data: Data, count: int) -> None:
        if count < 1:
            raise ValueError(f"the number of data loader workers must be at least 1, got {count}")
        self._data, self._count = data, count
        self._workers: list[_Worker] = []
        self._close = weakref.finalize(self, _close, self._workers, os.getpid())
        self._close.atexit = False
        _OPEN.add(self)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that have been started."""
        return tuple(worker.pid for worker in self._workers if worker.pid)

    def open(self, shards: Sequence[ShardState], how: Mapping[str, Any], pin_memory: bool) -> None:
        """Give each of the shards its stream; see `tritonemb.data.loader.open_shards`.

        Raises:
            RuntimeError: a worker could not start, or has ended: here or out of `next`. Exceptions of the data set keep
                their type if it is a built-in one; else they come as the nearest built-in type.
            TypeError: the data set cannot be pickled.
        """
        parts = [shards[first :: self._count] for first in range(min(self._count, len(shards)))]
        with ExitStack() as failed:
            groups = [failed.enter_context(_Group(self, part, how, pin_memory)) for part in parts]
            for group, part in zip(groups, parts, strict=True):
                group.open(part)
            failed.pop_all()

    def close(self) -> None:
        """End the processes; streams that are still open raise a RuntimeError."""
        self._close()

    def free_worker(self) -> _Worker:
        """One that serves no stream; a new one if all do."""
        if not self._close.alive:
            raise RuntimeError("these data loader workers have been closed")
        for worker in self._workers:
            if worker.free:
                return worker
        self._workers.append(_Worker(self._data, len(self._workers), self._count))
        return self._workers[-1]


_OPEN: weakref.WeakSet[DataLoaderWorkers] = weakref.WeakSet()


def _close(workers: list[_Worker], starter: int) -> None:
    if os.getpid() != starter:  # in a process forked off, to which they do not belong
        return
    for worker in workers:
        worker.close()
    leftover = {worker.pid for worker in workers}
    for process in multiprocessing.active_children():
        if process.pid in leftover:  # it makes a batch, and has ignored the loader's SIGTERM
            process.kill()
            process.join()


@atexit.register
def _close_all() -> None:
    """Before torch and multiprocessing, whose functions at exit would wait for the workers."""
    for workers in list(_OPEN):
        workers.close()


class _Request(NamedTuple):
    """What a worker is to read: shards, and the arguments of `Data.open`."""

    serial: int = 0
    shards: Sequence[ShardState] = ()
    how: Mapping[str, Any] = {}


class _Message(NamedTuple):
    """What a worker answers a request with: where its shards begin, a batch or the end of one, the end, or an error."""

    serial: int
    shard: int | None = None
    batch: tuple[BatchLayout, Tensor] | None = None
    position: Position | None = None
    report: ReadReport | None = None
    opened: list[tuple[Any, ReadReport]] | None = None
    error: dict[str, Any] | None = None
    pid: int = 0


class _Requests:
    """The sampler of a worker's loader: the same request until another one is made."""

    current = _Request()

    def __iter__(self) -> Iterator[_Request]:
        while True:
            yield self.current


class _Worker:
    """One process, and the loader that it belongs to. The loader is used in threads: in the main one, its handler of
    SIGCHLD would raise an exception anywhere in the program."""

    def __init__(self, data: Data, number: int, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pid, self.free = 0, True
        self._number, self._serial, self._closed = number, 0, False
        self._left = context.SimpleQueue()
        self._requests, self._lock = _Requests(), threading.RLock()  # the collector may close it in any thread
        self._data = data
        self._loader: DataLoader[_Message] = DataLoader(
            _Reading(data, self._left),
            batch_size=None,
            sampler=self._requests,
            num_workers=1,
            prefetch_factor=REQUESTS,
            collate_fn=_unchanged,
            worker_init_fn=partial(_initialize, count * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
            multiprocessing_context=context,
            timeout=POLL,
        )
        self._messages: Iterator[_Message] | None = None

    @property
    def name(self) -> str:
        return f"data loader worker {self._number}" + (f" (pid {self.pid})" if self.pid else "")

    def request(self, shards: Sequence[ShardState], how: Mapping[str, Any]) -> int:
        """Let the worker read these shards from now on; the serial number of the request."""
        self.free, self._serial = False, self._serial + 1
        self._requests.current = _Request(self._serial, [replace(shard) for shard in shards], how)
        return self._serial

    def release(self) -> None:
        """No thread takes answers to a request any more."""
        self.free = not self._closed

    def leave(self, serial: int) -> None:
        """The request is no longer wanted: the worker closes its streams, and waits for no batch of them."""
        self._left.put(serial)

    def messages(self, serial: int, wanted: threading.Event, pin_memory: bool) -> Generator[_Message, None, None]:
        """The answers to a request; the first one says where its shards begin."""
        try:
            while wanted.is_set():
                message = self._take()
                if self._closed:
                    raise RuntimeError(f"{self.name} has ended: its DataLoaderWorkers have been closed")
                if message is None or message.serial != serial:  # of a request that has been left
                    continue
                self.pid = message.pid or self.pid
                if message.error is not None:
                    raise decode_error(message.error, self.name)
                if message.opened is None and message.shard is None:
                    return
                if pin_memory and message.batch is not None:
                    layout, buffer = message.batch
                    message = message._replace(batch=(layout, buffer.pin_memory()))
                    del buffer
                yield message
                del message  # or it would stay until the next one is there
        finally:
            self.release()

    def _take(self) -> _Message | None:
        """The next answer; None if there is none for `POLL` seconds, or the worker has been closed."""
        with self._lock:
            if self._closed:
                return None
            try:
                if self._messages is None:
                    self._messages = self._start()
                return next(self._messages)
            except RuntimeError as error:
                if "timed out" in str(error):
                    return None
                self._messages = None
                raise RuntimeError(
                    f"{self.name} has ended, so nobody reads its shards ({error}); if it was killed because memory ran "
                    "out, use fewer workers, or smaller chunks and shuffle buffers"
                ) from error

    def _start(self) -> Iterator[_Message]:
        try:
            return iter(self._loader)
        except (TypeError, AttributeError, ValueError) as error:
            name = type(self._data).__name__
            raise TypeError(
                f"data loader workers need a data set that can be pickled; {name} cannot: {error}"
            ) from error

    def close(self) -> None:
        self._closed = True
        self.leave(self._serial)
        with self._lock:
            self._messages = None  # the loader ends its process


class _Group(Closing):
    """Shards that one worker reads. Their streams are taken from in turn, as the worker does."""

    def __init__(
        self, workers: DataLoaderWorkers, shards: Sequence[ShardState], how: Mapping[str, Any], pin_memory: bool
    ) -> None:
        self._workers = workers  # which are not closed while they have streams
        self._worker = worker = workers.free_worker()
        self._reading, wanted = len(shards), threading.Event()
        wanted.set()
        serial = worker.request(shards, how)

        def stop() -> None:
            wanted.clear()
            worker.leave(serial)

        messages = worker.messages(serial, wanted, pin_memory)
        self.messages = Prefetcher(messages, PREFETCH_DEPTH, "tritonemb-worker", stop)

    def open(self, shards: Sequence[ShardState]) -> None:
        """Wait until the worker has opened the shards. They belong to their streams, and these to the group."""
        opened = next(self.messages).opened
        assert opened is not None
        for shard, (position, report) in zip(shards, opened, strict=True):
            shard.stream = _WorkerStream(self, shard.index, position, report)

    def close(self) -> None:
        self.messages.close()
        self._worker.release()

    def closed_one(self) -> None:
        self._reading -= 1
        if self._reading == 0:
            self.close()


class _WorkerStream(Closing):
    """The batches of one shard that a worker reads."""

    def __init__(self, group: _Group, index: int, position: Position, report: ReadReport) -> None:
        self._group, self._index, self._closed = group, index, False
        self.position, self.report = position, report

    def __iter__(self) -> _WorkerStream:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        message = next(self._group.messages)
        assert message.shard == self._index, "shards are taken from in turn"
        self.report = message.report or self.report
        if message.batch is None:
            self.close()
            raise StopIteration
        self.position = message.position or self.position
        layout, buffer = message.batch
        return layout.batch(buffer)

    def close(self) -> None:
        """The worker ends what it reads when all shards of the group have been closed."""
        if not self._closed:
            self._closed = True
            self._group.closed_one()


class _Reading(Dataset[_Message]):
    """In a worker: answers a request with the next message of what it asks for."""

    def __init__(self, data: Data, left: Any) -> None:
        self._data, self._left = data, left
        self._last_left = 0
        self._request = _Request()
        self._messages: Iterator[_Message] = iter(())
        self._listens = False

    def __getitem__(self, request: _Request) -> _Message:
        if not self._listens:
            self._listens = True
            threading.Thread(target=self._listen, name="tritonemb-left", daemon=True).start()
        if request.serial != self._request.serial:
            self._close_streams()
            self._request, self._messages = request, self._read(request)
        return next(self._messages, _Message(request.serial, pid=os.getpid()))

    def _read(self, request: _Request) -> Iterator[_Message]:
        serial, pid = request.serial, os.getpid()
        try:
            open_here(self._data, request.shards, request.how, False)
            if serial <= self._last_left:
                self._close_streams()
            opened = [(shard.stream.position, shard.stream.report) for shard in request.shards if shard.stream]
            yield _Message(serial, opened=opened, pid=pid)
            for shard, batch in in_turn(request.shards):
                packed = None if batch is None else batch.packed()
                content = None if packed is None else (packed.layout, packed.buffer)
                position = None if shard.stream is None else dict(shard.stream.position)
                yield _Message(serial, shard.index, content, position, shard.current_report())  # type: ignore[arg-type]
                del batch, packed, content
        except Exception as error:
            yield _Message(serial, error=encode_error(error), pid=pid)
        finally:
            self._close_streams()

    def _listen(self) -> None:
        """Close the streams that are left, also while a batch of them is awaited."""
        while True:
            self._last_left = self._left.get()
            if self._request.serial <= self._last_left:
                self._close_streams()

    def _close_streams(self) -> None:
        for shard in self._request.shards:
            shard.close()


def _initialize(processes: int, _worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)
    protocol.reading_processes = processes
    atexit.register(_exit)


def _exit() -> None:
    """End this worker without finalizing Python: the loader's daemon thread, which shares tensors, may be in C++, and
    a thread that Python stops there aborts the process."""
    end_all()
    os._exit(0)


def _unchanged(message: Any) -> Any:
    return message
