"""From the raw figures of a run to README and docs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run as benchmark_run
from benchmarks.measuring import report, result_files
from benchmarks.measuring.clock import Timing
from benchmarks.measuring.result_files import Goal, at_least, timing_rows
from benchmarks.measuring.workload import same
from benchmarks.run import condense, run_pytest

pytestmark = pytest.mark.more

SHAPE = same(2048, 26, 1, 64)
OURS, PEER = Timing("tritonemb", (1.0, 2.0, 3.0)), Timing("fbgemm", (8.0, 9.0, 10.0))
SHARED = {
    "date": "2026-01-02", "commit": "abc", "cpu": "Some CPU, 2 cores", "threads": 2, "copy_gb_per_s": 30.0,
    "torch": "2", "numba": "1", "fbgemm": "3", "tritonemb": "0",
}  # fmt: skip


def results() -> dict[str, Any]:
    rows = timing_rows("forward", SHAPE, [OURS, PEER], {"tritonemb": 4_000_000, "fbgemm": 4_000_000})
    targets = [at_least("forward", SHAPE, OURS, [PEER], 4.0)]
    return condense([{"extra_info": {"rows": rows, "targets": targets}}], SHARED)


def test_rows_are_complete_and_in_the_right_units() -> None:
    row = results()["rows"][0]
    assert (row["op"], row["implementation"], row["p50_ms"], row["rounds"]) == ("forward", "tritonemb", 2.0, 3)
    assert row["gb_per_s"] == pytest.approx(2.0)  # 4 MB in 2 ms
    assert row["cpu"] == "Some CPU, 2 cores"


def test_targets_compare_medians_with_the_fastest_peer() -> None:
    slower = Timing("slower", (90.0,))
    target = at_least("forward", SHAPE, OURS, [slower, PEER], 4.6)
    assert target["ratio"] == pytest.approx(4.5)
    assert target["measured"] == "fbgemm / tritonemb"
    assert not target["met"]
    assert at_least("forward", SHAPE, OURS, [PEER], 4.5)["met"]
    assert Goal(0, 1, most=4.5).row("scaling", SHAPE, [PEER, OURS])["met"]
    assert not Goal(0, 1, most=4.4).row("scaling", SHAPE, [PEER, OURS])["met"]


def test_only_the_marked_section_is_replaced() -> None:
    text = "before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter\n"
    expected = "before\n<!-- bench:begin -->\nnew\n<!-- bench:end -->\nafter\n"
    assert report.replace_section(text, "bench", "new", "page.md") == expected
    assert report.replace_section(expected, "bench", "new", "page.md") == expected


@pytest.mark.parametrize("text", ["", "<!-- bench:begin -->", "<!-- bench:end --> <!-- bench:begin -->"])
def test_a_page_without_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md needs one line '<!-- bench:begin -->'"):
        report.replace_section(text, "bench", "new", "page.md")


def test_the_section_shows_figures_of_the_file() -> None:
    section = report.speed_section(results())
    assert (
        "| forward | B2048 T26 L1 D64 rows 100,000 | fbgemm 9.00 | 2.00 | 2.0 | 7 % | 4.50 | - |"
        in section.splitlines()
    )
    assert "a plain copy moves 30 GB/s" in section


def test_the_readme_shows_steps_beside_the_fastest_peer() -> None:
    timings = [OURS, Timing("slow", (90.0,)), PEER, Timing("copy", (0.5,))]
    moved = dict.fromkeys(("tritonemb", "slow", "fbgemm", "copy"), 1)
    rows = [row for op in ("forward", "step, Adagrad") for row in timing_rows(op, SHAPE, timings, moved)]
    section = report.shown_section(condense([{"extra_info": {"rows": rows}}], SHARED), "some.png")
    assert "](some.png)" in section
    assert [line for line in section.splitlines() if str(SHAPE) in line] == [
        f"| Adagrad | {SHAPE} | fbgemm 9.0 | 2.0 | 4.5 |"
    ]


def test_steps_by_ids_have_a_table_with_times_and_cpu_times() -> None:
    timings = [replace(OURS, cpu_samples=(3.0,)), replace(PEER, cpu_samples=(18.0,))]
    moved = dict.fromkeys(("tritonemb", "fbgemm"), 1)
    ops = "step, uniform ids, 1 thread", "step, uniform ids, 2 threads", "step, row-wise Adagrad"
    rows = [row for op in ops for row in timing_rows(op, SHAPE, timings, moved)]
    run = condense([{"extra_info": {"rows": rows}}], SHARED)
    section = report.speed_section(run).splitlines()
    assert f"| {SHAPE} | 4.50 (6.00) | 4.50 (6.00) |" in section
    assert not any(line.startswith("| step, uniform ids") for line in section)
    assert "With uniform ids, nearly all distinct, it is 4.5 to 4.5 times as fast as FBGEMM's" in report.headline(run)


def test_a_copy_is_no_peer_but_says_what_was_possible() -> None:
    timings = [OURS, Timing("copy", (0.5,))]
    rows = timing_rows("row cache allocate", SHAPE, timings, dict.fromkeys(("tritonemb", "copy"), 4_000_000))
    table = report.speed_section(condense([{"extra_info": {"rows": rows}}], SHARED))
    assert f"| row cache allocate | {SHAPE} | - | 2.00 | 2.0 | 25 % | - | - |" in table.splitlines()


def test_the_picture_has_bars_of_ours_and_the_peers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra draws the picture")
    timings = [OURS, PEER, Timing("copy", (0.5,)), Timing("tritonemb, grouped ahead", (1.0,))]
    for number, rows in enumerate((timing_rows("forward", SHAPE, timings[:2]), timing_rows("forward", SHAPE, timings))):
        report.draw({"rows": rows}, tmp_path / f"{number}.png")
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()


def test_the_newest_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no cpu-<date>\.json"):
        result_files.newest("cpu")
    for date in ("2026-01-02", "2026-01-10", "2025-12-31"):
        result_files.write("cpu", {"date": date})
    assert result_files.read(result_files.newest("cpu")) == {"date": "2026-01-10"}


def test_pages_show_the_figures_of_the_newest_files(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    def unchanged(page: str, name: str, content: str) -> None:
        text = (report.ROOT / page).read_text()
        assert report.replace_section(text, name, content, page) == text, (page, name)
        pages.append(f"{page} {name}")

    monkeypatch.setattr(report, "update", unchanged)
    monkeypatch.setattr(report, "draw_if_possible", lambda *_: None)
    report.main()
    assert len(pages) == 3 + len(report.SECTIONS)


def test_reports_of_another_selection_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_codecs.py").touch()
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark_run, "PARTS", tmp_path / "build" / "gpu-bench")
    commands: list[list[str]] = []

    def finish(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (path,) = (word.partition("=")[2] for word in command if word.startswith("--benchmark-json="))
        Path(path).write_text(json.dumps({"benchmarks": [{"extra_info": {"command": len(commands)}}]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", finish)
    calls = (5, "step"), (5, "step"), (5, ""), (40, ""), (40, "", True), (40, "", True)
    reports = [run_pytest({}, *arguments, left=True) for arguments in calls]
    assert [report["extra_info"]["command"] for (report,) in reports] == [1, 1, 2, 3, 4, 4]
