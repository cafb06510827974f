"""The ops of a row cache: PyTorch's own checks, compilation, what they refuse, and a cached table in use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tritonemb as te
from tests.ops.row_caches import Cache, make_cache, serve
from tritonemb import ops
from tritonemb.layout import DirectoryTensors, make_layout

pytestmark = pytest.mark.public


def test_a_batch_reads_its_rows_through_the_cache():
    """Look up, allocate, bring rows in with their state, translate the ids, change rows: as if in the table itself."""
    weight, state = torch.randn(300, 5), torch.rand(300)
    expected = weight.clone()
    layout = make_layout([te.TableConfig("t", 300, 5)], ["t"], True)
    slots_weight, slots_state = torch.zeros(64, 5), torch.zeros(64)
    tags, used, pins = torch.full((64,), -1), torch.zeros(64).long(), torch.zeros(64).int()
    directory = DirectoryTensors(tags, used, pins, torch.tensor([0]), layout.tables, torch.tensor([2]))
    for step in range(6):
        ids = torch.randint(-1, 301, (40,))
        groups = ops.row_groups(ids, torch.tensor([0, 40]), layout)
        rows = groups.rows[: int(groups.num_groups)]
        slots = ops.row_cache_look_up_(directory, rows, torch.tensor(step), "lru")
        absent = slots == -1
        evicted = ops.row_cache_allocate_(directory, rows, slots, torch.tensor(step), "lru")
        # What leaves goes home first; then what was absent comes in.
        ops.move_rows_([weight, state], [slots_weight, slots_state], evicted, slots)
        incoming = torch.where(absent & (slots >= 0), slots, -1)
        ops.move_rows_([slots_weight, slots_state], [weight, state], incoming, rows)
        places = ops.row_cache_translate(torch.nn.functional.pad(slots, (0, 40 - len(rows))), *groups[1:])
        valid = (ids >= 0) & (ids < 300)
        occupied = valid & (places >= 0)
        assert torch.equal(places >= 0, occupied)
        assert int(occupied.sum()) > 20
        assert torch.equal(slots_weight[places[occupied]], expected[ids[occupied]])
        assert torch.equal(slots_state[places[occupied]], state[ids[occupied]])
        slots_weight[places[occupied].unique()] += 1.0
        expected[ids[occupied].unique()] += 1.0
        pins.zero_()


@pytest.mark.usefixtures("dynamo")
def test_compiled_as_one_graph():
    def step(cache: Cache, to: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        slots, evicted = serve(cache)
        ops.move_rows_([to], [source], slots, evicted + 1)
        return slots, evicted

    eager, compiled = make_cache(), make_cache()
    to, source = torch.zeros(100, 3), torch.randn(2, 3)
    expected = step(eager, to, source)
    found_to = torch.zeros(100, 3)
    actual = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled, found_to, source)
    for value, reference in zip(
        [*actual, found_to, *compiled.directory[:3]],
        [*expected, to, *eager.directory[:3]],
        strict=True,
    ):
        assert torch.equal(value, reference)


def test_autograd_learns_of_changes():
    cache = make_cache()
    tensors = cache.directory[:3]
    initial = [tensor._version for tensor in tensors]
    slots, _ = serve(cache)
    assert all(tensor._version > old for tensor, old in zip(tensors, initial, strict=True))
    assert slots._version > 0
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    ops.move_rows_([weight], [torch.ones(3, 2)], torch.tensor([1]), torch.tensor([2]))
    assert weight._version > 0
    assert weight.detach().tolist() == [[0, 0], [1, 1], [0, 0]]


def test_inference_mode_serves_too():
    cache = make_cache()
    with torch.inference_mode():
        slots, _ = serve(cache)
    assert torch.equal(slots, serve(make_cache())[0])


def test_caches_that_cannot_be_are_refused():
    cache = make_cache()
    tags, used, _, first_slots, tables, _ = cache.directory

    def refuse(error: type[Exception], match: str, **changes: object) -> None:
        directory = {name: value for name, value in changes.items() if name in DirectoryTensors._fields}
        peers = {name: value for name, value in changes.items() if name not in directory}
        changed = cache._replace(directory=cache.directory._replace(**directory), **peers)
        with pytest.raises(error, match=match):
            ops.row_cache_look_up_(*changed)
        slots = torch.full_like(changed.rows, -1)
        with pytest.raises(error, match=match):
            ops.row_cache_allocate_(changed.directory, changed.rows, slots, changed.now, changed.policy)

    refuse(ValueError, "unknown policy 'fifo'", policy="fifo")
    refuse(ValueError, "must have at least one table", first_slots=first_slots[:0])
    refuse(ValueError, r"used must have shape \(102,\), got \(96,\)", used=used[:96])
    refuse(TypeError, r"pins must be torch.int32, got torch.int64", pins=used)
    refuse(ValueError, r"tags must be contiguous", tags=torch.stack([tags, tags], 1)[:, 0])
    refuse(ValueError, r"num_sets\[0\] is 1, but the table has 32 slots from 2 on", first_slots=first_slots + 2)
    refuse(TypeError, "rows must be torch.int64", rows=cache.rows.int())
    refuse(ValueError, r"tables must have shape \(3, 8\)", tables=tables[:, :2])
    refuse(ValueError, r"num_sets\[2\] is 3, but the table has 70 slots", num_sets=torch.tensor([1, 0, 3]))
    refuse(ValueError, r"num_sets\[1\] is -1", num_sets=torch.tensor([1, -1, 2]))
    refuse(ValueError, "now must be on cpu", now=torch.tensor(1, device="meta"))
    with pytest.raises(ValueError, match=r"slots must have shape \(6,\)"):
        ops.row_cache_allocate_(cache.directory, cache.rows, torch.full((3,), -1), cache.now, cache.policy)
    with pytest.raises(TypeError, match=r"starts must be torch.int32"):
        ops.row_cache_translate(torch.zeros(1).long(), torch.zeros(2).long(), torch.zeros(1).int(), torch.tensor(1))
    with pytest.raises(ValueError, match=r"starts must have shape \(2,\)"):
        ops.row_cache_translate(torch.zeros(1).long(), torch.zeros(3).int(), torch.zeros(1).int(), torch.tensor(1))


def test_moves_that_cannot_be_are_refused():
    to, source, rows, starts = torch.zeros(4, 3), torch.ones(5, 3), torch.tensor([0, 3]), torch.tensor([0, 1, 2])
    for error, match, args in (
        (ValueError, "must be pairs of 1 tables, got 2 and 1", ([to, to], [source], rows, rows)),
        (ValueError, r"got 1 and 1 of tables \[0, 1\]", ([to], [source], rows, rows, starts, [0, 1])),
        (ValueError, r"pairs of 2 tables, got 1 and 1 of tables \[2\]", ([to], [source], rows, rows, starts, [2])),
        (ValueError, r"pairs of 1 tables, got 1 and 1 of tables \[1\]", ([to], [source], rows, rows, None, [1])),
        (TypeError, "starts must be torch.int64", ([to], [source], rows, rows, starts.int(), [0])),
        (ValueError, r"starts must have shape \(2,\)", ([to], [source], rows, rows, starts[:0], [0])),
        (ValueError, r"from 0 to the number of moves, 2, got \[0, 1\]", ([to], [source], rows, rows, starts[:2], [0])),
        (ValueError, r"got \[0, 3, 2\]", ([to], [source], rows, rows, torch.tensor([0, 3, 2]), [0])),
        (TypeError, "one dtype of 1, 2, 4 or 8 bytes, got torch.float32 and", ([to], [source.half()], rows, rows)),
        (TypeError, "complex128", ([to.to(torch.complex128)], [source.to(torch.complex128)], rows, rows)),
        (ValueError, r"rows of one width, got shapes \(4, 3\) and \(5, 2\)", ([to], [source[:, :2]], rows, rows)),
        (ValueError, "1-D, or 2-D", ([to[None]], [source[None]], rows, rows)),
        (ValueError, r"sources\[0\] must have contiguous rows", ([to[:, :3]], [source[:3].T], rows, rows)),
        (ValueError, "overlapping rows", ([torch.zeros(3).expand(4, 3)], [source], rows, rows)),
        (ValueError, "must be on cpu like the rows", ([to.to("meta")], [source], rows, rows)),
        (ValueError, r"from_rows must have shape \(2,\)", ([to], [source], rows, rows[:1])),
        (TypeError, "to_rows must be torch.int64", ([to], [source], rows.int(), rows)),
    ):
        with pytest.raises(error, match=match):
            ops.move_rows_(*args)
    assert (to == 0).all()


def test_the_cpu_kernel_refuses_rows_that_there_are_not():
    from tritonemb.kernels.cpu.row_cache import move_rows_

    to = torch.zeros(4, 3)
    source, to_rows, from_rows = torch.ones(5, 3), torch.tensor([0, 3, -1]), torch.tensor([1, 5, 9])
    with pytest.raises(ValueError, match=r"move 1 goes from row 5 to row 3, but sources\[0\] has 5 rows and d"):
        move_rows_([to], [source], to_rows, from_rows)
    starts, longer = torch.tensor([0, 1, 3]), torch.ones(6, 3)
    with pytest.raises(ValueError, match=r"move 1 .* but sources\[2\] has 5 rows and destinations\[2\] 4;"):
        move_rows_([to, to, to], [source, longer, source], to_rows, from_rows, starts, [0, 1, 1])
    assert (to == 0).all()
    move_rows_([to], [longer], to_rows, from_rows, starts, [1])
    assert to.sum(1).tolist() == [0, 0, 0, 3]
