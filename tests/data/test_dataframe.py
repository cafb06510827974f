"""Data frames by Arrow's C stream interface: the rows of a Parquet file with the same columns."""

import pytest
import torch

pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")

from tests.data.logs import ALL_TRAIN, options, pa, parquet, random_lines, resumes, rows_of, same, write  # noqa: E402
from tritonemb.data import ClickLog, Schema, SplitRule, build_vocabulary, from_dataframe  # noqa: E402

SCHEMA = {"label": "click", "dense": ("price",), "sparse": ("user", "item")}
COLUMNS = {
    "click": [0, 1] * 50,
    "price": [None if row % 7 == 0 else row / 3 for row in range(100)],
    "user": [None if row % 5 == 0 else f"user number {row % 11}" for row in range(100)],
    "item": [row * row for row in range(100)],
    "time": list(range(100)),
}


class Stream:
    """Nothing but the interface."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def frames():
    table = pa.table(COLUMNS)
    halves = pa.concat_tables([table.slice(0, 33), table.slice(33)])
    categories = pandas.DataFrame(COLUMNS).astype({"user": "category"})
    views = polars.DataFrame(COLUMNS).with_columns(polars.col("user").cast(polars.Categorical))
    return {
        "pandas": pandas.DataFrame(COLUMNS),
        "pandas categories": categories,
        "polars": polars.DataFrame(COLUMNS),
        "polars categories": views,
        "arrow": halves,
        "interface": Stream(table),
    }


def test_strings_are_read_as_those_of_a_text_file(tmp_path):
    lines = [line.decode() for line in random_lines(50)]
    log = ClickLog(write(tmp_path, lines), options())
    fields = list(zip(*(line.split("\t") for line in lines), strict=True))
    texts = dict(zip(log.schema.sparse, map(list, fields[14:]), strict=True))
    numbers = {
        name: [int(n) if n else None for n in column]
        for name, column in zip(log.schema.dense, fields[1:14], strict=True)
    }
    for kind in (pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        columns = {name: pa.array(values).cast(kind) for name, values in texts.items()}
        rows = log.encode(pa.RecordBatch.from_pydict(numbers | columns), labelled=False, from_text=True)
        batch = next(iter(log.open("train", 50)))
        assert [column.values.tolist() for column in rows.columns] == batch.sparse.values().view(26, 50).tolist()
        assert torch.equal(rows.dense, batch.dense)
    columns |= {"cat_3": pa.array(["12"] * 49 + ["x"])}
    with pytest.raises(ValueError, match="column 'cat_3' is 'x', expected up to 8 hexadecimal digits or nothing"):
        log.encode(pa.RecordBatch.from_pydict(numbers | columns), labelled=False, from_text=True)


@pytest.fixture
def log(tmp_path):
    parquet.write_table(pa.table(COLUMNS), tmp_path / "log.parquet")
    return lambda rule=ALL_TRAIN: ClickLog(tmp_path / "log.parquet", options(rule, **SCHEMA, shuffle_rows=30))


@pytest.mark.parametrize("kind", list(frames()))
@pytest.mark.parametrize(
    "rule",
    [
        SplitRule(),
        SplitRule(split_by="random", validation_share=0.2),
        SplitRule(time_column="time", validation_from="60", test_from="80"),
    ],
    ids=["end", "random", "time"],
)
def test_rows_are_those_of_parquet(log, kind, rule):
    actual, expected = from_dataframe(frames()[kind], options(rule, **SCHEMA, shuffle_rows=30)), log(rule)
    assert actual.encoding == expected.encoding
    assert actual.splits() == expected.splits()
    for split in expected.splits():
        assert actual.num_rows(split) == expected.num_rows(split)
        assert same(actual.open(split, 8, shuffle=True), expected.open(split, 8, shuffle=True))
        shards = [rows_of(actual, split, shard=(index, 3)) for index in range(3)]
        assert sorted(row for shard in shards for row in shard) == sorted(rows_of(expected, split))


def test_lists_of_strings_are_multi_hot(tmp_path):
    columns = {"click": [0, 1], "tags": [["a", "b"], []]}
    logs = [
        from_dataframe(frame, options(label="click", sparse=("tags",)))
        for frame in (polars.DataFrame(columns), pa.table(columns))
    ]
    assert logs[0].features[0].multi_hot
    assert same(*(log.open("train", 2) for log in logs))


def test_a_stream_goes_on_at_its_position(log):
    result = from_dataframe(polars.DataFrame(COLUMNS), options(ALL_TRAIN, **SCHEMA, shuffle_rows=30, chunk_bytes=2000))
    assert resumes(result, after=6, shuffle=True)
    assert same(result.open("train", 8, shuffle=True), log().open("train", 8, shuffle=True))


def test_held_out_frames(log):
    frame = polars.DataFrame(COLUMNS)
    result = from_dataframe(frame[:60], options(SplitRule(), **SCHEMA), validation=frame[60:80], test=frame[80:])
    everything = rows_of(log())
    assert result.splits() == ("train", "validation", "test")
    assert [rows_of(result, split) for split in result.splits()] == [
        everything[:60],
        everything[60:80],
        everything[80:],
    ]
    assert from_dataframe(frame[:60], options(SplitRule(), **SCHEMA), test=frame[80:]).splits() == ("train", "test")


@pytest.mark.parametrize("integer", ["int64", "Int64", "category"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_strings_of_integers_are_scored_as_the_integers_that_were_trained(integer, dynamic):
    frame = pandas.DataFrame(COLUMNS)[["click", "price", "item", "user"]]
    kwargs = options(ALL_TRAIN, **SCHEMA, dynamic=dynamic)
    trained = from_dataframe(frame.astype({"item": integer}), kwargs)
    kinds = {feature.name: feature.kind for feature in trained.features}
    assert kinds == {"user": "strings", "item": "integers"}
    strings = from_dataframe(frame.astype({"item": str}), kwargs)
    assert not same(strings.open("train", 64), trained.open("train", 64))
    for texts in (frame["item"].astype(str), frame["item"].astype(str).astype("category")):
        scored = from_dataframe(frame.assign(item=texts), kwargs).read_as(kinds)
        assert same(scored.open("train", 64), trained.open("train", 64))
    large = ["-9223372036854775808", "9223372036854775807"]
    scored = from_dataframe(pandas.DataFrame({"click": [0, 1], "price": [0, 1], "user": "u", "item": large}), kwargs)
    numbers = from_dataframe(
        pandas.DataFrame({"click": [0, 1], "price": [0, 1], "user": "u", "item": list(map(int, large))}), kwargs
    )
    assert same(scored.read_as(kinds).open("train", 2), numbers.open("train", 2))
    for value in ("", "1.0", "0x10", " 1", "9223372036854775808", "1\n"):
        bad = from_dataframe(frame.assign(item=[*texts[:-1].astype(str), value]), kwargs)
        expected = r"data frame, row 1, or a later row: feature 'item' was trained with integers, has .*string '"
        with pytest.raises(ValueError, match=expected):
            rows_of(bad.read_as(kinds))
    with pytest.raises(ValueError, match="feature 'user' was trained with strings, has int64 '0'"):
        rows_of(from_dataframe(frame.assign(user=range(100)), kwargs).read_as(kinds))


def test_strings_are_looked_up_in_a_vocabulary_of_integers(tmp_path):
    frame = pandas.DataFrame(COLUMNS)[["click", "price", "item", "user"]]
    build_vocabulary(from_dataframe(frame, options(ALL_TRAIN, **SCHEMA)), tmp_path / "v.parquet")
    kwargs = options(ALL_TRAIN, **SCHEMA, vocabulary=tmp_path / "v.parquet")
    trained = from_dataframe(frame, kwargs)
    scored = from_dataframe(frame.astype({"item": str}), kwargs).read_as({"item": "integers"})
    assert same(scored.open("train", 64), trained.open("train", 64))


def test_mistakes_are_named():
    with pytest.raises(TypeError, match=r"options must be LogOptions\(schema=...\), got a Schema"):
        from_dataframe(polars.DataFrame(COLUMNS), Schema(**SCHEMA))
    frame = polars.DataFrame(COLUMNS)
    bad = frame.with_columns(click=polars.Series([0] * 99 + [2]))
    with pytest.raises(ValueError, match=r"clicks, row 100: field 1 \(click\) is '2', expected 0 or 1"):
        rows_of(from_dataframe(bad, options(**SCHEMA), name="clicks"))
    for wrong, kwargs, message in (
        ([1, 2], {}, "data frame: list is not a data frame with the method __arrow_c_stream__"),
        (frame[:0], {}, "data frame is empty: it has no rows"),
        (frame.drop("user"), {}, "data frame: the schema's sparse column 'user' is missing; columns: click, price"),
        (
            frame.with_columns(user=0.5),
            {},
            r"column 'user' is double, but .* or lists; if these are integers: df..user...astype\(.Int64.\) in pandas",
        ),
        (frame, {"test": frame.drop("item")}, r"data frame \(test\): the schema's sparse column 'item' is missing"),
        (frame, {"test": frame, "options": options(SplitRule(split_by="random"), **SCHEMA)}, "another split rule than"),
        (frame, {"options": options(SplitRule(split_by="files"), **SCHEMA)}, "give held-out data frames, or another"),
        (pandas.DataFrame({"click": [1, "a"]}), {}, "Arrow cannot represent its columns"),
        (pandas.DataFrame({"click": [1, 1 << 70]}), {}, "data frame: Arrow cannot represent its columns .*too large"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), {}, "data frame: Arrow cannot represent its columns .*Dupli"),
    ):
        with pytest.raises(ValueError, match=message):
            from_dataframe(wrong, **({"options": options(SplitRule(), **SCHEMA)} | kwargs))
