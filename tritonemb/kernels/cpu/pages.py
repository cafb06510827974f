"""Records of table rows in pages of a file: copied in and out, and pages with checksums that tell damage.

A block is the pages that hold a whole number of records: one page of several, or one record over several pages. A page
has `PAYLOAD_BYTES` bytes and, in its last 8, a checksum that is never 0, so a page of zeros was never written. In a
block, a byte that says whether the row was ever written stands before each record.

The checksum is NH (Black et al., UMAC, CRYPTO 1999) with a Toeplitz second pass: for the page's 64-bit words `w` and
constant keys `k`, `a = Σ (lo(w_i) + lo(k_i)) · (hi(w_i) + hi(k_i))`, its halves added modulo 2³², and `b` likewise with
`k_{i+1}`; the result is `mix(mix(a ^ seed) + b)`, 1 where that is 0. `seed` is the page's number in its file, so a page
at a wrong place is damage too; in a block of several it is the checksum of the page before, so the pages of two
versions do not make up a block. Its sums have no order, and vector units take 4 to 8 words at once.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tritonemb.kernels.cpu import pool
from tritonemb.kernels.cpu.arrays import share
from tritonemb.kernels.cpu.jit import called, compiled, inlined
from tritonemb.kernels.cpu.memory import int64_row, prefetch
from tritonemb.kernels.cpu.parallel import run_tasks

PAGE_BYTES = 4096
PAYLOAD_BYTES = PAGE_BYTES - 8
WORDS = PAYLOAD_BYTES // 8
NEVER_WRITTEN, WRITTEN, DAMAGED = 0, 1, 2
_LOW = 0xFFFFFFFF
_AHEAD = 4  # rows whose memory is asked for before it is needed
_BYTE = ir.IntType(8).as_pointer()


def _make_keys() -> np.ndarray:
    """int64 `[WORDS + 1]`: the outputs of splitmix64 (Steele et al., OOPSLA 2014) from the state 0."""
    mask, keys = (1 << 64) - 1, []
    for i in range(1, WORDS + 2):
        x = i * 0x9E3779B97F4A7C15 & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        keys.append(x ^ x >> 31)
    return np.array(keys, dtype=np.uint64).view(np.int64)


KEYS = _make_keys()


@intrinsic
def _copy(typing_context: Any, to: types.Type, source: types.Type, num_bytes: types.Type) -> Any:
    """Bytes from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, origin = (builder.inttoptr(address, _BYTE) for address in args[:2])
        cgutils.raw_memcpy(builder, target, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _byte_at(typing_context: Any, address: types.Type) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _BYTE))

    return types.uint8(types.int64), generate


@intrinsic
def _set_byte(typing_context: Any, address: types.Type, value: types.Type) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _BYTE))
        return context.get_dummy_value()

    return types.void(types.int64, types.uint8), generate


@inlined
def _mix(x):
    """The finaliser of splitmix64, a permutation of 64 bits."""
    bits = np.uint64(x)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64(bits ^ (bits >> np.uint64(31)))


@inlined
def _checksum(page, seed):
    words = int64_row(page, WORDS)
    a, b = np.int64(0), np.int64(0)
    for i in range(WORDS):
        low, high = words[i], words[i] >> 32
        a += ((low + KEYS[i]) & _LOW) * ((high + (KEYS[i] >> 32)) & _LOW)
        b += ((low + KEYS[i + 1]) & _LOW) * ((high + (KEYS[i + 1] >> 32)) & _LOW)
    found = _mix(_mix(a ^ seed) + b)
    return found if found != 0 else np.int64(1)


@inlined
def _page_state(page, seed):
    """Of one page, by its checksum."""
    words = int64_row(page, WORDS + 1)
    if words[WORDS] != 0:
        return WRITTEN if words[WORDS] == _checksum(page, seed) else DAMAGED
    bits = np.int64(0)
    for i in range(WORDS):
        bits |= words[i]
    return NEVER_WRITTEN if bits == 0 else DAMAGED


@compiled
def seal(buffer, first_pages, pages_per_block):
    """Write the checksums of blocks that stand one behind the other.

    `buffer` is the address of the first; `first_pages`, int64 `[blocks]`, numbers each one's first page in the file.
    """
    for block in range(first_pages.size):
        seed = first_pages[block]
        for page in range(pages_per_block):
            address = buffer + (block * pages_per_block + page) * PAGE_BYTES
            seed = _checksum(address, seed)
            int64_row(address, WORDS + 1)[WORDS] = seed


