"""The record of a run in its folder: every event as one line of JSON.

A line is an object with `event` ("start", "log", "evaluation", "checkpoint", "message" or "end") and the fields of that
event's dataclass. Messages carry the step after which they came. Numbers that are not finite are the strings "nan",
"inf" and "-inf", for JSON has no others. `start` and `end` carry the time in UTC; the end of a run that failed has the
reason "failed" and the exception under `error`. The last field is `crc32`, in hexadecimal digits, of what stands before
its comma; older logs have none.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partialmethod
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from tritonemb.training.callbacks import Callback, Evaluation, FitEnd, FitStart, StepEnd
from tritonemb.training.config import plain
from tritonemb.utils import write_whole

NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}  # what Python writes, and what is in the log
_CHECKED = re.compile(rb'(.*), "crc32": "([0-9a-f]{8})"}')


class RunLog(Callback):
    """Writes a run log, each line at once: a killed process loses at most the one that it was writing.

    Before the first new line, what was logged after the step from which a run is resumed is removed, also the `end` of
    the process before; ValueError if the file is damaged.

    Args:
        path: of the file; its folder is made.
        resume: whether a run that starts at step 0 may replace a log; FileExistsError if it may not.
    """

    essential = False

    def __init__(self, path: Path | str, resume: bool = False) -> None:
        self._path, self._resume, self._step = Path(path), resume, 0
        self._file: FileIO | None = None
        self._unwritten: list[bytes] = []  # lines for which there was no room on the disk

    def on_start(self, start: FitStart) -> None:
        self._step = start.first_step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            if not (self._resume or start.first_step):
                raise FileExistsError(f"{self._path} is the log of another run: move it away, or give resume=True")
            events = [each for each in _events(self._path) if each["event"] != "end"]
            write_whole(self._path, "".join(_line(each) for each in events if _step_of(each) <= start.first_step))
        self._file = FileIO(self._path, "ab")
        self._write("start", asdict(start) | {"time": datetime.now(UTC).isoformat(timespec="seconds")})

    def on_step(self, step: StepEnd) -> None:
        self._step = step.step

    def _write_event(self, kind: str, event: Any) -> None:
        self._write(kind, asdict(event))

    on_log = partialmethod(_write_event, "log")
    on_evaluation = partialmethod(_write_event, "evaluation")
    on_checkpoint = partialmethod(_write_event, "checkpoint")

    def on_message(self, text: str) -> None:
        self._write("message", {"step": self._step, "text": text})

    def on_end(self, end: FitEnd | None) -> None:
        error = sys.exception()
        text = None if error is None else f"{type(error).__name__}: {error}"
        values = {"reason": "failed", "step": self._step, "error": text} if end is None else asdict(end)
        try:
            self._write("end", values | {"time": datetime.now(UTC).isoformat(timespec="seconds")})
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
                rest = memoryview(self._unwritten[0])
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(size)  # no half lines: this one is written again with the next event
                raise
            del self._unwritten[0]


def add_evaluation(path: Path | str, evaluation: Evaluation) -> None:
    """Log an evaluation of a run that has ended, before its `end`; raises as `read_run_log`."""
    events = _events(Path(path))
    at = len(events) - (events[-1]["event"] == "end")
    lines = map(_line, [*events[:at], {"event": "evaluation", **asdict(evaluation)}, *events[at:]])
    write_whole(Path(path), "".join(lines))


def read_run_log(path: Path | str) -> list[dict[str, Any]]:
    """The events of a log, oldest first; a half-written last line, of a process that was killed, is left out.
    FileNotFoundError if there is no such file; ValueError names another line that is not an event."""
    # Those of a log, an evaluation or an end have no texts of the user's: there "nan" is a number.
    return [_numbers(each) if each["event"] in ("log", "evaluation", "end") else each for each in _events(Path(path))]


def _events(path: Path) -> list[dict[str, Any]]:
    events = []
    lines = path.read_bytes().split(b"\n")
    checked = any(map(_CHECKED.fullmatch, lines))
    for number, line in enumerate(lines, 1):
        whole = _CHECKED.fullmatch(line) if checked else None
        try:
            event = json.loads(whole[1] + b"}" if whole else line)
            if checked and (whole is None or zlib.crc32(whole[1]) != int(whole[2], 16)):
                raise ValueError("its checksum is another")
            if not (isinstance(event, dict) and isinstance(event.get("event"), str) and type(_step_of(event)) is int):
                raise ValueError("not an event with its step")
        except ValueError as error:
            # Nothing after the last line's end, or a line that was not finished; not one whose end has changed.
            if number == len(lines) and not _CHECKED.match(line):
                break
            beginning = line[:80].decode(errors="replace")
            raise ValueError(f"{path}, line {number}: damaged ({error}): {beginning}") from error
        events.append(event)
    return events


def _step_of(event: Mapping[str, Any]) -> Any:
    return event.get("first_step" if event["event"] == "start" else "step")


def _line(event: Mapping[str, Any]) -> str:
    text = json.dumps(plain(event), default=lambda value: value.item() if isinstance(value, np.generic) else str(value))
    content = json.dumps(json.loads(text, parse_constant=NOT_FINITE.__getitem__))[:-1]
    return f'{content}, "crc32": "{zlib.crc32(content.encode()):08x}"}}\n'


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return float(value) if isinstance(value, str) and value in NOT_FINITE.values() else value
