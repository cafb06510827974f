"""What `te.plan` knows of a plan: why each table is where it is, times and memory by rank, what another plan moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from tritonemb.layout import rows_to_shard
from tritonemb.sharding.plan import Shard, ShardingPlan, TablePlacement
from tritonemb.sharding.planner.cost_model import STAGES, CostModel, Prediction
from tritonemb.sharding.planner.statistics import TableStats
from tritonemb.sharding.planner.topology import amount
from tritonemb.types import TableConfig

if TYPE_CHECKING:
    from tritonemb.sharding.planner.options import Option
    from tritonemb.sharding.planner.search import Solution

SHOWN = 40  # tables, those that cost most
DRIFT = 0.1  # of the mean load, by which the slowest rank may be slower than planned
_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")


def duration(seconds: float) -> str:
    """Milliseconds, or microseconds below one."""
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


@dataclass(frozen=True)
class TableReport:
    """A table in a plan: its option, seconds of load that all ranks spend on it, and bytes of weights and states.

    `runner_up` is the best option of another type or tier, `extra` by how much the slowest rank would be slower with it
    (less than 0 if it is faster by itself, but what it needs is used up by others): seconds.
    """

    table: TableConfig
    option: Option
    seconds: float
    size: float
    runner_up: Option | None
    extra: float


@dataclass(frozen=True)
class PlanDiff:
    """What moves between two plans: bytes of rows and states by table, and tables whose tier changes.

    `fraction` is of all tables' bytes.
    """

    moved: Mapping[str, float]
    tiers: Mapping[str, tuple[str, str]]
    total: float

    @property
    def bytes(self) -> float:
        return sum(self.moved.values())

    @property
    def fraction(self) -> float:
        return self.bytes / self.total if self.total else 0.0

    def __str__(self) -> str:
        lines = [f"{amount(self.bytes)} of {amount(self.total)} move between ranks ({100 * self.fraction:.1f} %)"]
        moved = sorted(self.moved.items(), key=lambda each: (-each[1], each[0]))
        lines += [f"  {name}: {amount(size)}" for name, size in moved[:SHOWN] if size]
        lines += [f"  {name}: from {before} to {after}" for name, (before, after) in sorted(self.tiers.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class PlanReport:
    """Of a plan: its tables, and the `Prediction` of times and memory.

    `load` is the slowest rank's sum of stages, `bound` what no plan is below, `greedy` that of greedy packing: seconds.
    """

    model: CostModel
    tables: tuple[TableReport, ...]
    prediction: Prediction
    load: float
    bound: float
    greedy: float

    @classmethod
    def make(
        cls, model: CostModel, plan: ShardingPlan, solution: Solution,
        options: Sequence[tuple[Option, Option | None, float]],
    ) -> PlanReport:  # fmt: skip
        at, _ = model.pieces(plan)
        seconds = np.bincount(at.table, model.costs(at).seconds.sum(1), len(model.tables))
        numbers = np.arange(len(model.tables))
        sizes = model.rows * model.record_bytes(numbers, model.dims)
        tables = tuple(
            TableReport(table, *(option, float(seconds[n]), float(sizes[n])), runner_up, extra)
            for n, (table, (option, runner_up, extra)) in enumerate(zip(model.tables, options, strict=True))
        )
        prediction = model.predict(plan)
        return cls(model, tables, prediction, prediction.load, solution.bound, max(solution.greedy, prediction.load))

    @property
    def gap(self) -> float:
        """By which part of the bound the slowest rank is above it."""
        return max(0.0, self.load / self.bound - 1) if self.bound else 0.0

    @property
    def imbalance(self) -> float:
        """The slowest rank's load by the mean."""
        mean = float(self.prediction.seconds.sum(1).mean())
        return self.load / mean if mean else 1.0

    def summary(self) -> str:
        """Two lines: what was chosen, and what it costs."""
        counts: dict[str, int] = {}
        for each in self.tables:
            name = f"{each.option.kind.replace('_', '-')} on {each.option.placement}"
            counts[name] = counts.get(name, 0) + 1
        chosen = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
        hbm, of = float(self.prediction.hbm.max()), self.model.topology.hbm
        return (
            f"sharding plan of {len(self.tables)} tables for {self.model.topology.world_size} ranks: {chosen}\n"
            f"predicted: {duration(self.prediction.step)} a step, the slowest rank at {self.imbalance:.2f} of the "
            f"mean, at most {amount(hbm)} of {amount(of)} on a rank"
        )

    def __str__(self) -> str:
        model, top, seen = self.model, self.model.topology, self.prediction
        by_stage = ", ".join(
            f"{name} {duration(value)}"
            for name, value in zip(STAGES, seen.seconds.max(0).tolist(), strict=True)
            if value
        )
        copies = "" if model.copies == 1 else f", {model.copies} copies of the tables"
        lines = [
            f"Plan for {top.world_size} ranks, {top.local_size} a node{copies}; {model.batch_size:,} samples a rank; "
            f"{model.optimizer.name}; rates: {top.name or top.machine or 'assumed'}",
            f"A step: {duration(seen.step)} (other layers {duration(seen.dense)}, latencies {duration(seen.fixed)}).",
            f"Slowest rank, by stage: {by_stage}.",
            f"Load of the slowest rank: {duration(self.load)}, {self.imbalance:.3f} of the mean; no plan is below "
            f"{duration(self.bound)} (gap {100 * self.gap:.1f} %); greedy packing has {duration(self.greedy)}.",
            "Memory: " + "; ".join(self._memory()) + ".",
            "",
        ]
        head = ("table", "rows", "dim", "size", "sharding", "tier", "cached a rank", "time, all ranks", "next best")
        rows = [head, *(self._row(each) for each in sorted(self.tables, key=lambda each: -each.seconds)[:SHOWN])]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if len(self.tables) > SHOWN:
            lines.append(f"… and {len(self.tables) - SHOWN} more; plan.explain(name) tells of any")
        return "\n".join(lines)

    def _memory(self) -> list[str]:
        top, seen = self.model.topology, self.prediction
        found = [f"device {amount(seen.hbm.min())} to {amount(seen.hbm.max())} of {amount(top.hbm)} on a rank"]
        for name, values, size in (("host", seen.host, top.host), ("disk", seen.disk, top.disk)):
            if values.any():
                found.append(f"{name} {amount(values.min())} to {amount(values.max())} of {amount(size)} on a node")
        if seen.server:
            found.append(f"servers {amount(seen.server)} of {amount(top.servers * top.server_memory)}")
        return found

    def _row(self, each: TableReport) -> tuple[str, ...]:
        table, option = each.table, each.option
        rows = table.num_embeddings or table.capacity
        cached = f"{option.cached:,}" if option.placement in ("host", "disk") else ""
        runner_up = "" if each.runner_up is None else f"{_words(each.runner_up)}, {_more(each.extra)}"
        return (
            table.name, f"{rows:,}", str(table.embedding_dim), amount(each.size), _type(option), option.placement,
            cached, duration(each.seconds), runner_up,
        )  # fmt: skip

    def explain(self, name: str) -> str:
        """Of a table: where it is, what that costs by stage, and what the next best option would cost."""
        numbers = {each.table.name: number for number, each in enumerate(self.tables)}
        if name not in numbers:
            raise ValueError(f"the plan has no table {name!r}; it has {sorted(numbers)[:20]}")
        each, stats = self.tables[numbers[name]], self.model.stats[numbers[name]]
        distinct = self.model.distinct[numbers[name]]
        part = 100 * each.seconds / self._all_seconds()
        lines = [
            f"{name}: {_words(each.option)}, {amount(each.size)} with its states",
            f"  use: {stats.pooling_factor:.3g} ids a sample, {distinct:,.0f} distinct a step",
            f"  time: {duration(each.seconds)} over all ranks, {part:.1f} % of all tables'",
        ]
        if each.option.placement in ("host", "disk"):
            lines.append(f"  cached: {each.option.cached:,} rows a rank, {each.option.host_rows:,} more in host memory")
        if each.runner_up is None:
            lines.append("  no other option is better in anything")
        elif each.extra >= 0:
            lines.append(f"  next best: {_words(each.runner_up)}; the slowest rank would take {_more(each.extra)}")
        else:
            lines.append(
                f"  {_words(each.runner_up)} alone would be faster by {duration(-each.extra)}, but does not pack: "
                "parts are whole, and budgets are used up"
            )
        return "\n".join(lines)

    def _all_seconds(self) -> float:
        return sum(each.seconds for each in self.tables) or 1.0

    def diff(self, before: ShardingPlan, after: ShardingPlan) -> PlanDiff:
        """See `ShardingPlan.diff`."""
        older = self.model if before.report is None else before.report.model
        newer = self.model if after.report is None else after.report.model
        old_tables = {table.name: table for table in older.tables}
        moved, tiers, total = {}, {}, 0.0
        for number, table in enumerate(newer.tables):
            record = float(newer.record_bytes(np.array([number]), np.array([table.embedding_dim]))[0])
            total += float(newer.rows[number]) * record
            was = old_tables.get(table.name)
            if was is None or table.name not in before.tables or table.name not in after.tables:
                continue
            moved[table.name] = (
                _moved(was, before.shards(was), table, after.shards(table)) * record / table.embedding_dim
            )
            tier = [each.placements.get(table.name, TablePlacement()).placement for each in (before, after)]
            if tier[0] != tier[1]:
                tiers[table.name] = tier[0], tier[1]
        return PlanDiff(moved, tiers, total)

    def check(self, plan: ShardingPlan, stats: Mapping[str, TableStats]) -> list[str]:
        """See `ShardingPlan.check`."""
        model = self.model
        names = {table.name for table in model.tables}
        known = dict(zip((table.name for table in model.tables), model.stats, strict=True))
        if unknown := sorted(set(stats) - names):
            raise ValueError(f"there are statistics of the table {unknown[0]!r}, which the plan does not have")
        now = CostModel(
            model.tables, model.topology, model.batch_size, model.optimizer, known | dict(stats), model.exchange,
            model.copies, model.dense,
        )  # fmt: skip
        seen, found = now.predict(plan), []
        mean = float(seen.seconds.sum(1).mean())
        if seen.load > (self.imbalance + DRIFT) * mean:
            slowest = int(seen.seconds.sum(1).argmax())
            found.append(
                f"rank {slowest} takes {seen.load / mean:.2f} of the mean, {self.imbalance:.2f} when it was planned"
            )
        tiers = (
            ("device", seen.hbm, now.topology.hbm),
            ("host", seen.host, now.topology.host),
            ("disk", seen.disk, now.topology.disk),
        )
        for name, values, size in tiers:
            if values.max(initial=0) > size:
                found.append(f"{name} memory: {amount(values.max())} are needed, there are {amount(size)}")
        at, _ = now.pieces(plan)
        least = now.least_cached(at.table, at.share, at.rows)
        few = np.unique(at.table[(at.cached > 0) & (at.cached < least)])
        found += [
            f"table {model.tables[number].name!r}: its cache is smaller than the batches in flight" for number in few
        ]
        return found

    def to_html(self) -> str:
        """See `ShardingPlan.to_html`."""
        seen, top = self.prediction, self.model.topology
        time = _bars(seen.seconds * 1e3, STAGES, "ms a step, by rank")
        node = np.arange(len(seen.hbm)) // self.model.local
        tiers = np.stack([seen.hbm, seen.host[node] / self.model.local, seen.disk[node] / self.model.local], 1) / 1e9
        memory = _bars(tiers, ("device", "host", "disk"), f"GB, by rank; device memory: {amount(top.hbm)}")
        head, *rest = str(self).split("\n\n")
        return (
            '<!doctype html><meta charset="utf-8"><title>Sharding plan</title>'
            "<style>body{font:14px sans-serif;margin:2em}pre{overflow-x:auto}svg{max-width:100%}</style>"
            f"<h1>Sharding plan</h1><pre>{escape(head)}</pre><h2>Time</h2>{time}<h2>Memory</h2>{memory}"
            f"<h2>Tables</h2><pre>{escape(rest[0] if rest else '')}</pre>\n"
        )


