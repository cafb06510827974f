"""The command line: each command on small data, its help, its errors."""

import contextlib
import csv
import errno
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")

import torch

from tests.helpers import Calls, resealed
from tritonemb import cli
from tritonemb.cli import main
from tritonemb.data import open_dataset
from tritonemb.training import CheckpointError, binary_metrics
from tritonemb.training.checkpoint import load_tensors
from tritonemb.training.checkpoint.manager import CheckpointManager
from tritonemb.training.config import TrainConfig
from tritonemb.training.metrics import predict_logits
from tritonemb.training.model import build_model
from tritonemb.training.toml import from_plain, load_toml
from tritonemb.training.train_state import model_tensors

SMALL = ["--batch-size", "128", "--embedding-dim", "4", "--bottom-mlp", "8", "--top-mlp", "8", "--num-embeddings", "50"]
COMMANDS = sorted(cli.COMMANDS)


@pytest.fixture(scope="module")
def shared_log(tmp_path_factory) -> Path:
    """1,200 rows in Criteo's format whose label is mostly whether category 1 is even."""
    chance = random.Random(0)
    lines = []
    for _ in range(1_200):
        category = chance.randrange(20)
        label = (category + (chance.random() < 0.1)) % 2
        integers = [str(chance.randrange(50)) if chance.random() < 0.9 else "" for _ in range(13)]
        lines.append("\t".join([str(label), *integers, *[f"{category:08x}"] * 26]))
    path = tmp_path_factory.mktemp("log") / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def log(shared_log, tmp_path) -> Path:
    """One that the test may change."""
    return Path(shutil.copy(shared_log, tmp_path))


