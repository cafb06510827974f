"""Every block of code in README.md and docs/ is run; `tests/docs/page.py` says how each kind is proven.

The blocks of a page build on each other: a test runs those before its own, too, where they have not been run yet.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torchmetrics")
pytest.importorskip("rich")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("filelock")

import torch

from tests.docs import sample_data
from tests.docs.blocks import PAGES, blocks_of, name_of, outside_of_blocks
from tests.docs.launch import torchrun_options
from tests.docs.page import Page, check_output, commands_of

CASES = [(page, number) for page in PAGES for number in range(len(blocks_of(page)))]
# What a page is about, and the tests cannot do without.
NEEDS = {
    "docs/accelerate.md": "accelerate",
    "docs/from-torchrec.md": "torchrec",
    "docs/lightning.md": "lightning",
    "docs/offload.md": "safetensors",
    "docs/transformers.md": "transformers",
}
# Options of other commands than ours.
FOREIGN = {"--bytes", "--extra-index-url", "--list", "--logdir", "--ranks"}


def in_quick(page: Path, number: int) -> bool:
    """README's blocks that start no ranks."""
    return name_of(page) == "README.md" and "torchrun" not in blocks_of(page)[number].text


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    sample_data.make(folder)
    return folder


@pytest.fixture(scope="module")
def pages(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    found = {}
    for path in PAGES:
        folder = tmp_path_factory.mktemp("page") / "work"
        shutil.copytree(samples, folder)
        found[path] = Page(path, folder)
    return found


@pytest.mark.parametrize(
    ("page", "number"),
    [pytest.param(page, number, marks=() if in_quick(page, number) else pytest.mark.more) for page, number in CASES],
    ids=[blocks_of(page)[number].name for page, number in CASES],
)
def test_a_block_does_what_it_shows(pages, page, number):
    if name_of(page) in NEEDS:
        needed = NEEDS[name_of(page)]
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    torch.manual_seed(0)
    failed = pages[page].run(number)
    if failed is not None:
        pytest.skip(f"{failed.name} failed")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_that_the_text_names_exist(page, options):
    named = {
        (number, option)
        for number, line in outside_of_blocks(page)
        for code in re.findall(r"`([^`]+)`", line)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code)
    }
    unknown = sorted(
        (number, option) for number, option in named if option not in options | FOREIGN | torchrun_options()
    )
    assert not unknown, f"{name_of(page)}: no command has these (line, option): {unknown}"


@pytest.fixture(scope="module")
def options() -> set[str]:
    """The options of all commands."""
    import contextlib
    import io

    from tritonemb.cli import COMMANDS, main

    found = {"--help", "--help-all", "--version", "--preset", "--config", "--resume"}
    for command in COMMANDS:
        for flag in ("--help", "--help-all"):
            output = io.StringIO()
            to = contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)
            with to[0], to[1], contextlib.suppress(SystemExit):
                main([command, flag])
            found |= set(re.findall(r"--[a-z][a-z-]*", output.getvalue()))
    return found


def test_output_is_compared_by_its_words_and_not_by_its_numbers():
    check_output("here", ["loss 0.5", "...", "best  1:02"], "a\nloss 1,234.5\nmore\nbest 0:09\n")
    with pytest.raises(AssertionError):
        check_output("here", ["best 1", "loss 1"], "loss 1\nbest 1\n")
    with pytest.raises(AssertionError):
        check_output("here", ["los 1"], "loss 1\n")


def test_a_block_that_cannot_be_proven_fails(tmp_path):
    from tests.docs.blocks import ROOT, Block

    page = Page(PAGES[0], tmp_path)
    page.blocks = [
        Block(ROOT / "README.md", 1, "bash", "", "ls\n"),
        Block(ROOT / "README.md", 1, "text", "", "some output\n"),
        Block(ROOT / "README.md", 1, "text", "message", "a message that nobody ever wrote\n"),
        Block(ROOT / "README.md", 1, "console", "", "$ rm -r runs\n"),
        Block(ROOT / "README.md", 1, "console", "", "$ make no-such-target\n"),
        Block(ROOT / "README.md", 1, "console", "", "$ pip install 'tritonemb[no-such-extra]'\n"),
        Block(ROOT / "README.md", 1, "toml", "", "embeding_dim = 3\n"),
        Block(ROOT / "README.md", 1, "json", "", '{"event": "message", "text": "without its step"}\n'),
    ]
    for number, block in enumerate(page.blocks):
        page._failed = None
        with pytest.raises((AssertionError, ValueError)):
            page.run(number)
        assert page._failed is block


def test_a_command_is_joined_over_lines():
    from tests.docs.blocks import ROOT, Block

    block = Block(ROOT / "README.md", 1, "console", "", "$ ls \\\n    a\nb\n$ ls\n")
    assert commands_of(block) == [("ls      a", ["b"]), ("ls", [])]
