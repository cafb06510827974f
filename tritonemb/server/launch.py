"""`tritonemb embedding-server`, and servers in child processes of this machine, which end with their parent."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tritonemb.flight import TOKEN
from tritonemb.server.metrics import MetricsServer, scrape
from tritonemb.server.node import EmbeddingServer, LogMode, OverMemory
from tritonemb.server.transport import FlightServer
from tritonemb.utils import Closeable, Options, number

STARTED_BY = "TRITONEMB_STARTED_BY"  # set for a server that ends when its standard input does
SECONDS_TO_START = 600.0  # with many rows to restore
RESTARTS = 5  # of a server that ends


@dataclass(frozen=True)
class ServerOptions(Options):
    """Serve rows of embedding tables to trainers, on this machine's memory.

    Example: tritonemb embedding-server --address grpc+tls://0.0.0.0:9000 --certificate tls.crt --key tls.key

    Clients need the token of the environment, TRITONEMB_TOKEN; if there is none, a random one is printed. What is in
    the folder is restored.

    Args:
        address: grpc://HOST:PORT on this machine alone, or grpc+tls://HOST:PORT; port 0 takes a free one.
        certificate: a PEM file, for TLS.
        key: likewise.
        folder: where the state is saved, so that the server can be started again; nowhere if not given.
        log: who keeps what was told since then: clients (memory), a file (disk), or one that survives a loss of power
            (fsync).
        memory: bytes that tables may take, at most, when they are full.
        over_memory: tables that need more are refused, or put on disk (spill), as far as they find no room.
        threads: that compute; all cores if not given.
        metrics_port: of 127.0.0.1, where Prometheus finds the server's numbers; nowhere if not given.
    """

    address: str = "grpc://127.0.0.1:0"
    certificate: Path | None = None
    key: Path | None = None
    folder: Path | None = None
    log: LogMode | None = None
    memory: float | None = None
    over_memory: OverMemory = "refuse"
    threads: int | None = number(None, least=1)
    metrics_port: int | None = number(None, least=0)


def serve(options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM; see `ServerOptions`.

    Raises:
        ValueError, OSError: it cannot serve at this address, or the folder cannot be used.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    ended = threading.Event()
    for number_ in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number_, lambda *_: ended.set())
    if STARTED_BY in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    with ExitStack() as stack:
        limits = options.memory, options.over_memory
        server = stack.enter_context(EmbeddingServer(options.address, options.folder, options.log, *limits))
        where = options.address, None, options.certificate, options.key
        served = stack.enter_context(FlightServer(server, *where))
        server.name = served.address
        if options.metrics_port is not None:
            stack.enter_context(MetricsServer(options.metrics_port, partial(scrape, server, {"server": server.name})))
        print(f"serving at {served.address}", flush=True)
        if not os.environ.get(TOKEN):
            print(f"{TOKEN}={served.token}", flush=True)
        ended.wait()


def _end_with_parent() -> None:
    """The other end of the standard input is closed when that process ends, however it does."""
    with suppress(OSError):
        while os.read(0, 1 << 12):
            pass
    os._exit(0)


class ServerProcess(Closeable):
    """A server in a process of its own, on this machine; `address` and the token are what clients need.

    With a folder and a log it is started again if it ends, `RESTARTS` times; meanwhile `is_starting`.

    Raises:
        OSError: it did not start, or its folder cannot be used.
    """

    def __init__(
        self, token: str, folder: str | Path | None = None, log: str | None = None, threads: int | None = None
    ) -> None:
        self._token, self.address = token, "grpc://127.0.0.1:0"
        options = {"folder": folder, "log": log, "threads": threads}
        self._options = [f"--{name}={value}" for name, value in options.items() if value is not None]
        self._closing, self.is_starting = threading.Event(), False
        self._start()
        if log is not None:
            threading.Thread(target=self._watch, daemon=True, name="tritonemb-restart").start()

    def _start(self) -> None:
        environment = {**os.environ, TOKEN: self._token, STARTED_BY: str(os.getpid()), "OMP_WAIT_POLICY": "passive"}
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "tritonemb", "embedding-server", "--address", self.address, *self._options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,  # a signal to this process's group is not for servers, which it still needs
        )  # fmt: skip
        assert process.stdout is not None
        late = threading.Timer(SECONDS_TO_START, process.kill)
        late.start()
        line = process.stdout.readline()
        late.cancel()
        if not line.startswith("serving at "):
            process.kill()
            process.wait()
            raise OSError("an embedding server could not be started on this machine; what it has said is above")
        self.address = line.split()[-1]

    def _watch(self) -> None:
        for _ in range(RESTARTS):
            self._process.wait()
            if self._closing.is_set():
                return
            self.is_starting = True
            with suppress(OSError):  # clients say that it is gone
                self._start()
            self.is_starting = False

    def close(self) -> None:
        self._closing.set()
        with self._process as process:  # its streams are closed then
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
