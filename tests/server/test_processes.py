"""Servers that are processes: the bits of servers in this one, also if they are killed; and nothing outlives a run."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("pyarrow.flight")

import tritonemb as te
from tests.helpers import DEADLINE, assert_same_bits, process_ends
from tests.server.jobs import Trainers, make, outputs_on, same, train, train_all, train_on
from tritonemb import cli
from tritonemb.comm.group import RankGroup
from tritonemb.server import EmbeddingServer, Servers, connect, launch, start, start_on_ray
from tritonemb.server.attach import ServersOptions, address_file
from tritonemb.server.snapshot import read_tables
from tritonemb.server.transport import FlightServer
from tritonemb.training import job
from tritonemb.training.checkpoint.reader import saved_on_servers
from tritonemb.training.config import TrainConfig
from tritonemb.utils import MissingExtraError

DYNAMIC = {"capacity": 110, "eviction": te.EvictionConfig(protect=4)}


@pytest.fixture(autouse=True)
def _patient(monkeypatch) -> None:
    """A busy machine starts processes slowly."""
    monkeypatch.setattr(launch, "START_TIMEOUT", 4 * DEADLINE)


def processes_of(parent: int) -> list[int]:
    pids = []
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # another child may end meanwhile
            pids += [child.pid] if "embedding-server" in child.cmdline() else []
    return pids


def test_processes_have_the_bits_of_threads(monkeypatch, capfd):
    """And do not load what only trainers need."""
    options = {"trainers": 2, "staleness": 2, "ahead": 2, "dynamic": DYNAMIC}
    expected = train_on(1, 8, **options)
    initial = set(processes_of(os.getpid()))
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # has the process say what it imports
    with start(1, processes=True) as servers:
        imported = {line.rpartition("|")[2].strip() for line in capfd.readouterr().err.splitlines()}
        assert "tritonemb.server.launch" in imported
        assert "tritonemb.sharding" not in imported
        local = [pid for pid in processes_of(os.getpid()) if pid not in initial]
        assert len(local) == 1
        same(train_all(servers, 8, **options), expected)
        assert "import time:" not in capfd.readouterr().err  # everything was imported before it served
        monkeypatch.setenv("TRITONEMB_TOKEN", servers.token)
        assert cli.main(["doctor", "--servers", ",".join(servers.addresses)]) == 0
        text = capfd.readouterr().out
        assert "tables: 8 steps, staleness {'0': 2, '1': 2, '2': 12}" in text
        assert "all is well" in text
        assert cli.main(["doctor", "--servers", "grpc://127.0.0.1:1"]) == 1
        assert "FAILS: grpc://127.0.0.1:1 does not answer" in capfd.readouterr().out
        model = make(servers, 2, dynamic=DYNAMIC, group=Trainers(0, 2))
        servers.connections[0]._patience = 2.0
        servers._local_servers[0]._process.kill()  # it has no log
        with pytest.raises(ConnectionError, match=r"has not answered for 2 seconds; restart it"):
            train(model, 1)
    assert all(map(process_ends, local))


class Process:
    """A server's, which says its address when it is let."""

    def __init__(self, words: list[str], **how: Any) -> None:
        self.how, self.words, self.stdin, self.stdout = how, words, None, self
        self.may_serve, self.ended = threading.Event(), threading.Event()
        processes.append(self)

    def readline(self) -> str:
        self.may_serve.wait(DEADLINE)
        return "serving at grpc://127.0.0.1:1\n"

    def wait(self, timeout: float = DEADLINE) -> None:
        self.ended.wait(timeout)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def terminate(self) -> None:
        self.ended.set()

    kill = terminate


processes: list[Process] = []


