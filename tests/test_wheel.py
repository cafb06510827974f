"""A wheel in an empty environment, as a user has it: README's blocks and commands and the story of docs/serving.md run,
with nothing of this folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import pytest

from tests.docs import sample_data
from tests.docs.blocks import ROOT, Block, blocks_of

pytestmark = [pytest.mark.more, pytest.mark.timeout(1800)]

# Runs blocks of Python in one namespace, and commands, in their order: [language, text] each, from standard input.
DRIVER = """
import json, pathlib, subprocess, sys
names = {"__name__": "__main__"}
for language, text in json.load(sys.stdin):
    if language == "python":
        exec(compile(text, "README.md", "exec"), names)
    else:
        command = json.loads(text)
        subprocess.run([str(pathlib.Path(sys.executable).with_name(command[0])), *command[1:]], check=True)
import tritonemb
print("ran with", tritonemb.__file__)
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(blocks: Iterable[Block]) -> list[tuple[str, str]]:
    """Blocks of Python, and calls of `tritonemb` in one process."""
    steps = list[tuple[str, str]]()
    for block in blocks:
        if block.language == "python" and not block.title:
            steps.append(("python", block.text))
        lines = block.text.replace("\\\n", " ").splitlines() if block.language == "console" else []
        steps += [
            ("console", json.dumps(shlex.split(line[2:], comments=True)))
            for line in lines
            if line.startswith("$ tritonemb ")
        ]
    return steps


def test_a_wheel_in_an_empty_environment_does_what_the_docs_say(tmp_path):
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python, work = tmp_path / "venv" / "bin" / "python", tmp_path / "work"
    (torch,) = re.findall(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for package in (torch, f"{wheel}[train,serve]"):  # torch alone first: the index may offer builds of several sizes
        run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", package)
    run(python, "-m", "pip", "check")
    work.mkdir()
    sample_data.make(work)
    story = takewhile(lambda block: "torch.export" not in block.text, blocks_of(ROOT / "docs/serving.md"))
    steps = steps_of([*blocks_of(ROOT / "README.md"), *story])
    assert {language for language, _ in steps} == {"python", "console"}
    assert all(any(words in text for _, text in steps) for words in ("load_run", "--follow published", "candidates"))
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    output = run(python, "-c", DRIVER, cwd=work, input=json.dumps(steps), env=environment, timeout=1200)
    assert f"ran with {tmp_path / 'venv'}" in output
    assert Path(work, "scores.parquet").exists()
