"""From values to ids by hashing: no pass over the data beforehand, and the same ids on every machine.

The 64-bit hash of a value, all arithmetic modulo 2^64:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    seed(feature) = the first 8 bytes, little-endian, of SHA-256 of the feature's name in UTF-8
    hash(feature, integer x) = mix(seed(feature) ^ x), x in two's complement
    hash(feature, bytes s):  h = seed(feature)
                             for each 8 bytes w of s, little-endian, the last ones filled up with zeros: h = mix(h ^ w)
                             h = mix(h ^ length of s)

(`mix` is the finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014.) Strings are hashed as their UTF-8 bytes. Of
`n` ids, 0 stands for a missing value and the others for hashes: `id = 1 + ((hash >> 32) * (n - 1) >> 32)`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = (np.uint64(bits) for bits in (30, 27, 31, 32))


def feature_seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def hash_integers(values: Array, seed: np.uint64) -> Array:
    """uint64 hashes of integers `[N]`."""
    return mix(values.astype(np.uint64) ^ seed)


def hash_strings(data: Array, offsets: Array, seed: np.uint64) -> Array:
    """uint64 hashes `[N]` of strings: string i is `data[offsets[i] : offsets[i + 1]]`, uint8."""
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    padded = np.concatenate([data, np.zeros(8, dtype=np.uint8)])
    words = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,))
    hashes = np.full(len(starts), seed, dtype=np.uint64)
    active = np.flatnonzero(lengths > 0)
    place = 0
    while len(active):
        left = np.minimum(lengths[active] - place, 8)
        unused = ((8 - left) << 3).astype(np.uint64)
        word = words[starts[active] + place] << unused >> unused
        hashes[active] = mix(hashes[active] ^ word)
        place += 8
        active = active[lengths[active] > place]
    return mix(hashes ^ lengths.view(np.uint64))


def mix(hashes: Array) -> Array:
    """SplitMix64's finaliser, in place."""
    scratch = hashes >> _30
    hashes ^= scratch
    hashes *= _FIRST
    np.right_shift(hashes, _27, out=scratch)
    hashes ^= scratch
    hashes *= _SECOND
    np.right_shift(hashes, _31, out=scratch)
    hashes ^= scratch
    return hashes


def ids_of(hashes: Array, num_embeddings: int) -> Array:
    """int32 ids from 1 to `num_embeddings - 1`; overwrites the hashes."""
    hashes >>= _32
    hashes *= np.uint64(num_embeddings - 1)
    hashes >>= _32
    ids = hashes.astype(np.int32)
    ids += 1
    return ids
