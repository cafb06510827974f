"""`collect_stats` counts in batches how the rows of tables are used, in bounded memory."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import is_dataclass, replace
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from tritonemb.jagged import unpack_features
from tritonemb.layout import mix64
from tritonemb.sharding.table_stats import Array, TableStats
from tritonemb.types import TableConfig

MOST_IDS = 2**18  # of a table that are counted; of these, the hottest quarter whatever their hashes are
RANGES = 64  # of a table's rows
MOST_GROUPS = 64
MANY = 16  # ids of one count whose number says something about that of others
SMOOTHED = 16  # counts below which frequencies are corrected for chance
BATCH_SIZE = 8192  # in which a data set is read
_SALT = -7046029254386353131  # so that id 0 has a hash like any other


def collect_stats(
    data: Any, tables: Iterable[TableConfig] | nn.Module | None = None, *, num_batches: int | None = None
) -> dict[str, TableStats]:
    """How batches use tables, by table.

    Batches are counted one by one. Of each table up to 2^18 ids are counted exactly; of more, the hottest 2^16
    still are, and of the others a sample. Ids that were not seen are estimated (Good, Biometrika 1953; Chao, 1984).

    Args:
        data: batches: each a `KeyedJaggedTensor`, ours or TorchRec's, or a tuple, list, mapping or dataclass with some
            in it. Or a data set, whose training rows are read in shuffled batches of 8,192.
        tables: configs, or a module with collections of tables; one table for each key of the batches if not given.
        num_batches: to read at most; all if not given.

    Raises:
        TypeError, ValueError: there is no batch, or one lacks a table's feature, or has an id that its table does not.
    """
    if num_batches is not None and num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, got {num_batches}")
    configs = [] if tables is None else tables_in(tables)[1]
    counts = {each.name: _Counts(each.feature_names, each.name, each.num_embeddings or 0) for each in configs}
    opened = data.open("train", BATCH_SIZE, shuffle=True) if callable(getattr(data, "open", None)) else None
    if opened is None and (not isinstance(data, Iterable) or isinstance(data, Mapping | str)):
        raise TypeError(f"data must be batches, say a list of them, or a data set, got {type(data).__name__}")
    number = 0
    with closing(opened) if opened is not None else nullcontext(data) as batches:
        for number, batch in enumerate(islice(batches, num_batches), 1):
            found = _ids_by_key(batch, f"batch {number}")
            for key in found if tables is None else ():
                counts.setdefault(key, _Counts([key]))
            for count in counts.values():
                count.add(found, f"batch {number}")
    if not number:
        raise ValueError("there are no batches to measure; an iterator may have been used up")
    return {table: count.stats() for table, count in counts.items()}


def tables_in(tables: Iterable[TableConfig] | nn.Module) -> tuple[list[Any], list[TableConfig]]:
    """A module's collections of tables, none of other tables; and the tables, each with a name of its own."""
    from tritonemb.nn.collections import TableCollection
    from tritonemb.sharding.collection import ShardedCollection

    modules = tables.modules() if isinstance(tables, nn.Module) else ()
    collections = [module for module in modules if isinstance(module, TableCollection | ShardedCollection)]
    found = [config for each in collections for config in each.configs] if modules else list(cast(Any, tables))
    if wrong := [each for each in found if not isinstance(each, TableConfig)]:
        raise TypeError(f"tables must be TableConfigs, or a module with collections, got {wrong[0]!r}")
    if not found:
        raise ValueError("there are no tables; give TableConfigs, or a model with an embedding collection")
    names = [config.name for config in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two tables are named {twice[0]!r}; a plan knows tables by their names")
    return collections, found


def _parts(batch: Any) -> list[Any]:
    """Whatever is a `KeyedJaggedTensor` in it."""
    if all(callable(getattr(batch, method, None)) for method in ("keys", "values", "offsets")):
        return [batch]
    if is_dataclass(batch):
        batch = vars(batch)
    children = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [part for child in children for part in _parts(child)]


def _ids_by_key(batch: Any, where: str) -> dict[str, tuple[int, Array]]:
    """By key: samples, and ids; those of several micro-batches together."""
    found: dict[str, tuple[int, Array]] = {}
    if not (parts := _parts(batch)):
        raise TypeError(f"{where} is a {type(batch).__name__} without a KeyedJaggedTensor in it")
    for part in parts:
        keys, values, offsets, _ = unpack_features(part)
        if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
            raise TypeError(f"{where} must have int32 or int64 ids [N], got {values.dtype} {list(values.shape)}")
        ids, ends = values.cpu().numpy().astype(np.int64), offsets.cpu().numpy()
        size = (len(ends) - 1) // max(1, len(keys))
        for index, key in enumerate(keys):
            own = ids[ends[index * size] : ends[(index + 1) * size]]
            samples, others = found.get(key, (0, own[:0]))
            found[key] = samples + size, np.concatenate([others, own])
    return found


class _Counts:
    """How often each id of a table comes; without a table, of a key whose ids are any.

    When there are too many, the hottest quarter stays, and those whose hash is below a threshold, which halves. The
    weight of an id is how many ids it stands for: one over the threshold, but for the hottest what it was before.
    """

    def __init__(self, features: Sequence[str], table: str = "", num_rows: int = 0) -> None:
        self.features, self.table, self.num_rows = features, table, num_rows  # no rows: any id is one
        self.samples = self.total = self.squares = self.distinct = self.halvings = self.merged = 0
        self.by_range = np.zeros(min(RANGES, self.num_rows), dtype=np.int64)
        self.ids: Array = np.zeros(0, np.int64)  # the first `merged` are distinct
        self.counts: Array = np.zeros(0)
        self.weights: Array = np.zeros(0)

    def add(self, found: Mapping[str, tuple[int, Array]], where: str) -> None:
        """Count a batch."""
        if missing := [feature for feature in self.features if feature not in found]:
            if not self.table:
                return
            raise ValueError(
                f"{where} lacks feature {missing[0]!r}, which table {self.table!r} looks up; it has the keys "
                f"{sorted(found)}"
            )
        parts = [found[feature][1] for feature in self.features]
        for feature, ids in zip(self.features if self.num_rows else (), parts, strict=False):
            if len(bad := ids[(ids < 0) | (ids >= self.num_rows)]):
                raise ValueError(
                    f"{where}: feature {feature!r} has the id {bad[0]}, and table {self.table!r} {self.num_rows} rows; "
                    f"ids must lie in [0, {self.num_rows})"
                )
        ids = np.concatenate(parts)
        self.samples, self.total = self.samples + found[self.features[0]][0], self.total + len(ids)
        if self.num_rows:
            self.by_range += np.bincount(ids * len(self.by_range) // self.num_rows, minlength=len(self.by_range))
        own, counts = np.unique(ids, return_counts=True)
        self.squares, self.distinct = self.squares + len(ids) ** 2, self.distinct + len(ids) * len(own)
        if self.halvings:
            stay = self._sampled(own) | np.isin(own, self.ids)
            own, counts = own[stay], counts[stay]
        self.ids, self.counts = np.append(self.ids, own), np.append(self.counts, counts)
        self.weights = np.append(self.weights, np.full(len(own), 2.0**self.halvings))
        if len(self.ids) - self.merged > MOST_IDS // 4:
            self._merge()

    def _sampled(self, ids: Array) -> Array:
        hashes = mix64(torch.from_numpy(ids + _SALT)).numpy().view(np.uint64)
        return np.asarray(hashes < np.uint64(2 ** (64 - self.halvings)))

    def _merge(self) -> None:
        self.ids, first, inverse = np.unique(self.ids, return_index=True, return_inverse=True)
        self.counts, self.weights = np.bincount(inverse, self.counts), self.weights[first]
        while len(self.ids) > MOST_IDS:
            self.halvings += 1
            stay, hottest = self._sampled(self.ids), np.argpartition(self.counts, -(MOST_IDS // 4))[-(MOST_IDS // 4) :]
            kept = self.weights[hottest]
            self.weights[:] = 2.0**self.halvings
            self.weights[hottest], stay[hottest] = kept, True
            self.ids, self.counts, self.weights = self.ids[stay], self.counts[stay], self.weights[stay]
        self.merged = len(self.ids)

    def stats(self) -> TableStats:
        """What was counted."""
        self._merge()
        if not self.total:
            return TableStats(0.0)
        by_range = tuple((self.by_range / self.total).tolist())
        stats = TableStats(self.total / max(1, self.samples), self._hotness(), by_range)
        # Batches weigh as much as they have ids, so that a small one at the end matters little.
        ids, distinct = self.squares / self.total, self.distinct / self.total
        low, high = 0.0, ids
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if stats.distinct(math.inf, middle) < distinct else (low, middle)
        return replace(stats, repeats=max(0.0, 1 - high / ids))

    def _hotness(self) -> tuple[tuple[float, float], ...]:
        uses, exact = self.counts * self.weights, self.weights == 1
        if not exact.all():  # the total is known
            uses[~exact] *= (self.total - uses[exact].sum()) / uses[~exact].sum()
        values, inverse = np.unique(self.counts, return_inverse=True)
        rows: Array = np.bincount(inverse, self.weights)
        mass: Array = np.bincount(inverse, uses)
        if values[0] == 1 and rows[0] >= max(MANY, self.total / 100):
            # All rows that came c times can be expected to have the share that those have which came c + 1 times, and
            # rows that never came that of those which came once. The correction fades out, as larger counts need none.
            run = 1
            while run < min(SMOOTHED, len(values)) and values[run] == run + 1 and rows[run] >= MANY:
                run += 1
            down = mass[1:run] * (1 - np.arange(1, run) / SMOOTHED)
            mass[1:run] -= down
            mass[: run - 1] += down
            twice = rows[1] if run > 1 else 0.0
            unseen = rows[0] * (rows[0] - 1) / (2 * (twice + 1))
            rows[0] += min(unseen, max(0.0, (self.num_rows or math.inf) - rows.sum()))
        edges = np.unique(np.geomspace(1, values[-1] + 1, MOST_GROUPS).round())
        group = np.searchsorted(edges, values, "right") - 1
        rows, mass = np.bincount(group, rows), np.bincount(group, mass) / mass.sum()
        rows, mass = rows[rows > 0], mass[rows > 0]
        order = np.argsort(-mass / rows, kind="stable")
        return tuple(zip(rows[order].tolist(), mass[order].tolist(), strict=True))
