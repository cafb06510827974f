"""How many 16-byte loads of a Triton kernel are in flight at once, read from its machine code. Needs no GPU.

    python benchmarks/gpu/loads_in_flight.py                          the forward's kernels, for sm_90
    python benchmarks/gpu/loads_in_flight.py update-adam --target sm_100
    python benchmarks/gpu/loads_in_flight.py kernel.sass              what `nvdisasm -c` printed

Cases are those of `tests/kernels/ahead_of_time_cases.py`. The code is walked in order, loops once: a load is in flight
from its own line to the first line that names one of its registers. A kernel that waits after each of eight loads has
one in flight.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # called as a file, Python puts only this folder on the path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);")
_LOAD = re.compile(r"\bLDG\.[\w.]*\b128\b[\w.]*\s+R(\d+)")
_REGISTER = re.compile(r"\bR(\d+)(\.64)?")


def loads_in_flight(sass: str) -> int:
    """The most 16-byte loads whose registers no later instruction has named yet."""
    flying: list[set[int]] = []
    most = 0
    for text in _INSTRUCTION.findall(sass):
        named = {int(first) + i for first, pair in _REGISTER.findall(text) for i in range(2 if pair else 1)}
        flying = [registers for registers in flying if not registers & named]
        if load := _LOAD.search(text):
            flying.append({int(load.group(1)) + i for i in range(4)})
            most = max(most, len(flying))
    return most


def find_disassembler() -> str | None:
    """`nvdisasm`: Triton's own, else the one on the path."""
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        own = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if own.exists():
            return str(own)
    return shutil.which("nvdisasm")


def compiled(case_name: str, target: str, disassembler: str) -> Iterator[tuple[str, str]]:
    """Name and machine code of each launch of a case, compiled for `target`."""
    import triton

    from tests.kernels import ahead_of_time
    from tests.kernels.ahead_of_time_cases import CASES

    case = next((case for case in CASES if case.name == case_name), None)
    if case is None:
        raise SystemExit(f"no case is called {case_name!r}; there are {', '.join(case.name for case in CASES)}")
    for launch in ahead_of_time.record(case.call, target):
        source, options = ahead_of_time.source_of(launch, ahead_of_time.TARGETS[target])
        code = triton.compile(source, target=ahead_of_time.TARGETS[target], options=options)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(code.asm["cubin"])
            done = subprocess.run([disassembler, "-c", str(path)], capture_output=True, text=True, check=True)
        yield launch.kernel.__name__, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="The most 16-byte loads in flight, by kernel.")
    parser.add_argument("what", nargs="*", default=["forward-dim128"], help="cases, or files of machine code")
    parser.add_argument("--target", default="sm_90", choices=("sm_80", "sm_90", "sm_100"))
    args = parser.parse_args()
    for what in args.what:
        if Path(what).suffix == ".sass":
            print(f"{what}: {loads_in_flight(Path(what).read_text())}")
            continue
        disassembler = find_disassembler()
        if importlib.util.find_spec("triton") is None or disassembler is None:
            raise SystemExit(
                "kernels cannot be compiled and read here: this takes Triton and nvdisasm, which its Linux wheels have "
                "and the CUDA toolkit installs. Give the output of `nvdisasm -c` as a .sass file instead"
            )
        for kernel, sass in compiled(what, args.target, disassembler):
            print(f"{what}, {args.target}, {kernel}: {loads_in_flight(sass)}")


if __name__ == "__main__":
    main()
