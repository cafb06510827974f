"""Streams have the rows that arrive, in one order, and resume at their offsets."""

import json
import threading

import numpy as np
import pytest

from tests.data.logs import pa, parquet, same
from tests.data.threads import running, threads_end
from tritonemb.data import ClickLog, FolderStream, LogOptions, Schema, SplitRule, build_vocabulary, open_for_scoring
from tritonemb.data.loader import DataLoaderWorkers, merge_positions, open_shards
from tritonemb.data.open import ReaderHost, RemoteData, open_dataset

SCHEMA = Schema("click", dense=("price",), sparse=("user", "tags"), num_embeddings=100)
FOLLOW = LogOptions(SCHEMA, follow=True, parser_threads=2)
ROWS = 50


def table(number, rows=ROWS):
    values = np.arange(rows) + 1000 * number
    return pa.table({
        "click": values % 2, "price": values.astype(np.float64), "user": [f"u{row % 17}" for row in values.tolist()],
        "tags": [[row % 5, row % 3] for row in values.tolist()], "comment": ["unused"] * rows,
    })  # fmt: skip


def move_in(folder, *numbers, rows=ROWS):
    """Write files as a producer does: under another name, and then renamed."""
    for number in numbers:
        parquet.write_table(table(number, rows), folder / f".part-{number}", row_group_size=20)
        (folder / f".part-{number}").rename(folder / f"part-{number}.parquet")


def end(folder):
    (folder / "_SUCCESS").touch()


def prices(batches):
    return [price for batch in batches for price in batch.dense[:, 0].tolist()]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    move_in(folder, 8, 9, 10)
    return folder


def test_batches_are_those_of_the_files_in_their_order(folder):
    plain = ClickLog(folder, LogOptions(SCHEMA, SplitRule(split_by="end", test_share=0.0)))
    end(folder)
    (folder / "part-11.parquet.tmp").write_bytes(b"not yet")
    log = open_dataset(str(folder), log=FOLLOW)
    assert (log.name, log.features, log.encoding) == ("logs", plain.features, plain.encoding)
    assert log.splits() == ("train",)
    assert log.num_rows("train") is None
    assert log.estimated_rows("train") is None
    with log.open("train", 32, shuffle=True) as stream:
        assert same(stream, plain.open("train", 32))
    assert log.num_rows("train") == 3 * ROWS
    assert not running()


@pytest.mark.parametrize("batches", [0, 1, 2, 4])
def test_a_stream_resumes_while_files_come_and_go(folder, batches):
    log = ClickLog(folder, FOLLOW)
    with log.open("train", 32) as stream:
        initial = [next(stream) for _ in range(batches)]
        position = json.loads(json.dumps(stream.position))
    contents = log.contents
    plain = ClickLog(folder, LogOptions(SCHEMA))
    with plain.open("train", 32) as stream, pytest.raises(ValueError, match="in a file that is not in the train split"):
        plain.open("train", 32, position=stream.position | {"offset": {"part-8.parquet": 0}})
    move_in(folder, 11, 12)
    end(folder)
    whole = list(ClickLog(folder, FOLLOW).open("train", 32))
    assert same(initial, whole[:batches])
    current = int(next(iter(position["offset"] or {"part-8.": 0})).partition("-")[2].partition(".")[0])
    for number in range(8, current):
        (folder / f"part-{number}.parquet").unlink()
    resumed = ClickLog(folder, FOLLOW)
    assert resumed.contents == contents
    with resumed.open("train", 32, position=position) as stream:
        assert same(stream, whole[batches:])
        assert stream.report.rows == 5 * ROWS


def test_a_stream_waits_for_files(folder):
    with ClickLog(folder, FOLLOW).open("train", 60) as stream:
        first = prices([next(stream), next(stream)])
        move_in(folder, 11)
        assert prices([next(stream)]) == [
            *(10_000.0 + row for row in range(20, 50)),
            *(11_000.0 + row for row in range(30)),
        ]
        thread = threading.Thread(target=lambda: prices(stream))
        thread.start()
        stream.close()
        thread.join()
    assert first == [*range(8000, 8050), *range(9000, 9050), *range(10_000, 10_020)]
    assert threads_end()


