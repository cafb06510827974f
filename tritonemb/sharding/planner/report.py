"""The report of a plan: options of tables and alternatives, time and memory by rank, data that a new plan moves."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from typing import Any, Self

import numpy as np

from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.layout import rows_to_shard
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.sharding.plan import MAX_TABLES_SHOWN, PlanDiff, Shard, ShardingPlan
from tritonemb.sharding.planner.cost_model import STAGES, CostModel, Prediction
from tritonemb.sharding.planner.manifests import Deployment
from tritonemb.sharding.planner.options import Option
from tritonemb.sharding.planner.statistics import Array, TableStats
from tritonemb.sharding.planner.topology import Topology
from tritonemb.types import STORED_DTYPES, TableConfig
from tritonemb.utils import align_columns, format_bytes

RunnerUp = tuple[Option, float]  # the next best option, and the seconds that it would take longer
DRIFT = 0.1  # tolerated increase of the imbalance over the planned one
_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
# The fields of a table that a model reads, in JSON.
_TABLE_FIELDS = "name num_embeddings embedding_dim features pooling placement capacity fallback_rows"
_DTYPES = {str(dtype): dtype for dtype in STORED_DTYPES}


def duration(seconds: float, sign: str = "") -> str:
    """Format seconds as milliseconds, or microseconds below one; `sign="+"` prints a plus, too."""
    return f"{1e3 * seconds:{sign}.3g} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:{sign}.3g} us"


@dataclass(frozen=True)
class TableReport:
    """A table in a plan: its option, and the best option of another type or tier."""

    table: TableConfig
    option: Option
    seconds: float  # load, summed over ranks
    size: float  # bytes of weights and optimizer states
    runner_up: Option | None
    extra: float  # seconds that the slowest rank would take longer with the runner-up

    def cells(self) -> dict[str, str]:
        """Return text by the title of its column."""
        table, option, runner_up = self.table, self.option, self.runner_up
        shares = [f"{100 * share:.2g} %" for share in (option.cache_share, option.host_share) if share]
        next_best = f"{runner_up} on {runner_up.placement}, {duration(self.extra, '+')}" if runner_up else ""
        return {
            "table": table.name, "rows": f"{table.max_rows:,}", "dim": str(table.embedding_dim),
            "size": format_bytes(self.size), "sharding": str(option), "tier": option.placement,
            "cached": " + ".join(shares), "time, all ranks": duration(self.seconds), "next best": next_best,
        }  # fmt: skip


@dataclass(frozen=True)
class PlanReport:
    """Tables, predicted times and memory of a plan; seconds.

    `load` is the slowest rank's sum of stages, `bound` a lower bound of it, `greedy` the load of greedy packing.
    """

    model: CostModel
    tables: tuple[TableReport, ...]
    prediction: Prediction
    bound: float
    greedy: float

    @classmethod
    def of(
        cls, model: CostModel, plan: ShardingPlan, runner_ups: Mapping[str, RunnerUp], bound: float, greedy: float
    ) -> Self:
        """Report a plan. `runner_ups`: the next best options, with the seconds that they would take longer."""
        prediction = model.predict(plan)
        columns = zip(model.tables, prediction.by_table.tolist(), model.sizes.tolist(), strict=True)
        tables = [TableReport(t, Option.of(plan, t), *n, *runner_ups.get(t.name, (None, 0.0))) for t, *n in columns]
        return cls(model, tuple(tables), prediction, bound, greedy)

    def to_json(self) -> str:
        """Return the text that `from_values` reads: the model and the runner-ups. Other things follow from the plan."""
        model, names = self.model, _TABLE_FIELDS.split()
        runner_ups = {t.table.name: (t.runner_up, t.extra) for t in self.tables if t.runner_up}
        tables = [{name: getattr(t, name) for name in names} | {"dtype": str(t.dtype)} for t in model.tables]
        values = {member.name: getattr(model, member.name) for member in fields(model)}
        values |= {"tables": tables, "optimizer": {"name": model.optimizer.name, **asdict(model.optimizer)}}
        report = {"model": values, "runner_ups": runner_ups, "bound": self.bound, "greedy": self.greedy}
        return json.dumps(report, default=asdict)

    @classmethod
    def from_values(cls, plan: ShardingPlan, values: Any) -> Self:
        """Parse the JSON of a plan's report. ValueError if it is invalid."""
        try:
            model, optimizer = values["model"], dict(values["model"]["optimizer"])
            parsed: dict[str, Any] = {"topology": Topology(**model["topology"])}
            parsed["exchange"] = ExchangePrecision(**model["exchange"])
            parsed["tables"] = [TableConfig(**t | {"dtype": _DTYPES[t["dtype"]]}) for t in model["tables"]]
            parsed["stats"] = {name: TableStats(**stats) for name, stats in model["stats"].items()}
            parsed["optimizer"] = OPTIMIZERS[optimizer.pop("name")](**optimizer)
            runner_ups = {name: (Option(*option), extra) for name, (option, extra) in values["runner_ups"].items()}
            return cls.of(CostModel(**model | parsed), plan, runner_ups, values["bound"], values["greedy"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the report of a sharding plan is invalid: {error!r}") from error

    @property
    def load(self) -> float:
        return self.prediction.load

    @property
    def gap(self) -> float:
        """Relative gap of the load to the bound."""
        return max(0.0, self.load / self.bound - 1) if self.bound else 0.0

    @property
    def samples_per_second(self) -> float:
        return self.model.batch_size * self.model.topology.world_size / self.prediction.step

    @property
    def machines(self) -> dict[str, int]:
        """Numbers of nodes, of embedding servers if tables are on them, and of reader hosts."""
        top = self.model.topology
        return {"node": top.nodes, "server": top.servers * bool(self.prediction.server), "reader": top.readers}

    @property
    def epoch_hours(self) -> float:
        return self.model.epoch_samples / self.samples_per_second / 3600

    @property
    def epoch_price(self) -> float:
        """Price of all machines for an epoch, by the topology's prices per hour."""
        return self.epoch_hours * sum(
            number * float(getattr(self.model.topology, f"{name}_price")) for name, number in self.machines.items()
        )

    def to_manifests(self, plan: ShardingPlan, **settings: Any) -> dict[str, str]:
        """See `ShardingPlan.to_manifests`."""
        return Deployment(**settings).manifests(plan)

    def summary(self) -> str:
        """Return two lines: the sharding types and tiers, and the predicted time and memory."""
        counts = Counter(f"{table.option.kind.replace('_', '-')} on {table.option.placement}" for table in self.tables)
        options = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
        prediction, top = self.prediction, self.model.topology
        return (
            f"sharding plan of {len(self.tables)} tables for {top.world_size} ranks: {options}\n"
            f"predicted: {duration(prediction.step)} per step, the slowest rank at {prediction.imbalance:.2f} of the "
            f"mean, at most {format_bytes(float(prediction.hbm.max()))} of {format_bytes(top.hbm)} on a rank"
        )

    def __str__(self) -> str:
        shown = [table.cells() for table in sorted(self.tables, key=lambda t: -t.seconds)[:MAX_TABLES_SHOWN]]
        lines = align_columns([list(shown[0]), *(list(cells.values()) for cells in shown)])
        if len(self.tables) > MAX_TABLES_SHOWN:
            lines.append(f"… and {len(self.tables) - MAX_TABLES_SHOWN} more; see plan.explain(name)")
        return "\n".join([*self._head(), "", *lines])

    def _head(self) -> list[str]:
        """Return lines about the job, the time of a step, and the memory."""
        model, top, prediction = self.model, self.model.topology, self.prediction
        stages = zip(STAGES, prediction.seconds.max(0).tolist(), strict=True)
        memory = [
            f"{name} {format_bytes(used.min())} to {format_bytes(used.max())} of {format_bytes(size.max())} per {owner}"
            for name, used, size, owner in _tiers(prediction, model)
            if name == "device" or used.any()
        ]
        if prediction.server:
            memory += [f"servers {format_bytes(prediction.server)} of {format_bytes(top.servers * top.server_memory)}"]
        machines = ", ".join(f"{name}s: {number}" for name, number in self.machines.items() if number)
        epoch = f"Epoch: {self.epoch_hours:,.3g} hours of {machines}; price {self.epoch_price:,.2f}."
        copies = "" if model.copies == 1 else f", {model.copies} copies of the tables"
        return [
            f"Plan for {top.world_size} ranks, {top.local_world_size} per node{copies}; {model.batch_size:,} samples "
            f"per rank; {model.optimizer.name}; rates: {top.name or top.machine or 'assumed'}",
            f"Step: {duration(prediction.step)} (other layers {duration(prediction.dense)}, latencies "
            f"{duration(prediction.latency)}), {self.samples_per_second:,.0f} samples per second.",
            f"Slowest rank, by stage: {', '.join(f'{name} {duration(value)}' for name, value in stages if value)}.",
            f"Load of the slowest rank: {duration(self.load)}, {prediction.imbalance:.3f} of the mean; lower bound "
            f"{duration(self.bound)} (gap {100 * self.gap:.1f} %); greedy packing {duration(self.greedy)}.",
            f"Memory: {'; '.join(memory)}.",
            *([epoch] if model.epoch_samples else []),
        ]

    def explain(self, name: str) -> str:
        """Explain a table's option: its cost, and the cost of the next best option."""
        numbers = {report.table.name: number for number, report in enumerate(self.tables)}
        if name not in numbers:
            raise ValueError(f"the plan has no table {name!r}; it has {sorted(numbers)[:20]}")
        report, distinct = self.tables[numbers[name]], self.model.distinct[numbers[name]]
        percent = 100 * report.seconds / (sum(table.seconds for table in self.tables) or 1.0)
        use = f"{self.model.stats[name].pooling_factor:.3g} ids per sample, {distinct:,.0f} distinct per step"
        cells = {"use": use, "share of time": f"{percent:.1f} %"} | report.cells()
        cells["next best"] = cells["next best"] or "none that is better in any cost, and fits beside the other tables"
        return "\n".join([f"{cells.pop('table')}:", *(f"  {title}: {text}" for title, text in cells.items() if text)])

    def diff(self, old_plan: ShardingPlan, new_plan: ShardingPlan) -> PlanDiff:
        """See `ShardingPlan.diff`."""
        old_model, new_model = ((plan.report or self).model for plan in (old_plan, new_plan))
        old_tables, moved, tiers = {table.name: table for table in old_model.tables}, {}, {}
        for table, size in zip(new_model.tables, new_model.sizes.tolist(), strict=True):
            name, old_table = table.name, old_tables.get(table.name)
            if old_table is None or name not in old_plan.tables or name not in new_plan.tables:
                continue
            elements = _moved(old_plan.shards(old_table), new_plan.shards(table), rows_to_shard(old_table))
            moved[name] = size * elements / (rows_to_shard(table) * table.embedding_dim)
            tier = old_plan.placement(name).placement, new_plan.placement(name).placement
            if tier[0] != tier[1]:
                tiers[name] = tier
        return PlanDiff(moved, tiers, float(new_model.sizes.sum()))

    def check(self, plan: ShardingPlan, stats: Mapping[str, TableStats]) -> list[str]:
        """See `ShardingPlan.check`."""
        model = replace(self.model, stats={**self.model.stats, **stats})
        prediction, problems = model.predict(plan), []
        if prediction.imbalance > (planned := self.prediction.imbalance) + DRIFT:
            rank = int(prediction.seconds.sum(1).argmax())
            problems.append(f"rank {rank} takes {prediction.imbalance:.2f} of the mean, planned {planned:.2f}")
        problems += [
            f"{name} memory: {format_bytes((used - size).max())} short, of {format_bytes(size.max())} per {owner}"
            for name, used, size, owner in _tiers(prediction, model)
            if (used > size).any()
        ]
        shards, _ = model.shards(plan)
        needed = model.min_cached_rows(shards.table, shards.id_share, shards.rows)
        too_small = (shards.cached_rows > 0) & (shards.cached_rows < (1 - 1e-6) * needed)
        names = [model.tables[number].name for number in np.unique(shards.table[too_small])]
        return problems + [f"table {name!r}: its cache is smaller than the batches in flight" for name in names]

    def to_html(self) -> str:
        """See `ShardingPlan.to_html`."""
        prediction, top, local = self.prediction, self.model.topology, self.model.local
        node = np.arange(len(prediction.hbm)) // local
        tiers = np.stack([prediction.hbm, prediction.host[node] / local, prediction.disk[node] / local], 1) / 1e9
        time = _bars(prediction.seconds * 1e3, STAGES, "ms per step, by rank")
        memory = _bars(tiers, ("device", "host", "disk"), f"GB, by rank; device memory: {format_bytes(top.hbm)}")
        head, tables = str(self).split("\n\n")
        return (
            '<!doctype html><meta charset="utf-8"><title>Sharding plan</title>'
            "<style>body{font:14px sans-serif;margin:2em}pre{overflow-x:auto}</style>"
            f"<h1>Sharding plan</h1><pre>{escape(head)}</pre><h2>Time</h2>{time}<h2>Memory</h2>{memory}"
            f"<h2>Tables</h2><pre>{escape(tables)}</pre>\n"
        )


def _tiers(prediction: Prediction, model: CostModel) -> list[tuple[str, Array, Array, str]]:
    """Return name, used bytes, size in bytes and owner (rank or node) of each tier."""
    return [
        ("device", prediction.hbm, model.rank_hbm, "rank"),
        ("host", prediction.host, np.array(model.topology.host), "node"),
        ("disk", prediction.disk, np.array(model.topology.disk), "node"),
    ]


def _moved(old_shards: Sequence[Shard], new_shards: Sequence[Shard], num_rows: int) -> float:
    """Return the elements that a rank has in the new shards and not in the old ones, of the first `num_rows` rows."""
    shards_of_rank: dict[int, list[Shard]] = {}
    for shard in old_shards:
        shards_of_rank.setdefault(shard.rank, []).append(shard)
    old_rows = Shard(0, 0, num_rows, 0, 2**63)
    return sum(
        _overlap(shard, old_rows) - sum(_overlap(shard, old_rows, old) for old in shards_of_rank.get(shard.rank, ()))
        for shard in new_shards
    )


def _overlap(*shards: Shard) -> int:
    """Return the number of elements in the intersection of shards."""
    rows = min(shard.first_row + shard.num_rows for shard in shards) - max(shard.first_row for shard in shards)
    ends = min(shard.first_column + shard.num_columns for shard in shards)
    return max(0, rows) * max(0, ends - max(shard.first_column for shard in shards))


def _bars(values: Array, names: Sequence[str], title: str) -> str:
    """Draw stacked bars, one per row of `values [ranks, names]`, as SVG with a legend."""
    top, ends = max(float(values.sum(1).max()), 1e-12), np.cumsum(values, axis=1)
    colors = [f'<b style="color:{_COLORS[n]}">{names[n]}</b>' for n in np.flatnonzero(values.any(0)).tolist()]
    bars = [
        f'<rect x="{rank}" y="{top - ends[rank, n]:.6g}" width="0.9" height="{value:.6g}" fill="{_COLORS[n]}">'
        f"<title>rank {rank}: {names[n]} {value:.4g}</title></rect>"
        for (rank, n), value in np.ndenumerate(values)
        if value > 0
    ]
    box = f'viewBox="0 0 {len(values)} {top:.6g}" preserveAspectRatio="none" width="100%" height="220"'
    return f"<p>{title}, at most {top:.3g}: {', '.join(colors)}</p><svg {box}>{''.join(bars)}</svg>"


ShardingPlan.REPORT = PlanReport
