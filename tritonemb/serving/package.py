"""Folder of an exported model: `export.json`, dense tensors, the vocabulary, and a file per table, mapped when loaded.

The manifest is sealed, and has checksums of files other than tables. Tables can be replaced, so their files have their
own: they are safetensors files whose metadata are `table`, a description; `crc32` of all tensors; and `sha256` of the
header, in which that is zeros. `rows` has the rows, `ids` the ascending ids of the first ones if a table is dynamic;
fallback rows follow. Nothing in a folder names code that is run.
"""

import functools
import hashlib
import itertools
import json
import mmap
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn

from tritonemb.layout import HEADER_BYTES, INDEXED
from tritonemb.memory import bytes_of
from tritonemb.models.pooled import SplitEmbeddingBagCollection
from tritonemb.nn.collections import TableCollection
from tritonemb.nn.embeddings import DynamicModule
from tritonemb.offloading.dispatch import is_offloaded
from tritonemb.serving.quantized_tables import BITS, QuantizedCollection, QuantizedTable
from tritonemb.sharding import HybridParallel
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.storage import checkpoint
from tritonemb.storage.checkpoint import BLOCK_BYTES, SAFETENSORS_DTYPES, read_header
from tritonemb.storage.store import storage_errors
from tritonemb.tables.dynamic_table import sorted_table
from tritonemb.tables.table import Table
from tritonemb.training.doctor import versions
from tritonemb.types import CacheConfig, TableConfig
from tritonemb.utils import atomic_path

MANIFEST, DENSE, TABLES = "export.json", "dense.safetensors", "tables"
Collection = TableCollection | QuantizedCollection
Source = tuple[torch.dtype, tuple[int, ...], Iterable[Tensor]]  # dtype, shape and blocks of a tensor to write
PAGE_BYTES = 4096  # alignment of tensors in a file, so that a row of up to a page touches two at most
# Without a reservation (MAP_NORESERVE, which Python 3.11 lacks), as a file may be larger than the memory.
COPY_ON_WRITE = mmap.MAP_PRIVATE | 0x4000, mmap.PROT_READ | mmap.PROT_WRITE
NO_DIGEST, NO_IDS = "0" * 64, torch.empty(0, dtype=torch.int64)


def write_package(folder: Path, model: nn.Module, values: Mapping[str, Any]) -> dict[str, str]:
    """Write a model into a folder; `values` are those of the manifest that describe it. Return the files of tables."""
    check_exportable(model)
    tables: dict[str, Any] = {}
    for path, collection in collections_of(model).items():
        modules = [collection[config.name] for config in collection.configs]
        tables |= zip(keys_of(path, collection), modules, strict=True)
    names = {key: f"{TABLES}/{n:03}-{quote(key, safe='')[:100]}.safetensors" for n, key in enumerate(tables)}
    (folder / TABLES).mkdir(parents=True)
    for key, table in tables.items():
        write_table(folder / names[key], table)
    dense: dict[str, Tensor] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        if not isinstance(part, Table | QuantizedTable | Collection):
            part._save_to_state_dict(dense, f"{path}." if path else "", False)
    write_tensors(folder / DENSE, {name: (t.dtype, tuple(t.shape), [t.detach()]) for name, t in dense.items()}, {})
    # The vocabulary, as the folder may be copied to a machine without the training data.
    files, reading = [DENSE], json.loads(json.dumps(values["reading"]))
    schema = (reading.get("read") or {}).get("schema") or {}
    if vocabulary := schema.get("vocabulary"):
        schema["vocabulary"] = f"vocabulary{Path(vocabulary).suffix}"
        shutil.copyfile(vocabulary, folder / schema["vocabulary"])  # not a link, as its user may edit it
        files.append(schema["vocabulary"])
    checksums = {name: checkpoint.size_and_checksum(folder / name) for name in files}
    entries = {"reading": reading, "versions": versions(), "tables": names, "files": checksums}
    checkpoint.write_manifest(folder, {**values, **entries}, MANIFEST)
    return names


