"""`tritonemb embedding-server`, and servers in child processes of this machine, which end with their parent."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tritonemb.flight import ROOTS, TOKEN, complete_address
from tritonemb.server.durable import LogMode
from tritonemb.server.metrics import MetricsServer, scrape
from tritonemb.server.migration import rebalance
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.spec import OverMemory
from tritonemb.server.transport import FlightServer, FlightTransport
from tritonemb.utils import Closeable, Options, number

STARTED_BY = "TRITONEMB_STARTED_BY"  # set for a child process, which ends when its standard input is closed
START_TIMEOUT = 600.0  # seconds; restoring many rows takes long
RESTARTS = 5  # attempts after a server has ended


@dataclass(frozen=True)
class ServerOptions(Options):
    """Serve rows of embedding tables to trainers, from this machine's memory.

    Example: tritonemb embedding-server --address grpc+tls://0.0.0.0:9000 --certificate tls.crt --key tls.key

    Clients must present the token of TRITONEMB_TOKEN; if it is not set, a random token is printed. A snapshot in the
    folder is restored. With `leave` no server is started.

    Args:
        address: grpc://HOST:PORT on this machine only, or grpc+tls://HOST:PORT; port 0 selects a free port.
        advertise: address by which trainers and other servers reach this server, if it differs from address.
        join: addresses of running servers, whose tablets are distributed evenly over them and this server.
        leave: address of a running server whose tablets move to those of join.
        certificate: PEM file of the certificate, for TLS.
        key: PEM file of the private key, for TLS.
        folder: folder of snapshots and log, from which the server can be restarted; none by default.
        log: keeper of requests since the last snapshot: clients (memory), a file (disk), or a file that survives a
            power failure (fsync).
        memory: maximum bytes of full tables.
        over_memory: refuse tables above this limit, or put rows that do not fit on disk (spill).
        threads: compute threads; all cores by default.
        metrics_port: port on 127.0.0.1 of Prometheus metrics; none by default.
    """

    address: str = "grpc://127.0.0.1:0"
    advertise: str | None = None
    join: tuple[str, ...] = ()
    leave: str | None = None
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
        ValueError, OSError: the address cannot be served, or the folder cannot be used.
    """
    if options.leave is not None:
        transports = _transports([*options.join, options.leave])
        print(f"{rebalance(transports, [transports[-1].address])} tablets have moved")
        return
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    stopped = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stopped.set())
    if STARTED_BY in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    with ExitStack() as stack:
        limits = options.memory, options.over_memory
        server = stack.enter_context(EmbeddingServer(options.address, options.folder, options.log, *limits))
        endpoint = options.address, None, options.certificate, options.key
        flight_server = stack.enter_context(FlightServer(server, *endpoint))
        server.name = options.advertise or flight_server.address
        if options.metrics_port is not None:
            stack.enter_context(MetricsServer(options.metrics_port, partial(scrape, server, {"server": server.name})))
        print(f"serving at {flight_server.address}", flush=True)
        if not os.environ.get(TOKEN):
            print(f"{TOKEN}={flight_server.token}", flush=True)
        while options.join and not stopped.is_set():
            try:
                print(f"{rebalance(_transports([*options.join, server.name]))} tablets have moved", flush=True)
                break
            except (OSError, ValueError, RuntimeError) as error:  # such as a server that is restarted
                print(f"tablets could not be moved, trying again in 10 seconds: {error}", flush=True)
                stopped.wait(10.0)  # restarting a server may take as long
        stopped.wait()


def _transports(addresses: Sequence[str]) -> list[FlightTransport]:
    return [FlightTransport(complete_address(a), os.environ.get(TOKEN, ""), os.environ.get(ROOTS)) for a in addresses]


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1 << 12):
            pass
    os._exit(0)


def start_python(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start Python in a child process, with pipes.

    A signal to this process group does not end it, as a last checkpoint needs the servers.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive", **environment}
    return subprocess.Popen([sys.executable, *arguments], env=variables, start_new_session=True, **pipes)


class ServerProcess(Closeable):
    """Server in a child process. With a folder and a log it is restarted if it ends, up to `RESTARTS` times.

    OSError if it did not start, or cannot use its folder. `is_starting` while it is being restarted.
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
        arguments = ["-m", "tritonemb", "embedding-server", "--address", self.address, *self._options]
        process = self._process = start_python(arguments, {TOKEN: self._token, STARTED_BY: str(os.getpid())})
        assert process.stdout is not None
        timer = threading.Timer(START_TIMEOUT, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line.startswith("serving at "):
            process.kill()
            process.wait()
            raise OSError("an embedding server could not be started on this machine; see its output above")
        self.address = line.split()[-1]

    def _watch(self) -> None:
        for _ in range(RESTARTS):
            self._process.wait()
            if self._closing.is_set():
                return
            self.is_starting = True
            with suppress(OSError):  # clients raise when their patience ends
                self._start()
            self.is_starting = False

    def close(self) -> None:
        self._closing.set()
        with self._process as process:  # closes its streams
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
