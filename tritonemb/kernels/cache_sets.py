"""Which slots of a row cache may hold a row. Needs no compiler.

A cached table keeps some of its rows in slots on the device. Slots stand in sets of `WAYS`, slot = set · WAYS + way,
and a row may lie in any way of one set: `mix64(row) mod num_sets`, both unsigned. `mix64` is the finaliser of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64 bits: every bit of a row has a say in its set.
"""

from __future__ import annotations

from torch import Tensor

WAYS = 32  # slots a set
NO_ROW = -1  # tag of an empty slot
POLICIES = ("lru", "lfu")  # the unpinned row to evict: the one used longest ago, or the fewest times
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def set_of(rows: Tensor, num_sets: int) -> Tensor:
    """int64 `[N]`: the set of each of a table's rows int64 `[N]`; `num_sets` in [1, 2^62)."""
    mixed = rows
    for shift, factor in _MIXING:
        mixed = mixed ^ _shifted(mixed, shift)
        mixed = mixed * (factor - 2**64 if factor >= 2**63 else factor)
    # The upper 63 bits are a number that int64 holds; the last bit is brought down behind it.
    return (_shifted(mixed, 1) % num_sets * 2 + (mixed & 1)) % num_sets


def _shifted(values: Tensor, shift: int) -> Tensor:
    """`values >> shift` as if they were unsigned."""
    return (values >> shift) & ((1 << (64 - shift)) - 1)
