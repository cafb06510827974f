"""Run log `log.jsonl`: every event of a run as one line of JSON.

A line is an object with `event` ("start", "log", "evaluation", "checkpoint", "message" or "end") and the fields of the
event's dataclass. Messages have the `step` after which they were logged. Non-finite numbers, which JSON lacks, are the
strings "nan", "inf" and "-inf". `start` and `end` have the time in UTC; the end of a failed run has the reason "failed"
and the exception under `error`. The last field, `crc32`, is the hexadecimal checksum of the line's text before
', "crc32"'; logs of old versions lack it.
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
from tritonemb.training.toml import plain
from tritonemb.utils import atomic_write

NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}  # constants of Python's json to those of the log
_CHECKED = re.compile(rb'(.*), "crc32": "([0-9a-f]{8})"}')


class RunLog(Callback):
    """Callback that writes a run log line by line: a killed process loses at most the line that it was writing.

    On resume, later events, and `end` and test metrics of the earlier process, are removed; ValueError if the file is
    damaged. Only with `resume` a run that starts at step 0 may replace an existing log; otherwise FileExistsError."""

    essential = False

    def __init__(self, path: Path | str, resume: bool = False) -> None:
        self._path, self._resume, self._step = Path(path), resume, 0

    def on_start(self, start: FitStart) -> None:
        self._step = start.first_step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            if not (self._resume or start.first_step):
                raise FileExistsError(f"{self._path} is the log of another run: move it away, or pass resume=True")
            events = [e for e in _events(self._path) if e["event"] != "end" and e.get("split") != "test"]
            atomic_write(self._path, "".join(_line(event) for event in events if _step_of(event) <= start.first_step))
        self._file = FileIO(self._path, "ab")
        self._unwritten = list[bytes]()  # lines to write again, after a full disk
        self.can_retry = True  # the start is written with the next event
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
        except OSError as failure:
            raise OSError(f"{self._path} lacks the last {len(self._unwritten)} events: {failure}") from failure
        finally:
            self._file.close()

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        self._unwritten.append(_line({"event": event, **values}).encode())
        while self._unwritten:
            size = self._file.seek(0, os.SEEK_END)
            try:
                unsent = memoryview(self._unwritten[0])
                while unsent:
                    unsent = unsent[self._file.write(unsent) :]
            except OSError:
                self._file.truncate(size)  # remove the partial line; it is written again with the next event
                raise
            del self._unwritten[0]


def add_evaluation(path: Path | str, evaluation: Evaluation) -> None:
    """Insert an evaluation before the `end` of a finished run's log; raises as `read_run_log`."""
    events = _events(Path(path))
    position = len(events) - (events[-1]["event"] == "end")
    lines = map(_line, [*events[:position], {"event": "evaluation", **asdict(evaluation)}, *events[position:]])
    atomic_write(Path(path), "".join(lines))


def read_run_log(path: Path | str) -> list[dict[str, Any]]:
    """Read the events of a log, oldest first; a partial last line, of a killed process, is skipped.
    Raise FileNotFoundError if the file does not exist; ValueError names a damaged line."""
    # "nan" is a number in events without strings of the user.
    return [_numbers(e) if e["event"] in ("log", "evaluation", "end") else e for e in _events(Path(path))]


def _events(path: Path) -> list[dict[str, Any]]:
    events, lines = [], path.read_bytes().split(b"\n")
    checked = any(map(_CHECKED.fullmatch, lines))
    for number, line in enumerate(lines, 1):
        match = _CHECKED.fullmatch(line) if checked else None
        try:
            event = json.loads(match[1] + b"}" if match else line)
            if checked and (match is None or zlib.crc32(match[1]) != int(match[2], 16)):
                raise ValueError("checksum mismatch")
            if not (isinstance(event, dict) and isinstance(event.get("event"), str) and type(_step_of(event)) is int):
                raise ValueError("not an event with a step")
        except ValueError as error:
            # The last line may be empty or partial; a complete line with a wrong checksum is damaged.
            if number == len(lines) and not _CHECKED.match(line):
                break
            excerpt = line[:80].decode(errors="replace")
            raise ValueError(f"{path}, line {number}: damaged ({error}): {excerpt}") from error
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
