"""What a power failure must not take: a file is on the disk before it has its name, and its name is then."""

import os

import pytest

from tests.durability import LINUX, Durability
from tests.storage.stores import disk_rows, use_threads, write
from tritonemb.storage import restore
from tritonemb.storage.aio import PageFile

pytestmark = LINUX


def test_files_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    """A table's file, its snapshots, one that replaces another, and what is restored of them."""
    durability = Durability(monkeypatch, tmp_path)

    def named() -> list[str]:
        assert durability.check() == []
        return [path.name for path, _ in durability.named]

    with disk_rows(tmp_path / "rows", 100, 516) as store:
        assert named() == ["rows"]
        write(store, range(50), 1).wait()
        store.snapshot(tmp_path / "base").wait()
        assert named() == ["rows", "base"]
        write(store, range(3), 2).wait()
        store.snapshot(tmp_path / "changes", changes_only=True).wait()
        assert named() == ["rows", "base", "changes"]
        store.snapshot(tmp_path / "other").wait()
        store.snapshot(tmp_path / "other").wait()
        assert named() == ["rows", "base", "changes", "other", "other"]
    restore(tmp_path / "again", tmp_path / "base", [tmp_path / "changes"])
    assert named()[-1] == "again"


def test_rows_are_on_the_disk_after_flush_and_close(tmp_path, monkeypatch):
    durability, path = Durability(monkeypatch, tmp_path), tmp_path / "rows"
    with disk_rows(path, 100, 516) as store:
        for seed in (1, 2):
            write(store, range(seed, 90), seed).wait()
            store.flush().wait()
            assert durability.is_synced(path)
        write(store, range(10), 3).wait()
    assert durability.is_synced(path)


@pytest.mark.parametrize("again", [False, True])
def test_a_header_is_on_the_disk_before_the_rows_that_it_does_not_describe(tmp_path, monkeypatch, again):
    """A snapshot that is written to says so first, or it would be taken for whole."""
    events: list[str] = []
    real, fsync = PageFile.write, os.fsync

    def noted(self: PageFile, view: memoryview, offset: int) -> None:
        events.append("rows" if offset else "header")
        real(self, view, offset)

    with disk_rows(tmp_path / "rows", 100, 516) as store:
        write(store, range(50), 1).wait()
        store.snapshot(tmp_path / "base").wait()
    use_threads(monkeypatch, 1)
    monkeypatch.setattr(PageFile, "write", noted)
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), fsync(handle)))
    with disk_rows(tmp_path / ("base" if again else "rows"), 100, 516) as store:
        write(store, range(3), 2).wait()
        assert events[:2] == ["header", "fsync"]
        assert set(events[2:]) == {"rows"}
