"""Jobs that torchrun starts: ranks that are killed, stopped, or asked to end."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("psutil")
pytest.importorskip("pyarrow")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")

import psutil

from tests.programs import start_ranks
from tests.training.kills import write_log
from tests.training.test_kill import assert_same_run, losses
from tritonemb.training.callbacks.jsonl import read_run_log
from tritonemb.training.checkpoint import CheckpointFolder

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a platform without SIGKILL"),
    pytest.mark.usefixtures("ranks"),
]
LAST_STEP = 60
OPTIONS = (
    "--batch-size 64 --epochs 9 --shuffle-rows 500 --num-embeddings 500 --validation-share 0.1 --embedding-dim 8 "
    "--bottom-mlp 8 --top-mlp 16 --log-every 5 --checkpoint-steps 3 --keep 2 --dense-warmup-steps 20 "
    f"--dense-decay cosine --max-steps {LAST_STEP} --evaluate-every 20"
).split()


def words_of(data: Path, folder: Path) -> list[str]:
    return ["tritonemb", "train", "--data", str(data), *OPTIONS, "--out", str(folder), "--resume", "auto"]


class Job:
    """torchrun with ranks that train in a folder; what they print is kept.

    Args:
        options: more of those of `tritonemb train`.
    """

    def __init__(self, data: Path, folder: Path, ranks: int = 2, restarts: int = 0, options: str = "") -> None:
        self.folder = folder
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", str(restarts)]
        command += ["-m", *words_of(data, folder), *options.split()]
        quiet = os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=quiet, text=True)
        self._lines: list[str] = []
        self._printed, self._ended = threading.Condition(), False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in itertools.chain(self.process.stdout, [""]):  # an empty one behind the last
            with self._printed:
                self._lines.append(line)
                self._ended = not line
                self._printed.notify_all()

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def workers(self) -> dict[int, psutil.Process]:
        """The processes that train, by rank."""
        actual = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "tritonemb" in child.cmdline():
                    actual[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):  # it has just begun, or has just ended
                continue
        return actual

    def wait_for_checkpoint(self, step: int = 0) -> dict[int, psutil.Process]:
        """The processes, once they have saved that step or a later one."""
        checkpoints = CheckpointFolder(self.folder / "checkpoints")
        with self._printed:  # rank 0 prints a line when it has saved
            while max(checkpoints.steps(), default=-1) < step:
                assert not self._ended, self.output
                assert self._printed.wait(240.0), self.output
        return self.workers()

    def finish(self, timeout: float = 240.0) -> int:
        """The exit status of torchrun; nothing that it has started is left."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        status = self.process.wait(timeout)
        self._reader.join(60.0)
        _, alive = psutil.wait_procs(children, timeout=60.0)
        assert not alive, alive
        return status

    def end(self) -> None:
        """Whatever has become of it."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(data, tmp_path):
    jobs: list[Job] = []

    def started(folder: Path = tmp_path, **options) -> Job:
        jobs.append(Job(data, folder, **options))
        return jobs[-1]

    yield started
    for job in jobs:
        job.end()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_log(tmp_path_factory.mktemp("data") / "train.txt", 2_000)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    """What ranks that torchrun has not started have saved."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for rank in start_ranks(2, *words_of(data, folder)):
        status, text = rank.finish()
        assert status == 0, text
    return folder


@pytest.mark.parametrize("options", ["", pytest.param("--checkpoint-async", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
@pytest.mark.more
def test_a_rank_that_is_killed_changes_nothing(start, undisturbed, tmp_path, kills, options):
    chance = random.Random(kills)
    job, step = start(restarts=kills, options=options), 0
    for _ in range(kills):
        workers = job.wait_for_checkpoint(step + 3 * chance.randint(1, 2))
        step = max(CheckpointFolder(tmp_path / "checkpoints").steps())
        if step < LAST_STEP - 3:
            workers[chance.randrange(2)].kill()
            gone, _ = psutil.wait_procs(workers.values(), timeout=60.0)
            assert len(gone) == 2
    assert job.finish() == 0, job.output
    assert_same_run(tmp_path, undisturbed, LAST_STEP)
    starts = [event for event in read_run_log(tmp_path / "log.jsonl") if event["event"] == "start"]
    assert len(starts) > 1
    assert starts[-1]["first_step"] > 0


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_the_ranks_end_with_a_torchrun_that_is_killed_before_they_train(start):
    job, workers = start(), {}

    def imports_torch(rank: psutil.Process) -> bool:
        return any("libtorch_python" in mapping.path for mapping in rank.memory_maps())

    while len(workers) < 2 or not all(map(imports_torch, workers.values())):
        assert job.process.poll() is None, job.output
        time.sleep(0.01)
        workers = job.workers()
    assert not (job.folder / "checkpoints").exists()
    job.process.kill()
    _, alive = psutil.wait_procs(workers.values(), timeout=60.0)
    for rank in alive:
        rank.kill()
    assert not alive, alive


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(start, undisturbed, tmp_path, ranks):
    """Any number of ranks resumes the run; as many as before to the same bits."""
    job = start()
    job.wait_for_checkpoint(15)[1].send_signal(signal.SIGTERM)
    assert job.finish() != 0
    assert job.output.count("training was interrupted by SIGTERM; resume with --resume auto") == 2
    end = read_run_log(tmp_path / "log.jsonl")[-1]
    assert (end["event"], end["reason"]) == ("end", "SIGTERM")
    assert end["step"] == CheckpointFolder(tmp_path / "checkpoints").steps()[-1] < LAST_STEP
    again = start(ranks=ranks, options="" if ranks == 2 else "--num-workers 2")
    assert again.finish() == 0, again.output
    if ranks == 2:
        assert_same_run(tmp_path, undisturbed, LAST_STEP)
    assert [step for step, _ in losses(tmp_path)] == list(range(5, LAST_STEP + 1, 5))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_is_stopped_ends_the_others_in_time(start, tmp_path):
    job = start(options="--timeout 10")
    workers = job.wait_for_checkpoint(3)
    workers[1].suspend()
    assert workers[0].wait(240) != 0
    assert job.finish() != 0  # torchrun ends the stopped rank
    line = next(line for line in job.output.splitlines() if "error: rank" in line)
    assert "error: rank 1 has exited, or has not answered at step " in line
