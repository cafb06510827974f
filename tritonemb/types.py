"""What a table is: its size, its memory tier and how its bags are pooled."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsIndex, get_args

import torch
from torch import Tensor

Pooling = Literal["sum", "mean", "none"]
Placement = Literal["device", "host", "disk", "server"]
TRAINABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Device = torch.device | str | None
TABLE_DTYPES = (*TRAINABLE_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Codec:
    """How an element of a row or gradient crosses the network; see `kernels/quantize.py`.

    Args:
        dtype: of its code.
        largest: the largest value.
        saturation_threshold: the first magnitude that does not round to `largest` or below: it saturates.
        scales_gradients: by default; its smallest numbers are larger than gradients of a mean may be.
        row_wise: whether each row has a scale and an offset.
    """

    dtype: torch.dtype
    largest: float
    saturation_threshold: float
    scales_gradients: bool = False
    row_wise: bool = False


CODECS = {
    "fp32": Codec(torch.float32, torch.finfo(torch.float32).max, math.inf),
    "fp16": Codec(torch.float16, 65504.0, 65520.0, scales_gradients=True),
    "bf16": Codec(torch.bfloat16, torch.finfo(torch.bfloat16).max, 2.0**128 - 2.0**119),
    "fp8_e4m3": Codec(torch.float8_e4m3fn, 448.0, 464.0 + 2.0**-15, scales_gradients=True),
    "fp8_e5m2": Codec(torch.float8_e5m2, 57344.0, 61440.0, scales_gradients=True),
    "int8": Codec(torch.uint8, 2.0**125, 2.0**125 + 2.0**102, row_wise=True),
}


def checked_size(title: str, value: Any, least: int = 1) -> int:
    """An integer of any kind, say NumPy's, as an `int`; TypeError or ValueError if it is none, or less than `least`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or getattr(value, "shape", ()) != ():
        raise TypeError(f"{title} must be an int, got {value!r}")
    if value.__index__() < least:
        raise ValueError(f"{title} must be at least {least}, got {value}")
    return value.__index__()


def checked_number(title: str, value: Any) -> float:
    """A number that is no bool; TypeError if it is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{title} must be a number, got {value!r}")
    return value


@dataclass(frozen=True)
class CacheConfig:
    """How many rows of a host- or disk-resident table are cached, and which.

    Args:
        rows: cached on the device by each rank that holds some of the table, at least 1; rounded up to sets of 32. Of a
            table on embedding servers, kept by each trainer, so that they need not be sent again.
        share: of the table's rows, in (0, 1], where `rows` is not given; of a table on servers 262,144 rows at most.
        policy: which row is evicted: the least recently ("lru") or least frequently ("lfu") used one. Rows of batches
            that are trained or prefetched are pinned.
        folder: of a disk-resident table's file while it is in use; the system's temporary folder if not given. Nothing
            is left there when the process has ended.
        host_rows: of a disk-resident table, cached in host memory too, as `rows` are on the device; none if not given.
        host_share: of the table's rows, in (0, 1], where `host_rows` is not given.

    Raises:
        TypeError, ValueError: naming the field.
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
            raise ValueError(f"a cache has host_rows or host_share, got {self.host_rows} and {self.host_share}")
        if self.policy not in ("lru", "lfu"):
            raise ValueError(f"a cache's policy must be 'lru' or 'lfu', got {self.policy!r}")
        if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
            raise TypeError(f"a cache's folder must be a path, got {self.folder!r}")

    def num_device_rows(self, num_embeddings: int) -> int:
        """Rows to keep of a table, at least 1."""
        return min(math.ceil(self.share * num_embeddings) if self.rows is None else self.rows, num_embeddings)

    def num_host_rows(self, num_embeddings: int) -> int | None:
        """Rows of a table on disk to keep in host memory, at least 1; None if it has no such cache."""
        if self.host_share is not None:
            return math.ceil(self.host_share * num_embeddings)
        return None if self.host_rows is None else min(self.host_rows, num_embeddings)