def read_package(folder: Path) -> dict[str, Any]:
    """Read and check a manifest and the files that it has checksums of; raise ValueError if one is damaged."""
    _, manifest = checkpoint.read_manifest_text(folder, MANIFEST)
    checkpoint.check_files(folder, manifest["files"], 0, 1)
    if any(Path(name).parent != Path(TABLES) for name in manifest["tables"].values()):
        raise ValueError(f"{folder / MANIFEST} is damaged: it names files in other folders; export the model again")
    schema = (manifest["reading"].get("read") or {}).get("schema") or {}
    if "vocabulary" in schema:
        schema["vocabulary"] = str(folder / Path(schema["vocabulary"]).name)
    return manifest


def load_package(folder: Path, model: nn.Module, manifest: Mapping[str, Any]) -> nn.Module:
    """Replace the tables of a model by the mapped files of a package, and load its other tensors; return the model.

    ValueError if the package is of another model.
    """
    names, parts = dict(manifest["tables"]), collections_of(model)
    keys = [key for path, collection in parts.items() for key in keys_of(path, collection)]
    if {*keys} != {*names}:
        raise ValueError(f"{folder} has the tables {sorted(names)}, the model {sorted(keys)}; use that of the export")
    for path, collection in parts.items():
        loaded = _with_tables(collection, map_tables(path, collection, folder, names))
        for parent in list(model.modules()):
            parent._modules.update({name: loaded for name, child in parent._modules.items() if child is collection})
        model = model if path else loaded
    dense = {name: tensor.clone() for name, tensor in map_tensors(folder / DENSE)[0].items()}
    try:
        missing, unexpected = model.load_state_dict(dense, strict=False, assign=True)
    except RuntimeError as error:  # of other shapes
        raise ValueError(f"{folder} is of another model; use the model that was exported: {error}") from error
    parts_by_path = model.named_modules(remove_duplicate=False)
    tables = tuple(f"{path}.".lstrip(".") for path, part in parts_by_path if isinstance(part, Collection))
    missing = [name for name in missing if not name.startswith(tables)]
    for name in [*missing, *unexpected]:
        lacking, having = ("the package", "the model") if name in missing else ("the model", "the package")
        raise ValueError(f"{folder}: {lacking} lacks {name!r} of {having}; use the model that was exported")
    if absent := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"{folder} has no {absent[0]!r}, which state_dict lacks; pass a model that is built on the CPU"
        )
    return model.eval()


def collections_of(model: nn.Module) -> dict[str, Any]:
    """Return the collections of a model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Collection)}


def keys_of(path: str, collection: Any) -> list[str]:
    """Return the names of a collection's tables in the model."""
    return [f"{path}.{config.name}".lstrip(".") for config in collection.configs]


