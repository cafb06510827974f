"""Checkpoints in the format of `torch.distributed.checkpoint`: written with checksums, read without running code.
This module also reads safetensors files, and rows of pretrained tables, without running code.

Torch unpickles `.metadata` and values other than tensors, and a pickle may call any function. This reader accepts
tensors, plain values and the metadata of tensors only.
"""

import functools
import io
import itertools
import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from operator import index
from pathlib import Path, PurePath
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from tritonemb import memory
from tritonemb.storage.io import copy_rows, digest
from tritonemb.storage.store import StorageError
from tritonemb.types import TableConfig
from tritonemb.utils import atomic_write, join_names, read_sealed, require, seal, sync

FORMAT = 1
MANIFEST, METADATA = "trainer.json", ".metadata"
ROWS_SUFFIX, CHANGES_SUFFIX = ".rows", ".changes"  # suffixes of the sparse files of a table on disk
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
BLOCK_BYTES = 64 << 20  # of tensors that are read, compared or written block by block
FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}  # cast to each other
_KEYS = "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 BOOL I64 I32 I16 I8 U64 U32 U16 U8"  # in the order of `memory.DTYPES`
SAFETENSORS_DTYPES = dict(zip(_KEYS.split(), memory.DTYPES.values(), strict=True))
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


class FileTensor(NamedTuple):
    """Tensor in a safetensors file."""

    path: Path
    begin: int  # of its bytes in the file
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self, slices: tuple[slice, ...] = ()) -> Tensor:
        """Read a slice of the tensor; no other rows of it are in memory."""
        if not self.shape:
            return self._read_bytes(0, self.num_bytes).view(self.dtype).view(())
        first, last, _ = (*slices, slice(None))[0].indices(self.shape[0])
        row_bytes = self.num_bytes // max(self.shape[0], 1)
        rows = self._read_bytes(first * row_bytes, last * row_bytes).view(self.dtype)
        return rows.view(last - first, *self.shape[1:])[(slice(None), *slices[1:])]

    def has_values_of(self, other: "FileTensor") -> bool:
        """Return whether two tensors are equal, bit by bit; reads them by blocks."""
        blocks = ((begin, min(begin + BLOCK_BYTES, self.num_bytes)) for begin in range(0, self.num_bytes, BLOCK_BYTES))
        return self is other or (
            (self.dtype, self.shape) == (other.dtype, other.shape)
            and all(torch.equal(self._read_bytes(*block), other._read_bytes(*block)) for block in blocks)
        )

    def _read_bytes(self, begin: int, end: int) -> Tensor:
        result = torch.empty(end - begin, dtype=torch.uint8)
        remaining = memoryview(memory.bytes_of(result))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin + begin)
            while remaining and (num_read := file.readinto(remaining)):
                remaining = remaining[num_read:]
        if remaining:
            raise ValueError(f"{self.path} is truncated; copy or download it again")
        return result


