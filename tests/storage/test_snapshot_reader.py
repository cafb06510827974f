"""Snapshots read as they are, and what tells their files from others."""

import errno
import gc
import os

import pytest
import torch

from tests.storage.stores import Model, disk_rows, failing, initial, some_records
from tritonemb.storage import SnapshotReader, StorageError, restore, snapshot_header
from tritonemb.storage.io import DIGEST_BYTES, copy_rows, digest

ROWS = 40_000


@pytest.fixture(params=[5, 4089])
def snapshot(request, tmp_path):
    """A whole snapshot, one of changes, and what the first holds."""
    rows, model = [0, 1, 7, 2_000, ROWS - 1], Model(request.param)
    with disk_rows(tmp_path / "live", ROWS, request.param) as store:
        store.write(torch.tensor(rows), some_records(5, request.param, 1))
        model.write(rows, 1)
        store.snapshot(tmp_path / "whole").wait()
        store.write(torch.tensor([3]), some_records(1, request.param, 2))
        store.snapshot(tmp_path / "changes", changes_only=True).wait()
    return tmp_path / "whole", tmp_path / "changes", model


def test_rows_are_read_from_a_snapshot_which_stays_as_it_is(snapshot):
    path, changes, model = snapshot
    previous = digest(path)
    expected = torch.tensor([0, 1, 2, 6, 7, 8, 1_999, 2_000, ROWS - 2, ROWS - 1])
    with SnapshotReader(path) as one, SnapshotReader(path) as other:  # by several at once
        for saved in (one, other):
            records = torch.full((10, model.num_bytes), 254, dtype=torch.uint8)
            saved.read(expected, records, initial)
            assert torch.equal(records, model.read(expected.tolist()))
        with pytest.raises(ValueError, match="got row 40000"):
            one.read(torch.tensor([ROWS]), records[:1], initial)
    assert digest(path) == previous
    assert snapshot_header(path)["snapshot"] == snapshot_header(changes)["after"]
    with pytest.raises(StorageError, match="holds changes"):
        SnapshotReader(changes)


def test_a_snapshot_that_nobody_reads_any_more_is_closed(snapshot):
    rows = SnapshotReader(snapshot[0])
    handle = rows._blocks.file.handle
    os.fstat(handle)
    del rows
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_too_many_open_files(snapshot, tmp_path, monkeypatch):
    """No other disk or folder helps against that."""

    def refuse(path, *_):
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    path, changes, model = snapshot
    calls = [
        lambda: SnapshotReader(path),
        lambda: digest(path),
        lambda: restore(tmp_path / "restored", path, [changes]),
        lambda: disk_rows(tmp_path / "live", ROWS, model.num_bytes),
        lambda: disk_rows(tmp_path / "new", ROWS, model.num_bytes),
    ]
    with disk_rows(tmp_path / "other", ROWS, model.num_bytes) as store:
        monkeypatch.setattr(os, "open", refuse)
        for call in (*calls, store.snapshot(tmp_path / "more").wait):
            with pytest.raises(StorageError, match=r"Too many open files.*; .* raise the limit .* \(`ulimit -n`\)$"):
                call()


@pytest.mark.parametrize("bad", ["missing", "cut", "empty", "page"])
def test_a_bad_snapshot_is_told(snapshot, bad):
    path, _, model = snapshot
    if bad == "missing":
        path.unlink()
    elif bad == "page":
        content = bytearray(path.read_bytes())
        content[4096 + 9] ^= 1
        path.write_bytes(bytes(content))
    else:
        os.truncate(path, 0 if bad == "empty" else path.stat().st_size - 4096)
    message = {"missing": "cannot be opened", "cut": "bytes, expected", "empty": "too short", "page": "is damaged"}
    with pytest.raises(StorageError, match=message[bad]), SnapshotReader(path) as saved:
        saved.read(torch.tensor([0]), torch.empty(1, model.num_bytes, dtype=torch.uint8), initial)


class TestDigest:
    def write(self, path, *pieces: tuple[int, int], size: int = 4 * DIGEST_BYTES + 4096):
        """A file with a byte's value at some places."""
        with path.open("wb") as file:
            file.truncate(size)
            for place, value in pieces:
                file.seek(place)
                file.write(bytes([value]))
        return path

    def test_holes_are_zeros(self, tmp_path):
        sparse = self.write(tmp_path / "a", (5, 1), (4 * DIGEST_BYTES + 4095, 2))
        (tmp_path / "b").write_bytes(sparse.read_bytes())
        assert digest(sparse) == digest(tmp_path / "b")
        copy_rows(sparse, tmp_path / "c")
        assert digest(sparse) == digest(tmp_path / "c")
        assert (tmp_path / "c").read_bytes() == sparse.read_bytes()

    def test_every_byte_and_its_place_count(self, tmp_path):
        a, b = 5, DIGEST_BYTES + 5
        contents = [
            [], [(a, 1)], [(a, 2)], [(b, 1)], [(a + 1, 1)], [(a, 1), (b, 2)], [(a, 2), (b, 1)], [(a, 1), (b, 1)],
            [(3 * DIGEST_BYTES - 1, 1)], [(4 * DIGEST_BYTES + 4095, 1)],
        ]  # fmt: skip
        results = [digest(self.write(tmp_path / str(n), *pieces)) for n, pieces in enumerate(contents)]
        assert len(set(results)) == len(contents)

    def test_a_read_error_names_the_file(self, snapshot, monkeypatch):
        if not hasattr(os, "preadv"):
            pytest.skip("no preadv")
        monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO, range(8192, 1 << 62)))
        with pytest.raises(StorageError, match=r"whole cannot be read: .*Input/output error; check the disk"):
            digest(snapshot[0])
