"""A few processes that stay for many tests, each a rank of one gloo job: starting a process takes seconds."""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by the server of new processes, if installed. The last also loads kernels, and frees the garbage
# collector from all these modules' objects: 400,000, which every collection would visit.
PRELOADED = ["torch._inductor.compile_fx", "tritonemb.sharding", "tritonemb.training", "tests.preloaded"]
TIMEOUT = 240.0  # seconds that a case may take
KEPT: set[dist.ProcessGroup] = set()  # of this process; cases to come use them again


class Ranks:
    """`size` processes in one job. `run` calls a function in each of them at once.

    A case that fails on one rank leaves the others waiting for it, so a failure ends the processes; the next `run`
    starts new ones.
    """

    def __init__(self, size: int, method: str = "forkserver") -> None:
        self.size = size
        self._method = method  # "spawn": as torchrun does; each process imports everything by itself
        self._workers: list[tuple[mp.Process, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` of every rank, in their order. The function and what it returns are pickled.

        Raises:
            AssertionError: it raised on some rank; holds the first rank's traceback.
        """
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, args))
        results, failures = [], []
        for rank, (_, pipe) in enumerate(self._workers):
            wait = TIMEOUT if not failures else 1.0
            try:
                good, value = pipe.recv() if pipe.poll(wait) else (False, f"no answer in {wait} s")
            except EOFError:
                good, value = False, "the process has ended"
            results.append(value)
            if not good:
                failures.append(f"rank {rank}: {value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.size):
            local, remote = mp.Pipe()
            process = start_process(_serve, rank, self.size, port, remote, method=self._method)
            remote.close()
            self._workers.append((process, local))


def start_process(function: Callable[..., object], *args: Any, method: str = "forkserver") -> mp.Process:
    """A process that calls a function of a module, and has its imports from a server that made them once.

    Tests that start one, too, are in the group of those that use `ranks`: `@pytest.mark.usefixtures("ranks")`.
    """
    context = mp.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.current_process()._config["daemon"] = False  # as a rank of torchrun: it may start data loader workers
    with joined(rank, size, port):
        while True:
            try:
                function, args = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                answer = (True, function(rank, *args))
                leave_groups()
            except BaseException:
                answer = (False, traceback.format_exc())
            try:
                pipe.send(answer)
            except (BrokenPipeError, OSError):
                return
            sys.stdout.flush()


def leave_groups() -> None:
    """End the groups that a case has made: a thread of each would wake up a hundred times a second."""
    gc.collect()
    gc.freeze()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group not in KEPT:
            dist.destroy_process_group(group)


@contextmanager
def joined(rank: int, size: int, port: int, timeout: float = TIMEOUT) -> Iterator[None]:
    """This process as a rank of a gloo job on this machine."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=timeout), world_size=size, rank=rank)
    try:
        yield
    finally:
        dist.destroy_process_group()
