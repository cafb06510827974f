"""The part of FBGEMM's GPU wheel that the benchmarks call, for one GPU architecture, as a tar.xz of 54 MiB.

    python tests/gpu/slim_fbgemm.py 1.6.0 build/gpu-archives/fbgemm.tar.xz

The wheel has 465 MB: every optimizer family for three architectures. This keeps the libraries of a table-batched
embedding's forward, of its backward with fused optimizers, and of its cache, and clears the machine code of other
architectures in them, which xz then packs to nothing. FBGEMM 1.X goes with torch 2.(X + 5). Needs pip; no GPU.
"""

from __future__ import annotations

import argparse
import mmap
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# Of `fbgemm_gpu_libraries` in the package's __init__.py: what the training ops load.
LIBRARIES = (
    "config", "sparse_async_cumsum", "tbe_utils", "tbe_common", "tbe_cache", "tbe_optimizers", "tbe_training_forward",
    "tbe_training_backward", "tbe_training_backward_pt2", "tbe_training_backward_split_host", "py",
)  # fmt: skip
BESIDE = ("asmjit", "fbgemm")  # that those link to
# A fat binary: magic, version, size of its header, size of the entries behind it. An entry: kind, version, size of its
# header, size of its payload; at byte 28 the architecture.
MAGIC, HEADER, ENTRY = struct.pack("<I", 0xBA55ED50), struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
MACHINE_CODE, ARCHITECTURE = 2, 90  # the kind, where 1 is PTX; compute capability without its dot


def clear_other_code(library: Path, architecture: int) -> tuple[int, int]:
    """Overwrite with zeros, in place, GPU code of other architectures; the bytes of GPU code left, and cleared."""
    sizes = [0, 0]
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        begin = image.find(MAGIC)
        while begin >= 0:
            _, version, header_size, size = HEADER.unpack_from(image, begin)
            end = begin + header_size + size
            if version != 1 or header_size != HEADER.size or end > len(image):  # these bytes happen to be the magic
                begin = image.find(MAGIC, begin + len(MAGIC))
                continue
            entry = begin + header_size
            while entry < end:
                kind, _, entry_header_size, payload_size, target = ENTRY.unpack_from(image, entry)
                payload, entry = entry + entry_header_size, entry + entry_header_size + payload_size
                is_other = (kind, target) != (MACHINE_CODE, architecture)
                if is_other:
                    image[payload:entry] = bytes(payload_size)
                sizes[is_other] += payload_size
            begin = image.find(MAGIC, end)
    return sizes[0], sizes[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        download += ["--platform", "manylinux_2_28_x86_64", "--dest", name]
        subprocess.run([*download, f"fbgemm-gpu=={options.version}"], check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        package = folder / "fbgemm_gpu"
        for library in sorted(package.rglob("*.so")):
            if library.stem.removeprefix("fbgemm_gpu_") in (*LIBRARIES, *BESIDE):
                left, cleared = (size >> 20 for size in clear_other_code(library, ARCHITECTURE))
                print(f"{library.name}: {left} MiB of code for sm_{ARCHITECTURE}, {cleared} MiB cleared")
            else:
                library.unlink()
        module, loaded = package / "__init__.py", [f"fbgemm_gpu_{library}" for library in LIBRARIES]
        assignment, text = f"fbgemm_gpu_libraries = {loaded}", module.read_text()
        text, count = re.subn(r"(?s)fbgemm_gpu_libraries = \[.*?\]", assignment, text)
        if count != 1:
            sys.exit(f"FBGEMM {options.version} lists its libraries in another way than this tool knows")
        module.write_text(text)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(options.out, "w:xz") as tar:
            for part in (package, *folder.glob("fbgemm_gpu*.dist-info")):  # which says the version
                tar.add(part, part.name)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
