"""`KeyedJaggedTensor` against Python lists."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import tritonemb as te
from tests.strategies import ID_DTYPES, id_dtypes
from tritonemb import KeyedJaggedTensor

Lists = dict[str, list[list[int]]]


@st.composite
def lists(draw: st.DrawFn, keys: list[str] | None = None, batch_size: int | None = None) -> Lists:
    """Bags of any ids that fit 32 bits: for each key the same number."""
    if keys is None:
        keys = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
    if batch_size is None:
        batch_size = draw(st.integers(0, 4))
    bag = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3)
    return {key: draw(st.lists(bag, min_size=batch_size, max_size=batch_size)) for key in keys}


def weights_for(given_lists: Lists) -> dict[str, list[list[float]]]:
    """Each value's own number, so that a weight shows where it came from."""
    numbers = iter(range(10**6))
    return {key: [[float(next(numbers)) for _ in bag] for bag in bags] for key, bags in given_lists.items()}


def weight_lists(batch: KeyedJaggedTensor) -> dict[str, list[list[float]]]:
    """A batch's weights as lists, by way of a batch that has them as values."""
    return KeyedJaggedTensor(batch.keys(), batch.weights(), offsets=batch.offsets()).to_lists()


def check(batch: KeyedJaggedTensor, expected: Lists, weights=None) -> None:
    """The batch holds these lists; lengths, offsets, stride and weights agree."""
    assert batch.keys() == list(expected)
    assert batch.to_lists() == expected
    lengths = [len(bag) for bags in expected.values() for bag in bags]
    assert batch.lengths().tolist() == lengths
    assert batch.offsets().tolist() == [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    assert batch.lengths().dtype == batch.offsets().dtype
    assert batch.stride() == len(next(iter(expected.values()), []))
    assert batch.values().tolist() == [id for bags in expected.values() for bag in bags for id in bag]
    assert (batch.weights_or_none() is None) == (weights is None)
    if weights is not None:
        assert weight_lists(batch) == weights


@given(lists(), id_dtypes, id_dtypes, st.booleans())
def test_every_way_to_make_one(expected, id_dtype, offset_dtype, weighted):
    weights = weights_for(expected) if weighted else None
    batch = KeyedJaggedTensor.from_lists(expected, weights, dtype=id_dtype)
    assert batch.values().dtype == id_dtype
    check(batch, expected, weights)
    args = (list(expected), batch.values())
    lengths, offsets = batch.lengths().to(offset_dtype), batch.offsets().to(offset_dtype)
    square = lengths.reshape(len(expected), -1)
    for other in (
        KeyedJaggedTensor.from_lengths(*args, lengths, batch.weights_or_none()),
        KeyedJaggedTensor.from_lengths(*args, square, batch.weights_or_none()),
        KeyedJaggedTensor.from_offsets(*args, offsets, batch.weights_or_none()),
        KeyedJaggedTensor(*args, batch.weights_or_none(), lengths=lengths),
    ):
        assert other.lengths().dtype == offset_dtype
        check(other, expected, weights)


@given(st.data(), st.integers(0, 4), st.integers(1, 3), st.booleans())
def test_concat_joins_keys(data, batch_size, num_parts, weighted):
    parts = [data.draw(lists([f"{part}{k}" for k in range(part + 1)], batch_size)) for part in range(num_parts)]
    joined = {key: bags for part in parts for key, bags in part.items()}
    weights = weights_for(joined) if weighted else None
    created = [
        KeyedJaggedTensor.from_lists(part, {key: weights[key] for key in part} if weighted else None) for part in parts
    ]
    check(KeyedJaggedTensor.concat(created), joined, weights)


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.booleans(), id_dtypes)
def test_stack_joins_samples(data, num_parts, num_keys, weighted, dtype):
    keys = [f"k{index}" for index in range(num_keys)]
    parts = [data.draw(lists(keys)) for _ in range(num_parts)]
    part_weights = [
        {key: [[value + 1000 * i for value in bag] for bag in bags] for key, bags in weights_for(part).items()}
        for i, part in enumerate(parts)
    ]
    created = [
        KeyedJaggedTensor.from_lists(part, weights if weighted else None, dtype=dtype)
        for part, weights in zip(parts, part_weights, strict=True)
    ]
    stacked = KeyedJaggedTensor.stack(created)
    assert stacked.values().dtype == dtype
    expected = {key: [bag for part in parts for bag in part[key]] for key in keys}
    weights = {key: [bag for part in part_weights for bag in part[key]] for key in keys}
    check(stacked, expected, weights if weighted else None)


