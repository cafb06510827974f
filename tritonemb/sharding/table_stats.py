"""`TableStats`: access statistics of a table's rows."""

import math
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonemb.types import checked_number

Array = NDArray[Any]


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
            object.__setattr__(self, "hotness", tuple((rows, share) for rows, share in self.hotness))
            object.__setattr__(self, "row_share", tuple(self.row_share))
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
