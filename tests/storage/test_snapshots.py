"""Snapshots: equal to the table as it was, whole or in increments, and taken for good only when whole."""

import errno
import fcntl
import itertools
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.stores import Model, disk_rows, failing, read, some_records, write
from tritonemb.storage import SnapshotReader, StorageError, io, restore, snapshot

NUM_ROWS = 400
PAGE = 4096


def content(path: Path, num_rows: int, num_bytes: int):
    with disk_rows(path, num_rows, num_bytes) as store:
        return read(store, range(num_rows))


changes = st.lists(st.tuples(st.sampled_from("wwsc"), st.lists(st.integers(0, NUM_ROWS - 1), unique=True).map(sorted)))


@pytest.mark.parametrize(
    ("page_bytes", "num_bytes"), [(4096, 5), (4096, 516), (4096, 4089), (512, 5), (512, 260)], indirect=["page_bytes"]
)
def test_chains_of_increments(tmp_path, num_bytes, monkeypatch):
    """Every snapshot on the way can be restored, and a restored table goes on with the chain."""
    monkeypatch.setattr(snapshot, "_INDEX_CAPACITY", 7)  # so that there are several groups

    @settings(max_examples=10)
    @given(changes, st.integers(0, 5))
    def check(operations, reopened):
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        local = tmp_path / "here"
        local.mkdir()
        model, chain, expected = Model(num_bytes), [local / "base"], []
        store = disk_rows(local / "rows", NUM_ROWS, num_bytes)
        store.snapshot(local / "base").wait()
        for number, (kind, rows) in enumerate(operations):
            if number == reopened:  # go on from what was restored: what was written since the last snapshot is gone
                store.close()
                restore(local / "again", chain[0], chain[1:])
                store, model = (
                    disk_rows(local / "again", NUM_ROWS, num_bytes),
                    (expected or [(0, Model(num_bytes))])[-1][1],
                )
                model = model.copy()
            if kind == "w":
                write(store, rows, number)
                model.write(rows, number)
            elif kind == "s":
                chain = [local / f"base-{number}"]
                store.snapshot(chain[0]).wait()
                expected.append((list(chain), model.copy()))
            else:
                chain.append(local / f"changes-{number}")
                store.snapshot(chain[-1], changes_only=True).wait()
                assert store.changed_pages().tolist() == []
                expected.append((list(chain), model.copy()))
        store.close()
        for number, (files, occupied) in enumerate(expected):
            restore(local / f"restored-{number}", files[0], files[1:])
            assert content(local / f"restored-{number}", NUM_ROWS, num_bytes).equal(occupied.read(range(NUM_ROWS)))

    check()


def test_increments_hold_what_changed_and_no_more(tmp_path):
    with disk_rows(tmp_path / "rows", 10**8, 516) as store:
        write(store, range(70_000), 1).wait()
        store.snapshot(tmp_path / "base").wait()
        assert store.changed_pages().numel() == 0
        rows = [3, 5, 70, 69_999, 50_000_000, 99_999_999]
        write(store, rows, 2).wait()
        assert store.changed_pages().tolist() == [1, 11, 10_000, 10_001, 10_002]  # the last two are new
        store.snapshot(tmp_path / "changes", changes_only=True).wait()
    assert (tmp_path / "changes").stat().st_size == PAGE * (2 + 5)
    restore(tmp_path / "again", tmp_path / "base", [tmp_path / "changes"])
    assert (tmp_path / "again").stat().st_blocks * 512 < 45 << 20  # 41 MB were written of 58 GB
    with disk_rows(tmp_path / "again", 10**8, 516) as store:
        assert read(store, rows).equal(some_records(6, 516, 2))
        assert read(store, range(6, 70)).equal(some_records(70_000, 516, 1)[6:70])


@pytest.fixture
def chain(tmp_path):
    """A base and two increments of a table of 50 rows of 4089 bytes, and what they make up."""
    model = Model(4089)
    with disk_rows(tmp_path / "rows", 50, 4089) as store:
        store.snapshot(tmp_path / "base").wait()
        for number, rows in ((1, [3, 4, 20]), (2, [4, 5])):
            write(store, rows, number)
            model.write(rows, number)
            store.snapshot(tmp_path / f"changes-{number}", changes_only=True).wait()
    return [tmp_path / name for name in ("base", "changes-1", "changes-2")], model.read(range(50))


def refused(target: Path, base: Path, increments: list[Path], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        restore(target, base, increments)
    assert not target.exists()
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]


