"""Every block of code in README.md and docs/ is run; `tests/docs/page.py` says how each kind is proven."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("rich")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("filelock")

import torch

from tests.docs import sample_data
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, name_of, outside_of_blocks
from tests.docs.launch import torchrun_options
from tests.docs.page import Page, check_output, commands_of
from tritonemb.cli import COMMANDS, main

README, *OTHERS = (page for page in PAGES if blocks_of(page))
# What a page is about, and the tests cannot do without.
NEEDS = {
    "docs/accelerate.md": "accelerate",
    "docs/from-torchrec.md": "torchrec",
    "docs/lightning.md": "lightning",
    "docs/migrate.md": "uvicorn",
    "docs/offload.md": "safetensors",
    "docs/retrieval.md": "faiss",
    "docs/serving.md": "uvicorn",
    "docs/tracking.md": "wandb mlflow optuna",
    "docs/transformers.md": "transformers",
}
# Options of other commands than ours.
FOREIGN = {"--again", "--bytes", "--extra-index-url", "--list", "--logdir", "--op", "--page", "--ranks"}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    sample_data.make(folder)
    return folder


@pytest.fixture
def open_page(samples: Path, tmp_path: Path) -> Callable[[Path], Page]:
    return lambda path: Page(path, shutil.copytree(samples, tmp_path / "work"))


def starts_ranks(block: Block) -> bool:
    return "torchrun" in block.text


def test_the_readmes_blocks_do_what_they_show(open_page):
    """But for those that start ranks, which are a test of their own."""
    page = open_page(README)
    for block in page.blocks:
        if not starts_ranks(block):
            page.run(block)


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_the_readmes_blocks_of_ranks_do_what_they_show(open_page):
    page = open_page(README)
    blocks = list(filter(starts_ranks, page.blocks))
    assert blocks
    for block in blocks:
        page.run(block)


@pytest.mark.more
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", OTHERS, ids=name_of)
def test_the_blocks_of_a_page_do_what_they_show(path, open_page):
    """They build on each other, so the first that fails ends the test."""
    for needed in NEEDS.get(name_of(path), "").split():
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    page = open_page(path)
    for block in page.blocks:
        torch.manual_seed(0)
        page.run(block)


def test_options_that_the_text_names_exist():
    named = {
        (f"{name_of(page)}:{number}", option)
        for page in PAGES
        for number, line in outside_of_blocks(page)
        for code in re.findall(r"`([^`]+)`", line)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code)
    }
    known = options_of_commands() | FOREIGN | torchrun_options()
    assert len(named) > 100
    unknown = sorted((line, option) for line, option in named if option not in known)
    assert not unknown, f"no command has these options: {unknown}"


def options_of_commands() -> set[str]:
    result = {"--help", "--help-all", "--version", "--preset", "--config", "--resume"}
    for command in COMMANDS:
        for flag in ("--help", "--help-all"):
            output = io.StringIO()
            to = contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)
            with to[0], to[1], contextlib.suppress(SystemExit):
                main([command, flag])
            result |= set(re.findall(r"--[a-z][a-z-]*", output.getvalue()))
    return result


def test_output_is_compared_by_its_words_and_not_by_its_numbers():
    check_output("here", ["loss 0.5", "...", "best  1:02"], "a\nloss 1,234.5\nmore\nbest 0:09\n")
    with pytest.raises(AssertionError):
        check_output("here", ["best 1", "loss 1"], "loss 1\nbest 1\n")
    with pytest.raises(AssertionError):
        check_output("here", ["los 1"], "loss 1\n")


@pytest.mark.parametrize(
    ("language", "title", "text"),
    [
        ("bash", "", "ls\n"),
        ("text", "", "some output\n"),
        ("text", "message", "a message that nobody ever wrote\n"),
        ("console", "", "$ rm -r runs\n"),
        ("console", "", "$ make no-such-target\n"),
        ("console", "", "$ pip install 'tritonemb[no-such-extra]'\n"),
        ("toml", "", "embeding_dim = 3\n"),
        ("json", "", '{"event": "message", "text": "without its step"}\n'),
    ],
)
def test_a_block_that_cannot_be_proven_fails(language, title, text, tmp_path):
    block = Block(ROOT / "README.md", 1, language, title, text)
    with pytest.raises((AssertionError, ValueError)) as failure:
        Page(README, tmp_path).run(block)
    assert failure.value.__notes__ == ["in the block README.md:1"]


def test_a_command_is_joined_over_lines():
    block = Block(ROOT / "README.md", 1, "console", "", "$ ls \\\n    a\nb\n$ ls\n")
    assert commands_of(block) == [("ls      a", ["b"]), ("ls", [])]
