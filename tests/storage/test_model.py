"""Rows on disk, some of them in host memory or none, against a dict: whatever is asked for, in any order."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.storage import stores
from tests.storage.stores import SIZES, Model, disk_rows, identity, initial, read, some_records, write
from tritonemb.storage import DiskRows, memory, page_table, restore
from tritonemb.storage.store import Counts

KINDS = ("any", "ends", "stretch", "one set", "more than fit", "always new")


def random_rows(kind: str, number: int, cached: int, num_rows: int, generator: torch.Generator) -> Tensor:
    """The rows of an operation of this number."""
    everything = torch.arange(num_rows)
    if kind == "always new":
        return torch.arange(number * 50, (number + 1) * 50) % num_rows
    if kind == "stretch":
        first, size = (int(torch.randint(num_rows, (), generator=generator)) for _ in range(2))
        return everything[first : first + 1 + size // 2]
    pool, size = everything, 40
    if kind == "ends":
        pool, size = torch.cat([everything[:40], everything[-20:]]), 30
    elif kind == "one set":
        pool, size = torch.tensor(stores.rows_of_one_set(num_rows, -(-min(cached, num_rows) // 32))), 60
    elif kind == "more than fit":
        size = min(3 * cached + 40, num_rows)
    return pool[torch.randperm(pool.numel(), generator=generator)[:size]]


@st.composite
def streams(draw: st.DrawFn, num_rows: int) -> tuple[int, list[tuple[str, list[int]]]]:
    """Rows to cache, and operations: reads, writes, flushes, snapshots, and closing and opening again."""
    cached, kind = draw(st.sampled_from((1, 64, 5000))), draw(st.sampled_from(KINDS))
    operations = draw(st.text("rwwofsbc", max_size=12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rows = [random_rows(kind, number, cached, num_rows, generator).sort().values for number in range(len(operations))]
    return cached, [(operation, part.tolist()) for operation, part in zip(operations, rows, strict=True)]


# In sectors of 512 bytes: one, two and five in a block, and three records in one.
SMALL = [(512, num_bytes) for num_bytes in (130, 495, 496, 2000)]


@pytest.mark.parametrize(
    ("page_bytes", "num_bytes"), [*[(4096, num_bytes) for num_bytes in SIZES], *SMALL], indirect=["page_bytes"]
)
@pytest.mark.parametrize("store", ["file", "file, by threads", "lru", "lfu"])
def test_it_is_as_a_dict(tmp_path, num_bytes, store, monkeypatch):
    """Nobody waits between reads and writes; tables are closed and opened, flushed and saved in between."""
    monkeypatch.setattr(page_table, "BUFFER_BYTES", 3 * 4096)  # so that a request is of several tasks
    monkeypatch.setattr(memory, "CHUNK_BYTES", 30 * num_bytes)  # so that there are several
    if store == "file, by threads":
        stores.use_threads(monkeypatch, 3)
    # Two pages of the smallest records and a part of a third; few of those that take pages each.
    num_rows = 1700 if num_bytes == 5 else 200 if num_bytes < 4000 else 80

    @settings(max_examples=min(12, settings().max_examples))
    @given(streams(num_rows))
    def check(stream):
        cached, operations = stream
        for path in tmp_path.iterdir():
            path.unlink()
        options = {"host_rows": cached, "policy": store} if store in ("lru", "lfu") else {}
        rows_on_disk, model, reads = disk_rows(tmp_path / "rows", num_rows, num_bytes, **options), Model(num_bytes), []
        chain: list[Path] = []
        saved = model
        for number, (kind, rows) in enumerate(operations):
            if kind == "r":
                reads.append((stores.start_read(rows_on_disk, rows), model.read(rows)))
            elif kind == "w":
                write(rows_on_disk, rows, number)
                model.write(rows, number)
            elif kind == "f":
                rows_on_disk.flush()
            elif kind in "sb" or (kind == "c" and not chain):
                chain, saved = [tmp_path / f"base{number}"], model.copy()
                rows_on_disk.snapshot(chain[0])
            elif kind == "c":
                chain.append(tmp_path / f"changes{number}")
                saved = model.copy()
                rows_on_disk.snapshot(chain[-1], changes_only=True)
            else:
                rows_on_disk.close()
                # What was saved is the last snapshot of another file; this one begins a new chain.
                rows_on_disk, chain = disk_rows(tmp_path / "rows", num_rows, num_bytes, **options), []
        reads.append((stores.start_read(rows_on_disk, range(num_rows)), model.read(range(num_rows))))
        for (future, records), expected in reads:
            future.wait()
            assert records.equal(expected)
        rows_on_disk.close()
        with disk_rows(tmp_path / "rows", num_rows, num_bytes) as plain:  # all of it is in the file
            assert read(plain, range(num_rows)).equal(model.read(range(num_rows)))
        if chain:
            restore(tmp_path / "again", chain[0], chain[1:])
            with disk_rows(tmp_path / "again", num_rows, num_bytes) as again:
                assert read(again, range(num_rows)).equal(saved.read(range(num_rows)))

    check()


@pytest.mark.parametrize("num_bytes", [516, 10000])
@pytest.mark.parametrize("host_rows", [None, 5])
def test_empty_batches(tmp_path, num_bytes, host_rows):
    with disk_rows(tmp_path / "rows", 30, num_bytes, host_rows=host_rows) as store:
        write(store, [], 0).wait()
        assert read(store, []).shape == (0, num_bytes)
        assert store.counts() == Counts()
        assert store.changed_pages().tolist() == []


@pytest.mark.parametrize("host_rows", [None, 1])
def test_an_initial_that_fails_fails_its_read_alone(tmp_path, host_rows):
    def fill(rows, records):
        if 2 in rows:
            raise KeyError("no values")
        initial(rows, records)

    with DiskRows.create(tmp_path / "rows", identity(100, 516), fill, host_rows=host_rows) as store:
        write(store, [3], 5)
        for _ in range(2):
            with pytest.raises(KeyError, match="no values"):
                read(store, [2, 3])
        assert read(store, [3, 4]).equal(torch.cat([some_records(1, 516, 5), Model(516).read([4])]))
