"""Embedding servers as actors of a Ray cluster, which places them and restarts them; rows go over Arrow Flight.

Ray's driver is a process of its own: Ray ends drivers at once when its head is gone for a minute, and a trainer must
not end that way. The actors end with the driver, and the driver ends with the process that has started it.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch

from tritonemb.flight import decode_error, encode_error
from tritonemb.server.attach import Servers, address_file, transports_to
from tritonemb.server.launch import RESTARTS
from tritonemb.server.node import EmbeddingServer, LogMode
from tritonemb.server.transport import FlightServer
from tritonemb.utils import Closeable, atomic_write, on_error, require

PATIENCE = 60.0  # seconds; Ray takes half of them to notice that a machine is gone
SECONDS_TO_START, SECONDS_TO_END = 300.0, 30.0  # to find room likewise
DRIVE = "from tritonemb.server.on_ray import drive; drive()"
STARTED = Path("/tmp/ray/ray_current_cluster")  # `ray start` writes it
LOCAL = {  # of a Ray of our own: nothing listens on the network, and nothing is told to Ray's makers
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}


def start_on_ray(
    number: int, *, name: str = "tritonemb", folder: str | Path | None = None, log: LogMode | None = None,
    memory: float | None = None, certificate: str | Path | None = None, key: str | Path | None = None,
    roots: str | Path | None = None, num_cpus: int = 1, resources: Mapping[str, float] | None = None,
    patience: float = PATIENCE,
) -> Servers:  # fmt: skip
    """Start embedding servers as actors of Ray, on as many machines as there are; `close` ends them, and so does the
    end of this process, however it ends.

    The cluster is that which this process is connected to, or that of RAY_ADDRESS, or that which `ray start` has begun
    on this machine. Else, or with RAY_ADDRESS=local, it is this machine alone, and ends with the servers.

    Args:
        name: of the actors, with their number behind it.
        folder: where their state is saved; what is there is restored. A server can move to another machine if all
            machines have the same folder, the trainers' too.
        log: who keeps what they were told since then; see `EmbeddingServer`. With it Ray restarts lost servers.
        memory: bytes that the tables of one may take, at most, which are reserved.
        certificate, key: PEM files on the machines of the servers, for the IP addresses of these; not needed where all
            of Ray is at 127.0.0.1.
        roots: a PEM file here of certificates to trust; that of TRITONEMB_TLS_ROOTS, or the system's, if not given.
        num_cpus: that are reserved for one; it computes with as many threads.
        resources: of Ray that one needs besides.
        patience: seconds without a sign of life after which a server counts as gone, and training ends.

    Raises:
        MissingExtraError: Ray is not installed.
        ValueError: there is no server to start, a log without a folder, no room in the cluster, or other machines could
            reach the servers without TLS.
        OSError: Ray cannot be reached or started, or the folder cannot be used.
    """
    if number < 1:
        raise ValueError(f"the number of servers must be at least 1, got {number}")
    token = secrets.token_hex(32)
    place, *files = (path and str(Path(path).absolute()) for path in (folder, certificate, key))
    how = {"log": log, "memory": memory, "certificate": files[0], "key": files[1], "token": token}
    servers = [
        {"name": f"{name}-{n}", "folder": place and f"{place}/server-{n}", "threads": max(1, num_cpus), **how}
        for n in range(number)
    ]
    bundle = {"CPU": num_cpus, **(resources or {}), **({} if memory is None else {"memory": memory})}
    driver = RayDriver(servers, bundle)
    with on_error(driver.close):
        return Servers(transports_to(driver.addresses, token, roots, folder), [driver], patience, token)


class RayDriver(Closeable):
    """A process that has started these servers as actors, at `addresses`, and ends with this one.

    Raises:
        ValueError, OSError: they could not be started.
    """

    def __init__(self, servers: list[dict[str, Any]], bundle: Mapping[str, float]) -> None:
        address, environment = _cluster(), {**os.environ, "OMP_WAIT_POLICY": "passive"}
        if address is None:
            environment |= LOCAL | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        usual = tempfile.gettempdir()
        self._files = tempfile.mkdtemp(prefix="tritonemb-", dir=usual if len(usual) < 24 else "/tmp")  # of sockets, too
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        with on_error(self.close):
            self.addresses = self._ask([address, self._files, servers, bundle])

    def _ask(self, wanted: list[Any]) -> list[str]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(wanted), file=stdin, flush=True)
        if not (line := stdout.readline()):
            raise OSError("Ray's driver has ended; what it has said is above")
        found = json.loads(line)
        for each in found:
            if "error" in each:
                raise decode_error(each["error"], "Ray")
        return [each["address"] for each in found]

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=SECONDS_TO_END)
        with suppress(ProcessLookupError):  # what it may have left, if Ray was lost
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        shutil.rmtree(self._files, ignore_errors=True)


def _cluster() -> str | None:
    """The address of the Ray cluster to use; None for one of our own."""
    ray = require("ray", "ray")
    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    found = os.environ.get("RAY_ADDRESS") or ("auto" if STARTED.exists() else "local")
    return None if found == "local" else found


def drive() -> None:
    """Of a driver's process: start what standard input asks for, say where it is, and end when standard input does."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where Ray's messages go
    address, files, servers, bundle = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, files, ignore_errors=True)  # the process that has begun this may be gone
        try:
            found = _start(address, files, servers, bundle, stack)
        except Exception as error:
            found = [{"error": encode_error(error)}]
        with suppress(BrokenPipeError):
            print(json.dumps(found), file=out, flush=True)
        sys.stdin.read()