def test_a_process_has_a_session_of_its_own_and_says_that_it_is_being_started(monkeypatch):
    """So a signal to the group of the trainer ends the trainer alone, which then saves what servers have."""
    started = threading.Event()

    def start_one(*args: Any, **options: Any) -> Process:
        process = Process(*args, **options)
        if len(processes) == 1:
            process.may_serve.set()
        started.set()
        return process

    monkeypatch.setattr(launch.subprocess, "Popen", start_one)
    processes.clear()
    with launch.ServerProcess("secret", "folder", "disk") as server:
        assert processes[0].how["start_new_session"]
        assert not server.is_starting
        started.clear()
        processes[0].ended.set()
        assert started.wait(DEADLINE)
        assert server.is_starting
        processes[1].may_serve.set()
        while server.is_starting:
            time.sleep(0.001)


def test_a_server_that_is_asked_for_without_a_token_says_which_one_it_has(capsys, monkeypatch):
    monkeypatch.setattr(launch.signal, "signal", lambda number, handler: handler(number, None))  # it ends at once
    for token in ("", "secret"):
        monkeypatch.setenv("TRITONEMB_TOKEN", token)
        launch.serve(launch.ServerOptions())
        address, *more = capsys.readouterr().out.splitlines()
        assert address.startswith("serving at grpc://127.0.0.1:")
        assert [line[:16] for line in more] == ([] if token else ["TRITONEMB_TOKEN="])


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
@pytest.mark.timeout(600)
def test_killed_servers_change_no_bit(tmp_path, log, staleness):
    """At any moment: while they take pushes, log them, answer, save their state, or have just been started again."""
    options = {"trainers": 2, "staleness": staleness, "ahead": min(staleness, 1), "dynamic": DYNAMIC}
    expected = train_on(1, 80, **options)
    with start(2, processes=True, folder=tmp_path, log=log) as servers:
        draw, steps, kills = random.Random(staleness), itertools.count(), []

        def kill() -> None:
            """Before some of the trainers' steps, whatever the servers are doing then."""
            if next(steps) in moments:
                kills.append(len(kills))
                for connection in servers._local_servers if len(kills) == 2 else [draw.choice(servers._local_servers)]:
                    connection._process.kill()

        moments = draw.sample(range(10, 130), 2)
        for connection in servers.connections:
            connection._max_replay_bytes, connection._patience = 30_000, 4 * DEADLINE
        same(train_all(servers, 80, on_step=kill, **options), expected)
        assert len(kills) == 2


@pytest.mark.more
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path, sign):
    """Signals go to its process group, as from a terminal or a scheduler. One that it can note ends it with a
    checkpoint, which takes the servers."""
    command = [sys.executable, "-m", "tritonemb", "train", "--data", "synthetic", "--epochs", "50"]
    command += ["--servers", "2", "--staleness", "4", "--out", str(tmp_path / "run"), "--server-log", "disk"]
    command += ["--log-every", "3"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        process.stdout.readline()
        assert process.stdout.readline(), process.stderr.read()  # it trains
        servers = processes_of(process.pid)
        assert len(servers) == 2
        os.killpg(process.pid, sign)
        _, errors = process.communicate(timeout=DEADLINE)
        assert all(map(process_ends, servers))
        assert any((tmp_path / "run/checkpoints").glob("step-*")) == (sign == signal.SIGINT), errors
        assert process.returncode == (130 if sign == signal.SIGINT else -sign), errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 3])
def test_killed_trainers_change_no_bit(tmp_path, staleness):
    """At any moment: while it computes, saves, or has just begun. It is started again until it has come to its end."""
    draw = random.Random(staleness)
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}

    def command(folder: Path, addresses: list[str]) -> list[str]:
        options = {
            "data": "synthetic", "servers": ",".join(addresses), "staleness": staleness, "out": folder, "epochs": 1,
            "max-steps": 400, "checkpoint-steps": 30, "batch-size": 64, "resume": "auto",
        }  # fmt: skip
        return [sys.executable, "-m", "tritonemb", "train", *(f"--{name}={value}" for name, value in options.items())]

    def run(folder: Path, kills: int) -> dict[str, torch.Tensor]:
        checkpoints = folder / "run/checkpoints"
        with start(2, processes=True, folder=folder / "rows", log="disk") as servers:
            local = environment | {"TRITONEMB_TOKEN": servers.token}
            for number in range(kills + 1):
                trainer = command(folder / "run", servers.addresses)
                process = subprocess.Popen(trainer, env=local, stdout=subprocess.PIPE, text=True)
                if number < kills:
                    next(line for line in process.stdout if line.startswith("checkpoint"))
                    for _ in range(draw.randrange(12)):  # more lines
                        process.stdout.readline()
                    process.kill()
                process.communicate(timeout=DEADLINE)
            assert process.returncode == 0
        return read_tables(next(iter(saved_on_servers(checkpoints / "step-400").values())))

    expected, actual = run(tmp_path / "whole", 0), run(tmp_path / "killed", 5)
    for name, tensors in expected.items():
        assert_same_bits(actual[name], tensors)


