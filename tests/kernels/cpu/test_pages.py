"""Pages of records: their checksums against plain NumPy, and what is damage."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.test_row_cache import MASK64, mixed
from tritonemb.kernels.cpu import pages
from tritonemb.kernels.cpu.pages import NEVER_WRITTEN, TRAILER_BYTES, check, identify, seal
from tritonemb.storage import page_table
from tritonemb.storage.aio import IoBuffer


def reference(page: np.ndarray, seed: int) -> int:
    """The checksum of a page, uint8 `[n]`, word by word as the formula says."""
    words, keys = page[:-8].view(np.uint64).tolist(), pages.KEYS.view(np.uint64).tolist()
    low, sums = 0xFFFFFFFF, [0, 0]
    for number, word in enumerate(words):
        for shift in (0, 1):
            key = keys[number + shift]
            sums[shift] += (((word & low) + (key & low)) & low) * (((word >> 32) + (key >> 32)) & low)
    return mixed(mixed((sums[0] ^ seed) & MASK64) + sums[1] & MASK64) or 1


@pytest.fixture(params=[4096, 512])
def page_bytes(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def three(page_bytes: int) -> IoBuffer:
    """Three pages of random bytes."""
    buffer = IoBuffer(3 * page_bytes)
    buffer.array[:] = np.random.default_rng(0).integers(0, 256, buffer.array.size, dtype=np.uint8)
    return buffer


def checksums(buffer: IoBuffer) -> list[int]:
    return buffer.array.reshape(3, -1)[:, -8:].copy().view(np.uint64)[:, 0].tolist()


def test_both_know_one_page():
    assert (page_table.PAGE_BYTES, page_table.TRAILER_BYTES) == (pages.MAX_PAGE_BYTES, TRAILER_BYTES)
    assert pages.KEYS.shape == (512,)
    assert len(set(pages.KEYS.tolist())) == 512
    assert pages.KEYS.view(np.uint64)[0] == 0xE220A8397B1DCDAF  # splitmix64's first output from the state 0


@pytest.mark.parametrize("fill", [None, 0, 255])
def test_checksums_are_those_of_the_formula(three, page_bytes, fill):
    if fill is not None:
        three.array[:] = fill
    seal(three.address, np.array([1, 2, 1 << 40]), 1, page_bytes)
    whole = three.array.reshape(3, page_bytes)
    assert whole[:, -TRAILER_BYTES:-8].copy().view(np.int64)[:, 0].tolist() == [1, 2, 1 << 40]
    assert checksums(three) == [reference(page, seed) for page, seed in zip(whole, (1, 2, 1 << 40), strict=True)]
    seal(three.address, np.array([7]), 3, page_bytes)  # one block: each page's seed is the checksum before
    seeds = [7, *checksums(three)[:2]]
    assert checksums(three) == [reference(page, seed) for page, seed in zip(whole, seeds, strict=True)]


def test_any_changed_bit_and_any_other_place_is_damage(three, page_bytes):
    numbers, size = np.array([5, 6, 7]), page_bytes
    seal(three.address, numbers, 1, size)
    assert check(three.address, numbers, 1, size) == 3
    for byte in (0, 3, 4, size - 9, size - 8, size - 1, size, 2 * size + size // 2):
        for bit in (0, 7):
            three.array[byte] ^= 1 << bit
            assert check(three.address, numbers, 1, size) == byte // size, byte
            three.array[byte] ^= 1 << bit
    assert check(three.address, np.array([5, 7, 6]), 1, size) == 1
    three.array[size : 2 * size] = 0  # lost
    assert check(three.address, numbers, 1, size) == 1


def identified(buffer: IoBuffer, pages_per_block: int, num_blocks: int) -> tuple[int, list[int]]:
    numbers = np.full(3 // pages_per_block, 99)
    geometry = pages_per_block, buffer.array.size // 3, num_blocks
    return identify(buffer.address, numbers, *geometry), numbers.tolist()


def test_blocks_say_their_numbers(three, page_bytes):
    seal(three.address, np.array([5, 9, 7]), 1, page_bytes)
    assert identified(three, 1, 10) == (3, [5, 9, 7])
    assert identified(three, 1, 9) == (1, [5, 99, 99])  # there is no such block
    three.array[page_bytes : 2 * page_bytes] = 0
    assert identified(three, 1, 10) == (3, [5, NEVER_WRITTEN, 7])
    for byte in (page_bytes, 2 * page_bytes - TRAILER_BYTES, 2 * page_bytes - 1):
        three.array[byte] ^= 1
        assert identified(three, 1, 10) == (1, [5, 99, 99])
        three.array[byte] ^= 1
    seal(three.address, np.array([-1]), 1, page_bytes)
    assert identified(three, 1, 10) == (0, [99, 99, 99])
    seal(three.address, np.array([4]), 3, page_bytes)
    assert identified(three, 3, 10) == (1, [4])
    three.array[page_bytes : 2 * page_bytes] = 0
    assert identified(three, 3, 10) == (0, [99])
    three.array[:] = 0
    assert identified(three, 3, 10) == (1, [NEVER_WRITTEN])


def test_pages_of_two_versions_make_no_block(three, page_bytes):
    numbers = np.array([5])
    seal(three.address, numbers, 3, page_bytes)
    old = three.array.copy()
    three.array[10] ^= 1
    seal(three.address, numbers, 3, page_bytes)
    new = three.array.copy()
    assert check(three.address, numbers, 3, page_bytes) == 1
    for retained in (1, 2, 3, 4, 5, 6):  # each mixture of old and new pages
        for page in range(3):
            source = old if retained >> page & 1 else new
            part = slice(page * page_bytes, (page + 1) * page_bytes)
            three.array[part] = source[part]
        assert check(three.address, numbers, 3, page_bytes) == 0
    three.array[:] = old
    for page in range(3):  # a page that was lost
        three.array[page * page_bytes : (page + 1) * page_bytes] = 0
        assert check(three.address, numbers, 3, page_bytes) == 0
        three.array[:] = old
