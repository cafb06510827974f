"""Shards of the data of one rank, read round-robin, in this process or in data loader workers.

An epoch keeps its number of shards S until it ends, even if it resumes on another number of ranks: rank r of W reads
the shards r, r + W, r + 2W, ... The positions of all shards are all that is needed to resume.

Data loader workers are processes of `torch.utils.data.DataLoader`. A worker serves one stream at a time: the loader's
sampler yields the request to read. Processes are spawned, without threads of Numba; batches are in shared memory.
"""

import atexit
import multiprocessing
import os
import signal
import threading
import weakref
from collections import ChainMap, Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tritonemb.data import protocol
from tritonemb.data.batch import Batch
from tritonemb.data.protocol import Batches, Data, Position, PositionedBatch, ReadReport, Split, Stream
from tritonemb.flight import decode_error, encode_error
from tritonemb.utils import Closeable, on_error

POLL_SECONDS = 0.5  # seconds between checks that the worker is alive and its stream is open
REQUESTS = 2  # requests queued per worker: while it serves one, the next is there
PREFETCH_DEPTH = 2  # batches prefetched in this process, in addition to those in the worker
SERIAL, PID = range(2)  # slots shared with a worker: serial number of the current request, and the process id

# JSON-serializable. With one shard: the position of its stream. Else {"shares": S, "at": {shard: its entry}}.
ShardsPosition = dict[str, Any]

_ENTRY = ("batches", "ended", "rows", "skipped", "position")
Request = tuple[int, Sequence["ShardState"], Mapping[str, Any]]  # serial number, shards, arguments of `Data.open`


@dataclass
class ShardState:
    """Progress of one shard of `count`."""

    index: int
    count: int
    batches: int = 0
    ended: bool = False
    report: ReadReport = field(default_factory=ReadReport)
    position: Position | None = None
    stream: Batches | None = None

    def attach(self, stream: Batches) -> None:
        self.stream, self.report, self.position = stream, stream.report, dict(stream.position)

    def entry(self) -> dict[str, Any]:
        report = self.report
        return dict(zip(_ENTRY, (self.batches, self.ended, report.rows, report.skipped, self.position), strict=True))

    def close(self) -> None:
        """Close the stream, even while another thread waits for it; the position stays."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()


def open_shards(
    data: Data, split: Split, batch_size: int, rank: int = 0, world: int = 1, shards: int | None = None,
    positions: Mapping[str, Any] | None = None, *, workers: "DataLoaderWorkers | None" = None, **kwargs: Any,
) -> Batches:  # fmt: skip
    """Open the batches of the shards rank, rank + world, ... of a split.

    Every shard uses the threads and memory of a stream. Raise ValueError for an unknown rank, split or position.

    Args:
        shards: number of shards in the epoch; by default that of `positions`, else `world`.
        positions: positions to resume from: of a stream of this rank, or of all ranks, merged by `merge_positions`.
        workers: processes that read instead of this one. The batches are the same.
        kwargs: `seed`, `epoch`, `shuffle` and `pin_memory`; see `tritonemb.data.protocol.OpenOptions`.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}), got {rank}")
    count, entries = (world if shards is None else shards, None) if positions is None else _parse_position(positions)
    if shards not in (None, count):
        raise ValueError(f"the position is of an epoch in {count} shards, which cannot resume in {shards}")
    if count < 1:
        raise ValueError(f"shards must be at least 1, got {count}")
    local_shards = [ShardState(index, count) for index in range(rank, count, world)]
    for shard in local_shards if entries is not None else ():
        if (entry := (entries or {}).get(str(shard.index))) is None:
            raise ValueError(f"the position lacks shard {shard.index} of {count}; merge the positions of all ranks")
        shard.batches, shard.ended, shard.position = entry["batches"], entry["ended"], entry["position"]
        shard.report = ReadReport(entry["rows"], entry["skipped"])
    # Open the streams of the shards that have not ended.
    open_all = partial(_open_streams, data) if workers is None else workers.open
    open_all([shard for shard in local_shards if not shard.ended], {"split": split, "batch_size": batch_size} | kwargs)
    if count == 1 and local_shards and local_shards[0].stream is not None:
        return local_shards[0].stream
    return ShardedStream(count, local_shards)