@pytest.fixture(scope="module")
def trained(shared_log, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder of a run that no test changes, and the lines that it has printed."""
    folder, output = tmp_path_factory.mktemp("trained") / "run", io.StringIO()
    with contextlib.redirect_stdout(output):
        assert run("train", "--data", shared_log, "--out", folder, "--epochs", 3, "--embedding-lr", 0.2, *SMALL) == 0
    return folder, output.getvalue().splitlines()


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_a_run_from_the_command_line_prints_its_quality(trained):
    folder, lines = trained
    auc, log_loss, entropy, speed = lines[-4:]
    assert float(re.fullmatch(r"test AUC +(0\.\d{4})", auc)[1]) > 0.8
    assert re.fullmatch(r"log loss +0\.\d{4}", log_loss)
    assert re.fullmatch(r"normalized entropy +0\.\d{4}", entropy)
    assert re.fullmatch(r"samples/s +[\d,]+  \(training took \d+\.\d s\)", speed)
    retained = {path.name for path in folder.iterdir()} - {".lock"}
    assert retained == {"cache", "checkpoints", "config.toml", "log.jsonl", "report.html"}


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "log"]


def test_the_effective_configuration_is_saved_and_gives_the_same_run(log, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--seed", 3, "--table-decay", "cosine", "--table-decay-steps", 8, "--max-steps", 8, "--log-every", 1]
    assert run("train", "--data", log, "--out", first, *options, *SMALL) == 0
    assert run("train", "--config", first / "config.toml", "--out", second) == 0
    assert losses(first) == losses(second)
    assert len(losses(first)) == 8
    assert (first / "config.toml").read_text() == (second / "config.toml").read_text().replace("second", "first")


def test_flags_win_over_the_file_and_the_file_over_the_preset(log, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f'data = "{log}"\nbatch_size = 64\nmax_steps = 3\nlog_every = 1\n')
    out = tmp_path / "run"
    options = [option for option in SMALL if option not in ("--batch-size", "128")]
    assert run("train", "--config", tmp_path / "run.toml", "--max-steps", 2, "--out", out, *options) == 0
    assert len(losses(out)) == 2
    text = (out / "config.toml").read_text()
    assert "batch_size = 64" in text
    assert "embedding_lr = 0.02" in text  # of criteo-kaggle


def test_resume_goes_on_and_without_it_nothing_is_overwritten(log, tmp_path, capsys):
    out = tmp_path / "run"
    base = ["train", "--data", log, "--out", out, "--log-every", 1, *SMALL]
    assert run(*base, "--max-steps", 3, "--resume", "auto") == 0
    assert run(*base, "--max-steps", 5) == 2
    assert "holds a run with step-3; resume it (--resume auto) or choose another folder" in capsys.readouterr().err
    assert run(*base, "--max-steps", 5, "--resume", "auto") == 0
    assert run("train", "--data", log, "--out", tmp_path / "once", "--log-every", 1, "--max-steps", 5, *SMALL) == 0
    assert losses(out) == losses(tmp_path / "once")


def test_resume_auto_without_a_folder_takes_the_newest_run_of_the_data(log, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ["train", "--data", log, "--log-every", 1, *SMALL]
    assert run(*base, "--max-steps", 2) == 0
    assert run(*base, "--max-steps", 4, "--resume", "auto") == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(losses(folder)) == 4
    for steps, resumed in ((5, folder / "checkpoints" / "step-4"), (6, folder)):
        assert run(*base, "--max-steps", steps, "--resume", resumed) == 0
        assert len(losses(folder)) == steps


def test_predict_scores_every_row_in_order(trained, log, tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    out, _ = trained
    assert run("predict", "--checkpoint", out, "--data", log, "--out", tmp_path / "scores.parquet") == 0
    assert "1,200 scores by" in capsys.readouterr().out
    scores = parquet.read_table(tmp_path / "scores.parquet")["score"].to_pylist()
    labels = [int(line[0]) for line in log.read_text().splitlines()]
    assert len(scores) == 1_200
    ones = [score for score, label in zip(scores, labels, strict=True) if label]
    zeros = [score for score, label in zip(scores, labels, strict=True) if not label]
    assert sum(ones) / len(ones) > sum(zeros) / len(zeros) + 0.2
    assert run("predict", "--checkpoint", out, "--data", log, "--out", tmp_path / "scores.csv", "--batch-size", 7) == 0
    texts = (tmp_path / "scores.csv").read_text().splitlines()
    assert [float(text) for text in texts[1:]] == pytest.approx(scores, abs=1e-6)
    assert {path.name for path in tmp_path.iterdir()} == {"scores.csv", "scores.parquet", "train.txt"}
    retained = tmp_path / "kept.parquet"
    assert run("predict", "--checkpoint", out, "--data", log, "--out", retained, "--keep", "cat_2", "label") == 0
    table, fields = parquet.read_table(retained), [line.split("\t") for line in log.read_text().splitlines()]
    assert table.column_names == ["cat_2", "label", "score"]
    assert table["label"].to_pylist() == labels
    assert table["cat_2"].to_pylist() == [int(field[15], 16) for field in fields]
    assert table["score"].to_pylist() == pytest.approx(scores, abs=1e-6)
    unlabelled = tmp_path / "test.txt"
    unlabelled.write_text("".join(line.partition("\t")[2] + "\n" for line in log.read_text().splitlines()))
    assert run("predict", "--checkpoint", out, "--data", unlabelled, "--out", retained, "--keep", "label") == 2
    assert "test.txt: column 'label' is missing; columns: int_1," in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.few(1)
def test_predict_keeps_columns_of_the_log(kind, tmp_path, capsys):
    """Strings and numbers, used by the model or not, in the order of the rows, however training reads the log."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = 800
    columns = {
        "request": [f'{row:04d}, "a"' for row in range(rows)],
        "click": [row % 2 for row in range(rows)],
        "price": [row / 4 if row % 5 else None for row in range(rows)],
        "item": [f"i{row % 7}" for row in range(rows)],
        "user": [row % 11 for row in range(rows)],
        "when": list(range(rows)),
    }
    data, table = tmp_path / f"log.{kind}", arrow.table(columns)
    pytest.importorskip("pyarrow.csv").write_csv(table, data) if kind == "csv" else parquet.write_table(table, data)
    reading = ("--chunk-bytes", 3_000, "--parser-threads", 3, "--split-by", "random", "--on-bad-row", "skip")
    schema = ("--label", "click", "--dense", "price", "--sparse", "item", "user", "--integers", "user")
    assert run("train", "--data", data, *schema, *reading, "--max-steps", 2, "--out", tmp_path / "run", *SMALL) == 0
    config = tmp_path / "run" / "config.toml"
    assert "\nnum_workers = 0\n" in config.read_text()
    config.write_text(config.read_text().replace("\nnum_workers = 0\n", "\nnum_workers = 1\n"))
    predict = ("predict", "--checkpoint", tmp_path / "run", "--data", data, "--batch-size", 64)
    names = ["when", "request", "price", "item", "user"]
    assert run(*predict, "--out", tmp_path / "scores.parquet", "--keep", *names) == 0
    assert run(*predict, "--out", tmp_path / "scores.csv", "--keep", *names) == 0
    retained = parquet.read_table(tmp_path / "scores.parquet")
    expected = columns | ({"when": list(map(str, columns["when"]))} if kind == "csv" else {})
    assert retained.select(names).to_pydict() == {name: expected[name] for name in names}
    with (tmp_path / "scores.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["request"] for line in lines] == columns["request"]
    assert [line["when"] for line in lines] == list(map(str, range(rows)))
    assert [float(line["score"]) for line in lines] == pytest.approx(retained["score"].to_pylist(), abs=1e-6)
    assert run(*predict, "--out", tmp_path / "alone.parquet") == 0
    assert parquet.read_table(tmp_path / "alone.parquet")["score"].equals(retained["score"])
    capsys.readouterr()
    for names, message in (
        (["users"], "columns: request, click, price, item, user, when; did you mean 'user'?"),
        (["score"], "keep must name each column once, and not 'score', got ['score']"),
        (["item", "item"], "keep must name each column once"),
    ):
        assert run(*predict, "--out", tmp_path / "no.csv", "--keep", *names) == 2
        assert message in capsys.readouterr().err
    data.with_name("bad.csv").write_text("request,click,price,item,user,when\na,0,1,b,2,3\na,0,x,b,2,3\n")
    bad = ("predict", "--checkpoint", tmp_path / "run", "--data", tmp_path / "bad.csv", "--keep", "when")
    assert run(*bad, "--out", tmp_path / "no.csv") == 2
    assert "bad.csv, line 3: field 3 (price) is 'x', expected a number" in capsys.readouterr().err
    data.with_name("bad.csv").write_text("request,click,price,item,user,when\n")
    assert run(*bad, "--out", tmp_path / "no.csv") == 2
    assert "has no rows to score" in capsys.readouterr().err
    assert not (tmp_path / "no.csv").exists()


def test_columns_that_a_file_cannot_hold_are_named(tmp_path, capsys):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"click": [0, 1] * 50, "item": [["a"], ["b", "c"]] * 50, "user": ["x", "y"] * 50})
    parquet.write_table(table, tmp_path / "log.parquet")
    schema = ("--label", "click", "--sparse", "item", "user", "--max-steps", 1)
    assert run("train", "--data", tmp_path / "log.parquet", *schema, "--out", tmp_path / "run", *SMALL) == 0
    options = ("--checkpoint", tmp_path / "run", "--data", tmp_path / "log.parquet", "--keep", "item")
    assert run("predict", *options, "--out", tmp_path / "scores.csv") == 2
    error = capsys.readouterr().err
    assert "scores.csv: these columns cannot be written in this format (" in error
    assert "; a .csv file cannot have lists, a .parquet file can" in error
    assert not (tmp_path / "scores.csv").exists()
    assert run("predict", *options, "--out", tmp_path / "scores.parquet") == 0
    assert parquet.read_table(tmp_path / "scores.parquet")["item"].to_pylist() == table["item"].to_pylist()


