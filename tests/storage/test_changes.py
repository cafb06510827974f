"""Which blocks have changed, and what it costs to know."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import resident_growth
from tritonemb.storage.page_table import CHUNK_BITS, ChangedBlocks

NUM_BLOCKS = 3 * CHUNK_BITS + 5
block = st.integers(0, 40) | st.integers(CHUNK_BITS - 9, CHUNK_BITS + 9) | st.integers(NUM_BLOCKS - 9, NUM_BLOCKS - 1)


@given(st.lists(st.lists(block, unique=True).map(sorted)))
def test_it_is_as_a_set(additions):
    changed, expected = ChangedBlocks(NUM_BLOCKS), set()
    for blocks in additions:
        changed.add(np.array(blocks, dtype=np.int64))
        expected |= set(blocks)
        assert changed.blocks().tolist() == sorted(expected)
    changed.clear()
    assert changed.blocks().tolist() == []


def test_memory_grows_with_what_changed():
    """10^11 rows of 516 bytes: a bitmap of 1.8 GB, of which three pages and a flag for each page are used."""

    def set_bits():
        changed = ChangedBlocks(10**11 // 7)
        changed.add(np.array([5, 10**10, 10**11 // 7 - 1]))
        assert changed.blocks().tolist() == [5, 10**10, 10**11 // 7 - 1]
        return changed

    assert resident_growth(set_bits) < 16 << 20