def check_exportable(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot be exported, before anything is written."""
    checkpointed = "; save a checkpoint, and export te.load_run(checkpoint) in one process"
    for path, module in model.named_modules():
        problem, parameters = "", [parameter for parameter in module._parameters.values() if parameter is not None]
        if isinstance(module, HybridParallel | ShardedCollection):
            problem = f"is sharded over ranks{checkpointed}"
        elif isinstance(module, SplitEmbeddingBagCollection):
            problem = f"has tables on embedding servers and others{checkpointed}, without servers="
        elif isinstance(module, QuantizedTable) and module.bits == INDEXED:
            problem = "is dynamic, or quantized by frequency; save its state_dict"
        elif isinstance(module, DynamicModule):
            problem = "is a dynamic or quantized table outside of a collection; put it into an EmbeddingBagCollection"
        elif any(map(is_offloaded, parameters)):
            problem = f"has offloaded parameters{checkpointed}"
        elif any(parameter.is_meta for parameter in parameters):
            problem = "is on the meta device and has no values; load them first"
        if problem:
            raise ValueError(f"{path or type(module).__name__} cannot be exported: it {problem}")


@torch.no_grad()
def write_table(path: Path, table: Any) -> None:
    """Write the rows of a table in any memory, without optimizer states, in blocks; all rows at once if on servers."""
    config, schema, ids, numbers = table.config, _schema_of(table.config), None, None
    if isinstance(table, QuantizedTable):
        schema["kind"], num_rows, blocks = table.dtype, len(table.weight), iter([table.weight])
    else:
        table = table.rows.fetch(table)
        if (sorted_rows := table.index.sorted_rows()) is not None:
            ids, numbers = sorted_rows
        num_rows = config.num_embeddings if numbers is None else len(numbers)
        blocks = (weights for _, weights in table.rows.blocks(table, numbers))
    shape, dtype = (max(1, num_rows), table.weight.shape[1]), table.weight.dtype  # a file has one row at least
    schema |= {"dtype": str(dtype), "seed": getattr(table, "seed", 0)}
    if num_rows == 0:
        blocks = iter([torch.zeros(shape, dtype=dtype)])
    sources: dict[str, Source] = {"rows": (dtype, shape, blocks)}
    sources |= {} if ids is None else {"ids": (ids.dtype, tuple(ids.shape), [ids])}
    write_tensors(path, sources, {"table": json.dumps(schema)})


def _schema_of(config: TableConfig) -> dict[str, Any]:
    """Return what must be equal in a table's file and in a model that loads it."""
    names = "name", "embedding_dim", "num_embeddings", "fallback_rows"
    values = {name: getattr(config, name) for name in names}
    return values | ({"kind": "dynamic", "bound": config.bound} if config.is_dynamic else {"kind": "static"})


def _stored_schema(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if "table" not in metadata:
        raise ValueError(f"{path} is not the file of a table; expected one of the folder {TABLES} of an export")
    return json.loads(metadata["table"])


def _check_equal(title: str, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    changed = [name for name, value in expected.items() if actual.get(name) != value]
    differences = [f"{name} is {actual.get(name)!r}, expected {expected[name]!r}" for name in changed]
    if differences:
        raise ValueError(f"{title} is of another table: {'; '.join(differences)}")


def load_table(path: Path, config: TableConfig) -> Any:
    """Map a table's file; raise ValueError unless it fits the table's config."""
    (tensors, metadata), expected = map_tensors(path), _schema_of(config)
    schema = _stored_schema(path, metadata)
    bits = BITS.get(schema["kind"])
    _check_equal(str(path), schema, expected if bits is None else {**expected, "kind": schema["kind"]})
    rows, ids = tensors["rows"], tensors.get("ids", NO_IDS)
    width = config.embedding_dim if bits is None else HEADER_BYTES + -(-config.embedding_dim * bits // 8)
    if rows.shape[1:] != (width,) or len(rows) < (config.num_embeddings or max(1, len(ids))):
        raise ValueError(f"{path} is damaged: its rows have shape {[*rows.shape]}; export the model again")
    if bits is not None:
        return QuantizedTable(config, rows, schema["kind"])
    return sorted_table(config, rows, ids if config.is_dynamic else None, schema["seed"])


def map_tables(path: str, collection: Any, folder: Path, names: Mapping[str, str]) -> list[Any]:
    """Map the tables of a collection from their files, by their names in the model."""
    configs = [
        replace(config, placement="device", dtype=config.row_dtype, cache=CacheConfig())
        for config in collection.configs
    ]
    return [load_table(folder / names[key], c) for key, c in zip(keys_of(path, collection), configs, strict=True)]


def _with_tables(collection: Any, loaded: list[Any]) -> nn.Module:
    """Return a collection like `collection` of mapped tables."""
    configs = [table.config for table in loaded]
    kinds = {isinstance(table, QuantizedTable) for table in loaded}
    if len(kinds) > 1 or (isinstance(collection, QuantizedCollection) and False in kinds):
        raise ValueError("some tables of a collection are quantized, others are not; replace those that differ")
    if not isinstance(collection, QuantizedCollection):
        kind, tables = type(collection), collection.table_set
        collection = kind(configs, None, "meta", tables.bounds_check, tables.output_dtype)
        if True in kinds:
            return QuantizedCollection(collection, loaded)
    (collection if True in kinds else collection.table_set).replace_tables(loaded)
    return collection


def write_tensors(path: Path, sources: Mapping[str, Source], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with checksums; larger elements come first, so that all are aligned."""
    sources, crc, end = dict(sorted(sources.items(), key=lambda entry: -entry[1][0].itemsize)), 0, 0
    names, entries = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}, dict[str, Any]()
    for name, (dtype, shape, _) in sources.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [begin, end]}
    with path.open("wb") as file:
        file.write(encode_header(entries, {**metadata, "crc32": f"{crc:08x}"}))
        for block in itertools.chain.from_iterable(blocks for _, _, blocks in sources.values()):
            for part in block.flatten().split(BLOCK_BYTES):
                file.write(data := bytes_of(part.cpu()))
                crc = zlib.crc32(data, crc)
        file.seek(0)
        file.write(encode_header(entries, {**metadata, "crc32": f"{crc:08x}"}))


def encode_header(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file before its tensors, with a digest."""
    text = json.dumps({"__metadata__": {**metadata, "sha256": NO_DIGEST}, **entries})
    text = text.replace(NO_DIGEST, hashlib.sha256(text.encode()).hexdigest())
    size = header_size(text)
    return size.to_bytes(8, "little") + text.ljust(size).encode()


def header_size(text: str) -> int:
    """Return the bytes of a header behind its length: blanks fill its last page."""
    return -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8


def map_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a file, copy on write; return its tensors and its metadata.

    Pages are shared with the page cache and with other processes until a follower writes to them. The file may be
    replaced meanwhile. ValueError if the header is damaged, or not of `write_tensors`.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; export the model again")
    with path.open("rb") as file:
        tensors = read_header(path, file)
        file.seek(0)
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size).decode().rstrip()
        data = torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0, *COPY_ON_WRITE), np.uint8))
    metadata = json.loads(text).get("__metadata__") or {}
    digest = metadata.get("sha256") or NO_DIGEST
    # The digest does not cover the length, which says where tensors begin.
    if size != header_size(text) or hashlib.sha256(text.replace(digest, NO_DIGEST).encode()).hexdigest() != digest:
        raise ValueError(f"{path} is damaged, or not of te.export: its header does not have its SHA-256 digest")
    views = {name: data[t.begin : t.begin + t.num_bytes].view(t.dtype).view(t.shape) for name, t in tensors.items()}
    return views, metadata


def check_contents(path: str | Path) -> None:
    """Raise ValueError unless the tensors of a table's file have the checksum of its header."""
    tensors, metadata = map_tensors(Path(path))
    ordered = sorted(tensors.values(), key=Tensor.data_ptr)
    if f"{functools.reduce(lambda crc, part: zlib.crc32(bytes_of(part), crc), ordered, 0):08x}" != metadata["crc32"]:
        raise ValueError(f"{path} is damaged: its tensors do not have their checksum; use another copy")


def replace_table(path: str | Path, source: str | Path) -> None:
    """Replace a table's file of an exported model by another one atomically; models that are loaded keep theirs.

    Args:
        path: file in the folder `tables` of an export.
        source: file of another export, of a table of the same name, shape, dtype and kind.

    Raises:
        ValueError: the source is damaged, or of another table; nothing is changed.
        StorageError: the file cannot be written, as the disk is full; nothing is changed.
    """
    path, source = Path(path), Path(source)
    old, new = ({**_stored_schema(file, map_tensors(file)[1]), "seed": 0} for file in (path, source))
    _check_equal(f"{source} cannot replace {path}: it", new, old)
    with storage_errors(f"{path} could not be written", "check the disk"), atomic_path(path, durable=True) as temporary:
        shutil.copyfile(source, temporary)
        check_contents(temporary)
