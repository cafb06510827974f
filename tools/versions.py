"""Run a core selection of the tests on other versions: `python tools/versions.py [--python 3.13]`.

Each case is an environment of its own in build/versions, kept for the next time, with the library as it is installed
from here. Interpreters that are not on the PATH as python3.12 and so on are named, and the command ends with status 1;
`--python` runs the cases of one alone. PIP_ARGS goes to every `pip install`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "versions"
OLDEST, NEWEST = ("2.11.0", "3.6.0"), ("2.15.0", "3.9.0")  # torch, and the triton that it goes with
NUMPY = {OLDEST[0]: "numpy<2.4"}  # with newer ones Triton 3.6 does not interpret kernels
CASES = [(python, *versions) for python in ("3.11", "3.12", "3.13") for versions in (OLDEST, NEWEST)]
TOOLS = ("pytest>=8.2,<9.2", "pytest-timeout", "pytest-xdist", "hypothesis")
FOLDERS = ("tests/compiler", "tests/nn", "tests/offloading", "tests/ops")
SELECTION = (*FOLDERS, "tests/test_jagged.py", "tests/test_types.py")


def install(environment: Path, python: str, torch: str, triton: str) -> None:
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    pip += shlex.split(os.environ.get("PIP_ARGS", ""))
    subprocess.run([*pip, f"torch=={torch}"], check=True)
    subprocess.run([*pip, f"triton=={triton}", NUMPY.get(torch, "numpy"), *TOOLS, "-e", f"{ROOT}[train]"], check=True)
    (environment / "ready").touch()


def run(python: str, torch: str, triton: str) -> bool:
    """Whether the selection passes."""
    environment = FOLDER / f"{python}-torch-{torch}"
    if not (environment / "ready").exists():
        shutil.rmtree(environment, ignore_errors=True)
        try:
            install(environment, f"python{python}", torch, triton)
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
            return False
    command = [str(environment / "bin" / "python"), "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--quick"]
    variables = os.environ | {"HYPOTHESIS_PROFILE": "fewest", "OMP_WAIT_POLICY": "passive"}
    runs = ((SELECTION, {}), (("tests/kernels", "tests/ops", "-m", "triton and not slow"), {"TRITON_INTERPRET": "1"}))
    results = [subprocess.run([*command, *paths], cwd=ROOT, env=variables | more).returncode for paths, more in runs]
    return results == [0, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", choices=sorted({case[0] for case in CASES}), help="only the cases of this one")
    parser.add_argument("--torch", choices=sorted({case[1] for case in CASES}), help="only the cases of this one")
    options = parser.parse_args()
    results = {}
    for python, torch, triton in CASES:
        if options.python in (None, python) and options.torch in (None, torch):
            path = shutil.which(f"python{python}")  # perhaps one that only says that it is not installed
            available = path is not None and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
            passed = available and run(python, torch, triton)
            results[python, torch, triton] = "passed" if passed else "failed" if available else "no such interpreter"
    for (python, torch, triton), result in results.items():
        print(f"Python {python}, torch {torch}, triton {triton}: {result}")
    sys.exit(set(results.values()) != {"passed"})


if __name__ == "__main__":
    main()