@given(st.data(), lists(), st.booleans())
def test_split_permute_and_single_keys(data, expected, weighted):
    weights = weights_for(expected) if weighted else None
    batch = KeyedJaggedTensor.from_lists(expected, weights)
    keys = list(expected)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=3)))
    bounds = [0, *cuts, len(keys)]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    parts = batch.split(sizes)
    assert len(parts) == len(sizes)
    for part, begin, size in zip(parts, bounds, sizes, strict=False):
        local = keys[begin : begin + size]
        check(part, {k: expected[k] for k in local}, weights and {k: weights[k] for k in local})
    if all(sizes):
        check(KeyedJaggedTensor.concat(parts), expected, weights)
    order = data.draw(st.lists(st.sampled_from(range(len(keys))), min_size=1, unique=True))
    chosen = [keys[index] for index in order]
    check(batch.permute(order), {k: expected[k] for k in chosen}, weights and {k: weights[k] for k in chosen})
    for key in keys:
        check(batch[key], {key: expected[key]}, weights and {key: weights[key]})


def test_nothing_left():
    batch = KeyedJaggedTensor.from_lists({"a": [[1, 2], []]})
    for empty in (batch.permute([]), batch.split([0, 1])[0]):
        assert empty.keys() == []
        assert empty.to_lists() == {}
        assert empty.values().tolist() == []
        assert empty.offsets().tolist() == [0]
        assert empty.stride() == 0


def test_values_may_be_rows():
    rows = torch.randn(3, 5)
    batch = KeyedJaggedTensor(["a", "b"], rows, lengths=torch.tensor([1, 0, 0, 2]))
    assert torch.equal(batch["b"].values(), rows[1:])
    assert batch.to_lists()["b"] == [[], rows[1:].tolist()]


@given(lists(), st.booleans())
def test_it_is_a_pytree(expected, weighted):
    batch = KeyedJaggedTensor.from_lists(expected, weights_for(expected) if weighted else None, dtype=torch.int32)
    batch.offsets()
    leaves, spec = pytree.tree_flatten(batch)
    parts = (batch.values(), batch.weights_or_none(), batch.lengths(), batch.offsets())
    assert all(leaf is part for leaf, part in zip(leaves, parts, strict=True))
    check(pytree.tree_unflatten(leaves, spec), expected, weights_for(expected) if weighted else None)
    half = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor // 2, batch)
    assert half.keys() == batch.keys()
    assert half.values().tolist() == [value // 2 for value in batch.values().tolist()]
    restored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    check(pytree.tree_unflatten(leaves, restored), expected, weights_for(expected) if weighted else None)


def test_pytree_paths_name_the_parts():
    batch = KeyedJaggedTensor.from_lists({"a": [[1]]})
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"x": batch})[0]]
    assert paths == [f"['x'].{part}" for part in ("values", "weights", "lengths", "offsets")]


def test_to():
    batch = KeyedJaggedTensor.from_lists({"a": [[1], [2, 3]]}, {"a": [[0.5], [1.5, 2.5]]})
    meta = batch.to("meta")
    assert meta.device().type == "meta"
    assert all(part.is_meta for part in (meta.values(), meta.weights(), meta.lengths(), meta.offsets()))
    assert meta.keys() == ["a"]
    assert meta.values().shape == (3,)
    check(batch.to("cpu"), {"a": [[1], [2, 3]]}, {"a": [[0.5], [1.5, 2.5]]})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_to_a_gpu_and_pinned():
    expected = {"a": [[1], [2, 3]], "b": [[], [4]]}
    batch = KeyedJaggedTensor.from_lists(expected, weights_for(expected))
    pinned = batch.pin_memory()
    assert all(part.is_pinned() for part in (pinned.values(), pinned.weights(), pinned.lengths()))
    check(pinned, expected, weights_for(expected))
    moved = pinned.to("cuda", non_blocking=True)
    assert moved.device().type == "cuda"
    check(moved.to("cpu"), expected, weights_for(expected))


