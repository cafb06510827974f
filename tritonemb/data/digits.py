"""Numbers in text, eight characters at a time: each uint64 holds the last eight bytes of a field, its last one on top.

Every step treats the eight bytes of a word side by side (Lamport, "Multiple byte processing with full-word
instructions", CACM 1975), so a column of a chunk costs a few dozen passes of plain NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PADDING = 24  # bytes before the text, so that the words of its first field can be read
MAX_DIGITS = 18  # of a decimal number: any such fits an int64
MAX_HEX_DIGITS = 8


def _each(byte: int) -> np.uint64:
    """This byte eight times."""
    return np.uint64(byte * 0x0101010101010101)


_ONES, _LOW, _TENTH, _ZEROS, _SIX = _each(0x01), _each(0x0F), _each(0x10), _each(0x30), _each(0x06)
_ABOVE_NINE, _TOP = _each(0x76), _each(0x80)
_PAIRS, _QUADS, _HALF = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
_U = [np.uint64(number) for number in range(65)]
_HUNDRED, _TEN_THOUSAND = np.uint64(100), np.uint64(10_000)


def words_of(text: Array) -> Array:
    """All words of a text (uint8), one beginning at each byte: a view."""
    return np.ndarray((len(text) - 7,), dtype="<u8", buffer=text, strides=(1,))


def hexadecimal(words: Array, ends: Array, lengths: Array) -> tuple[Array, Array]:
    """Fields of up to 8 hexadecimal digits, in either case, as uint64; and which are such (an empty one is, as 0).

    Args:
        words: of the text.
        ends: where each field ends, at least 8.
        lengths: its number of bytes.
    """
    word, shift = words[ends - 8], _unused_bits(lengths)
    if shift is not None:
        word >>= shift
        word <<= shift
    letter = word >> _U[6]
    letter &= _ONES
    digit = word & _LOW
    digit += letter * _U[9]  # 'a' is 0x61: its low half is 1
    # Written back as lower-case text, a digit must give what was read.
    letter <<= _U[5]
    word |= letter
    text = digit + _SIX
    text >>= _U[4]
    text &= _ONES
    text *= _U[0x27]
    text += digit
    text += _ZEROS
    text ^= word
    text |= digit & _TENTH  # 'g' to 'o' would be digits 16 to 24
    if shift is not None:
        text >>= shift
    number = digit << _U[4]
    digit >>= _U[8]
    number |= digit
    number &= _PAIRS
    number = _joined(number, _U[8], _QUADS)
    number = _joined(number, _U[16], _HALF)
    valid = text == 0
    valid &= lengths <= MAX_HEX_DIGITS
    return number, valid


def decimal(words: Array, text: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """Fields of a minus sign or none and 1 to 18 digits as int64; and which are such (an empty one is, as 0).

    Args:
        starts, ends: of each field in the text; ends are at least 24.
    """
    lengths = ends - starts
    negative = text[starts] == ord("-")
    digits = lengths - negative
    number, wrong = _eight_digits(words[ends - 8], digits)
    valid = wrong == 0
    valid &= digits <= MAX_DIGITS
    if (digits > 8).any():
        long = np.flatnonzero((digits > 8) & valid)
        for scale, place in ((10**8, 16), (10**16, 24)):
            more, wrong = _eight_digits(words[ends[long] - place], np.maximum(digits[long] - place + 8, 0))
            number[long] += more * np.uint64(scale)
            valid[long] &= wrong == 0
    values = number.view(np.int64)
    if negative.any():
        valid &= ~negative | (digits > 0)
        np.negative(values, out=values, where=negative)
    return values, valid


def _eight_digits(word: Array, digits: Array) -> tuple[Array, Array]:
    """The number that the last `digits` bytes of each word spell, and 0 where they are digits indeed."""
    shift = _unused_bits(digits)
    word ^= _ZEROS
    if shift is not None:
        word >>= shift
        word <<= shift
    wrong = word + _ABOVE_NINE
    wrong |= word
    wrong &= _TOP
    for factor, bits, mask in ((_U[10], _U[8], _PAIRS), (_HUNDRED, _U[16], _QUADS), (_TEN_THOUSAND, _U[32], _HALF)):
        upper = word >> bits
        word *= factor
        word += upper
        word &= mask
    return word, wrong


def _unused_bits(lengths: Array) -> Array | None:
    """How many bits of each word lie before its field; None if none do. NumPy shifts by 64 to 0."""
    if len(lengths) and lengths.min() >= 8:
        return None
    return ((8 - np.minimum(lengths, 8)) << 3).astype(np.uint64)


def _joined(lanes: Array, bits: np.uint64, mask: np.uint64) -> Array:
    joined = lanes << bits
    lanes >>= bits + bits
    joined |= lanes
    joined &= mask
    return joined
