"""Page tables, against a dict; which blocks have changed; pages of the size of a disk's sectors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import resident_growth
from tests.storage.stores import disk_rows, read, some_records, write
from tritonemb.storage import StorageError, aio, io, page_table, restore
from tritonemb.storage.page_table import CHUNK_BITS, LEAF, MAX_POSITIONS, ChangedBlocks, FileLayout, PageTable

NUM_BLOCKS = 5 * LEAF + 3
blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True).map(sorted)


@given(st.lists(blocks, max_size=8))
def test_they_are_as_a_dict(requests):
    table, model = PageTable(NUM_BLOCKS), {}
    for subset in requests:
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


NUM_FLAGS = 3 * CHUNK_BITS + 5
flags = st.integers(0, 40) | st.integers(CHUNK_BITS - 9, CHUNK_BITS + 9) | st.integers(NUM_FLAGS - 9, NUM_FLAGS - 1)


@given(st.lists(st.lists(flags, unique=True).map(sorted)))
def test_changed_blocks_are_as_a_set(additions):
    changed, expected = ChangedBlocks(NUM_FLAGS), set()
    for subset in additions:
        changed.add(np.array(subset, dtype=np.int64))
        expected |= set(subset)
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


ROWS = range(3, 300, 9)
sectors = pytest.mark.parametrize("page_bytes", [512], indirect=True)


@pytest.fixture
def moved(monkeypatch):
    """Bytes of the extents that were read, and written, asynchronously."""
    num_bytes, real = {False: 0, True: 0}, aio.AioQueue.submit

    def submit(self, handle, extents, write):
        num_bytes[write] += int(extents.sizes.sum())
        return real(self, handle, extents, write)

    monkeypatch.setattr(aio.AioQueue, "submit", submit)
    return num_bytes


@sectors
def test_a_row_of_a_sector_is_moved_alone(tmp_path, moved):
    with disk_rows(tmp_path / "rows", 300, 260) as store:
        if not store.direct:
            pytest.skip("this file system has no direct I/O")
        write(store, range(300), 1).wait()
        moved.update({False: 0, True: 0})
        write(store, ROWS, 2).wait()
        assert moved == {False: 0, True: 512 * len(ROWS)}
        assert read(store, ROWS).equal(some_records(len(ROWS), 260, 2))
        assert moved[False] == 512 * len(ROWS)
        assert store.changed_pages().tolist() == list(range(8, 308))


@sectors
def test_a_damaged_sector_harms_its_row_alone(tmp_path):
    with disk_rows(tmp_path / "rows", 300, 260) as store:
        write(store, range(300), 1).wait()
        with store.path.open("r+b") as file:
            file.seek(aio.PAGE_BYTES + 512 * 7 + 100)
            file.write(b"\xff\0")
        with pytest.raises(StorageError, match=r"row 7, at byte 7,680, is damaged"):
            read(store, [6, 7])
        assert read(store, [6, 8]).equal(some_records(300, 260, 1)[[6, 8]])
        write(store, [7], 2).wait()
        assert read(store, [7]).equal(some_records(1, 260, 2))


@sectors
def test_a_disk_of_larger_sectors_has_its_file_through_the_page_cache(tmp_path, monkeypatch):
    with disk_rows(tmp_path / "rows", 300, 260) as store:
        write(store, ROWS, 1).wait()
        store.snapshot(tmp_path / "base").wait()
    monkeypatch.setattr(aio, "_alignment", lambda handle: 4096)
    restore(tmp_path / "again", tmp_path / "base")
    with disk_rows(tmp_path / "again", 300, 260) as store:
        assert not store.direct
        write(store, ROWS[:5], 2).wait()
        store.snapshot(tmp_path / "changes", changes_only=True).wait()
    assert (tmp_path / "changes").stat().st_size == 3 * 4096
    restore(tmp_path / "last", tmp_path / "base", [tmp_path / "changes"])
    with disk_rows(tmp_path / "last", 300, 260) as store:
        assert read(store, ROWS[:5]).equal(some_records(5, 260, 2))
        assert read(store, ROWS[5:]).equal(some_records(len(ROWS), 260, 1)[5:])


def test_new_files_have_pages_of_sectors_unless_these_are_too_many(monkeypatch):
    monkeypatch.undo()
    geometry = {n: FileLayout.smallest(1000, n, 512) for n in (68, 260, 516, 1028)}
    sizes = {n: (layout.rows_per_block, layout.block_bytes) for n, layout in geometry.items()}
    assert sizes == {68: (7, 512), 260: (1, 512), 516: (1, 1024), 1028: (1, 1536)}
    assert FileLayout.smallest(1000, 260, 4096).rows_per_block == 15
    assert FileLayout.smallest(MAX_POSITIONS, 260, 512).page_bytes == 512
    assert FileLayout.smallest(MAX_POSITIONS + 1, 260, 512).page_bytes == 1024
    assert FileLayout.smallest(1 << 50, 260, 512).page_bytes == 4096


@pytest.mark.parametrize(
    ("mask", "alignments", "expected"),
    [
        (0x2000, (4, 512), 512),
        (0x2000, (4, 1), 512),
        (0x2000, (4, 4096), 4096),
        (0x2000, (0, 0), 4096),
        (1, (4, 512), 4096),
    ],
)
def test_the_system_says_the_alignment(tmp_path, monkeypatch, mask, alignments, expected):
    def call(number, handle, path, flags, field_mask, address):
        words = np.ctypeslib.as_array((aio.ctypes.c_uint32 * 64).from_address(address))
        words[0], words[38:40] = mask, alignments

    monkeypatch.setattr(aio, "_call", call)
    assert aio._alignment(0) == expected
    monkeypatch.undo()
    monkeypatch.setattr(aio.platform, "machine", lambda: "another")
    assert aio._alignment(0) == 4096


def test_files_of_format_2_are_read_and_written(tmp_path, monkeypatch):
    real = io.encode_header
    with monkeypatch.context() as patch:
        patch.setattr(io, "FORMAT", 2)
        patch.setattr(
            io, "encode_header", lambda kind, header: real(kind, {k: header[k] for k in header if k != "page_bytes"})
        )
        with disk_rows(tmp_path / "rows", 300, 260) as store:
            write(store, ROWS, 1).wait()
            store.snapshot(tmp_path / "base").wait()
    monkeypatch.setattr(FileLayout, "smallest", None)  # for new files alone
    restore(tmp_path / "again", tmp_path / "base")
    with disk_rows(tmp_path / "again", 300, 260) as store:
        assert store.page_bytes == 4096
        write(store, ROWS[:5], 2).wait()
        store.snapshot(tmp_path / "changes", changes_only=True).wait()
    restore(tmp_path / "last", tmp_path / "base", [tmp_path / "changes"])
    with disk_rows(tmp_path / "last", 300, 260) as store:
        assert read(store, ROWS[:5]).equal(some_records(5, 260, 2))
        assert read(store, ROWS[5:]).equal(some_records(len(ROWS), 260, 1)[5:])
