"""The page on the architecture shows all packages; its walks name files and functions that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.blocks import ROOT

LIBRARY = ROOT / "tritonemb"
PAGE = (ROOT / "docs/architecture.md").read_text()
HOPS = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names_in(path: str) -> set[str]:
    """Classes, functions, methods as `Class.method`, variables and imports of a file: ops import kernels."""
    names: set[str] = set()
    for node in ast.parse((LIBRARY / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        else:
            stored = (child for child in ast.walk(node) if isinstance(child, ast.Name))
            names |= {name.id for name in stored if isinstance(name.ctx, ast.Store)}
        if isinstance(node, ast.ClassDef):
            methods = [child.name for child in node.body if isinstance(child, ast.FunctionDef)]
            names |= {*methods, *(f"{node.name}.{method}" for method in methods)}
    return names


@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: f"{hop[0]}-{hop[1]}")
def test_a_hop_names_functions_of_its_files(hop):
    names = set().union(*map(names_in, quoted(hop[1])))
    assert quoted(hop[2])
    assert set(quoted(hop[2])) <= names


def test_the_page_has_four_walks():
    assert [hop[0] for hop in HOPS].count("| 1") == 4


def test_every_package_and_module_is_in_the_picture():
    picture = PAGE.split("## Layers")[1].split("\n| package |")[0]
    packages = {path.parent.name for path in LIBRARY.rglob("*/__init__.py")}
    modules = {path.stem for path in LIBRARY.glob("*.py")} - {"__init__", "__main__"}
    assert packages | modules <= set(re.findall(r"\w+", picture))
