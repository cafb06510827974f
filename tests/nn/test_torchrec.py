"""TorchRec's `KeyedJaggedTensor` is accepted wherever ours is."""

from __future__ import annotations

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits, contents, make_collection, output_of, random_steps

pytestmark = pytest.mark.public
sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is not installed")


@pytest.mark.parametrize("by", ["lengths", "offsets"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", [None, te.optim.Adam(lr=0.1)], ids=["plain", "fused"])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_torchrec_batch_gives_the_same_result(pooled, optimizer, weighted, by):
    configs = [te.TableConfig(name, 9, 5, pooling="sum" if pooled else "none") for name in "ab"]
    collection, twin = (make_collection(configs, optimizer, pooled) for _ in range(2))
    for batch, grad in random_steps(collection, 3, weighted=weighted):
        sizes = {by: getattr(batch, by)()}
        reference = sparse.KeyedJaggedTensor(batch.keys(), batch.values(), batch.weights_or_none(), **sizes)
        result, expected = output_of(collection, reference), output_of(twin, batch)
        assert torch.equal(result, expected)
        result.backward(grad)
        expected.backward(grad)
    assert_same_bits(contents(collection), contents(twin))
    for actual, other in zip(collection.tables, twin.tables, strict=True):
        assert (actual.weight.grad is None) == (optimizer is not None)
        assert actual.weight.grad is None or torch.equal(actual.weight.grad, other.weight.grad)


def test_accumulating_torchrec_batches():
    configs = [te.TableConfig(name, 9, 5) for name in "ab"]
    collection, twin = (make_collection(configs, te.optim.Adagrad()) for _ in range(2))
    with collection.accumulate(), twin.accumulate():
        for batch, grad in random_steps(collection, 3):
            collection(sparse.KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths())).backward(grad)
            twin(batch).backward(grad)
    assert_same_bits(contents(collection), contents(twin))


def test_a_batch_with_several_batch_sizes_is_refused():
    collection = make_collection([te.TableConfig(name, 9, 5) for name in "ab"], None)
    batch = sparse.KeyedJaggedTensor(
        ["a", "b"], torch.arange(5), lengths=torch.tensor([1, 2, 2]), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(ValueError, match="variable_stride_per_key"):
        collection(batch)
