"""What `te.plan` knows of a plan: why each table is where it is, times and memory by rank, what another plan moves."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from tritonemb.layout import rows_to_shard
from tritonemb.sharding.plan import MAX_TABLES_SHOWN, PlanDiff, Shard, ShardingPlan
from tritonemb.sharding.planner.cost_model import STAGES, CostModel, Prediction
from tritonemb.sharding.planner.options import Option
from tritonemb.sharding.planner.topology import Topology
from tritonemb.sharding.table_stats import Array, TableStats
from tritonemb.types import TableConfig
from tritonemb.utils import align_columns, format_bytes

DRIFT = 0.1  # of the mean load, by which the slowest rank may be slower than planned
_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")


def duration(seconds: float, sign: str = "") -> str:
    """Milliseconds, or microseconds below one; with a plus, too, where `sign` is one."""
    return f"{1e3 * seconds:{sign}.3g} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:{sign}.3g} us"


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
class PlanReport:
    """Of a plan: its tables, and the `Prediction` of times and memory.

    `load` is the slowest rank's sum of stages, `bound` what no plan is below, `greedy` that of greedy packing: seconds.
    """

    model: CostModel
    tables: tuple[TableReport, ...]
    prediction: Prediction
    bound: float
    greedy: float

    @property
    def load(self) -> float:
        return self.prediction.load

    @property
    def gap(self) -> float:
        """By which part of the bound the slowest rank is above it."""
        return max(0.0, self.load / self.bound - 1) if self.bound else 0.0

    @property
    def imbalance(self) -> float:
        """The slowest rank's load by the mean."""
        return _imbalance(self.prediction)

    def summary(self) -> str:
        """Two lines: what was chosen, and what it costs."""
        counts = Counter(f"{each.option.kind.replace('_', '-')} on {each.option.placement}" for each in self.tables)
        chosen = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
        hbm, top = float(self.prediction.hbm.max()), self.model.topology
        return (
            f"sharding plan of {len(self.tables)} tables for {top.world_size} ranks: {chosen}\n"
            f"predicted: {duration(self.prediction.step)} a step, the slowest rank at {self.imbalance:.2f} of the "
            f"mean, at most {format_bytes(hbm)} of {format_bytes(top.hbm)} on a rank"
        )

    def __str__(self) -> str:
        lines = [*self._head(), "", *self._table()]
        if len(self.tables) > MAX_TABLES_SHOWN:
            lines.append(f"… and {len(self.tables) - MAX_TABLES_SHOWN} more; plan.explain(name) tells of any")
        return "\n".join(lines)

    def _head(self) -> list[str]:
        """What the plan is for, what a step takes, and the memory."""
        model, top, seen = self.model, self.model.topology, self.prediction
        stages = zip(STAGES, seen.seconds.max(0).tolist(), strict=True)
        memory = [
            f"{name} {format_bytes(values.min())} to {format_bytes(values.max())} of {format_bytes(size)} on a {of}"
            for name, values, size, of in _tiers(seen, top) if name == "device" or values.any()
        ]  # fmt: skip
        memory += (
            [f"servers {format_bytes(seen.server)} of {format_bytes(top.servers * top.server_memory)}"]
            if seen.server
            else []
        )
        copies = "" if model.copies == 1 else f", {model.copies} copies of the tables"
        return [
            f"Plan for {top.world_size} ranks, {top.local_world_size} a node{copies}; {model.batch_size:,} samples a "
            f"rank; {model.optimizer.name}; rates: {top.name or top.machine or 'assumed'}",
            f"A step: {duration(seen.step)} (other layers {duration(seen.dense)}, latencies {duration(seen.fixed)}).",
            f"Slowest rank, by stage: {', '.join(f'{name} {duration(value)}' for name, value in stages if value)}.",
            f"Load of the slowest rank: {duration(self.load)}, {self.imbalance:.3f} of the mean; no plan is below "
            f"{duration(self.bound)} (gap {100 * self.gap:.1f} %); greedy packing has {duration(self.greedy)}.",
            f"Memory: {'; '.join(memory)}.",
        ]

    def _table(self) -> list[str]:
        """The tables that cost most, a line each, below the names of the columns."""
        parts: list[tuple[str, Callable[[TableReport], str]]] = [
            ("table", lambda each: each.table.name),
            ("rows", lambda each: f"{each.table.num_embeddings or each.table.capacity:,}"),
            ("dim", lambda each: str(each.table.embedding_dim)),
            ("size", lambda each: format_bytes(each.size)),
            ("sharding", lambda each: str(each.option)),
            ("tier", lambda each: each.option.placement),
            ("cached", lambda each: f"{100 * each.option.cached:.2g} %" if each.option.cached else ""),
            ("time, all ranks", lambda each: duration(each.seconds)),
            ("next best", lambda each: f"{_on(each.runner_up)}, {duration(each.extra, '+')}" if each.runner_up else ""),
        ]
        shown = sorted(self.tables, key=lambda each: -each.seconds)[:MAX_TABLES_SHOWN]
        return align_columns([[name for name, _ in parts], *([cell(each) for _, cell in parts] for each in shown)])

    def explain(self, name: str) -> str:
        """Of a table: where it is, what that costs by stage, and what the next best option would cost."""
        numbers = {each.table.name: number for number, each in enumerate(self.tables)}
        if name not in numbers:
            raise ValueError(f"the plan has no table {name!r}; it has {sorted(numbers)[:20]}")
        each, distinct = self.tables[numbers[name]], self.model.distinct[numbers[name]]
        part = 100 * each.seconds / (sum(other.seconds for other in self.tables) or 1.0)
        lines = [
            f"{name}: {_on(each.option)}, {format_bytes(each.size)} with its states",
            f"  use: {self.model.stats[name].pooling_factor:.3g} ids a sample, {distinct:,.0f} distinct a step",
            f"  time: {duration(each.seconds)} over all ranks, {part:.1f} % of all tables'",
        ]
        if each.option.cached:
            cached, on_host = 100 * each.option.cached, 100 * each.option.on_host
            lines.append(f"  cached: {cached:.2g} % of its rows, {on_host:.2g} % more in host memory")
        if each.runner_up is None:
            lines.append("  no other option is better in anything")
        elif each.extra >= 0:
            lines.append(f"  next best: {_on(each.runner_up)}; the slowest rank would take {duration(each.extra, '+')}")
        else:
            lines.append(
                f"  {_on(each.runner_up)} alone would be faster by {duration(-each.extra)}, but does not pack: "
                "parts are whole, and budgets are used up"
            )
        return "\n".join(lines)

    def diff(self, before: ShardingPlan, after: ShardingPlan) -> PlanDiff:
        """See `ShardingPlan.diff`."""
        reports = [plan.report if isinstance(plan.report, PlanReport) else self for plan in (before, after)]
        older, newer = (report.model for report in reports)
        were, moved, tiers = {table.name: table for table in older.tables}, {}, {}
        for table, size in zip(newer.tables, newer.sizes.tolist(), strict=True):
            name, was = table.name, were.get(table.name)
            if was is None or name not in before.tables or name not in after.tables:
                continue
            part = _moved(before.shards(was), after.shards(table), rows_to_shard(was))
            moved[name] = size * part / (rows_to_shard(table) * table.embedding_dim)
            tier = before.placement(name).placement, after.placement(name).placement
            if tier[0] != tier[1]:
                tiers[name] = tier
        return PlanDiff(moved, tiers, float(newer.sizes.sum()))

    def check(self, plan: ShardingPlan, stats: Mapping[str, TableStats]) -> list[str]:
        """See `ShardingPlan.check`."""
        now = replace(self.model, stats={**self.model.stats, **stats})
        seen, found = now.predict(plan), []
        if _imbalance(seen) > self.imbalance + DRIFT:
            found.append(
                f"rank {int(seen.seconds.sum(1).argmax())} takes {_imbalance(seen):.2f} of the mean, "
                f"{self.imbalance:.2f} when it was planned"
            )
        found += [
            f"{name} memory: {format_bytes(values.max())} are needed, there are {format_bytes(size)}"
            for name, values, size, _ in _tiers(seen, now.topology) if values.max() > size
        ]  # fmt: skip
        at, _ = now.pieces(plan)
        few = (at.cached > 0) & (at.cached < (1 - 1e-6) * now.least_cached(at.table, at.share, at.rows))
        names = [now.tables[number].name for number in np.unique(at.table[few])]
        return found + [f"table {name!r}: its cache is smaller than the batches in flight" for name in names]

    def to_html(self) -> str:
        """See `ShardingPlan.to_html`."""
        seen, top, local = self.prediction, self.model.topology, self.model.local
        node = np.arange(len(seen.hbm)) // local
        tiers = np.stack([seen.hbm, seen.host[node] / local, seen.disk[node] / local], 1) / 1e9
        time = _bars(seen.seconds * 1e3, STAGES, "ms a step, by rank")
        memory = _bars(tiers, ("device", "host", "disk"), f"GB, by rank; device memory: {format_bytes(top.hbm)}")
        head, tables = str(self).split("\n\n")
        return (
            '<!doctype html><meta charset="utf-8"><title>Sharding plan</title>'
            "<style>body{font:14px sans-serif;margin:2em}pre{overflow-x:auto}</style>"
            f"<h1>Sharding plan</h1><pre>{escape(head)}</pre><h2>Time</h2>{time}<h2>Memory</h2>{memory}"
            f"<h2>Tables</h2><pre>{escape(tables)}</pre>\n"
        )


