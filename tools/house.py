"""Ceilings of the library's structure. `python tools/house.py [--check | --list FIGURE | --write]`

Prints each figure and its ceiling, the figure's value in `tools/ceilings.toml`. `--check` fails if a figure is above
its ceiling; if none is, it lowers the ceilings that are above their figures, except where the variable CI is set.
`--write` sets every ceiling to its figure.

- arguments: functions with 8 or more arguments, methods and nested functions included. Positional and keyword arguments
  count; `self`, `cls`, `*args` and `**kwargs` do not. `arguments.kernels` has all functions of `kernels/`, where a
  pointer, a size and a stride are an argument each.
- docstring_openings: docstrings whose first word is one of `openings` in `tools/words.toml`.
- files, lines: of each package, lines without blank and comment lines; `root` has the modules outside packages,
  `kernels` is without `kernels.cpu`, and `sharding` without `sharding.planner`.
- fmt_comments: `# fmt: skip` and `# fmt: off`.
- import_cycles: modules that are in a cycle. Imports in functions and under TYPE_CHECKING count. An edge goes to the
  module that is named, be it a package's `__init__`, but not to the packages above it.
- large_classes, long_classes, long_files: over 200 lines, over 300 lines, over 450 lines, blank lines and comments
  included.
- phrases: `phrases` of `tools/words.toml` in names and text of the library, of `tools/*.py`, and of `docs/` and
  `README.md`.
- statements: all, docstrings included.
- vague_names: variables, attributes and parameters that are `names` of `tools/words.toml`, leading underscores aside,
  per 1,000 of all; each occurrence counts. `vague_names.tests` has those of tests, benchmarks and tools; names that a
  file imports, such as Hypothesis' `given`, do not count.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tritonemb"
CEILINGS, WORDS = "tools/ceilings.toml", "tools/words.toml"
SUBPACKAGES = ("kernels/cpu", "sharding/planner")  # with figures of their own
MAX_ARGUMENTS, MAX_FILE_LINES = 7, 450
MAX_CLASS_LINES = {"large_classes": 200, "long_classes": 300}
FMT_COMMENT = re.compile(r"#\s*fmt:\s*(skip|off)")


@dataclass(frozen=True)
class Words:
    """Contents of `tools/words.toml`, which says what they are."""

    names: list[str]
    openings: list[str]
    phrases: list[str]
    allowed_phrases: list[str]


@dataclass(frozen=True)
class Source:
    """A Python file of the library; `path` is relative to the root of the repository."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def num_code_lines(self) -> int:
        """Number of lines that are neither blank nor comments; a docstring's lines count."""
        return sum(not line.lstrip().startswith("#") for line in self.text.splitlines() if line.strip())

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """Name in the figures: `tables`, `kernels.cpu`, or `root`."""
        folder = self.path.removeprefix(f"{PACKAGE}/").rpartition("/")[0]
        package = folder if folder in SUBPACKAGES else folder.split("/")[0]
        return package.replace("/", ".") or "root"


@dataclass(frozen=True)
class Figure:
    """A value, and the places that it counts or is the sum of."""

    value: float
    places: list[str]


Figures = dict[str, Figure]


def count(places: Iterable[str]) -> Figure:
    listed = list(places)
    return Figure(len(listed), listed)


def read_sources(root: Path, *folders: str) -> list[Source]:
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return [Source(path.relative_to(root).as_posix(), path.read_text()) for path in paths]


