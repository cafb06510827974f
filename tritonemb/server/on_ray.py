"""Embedding servers as actors of a Ray cluster, which places and restarts them; rows are sent over Arrow Flight.

Ray's driver is a child process: Ray kills drivers when its head has been unreachable for a minute, and a trainer must
not end that way. The actors end with the driver, and the driver ends with its parent process.
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
from tritonemb.server.durable import LogMode
from tritonemb.server.launch import RESTARTS, start_python
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.transport import FlightServer
from tritonemb.utils import Closeable, atomic_write, on_error, require

PATIENCE = 60.0  # seconds; Ray takes 30 to detect the loss of a machine
START_TIMEOUT, CLOSE_TIMEOUT = 300.0, 30.0  # seconds; the former also to reserve resources
DRIVE = "from tritonemb.server.on_ray import drive; drive()"
CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")  # written by `ray start`
LOCAL = {  # environment of a local Ray: no network, no usage statistics
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
    """Start embedding servers as Ray actors, spread over machines. They end on `close`, or with this process.

    The cluster is the one that this process is connected to, else that of RAY_ADDRESS, else that of `ray start` on this
    machine. Otherwise, or with RAY_ADDRESS=local, a local Ray is started, which ends with the servers.

    Args:
        name: prefix of the actors' names; their number follows.
        folder: folder of their snapshots, which are restored if they exist. A server can move to another machine if all
            machines, trainers too, share the folder.
        log: keeper of requests since the last snapshot; see `EmbeddingServer`. With it Ray restarts lost servers.
        memory: maximum bytes of full tables per server, which are reserved.
        certificate, key: PEM files on the servers' machines, for their IP addresses; optional if Ray is at 127.0.0.1.
        roots: PEM file on this machine of trusted root certificates; default: TRITONEMB_TLS_ROOTS, else those of the
            system.
        num_cpus: CPUs that are reserved per server, and its number of compute threads.
        resources: other Ray resources per server.
        patience: seconds without any message from a server after which training fails.

    Raises:
        MissingExtraError: Ray is not installed.
        ValueError: `number` is less than 1, `log` is given without a folder, the cluster lacks resources, or other
            machines could reach the servers without TLS.
        OSError: Ray cannot be reached or started, or the folder cannot be used.
    """
    if number < 1:
        raise ValueError(f"the number of servers must be at least 1, got {number}")
    token = secrets.token_hex(32)
    root, *files = (path and str(Path(path).absolute()) for path in (folder, certificate, key))
    options = {"log": log, "memory": memory, "certificate": files[0], "key": files[1], "token": token}
    servers = [
        {"name": f"{name}-{n}", "folder": root and f"{root}/server-{n}", "threads": max(1, num_cpus), **options}
        for n in range(number)
    ]
    bundle = {"CPU": num_cpus, **(resources or {}), **({} if memory is None else {"memory": memory})}
    driver = RayDriver(servers, bundle)
    with on_error(driver.close):
        return Servers(transports_to(driver.addresses, token, roots, folder), [driver], patience, token)


class RayDriver(Closeable):
    """Ray driver in a child process, which starts a server at each of `addresses`; ValueError or OSError if it fails.

    `servers` has the arguments of each `ServerActor`, `bundle` the Ray resources per server.
    """

    def __init__(self, servers: list[dict[str, Any]], bundle: Mapping[str, float]) -> None:
        address = _cluster()
        parent = folder if len(folder := tempfile.gettempdir()) < 24 else "/tmp"  # paths of sockets must be short
        self._files = tempfile.mkdtemp(prefix="tritonemb-", dir=parent)
        environment = LOCAL | {"RAY_AUTH_TOKEN": secrets.token_hex(32)} if address is None else {}
        self._process = start_python(["-c", DRIVE], environment)
        with on_error(self.close):
            with suppress(BrokenPipeError):
                print(json.dumps([address, self._files, servers, bundle]), file=self._process.stdin, flush=True)
            assert self._process.stdout is not None
            if not (line := self._process.stdout.readline()):
                raise OSError("Ray's driver has ended; see its output above")
            results = json.loads(line)
            for error in (result["error"] for result in results if "error" in result):
                raise decode_error(error, "Ray")
            self.addresses = [result["address"] for result in results]

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=CLOSE_TIMEOUT)
        with suppress(ProcessLookupError):  # its children, if the connection to Ray was lost
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        shutil.rmtree(self._files, ignore_errors=True)


def _cluster() -> str | None:
    """Return the address of the Ray cluster to use; None to start a local one."""
    ray = require("ray", "ray")
    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    address = os.environ.get("RAY_ADDRESS") or ("auto" if CLUSTER_FILE.exists() else "local")
    return None if address == "local" else address


def drive() -> None:
    """Run a driver process: start the servers that standard input describes, print their addresses, wait for EOF."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # messages of Ray go to standard error
    address, files, *arguments = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, files, ignore_errors=True)  # the parent process may be gone
        try:
            results = _start_actors(stack, address, files, *arguments)
        except Exception as error:
            results = [{"error": encode_error(error)}]
        with suppress(BrokenPipeError):
            print(json.dumps(results), file=out, flush=True)
        sys.stdin.read()


