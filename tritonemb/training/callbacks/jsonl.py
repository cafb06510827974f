"""The record of a run in its folder: every event as one line of JSON.

A line is an object with `event` ("start", "log", "evaluation", "checkpoint", "message" or "end") and the fields of that
event's dataclass. Messages carry the step after which they came. Numbers that are not finite are the strings "nan",
"inf" and "-inf", for JSON has no others. `start` and `end` carry the time in UTC; the end of a run that failed has the
reason "failed" and the exception under `error`.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from tritonemb.training.callbacks.base import Callback, CheckpointSaved, Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.utils import write_whole

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunLog(Callback):
    """Writes a run log. Every line is written at once, so a killed process loses at most the one that it was writing.

    Args:
        path: of the file; its folder is made.
        resume_at_step: the step of the checkpoint from which a run is resumed: what was logged after it is removed
            before the first new line, also the `end` of the process before. Without it the file must not exist.

    Raises:
        FileExistsError: the file exists and `resume_at_step` is not given.
        ValueError: from `on_start`, the log of the resumed run is damaged.
    """

    essential = False

    def __init__(self, path: Path | str, resume_at_step: int | None = None) -> None:
        self._path = Path(path)
        if resume_at_step is None and self._path.exists():
            raise FileExistsError(f"{path} is the log of another run; give resume_at_step to resume that run")
        self._resume_at_step = resume_at_step
        self._step = 0
        self._file: FileIO | None = None
        self._unwritten: list[bytes] = []  # lines for which there was no room on the disk

    def on_start(self, start: FitStart) -> None:
        self._step = start.first_step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._resume_at_step is not None and self._path.exists():
            cut_after(self._path, self._resume_at_step)
        self._resume_at_step = None  # a second fit in this process only adds to the log
        self._file = FileIO(self._path, "ab")
        self._write("start", _fields(start) | {"time": _now()})

    def on_step(self, step: StepEnd) -> None:
        self._step = step.step

    def on_log(self, log: Log) -> None:
        self._write("log", _fields(log))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._write("evaluation", _fields(evaluation))

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self._write("checkpoint", _fields(saved))

    def on_message(self, text: str) -> None:
        self._write("message", {"step": self._step, "text": text})

    def on_end(self, end: FitEnd | None) -> None:
        try:
            if end is None:
                error = sys.exception()
                text = None if error is None else f"{type(error).__name__}: {error}"
                self._write("end", {"reason": "failed", "step": self._step, "error": text, "time": _now()})
            else:
                self._write("end", _fields(end) | {"time": _now()})
        finally:
            if self._file is not None:
                self._file.close()
            self._file, self._unwritten = None, []

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        self._unwritten.append(_line({"event": event, **values}).encode())
        while self._unwritten:
            size = self._file.seek(0, os.SEEK_END)
            try:
                _write_all(self._file, self._unwritten[0])
            except OSError:
                self._file.truncate(size)  # no half lines: this one is written again with the next event
                raise
            del self._unwritten[0]


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def read_run_log(path: Path | str) -> list[dict[str, Any]]:
    """The events of a log, oldest first; a half-written last line, of a process that was killed, is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another line is not an event; the message says which.
    """
    return [_with_numbers(event) for event in _events(Path(path))]


def cut_after(path: Path, step: int) -> None:
    """Remove from the log at `path` what was logged after `step`, and every `end`.

    Raises:
        ValueError: as `read_run_log`.
    """
    kept = [event for event in _events(path) if event["event"] != "end" and _step_of(event) <= step]
    write_whole(path, "".join(map(_line, kept)))


def _events(path: Path) -> list[dict[str, Any]]:
    events = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError("not an object with an event")
            _step_of(event)
        except ValueError as error:
            if number == len(lines):  # nothing after the last line's end, or a line that was not finished
                break
            raise ValueError(
                f"{path}, line {number}: damaged ({error}): {line[:80].decode(errors='replace')}"
            ) from error
        events.append(event)
    return events


def _step_of(event: Mapping[str, Any]) -> int:
    step = event.get("first_step" if event["event"] == "start" else "step")
    if not isinstance(step, int):
        raise ValueError("an event without its step")
    return step


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps(event, allow_nan=False) + "\n"


def _fields(event: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(event, field.name)) for field in fields(event)}


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    return str(value)


def _with_numbers(event: dict[str, Any]) -> dict[str, Any]:
    """An event as it was written; in those without texts of the user's, "nan" is a number."""
    if event["event"] not in ("log", "evaluation", "end"):
        return event
    return {key: _number(value) for key, value in event.items()}


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
