import pytest

pa = pytest.importorskip("pyarrow")

from tritonemb.data.encode import encode_categories  # noqa: E402


def test_ids_follow_training_counts_then_value():
    ids, num_embeddings = encode_categories(pa.array(["c", "b", "b", "a", "c", "b", None]), num_train=7)
    assert ids.tolist() == [2, 1, 1, 3, 2, 1, 0]  # b: 3 rows, c: 2, a: 1
    assert num_embeddings == 4


def test_what_training_rows_do_not_hold_is_zero():
    ids, num_embeddings = encode_categories(pa.array([7, 7, 5, 9, 9, 9, 7]), num_train=3)
    assert ids.tolist() == [1, 1, 2, 0, 0, 0, 1]
    assert num_embeddings == 3


def test_rare_categories_share_zero_with_missing():
    ids, num_embeddings = encode_categories(pa.array([1, 1, 1, 2, 2, 3, None]), num_train=7, min_count=2)
    assert ids.tolist() == [1, 1, 1, 2, 2, 0, 0]
    assert num_embeddings == 3


def test_chunks_and_ties():
    chunks = pa.chunked_array([pa.array([9, 4], pa.uint32()), pa.array([4, 9, 1], pa.uint32())])
    ids, num_embeddings = encode_categories(chunks, num_train=5)
    assert ids.tolist() == [2, 1, 1, 2, 3]
    assert num_embeddings == 4


def test_only_missing_values():
    ids, num_embeddings = encode_categories(pa.nulls(3, pa.uint32()), num_train=2)
    assert (ids.tolist(), num_embeddings) == ([0, 0, 0], 1)
