import errno
import json
import math
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from tests.training.callbacks.events import STEPS, end, evaluation, log, start, step, train
from tritonemb.training.callbacks import CallbackList, FitEnd, jsonl
from tritonemb.training.callbacks.jsonl import RunLog, add_evaluation, read_run_log
from tritonemb.training.callbacks.report import test_event as last_test


def strictly(path: Path) -> list[dict]:
    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    events = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert all(len(event.pop("crc32")) == 8 for event in events)
    return events


def lasting(path: Path) -> list[dict]:
    """Events of a log without those that an interruption changes."""
    return [event for event in read_run_log(path) if event["event"] not in ("start", "end")]


def test_every_event_is_a_line_with_its_fields(tmp_path):
    path = tmp_path / "made" / "run.jsonl"
    train([RunLog(path)])
    events = strictly(path)
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    counts = {kind: kinds.count(kind) for kind in ("log", "evaluation", "checkpoint", "message")}
    assert counts == {"log": 12, "evaluation": 6, "checkpoint": 6, "message": 1}
    assert events[0]["config"] == {"data": "synthetic", "batch_size": 100, "read": {"shuffle_rows": 7}}
    assert events[1] == {"event": "log", **vars(log(100, loss=0.7))}
    message = next(event for event in events if event["event"] == "message")
    assert message == {"event": "message", "step": 450, "text": "12 rows were skipped"}
    assert events[-1]["test"]["auc"] == 0.78081


def test_a_full_disk_is_reported_at_once_and_lines_are_written_later(tmp_path, monkeypatch, capsys):
    class File(FileIO):
        full = True

        def write(self, data):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(jsonl, "FileIO", File)
    callbacks, path = CallbackList([RunLog(tmp_path / "run.jsonl")]), tmp_path / "run.jsonl"
    callbacks.on_start(start())
    note = "note: RunLog cannot write: [Errno 28] No space left on device. Training continues\n"
    assert capsys.readouterr().err == note
    callbacks.on_log(log(100))
    File.full = False
    callbacks.on_log(log(200))
    assert [event["event"] for event in strictly(path)] == ["start", "log", "log"]
    File.full = True
    callbacks.on_log(log(300))
    assert capsys.readouterr().err == ""
    callbacks.on_end(end())
    assert f"{path} lacks the last 2 events: [Errno 28]" in capsys.readouterr().err
    assert [event["event"] for event in strictly(path)] == ["start", "log", "log"]


def test_a_line_is_in_the_file_at_once(tmp_path):
    run_log = RunLog(tmp_path / "run.jsonl")
    run_log.on_start(start())
    run_log.on_log(log(100))
    assert [event["event"] for event in strictly(tmp_path / "run.jsonl")] == ["start", "log"]
    run_log.on_end(None)


def test_numbers_that_are_not_finite_come_back(tmp_path):
    path = tmp_path / "run.jsonl"
    run_log = RunLog(path)
    run_log.on_start(start(config={"data": "nan"}))
    run_log.on_log(log(100, loss=math.nan, samples_per_second=math.inf, dense_lr=None))
    run_log.on_evaluation(evaluation(100, auc=-math.inf))
    run_log.on_end(end())
    assert strictly(path)[1]["loss"] == "nan"
    first, logged, evaluated, _ = read_run_log(path)
    assert math.isnan(logged["loss"])
    assert (logged["samples_per_second"], logged["dense_lr"]) == (math.inf, None)
    assert evaluated["metrics"]["auc"] == -math.inf
    assert first["config"]["data"] == "nan"  # a name


def test_any_plain_value_of_a_configuration_can_be_written(tmp_path):
    config = {"path": Path("a"), "widths": (1, 2), "lr": np.float32(0.5), "n": np.int64(3), "flag": True, 5: None}
    config[1, "a"] = 2
    run_log = RunLog(tmp_path / "run.jsonl")
    run_log.on_start(start(config=config, folder=Path("runs")))
    run_log.on_end(end())
    first = read_run_log(tmp_path / "run.jsonl")[0]
    plain = {"path": "a", "widths": [1, 2], "lr": 0.5, "n": 3, "flag": True, "5": None, "(1, 'a')": 2}
    assert first["config"] == plain
    assert first["folder"] == "runs"


