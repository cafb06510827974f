"""What a user sees while a model trains: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from tritonemb.training.callbacks import Callback
from tritonemb.training.watch.lines import Lines
from tritonemb.utils import require


def make_display(stream: TextIO | None = None) -> Callback:
    """A display for `stream`, by default standard output.

    Raises:
        MissingExtraError: the stream is a terminal and rich is not installed.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return Lines(stream)
    require("rich")
    from tritonemb.training.watch.live import LiveView

    return LiveView(stream)
