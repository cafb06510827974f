"""Disks that fail, files that are damaged: a clear message, and nothing wrong is ever read."""

import errno
import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.storage import stores
from tests.storage.stores import disk_rows, identity, initial, read, short, some_records, write
from tritonemb.optimizers import Adam, RowWiseAdagrad
from tritonemb.storage import DiskRows, StorageError, aio, io
from tritonemb.storage.io import TableIdentity
from tritonemb.storage.store import record_of

PAGE = 4096


@pytest.mark.parametrize("threads", [None, 1])
def test_a_read_that_fails_harms_nothing_else(filled, monkeypatch, threads):
    if threads:
        stores.use_threads(monkeypatch, threads)
    store = disk_rows(filled, 100, 516)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stores.failing(os.preadv, errno.EIO, range(2 * PAGE, 3 * PAGE)))
        stores.break_queues(patch, errno.EIO, range(2 * PAGE, 3 * PAGE), writes=False)
        with pytest.raises(StorageError) as caught:
            read(store, [6, 7, 20])
        message = str(caught.value)
        assert message.startswith(
            f"table 'user', file {filled}: the extent with rows 0 to 20, at byte 4,096, could not be"
        )
        assert "read: [Errno 5] Input/output error; check the disk" in message
        assert read(store, [3, 21]).equal(some_records(100, 516, 1)[[3, 21]])
    assert read(store, range(100)).equal(some_records(100, 516, 1))
    store.close()


@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize("partial", [True, False])
def test_a_failed_write_is_the_last_operation(filled, monkeypatch, partial, threads):
    if threads:
        stores.use_threads(monkeypatch, threads)
    store = disk_rows(filled, 100, 516)
    rows = [8, 50, 99] if partial else range(100)
    monkeypatch.setattr(os, "pwritev", stores.failing(os.pwritev, errno.EIO, range(8 * PAGE, 9 * PAGE)))
    stores.break_queues(monkeypatch, errno.EIO, range(8 * PAGE, 9 * PAGE))
    requests = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: requests.wait())
        flushed = store.flush()  # holds the others until all have been asked for
        first, second, (third, _) = write(store, rows, 2), write(store, [0], 3), stores.start_read(store, [0])
        requests.set()
        flushed.wait()
    with pytest.raises(StorageError, match=r"could not be written: \[Errno 5\] Input/output error; check the disk"):
        first.wait()
    for later in (second.wait, third.wait, lambda: read(store, [1]), lambda: write(store, [1], 0), store.flush):
        with pytest.raises(StorageError, match=r"is unusable because a write failed: table 'user'.*Errno 5"):
            later()
    store.close()  # everybody knows by now
    monkeypatch.undo()
    with disk_rows(filled, 100, 516) as store:  # each page is as it was, or as it was to be
        result, old, new = read(store, range(100)), stores.Model(516), stores.Model(516)
        old.write(range(100), 1)
        new.write(range(100), 1)
        new.write(rows, 2)
        same_as_new = (result == new.read(range(100))).all(1)
        assert (same_as_new | (result == old.read(range(100))).all(1)).all()
        assert not same_as_new[50]  # which stands in page 8
        assert result[0].equal(old.read([0])[0]) or not partial


def test_a_failure_that_nobody_has_waited_for_comes_out_of_close(filled, monkeypatch):
    store = disk_rows(filled, 100, 516)
    stores.break_queues(monkeypatch, errno.EIO)
    write(store, [1], 2)
    with pytest.raises(StorageError, match=r"could not be written: \[Errno 5\]"):
        store.close()
    store.close()


def test_a_disk_that_loses_what_was_written_is_told(filled, monkeypatch):
    store = disk_rows(filled, 100, 516)

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    write(store, [1], 2).wait()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="writes could not be flushed to disk"):
        store.flush().wait()
    with pytest.raises(StorageError, match="is unusable"):
        read(store, [1])
    store.close()


