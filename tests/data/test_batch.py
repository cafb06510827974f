import pytest
import torch

from tests.data.logs import contents
from tritonemb.data import Batch, Column, Rows
from tritonemb.data.batch import BatchLayout, concat_rows, gather_batch, pad_batch
from tritonemb.jagged import KeyedJaggedTensor

KEYS = ("one", "many", "other")


def rows(dtype: torch.dtype = torch.int32) -> Rows:
    bags = [[1, 2, 3], [], [4], [0, 5], [2]]
    offsets = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    many = Column(torch.tensor([id for bag in bags for id in bag], dtype=torch.int32), offsets)
    one, other = Column(torch.arange(5, dtype=dtype)), Column(torch.arange(10, 15, dtype=torch.int32))
    return Rows(torch.arange(10.0).view(5, 2), (one, many, other), torch.arange(5) % 2.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("chosen", [[3, 0, 3, 1], [1], [2, 4], []])
def test_a_batch_is_what_its_rows_are(dtype, chosen):
    whole = rows(dtype)
    batch = gather_batch(whole, KEYS, torch.tensor(chosen, dtype=torch.int64).numpy())
    selection = whole.take(torch.tensor(chosen, dtype=torch.int64)).columns
    lengths = [torch.ones(len(chosen), dtype=torch.int64) if c.offsets is None else c.offsets.diff() for c in selection]
    values = torch.cat([column.values for column in selection])
    expected = KeyedJaggedTensor.from_lengths(KEYS, values, torch.cat(lengths).int())
    assert torch.equal(batch.dense, whole.dense[chosen])
    assert torch.equal(batch.labels, whole.labels[chosen])
    assert batch.sparse.keys() == list(KEYS)
    assert torch.equal(batch.sparse.values(), expected.values())
    assert batch.sparse.values().dtype == dtype
    assert torch.equal(batch.sparse.lengths(), expected.lengths())
    assert torch.equal(batch.sparse.offsets(), expected.offsets())
    assert batch.sparse.offsets().dtype == torch.int32
    assert batch.sparse.to_lists() == expected.to_lists()
    assert len(batch) == len(chosen)


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 3), (4, 5), (2, 2)])
def test_a_run_of_rows_is_cut_like_chosen_ones(start, stop):
    run = gather_batch(rows(), KEYS, slice(start, stop))
    chosen = gather_batch(rows(), KEYS, torch.arange(start, stop).numpy())
    assert all(torch.equal(a, b) for a, b in zip(contents(run), contents(chosen), strict=True))


def test_all_parts_lie_in_one_buffer_at_multiples_of_64_bytes():
    batch = gather_batch(rows(), KEYS, torch.tensor([0, 2, 1]).numpy())
    assert batch.buffer is not None
    assert batch.buffer.dtype == torch.uint8
    start, end = batch.buffer.data_ptr(), batch.buffer.data_ptr() + batch.buffer.numel()
    for part in contents(batch):
        assert part.data_ptr() % 64 == 0
        assert part.numel() == 0 or start <= part.data_ptr() < part.data_ptr() + part.nbytes <= end
    assert batch.buffer.numel() % 64 == 0
    assert batch.dense.is_contiguous()


def test_moving_moves_the_buffer_and_takes_the_views_again():
    batch = gather_batch(rows(), KEYS, torch.tensor([0, 2, 1]).numpy())
    moved = batch.to("meta")
    assert {part.device.type for part in contents(moved)} == {"meta"}
    assert [part.shape for part in contents(moved)] == [part.shape for part in contents(batch)]
    assert [part.dtype for part in contents(moved)] == [part.dtype for part in contents(batch)]
    same = batch.to("cpu")
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(contents(same), contents(batch), strict=True))


def test_a_batch_of_loose_tensors_is_moved_tensor_by_tensor():
    sparse = KeyedJaggedTensor.from_lengths(["a"], torch.tensor([1]), torch.tensor([1, 0]))
    batch = Batch(torch.zeros(2, 3), sparse, torch.ones(2))
    assert batch.buffer is None
    moved = batch.to("meta")
    assert (moved.dense.device.type, moved.sparse.values().device.type, moved.labels.device.type) == ("meta",) * 3
    assert len(moved) == 2