def test_a_failure_is_logged_with_its_exception(tmp_path):
    run_log = RunLog(tmp_path / "run.jsonl")
    run_log.on_start(start())
    run_log.on_step(step(7))
    try:
        raise ValueError("the loss is nan")
    except ValueError:
        run_log.on_end(None)
    last = read_run_log(tmp_path / "run.jsonl")[-1]
    assert (last["reason"], last["step"], last["error"]) == ("failed", 7, "ValueError: the loss is nan")


@pytest.mark.parametrize("ends", [False, None, "SIGTERM"], ids=["killed", "failed", "stopped"])
@pytest.mark.parametrize(("died", "resumed"), [(700, 600), (600, 600), (620, 600), (350, 200), (1200, 0)])
def test_a_resumed_run_has_the_log_of_an_uninterrupted_one(tmp_path, died, resumed, ends):
    full_path, path = tmp_path / "whole.jsonl", tmp_path / "run.jsonl"
    train([RunLog(full_path)])
    train([RunLog(path)], last=died, ends=FitEnd(ends, died, 100, 1.0, 1.0) if ends else ends)
    train([RunLog(path, resume=True)], first=resumed)
    assert lasting(path) == lasting(full_path)
    events = read_run_log(path)
    assert [event["first_step"] for event in events if event["event"] == "start"] == [0, resumed]
    assert [event["event"] for event in events].count("end") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.jsonl", "whole.jsonl"]  # nothing left aside


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_half_written_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "run.jsonl"
    train([RunLog(path)], last=400, ends=False)
    initial = read_run_log(path)
    with path.open("a") as file:
        file.write(json.dumps({"event": "log", "step": 500, "text": "x" * 100})[:cut])
    assert read_run_log(path) == initial
    train([RunLog(path)], first=400)
    full_path = tmp_path / "whole.jsonl"
    train([RunLog(full_path)])
    assert lasting(path) == lasting(full_path)


@pytest.mark.parametrize("damage", ["{", "[1]", '{"event": "log"}', '{"step": 3}', "", '{"event": "log", "step": "3"}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "run.jsonl"
    train([RunLog(path)], last=400)
    lines = path.read_text().splitlines()
    lines[2] = damage
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"run\.jsonl, line 3: damaged"):
        read_run_log(path)
    with pytest.raises(ValueError, match="line 3"):
        RunLog(path).on_start(start(first_step=200))
    assert path.read_text().splitlines() == lines  # and nothing is lost


def test_a_damaged_last_line_that_was_finished_is_named_too(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "start", "first_step": 0}\n{"event":\n')
    with pytest.raises(ValueError, match="line 2: damaged"):
        read_run_log(path)


def test_the_log_of_another_run_is_not_touched(tmp_path):
    path = tmp_path / "run.jsonl"
    train([RunLog(path)])
    initial = path.read_text()
    with pytest.raises(FileExistsError, match="log of another run"):
        RunLog(path).on_start(start())
    RunLog(path, resume=True)  # cuts when training starts
    assert path.read_text() == initial
    train([RunLog(path, resume=True)], last=300)
    assert lasting(path)[-1]["step"] == 300


def test_test_metrics_of_an_earlier_process_are_removed(tmp_path):
    """The checkpoint that they are of may be removed, or no longer the best."""
    path = tmp_path / "run.jsonl"
    train([RunLog(path)], last=600)
    add_evaluation(path, replace(evaluation(200), split="test"))
    assert last_test(read_run_log(path))["step"] == 200
    train([RunLog(path, resume=True)], first=600)
    assert last_test(read_run_log(path))["step"] == STEPS


def test_a_run_without_a_log_can_be_resumed(tmp_path):
    path = tmp_path / "run.jsonl"
    train([RunLog(path)], first=600)
    assert lasting(path)[0]["step"] == 700


@pytest.mark.parametrize("resumed", [None, 600])
def test_a_second_fit_goes_on_in_the_same_log(tmp_path, resumed):
    path = tmp_path / "run.jsonl"
    if resumed:
        train([RunLog(path)], last=700, ends=False)
    run_log = RunLog(path)
    train([run_log], first=resumed or 0)
    train([run_log], first=STEPS, last=STEPS + 100)
    events = read_run_log(path)
    assert [event["step"] for event in events if event["event"] == "log"] == list(range(100, STEPS + 101, 100))
    assert [event["event"] for event in events].count("end") == 1  # of the whole