def measure(root: Path) -> Figures:
    """All figures of the repository at `root`, sorted by name."""
    sources = read_sources(root, PACKAGE)
    kernels = [source for source in sources if source.package.startswith("kernels")]
    library = [source for source in sources if source not in kernels]
    words = Words(**tomllib.loads((root / WORDS).read_text()))
    figures = size_figures(sources) | phrase_figures(root, phrase_pattern(words))
    figures["arguments.kernels"] = count(long_signatures(kernels))
    figures["arguments.library"] = count(long_signatures(library))
    figures["fmt_comments"] = count(fmt_comments(sources))
    figures["import_cycles"] = count(import_cycles(import_graph(sources)))
    figures["docstring_openings"] = count(docstring_openings(sources, words))
    figures["statements"] = count(statements(sources))
    for name, limit in MAX_CLASS_LINES.items():
        figures[name] = count(long_classes(sources, limit))
    figures["long_files"] = count(f"{s.path}: {s.num_lines} lines" for s in sources if s.num_lines > MAX_FILE_LINES)
    figures["vague_names"] = vague_names(sources, words)
    figures["vague_names.tests"] = vague_names(read_sources(root, "tests", "benchmarks", "tools"), words)
    return dict(sorted(figures.items()))


def size_figures(sources: Iterable[Source]) -> Figures:
    lines: dict[str, dict[str, int]] = defaultdict(dict)
    for source in sources:
        lines[source.package][source.path] = lines["total"][source.path] = source.num_code_lines
    figures = {f"files.{package}": count(sizes) for package, sizes in lines.items()}
    for package, sizes in lines.items():
        longest_first = sorted(sizes, key=lambda path: -sizes[path])
        figures[f"lines.{package}"] = Figure(sum(sizes.values()), [f"{path}: {sizes[path]}" for path in longest_first])
    return figures


def long_signatures(sources: Iterable[Source]) -> Iterator[str]:
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and num_arguments(node.args) > MAX_ARGUMENTS:
                yield f"{source.path}:{node.lineno} {node.name}: {num_arguments(node.args)} arguments"


def num_arguments(arguments: ast.arguments) -> int:
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return len(positional) + len(arguments.kwonlyargs) - (positional[:1] in (["self"], ["cls"]))


def statements(sources: Iterable[Source]) -> Iterator[str]:
    return (f"{source.path}:{node.lineno}" for source in sources for node in source.nodes if isinstance(node, ast.stmt))


def docstring_openings(sources: Iterable[Source], words: Words) -> Iterator[str]:
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                opening = re.match(r"\w*", ast.get_docstring(node) or "")
                if opening and opening[0] in words.openings:
                    yield f"{source.path}:{node.body[0].lineno} {opening[0]}"


def long_classes(sources: Iterable[Source], limit: int) -> Iterator[str]:
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and (num_lines := node.end_lineno - node.lineno + 1) > limit:
                yield f"{source.path}:{node.lineno} {node.name}: {num_lines} lines"


def fmt_comments(sources: Iterable[Source]) -> Iterator[str]:
    for source in sources:
        for number, line in enumerate(source.text.splitlines(), 1):
            if FMT_COMMENT.search(line):
                yield f"{source.path}:{number}"


def import_graph(sources: Iterable[Source]) -> dict[str, set[str]]:
    """The modules of the library that a module imports."""
    imported = {source.module: list(imported_names(source)) for source in sources}
    modules = imported.keys()
    return {
        module: {name if name in modules else name.rpartition(".")[0] for name in names} & modules - {module}
        for module, names in imported.items()
    }


