"""The microbenchmarks of op families: in small they run, ours and its peers have equal results, all say their bytes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tritonemb as te
from benchmarks import bench_dynamic_table, bench_embedding_bag
from benchmarks.measuring import peers
from benchmarks.measuring.cases import COPY, OURS
from benchmarks.measuring.clock import Clock, Timing
from benchmarks.measuring.peers import OurTables, check_forward, check_step, copy_weights
from benchmarks.measuring.result_files import lines, timing_rows
from benchmarks.measuring.workload import draw_batches, draw_gradient, same
from benchmarks.run import FAMILIES, ON_TABLES

pytestmark = pytest.mark.more

CPU_SHAPE = same(8, 2, 3, 16, 50)
CPU = torch.device("cpu")


def name(family: ModuleType) -> str:
    return family.__name__.rpartition(".")[2]


@pytest.mark.parametrize("family", [*(one for one in FAMILIES if one not in ON_TABLES), bench_dynamic_table], ids=name)
def test_all_cases_run_and_contenders_agree(family: ModuleType) -> None:
    for case in family.cases(CPU, tiny=True):
        contenders = case.make(Clock(CPU))
        assert contenders[0].name == OURS
        assert all(one.check is not None for one in contenders[:-1])
        outcome = Clock(CPU).measure(contenders, rounds=1, warmup_rounds=0)
        assert outcome.errors == {}
        assert [timing.name for timing in outcome.timings] == [one.name for one in contenders]
        assert min(outcome.num_bytes.values()) == outcome.num_bytes[COPY] > 0


def test_all_benchmarks_can_be_imported() -> None:
    """But for peers that are not installed."""
    for file in sorted(Path(peers.__file__).parents[1].glob("bench_*.py")):
        try:
            importlib.import_module(f"benchmarks.{file.stem}")
        except ModuleNotFoundError as error:
            if error.name not in ("fbgemm_gpu", "torchrec", "deepspeed", "torchao"):
                raise


@pytest.mark.parametrize("interval", [1, 10])
def test_managed_collisions_take_the_same_steps(interval: int) -> None:
    """What they have trained is compared where they are made."""
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    result = bench_dynamic_table.managed_collisions(2_000, 500, interval)
    outcome = Clock(CPU).measure(result, rounds=1, warmup_rounds=0)
    assert outcome.errors == {}
    assert [timing.name for timing in outcome.timings] == [OURS, "torchrec, LRU", "torchrec, LFU"]


@pytest.mark.parametrize("family", ON_TABLES, ids=name)
def test_ops_over_tables_run_beside_their_peers(family: ModuleType) -> None:
    """Those over the smallest workload; peers are compared with ours when the tables are made."""
    everything = list(family.cases(CPU, tiny=True))
    for case in (one for one in everything if one.shape == everything[0].shape):
        contenders = case.make(Clock(CPU))
        outcome = Clock(CPU).measure(contenders, rounds=1, warmup_rounds=0)
        assert outcome.errors == {}
        assert outcome.num_bytes.keys() == {one.name for one in contenders}
        assert {OURS, "torch"} & outcome.num_bytes.keys()


@pytest.mark.parametrize("name", ["torch", "fbgemm"])
def test_a_peer_that_cannot_be_made_says_why_and_the_others_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setitem(peers.PEERS, name, fail)
    monkeypatch.setattr(peers, "has_fbgemm", lambda: name == "fbgemm")
    monkeypatch.setattr(peers, "_last", None)
    (case, *_) = bench_embedding_bag.cases(CPU, tiny=True)
    outcome = Clock(CPU).measure(case.make(Clock(CPU)), rounds=1, warmup_rounds=0)
    assert outcome.errors == {name: "RuntimeError: RuntimeError: no room"}
    assert {OURS, COPY} <= {timing.name for timing in outcome.timings}
    monkeypatch.setattr(peers, "_last", None)


def test_a_peer_that_looks_up_or_trains_otherwise_is_refused() -> None:
    batches, gradient = draw_batches(CPU_SHAPE, 1), draw_gradient(CPU_SHAPE)
    fused, same_tables, other = (OurTables(CPU_SHAPE) for _ in range(3))
    copy_weights(fused, same_tables)
    check_forward(fused, same_tables, batches[0])
    with pytest.raises(AssertionError, match="not close"):
        check_forward(fused, other, batches[0])
    check_step(fused, same_tables, batches[0], gradient)
    other = OurTables(CPU_SHAPE, optimizer=te.optim.SGD(1.0))
    copy_weights(fused, other)
    with pytest.raises(AssertionError, match="not close"):
        check_step(fused, other, batches[0], gradient)


def test_a_line_says_share_of_the_copy_and_ratio_to_the_fastest_peer() -> None:
    medians = {OURS: 2.0, "torch": 8.0, "fbgemm": 3.0, COPY: 1.0}
    timings = [Timing(name, (median,)) for name, median in medians.items()]
    fused, torchs, _, copy = lines(timing_rows("op", "shape", timings, dict.fromkeys(medians, 8)))
    assert "50 % of a copy" in fused
    assert "1.50 x fbgemm" in fused
    assert "12 % of a copy" in torchs
    assert " x " not in torchs + copy
