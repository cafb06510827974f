"""Curves over steps as inline SVG: no script, colours from the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tritonemb.training.watch.markup import escape
from tritonemb.training.watch.text import size

WIDTH, HEIGHT = 400, 212
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 40
LIMIT = 1000  # points of a curve
PROBES = 80  # places in a chart that tell their values
FEW = 30  # up to so many points of a curve are seen as such
MANY = 200  # from here on its line is thinner
LARGEST = 1e300  # beyond it differences overflow

Point = tuple[int, float]


@dataclass(frozen=True)
class Unit:
    """How values are written: one by itself, and one on an axis with ticks that are `step` apart."""

    value: Callable[[float], str]
    tick: Callable[[float, float], str]


@dataclass(frozen=True)
class Level:
    """A value to compare with, drawn as a dashed line."""

    name: str
    value: float


def chart(
    name: str,
    points: Sequence[Point],
    unit: Unit,
    last_step: int,
    *,
    from_zero: bool = False,
    level: Level | None = None,
    marks: Sequence[int] = (),
) -> str:
    """An SVG element with a curve from step 0 to `last_step`; a note in words where no value is finite.

    Args:
        points: in the order of their steps; values that are not finite are gaps.
        from_zero: let the axis begin at 0.
        level: see `Level`.
        marks: steps with a dotted line, where a run was resumed.
    """
    points = thin(points)
    values = [y for _, y in points if is_drawn(y)]
    if not values:
        return '<p class="none">no finite values</p>'
    if level is not None and is_drawn(level.value):
        values.append(level.value)
    y_ticks = ticks(min(0.0, *values) if from_zero else min(values), max(values), outside=True)
    frame = Frame(max(1, last_step), y_ticks[0], y_ticks[-1])
    label = escape(f"{name} over steps")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">', *_axes(frame, y_ticks, unit)]
    for mark in marks:
        x = frame.x(mark)
        parts.append(f"<g><title>resumed at step {mark:,}</title>{_line(x, TOP, x, HEIGHT - BOTTOM, 'mark')}</g>")
    if level is not None and is_drawn(level.value):
        y = frame.y(level.value)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "level"))
        parts.append(_text(WIDTH - RIGHT, y + 14, f"{level.name} {unit.value(level.value)}", "end"))
    parts += _curve(frame, points)
    parts += _probes(frame, points, name, unit)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class Frame:
    """Where a step and a value are in the picture."""

    last_step: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(step / self.last_step, 0.0), 1.0)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def thin(points: Sequence[Point], limit: int = LIMIT) -> list[Point]:
    """At most `limit` points that look like all of them: of each bucket the smallest, the largest and the first gap."""
    if len(points) <= limit:
        return list(points)
    width = math.ceil(len(points) / (limit // 3))
    kept = []
    for start in range(0, len(points), width):
        bucket = range(start, min(start + width, len(points)))
        finite = [i for i in bucket if is_drawn(points[i][1])]
        chosen = {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])} if finite else set()
        chosen.update([i for i in bucket if not is_drawn(points[i][1])][:1])
        kept += [points[i] for i in sorted(chosen)]
    return kept


def segments(points: Sequence[Point]) -> list[list[Point]]:
    """The points without their gaps."""
    found: list[list[Point]] = [[]]
    for point in points:
        if is_drawn(point[1]):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [segment for segment in found if segment]


def ticks(low: float, high: float, count: int = 4, outside: bool = False) -> list[float]:
    """About `count` round numbers within [low, high], or with `outside` the next ones around it, two at least."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # equal, or no more apart than rounding
        margin = abs(high) / 10 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    slack = 1e-9 * (high - low) / step
    if outside:
        first, last = math.floor(low / step + slack), math.ceil(high / step - slack)
    else:
        first, last = math.ceil(low / step - slack), math.floor(high / step + slack)
    return [number * step for number in range(first, last + 1)]


def is_drawn(value: float) -> bool:
    """Whether a value has a place in a chart."""
    return abs(value) < LARGEST  # False for NaN


def decimals(value: float, step: float) -> str:
    """`value` with as many digits as ticks `step` apart need."""
    for digits in range(6):
        if math.isclose(step * 10**digits, round(step * 10**digits)) and abs(value) < 1e6:
            return f"{value:,.{digits}f}"
    return f"{value:.3g}"


def compact(value: float, step: float = 1.0) -> str:
    """A large number with k, M or G."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"


PLAIN = Unit(lambda value: f"{value:.4f}", decimals)
COUNT = Unit(lambda value: f"{value:,.0f}", compact)
SHARE = Unit(lambda value: f"{100 * value:.1f} %", lambda value, step: f"{decimals(100 * value, 100 * step)} %")
BYTES = Unit(lambda value: size(round(value)), lambda value, step: size(round(value)) if value else "0")
RATE = Unit(lambda value: f"{value:.3g}", lambda value, step: f"{value:.3g}")


def _axes(frame: Frame, y_ticks: Sequence[float], unit: Unit) -> list[str]:
    parts, step = [], y_ticks[1] - y_ticks[0]
    for value in y_ticks:
        y = frame.y(value)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "grid"))
        parts.append(_text(LEFT - 7, y + 4, unit.tick(value, step), "end"))
    bottom = HEIGHT - BOTTOM
    for value in ticks(0, frame.last_step):
        if value == int(value):
            x = frame.x(value)
            parts.append(_line(x, bottom, x, bottom + 4, "axis"))
            parts.append(_text(x, bottom + 18, compact(value), "middle"))
    parts.append(_line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "step", "middle"))
    return parts


def _curve(frame: Frame, points: Sequence[Point]) -> list[str]:
    parts = []
    kind = "curve" if len(points) <= MANY else "curve many"
    for segment in segments(points):
        places = [(frame.x(x), frame.y(y)) for x, y in segment]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{kind}" points="{path}"/>')
        if len(points) <= FEW or len(places) == 1:
            parts += [_dot(x, y) for x, y in places]
    return parts


def _probes(frame: Frame, points: Sequence[Point], name: str, unit: Unit) -> list[str]:
    """Columns that show a line, a dot and the value of their step under the mouse."""
    points = [(x, y) for x, y in points if is_drawn(y)]
    stride = math.ceil(len(points) / PROBES)
    points = points[(len(points) - 1) % stride :: stride]  # the last one is always there
    middles = ((frame.x(a) + frame.x(b)) / 2 for (a, _), (b, _) in pairwise(points))
    edges = pairwise([LEFT, *middles, WIDTH - RIGHT])
    parts = []
    for (step, value), (left, right) in zip(points, edges, strict=True):
        x = frame.x(step)
        parts.append(
            f'<g class="probe"><title>{escape(f"step {step:,}: {name} {unit.value(value)}")}</title>'
            f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
            f"{_line(x, TOP, x, HEIGHT - BOTTOM, 'cursor')}{_dot(x, frame.y(value))}</g>"
        )
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(x: float, y: float) -> str:
    return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