def _start_actors(
    stack: ExitStack, address: str | None, files: str, servers: list[dict[str, Any]], bundle: dict[str, float]
) -> list[dict[str, Any]]:
    """Start the actors, and return the address or the error of each server."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    number, resources = len(servers), dict(bundle)
    num_cpus, memory = resources.pop("CPU"), resources.pop("memory", None)
    local: dict[str, Any] = {"num_cpus": number * num_cpus, "_memory": memory and number * memory, "_temp_dir": files}
    local |= {"resources": {key: number * value for key, value in resources.items()}}
    local |= {"include_dashboard": False, "object_store_memory": 80 << 20}
    stack.callback(ray.shutdown)
    ray.init(address or "local", logging_level="warning", **(local if address is None else {}))
    group = placement_group([bundle] * number, strategy="SPREAD")
    if not group.wait(START_TIMEOUT):
        raise ValueError(
            f"the Ray cluster cannot reserve {bundle} for each of {number} servers within {START_TIMEOUT:.0f} "
            "seconds; start fewer, reduce their resources, or add machines"
        )
    actors = []
    for index, server in enumerate(servers):
        options = {"name": server["name"], "max_restarts": 0 if server["log"] is None else RESTARTS}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        actor = ray.remote(ServerActor).options(num_cpus=num_cpus, memory=memory, resources=resources, **options)
        actors.append(actor.remote(**server))
    stack.callback(_close, ray, actors)
    try:
        return ray.get([actor.result.remote() for actor in actors], timeout=START_TIMEOUT)
    except TimeoutError as error:
        raise OSError(f"servers on Ray have not started in {START_TIMEOUT:.0f} seconds; see Ray's logs") from error


def _close(ray: Any, actors: list[Any]) -> None:
    for reference in [actor.close.remote() for actor in actors]:
        with suppress(Exception):  # the actor is gone
            ray.get(reference, timeout=10.0)


class ServerActor:
    """Embedding server in a Ray worker process; Ray creates the object again after a restart."""

    def __init__(self, **options: Any) -> None:
        self._stack = ExitStack()
        try:
            self._result: dict[str, Any] = {"address": self._serve(**options)}
        except Exception as error:
            traceback.print_exc()  # after a restart no driver reads the result
            self._result = {"error": encode_error(error)}

    def _serve(self, token: str, certificate: str | None, key: str | None, threads: int, **options: Any) -> str:
        host = require("ray", "ray").util.get_node_ip_address()
        if not (ip_address(host).is_loopback or (certificate and key)):
            raise ValueError(
                f"other machines can reach servers at {host}: give certificate= and key=, PEM files on that machine, "
                "and roots=, the PEM file of trusted certificates"
            )
        torch.set_num_threads(threads)
        server, folder = self._stack.enter_context(EmbeddingServer(**options)), options["folder"]
        # Serve at the port of before a restart, if this is the same machine and the port is free.
        prefix, last_address = f"{'grpc+tls' if certificate else 'grpc'}://{host}:", ""
        if folder is not None:
            with suppress(OSError):
                last_address = address_file(folder).read_text()
        address = last_address if last_address.startswith(prefix) else f"{prefix}0"
        try:
            flight_server = FlightServer(server, address, token, certificate, key)
        except OSError:  # the port is in use
            flight_server = FlightServer(server, f"{prefix}0", token, certificate, key)
        self._stack.enter_context(flight_server)
        if folder is not None:
            atomic_write(address_file(folder), flight_server.address)
        return flight_server.address

    def result(self) -> dict[str, Any]:
        return self._result

    def close(self) -> None:
        self._stack.close()
