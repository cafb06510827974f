"""Figures of the library's structure: size, imports, names, and what a batch crosses. `python tools/house.py [--slow]`

Prints each figure as it was (`house_before.json` beside this file), as it is now in the tree `--root`, and its target.

- lines: as `ruff format` leaves them. statements: every `ast.stmt` node, docstrings included.
- public docstrings: of modules, classes, functions and methods whose path has no leading underscore; overloads count
  once. One is lost if it was there before, and a class, function or `Class.method` of that name has none now.
- import circles: strongly connected components of modules. Imports in functions and under TYPE_CHECKING count. An edge
  goes to the module that is named, be it a package's `__init__`, but not to the packages above it.
- imports of kernels: import statements outside `kernels/` and `ops/`; "all" has those of layout and error texts, too.
- class names used twice: of top-level classes.
- files that a batch crosses: distinct files of the package in which a Python function runs, in any thread, after the
  loader has returned the batch of step 5 and before the end of the dense optimizer's step 5. The loader itself and its
  threads are left out. Other steps that are prefetched or trained meanwhile count. `te.nn.DLRM` on synthetic data,
  eager, on the CPU; a first training in the same process has compiled and loaded all. The sharded cases are row-wise
  on two gloo ranks, whose files are united. Timing decides about two or three files.
- wrapper types of a batch: classes of the package of which an instance was made in that window, sharded on disk, and
  holds a tensor: in an attribute, an item, a builtin container of these, or in an instance of another such class. The
  loader's batch and its parts count; modules, exceptions and contexts of autograd functions do not.
- first train: `tritonemb train` on synthetic data with an empty kernel cache, then with a full one: the difference is
  compiling, which is silent unless a line of output says "compil...". On a machine that does more than this, CPU
  seconds tell what wall time does not.
- make test: wall time with `--time`, or the sum of JUnit files with `--junit`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any
from xml.etree import ElementTree

PACKAGE = "tritonemb"
BEFORE = Path(__file__).with_name("house_before.json")
CASES = ("device", "disk", "sharded", "sharded_disk")
STEP, LAST_STEP = 5, 12
ROWS: tuple[tuple[str, str, float | None], ...] = (
    ("lines", "lines", 29_000),
    ("files", "files", 150),
    ("statements", "statements", 18_500),
    ("documented", "public docstrings", None),
    ("lost", "public docstrings lost", 0),
    ("undocumented", "public names without a docstring", None),
    ("circles", "import circles", 0),
    ("kernel_imports", "imports of kernels from above ops", 0),
    ("kernel_imports_all", "imports of kernels from above ops, all", None),
    ("twice", "class names used twice", 0),
    ("twice_private", "class names used twice, private", 0),
    ("device", "files a batch crosses: tables on device", 15),
    ("disk", "files a batch crosses: tables on disk", 28),
    ("sharded", "files a batch crosses: sharded", 38),
    ("sharded_disk", "files a batch crosses: sharded, on disk", None),
    ("wrappers", "wrapper types of a batch", 7),
    ("test_seconds", "make test, seconds", 360),
    ("compile_seconds", "first train, seconds of compiling", 15),
    ("compile_cpu", "first train, CPU seconds of compiling", None),
    ("silent_seconds", "first train, seconds of silent compiling", 0),
)
LISTS = {
    "files": [*CASES, "wrappers"],
    "docstrings": ["undocumented", "lost", "gone"],
    "circles": ["circles"],
    "imports": ["kernel_imports"],
    "classes": ["twice", "twice_private"],
    "output": ["output"],
}
Figures = dict[str, float]
Lists = dict[str, list[str]]


def read_sources(root: Path) -> Lists:
    """What the sources alone tell; a figure is the length of its list."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    trees = dict(zip(names, (ast.parse(path.read_text()) for path in paths), strict=True))
    known: dict[str, bool] = {}
    classes = defaultdict(list)
    kernels: Lists = {"kernel_imports": [], "kernel_imports_all": []}
    edges: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for name, node in public(module, tree):
            known[name] = known.get(name, False) or ast.get_docstring(node) is not None
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module)
        edges[module] = set()
        for text, imported in imports(tree):
            targets = {name if name in trees else name.rpartition(".")[0] for name in imported}
            edges[module] |= targets & trees.keys() - {module}
            inside = {name.split(".")[2] for name in imported if name.startswith(f"{PACKAGE}.kernels.")}
            if inside and module.split(".")[1:2] not in (["kernels"], ["ops"]):
                kernels["kernel_imports_all"].append(f"{module}: {text}")
                if not inside <= {"layout", "errors"}:
                    kernels["kernel_imports"].append(f"{module}: {text}")
    twice = [f"{name}: {', '.join(modules)}" for name, modules in classes.items() if len(modules) > 1]
    return kernels | {
        "files": [str(path.relative_to(root)) for path in paths],
        "statements": [type(n).__name__ for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.stmt)],
        "documented": [name for name, has_docstring in known.items() if has_docstring],
        "undocumented": [name for name, has_docstring in known.items() if not has_docstring],
        "circles": circles(edges),
        "twice": [text for text in twice if not text.startswith("_")],
        "twice_private": [text for text in twice if text.startswith("_")],
    }