@pytest.mark.parametrize("most", [512, 4096, 5000 // 512 * 512])
def test_what_is_read_and_written_in_part_is_continued(tmp_path, monkeypatch, most):
    monkeypatch.setattr(os, "preadv", short(os.preadv, most))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev, most))
    stores.shorten_queues(monkeypatch, most)
    model = stores.Model(10000)
    with disk_rows(tmp_path / "rows", 30, 10000) as store:
        for rows, seed in ((range(10), 1), (range(5, 25, 3), 2), ([29], 3)):
            write(store, rows, seed)
            model.write(rows, seed)
        assert read(store, range(30)).equal(model.read(range(30)))


def test_a_disk_that_takes_nothing_more_ends_the_write(filled, monkeypatch):
    store = disk_rows(filled, 100, 516)
    stores.shorten_queues(monkeypatch, 0)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageError, match="no further byte could be written"):
        write(store, [1], 2).wait()
    store.close()


def test_a_full_disk(small_disk, monkeypatch):
    """The rows of pages that found no room read as before."""
    stores.use_threads(monkeypatch, 2)
    path = small_disk / "rows"
    store = disk_rows(path, 100_000, 516)
    model = stores.Model(516)
    write(store, range(700), 1).wait()
    model.write(range(700), 1)
    with pytest.raises(StorageError, match=r"could not be written: \[Errno 28\] No space left on device; free"):
        write(store, range(700, 4000), 2).wait()
    with pytest.raises(StorageError, match="is unusable"):
        read(store, [0])
    store.close()
    with disk_rows(path, 100_000, 516) as store:
        result, never = read(store, range(4000)), model.read(range(4000))
        model.write(range(700, 4000), 2)
        written = (result == model.read(range(4000))).all(1)
        assert (written | (result == never).all(1)).all()
        assert written[:700].all()
        assert 700 < int(written.sum()) < 4000


def test_a_table_too_large_for_the_file_system_or_without_a_folder(tmp_path):
    with pytest.raises(StorageError, match=r"table 'user': file .* rows cannot be created: .*choose another"):
        disk_rows(tmp_path / "rows", 10**16, 4000)
    with pytest.raises(StorageError, match=r"cannot be created: .*No such file"):
        disk_rows(tmp_path / "nowhere" / "rows", 10, 4)
    assert list(tmp_path.iterdir()) == []


def damage(path: Path, place: int, bits: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ bits]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("ask", [lambda store: read(store, [15, 30]), lambda store: write(store, [15], 0).wait()])
def test_damage_is_found_and_not_written_over(filled, ask):
    """Be it done while the file is open, or before."""
    with disk_rows(filled, 100, 516) as store:
        damage(filled, 3 * PAGE + 1000, 4)
        content = filled.read_bytes()
        assert read(store, [0, 30]).equal(some_records(100, 516, 1)[[0, 30]])
        with pytest.raises(
            StorageError, match="the extent with rows 14 to 20, at byte 12,288, is damaged: its checksum"
        ):
            ask(store)
    assert filled.read_bytes()[PAGE:] == content[PAGE:]
    with pytest.raises(StorageError, match="the extent at byte 12,288 is damaged: its checksum does not match"):
        disk_rows(filled, 100, 516)


@pytest.mark.parametrize(("page", "rows"), [(3, range(14, 21)), (15, [98, 99])])
def test_a_page_that_is_written_whole_is_not_read(filled, page, rows):
    """The last one is whole with the rows that there are."""
    with disk_rows(filled, 100, 516) as store:
        damage(filled, page * PAGE + 100)
        write(store, rows, 9).wait()
        assert read(store, rows).equal(some_records(len(rows), 516, 9))


def test_a_file_holds_nothing_but_its_rows(tmp_path, monkeypatch):
    """What stood in the buffers before does not get into the pages, so the same rows make the same file."""
    monkeypatch.setattr(aio, "NUM_CONTEXTS", 1)
    monkeypatch.setattr(aio.IoContext, "free", aio._make_contexts())
    with (
        disk_rows(tmp_path / "rows", 9, 4000) as store,
        disk_rows(tmp_path / "b", 3, 300) as other,
    ):
        write(store, range(9), 1).wait()
        page = tmp_path.joinpath("rows").read_bytes()[PAGE : 2 * PAGE]
        assert page[4001:-8] == bytes(PAGE - 4009)
        write(other, [0, 1, 2], 1).wait()
        assert tmp_path.joinpath("b").read_bytes()[PAGE + 903 : -8] == bytes(PAGE - 911)
        with closing(aio.IoContext.free.get()) as context:
            context.buffer.array.fill(255)
        write(store, range(9), 2).wait()
        write(store, range(9), 1).wait()
        assert tmp_path.joinpath("rows").read_bytes()[PAGE : 2 * PAGE] == page


