"""Does `make test` notice mistakes? `python tools/planted.py [names]`, or `make planted`.

Each `tests/planted/NAME.patch` plants one mistake. It is applied to a copy of the tree, and there the tests of
`make test` run until one fails: those that the patch's `Tests:` line names first, then all; with `--more`, then those
of `make test-more` that it names. A mistake that no test notices has survived. Outcomes go to `build/planted.json`,
line by line: a second call continues where the first one ended. A patch or a tree that has changed since is run again.
`--record` writes the outcomes to `tests/planted/results.json`. `--check` only checks that every patch applies.

The tree without a mistake runs first (`unchanged`), as a test that always fails would find everything;
`--no-unchanged` goes without.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from run_tests import NO_TESTS, Pass, selections

ROOT = Path(__file__).parents[1]
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?:@[\w/.]+)?(?: - |$)", re.MULTILINE)  # without a group


@dataclass
class Outcome:
    """What became of a mistake.

    Args:
        status: found, survived, timeout, or error where the patch does not apply.
        test: the one that failed first.
        selection: the last one that ran: "test" of `make test`, "more" of `make test-more`.
    """

    name: str
    digest: str
    status: str
    test: str
    selection: str
    seconds: int


def main() -> None:
    options = parse()
    patches = [
        path for path in sorted(options.patches.glob("*.patch")) if not options.names or path.stem in options.names
    ]
    if options.check:
        checks = [subprocess.run(["git", "apply", "--check", path], cwd=ROOT, check=False) for path in patches]
        sys.exit(any(check.returncode for check in checks))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    tree = digest_of_tree()
    done = read(options.results)
    outcomes = []
    if not options.no_unchanged:
        outcomes.append(outcome := once("unchanged", None, tree, done, options))
        if outcome.status != "survived":
            sys.exit(f"without any mistake {outcome.test or 'the selection'} already ends with: {outcome.status}")
    for path in patches:
        digest = hashlib.sha256(path.read_bytes() + tree.encode()).hexdigest()[:16]
        outcomes.append(once(path.stem, path, digest, done, options))
    if options.record:
        table = {
            o.name: {"status": o.status, "selection": o.selection, "test": o.test}
            for o in outcomes
            if o.name != "unchanged"
        }
        (options.patches / "results.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    survivors = [o.name for o in outcomes if (o.status, o.selection) != ("found", "test") and o.name != "unchanged"]
    print(f"{len(patches) - len(survivors)} of {len(patches)} found by make test; not: {survivors}")
    sys.exit(len(survivors) > options.most_survivors)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of patches; all of them by default")
    parser.add_argument("--patches", type=Path, default=ROOT / "tests" / "planted")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "planted.json")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one mistake")
    parser.add_argument("--jobs", type=int, default=3, help="processes of pytest-xdist; 0: none of them")
    parser.add_argument("--first-only", action="store_true", help="only the tests that the patch names first")
    parser.add_argument("--no-unchanged", action="store_true", help="do not run the tree without a mistake")
    parser.add_argument(
        "--more", action="store_true", help="run the tests of `make test-more`, too, that the patch names"
    )
    parser.add_argument("--record", action="store_true", help="write results.json beside the patches")
    parser.add_argument("--check", action="store_true", help="only check that all patches apply")
    parser.add_argument("--most-survivors", type=int, default=2, help="more than these are an error")
    return parser.parse_args()


def read(results: Path) -> dict[tuple[str, str], Outcome]:
    lines = results.read_text().splitlines() if results.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {(outcome.name, outcome.digest): outcome for outcome in outcomes}


def once(
    name: str,
    patch: Path | None,
    digest: str,
    done: dict[tuple[str, str], Outcome],
    options: argparse.Namespace,
) -> Outcome:
    """What became of a mistake, from the results or by running the tests."""
    outcome = done.get((name, digest))
    if outcome is None:
        outcome = run(name, patch, digest, options)
        if not (options.first_only and outcome.status == "survived"):  # all tests might still find it
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    print(f"{outcome.status:9} {outcome.name:45} {outcome.seconds:5} s  {outcome.test}", flush=True)
    return outcome


def run(name: str, patch: Path | None, digest: str, options: argparse.Namespace) -> Outcome:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "tree"
        copy_tree(copy)
        if patch is not None:
            applied = subprocess.run(
                ["git", "apply", str(patch)], cwd=copy, capture_output=True, text=True, check=False
            )
            if applied.returncode:
                return Outcome(name, digest, "error", applied.stderr.strip(), "", 0)
        status, test, selection = "survived", "", ""
        for selection, arguments in stages(patch, options):
            passes = [step for queue in selections()[selection] for step in queue]
            status, test = run_passes(copy, passes, arguments, begin + options.timeout, options.jobs)
            if status != "survived":
                break
    return Outcome(name, digest, status, test, selection, round(time.monotonic() - begin))


def stages(patch: Path | None, options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Selections and arguments of pytest: the tests that a patch names first, then all."""
    line = re.search(r"^Tests: (.+)$", patch.read_text(), re.MULTILINE) if patch else None
    named = line[1].split() if line else []
    if named:
        yield "test", named
    if not options.first_only:
        yield "test", []
    if named and options.more:
        yield "more", named


def run_passes(copy: Path, passes: list[Pass], arguments: list[str], deadline: float, jobs: int) -> tuple[str, str]:
    """The status, and the test that failed first."""
    for step in passes:
        command = step.command(["-x", "-q", "-p", "no:cacheprovider", *arguments], jobs)
        environment = step.environment() | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(
            command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return "timeout", ""
        if process.returncode not in (0, NO_TESTS):
            failed = FAILED.search(output)
            return "found", failed[1] if failed else " / ".join(output.splitlines()[-3:])
    return "survived", ""


def tracked() -> list[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def copy_tree(target: Path) -> None:
    for name in tracked():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def digest_of_tree() -> str:
    """Of everything that the tests may read, but for the patches."""
    digest = hashlib.sha256()
    for name in sorted(tracked()):
        if not name.startswith("tests/planted/"):
            digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