def test_a_log_without_numbers_trains_the_default_model(tmp_path, capsys):
    chance = random.Random(0)
    rows = [(chance.randrange(9), chance.randrange(9), chance.choice("ab")) for _ in range(900)]
    lines = [f"u{user},i{item},{context},{user % 2}" for user, item, context in rows]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,context,clicked", *lines]) + "\n")
    columns = ["--label", "clicked", "--sparse", "user", "item", "context"]
    options = ["--epochs", 8, "--embedding-lr", 0.2, "--dense-lr", 0.01, *SMALL]
    assert run("train", "--data", tmp_path / "clicks.csv", *columns, "--out", tmp_path / "run", *options) == 0
    auc = re.search(r"^test AUC +(\d\.\d{4})", capsys.readouterr().out, flags=re.MULTILINE)
    assert float(auc[1]) > 0.9
    scores = tmp_path / "scores.csv"
    assert run("predict", "--checkpoint", tmp_path / "run", "--data", tmp_path / "clicks.csv", "--out", scores) == 0
    assert len(scores.read_text().splitlines()) == 901


def test_the_best_checkpoint_is_reported_beside_the_last_model(log, tmp_path, capsys):
    """What predict takes has the metrics that are reported."""
    options = ["--validation-share", 0.2, "--epochs", 6, "--embedding-lr", 3, "--patience", 1, *SMALL]
    assert run("train", "--data", log, "--out", tmp_path / "run", *options) == 0
    out = capsys.readouterr().out
    (best,) = re.findall(r"^test  step (\d+)  AUC 0\.\d{4}  log loss (\d+\.\d{4})  normalized .*\(best\)$", out, re.M)
    last = re.search(r"^log loss +(\d+\.\d{4})$", out, re.M)[1]
    assert best[1] != last
    (retained,) = (tmp_path / "run" / "checkpoints").glob("best-*")
    assert retained.name == f"best-{best[0]}"
    config = from_plain(load_toml(tmp_path / "run" / "config.toml"), TrainConfig(), "")
    data = open_dataset(str(log), log=config.read)
    model = build_model(config, data.features, data.num_dense)
    load_tensors(retained, model_tensors(model), ignore=("optimizer.", "rng.", "trainer."))
    with data.open("test", 128) as stream:
        result = binary_metrics(*predict_logits(model, stream, torch.device("cpu")))
    assert f"{result.log_loss:.4f}" == best[1]


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure(log, tmp_path, capsys, monkeypatch):
    def fails(*_, **__):
        raise CheckpointError("checkpoint of step 3 could not be written: no room")

    monkeypatch.setattr(CheckpointManager, "start", fails)
    assert run("train", "--data", log, "--out", tmp_path / "run", "--max-steps", 3, *SMALL) == 1
    captured = capsys.readouterr()
    assert "test AUC" in captured.out
    assert captured.err.splitlines()[-1] == "error: checkpoint of step 3 could not be written: no room"


