"""Launch every kernel on small shapes, for `compute-sanitizer`: `python -m tests.gpu.sanitize [part of a name]`.

Torch's caching allocator is off, so that each tensor is an allocation of its own and a stray access is noticed.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import tritonemb as te
from tests.kernels.ahead_of_time_cases import CASES, on


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("sanitize needs a CUDA device")
    select = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [case for case in CASES if case.core and select in case.name]
    if not chosen:
        sys.exit(f"no case has {select!r} in its name")
    with on("cuda"):
        for case in chosen:
            torch.manual_seed(0)
            case.call()
            torch.cuda.synchronize()
            print(f"ran {case.name}", flush=True)
    te.check_errors()
    print(f"all {len(chosen)} cases ran")


if __name__ == "__main__":
    main()
