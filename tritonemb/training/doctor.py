"""Checks of the installation by `tritonemb doctor`: versions, devices, kernels, a training step, embedding servers."""

import copy
import functools
import platform
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import metadata

import torch

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.nn.collections import EmbeddingBagCollection
from tritonemb.ops.registry import REFERENCE, check_errors, explain_choice, ops, use_kernels
from tritonemb.optimizers import RowWiseAdagrad
from tritonemb.server.attach import connect
from tritonemb.training.callbacks.console import format_bytes
from tritonemb.types import TableConfig
from tritonemb.utils import align_columns, cpu_model, kernel_folder

# Largest difference between kernels and references: values are fp32 sums of at most 8 products of numbers near 1.
TOLERANCE = 1e-5
PACKAGES = ("tritonemb", "torch", "triton", "numba", "numpy", "pyarrow")


def examine(device: str | None = None) -> tuple[str, bool]:
    """Check a device, by default the CPU and every GPU; return a report, and whether all is well. Raise ValueError for
    an unknown device."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = [torch.device("cpu"), *gpus] if device is None else [check_device(device)]
    lines = ["versions", *align_columns(("", *item) for item in versions().items())]
    healthy = True
    for target in devices:
        details = versions(target)
        try:
            difference = check_step(target)
            verdict = f"agrees with the reference (largest difference {difference:.1e})"
            if not difference <= TOLERANCE:
                verdict = f"is WRONG: it differs from the reference by {difference:.1e}"
        except Exception as error:  # any failure belongs in the report
            verdict = f"FAILS: {type(error).__name__}: {error}"
        healthy &= verdict.startswith("agrees")
        lines += ["", f"{target}: {details['device']}, {details['threads']} threads on the CPU"]
        lines += [*align_columns(("", op, *explain_choice(op, target)) for op in ops()), f"  a training step {verdict}"]
    size = format_bytes(sum(path.lstat().st_size for path in kernel_folder().rglob("*.nbc")))
    lines += ["", f"compiled kernels: {size} in {kernel_folder()}; doctor --clear-kernels removes them"]
    if not gpus:
        lines += ["", f"no GPU: torch {torch.__version__} sees no CUDA device"]
    lines += ["", "all is well" if healthy else "something is wrong: see above"]
    return "\n".join(lines), healthy


def examine_servers(addresses: Sequence[str]) -> tuple[str, bool]:
    """Check embedding servers: latency, collections and tables; return the text, and whether all servers answered."""
    lines, healthy = list[str](), True
    for address in addresses:
        lines.append(address)
        try:
            with connect([address]) as servers:
                begin = time.perf_counter()
                (statistics,) = servers.statistics()
                lines.append(f"  answers in {1000 * (time.perf_counter() - begin):.1f} ms")
        except (OSError, ValueError) as error:
            lines.append(f"  FAILS: {error}")
            healthy = False
            continue
        for name, collection in statistics["collections"].items():
            lines.append(f"  {name}: {collection['steps']:,} steps, staleness {collection['staleness']}")
            tables = collection["tables"].items()
            rows = ((table, f"{t['rows']:,} rows", format_bytes(t["num_bytes"])) for table, t in tables)
            lines += align_columns(("", *row) for row in rows)
    return "\n".join([*lines, "", "all is well" if healthy else "something is wrong: see above"]), healthy


def clear_kernels() -> str:
    """Remove the compiled CPU kernels of all versions; return a message. Raise OSError if they cannot be removed."""
    for version in kernel_folder().iterdir():
        shutil.rmtree(version)
    return f"{kernel_folder()} is empty now; kernels are compiled again on first use"


def check_step(device: torch.device) -> float:
    """Return the largest difference between a training step by the kernels of `device` and one by the references:
    forward, backward and update of sum-pooled, mean-pooled and dynamic tables, with repeated ids and empty bags."""
    tables = [TableConfig("sums", 50, 16), TableConfig("means", 7, 16, pooling="mean")]
    tables.append(TableConfig("dynamic", None, 16, capacity=50))
    torch.manual_seed(0)
    kernel_module = EmbeddingBagCollection(tables, RowWiseAdagrad(lr=0.1), device=device)
    reference = copy.deepcopy(kernel_module)
    lengths = torch.tensor([2, 0, 3, 1, 1, 0, 4, 2, 1, 0, 2, 3])
    ids = torch.randint(7, (int(lengths.sum()),))
    batch = KeyedJaggedTensor.from_lengths([table.name for table in tables], ids, lengths).to(device)
    gradient = torch.randn(4, 48, device=device)
    outputs = []
    for collection, kernels in ((kernel_module, nullcontext()), (reference, use_kernels(REFERENCE))):
        with kernels:
            output = collection(batch)
            output.backward(gradient)
        outputs.append(output.detach())
    check_errors(device)
    pairs = [outputs, *zip(kernel_module.state_dict().values(), reference.state_dict().values(), strict=True)]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def check_device(name: str) -> torch.device:
    """Return the device `name`; raise ValueError if it does not exist or torch cannot use it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def versions(device: torch.device | None = None) -> dict[str, str]:
    """Versions of Python and of the packages that determine results, the platform, and the device if given."""
    packages = {name: _version(name) for name in PACKAGES}
    result = {"python": platform.python_version(), **packages, "platform": platform.platform()}
    if device is not None:
        result["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
        result["threads"] = str(torch.get_num_threads())
    return result


@functools.cache
def _version(package: str) -> str:
    return next((distribution.version for distribution in metadata.distributions(name=package)), "not installed")
