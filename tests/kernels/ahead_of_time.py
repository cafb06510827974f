"""Compile recorded launches for GPUs that are not there, and read the machine code.

A launch is specialised by Triton's own binder, the one that a real launch goes through: dtypes of pointers, integers
equal to 1, and divisibility by 16 of integers and addresses. What the compilers made of it is read from the cubin
(NVIDIA) or the assembly (AMD) with the tools of the Triton wheel. Needs no GPU and no driver. Figures of machine code
are kept in the folder of compiled kernels, by what the code was compiled from: only what has changed is compiled and
read again.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import json
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tritonemb.kernels import triton_utils
from tritonemb.utils import kernel_folder

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ARTEFACTS = Path(os.environ.get("TRITONEMB_AHEAD_OF_TIME", Path(__file__).parents[2] / "build" / "ahead_of_time"))
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Code:
    """What a compiler made of one launch.

    Attributes:
        case, kernel, constants, num_warps, target: which launch, where.
        registers: vector registers a thread.
        spilled: registers kept in memory. NVIDIA: bytes of stack and local memory a thread, if code stores there; AMD:
            spilled vector registers and bytes of scratch (scalar registers spill into lanes of vector registers).
        shared: bytes of shared memory (LDS) a program; what the launch asks for on top is included.
        loads: how many instructions load 1, 2, 4, 8, 12 and 16 bytes a thread from global memory.
        in_flight: the most loads of 16 bytes that a thread waits for at once; NVIDIA only.
        bytes_in_flight: the most bytes, by loads of any width; NVIDIA only.
    """

    case: str
    kernel: str
    constants: str
    num_warps: int
    target: str
    registers: int
    spilled: int
    shared: int
    loads: dict[int, int]
    in_flight: int
    bytes_in_flight: int

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes a thread."""
        return self.loads.get(16, 0)


class Figures(NamedTuple):
    """What `Code` says of machine code: its last attributes, in their order."""

    registers: int
    spilled: int
    shared: int
    loads: dict[int, int]
    in_flight: int
    bytes_in_flight: int


class Launch(NamedTuple):
    """One launch: the kernel and what it is specialised on."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int


def record(call: Callable[[], object], target: str = "sm_90") -> list[Launch]:
    """The launches that `call` makes for `target`; nothing runs, so outputs stay unwritten."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_utils, "launch_recorder", lambda *launch: launches.append(Launch(*launch)))
        patch.setattr(triton_utils, "_lanes", TARGETS[target].warp_size)
        call()
    return launches


