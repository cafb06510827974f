"""What kernels share on the host: the error word, and how many programs a device holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tritonemb.kernels import triton_utils
from tritonemb.layout import make_layout
from tritonemb.types import TableConfig


class SlowRecord:
    """A record whose readers all see that there is a finding before one of them has read it."""

    def __init__(self, fields: list[int], readers: int) -> None:
        self.fields, self.together = fields, threading.Barrier(readers)

    def __getitem__(self, index: int) -> int:
        found = self.fields[index]
        self.together.wait(timeout=60)
        return found

    def tolist(self) -> list[int]:
        return list(self.fields)

    def zero_(self) -> None:
        self.fields = [0] * len(self.fields)


def test_one_of_two_threads_raises_a_finding(monkeypatch):
    layout = make_layout([TableConfig("user", 9, 4)], ["user"], True, torch.device("cpu"))
    number = int(triton_utils.error_args(layout, torch.device("cpu"))[2])
    record = SlowRecord([1, number, 3, 12, 0, 0, 2, 9], readers=2)  # an id out of range
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
