"""Programs in processes that are forked with their imports, which take a program longer than a short training."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection

from tests.ranks import free_port, start_process


class Program:
    """`python -m module words`, or `python script.py words`, in this folder and with this process's variables.

    `output` is what it prints, errors too, line by line.
    """

    def __init__(self, *words: str, variables: Mapping[str, str] | None = None) -> None:
        local, remote = Pipe(duplex=False)
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (variables or {})
        self.process = start_process(_run, remote, words, environment, os.getcwd())
        remote.close()
        self.output = os.fdopen(os.dup(local.fileno()), errors="replace")

    def finish(self) -> tuple[int | None, str]:
        """Wait for its end. Its exit status, less the signal that killed it, and what it has printed since."""
        text = self.output.read()
        self.process.join()
        self.output.close()
        return self.process.exitcode, text


def start_ranks(size: int, *words: str) -> list[Program]:
    """Programs with the variables that torchrun gives its ranks."""
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return [Program(*words, variables={name: str(value) for name, value in rank.items()}) for rank in ranks]


def _run(output: Connection, words: list[str], environment: Mapping[str, str], folder: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    output.close()
    current_process()._config["daemon"] = False  # it may start data loader workers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = words
    sys.path.insert(0, folder)
    try:
        if words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
