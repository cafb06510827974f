"""Records of table rows in pages of a file: copies in and out, and checksums that detect corrupt pages.

A block is the smallest run of pages with a whole number of records: one page of several records, or one record over
several pages. A page has `page_bytes - TRAILER_BYTES` bytes, then 8 of its block's number, then 8 of a checksum that is
never 0, so that a page of zeros was never written. A byte before each record says whether the row was ever written.

The checksum is NH (Black et al., UMAC, CRYPTO 1999) with a Toeplitz second pass: for the page's 64-bit words `w` and
constant keys `k`, `a = Σ (lo(w_i) + lo(k_i)) · (hi(w_i) + hi(k_i))`, halves added modulo 2³², and `b` the same with
`k_{i+1}`; the result is `mix(mix(a ^ seed) + b)`, 1 instead of 0. `seed` is the block's number, so that a misdirected
block is detected; from a block's second page on it is the checksum of the previous page, so that a torn write, with
pages of two versions, is detected. The sums have no order, and vector units add 4 to 8 words at once.
"""

import numba
import numpy as np

from tritonemb.kernels.cpu.jit import compiled, inlined, parallel
from tritonemb.kernels.cpu.simd import copy_bytes, int64_row, mix, uint8_row

MAX_PAGE_BYTES = 4096
TRAILER_BYTES = 16
ROWS_PER_TASK = 4096  # of fingerprints
NEVER_WRITTEN = -1
_LOW = 0xFFFFFFFF
_STEP, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def splitmix64(state: int) -> int:
    """Return the output of splitmix64 (Steele et al., OOPSLA 2014) for a state, modulo 2^64."""
    x = (state + _STEP) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