def _open_streams(data: Data, shards: Sequence[ShardState], options: Mapping[str, Any]) -> None:
    with ExitStack() as stack:
        for shard in shards:
            stream = data.open(**options, position=shard.position, shard=(shard.index, shard.count))
            shard.attach(stack.enter_context(stream))
        stack.pop_all()


def next_shard(shards: Sequence[ShardState]) -> ShardState:
    return min(shards, key=lambda shard: (shard.batches, shard.index))


def round_robin(shards: Sequence[ShardState]) -> Iterator[tuple[ShardState, Batch | None]]:
    """Yield the next batch of the first shard with the fewest batches returned; None when a shard ends or is closed.

    The order depends on the shards' positions only, and is the same for a subset of the shards.
    """
    while active_shards := [shard for shard in shards if shard.stream is not None]:
        shard = next_shard(active_shards)
        stream = shard.stream
        batch = None if stream is None else next(stream, None)
        if stream is not None and batch is not None:
            shard.batches, shard.report, shard.position = shard.batches + 1, stream.report, dict(stream.position)
        elif stream is not None and shard.stream is not None:
            shard.ended, shard.report, shard.position, shard.stream = True, stream.report, None, None
        yield shard, batch


class ShardedStream(Batches):
    """Batches of a rank's shards (`count` in the epoch), `round_robin`. Position and report cover all shards."""

    def __init__(self, count: int, shards: list[ShardState]) -> None:
        self._count, self._shards, self._round_robin = count, shards, round_robin(shards)
        self._update_position()

    def __next__(self) -> Batch:
        try:
            with on_error(self.close):
                return next(batch for _, batch in self._round_robin if batch is not None)
        finally:
            self._update_position()

    def wait(self, seconds: float) -> bool:
        active_shards = [shard for shard in self._shards if shard.stream is not None]
        stream = next_shard(active_shards).stream if active_shards else None
        return stream is None or stream.wait(seconds)

    def _update_position(self) -> None:
        self.position = {"shares": self._count, "at": {str(shard.index): shard.entry() for shard in self._shards}}
        self.report = sum((shard.report for shard in self._shards), ReadReport())

    def close(self) -> None:
        """Stop the threads of all streams; no further batches are returned. The position stays."""
        for shard in self._shards:
            shard.close()


def read_shards(data: Data, shards: Sequence[ShardState], options: Mapping[str, Any]) -> Iterator[PositionedBatch]:
    """Read shards for another process: yield the first position of each shard, without a batch; then their batches
    round-robin, each in one buffer, and the report of a shard when it ends."""
    try:
        _open_streams(data, shards, options)
        for shard in shards:
            yield PositionedBatch(None, shard.position or {}, shard.report)
        for shard, batch in round_robin(shards):
            packed = None if batch is None else batch.packed()
            yield PositionedBatch(packed, shard.position or {}, shard.report)
            del batch, packed  # free them while the next batch is read
    finally:
        for shard in shards:
            shard.close()


def merge_positions(positions: Sequence[Mapping[str, Any]]) -> ShardsPosition:
    """Merge the positions of all ranks' streams into the epoch's; raise ValueError unless each shard is in one."""
    parsed = list(map(_parse_position, positions))
    counts, uses = sorted({count for count, _ in parsed}), Counter(name for _, entries in parsed for name in entries)
    if duplicates := sorted(name for name, number in uses.items() if number > 1):
        raise ValueError(f"shard {duplicates[0]} is in the positions of two ranks")
    if len(counts) != 1:
        raise ValueError(f"the positions are of epochs in {counts} shards; merge those of one epoch")
    if missing := [index for index in range(counts[0]) if str(index) not in uses]:
        raise ValueError(f"no rank's position has shard {missing[0]} of {counts[0]}; merge the positions of all ranks")
    return rank_position({"shares": counts[0], "at": dict(ChainMap(*(entries for _, entries in parsed)))}, 0, 1)


