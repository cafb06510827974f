"""Where large results of CPU kernels stand, and the bytes of tensors."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch

import tritonemb as te
from tritonemb import memory
from tritonemb.ops.registry import CPU, use_kernels


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no huge pages")
def test_a_large_result_and_its_gradient_ask_for_huge_pages():
    module = te.nn.Embedding(70_000, 128)
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("a", 10, 128)])
    with use_kernels(CPU):
        rows = module(torch.arange(70_000))
        rows.backward(torch.ones_like(rows))
        pooled = collection(te.KeyedJaggedTensor.from_lengths(["a"], *[torch.ones(70_000, dtype=torch.int64)] * 2))
    for tensor in (rows, module.weight.grad, pooled):
        assert "hg" in flags_of(tensor.data_ptr() + tensor.nbytes // 2)


def test_a_large_result_stands_where_one_stood_that_is_used_no_longer():
    """Else each of its pages is a fault, and is cleared first."""
    ids, module = torch.arange(70_000), te.nn.Embedding(70_000, 128)
    with use_kernels(CPU):
        first, second = module(ids), module(ids)
        place, size = first.data_ptr(), first.nbytes
        assert second.data_ptr() != place
        assert torch.equal(first, module.weight)
        assert torch.equal(second, module.weight)
        view = first.detach()[1:]
        del first
        assert module(ids).data_ptr() not in (place, second.data_ptr()), "a view still uses it"
        assert torch.equal(view, module.weight[1:])
        del view
        assert module(ids[: len(ids) - 9]).data_ptr() == place, "about as large"
        assert module(ids[:66_000].repeat(2)).data_ptr() != place, "larger"
        occupied = sum(block.nbytes for block in [*memory._idle.values(), *memory._used.values()])
        assert occupied < 5 * size, "no more than was in use at once"


def test_a_large_result_is_an_ordinary_tensor():
    rows = memory.empty_result((70_000, 256), torch.bfloat16)
    assert rows.is_contiguous()
    assert not rows._is_view()
    assert rows.untyped_storage().nbytes() == rows.nbytes
    rows.fill_(3)
    assert torch.equal(pickle.loads(pickle.dumps(rows)), rows)


def flags_of(address: int) -> list[str]:
    """What has been asked of the memory there, see proc(5), VmFlags."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if result := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(result[1], 16) <= address < int(result[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize("alignment", [1, 64])
def test_tensors_are_read_from_their_bytes(alignment):
    """Also those that are empty, and those whose bytes begin where their dtype cannot be read."""
    shapes = [(3,), (), (0, 2), (2, 5)]
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype in memory.DTYPES.values() for shape in shapes]
    for subset in (tensors, tensors[2:3], []):
        spans = memory.tensor_spans(memory.describe_tensors(subset), alignment)
        data = torch.zeros(spans[-1][0].stop if spans else 0, dtype=torch.uint8)
        for (span, _, _), tensor in zip(spans, subset, strict=True):
            data[span] = torch.from_numpy(memory.bytes_of(tensor))
        for result, tensor in zip(memory.view_tensors(data, spans), subset, strict=True):
            assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
            assert memory.bytes_of(result).tobytes() == memory.bytes_of(tensor).tobytes()


def test_parts_that_follow_each_other_are_concatenated_without_a_copy():
    whole = torch.arange(40.0).view(10, 4)
    parts = whole.split([3, 0, 5, 2])
    viewed = memory.concat(parts)
    assert torch.equal(viewed, whole)
    assert viewed.data_ptr() == whole.data_ptr()
    assert memory.concat(parts[2:]).data_ptr() == parts[2].data_ptr()
    for peers in (
        [parts[2], parts[0]],
        [parts[0], parts[3]],
        [parts[0], parts[2].clone()],
        [whole[:, :2], whole[:, 2:]],
    ):
        copied = memory.concat(peers)
        assert torch.equal(copied, torch.cat(peers))
        assert copied.data_ptr() != peers[0].data_ptr()
    assert memory.concat([whole[:0], whole[:0]]).shape == (0, 4)


def test_bytes_of_tensors_with_any_strides():
    """PyTorch calls a single element contiguous whatever its stride is, as in a message to a server of one id."""
    ids = torch.arange(12)
    for tensor in (ids[3:4], ids[::3][:1], torch.tensor(7).expand(1), torch.tensor(7).expand(3), ids[::5], ids[:0]):
        assert memory.bytes_of(tensor).tobytes() == tensor.numpy().tobytes()
    memory.bytes_of(ids[::3][:1])[0] = 99
    assert ids[0] == 99, "of a contiguous tensor it is a view"
