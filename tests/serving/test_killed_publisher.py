"""Publishers that are killed at any time: a follower serves a state that was published as a whole."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from tests.programs import Program
from tests.serving.models import Model, scores, train
from tritonemb.serving import ModelFollower

PROGRAM = """
import sys
from pathlib import Path
from tests.serving.models import Model, train
from tritonemb.serving import Publisher

model, publisher = Model("dynamic"), Publisher(Path(sys.argv[1]), most=3)
for step in range(1, 60):
    train(model, step)
    if step > int(sys.argv[2]):
        publisher.publish(model, step, wait=step % 2 == 0)
        print(step, flush=True)
"""


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
def test_a_publisher_that_is_killed_at_any_time(tmp_path: Path) -> None:
    (tmp_path / "publish.py").write_text(PROGRAM)
    expected, model, draw = {0: None}, Model("dynamic"), random.Random(0)
    for step in range(1, 60):
        train(model, step)
        expected[step] = scores(model)
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
