"""Several labels per row, and row weights: from logs, data sets, workers and reader hosts to batches."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils import _pytree as pytree

from tritonemb.data import ClickLog, Dataset, Feature, LogOptions, RemoteData, Schema, from_dataframe, transform
from tritonemb.data.batch import Batch, Column, Rows, concat_rows, gather_batch, pad_batch
from tritonemb.data.convert import cached_as_parquet, convert
from tritonemb.data.loader import DataLoaderWorkers, open_shards
from tritonemb.data.open import ReaderHost, open_dataset
from tritonemb.data.schema import ALL_ROWS, SplitRule

NAN = math.nan
SCHEMA = Schema(labels=("buy", "like"), weight="w", dense=("x",), sparse=("user",), num_embeddings=50)
OPTIONS = LogOptions(schema=SCHEMA, split=ALL_ROWS, shuffle_rows=0)
COLUMNS = {
    "user": ["a", "b", "c", "d"], "buy": [1, None, 0, 1], "like": [None, 0, 1, 1], "w": [0.5, 2.0, 0.0, 1.0],
    "x": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip
LABELS, WEIGHTS = [[1, NAN], [NAN, 0], [0, 1], [1, 1]], [0.5, 2.0, 0.0, 1.0]


def csv(folder, text="user,buy,like,w,x\na,1,,0.5,1\nb,,0,2,2\nc,0,1,0,3\nd,1,1,1,4\n"):
    (folder / "log.csv").write_text(text)
    return folder / "log.csv"


def rows_of(data, split="train", batch_size=3, **kwargs):
    with data.open(split, batch_size, **kwargs) as stream:
        batches = list(stream)
    return torch.cat([batch.labels for batch in batches]), torch.cat([batch.weights for batch in batches])


def check(data, **kwargs):
    assert tuple(data.labels) == ("buy", "like")
    assert data.has_weights
    labels, weights = rows_of(data, **kwargs)
    np.testing.assert_array_equal(labels, LABELS)
    assert weights.tolist() == WEIGHTS


def test_csv_and_its_conversions_have_labels_with_nan_and_weights(tmp_path):
    log = ClickLog(csv(tmp_path), OPTIONS)
    check(log)
    check(cached_as_parquet(log, tmp_path / "cache"))
    convert(tmp_path / "log.csv", tmp_path / "log.parquet", OPTIONS)
    parquet = ClickLog(tmp_path / "log.parquet", OPTIONS)
    check(parquet)
    assert parquet.encoding == log.encoding
    assert (
        log.encoding
        != ClickLog(csv(tmp_path), replace(OPTIONS, schema=replace(SCHEMA, labels=("like", "buy")))).encoding
    )


def test_a_label_that_is_nan_is_missing_in_a_conversion_too(tmp_path):
    log = ClickLog(csv(tmp_path, "user,buy,like,w,x\na,1,NaN,0.5,1\nb,,0,2,2\nc,0,1,0,3\nd,1,1,1,4\n"), OPTIONS)
    check(log)
    check(cached_as_parquet(log, tmp_path / "cache"))


@transform(reads=["x"], makes=["like"])
def like_of_row(batch):
    likes = {1.0: None, 2.0: 0, 3.0: 1, 4.0: 1}
    return batch.append_column("like", pa.array([likes[x] for x in batch["x"].to_pylist()], pa.int8()))


def test_a_transform_makes_one_of_several_labels_beside_weights(tmp_path):
    """A row without the label of the log is good if it has that of the transform."""
    made = replace(OPTIONS, transforms=(f"{__name__}:like_of_row",))
    check(ClickLog(csv(tmp_path, "user,buy,w,x\na,1,0.5,1\nb,,2,2\nc,0,0,3\nd,1,1,4\n"), made))
    one = replace(made, schema=replace(SCHEMA, labels=(), label="like"))
    labels, weights = rows_of(ClickLog(csv(tmp_path, "user,w,x\nb,2,2\nc,0,3\nd,1,4\n"), one))
    assert (labels.tolist(), weights.tolist()) == ([0, 1, 1], [2, 0, 1])
    with pytest.raises(ValueError, match=r"\(w\)"):
        rows_of(ClickLog(csv(tmp_path, "user,w,x\nb,-2,2\nc,0,3\n"), one))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("synthetic", {"labels": ("a", "b")}), ("movielens-100k", {"weight": "w"}), ("adult", {"weight": "w"}),
        ("synthetic", {"label": "c", "sparse": ("a", "b"), "share": ("a=b",)}), ("movielens-100k", {"sizes": ("a=3",)}),
    ],
)  # fmt: skip
def test_a_named_data_set_does_not_ignore_roles_of_columns(name, options, tmp_path):
    with pytest.raises(ValueError, match=rf"data set '{name}' does not take {', '.join(options)}, for logs only"):
        open_dataset(name, tmp_path if name == "adult" else None, log=LogOptions(schema=Schema(**options)))
    with pytest.raises(ValueError, match="does not take split, follow, for logs only"):
        open_dataset("synthetic", log=LogOptions(split=SplitRule("random"), follow=True))


def test_data_frames_have_labels_of_several_types():
    table = pa.table(COLUMNS | {"like": pa.array([None, False, True, True])})
    check(from_dataframe(table, OPTIONS))
    one = replace(SCHEMA, labels=("buy",), weight="")
    assert one.label == "buy"
    with from_dataframe(table.filter(pa.array([True, False, True, True])), replace(OPTIONS, schema=one)).open(
        "train", 9
    ) as s:
        assert next(s).labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("buy", 2, r"buy.*0 or 1, or nothing"), ("w", -1.0, r"\bw\b.*finite number of 0 or more"),
        ("w", None, r"\bw\b.*finite number of 0 or more"), ("w", NAN, r"\bw\b.*finite number of 0 or more"),
        ("w", math.inf, r"\bw\b.*finite number of 0 or more"), ("like", None, "at least one of buy, like"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["csv", "table"])
def test_bad_labels_and_weights_are_named(tmp_path, form, column, value, expected):
    columns = {name: list(values) for name, values in COLUMNS.items()}
    columns[column][1] = value
    if form == "table":
        open_log = lambda: from_dataframe(pa.table(columns), OPTIONS)  # noqa: E731
    else:
        text = lambda v: "" if v is None else str(v)  # noqa: E731
        lines = [",".join(columns), *(",".join(map(text, row)) for row in zip(*columns.values(), strict=True))]
        open_log = lambda: ClickLog(csv(tmp_path, "\n".join(lines)), OPTIONS)  # noqa: E731
    with pytest.raises(ValueError, match=expected):
        rows_of(open_log())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"label": "a", "labels": ("b", "c")}, "only one of label and labels"),
        ({"labels": ("a", "a")}, "more than once"), ({"label": "a", "weight": "u"}, "more than once"),
    ],
)  # fmt: skip
def test_schema_checks_roles(options, expected):
    with pytest.raises(ValueError, match=expected):
        Schema(**options, sparse=("u",))
    with pytest.raises(ValueError, match="the schema's weight column"):
        from_dataframe(pa.table(COLUMNS).drop_columns("w"), OPTIONS)


def dataset(labels=LABELS, weights=WEIGHTS):
    rows = Rows(
        torch.arange(4.0)[:, None], (Column(torch.arange(4)),), torch.tensor(labels),
        None if weights is None else torch.tensor(weights),
    )  # fmt: skip
    return Dataset("d", (Feature("user", 4),), rows, rows, labels=("buy", "like"))


def test_datasets_gather_shuffle_and_check_labels():
    check(dataset())
    rows = dataset().train
    order = np.array([3, 0, 2])
    taken = concat_rows([rows.slice(0, 2), rows.slice(2, 4)], order)
    np.testing.assert_array_equal(taken.labels, np.array(LABELS)[order])
    assert taken.weights.tolist() == [1, 0.5, 0]
    for labels, weights, expected in (
        ([[NAN, NAN], *LABELS[1:]], WEIGHTS, "row 0 is"), ([[2, 0], *LABELS[1:]], WEIGHTS, "expected 0 or 1"),
        (LABELS, [-1.0, 1, 1, 1], "negative"), ([1.0, 0, 1, 0], WEIGHTS, r"expected \[4, 2\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=expected):
            dataset(labels, weights)


def test_batches_pack_pickle_pad_and_flatten():
    batch = gather_batch(dataset().train, ("user",), np.arange(4))
    assert batch.layout.num_bytes == batch.buffer.numel()
    for copy in (pickle.loads(pickle.dumps(batch)), replace(batch, buffer=None).packed(), batch.to("cpu")):
        np.testing.assert_array_equal(copy.labels, LABELS)
        assert copy.weights.tolist() == WEIGHTS
    leaves, spec = pytree.tree_flatten(batch)
    assert pytree.tree_unflatten(leaves, spec).weights is batch.weights
    padded = pad_batch(batch, 16)
    assert padded.labels[4:].isnan().all()
    np.testing.assert_array_equal(padded.label_weights()[:4], [[0.5, 0], [0, 2], [0, 0], [1, 1]])
    assert not padded.label_weights()[4:].any()
    one = Batch(batch.dense, batch.sparse, batch.labels[:, 0])
    assert one.label_weights() is None
    assert replace(one, weights=batch.weights).label_weights().tolist() == [0.5, 0, 0, 1]


@pytest.mark.more
def test_workers_and_reader_hosts_have_the_same_batches(tmp_path):
    log = ClickLog(csv(tmp_path), OPTIONS)
    with ReaderHost(log) as host:
        check(RemoteData(host.address, token=host.token))
    with DataLoaderWorkers(log, 1) as workers, open_shards(log, "train", 3, workers=workers) as stream:
        np.testing.assert_array_equal(torch.cat([batch.labels for batch in stream]), LABELS)