@pytest.mark.parametrize("kind", ["train", "vocab"])
def test_a_folder_that_cannot_be_written_is_a_mistake(kind, log, tmp_path, capsys, monkeypatch):
    """Like a read-only one, which root could write to."""
    (tmp_path / "file").write_text("")
    if kind == "train":
        folder = tmp_path / "file" / "cache"
        options = ["--placement", "disk", "--placed-rows", 10, "--cache-folder", folder, "--out", tmp_path / "run"]
        assert run("train", "--data", log, "--max-steps", 1, *options, *SMALL) == 2
        assert f"cannot create its file in folder {folder}" in capsys.readouterr().err
        return

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/read/only")

    monkeypatch.setattr(os, "replace", read_only)
    assert run("vocab", "--data", log, "--out", tmp_path / "v.parquet") == 2
    assert "Read-only file system" in capsys.readouterr().err


def test_scores_that_are_no_numbers_are_refused(trained, log, tmp_path, capsys, monkeypatch):
    nan = torch.full((1,), float("nan"))
    monkeypatch.setattr("tritonemb.training.metrics.logits_of", lambda _, batch, *__: nan.expand(len(batch)))
    assert run("predict", "--checkpoint", trained[0], "--data", log, "--out", tmp_path / "scores.csv") == 2
    assert re.search(
        r"step-\d+: [\d,]+ scores are NaN, because training diverged; use another checkpoint", capsys.readouterr().err
    )
    assert not (tmp_path / "scores.csv").exists()


def test_a_run_of_a_stranger_runs_no_code(trained, log, tmp_path, capsys):
    folder, mark = shutil.copytree(trained[0], tmp_path / "theirs"), tmp_path / "mark"
    for path in (folder / "checkpoints").iterdir():
        (path / ".metadata").write_bytes(pickle.dumps(Calls(os.mkdir, str(mark))))
        resealed(path, ".metadata")
    data = ("--data", log, "--out")
    for command in (
        ("predict", "--checkpoint", folder, *data, tmp_path / "scores.csv"),
        ("train", *data, folder, "--resume", "auto", "--epochs", 4, "--embedding-lr", 0.2, *SMALL),
    ):
        assert run(*command) == 2
        assert ".metadata refers to posix.mkdir, which could run code, so it is not loaded" in capsys.readouterr().err
    assert not mark.exists()


