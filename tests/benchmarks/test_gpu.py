"""The GPU's benchmarks, as far as they can be tried without one: figures, files, the report, and that they run."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import run as gpu_run
from benchmarks.gpu import targets
from benchmarks.measuring import cases, report, result_files, workload
from benchmarks.measuring.cases import GRAPH
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.workload import MLPERF_BAGS, MLPERF_ROWS, WORKLOADS, Batch, Workload, draw_batches

pytestmark = pytest.mark.more

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = Workload("small", 4, (100, 50), (3, 1), dim=8, dtype=torch.float16)


def small_batch() -> Batch:
    values = torch.tensor([1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 0, 0, 1, 2])
    return Batch(SMALL, values, torch.tensor([0, 3, 6, 9, 12, 13, 14, 15, 16]), 9 + 3)


def test_bytes_of_a_batch_worked_by_hand() -> None:
    batch = small_batch()  # 16 ids, 12 distinct rows, 8 bags; rows of 16 bytes, outputs and gradients of 32
    assert workload.forward_bytes(batch) == 16 * 8 + 16 * 16 + 8 * 32
    assert workload.group_bytes(batch) == 16 * 8 + 12 * (8 + 4) + 16 * 4
    assert workload.update_bytes(batch) == 16 * (4 + 32) + 2 * 12 * (16 + 4)
    assert workload.sort_bytes(batch) == 16 * 12


def test_shapes_are_those_of_the_published_benchmarks() -> None:
    assert (len(MLPERF_ROWS), len(MLPERF_BAGS), sum(MLPERF_BAGS)) == (26, 26, 214)
    (large,) = (w for w in WORKLOADS if w.num_rows == (100_000_000,))
    assert large.num_rows[0] * large.dim * large.dtype.itemsize * 4 < 60e9  # ours, two peers, the state of torch's
    assert next(w for w in WORKLOADS if w.num_tables == 1000).num_ids == 2_048_000


@pytest.mark.parametrize("ids", ["uniform", "zipf", "reuse"])
def test_batches_fit_their_tables(ids: Any) -> None:
    w = Workload("any", 64, (5000, 300), (5, 2), ids=ids)
    first, second = draw_batches(w, 2, CPU)
    for batch in (first, second):
        parts = [values for values, _ in batch.bags]
        assert [len(part) for part in parts] == [320, 128]
        assert all(part.min() >= 0 and part.max() < rows for part, rows in zip(parts, w.num_rows, strict=True))
        assert batch.num_distinct == sum(len(part.unique()) for part in parts)
        assert batch.offsets[-1] == len(batch.values) == w.num_ids
    assert not torch.equal(first.values, second.values)


def test_zipf_ids_are_as_skewed_as_they_say() -> None:
    (batch,) = draw_batches(Workload("any", 50_000, (1000,), (1,), ids="zipf"), 1, CPU)
    counts = torch.bincount(batch.values, minlength=1000).sort(descending=True).values.double()
    expected = torch.arange(1, 1001).double() ** -workload.ZIPF_EXPONENT
    # A frequency of 11,000 in 50,000 draws has a standard deviation of 90.
    assert counts[0] / 50_000 == pytest.approx(float(expected[0] / expected.sum()), abs=0.01)
    assert counts[0] / counts[3] == pytest.approx(4**workload.ZIPF_EXPONENT, rel=0.1)


def test_a_contender_that_fails_is_recorded_and_the_others_go_on() -> None:
    calls = []

    def fail(number: int) -> None:
        if number == 2:
            raise RuntimeError("out\nof memory")

    contenders = [
        Contender("fails", lambda number: number, fail, 1),
        Contender("runs", lambda number: number, calls.append, 2),
    ]
    outcome = Clock(CPU).measure(contenders, rounds=3, warmup_rounds=1)
    assert outcome.errors == {"fails": "RuntimeError: out of memory"}
    assert [(t.name, len(t.samples)) for t in outcome.timings] == [("runs", 3)]
    assert calls == [0, 1, 2, 3]
    assert outcome.num_bytes["runs"] == 2


def test_a_contender_whose_result_is_wrong_is_not_timed() -> None:
    contenders = cases.contenders(
        {"right": lambda: torch.ones(2), "wrong": lambda: torch.zeros(2)}, 8, CPU, cases.equal(torch.ones(2))
    )
    outcome = Clock(CPU).measure(contenders, rounds=2)
    assert [timing.name for timing in outcome.timings] == ["right", "copy"]
    assert outcome.errors["wrong"].startswith("AssertionError")


@pytest.mark.parametrize("num_bytes", [4 * 3 * 8 * 2 + 8, 10_000])
def test_a_gather_moves_as_many_bytes_by_the_same_ids(num_bytes: int) -> None:
    rows = torch.tensor([0, 7, 3, 7])
    gather = cases.gather_contender(rows, 3, torch.float32, num_bytes)
    (outcome,) = (gather.run(gather.prepare(0)),)
    moved = outcome.numel() * 4 * 2 + outcome.shape[0] * 8
    assert num_bytes - 32 < moved <= num_bytes  # a row of 12 bytes is read and written, and an id read
    outcome = Clock(CPU).measure([gather], rounds=2)
    assert (outcome.errors, outcome.num_bytes) == ({}, {cases.GATHER: num_bytes})


def test_a_case_ends_at_the_deadline_with_the_rounds_that_it_has() -> None:
    def measure(last: int) -> int:
        """Rounds of a contender in whose round `last` time is over; round 0 is a warm-up."""
        clock = Clock(CPU)

        def run(number: int) -> None:
            clock.deadline = 0.0 if number == last else math.inf

        (timing,) = clock.measure([Contender("any", lambda number: number, run)], 1000, warmup_rounds=1).timings
        return len(timing.samples)

    assert measure(5) == 5
    assert measure(3) == 3
    with pytest.raises(TimeoutError, match="deadline reached after 2 rounds"):
        measure(2)


def test_repeated_runs_are_divided_by_their_number() -> None:
    calls: list[int] = []
    outcome = Clock(CPU).measure([Contender("any", lambda n: n, calls.append, 1)], 2, warmup_rounds=1, repeats=4)
    assert calls == list(range(12))
    assert len(outcome.timings[0].samples) == 2


def row(op: str, implementation: str, median: float, shape: str = "some") -> dict[str, Any]:
    return {
        "op": op, "shape": shape, "implementation": implementation, "p20_ms": median, "p50_ms": median,
        "p80_ms": median, "rounds": 3, "bytes": 10**9, "gb_per_s": 1e3 / median, "date": "2026-01-02",
        "commit": "abc", "device": "Some GPU", "torch": "2", "triton": "3", "cuda": "13", "fbgemm": None,
        "tritonemb": "0",
    }  # fmt: skip


def results() -> dict[str, Any]:
    rows = [row("forward", "tritonemb", 1.0), row("forward", "fbgemm", 1.2), row("forward", "copy", 0.6)]
    rows += [row("forward", "gather", 0.7)]
    rows += [row("sort", "torch", 0.5), row("group + update", "tritonemb", 2.0)]
    failures = [
        {"op": "group + update", "shape": "some", "implementation": "fbgemm", "error": "RuntimeError: no | luck"}
    ]
    verdicts = targets.verdicts(rows)
    return {"kind": "gpu", "date": "2026-01-02", "rows": rows, "targets": verdicts, "failures": failures}


def test_targets_are_met_missed_or_unknown() -> None:
    result = {(v["op"], v["measured"]): (v["ratio"], v["met"]) for v in results()["targets"]}
    assert result["forward", "fbgemm / tritonemb"] == (pytest.approx(1.2), True)
    assert result["forward", "gather / tritonemb"] == (pytest.approx(0.7), False)
    assert ("group + update", "fbgemm / tritonemb") not in result  # whose targets are of other shapes
    shaped = targets.verdicts([row("group + update", "tritonemb", 2.0, "mlperf: B8192")])
    assert [(v["op"], v["ratio"], v["met"]) for v in shaped] == [("group + update", None, None)]
    assert json.loads(json.dumps(results()["targets"])) == results()["targets"]


PAGE = "# name\n\n<!-- bench:begin -->\nold\n<!-- bench:end -->\n\n## Next\n"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / report.BENCHMARKS
    path.parent.mkdir()
    path.write_text(PAGE)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(result_files, "RESULTS", tmp_path / "results")
    return path


def test_without_a_measured_gpu_the_page_says_nothing(page: Path) -> None:
    result_files.write("cpu", {"date": "2026-01-02"})
    report.report_gpu()
    assert page.read_text() == PAGE


def test_a_measured_gpu_gets_a_section_of_its_own(page: Path) -> None:
    result_files.write("some-gpu", results() | {"date": "2025-12-31", "rows": [row("forward", "tritonemb", 9.0)]})
    result_files.write("some-gpu", results())
    for _ in range(2):  # the second time the section is there
        report.report_gpu()
    text = page.read_text()
    assert text.startswith("# name\n\n<!-- bench:begin -->\nold\n<!-- bench:end -->\n\n## Speed on one Some GPU\n")
    assert text.endswith("<!-- gpu Some GPU:end -->\n\n## Next\n")
    assert text.count("## Speed on one Some GPU") == 1
    lines = text.splitlines()
    assert "| forward | some | fbgemm 1.200 | tritonemb | 1.000 | 70 % | 1.20 |" in lines
    assert "| sort | some | - | torch | 0.500 | - | - |" in lines
    assert "| forward | some | gather / tritonemb | at least 0.9 | 0.70 | not met |" in lines
    assert "| group + update | some | fbgemm | RuntimeError: no / luck |" in lines


def test_file_names_come_from_the_device() -> None:
    assert gpu_run.slug("NVIDIA H200") == "nvidia-h200"
    assert gpu_run.slug("AMD Instinct MI300X (OAM)") == "amd-instinct-mi300x-oam"


def test_cases_can_be_chosen_by_name() -> None:
    everything = list(gpu_run.cases(GPU, tiny=False))
    assert len({str(case) for case in everything}) == len(everything)
    chosen = gpu_run.select(iter(everything), "codec fp16, DLRM")
    assert [case.op for case in chosen if not case.op.endswith(GRAPH)] == [
        "codec fp16 pack", "codec fp16 unpack", "DLRM step", "DLRM step"
    ]  # fmt: skip
    both = gpu_run.select(iter(everything), "forward,step, row-wise", ["B8192 T26 L1 D128 float32", "B2048 T26"])
    assert {case.op.removesuffix(GRAPH) for case in both} == {"forward", "step, row-wise Adagrad"}
    assert {case.shape.split(":")[1].split()[0] for case in both} == {"B8192", "B2048"}
    assert len(both) == 2 * 2 * 4  # eager and as a graph; three widths of the smaller batch
    assert {case.op.removesuffix(GRAPH).split()[0] for case in everything} == {
        "forward", "sort", "group", "custom", "step,", "DLRM", "codec", "interaction", "cross", "jagged", "block",
        "row", "training",
    }  # fmt: skip


def test_who_chooses_no_case_is_told() -> None:
    with pytest.raises(SystemExit, match=r"no case has 'nothing' in its op and one of \[\] in its shape; --list shows"):
        gpu_run.main(["--tiny", "--op", "nothing"])


def test_all_but_updates_and_tiers_are_measured_as_cuda_graphs_too() -> None:
    ops = {case.op for case in gpu_run.cases(CPU, tiny=True)}
    eager = {op for op in ops if not op.endswith(GRAPH)}
    assert {op for op in eager if op + GRAPH not in ops} == {
        "group + update", "custom update", "training from host memory", "training from disk"
    }  # fmt: skip
    assert {op.removesuffix(GRAPH) for op in ops} == eager


def test_each_workload_family_and_tier_is_a_process() -> None:
    everything = list(gpu_run.cases(GPU, tiny=False))
    groups = [group for group, _ in itertools.groupby(everything, key=lambda case: case.group)]
    assert len(set(groups)) == len(groups) == 2 * len(WORKLOADS) + len(gpu_run.FAMILIES) - len(gpu_run.ON_TABLES) + 3
    first = everything[: sum(case.op.startswith(("forward", "group +", "step")) for case in everything)]
    assert {case.op.removesuffix(GRAPH) for case in first} == {"forward", "group + update", "step, row-wise Adagrad"}
    assert {case.shape for case in first} == {str(workload) for workload in WORKLOADS}
    (single, *_), *peers = ([case for case in everything if case.group == group] for group in groups[-3:])
    assert "training" in single.op
    assert all(len(other) == 1 for other in peers)


def test_ops_on_tables_run_and_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops, shapes = "forward,group,step,sort,codec int8", ["small tables", "rows 8 T26 D128"]
    result = gpu_run.main(["--tiny", "--op", ops, "--shape", *shapes, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("cpu-*.json")
    assert json.loads(path.read_text()) == result
    measured = {(row["op"], row["implementation"]) for row in result["rows"]}
    for op in ("forward", "group", "group + update", "step, row-wise Adagrad", "codec int8 pack", "codec int8 unpack"):
        assert (op, "tritonemb") in measured
    assert ("sort", "torch") in measured
    assert ("forward", "torch") in measured
    assert ("group + update", "tritonemb, grouped ahead") in measured
    assert (f"step, row-wise Adagrad{GRAPH}", "tritonemb") in measured
    assert {failure["implementation"] for failure in result["failures"]} <= {"fbgemm"}
    assert all(row["bytes"] > 0 and row["p50_ms"] > 0 for row in result["rows"])
    assert "wrote" in capsys.readouterr().out


def test_a_run_without_time_says_what_it_has_not_measured(tmp_path: Path) -> None:
    options = ["--tiny", "--op", "codec int8 pack", "--seconds", "0", "--out", str(tmp_path)]
    result = gpu_run.main(options)
    assert result["rows"] == []
    assert {(failure["op"], failure["implementation"], failure["error"]) for failure in result["failures"]} == {
        (op, "all", "not measured: 0 s were over") for op in ("codec int8 pack", f"codec int8 pack{GRAPH}")
    }
    (path,) = tmp_path.glob("cpu-*.json")
    assert json.loads(path.read_text()) == result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    result = gpu_run.main(["--tiny", "--seconds", "850"])
    assert all(failure["implementation"].startswith("fbgemm") for failure in result["failures"])
    assert ("DLRM step", "tritonemb") in {(row["op"], row["implementation"]) for row in result["rows"]}
