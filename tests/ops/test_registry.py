"""Which kernel serves an op."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.helpers import INTERPRETED
from tritonemb.kernels.row_groups import row_groups_reference
from tritonemb.ops import registry
from tritonemb.ops.registry import choose, forced, kernel

pytestmark = pytest.mark.public
SERVING = "triton" if INTERPRETED else "cpu"
row_groups = importlib.import_module(f"tritonemb.kernels{'' if INTERPRETED else '.cpu'}.row_groups").row_groups
CPU = torch.device("cpu")
OPS = ("row_groups", "embedding_bag", "sample_weight_gradient", "row_update_")


@pytest.fixture(autouse=True)
def _free_choice(monkeypatch):
    monkeypatch.setattr(registry, "_forced", None)
    registry.chosen.cache_clear()
    registry.kernel.cache_clear()


@pytest.mark.parametrize("op", OPS)
def test_the_devices_kernel_serves_if_it_knows_all_dtypes(op):
    known = [torch.float32, torch.float16, torch.bfloat16]
    assert choose(op, CPU, known) == SERVING
    assert choose(op, CPU, [*known, torch.float64]) == "reference"
    assert choose(op, torch.device("meta"), known) == "reference"


def test_forced_serves_every_op_and_ends_with_its_block():
    assert kernel("row_groups", CPU) is row_groups
    with forced("reference"):
        assert all(choose(op, CPU) == "reference" for op in OPS)
        assert kernel("row_groups", CPU) is row_groups_reference
        with forced("cpu"):
            assert choose("row_groups", CPU) == "cpu"
        assert choose("row_groups", CPU) == "reference"
    with pytest.raises(KeyError, match="inside"), forced("reference"):
        raise KeyError("inside")
    assert kernel("row_groups", CPU) is row_groups


@pytest.mark.parametrize("op", registry.ops())
def test_every_kernel_stands_where_its_name_says(op):
    """A CPU kernel that the rule does not know of would never serve."""
    for name in registry.kernels_of(op):
        assert callable(registry.load(op, name))
    if "cpu" not in registry.kernels_of(op):
        with pytest.raises((ImportError, AttributeError)):
            registry.load(op, "cpu")


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="no kernels are called 'gpu'"), forced("gpu"):
        pass