def read_header(path: Path, source: BinaryIO | None = None) -> dict[str, FileTensor]:
    """Read the header of a safetensors file, which may be open; ValueError unless it is valid, and no byte is missing.

    A file has the length of its header in 8 bytes, the header in JSON, and the tensors
    (https://huggingface.co/docs/safetensors).
    """
    tensors: dict[str, FileTensor] = {}
    try:
        with path.open("rb") if source is None else nullcontext(source) as file:
            file_bytes, data_begin = os.fstat(file.fileno()).st_size, 8 + int.from_bytes(file.read(8), "little")
            if not 8 < data_begin <= min(file_bytes, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {data_begin - 8:,} bytes, in a file of {file_bytes:,}")
            header = json.loads(file.read(data_begin - 8))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if (dtype := SAFETENSORS_DTYPES.get(entry["dtype"])) is None:
                raise ValueError(
                    f"{name!r} has the dtype {entry['dtype']}, not one of {join_names(SAFETENSORS_DTYPES)}"
                )
            shape = torch.Size(entry["shape"])
            begin, end = (data_begin + index(offset) for offset in entry["data_offsets"])
            tensor = tensors[name] = FileTensor(path, begin, dtype, shape)
            is_inside = data_begin <= begin <= end <= file_bytes
            if not is_inside or min(shape, default=0) < 0 or end - begin != tensor.num_bytes:
                raise ValueError(f"{name!r} of {dtype} and shape {list(shape)} cannot be at bytes {begin:,} to {end:,}")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or not a safetensors file: {error!r}") from error
    return tensors


class PretrainedRows(NamedTuple):
    """Rows of a table in a file, which are read block by block."""

    ids: Tensor | None  # int64 `[rows]`; None: row i is that of id i
    starts: Sequence[int]  # first row of each block, then the number of rows
    read: Callable[[int, int], Tensor]  # rows from the first on to before the second, in one block

    def blocks(self, select: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids and rows where `select` is true of the ids; others are read only if they stand between these."""
        for first, stop in itertools.pairwise(self.starts):
            ids = torch.arange(first, stop) if self.ids is None else self.ids[first:stop]
            if len(positions := select(ids).nonzero().squeeze(1)):
                begin, end = int(positions[0]), int(positions[-1]) + 1
                yield ids[positions], self.read(first + begin, first + end)[positions - begin]


def open_pretrained(config: TableConfig) -> PretrainedRows:
    """Open the file that is a table's `init`. FileNotFoundError; ValueError unless ids, shape and dtypes fit."""
    path, dim, title = Path(str(config.init)), config.embedding_dim, f"table {config.name!r}: init {str(config.init)!r}"
    if (make := _SOURCES.get(path.suffix)) is None:
        raise ValueError(f"{title} must be a file of {join_names(_SOURCES)}")
    if not path.is_file():
        raise FileNotFoundError(f"{title} does not exist")
    try:
        ids, dtype, shape, starts, read = make(path, dim)
    except (ValueError, TypeError, OSError, LookupError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{title} cannot be read, or has no `weight`: {error!r}") from error
    # Compare with the table.
    if ids is not None and (ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1):
        actual = f"{list(ids.shape)} and dtype {ids.dtype}"
        raise ValueError(f"{title} has ids of shape {actual}; expected int32 or int64 [N]")
    size = config.num_embeddings if ids is None else len(ids)
    if ids is None and config.is_dynamic:
        raise ValueError(f"{title} has no ids, which a dynamic table needs; write `ids` int64 [N] beside `weight`")
    if dtype not in FLOATS or (*shape,) != (size, dim):
        actual = f"{list(shape)} and dtype {dtype}"
        raise ValueError(f"{title} has rows of shape {actual}; expected [{size}, {dim}] of a floating-point dtype")
    if ids is None:
        return PretrainedRows(None, starts, read)
    ids, ordered = ids.long(), ids.long().sort()[0]
    if not config.is_dynamic and len(bad := ids[(ids < 0) | (ids >= config.num_embeddings)]):
        raise ValueError(f"{title} has {len(bad):,} ids outside of 0 to {config.num_embeddings - 1}, such as {bad[0]}")
    if len(duplicates := ordered[1:][ordered[1:] == ordered[:-1]]):
        raise ValueError(f"{title} has the id {duplicates[0]} twice")
    return PretrainedRows(ids, starts, read)


def _open_numpy(path: Path, dim: int) -> "_Source":
    arrays = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
    arrays = {"weight": arrays} if path.suffix == ".npy" else arrays
    weight, ids = arrays["weight"], _native_tensor(arrays["ids"]) if "ids" in arrays else None
    starts, dtype = _block_starts(len(weight), weight.nbytes), _native_tensor(weight[:0]).dtype
    return ids, dtype, weight.shape, starts, lambda first, stop: _native_tensor(weight[first:stop])


def _native_tensor(array: np.ndarray) -> Tensor:
    """Copy an array of any byte order."""
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _open_safetensors(path: Path, dim: int) -> "_Source":
    tensors = read_header(path)
    weight, ids = tensors["weight"], tensors["ids"].read() if "ids" in tensors else None
    starts = _block_starts(weight.shape[0], weight.num_bytes)
    return ids, weight.dtype, weight.shape, starts, lambda first, stop: weight.read((slice(first, stop),))


def _open_parquet(path: Path, dim: int) -> "_Source":
    """Open `weight` and `ids`, read by row groups. Rows without an id come last: fallback rows of an export."""
    compute, parquet = require("pyarrow.compute"), require("pyarrow.parquet")
    file = parquet.ParquetFile(path, page_checksum_verification=True)
    groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    group_starts, ids, size = [0, *itertools.accumulate(groups)], None, sum(groups)
    if "ids" in file.schema_arrow.names:
        column = file.read(["ids"])["ids"]
        size -= column.null_count
        if (column := column.slice(0, size)).null_count:
            raise ValueError("rows without an id must be the last ones")
        ids = torch.from_numpy(column.to_numpy().copy())
    kind = file.schema_arrow.field("weight").type
    width = getattr(kind, "list_size", dim)
    dtype = torch.from_numpy(np.empty(0, kind.value_type.to_pandas_dtype())).dtype

    def read(first: int, stop: int) -> Tensor:
        group = bisect_right(group_starts, first) - 1
        rows = file.read_row_group(group, ["weight"])["weight"].slice(first - group_starts[group], stop - first)
        values = rows.combine_chunks().flatten()
        if values.null_count or compute.unique(compute.list_value_length(rows)).to_pylist() != [dim]:
            raise ValueError(f"{path}: `weight` of rows {first} to {stop - 1} has lists of other than {dim} numbers")
        return torch.from_numpy(values.to_numpy(zero_copy_only=False).reshape(-1, dim).copy())

    return ids, dtype, (size, width), [*(start for start in group_starts if start < size), size], read


def _block_starts(num_rows: int, num_bytes: int) -> list[int]:
    return [*range(0, num_rows, max(1, num_rows * BLOCK_BYTES // max(1, num_bytes))), num_rows]


_Source = tuple[Tensor | None, torch.dtype, Sequence[int], Sequence[int], Callable[[int, int], Tensor]]
_SOURCES: dict[str, Callable[[Path, int], _Source]] = {".npy": _open_numpy, ".npz": _open_numpy}
_SOURCES |= {".parquet": _open_parquet, ".safetensors": _open_safetensors}