def test_files_that_are_late_or_missing_are_named(folder):
    log = ClickLog(folder, FOLLOW)
    with log.open("train", 25) as stream:
        for _ in range(5):
            next(stream)
        position = stream.position
        move_in(folder, 3)
        with pytest.raises(ValueError, match=r"logs: part-3.parquet has come after part-10.parquet; files must come"):
            list(stream)
    for number in (3, 9):
        (folder / f"part-{number}.parquet").unlink()
    with log.open("train", 25, position=position) as stream:
        next(stream)
    (folder / "part-10.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"the position is in part-10.parquet, which is missing"):
        next(log.open("train", 25, position=position))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ClickLog(FolderStream(folder / "nowhere"))


def test_shards_divide_each_file(folder):
    end(folder)
    log = ClickLog(folder, FOLLOW)
    shards = [list(log.open("train", 7, shard=(index, 3))) for index in range(3)]
    assert [sum(map(len, shard)) for shard in shards] == [3 * 16, 3 * 17, 3 * 17]
    assert sorted(value for shard in shards for value in prices(shard)) == sorted(prices(log.open("train", 7)))
    first, second = (open_shards(log, "train", 7, rank, 2, 3) for rank in range(2))
    read = [next(first), next(second), next(first)]
    position = merge_positions([first.position, second.position])
    remainder = list(open_shards(log, "train", 7, positions=json.loads(json.dumps(position))))
    assert sorted(prices([*read, *remainder])) == sorted(prices(log.open("train", 7)))


def test_held_out_rows_are_those_of_files(folder, tmp_path):
    (tmp_path / "held").mkdir()
    move_in(tmp_path / "held", 1)
    rule = SplitRule(test_files=(str(tmp_path / "held" / "part-1.parquet"),))
    log = ClickLog(folder, LogOptions(SCHEMA, rule, follow=True))
    assert log.splits() == ("train", "test")
    assert prices(log.open("test", 16)) == list(range(1000, 1050))
    assert log.estimated_rows("test") == ROWS
    with pytest.raises(ValueError, match="a stream, which has no end, cannot be split by random; set test_files"):
        ClickLog(folder, LogOptions(SCHEMA, SplitRule(split_by="random"), follow=True))


def test_bad_rows_and_changed_columns_are_named(folder):
    end(folder)
    bad = table(11).set_column(0, "click", pa.array([0, 7] * 25))
    parquet.write_table(bad, folder / "part-11.parquet")
    with pytest.raises(ValueError, match=r"logs at .*part-11.parquet.*row 2: .*\(click\) is '7', expected 0 or 1"):
        list(ClickLog(folder, FOLLOW).open("train", 25))
    other = table(12).set_column(2, "user", pa.array(range(ROWS)))
    parquet.write_table(other, folder / "part-11.parquet")
    with pytest.raises(ValueError, match=r"part-11.parquet.*: column 'user' has integers, but strings in .*logs"):
        list(ClickLog(folder, FOLLOW).open("train", 25))
    parquet.write_table(table(12).drop_columns(["price"]), folder / "part-11.parquet")
    with pytest.raises(ValueError, match=r"part-11.parquet.*: the schema's dense column 'price' is missing"):
        list(ClickLog(folder, FOLLOW).open("train", 25))
    missing = table(12).set_column(3, "tags", pa.nulls(ROWS))
    parquet.write_table(missing, folder / "part-11.parquet")
    assert sum(map(len, ClickLog(folder, FOLLOW).open("train", 25))) == 4 * ROWS
    parquet.write_table(missing, folder / "part-8.parquet")
    with pytest.raises(
        ValueError, match=r"part-9.parquet.*: column 'tags' has a list per row, but one value in the fe"
    ):
        list(ClickLog(folder, FOLLOW).open("train", 25))


class Numbers:
    """A stream of a user: rows in lists, three at a time, or none."""

    path = "numbers"

    def __init__(self, last=None):
        self.last, self.polls = last, 0

    def read(self, offsets, shard, columns):
        row = offsets.get("row", 0)
        while self.last is None or row < self.last:
            self.polls += 1
            if self.polls % 2:
                yield {"row": row}, None
            else:
                batch = table(0, row + 3).slice(row).to_batches()[0]
                yield {"row": row}, batch.select(list(columns) or batch.schema.names)
                row += 3


def test_a_stream_may_be_any_object(tmp_path):
    log = ClickLog(Numbers(), LogOptions(SCHEMA))
    assert log.name == "numbers"
    with log.open("train", 5) as stream:
        assert prices([next(stream) for _ in range(4)]) == list(range(20))
        position = stream.position
    with ClickLog(Numbers(), LogOptions(SCHEMA)).open("train", 5, position=position) as stream:
        assert prices([next(stream)]) == list(range(20, 25))
    ending = ClickLog(Numbers(30), LogOptions(SCHEMA))
    assert build_vocabulary(ending, tmp_path / "vocabulary", 1).rows == 30
    with pytest.raises(ValueError, match="workers cannot be interrupted while a stream has no rows"):
        DataLoaderWorkers(ending, 1)


def test_a_reader_host_serves_a_stream(folder):
    pytest.importorskip("pyarrow.flight")
    end(folder)
    log = ClickLog(folder, FOLLOW)
    with ReaderHost(log) as host:
        remote = RemoteData(host.address, token=host.token)
        with remote.open("train", 32) as stream:
            next(stream)
            position = stream.position
        assert same(remote.open("train", 32, position=position), list(log.open("train", 32))[1:])
        with pytest.raises(ValueError, match="workers cannot be interrupted"):
            DataLoaderWorkers(remote, 1)


def test_options_of_a_stream_are_not_those_of_scoring(folder):
    log = ClickLog(folder, FOLLOW)
    scored = open_for_scoring(folder / "part-9.parquet", FOLLOW, log.features)
    assert sum(map(len, scored.open("test", 16))) == ROWS
