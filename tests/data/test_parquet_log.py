import datetime
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.data.logs import contents, line, options, pa, parquet, resumes, rows_of, same
from tests.data.logs import write as write_lines
from tests.helpers import DEADLINE
from tritonemb.data import ClickLog, SplitRule, from_dataframe
from tritonemb.data.encode import feature_seed, hash_integers, hash_strings, hashes_to_ids

SCHEMA = {"label": "click", "dense": ("price",), "sparse": ("user",)}


def write(folder, name="log.parquet", row_group_size=None, **columns):
    table = {"click": [0, 1, 0], "price": [1.5, None, -2.0], "user": ["a", None, "b"]} | columns
    parquet.write_table(pa.table(table), folder / name, row_group_size=row_group_size)
    return folder / name


def ids(log, name="user"):
    return [bag for batch in log.open("train", 2) for bag in batch.sparse.to_lists()[name]]


def of_strings(*strings: str) -> list[list[int]]:
    raw = [string.encode() for string in strings]
    offsets = np.cumsum([0, *map(len, raw)])
    hashes = hash_strings(np.frombuffer(b"".join(raw), np.uint8), offsets, feature_seed("user"))
    return [[id] for id in hashes_to_ids(hashes, 100_000).tolist()]


def of_integers(*values: int) -> list[list[int]]:
    return [[id] for id in hashes_to_ids(hash_integers(np.array(values), feature_seed("user")), 100_000).tolist()]


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        (pa.array(["a", None, "bé"]), [*of_strings("a"), [0], *of_strings("bé")]),
        (pa.array(["a", None, "bé"], pa.large_string()), [*of_strings("a"), [0], *of_strings("bé")]),
        (pa.array([b"a", None, b"b"]), [*of_strings("a"), [0], *of_strings("b")]),
        (pa.array(["a", None, "a"]).dictionary_encode(), [*of_strings("a"), [0], *of_strings("a")]),
        (pa.array([5, None, -1]), [*of_integers(5), [0], *of_integers(-1)]),
        (pa.array([5, None, 0], pa.uint8()), [*of_integers(5), [0], *of_integers(0)]),
        (pa.array([2**64 - 1, None, 0], pa.uint64()), [*of_integers(-1), [0], *of_integers(0)]),
        (pa.array([True, None, False]), [*of_integers(1), [0], *of_integers(0)]),
        (pa.nulls(3), [[0], [0], [0]]),
        (pa.array(["", "", ""]), of_strings("", "", "")),
    ],
    ids=range(10),
)
def test_categories_of_every_kind(tmp_path, users, expected):
    assert ids(ClickLog(write(tmp_path, user=users), options(**SCHEMA))) == expected