def test_predict_leaves_no_row_out(log, tmp_path, capsys):
    """A model that was trained without the bad rows still scores a log row by row, or not at all."""
    lines = log.read_text().splitlines()
    lines[3] = "x" + lines[3]
    log.write_text("\n".join(lines) + "\n")
    options = ["--on-bad-row", "skip", "--max-steps", 3, *SMALL]
    assert run("train", "--data", log, "--out", tmp_path / "run", *options) == 0
    assert "1 bad rows skipped" in capsys.readouterr().out
    assert run("predict", "--checkpoint", tmp_path / "run", "--data", log, "--out", tmp_path / "scores.csv") == 2
    assert "train.txt, line 4: field 1 (label)" in capsys.readouterr().err
    assert not (tmp_path / "scores.csv").exists()


def test_another_vocabulary_is_noticed(log, tmp_path, capsys):
    vocabulary, out = tmp_path / "v.parquet", tmp_path / "run"
    assert run("vocab", "--data", log, "--out", vocabulary, "--min-count", 2) == 0
    options = ["--data", log, "--out", out, "--vocabulary", vocabulary, *SMALL]
    assert run("train", *options, "--max-steps", 2) == 0
    lines = log.read_text().splitlines()
    lines = [line.replace("00000003", "000000aa").replace("00000004", "00000003") for line in lines]
    (tmp_path / "other.txt").write_text("\n".join(lines) + "\n")
    vocabulary.unlink()
    assert run("vocab", "--data", tmp_path / "other.txt", "--out", vocabulary, "--min-count", 2) == 0
    capsys.readouterr()
    assert run("predict", "--checkpoint", out, "--data", log, "--out", tmp_path / "scores.csv") == 2
    assert "would be encoded differently than in training" in capsys.readouterr().err
    assert run("train", *options, "--max-steps", 4, "--resume", "auto") == 2
    assert "is of another run: encoding was" in capsys.readouterr().err


def test_a_refused_run_leaves_the_configuration_of_the_other_alone(trained, log, capsys):
    folder, _ = trained
    initial = (folder / "config.toml").read_text()
    assert run("train", "--data", log, "--out", folder, "--max-steps", 50, "--dense-lr", 0.5, *SMALL) == 2
    assert (folder / "config.toml").read_text() == initial


def test_predict_needs_no_labels(trained, log, tmp_path, capsys):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder, _ = trained
    assert run("convert", "--data", log, "--out", tmp_path / "train.parquet") == 0
    unlabelled = [line.partition("\t")[2] for line in log.read_text().splitlines()]
    (tmp_path / "test.txt").write_text("\n".join(unlabelled) + "\n")
    columns = parquet.read_table(tmp_path / "train.parquet")
    parquet.write_table(columns.drop_columns(["label"]), tmp_path / "test.parquet")
    scores = []
    for number, name in enumerate(("train.txt", "test.txt", "train.parquet", "test.parquet")):
        out = tmp_path / f"{number}.parquet"
        assert run("predict", "--checkpoint", folder, "--data", tmp_path / name, "--out", out) == 0
        scores.append(parquet.read_table(out)["score"].combine_chunks())
    assert len(scores[0]) == 1_200
    assert all(pa.Array.equals(score, scores[0]) for score in scores[1:])
    (tmp_path / "bad.txt").write_text("\n".join([*unlabelled[:5], "x" + unlabelled[5]]) + "\n")
    capsys.readouterr()
    assert run("predict", "--checkpoint", folder, "--data", tmp_path / "bad.txt") == 2
    assert "bad.txt, line 6: field 1 (int_1) is 'x" in capsys.readouterr().err


def test_vocabulary_and_conversion_serve_training(log, tmp_path, capsys):
    assert run("vocab", "--data", log, "--out", tmp_path / "v.parquet", "--min-count", 2) == 0
    assert "cat_1 21" in capsys.readouterr().out
    assert run("convert", "--data", log, "--out", tmp_path / "train.parquet") == 0
    assert "train.parquet: 1,200 rows" in capsys.readouterr().out
    options = ["--vocabulary", tmp_path / "v.parquet", "--max-steps", 4, "--log-every", 1, *SMALL]
    assert run("train", "--data", tmp_path / "train.parquet", "--out", tmp_path / "parquet", *options) == 0
    assert len(losses(tmp_path / "parquet")) == 4


