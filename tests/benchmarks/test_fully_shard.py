"""The study that compares offloaded shards with those of FSDP2 in memory."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measuring import report
from benchmarks.studies.fully_shard import OFFLOADS, PLAIN, times

pytestmark = pytest.mark.more


def test_all_models_have_the_same_losses(ranks: Any, tmp_path: Any) -> None:
    first, second = ranks(2).run(times, 2, str(tmp_path), 2, 32, 3, 8)
    for name in OFFLOADS:
        seconds, losses = first[name]
        assert seconds == second[name][0], "a step takes as long as its slowest rank"
        assert len(seconds) == 2
        assert losses == first[PLAIN][1]


def test_the_table_has_a_line_per_model() -> None:
    rows = [
        {"model": name, "best_ms": 10.0 * (number + 1), "median_ms": 50.0, "peak_bytes": 3 << 20}
        for number, name in enumerate(OFFLOADS)
    ]
    lines = report.fully_shard_section({"rows": rows}).splitlines()
    assert lines[3] == "| states in host memory | 20 ms | 50 ms | 2.00 | 3 MiB |"
    assert len(lines) == 2 + len(OFFLOADS)