def source_of(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """The specialisation that a launch with these arguments compiles on `target`, and the compiler's options."""
    kernel, backend = launch.kernel, make_backend(target)
    options = triton_utils.compiler_options(launch.num_warps, target.backend == "cuda")
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, inputs = bind(*launch.args, **launch.constants, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, inputs, bound, specialization, inputs)
    return ASTSource(kernel, signature, constants, attributes), parsed.__dict__


def compile_all(case: str, launches: Iterable[Launch], target: str) -> list[Code]:
    """The code of every distinct specialisation among `launches`, in the order of launches."""
    variants: dict[str, tuple[Launch, ASTSource, dict[str, Any]]] = {}
    for launch in launches:
        source, options = source_of(launch, TARGETS[target])
        variants.setdefault(f"{source.hash()} {launch.num_warps}", (launch, source, options))
    figures = _cached_figures([(source, options) for _, source, options in variants.values()], target)
    return [
        Code(case, launch.kernel.__name__, describe(launch), launch.num_warps, target, *figures_of_launch)
        for (launch, *_), figures_of_launch in zip(variants.values(), figures, strict=True)
    ]


def _cached_figures(variants: Sequence[tuple[ASTSource, dict[str, Any]]], target: str) -> list[Figures]:
    """Those of the last time that the same sources were compiled by the same compiler and read by this file."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    paths, results, missing = list[Path](), dict[Path, Figures](), dict[Path, tuple[ASTSource, dict[str, Any]]]()
    for source, options in variants:
        key = digest.copy()
        key.update(repr((triton.__version__, source.hash(), sorted(options.items()), target)).encode())
        path = kernel_folder() / "ahead_of_time" / f"{key.hexdigest()[:32]}.json"
        paths.append(path)
        with suppress(OSError, ValueError):
            registers, spilled, shared, loads, *flying = json.loads(path.read_text())
            counts = {int(width): count for width, count in loads}
            results[path] = Figures(registers, spilled, shared, counts, *flying)
        if path not in results:
            missing[path] = source, options
    created = _figures(list(missing.values()), target) if missing else []
    for path, figures in zip(missing, created, strict=True):
        results[path] = figures
        path.parent.mkdir(exist_ok=True)
        with _replaced(path) as file:
            json.dump([list(part.items()) if isinstance(part, dict) else part for part in figures], file)
    return [results[path] for path in paths]


def _figures(variants: Sequence[tuple[ASTSource, dict[str, Any]]], target: str) -> list[Figures]:
    compiled = [triton.compile(source, target=TARGETS[target], options=options) for source, options in variants]
    if TARGETS[target].backend == "cuda":
        results = read_cubins([kernel.asm["cubin"] for kernel in compiled], target)
    else:
        results = [read_amdgcn(kernel.asm["amdgcn"]) for kernel in compiled]
    return [
        figures._replace(shared=max(figures.shared, kernel.metadata.shared))
        for figures, kernel in zip(results, compiled, strict=True)
    ]


def describe(launch: Launch) -> str:
    """What a launch is specialised on, on one line: dtypes of pointers (`%16` if aligned), integers, constants."""
    names = [parameter.name for parameter in launch.kernel.params]
    arguments = (f"{name}{_kind(value)}" for name, value in zip(names, launch.args, strict=False))
    constants = (f"{name}={getattr(value, 'value', value)}" for name, value in sorted(launch.constants.items()))
    return " ".join([*arguments, *constants])


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f":{str(value.dtype).removeprefix('torch.')}" + "%16" * (value.data_ptr() % 16 == 0)
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    if isinstance(value, int) and value != 1:
        return "%16" * (value % 16 == 0)
    return "" if isinstance(value, float) else f"={value}"


INSTRUCTION_BYTES = 16


def read_cubins(cubins: Sequence[bytes], target: str) -> list[Figures]:
    """Of kernels, disassembled as one: the disassembler takes half a second to start, and little for each kernel."""
    codes, architecture = [code_of(cubin) for cubin in cubins], target.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel"
        path.write_bytes(b"".join(codes))
        sass = _run("nvdisasm", "-b", f"SM{architecture}{'a' * (int(architecture) >= 90)}", str(path))
        usages = []
        for cubin in cubins:
            path.write_bytes(cubin)
            usages.append(_run("cuobjdump", "--dump-resource-usage", str(path)))
    instructions = iter(re.findall(r"/\*[0-9a-f]+\*/[^;]*;", sass))
    results = []
    for code, usage in zip(codes, usages, strict=True):
        lines = list(itertools.islice(instructions, len(code) // INSTRUCTION_BYTES))
        assert len(lines) == len(code) // INSTRUCTION_BYTES, "the disassembler left instructions out"
        text = "\n".join(lines)
        numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
        spilled = numbers["STACK"] + numbers["LOCAL"] if re.search(r"\b(STL|LDL)\b", text) else 0
        results.append(Figures(numbers["REG"], spilled, numbers["SHARED"], loads_of_sass(text), *in_flight(text)))
    assert next(instructions, None) is None, "there are more instructions than code"
    return results


def code_of(cubin: bytes) -> bytes:
    """The instructions in an ELF file of 64 bits: its sections whose names begin with `.text.`."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, number, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<I4xQQQQ", cubin, headers + n * size) for n in range(number)]
    texts = [
        (at, length) for name, _, _, at, length in sections if cubin.startswith(b".text.", sections[names][3] + name)
    ]
    return b"".join(cubin[at : at + length] for at, length in texts)


def loads_of_sass(sass: str) -> dict[int, int]:
    """Bytes a thread of every global load, counted: `LDG.E.128` loads 16, `LDG.E` 4; `LDGSTS` too."""
    counts: dict[int, int] = {}
    for suffixes in re.findall(r"\bLDG(?:STS)?((?:\.\w+)*)", sass):
        counts[_width(suffixes)] = counts.get(_width(suffixes), 0) + 1
    return counts