def public(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """A module, class or function and what is public in it."""
    if any(part.startswith("_") for part in name.split(".")):
        return
    yield name, node
    for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from public(f"{name}.{child.name}", child)


def imports(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Each absolute import statement and the full names that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield ast.unparse(node), [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import is not understood: {ast.unparse(node)}"
            yield ast.unparse(node), [f"{node.module}.{alias.name}" for alias in node.names]


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Strongly connected components of more than one module, as text with their edges."""

    def reachable(start: str) -> set[str]:
        seen, todo = set(), [*edges[start]]
        while todo:
            if (module := todo.pop()) not in seen:
                seen.add(module)
                todo += edges[module]
        return seen

    reached = {module: reachable(module) for module in edges}
    found = {frozenset(other for other in reached[m] if m in reached[other]) for m in edges if m in reached[m]}
    texts = []
    for circle in sorted(found, key=lambda circle: (-len(circle), sorted(circle))):
        arrows = [f"{module} -> {', '.join(sorted(edges[module] & circle))}" for module in sorted(circle)]
        texts.append("\n    ".join([f"{len(circle)} modules", *arrows]))
    return texts


def formatted_lines(root: Path) -> int:
    """Lines of the package in the format of its own settings."""
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(root / PACKAGE, Path(folder) / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "pyproject.toml", folder)
        subprocess.run([ruff, "format", "--quiet", "--no-cache", PACKAGE], cwd=folder, check=True)
        return sum(path.read_text().count("\n") for path in Path(folder, PACKAGE).rglob("*.py"))


def short(name: str) -> str:
    """`Class.method`, or a name alone: what stays when a module is renamed."""
    parts = name.split(".")
    return ".".join(parts[next((at for at, part in enumerate(parts) if part[0].isupper()), -1) :])


def compare_docstrings(now: Lists, before: Lists) -> Lists:
    """Docstrings lost, and names documented before that are gone or renamed."""
    with_one, without = ({short(name) for name in now[key]} for key in ("documented", "undocumented"))
    missing = [name for name in before.get("documented", ()) if short(name) not in with_one]
    lost = [name for name in missing if short(name) in without]
    return {"lost": lost, "gone": [name for name in missing if name not in lost]}


class Probe:
    """A profiler of all threads that notes files and wrapper types while its window is open."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.wrappers: set[type] = set()
        self._open = False
        self._muted: set[int | None] = set()  # threads that read the data
        self._batches = self.steps = 0

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Note nothing in this thread, nor in those that it starts."""
        before = {thread.ident for thread in threading.enumerate()}
        self._muted.add(threading.get_ident())
        try:
            yield
        finally:
            self._muted |= {thread.ident for thread in threading.enumerate()} - before
            self._muted.discard(threading.get_ident())

    def watch(self, data: Any) -> Any:
        """The data set, whose iterators open the window when they return the batch of step 5."""
        probe = self

        class Watched:
            def __next__(self) -> Any:
                with probe._reading():
                    batch = super().__next__()  # type: ignore[misc]
                probe._batches += 1
                if probe._batches == STEP:
                    probe._open = True
                    for part in (*vars(batch).values(), batch):
                        probe._note(part)
                return batch

        def watched(method: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                with probe._reading():
                    result = method(*args, **options)
                if hasattr(type(result), "__next__") and not isinstance(result, Watched):
                    object.__setattr__(result, "__class__", type("Stream", (Watched, type(result)), {}))
                return result

            return call

        kind = type(data)
        methods = {
            name: watched(method)
            for base in reversed(kind.__mro__)
            for name, method in vars(base).items()
            if isinstance(method, FunctionType) and not name.startswith("_")
        }
        object.__setattr__(data, "__class__", type(kind.__name__, (kind,), methods))
        return data

    def step_done(self, *_: object) -> None:
        """A hook behind the dense optimizer's step."""
        self.steps += 1
        self._open &= self.steps < STEP

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        if not self._open or threading.get_ident() in self._muted:
            return
        self.codes.add(frame.f_code)
        if event == "call" and frame.f_back is not None:
            self.codes.add(frame.f_back.f_code)
        elif event == "return" and frame.f_code.co_name == "__init__":
            self._note(next(iter(frame.f_locals.values()), None))
        elif event == "return" and isinstance(result, tuple) and frame.f_code.co_name in ("<lambda>", "_make"):
            self._note(result)  # made by a named tuple's `__new__` or `_make`

    def _note(self, instance: Any) -> None:
        if type(instance).__module__.split(".")[0] == PACKAGE and type(instance) not in self.wrappers:
            from torch import Tensor, autograd, nn

            if not isinstance(instance, nn.Module | BaseException | autograd.Function | autograd.function.FunctionCtx):
                todo = [*instance] if isinstance(instance, tuple) else []
                todo += [getattr(instance, name, None) for name in getattr(type(instance), "__slots__", ())]
                todo += getattr(instance, "__dict__", {}).values()
                while todo:
                    value = todo.pop()
                    if type(value) in (list, tuple, set, deque, dict):
                        todo += value.values() if isinstance(value, dict) else value
                    elif isinstance(value, Tensor) or type(value) in self.wrappers:
                        self.wrappers.add(type(instance))


def trace(root: Path, case: str) -> Lists:
    """Train a case twice, the second time with a probe; in a process of its own, one for each rank."""
    import torch

    import tritonemb as te
    from tritonemb.data import make_synthetic

    probe, sharded = Probe(), case.startswith("sharded")

    def train(probed: bool) -> None:
        torch.manual_seed(0)
        data = make_synthetic(num_train=4_000, num_test=400)
        tables = data.tables(16)
        if case.endswith("disk"):  # so few rows are cached that every step evicts some
            tables = [replace(table, placement="disk", cache=te.CacheConfig(share=0.05)) for table in tables]
        if probed:
            data = probe.watch(data)
            probe.install()
        model: Any = te.nn.DLRM(tables, data.num_dense, (32,), (32,), optimizer=te.optim.RowWiseAdagrad(lr=0.02))
        if sharded:
            plan = te.sharding.ShardingPlan({table.name: te.sharding.RowWise() for table in tables}, 2, 2)
            model = te.HybridParallel(model, plan)

        def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
            optimizer = torch.optim.Adam(parameters, lr=lr)
            if probed:
                optimizer.register_step_post_hook(probe.step_done)
            return optimizer

        te.Trainer(model, data, dense_optimizer=adam, batch_size=32, max_steps=LAST_STEP, verbose=False).fit()

    if sharded:
        torch.distributed.init_process_group("gloo")
    train(probed=False)
    train(probed=True)
    sys.setprofile(None)
    if not probe.codes or probe.steps != LAST_STEP:
        raise RuntimeError("the batch of step 5 was not seen to leave the loader, or its update not seen to end")
    if sharded:
        torch.distributed.destroy_process_group()
    package = root / PACKAGE
    paths = {Path(code.co_filename) for code in probe.codes if code.co_flags & 1}  # functions, no bodies of modules
    files = [str(path.relative_to(package)) for path in paths if path.is_relative_to(package)]
    return {case: files, "wrappers": [f"{kind.__module__}.{kind.__qualname__}" for kind in probe.wrappers]}


def trace_all(root: Path) -> Lists:
    """The files of each case, and the wrapper types of the last one."""
    lists: Lists = {}
    for case in CASES:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        with tempfile.TemporaryDirectory() as folder:
            words = [__file__, "--root", str(root), "--trace", case, "--json", f"{folder}/found"]
            command = [sys.executable, *(torchrun if case.startswith("sharded") else []), *words]
            done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
            found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
        lists |= {key: sorted({name for each in found for name in each[key]}) for key in (case, "wrappers")}
    return lists


def environment(root: Path, **more: str) -> dict[str, str]:
    """That of a subprocess which imports the package of this tree."""
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | dict(os.environ) | {"PYTHONPATH": str(root)} | more


def time_first_train(root: Path) -> tuple[Figures, Lists]:
    """Seconds for which a first run of the command compiles, and for how many of them it says nothing about it."""
    command = [sys.executable, "-m", PACKAGE, "train", "--data", "synthetic", "--max-steps", "20"]
    output: list[list[str]] = []
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as cache:
        given = environment(root, TRITONEMB_CACHE_DIR=cache, PYTHONUNBUFFERED="1")
        subprocess.run([*command, "--help"], env=given, check=True, capture_output=True)  # writes Python's own cache
        for _ in range(2):
            start, before, lines = time.perf_counter(), os.times(), []
            with subprocess.Popen(
                command, env=given, cwd=cache, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process:
                for line in process.stdout or ():
                    lines.append(f"{time.perf_counter() - start:6.1f} s  {line.rstrip()}")  # noqa: PERF401
            if process.returncode:
                raise RuntimeError("\n".join(lines))
            walls.append(time.perf_counter() - start)
            after = os.times()
            cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
            output.append(lines)
    wall, cpu = (round(max(0.0, cold - warm), 1) for cold, warm in (walls, cpus))
    said = any("compil" in line.lower() for line in output[0])
    figures = {"compile_seconds": wall, "compile_cpu": cpu, "silent_seconds": 0 if said else wall}
    return figures, {"output": [*output[0], *output[1]]}


def time_tests(root: Path, junit: Iterable[Path]) -> float:
    """Seconds of `make test`, read or measured."""
    suites = [suite for path in junit for suite in ElementTree.parse(path).iter("testsuite")]
    if suites:
        return round(sum(float(suite.get("time", 0)) for suite in suites), 1)
    start = time.perf_counter()
    subprocess.run(["make", "test"], cwd=root, check=True, stdout=sys.stderr)
    return round(time.perf_counter() - start, 1)


def print_table(now: Figures, before: Figures) -> None:
    print(f"{'figure':<44}{'before':>9}{'now':>9}{'target':>12}")
    for key, label, target in ROWS:
        old, new = (f"{values[key]:,}" if key in values else "-" for values in (before, now))
        wanted = "" if target is None else f"<= {target:,}" if target else "0"
        reached = "" if target is None or key not in now else "  yes" if now[key] <= target else "  no"
        print(f"{label:<44}{old:>9}{new:>9}{wanted:>12}{reached}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the tree to measure")
    parser.add_argument("--json", type=Path, help="write figures and lists to this file, into what it has")
    parser.add_argument("--slow", action="store_true", help="trace batches and time the first train, too")
    parser.add_argument("--first-train", action="store_true", help="time the first train, too")
    parser.add_argument("--time", action="store_true", help="run and time make test, too")
    parser.add_argument("--junit", type=Path, nargs="*", default=[], help="JUnit files of make test")
    for name in LISTS:
        parser.add_argument(f"--{name}", action="store_true", help=f"list {', '.join(LISTS[name])}")
    parser.add_argument("--trace", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    root = given.root.resolve()
    if given.trace:
        given.json.with_suffix(f".{os.environ.get('RANK', 0)}").write_text(json.dumps(trace(root, given.trace)))
        return
    figures: Figures
    before = json.loads(BEFORE.read_text()) if BEFORE.exists() else {"figures": {}, "lists": {}}
    lists, figures = read_sources(root), {"lines": formatted_lines(root)}
    lists |= compare_docstrings(lists, before["lists"])
    if given.slow or given.files:
        lists |= trace_all(root)
    figures |= {key: len(lists[key]) for key, _, _ in ROWS if key in lists}
    if given.slow or given.first_train or given.output:
        seconds, output = time_first_train(root)
        figures, lists = figures | seconds, lists | output
    if given.time or given.junit:
        figures["test_seconds"] = time_tests(root, given.junit)
    if given.json:
        kept = {key: values for key, values in lists.items() if key not in ("files", "statements")}
        old = json.loads(given.json.read_text()) if given.json.exists() else {"figures": {}, "lists": {}}
        new = {"figures": old["figures"] | figures, "lists": old["lists"] | kept}
        given.json.write_text(json.dumps(new) + "\n")
    print_table(figures, before["figures"])
    for key in (key for name, keys in LISTS.items() if getattr(given, name) for key in keys):
        print(f"\n{key}: {len(lists[key])}", *lists[key], sep="\n  ")


if __name__ == "__main__":
    main()