def test_increments_are_put_on_in_their_order_only(tmp_path, chain):
    (base, first, second), expected = chain
    target = tmp_path / "again"
    refused(target, base, [second], "changes-2 do not follow the previous snapshot; pass all increments, in order")
    refused(target, base, [second, first], "changes-2 do not follow")
    refused(target, base, [first, first], "changes-1 do not follow")
    refused(target, base, [base], "base holds whole rows, no changes")
    refused(target, first, [], "changes-1 holds changes, restore them onto their snapshot")
    refused(target, tmp_path / "none", [], "none cannot be opened: .*No such file")
    refused(target, base, [tmp_path / "none"], "none cannot be opened: .*No such file")
    refused(target, tmp_path / "rows", [first], "is not a snapshot, or was modified since")
    with disk_rows(tmp_path / "other", 50, 4088) as store:
        store.snapshot(tmp_path / "other-base").wait()
    refused(target, tmp_path / "other-base", [first], "changes-1 belong to another table or optimizer")
    restore(target, base, [first, second])
    assert content(target, 50, 4089).equal(expected)
    with pytest.raises(StorageError, match=r"file .*again exists already"):
        restore(target, base)


def test_a_snapshot_that_was_written_to_is_a_base_no_more(tmp_path, chain):
    (base, first, _), _ = chain
    with disk_rows(base, 50, 4089) as store:
        read(store, [1])
    restore(tmp_path / "again", base, [first])
    with disk_rows(base, 50, 4089) as store:
        write(store, [1], 9).wait()
    refused(tmp_path / "third", base, [first], "is not a snapshot, or was modified since")
    with (
        disk_rows(base, 50, 4089) as store,
        pytest.raises(StorageError, match="take a whole snapshot first"),
    ):
        store.snapshot(tmp_path / "changes", changes_only=True).wait()


@pytest.mark.parametrize("host_rows", [None, 32])
def test_changes_need_something_that_they_follow(tmp_path, host_rows):
    with disk_rows(tmp_path / "rows", 50, 516, host_rows=host_rows) as store:
        assert store.last_snapshot is None
        with pytest.raises(StorageError, match="take a whole snapshot first"):
            store.snapshot(tmp_path / "changes", changes_only=True).wait()
        with pytest.raises(ValueError, match="is the table's own file"):
            store.snapshot(tmp_path / "rows")
        write(store, [1], 1).wait()
        assert read(store, [1]).equal(some_records(1, 516, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_any_damage_of_increments_is_found(tmp_path, chain):
    (base, first, _), _ = chain
    whole = first.read_bytes()
    assert len(whole) == PAGE * (2 + 3 * 2)
    for place in (20, 50, PAGE - 1, PAGE, PAGE + 8, PAGE + 17, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE + 4, 8 * PAGE - 1):
        broken = bytearray(whole)
        broken[place] ^= 1
        first.write_bytes(broken)
        refused(tmp_path / "again", base, [first], "damaged")
    for size, message in ((100, "too short"), (PAGE, "expected 32,768"), (7 * PAGE, "expected 32,768")):
        first.write_bytes(whole[:size])
        refused(tmp_path / "again", base, [first], message)
    first.write_bytes(whole)
    restore(tmp_path / "again", base, [first])
    os.truncate(base, 8 * PAGE)
    refused(tmp_path / "third", base, [first], "base has 32,768 bytes, expected")


def test_a_damaged_page_does_not_get_into_increments(tmp_path):
    with disk_rows(tmp_path / "rows", 50, 516) as store:
        store.snapshot(tmp_path / "base").wait()
        write(store, range(50), 1).wait()
        with (tmp_path / "rows").open("r+b") as file:
            file.seek(2 * PAGE + 9)
            file.write(b"damage")
            os.fsync(file.fileno())
        with pytest.raises(StorageError, match=r"rows 7 to 13, .* is damaged"):
            store.snapshot(tmp_path / "changes", changes_only=True).wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "rows"]
        assert store.changed_pages().tolist() == list(range(1, 9))
        write(store, range(50), 2).wait()  # whole pages
        store.snapshot(tmp_path / "changes", changes_only=True).wait()
    restore(tmp_path / "again", tmp_path / "base", [tmp_path / "changes"])
    assert content(tmp_path / "again", 50, 516).equal(some_records(50, 516, 2))


@pytest.mark.parametrize("changes_only", [False, True])
def test_a_full_disk_harms_neither_table_nor_earlier_snapshot(tmp_path, small_disk, changes_only):
    with disk_rows(tmp_path / "rows", 10_000, 516) as store:
        write(store, range(200), 1).wait()
        store.snapshot(small_disk / "snapshot").wait()
        write(store, range(5000), 2).wait()
        target = small_disk / ("changes" if changes_only else "snapshot")
        message = r"snapshot .* could not be written: .*No space left on device; free disk space there"
        with pytest.raises(StorageError, match=message):
            store.snapshot(target, changes_only).wait()
        assert [path.name for path in small_disk.iterdir()] == ["snapshot"]
        assert content(small_disk / "snapshot", 10_000, 516)[:200].equal(some_records(200, 516, 1))
        assert store.changed_pages().numel() == 5000 // 7 + 1  # what the next one must hold
        assert read(store, range(5000)).equal(some_records(5000, 516, 2))
        if changes_only:
            store.snapshot(tmp_path / "changes", changes_only=True).wait()  # where there is room
            restore(tmp_path / "again", small_disk / "snapshot", [tmp_path / "changes"])
            assert content(tmp_path / "again", 10_000, 516)[:5000].equal(some_records(5000, 516, 2))


@pytest.mark.parametrize("step", ["rename", "sync", "read"])
def test_a_snapshot_that_is_cut_off_leaves_the_one_before(tmp_path, monkeypatch, step):
    store = disk_rows(tmp_path / "rows", 1000, 516)
    write(store, range(1000), 1).wait()
    store.snapshot(tmp_path / "snapshot").wait()
    write(store, range(1000), 2).wait()
    real, calls = os.fsync, []

    def second_fails(handle: int) -> None:  # the first is that of the table
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(handle)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        if step == "rename":
            patch.setattr(os, "replace", fail)
        elif step == "sync":
            patch.setattr(os, "fsync", second_fails)
        else:
            patch.setattr(os, "preadv", failing(os.preadv, errno.EIO))
        with pytest.raises(StorageError, match=r"snapshot .* could not be written: \[Errno 5\]"):
            store.snapshot(tmp_path / "snapshot").wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "snapshot"]
    assert content(tmp_path / "snapshot", 1000, 516).equal(some_records(1000, 516, 1))
    store.snapshot(tmp_path / "snapshot").wait()
    assert content(tmp_path / "snapshot", 1000, 516).equal(some_records(1000, 516, 2))
    store.close()


