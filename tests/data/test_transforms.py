"""Transforms change the columns of a log before rows are encoded: the same in every format, process and batch size."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import compute, parquet
from pyarrow import csv as arrow_csv

from tests.data.logs import ALL_TRAIN, options, random_lines, resumes, same, write
from tritonemb.data import ClickLog, LogOptions, Schema, SplitRule, convert, open_for_scoring, transform
from tritonemb.data.loader import DataLoaderWorkers, open_shards
from tritonemb.data.parquet import file_of_frame

HERE = "tests.data.test_transforms"
NUM_ROWS = 900
TABLE = pa.table({
    "click": np.arange(NUM_ROWS) % 2, "price": np.arange(NUM_ROWS) * 0.5, "views": np.arange(NUM_ROWS) % 7 + 1,
    "user": [f"u{row % 13}" for row in range(NUM_ROWS)], "stars": np.arange(NUM_ROWS) % 5 + 1,
})  # fmt: skip


def halved(batch):
    return batch.set_column(batch.schema.get_field_index("price"), "price", compute.divide(batch["price"], 2.0))


def raised(batch):
    return batch.set_column(batch.schema.get_field_index("price"), "price", compute.add(batch["price"], 1.0))


@transform(reads=["views"], makes=["ratio", "segment"])
def ratio(batch):
    views = batch["views"].cast(pa.float64())
    batch = batch.append_column("ratio", compute.divide(batch["price"], views))
    return batch.append_column("segment", compute.cast(compute.floor(compute.divide(batch["price"], 10.0)), pa.int64()))


@transform(reads=["stars"], makes=["good"])
def label_of_stars(batch):
    return batch.append_column("good", compute.greater_equal(batch["stars"].cast(pa.int64()), 4))


@transform(reads=["price"], makes=["late"])
def late_lists(batch):
    return batch.append_column(
        "late", pa.array([["a", "b"] if price > 400 else None for price in batch["price"].to_pylist()])
    )


def centred(batch):
    index = batch.schema.get_field_index("price")
    return batch.set_column(index, "price", compute.subtract(batch["price"], compute.mean(batch["price"])))


def infinite(batch):
    price = compute.if_else(compute.equal(batch["price"], 3.5), float("inf"), batch["price"])
    return batch.set_column(batch.schema.get_field_index("price"), "price", price)


def failing(batch):
    if compute.any(compute.equal(batch["price"], 400.0)).as_py():
        raise KeyError("no such price")
    return batch


def shortened(batch):
    return batch.slice(1)


def listed(batch):
    return batch.to_pylist()


def with_transforms(*names, schema=None, **changes):
    schema = schema or Schema("click", dense=("price",), sparse=("user",), num_embeddings=100)
    names = tuple(f"{HERE}:{name}" for name in names)
    return LogOptions(schema, ALL_TRAIN, transforms=names, parser_threads=2, **changes)


DERIVED = Schema("click", dense=("price", "ratio"), sparse=("user", "segment"), num_embeddings=100)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    parquet.write_table(TABLE, folder / "log.parquet", row_group_size=200)
    arrow_csv.write_csv(TABLE, folder / "log.csv")
    return folder


def test_results_are_those_of_a_log_that_has_the_columns(logs, tmp_path):
    price = np.arange(NUM_ROWS) * 0.5
    expected = TABLE.append_column("ratio", pa.array(price / (np.arange(NUM_ROWS) % 7 + 1)))
    expected = expected.append_column("segment", pa.array((price // 10).astype(np.int64)))
    parquet.write_table(expected, tmp_path / "expected.parquet")
    plain = ClickLog(tmp_path / "expected.parquet", with_transforms(schema=DERIVED))
    for name in ("log.parquet", "log.csv"):
        log = ClickLog(logs / name, with_transforms("ratio", schema=DERIVED, chunk_bytes=1000))
        assert log.features == plain.features
        assert log.features[1].kind == "integers"
        assert same(log.open("train", 64, shuffle=True, seed=3), plain.open("train", 64, shuffle=True, seed=3))
        assert log.encoding != plain.encoding


def test_transforms_run_in_their_order(logs):
    def first_prices(*names):
        with ClickLog(logs / "log.parquet", with_transforms(*names)).open("train", 3) as stream:
            return next(stream).dense[:, 0].tolist()

    assert first_prices("halved", "raised") == [1.0, 1.25, 1.5]
    assert first_prices("raised", "halved") == [0.5, 0.75, 1.0]


def test_a_label_may_be_made(logs):
    schema = Schema("good", dense=("price",), sparse=("user",))
    for name in ("log.parquet", "log.csv"):
        with ClickLog(logs / name, with_transforms("label_of_stars", schema=schema)).open("train", 5) as stream:
            assert next(stream).labels.tolist() == [0, 0, 0, 1, 1]


def test_shards_workers_positions_and_chunks_do_not_matter(logs):
    log = ClickLog(logs / "log.parquet", with_transforms("ratio", schema=DERIVED, shuffle_rows=100))
    other = ClickLog(log.files[0], replace(log.options, chunk_bytes=5_000, parser_threads=1))
    assert resumes(log, batch_size=30, after=5, other=other, shuffle=True)


@pytest.mark.more
def test_workers_run_transforms(logs):
    log = ClickLog(logs / "log.parquet", with_transforms("ratio", schema=DERIVED))
    with DataLoaderWorkers(log, 1) as workers, open_shards(log, "train", 30, workers=workers) as stream:
        assert same(stream, log.open("train", 30))


def test_errors_name_function_file_and_rows(logs):
    texts = {
        "log.parquet": r"log.parquet, row 701 to row 800: KeyError: 'no such price'",
        "log.csv": r"log.csv, line \d+ to line \d+: KeyError: 'no such price'",
    }
    for name, text in texts.items():
        with pytest.raises(ValueError, match=rf"transform {HERE}:failing, .*{text}"):
            list(ClickLog(logs / name, with_transforms("raised", "failing", chunk_bytes=25_600)).open("train", 8))
    wrong = {
        "shortened": "row 1 to row 256: ValueError: expected 256 rows, got 255",
        "listed": "row 1 to row 256: TypeError: expected a pyarrow.RecordBatch, got a list",
    }
    for name, text in wrong.items():
        with pytest.raises(ValueError, match=rf"transform {HERE}:{name}, .*log.parquet, {text}"):
            ClickLog(logs / "log.parquet", with_transforms(name))


def test_a_row_must_not_depend_on_its_batch(logs):
    with pytest.raises(ValueError, match=rf"transforms {HERE}:centred: a row's result depends on other rows"):
        ClickLog(logs / "log.parquet", with_transforms("centred"))


def test_values_are_checked_after_transforms(logs):
    with pytest.raises(
        ValueError, match=r"log.parquet, row 8: .*price\) is 'inf', expected a finite .*after transforms"
    ):
        list(ClickLog(logs / "log.parquet", with_transforms("infinite")).open("train", 8))
    rows = TABLE.set_column(0, "click", pa.array([2.0 if row == 3 else row % 2 for row in range(NUM_ROWS)]))
    parquet.write_table(rows, logs / "bad.parquet")
    with ClickLog(logs / "bad.parquet", with_transforms("infinite", on_bad_row="skip")).open("train", 64) as stream:
        assert sum(map(len, stream)) == NUM_ROWS - 2
        first, second = stream.report.problems
        assert "row 4: field 1 (click) is '2.0', expected 0 or 1" in first
        assert "row 8: field 2 (price) is 'inf', expected a finite number or nothing after transforms" in second
        assert [reason.partition(": ")[2] for reason, _ in stream.report.reasons] == [
            "column click is not 0 or 1", "column price is not a finite number or nothing after transforms",
        ]  # fmt: skip


def test_names_are_checked(logs):
    with pytest.raises(ValueError, match=rf"transform '{HERE}:halvd' must be MODULE:FUNCTION, .*did you mean 'halved'"):
        ClickLog(logs / "log.parquet", with_transforms("halvd"))
    for name, text in {"no_such_module:f": "No module named", "math:pi": "math has no function 'pi'"}.items():
        with pytest.raises(ValueError, match=text):
            ClickLog(logs / "log.parquet", replace(with_transforms(), transforms=(name,)))
    schema = Schema("click", dense=("price", "rtio"), sparse=("user",))
    with pytest.raises(ValueError, match=r"column 'rtio' is missing"):
        ClickLog(logs / "log.parquet", with_transforms("ratio", schema=schema))
    narrow = pa.Table.from_pylist([{"click": 1, "price": 1.0, "user": "a"}])
    with pytest.raises(ValueError, match="column 'views' is missing"):
        open_for_scoring(narrow, with_transforms("ratio", schema=DERIVED), ())


def test_splits_see_the_rows_of_the_file(logs):
    rule = SplitRule(time_column="price", test_from="300")
    schema = Schema("click", dense=("views",), sparse=("user",))
    log = ClickLog(logs / "log.parquet", replace(with_transforms("halved", schema=schema), split=rule))
    assert [sum(map(len, log.open(split, 64))) for split in ("train", "test")] == [600, 300]


def test_scoring_transforms_rows_without_labels_too(logs):
    read = with_transforms("ratio", schema=DERIVED)
    log = ClickLog(logs / "log.parquet", read)
    scored = open_for_scoring(TABLE.drop_columns(["click"]), read, log.features)
    for batch, expected in zip(scored.open("test", 100), log.open("train", 100), strict=True):
        assert batch.dense.equal(expected.dense)
        assert batch.sparse.values().equal(expected.sparse.values())


def test_lists_after_rows_without_a_type_are_an_error_unless_a_model_has_lists():
    read = with_transforms("late_lists", schema=Schema("click", dense=("price",), sparse=("late",), num_embeddings=100))
    read = replace(read, chunk_bytes=1 << 14)
    log = ClickLog({"train": file_of_frame(TABLE, "frame")}, read)
    (feature,) = log.features
    assert not feature.multi_hot
    text = "column 'late' has a list per row, but one value in the features: the first rows have no type"
    with pytest.raises(ValueError, match=text):
        list(log.open("train", 100))
    scored = open_for_scoring(TABLE, read, [replace(feature, multi_hot=True, kind="strings")])
    lengths = np.concatenate([batch.sparse.lengths().numpy() for batch in scored.open("test", 100)])
    assert lengths.tolist() == [2 * (row * 0.5 > 400) for row in range(NUM_ROWS)]


def test_text_with_transforms_is_read_as_it_is(tmp_path):
    log = ClickLog(write(tmp_path, random_lines(50)), options(transforms=(f"{HERE}:unchanged",)))
    assert same(log.open("train", 8), ClickLog(log.files[0], options()).open("train", 8))
    assert log.text_schema() is None
    convert(log.files[0], tmp_path / "copy.parquet", log.options)
    assert same(ClickLog(tmp_path / "copy.parquet", log.options).open("train", 8), log.open("train", 8))


def unchanged(batch):
    return batch
