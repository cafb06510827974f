import pytest
import torch

from tritonemb.cli import main
from tritonemb.training.doctor import examine


def test_a_healthy_machine_is_told_so():
    text, healthy = examine("cpu")
    assert healthy
    assert f"torch           {torch.__version__}".split() in [line.split() for line in text.splitlines()]
    assert "all is well" in text
    assert "a training step agrees with the reference" in text
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["embedding_bag"]]
    assert line.split()[1] in ("cpu", "triton")


def test_a_wrong_kernel_is_found(monkeypatch):
    monkeypatch.setattr("tritonemb.training.doctor.check_step", lambda device: 0.5)
    text, healthy = examine("cpu")
    assert not healthy
    assert "a training step is WRONG: it differs from the reference by 5.0e-01" in text
    assert "something is wrong: see above" in text


def test_a_broken_kernel_is_found(monkeypatch):
    def broken(device):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("tritonemb.training.doctor.check_step", broken)
    text, healthy = examine("cpu")
    assert not healthy
    assert "a training step FAILS: RuntimeError: no compiler" in text


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device 'nonsense' cannot be used"):
        examine("nonsense")


def test_compiled_kernels_are_named_with_their_size_and_cleared(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tritonemb.training.doctor.kernel_folder", lambda: tmp_path)
    monkeypatch.setattr("tritonemb.training.doctor.check_step", lambda device: 0.0)
    for version in ("old", "new"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "kernel.1.nbc").write_bytes(bytes(1_000_000))
    text, _ = examine("cpu")
    assert f"compiled kernels: 2.00 MB in {tmp_path}; doctor --clear-kernels removes them" in text
    assert main(["doctor", "--clear-kernels"]) == 0
    assert f"{tmp_path} is empty now" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
