"""Servers that are processes: the bits of servers in this one, also if they are killed; and nothing outlives a run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("pyarrow.flight")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.server.jobs import local_servers, make, train, train_all
from tests.server.test_staleness import same
from tritonemb import cli
from tritonemb.server import EmbeddingServer, connect, start, start_on_ray
from tritonemb.server.attach import address_file
from tritonemb.server.snapshot import read_tables
from tritonemb.server.transport import FlightServer
from tritonemb.training.checkpoint.reader import saved_on_servers
from tritonemb.training.config import ServersOptions
from tritonemb.utils import MissingExtraError

DYNAMIC = {"capacity": 110, "eviction": te.EvictionConfig(protect=4)}


def processes_of(parent: int) -> list[int]:
    children = psutil.Process(parent).children(recursive=True)
    return [child.pid for child in children if "server" in child.cmdline()]


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end and any(map(psutil.pid_exists, pids)):
        time.sleep(0.05)
    return not any(map(psutil.pid_exists, pids))


def test_processes_have_the_bits_of_threads(monkeypatch, capsys):
    how = {"trainers": 2, "staleness": 2, "ahead": 2, "dynamic": DYNAMIC}
    with local_servers(1) as servers:
        expected = train_all(servers, 8, **how)
    before = set(processes_of(os.getpid()))
    with start(1, processes=True) as servers:
        mine = [pid for pid in processes_of(os.getpid()) if pid not in before]
        assert len(mine) == 1
        same(train_all(servers, 8, **how), expected)
        monkeypatch.setenv("TRITONEMB_TOKEN", servers.token)
        assert cli.main(["doctor", "--servers", ",".join(servers.addresses)]) == 0
        text = capsys.readouterr().out
        assert "tables: 8 steps, staleness {'0': 2, '1': 2, '2': 12}" in text
        assert "all is well" in text
        assert cli.main(["doctor", "--servers", "grpc://127.0.0.1:1"]) == 1
        assert "FAILS: grpc://127.0.0.1:1 does not answer" in capsys.readouterr().out
    assert gone(mine)


@pytest.mark.more
@pytest.mark.parametrize(
    ("staleness", "log"),
    [
        (3, "disk"),
        pytest.param(0, "memory", marks=pytest.mark.slow),
        pytest.param(0, "disk", marks=pytest.mark.slow),
        pytest.param(3, "memory", marks=pytest.mark.slow),
    ],
)
def test_killed_servers_change_no_bit(tmp_path, log, staleness):
    """At any moment: while they take pushes, log them, answer, save their state, or have just been started again."""
    how = {"trainers": 2, "staleness": staleness, "ahead": min(staleness, 1), "dynamic": DYNAMIC}
    with local_servers(1) as servers:
        expected = train_all(servers, 150, **how)
    with start(2, processes=True, folder=tmp_path, log=log) as servers:
        own, ended, draw = servers._own, threading.Event(), random.Random(staleness)

        def kill() -> None:
            for number in range(4):
                if ended.wait(draw.uniform(0.1, 0.4)):
                    return
                for each in own if number == 3 else [draw.choice(own)]:
                    each._process.send_signal(signal.SIGKILL)
                    each._process.wait()
                time.sleep(draw.uniform(0.0, 3.0))

        killing = threading.Thread(target=kill)
        killing.start()
        for each in servers.connections:
            each._keep_bytes = 30_000
        found = train_all(servers, 150, **how)
        ended.set()
        killing.join()
        same(found, expected)


def test_a_server_loads_nothing_that_only_trainers_need():
    code = "import sys, tritonemb.server.launch; sys.exit('tritonemb.sharding' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.more
@pytest.mark.parametrize("sign", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path, sign):
    command = [sys.executable, "-m", "tritonemb", "train", "--data", "synthetic", "--epochs", "50"]
    command += ["--servers", "2", "--staleness", "4", "--out", str(tmp_path / "run"), "--server-log", "disk"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "run/log.jsonl").exists() and time.monotonic() < end and process.poll() is None:
            time.sleep(0.1)
        assert process.poll() is None, process.stderr.read()
        servers = processes_of(process.pid)
        assert len(servers) == 2
        process.send_signal(sign)
        process.wait(60)
        assert gone(servers)
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 3])
def test_killed_trainers_change_no_bit(tmp_path, staleness):
    """At any moment: while it computes, saves, or has just begun. It is started again until it has come to its end."""
    draw = random.Random(staleness)
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}

    def newest_of(checkpoints: Path) -> int:
        return max((int(path.name[5:]) for path in checkpoints.glob("step-*")), default=0)

    def command(folder: Path, addresses: list[str]) -> list[str]:
        options = {
            "data": "synthetic", "servers": ",".join(addresses), "staleness": staleness, "out": folder, "epochs": 1,
            "max-steps": 400, "checkpoint-steps": 30, "batch-size": 64, "resume": "auto",
        }  # fmt: skip
        return [sys.executable, "-m", "tritonemb", "train", *(f"--{name}={value}" for name, value in options.items())]

    def run(folder: Path, kills: int) -> dict[str, torch.Tensor]:
        checkpoints = folder / "run/checkpoints"
        with start(2, processes=True, folder=folder / "rows", log="disk") as servers:
            own = environment | {"TRITONEMB_TOKEN": servers.token}
            for number in range(kills + 1):
                process = subprocess.Popen(
                    command(folder / "run", servers.addresses), env=own, stdout=subprocess.DEVNULL
                )
                if number < kills:
                    newest = newest_of(checkpoints)
                    while process.poll() is None and newest_of(checkpoints) == newest:
                        time.sleep(0.02)
                    time.sleep(draw.uniform(0.0, 0.5))
                    process.kill()
                process.wait(200)
            assert process.returncode == 0
        return read_tables(next(iter(saved_on_servers(checkpoints / "step-400").values())))

    expected, found = run(tmp_path / "whole", 0), run(tmp_path / "killed", 5)
    for name, tensors in expected.items():
        assert_same_bits(found[name], tensors)


@pytest.mark.more
def test_a_process_that_cannot_start_says_so(tmp_path):
    (tmp_path / "server-0").write_text("no folder")
    with pytest.raises(OSError, match="could not be started on this machine"):
        start(1, processes=True, folder=tmp_path, log="disk")


@pytest.mark.more
def test_a_killed_server_without_a_log_ends_training():
    with start(1, processes=True) as servers:
        servers.connections[0]._patience = 2.0
        model = make(servers)
        train(model, 2)
        servers._own[0]._process.kill()
        with pytest.raises(ConnectionError, match=r"has not answered for 2 seconds; start it again"):
            train(model, 2)


def test_a_server_that_has_moved_is_found(tmp_path):
    server = EmbeddingServer("server-0", tmp_path / "server-0", "disk")
    before = FlightServer(server)
    with server, connect([before.address], token=before.token, folder=tmp_path, patience=5.0) as servers:
        model = make(servers, 1)
        found = train(model, 2)
        before.close()
        with FlightServer(server, token=before.token) as now:
            address_file(tmp_path / "server-0").write_text(now.address)
            found += train(model, 2)
            assert servers.addresses == [now.address] != [before.address]
    with local_servers(1) as servers:
        model = make(servers, 1)
        same(([found], {}), ([train(model, 2) + train(model, 2)], {}))


def test_ray_has_to_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"ray is needed here .* pip install 'tritonemb\[ray\]'"):
        start_on_ray(1)
    with pytest.raises(ValueError, match="number of servers must be at least 1, got 0"):
        start_on_ray(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": "ray"}, "servers=ray: say how many servers Ray is to start, for example ray:4"),
        ({"servers": "ray:two"}, "servers=ray:two: say how many"),
        ({"servers": "ray:-1"}, "servers=ray:-1: say how many"),
        ({"servers": "2", "server_key": Path("key")}, "server_key are for servers on Ray"),
        ({"servers": "grpc://127.0.0.1:1", "server_log": "disk"}, "server_log is for servers that are started here"),
    ],
)
@pytest.mark.few(3)
def test_what_the_command_is_asked_for_wrongly(options, message):
    with pytest.raises(ValueError, match=message):
        ServersOptions(**options)
    assert ServersOptions(servers="ray:4", server_log="disk").num_started == 4


def test_a_folder_that_was_damaged_is_refused(tmp_path: Path):
    with start(1, folder=tmp_path, log="disk") as servers:
        train(make(servers), 2)
    (snapshot,) = (tmp_path / "server-0").glob("*.rows")
    content = bytearray(snapshot.read_bytes())
    content[len(content) // 2] ^= 1
    snapshot.write_bytes(content)
    with pytest.raises(OSError, match="damaged"):
        start(1, folder=tmp_path, log="disk")