def _type(option: Option) -> str:
    name = option.kind.replace("_", "-")
    parts = [
        f"{option.blocks} columns" if option.blocks > 1 else "",
        f"{option.owners} rows" if option.owners > 1 else "",
    ]
    return name + (f" ({' x '.join(part for part in parts if part)})" if any(parts) else "")


def _words(option: Option) -> str:
    return f"{_type(option)} on {option.placement}"


def _more(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{duration(abs(seconds))}"


def _moved(old: TableConfig, before: Sequence[Shard], new: TableConfig, after: Sequence[Shard]) -> float:
    """Elements of the old table that are on a rank after, but were not before."""
    old_parts, new_parts = rows_to_shard(old), rows_to_shard(new)
    scale = 1.0 if not new.is_dynamic else (new.capacity or 1) / new_parts
    had: dict[int, list[Shard]] = {}
    for shard in before:
        had.setdefault(shard.rank, []).append(shard)
    moved = 0.0
    for shard in after:
        rows = max(0, min(shard.first_row + shard.num_rows, old_parts) - shard.first_row)
        kept = sum(
            _overlap(shard.first_row, rows, each.first_row, each.num_rows)
            * _overlap(shard.first_column, shard.num_columns, each.first_column, each.num_columns)
            for each in had.get(shard.rank, ())
        )
        moved += rows * shard.num_columns - kept
    return moved * scale


def _overlap(first: int, count: int, other: int, other_count: int) -> int:
    return max(0, min(first + count, other + other_count) - max(first, other))


def _bars(values: Any, names: Sequence[str], title: str) -> str:
    """Stacked bars, one a row of `values [ranks, names]`, as SVG."""
    ranks, top = len(values), max(float(values.sum(1).max()), 1e-12)
    width, height = max(480, min(1200, 14 * ranks)), 220
    step = width / ranks
    parts = [
        f'<svg viewBox="0 0 {width + 60} {height + 60}" width="{width + 60}" role="img"><title>{escape(title)}</title>'
    ]
    for rank, row in enumerate(values):
        base = 0.0
        for number, value in enumerate(row):
            if value > 0:
                size = value / top * height
                parts.append(
                    f'<rect x="{50 + rank * step:.1f}" y="{height + 10 - base - size:.1f}" height="{size:.1f}" '
                    f'width="{max(step * 0.9, 0.5):.1f}" fill="{_COLORS[number]}">'
                    f"<title>rank {rank}: {names[number]} {value:.4g}</title></rect>"
                )
                base += size
    for part in (0, 0.5, 1):
        y = height + 10 - part * height
        parts.append(f'<text x="45" y="{y + 4:.0f}" text-anchor="end" font-size="11">{part * top:.3g}</text>')
    shown = [number for number in range(len(names)) if values[:, number].any()]
    for at, number in enumerate(shown):
        x = 50 + at * 110
        parts.append(f'<rect x="{x}" y="{height + 32}" width="10" height="10" fill="{_COLORS[number]}"/>')
        parts.append(f'<text x="{x + 14}" y="{height + 41}" font-size="11">{escape(names[number])}</text>')
    parts.append(f'<text x="50" y="{height + 25}" font-size="11">{escape(title)}</text></svg>')
    return "".join(parts)
