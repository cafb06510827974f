"""Versions, the GPU, and how fast it copies, and gathers rows of 512 bytes: `python benchmarks/gpu/device.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # called as a file, Python puts only this folder there

from benchmarks.measuring.clock import Clock, Contender
from tests.gpu.driver import rehearsing

COPIED = 2 << 30  # bytes, read and written: many times any cache


def main() -> None:
    import triton

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}")
    device, num_bytes = torch.device("cuda"), COPIED
    if rehearsing():
        device, num_bytes = torch.device("cpu"), COPIED >> 8
    elif not torch.cuda.is_available():
        sys.exit("there is no CUDA device, or torch does not see it")
    else:
        print(torch.cuda.get_device_properties(device))
        command = ["nvidia-smi", "--query-gpu=driver_version,memory.used,temperature.gpu", "--format=csv,noheader"]
        tool = shutil.which(command[0])
        print("driver", subprocess.run(command, capture_output=True, text=True).stdout if tool else "not known")
    source = torch.zeros(num_bytes // 1024, 128, device=device)
    target, rows = torch.empty_like(source), torch.randint(len(source), (len(source),), device=device)
    runs = {"copies": lambda: target.copy_(source), "gathers": lambda: torch.index_select(source, 0, rows, out=target)}
    contenders = [Contender(name, lambda _: None, lambda _, run=run: run(), num_bytes) for name, run in runs.items()]
    outcome = Clock(device).measure(contenders, 20)
    if outcome.errors:
        sys.exit(str(outcome.errors))
    rates = [f"{timing.name} {num_bytes / timing.percentile(50) / 1e6:.0f} GB/s" for timing in outcome.timings]
    print(f"{device}: {', '.join(rates)}")


if __name__ == "__main__":
    main()
