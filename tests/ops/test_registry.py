"""Which kernel serves an op."""

from __future__ import annotations

import ast
import importlib
import itertools
from pathlib import Path

import pytest
import torch

import tritonemb
from tests.helpers import INTERPRETED
from tritonemb.kernels import by_torch
from tritonemb.kernels.row_groups import row_groups_reference
from tritonemb.ops import registry
from tritonemb.ops.registry import choose, explain_choice, kernel, use_kernels
from tritonemb.types import TABLE_DTYPES

pytestmark = pytest.mark.public
SERVING = "triton" if INTERPRETED else "cpu"
row_groups = importlib.import_module(f"tritonemb.kernels{'' if INTERPRETED else '.cpu'}.row_groups").row_groups
CPU = torch.device("cpu")
OPS = ("row_groups", "embedding_bag", "sample_weight_gradient", "row_update_")


@pytest.fixture(autouse=True)
def _free_choice(monkeypatch):
    monkeypatch.setattr(registry, "_forced", None)
    registry.choose_cached.cache_clear()
    registry.kernel.cache_clear()


@pytest.mark.parametrize("op", OPS)
def test_the_devices_kernel_serves_if_it_knows_all_dtypes(op):
    known = [torch.float32, torch.float16, torch.bfloat16]
    assert choose(op, CPU, known) == SERVING
    assert choose(op, CPU, [*known, torch.complex64]) is None
    assert choose(op, torch.device("meta"), known) is None
    assert explain_choice(op, CPU)[0] == SERVING
    assert explain_choice(op, torch.device("meta"))[0] == "none"
    with pytest.raises(TypeError, match=f"{op} is not implemented on meta for torch.float32; use float32, .* the CPU"):
        kernel(op, torch.device("meta"), (torch.float32,))


def test_plain_pytorch_serves_float64_anywhere_and_float8_tables_on_the_cpu():
    cuda, float8 = torch.device("cuda"), torch.float8_e5m2
    for op in [op for op in registry.ops() if "torch" in registry.kernels_of(op)]:
        for device, peers in itertools.product((CPU, cuda), ((), (torch.float32,))):
            assert choose(op, device, (torch.float64, *peers)) == "torch"
        assert kernel(op, CPU, (torch.float64,)) is getattr(by_torch, op)
    assert choose("embedding_bag", CPU, (float8, torch.float32)) == ("triton" if INTERPRETED else "torch")


@pytest.mark.parametrize("op", registry.ops())
def test_no_reference_serves_unless_it_is_forced(op):
    devices, dtypes = (CPU, torch.device("cuda"), torch.device("meta")), (*TABLE_DTYPES, torch.float64)
    for device, served in itertools.product(devices, [(), *((dtype,) for dtype in dtypes), dtypes]):
        assert choose(op, device, served) != "reference"
    with use_kernels("reference"):
        assert choose(op, CPU) == "reference"


def test_nothing_but_references_calls_a_reference():
    """The registry finds them by name; else only they name each other."""
    for path in Path(tritonemb.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if "_reference" not in text:
            continue
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and "_reference" in node.name]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        outside = [node for node in ast.walk(tree) if id(node) not in inside]
        names = [node.id for node in outside if isinstance(node, ast.Name)]
        names += [node.attr for node in outside if isinstance(node, ast.Attribute)]
        assert not [name for name in names if "_reference" in name], path


def test_forced_serves_every_op_and_ends_with_its_block():
    assert kernel("row_groups", CPU) is row_groups
    with use_kernels("reference"):
        assert all(choose(op, CPU) == "reference" for op in OPS)
        assert kernel("row_groups", CPU) is row_groups_reference
        with use_kernels("cpu"):
            assert choose("row_groups", CPU) == "cpu"
        assert choose("row_groups", CPU) == "reference"
    with pytest.raises(KeyError, match="inside"), use_kernels("reference"):
        raise KeyError("inside")
    assert kernel("row_groups", CPU) is row_groups


@pytest.mark.parametrize("op", registry.ops())
def test_every_kernel_stands_where_its_name_says(op):
    """A CPU kernel that the rule does not know of would never serve."""
    for name in registry.kernels_of(op):
        assert callable(registry.load(op, name))
    assert ("torch" in registry.kernels_of(op)) == hasattr(by_torch, op)


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="unknown kernels 'gpu'"), use_kernels("gpu"):
        pass