@pytest.mark.parametrize(
    "tags",
    [
        pa.array([["a", "b"], None, ["a", None, "b"]]),
        pa.array([["a", "b"], [], ["a", None, "b"]], pa.large_list(pa.large_string())),
        pa.array([["a", "b"], [], ["a", None, "b"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    ],
    ids=range(3),
)
def test_lists_are_multi_hot(tmp_path, tags):
    (a,), (b,) = of_strings("a", "b")
    for row_group_size in (3, 1):
        log = ClickLog(write(tmp_path, row_group_size=row_group_size, user=tags), options(**SCHEMA))
        assert ids(log) == [[a, b], [], [a, 0, b]]
    assert log.features[0].multi_hot
    assert log.tables(4)[0].pooling == "mean"


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_file_without_a_value_has_empty_lists(tmp_path, order):
    for name, user in zip(order, ([["a"]] * 3, [None] * 3), strict=True):
        write(tmp_path, f"{name}.parquet", user=pa.array(user))
    log = ClickLog(tmp_path, options(**SCHEMA))
    lists = [[of_strings("a")[0][0]]] * 3, [[]] * 3
    assert ids(log) == [row for name in "ab" for row in lists[order.index(name)]]
    assert log.features[0].multi_hot


def test_lists_of_integers_shuffled_and_resumed(tmp_path):
    random = np.random.default_rng(0)
    bags = [random.integers(0, 50, random.integers(0, 6)).tolist() for _ in range(500)]
    users = pa.array(bags, pa.list_(pa.int16()))
    path = write(tmp_path, row_group_size=77, click=[0, 1] * 250, price=np.arange(500.0), user=users)
    log = ClickLog(path, options(**SCHEMA, log_transform=False, shuffle_rows=90, chunk_bytes=256 * 31))
    kwargs = {"shuffle": True, "seed": 4}
    whole = list(log.open("train", 16, **kwargs))
    for batch in whole:
        for row, bag in zip(batch.dense[:, 0].int().tolist(), batch.sparse.to_lists()["user"], strict=True):
            assert bag == [id for (id,) in of_integers(*bags[row])]
    assert sorted(torch.cat([batch.dense[:, 0] for batch in whole]).int().tolist()) == list(range(500))
    assert resumes(log, batch_size=16, after=11, **kwargs)


def test_small_dictionaries_of_a_file_are_hashed_instead_of_its_values(tmp_path):
    """The rows are those of the same columns as strings in memory, and a stream resumes inside a row group."""
    random = np.random.default_rng(0)
    few, many = ([None if n % 7 == 0 else f"{n:03x}" for n in random.integers(0, size, 500)] for size in (9, 1 << 30))
    columns = {"click": [0, 1] * 250, "price": [1.0] * 500, "user": few, "item": many, "list": [[v] for v in few]}
    path = write(tmp_path, row_group_size=170, **columns)
    how = options(label="click", dense=("price",), sparse=("user", "item", "list"), chunk_bytes=256 * 50)
    log, in_memory = ClickLog(path, how), from_dataframe(pa.table(columns), how)
    for kinds in ({}, {"user": "strings"}):
        assert same(log.read_as(kinds).open("train", 64), in_memory.open("train", 64))
    kinds = [[str(kind) for kind in block.rows.types] for block in log.scan("train", lambda batch: batch.schema)]
    dictionary = "dictionary<values=string, indices=int32, ordered=0>"
    assert set(map(tuple, kinds)) == {("int64", "double", dictionary, "string", "list<element: string>")}
    assert sum(batch.rows for batch in log.scan("train", lambda batch: batch.num_rows)) == 500
    stream, batches = log.open("train", 64), list(in_memory.open("train", 64))
    for batch in range(1, 7):
        next(stream)
        assert same(log.open("train", 64, position=stream.position), batches[batch:])
    # Columns that are read for other purposes remain strings.
    scored = ClickLog(path, how, extra_columns=("user",))
    assert {str(block.rows) for block in scored.scan("train", lambda batch: batch.column("user").type)} == {"string"}


def test_batches_and_positions_do_not_depend_on_the_number_of_threads(tmp_path):
    """Row groups have dictionaries of their own, where only some of the threads' batches end."""
    random = np.random.default_rng(0)
    users = [f"{number:03x}" for number in random.integers(0, 9, 500)]
    columns = {"click": [0, 1] * 250, "price": random.random(500), "user": users, "item": random.integers(0, 99, 500)}
    path = write(tmp_path, row_group_size=170, **columns)
    schema = {"label": "click", "dense": ("price",), "sparse": ("user", "item")}
    states = []
    for num_threads in (1, 2, 5):
        log = ClickLog(path, options(**schema, chunk_bytes=256 * 100, shuffle_rows=90, parser_threads=num_threads))
        with log.open("train", 30, shuffle=True) as stream:
            states.append([(batch.dense.tolist(), batch.sparse.to_lists(), dict(stream.position)) for batch in stream])
    assert states[0] == states[1] == states[2]
    assert len(states[0]) == 17


@pytest.mark.more
def test_reading_does_not_import_pandas_and_a_program_may_end_with_a_stream_open(tmp_path):
    """Threads that are at work when Python goes away can abort the process."""
    paths = [write(tmp_path), write_lines(tmp_path, [*[line()] * 2000, line(categories={1: "a", 2: ""}), "bad"])]
    schema = "label='click', dense=('price',), sparse=('user',)"
    program = f"""
import sys
from tritonemb.data import ClickLog, LogOptions, Schema, SplitRule
from tritonemb.data.schema import ALL_ROWS
streams = []
for path, schema, split in (
    ({str(paths[0])!r}, Schema({schema}), ALL_ROWS),
    ({str(paths[1])!r}, Schema(), SplitRule("random")),
):
    streams.append(ClickLog(path, LogOptions(schema, split, on_bad_row="skip")).open("train", 2))
    print(len(next(streams[-1])), "pandas" in sys.modules)
"""
    args = {"capture_output": True, "text": True, "timeout": DEADLINE, "env": os.environ | {"TRITONEMB_QUIET": "1"}}
    done = subprocess.run([sys.executable, "-c", program], **args)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["2", "False"] * 2, "")


def test_dictionaries_with_more_values_than_rows(tmp_path):
    users = pa.DictionaryArray.from_arrays([7, None, 2], pa.array([f"user {n}" for n in range(9)]))
    assert ids(ClickLog(write(tmp_path, user=users), options(**SCHEMA))) == [
        *of_strings("user 7"), [0], *of_strings("user 2"),
    ]  # fmt: skip


def test_numbers_of_every_kind(tmp_path):
    for prices, expected in (
        (pa.array([1.5, None, -2.0]), [1.5, 0, -2]),
        (pa.array([1.5, float("nan"), -2.0], pa.float32()), [1.5, 0, -2]),
        (pa.array([1, None, -2], pa.int8()), [1, 0, -2]),
        (pa.array([True, None, False]), [1, 0, 0]),
        (pa.nulls(3), [0, 0, 0]),
    ):
        log = ClickLog(write(tmp_path, price=prices), options(**SCHEMA))
        assert [row[1] for row in rows_of(log)] == expected
        path, logarithmic = write(tmp_path, price=prices), SCHEMA | {"log_transform": True}
        if min(expected) < 0:
            message = r"log.parquet, row 3: field 2 \(price\) is '-2(\.0)?', expected 0 or more under log_transform"
            with pytest.raises(ValueError, match=message):
                rows_of(ClickLog(path, options(**logarithmic)))
        log = ClickLog(path, options(**logarithmic, clamp_negative=True))
        assert [row[1] for row in rows_of(log)] == pytest.approx(np.log1p(np.maximum(expected, 0)))


@pytest.mark.parametrize("clicks", [[0, 1, 0], [0.0, 1.0, 0.0], [False, True, False]], ids=["int", "float", "bool"])
def test_labels_of_every_kind(tmp_path, clicks):
    assert [row[0] for row in rows_of(ClickLog(write(tmp_path, click=clicks), options(**SCHEMA)))] == [0, 1, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"click": [0, 2, 1]}, "row 2: field 1 (click) is '2', expected 0 or 1"),
        ({"click": [0, None, 1]}, "row 2: field 1 (click) is 'missing', expected 0 or 1"),
        ({"click": [0, 0.5, 1]}, "row 2: field 1 (click) is '0.5', expected 0 or 1"),
        ({"price": [0, float("inf"), 1]}, "row 2: field 2 (price) is 'inf', expected a finite number or nothing"),
        (
            {"price": [0, -1e300, float("nan")]},
            "row 2: field 2 (price) is '-1e+300', expected a number that fits float32",
        ),
        (
            {"price": [3.4028235e38, 3.4028236e38, 0]},
            "row 2: field 2 (price) is '3.4028236e+38', expected a number that fits float32",
        ),
    ],
)
def test_bad_rows(tmp_path, columns, message):
    path = write(tmp_path, **columns)
    with pytest.raises(ValueError, match="row 2") as caught:
        rows_of(ClickLog(path, options(**SCHEMA, chunk_bytes=256, log_transform=False)))
    assert str(caught.value) == f"{path}, {message}"
    log = ClickLog(path, options(**SCHEMA, on_bad_row="skip", log_transform=False))
    with log.open("train", 2) as stream:
        assert [len(batch) for batch in stream] == [2]
        assert stream.report.skipped == 1
        assert stream.report.problems == (f"{path}, {message}",)


