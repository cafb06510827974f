"""The first minutes on a GPU machine, without one: stages that pass, die, hang or come too late, and a rehearsal."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.gpu import archives, checks, first, processes
from tests.gpu.first import LINES, WIDTH, Stage, run_stages
from tests.gpu.processes import CRASHED, FAILED, NOT_RUN, PASSED, TIMED_OUT
from tests.gpu.slim_fbgemm import ENTRY, HEADER, MAGIC, clear_other_code

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fast_endings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ENDINGS", ((signal.SIGKILL, 10.0),))


def stage(name: str, code: str, share: float = 0.1, lines: int = 1) -> Stage:
    return Stage(name, share, ["-c", code], lines)


def test_every_stage_ends_in_its_way_and_the_archive_has_those_before(tmp_path):
    archive = tmp_path / "first.tgz"
    look = f"import tarfile; print('seen', *sorted(tarfile.open({str(archive)!r}).getnames()))"
    todo = [
        stage("fine", "print('passed one'); print('two')"),
        stage("hangs", "import time; print('begins', flush=True); time.sleep(100)", share=0.01),
        stage("dies", "import os; os.abort()"),
        stage("fails", look + "; raise SystemExit(3)"),
        stage("late", "print('ran')", share=3.0),
        stage("last", "print('told {seconds}')", share=0.01),
    ]
    results = run_stages(todo, tmp_path / "out", archive, seconds=100)
    assert {name: result["status"] for name, result in results.items()} == {
        "fine": PASSED, "hangs": TIMED_OUT, "dies": CRASHED, "fails": FAILED, "late": NOT_RUN, "last": PASSED
    }  # fmt: skip
    assert results["fine"]["lines"] == ["two"]
    assert results["hangs"]["lines"] == ["begins"]
    seen = results["fails"]["lines"][0]
    assert {"out/fine.log", "out/hangs.log", "out/dies.log", "out/results.json"} <= set(seen.split())
    assert int(results["last"]["lines"][0].removeprefix("told ")) > 50  # what the others left
    with tarfile.open(archive) as tar:
        assert json.load(tar.extractfile("out/results.json")) == results


def test_what_has_passed_is_not_run_again(tmp_path):
    def run(code: str) -> dict[str, str]:
        todo = [stage("good", f"print('{code}')"), stage("bad", code)]
        results = run_stages(todo, tmp_path / "out", tmp_path / "first.tgz", seconds=100)
        return {name: (result["status"], result["lines"]) for name, result in results.items()}

    assert run("raise SystemExit(1)")["bad"] == (FAILED, [])
    assert run("pass") == {"good": (PASSED, ["raise SystemExit(1)"]), "bad": (PASSED, [])}


def test_without_a_device_no_other_stage_runs(tmp_path):
    todo = [stage("device", "raise SystemExit('no device')"), stage("other", "pass")]
    results = run_stages(todo, tmp_path / "out", tmp_path / "first.tgz", seconds=100)
    assert list(results) == ["device"]
    assert results["device"]["lines"] == ["no device"]


@pytest.mark.parametrize("rehearse", [False, True])
def test_the_stages_fit_the_time_and_the_table(rehearse, tmp_path):
    stages = first.stages(tmp_path, 8, rehearse, left=False)
    assert sum(stage.share for stage in stages) <= 1
    assert sum(1 + stage.lines for stage in stages) + 2 <= LINES
    assert stages[-1].name == "suite"


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "OUT")}
    command = ["make", "-C", str(ROOT), f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True)


@pytest.mark.timeout(900)
def test_a_rehearsal_runs_every_stage_behind_the_stub(tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    arguments = f"--rehearse --out {tmp_path / 'out'}"
    done = make("gpu-first", "GPU_JOBS=2", f"ARGS={arguments}", OUT=str(tmp_path / "kept"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results) == ["device", "smoke", "ahead", "speed", "host", "compiled", "suite"]
    assert {result["status"] for result in results.values()} == {PASSED}
    table = done.stdout.split("\n\n")[-1].splitlines()
    assert len(table) <= LINES
    assert [line.split()[-1] for line in table if line.startswith(PASSED)] == list(results)
    tests = json.loads((tmp_path / "out" / "smoke" / "results.json").read_text())["tests/gpu/test_smoke.py"]
    assert tests["counts"][PASSED] == len(checks.LAUNCHES)
    named = [f"test_a_compiled_dlrm_takes_the_steps_of_an_eager_one[{mode}]" for mode in checks.COMPILED]
    assert results["compiled"]["lines"][-1] == f"not rehearsed, without a GPU: {' '.join(named)}"[:WIDTH]
    assert "1000 tables: " in (tmp_path / "out" / "host.log").read_text()
    with tarfile.open(tmp_path / "kept" / "first.tgz") as tar:
        assert "out/speed.log" in tar.getnames()


@pytest.mark.parametrize("target", ["gpu", "gpu-smoke"])
def test_targets_do_not_share_the_machines_folder(target, tmp_path):
    command = make("-n", target, OUT=str(tmp_path)).stdout
    assert f"--out build/{target} " in command


def test_archives_leave_sources_out_and_are_weighed(tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "key"
    cache.mkdir(parents=True)
    for name in ("kernel.cubin", "kernel.source", "part.log"):
        (cache / name).write_bytes(os.urandom(1000))
    first.pack(tmp_path / "cache", tmp_path / "cache.tar.xz", "w:xz", archives.BESIDE)
    with tarfile.open(tmp_path / "cache.tar.xz") as tar:
        assert [member.name for member in tar if member.isfile()] == ["cache/key/kernel.cubin"]
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    Path(".gitignore").write_text("cache*\n")
    Path("weighed").write_bytes(bytes(100))
    assert archives.tree_bytes() == 100 + len("cache*\n")


def test_machine_code_of_other_architectures_is_cleared(tmp_path):
    def entry(kind: int, target: int, payload: bytes) -> bytes:
        return ENTRY.pack(kind, 257, 64, len(payload), target).ljust(64, b"\1") + payload

    payloads = {(2, 80): b"old" * 20, (2, 90): b"right" * 20, (1, 90): b"ptx" * 20}
    entries = b"".join(entry(*key, payload) for key, payload in payloads.items())
    library = tmp_path / "library.so"
    fat = HEADER.pack(struct.unpack("<I", MAGIC)[0], 1, 16, len(entries)) + entries
    library.write_bytes(b"host code" + MAGIC + b"happens to be here" + fat + b"more")
    assert clear_other_code(library, 90) == (100, 120)
    actual = library.read_bytes()
    expected = b"".join(entry(*key, p if key == (2, 90) else bytes(len(p))) for key, p in payloads.items())
    assert actual == b"host code" + MAGIC + b"happens to be here" + fat[:16] + expected + b"more"