def test_a_reflink_is_made_where_the_file_system_supports_it(tmp_path, monkeypatch):
    """This one may not: what the system would do is done by copying here."""
    requests = []

    def reflink(target: int, request: int, source: int) -> int:
        assert request == 0x40049409
        requests.append((target, source))
        size = os.fstat(source).st_size
        with open(f"/proc/self/fd/{source}", "rb") as file, open(f"/proc/self/fd/{target}", "wb") as copy:
            shutil.copyfileobj(file, copy)
        assert os.fstat(target).st_size == size
        return 0

    monkeypatch.setattr(fcntl, "ioctl", reflink)
    monkeypatch.setattr(io, "_read_pieces", None)  # nothing is copied besides
    with disk_rows(tmp_path / "rows", 100, 516) as store:
        write(store, range(100), 1).wait()
        store.snapshot(tmp_path / "base").wait()
        write(store, range(50), 2).wait()
        store.snapshot(tmp_path / "changes", changes_only=True).wait()
    restore(tmp_path / "again", tmp_path / "base", [tmp_path / "changes"])
    assert len(requests) == 2
    result = content(tmp_path / "again", 100, 516)
    assert result[:50].equal(some_records(50, 516, 2))
    assert result[50:].equal(some_records(100, 516, 1)[50:])


def test_a_reflink_that_fails_is_no_reason_to_copy(tmp_path, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fcntl, "ioctl", fail)
    with disk_rows(tmp_path / "rows", 100, 516) as store:
        with pytest.raises(StorageError, match=r"could not be written: .*No space left"):
            store.snapshot(tmp_path / "base").wait()
        assert read(store, [1]).shape == (1, 516)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 700)), max_size=20))
def test_pieces_hold_all_parts_once(gaps_and_lengths):
    parts, end = [], 0
    for gap, length in gaps_and_lengths:
        parts.append(((end + gap) * PAGE, (end + gap + length) * PAGE))
        end += gap + length
    pages = io.COPY_BYTES // PAGE
    numbers = list(io.piece_numbers(iter(parts), io.COPY_BYTES))
    assert all(initial < final for initial, final in itertools.pairwise(numbers))
    parts_pages = {page for begin, stop in parts for page in range(begin // PAGE, stop // PAGE)}
    assert set(numbers) == {page // pages for page in parts_pages}


def test_a_table_without_a_name_replaces_a_snapshot(tmp_path):
    """Its file has been removed while it is open, as that of a module's table is."""
    with disk_rows(tmp_path / "rows", 100, 64) as rows:
        rows.path.unlink()
        for _ in range(2):
            rows.snapshot(tmp_path / "copy").wait()
    assert (tmp_path / "copy").exists()


@pytest.mark.parametrize("kind", ["snapshot", "closed file"])
@pytest.mark.parametrize("block", [0, 3, 9])
def test_a_block_that_a_disk_has_zeroed_is_missed(tmp_path, kind, block):
    """Its rows are not read as initial values: they were written."""
    with disk_rows(tmp_path / "rows", 50, 4000) as store:
        write(store, range(10), 1).wait()
        store.snapshot(tmp_path / "base").wait()
        write(store, [4], 2).wait()
        store.snapshot(tmp_path / "changes", changes_only=True).wait()
        layout = store._file.blocks.layout
    path = tmp_path / ("base" if kind == "snapshot" else "rows")
    with path.open("r+b") as file:
        file.seek(int(layout.offset(block)))
        file.write(bytes(layout.block_bytes))
    message = "1 blocks are missing"
    with pytest.raises(StorageError, match=message):
        disk_rows(path, 50, 4000)
    with pytest.raises(StorageError, match=message):
        SnapshotReader(path)
    if kind == "snapshot":
        refused(tmp_path / "again", path, [tmp_path / "changes"], message)