def test_columns_must_be_named_and_of_a_kind_that_fits(tmp_path):
    path = write(tmp_path, when=[datetime.date(2014, 5, 1)] * 3, pair=[{"a": 1, "user": "x"}] * 3)
    with pytest.raises(ValueError, match=r"log.parquet: its columns are click, price, user, when, pair; they are not"):
        ClickLog(path, options())
    for schema, message in (
        ({"label": "clicks"}, "the schema's label column 'clicks' is missing; columns: click, price, user"),
        ({"dense": ("cost",)}, "the schema's dense column 'cost' is missing"),
        ({"dense": ("user",), "sparse": ("price",)}, "column 'user' is string, but a dense column has numbers"),
        ({"label": "when"}, "column 'when' is date32.*, but the label has numbers"),
        ({"dense": (), "sparse": ("price",)}, "column 'price' is double, but a sparse column has integers, strings or"),
        ({"sparse": ("pair",)}, "column 'pair' is struct.*, but a sparse column has integers"),
        ({"label": "pair"}, "column 'pair' is struct"),
        ({"dense": ("pair",)}, "column 'pair' is struct"),
    ):
        with pytest.raises(ValueError, match=rf"log.parquet: {message}"):
            ClickLog(path, options(**(SCHEMA | schema)))
    assert len(rows_of(ClickLog(path, options(**SCHEMA)))) == 3
    with pytest.raises(ValueError, match="is not a time of the time column, which is struct"):
        ClickLog(path, options(SplitRule(time_column="pair", test_from="3"), **SCHEMA))


