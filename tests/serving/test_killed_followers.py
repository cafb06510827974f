"""Followers and scorers that are killed at any time, while a trainer publishes, serve states that were published."""

from __future__ import annotations

import hashlib
import http.client
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import tritonemb as te
from tests.programs import Program
from tests.server.jobs import local_servers
from tests.serving.models import Model, scores, train
from tests.serving.scorers import port_of, request, scores_at, start_server, train_run
from tritonemb.serving import Publisher

IDS = torch.arange(300)
PROGRAM = """
import sys
from tests.serving.models import Model, scores
from tests.serving.test_killed_followers import IDS, digest
from tritonemb.serving import Follower, ModelFollower

if sys.argv[2] == "server":  # a replica of tables, which a thread keeps up to date
    follower = Follower(sys.argv[1], poll=0.001)
    while True:
        with follower._serving:
            if follower.step is not None:
                print("state", follower.step, digest(follower.look_up({"a": IDS})["a"]), flush=True)
model = Model(sys.argv[2], seed=1)
follower = ModelFollower(model, sys.argv[1], poll=0.001)
while True:
    follower.apply()
    if follower.step is not None:
        print("state", follower.step, digest(scores(model)), flush=True)
"""


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


@contextmanager
def publishing(publish: Callable[[int], None]) -> Iterator[None]:
    """A thread that publishes step 2, 3, ... until the end, and leaves half of the time to others."""
    stop, errors = threading.Event(), []

    def work() -> None:
        step = 1
        try:
            while not stop.is_set():
                start = time.monotonic()
                publish(step := step + 1)
                stop.wait(time.monotonic() - start)
        except BaseException as error:
            errors.append(error)

    publish(1)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        assert not errors, errors


def kill_followers(folder: Path, kind: str, rounds: int, seed: int = 0) -> int:
    """Kill a follower's process so many times; return how many served states were compared."""
    (folder / "follow.py").write_text(PROGRAM)
    model, expected, draw, last, count = Model(kind), dict[int, str](), random.Random(seed), 0, 0
    publisher = Publisher(folder / "published", most=3)

    def publish(step: int) -> None:
        train(model, step)
        if kind == "server":  # all rows of the table, as evaluation reads them
            expected[step] = digest(model.state_dict()["tables.a.weight"][IDS])
        else:
            expected[step] = digest(scores(model))
        publisher.publish(model, step)

    with local_servers(2) if kind == "server" else nullcontext() as servers:
        if servers is not None:
            te.server.attach(model, servers, 0)
        with publishing(publish):
            for _ in range(rounds):
                program = Program(str(folder / "follow.py"), str(folder / "published"), kind)
                if draw.random() < 0.3:  # perhaps before it serves
                    threading.Timer(draw.random() * 0.5, program.process.kill).start()
                lines, left = [], draw.randrange(1, 12)
                while left and (line := program.output.readline()).endswith("\n"):  # else it was killed
                    lines.append(line)
                    if line.startswith("state "):  # not a warning
                        _, number, text = line.split()
                        assert last <= int(number), line  # never an older state, also after a restart
                        assert expected[int(number)] == text, line
                        last, count, left = int(number), count + 1, left - 1
                program.process.kill()
                status, text = program.finish()
                assert status == -signal.SIGKILL, [*lines, text]
    return count


def kill_scorers(folder: Path, rounds: int, seed: int = 0) -> int:
    """Kill `tritonemb serve --follow` so many times, while it scores; return how many answers were compared."""
    served, expected, draw, last, count = train_run(folder), dict[int, list[float]](), random.Random(seed), 0, 0
    trained, publisher = te.load_run(folder / "run"), Publisher(folder / "published", most=3)
    generator = torch.Generator().manual_seed(0)

    def publish(step: int) -> None:
        with torch.no_grad():
            for weight in trained.model.parameters():
                weight.mul_(
                    1 + 0.02 * torch.randn(len(weight), generator=generator).view(-1, *[1] * (weight.dim() - 1))
                )
        expected[step] = trained.predict(served.rows).tolist()
        publisher.publish(trained.model, step)

    with publishing(publish):
        for round_number in range(rounds):
            program = start_server(folder / "run", "--follow", str(folder / "published"))
            timer = threading.Timer(draw.random() * 2, program.process.kill)
            if round_number % 3 == 2:  # perhaps before it is ready
                timer.start()
            try:
                port = port_of(program)
                if round_number % 3 < 2:
                    timer.start()
                assert request(port, "GET", "/health")["step"] >= last, "it serves an older state than before"
                while True:
                    answer = scores_at(port, served.rows)
                    (step,) = (step for step, values in list(expected.items()) if values == answer)
                    assert step >= last, "it serves an older state than before"
                    last, count = step, count + 1
            except TimeoutError:
                raise
            except (EOFError, OSError, http.client.HTTPException) as error:  # it was killed
                timer.join()
                if program.finish()[0] != -signal.SIGKILL:
                    raise AssertionError("the server has ended by itself") from error
    return count


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kind", ["dynamic", "server"])
def test_a_follower_that_is_killed_at_any_time(kind, tmp_path):
    assert kill_followers(tmp_path, kind, rounds=3) > 3


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
def test_a_scorer_that_is_killed_at_any_time(tmp_path):
    pytest.importorskip("uvicorn")
    assert kill_scorers(tmp_path, rounds=3) > 3
