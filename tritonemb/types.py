"""What a table is: its size, its memory tier and how its bags are pooled."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex, get_args

import torch
from torch import Tensor

Pooling = Literal["sum", "mean", "none"]
Placement = Literal["device", "host", "disk", "server"]
TRAINABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Device = torch.device | str | None
TABLE_DTYPES = (*TRAINABLE_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class CacheConfig:
    """How many rows of a host- or disk-resident table are cached, and which.

    Args:
        rows: cached on the device by each rank that holds some of the table, at least 1; rounded up to sets of 32.
        share: of the table's rows, in (0, 1], where `rows` is not given.
        policy: which row is evicted: the least recently ("lru") or least frequently ("lfu") used one. Rows of batches
            that are trained or prefetched are pinned.
        folder: of a disk-resident table's file while it is in use; the system's temporary folder if not given. Nothing
            is left there when the process has ended.
        host_rows: of a disk-resident table, cached in host memory too, as `rows` are on the device; none if not given.

    Raises:
        TypeError, ValueError: naming the field.
    """

    rows: int | None = None
    share: float = 0.1
    policy: Literal["lru", "lfu"] = "lru"
    folder: str | os.PathLike[str] | None = None
    host_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "host_rows"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _size(f"a cache's {name}", getattr(self, name)))
        if not isinstance(self.share, (int, float)) or isinstance(self.share, bool):
            raise TypeError(f"a cache's share must be a number, got {self.share!r}")
        if not 0 < self.share <= 1:
            raise ValueError(f"a cache's share must lie in (0, 1], got {self.share}")
        if self.policy not in ("lru", "lfu"):
            raise ValueError(f"a cache's policy must be 'lru' or 'lfu', got {self.policy!r}")
        if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
            raise TypeError(f"a cache's folder must be a path, got {self.folder!r}")

    def rows_of(self, num_embeddings: int) -> int:
        """Rows to keep of a table, at least 1."""
        return min(math.ceil(self.share * num_embeddings) if self.rows is None else self.rows, num_embeddings)


@dataclass(frozen=True)
class TableConfig:
    """One embedding table.

    Args:
        name: unique among the tables of a module; the first part of its `state_dict` keys. No dots.
        num_embeddings: rows, at least 1.
        embedding_dim: columns, at least 1; fastest when a row is a multiple of 16 bytes.
        features: the batch's keys that look this table up; the table's own name if not given.
        pooling: how the rows of a bag become one: "sum", "mean", or "none" (each id keeps its row).
        dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`; `torch.float8_e4m3fn` or `torch.float8_e5m2` for
            tables that are looked up but not trained. Optimizer state is always float32.
        placement: where rows are: on the device, or on the host or a disk and partly cached there. Bits are the same.
        init: fills `[num_embeddings, embedding_dim]` in place; uniform in ±1/sqrt(num_embeddings) if not given.
        cache: of a host- or disk-resident table.

    Attributes:
        seed: of the table's random numbers, 63 bits from its name: the same on every tier.
        row_origin, column_origin: first row and column in the whole table, of a `part`; else 0.
        whole_rows: rows of the whole table.
        feature_names: `features`, never None.

    Raises:
        TypeError, ValueError: naming the table and the field.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    features: Sequence[str] | None = None
    pooling: Pooling = "sum"
    dtype: torch.dtype = torch.float32
    placement: Placement = "device"
    init: Callable[[Tensor], object] | None = None
    cache: CacheConfig = CacheConfig()
    seed: int = field(init=False, compare=False, repr=False)
    row_origin: int = field(default=0, init=False, compare=False, repr=False)
    column_origin: int = field(default=0, init=False, compare=False, repr=False)
    whole_rows: int = field(default=0, init=False, compare=False, repr=False)
    feature_names: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a table's name must be a str, got {type(self.name).__name__}")
        if not self.name or "." in self.name or "\n" in self.name:
            raise ValueError(f"table {self.name!r}: a name must be non-empty, without dots or line breaks")
        for size in ("num_embeddings", "embedding_dim"):
            object.__setattr__(self, size, _size(f"table {self.name!r}: {size}", getattr(self, size)))
        choices = {"pooling": get_args(Pooling), "placement": get_args(Placement), "dtype": TABLE_DTYPES}
        for part, known in choices.items():
            if getattr(self, part) not in known:
                raise ValueError(f"table {self.name!r}: {part} must be one of {known}, got {getattr(self, part)!r}")
        if self.init is not None and not callable(self.init):
            raise TypeError(f"table {self.name!r}: init must be a function that fills a tensor, got {self.init!r}")
        if not isinstance(self.cache, CacheConfig):
            raise TypeError(f"table {self.name!r}: cache must be a CacheConfig, got {self.cache!r}")
        if self.cache.host_rows is not None and self.placement != "disk":
            raise ValueError(
                f"table {self.name!r}: its cache has host_rows, rows in host memory of a table on disk, but its "
                f"placement is {self.placement!r}; leave them out, or place it on disk"
            )
        features = self._checked_features()
        derived = {"features": features, "feature_names": features, "seed": seed_of(self.name)}
        for part, value in {**derived, "whole_rows": self.num_embeddings}.items():
            object.__setattr__(self, part, value)

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

    def part(
        self, name: str, rows: tuple[int, int], columns: tuple[int, int], features: Sequence[str]
    ) -> "TableConfig":
        """A shard of this table, whose updates are bitwise identical to this table's.

        It has this table's seed, but not its `init`. `dataclasses.replace` of a part makes a whole table.

        Args:
            rows, columns: the first, and how many.
            features: the keys that look the part up, with ids that count from its own first row.

        Raises:
            ValueError: for a rectangle that is empty or not inside this table.
        """
        sizes = self.num_embeddings, self.embedding_dim
        for what, (first, count), whole in zip(("rows", "columns"), (rows, columns), sizes, strict=True):
            if first < 0 or count < 1 or first + count > whole:
                raise ValueError(
                    f"table {self.name!r} has {what} 0 to {whole - 1}; {count} {what} from {first} on are no part of it"
                )
        part = TableConfig(
            name, rows[1], columns[1], features, self.pooling, self.dtype, self.placement, cache=self.cache
        )
        origin = {"row_origin": self.row_origin + rows[0], "column_origin": self.column_origin + columns[0]}
        for field_name, value in {"seed": self.seed, "whole_rows": self.whole_rows, **origin}.items():
            object.__setattr__(part, field_name, value)
        return part

    @property
    def bound(self) -> float:
        """Initial values are uniform in ± this, where there is no `init`."""
        return float(self.whole_rows**-0.5)


def _size(title: str, value: Any) -> int:
    """An integer of any kind, say NumPy's, as an `int`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or getattr(value, "shape", ()) != ():
        raise TypeError(f"{title} must be an int, got {value!r}")
    if value.__index__() < 1:
        raise ValueError(f"{title} must be at least 1, got {value}")
    return value.__index__()


def seed_of(name: str) -> int:
    """The seed of a table's own stream of random numbers: 63 bits from its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
