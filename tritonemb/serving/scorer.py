"""Scorer of requests: a queue with bounds, and one thread that scores what is queued in batches.

A batch of small requests costs little more than one of them, as it is padded (see `Run.predict`). So the thread takes
all that is queued when the last batch is done; a second thread would wait for the GIL.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from tritonemb.data.batch import Array, Batch
from tritonemb.data.requests import RawRows
from tritonemb.serving.run import Run
from tritonemb.utils import Closeable

POLL = 0.05  # seconds between looks for updates while there are no requests
logger = logging.getLogger(__name__)


class OverloadedError(RuntimeError):
    """The queue of a scorer is full, or it is closing."""


@dataclass(eq=False)
class QueuedRequest:
    """Queued request; the result of `future` are its scores, float32 `[N]` or `[N, L]`."""

    raw: RawRows
    timeout: float
    future: "Future[Array]" = field(default_factory=Future)
    arrival: float = field(default_factory=time.monotonic)


class Scorer(Closeable):
    """Scorer of raw rows by a run, for any number of threads; scores are bitwise those of `Run.predict`.

    Args:
        run: see `load_run`; ValueError if it has transforms, or cannot score raw rows.
        batch_size: rows of a batch; a larger request is scored alone.
        max_wait, slow: seconds that a request waits for others while the model is idle; after which it is logged.
        max_queue: queued rows, beyond which requests are rejected; also those of one request.
        updates: updates of the model, which the scorer applies between two batches: `step` is served, published `age`
            seconds ago; `problem` is why newer steps are not; `pending()` says whether to call `apply()`.
    """

    def __init__(
        self,
        run: Run,
        *,
        batch_size: int = 512,
        max_queue: int = 16_384,
        max_wait: float = 0.0,
        slow: float = 1.0,
        updates: Any = None,
    ) -> None:
        if run.transforms:
            raise ValueError(f"{run.path}: a run with transforms cannot be served; transform rows before training")
        self.run, self.updates, self.encoder, self.failure = run, updates, run.encoder, ""
        self._batch_size, self.max_queue, self._max_wait, self._slow = batch_size, max_queue, max_wait, slow
        self._queue, self._queued_rows, self._condition = deque[QueuedRequest](), 0, threading.Condition()
        self._counts, self._milliseconds, self._closing = Counter[str](), Counter[str](), False
        self._thread = threading.Thread(target=self._work, name="tritonemb-scorer", daemon=True)
        self._thread.start()

    def submit(self, raw: RawRows, timeout: float = 10.0) -> "Future[Array]":
        """Queue rows of the `encoder`; return a future of their scores, float32 `[N]`. It raises ValueError for a bad
        row, TimeoutError after `timeout` seconds in the queue, ArithmeticError if the model scores NaN; `submit` raises
        ValueError for too many rows, OverloadedError if others are queued."""
        if raw.num_rows > self.max_queue:
            raise ValueError(f"the request has {raw.num_rows:,} rows; send up to {self.max_queue:,} per request")
        request = QueuedRequest(raw, timeout)
        with self._condition:
            if self._closing or self._queued_rows + raw.num_rows > self.max_queue:
                self._counts["rejected"] += 1
                raise OverloadedError(f"stopping or overloaded: {self._queued_rows:,} rows are queued; try again later")
            self._queue.append(request)
            self._queued_rows += raw.num_rows
            self._condition.notify()
        return request.future

    def statistics(self) -> dict[str, Any]:
        """Totals since the start, the queue, and the state of the updates."""
        values: dict[str, Any] = {"queued_rows": self._queued_rows, "milliseconds": dict(self._milliseconds)}
        if (updates := self.updates) is not None:
            values |= {"step": updates.step, "age": updates.age, "failing": int(updates.problem is not None)}
        return values | self._counts

    def close(self) -> None:
        """Reject new requests, score the queued ones, and stop."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                if self.updates is not None and not self.failure and self.updates.pending():
                    self.updates.apply()
            except Exception as error:  # part of the update may have been applied
                self.failure = f"an update of the model failed, and its state is undefined: {error!r}; restart"
                logger.exception("an update of the model failed")
            if requests := [request for request in batch if self._is_due(request)]:
                self._score(requests)

    def _next_batch(self) -> list[QueuedRequest] | None:
        """Wait for requests or an update, and take the requests of the next batch; None at the end."""
        batch, size = list[QueuedRequest](), 0
        with self._condition:
            if not self._queue and not self._closing:
                self._condition.wait(None if self.updates is None else POLL)
            if not self._queue:
                return None if self._closing else batch
            end = self._queue[0].arrival + self._max_wait
            while (
                not self._closing and self._queued_rows < self._batch_size and (seconds := end - time.monotonic()) > 0
            ):
                self._condition.wait(seconds)
            while self._queue and (not batch or size + self._queue[0].raw.num_rows <= self._batch_size):
                batch.append(self._queue.popleft())
                size += batch[-1].raw.num_rows
            self._queued_rows -= size
        return batch

    def _is_due(self, request: QueuedRequest) -> bool:
        """Finish a request that cannot be scored any more, or whose client has gone."""
        if not request.future.set_running_or_notify_cancel():
            return False
        seconds = time.monotonic() - request.arrival
        if self.failure or seconds > request.timeout:
            text = f"timeout: the rows waited {seconds:.3f} seconds; try again later"
            self._finish(request, RuntimeError(self.failure) if self.failure else TimeoutError(text))
        return not request.future.done()

    def _score(self, requests: Sequence[QueuedRequest]) -> None:
        try:
            scores = self._run_model(self.encoder.encode([request.raw for request in requests]))
            has_diverged = bool(np.isnan(scores).any() and np.isnan(self._run_model(missing_row(self.run))).any())
        except Exception as error:
            if len(requests) == 1:
                return self._finish(requests[0], error)
            middle = len(requests) // 2  # so the others are scored in few batches
            self._score(requests[:middle])
            return self._score(requests[middle:])
        self._counts["batches"] += 1
        ends = np.cumsum([request.raw.num_rows for request in requests])
        for request, result in zip(requests, np.split(scores, ends[:-1]), strict=True):
            self._finish(request, _nan_error(result, has_diverged) if np.isnan(result).any() else result)
        return None

    def _run_model(self, rows: Batch) -> Array:
        try:
            return self.run.score(rows)
        except Exception as error:  # of any kind: it is not an error of the request
            raise RuntimeError(f"the model failed: {error!r}") from error

    def _finish(self, request: QueuedRequest, result: Array | Exception) -> None:
        self._counts["requests"] += 1
        seconds = time.monotonic() - request.arrival
        self._milliseconds[str(ceil(1000 * seconds))] += 1
        if seconds >= self._slow:
            logger.warning("slow request: %d rows took %.3f seconds", request.raw.num_rows, seconds)
        if isinstance(result, Exception):
            self._counts["errors"] += 1
            return request.future.set_exception(result)
        self._counts["scored_rows"] += len(result)
        return request.future.set_result(result)


def warm_up(run: Run, rows: str | None = None) -> None:
    """Compile the kernels that a request needs, and score a file of rows, whose table rows are then cached."""
    run.score(missing_row(run))
    if rows is not None:
        run.predict(rows)


def _nan_error(scores: Array, has_diverged: bool) -> Exception:
    """Return the error of the first row whose score is NaN, or of a model that has diverged."""
    if has_diverged:
        return ArithmeticError("all scores are NaN, because training has diverged; serve another checkpoint")
    row = 1 + int(np.isnan(scores).reshape(len(scores), -1).any(1).argmax())
    return ValueError(f"row {row}: the score is NaN, because a number is too large for the model")


def missing_row(run: Run) -> Batch:
    """Return a row all of whose values are missing."""
    return run.encoder([dict.fromkeys((*run.encoder.schema.dense, *run.encoder.schema.sparse))])
