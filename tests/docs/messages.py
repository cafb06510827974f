"""Whether the source still has a message that the documentation quotes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.docs.blocks import ROOT

HOLE = "\0"  # stands for a value in a message
SHORTEST = 15  # characters, besides its dots, of a quotation that may leave out a message's beginning or end


def is_in_source(quoted: str) -> bool:
    """Whether a text of the source, no docstring, has these words; `...` in the quotation stands for anything.

    A short quotation must be the whole text, with `...` for each of its values.
    """
    parts = [part.strip() for part in quoted.split("...")]
    if sum(map(len, parts)) < SHORTEST:
        return any([part.strip() for part in re.split(f"{HOLE}+", text)] == parts for text in _texts())
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
    result = set()
    for path in sorted((ROOT / "tritonemb").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        result.update(text for node in nodes if id(node) not in docstrings for text in _text(node) if text)
    return frozenset(result)


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(next(_text(part), HOLE) for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield next(_text(node.left), HOLE) + next(_text(node.right), HOLE)