def test_files_must_have_the_same_columns(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    write(folder, "a.parquet")
    parquet.write_table(pa.table({"click": [1], "price": [1.0]}), folder / "b.parquet")
    with pytest.raises(ValueError, match=r"b.parquet: the schema's sparse column 'user' is missing"):
        ClickLog(folder, options(**SCHEMA))
    write(folder, "b.parquet", user=[["a"]] * 3)
    with pytest.raises(ValueError, match=r"b.parquet: column .* has .* per row, but .* in .*a.parquet"):
        ClickLog(folder, options(**SCHEMA))


def test_large_numbers_have_logarithms(tmp_path):
    log = ClickLog(write(tmp_path, price=[1e300, 3.5, 0]), options(**SCHEMA, log_transform=("price",)))
    assert [row[1] for row in rows_of(log)] == pytest.approx(np.log1p([1e300, 3.5, 0]))


@pytest.mark.parametrize("log_transform", [False, True])
def test_large_unsigned_numbers_stay_positive(tmp_path, log_transform):
    prices = pa.array([2**63, 5, 2**64 - 1], pa.uint64())
    log = ClickLog(write(tmp_path, price=prices), options(**SCHEMA, log_transform=log_transform))
    expected = np.array([2.0**63, 5, 2.0**64])
    assert [row[1] for row in rows_of(log)] == pytest.approx(np.log1p(expected) if log_transform else expected)


@pytest.mark.parametrize(
    ("first", "second"), [([1, 2, 3], ["1", "2", "3"]), (["1", "2", "3"], [1, 2, 3]), ([["1"]] * 3, [[1]] * 3)]
)
def test_a_column_with_integers_here_and_strings_there_is_refused(tmp_path, first, second):
    paths = [write(tmp_path, "a.parquet", user=first), write(tmp_path, "c.parquet", user=second)]
    if not isinstance(first[0], list):
        paths.insert(1, write(tmp_path, "b.parquet", user=pa.nulls(3)))  # fits both
        ClickLog(paths[:2], options(**SCHEMA))
    kinds = ("integers", "strings") if isinstance(np.ravel(first)[0], str) else ("strings", "integers")
    with pytest.raises(ValueError, match=rf"c.parquet: column 'user' has {kinds[0]}, but {kinds[1]} in .*a.parquet; "):
        ClickLog(paths, options(**SCHEMA))


@pytest.mark.parametrize("twice", ["click", "price", "user", "when"])
def test_a_column_that_is_there_twice_is_refused(tmp_path, twice):
    columns = {"click": [0, 1, 0], "price": [1.5, None, -2.0], "user": ["a", None, "b"], "when": [1, 2, 3]}
    table = pa.table([*map(pa.array, columns.values()), pa.array(columns[twice])], names=[*columns, twice])
    parquet.write_table(table, tmp_path / "log.parquet")
    rule = SplitRule(time_column="when", test_from="3")
    with pytest.raises(ValueError, match=rf"log.parquet: there are 2 columns '{twice}'; rename all but one"):
        ClickLog(tmp_path / "log.parquet", options(rule, **SCHEMA))
    if twice == "when":  # nobody reads it
        assert len(rows_of(ClickLog(tmp_path / "log.parquet", options(**SCHEMA)))) == 3


def test_damaged_files_are_refused(tmp_path):
    good = write(tmp_path, user=["abc"] * 3).read_bytes()
    for content in (good[:-9], b"PAR1" + b"x" * 100, good[:4] + b"\xff" * 40 + good[44:]):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"bad.parquet is not a complete Parquet file \(.*\); write or fetch it again"
        ):
            rows_of(ClickLog(tmp_path / "bad.parquet", options(**SCHEMA, on_bad_row="skip")))
    (tmp_path / "bad.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"bad.parquet is empty"):
        ClickLog(tmp_path / "bad.parquet", options(**SCHEMA))
    parquet.write_table(pa.table({"click": pa.array([], pa.int8())}), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad.parquet is empty: it has no rows"):
        ClickLog(tmp_path / "bad.parquet", options(**SCHEMA))


def test_files_without_rows_beside_others_have_none(tmp_path):
    """As Spark writes them, with columns of nulls, too."""
    folder = tmp_path / "log"
    folder.mkdir()
    empty = {"click": pa.array([], pa.int8()), "price": pa.nulls(0), "user": pa.nulls(0)}
    for number in range(4):
        write(folder, f"part-{number}.parquet", **({} if number % 2 else empty))
    log = ClickLog(folder, options(**SCHEMA))
    assert len(rows_of(log)) == 6
    assert sum(len(rows_of(log, shard=(index, 3))) for index in range(3)) == 6
    assert len(rows_of(ClickLog(folder, options(SplitRule(test_share=0.5), **SCHEMA)), "test")) == 3
    held_out = SplitRule(test_files=(str(folder / "part-2.parquet"),))
    with pytest.raises(ValueError, match="log: the files of the test split have no rows"):
        ClickLog(folder, options(held_out, **SCHEMA))


def test_decimals_and_views_are_numbers_and_strings(tmp_path):
    prices = pa.array([None, "1.25", "-3.00"]).cast(pa.decimal128(12, 2))
    users = pa.array(["7", None, "-8"]).cast(pa.decimal128(18, 0))
    labels = pa.array(["1", "0", "1"]).cast(pa.decimal128(1, 0))
    path = write(tmp_path, click=labels, price=prices, user=users)
    expected = ClickLog(
        write(tmp_path, "same.parquet", click=[1, 0, 1], price=[None, 1.25, -3.0], user=[7, None, -8]),
        options(**SCHEMA),
    )
    assert rows_of(ClickLog(path, options(**SCHEMA))) == rows_of(expected)
    with pytest.raises(ValueError, match="column 'user' is double, but a sparse column has integers, strings or lists"):
        ClickLog(write(tmp_path, user=prices), options(**SCHEMA))
    views = write(tmp_path, user=pa.array(["a", None, "a string too long to be inlined"], pa.string_view()))
    assert ids(ClickLog(views, options(**SCHEMA))) == [
        *of_strings("a"),
        [0],
        *of_strings("a string too long to be inlined"),
    ]


def test_large_row_groups_are_read_in_slices(tmp_path):
    num_rows = 150_000
    path = write(tmp_path, click=[0, 1] * 75_000, price=np.arange(num_rows), user=["u"] * num_rows)
    log = ClickLog(path, options(SplitRule(), **SCHEMA))
    sizes = [len(block.rows) for block in log.scan("train", log.encode)]
    assert sum(sizes) == log.num_rows("train") == 125_000
    assert max(sizes) <= 65_536
    assert contents(next(log.open("test", 1)))[0].item() == 125_000
