"""Files of checksummed records, each of which has a message: snapshots, and the write-ahead log of a server."""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tritonemb.memory import bytes_of, describe_tensors, tensor_spans, view_tensors
from tritonemb.server.transport import Message, Values
from tritonemb.storage.store import StorageError, storage_errors
from tritonemb.utils import Closeable

_HEADER = struct.Struct("<IQI")  # bytes of JSON, bytes of tensors, CRC-32 of both
_HEADER_BYTES = _HEADER.size + 4  # with the CRC-32 of the header

# Names in files of earlier versions: operations of messages, and keys of records of clients, snapshots and collections.
_OLD_OPERATIONS = {"facts": "describe", "hold": "lease", "assign": "allocate", "move": "transfer"}
_OLD_KEYS = {"expected": "next_sequence", "answered": "replied", "undone": "in_progress", "held": "is_leased"}
_OLD_KEYS |= {"owners": "partition_starts", "parts": "shards", "rows_in": "row_codec", "gradients_in": "gradient_codec"}


def with_current_names(values: Values) -> Values:
    """Replace names of earlier versions in the values of a record."""
    values = {_OLD_KEYS.get(key, key): value for key, value in values.items()}
    return values | {"op": _OLD_OPERATIONS.get(values["op"], values["op"])} if "op" in values else values


def write_record(file: BinaryIO, message: Message) -> int:
    """Append a record, and return its size in bytes."""
    values, tensors = message
    arrays = [bytes_of(tensor) for tensor in tensors]
    text = json.dumps({"values": values, "tensors": describe_tensors(tensors)}).encode()
    checksum, size = zlib.crc32(text), sum(map(len, arrays))
    for array in arrays:
        checksum = zlib.crc32(array, checksum)
    header = _HEADER.pack(len(text), size, checksum)
    file.write(header + zlib.crc32(header).to_bytes(4, "little"))
    file.write(text)
    for array in arrays:
        file.write(array)
    return _HEADER_BYTES + len(text) + size


def read_records(path: Path, torn: bool = False) -> Iterator[Message]:
    """Yield the records of a file in order. StorageError if it is damaged.

    After the first record, which some callers read alone, a thread reads the next record while the caller uses one.

    Args:
        torn: skip a last record that was written partially, which was never acknowledged.
    """
    with (
        storage_errors(f"file {path} cannot be read", "check the disk"),
        path.open("rb") as file,
        ThreadPoolExecutor(1) as thread,
    ):
        read = partial(_read_record, file, path, torn)
        if (record := read()) is not None:
            yield record
            next_record = thread.submit(read)
            while (record := next_record.result()) is not None:
                next_record = thread.submit(read)
                yield record


def _read_record(file: BufferedReader, path: Path, torn: bool) -> Message | None:
    start, file_size = file.tell(), os.fstat(file.fileno()).st_size
    if start == file_size:
        return None
    header = file.read(_HEADER_BYTES)
    is_header_valid = len(header) == _HEADER_BYTES and zlib.crc32(header[:-4]) == int.from_bytes(header[-4:], "little")
    if is_header_valid:
        text_size, size, checksum = _HEADER.unpack(header[:-4])
        end = start + _HEADER_BYTES + text_size + size
        if end <= file_size:
            text, data = file.read(text_size), torch.empty(size, dtype=torch.uint8)
            file.readinto(data.numpy())
            if hasattr(os, "posix_fadvise"):  # read ahead while the checksum is computed
                os.posix_fadvise(file.fileno(), end, size, os.POSIX_FADV_WILLNEED)
            if zlib.crc32(data.numpy(), zlib.crc32(text)) == checksum:
                parsed = json.loads(text)
                return parsed["values"], view_tensors(data, tensor_spans(parsed["tensors"]))
    # A power failure may leave zeros where a write was in progress.
    if torn and (end >= file_size if is_header_valid else len(header) < _HEADER_BYTES or not any(header)):
        return None
    raise StorageError(f"file {path} is damaged at byte {start:,}; use another one")


def read_log(path: Path) -> Iterator[Message]:
    """Yield the messages of a `MessageLog`; a last append that was written partially is skipped."""
    for values, tensors in read_records(path, torn=True):
        start = 0
        for message, num_tensors in zip(values.get("messages", ()), values.get("sizes", ()), strict=True):
            yield with_current_names(message), tensors[start : start + num_tensors]
            start += num_tensors


class MessageLog(Closeable):
    """Write-ahead log: requests since the last snapshot, appended to a file, and synced to the disk if `durable`.

    Messages that are appended together are one record, so a power failure loses all of them or none. An empty record
    follows as an end mark: a damaged record that has one behind it was acknowledged, and is not torn.
    """

    def __init__(self, path: Path, durable: bool) -> None:
        self._durable, self.path = durable, path
        self._problem = f"log {path} could not be written"
        with storage_errors(self._problem, "check the disk"):
            self._file: Any = path.open("ab")

    def append(self, messages: Sequence[Message]) -> int:
        """Append all messages or none, and return their size in bytes; StorageError if the log cannot be written."""
        values = {"messages": [values for values, _ in messages], "sizes": [len(tensors) for _, tensors in messages]}
        with storage_errors(self._problem, "check the disk"):
            if self._file.closed:
                raise OSError("it could not be reopened after an error")
            start = self._file.tell()
            try:
                size = write_record(self._file, (values, [tensor for _, tensors in messages for tensor in tensors]))
                self._file.flush()
                if self._durable:
                    os.fdatasync(self._file.fileno())
                size += write_record(self._file, ({}, []))
                self._file.flush()
            except OSError:
                with suppress(OSError):
                    self._file.close()  # drops its write buffer
                os.truncate(self.path, start)
                self._file = self.path.open("ab")
                raise
            return size

    def close(self) -> None:
        self._file.close()