# int64, one per word of the largest page: the outputs from state 0 on.
KEYS = np.array([splitmix64(i * _STEP) for i in range(MAX_PAGE_BYTES // 8)], dtype=np.uint64).view(np.int64)


@inlined
def _checksum(page, page_bytes, seed):
    words = int64_row(page, page_bytes // 8 - 1)  # the last one is the block's number
    a, b = np.int64(0), np.int64(0)
    for i in range(words.size):
        low, high = words[i], words[i] >> 32
        a += ((low + KEYS[i]) & _LOW) * ((high + (KEYS[i] >> 32)) & _LOW)
        b += ((low + KEYS[i + 1]) & _LOW) * ((high + (KEYS[i + 1] >> 32)) & _LOW)
    result = mix(mix(a ^ seed) + b)
    return result if result != 0 else np.int64(1)


@inlined
def _seal_block(block, number, pages_per_block, page_bytes):
    seed = number
    for page in range(block, block + pages_per_block * page_bytes, page_bytes):
        words = int64_row(page, page_bytes // 8)
        words[words.size - 2] = number
        seed = _checksum(page, page_bytes, seed)
        words[words.size - 1] = seed


@inlined
def _is_damaged(block, number, pages_per_block, page_bytes):
    seed = number
    for page in range(block, block + pages_per_block * page_bytes, page_bytes):
        checksum = int64_row(page, page_bytes // 8)[page_bytes // 8 - 1]
        if checksum == 0 or checksum != _checksum(page, page_bytes, seed):
            return True
        seed = checksum
    return False


@inlined
def _is_empty(block, block_bytes):
    bits = np.int64(0)
    words = int64_row(block, block_bytes // 8)
    for word in range(words.size):
        bits |= words[word]
    return bits == 0


@compiled
def seal(buffer, numbers, pages_per_block, page_bytes):
    """Write the numbers and checksums of contiguous blocks.

    `buffer` is the address of the first block; `numbers` int64 `[blocks]`.
    """
    for block in range(numbers.size):
        _seal_block(buffer + block * pages_per_block * page_bytes, numbers[block], pages_per_block, page_bytes)


@compiled
def check(buffer, numbers, pages_per_block, page_bytes):
    """Return the index of the first damaged block, the number of blocks if none is; arguments as of `seal`."""
    for block in range(numbers.size):
        address = buffer + block * pages_per_block * page_bytes
        if _is_damaged(address, numbers[block], pages_per_block, page_bytes):
            return block
    return numbers.size


@compiled
def identify(buffer, numbers, pages_per_block, page_bytes, num_blocks):
    """Read the numbers of contiguous blocks, and check the blocks.

    Writes `numbers`, int64 `[blocks]`, `NEVER_WRITTEN` for blocks of zeros. Stops at, and returns the index of, the
    first block that is damaged or not among the table's `num_blocks`; the number of blocks if none is.
    """
    for block in range(numbers.size):
        address = buffer + block * pages_per_block * page_bytes
        number = int64_row(address, page_bytes // 8)[page_bytes // 8 - 2]
        if 0 <= number < num_blocks and not _is_damaged(address, number, pages_per_block, page_bytes):
            numbers[block] = number
        elif _is_empty(address, pages_per_block * page_bytes):
            numbers[block] = NEVER_WRITTEN
        else:
            return block
    return numbers.size


@inlined
def _absorb(state, word):
    product = (state ^ numba.uint64(word)) * numba.uint64(_STEP)
    return (product << numba.uint64(29)) | (product >> numba.uint64(35))


@parallel
def fingerprint(task, rows, num_words, ids, results):
    """Write hashes of rows of an even number of words, with their ids as seeds: int64 `[N]`, never 0.

    A change of one word always changes the hash. The state of even and that of odd words are two independent chains.
    """
    for row in range(task * ROWS_PER_TASK, min(ids.size, (task + 1) * ROWS_PER_TASK)):
        words = int64_row(rows + row * num_words * 8, num_words)
        even = odd = numba.uint64(mix(ids[row] + num_words))
        for i in range(0, num_words, 2):
            even, odd = _absorb(even, words[i]), _absorb(odd, words[i + 1])
        result = mix(mix(numba.int64(even)) ^ numba.int64(odd))
        results[row] = result if result != 0 else np.int64(1)


@inlined
def _copy_record(slot, record, num_bytes, page_bytes, into_slot):
    """Copy between a record and its slot, which skips the trailers of the pages that it spans."""
    address, num_copied, payload_bytes = slot + 1, np.int64(0), page_bytes - TRAILER_BYTES
    available = payload_bytes - 1 if num_bytes >= payload_bytes else num_bytes
    while num_copied < num_bytes:
        size = min(available, num_bytes - num_copied)
        if into_slot:
            copy_bytes(address, record + num_copied, size)
        else:
            copy_bytes(record + num_copied, address, size)
        num_copied += size
        address += size + TRAILER_BYTES
        available = payload_bytes


@compiled
def copy(buffer, blocks_and_slots, rows, geometry, records, flags, writes):
    """Check blocks and copy records out of them, except those never written. Reads each block once.

    With `writes` copy records into blocks that all have slots, mark the records as written, and seal the blocks.

    `buffer` is the address of the blocks, whose ascending numbers and indices in the buffer, negative if never written,
    are two int64 `[b]`; `rows` int64 `[n]`, ascending; `geometry` rows and pages per block, and bytes per page and per
    record; `records` the address of `n` records; `flags` uint8 `[n]`, output: whether a row was ever written; with
    `writes` uint8 `[b]`: whether a block is zeroed instead of checked. Stops at, and returns the index of, the first
    damaged block; the number of blocks if none is.
    """
    i, (blocks, slots), (rows_per_block, pages_per_block, page_bytes, record_bytes) = 0, blocks_and_slots, geometry
    block_bytes = pages_per_block * page_bytes
    for block in range(blocks.size):
        address, first_row = buffer + slots[block] * block_bytes, blocks[block] * rows_per_block
        # Clear or check the block, copy its records, seal it.
        if writes and flags[block] != 0:
            words = int64_row(address, block_bytes // 8)
            for word in range(words.size):
                words[word] = 0
        elif slots[block] >= 0 and _is_damaged(address, blocks[block], pages_per_block, page_bytes):
            return block
        while i < rows.size and rows[i] < first_row + rows_per_block:
            slot = address + (rows[i] - first_row) * (record_bytes + 1)
            if writes:
                uint8_row(slot, 1)[0] = 1
            else:
                flags[i] = uint8_row(slot, 1)[0] if slots[block] >= 0 else np.uint8(0)
            if writes or flags[i] != 0:
                _copy_record(slot, records + i * record_bytes, record_bytes, page_bytes, writes)
            i += 1
        if writes:
            _seal_block(address, blocks[block], pages_per_block, page_bytes)
    return blocks.size
