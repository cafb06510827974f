"""The pages of the documentation, and the fenced blocks in them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)(?P<rest>.*)$")
_TITLE = re.compile(r'title="([^"]*)"')


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        page: the file.
        line: of the fence, from 1.
        language: what stands behind the fence's backquotes; "" for nothing.
        title: of `title="..."`, "" if there is none.
        text: without the indentation of the fence; ends with a line feed.
    """

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def name(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page.

    Raises:
        ValueError: the last one has no end.
    """
    blocks, lines = [], page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence:
            first = number
            number += 1
            while number < len(lines) and lines[number].strip() != "```":
                number += 1
            if number == len(lines):
                raise ValueError(f"{name_of(page)}, line {first + 1}: this block has no end")
            text = textwrap.dedent("".join(f"{line}\n" for line in lines[first + 1 : number]))
            title = _TITLE.search(fence["rest"])
            blocks.append(Block(page, first + 1, fence["language"], title[1] if title else "", text))
        number += 1
    return blocks


def outside_of_blocks(page: Path) -> list[tuple[int, str]]:
    """Number and text of the lines that stand in no block."""
    inside, lines = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            lines.append((number, line))
    return lines
