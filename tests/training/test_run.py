"""A run that is loaded: scores, metrics and rows of tables, the same from every kind of rows."""

from __future__ import annotations

import csv
import gc
import json
import random
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.helpers import fewer
from tests.programs import start_ranks
from tritonemb.cli import main
from tritonemb.data import LogOptions, Schema, from_dataframe
from tritonemb.data.batch import Batch, gather_batch, pad_batch
from tritonemb.data.encode import encode, make_numberings
from tritonemb.data.files import pa, parquet
from tritonemb.data.protocol import Feature
from tritonemb.data.requests import RequestEncoder
from tritonemb.serving.commands import EvaluateOptions, PredictOptions, evaluate, predict
from tritonemb.storage.checkpoint import write_manifest
from tritonemb.training.callbacks.jsonl import read_run_log
from tritonemb.training.checkpoint import CheckpointFolder, read_manifest
from tritonemb.training.metrics import best_threshold, calibration_of, probabilities

COLUMNS = ("--label", "click", "--dense", "price", "age", "--sparse", "user", "item", "tags")
SMALL = (
    "--embedding-dim", 8, "--bottom-mlp", 16, "--top-mlp", 16, "--batch-size", 64, "--embedding-lr", 0.2,
    "--list-separator", "|", "--lists", "tags", "--integers", "item", "--epochs", 1,
)  # fmt: skip


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def make_rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Rows with missing values of every kind, whose label depends on the user."""
    chance, rows = random.Random(seed), list[dict[str, object]]()
    for _ in range(count):
        user = chance.randrange(40)
        rows.append({
            "click": int(chance.random() < 0.15 + 0.7 * (user % 2)),
            "price": round(chance.random() * 50, 2) if chance.random() > 0.1 else None,
            "age": chance.randrange(80),
            "user": f"ü{user}" if chance.random() > 0.05 else None,
            "item": chance.randrange(-5, 30) if chance.random() > 0.05 else None,
            "tags": [chance.choice("abc") for _ in range(chance.randrange(4))],
        })  # fmt: skip
    return rows


def write_csv(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({**row, "tags": "|".join(row["tags"])})  # type: ignore[arg-type]
    return path


def frame_of(rows: list[dict[str, object]]) -> object:
    return pa.Table.from_pylist([{**row, "tags": row["tags"] or None} for row in rows])


KINDS = {
    "static": (),
    "dynamic": ("--dynamic", "--num-embeddings", 500),
    "host": ("--placement", "host", "--placed-rows", 0, "--cache-rows", 60),
    "disk": ("--placement", "disk", "--placed-rows", 0, "--cache-rows", 60),
    "servers": ("--servers", 2, "--staleness", 1),
    "sharded": ("--exchange", "fp32"),  # an evaluation on ranks rounds embeddings otherwise
}


PARAMS = [pytest.param(kind, marks=pytest.mark.more if kind == "servers" else ()) for kind in KINDS]


@pytest.fixture(scope="module", params=PARAMS)
def trained(request, tmp_path_factory, ranks) -> tuple[Path, list[dict[str, object]]]:
    folder, rows, kind = tmp_path_factory.mktemp("run"), make_rows(600), request.param
    data = write_csv(folder / "clicks.csv", rows)
    options = ["train", "--data", data, "--out", folder / "run", *COLUMNS, *SMALL, *KINDS[kind]]
    if kind == "disk":
        options += ["--cache-folder", folder / "tables"]
    if kind == "sharded":
        for status, text in [rank.finish() for rank in start_ranks(2, "tritonemb", *map(str, options))]:
            assert status == 0, text
    else:
        assert run(*options) == 0
    return folder, rows


def test_a_row_has_the_same_score_wherever_it_comes_from(trained, tmp_path):
    folder, rows = trained
    loaded_run = te.load_run(folder / "run")
    scores = loaded_run.predict(folder / "clicks.csv")
    assert scores.dtype == np.float32
    assert len(np.unique(scores)) > 100
    requests = [{name: value for name, value in row.items() if name != "click"} for row in rows]
    assert np.array_equal(loaded_run.predict(requests), scores)
    assert np.array_equal(loaded_run.predict(frame_of(rows)), scores)
    texts = [{**row, "user": row["user"] or ""} for row in rows]  # a text file has no empty strings
    assert np.array_equal(loaded_run.predict(frame_of(texts)), scores)
    parquet.write_table(frame_of(rows), tmp_path / "clicks.parquet")
    assert np.array_equal(loaded_run.predict(str(tmp_path / "clicks.parquet"), batch_size=37), scores)
    assert [loaded_run.predict(row) for row in requests[:40]] == scores[:40].tolist()
    missing = [{**row, "user": None, "tags": None} for row in requests[:2]]  # whole columns, so Arrow has no types
    assert np.array_equal(loaded_run.predict(pa.Table.from_pylist(missing)), loaded_run.predict(missing))
    out = tmp_path / "scores.parquet"
    predict(PredictOptions(checkpoint=folder / "run", data=str(folder / "clicks.csv"), out=out))
    assert parquet.read_table(out)["score"].to_pylist() == scores.tolist()
    # Text of another form than in training.
    text = (folder / "clicks.csv").read_text("utf-8").replace(",", ";").replace("|", "&")
    (tmp_path / "clicks.txt").write_text(text, "utf-8")
    options = {"checkpoint": folder / "run", "delimiter": ";", "list_separator": "&"}
    predict(PredictOptions(**options, data=str(tmp_path / "clicks.txt"), out=out))
    assert parquet.read_table(out)["score"].to_pylist() == scores.tolist()
    metrics = json.loads(evaluate(EvaluateOptions(**options, data=str(tmp_path / "clicks.txt"), json=True)))
    assert metrics["auc"] == loaded_run.evaluate(folder / "clicks.csv").auc
    with pytest.raises(ValueError, match="delimiter, list_separator: no effect without data"):
        evaluate(EvaluateOptions(**options))


def discounted(batch: object) -> object:
    price = pa.array([None if price is None else price * 0.9 for price in batch["price"].to_pylist()], pa.float64())
    return batch.set_column(batch.schema.get_field_index("price"), "price", price)


def test_a_checkpoint_does_not_select_the_code_that_transforms_rows(tmp_path, capsys):
    rows, out, name = make_rows(150), tmp_path / "run", f"{__name__}:discounted"
    log = write_csv(tmp_path / "log.csv", rows)
    assert run("train", "--data", log, *COLUMNS, *SMALL, "--transforms", name, "--out", out) == 0
    scored = te.load_run(out, transforms=[name])
    expected = scored.predict(log)
    assert np.array_equal(scored.predict(rows), expected)
    assert np.array_equal(scored.predict(frame_of(rows)), expected)
    assert scored.predict(rows[0]) == expected[0]
    missing = {**rows[0], "price": None, "user": None, "tags": None}
    assert scored.predict(missing) == scored.predict([missing, rows[1]])[0]
    with pytest.raises(ValueError, match=r"Arrow cannot represent the values of the rows' columns .*too large"):
        scored.predict({**rows[0], "item": 1 << 70})
    with pytest.raises(ValueError, match="row 2: missing columns: user; the row has"):
        scored.predict([rows[0], {name: value for name, value in rows[1].items() if name != "user"}])
    with pytest.raises(ValueError, match=f"was trained with the transform '{name}', code that it must not"):
        te.load_run(out)
    capsys.readouterr()
    assert run("evaluate", out, "--data", log) == 2
    assert "or --transforms to a command" in capsys.readouterr().err
    assert run("evaluate", out, "--data", log, "--transforms", name) == 0
    assert run("plan", "--from-run", out) == 2
    assert "trained with transforms" in capsys.readouterr().err


def test_metrics_are_those_that_the_run_has_reported(trained):
    folder, rows = trained
    loaded_run = te.load_run(folder / "run")
    assert loaded_run.evaluate() == loaded_run.evaluate(frame_of(rows[-100:]))
    start, *_, end = read_run_log(folder / "run" / "log.jsonl")
    reported, metrics = end["test"], loaded_run.evaluate()
    for name in ("auc", "num_samples", "best_threshold", "best_f1"):
        assert getattr(metrics, name) == reported[name]
    # On two ranks a list's embeddings of a row-wise table are summed rank by rank, which rounds otherwise.
    tolerance = 1e-8 if start["num_ranks"] > 1 else 0
    for name in ("log_loss", "normalized_entropy"):
        assert getattr(metrics, name) == pytest.approx(reported[name], rel=tolerance, abs=0)
    assert metrics.auc > 0.7


def test_weights_of_rows_count_as_in_training(tmp_path):
    rows = [{**row, "sales": 1 + number % 7} for number, row in enumerate(make_rows(150))]
    log = write_csv(tmp_path / "log.csv", rows)
    assert run("train", "--data", log, *COLUMNS, *SMALL, "--weight", "sales", "--out", tmp_path / "run") == 0
    loaded_run, reported = te.load_run(tmp_path / "run"), read_run_log(tmp_path / "run" / "log.jsonl")[-1]["test"]
    metrics, unweighted = loaded_run.evaluate(), loaded_run.evaluate(frame_of([{**r, "sales": 1} for r in rows[-25:]]))
    assert (metrics.auc, metrics.log_loss) == (reported["auc"], reported["log_loss"])
    assert metrics.log_loss != unweighted.log_loss


def test_test_rows_of_changed_data_are_not_evaluated(tmp_path):
    rows = make_rows(150)
    log = write_csv(tmp_path / "log.csv", rows)
    log.write_text(log.read_text(encoding="utf-8") + "bad\nbad\n", encoding="utf-8")
    options = *COLUMNS, *SMALL, "--epochs", 2, "--on-bad-row", "skip"
    assert run("train", "--data", log, *options, "--out", tmp_path / "run") == 0  # reads a Parquet cache
    te.export(te.load_run(tmp_path / "run"), tmp_path / "exported")
    for folder in ("run", "exported"):
        assert te.load_run(tmp_path / folder).evaluate().num_skipped == 2
    write_csv(log, rows[::-1])
    for folder in ("run", "exported"):
        loaded_run = te.load_run(tmp_path / folder)
        with pytest.raises(ValueError, match=r"the data have changed since .*: log\.csv was .* may have been trained"):
            loaded_run.evaluate()
        assert loaded_run.evaluate(log).num_samples == 150


@pytest.mark.more
def test_the_test_rows_of_an_older_run_are_numbered_by_line(tmp_path):
    rows = make_rows(200)
    log = write_csv(tmp_path / "log.csv", rows)
    options = "--split-by", "random", "--out", tmp_path / "run"
    assert run("train", "--data", log, *COLUMNS, *SMALL, *options) == 0
    checkpoint = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()
    manifest = read_manifest(checkpoint)
    current = te.load_run(tmp_path / "run").evaluate()
    write_manifest(checkpoint, {name: value for name, value in manifest.items() if name != "data"})
    loaded_run = te.load_run(tmp_path / "run")
    te.export(loaded_run, tmp_path / "exported")
    older = te.data.open_dataset(str(log), log=loaded_run.options.read)
    older.number_by_line()
    num_rows = sum(map(len, older.open("test", 1_000)))
    metrics = loaded_run.evaluate()
    assert metrics.num_samples == num_rows != current.num_samples
    assert te.load_run(tmp_path / "exported").evaluate() == metrics


def test_rows_of_tables_are_read_by_id(trained):
    folder, _ = trained
    loaded_run = te.load_run(folder / "run")
    ids = torch.tensor([3, 1, 3])
    rows = loaded_run.tables["user"].lookup(ids)
    assert rows.shape == (3, 8)
    assert torch.equal(rows[0], rows[2])
    for wrong in ([3.0, 1.7], np.array([3.0, np.nan]), torch.tensor([True])):
        with pytest.raises(TypeError, match="ids must be integers, got torch"):
            loaded_run.tables["user"].lookup(wrong)
    assert loaded_run.tables["user"].lookup([]).shape == (0, 8)
    table = loaded_run.model.embeddings["user"]
    if loaded_run.tables["user"].config.is_dynamic:
        known = table.ids()[:5]
        assert torch.equal(loaded_run.tables["user"].lookup(known), table.lookup(known))
    elif loaded_run.tables["user"].config.placement == "device":
        assert torch.equal(rows, table.weight[ids])
        with pytest.raises(ValueError, match="user"):
            loaded_run.tables["user"].lookup([10**6])
        loaded_run.model = te.quantize(loaded_run.model, "int4")
        decoded = loaded_run.model.embeddings["user"].dequantize()[ids]
        assert torch.equal(loaded_run.tables["user"].lookup(ids), decoded)
        assert not torch.equal(decoded, rows)


def test_what_cannot_be_encoded_is_named(trained):
    row = {"price": 1.0, "age": 3, "user": "ü1", "item": 2, "tags": ["a"]}
    loaded_run = te.load_run(trained[0] / "run")
    for change, message in (
        ({"price": "cheap"}, r"row 2: column 'price' is 'cheap', expected a number or nothing"),
        ({"price": float("inf")}, r"row 2: column 'price' is 'inf', expected a finite number or nothing"),
        ({"user": 5}, r"row 2: column 'user' is '5', expected a string or nothing, as in training"),
        ({"item": "x"}, r"row 2: column 'item' is 'x', expected an integer or nothing, as in training"),
        ({"item": 1.5}, r"row 2: column 'item' is '1.5', expected an integer, a string or nothing"),
        ({"tags": "a"}, r"row 2: column 'tags' is 'a', expected a list of values, or nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded_run.predict([row, row | change])
    with pytest.raises(
        ValueError, match=r"row 1: missing columns: age, user; the row has .* pass None for a missing value"
    ):
        loaded_run.predict({name: value for name, value in row.items() if name not in ("user", "age")})
    assert loaded_run.predict(row | {"item": "2", "other": object()}) == loaded_run.predict(row)
    assert loaded_run.predict(row | {"age": "3", "price": "1e0"}) == loaded_run.predict(row)  # as CSV has them
    assert loaded_run.predict(row | {"age": ""}) == loaded_run.predict(row | {"age": None})
    for wrong in (3, None, np.zeros(2), [row, None]):
        with pytest.raises(TypeError, match=r"expected the path of a log, or a data frame .* a dictionary"):
            loaded_run.predict(wrong)
    with pytest.raises(FileNotFoundError, match="no such folder; expected the folder of a run"):
        te.load_run(trained[0] / "none")


def test_a_row_of_pandas_is_scored_as_a_dictionary(trained):
    pandas = pytest.importorskip("pandas")
    folder, rows = trained
    run = te.load_run(folder / "run")
    row = {name: value for name, value in rows[0].items() if name != "click"}
    assert run.predict(pandas.Series(row)) == run.predict(row)
    user = np.array(["12"])[0]  # a string of NumPy, which NumPy would parse as an integer
    assert run.predict(row | {"user": user, "tags": np.array(["3"])}) == run.predict(
        row | {"user": "12", "tags": ["3"]}
    )


def test_raw_values_lead_to_rows_of_tables(trained):
    run = te.load_run(trained[0] / "run")
    ids = run.ids("user", ["ü3", None, "ü4"])
    assert run.tables["user"].lookup(ids).shape == (3, 8)
    encoded = run.encoder([{"price": 1, "age": 1, "user": "ü4", "item": 1, "tags": []}])
    assert ids[2] == encoded.sparse["user"].values()[0]
    with pytest.raises(ValueError, match=r"unknown feature 'usr'; .*did you mean 'user'\?"):
        run.ids("usr", ["a"])
    assert repr(run).startswith("Run(")


def data_and_model(placement: str = "device") -> tuple[Any, Callable[[], torch.nn.Module]]:
    schema = Schema("click", ("price", "age"), ("user", "item", "tags"), num_embeddings=100)
    data = from_dataframe(frame_of(make_rows(400)), LogOptions(schema=schema))
    tables = [replace(table, placement=placement) for table in data.tables(8)]
    return data, lambda: te.nn.DLRM(tables, 2, (16,), (16,), optimizer=te.optim.RowWiseAdagrad(lr=0.1))


def test_a_run_of_a_trainer_is_loaded_with_its_model(tmp_path):
    data, make_model = data_and_model()
    trainer = te.Trainer(make_model(), data, folder=tmp_path / "run", batch_size=50, verbose=False)
    trainer.fit()
    with pytest.raises(ValueError, match=r"has no model config .not written by `tritonemb train`..*model=\.\.\."):
        te.load_run(tmp_path / "run")
    loaded_run = te.load_run(tmp_path / "run", model=make_model)
    test_rows = frame_of(make_rows(400)).slice(400 - len(trainer.predict()))
    assert np.array_equal(loaded_run.predict(test_rows), trainer.predict("test").numpy())
    assert loaded_run.evaluate(test_rows).auc == trainer.evaluate().auc


def test_rows_are_read_from_the_servers_of_a_run(tmp_path):
    data, make_model = data_and_model("server")
    frame, initial = frame_of(make_rows(100, seed=1)), set(threading.enumerate())
    with te.server.start(2) as servers:
        trainer = te.Trainer(
            make_model(), data, folder=tmp_path / "run", batch_size=50, verbose=False, servers=servers, staleness=1
        )
        trainer.fit()
        live = te.load_run(tmp_path / "run", model=make_model, servers=servers)
        scores = live.predict(frame)
        assert np.array_equal(scores, te.load_run(tmp_path / "run", model=make_model()).predict(frame))
        steps = servers.statistics()[0]["collections"]["embeddings"]["steps"]
        # The trainer goes on; the reader sees its rows, and has taken nothing from it.
        trainer.fit()
        assert servers.statistics()[0]["collections"]["embeddings"]["steps"] == 2 * steps
        now = torch.cat([table.lookup(torch.arange(100)) for table in live.tables.values()])
        rows = trainer.model.state_dict()
        assert torch.equal(now, torch.cat([rows[f"embeddings.{name}.weight"] for name in live.tables]))
        assert not np.array_equal(live.predict(frame), scores)
        with data.open("train", 50) as batches:
            batch = next(batches)
        with pytest.raises(ValueError, match="are read-only here: they are read from embedding servers"):
            live.model.train()(batch.dense, batch.sparse)
        with (
            te.server.start(2) as other_servers,
            pytest.raises(ValueError, match="2 embedding servers do not have tables"),
        ):
            te.load_run(tmp_path / "run", model=make_model, servers=other_servers)
    # Nothing goes on behind a run that is no more, not even where it had the checkpoint's rows in a thread.
    gc.collect()
    for thread in set(threading.enumerate()) - initial:
        thread.join(timeout=60)
        assert not thread.is_alive(), thread


@settings(max_examples=fewer(60, 15))
@given(
    texts=st.lists(st.one_of(st.none(), st.text(max_size=20)), min_size=1, max_size=5),
    integers=st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=5, max_size=5),
    lists=st.lists(st.one_of(st.none(), st.lists(st.text(max_size=9), max_size=3)), min_size=5, max_size=5),
    numbers=st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)), min_size=5, max_size=5),
    dynamic=st.booleans(),
    logarithmic=st.booleans(),
)
def test_requests_are_encoded_as_rows_of_a_log(texts, integers, lists, numbers, dynamic, logarithmic):
    schema = Schema("y", ("n",), ("s", "i", "l"), logarithmic, 1_000, dynamic=dynamic, clamp_negative=True)
    columns = {"n": numbers, "s": texts, "i": integers, "l": lists}
    rows = [dict(zip(columns, row, strict=False)) for row in zip(*columns.values(), strict=False)]
    kinds = {"n": pa.float64(), "s": pa.string(), "i": pa.int64(), "l": pa.list_(pa.string())}
    table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()})
    features = tuple(Feature(n, 1_000, n == "l", dynamic, "integers" if n == "i" else "strings") for n in "sil")
    log = te.data.open_for_scoring(table, LogOptions(schema=schema), features)
    (block,) = log.scan("test", log.encode)
    encoded = RequestEncoder(schema, features, make_numberings(schema))(rows)
    expected = gather_batch(block.rows, ("s", "i", "l"), slice(0, len(rows)))
    assert torch.equal(encoded.dense, expected.dense)
    assert encoded.sparse.keys() == expected.sparse.keys()
    assert torch.equal(encoded.sparse.values(), expected.sparse.values())
    assert torch.equal(encoded.sparse.offsets(), expected.sparse.offsets())


def test_empty_bytes_are_missing_in_requests_as_in_logs_of_a_model_of_text():
    schema = Schema("y", (), ("s", "i"), num_embeddings=99)
    features = Feature("s", 99, kind="strings"), Feature("i", 99, kind="integers")
    columns, numberings = {"s": [b"", b"a"], "i": [b"", b"7"]}, make_numberings(schema)
    expected = encode(pa.RecordBatch.from_pydict(columns), schema, features, numberings, False, from_text=True).columns
    encoder = RequestEncoder(schema, features, numberings, from_text=True)
    assert [encoder.ids(*column).tolist() for column in columns.items()] == [ids.values.tolist() for ids in expected]


@pytest.mark.parametrize("size", [1, 5, 16, 17])
def test_padding_repeats_the_first_sample_without_its_label_with_one_id_per_bag(size):
    lengths = (torch.arange(2 * size) + 2) % 3  # of the first bags: 2; 0, 1 or 2
    sparse = te.KeyedJaggedTensor(["a", "b"], torch.arange(int(lengths.sum())), lengths=lengths)
    batch = Batch(torch.randn(size, 2), sparse, torch.arange(float(size)))
    full = pad_batch(batch, 16)
    assert len(full) == (16 if size <= 16 else 32)
    assert torch.equal(full.labels[:size], batch.labels)
    assert full.labels[size:].isnan().all()
    assert torch.equal(full.dense, torch.cat([batch.dense, batch.dense[:1].expand(len(full) - size, -1)]))
    for key in ("a", "b"):
        bags = sparse.to_lists()[key]
        assert full.sparse.to_lists()[key] == bags + [bags[0][:1]] * (len(full) - size)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=12))
def test_the_best_threshold_has_the_largest_f1_of_all(pairs):
    pairs = sorted(pairs, key=lambda pair: pair[0])
    logits = torch.tensor([float(logit) for logit, _ in pairs], dtype=torch.float64)
    labels = torch.tensor([float(label) for _, label in pairs], dtype=torch.float64)
    threshold, f1 = best_threshold(logits, labels, torch.ones_like(labels))

    def f1_at(chosen: torch.Tensor) -> float:
        total = float(chosen.sum() + labels.sum())
        return 2 * float(labels[chosen].sum()) / total if total else 0.0

    assert f1 == pytest.approx(max(f1_at(logits >= logit) for logit in logits.unique()), rel=1e-12)  # sums of float64
    assert f1_at(probabilities(logits).double() >= threshold) == pytest.approx(f1, rel=1e-12)


def test_the_best_threshold_has_its_f1_on_the_scores_that_are_returned():
    """These are float32, so that one may be less than its probability, and two logits may have one score."""
    for logits in (torch.linspace(-3, 3, 60).double(), torch.tensor([0.0, 20, 21, 22]).double()):
        labels = (torch.arange(len(logits)) % 3 > 0).double()
        for cut in range(len(logits) - 1):
            rows = slice(cut, None)
            threshold, f1 = best_threshold(logits[rows], labels[rows], torch.ones_like(labels[rows]))
            clicked = labels[rows][probabilities(logits[rows]).double() >= threshold]
            expected = 2 * float(clicked.sum()) / (len(clicked) + float(labels[rows].sum()))
            assert f1 == pytest.approx(expected, rel=1e-12)  # sums of float64


def test_a_calibration_curve_has_ten_parts_of_all_rows():
    logits, labels = torch.arange(25.0, dtype=torch.float64) / 5, (torch.arange(25) % 2).double()
    parts = calibration_of(logits, labels, torch.ones_like(labels))
    assert [size for size, _, _ in parts] == [3] * 5 + [2] * 5
    assert [rate for _, _, rate in parts][:2] == [pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert [score for _, score, _ in parts] == sorted(score for _, score, _ in parts)
    assert parts[0][1] == pytest.approx(float(logits[:3].sigmoid().mean()))


def test_an_export_scores_as_its_run(trained, tmp_path, capsys):
    folder, rows = trained
    assert run("export", folder / "run", "--out", tmp_path / "export") == 0
    assert re.search(r"export: .* for tritonemb, [\d,]+ bytes", capsys.readouterr().out)
    original, exported = te.load_run(folder / "run"), te.load_run(tmp_path / "export")
    requests = [{**row, "user": f"new{number}"} if number % 3 == 0 else row for number, row in enumerate(rows)]
    assert np.array_equal(exported.predict(requests), original.predict(requests))
    assert exported.evaluate() == original.evaluate()
    assert torch.equal(*(loaded.tables["user"].lookup([3, 1, 3]) for loaded in (original, exported)))
