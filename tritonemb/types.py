"""What a table is: its size, where its rows live and how its bags are pooled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

Pooling = Literal["sum", "mean", "none"]
Placement = Literal["device", "host", "disk", "server"]
TRAINABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TABLE_DTYPES = (*TRAINABLE_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)


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
        placement: where the rows live.
        init: fills the weight `[num_embeddings, embedding_dim]` in place; uniform in ±1/sqrt(num_embeddings)
            if not given.

    Attributes:
        seed: of the table's own stream of random numbers, 63 bits from its name: the same wherever the table lives.
        row_origin, column_origin: where the first row and column stand in the whole table, of a `part`; 0 of a whole
            table.

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
    seed: int = field(init=False, compare=False, repr=False)
    row_origin: int = field(default=0, init=False, compare=False, repr=False)
    column_origin: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a table's name must be a str, got {type(self.name).__name__}")
        if not self.name or "." in self.name or "\n" in self.name:
            raise ValueError(f"table {self.name!r}: a name must be non-empty, without dots or line breaks")
        for size in ("num_embeddings", "embedding_dim"):
            value = getattr(self, size)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"table {self.name!r}: {size} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"table {self.name!r}: {size} must be at least 1, got {value}")
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"table {self.name!r}: pooling must be one of {get_args(Pooling)}, got {self.pooling!r}")
        if self.placement not in get_args(Placement):
            raise ValueError(
                f"table {self.name!r}: placement must be one of {get_args(Placement)}, got {self.placement!r}"
            )
        if self.dtype not in TABLE_DTYPES:
            raise ValueError(f"table {self.name!r}: dtype must be one of {TABLE_DTYPES}, got {self.dtype}")
        if self.init is not None and not callable(self.init):
            raise TypeError(f"table {self.name!r}: init must be a function that fills a tensor, got {self.init!r}")
        object.__setattr__(self, "features", self._checked_features())
        object.__setattr__(self, "seed", seed_of(self.name))

    def _checked_features(self) -> tuple[str, ...]:
        if self.features is None:
            return (self.name,)
        if isinstance(self.features, str):
            raise TypeError(f"table {self.name!r}: features must be a list of keys, got the str {self.features!r}")
        features = tuple(self.features)
        for feature in features:
            if not isinstance(feature, str) or not feature or "\n" in feature:
                raise ValueError(f"table {self.name!r}: a feature must be a non-empty one-line str, got {feature!r}")
        if not features:
            raise ValueError(f"table {self.name!r}: needs at least one feature")
        if len(set(features)) != len(features):
            raise ValueError(f"table {self.name!r}: a feature is named twice in {list(features)}")
        return features

    def part(self, name: str, rows: tuple[int, int], columns: tuple[int, int], features: Sequence[str]) -> TableConfig:
        """A rectangle of this table as a table of its own, whose updates give the bits that this one's give there.

        It rounds by the random numbers of the elements' places here, so its seed is this table's; `init`, which fills
        whole tables, is not carried over. `dataclasses.replace` of a part makes a whole table.

        Args:
            rows, columns: the first, and how many.
            features: the keys that look the part up, with ids that count from its own first row.

        Raises:
            ValueError: for a rectangle that is empty or not inside this table.
        """
        for what, (first, count), whole in (
            ("rows", rows, self.num_embeddings),
            ("columns", columns, self.embedding_dim),
        ):
            if first < 0 or count < 1 or first + count > whole:
                raise ValueError(
                    f"table {self.name!r} has {what} 0 to {whole - 1}; {count} {what} from {first} on are no part of it"
                )
        part = TableConfig(name, rows[1], columns[1], features, self.pooling, self.dtype, self.placement)
        object.__setattr__(part, "seed", self.seed)
        object.__setattr__(part, "row_origin", self.row_origin + rows[0])
        object.__setattr__(part, "column_origin", self.column_origin + columns[0])
        return part

    @property
    def bound(self) -> float:
        """First values are uniform in ± this, where there is no `init`."""
        return float(self.num_embeddings**-0.5)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The keys that look this table up, never None."""
        assert isinstance(self.features, tuple)
        return self.features


def seed_of(name: str) -> int:
    """The seed of a table's own stream of random numbers: 63 bits from its name."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