def test_a_page_at_a_wrong_place_is_damage(filled):
    content = bytearray(filled.read_bytes())
    content[2 * PAGE : 3 * PAGE] = content[PAGE : 2 * PAGE]
    filled.write_bytes(content)
    with pytest.raises(StorageError, match="it is damaged: the extent with rows 0 to 6 occurs twice"):
        disk_rows(filled, 100, 516)


def test_a_page_that_has_changed_places_while_it_is_open_is_damage(filled):
    with disk_rows(filled, 100, 516) as store:
        content = filled.read_bytes()
        with filled.open("r+b") as file:
            file.seek(2 * PAGE)
            file.write(content[PAGE : 2 * PAGE])
            os.fsync(file.fileno())
        with pytest.raises(StorageError, match=r"rows 7 to 13, .* is damaged"):
            read(store, [7])


def test_a_record_of_which_only_a_part_was_written_is_damage(tmp_path):
    path = tmp_path / "rows"
    with disk_rows(path, 10, 10000) as store:
        write(store, [0, 4], 1).wait()
        old = path.read_bytes()
        write(store, [4], 2).wait()
    content = bytearray(path.read_bytes())
    place = PAGE * (1 + 3 + 1)  # of the second row that was written
    content[place : place + PAGE] = old[place : place + PAGE]
    path.write_bytes(content)
    with pytest.raises(StorageError, match="the extent at byte 16,384 is damaged"):
        disk_rows(path, 10, 10000)


def test_a_file_that_is_cut_short(filled):
    store = disk_rows(filled, 100, 516)
    os.truncate(filled, 6 * PAGE)
    assert read(store, [34]).equal(some_records(100, 516, 1)[[34]])
    with pytest.raises(
        StorageError, match=r"rows 35 to 41, .* could not be read: the file ends at byte 24,576; another process"
    ):
        read(store, [35])
    store.close()
    with pytest.raises(StorageError, match="has 24,576 bytes, expected 65,536: it was truncated"):
        disk_rows(filled, 100, 516)
    os.truncate(filled, 100)
    with pytest.raises(StorageError, match="is too short to have a header"):
        disk_rows(filled, 100, 516)


@pytest.mark.parametrize(
    ("place", "message"),
    [(0, "has no header of rows"), (17, "or it is damaged"), (60, "or it is damaged"), (PAGE - 1, "or it is damaged")],
)
def test_a_damaged_header(filled, place, message):
    content = bytearray(filled.read_bytes())
    content[place] ^= 1
    filled.write_bytes(content)
    with pytest.raises(StorageError, match=message):
        disk_rows(filled, 100, 516)


