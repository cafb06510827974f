"""Rows on disk, against a dict: in any order, by many threads, in files of any size."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.helpers import resident_growth
from tests.storage import stores
from tests.storage.stores import ROOT, Model, disk_rows, identity, initial, read, some_records, without_direct, write
from tritonemb.storage import DiskRows, StorageError, page_table


@pytest.mark.parametrize("direct", [True, False])
def test_a_table_of_10_billion_rows_takes_no_room(tmp_path, direct, monkeypatch):
    if not direct:
        monkeypatch.setattr(os, "open", without_direct(os.open))
    stores.use_threads(monkeypatch, 2)
    num_rows, num_bytes, path = 10**10, 516, tmp_path / "rows"
    disk_rows(tmp_path / "other", 10, num_bytes).close()  # what is loaded once is loaded

    def open_and_close():
        with disk_rows(path, num_rows, num_bytes) as store:
            return store

    assert resident_growth(open_and_close) < 8 << 20
    begin = time.process_time()
    store = disk_rows(path, num_rows, num_bytes)
    assert time.process_time() - begin < 2  # milliseconds, on most machines
    rows = [0, 1, 6, 7, 4_294_967_295, 4_294_967_296, num_rows - 2, num_rows - 1]
    assert read(store, rows).equal(Model(num_bytes).read(rows))
    write(store, rows[::2], 3)
    model = Model(num_bytes)
    model.write(rows[::2], 3)
    assert read(store, rows).equal(model.read(rows))
    assert store.changed_pages().tolist() == [1, 2, 3]  # in the order in which they were written
    store.close()
    assert path.stat().st_size == 4 * 4096
    with disk_rows(path, num_rows, num_bytes) as store:
        assert read(store, rows).equal(model.read(rows))


@pytest.mark.parametrize("options", [{}, {"host_rows": 1000}], ids=str)
def test_many_threads_ask_at_once(tmp_path, options, monkeypatch):
    """Each writes rows of its own, in pages and sets that others' stand in, and reads them right behind it."""
    if not options:
        stores.use_threads(monkeypatch, 4)
    store, failures = disk_rows(tmp_path / "rows", 4000, 100, **options), []

    def work(number: int) -> None:
        rows, model = list(range(number, 4000, 8)), Model(100)
        for turn in range(6):
            part = rows[turn::2]
            future = write(store, part, number * 100 + turn)
            model.write(part, number * 100 + turn)
            if not read(store, rows).equal(model.read(rows)) or not future.done():
                failures.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert failures == []


def test_initial_is_asked_once_for_those_never_written(tmp_path):
    requests = []

    def fill(rows, records):
        requests.append(rows.tolist())
        initial(rows, records)

    with DiskRows.create(tmp_path / "rows", identity(100, 516), fill) as store:
        write(store, [3, 50], 0)
        read(store, [2, 3, 4, 50, 99])
        read(store, [3, 50])
        read(store, [0, 1])
    assert requests == [[2, 4, 99], [0, 1]]


def test_memory_does_not_grow_with_what_is_read_and_written(tmp_path):
    """A buffer is 4 MB; a batch is 0.5 MB; the table is 40 MB."""
    store = disk_rows(tmp_path / "rows", 80_000, 516)
    batches = torch.arange(80_000).view(80, 1000)
    records = torch.zeros(1000, 516, dtype=torch.uint8)
    store.write(batches[0], records).wait()
    store.read(batches[0], records).wait()

    def use_all():
        for rows in batches:
            store.write(rows, records).wait()
            store.read(rows, records).wait()

    assert resident_growth(use_all) < 16 << 20
    store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_end_of_a_program_waits_for_its_writes_and_a_killed_one_leaves_whole_pages(tmp_path):
    """The first one has rows in host memory, too. The second one writes all rows again and again; what it has said is
    written is there, and each row is of one version."""
    program = """
import os, sys
from pathlib import Path
from tests.storage.stores import disk_rows, write
folder = Path(sys.argv[1])
if os.fork() == 0:
    stores = [disk_rows(folder / str(host_rows), 20_000, 100, host_rows=host_rows) for host_rows in (None, 3000)]
    for store, seed in ((store, seed) for store in stores for seed in range(10)):
        write(store, range(seed, 20_000, 10), seed)
    sys.exit()
print(os.wait()[1], flush=True)
store = disk_rows(folder / "killed", 3500, 516)
for seed in range(100_000):
    write(store, range(3500), seed).wait()
    print(seed, flush=True)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        status = process.stdout.readline()
        lines = [process.stdout.readline() for _ in range(10)]
        process.kill()
        lines += process.stdout.readlines()
        assert (status, process.stderr.read()) == ("0\n", "")
    for host_rows in (None, 3000):
        with disk_rows(tmp_path / str(host_rows), 20_000, 100) as store:
            for seed in range(10):
                assert read(store, range(seed, 20_000, 10)).equal(some_records(2000, 100, seed))
    last = int(lines[-1] if lines[-1].endswith("\n") else lines[-2])
    with disk_rows(tmp_path / "killed", 3500, 516) as store:
        rows = read(store, range(3500))
    versions = [some_records(3500, 516, seed) for seed in (last, last + 1, last + 2)]
    assert torch.stack([(rows == version).all(1) for version in versions]).any(0).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.more
def test_processes_forked_off_are_refused_and_leave_tables_alone(tmp_path):
    """One of them asks for rows, closes the table, and has one of its own, with threads of its own. Another one drops a
    table: its lock on the file stays, what is in memory alone, and what other threads held when it was forked off."""
    program = """
