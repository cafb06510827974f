"""Servers that are actors of Ray: the bits of servers in threads, if they are lost too; and nothing outlives a run."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")
pytest.importorskip("pyarrow.flight")

import ray

import tritonemb as te
from tests.helpers import DEADLINE
from tests.server.jobs import make, same, train, train_all, train_on
from tritonemb.server import start_on_ray
from tritonemb.utils import cache_dir

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]
DYNAMIC = {"capacity": 110, "eviction": te.EvictionConfig(protect=4)}
HOW = {"trainers": 2, "staleness": 2, "ahead": 2, "dynamic": DYNAMIC}


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path) -> Iterator[Path]:
    """Where temporary files go, and the user's; Ray's sockets need a short path. Nothing of Ray's is left there."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        monkeypatch.setenv("TRITONEMB_CACHE_DIR", str(cache_dir()))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        for name in ("TMPDIR", "HOME"):
            monkeypatch.setenv(name, folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("RAY_ADDRESS", "local")
        for name in ("RAY_AUTH_MODE", "TRITONEMB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield Path(folder)
        end = time.monotonic() + 10
        while (left := list(Path(folder).iterdir())) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left


def below(parent: int | None = None) -> list[psutil.Process]:
    """The processes that a process has begun, and these."""
    return psutil.Process(parent).children(recursive=True)


def named(name: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    results = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # by now
            results += [process] * (name in " ".join([process.name(), *process.cmdline()]))
    return results


def train_for(seconds: float, model) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        train(model, 1)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=DEADLINE)[1]


def test_actors_have_the_bits_of_threads(temporary):
    expected = train_on(2, 8, **HOW)
    initial = set(below())
    with start_on_ray(2) as servers:
        same(train_all(servers, 8, **HOW), expected)
        local = [process for process in below() if process not in initial]
        assert len(named("ray::ServerActor", local)) == 2
        listening = [at for process in local for at in process.net_connections() if at.status == psutil.CONN_LISTEN]
        assert {at.laddr.ip.removeprefix("::ffff:") for at in listening} == {"127.0.0.1"}
        ports = {at.laddr.port for at in listening}
        assert {address.rpartition(":")[0] for address in servers.addresses} == {"grpc://127.0.0.1"}
        assert {int(address.rpartition(":")[2]) for address in servers.addresses} < ports
        assert any(temporary.rglob("gcs_server.out"))
        written = [path.read_bytes() for path in temporary.rglob("*") if path.is_file()]
        assert not [text for text in written if servers.token.encode() in text]
        assert not named(servers.token, local)
    assert gone(local)


def test_killed_actors_change_no_bit(tmp_path):
    """They come back where they were; or, as if on another machine, somewhere else."""
    expected = train_on(2, 400, **HOW)
    with start_on_ray(2, folder=tmp_path, log="disk", memory=1e8, resources={"disk": 1}) as servers:
        addresses, files = servers.addresses, [tmp_path / f"server-{index}" / "address" for index in range(2)]
        assert [file.read_text() for file in files] == addresses
        killed, steps = [], itertools.count()

        def kill() -> None:
            """Before a step of a trainer."""
            if next(steps) != 200:
                return
            files[1].unlink()
            for actor in named("ray::ServerActor", below()):
                actor.kill()
                killed.append(actor)

        same(train_all(servers, 400, on_step=kill, **HOW), expected)
        assert len(killed) == 2
        assert gone(killed)
        assert servers.addresses[0] == addresses[0]
        assert servers.addresses[1] == files[1].read_text() != addresses[1]


def test_what_is_lost_without_a_log_ends_training():
    with start_on_ray(1, patience=2.0) as servers:
        model = make(servers, 1)
        train(model, 2)
        local = below()
        named("ray::ServerActor", local)[0].kill()
        with pytest.raises(ConnectionError, match="has not answered for 2 seconds; restart it"):
            train(model, 2)
        assert len(named("ray::ServerActor", below())) == 0
    assert gone(local)


@pytest.mark.parametrize("part", ["gcs_server", "drive()"])
def test_training_ends_with_an_error_when_ray_is_lost(monkeypatch, part, tmp_path):
    """Its head, or the process that has started the servers."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # the servers live as long without a head
    with start_on_ray(2, patience=2.0, folder=tmp_path, log="disk") as servers:
        model, local = make(servers, 1), below()
        train(model, 2)
        (lost,) = named(part, local)
        lost.kill()
        with pytest.raises(ConnectionError, match="has not answered for 2 seconds"):
            train_for(30, model)
    assert gone(local)


def test_training_goes_on_while_servers_live():
    with start_on_ray(2, patience=2.0) as servers:
        model, local = make(servers, 1), below()
        (lost,) = named("raylet/raylet", local)
        lost.kill()
        train_for(4, model)
    assert gone(local)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path, sign):
    command = [sys.executable, "-m", "tritonemb", "train", "--data", "synthetic", "--epochs", "50"]
    command += ["--servers", "ray:2", "--staleness", "4", "--out", str(tmp_path / "run"), "--server-log", "disk"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
    local = []
    try:
        assert process.stdout.readline(), (tmp_path / "said").read_text()  # it begins to train
        local = below(process.pid)
        assert len(named("ray::ServerActor", local)) == 2
        process.send_signal(sign)
        process.communicate(timeout=DEADLINE)
        assert gone(local)
        assert "Traceback" not in (tmp_path / "said").read_text()
    finally:
        process.kill()
        for item in local:
            with suppress(psutil.NoSuchProcess):
                item.kill()


def test_what_cannot_be_started_says_so(tmp_path):
    (tmp_path / "server-0").write_text("no folder")
    initial = set(below())
    for options, error, message in (
        ({"folder": tmp_path, "log": "disk"}, OSError, "cannot use .*server-0"),
        ({"log": "disk"}, ValueError, "log='disk' needs a folder"),
    ):
        with pytest.raises(error, match=message):
            start_on_ray(1, **options)
    assert gone([process for process in below() if process not in initial])


def run(script: str, folder: Path, address: str) -> list[str]:
    """What a process with a Ray of its own prints; it has a certificate for this machine's address."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=rows"]
    command += ["-addext", f"subjectAltName=IP:{address}", "-keyout", f"{folder}/key", "-out", f"{folder}/pem"]
    subprocess.run(command, check=True, capture_output=True)
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": str(folder)}
    command = [sys.executable, "-c", BEGIN + script, str(folder)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for name in ("pem", "key"):
        (folder / name).unlink()
    shutil.rmtree(folder / "ray")
    return done.stdout.splitlines()


@pytest.fixture
def address() -> str:
    """Of this machine, for others."""
    result = ray.util.get_node_ip_address()
    if ip_address(result).is_loopback or shutil.which("openssl") is None:
        pytest.skip("this machine has no other address, or no openssl")
    return result


BEGIN = """
import os, sys, time
import ray, torch
from ray.cluster_utils import Cluster
import tritonemb as te
from tests.server.jobs import local_servers, make, train
from tests.server.test_ray import below, named
from tritonemb.server import on_ray

folder = sys.argv[1]
files = {"certificate": folder + "/pem", "key": folder + "/key", "roots": folder + "/pem"}
"""
OF_THE_PROCESS = """
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
usual = on_ray.DRIVE
impatient = "from tritonemb.server import on_ray; on_ray.START_TIMEOUT = 2; on_ray.drive()"
for on_ray.DRIVE, how in ((impatient, {"num_cpus": 3}), (usual, {})):
    try:
        te.server.start_on_ray(1, **how)
    except ValueError as error:
        print(error)
with te.server.start_on_ray(2, name="rows", **files) as servers:
    print(*servers.addresses)
    print(*sorted(each["name"] for each in ray.util.list_named_actors(all_namespaces=True)))
    train(make(servers, 1), 3)
end, left = time.monotonic() + 10, None
while left != ([], 2.0) and time.monotonic() < end:
    time.sleep(0.1)
    left = ray.util.list_named_actors(all_namespaces=True), ray.available_resources().get("CPU")
print(left)
ray.shutdown()
"""


def test_a_cluster_that_other_machines_reach_needs_tls(temporary, address):
    """It is that of the process, and stays as it was."""
    no_room, no_tls, addresses, names, left = run(OF_THE_PROCESS, temporary, address)
    assert no_room.startswith(
        "the Ray cluster cannot reserve {'CPU': 3} for each of 1 servers within 2 seconds; start "
    )
    assert no_tls.startswith(f"other machines can reach servers at {address}: give certificate= and key=")
    assert [item.rpartition(":")[0] for item in addresses.split()] == [f"grpc+tls://{address}"] * 2
    assert names == "rows-0 rows-1"
    assert left == "([], 2.0)"


OF_SEVERAL_MACHINES = """
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
machines = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()
os.environ["RAY_ADDRESS"] = cluster.address
with te.server.start_on_ray(2, folder=folder + "/ray/rows", log="disk", **files) as servers:
    model, before = make(servers, 1), servers.addresses
    found = train(model, 5)
    actors = named("ray::ServerActor", below())
    parents = [actor.ppid() for actor in actors]
    print(len(set(parents)))
    for index in range(2):
        os.unlink(f"{folder}/ray/rows/server-{index}/address")  # the other machine has other ports
    cluster.add_node(num_cpus=1)
    pids = [machine.all_processes["raylet"][0].process.pid for machine in machines]
    cluster.remove_node(machines[pids.index(parents[0])], allow_graceful=False)
    actors[0].kill()  # as it would be on another machine
    found += train(model, 5)
    print(sum(address not in before for address in servers.addresses))
with local_servers(2) as servers:
    model = make(servers, 1)
    print(all(map(torch.equal, found, train(model, 5) + train(model, 5))))
cluster.shutdown()
"""


def test_a_server_moves_to_another_machine(temporary, address):
    assert run(OF_SEVERAL_MACHINES, temporary, address) == ["2", "1", "True"]
