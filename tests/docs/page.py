"""Runs the blocks of one page of the documentation, one after the other, in one folder.

How each kind of block is proven:

python     Run, in the page's order and in one namespace; one with a title is written to a file of that name instead.
console    Each line that begins with `$ ` is run, and the lines below it must be in its output, in this order. Numbers
           in them may differ, `...` stands for anything. `tritonemb ...` must end with status 0, or with 2 where an
           expected line begins with "error: ". It runs in this process. `ls` runs as it is. `make` is proven by
           `make -n`: there is such a target. `torchrun` is run on CPUs with at most 2 processes, 4 with `--standalone`,
           whatever it is told of nodes and devices (`tests/docs/launch.py`). `pip install` must name tritonemb, or this
           folder, and extras that it has.
           `git clone` and `tensorboard` need what tests do not have, a network and a browser: `git clone` must be a
           whole command, `tensorboard` must name a folder that an earlier command has made.
toml       Loaded as a configuration; one with a title is written to a file of that name, for the blocks that follow.
bash       A batch script for Slurm: run, with stubs that start every node's task on this machine.
yaml       A TrainJob of Kubeflow: has fields that there are, and its command is run as torchrun's are.
json       Each line is an event of a run log: it must have the fields of that event, and no others.
text       By its title. "output": what the python block before it printed, compared as for console. "message": an error
           message; the source must have its words, `...` stands for values. The path of a source file: the lines must
           stand in it. Another path: a folder that earlier blocks have made, and what is in it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.docs import launch
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.docs.messages import is_in_source

_NUMBER = r"-?[0-9][0-9,.:]*(?:e[-+]?[0-9]+)?"


class Page:
    """The blocks of a page, and what those before have left for the next: names, output, files.

    Args:
        path: of the page.
        folder: with the sample data.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.blocks = blocks_of(path)
        self.folder = folder
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""

    def run(self, block: Block) -> None:
        """Prove one block, after those that it builds on.

        Raises:
            Exception: what the block raises, with its name in a note.
        """
        try:
            with _inside(self.folder):
                self._kind(block)(block)
        except BaseException as error:
            error.add_note(f"in the block {block.name}")
            raise

    def _kind(self, block: Block) -> Callable[[Block], None]:
        kinds = {
            "python": self._python,
            "console": self._console,
            "toml": self._toml,
            "json": self._json,
            "text": self._text,
            "bash": self._bash,
            "yaml": self._yaml,
        }
        if block.language not in kinds:
            raise AssertionError(
                f"{block.name}: {block.language!r} is none of {', '.join(kinds)}: say how it is proven"
            )
        return kinds[block.language]

    def _python(self, block: Block) -> None:
        if block.title:
            Path(block.title).write_text(block.text)
            return
        source = "\n" * block.line + block.text  # so that a traceback names the line of the page
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(source, str(block.page), "exec"), self._namespace)
        self._printed = printed.getvalue()

    def _console(self, block: Block) -> None:
        commands = commands_of(block)
        assert commands, f"{block.name}: there is no line that begins with '$ '"
        for command, expected in commands:
            output = run_command(command, any(line.startswith("error: ") for line in expected))
            check_output(f"{block.name}: {command}", expected, output)

    def _bash(self, block: Block) -> None:
        launch.sbatch(block.text)

    def _yaml(self, block: Block) -> None:
        yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'tritonemb[docs]'")
        launch.train_job(yaml.safe_load(block.text))

    def _toml(self, block: Block) -> None:
        from tritonemb.training.config import preset
        from tritonemb.training.toml import read_toml

        path = Path(block.title or "a.toml")
        path.write_text(block.text)
        read_toml(path, preset(tomllib.loads(block.text).get("data", "synthetic")))

    def _json(self, block: Block) -> None:
        from tritonemb.training import callbacks

        events = {
            "start": (callbacks.FitStart, {"event", "time"}),
            "log": (callbacks.Log, {"event"}),
            "evaluation": (callbacks.Evaluation, {"event"}),
            "checkpoint": (callbacks.CheckpointSaved, {"event"}),
            "end": (callbacks.FitEnd, {"event", "time"}),
        }
        for line in block.text.splitlines():
            event = json.loads(line)
            if event["event"] == "message":
                names = {"event", "step", "text"}
            else:
                kind, more = events[event["event"]]
                names = {field.name for field in dataclasses.fields(kind)} | more
            assert event.keys() == names, f"{block.name}: the fields of {event['event']!r} are {sorted(names)}"

    def _text(self, block: Block) -> None:
        lines = block.text.splitlines()
        if block.title == "output":
            check_output(block.name, lines, self._printed)
        elif block.title == "message":
            missing = [line for line in lines if not is_in_source(line.removeprefix("error: "))]
            assert not missing, f"{block.name}: the source has no such message: {missing}"
        elif block.title.endswith(".py"):
            source = [line.strip() for line in (ROOT / block.title).read_text().splitlines()]
            missing = [line for line in lines if line.strip() not in source]
            assert not missing, f"{block.name}: {block.title} has no such lines: {missing}"
        elif block.title:
            remote = [Path(block.title, line.split()[0]) for line in lines]
            missing = [str(path) for path in remote if not path.exists()]
            assert not missing, f"{block.name}: {missing} is not there"
        else:
            raise AssertionError(f"{block.name}: a text block needs a title, which says how it is proven")


