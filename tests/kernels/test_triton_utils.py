"""What kernels share on the host: the error word, and how many programs a device holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tritonemb.kernels import triton_utils
from tritonemb.kernels.triton_utils import tl
from tritonemb.layout import make_layout
from tritonemb.types import TableConfig


class SlowRecord:
    """A record whose readers all see that there is a finding before one of them has read it."""

    def __init__(self, fields: list[int], readers: int) -> None:
        self.fields, self.together = fields, threading.Barrier(readers)

    def __getitem__(self, index: int) -> int:
        result = self.fields[index]
        self.together.wait(timeout=60)
        return result

    def tolist(self) -> list[int]:
        return list(self.fields)

    def zero_(self) -> None:
        self.fields = [0] * len(self.fields)


def test_one_of_two_threads_raises_a_finding(monkeypatch):
    layout = make_layout([TableConfig("user", 9, 4)], ["user"], True, torch.device("cpu"))
    number = int(triton_utils.error_args(layout, torch.device("cpu"))[2])
    record = SlowRecord([1, number, 3, 12, 0, 0, 2, 9, 0], readers=2)  # an id out of range
    monkeypatch.setattr(triton_utils, "error_word", lambda device: (torch.ones(1, dtype=torch.int32), record, record))

    def found() -> str:
        try:
            triton_utils.poll(torch.device("cpu"))
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        quiet, raised = sorted(future.result() for future in [pool.submit(found) for _ in range(2)])
    assert quiet == ""
    assert "'user'" in raised
    assert "12" in raised


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 16])
def test_all_programs_of_a_loop_are_resident(num_warps, monkeypatch):
    """A program that waits for another's registers would begin when the others have done its share."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    programs = triton_utils.num_programs(torch.device("cuda"), num_warps)
    registers = programs * num_warps * 32 * triton_utils.MAX_REGISTERS
    assert registers <= 132 * 65_536 < registers * 2


@triton_utils.jit
def search_kernel(values, places, count, wanted, stride):
    place = triton_utils.last_at_most(values, count, tl.zeros((1,), tl.int64) + wanted, stride)
    tl.store(places + tl.arange(0, 1), place)


@pytest.mark.triton
@pytest.mark.parametrize("count", [5, 2**30 + 1, 2**31 - 1])
def test_a_search_among_more_than_a_billion_values_does_not_wrap(device, count):
    """All values are one number in memory, 0 apart: a sum of two places beyond 2^30 has more than 31 bits."""
    value, place = torch.tensor([7], device=device), torch.full((1,), -1, dtype=torch.int32, device=device)
    for required, expected in ((7, count - 1), (6, 0)):
        triton_utils.launch(search_kernel, (1,), value, place, count, required, 0)
        assert place.item() == expected


class Kernel:
    """Notes what it is specialised on, and what the compiled kernel is launched with."""

    arg_names = ("source", "size", "scale", "target", "BLOCK", "ALIGN")

    def __init__(self) -> None:
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.compiled += 1
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


def test_a_launch_is_specialised_once(monkeypatch):
    """On what Triton is: dtypes, addresses and integers that 16 divides, 1, integers of 64 bits, constants."""
    monkeypatch.setattr(triton_utils, "launch_recorder", None)
    kernel, room = Kernel(), torch.zeros(64)
    usual = {"source": room, "size": 3, "scale": 0.5, "BLOCK": 8, "ALIGN": 4}
    changes = ({}, {"source": room[1:]}, {"source": room.int()}, {"source": None}, {"size": 1}, {"size": 32})
    for change in (*changes, {"size": 2**31 + 3}, {"BLOCK": 16}, {"ALIGN": 16}):
        source, size, scale, block, align = {**usual, **change}.values()
        initial = kernel.compiled
        for grid in ((2,), (5, 3)):
            triton_utils.launch(kernel, grid, source, size, scale, room, ALIGN=align, BLOCK=block)
        assert kernel.compiled == initial + 1, change
    triton_utils.launch(kernel, (2,), room, 5, 0.25, room, ALIGN=4, BLOCK=8)
    assert kernel.compiled == 9
    grid, args = kernel.launched[-1]
    assert grid[:3] == (2, 1, 1)
    assert args[1:3] == (5, 0.25)
    assert args[4:] == (8, 4)  # in the kernel's order
