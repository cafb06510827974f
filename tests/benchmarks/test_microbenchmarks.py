"""The microbenchmarks of op families: in small they run, ours and its peers have equal results, all say their bytes."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from benchmarks.cases import COPY, OURS
from benchmarks.clock import Clock, Timing
from benchmarks.gpu.run import FAMILIES
from benchmarks.record import lines, timing_rows

CPU = torch.device("cpu")


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.rpartition(".")[2])
def test_all_cases_run_and_contenders_agree(family: ModuleType) -> None:
    for case in family.cases(CPU, tiny=True):
        contenders = case.make(CPU)
        assert contenders[0].name == OURS
        assert all(one.check is not None for one in contenders[:-1])
        outcome = Clock(CPU).measure(contenders, rounds=1, warmup_rounds=0)
        assert outcome.errors == {}
        assert [timing.name for timing in outcome.timings] == [one.name for one in contenders]
        assert min(outcome.num_bytes.values()) == outcome.num_bytes[COPY] > 0


def test_a_line_says_share_of_the_copy_and_ratio_to_the_fastest_peer() -> None:
    medians = {OURS: 2.0, "torch": 8.0, "fbgemm": 3.0, COPY: 1.0}
    timings = [Timing(name, (median,)) for name, median in medians.items()]
    ours, torchs, _, copy = lines(timing_rows("op", "shape", timings, dict.fromkeys(medians, 8)))
    assert "50 % of a copy" in ours
    assert "1.50 x fbgemm" in ours
    assert "12 % of a copy" in torchs
    assert " x " not in torchs + copy
