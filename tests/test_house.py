"""Ceilings of the library's structure, on a made-up repository with a violation for each figure."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools import house

FILES = {
    "tritonemb/a.py": '"""Of a."""\n\nimport tritonemb.b\n\nx = [1,2]  # fmt: skip\n_found = x.rest\n',
    "tritonemb/b.py": "def load(size):\n    from tritonemb.a import x\n\n    return x[:size]\n",
    "tritonemb/kernels/cpu/sums.py": "def kernel(a, b, c, d, e, f, g, h): ...\n",
    "tritonemb/tables/long.py": "class Long:\n" + "    x = 1\n" * 300 + "\n" * 200,
    "tritonemb/tables/rows.py": "def f(self, a, b, c, d, e, f, *, g): ...\ndef put(a, b, c, d, e, f, g, *, h): ...\n",
    "tritonemb/sharding/planner/search.py": "# A plan that\n# Nobody reads; there is no other.\n",
    "benchmarks/a.py": "from b import rest\nfound = rest\nsize = 1\n",
    "README.md": "There is no table.\n",
    "docs/api/a.md": "A list is\nno table.\n",
    "tools/a.py": "# so\n# many rows; also many\n",
    "tools/words.toml": """
names = ["found", "rest"]
openings = ["Of"]
phrases = ["nobody", "so many", "is no"]
allowed_phrases = ["there is no"]
""",
}
PLACES = {
    "arguments.kernels": ["tritonemb/kernels/cpu/sums.py:1 kernel: 8 arguments"],
    "arguments.library": ["tritonemb/tables/rows.py:2 put: 8 arguments"],
    "docstring_openings": ["tritonemb/a.py:1 Of"],
    "files.tables": ["tritonemb/tables/long.py", "tritonemb/tables/rows.py"],
    "fmt_comments": ["tritonemb/a.py:5"],
    "import_cycles": ["tritonemb.a imports tritonemb.b", "tritonemb.b imports tritonemb.a"],
    "lines.kernels.cpu": ["tritonemb/kernels/cpu/sums.py: 1"],
    "lines.root": ["tritonemb/a.py: 4", "tritonemb/b.py: 3"],
    "large_classes": ["tritonemb/tables/long.py:1 Long: 301 lines"],
    "long_classes": ["tritonemb/tables/long.py:1 Long: 301 lines"],
    "long_files": ["tritonemb/tables/long.py: 501 lines"],
    "phrases.docs": ["docs/api/a.md:1 is no"],
    "phrases.library": ["tritonemb/sharding/planner/search.py:2 nobody"],
    "phrases.tools": ["tools/a.py:1 so many"],
    "vague_names": ["tritonemb/a.py:6 _found", "tritonemb/a.py:6 rest"],
    "vague_names.tests": ["benchmarks/a.py:2 found"],
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose ceilings equal its figures."""
    monkeypatch.delenv("CI", raising=False)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert run(tmp_path, "--write") == 0
    return tmp_path


def run(root: Path, *options: str) -> int:
    return house.main(["--root", str(root), *options])


def set_ceiling(root: Path, name: str, value: float | None) -> None:
    """Change a ceiling, or remove its line."""
    path = root / "tools" / "ceilings.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f'"{name}" =')]
    path.write_text("\n".join([*lines, "" if value is None else f'"{name}" = {value}', ""]))


def ceilings(root: Path) -> dict[str, float]:
    return tomllib.loads((root / "tools" / "ceilings.toml").read_text())


def test_places(root: Path) -> None:
    figures = house.measure(root)
    assert {name: figures[name].places for name in PLACES} == PLACES


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "--list", "vague_names") == 0
    assert capsys.readouterr().out.splitlines() == PLACES["vague_names"]


def test_values(root: Path) -> None:
    expected = {"lines.total": 311, "statements": 314, "files.total": 6, "files.root": 2}
    expected["vague_names"] = 6.1  # 2 of 330 names
    assert {name: ceilings(root)[name] for name in expected} == expected


def test_figures_at_their_ceilings_pass(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "--check") == 0
    assert capsys.readouterr().out == ""


def test_figures_above_their_ceilings_fail(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = ceilings(root)
    for name in PLACES:
        set_ceiling(root, name, round(values[name] - 0.1, 1))
    set_ceiling(root, "lines.comm", 10_000)
    low = ceilings(root)
    assert run(root, "--check") == 1
    output = capsys.readouterr().out
    for name in PLACES:
        assert f"{name} is {values[name]}, above its ceiling of {low[name]}\n" in output
        assert f"--list {name}\n" in output
    assert ceilings(root) == low  # none is lowered while a figure is too high


def test_figure_without_a_ceiling_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_ceiling(root, "files.tables", None)
    assert run(root, "--check") == 1
    assert "files.tables is 2, above its ceiling of 0" in capsys.readouterr().out


def test_ceilings_are_lowered(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ceilings(root)
    set_ceiling(root, "vague_names", expected["vague_names"] + 0.1)
    set_ceiling(root, "lines.removed_package", 7)
    assert run(root, "--check") == 0
    assert capsys.readouterr().out.startswith("Lowered the ceilings of vague_names, lines.removed_package;")
    assert ceilings(root) == expected


def test_ci_writes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CI", "true")
    set_ceiling(root, "fmt_comments", 5)
    assert run(root, "--check") == 0
    assert capsys.readouterr().out.endswith("lowers the ceilings of fmt_comments\n")
    assert ceilings(root)["fmt_comments"] == 5


def test_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_ceiling(root, "lines.total", 10_000)
    assert run(root) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lines.total", "311", "10,000"] in rows


def test_unknown_figure(root: Path) -> None:
    with pytest.raises(SystemExit):
        run(root, "--list", "lines.unknown")