def imported_names(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{source.path}:{node.lineno}: relative imports are not supported")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_cycles(graph: dict[str, set[str]]) -> Iterator[str]:
    reachable = {module: reachable_modules(graph, module) for module in graph}
    for module in graph:
        if cyclic := sorted(name for name in graph[module] if module in reachable[name]):
            yield f"{module} imports {', '.join(cyclic)}"


def reachable_modules(graph: dict[str, set[str]], start: str) -> set[str]:
    visited: set[str] = set()
    stack = [start]
    while stack:
        imported = graph[stack.pop()] - visited
        visited |= imported
        stack += imported
    return visited


def vague_names(sources: Iterable[Source], words: Words) -> Figure:
    occurrences = [(source.path, line, name) for source in sources for line, name in names(source)]
    places = [f"{path}:{line} {name}" for path, line, name in occurrences if name.lstrip("_") in words.names]
    return Figure(round(1000 * len(places) / max(len(occurrences), 1), 1), places)


def names(source: Source) -> Iterator[tuple[int, str]]:
    """Lines and names of variables, attributes and parameters; without imported names."""
    imports = [node for node in source.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id not in imported:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute):
            yield node.end_lineno or node.lineno, node.attr


def phrase_figures(root: Path, pattern: re.Pattern[str]) -> Figures:
    paths = {
        "docs": [root / "README.md", *(root / "docs").rglob("*.md")],
        "library": (root / PACKAGE).rglob("*.py"),
        "tools": (root / "tools").glob("*.py"),
    }
    return {
        f"phrases.{area}": count(place for path in sorted(group) for place in phrases(root, path, pattern))
        for area, group in paths.items()
    }


def phrase_pattern(words: Words) -> re.Pattern[str]:
    """A pattern of lower-case text, whose first group is a phrase that counts; allowed uses match without it.

    Only letters continue a word, so `row_holder_id` has `holder`. A space may be the end of a line of a comment.
    """
    allowed, avoided = (
        "|".join(re.escape(phrase).replace(r"\ ", r"\s+(?:#\s*)?") for phrase in group)
        for group in (words.allowed_phrases, words.phrases)
    )
    return re.compile(rf"(?<![a-z])(?:(?:{allowed or '(?!)'})|({avoided}))(?![a-z])")


def phrases(root: Path, path: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    text = path.read_text().lower()
    for match in pattern.finditer(text):
        if match[1]:
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path.relative_to(root).as_posix()}:{line} {re.sub('[^a-z-]+', ' ', match[1])}"


def read_ceilings(path: Path) -> dict[str, float]:
    return tomllib.loads(path.read_text()) if path.exists() else {}


def write_ceilings(path: Path, figures: Figures) -> None:
    lines = [f'"{name}" = {figure.value}\n' for name, figure in figures.items()]
    path.write_text("# Lowered by `make lint`; CONTRIBUTING.md says when one may be raised.\n" + "".join(lines))


def check(figures: Figures, path: Path) -> bool:
    """Whether no figure is above its ceiling; prints those that are, or lowers the ceilings in `path`."""
    ceilings = read_ceilings(path)
    high = [name for name, figure in figures.items() if figure.value > ceilings.get(name, 0)]
    for name in high:
        print(f"{name} is {figures[name].value:,}, above its ceiling of {ceilings.get(name, 0):,}")
        print(f"    places: python tools/house.py --list {name}")
    if high:
        print(f"Bring them down, or raise the ceilings in {CEILINGS} in a commit of its own that says why.")
        return False
    low = [name for name, ceiling in ceilings.items() if name not in figures or figures[name].value < ceiling]
    if low and os.environ.get("CI"):
        print(f"`python tools/house.py --check` lowers the ceilings of {', '.join(low)}")
    elif low:
        write_ceilings(path, figures)
        print(f"Lowered the ceilings of {', '.join(low)}; commit {CEILINGS}")
    return True


def print_table(figures: Figures, ceilings: dict[str, float]) -> None:
    print(f"{'figure':<24}{'now':>9}{'ceiling':>9}")
    for name, figure in figures.items():
        print(f"{name:<24}{figure.value:>9,}{ceilings.get(name, 0):>9,}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository to measure")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail if a figure is above its ceiling; lower the others")
    action.add_argument("--list", metavar="FIGURE", help="print the places that a figure counts")
    action.add_argument("--write", action="store_true", help="set every ceiling to its figure")
    options = parser.parse_args(arguments)
    figures, path = measure(options.root), options.root / CEILINGS
    if options.check:
        return 0 if check(figures, path) else 1
    if options.list and options.list not in figures:
        parser.error(f"unknown figure {options.list!r}; one of {', '.join(figures)}")
    if options.list:
        print(*figures[options.list].places, sep="\n")
    elif options.write:
        write_ceilings(path, figures)
    else:
        print_table(figures, read_ceilings(path))
    return 0


if __name__ == "__main__":
    gc.disable()  # collections visit every syntax tree again, which doubles the time
    sys.exit(main())
