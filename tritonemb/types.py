"""Configurations: tables, their caches, eviction and admission, and the codecs of rows and gradients."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias, get_args

import torch
from torch import Tensor

from tritonemb.utils import Options, join_names, number, pairs_by_name

Pooling = Literal["sum", "mean", "none"]
Placement = Literal["device", "host", "disk", "server"]
TRAINABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Device = torch.device | str | None
TABLE_DTYPES = (*TRAINABLE_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
STORED_DTYPES = (*TABLE_DTYPES, torch.int8)  # those of rows that may have another one on the device


@dataclass(frozen=True)
class Codec:
    """Encoding of the elements of a row or gradient in transit; see `kernels/quantize.py`."""

    dtype: torch.dtype  # of a code
    largest: float  # largest finite value
    saturation_threshold: float  # smallest magnitude that saturates: it would round beyond `largest`
    scales_gradients: bool = False  # by default, as gradients of a mean may be below the codec's smallest number
    row_wise: bool = False  # whether each row has a scale and an offset


CODECS = {
    "fp32": Codec(torch.float32, torch.finfo(torch.float32).max, math.inf),
    "fp16": Codec(torch.float16, 65504.0, 65520.0, scales_gradients=True),
    "bf16": Codec(torch.bfloat16, torch.finfo(torch.bfloat16).max, 2.0**128 - 2.0**119),
    "fp8_e4m3": Codec(torch.float8_e4m3fn, 448.0, 464.0 + 2.0**-15, scales_gradients=True),
    "fp8_e5m2": Codec(torch.float8_e5m2, 57344.0, 61440.0, scales_gradients=True),
    "int8": Codec(torch.uint8, 2.0**125, 2.0**125 + 2.0**102, row_wise=True),
}
CodecName: TypeAlias = Literal[tuple(CODECS)]  # type: ignore[valid-type]


def checked_size(title: str, value: Any, minimum: int = 1) -> int:
    """Return an integer of any type, NumPy's included, as an `int`; raise TypeError or ValueError unless it is ≥
    `minimum`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or getattr(value, "shape", ()) != ():
        raise TypeError(f"{title} must be an int, got {value!r}")
    if value.__index__() < minimum:
        raise ValueError(f"{title} must be at least {minimum}, got {value}")
    return value.__index__()