def test_a_file_of_another_format(filled, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(io, "FORMAT", 4)
        disk_rows(filled.with_name("new"), 100, 516).close()
    with pytest.raises(StorageError, match="has format 4, this version of tritonemb reads format 3"):
        disk_rows(filled.with_name("new"), 100, 516)


def test_a_file_of_another_table_is_refused_with_each_difference(tmp_path):
    path, record = tmp_path / "rows", record_of(16, torch.float32, RowWiseAdagrad.states)
    inputs = {"table": "user", "num_rows": 100, "record": record, "seed": 7, "row_origin": 0, "column_origin": 0}
    DiskRows.create(path, TableIdentity(**inputs), initial).close()
    cases = [
        ({"table": "item"}, "the table's name: 'user' in the file, expected 'item'"),
        ({"num_rows": 101}, "the number of rows: 100 in the file, expected 101"),
        ({"seed": 8}, "the seed: 7 in the file, expected 8"),
        ({"row_origin": 9}, "the first row in the whole table: 0 in the file, expected 9"),
        ({"column_origin": 9}, "the first column in the whole table: 0 in the file, expected 9"),
        (
            {"record": record_of(8, torch.float32, RowWiseAdagrad.states)},
            "the weight of a row: 16 float32 at byte 0 in the file, expected 8 float32 at byte 0",
        ),
        (
            {"record": record_of(16, torch.bfloat16, RowWiseAdagrad.states)},
            "the weight of a row: 16 float32 at byte 0 in the file, expected 16 bfloat16 at byte 0",
        ),
        (
            {"record": record_of(16, torch.float32, Adam.states)},
            "optimizer state 'sum': one float32 at byte 64 in the file, expected none\n"
            "  optimizer state 'exp_avg': none in the file, expected 16 float32 at byte 64",
        ),
    ]
    for change, message in cases:
        with pytest.raises(StorageError) as caught:
            DiskRows.open(path, TableIdentity(**inputs | change), initial)
        assert f"file {path} belongs to another table or optimizer:\n" in str(caught.value)
        assert message in str(caught.value)
    DiskRows.open(path, TableIdentity(**inputs), initial).close()


def test_a_file_has_one_owner_and_is_not_overwritten(filled):
    store = disk_rows(filled, 100, 516)
    with pytest.raises(StorageError, match="is open for another table or process; close it there first"):
        disk_rows(filled, 100, 516)
    store.close()
    with pytest.raises(StorageError, match=r"file .* exists already; open it, remove it"):
        DiskRows.create(filled, identity(100, 516), initial)
    with pytest.raises(StorageError, match=r"cannot be opened: .*No such file"):
        DiskRows.open(filled.with_name("none"), identity(100, 516), initial)
    with pytest.raises(StorageError, match="is closed; open it again"):
        read(store, [1])
    with pytest.raises(ValueError, match="num_rows must be at least 1"):
        disk_rows(filled.with_name("none"), 0, 516)
    with pytest.raises(ValueError, match="its name is too long"):
        DiskRows.create(filled.with_name("none"), identity(5, 5, "n" * 5000), initial)
    assert not filled.with_name("none").exists()
    disk_rows(filled, 100, 516).close()


def test_a_table_half_made_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", stores.failing(os.pwritev, errno.ENOSPC))
    with pytest.raises(StorageError, match="No space left on device"):
        disk_rows(tmp_path / "rows", 100, 516)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("system", ["plain", "refuses at the first read"])
def test_file_systems_without_direct_io(tmp_path, monkeypatch, system):
    if system == "plain":
        monkeypatch.setattr(os, "open", stores.without_direct(os.open))
    else:
        real_open, real_read, handles = os.open, os.preadv, set()

        def note(path, flags, *mode):
            handle = real_open(path, flags, *mode)
            (handles.add if flags & os.O_DIRECT else handles.discard)(handle)
            return handle

        def refuse(handle, views, offset):
            if handle in handles:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real_read(handle, views, offset)

        monkeypatch.setattr(os, "open", note)
        monkeypatch.setattr(os, "preadv", refuse)
    path, model = tmp_path / "rows", stores.Model(516)
    with disk_rows(path, 3000, 516) as store:
        assert not store.direct
        for rows, seed in ((range(1000), 1), (range(500, 3000, 7), 2), (range(0, 3000, 50), 3)):
            write(store, rows, seed)
            model.write(rows, seed)
        assert read(store, range(3000)).equal(model.read(range(3000)))
        store.snapshot(tmp_path / "snapshot").wait()
    for name in (path, tmp_path / "snapshot"):
        with disk_rows(name, 3000, 516) as store:
            assert read(store, range(3000)).equal(model.read(range(3000)))


def test_the_page_cache_is_asked_to_keep_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", stores.without_direct(os.open))
    monkeypatch.setattr("tritonemb.storage.aio.SWEEP_BYTES", 100 * PAGE)
    requests, real = [], os.posix_fadvise

    def note(handle, offset, size, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        requests.append((offset, size))
        real(handle, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    stores.use_threads(monkeypatch, 1)
    with disk_rows(tmp_path / "rows", 2000, 516) as store:
        requests.clear()
        write(store, range(70), 1).wait()
        assert requests == [(PAGE, 10 * PAGE)]
        write(store, range(700), 1).wait()
        assert (0, 0) in requests
        requests.clear()
        read(store, [0, 7, 21])
        assert requests == [(PAGE, 2 * PAGE), (4 * PAGE, PAGE)]
