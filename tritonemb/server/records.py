"""Files of records, each a message with a checksum: snapshots, and the log of what a server was told."""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tritonemb.server.transport import Message
from tritonemb.storage.store import StorageError, storage_errors
from tritonemb.utils import Closeable

_HEADER = struct.Struct("<IQI")  # bytes of JSON and of tensors, and the CRC-32 of both
_SIZE = _HEADER.size + 4  # with a CRC-32 of its own


def write_record(file: BinaryIO, message: Message) -> int:
    """Write a record at the file's end; its bytes."""
    values, tensors = message
    arrays = [tensor.detach().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b"" for tensor in tensors]
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps({"values": values, "tensors": kinds}).encode()
    checksum, size = zlib.crc32(text), sum(map(len, arrays))
    for array in arrays:
        checksum = zlib.crc32(array, checksum)
    header = _HEADER.pack(len(text), size, checksum)
    file.write(header + zlib.crc32(header).to_bytes(4, "little"))
    file.write(text)
    for array in arrays:
        file.write(array)
    return _SIZE + len(text) + size


def read_records(path: Path, torn: bool = False) -> Iterator[Message]:
    """The records of a file, in their order. StorageError if it is damaged.

    Behind the first one, which some read alone, a thread reads a record while the one before it is used.

    `torn`: a last record that was not written to its end is left out, as nobody was told that it was.
    """
    with (
        storage_errors(f"file {path} cannot be read", "check the disk"),
        path.open("rb") as file,
        ThreadPoolExecutor(1) as thread,
    ):
        read = partial(_read_record, file, path, torn)
        if (record := read()) is not None:
            yield record
            coming = thread.submit(read)
            while (record := coming.result()) is not None:
                coming = thread.submit(read)
                yield record


def _read_record(file: BufferedReader, path: Path, torn: bool) -> Message | None:
    """The next one; None at the end."""
    at, end = file.tell(), os.fstat(file.fileno()).st_size
    if at == end:
        return None
    header = file.read(_SIZE)
    begun = len(header) == _SIZE and zlib.crc32(header[:-4]) == int.from_bytes(header[-4:], "little")
    if begun:
        text_size, size, checksum = _HEADER.unpack(header[:-4])
        behind = at + _SIZE + text_size + size
        if behind <= end:
            text, data = file.read(text_size), np.empty(size, dtype=np.uint8)
            file.readinto(data)
            if hasattr(os, "posix_fadvise"):  # the disk reads on while this is checked
                os.posix_fadvise(file.fileno(), behind, size, os.POSIX_FADV_WILLNEED)
            if zlib.crc32(data, zlib.crc32(text)) == checksum:
                parsed = json.loads(text)
                return parsed["values"], list(_tensors(parsed["tensors"], data))
    # After a loss of power there may be zeros where something was about to be written.
    if torn and (behind >= end if begun else len(header) < _SIZE or not any(header)):
        return None
    raise StorageError(f"file {path} is damaged at byte {at:,}; use another one")


def _tensors(kinds: Iterable[tuple[str, list[int]]], data: np.ndarray) -> Iterator[Tensor]:
    at = 0
    for name, shape in kinds:
        dtype, count = getattr(torch, name), int(np.prod(shape, dtype=np.int64))
        part = data[at : at + count * dtype.itemsize]
        at += part.size
        if part.ctypes.data % dtype.itemsize:
            part = part.copy()
        yield torch.from_numpy(part).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def read_log(path: Path) -> Iterator[Message]:
    """What a `MessageLog` has; the last that was appended is left out if it was not written to its end."""
    for values, tensors in read_records(path, torn=True):
        begin = 0
        for message, size in zip(values.get("messages", ()), values.get("sizes", ()), strict=True):
            yield message, tensors[begin : begin + size]
            begin += size


class MessageLog(Closeable):
    """What a server was told, since its last snapshot: appended to a file, and on the disk if `durable`.

    What is appended at once is one record: if power is lost meanwhile, all or nothing of it is found. An empty record
    follows when it is written: one that is damaged, and has that behind it, was acknowledged, and is not torn.
    """

    def __init__(self, path: Path, durable: bool) -> None:
        self._durable, self.path = durable, path
        self._what = f"log {path} could not be written"
        with storage_errors(self._what, "check the disk"):
            self._file: Any = path.open("ab")

    def append(self, messages: Sequence[Message]) -> int:
        """Write these, all or none, and return their bytes; StorageError if they cannot be written."""
        values = {"messages": [values for values, _ in messages], "sizes": [len(tensors) for _, tensors in messages]}
        with storage_errors(self._what, "check the disk"):
            if self._file.closed:
                raise OSError("it could not be opened again after an error")
            begin = self._file.tell()
            try:
                size = write_record(self._file, (values, [each for _, tensors in messages for each in tensors]))
                self._file.flush()
                if self._durable:
                    os.fdatasync(self._file.fileno())
                size += write_record(self._file, ({}, []))
                self._file.flush()
            except OSError:
                with suppress(OSError):
                    self._file.close()  # with what it has not written
                os.truncate(self.path, begin)
                self._file = self.path.open("ab")
                raise
            return size

    def close(self) -> None:
        self._file.close()
