"""Runs side by side, as text and as a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from tritonemb.cli import main
from tritonemb.training.callbacks import Evaluation, FitEnd, FitStart, Log
from tritonemb.training.callbacks.jsonl import RunLog
from tritonemb.training.callbacks.report import tables_of
from tritonemb.training.metrics import Metrics


def write_run(path: Path, lr: float, aucs: list[float], ended: bool = True, rows: int = 100, **options: object) -> Path:
    config = {"data": "clicks", "embedding_lr": lr, "output": {"out": str(path)}, "mlp": [8], **options}
    log, test = RunLog(path / "log.jsonl"), Metrics(aucs[-1], 0.5, 0.9, rows, best_threshold=0.25, best_f1=0.75)
    log.on_start(FitStart(config=config))
    for step, auc in enumerate(aucs, 1):
        log.on_log(Log(step, 0, 8 * step, 0.5 + lr, None, lr, 1234.5, 0.0, 1000, 0.5))
        log.on_evaluation(Evaluation(step, 0, "validation", Metrics(auc, 0.5, 0.9, 100), False))
    if ended:
        log.on_end(FitEnd("finished", len(aucs), 80, 90.0, 1234.5, test))
    return path


def test_runs_are_compared_in_the_terminal_and_on_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), 0.1, [0.6, 0.75, 0.7])
    write_run(Path("b<&>"), 0.2, [0.5], ended=False, mlp=[8, 4], dim=16)
    assert main(["compare", "a", "b<&>", "--out", "page.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:29].strip(): line[29:].split("  ") for line in lines[:-2]}
    rows = {name: [value.strip() for value in values if value.strip()] for name, values in rows.items()}
    assert rows == {
        "": ["a", "b<&>"],
        "embedding_lr": ["0.1", "0.2"],
        "mlp": ["8", "8, 4"],
        "dim": ["-", "16"],
        "test AUC": ["0.7", "-"],
        "test log loss": ["0.5", "-"],
        "test normalized entropy": ["0.9", "-"],
        "test best threshold": ["0.25", "-"],
        "test F1 at the best threshold": ["0.75", "-"],
        "test rows": ["100", "-"],
        "tested at step": ["3", "-"],
        "best validation AUC": ["0.75 at step 2", "0.5 at step 1"],
        "last training loss": ["0.6", "0.7"],
        "samples/s": ["1,234", "1,234"],
        "training time": ["1:30", "0.5 s"],
        "steps": ["3", "1"],
        "ended by": ["finished", "not ended"],
    }
    assert lines[-1] == "curves: page.html"
    assert not any("note:" in line for line in lines)
    text = Path("page.html").read_text(encoding="utf-8")
    page = ElementTree.fromstring(text.replace("<!DOCTYPE html>", "", 1))
    labels = [svg.get("aria-label") for svg in page.iter("svg")]
    assert labels == ["validation AUC over steps", "validation log loss over steps", "training loss over steps"]
    for svg in page.iter("svg"):
        curves = {group.get("class"): list(group) for group in svg.iter("g") if "run" in group.get("class", "")}
        assert {name: [part.tag for part in parts] for name, parts in curves.items()} == {
            "run0": ["polyline", "circle", "circle", "circle"], "run1": ["circle"],
        }  # fmt: skip
    cells = ["".join(cell.itertext()) for cell in page.iter("td")]
    assert cells[:6] == ["embedding_lr", "0.1", "0.2", "mlp", "8", "8, 4"]
    assert "script" not in text


def test_runs_on_files_of_a_data_set_differ_in_their_path_and_several_labels_have_no_threshold():
    metrics = asdict(Metrics(0.6, 0.5, 0.9, 100, labels={"a": Metrics(0.7, 0.4, 0.8, 90)}))
    end = {"event": "end", "test": metrics, "step": 1}
    logs = [[{"event": "start", "config": {"path": path}}, end] for path in ("jan.txt", "feb.txt")]
    tables = tables_of(logs)
    assert tables["Options"] == {"path": ["jan.txt", "feb.txt"]}
    assert not [name for name in tables["Metrics"] if "threshold" in name or "GAUC" in name]
    assert tables["Metrics"]["test AUC [a]"] == ["0.7", "0.7"]


def test_runs_that_cannot_be_compared_are_named(tmp_path, capsys):
    run = str(write_run(tmp_path / "a", 0.1, [0.6]))
    assert main(["compare", run]) == 2
    assert "compare needs two or more runs, got 1" in capsys.readouterr().err
    assert main(["compare", run, str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    other = write_run(tmp_path / "b", 0.1, [0.6], rows=50)
    assert main(["compare", run, str(other), "--out", str(tmp_path / "page.html")]) == 0
    assert "note: the runs have different test rows" in capsys.readouterr().out
    assert main(["compare", run, run, "--out", str(tmp_path / "page.html")]) == 0
    assert "all options are the same" in capsys.readouterr().out