def test_doctor_says_how_it_is(capsys):
    assert run("doctor", "--device", "cpu") == 0
    assert "all is well" in capsys.readouterr().out


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_a_screen_and_has_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--help"] if command is None else [command, "--help"]
    try:
        assert run(*arguments) == 0
    except SystemExit as stopped:
        assert stopped.code == 0  # noqa: PT017 (some parsers leave this way)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert sum(-(-len(line) // 80) for line in lines) <= 30
    assert any(re.search(r"tritonemb [\w-]+ (--\w+|runs/)", line) and "usage" not in line for line in lines)


def test_the_columns_of_a_log_come_first_in_the_help_of_train():
    named = re.findall(r"--[a-z][a-z-]+", cli.TRAIN_USAGE.partition("samples/s.")[2])
    assert {"--label", "--dense", "--sparse", "--time-column"} <= set(named[:6])


def test_every_flag_that_the_short_help_names_exists(capsys):
    with pytest.raises(SystemExit):
        run("train", "--help-all")
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    known |= {"--config", "--preset", "--resume", "--help-all"}
    named = set(re.findall(r"--[a-z][a-z-]+", cli.TRAIN_USAGE))
    assert len(named) > 30
    assert named <= known, named - known


def test_defaults_follow_the_data_set(capsys):
    texts = {}
    for data in ("movielens-100k", "synthetic"):
        with pytest.raises(SystemExit) as stopped:
            run("train", "--data", data, "--help-all")
        assert stopped.value.code == 0
        texts[data] = " ".join(capsys.readouterr().out.split())
    assert "default: 256" in texts["movielens-100k"]
    assert "default: 1024" in texts["synthetic"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tain"], "unknown command 'tain'; did you mean 'train'?"),
        (
            ["xyz"],
            "unknown command 'xyz'; there are train, predict, evaluate, export, serve, compare, vocab, convert, reader",
        ),
        (["serve", "--data", "x.csv"], "to read a log for trainers: tritonemb reader"),
        (["server", "--folder", "x"], "unknown command 'server'; it is now 'embedding-server'"),
        (["train", "--data", "x.csv", "--workers", "3"], "unknown option --workers; it is now --parser-threads"),
        (["convert", "--data", "x.csv", "--workers=3"], "unknown option --workers; it is now --parser-threads"),
        (["train", "--data", "nowhere.txt"], "'nowhere.txt' is neither a file or folder nor one of the data sets"),
        (["train", "--data", "criteo-kaggle"], "data set 'criteo-kaggle' needs a path"),
        (["train", "--data", "adult", "--path", "nowhere"], "adult.data: no such file"),
        (["train", "--data", "synthetic", "--threads", "0"], "threads must be at least 1, got 0"),
        (["train", "--data", "synthetic", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (
            ["train", "--data", "synthetic", "--preset", "kaggle"],
            "unknown preset 'kaggle'; expected one of movielens-100k",
        ),
        (["train", "--config", "nowhere.toml"], "nowhere.toml: no such file; expected a configuration in TOML"),
        (["train", "--data", "synthetic", "--patience", "2"], "patience needs validation rows"),
        (["train", "--data", "synthetic", "--resume", "nowhere/a/b"], "nowhere/a/b is not a checkpoint"),
        (
            ["predict", "--checkpoint", "nowhere", "--data", "x"],
            "nowhere: no such folder; expected the folder of a run",
        ),
        (["convert", "--data", "nowhere", "--out", "x"], "nowhere: no such file"),
        (["vocab", "--data", "nowhere"], "nowhere: no such file"),
        (["train", "--data", "synthetic", "--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["doctor", "--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["doctor", "--devise", "cpu"], "unrecognized arguments: --devise cpu; see tritonemb doctor --help"),
        (["train", "--data"], "argument --data: expected one argument; see tritonemb train --help"),
        (["train", "--data", "sinthetic"], "; did you mean 'synthetic'?"),
        (
            ["train", "--data", "synthetic", "--epocs", "3"],
            "Unrecognized options: --epocs, 3; did you mean '--epochs'?",
        ),
        (
            ["train", "--data", "synthetic", "--epochs", "x"],
            "error: --epochs: invalid literal for int() with base 10: 'x'; see",
        ),
        (["train", "--data", "x.csv", "--label", "y"], "error: no sparse columns are named; a click model needs at"),
        (["train", "--data", "x.csv", "--test-share", "2"], "error: test_share must be a share of the rows, from 0 to"),
        (["train", "--data", "x.csv", "--delimiter", ",,"], "error: delimiter must be one ASCII character, got ',,';"),
        (
            ["train", "--data", "synthetic", "--model", "dlm"],
            "two_tower, mmoe, ple, or MODULE:FUNCTION, got 'dlm'; did you mean 'dlrm'?",
        ),
        (["predict"], "Missing from tritonemb predict: --checkpoint --data; see tritonemb predict --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_two(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("columns", [30, 80, 300])
def test_a_mistake_is_one_line_on_a_terminal_of_any_width(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run("train", "--data", "synthetic", "--evaluate-evry", "3") == 2
    assert capsys.readouterr().err == (
        "error: Unrecognized options: --evaluate-evry, 3; did you mean '--evaluate-every'?\n"
    )


@pytest.mark.parametrize("name", ["x.json", "readme.md", "bin.txt"])
def test_a_file_that_is_no_log_is_told_so(name, tmp_path, capsys):
    contents = {"x.json": b'{"a": 1}\n', "readme.md": b"# Read me\n", "bin.txt": bytes(range(128, 256)) + b"\n"}
    (tmp_path / name).write_bytes(contents[name])
    assert run("train", "--data", tmp_path) == 2
    error = capsys.readouterr().err
    assert f"{name} is not a log in a known format: Parquet (.parquet), CSV (.csv) or Criteo's text: " in error


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest_name(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('data = "synthetic"\n[evaluation]\npatiens = 2\n')
    assert run("train", "--config", tmp_path / "run.toml") == 2
    assert "unknown key 'evaluation.patiens'; did you mean 'patience'?" in capsys.readouterr().err
    (tmp_path / "old.toml").write_text("[output]\nlog_every = 3\n")
    assert run("train", "--config", tmp_path / "old.toml") == 2
    assert "unknown key 'output.log_every'; move it above the sections" in capsys.readouterr().err


def test_a_bad_line_is_named_and_can_be_skipped(log, tmp_path, capsys):
    lines = log.read_text().splitlines()
    lines[700] = "x" + lines[700]
    log.write_text("\n".join(lines) + "\n")
    options = ["--epochs", 1, *SMALL]
    assert run("train", "--data", log, "--out", tmp_path / "a", *options) == 2
    assert "train.txt, line 701" in capsys.readouterr().err
    assert run("train", "--data", log, "--out", tmp_path / "b", "--on-bad-row", "skip", *options) == 0
    out = capsys.readouterr().out
    assert re.search(r"^note: [\d,]+ rows were read, 1 bad rows skipped$", out, flags=re.MULTILINE)
    assert "train.txt, line 701: field 1 (label) is 'x" in out


def test_without_a_command_the_usage_is_shown(capsys):
    assert run() == 2
    assert "train" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    import tritonemb

    assert run("--version") == 0
    assert capsys.readouterr().out == f"tritonemb {tritonemb.__version__}\n"


@pytest.mark.parametrize(
    ("given", "found"), [(None, "0"), pytest.param("active", "30000000000", marks=pytest.mark.more)]
)
@pytest.mark.more
def test_threads_of_the_command_do_not_spin(given, found):
    """OpenMP says what it was loaded with."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    command = [sys.executable, "-m", "tritonemb", "doctor", "--device", "nonsense"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"GOMP_SPINCOUNT = '{found}'" in done.stderr


def test_an_interruption_while_packages_are_loaded_is_no_traceback():
    program = """
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":  # torch is loaded in part
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from tritonemb.cli import main
sys.exit(main(["train", "--data", "synthetic"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named():
    program = "import sys; sys.modules['tyro'] = None; from tritonemb.cli import main; sys.exit(main(['train']))"
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    expected = "error: tyro is required and not installed: pip install 'tritonemb[train]', or in a clone pip install "
    assert done.stderr.strip() == f"{expected}'.[train]'"
