"""Compiled loops over categories: their hashes, as `encode` defines them."""

import numpy as np

from tritonemb.kernels.cpu.jit import compiled, inlined
from tritonemb.kernels.cpu.simd import mix

_32 = np.uint64(32)


@inlined
def _is_present(validity, bit):
    return validity.size == 0 or (np.int64(validity[bit >> 3]) >> (bit & 7)) & 1 != 0


@compiled
def hash_integers(values, validity, first, seed, num_embeddings, ids):
    """Write the ids of integers to int32 `ids`: 0 where bit `first + i` of `validity`, unless it has no bytes, is 0."""
    scale = np.uint64(num_embeddings - 1)
    for i in range(ids.size):
        hash64 = np.uint64(mix(np.uint64(values[i]) ^ seed))
        id = np.int64(((hash64 >> _32) * scale) >> _32) + 1
        ids[i] = np.int32(id if _is_present(validity, first + i) else 0)


@compiled
def hash_strings(data, offsets, hashes):
    """Hash strings `data[offsets[i] : offsets[i + 1]]` in place of their seeds, uint64 `hashes`."""
    for i in range(hashes.size):
        begin, end, hash64 = offsets[i], offsets[i + 1], hashes[i]
        for start in range(begin, end, 8):
            word = np.uint64(0)
            for index in range(min(8, end - start)):
                word |= np.uint64(data[start + index]) << np.uint64(8 * index)
            hash64 = np.uint64(mix(hash64 ^ word))
        hashes[i] = np.uint64(mix(hash64 ^ np.uint64(end - begin)))
