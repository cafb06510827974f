import pytest
import torch

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
