import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.logs import line, options, pa, rows_of, write
from tritonemb.data import ClickLog
from tritonemb.data.encode import (
    Numbering,
    encode_categories,
    feature_seed,
    hash_integers,
    hash_strings,
    hashes_to_ids,
)

WORD = (1 << 64) - 1


def mix(z: int) -> int:
    """The documented definition, word for word."""
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & WORD
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def hash_of(name: str, value: int | bytes) -> int:
    h = seed_of(name)
    if isinstance(value, int):
        return mix(h ^ value & WORD)
    for start in range(0, len(value), 8):
        h = mix(h ^ int.from_bytes(value[start : start + 8].ljust(8, b"\0"), "little"))
    return mix(h ^ len(value))


def id_of(h: int, num_embeddings: int) -> int:
    return 1 + ((h >> 32) * (num_embeddings - 1) >> 32)


def hashes_of_strings(name: str, strings: list[bytes]) -> list[int]:
    offsets = np.cumsum([0, *map(len, strings)])
    return hash_strings(np.frombuffer(b"".join(strings), np.uint8), offsets, feature_seed(name)).tolist()


def test_golden_values():
    """Models that were trained with these ids must find them again: these numbers never change."""
    assert hash_integers(np.array([0, 1, -1, 2**40]), feature_seed("cat_1")).tolist() == GOLDEN_INTEGERS
    assert hashes_of_strings("user", [b"", b"a", b"12345678", b"123456789"]) == GOLDEN_STRINGS
    assert hashes_to_ids(np.array(GOLDEN_INTEGERS, np.uint64), 1000).tolist() == GOLDEN_IDS


GOLDEN_INTEGERS = [13009646501444715986, 7160523303418773416, 8713817709300499043, 15976134593402383968]
GOLDEN_STRINGS = [13077179909825780359, 10319332950920371323, 13687503767974746422, 9437534023217219539]
GOLDEN_IDS = [705, 388, 472, 866]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.text(max_size=9), st.integers(2, 2**31))
def test_integers_follow_the_definition(values, name, num_embeddings):
    hashes = hash_integers(np.array(values), feature_seed(name))
    assert hashes.tolist() == [hash_of(name, value) for value in values]
    assert hashes_to_ids(hashes.copy(), num_embeddings).tolist() == [id_of(int(h), num_embeddings) for h in hashes]


@given(
    st.lists(st.binary(max_size=40) | st.binary(min_size=60, max_size=200), min_size=1, max_size=20),
    st.text(max_size=9),
)
def test_strings_follow_the_definition(values, name):
    assert hashes_of_strings(name, values) == [hash_of(name, value) for value in values]


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint32", "int64", "uint64"])
def test_ids_of_integers_follow_the_definition(kind):
    ends = [np.iinfo(kind).min, np.iinfo(kind).max]
    values, numbering = [*ends, None, 1, 0, None, 7, *ends * 4, None, 3], Numbering("item", 1000)
    ids = [0 if value is None else id_of(hash_of("item", value), 1000) for value in values]
    for first in (0, 3, 9):
        assert numbering.ids(pa.array(values, kind)[first:]).tolist() == ids[first:]
    assert numbering.ids(pa.array(ends, kind)).tolist() == ids[:2]
    assert Numbering("item", 2).ids(pa.array(values, kind)).tolist() == [int(value is not None) for value in values]


@pytest.mark.parametrize("num_embeddings", [2, 3, 100, 1 << 31])
def test_the_ends_of_the_range(num_embeddings):
    hashes = np.array([0, WORD], dtype=np.uint64)
    assert hashes_to_ids(hashes, num_embeddings).tolist() == [1, num_embeddings - 1]


def test_categories_of_a_text_file_are_hashed_as_integers(tmp_path):
    path = write(tmp_path, [line(categories={1: "00ABCDEF", 26: "0"})])
    (row,) = rows_of(ClickLog(path, options(num_embeddings=5000)))
    assert row[14] == id_of(hash_of("cat_1", 0xABCDEF), 5000)
    assert row[-1] == id_of(hash_of("cat_26", 0), 5000)


@pytest.mark.parametrize(
    ("column", "kwargs", "ids"),
    [
        (pa.array(["c", "b", "b", "a", "c", "b", None]), {"num_train": 7}, [2, 1, 1, 3, 2, 1, 0]),  # b: 3 rows, c: 2
        (pa.array([7, 7, 5, 9, 9, 9, 7]), {"num_train": 3}, [1, 1, 2, 0, 0, 0, 1]),  # training rows lack 9
        (pa.array([1, 1, 1, 2, 2, 3, None]), {"num_train": 7, "min_count": 2}, [1, 1, 1, 2, 2, 0, 0]),
        (pa.chunked_array([pa.array([9, 4]), pa.array([4, 9, 1])]), {"num_train": 5}, [2, 1, 1, 2, 3]),  # ties by value
        (pa.nulls(3, pa.uint32()), {"num_train": 2}, [0, 0, 0]),
    ],
    ids=range(5),
)
def test_categories_without_hashes_follow_training_counts_then_values(column, kwargs, ids):
    result, num_embeddings = encode_categories(column, **kwargs)
    assert (result.tolist(), num_embeddings) == (ids, max(ids) + 1)
