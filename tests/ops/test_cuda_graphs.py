"""What Inductor takes for a CUDA graph: ops that call the host stay outside, or a replay would leave their work out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

import tritonemb as te
import tritonemb.sharding  # defines the exchanges' ops
from tritonemb.layout import make_layout
from tritonemb.ops.row_update import Accumulator

OPS = torch.ops.tritonemb


@pytest.fixture
def partitioned(monkeypatch):
    """By op whether Inductor, which takes the CPU for a GPU, leaves it out of CUDA graphs."""
    decisions, decide = {}, Scheduler.should_partition

    def decide_and_note(scheduler, node):
        if (op := getattr(node.node, "op_overload", None)) is not None:
            decisions[op] = decide(scheduler, node) is not None
        return decide(scheduler, node)

    monkeypatch.setattr(Scheduler, "should_partition", decide_and_note)
    monkeypatch.setattr(BaseSchedulerNode, "is_gpu", lambda node: True)
    with config.patch({"triton.cudagraphs": True, "force_disable_caches": True}):
        yield decisions


@pytest.mark.more
@pytest.mark.usefixtures("dynamo")
def test_ops_that_call_the_host_are_left_out(partitioned):
    accumulator, updates = Accumulator(), []
    accumulator.is_open = True
    tables = SimpleNamespace(
        read_pinned=lambda number, *_: torch.full((2, 3), float(number)),
        update_pinned=lambda *_: updates.append("pinned"),
        update_shared=lambda *batch: updates.append("shared"),
    )
    accumulator.tables = lambda: tables
    layout = make_layout([te.TableConfig("t", 2, 3)], ["t"], True)

    def run(weight, ticket, values, offsets, pending):
        rows = OPS.pinned_lookup(weight, None, ticket, accumulator.handle, False, 2, 3, torch.float32) * 2
        OPS.pinned_update(rows, None, ticket, accumulator.handle)
        groups = OPS.row_groups(values, offsets, *layout)
        OPS.shared_update(accumulator.handle, rows, values, offsets, None, *groups, *layout)
        OPS.accumulate_(pending, accumulator.handle, rows, values, offsets, None)
        return rows

    batch = torch.tensor([0, 1]), torch.tensor([0, 1, 2])
    pending = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        rows = torch.compile(run, fullgraph=True)(torch.ones(5, 3), torch.tensor(7), *batch, pending)
    assert torch.equal(rows, torch.full((2, 3), 14.0))
    assert (updates, int(pending)) == (["pinned", "shared"], 1)
    host_ops = (OPS.pinned_lookup, OPS.pinned_update, OPS.shared_update, OPS.accumulate_)
    assert {op.default: partitioned.get(op.default) for op in host_ops} == {op.default: True for op in host_ops}
    assert partitioned[OPS.row_groups.default] is False


def test_ops_that_call_the_host_are_tagged():
    host_ops = OPS.pinned_lookup, OPS.pinned_update, OPS.shared_update, OPS.accumulate_
    host_ops += OPS.start_exchange, OPS.finish_exchange, OPS.broadcast_buffers
    assert all(torch.Tag.cudagraph_unsafe in op.default.tags for op in host_ops)
    assert torch.Tag.cudagraph_unsafe not in OPS.row_update_.default.tags
