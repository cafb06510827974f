import sys

import pytest

from tests.training.callbacks.events import train
from tritonemb.training.callbacks import CallbackList
from tritonemb.training.callbacks.trackers import TensorBoard
from tritonemb.utils import MissingExtraError


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulators.EventAccumulator(str(folder))
    read.Reload()
    return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}


def test_curves_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    train([TensorBoard(tmp_path)])
    read = scalars(tmp_path)
    assert set(read) == {
        *("train/loss", "train/samples_per_second", "train/data_wait", "train/memory_bytes", "lr/dense", "lr/tables"),
        *(f"{split}/{name}" for split in ("validation", "test") for name in ("auc", "log_loss", "normalized_entropy")),
    }
    assert read["train/loss"] == [(step, pytest.approx(0.5 + 20 / step)) for step in range(100, 1201, 100)]
    assert read["validation/auc"] == [(step, pytest.approx(0.78 - 20 / step)) for step in range(200, 1201, 200)]
    assert read["train/memory_bytes"][0] == (100, 812_000_000.0)
    assert read["test/auc"] == [(1200, pytest.approx(0.78081))]


@pytest.mark.parametrize(("died", "resumed"), [(750, 600), (600, 600), (350, 0)])
def test_a_resumed_run_shows_every_step_once(tmp_path, died, resumed):
    pytest.importorskip("tensorboard")
    train([TensorBoard(tmp_path)], last=died, ends=None)
    train([TensorBoard(tmp_path)], first=resumed)
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == list(range(100, 1201, 100))
    assert [step for step, _ in scalars(tmp_path)["validation/auc"]] == list(range(200, 1201, 200))


def test_without_tensorboard_the_error_names_the_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "tensorboard":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(MissingExtraError, match=r"tensorboard is required .* pip install 'tritonemb\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_training_goes_on_where_no_file_can_be_written(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    callback = TensorBoard(tmp_path / "file" / "below")
    with pytest.raises(OSError, match="file"):
        train([callback], last=1)
    train([CallbackList([callback])])
    assert capsys.readouterr().err.count("note: TensorBoard cannot write") == 1
    assert (tmp_path / "file").read_bytes() == b""