def _width(suffixes: str) -> int:
    parts = suffixes.split(".")
    return next((size for name, size in _SASS_WIDTHS.items() if name in parts), 4)


def in_flight(sass: str) -> tuple[int, int]:
    """The most loads of 16 bytes a thread, and bytes, that code asks for before it names a register of the first.

    What `LDGSTS` loads is waited for by `DEPBAR`, and counts as bytes alone. In the order of the code: the body of a
    loop counts once, and loads of two turns never together.
    """
    waiting: list[tuple[range, int]] = []
    most = most_bytes = 0
    for instruction in re.findall(r"\*/([^;]*);", sass):
        named = {int(number) for number in re.findall(r"\bR(\d+)\b", instruction)}
        waits = "DEPBAR" in instruction and "LDGDEPBAR" not in instruction
        waiting = [item for item in waiting if (named.isdisjoint(item[0]) if item[0] else not waits)]
        load = re.search(r"\bLDG((?:STS)?)((?:\.\w+)*)\s+\D*(\d+)", instruction)
        if load:
            width, first = _width(load[2]), int(load[3])
            waiting.append((range(0) if load[1] else range(first, first + max(1, width // 4)), width))
            most = max(most, sum(bool(registers) and size == 16 for registers, size in waiting))
            most_bytes = max(most_bytes, sum(size for _, size in waiting))
    return most, most_bytes


_SASS_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def read_amdgcn(assembly: str) -> Figures:
    """With none in flight."""

    def number(name: str) -> int:
        return max([0, *(int(result) for result in re.findall(rf"\.{name}:\s+(\d+)", assembly))])

    counts: dict[int, int] = {}
    for name in re.findall(r"\b(?:global|buffer|flat)_load_(\w+)", assembly):
        width = next((size for start, size in _AMD_WIDTHS.items() if name.startswith(start)), 4)
        counts[width] = counts.get(width, 0) + 1
    spilled = number("vgpr_spill_count") + number("private_segment_fixed_size")
    return Figures(number("vgpr_count"), spilled, number("group_segment_fixed_size"), counts, 0, 0)


_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "sshort": 2}
_AMD_WIDTHS |= {"ubyte": 1, "sbyte": 1}


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=True).stdout


@functools.cache
def _tool(name: str) -> str:
    local = _TOOLS / name
    return str(local) if local.exists() else name


def keep(codes: Sequence[Code], case: str, target: str) -> None:
    """Leave the rows of one case for `write_tables`; cases may run in processes of their own."""
    folder = ARTEFACTS / "cases"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{case}-{target}.json").write_text(json.dumps([asdict(code) for code in codes]))


def write_tables(cases: Iterable[str]) -> None:
    """Gather what cases have left into `kernels.csv` and `kernels.md`; cases that are not among `cases` are dropped."""
    known, rows = set(cases), []
    for path in sorted((ARTEFACTS / "cases").glob("*.json")):
        if path.stem.rsplit("-", 1)[0] in known:
            rows += [_row(code) for code in json.loads(path.read_text())]
        else:
            path.unlink(missing_ok=True)
    if not rows:
        return
    rows.sort(key=lambda row: (row["kernel"], row["constants"], row["target"], row["case"]))
    header = list(rows[0])
    with _replaced(ARTEFACTS / "kernels.csv") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)
    with _replaced(ARTEFACTS / "kernels.md") as file:
        for line in (header, ["---"] * len(header), *([str(row[name]) for name in header] for row in rows)):
            file.write("| " + " | ".join(line) + " |\n")


def _row(code: dict[str, Any]) -> dict[str, Any]:
    loads = ", ".join(
        f"{count} of {width} B" for width, count in sorted(code["loads"].items(), key=lambda x: -int(x[0]))
    )
    first = ("kernel", "target", "case", "num_warps", "registers", "spilled", "shared", "in_flight")
    return {name: code[name] for name in first} | {"loads": loads, "constants": code["constants"]}


class _replaced:
    """A file that takes its name when it is whole, whoever else writes it meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        self.file = tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, newline="")
        return self.file

    def __exit__(self, *_: object) -> None:
        self.file.close()
        os.replace(self.file.name, self.path)