def commands_of(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console block, and the lines below each. A backslash at the end joins lines."""
    commands: list[tuple[str, list[str]]] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            commands.append((line.removeprefix("$ "), []))
        elif line.strip():
            assert commands, f"{block.name}: {line!r} stands before the first command"
            commands[-1][1].append(line)
    return commands


def run_command(command: str, may_fail: bool) -> str:
    """What the command prints.

    Raises:
        AssertionError: it fails, or it is of a kind that cannot be proven.
    """
    output = ""
    for words in _parts(command):
        if words[0] == "tritonemb":
            output += _tritonemb(words[1:], may_fail)
        elif words[0] == "ls":
            output += subprocess.run(words, capture_output=True, text=True, check=True).stdout
        elif words[0] == "make":
            _check_make(words)
        elif words[0] == "torchrun":
            output += launch.torchrun(words[1:])
        elif words[0] == "cd":
            assert len(words) == 2, words
        elif words[:2] == ["pip", "install"]:
            _check_pip(words[2:])
        elif words[:2] == ["git", "clone"]:
            assert len(words) == 3, words
        elif words[0] == "tensorboard":
            assert words[1] == "--logdir", words
            assert Path(words[2]).is_dir(), words
        else:
            raise AssertionError(f"{command!r}: there is no rule how to prove {words[0]!r}")
    return output


def check_output(where: str, expected: list[str], output: str) -> None:
    """AssertionError unless the lines are in the output, in their order, whatever numbers they have."""
    lines = iter(output.splitlines())
    for required in expected:
        pattern = re.compile(_pattern(required))
        if required.strip() != "...":
            assert any(pattern.fullmatch(line.rstrip()) for line in lines), f"{where}\n{required!r} is not in\n{output}"


def _pattern(line: str) -> str:
    """Numbers match any number, MB matches GB, runs of blanks any such run, `...` anything."""
    parts = re.split(rf"({_NUMBER}|\.\.\.|\s+|\b[MG]B\b)", line.rstrip())
    kinds = {"...": ".*", "MB": "[MG]B", "GB": "[MG]B"}
    return "".join(
        kinds.get(part) or (r"\s+" if part.isspace() else _NUMBER if re.fullmatch(_NUMBER, part) else re.escape(part))
        for part in parts
        if part
    )


def _parts(command: str) -> list[list[str]]:
    """The words of the commands between `&&`, without a comment at the end. `<a placeholder>` is one word."""
    words = shlex.split(re.sub(r"<([^>]*)>", lambda result: f"'{result[0]}'", command), comments=True)
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "&&":
            parts.append([])
        else:
            parts[-1].append(word)
    assert all(parts), command
    return parts


def _tritonemb(words: list[str], may_fail: bool) -> str:
    from tritonemb.cli import main

    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            status = main(words)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    assert status == (2 if may_fail else 0), f"tritonemb {' '.join(words)}\nstatus {status}\n{output.getvalue()}"
    return output.getvalue()


def _check_make(words: list[str]) -> None:
    if shutil.which("make") is None:
        return
    # The set-up is not what is proven, and would be looked for in folders of this machine.
    quoted = [word.replace("<", "").replace(">", "") for word in words[1:]]
    done = subprocess.run(["make", "-n", *quoted], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [word for word in words if not word.startswith("-")]
    assert names, words
    for name in names:
        result = re.fullmatch(r"(?:tritonemb|\.)(?:\[([a-z,]+)\])?", name)
        assert result, f"pip install {name}: not this package"
        unknown = set((result[1] or "").split(",")) - {"", *extras}
        assert not unknown, f"pip install {name}: there is no extra {unknown}"


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    initial = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as it is for whoever types the blocks there
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(initial)