import gc, os, signal, sys
from pathlib import Path
from tests.storage.stores import disk_rows, read, write
from tritonemb.storage import StorageError
from tritonemb.storage.threads import shared_threads
folder, path = Path(sys.argv[1]), Path(sys.argv[1]) / "rows"
store = disk_rows(folder / "other", 1000, 100)
write(store, range(1000), 1).wait()
child = os.fork()
if child == 0:
    code = 1
    try:
        read(store, [1])
    except StorageError as error:
        code = 3 if "before this process was forked" in str(error) else 2
    store.close()  # does nothing, and does not hang
    with disk_rows(folder / "own", 1000, 100) as own:
        write(own, range(1000), 2)
        if read(own, [5]).equal(read(own, [6])):
            code = 4
    os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
read(store, [1])
store.close()
disk_rows(folder / "other", 1000, 100).close()
store = disk_rows(path, 1000, 100, host_rows=1000)
write(store, range(1000), 1).wait()
size = path.stat().st_size
store._operations.submit(lambda: None).wait()  # by now its thread has nothing of the table any more
with store._operations._lock, shared_threads._lock:
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        handle = store._file.file.handle
        del store
        gc.collect()
        try:
            os.fstat(handle)
        except OSError:
            os._exit(3)
        os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert path.stat().st_size == size
try:
    disk_rows(path, 1000, 100)
except StorageError as error:
    print(error)
"""
    done = stores.run_python(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("3\n3\n")
    assert "is open for another table" in done.stdout
    with disk_rows(tmp_path / "rows", 1000, 100) as store:
        assert read(store, range(1000)).equal(some_records(1000, 100, 1))


@pytest.mark.more
def test_the_end_of_a_program_starts_no_thread(tmp_path):
    """Python refuses that from 3.12 on. One table is new, another has rows in memory, for a file that takes threads."""
    program = """