@pytest.mark.more
def test_a_process_that_cannot_start_says_so(tmp_path):
    (tmp_path / "server-0").write_text("no folder")
    with pytest.raises(OSError, match="could not be started on this machine"):
        start(1, processes=True, folder=tmp_path, log="disk")


def test_a_server_that_has_moved_is_found(tmp_path):
    server = EmbeddingServer("server-0", tmp_path / "server-0", "disk")
    initial = FlightServer(server)
    with server, connect([initial.address], token=initial.token, folder=tmp_path, patience=DEADLINE) as servers:
        model = make(servers, 1)
        result = train(model, 2)
        initial.close()
        with FlightServer(server, token=initial.token) as now:
            address_file(tmp_path / "server-0").write_text(now.address)
            result += train(model, 2)
            assert servers.addresses == [now.address] != [initial.address]
    same(([result], {}), ([outputs_on(1, 1, 2, 2)], {}))


def test_ray_has_to_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"ray is required .* pip install 'tritonemb\[ray\]'"):
        start_on_ray(1)
    with pytest.raises(ValueError, match="number of servers must be at least 1, got 0"):
        start_on_ray(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": "ray"}, "servers=ray: expected the number of servers to start, for example ray:4"),
        ({"servers": "ray:two"}, "servers=ray:two: expected the number"),
        ({"servers": "ray:-1"}, "servers=ray:-1: expected the number"),
        ({"servers": "2", "server_key": Path("key")}, "server_key are for servers on Ray"),
        ({"servers": "grpc://127.0.0.1:1", "server_log": "disk"}, "server_log is for servers that the run starts"),
        ({"server_restart_timeout": 5.0}, "server_restart_timeout: no effect without servers"),
        ({"servers": "2", "server_restart_timeout": 0.0}, "server_restart_timeout must be at least 1"),
    ],
)
@pytest.mark.few(3)
def test_what_the_command_is_asked_for_wrongly(options, message):
    with pytest.raises(ValueError, match=message):
        ServersOptions(**options)
    assert ServersOptions(servers="ray:4", server_log="disk").num_started == 4


def test_the_command_waits_for_a_lost_server_as_long_as_it_is_asked_to(tmp_path, monkeypatch):
    patience = []
    for name in ("start", "start_on_ray", "connect"):
        monkeypatch.setattr(job, name, lambda *args, **options: patience.append(options["patience"]) or Servers([]))
    for servers in ("2", "ray:2", "localhost:1"):
        for seconds in (None, 300.0):
            options = ServersOptions(servers=servers, server_restart_timeout=seconds)
            with job._servers(TrainConfig(server=options), tmp_path, RankGroup()):
                pass
    assert patience == [20.0, 300.0, 60.0, 300.0, 20.0, 300.0]


def test_a_folder_that_was_damaged_is_refused(tmp_path: Path):
    with start(1, folder=tmp_path, log="disk") as servers:
        train(make(servers), 2)
    (snapshot,) = (tmp_path / "server-0").glob("*.rows")
    content = bytearray(snapshot.read_bytes())
    content[len(content) // 2] ^= 1
    snapshot.write_bytes(content)
    with pytest.raises(OSError, match="damaged"):
        start(1, folder=tmp_path, log="disk")