@compiled
def check(buffer, first_pages, pages_per_block):
    """The state of the first block that is `DAMAGED`, by its index; the number of blocks if none is."""
    for block in range(first_pages.size):
        seed, state = first_pages[block], DAMAGED
        for page in range(pages_per_block):
            address = buffer + (block * pages_per_block + page) * PAGE_BYTES
            found = _page_state(address, seed)
            if found == DAMAGED or (page > 0 and found != state):
                return block
            seed, state = int64_row(address, WORDS + 1)[WORDS], found
    return first_pages.size


@inlined
def _slot(buffer, block, row, number, rows_per_block, pages_per_block, record_bytes):
    """The address of a row's byte in block `block` of the buffer, which is the table's block `number`."""
    return buffer + block * pages_per_block * PAGE_BYTES + (row - number * rows_per_block) * (record_bytes + 1)


@inlined
def _copy_record(slot, record, num_bytes, into_slot):
    """Between a record and its place, which leaves out the checksums of the pages it runs over."""
    place, done = slot + 1, np.int64(0)
    room = PAYLOAD_BYTES - 1 if num_bytes >= PAYLOAD_BYTES else num_bytes
    while done < num_bytes:
        size = min(room, num_bytes - done)
        if into_slot:
            _copy(place, record + done, size)
        else:
            _copy(record + done, place, size)
        done += size
        place += size + 8
        room = np.int64(PAYLOAD_BYTES)


@compiled
def copy_out(buffer, blocks, rows, rows_per_block, pages_per_block, record_bytes, records, written):
    """Copy records of rows out of their blocks; those never written are left alone.

    Args:
        buffer: address of the blocks, one behind the other.
        blocks: int64, their numbers in the table, ascending, those of the rows.
        rows: int64 `[n]`, ascending.
        records: address of `n` times `record_bytes` bytes.
        written: uint8 `[n]`, becomes whether a row was ever written.
    """
    block = 0
    for i in range(rows.size):
        number = rows[i] // rows_per_block
        while blocks[block] < number:
            block += 1
        slot = _slot(buffer, block, rows[i], number, rows_per_block, pages_per_block, record_bytes)
        written[i] = _byte_at(slot)
        if written[i] != 0:
            _copy_record(slot, records + i * record_bytes, record_bytes, False)


@compiled
def copy_in(buffer, blocks, rows, rows_per_block, pages_per_block, record_bytes, records):
    """Copy records of rows into their blocks and mark them as written; arguments as of `copy_out`."""
    block = 0
    for i in range(rows.size):
        number = rows[i] // rows_per_block
        while blocks[block] < number:
            block += 1
        slot = _slot(buffer, block, rows[i], number, rows_per_block, pages_per_block, record_bytes)
        _set_byte(slot, numba.uint8(1))
        _copy_record(slot, records + i * record_bytes, record_bytes, True)


@called
def _move_some(task, bounds, rows, table, records, num_bytes, into_table):
    for i in range(bounds[task], bounds[task + 1]):
        if i + _AHEAD < bounds[task + 1]:
            prefetch(table + rows[i + _AHEAD] * num_bytes, min(num_bytes, 1024))
        if into_table:
            _copy(table + rows[i] * num_bytes, records + i * num_bytes, num_bytes)
        else:
            _copy(records + i * num_bytes, table + rows[i] * num_bytes, num_bytes)


@compiled
def _move(team, num_threads, bounds, rows, table, records, num_bytes, into_table):
    run_tasks(
        team, num_threads, bounds.size - 1, _move_some, (bounds, rows, table, records, num_bytes, into_table)
    )  # fmt: skip


def move_records(rows: np.ndarray, table: int, records: int, num_bytes: int, into_table: bool) -> None:
    """`records[i] = table[rows[i]]`, or the other way round: records of `num_bytes` bytes by their addresses.

    Args:
        rows: int64 `[n]`, distinct.
    """
    bounds = share(rows.size, rows.size * num_bytes // 4)
    team, num_threads = (0, 1) if bounds.size == 2 else (pool.team(), pool.num_threads())
    _move(team, num_threads, bounds, rows, table, records, num_bytes, into_table)
