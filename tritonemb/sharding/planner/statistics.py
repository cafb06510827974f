"""`TableStats`: access statistics of a table's rows; `collect_stats` counts the ids of batches, in bounded memory."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tritonemb.jagged import unpack_features
from tritonemb.layout import mix64
from tritonemb.types import TableConfig, checked_number

Array = NDArray[Any]
MAX_IDS = 2**18  # counted ids per table; a quarter of them are the hottest ones, the others a sample by hash
ROW_RANGES = 64  # per table
MAX_GROUPS = 64  # groups of hotness per table
MIN_ROWS = 16  # rows of a count, from which their number is reliable
SMOOTHED_COUNTS = 16  # counts below this are corrected for chance
BATCH_SIZE = 8192  # of a data set
_SALT = -7046029254386353131  # mix64(0) is 0: id 0 would always be sampled


@dataclass(frozen=True)
class TableStats:
    """Access statistics of a table, measured or assumed; uniform by default.

    Args:
        pooling_factor: ids per sample, over all features of the table.
        hotness: (rows, share of ids) of groups of rows that are accessed about equally often, hottest first.
        row_share: share of ids in each of equal ranges of the table's rows, in ascending order.
        repeats: share of a batch's ids that repeat other ids of the batch, beyond independent draws.

    Raises:
        TypeError, ValueError: naming the field.
    """

    pooling_factor: float = 1.0
    hotness: tuple[tuple[float, float], ...] = ()
    row_share: tuple[float, ...] = ()
    repeats: float = 0.0

    def __post_init__(self) -> None:
        try:
            groups = tuple((rows, share) for rows, share in self.hotness)
            vars(self).update(hotness=groups, row_share=tuple(self.row_share))
        except (TypeError, ValueError):
            raise TypeError(f"hotness must be pairs and row_share numbers, got {self!r}") from None
        numbers = {"pooling_factor": [self.pooling_factor], "repeats": [self.repeats], "row_share": self.row_share}
        for name, values in (numbers | {"hotness": list(chain(*self.hotness))}).items():
            for value in values:
                if not 0 <= checked_number(f"a table's {name}", value) < math.inf:
                    raise ValueError(f"a table's {name} must be finite and not negative, got {value}")
        for name, shares in (("hotness", [share for _, share in self.hotness]), ("row_share", self.row_share)):
            if shares and abs(sum(shares) - 1) > 1e-6:
                raise ValueError(f"the shares of a table's {name} must add up to 1, got {sum(shares)}")
        uses = [share / rows if rows else math.nan for rows, share in self.hotness]
        if any(not current <= previous * (1 + 1e-9) for previous, current in pairwise([math.inf, *uses])):
            raise ValueError(f"a table's hotness must have groups of some rows, hottest first, got {self.hotness}")
        if self.repeats >= 1:
            raise ValueError(f"a table's repeats must be below 1, got {self.repeats}")

    def distinct(self, num_rows: float, ids: float) -> float:
        """Return the expected number of distinct rows that `ids` ids of a batch access, in a table of `num_rows`.

        Rows beyond those of `hotness` are not accessed; for fewer rows, its groups shrink in proportion.
        """
        return self.misses(num_rows, ids, 0)

    def misses(self, num_rows: float, ids: float, cached_rows: float) -> float:
        """Return the expected number of distinct rows outside of the `cached_rows` hottest; see `distinct`."""
        ids *= 1 - self.repeats
        if ids <= 0 or num_rows <= 0:
            return 0.0
        if not self.hotness:
            return float(_used(num_rows, 1 / num_rows, ids)) * max(0.0, 1 - cached_rows / num_rows)
        rows, shares = np.array(self.hotness, dtype=np.float64).T
        rows = rows * min(1.0, num_rows / rows.sum())
        used = _used(rows, np.minimum(1.0, shares / rows), ids)
        cached = np.clip(cached_rows - (np.cumsum(rows) - rows), 0, rows)
        return float(used @ (1 - cached / rows))

    def share(self, first_row: Any, rows: Any, num_rows: float) -> Any:
        """Return the share of ids in `rows` rows from `first_row` on, of a table of `num_rows`; numbers or arrays."""
        if not np.all((first_row >= 0) & (rows >= 0) & (first_row + rows <= num_rows * (1 + 1e-9))):
            raise ValueError(f"{rows} rows from row {first_row} on are out of range for a table of {num_rows} rows")
        if not self.row_share:
            return rows / num_rows if num_rows else 0.0
        ends = np.array([first_row, first_row + rows]) * (len(self.row_share) / num_rows)
        low, high = np.interp(ends, np.arange(len(self.row_share) + 1), np.append(0.0, np.cumsum(self.row_share)))
        return high - low


def _used(rows: Any, share: Any, ids: float) -> Any:
    """Return the expected number of distinct rows of `ids` ids, where an id is a given row with probability `share`."""
    with np.errstate(divide="ignore"):
        return np.minimum(-rows * np.expm1(ids * np.log1p(-np.minimum(share, 1.0))), ids * rows * share)


def collect_stats(
    data: Any, tables: Iterable[TableConfig] | nn.Module | None = None, *, num_batches: int | None = None
) -> dict[str, TableStats]:
    """Measure the statistics of each table in batches.

    Up to 2^18 ids per table are counted exactly; of more ids, the hottest 2^16 are, and a sample of the others. Unseen
    ids are estimated (Good, Biometrika 1953; Chao, 1984).

    Args:
        data: batches, each a `KeyedJaggedTensor` of this library or TorchRec, or a tuple, list, mapping or dataclass
            that contains some. Or a data set, whose training rows are read in shuffled batches of 8,192.
        tables: configs, or a module with embedding collections; one table per key of the batches by default.
        num_batches: most batches to read; all by default.

    Raises:
        TypeError, ValueError: no batches, a batch without a table's feature, or an id out of range.
    """
    if num_batches is not None and num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, got {num_batches}")
    configs = [] if tables is None else tables_in(tables)[1]
    counts = {config.name: _Counts(config.feature_names, config.name, config.num_embeddings or 0) for config in configs}
    opened = data.open("train", BATCH_SIZE, shuffle=True) if callable(getattr(data, "open", None)) else None
    if opened is None and (not isinstance(data, Iterable) or isinstance(data, Mapping | str)):
        raise TypeError(f"data must be an iterable of batches, or a data set, got {type(data).__name__}")
    number = 0
    with closing(opened) if opened is not None else nullcontext(data) as batches:
        for number, batch in enumerate(islice(batches, num_batches), 1):
            ids_by_key = _ids_by_key(batch, f"batch {number}")
            for key in ids_by_key if tables is None else ():
                counts.setdefault(key, _Counts([key]))
            for count in counts.values():
                count.add(ids_by_key, f"batch {number}")
    if not number:
        raise ValueError("there are no batches to measure; an iterator may have been used up")
    return {table: count.stats() for table, count in counts.items()}


def tables_in(tables: Iterable[TableConfig] | nn.Module) -> tuple[list[Any], list[TableConfig]]:
    """Return the embedding collections of a module (none for configs), and the table configs, of unique names."""
    from tritonemb.nn.collections import TableCollection
    from tritonemb.sharding.collection import ShardedCollection

    modules = tables.modules() if isinstance(tables, nn.Module) else ()
    collections = [module for module in modules if isinstance(module, TableCollection | ShardedCollection)]
    configs = [config for c in collections for config in c.configs] if modules else list(cast(Any, tables))
    if invalid := [config for config in configs if not isinstance(config, TableConfig)]:
        raise TypeError(f"tables must be TableConfigs, or a module with collections, got {invalid[0]!r}")
    if not configs:
        raise ValueError("there are no tables; pass TableConfigs, or a model with an embedding collection")
    names = [config.name for config in configs]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two tables are named {duplicates[0]!r}; the names of a plan's tables must be unique")
    return collections, configs


def _keyed_jagged_tensors(batch: Any) -> list[Any]:
    if all(callable(getattr(batch, method, None)) for method in ("keys", "values", "offsets")):
        return [batch]
    if is_dataclass(batch):
        batch = vars(batch)
    children = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [features for child in children for features in _keyed_jagged_tensors(child)]


def _ids_by_key(batch: Any, title: str) -> dict[str, tuple[int, Array]]:
    """Return the number of samples and the ids of each key, concatenated over micro-batches."""
    ids_by_key: dict[str, tuple[int, Array]] = {}
    if not (tensors := _keyed_jagged_tensors(batch)):
        raise TypeError(f"{title} is a {type(batch).__name__} without a KeyedJaggedTensor in it")
    for features in tensors:
        keys, values, offsets, _ = unpack_features(features)
        if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
            raise TypeError(f"{title} must have int32 or int64 ids [N], got {values.dtype} {list(values.shape)}")
        ids, ends = values.cpu().numpy().astype(np.int64), offsets.cpu().numpy()
        size = (len(ends) - 1) // max(1, len(keys))
        for index, key in enumerate(keys):
            key_ids = ids[ends[index * size] : ends[(index + 1) * size]]
            samples, earlier_ids = ids_by_key.get(key, (0, key_ids[:0]))
            ids_by_key[key] = samples + size, np.concatenate([earlier_ids, key_ids])
    return ids_by_key


class _Counts:
    """Counts of the ids of a table; or of a key, if there is no table.

    If there are too many ids, the hottest quarter stays, and ids whose hash is below a threshold, which halves. The
    weight of an id is the number of ids that it represents: the inverse of the threshold, or its previous weight for
    one of the hottest.
    """

    def __init__(self, features: Sequence[str], table: str = "", num_rows: int = 0) -> None:
        self.features, self.table, self.num_rows = features, table, num_rows  # 0 rows: ids are not limited
        # Sums over batches: samples, ids, squares of ids per batch, and distinct ids weighted by ids.
        self.samples = self.total = self.squares = self.distinct = 0
        self.by_range = np.zeros(min(ROW_RANGES, self.num_rows), dtype=np.int64)
        # Counted ids; the first `merged` are distinct.
        self.halvings = self.merged = 0
        self.ids: Array = np.zeros(0, np.int64)
        self.counts: Array = np.zeros(0)
        self.weights: Array = np.zeros(0)

    def add(self, ids_by_key: Mapping[str, tuple[int, Array]], title: str) -> None:
        if missing := [feature for feature in self.features if feature not in ids_by_key]:
            if not self.table:
                return
            raise ValueError(
                f"{title} lacks feature {missing[0]!r} of table {self.table!r}; it has the keys {sorted(ids_by_key)}"
            )
        ids_of_features = [ids_by_key[feature][1] for feature in self.features]
        for feature, ids in zip(self.features if self.num_rows else (), ids_of_features, strict=False):
            if len(invalid := ids[(ids < 0) | (ids >= self.num_rows)]):
                raise ValueError(
                    f"{title}: feature {feature!r} has the id {invalid[0]}, but table {self.table!r} has "
                    f"{self.num_rows} rows; ids must lie in [0, {self.num_rows})"
                )
        ids = np.concatenate(ids_of_features)
        self.samples, self.total = self.samples + ids_by_key[self.features[0]][0], self.total + len(ids)
        if self.num_rows:
            self.by_range += np.bincount(ids * len(self.by_range) // self.num_rows, minlength=len(self.by_range))
        distinct_ids, counts = np.unique(ids, return_counts=True)
        self.squares, self.distinct = self.squares + len(ids) ** 2, self.distinct + len(ids) * len(distinct_ids)
        if self.halvings:
            counted = self._sampled(distinct_ids) | np.isin(distinct_ids, self.ids)
            distinct_ids, counts = distinct_ids[counted], counts[counted]
        self.ids, self.counts = np.append(self.ids, distinct_ids), np.append(self.counts, counts)
        self.weights = np.append(self.weights, np.full(len(distinct_ids), 2.0**self.halvings))
        if len(self.ids) - self.merged > MAX_IDS // 4:
            self._merge()

    def _sampled(self, ids: Array) -> Array:
        """Return which ids have a hash below the threshold."""
        hashes = mix64(torch.from_numpy(ids + _SALT)).numpy().view(np.uint64)
        return np.asarray(hashes < np.uint64(2 ** (64 - self.halvings)))

    def _merge(self) -> None:
        """Merge the counts of equal ids, and halve the sample while there are too many ids."""
        self.ids, first, inverse = np.unique(self.ids, return_index=True, return_inverse=True)
        self.counts, self.weights = np.bincount(inverse, self.counts), self.weights[first]
        while len(self.ids) > MAX_IDS:
            self.halvings += 1
            sampled, hottest = self._sampled(self.ids), np.argpartition(self.counts, -(MAX_IDS // 4))[-(MAX_IDS // 4) :]
            previous_weights = self.weights[hottest]
            self.weights[:] = 2.0**self.halvings
            self.weights[hottest], sampled[hottest] = previous_weights, True
            self.ids, self.counts, self.weights = self.ids[sampled], self.counts[sampled], self.weights[sampled]
        self.merged = len(self.ids)

    def stats(self) -> TableStats:
        """Return the statistics of the counted batches."""
        self._merge()
        if not self.total:
            return TableStats(0.0)
        by_range = tuple((self.by_range / self.total).tolist())
        stats = TableStats(self.total / max(1, self.samples), self._hotness(), by_range)
        # Batches are weighted by their ids, so that a small last batch matters little. Bisect the number of independent
        # ids with as many distinct ones; the others are repeats.
        ids, distinct = self.squares / self.total, self.distinct / self.total
        low, high = 0.0, ids
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if stats.distinct(math.inf, middle) < distinct else (low, middle)
        return replace(stats, repeats=max(0.0, 1 - high / ids))

    def _hotness(self) -> tuple[tuple[float, float], ...]:
        """Return groups of rows of similar hotness: their number, and their share of the ids."""
        uses, exact = self.counts * self.weights, self.weights == 1
        if not exact.all():  # scale the sample to the known total
            uses[~exact] *= (self.total - uses[exact].sum()) / uses[~exact].sum()
        values, inverse = np.unique(self.counts, return_inverse=True)
        rows: Array = np.bincount(inverse, self.weights)
        mass: Array = np.bincount(inverse, uses)
        if values[0] == 1 and rows[0] >= max(MIN_ROWS, self.total / 100):
            # Good-Turing smoothing: rows with count c have the expected mass of rows with count c + 1, and unseen rows
            # that of rows with count 1. The correction fades out, as larger counts need none.
            run = 1
            while run < min(SMOOTHED_COUNTS, len(values)) and values[run] == run + 1 and rows[run] >= MIN_ROWS:
                run += 1
            shifted = mass[1:run] * (1 - np.arange(1, run) / SMOOTHED_COUNTS)
            mass[1:run] -= shifted
            mass[: run - 1] += shifted
            # Chao's estimate of the unseen rows.
            doubletons = rows[1] if run > 1 else 0.0
            unseen = rows[0] * (rows[0] - 1) / (2 * (doubletons + 1))
            rows[0] += min(unseen, max(0.0, (self.num_rows or math.inf) - rows.sum()))
        edges = np.unique(np.geomspace(1, values[-1] + 1, MAX_GROUPS).round())
        group = np.searchsorted(edges, values, "right") - 1
        rows, mass = np.bincount(group, rows), np.bincount(group, mass) / mass.sum()
        rows, mass = rows[rows > 0], mass[rows > 0]
        order = np.argsort(-mass / rows, kind="stable")
        return tuple(zip(rows[order].tolist(), mass[order].tolist(), strict=True))
