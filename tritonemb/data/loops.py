"""Compiled loops of readers: hashes of categories, as `encode` defines them, and lines in Criteo's format."""

import numpy as np

from tritonemb.kernels.cpu.jit import compiled, inlined
from tritonemb.kernels.cpu.simd import mix

_32 = np.uint64(32)
_MINUS, _ZERO, _TAB, _LINE_FEED = map(ord, "-0\t\n")
_HEXADECIMAL = np.array([int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else 16 for byte in range(256)])


@inlined
def _is_present(validity, bit):
    return validity.size == 0 or (np.int64(validity[bit >> 3]) >> (bit & 7)) & 1 != 0


@compiled
def integer_ids(values, validity, first, seed, num_embeddings, ids):
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


@compiled
def parse_criteo(text, is_labelled, numbers, categories, validity):
    """Parse lines of integers and hexadecimal categories to int64 `numbers` `[I, N]` and uint32 `categories` `[C, N]`,
    0 where missing; set the bits of the present values in `validity` `[I + C, (N + 7) // 8]`, all zeros. Return whether
    all lines are valid, and have labels of one digit in the first column if `is_labelled`."""
    position, num_columns = 0, numbers.shape[0] + categories.shape[0]
    for row in range(numbers.shape[1]):
        for column in range(num_columns):
            begin, value = position, np.int64(0)
            if column < numbers.shape[0]:
                is_negative = text[position] == _MINUS
                position += 1 if is_negative else 0
                start = position
                while _ZERO <= text[position] <= _ZERO + 9:
                    value = value * 10 + (np.int64(text[position]) - _ZERO)
                    position += 1
                num_digits = position - start
                if num_digits > 18 or (is_negative and num_digits == 0):
                    return False
                if is_labelled and column == 0 and position > begin + 1:
                    return False
                numbers[column, row] = -value if is_negative else value
            else:
                while _HEXADECIMAL[text[position]] < 16:
                    value = (value << 4) | _HEXADECIMAL[text[position]]
                    position += 1
                if position - begin > 8:
                    return False
                categories[column - numbers.shape[0], row] = np.uint32(value)
            if position > begin:
                validity[column, row >> 3] |= np.uint8(1 << (row & 7))
            if text[position] != (_TAB if column + 1 < num_columns else _LINE_FEED):
                return False
            position += 1
    return position == text.size
