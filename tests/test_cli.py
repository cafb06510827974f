import os
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torchmetrics")
pytest.importorskip("rich")
pytest.importorskip("tyro")

from tritonemb.cli import main, summary
from tritonemb.training import FitResult, Metrics
from tritonemb.training.job import TrainResult

LINE = "\t".join(["1", *["1"] * 13, *["0a"] * 26])
SMALL = ["--bottom-mlp", "8", "--top-mlp", "8", "--embedding-dim", "4", "--batch-size", "8"]


def criteo_file(tmp_path, lines: list[str]) -> str:
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_train_ends_with_the_summary(tmp_path, capsys):
    path = criteo_file(tmp_path, [str(i % 2) + LINE[1:] for i in range(60)])
    assert main(["train", "--data", path, *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 1/1: training loss")
    assert [line.split("  ")[0] for line in lines[1:]] == ["test AUC", "log loss", "normalized entropy", "samples/s"]


def test_summary_shows_the_best_possible_auc():
    metrics = Metrics(auc=0.8123, log_loss=0.5, normalized_entropy=0.9, num_samples=10)
    text = summary(TrainResult(FitResult((0.5,), 10, 1.0, 12_345.0), metrics, best_auc=0.83))
    assert "test AUC            0.8123  (best possible 0.8300)" in text
    assert "12,345" in text
    assert "best possible" not in summary(TrainResult(FitResult((0.5,), 10, 1.0, 1.0), metrics, best_auc=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "movielens"], "error: 'movielens' is neither a file nor one of the data sets"),
        (["--data", "criteo"], "error: data set 'criteo' needs a path"),
        (["--data", "adult", "--path", "nowhere"], "adult.data: no such file"),
        (["--data", "synthetic", "--threads", "0"], "error: threads must be at least 1, got 0"),
        (["--data", "synthetic", "--criteo.min-count", "0"], "min_count must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(arguments, message):
    command = [sys.executable, "-m", "tritonemb", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_line_is_named(tmp_path, capsys):
    assert main(["train", "--data", criteo_file(tmp_path, [LINE, "x" + LINE])]) == 2
    assert "line 2: field 1 (label) is 'x1', expected 0 or 1" in capsys.readouterr().err


def test_defaults_follow_the_data_set(capsys):
    texts = {}
    for data in ("movielens-100k", "synthetic"):
        with pytest.raises(SystemExit) as stopped:
            main(["train", "--data", data, "--help"])
        assert stopped.value.code == 0
        texts[data] = capsys.readouterr().out
    assert "default: 256" in " ".join(texts["movielens-100k"].split())
    assert "default: 1024" in " ".join(texts["synthetic"].split())


def test_without_a_command_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "train" in capsys.readouterr().err


def test_a_missing_extra_is_named():
    program = "import sys; sys.modules['tyro'] = None; from tritonemb.cli import main; sys.exit(main(['train']))"
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: tyro is needed here and not installed: pip install 'tritonemb[train]'"
