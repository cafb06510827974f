"""The main program of a reader process."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tritonemb.data import pipeline
from tritonemb.data.readers import packing, server, wire
from tritonemb.data.readers.address import listen

# The path is that of the process which starts this one; what follows on the standard input are the settings.
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from tritonemb.data.readers.main import main; main()"
)
EVERY = 0.5  # seconds between looks at whether the starter is still there

running = False  # whether this process is a reader


def main() -> None:
    """Take the data set from the standard input, say where we listen, and serve until the starter is gone."""
    global running
    running = True
    starter = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job: the trainers decide when to end
        signal.signal(number, signal.SIG_IGN)
    settings: dict[str, Any] = pickle.load(sys.stdin.buffer)
    folder, name = Path(settings["folder"]), settings["name"]
    threading.Thread(target=_leave_at_end_of_input, args=(folder / name,), daemon=True).start()
    if hasattr(os, "fork"):  # a process forked off the starter may hold the pipe open
        threading.Thread(target=_leave_without, args=(starter, folder / name), daemon=True).start()
    torch.set_num_threads(1)
    pipeline.processes = settings["readers"]
    try:
        data = packing.unpack(settings["data"])
        listener, place = listen(folder, name)
    except Exception as error:
        _tell(folder, name, {"error": wire.described(error)})
        os._exit(1)
    _tell(folder, name, {"place": asdict(place)})
    server.serve(data, listener, settings["token"])


def _tell(folder: Path, name: str, values: dict[str, Any]) -> None:
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps(values))
    partial.replace(folder / f"{name}.json")


def _leave_at_end_of_input(path: Path) -> None:
    while os.read(0, 1):
        pass
    _leave(path)


def _leave_without(starter: int, path: Path) -> None:
    while os.getppid() == starter:
        time.sleep(EVERY)
    _leave(path)


def _leave(path: Path) -> None:
    """At once, whatever the threads do: there is nothing to be saved. The last one takes the folder away."""
    for entry in (path, path.with_name(f"{path.name}.json"), path.with_name("arrays")):
        with suppress(OSError):
            entry.unlink()
    with suppress(OSError):
        path.parent.rmdir()
    os._exit(0)