@dataclass(frozen=True)
class EvictionConfig:
    """Which row of a dynamic table that is full makes room for a new id.

    Args:
        policy: the least recently ("lru") or least frequently ("lfu") used one of the new id's set of rows.
        protect: rows that were used in so many last training batches stay. So many batches may be prefetched, and
            as many micro-batches accumulated; what is trained does not depend on how many are.
        half_life: steps without use after which a row's count is worth half, for "lfu".
        ttl: rows that were not used in so many last steps go, full or not; never if not given. In each step a share of
            the table is looked through, the whole of it in at most 1,024 steps.

    Raises:
        TypeError, ValueError: naming the field.
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
    """Which new ids get a row of a dynamic table; the others read their initial values, and get no gradient.

    Args:
        probability: of an id; it is drawn from the table's seed and the id, so it stays the same.
        appearances: how often an id must have occurred, this batch included. They are counted by a count-min sketch,
            which may count too many, and whose counts are halved now and then.

    Raises:
        TypeError, ValueError: naming the field.
    """

    probability: float = 1.0
    appearances: int = 1

    def __post_init__(self) -> None:
        if not 0 < checked_number("an admission's probability", self.probability) <= 1:
            raise ValueError(f"an admission's probability must lie in (0, 1], got {self.probability}")
        object.__setattr__(self, "appearances", checked_size("an admission's appearances", self.appearances))


@dataclass(frozen=True)
class TableConfig:
    """One embedding table.

    A *dynamic* table has no number of rows: `num_embeddings` is None, and any int64 is an id. An id gets a row when it
    is first trained; docs/dynamic-tables.md says more.

    Args:
        name: unique among the tables of a module; the first part of its `state_dict` keys. No dots.
        num_embeddings: rows, at least 1; None for a dynamic table.
        embedding_dim: columns, at least 1; fastest when a row is a multiple of 16 bytes.
        features: the batch's keys that look this table up; the table's own name if not given.
        pooling: how the rows of a bag become one: "sum", "mean", or "none" (each id keeps its row).
        dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`; `torch.float8_e4m3fn` or `torch.float8_e5m2` for
            tables that are looked up but not trained. Optimizer state is always float32.
        placement: where rows are: on the device; on the host or a disk, and partly cached there, with the same bits; or
            on embedding servers (`tritonemb.server`).
        init: fills `[num_embeddings, embedding_dim]` in place; uniform in ±1/sqrt(num_embeddings) if not given.
        cache: of a table that is not on the device.
        capacity: rows of a dynamic table, at most; it is rounded up a little.
        capacity_bytes: as many rows as take so much memory, with their optimizer states and their index, instead.
        init_bound: initial values are uniform in ± this; 1/sqrt(num_embeddings) if not given, or 1/sqrt(embedding_dim)
            of a dynamic table, whose values follow from its seed and the id.
        eviction, admission: of a dynamic table.

    Attributes:
        seed: of the table's random numbers, 63 bits from its name: the same on every tier.
        row_origin, column_origin: first row and column in the whole table, of a `shard`; else 0.
        global_rows: rows of the whole table.
        partitions: of a `shard` of a dynamic table, the first, and how many; else None.
        feature_names: `features`, never None.

    Raises:
        TypeError, ValueError: naming the table and the field.
    """

    name: str
    num_embeddings: Any  # an int, or None
    embedding_dim: int
    features: Sequence[str] | None = None
    pooling: Pooling = "sum"
    dtype: torch.dtype = torch.float32
    placement: Placement = "device"
    init: Callable[[Tensor], object] | None = None
    cache: CacheConfig = CacheConfig()
    capacity: int | None = None
    capacity_bytes: int | None = None
    init_bound: float | None = None
    eviction: EvictionConfig = EvictionConfig()
    admission: AdmissionConfig = AdmissionConfig()
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
        self._check_dynamic()
        choices = {"pooling": get_args(Pooling), "placement": get_args(Placement), "dtype": TABLE_DTYPES}
        for part, known in choices.items():
            if getattr(self, part) not in known:
                raise ValueError(f"table {self.name!r}: {part} must be one of {known}, got {getattr(self, part)!r}")
        if self.init is not None and not callable(self.init):
            raise TypeError(f"table {self.name!r}: init must be a function that fills a tensor, got {self.init!r}")
        if not isinstance(self.cache, CacheConfig):
            raise TypeError(f"table {self.name!r}: cache must be a CacheConfig, got {self.cache!r}")
        if self.placement != "disk":
            for part in ("host_rows", "host_share"):
                if getattr(self.cache, part) is not None:
                    raise ValueError(
                        f"table {self.name!r}: its cache has {part}, rows in host memory of a table on disk, but its "
                        f"placement is {self.placement!r}; leave them out, or place it on disk"
                    )
        features = self._checked_features()
        vars(self).update(features=features, feature_names=features, seed=seed_of(self.name))
        vars(self).update(global_rows=self.num_embeddings or 0)

    @property
    def is_dynamic(self) -> bool:
        """Whether any int64 is an id."""
        return self.num_embeddings is None

    def _check_dynamic(self) -> None:
        title, given = f"table {self.name!r}", [self.capacity, self.capacity_bytes].count(None)
        if self.init_bound is not None and not 0 <= checked_number(f"{title}: init_bound", self.init_bound) < math.inf:
            raise ValueError(f"{title}: init_bound must lie in [0, inf), got {self.init_bound}")
        for name, kind in (("eviction", EvictionConfig), ("admission", AdmissionConfig)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{title}: {name} must be an {kind.__name__}, got {getattr(self, name)!r}")
        if not self.is_dynamic:
            dynamic = given < 2 or (self.eviction, self.admission) != (EvictionConfig(), AdmissionConfig())
            if dynamic:
                raise ValueError(
                    f"{title}: capacity, eviction and admission are a dynamic table's; leave them out, or give "
                    "num_embeddings=None"
                )
            return
        if given != 1:
            raise ValueError(f"{title}: a dynamic table needs one of capacity, in rows, and capacity_bytes")
        if self.init is not None:
            raise ValueError(
                f"{title}: an init fills all rows, and those of a dynamic table come with their ids; use init_bound, "
                "or insert rows"
            )
        if self.dtype not in TRAINABLE_DTYPES:
            raise ValueError(f"{title}: a dynamic table has one of the dtypes {TRAINABLE_DTYPES}, got {self.dtype}")

    def _checked_features(self) -> tuple[str, ...]:
        if self.features is None:
            return (self.name,)
        if isinstance(self.features, str) or not isinstance(self.features, Iterable):
            shown = f"the {type(self.features).__name__} {self.features!r}"
            raise TypeError(f"table {self.name!r}: features must be a list of keys, got {shown}")
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
        """A shard of this table, whose updates are bitwise identical to this table's.

        It has this table's seed, but not its `init`. `dataclasses.replace` of a part makes a whole table.

        Args:
            rows, columns: the first, and how many; of a dynamic table, partitions in place of rows.
            features: the keys that look the part up, with ids that count from its own first row.

        Raises:
            ValueError: for a rectangle that is empty or not inside this table.
        """
        if self.is_dynamic:
            part = replace(self, name=name, features=features, init_bound=self.bound)
            vars(part).update(seed=self.seed, partitions=rows)
            return part
        sizes = self.num_embeddings, self.embedding_dim
        for what, (first, count), whole in zip(("rows", "columns"), (rows, columns), sizes, strict=True):
            if first < 0 or count < 1 or first + count > whole:
                raise ValueError(
                    f"table {self.name!r} has {what} 0 to {whole - 1}; {count} {what} from {first} on are no part of it"
                )
        part = TableConfig(
            name, rows[1], columns[1], features, self.pooling, self.dtype, self.placement, cache=self.cache,
            init_bound=self.init_bound,
        )  # fmt: skip
        vars(part).update(row_origin=self.row_origin + rows[0], column_origin=self.column_origin + columns[0])
        vars(part).update(seed=self.seed, global_rows=self.global_rows)
        return part

    def storage_config(self, num_rows: int, first_row: int = 0) -> "TableConfig":
        """The static table that the memory of a dynamic table, or of a part of one, is: so many rows, with numbers."""
        made = replace(
            self, num_embeddings=num_rows, capacity=None, capacity_bytes=None, eviction=EvictionConfig(),
            admission=AdmissionConfig(), init_bound=self.bound,
        )  # fmt: skip
        vars(made).update(seed=self.seed, row_origin=first_row)
        return made

    @property
    def bound(self) -> float:
        """Initial values are uniform in ± this, where there is no `init`."""
        if self.init_bound is not None:
            return float(self.init_bound)
        return float((self.embedding_dim if self.is_dynamic else self.global_rows) ** -0.5)


def seed_of(name: str) -> int:
    """The seed of a table's own stream of random numbers: 63 bits from its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
