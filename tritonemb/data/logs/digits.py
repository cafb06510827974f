"""Numbers in text, eight characters at a time: each uint64 holds the last eight bytes of a field, its last one on top.

Every step treats the eight bytes of a word side by side (Lamport, "Multiple byte processing with full-word
instructions", CACM 1975), so the numbers of a text cost a few dozen passes of plain NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PADDING = 24  # bytes before the text, so that the words of its first field can be read
MAX_DIGITS = 18  # of a decimal number: any such fits an int64
MAX_HEX_DIGITS = 8
LINE_FEED = 10
PIECE = 1 << 18  # bytes that stay in the processor's cache


def _each(byte: int) -> np.uint64:
    """This byte eight times."""
    return np.uint64(byte * 0x0101010101010101)


_ONES, _LOW, _TENTH, _ZEROS, _SIX = _each(0x01), _each(0x0F), _each(0x10), _each(0x30), _each(0x06)
_ABOVE_NINE, _TOP = _each(0x76), _each(0x80)
_PAIRS, _QUADS, _HALF = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
_U = [np.uint64(number) for number in range(65)]
_HUNDRED, _TEN_THOUSAND = np.uint64(100), np.uint64(10_000)


def padded(data: bytes) -> Array:
    """A text as uint8, with `PADDING` zeros before it and 8 after it."""
    text = np.zeros(PADDING + len(data) + 8, dtype=np.uint8)
    text[PADDING:-8] = np.frombuffer(data, np.uint8)
    return text


def count_bytes(text: Array, byte: int) -> int:
    """How often a byte occurs."""
    return sum(int(np.count_nonzero(text[i : i + PIECE] == byte)) for i in range(0, len(text), PIECE))


def words_of(text: Array) -> Array:
    """All words of a padded text: a view, in which word i ends before byte i of the text without its padding."""
    return np.ndarray((len(text) - PADDING + 1,), dtype="<u8", buffer=text, offset=PADDING - 8, strides=(1,))


def hexadecimal(words: Array, ends: Array, lengths: Array) -> tuple[Array, Array]:
    """Fields of up to 8 hexadecimal digits, in either case, as uint64; and which are such, as are empty ones.

    Args:
        words: of the text.
        ends: where each field ends in the text without its padding.
        lengths: its number of bytes.
    """
    word, shift = words[ends], None
    if (lengths & 7).any():  # or all are empty or of 8 bytes, as Criteo's are
        shift = _unused_bits(lengths)
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
    np.bitwise_and(digit, _TENTH, out=letter)  # 'g' to 'o' would be digits 16 to 24
    text |= letter
    if shift is not None:
        text >>= shift
    number = digit << _U[4]
    digit >>= _U[8]
    number |= digit
    number &= _PAIRS
    _join(number, digit, _U[8], _QUADS)
    _join(number, digit, _U[16], _HALF)
    valid = text == 0
    valid |= lengths == 0
    valid &= lengths <= MAX_HEX_DIGITS
    return number, valid


def decimal(words: Array, ends: Array, lengths: Array) -> tuple[Array, Array]:
    """Fields of a minus sign or none and 1 to 18 digits as int64; and which are such. An empty one is, as 0."""
    number, wrong = _eight_digits(words[ends], lengths)
    valid = wrong == 0
    values = number.view(np.int64)
    odd = np.flatnonzero(~valid | (lengths > 8))
    if len(odd):
        values[odd], valid[odd] = _long_or_negative(words, ends[odd], lengths[odd])
    return values, valid


def _long_or_negative(words: Array, ends: Array, lengths: Array) -> tuple[Array, Array]:
    first = words[np.maximum(ends - lengths + 8, 0)] & np.uint64(0xFF)  # the word that begins with the field
    negative = first == ord("-")
    digits = lengths - negative
    number, wrong = _eight_digits(words[ends], digits)
    for scale, place in ((10**8, 8), (10**16, 16)):
        more, wrong_there = _eight_digits(words[np.maximum(ends - place, 0)], np.clip(digits - place, 0, 8))
        number += more * np.uint64(scale)
        wrong |= wrong_there
    values = number.view(np.int64)
    np.negative(values, out=values, where=negative)
    return values, (wrong == 0) & (digits <= MAX_DIGITS) & (~negative | (digits > 0))


def _eight_digits(word: Array, digits: Array) -> tuple[Array, Array]:
    """The number that the last `digits` bytes of each word spell, and 0 where they are digits indeed."""
    shift = _unused_bits(digits)
    word ^= _ZEROS
    word >>= shift
    word <<= shift
    wrong = word + _ABOVE_NINE
    wrong |= word
    wrong &= _TOP
    upper = shift
    for factor, bits, mask in ((_U[10], _U[8], _PAIRS), (_HUNDRED, _U[16], _QUADS), (_TEN_THOUSAND, _U[32], _HALF)):
        np.right_shift(word, bits, out=upper)
        word *= factor
        word += upper
        word &= mask
    return word, wrong


def _unused_bits(lengths: Array) -> Array:
    """How many bits of each word lie before its field. NumPy shifts by 64 to 0."""
    bits = np.minimum(lengths, 8)
    bits <<= 3
    np.subtract(64, bits, out=bits)
    return bits.view(np.uint64)


def _join(lanes: Array, scratch: Array, bits: np.uint64, mask: np.uint64) -> None:
    """Bring each lane's two halves together; the lanes become twice as wide."""
    np.right_shift(lanes, bits + bits, out=scratch)
    lanes <<= bits
    lanes |= scratch
    lanes &= mask