import atexit, os, sys, threading
from pathlib import Path
from tests.storage.stores import disk_rows, no_thread, without_direct, write
os.open = without_direct(os.open)
new = disk_rows(Path(sys.argv[1]) / "new", 1000, 516)
store = disk_rows(Path(sys.argv[1]) / "rows", 1000, 516, host_rows=1000)
write(store, range(1000), 1)
atexit.register(setattr, threading.Thread, "start", no_thread)  # the last one is the first to be called
"""
    done = stores.run_python(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    with disk_rows(tmp_path / "rows", 1000, 516) as store:
        assert read(store, range(1000)).equal(some_records(1000, 516, 1))
    disk_rows(tmp_path / "new", 1000, 516).close()


@pytest.mark.parametrize(
    ("rows", "records", "error", "message"),
    [
        ([1], torch.zeros(1, 4, dtype=torch.uint8), TypeError, "rows must be a tensor, got list"),
        (torch.tensor([1.0]), torch.zeros(1, 4, dtype=torch.uint8), ValueError, "rows must be torch.int64"),
        (torch.tensor([1]), torch.zeros(1, 4), ValueError, "records must be torch.uint8"),
        (torch.tensor([1]), torch.zeros(4, 1, dtype=torch.uint8).t()[:, ::2], ValueError, "not contiguous"),
        (torch.tensor([1]), torch.zeros(2, 4, dtype=torch.uint8), ValueError, r"got \[1\] and \[2, 4\]"),
        (torch.tensor([[1]]), torch.zeros(1, 4, dtype=torch.uint8), ValueError, r"rows must be \[n\]"),
        (torch.tensor([2, 1]), torch.zeros(2, 4, dtype=torch.uint8), ValueError, r"rows\[0\] is 2 and rows\[1\] is 1"),
        (torch.tensor([1, 1]), torch.zeros(2, 4, dtype=torch.uint8), ValueError, "drop duplicates"),
        (torch.tensor([-1]), torch.zeros(1, 4, dtype=torch.uint8), ValueError, "rows 0 to 3, got row -1"),
        (torch.tensor([0, 4]), torch.zeros(2, 4, dtype=torch.uint8), ValueError, "got row 4"),
    ],
)
def test_bad_requests_have_a_name(tmp_path, rows, records, error, message):
    with disk_rows(tmp_path / "rows", 4, 4) as store:
        for ask in (store.read, store.write):
            with pytest.raises(error, match=message):
                ask(rows, records)


@pytest.mark.parametrize("buffer_bytes", [3 * 4096, page_table.BUFFER_BYTES])
def test_tables_move_at_once_and_each_in_the_order_of_its_operations(tmp_path, monkeypatch, buffer_bytes):
    """In chunks beside those of other tables, or of several per table; the last one has rows in host memory."""
    monkeypatch.setattr(page_table, "BUFFER_BYTES", buffer_bytes)
    kinds = [(100, None), (516, None), (9000, None), (100, 32)]
    stores = [disk_rows(tmp_path / str(n), 300, size, host_rows=rows) for n, (size, rows) in enumerate(kinds)]
    models, gate = [Model(size) for size, _ in kinds], threading.Event()
    stores[1]._submit(lambda: gate.wait(30))
    for seed, step in enumerate((1, 3, 2)):
        rows = list(range(seed, 300, step))
        records = [some_records(len(rows), size, seed) for size, _ in kinds]
        DiskRows.transfer([*zip(stores, [torch.tensor(rows)] * 4, records, strict=True)], write=True)
        for model in models:
            model.write(rows, seed)
    snapshot = stores[0].snapshot(tmp_path / "snapshot")
    records = [torch.empty(300, size, dtype=torch.uint8) for size, _ in kinds]
    futures = DiskRows.transfer([*zip(stores, [torch.arange(300)] * 4, records, strict=True)], write=False)
    assert not futures[2].done()  # after that of the table in host memory, and the one of the first table
    gate.set()
    for future in (snapshot, *futures):
        future.wait()
    for store in stores:
        store.close()
    (tmp_path / "0").unlink()
    (tmp_path / "snapshot").rename(tmp_path / "0")
    for number, (size, _) in enumerate(kinds):
        assert torch.equal(records[number], models[number].read(range(300)))
        with disk_rows(tmp_path / str(number), 300, size) as store:
            assert torch.equal(read(store, range(300)), records[number])


def test_a_write_that_fails_is_one_of_all_tables_of_its_operation(tmp_path, monkeypatch):
    stores, real = [disk_rows(tmp_path / name, 100, 100) for name in "ab"], page_table.BlockFile.submit

    def submit(blocks, *args):
        if blocks is stores[0]._file.blocks:
            raise StorageError("no more")
        real(blocks, *args)

    monkeypatch.setattr(page_table.BlockFile, "submit", submit)
    requests = [(store, torch.arange(50), some_records(50, 100, 1)) for store in stores]
    with pytest.raises(StorageError, match="no more"):
        DiskRows.transfer(requests, write=True)[0].wait()
    monkeypatch.undo()
    for store in stores:
        with pytest.raises(StorageError, match="is unusable because a write failed: no more"):
            read(store, [1])
        store.close()


def test_a_write_with_a_table_that_has_failed_fails_its_partners(tmp_path):
    """Their rows are not written either."""
    stores, gate = [disk_rows(tmp_path / name, 100, 100) for name in "ab"], threading.Event()
    stores[0]._submit(lambda: gate.wait(30))
    requests = [(store, torch.arange(50), some_records(50, 100, 1)) for store in stores]
    (future,) = DiskRows.transfer(requests, write=True)
    stores[0]._file.failure = StorageError("no more")
    gate.set()
    with pytest.raises(StorageError, match="is unusable because a write failed: no more"):
        future.wait()
    for store in stores:
        with pytest.raises(StorageError, match="is unusable because a write failed"):
            read(store, [1])
        store.close()


def test_operations_wait_for_one_that_was_interrupted_while_it_was_submitted(tmp_path, monkeypatch):
    stores, gate = [disk_rows(tmp_path / name, 100, 100) for name in "ab"], threading.Event()
    operations = DiskRows.joint_operations[0]
    submit = operations.submit

    def submit_and_raise(work):
        monkeypatch.undo()
        submit(lambda: (gate.wait(30), work()))
        raise KeyboardInterrupt

    monkeypatch.setattr(operations, "submit", submit_and_raise)
    records = some_records(50, 100, 1)
    with pytest.raises(KeyboardInterrupt):
        DiskRows.transfer([(store, torch.arange(50), records) for store in stores], write=True)
    flushes = [store.flush() for store in stores]
    assert not any(flush.done() for flush in flushes)
    gate.set()
    for flush, store in zip(flushes, stores, strict=True):
        flush.wait()
        assert torch.equal(read(store, range(50)), records)
        store.close()


def test_a_table_alone_does_not_wait_for_others(tmp_path):
    busy, idle = (disk_rows(tmp_path / name, 100, 100) for name in "ab")
    gate = threading.Event()
    busy._submit(lambda: gate.wait(30))
    records = torch.empty(1, 100, dtype=torch.uint8)
    waiting = busy.read(torch.tensor([1]), records)
    read(idle, [1])
    assert not waiting.done()
    gate.set()
    waiting.wait()
    busy.close()
    idle.close()
