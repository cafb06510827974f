"""Chunks read by one thread, worked on by a few, handed on in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tritonemb.data.logs.text import Chunk
from tritonemb.data.prefetch import Prefetcher

R = TypeVar("R")

CHUNKS_READ = 2  # that wait to be worked on
MOST_WORKERS = 8

processes = 1  # that parse on this host, as far as this one knows


def default_workers() -> int:
    return min(max((os.cpu_count() or 1) // processes, 1), MOST_WORKERS)


def in_order(job: Callable[[Chunk], R], chunks: Iterator[Chunk], workers: int) -> Generator[R, None, None]:
    """`job(chunk)` of every chunk, in their order; its exception comes in its place.

    At most `CHUNKS_READ + 1` chunks wait to be worked on and at most `2 * workers + 1` are being worked on or wait as
    results, so memory does not depend on the size of the log. Closing the generator ends all threads.
    """
    read = Prefetcher(chunks, CHUNKS_READ + 1, "tritonemb-read")
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tritonemb-parse")
    results: deque[Future[R]] = deque()
    try:
        more = True
        while True:
            while more and len(results) <= 2 * workers:
                chunk = next(read, None)
                if chunk is None:
                    more = False
                else:
                    results.append(pool.submit(job, chunk))
                del chunk
            if not results:
                return
            yield results.popleft().result()
    finally:
        for result in results:
            result.cancel()
        read.close()
        pool.shutdown(wait=True, cancel_futures=True)
