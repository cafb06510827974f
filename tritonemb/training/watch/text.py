"""How numbers of a training run are written for people."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """m:ss, from an hour on h:mm:ss; `?` where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(num_bytes: int) -> str:
    """Three digits in MB (10^6 bytes) or GB (10^9)."""
    value, unit = (num_bytes / 1e6, "MB") if num_bytes < 999.5e6 else (num_bytes / 1e9, "GB")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"


def percent(share: float) -> str:
    """A share from 0 to 1 in whole percent."""
    return f"{100 * share:.0f} %"


def of(done: int, total: int | None) -> str:
    """`done/total`, or `done` where the total is not known."""
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def learning_rate(value: float | None) -> str:
    """Three digits, or `-` for none."""
    return "-" if value is None else f"{value:.3g}"


def printable(text: str, encoding: str | None) -> str:
    """`text` as a stream of this encoding can take it, without control characters: a path may hold anything."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")
