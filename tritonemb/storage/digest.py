"""What tells a file of rows from a damaged or another one, holes or no holes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path

from tritonemb.storage.apart import apart
from tritonemb.storage.clone import BATCH, written_parts
from tritonemb.storage.file import PageFile, buffer_of
from tritonemb.storage.store import StorageError, advice
from tritonemb.storage.threads import shared_threads

PIECE_BYTES = 1 << 18  # that are checked at once; a part of the digest's definition
_MASK = (1 << 64) - 1


def digest(path: Path) -> int:
    """64 bits of a file's content, from the CRC-32 of each piece that is not all zeros, and its place.

    Holes are not read, and how a file system stores zeros does not matter. The file's size, a multiple of a page's, is
    no part of it.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        return apart(lambda: _digest(path))
    except (OSError, EOFError) as error:
        otherwise = "check the disk, or use another copy"
        raise StorageError(f"file {path} cannot be read: {error}; {advice(error, otherwise)}") from error


def _digest(path: Path) -> int:
    file, total = PageFile(path, writable=False), 0
    try:
        size = file.size()

        def of_piece(piece: int) -> int:
            begin = piece * PIECE_BYTES
            count = min(PIECE_BYTES, size - begin)
            buffer = buffer_of(PIECE_BYTES)
            file.read(buffer.view[:count], begin)
            if not buffer.array[:count].any():
                return 0
            return _mix((piece << 32) ^ zlib.crc32(buffer.view[:count]))

        pieces = _pieces(written_parts(file, size))
        while batch := list(itertools.islice(pieces, BATCH)):
            found = [0] * len(batch)

            def work(number: int, batch: list[int] = batch, found: list[int] = found) -> None:
                found[number] = of_piece(batch[number])

            shared_threads().run(work, len(batch))
            total += sum(found)
    finally:
        file.close()
    return total & _MASK


def _pieces(parts: Iterator[tuple[int, int]]) -> Iterator[int]:
    """The pieces that ascending parts of a file lie in, each once."""
    following = 0
    for begin, end in parts:
        first = max(following, begin // PIECE_BYTES)
        following = max(following, -(-end // PIECE_BYTES))
        yield from range(first, following)


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014), so that pieces that have changed places do not cancel."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
