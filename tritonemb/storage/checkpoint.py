"""Checkpoints in the format of `torch.distributed.checkpoint`: written with checksums, read without running code.

Torch unpickles `.metadata` and values other than tensors, and a pickle may call any function. This reader accepts
tensors, plain values and the metadata of tensors only.
"""

import functools
import io
import json
import os
import pickle
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from tritonemb.storage.io import copy_rows, digest
from tritonemb.storage.store import StorageError
from tritonemb.utils import atomic_write, read_sealed, seal, sync

FORMAT = 1
MANIFEST, METADATA = "trainer.json", ".metadata"
ROWS_SUFFIX, CHANGES_SUFFIX = ".rows", ".changes"  # suffixes of the sparse files of a table on disk
Files = dict[str, list[int]]  # by file name: size and checksum
# Classes that metadata may name, besides dtypes; torch before 2.3 had TensorProperties in the last module.
_ALLOWED_NAMES = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING TensorProperties",
}


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickler of tensor metadata. The C unpickler would let a file change attributes of classes."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local"):
            return PurePath  # the folder that it was written to
        if name in _ALLOWED_NAMES.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")  # like torch's message

    def load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type) or not is_dataclass(target):
            raise pickle.UnpicklingError(f"BUILD of {target!r}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def _unsafe_file_error(path: Path, error: Exception) -> ValueError:
    if name := re.search(r"GLOBAL (\S+)", str(error)):
        reference = f"{path} refers to {name[1]}"
        return ValueError(f"{reference}, which could run code, so it is not loaded; use another checkpoint")
    return ValueError(f"{path} is damaged ({error!r}); use another checkpoint")


class CheckpointReader(FileSystemReader):
    """Reader of a checkpoint, which reads the metadata once.

    Raise ValueError, which names the file, if a file is damaged or refers to code.
    """

    _metadata: Metadata | None = None
    _file = ""  # the file that is being read

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            path = Path(self.path, METADATA)
            content = path.read_bytes()
            try:
                metadata = _MetadataUnpickler(io.BytesIO(content)).load()
                names = {info.relative_path for info in metadata.storage_data.values()}
                if any(name != PurePath(name).name for name in names):
                    raise ValueError("it refers to files in other folders")
            except Exception as error:
                raise _unsafe_file_error(path, error) from error
            self._metadata = metadata
        return self._metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        self._file = sinfo.relative_path
        return super()._slice_file(file, sinfo)

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            raise _unsafe_file_error(Path(self.path, self._file), error) from error


class ChecksumWriter(FileSystemWriter):
    """Writer of a checkpoint's tensors. The last result of each rank's `write_data` are its `Files`."""

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        future = super().write_data(plan, planner)
        results: list[Any] = future.value()
        paths = Path(self.path).glob(f"{plan.storage_data.prefix}*")
        results.append({path.name: size_and_checksum(path) for path in paths})
        return future

    def finish_files(self, metadata: Metadata, results: list[list[Any]]) -> Files:
        """Write the metadata, and return its `Files`."""
        super().finish(metadata, results)
        path = Path(self.path, METADATA)
        sync(path)  # torch syncs it before its buffers are flushed
        return {METADATA: size_and_checksum(path)}


class CheckpointPlanner(DefaultLoadPlanner):
    """Planner that loads values other than tensors without running code."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


@contextmanager
def checkpoint_errors(subject: str) -> Iterator[None]:
    """Raise the failure of a rank, which torch wraps in a BaseException, as a ValueError or StorageError."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        if not isinstance(failure, Exception):  # e.g. KeyboardInterrupt
            raise failure from error
        if isinstance(failure.__context__, OSError):  # torch's archive hides a full disk behind its own error
            failure = failure.__context__
        kind = ValueError if isinstance(failure, ValueError) else StorageError
        raise kind(f"{subject}: rank {rank}: {type(failure).__name__}: {failure}") from error


def ignore_single_process_warning() -> None:
    """Silence torch's warning about single-process checkpoints; it may be raised in another thread."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class ArchiveFile(io.BufferedWriter):
    """File that raises its first error when it is closed: torch's writer of archives hides it, or ends the process."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data) if self.error is None else len(data)
        except OSError as error:
            self.error = error
            return len(data)

    def close(self) -> None:
        super().close()
        if self.error is not None:
            raise self.error


def write_manifest(path: Path, values: Mapping[str, Any], name: str = MANIFEST) -> None:
    """Write a checkpoint's manifest; `values` include its `Files`."""
    atomic_write(path / name, seal(json.dumps({"format": FORMAT, **values}, indent=1)))


def read_manifest_text(path: Path, name: str = MANIFEST) -> tuple[bytes, dict[str, Any]]:
    """Return a checkpoint's manifest as text and parsed; raise the errors of `read_manifest`."""
    if not (path / name).is_file():
        raise FileNotFoundError(f"{path} is not a checkpoint: it has no {name}")
    text = read_sealed(path / name)
    try:
        manifest = json.loads(text)
        _, file_format = dict(manifest["files"]), manifest["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / name} is damaged ({error!r}); use another checkpoint") from error
    if file_format != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {file_format}, this version of tritonemb reads format {FORMAT}; it was "
            f"written by tritonemb {manifest.get('versions', {}).get('tritonemb', 'of an unknown version')}"
        )
    return text, manifest


def check_files(path: Path, files: Mapping[str, Sequence[int]], rank: int, ranks: int) -> None:
    """Raise ValueError unless the files have the sizes and checksums of the manifest; the ranks share the files."""
    by_size = sorted(files.items(), key=lambda entry: -entry[1][0])  # so that each rank gets large and small files
    for name, (expected_size, expected_crc) in by_size[rank::ranks]:
        if (actual_size := size_of(path / name)) != expected_size:
            problem = "does not exist" if actual_size is None else f"has {actual_size:,} bytes"
            raise ValueError(
                f"{path} is damaged: {name} {problem}, expected {expected_size:,} bytes; use another checkpoint"
            )
        if checksum(path / name) != expected_crc:
            raise ValueError(f"{path} is damaged: {name} does not have the checksum that was written; use another one")


def size_of(path: Path) -> int | None:
    """Return a file's size in bytes, None if it does not exist."""
    return path.stat().st_size if path.is_file() else None


def size_and_checksum(path: Path) -> list[int]:
    """Return a file's entry in the manifest."""
    return [path.stat().st_size, checksum(path)]


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file; for the sparse file of a table's rows, its `digest`."""
    if path.suffix in (ROWS_SUFFIX, CHANGES_SUFFIX):
        return digest(path)
    with path.open("rb") as file:
        return functools.reduce(lambda crc, chunk: zlib.crc32(chunk, crc), iter(lambda: file.read(1 << 22), b""), 0)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, or an fsynced copy where the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        if source.suffix in (ROWS_SUFFIX, CHANGES_SUFFIX):
            copy_rows(source, target)
        else:
            shutil.copy2(source, target)
        sync(target)
