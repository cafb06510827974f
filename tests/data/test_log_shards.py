"""Shards of a data set: disjoint, complete, of much the same size, and each a stream like any other."""

import itertools
import json
import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.logs import ALL_TRAIN, line, options, pa, parquet, rows_of, same, write
from tritonemb.data import ClickLog, SplitRule, convert, files, make_synthetic, text
from tritonemb.data import parquet as parquet_files
from tritonemb.data.files import Part, find_files

KINDS = ("plain", "packed", "parquet", "plain files", "packed files", "mixed files", "parquet files")
SIZES = (1, 3, 40, 300)
RULES = (ALL_TRAIN, SplitRule(), SplitRule(split_by="random", test_share=0.3))


def numbered(num_rows, first=0):
    """Lines whose int_1 is their number, of different lengths, with blank and bad ones between them."""
    for number in range(first, first + num_rows):
        yield line(integers={1: str(number), 2: "7" * (number * 7 % 15)})
        if number % 11 == 5:
            yield ""
        if number % 13 == 7:
            yield "bad"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A path for every kind and size."""
    paths = {}
    for size in SIZES:
        folder = tmp_path_factory.mktemp(f"rows_{size}")
        paths["plain", size] = write(folder, numbered(size))
        paths["packed", size] = write(folder, numbered(size), "packed.txt.gz")
        paths["parquet", size] = folder / "log.parquet"
        convert(paths["plain", size], paths["parquet", size], row_group_rows=70, options=options(on_bad_row="skip"))
        for kind, endings in (("plain", ("",)), ("packed", (".gz", ".zst")), ("mixed", ("", ".gz"))):
            (folder / kind).mkdir()
            paths[f"{kind} files", size] = folder / kind
            cuts = [size * number // 5 for number in range(6)]
            for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
                if start < stop:
                    name = f"part_{number}.txt{endings[number % len(endings)]}"
                    write(folder / kind, numbered(stop - start, start), name)
        paths["parquet files", size] = folder / "files.parquet"
        skipping = options(on_bad_row="skip")
        convert(paths["plain files", size], paths["parquet files", size], row_group_rows=33, options=skipping)
    return paths


def reader(path, rule=ALL_TRAIN, **changes):
    return ClickLog(path, options(rule, log_transform=False, on_bad_row="skip", **changes))


def numbers(log, split="train", **how):
    return [round(row[1]) for row in rows_of(log, split, **how)]


@settings(max_examples=25)  # each opens many streams
@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES[1:]),
    count=st.sampled_from((2, 3, 4, 5, 20)),
    rule=st.sampled_from(RULES),
    split=st.sampled_from(("train", "test")),
    shuffle=st.booleans(),
    chunk_bytes=st.sampled_from((200, 3000, 100_000)),
)
def test_every_row_of_a_log_is_in_one_shard(logs, kind, size, count, rule, split, shuffle, chunk_bytes):
    if size < 40:  # too few for a split
        rule, split = ALL_TRAIN, "train"
    log = reader(logs[kind, size], rule, chunk_bytes=chunk_bytes, shuffle_rows=50)
    if split not in log.splits():
        return
    rows, skipped = [], 0
    for index in range(count):
        with log.open(split, 16, seed=3, shuffle=shuffle, shard=(index, count)) as stream:
            for batch in stream:
                rows += batch.dense[:, 0].int().tolist()
            skipped += stream.report.skipped
    with log.open(split, 16) as stream:
        expected = [int(row) for batch in stream for row in batch.dense[:, 0]]
        assert skipped == stream.report.skipped
    assert sorted(rows) == sorted(expected)
    if kind in ("plain", "parquet") and not shuffle:
        assert rows == expected  # runs, one after the other


def test_rows_of_shards_are_known_where_those_of_the_split_are(logs):
    for rule in RULES[:2]:
        log = ClickLog(logs["parquet files", 300], options(rule, log_transform=False))
        for split, count in itertools.product(log.splits(), (1, 2, 3, 7)):
            rows = [len(numbers(log, split, shard=(index, count))) for index in range(count)]
            assert log.shard_rows(split, count) == rows
    for kind in ("plain", "parquet"):
        assert reader(logs[kind, 300]).shard_rows("train", 2) is None


@settings(max_examples=25)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(2, 5),
    data=st.data(),
    batch_size=st.integers(1, 40),
    chunk_bytes=st.tuples(st.integers(300, 20_000), st.integers(300, 20_000)),
    rule=st.sampled_from(RULES),
)
@pytest.mark.more
def test_a_shard_goes_on_with_the_same_bits(logs, kind, count, data, batch_size, chunk_bytes, rule):
    shard = (data.draw(st.integers(0, count - 1)), count)
    kwargs = {"seed": 1, "epoch": 2, "shuffle": True, "shard": shard}
    first, second = (reader(logs[kind, 300], rule, chunk_bytes=size, shuffle_rows=60) for size in chunk_bytes)
    with first.open("train", batch_size, **kwargs) as stream:
        whole = list(stream)
        report = stream.report
    stop = data.draw(st.integers(0, len(whole)))
    with first.open("train", batch_size, **kwargs) as stream:
        assert same(itertools.islice(stream, stop), whole[:stop])
        position = json.loads(json.dumps(stream.position))
    with second.open("train", batch_size, **kwargs, position=position) as stream:
        assert stream.report.rows == sum(map(len, whole[:stop]))
        assert same(stream, whole[stop:])
        assert (stream.report.rows, stream.report.skipped) == (report.rows, report.skipped)
    other = (shard[0], count + 1)
    with pytest.raises(ValueError, match="seed, epoch, order and shard that it was opened with"):
        first.open("train", batch_size, **(kwargs | {"shard": other}), position=position)


@given(
    num_rows=st.integers(1, 60),
    count=st.integers(1, 70),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    stop=st.integers(0, 20),
)
def test_every_row_in_memory_is_in_one_shard_of_its_epochs_order(num_rows, count, batch_size, shuffle, seed, stop):
    data = numbered_in_memory(num_rows)
    kwargs = {"seed": seed, "epoch": 1, "shuffle": shuffle}
    whole = [row for batch in data.open("train", batch_size, **kwargs) for row in batch.dense[:, 0].int().tolist()]
    results = []
    for index in range(count):
        with data.open("train", batch_size, **kwargs, shard=(index, count)) as stream:
            batches = list(stream)
            sizes = list(map(len, batches))
            assert all(size == batch_size for size in sizes[:-1])
            assert stream.report.rows == sum(sizes)
            results.append([row for batch in batches for row in batch.dense[:, 0].int().tolist()])
        if batches:
            with data.open("train", batch_size, **kwargs, shard=(index, count)) as stream:
                list(itertools.islice(stream, stop))
                position = json.loads(json.dumps(stream.position))
            with data.open("train", batch_size, **kwargs, shard=(index, count), position=position) as stream:
                assert same(stream, batches[stop:])
                assert stream.report.rows == sum(sizes)
    assert results == [whole[index::count] for index in range(count)]


def numbered_in_memory(num_rows):
    data = make_synthetic(num_rows, 50)
    data.train.dense[:, 0] = torch.arange(num_rows)
    return data


def test_shares_have_much_the_same_size(logs):
    for kind, slack in (("plain", 0.05), ("packed", 0.35), ("parquet", 0.01), ("plain files", 0.05)):
        for count in (2, 3, 7):
            log = reader(logs[kind, 300], chunk_bytes=100_000)
            sizes = [len(numbers(log, shard=(index, count))) for index in range(count)]
            assert max(sizes) <= 300 / count * (1 + slack) + 2, (kind, sizes)


def test_nobody_parses_what_others_parse(logs, monkeypatch):
    """Every byte of plain text, every row of Parquet and, but for unpacking, every byte of packed text once."""
    seen = []
    for kind in KINDS:
        source = parquet_files.ArrowSource if "parquet" in kind else text.TextSource
        with monkeypatch.context() as patched:
            initial = source.parse
            patched.setattr(source, "parse", lambda *args, b=initial: seen.append(args[1]) or b(*args))
            log = reader(logs[kind, 40], chunk_bytes=400)
            numbers(log)
            whole = rows_seen(seen)
            seen.clear()
            for index in range(3):
                numbers(log, shard=(index, 3))
            assert rows_seen(seen) == whole
            seen.clear()


def rows_seen(chunks):
    if all(isinstance(chunk.rows, bytearray) for chunk in chunks):
        return sum(chunk.rows.count(b"\n") for chunk in chunks)
    return sum(chunk.rows.num_rows for chunk in chunks)


@pytest.mark.parametrize("kind", ["plain", "packed", "parquet", pytest.param("mixed files", marks=pytest.mark.more)])
def test_bad_rows_of_a_shard_have_their_lines(tmp_path, logs, kind):
    if kind == "parquet":
        table = pa.table({"click": [0] * 90 + [3] + [0] * 9, "user": [str(row) for row in range(100)]})
        parquet.write_table(table, tmp_path / "log.parquet", row_group_size=20)
        log = ClickLog(
            tmp_path / "log.parquet", options(label="click", sparse=("user",), on_bad_row="raise", chunk_bytes=256 * 7)
        )
        message = "log.parquet, row 91: "
        with pytest.raises(ValueError, match=message):
            list(log.open("train", 8, shard=(2, 3)))
        return
    strict = ClickLog(logs[kind, 300], options(chunk_bytes=3000))
    expected = set()
    with reader(logs[kind, 300], chunk_bytes=2000).open("train", 16) as stream:
        list(stream)
        assert stream.report.skipped > 20
    for path in strict.files:
        plain = path.read_bytes() if path.suffix == ".txt" else text_of(path)
        expected |= {f"{path}, line {n}" for n, entry in enumerate(plain.split(b"\n"), start=1) if entry == b"bad"}
    actual = set()
    for index in range(11):  # each tells at most ten in full
        with reader(logs[kind, 300], chunk_bytes=2000).open("train", 16, shard=(index, 11)) as stream:
            list(stream)
            actual |= {problem.partition(": ")[0] for problem in stream.report.problems}
    assert actual == expected


@pytest.mark.parametrize("name", ["plain.txt", "packed.txt.gz"])
def test_lines_are_counted_from_anywhere(tmp_path, name):
    path = write(tmp_path, ["ab", "", "", "cde", "f", "", "ghi"], name)
    (file,) = find_files(path)
    starts = [0, 3, 4, 5, 9, 11, 12]
    for start in range(17):
        assert text.count_before(file, start)[0] == sum(line < start for line in starts)
        assert text.count_before(file, start)[1] == sum(line < start for line in (0, 5, 9, 12))


def text_of(path):
    with text.open_text(reader(path, SplitRule(split_by="end", test_share=0.0))._reader.source.files[0]) as source:
        return source.read(1 << 20)


def by_time(folder, times, kind, statistics=True, **rule):
    rows = len(times)
    columns = {"click": [0] * rows, "price": [float(row) for row in range(rows)], "user": ["a"] * rows}
    table = pa.table({"when": pa.array(times, type=pa.int64()).cast(kind), **columns})
    parquet.write_table(table, folder / "log.parquet", row_group_size=7, write_statistics=statistics)
    bounds = ["1970-01-02", "1970-01-03T00:00:00"] if pa.types.is_timestamp(kind) else ["60", "80"]
    rule = rule or {"validation_from": bounds[0], "test_from": bounds[1]}
    rule = SplitRule(time_column="when", **rule)
    return reader(folder / "log.parquet", rule, label="click", dense=("price",), sparse=("user",), shuffle_rows=0)


@pytest.mark.parametrize("count", [2, 3, 40])
@pytest.mark.parametrize("statistics", [True, False])
def test_a_shard_of_rows_by_time(tmp_path, count, statistics):
    log = by_time(tmp_path, list(range(100)), pa.int64(), statistics)
    for split, expected in (("train", range(60)), ("validation", range(60, 80)), ("test", range(80, 100))):
        results = [numbers(log, split, shard=(index, count)) for index in range(count)]
        assert [row for local in results for row in local] == list(expected)
        if statistics:  # only the row groups at the bounds have rows of others
            assert max(map(len, results)) <= (len(expected) + 7) / count + 2


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_shard_of_rows_by_time_with_one_bound(tmp_path, split):
    log = by_time(tmp_path, list(range(100)), pa.int64(), **{f"{split}_from": "70"})
    for item, expected in (("train", range(70)), (split, range(70, 100))):
        results = [numbers(log, item, shard=(index, 3)) for index in range(3)]
        assert [row for local in results for row in local] == list(expected)
        assert max(map(len, results)) < 30


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 99)), min_size=1, max_size=40),
    st.sampled_from([pa.int64(), pa.int32(), pa.float64(), pa.timestamp("ms"), pa.timestamp("s"), pa.timestamp("ns")]),
    st.integers(2, 5),
)
def test_no_row_is_lost_where_times_are_in_any_order(tmp_path_factory, times, kind, count):
    if pa.types.is_timestamp(kind):
        scale = {"s": 1, "ms": 1000, "ns": 10**9}[kind.unit]
        times = [None if time is None else time * 3000 * scale for time in times]
    log = by_time(tmp_path_factory.mktemp("log"), times, kind)
    results = []
    for split in ("train", "validation", "test"):
        whole = []
        with suppress(ValueError):  # there are none
            whole = numbers(log, split)
        local = [row for index in range(count) for row in numbers(log, split, shard=(index, count))]
        assert local == whole
        results += local
    assert sorted(results) == list(range(len(times)))


def test_numbers_of_rows_stay_those_of_the_split(logs):
    for kind in ("plain", "parquet"):
        log = reader(logs[kind, 300])
        initial = log.estimated_rows("train")
        numbers(log, shard=(0, 2))
        assert log.estimated_rows("train") == initial
        assert log.num_rows("train") is None


def test_row_groups_stay_whole_where_there_are_enough():
    parts = [Part(0, 0, None), Part(1, 0, 500)]
    ends = [*range(10, 501, 10), *range(510, 1001, 10)]
    results = [files.even_shard(parts, [500, 500], (index, 3), ends) for index in range(3)]
    assert results == [[Part(0, 0, 330)], [Part(0, 330, None), Part(1, 0, 170)], [Part(1, 170, 500)]]
    few = [files.even_shard([Part(0, 0, None)], [1000], (index, 2), [400, 1000]) for index in range(2)]
    assert few == [[Part(0, 0, 500)], [Part(0, 500, None)]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 80), st.data())
def test_runs_are_disjoint_and_complete(sizes, count, data):
    total = sum(sizes)
    ends = sorted(data.draw(st.sets(st.integers(1, total))) | set(itertools.accumulate(sizes)))
    parts = [Part(file, 5, None) for file in range(len(sizes))]
    rows = []
    for index in range(count):
        for part in files.even_shard(parts, sizes, (index, count), ends):
            stop = 5 + sizes[part.file] if part.stop is None else part.stop
            rows += [(part.file, row) for row in range(part.start, stop)]
    assert rows == [(file, 5 + row) for file, size in enumerate(sizes) for row in range(size)]


def test_whole_files_are_dealt_out_by_size():
    parts = [Part(file, 0, None) for file in range(5)]
    sizes = [10, 50, 20, 30, 10]
    results = [files.whole_file_shard(parts, sizes, (index, 2)) for index in range(2)]
    assert [[part.file for part in local] for local in results] == [[0, 1], [2, 3, 4]]


def test_packed_files_are_dealt_out_whole_if_there_are_enough(logs):
    log = reader(logs["packed files", 300])
    assert [len(numbers(log, shard=(index, 5))) for index in range(5)] == [60] * 5
    for index in range(6):
        assert {part.stripes for part in log._reader.shard("train", (index, 6)).parts["train"]} == {(index, 6)}


@pytest.mark.parametrize("shard", [(1, 1), (-1, 2), (0, 0), (0,), [0, 1], (0.0, 1), (False, 1), "01"])
def test_a_shard_that_is_none_is_refused(logs, shard):
    for data in (reader(logs["plain", 3]), make_synthetic(10, 50)):
        with pytest.raises(ValueError, match=re.escape("shard must be (index, count) with 0 <= index < count")):
            data.open("train", 4, shard=shard)


def test_shares_of_a_split_without_rows_end_at_once(tmp_path):
    log = reader(write(tmp_path, ["bad"] * 7))
    with log.open("train", 4, shard=(1, 2)) as stream:
        assert list(stream) == []
        position = stream.position
    with log.open("train", 4, shard=(1, 2), position=position) as stream:
        assert list(stream) == []
    parquet_log = tmp_path / "log.parquet"
    convert(write(tmp_path, numbered(2), "two.txt"), parquet_log)
    with reader(parquet_log).open("train", 4, shard=(0, 5)) as stream:
        assert list(stream) == []
        position = stream.position
    with reader(parquet_log).open("train", 4, shard=(0, 5), position=position) as stream:
        assert list(stream) == []
    with pytest.raises(ValueError, match="the position is in a file that is not in the train split"):
        reader(parquet_log).open("train", 4, shard=(0, 5), position=position | {"part": 1})