def test_no_dense_values_and_no_features():
    no_dense = Rows(torch.zeros(5, 0), rows().columns, rows().labels)
    assert gather_batch(no_dense, KEYS, torch.arange(5).numpy()).dense.shape == (5, 0)
    bare = Rows(torch.zeros(5, 1), (), rows().labels)
    assert gather_batch(bare, (), torch.arange(5).numpy()).sparse.keys() == []


def test_layout_counts_its_bytes():
    layout = BatchLayout(("a", "b"), batch_size=3, num_dense=5, num_values=7, wide=True)
    assert layout.num_bytes == 64 + 64 + 64 + 64 + 64  # 60, 12, 56, 24 and 28 bytes, each rounded up


def test_rows_are_put_together_and_taken_apart():
    whole = rows()
    parts = [whole.slice(0, 2), whole.slice(2, 2), whole.slice(2, 5)]
    joined = concat_rows(parts)
    for a, b in zip(joined.columns, whole.columns, strict=True):
        assert torch.equal(a.values, b.values)
        assert (a.offsets is None and b.offsets is None) or torch.equal(a.offsets, b.offsets)
    assert torch.equal(joined.dense, whole.dense)
    shuffled = concat_rows(parts, torch.tensor([3, 0]).numpy())
    selection = whole.take(torch.tensor([3, 0]))
    assert shuffled.columns[1].values.tolist() == [0, 5, 1, 2, 3]
    assert shuffled.columns[1].offsets.tolist() == [0, 2, 5]
    assert (shuffled.columns[0].values.tolist(), shuffled.labels.tolist()) == ([3, 0], [1, 0])
    assert torch.equal(shuffled.dense, whole.dense[[3, 0]])
    assert selection.columns[1].values.tolist() == [0, 5, 1, 2, 3]
    assert selection.columns[1].offsets.tolist() == [0, 2, 5]
    assert selection.labels.tolist() == [1, 0]


@pytest.mark.gpu
def test_pinned_batches_reach_the_device():
    batch = gather_batch(rows(), KEYS, torch.arange(5).numpy(), pin_memory=True)
    assert batch.buffer is not None
    assert batch.buffer.is_pinned()
    assert batch.pin_memory().buffer.is_pinned()
    moved = batch.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(contents(moved), contents(batch), strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_batch_of_loose_tensors_is_packed(dtype):
    lengths = torch.tensor([2, 0, 1, 3])
    sparse = KeyedJaggedTensor(["a", "b"], torch.arange(6, dtype=dtype), lengths=lengths)
    batch = Batch(torch.randn(2, 3), sparse, torch.tensor([0.0, 1.0]))
    packed = batch.packed()
    assert packed.packed() is packed
    assert packed.layout == BatchLayout(("a", "b"), 2, 3, 6, dtype == torch.int64)
    assert torch.equal(packed.dense, batch.dense)
    assert torch.equal(packed.labels, batch.labels)
    assert packed.sparse.to_lists() == sparse.to_lists()
    assert packed.sparse.values().dtype == dtype
    assert packed.layout.bytes_before_offsets == packed.layout.num_bytes - 64
    weighted = KeyedJaggedTensor(["a", "b"], torch.arange(6), torch.ones(6), lengths=lengths)
    with pytest.raises(ValueError, match="ids have weights"):
        Batch(batch.dense, weighted, batch.labels).packed()
    with pytest.raises(ValueError, match=r"float32 \[B\], got torch.float64 \(2, 3\)"):
        Batch(batch.dense.double(), sparse, batch.labels).packed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_keeps_the_weights_of_ids(dtype):
    """Evaluations pad their batches: without the weights a metric would depend on the size of a batch."""
    ids, weights = [[7, 5], [], [3]], [[0.5, 2.0], [], [4.0]]
    lengths, size = torch.tensor([2, 0, 1, 1, 1, 1]), 16
    values, numbers = torch.tensor([7, 5, 3, 1, 2, 3]), torch.tensor([0.5, 2.0, 4.0, 1.0, 8.0, 3.0], dtype=dtype)
    batch = Batch(torch.zeros(3, 0), KeyedJaggedTensor(["a", "b"], values, numbers, lengths=lengths), torch.ones(3))
    padded = pad_batch(batch, size).sparse
    assert padded.to_lists()["a"] == [*ids, *[[7]] * (size - 3)]
    assert padded["a"].weights().tolist() == [w for bag in weights for w in bag] + [0.5] * (size - 3)
    assert padded["b"].weights().tolist() == [1.0, 8.0, 3.0] + [1.0] * (size - 3)
    assert padded.weights().dtype == dtype
