"""Whether the source still has a message that the documentation quotes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.docs.blocks import ROOT

HOLE = "\0"  # stands for a value in a message
SHORTEST = 15  # characters that a quotation must have besides its dots


def is_in_source(quoted: str) -> bool:
    """Whether one text of the source has these words; `...` in the quotation stands for anything.

    Raises:
        ValueError: the quotation is too short to say anything.
    """
    parts = [part.strip() for part in quoted.split("...")]
    if sum(map(len, parts)) < SHORTEST:
        raise ValueError(f"{quoted!r}: quote at least {SHORTEST} characters of the message")
    return any(_has(text, parts) for text in _texts())


def _has(text: str, parts: list[str]) -> bool:
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


@cache
def _texts() -> frozenset[str]:
    """Every text in the source, with holes where values are put in."""
    found = set()
    for path in sorted((ROOT / "tritonemb").rglob("*.py")):
        found.update(text for node in ast.walk(ast.parse(path.read_text())) for text in _text(node) if text)
    return frozenset(found)


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(next(_text(part), HOLE) for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield next(_text(node.left), HOLE) + next(_text(node.right), HOLE)
