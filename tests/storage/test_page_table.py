"""Page tables, against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import resident_growth
from tests.storage.stores import disk_rows, read, some_records, write
from tritonemb.storage import StorageError, page_table
from tritonemb.storage.page_table import LEAF, PageTable

NUM_BLOCKS = 5 * LEAF + 3
blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True).map(sorted)


@given(st.lists(blocks, max_size=8))
def test_they_are_as_a_dict(asked):
    table, model = PageTable(NUM_BLOCKS), {}
    for subset in asked:
        for block in subset:
            model.setdefault(block, len(model))
        assert table.allocate(np.array(subset, dtype=np.int64)).tolist() == [model[block] for block in subset]
        everything = np.arange(NUM_BLOCKS)
        assert table.find(everything).tolist() == [model.get(block, -1) for block in range(NUM_BLOCKS)]
        assert table.count == len(model)
        assert [block for part in table.blocks() for block in part.tolist()] == sorted(model)


@given(st.permutations(range(NUM_BLOCKS)), st.integers(0, NUM_BLOCKS))
def test_positions_that_are_known(order, count):
    table = PageTable(NUM_BLOCKS)
    table.insert(np.array(order[:count], dtype=np.int64), np.arange(count) * 2)
    assert table.find(np.array(order, dtype=np.int64)).tolist() == [
        2 * n if n < count else -1 for n in range(NUM_BLOCKS)
    ]
    assert table.count == max(2 * count - 1, 0)


def test_they_grow_and_are_listed_in_pieces(monkeypatch):
    monkeypatch.setattr(page_table, "_LEAVES_PER_CHUNK", 1000)
    table = PageTable(10**6)
    for first in (7, 3, 500_000 % 10):
        table.allocate(np.arange(first, 10**6, 10))
    result = np.concatenate(list(table.blocks()))
    assert (result == np.sort(np.concatenate([np.arange(first, 10**6, 10) for first in (0, 3, 7)]))).all()
    assert (table.find(np.arange(7, 10**6, 10)) == np.arange(10**5)).all()


def test_memory_is_that_of_what_was_written():
    def written(num_blocks, blocks):
        table = PageTable(num_blocks)
        table.allocate(blocks)
        return table

    assert resident_growth(lambda: PageTable(10**9)) < 1 << 20
    # 10,000 blocks far apart: 128 bytes each, and a page above for each
    assert resident_growth(lambda: written(10**9, np.arange(0, 10**9, 10**5))) < 60 << 20
    assert resident_growth(lambda: written(10**6, np.arange(10**6))) < 40 << 20


def test_a_file_has_a_limited_number_of_positions(tmp_path, monkeypatch):
    monkeypatch.setattr(page_table, "MAX_POSITIONS", 3)
    store = disk_rows(tmp_path / "rows", 100, 516)
    write(store, [0, 50, 99], 1).wait()
    with pytest.raises(StorageError, match="a file has at most 3 blocks of 4,096 bytes; split the table"):
        write(store, [0, 20], 2).wait()
    store.close()
    monkeypatch.undo()
    with disk_rows(tmp_path / "rows", 100, 516) as store:
        assert read(store, [0, 50, 99]).equal(some_records(3, 516, 1))
