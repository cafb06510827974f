"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.gpu.driver import rehearsing
from tests.helpers import INTERPRETED
from tests.ranks import Ranks
from tests.selection import Meter, limit_examples, rest, schedule, select, skips_file
from tests.tracing import collect_seldom, hasten_compilation
from tritonemb.ops.registry import use_kernels

_COMMON = {
    "deadline": None,  # the first example compiles kernels
    "database": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
}
settings.register_profile("fewest", max_examples=4, **_COMMON)  # likewise, in `make test`
settings.register_profile("quick", max_examples=8, **_COMMON)
settings.register_profile("few", max_examples=5, **_COMMON)  # for kernels that are interpreted
settings.register_profile("several", max_examples=24, **_COMMON)  # in `make test-more`
settings.register_profile("fast", max_examples=40, **_COMMON)
settings.register_profile("thorough", max_examples=100, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
hasten_compilation()
collect_seldom()
gc.disable()  # until the first test: imports leave little garbage, and full collections would visit all of them
if INTERPRETED:
    from tests.interpreter import hasten

    hasten()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels", choices=("reference", "cpu", "triton"), help="let these serve every op in tests marked public"
    )
    parser.addoption("--quick", action="store_true", help="each value of a parameter once, nothing marked more")
    parser.addoption("--rest", action="store_true", help="what --quick leaves out, and tests of Hypothesis")
    parser.addoption("--measure", type=Path, metavar="FILE", help="write what each test costs to this file")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs; processes would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if path := config.getoption("--measure"):
        config.pluginmanager.register(Meter(path))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--quick") and skips_file(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select, order, and skip what this machine cannot run."""
    has_cuda, has_launcher = torch.cuda.is_available(), INTERPRETED or rehearsing()
    lacking = {
        "gpu": None if has_cuda else "needs a CUDA device",
        "triton": None if has_cuda or has_launcher else "needs TRITON_INTERPRET=1 or a CUDA device",
    }
    reasons = {name: reason for name, reason in lacking.items() if reason}
    if config.getoption("--quick") or config.getoption("--rest"):
        chosen, deselected = select(items) if config.getoption("--quick") else rest(items)
        deselected += [item for item in chosen if any(map(item.get_closest_marker, reasons))]
        items[:] = [item for item in chosen if not any(map(item.get_closest_marker, reasons))]
        config.hook.pytest_deselected(items=deselected)
    if config.getoption("--quick"):
        for item in items:
            limit_examples(item)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items[:] = schedule(items)
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton kernels run: a CUDA device, or the CPU if they are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)`: n processes in one gloo job, started when first asked for."""
    created: dict[int, Ranks] = {}
    yield lambda size: created.setdefault(size, Ranks(size))
    for job in created.values():
        job.close()


@pytest.fixture(scope="module", autouse=True)
def _freeze_imports() -> None:
    """Free the garbage collector from the objects of modules, 400,000, which a full collection would visit."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from one seed and leaves the number of threads as it found it."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    initial = torch.get_num_threads()
    yield
    torch.set_num_threads(initial)


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked public are served as `--kernels` says; without it, as the registry chooses."""
    name = request.config.getoption("--kernels")
    with use_kernels(name) if name and request.node.get_closest_marker("public") else nullcontext():
        yield


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate of localhost for TLS, `pem`, and its `key`."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(folder / "key"), "-out", str(folder / "pem")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl makes no certificate")
    return folder


@pytest.fixture
def poisoned() -> Iterator[None]:
    """`torch.empty` and its kin come filled with NaN or the largest integer, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def dynamo() -> Iterator[None]:
    """A test of `torch.compile` starts with nothing compiled and leaves nothing behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def disk_size() -> str:
    """Of `small_disk`; tests that fill it up sooner have a smaller one."""
    return "4m"


@pytest.fixture
def small_disk(tmp_path: Path, disk_size: str) -> Iterator[Path]:
    """A small file system in memory, where the tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if problem := _mount(disk, disk_size):
        pytest.skip(problem)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def _mount(folder: Path, size: str) -> str | None:
    """Mount a small file system in memory; why that cannot be done."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return "there is no mount"
    return "a small file system cannot be mounted here" if done.returncode else None