def _tiers(seen: Prediction, top: Topology) -> list[tuple[str, Array, float, str]]:
    """Of each tier of ranks and nodes: its name, the bytes that are needed, how many there are, and of what."""
    return [
        ("device", seen.hbm, top.hbm, "rank"),
        ("host", seen.host, top.host, "node"),
        ("disk", seen.disk, top.disk, "node"),
    ]


def _imbalance(seen: Prediction) -> float:
    mean = float(seen.seconds.sum(1).mean())
    return seen.load / mean if mean else 1.0


def _on(option: Option) -> str:
    return f"{option} on {option.placement}"


def _moved(before: Sequence[Shard], after: Sequence[Shard], rows: int) -> float:
    """Elements of a table that had so many rows that are on a rank after, but were not before."""
    had: dict[int, list[Shard]] = {}
    for shard in before:
        had.setdefault(shard.rank, []).append(shard)
    everything = Shard(0, 0, rows, 0, 2**63)
    return sum(
        _overlap(shard, everything) - sum(_overlap(shard, everything, each) for each in had.get(shard.rank, ()))
        for shard in after
    )


def _overlap(*shards: Shard) -> int:
    """Elements that all of these have."""
    rows = min(each.first_row + each.num_rows for each in shards) - max(each.first_row for each in shards)
    ends = min(each.first_column + each.num_columns for each in shards)
    return max(0, rows) * max(0, ends - max(each.first_column for each in shards))


def _bars(values: Array, names: Sequence[str], title: str) -> str:
    """Stacked bars, one a row of `values [ranks, names]`, as SVG, below what their colors mean."""
    top, ends = max(float(values.sum(1).max()), 1e-12), np.cumsum(values, axis=1)
    colors = [f'<b style="color:{_COLORS[n]}">{names[n]}</b>' for n in np.flatnonzero(values.any(0)).tolist()]
    bars = [
        f'<rect x="{rank}" y="{top - ends[rank, n]:.6g}" width="0.9" height="{value:.6g}" fill="{_COLORS[n]}">'
        f"<title>rank {rank}: {names[n]} {value:.4g}</title></rect>"
        for (rank, n), value in np.ndenumerate(values) if value > 0
    ]  # fmt: skip
    box = f'viewBox="0 0 {len(values)} {top:.6g}" preserveAspectRatio="none" width="100%" height="220"'
    return f"<p>{title}, at most {top:.3g}: {', '.join(colors)}</p><svg {box}>{''.join(bars)}</svg>"
