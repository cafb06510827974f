import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from tests.data.logs import line, options, rows_of, write  # noqa: E402
from tritonemb.data import ClickLog  # noqa: E402
from tritonemb.data.encode import feature_seed, hash_integers, hash_strings, hashes_to_ids  # noqa: E402

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


@pytest.mark.parametrize("num_embeddings", [2, 3, 100, 1 << 31])
def test_the_ends_of_the_range(num_embeddings):
    hashes = np.array([0, WORD], dtype=np.uint64)
    assert hashes_to_ids(hashes, num_embeddings).tolist() == [1, num_embeddings - 1]


def test_ids_of_neighbours_spread_evenly():
    """Chi-square of 1,000 bins over 200,000 consecutive integers: 999 ± 45 is what chance gives."""
    for name in ("cat_1", "cat_2", "user"):
        ids = hashes_to_ids(hash_integers(np.arange(200_000), feature_seed(name)), 1001)
        counts = np.bincount(ids, minlength=1001)
        assert counts[0] == 0
        assert 800 < (((counts[1:] - 200.0) ** 2) / 200).sum() < 1200


def test_features_have_hashes_of_their_own():
    left, right = (
        hashes_to_ids(hash_integers(np.arange(10_000), feature_seed(name)), 101) for name in ("cat_1", "cat_2")
    )
    assert 50 < int((left == right).sum()) < 150


def test_categories_of_a_text_file_are_hashed_as_integers(tmp_path):
    path = write(tmp_path, [line(categories={1: "00ABCDEF", 26: "0"})])
    (row,) = rows_of(ClickLog(path, options(num_embeddings=5000)))
    assert row[14] == id_of(hash_of("cat_1", 0xABCDEF), 5000)
    assert row[-1] == id_of(hash_of("cat_26", 0), 5000)
