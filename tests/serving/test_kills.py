"""Followers, scorers and publishers that are killed at any time: what is served are states that were published."""

from __future__ import annotations

import hashlib
import http.client
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

import tritonemb as te
from tests.programs import Program
from tests.server.jobs import local_servers
from tests.serving.models import Model, scores, train
from tests.serving.scorers import port_of, request, scores_at, start_server, train_run
from tritonemb.serving import ModelFollower, Publisher

IDS = torch.arange(300)
PROGRAM = """
import sys
from tests.serving.models import Model, scores
from tests.serving.test_kills import IDS, digest
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


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kind", ["dynamic", "server"])
def test_a_follower_that_is_killed_at_any_time(kind, tmp_path):
    (tmp_path / "follow.py").write_text(PROGRAM)
    model, expected, draw, last, count = Model(kind), dict[int, str](), random.Random(0), 0, 0
    publisher = Publisher(tmp_path / "published", most=3)

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
            for _ in range(3):
                program = Program(str(tmp_path / "follow.py"), str(tmp_path / "published"), kind)
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
    assert count > 3


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
def test_a_scorer_that_is_killed_at_any_time(tmp_path):
    pytest.importorskip("uvicorn")
    served, expected, draw, last, count = train_run(tmp_path), dict[int, list[float]](), random.Random(0), 0, 0
    trained, publisher = te.load_run(tmp_path / "run"), Publisher(tmp_path / "published", most=3)

    def publish(step: int) -> None:
        for weight in trained.model.parameters():
            weight.data.mul_(1 + 0.02 * torch.randn(len(weight)).view(-1, *[1] * (weight.dim() - 1)))
        expected[step] = trained.predict(served.rows).tolist()
        publisher.publish(trained.model, step)

    with publishing(publish):
        for is_ready in (True, False):
            program = start_server(tmp_path / "run", "--follow", str(tmp_path / "published"))
            timer = threading.Timer(draw.random(), program.process.kill)
            try:
                if not is_ready:  # killed while it loads, perhaps
                    timer.start()
                port = port_of(program)
                assert request(port, "GET", "/health")["step"] >= last
                while True:
                    result = scores_at(port, served.rows)
                    (step,) = (step for step, values in list(expected.items()) if values == result)
                    assert step >= last  # also after a restart
                    last, count = step, count + 1
                    if count == 4:
                        timer.start()
            except (EOFError, ConnectionError, http.client.HTTPException):
                timer.join()
                assert program.finish()[0] == -signal.SIGKILL
            finally:
                program.process.kill()
    assert count > 3


PUBLISH = """
import sys
from tests.serving.models import Model, train
from tritonemb.serving import Publisher

model, publisher = Model("dynamic"), Publisher(sys.argv[1], most=3)
for step in range(1, 60):
    train(model, step)
    if step > int(sys.argv[2]):
        publisher.publish(model, step, wait=step % 2 == 0)
        print(step, flush=True)
"""


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
def test_a_publisher_that_is_killed_at_any_time(tmp_path):
    (tmp_path / "publish.py").write_text(PUBLISH)
    expected, model, draw = [None], Model("dynamic"), random.Random(0)
    for step in range(1, 60):
        train(model, step)
        expected.append(scores(model))
    served = Model("dynamic", seed=1)
    follower = ModelFollower(served, tmp_path / "published", poll=None)
    for _ in range(6):
        program = Program(str(tmp_path / "publish.py"), str(tmp_path / "published"), str(follower.step or 0))
        for _ in range(draw.randrange(1, 5)):
            assert program.output.readline().strip().isdecimal()
        time.sleep(draw.random() * 0.02)  # so that it is killed at another point of a publication
        program.process.kill()
        program.finish()
        previous = follower.step or 0
        assert follower.refresh(), follower.problem
        follower.apply()
        assert follower.problem is None
        assert follower.step > previous
        assert torch.equal(scores(served), expected[follower.step])