def checked_number(title: str, value: Any) -> float:
    """Return `value` if it is an int or float; raise TypeError otherwise, and for a bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{title} must be a number, got {value!r}")
    return value


@dataclass(frozen=True)
class CacheConfig:
    """Cache of a host- or disk-resident table: capacity, eviction policy and folder.

    Args:
        rows: rows cached on the device by each rank that has a shard of the table, at least 1; rounded up to sets of
            32. For a table on embedding servers, the capacity of each trainer's worker-side embedding cache.
        share: share of the table's rows to cache, in (0, 1], if `rows` is not given: a tenth by default, but at most
            262,144 rows of a table on servers.
        policy: evict the least recently ("lru") or least frequently ("lfu") used row. Rows of batches that are being
            trained or prefetched are pinned.
        folder: folder for the file of a disk-resident table while it is in use; the system's temporary folder by
            default. The file is removed when the process ends.
        host_rows: rows of a disk-resident table to cache in host memory as well; none by default.
        host_share: share of the table's rows, in (0, 1], if `host_rows` is not given.

    Raises:
        TypeError, ValueError: the message names the field.
    """

    rows: int | None = None
    share: float = 0.1
    policy: Literal["lru", "lfu"] = "lru"
    folder: str | os.PathLike[str] | None = None
    host_rows: int | None = None
    host_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "host_rows"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checked_size(f"a cache's {name}", getattr(self, name)))
        host_share = 1.0 if self.host_share is None else self.host_share
        for name, share in (("share", self.share), ("host_share", host_share)):
            if not 0 < checked_number(f"a cache's {name}", share) <= 1:
                raise ValueError(f"a cache's {name} must lie in (0, 1], got {share}")
        if self.host_rows is not None and self.host_share is not None:
            raise ValueError(f"pass host_rows or host_share, not both, got {self.host_rows} and {self.host_share}")
        if self.policy not in ("lru", "lfu"):
            raise ValueError(f"a cache's policy must be 'lru' or 'lfu', got {self.policy!r}")
        if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
            raise TypeError(f"a cache's folder must be a path, got {self.folder!r}")

    def num_device_rows(self, num_embeddings: int) -> int:
        """Rows of a table to cache on the device, at least 1."""
        return min(math.ceil(self.share * num_embeddings) if self.rows is None else self.rows, num_embeddings)

    def num_host_rows(self, num_embeddings: int) -> int | None:
        """Rows of a disk-resident table to cache in host memory, at least 1; None without a host cache."""
        if self.host_share is not None:
            return math.ceil(self.host_share * num_embeddings)
        return None if self.host_rows is None else min(self.host_rows, num_embeddings)


@dataclass(frozen=True)
class EvictionConfig:
    """Eviction of rows of a full dynamic table, to insert new ids.

    Args:
        policy: evict the least recently ("lru") or least frequently ("lfu") used row of the new id's set and the next.
        protect: number of training batches: rows used in the last `protect` ones are not evicted. At most `protect`
            batches can be prefetched and `protect` micro-batches accumulated; the result is the same for any number.
        half_life: number of steps in which the use count of an unused row decays by half, for "lfu".
        ttl: number of steps after which an unused row is evicted even if the table is not full; never by default. Each
            step scans a share of the table, and 1,024 steps at most scan all of it.

    Raises:
        TypeError, ValueError: the message names the field.
    """

    policy: Literal["lru", "lfu"] = "lru"
    protect: int = 8
    half_life: int = 1_000
    ttl: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("lru", "lfu"):
            raise ValueError(f"an eviction's policy must be 'lru' or 'lfu', got {self.policy!r}")
        for name in ("protect", "half_life", "ttl"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_size(f"an eviction's {name}", value))
        if self.ttl is not None and self.ttl <= self.protect:
            raise ValueError(f"an eviction's ttl must be more than protect, {self.protect}, got {self.ttl}")


@dataclass(frozen=True)
class AdmissionConfig:
    """Admission of new ids to a dynamic table; an id without a row reads its initial values and gets no gradient.

    Args:
        probability: probability to admit an id, drawn from the table's seed and the id, so it never changes.
        appearances: occurrences of an id before it is admitted, the current batch included. A count-min sketch counts
            them: it may overcount, and its counts are halved periodically.

    Raises:
        TypeError, ValueError: the message names the field.
    """

    probability: float = 1.0
    appearances: int = 1

    def __post_init__(self) -> None:
        if not 0 < checked_number("an admission's probability", self.probability) <= 1:
            raise ValueError(f"an admission's probability must lie in (0, 1], got {self.probability}")
        object.__setattr__(self, "appearances", checked_size("an admission's appearances", self.appearances))


@dataclass(frozen=True)
class TableConfig:
    """Configuration of an embedding table.

    A *dynamic* table has no fixed number of rows: `num_embeddings` is None, and any int64 is an id. An id gets a row
    when it is first trained; see docs/dynamic-tables.md.

    Args:
        name: unique among the tables of a module; the first component of its `state_dict` keys. No dots.
        num_embeddings: rows, at least 1; None for a dynamic table.
        embedding_dim: columns, at least 1; fastest when a row is a multiple of 16 bytes.
        features: keys of the batch that look this table up; the table's name by default.
        pooling: reduction of the rows of a bag: "sum", "mean", or "none" (one output row per id).
        dtype: `torch.float32`, `torch.float16`, `torch.bfloat16`, or `torch.int8` off the device, see docs/tiers.md;
            `torch.float8_e4m3fn` or `torch.float8_e5m2` for lookups alone. Optimizer state is always float32.
        placement: memory tier of the rows: the device; host memory or a disk, with a cache on the device and bitwise
            identical results; or embedding servers (`tritonemb.server`).
        init: fills `[num_embeddings, embedding_dim]` in place; uniform in ±1/sqrt(num_embeddings) by default. Or a file
            of pretrained rows, .npy, .npz, .safetensors or .parquet, on any tier but servers: floats `weight`,
            `[N, embedding_dim]`, and `ids` int64 `[N]`, which a dynamic table needs; without ids N is `num_embeddings`,
            with them other rows have their default values. A rank reads the rows of its shards.
        cache: cache of a table that is not on the device.
        capacity: maximal number of rows of a dynamic table; rounded up slightly.
        capacity_bytes: memory of a dynamic table's rows with their optimizer states and index, in place of `capacity`.
        init_bound: bound of the uniform initial values; 1/sqrt(num_embeddings) by default, or 1/sqrt(embedding_dim)
            for a dynamic table, whose initial values are a function of its seed and the id.
        eviction, admission: policies of a dynamic table.
        fallback_rows: rows of a dynamic table beside `capacity` that ids without a row share, trained like others; the
            id's hash selects one. Rounded up slightly. 0: such ids read as initial values, and get no gradient.

    Attributes:
        seed: seed of the table's random numbers, 63 bits from its name: the same on every tier.
        row_origin, column_origin: first row and column of a `shard` in the unsharded table; else 0.
        global_rows: rows of the unsharded table.
        partitions: first partition and number of partitions of a `shard` of a dynamic table; else None.
        feature_names: `features`, never None.

    Raises:
        TypeError, ValueError: the message names the table and the field.
    """

    name: str
    num_embeddings: Any  # an int, or None
    embedding_dim: int
    features: Sequence[str] | None = None
    pooling: Pooling = "sum"
    dtype: torch.dtype = torch.float32
    placement: Placement = "device"
    init: Callable[[Tensor], object] | str | os.PathLike[str] | None = None
    cache: CacheConfig = CacheConfig()
    capacity: int | None = None
    capacity_bytes: int | None = None
    init_bound: float | None = None
    eviction: EvictionConfig = EvictionConfig()
    admission: AdmissionConfig = AdmissionConfig()
    fallback_rows: int = 0
    row_dtype: torch.dtype = field(init=False, compare=False, repr=False)  # on the device
    seed: int = field(init=False, compare=False, repr=False)
    row_origin: int = field(default=0, init=False, compare=False, repr=False)
    column_origin: int = field(default=0, init=False, compare=False, repr=False)
    global_rows: int = field(default=0, init=False, compare=False, repr=False)
    partitions: tuple[int, int] | None = field(default=None, init=False, compare=False, repr=False)
    feature_names: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a table's name must be a str, got {type(self.name).__name__}")
        if not self.name or "." in self.name or "\n" in self.name:
            raise ValueError(f"table {self.name!r}: a name must be non-empty, without dots or line breaks")
        for size in ("num_embeddings", "embedding_dim", "capacity", "capacity_bytes"):
            if size == "embedding_dim" or getattr(self, size) is not None:
                object.__setattr__(self, size, checked_size(f"table {self.name!r}: {size}", getattr(self, size)))
        vars(self).update(fallback_rows=checked_size(f"table {self.name!r}: fallback_rows", self.fallback_rows, 0))
        self._check_dynamic()
        choices = {"pooling": get_args(Pooling), "placement": get_args(Placement), "dtype": STORED_DTYPES}
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ValueError(f"table {self.name!r}: {name} must be one of {values}, got {getattr(self, name)!r}")
        vars(self).update(row_dtype=torch.float32 if self.dtype == torch.int8 else self.dtype)
        if self.dtype == torch.int8 and self.placement not in ("host", "disk"):
            raise ValueError(f"table {self.name!r}: int8 rows need placement host or disk, got {self.placement!r}")
        if self.init is not None and not callable(self.init) and not isinstance(self.init, str | os.PathLike):
            raise TypeError(f"table {self.name!r}: init must be a function or a file's path, got {self.init!r}")
        if not isinstance(self.cache, CacheConfig):
            raise TypeError(f"table {self.name!r}: cache must be a CacheConfig, got {self.cache!r}")
        if self.placement != "disk":
            for name in ("host_rows", "host_share"):
                if getattr(self.cache, name) is not None:
                    raise ValueError(
                        f"table {self.name!r}: cache {name} is the host cache of a disk-resident table, but the "
                        f'placement is {self.placement!r}; omit it, or use placement="disk"'
                    )
        features = self._checked_features()
        vars(self).update(features=features, feature_names=features, seed=seed_of(self.name))
        vars(self).update(global_rows=self.num_embeddings or 0)

    @property
    def is_dynamic(self) -> bool:
        """Return whether any int64 is an id."""
        return self.num_embeddings is None

    @property
    def max_rows(self) -> int:
        """Number of rows; of a dynamic table its capacity in rows, with its fallback rows."""
        return self.num_embeddings or (self.capacity or 0) + self.fallback_rows

    def _check_dynamic(self) -> None:
        title, num_capacities = f"table {self.name!r}", 2 - [self.capacity, self.capacity_bytes].count(None)
        if self.init_bound is not None and not 0 <= checked_number(f"{title}: init_bound", self.init_bound) < math.inf:
            raise ValueError(f"{title}: init_bound must lie in [0, inf), got {self.init_bound}")
        for name, kind in (("eviction", EvictionConfig), ("admission", AdmissionConfig)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{title}: {name} must be an {kind.__name__}, got {getattr(self, name)!r}")
        if not self.is_dynamic:
            policies = self.eviction, self.admission, self.fallback_rows
            if num_capacities or policies != (EvictionConfig(), AdmissionConfig(), 0):
                raise ValueError(
                    f"{title}: capacity, eviction, admission and fallback_rows are for dynamic tables; omit them, or "
                    "pass num_embeddings=None"
                )
            return
        if num_capacities != 1:
            raise ValueError(f"{title}: a dynamic table needs either capacity, in rows, or capacity_bytes")
        if callable(self.init):
            raise ValueError(
                f"{title}: init fills all rows at once, but rows of a dynamic table are assigned to ids on first use; "
                "use init_bound, a file with ids, or insert rows"
            )
        if self.dtype not in TRAINABLE_DTYPES:
            raise ValueError(
                f"{title}: the dtype of a dynamic table must be one of {TRAINABLE_DTYPES}, got {self.dtype}"
            )

    def _checked_features(self) -> tuple[str, ...]:
        if self.features is None:
            return (self.name,)
        if isinstance(self.features, str) or not isinstance(self.features, Iterable):
            kind = type(self.features).__name__
            raise TypeError(f"table {self.name!r}: features must be a list of keys, got the {kind} {self.features!r}")
        features = tuple(self.features)
        for feature in features:
            if not isinstance(feature, str) or not feature or "\n" in feature:
                raise ValueError(f"table {self.name!r}: a feature must be a non-empty one-line str, got {feature!r}")
        if not features:
            raise ValueError(f"table {self.name!r}: needs at least one feature")
        if len(set(features)) != len(features):
            raise ValueError(f"table {self.name!r}: a feature is named twice in {list(features)}")
        return features

    def shard(
        self, name: str, rows: tuple[int, int], columns: tuple[int, int], features: Sequence[str]
    ) -> "TableConfig":
        """Return the configuration of a shard, whose updates are bitwise identical to this table's.

        A shard has this table's seed, but not its `init`. `dataclasses.replace` of a shard makes an unsharded table.

        Args:
            rows, columns: first index and count; partitions in place of rows for a dynamic table.
            features: keys that look the shard up, with ids relative to its first row.

        ValueError for a rectangle that is empty or not inside this table.
        """
        if self.is_dynamic:
            shard = replace(self, name=name, features=features, init=None, init_bound=self.bound)
            vars(shard).update(seed=self.seed, partitions=rows)
            return shard
        sizes = self.num_embeddings, self.embedding_dim
        for axis, (first, count), size in zip(("rows", "columns"), (rows, columns), sizes, strict=True):
            if first < 0 or count < 1 or first + count > size:
                raise ValueError(
                    f"table {self.name!r} has {axis} 0 to {size - 1}; a shard of {count} {axis} from {first} on is "
                    "outside of it"
                )
        shard = TableConfig(
            name, rows[1], columns[1], features, self.pooling, self.dtype, self.placement, cache=self.cache,
            init_bound=self.init_bound,
        )  # fmt: skip
        vars(shard).update(row_origin=self.row_origin + rows[0], column_origin=self.column_origin + columns[0])
        vars(shard).update(seed=self.seed, global_rows=self.global_rows)
        return shard

    def storage_config(self, num_rows: int, first_row: int = 0) -> "TableConfig":
        """Return the static table that stores the rows of a dynamic table or shard; `first_row` is its row origin."""
        storage = replace(
            self, num_embeddings=num_rows, capacity=None, capacity_bytes=None, eviction=EvictionConfig(),
            admission=AdmissionConfig(), fallback_rows=0, init=None, init_bound=self.bound,
        )  # fmt: skip
        vars(storage).update(seed=self.seed, row_origin=first_row)
        return storage

    @property
    def init_function(self) -> Callable[[Tensor], object] | None:
        """Function `init`; None for a file."""
        return self.init if callable(self.init) else None

    @property
    def bound(self) -> float:
        """Bound of the uniform initial values, without `init`."""
        if self.init_bound is not None:
            return float(self.init_bound)
        return float((self.embedding_dim if self.is_dynamic else self.global_rows) ** -0.5)


def seed_of(name: str) -> int:
    """Derive the seed of a table's random numbers, 63 bits, from its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """Placement of the tables, and caches of their rows on the device.

    Args:
        embedding_dims: columns of single tables, as NAME=NUMBER, in place of embedding_dim.
        pretrained: files of initial rows of single tables, as NAME=PATH, read when a run starts; see `TableConfig`.
        placement: placement of large tables: device, or host memory (host) or disk with rows cached on the device.
        placed_rows: least number of rows of a table with this placement; smaller tables stay on the device.
        placed_dtype: dtype of the stored rows of tables with this placement; int8 takes a quarter of the memory.
        cache_share: fraction of a table's rows that its device cache holds.
        cache_rows: number of rows that a device cache holds, in place of cache_share.
        cache_host_rows: rows of each table on disk that are also cached in host memory; none if not given.
        cache_policy: eviction policy of caches: least recently used (lru) or least frequently used (lfu).
        cache_folder: folder of the files of tables on disk during the run; the system's temporary folder if not given.
        evict: eviction policy of full dynamic tables: lru or lfu.
        admit_after: occurrences of an id after which it gets a row of a dynamic table.
        fallback_rows: rows of a dynamic table beside its capacity that ids without a row share.
    """

    embedding_dims: tuple[str, ...] = ()
    pretrained: tuple[str, ...] = ()
    placement: Literal["device", "host", "disk"] = "device"
    placed_rows: int = number(10_000, least=0)
    placed_dtype: Literal["float32", "int8"] = "float32"
    cache_share: float = 0.1
    cache_rows: int | None = None
    cache_host_rows: int | None = None
    cache_policy: Literal["lru", "lfu"] = "lru"
    cache_folder: Path | None = None
    evict: Literal["lru", "lfu"] = "lru"
    admit_after: int = number(1, least=1)
    fallback_rows: int = number(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_host_rows is not None and self.placement != "disk":
            raise ValueError(f"cache_host_rows is for tables on disk, but placement is {self.placement!r}")
        if self.placed_dtype == "int8" and self.placement == "device":
            raise ValueError("placed_dtype int8 is for tables in host memory or on disk, but placement is 'device'")
        self.place([])  # checks the cache options

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """Set columns, initial rows, placement, cache, eviction, admission and fallback rows of tables."""
        dims, names = pairs_by_name("embedding_dims", self.embedding_dims), [table.name for table in tables]
        files = pairs_by_name("pretrained", self.pretrained, "path", ".+")
        for option, pairs in {"embedding_dims": dims, "pretrained": files}.items():
            if unknown := [name for name in pairs if names and name not in names]:
                raise ValueError(f"{option} names {unknown[0]!r}, not a table; the tables are {join_names(names)}")
        cache = CacheConfig(
            self.cache_rows, self.cache_share, self.cache_policy, self.cache_folder, self.cache_host_rows
        )
        eviction, admission = EvictionConfig(self.evict), AdmissionConfig(appearances=self.admit_after)
        policies: dict[str, Any] = {"eviction": eviction, "admission": admission, "fallback_rows": self.fallback_rows}
        placed = [
            replace(t, embedding_dim=int(dims.get(t.name, t.embedding_dim)), init=files.get(t.name, t.init))
            for t in tables
        ]
        for index, table in enumerate(placed):
            if table.is_dynamic:
                placed[index] = replace(table, **policies)
            if (table.num_embeddings or table.capacity or 0) >= self.placed_rows:
                tier = {"placement": self.placement, "cache": cache, "dtype": getattr(torch, self.placed_dtype)}
                placed[index] = replace(placed[index], **tier)
        return placed