def double(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(batch.keys(), batch.values() * 2, batch.weights_or_none(), lengths=batch.lengths())


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_it_passes_through_compile(dtype, weighted):
    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    for expected in ({"a": [[1], [2, 3]], "b": [[], [4]]}, {"a": [[], [2, 3, 4]], "b": [[5], [4, 1]]}):
        weights = weights_for(expected) if weighted else None
        twice = {key: [[2 * value for value in bag] for bag in bags] for key, bags in expected.items()}
        check(compiled(KeyedJaggedTensor.from_lists(expected, weights, dtype=dtype)), twice, weights)


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_it_passes_through_export(dtype):
    class Double(torch.nn.Module):
        def forward(self, batch):
            return double(batch)

    first, second = {"a": [[1], [2, 3]]}, {"a": [[9, 8, 7], [6]]}
    values = torch.export.Dim("values", min=2)
    exported = torch.export.export(
        Double(), (KeyedJaggedTensor.from_lists(first, dtype=dtype),), dynamic_shapes=([{0: values}, None, {}, None],)
    ).module()
    check(exported(KeyedJaggedTensor.from_lists(second, dtype=dtype)), {"a": [[18, 16, 14], [12]]})


IDS, LENGTHS = torch.tensor([1, 2, 3]), torch.tensor([1, 0, 0, 2])
BAD = {
    "duplicate key in ['a', 'a']": {"keys": ["a", "a"]},
    "keys must be str, got ['a', 3]": {"keys": ["a", 3]},
    "pass lengths or offsets": {"lengths": None},
    "lengths must be int32 or int64, got torch.float32": {"lengths": LENGTHS.float()},
    "lengths must be int32 or int64, got torch.int16": {"lengths": LENGTHS.short()},
    "lengths must be 1-D, got shape (4, 1, 1)": {"lengths": LENGTHS.reshape(4, 1, 1)},
    "lengths has 3 elements; for 2 keys, expected a multiple of 2": {"lengths": LENGTHS[:3]},
    "lengths must not be negative: feature 'b', sample 0 has -1": {"lengths": torch.tensor([1, 1, -1, 2])},
    "lengths sum to 4 but there are 3 values": {"lengths": torch.tensor([1, 1, 0, 2])},
    "lengths sum to 2 but there are 3 values": {"lengths": torch.tensor([1, 0, 0, 1])},
    "offsets must be int32 or int64, got torch.float64": {"lengths": None, "offsets": torch.zeros(5).double()},
    "offsets must have at least one element": {"lengths": None, "offsets": IDS[:0], "keys": []},
    "offsets has 4 elements; for 2 keys, expected a multiple of 2 plus 1": {
        "lengths": None, "offsets": torch.tensor([0, 1, 1, 3]),
    },
    "5 offsets need 4 lengths, got 6; pass only one of them": {
        "lengths": torch.tensor([1, 0, 0, 2, 0, 0]), "offsets": torch.tensor([0, 1, 1, 1, 3]),
    },
    "lengths and offsets disagree: feature 'a', sample 1 has length 2, but by its offsets 0; pass only one of them": {
        "lengths": torch.tensor([1, 2, 0, 0]), "offsets": torch.tensor([0, 1, 1, 1, 3], dtype=torch.int32),
    },
    "keys must be a list of feature names, got None": {"keys": None},
    "keys must be a list of feature names, got 'ab'": {"keys": "ab"},
    "values must be a dense tensor of at least one dimension, got list; make one with torch.tensor": {
        "values": [1, 2, 3],
    },
    "values must be a dense tensor of at least one dimension, got NoneType": {"values": None},
    "values must be a dense tensor of at least one dimension, got torch.strided": {"values": torch.tensor(3)},
    "values must be a dense tensor of at least one dimension, got torch.sparse_coo": {"values": IDS.to_sparse()},
    "lengths must be a dense tensor of at least one dimension, got list": {"lengths": [1, 0, 0, 2]},
    "offsets must be a dense tensor of at least one dimension, got ndarray": {"offsets": LENGTHS.numpy()},
    "weights must be a dense tensor of at least one dimension, got torch.sparse_coo": {
        "weights": torch.ones(3).to_sparse(),
    },
    "offsets must start with 0, got 1": {"lengths": None, "offsets": torch.tensor([1, 1, 1, 2, 3])},
    "offsets must ascend: feature 'a', sample 1 goes from 2 to 1": {
        "lengths": None, "offsets": torch.tensor([0, 2, 1, 2, 3]),
    },
    "offsets end at 2 but there are 3 values": {"lengths": None, "offsets": torch.tensor([0, 1, 1, 1, 2])},
    "weights must have one element per value: expected shape (3,), got (2,)": {"weights": torch.ones(2)},
    "weights must be floating point, got torch.int64": {"weights": IDS},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_has_a_name(message):
    args = {"keys": ["a", "b"], "values": IDS, "weights": None, "lengths": LENGTHS, "offsets": None}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        KeyedJaggedTensor(**(args | BAD[message]))


def test_of_lengths_and_offsets_only_the_offsets_are_kept():
    """Where nobody can read them they may disagree, and all that is made of a batch must still be of one kind."""
    lengths, offsets = torch.tensor([2, 0, 1, 0]), torch.tensor([0, 1, 1, 1, 3])
    agreeing = KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS.int(), offsets=offsets)
    check(KeyedJaggedTensor.concat([agreeing]), {"a": [[1], []], "b": [[], [2, 3]]}, None)
    unread = KeyedJaggedTensor(["a", "b"], IDS.to("meta"), lengths=lengths.to("meta"), offsets=offsets.to("meta"))
    assert unread.lengths_or_none() is None

    def traced(values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor.concat([KeyedJaggedTensor(["a", "b"], values, lengths=lengths, offsets=offsets)])

    compiled = torch.compile(traced, fullgraph=True, backend="eager")
    check(compiled(IDS, lengths, offsets), {"a": [[1], []], "b": [[], [2, 3]]}, None)


def test_bad_lists_have_a_name():
    make = KeyedJaggedTensor.from_lists
    with pytest.raises(TypeError, match=r"from_lists expects {key: a list of ids for each sample}"):
        make([[1], [2]])
    for lists in ({"a": [1, 2]}, {"a": 3}):
        with pytest.raises(TypeError, match="'a' needs a list of ids for each sample, got"):
            make(lists)
        with pytest.raises(TypeError, match="'a' needs a list of weights for each sample, got"):
            make({"a": [[1]]}, lists)
    with pytest.raises(TypeError, match="'a' needs a list of ids for each sample, got"):
        make({"a": torch.tensor([1, 2])})
    parts = {"a": make({"a": [[1]]}), "b": make({"b": [[2]]})}
    assert KeyedJaggedTensor.concat(parts.values()).to_lists() == {"a": [[1]], "b": [[2]]}
    for join in (KeyedJaggedTensor.concat, KeyedJaggedTensor.stack):
        for parts in ([1], [make({"a": [[1]]}), None], make({"a": [[1]]})):
            with pytest.raises(TypeError, match=f"{join.__name__} expects a list of tritonemb.KeyedJaggedTensor"):
                join(parts)
    with pytest.raises(ValueError, match=re.escape("same number of samples, got {'a': 1, 'b': 2}")):
        make({"a": [[1]], "b": [[1], [2]]})
    with pytest.raises(TypeError, match=r"ids of 'a' must be integers, got 1\.5"):
        make({"a": [[1.5]]})
    for dtype, value in ((torch.int64, 2**63), (torch.int64, -(2**63) - 1), (torch.int32, 2**31)):
        with pytest.raises(ValueError, match=rf"ids of 'b' must lie in \[.*\), got {value}"):
            make({"a": [[1]], "b": [[value]]}, dtype=dtype)
        assert make({"a": [[torch.iinfo(dtype).min]]}, dtype=dtype).values().tolist() == [torch.iinfo(dtype).min]
    with pytest.raises(TypeError, match=r"dtype must be torch\.int32 or torch\.int64, got torch\.uint8"):
        make({"a": [[1]]}, dtype=torch.uint8)
    with pytest.raises(ValueError, match="weights have no key 'a'"):
        make({"a": [[1]]}, {"b": [[1.0]]})
    with pytest.raises(ValueError, match="weights of 'a' have 2 samples, its ids have 1"):
        make({"a": [[1]]}, {"a": [[1.0], []]})
    with pytest.raises(ValueError, match="'a', sample 1: 2 ids but 1 weights"):
        make({"a": [[1], [2, 3]]}, {"a": [[1.0], [2.0]]})


def test_bad_calls_have_a_name():
    a, b = KeyedJaggedTensor.from_lists({"a": [[1]]}), KeyedJaggedTensor.from_lists({"b": [[1], []]})
    weighted = KeyedJaggedTensor.from_lists({"a": [[1]]}, {"a": [[1.0]]})
    for join in (KeyedJaggedTensor.concat, KeyedJaggedTensor.stack):
        with pytest.raises(ValueError, match="at least one"):
            join([])
    with pytest.raises(ValueError, match=re.escape("batches of one size, got [1, 2]")):
        KeyedJaggedTensor.concat([a, b])
    with pytest.raises(ValueError, match="duplicate key"):
        KeyedJaggedTensor.concat([a, a])
    without_keys = a.split([0, 1])[0]
    assert KeyedJaggedTensor.stack([without_keys, without_keys]).keys() == []
    with pytest.raises(ValueError, match="batches with the same keys in one order"):
        KeyedJaggedTensor.stack([a, b])
    with pytest.raises(ValueError, match="all batches or none must have weights"):
        KeyedJaggedTensor.stack([a, weighted])
    for segments in ([2], [0], [2, -1], []):
        with pytest.raises(ValueError, match="must add up to the 1 keys"):
            a.split(segments)
    with pytest.raises(ValueError, match=re.escape("index 1 is not in [0, 1)")):
        a.permute([1])
    with pytest.raises(ValueError, match="an index is repeated"):
        a.permute([0, 0])
    with pytest.raises(KeyError, match="no key 'b' among"):
        a["b"]
    with pytest.raises(ValueError, match="has no weights"):
        a.weights()


def test_repr_says_what_it_is():
    batch = te.KeyedJaggedTensor.from_lists({"a": [[1], [2]]}, dtype=torch.int32)
    assert repr(batch) == (
        "KeyedJaggedTensor(keys=['a'], batch_size=2, values=(2,) torch.int32, weighted=False, device=cpu)"
    )
