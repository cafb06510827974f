"""The kernels' cache on disk."""

from __future__ import annotations

import ast
import errno
import gc
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numba.core.registry import cpu_target

import tritonemb as te
from tritonemb import utils
from tritonemb.kernels.cpu import jit, row_update
from tritonemb.kernels.cpu.row_groups import GOOD_OFFSETS

COUNT_COMPILATIONS = """
import json, torch
from tritonemb.kernels.cpu import jit, random, row_groups

bad_bags = [int(row_groups.first_bad_bag(torch.tensor(offsets).numpy(), 2)) for offsets in ([0, 1, 2], [0, 2, 1])]
kernels = [value for value in vars(row_groups).values() if isinstance(getattr(value, "_cache", None), jit._KernelFiles)]
hits = sum(sum(kernel.stats.cache_hits.values()) for kernel in kernels)
misses = sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels)
random.initialize_rows_([torch.empty(3, 4)], [], [(1, 0.5)])  # a kernel of one loop over tasks
print(json.dumps([hits, misses, bad_bags, len(jit._compile_seconds)]))
"""


def test_no_kernel_takes_the_address_of_its_own_memory_but_in_a_loop():
    """Numba frees an array behind the last statement that names it; what a loop names lives as long as the loop."""
    for source in Path(jit.__file__).parent.glob("*.py"):
        for kernel in ast.walk(ast.parse(source.read_text())):
            if not isinstance(kernel, ast.FunctionDef):
                continue
            loops = [node for node in ast.walk(kernel) if isinstance(node, (ast.For, ast.While))]
            in_loops = {node for loop in loops for part in loop.body for node in ast.walk(part)}
            assigned = [
                node
                for node in ast.walk(kernel)
                if isinstance(node, ast.Assign) and re.search(r"(?<!torch\.)\b(empty|zeros)\(", ast.unparse(node))
            ]
            local = {name.id for node in assigned for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
            uses = [node for node in ast.walk(kernel) if isinstance(node, ast.Attribute) and node.attr == "ctypes"]
            bad = [ast.unparse(node) for node in uses if ast.unparse(node.value) in local and node not in in_loops]
            assert not bad, f"{source.name}, {kernel.name}: {bad}"


def run(cache: Path, **environment: str) -> tuple[int, int, list[int], int]:
    """Cache hits and misses of a kernel, its results, and how many kernels were compiled, in a process of its own."""
    env = {**os.environ, "TRITONEMB_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return tuple(json.loads(subprocess.check_output([sys.executable, "-c", COUNT_COMPILATIONS], env=env, text=True)))


@pytest.mark.more
def test_a_second_process_compiles_nothing(tmp_path):
    hits, misses, bad_bags, compiled = run(tmp_path)
    assert hits == 0
    assert misses >= 1
    assert compiled == misses + 1
    assert bad_bags == [GOOD_OFFSETS, 1]
    assert run(tmp_path) == (misses, 0, bad_bags, 0)


def test_the_cache_is_another_one_when_a_file_beside_a_kernel_has_changed(tmp_path):
    (tmp_path / "helper.py").write_text("STEP = 1")
    initial = jit._kernel_cache_dir.__wrapped__(tmp_path)
    (tmp_path / "helper.py").write_text("STEP = 2")
    assert jit._kernel_cache_dir.__wrapped__(tmp_path) != initial


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_replaced(tmp_path):
    tmp_path.chmod(0o500)
    assert run(tmp_path, TMPDIR=str(tmp_path.parent))[1] >= 1


def test_the_cache_may_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITONEMB_CACHE_DIR", str(tmp_path / "here"))
    assert jit.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("TRITONEMB_CACHE_DIR")
    assert jit.cache_dir().name == "tritonemb"


def test_processes_that_save_at_once_keep_each_signatures_code(tmp_path):
    ready = threading.Barrier(8, timeout=30)

    def save(number: int) -> None:
        files = jit._KernelFiles(str(tmp_path), "kernel", "")
        ready.wait()
        files.save(("signature", number), number)

    with ThreadPoolExecutor(8) as processes:
        list(processes.map(save, range(8)))
    files = jit._KernelFiles(str(tmp_path), "kernel", "")
    assert [files.load(("signature", number)) for number in range(9)] == [*range(8), None]


def decrease(array):
    for i in range(array.size):
        array[i] -= 1


def calls(*functions) -> None:
    """Compile or load each anew, as another process does, and run it."""
    for function in functions:
        array = np.zeros(2, dtype=np.int64)
        jit.compiled(function)(array)
        assert abs(array).tolist() == ([1, 1] if function is decrease else [2, 2])


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "_kernel_cache_dir", lambda folder: tmp_path / "kernels")
    monkeypatch.setattr(jit, "_compile_seconds", [])
    jit._warn_once.cache_clear()
    return tmp_path / "kernels"


def test_a_damaged_file_is_compiled_anew_and_replaced(kept, caplog):
    calls(decrease)
    (path,) = kept.iterdir()
    stored = path.read_bytes()
    for place in (0, 31, 32, len(stored) // 2, len(stored) - 1):
        damaged = bytearray(stored)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        calls(decrease, decrease)
    path.write_bytes(stored[:40])
    calls(decrease, decrease)
    path.write_bytes(b"")
    calls(decrease, decrease)
    assert len(jit._compile_seconds) == 1 + 7
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"{kept}: damaged cache of compiled kernels; compiling again"
    ]


@pytest.mark.parametrize("why", ["full", "no folder"])
def test_where_nothing_can_be_kept_kernels_are_compiled_anew(kept, caplog, monkeypatch, why):
    if why == "full":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(jit._KernelFiles, "_open_for_write", lambda *_: raising(full))
    else:
        kept.write_text("")
    calls(decrease, increase_twice, decrease)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.message.startswith(f"{kept}: cannot write compiled kernels (")


def raising(error):
    raise error


def raise_typing_error(number):
    return number.no_such_attribute


@pytest.mark.parametrize("seconds", [60, 0])
def test_a_process_waits_for_another_that_compiles_the_same_code(kept, monkeypatch, seconds):
    """It is another file, opened anew, so that both may be in one process."""
    first, second = (jit._KernelFiles(str(kept), "kernel", "") for _ in range(2))
    waits = []
    monkeypatch.setattr(jit, "_LOCK_SECONDS", seconds)
    first._lock(str(kept / "code.lock"))
    assert first._lock_file if seconds else True
    monkeypatch.setattr(jit.time, "sleep", lambda wait: waits.append(wait) or first._unlock())
    second._lock(str(kept / "code.lock"))
    assert len(waits) == (1 if seconds else 0)
    assert (second._lock_file is not None) == (seconds > 0)
    second._unlock()
    assert not seconds or not [*kept.iterdir()]


def test_a_compilation_that_fails_lets_others_compile(kept):
    files = jit._KernelFiles(str(kept), "kernel", "")
    files._lock(str(kept / "code.lock"))
    with pytest.raises(KeyboardInterrupt):
        files.unlocking_on_error()(raising)(KeyboardInterrupt())
    assert files._lock_file is None
    assert not [*kept.iterdir()]


def test_a_kernel_that_cannot_be_typed_is_not_locked(kept):
    kernel = jit.compiled(raise_typing_error)
    for _ in range(2):
        with pytest.raises(numba.core.errors.TypingError):
            kernel(1)
        assert kernel._cache._lock_file is None


def test_where_no_process_can_be_started_this_one_compiles_all(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="tritonemb")
    monkeypatch.setattr(sys, "executable", "/usr/bin/server")
    jit._start_compiler.__wrapped__()
    assert "compiling all kernels in this process, as no other can be started: " in caplog.text


def test_the_other_process_compiles_what_a_step_calls():
    row_update.precompile()
    bag = te.nn.EmbeddingBagCollection([te.TableConfig("table", 4, 8)], optimizer=te.optim.SGD(lr=0.1))
    bag(te.KeyedJaggedTensor(["table"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))).sum().backward()
    assert len(row_update._update.overloads) == 1


@pytest.mark.parametrize("there", ["nothing", "own", "open to others", "link", "file"])
def test_the_folder_among_temporary_files_is_ones_own(there, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITONEMB_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"tritonemb-{os.getuid()}"
    if there in ("own", "open to others"):
        usual.mkdir(mode=0o700)
        usual.chmod(0o700 if there == "own" else 0o770)
    elif there == "link":
        (tmp_path / "elsewhere").mkdir()
        usual.symlink_to(tmp_path / "elsewhere")
    elif there == "file":
        usual.write_text("")
    folder = utils.kernel_folder.__wrapped__()
    assert (folder == usual) == (there in ("nothing", "own"))
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "compiled kernels are cached in the temporary folder: " in caplog.text


@pytest.mark.parametrize("whose", ["own", "roots", "another user's", "open to all"])
def test_a_cache_that_others_can_write_is_not_used(whose, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TRITONEMB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kernels = tmp_path / "cache" / "kernels"
    kernels.mkdir(parents=True)
    kernels.chmod(0o777 if whose == "open to all" else 0o755)
    owner = kernels.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + (whose == "another user's"))
    if whose == "another user's" and owner == 0:
        os.chown(kernels, 7, 7)
    if whose == "roots" and owner == 0:
        monkeypatch.setattr(os, "getuid", lambda: 1)
    assert (utils.kernel_folder.__wrapped__() == kernels) == (whose in ("own", "roots"))
    assert (f"other users may write to {kernels}" in caplog.text) == (whose not in ("own", "roots"))


def test_another_users_folder_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITONEMB_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = os.getuid()
    (tmp_path / f"tritonemb-{owner + 1}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert utils.kernel_folder.__wrapped__() != tmp_path / f"tritonemb-{owner + 1}"


@jit.inlined
def _increase(array):
    for i in range(array.size):
        array[i] += 1


def increase_twice(array):
    _increase(array)
    _increase(array)


def test_a_kernel_that_is_compiled_is_logged_once_and_optimized_once(monkeypatch, tmp_path, caplog):
    cpu_target.target_context.refresh()  # Numba's own runtime is compiled now
    base, optimized = jit._Library.__base__, []
    optimize = base._optimize_final_module
    noted = lambda library: optimized.append(library.name) or optimize(library)  # noqa: E731
    monkeypatch.setattr(base, "_optimize_final_module", noted, raising=False)
    monkeypatch.setattr(jit, "_kernel_cache_dir", lambda folder: tmp_path)
    monkeypatch.setenv("TRITONEMB_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, logger="tritonemb")
    kernel, array = jit.compiled(increase_twice), np.zeros(3, dtype=np.int64)
    kernel(array)
    kernel(array)
    assert array.tolist() == [4, 4, 4]
    assert optimized == ["increase_twice"]
    assert gc.isenabled()
    (record,) = caplog.records
    assert record.message.startswith("compiling the CPU kernel test_jit.increase_twice (first use on this machine; ")
    assert record.message.endswith(f"cached in {tmp_path})")


@pytest.mark.parametrize(
    ("level", "quiet", "lines"), [(logging.WARNING, "", 1), (logging.INFO, "", 0), (logging.WARNING, "1", 0)]
)
def test_who_sees_no_notes_is_told_once_that_kernels_are_compiled(level, quiet, lines, monkeypatch, capsys, caplog):
    """When compiling has taken two seconds in all."""

    class Timer:
        def __init__(self, interval, function):
            intervals.append(interval)
            self.start, self.cancel = function, lambda: cancelled.append(interval)

    intervals, cancelled = [], []
    jit._print_notice.cache_clear()
    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(jit, "_compile_seconds", [0.5])
    monkeypatch.setenv("TRITONEMB_QUIET", quiet)
    caplog.set_level(level, logger="tritonemb")
    for _ in range(2):
        with jit._compiling("kernel", "_kernel"):
            pass
    assert intervals[0] == 1.5
    assert intervals[1] < 1.5
    assert cancelled == intervals
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all(line.startswith("tritonemb: compiling kernels for this machine, once: ") for line in said)
    jit._print_notice.cache_clear()