def rank_position(position: Mapping[str, Any], rank: int, world: int) -> ShardsPosition:
    """Return one rank's shards of an epoch's position, saved by any number of ranks; raise ValueError if invalid."""
    count, entries = _parse_position(position)
    local_entries = {str(index): entries[str(index)] for index in range(rank, count, world) if str(index) in entries}
    if count == 1 and local_entries:
        return dict(local_entries["0"]["position"])
    return {"shares": count, "at": local_entries}


def _parse_position(position: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    if not isinstance(position, Mapping):
        raise ValueError(f"{position!r} is not a position")
    if "shares" not in position:  # position of a stream of all rows
        return 1, {"0": ShardState(0, 1, position=dict(position)).entry()}
    count, entries = position["shares"], position.get("at", ())
    valid = set(position) == {"shares", "at"} and isinstance(count, int) and count >= 1 and isinstance(entries, Mapping)
    valid = valid and set(entries) <= {str(index) for index in range(count)}
    if not valid or any(set(entry) != set(_ENTRY) for entry in entries.values()):
        raise ValueError(f"{position!r} is not a position of shards; pass a value of `position` or `merge_positions`")
    return count, dict(entries)


class DataLoaderWorkers(Closeable):
    """Worker processes of this host that read `data` for this process.

    They end with `close`, when this object is collected, and when this process ends for any reason. They ignore SIGINT
    and SIGTERM, which launchers send to all processes of a job, so that trainers can finish their step.

    Args:
        data: pickled once per worker; all workers share its tensors in shared memory. Workers import the main program,
            so guard its code by `if __name__ == "__main__":`.
        num_workers: workers that divide the shards of a stream, at least 1; each open stream has separate ones.
    """

    def __init__(self, data: Data, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"the number of data loader workers must be at least 1, got {num_workers}")
        if getattr(data, "is_stream", False):
            raise ValueError("workers cannot be interrupted while a stream has no rows; set num_workers to 0")
        self._data, self._num_workers = data, num_workers
        self._workers: list[_Worker] = []
        self._close = weakref.finalize(self, _close, self._workers, os.getpid())
        atexit.register(self._close)  # before the handlers of torch and multiprocessing, which wait for the workers

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that have been started."""
        return tuple(worker.pid for worker in self._workers if worker.pid)

    def open(self, shards: Sequence[ShardState], options: Mapping[str, Any]) -> None:
        """Open and attach the stream of each shard; see `open_shards`. Raise RuntimeError, here or in `next`, if a
        worker could not start or has ended; raise TypeError if the data set cannot be pickled. Exceptions in the
        worker are raised as their nearest built-in type."""
        worker_shards = [shards[first :: self._num_workers] for first in range(min(self._num_workers, len(shards)))]
        with ExitStack() as stack:
            streams = [_WorkerStream(self, local_shards, options) for local_shards in worker_shards]
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
        if not self._close.alive:
            raise RuntimeError("these data loader workers have been closed")
        if all(not worker.idle for worker in self._workers):
            self._workers.append(_Worker(self._data, len(self._workers), self._num_workers))
        return next(worker for worker in self._workers if worker.idle)


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
    """One worker process and its `DataLoader`. Only other threads than the main thread iterate over the loader: in the
    main thread its SIGCHLD handler would raise exceptions anywhere in the program."""

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

    def items(self, serial: int, pin_memory: bool = False) -> Generator[PositionedBatch, None, None]:
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
                text = f"data loader workers need a data set that can be pickled; {self._data_type} cannot: {error}"
                raise TypeError(text) from error

    def _next_response(self) -> Any:
        """Return the next response; None if there is none within `POLL_SECONDS`, or no process."""
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
    def __init__(self, workers: DataLoaderWorkers, shards: Sequence[ShardState], options: Mapping[str, Any]) -> None:
        self.workers = workers  # keeps them alive while they have streams
        self.worker, self._num_open = workers.free_worker(), len(shards)
        serial = self.worker.request(shards, {name: options[name] for name in options if name != "pin_memory"})
        items = self.worker.items(serial, options.get("pin_memory", False))
        super().__init__(items, {}, on_stop=partial(self.worker.cancel, serial), depth=PREFETCH_DEPTH)

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
    protocol.end_all()
    os._exit(0)