def _start(
    address: str | None, files: str, servers: list[dict[str, Any]], bundle: dict[str, float], stack: ExitStack
) -> list[dict[str, Any]]:
    """Of each server its address, or why it has none."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    number, other = len(servers), dict(bundle)
    num_cpus, memory = other.pop("CPU"), other.pop("memory", None)
    stack.callback(ray.shutdown)
    if address is None:
        ray.init(
            "local", num_cpus=number * num_cpus, resources={key: number * value for key, value in other.items()},
            include_dashboard=False, object_store_memory=80 << 20, _memory=memory and number * memory, _temp_dir=files,
            logging_level="warning",
        )  # fmt: skip
    else:
        ray.init(address, logging_level="warning")
    group = placement_group([bundle] * number, strategy="SPREAD")
    if not group.wait(SECONDS_TO_START):
        raise ValueError(
            f"the Ray cluster has had no room for {number} servers with {bundle} each for {SECONDS_TO_START:.0f} "
            "seconds; start fewer, let them have less, or add machines"
        )
    actors = [
        ray.remote(ServerActor).options(
            name=each["name"], num_cpus=num_cpus, memory=memory, resources=other,
            max_restarts=0 if each["log"] is None else RESTARTS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(**each)
        for index, each in enumerate(servers)
    ]  # fmt: skip
    stack.callback(_close, ray, actors)
    try:
        return ray.get([actor.found.remote() for actor in actors], timeout=SECONDS_TO_START)
    except TimeoutError as error:
        raise OSError(f"servers on Ray have not started in {SECONDS_TO_START:.0f} seconds; its logs say why") from error


def _close(ray: Any, actors: list[Any]) -> None:
    for closed in [actor.close.remote() for actor in actors]:
        with suppress(Exception):  # it is gone
            ray.get(closed, timeout=10.0)


class ServerActor:
    """A server in a process of Ray's, which makes this anew when it has restarted it."""

    def __init__(self, **how: Any) -> None:
        self._stack = ExitStack()
        try:
            self._found: dict[str, Any] = {"address": self._serve(**how)}
        except Exception as error:
            traceback.print_exc()  # after a restart nobody asks
            self._found = {"error": encode_error(error)}

    def _serve(
        self, name: str, folder: str | None, log: LogMode | None, memory: float | None, certificate: str | None,
        key: str | None, token: str, threads: int,
    ) -> str:  # fmt: skip
        host = require("ray", "ray").util.get_node_ip_address()
        if not (ip_address(host).is_loopback or (certificate and key)):
            raise ValueError(
                f"other machines can reach servers at {host}: give certificate= and key=, which are PEM files there, "
                "and roots=, that of certificates to trust"
            )
        torch.set_num_threads(threads)
        server = self._stack.enter_context(EmbeddingServer(name, folder, log, memory))
        place, before = f"{'grpc+tls' if certificate else 'grpc'}://{host}:", ""
        if folder is not None:
            with suppress(OSError):
                before = address_file(folder).read_text()
        try:
            served = FlightServer(server, before if before.startswith(place) else f"{place}0", token, certificate, key)
        except OSError:  # the port is somebody else's now
            served = FlightServer(server, f"{place}0", token, certificate, key)
        self._stack.enter_context(served)
        if folder is not None:
            atomic_write(address_file(folder), served.address)
        return served.address

    def found(self) -> dict[str, Any]:
        return self._found

    def close(self) -> None:
        self._stack.close()
