"""Updates of models by followers: new rows of tables, compared with those that are served, and new dense tensors."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.kernels.quantized_bag import dequantize_rows, quantize_rows
from tritonemb.layout import INDEXED, nonzero, partitions_of
from tritonemb.models import ModelOptions
from tritonemb.server.snapshot import read_snapshot
from tritonemb.server.spec import TableSpec
from tritonemb.server.transport import Values
from tritonemb.serving.quantized_tables import QuantizedModule, QuantizedTable, plain_table
from tritonemb.storage.store import SCALE, StorageError, decode_rows
from tritonemb.tables.dynamic_table import FALLBACK, DynamicTable
from tritonemb.tables.table import BLOCK_ELEMENTS, WEIGHT, Table
from tritonemb.training.checkpoint import load_tensors, read_manifest, stored_tensors
from tritonemb.training.checkpoint.manager import rows_by_id
from tritonemb.training.toml import plain

Change = tuple[Tensor, Tensor | None, int]
"""Distinct ids, their rows or None for removed ones, and the first column."""
Parts = Sequence[Mapping[str, Tensor]]
"""Seed and fallback rows of a dynamic table, by rank or server."""
# Tensors of a table in checkpoints that followers read; those of a dynamic table on disk are in the order of its file.
ROW_FIELDS = ("weight", SCALE, "ids", "seed", f"{FALLBACK}weight", "row", "rows.weight", "rows.id")


def source_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest of a run says of the encoding of its rows, and of its model; by name, for errors."""
    run, reading, config = (manifest.get(name) or {} for name in ("run", "reading", "config"))
    values = {f"kind of column {name!r}": kind for name, kind in run.get("kinds", {}).items() if kind}
    values |= {"encoding of rows": run["encoding"]} if "encoding" in run else {}
    if "embedding_dim" in config:  # of `tritonemb train`; TOML has no None, and older runs lack options
        options = dict.fromkeys(field.name for field in fields(ModelOptions)) | plain(ModelOptions())
        values |= {"model": config["model"], **options, **config.get("model_options", {})}
    return values | {"labels": [*reading.get("labels", ())]}


class FollowedTable:
    """Table whose rows are compared with published ones, and replaced. ValueError for rows that do not fit."""

    def __init__(self, name: str, table: Any, num_rows: int | None = None) -> None:
        table = table.table if isinstance(table, QuantizedModule) else table
        self.name, self.dynamic = name, table if isinstance(table, DynamicTable) else None
        self.bits = table.bits if isinstance(table, QuantizedTable) else 32
        config = getattr(table, "config", table)  # a single table has none
        if self.bits == INDEXED or (config.num_embeddings is None and self.dynamic is None):
            text = "it is quantized by frequency, or dynamic and quantized, exported, or outside of a collection"
            raise ValueError(f"table {name!r} takes no new ids: {text}; use the model of a checkpoint")
        self.num_rows, self.dim = num_rows or config.num_embeddings, config.embedding_dim
        self.table: Any = table if isinstance(table, Table) else plain_table(table, config)

    def encode(self, ids: Tensor, rows: Tensor, bits: int, column: int) -> Tensor:
        """Convert rows, quantized to `bits` unless 32, to the format of the table."""
        width, dtype = (rows.shape[1], rows.dtype) if bits == 32 else (rows.shape[1] - 4, self.table.weight.dtype)
        is_whole = width == self.dim or (bits == self.bits == 32 and column + width <= self.dim)
        if not is_whole or (self.bits == 32 and dtype != self.table.weight.dtype):
            text = f"columns {column}:{column + width} of {dtype} were published"
            raise ValueError(f"table {self.name!r} has {self.dim} columns of {self.table.weight.dtype}; {text}")
        if self.num_rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_rows:
            raise ValueError(f"table {self.name!r} has {self.num_rows:,} rows; row {int(ids.max())} was published")
        if bits == self.bits:
            return rows
        rows = rows if bits == 32 else dequantize_rows(rows, bits, self.dim)
        return rows.to(dtype) if self.bits == 32 else quantize_rows(rows, self.bits, search=self.bits < 8)

    def differ(self, ids: Tensor, rows: Tensor, column: int) -> Tensor:
        """Return which ids have no row, or another one, bool `[N]`."""
        result, numbers = torch.ones(len(ids), dtype=torch.bool), ids
        if self.dynamic is not None:
            numbers = self.dynamic.index.find(ids.to(self.dynamic.index.ids))
        known = nonzero(numbers >= 0)
        current = self._read(numbers[known])[:, column : column + rows.shape[1]]
        current, rows = (values.cpu().contiguous().view(torch.uint8) for values in (current, rows[known.cpu()]))
        result[known.cpu()] = (current != rows).any(1)
        return result

    def check(self, changes: Sequence[Change], metadata: Parts) -> None:
        """Check that a dynamic table has room for new rows."""
        if (table := self.dynamic) is None:
            return
        index, num_rows = table.index, table.index.tensors.num_rows.cpu().clone()
        for ids, rows, _ in changes:
            ids = ids[(index.find(ids.to(index.ids)) < 0).cpu() != (rows is None)]
            counts = partitions_of(ids, index.shard[0]).bincount(minlength=index.shard[0])
            num_rows += counts if rows is not None else -counts
        if int(num_rows.max()) > index.capacity // index.num_partitions:
            raise ValueError(f"table {self.name!r} has no room for the published rows; raise its capacity")
        num_fallback_rows = sum(len(part.get(f"{FALLBACK}weight", ())) for part in metadata)
        if metadata and num_fallback_rows != len(index.fallback_rows):
            text = f"{num_fallback_rows} fallback rows, and has {len(index.fallback_rows)}"
            raise ValueError(f"table {self.name!r} was published with {text}; use the model that is trained")

    def write(self, changes: Sequence[Change], metadata: Parts) -> None:
        """Remove and write rows; set the seed and the fallback rows of a dynamic table."""
        for ids, rows, column in changes:
            if self.dynamic is not None:
                self._write_dynamic(self.dynamic, ids, rows)
            elif rows is not None:
                if rows.shape[1] < self.table.weight.shape[1]:  # columns
                    whole_rows = self._read(ids)
                    whole_rows[:, column : column + rows.shape[1]] = rows
                    rows = whole_rows
                self.table.rows.write(self.table, ids, {"weight": rows})
        if (table := self.dynamic) is not None and metadata:
            table.seed = seed_of(metadata)
            if len(fallback := [part[f"{FALLBACK}weight"] for part in metadata if f"{FALLBACK}weight" in part]):
                table.rows.write(table, table.index.fallback_rows, {"weight": torch.cat(fallback)})

    def _read(self, numbers: Tensor) -> Tensor:
        rows: Tensor = self.table.rows.read(self.table, numbers, WEIGHT)["weight"]
        return rows

    def _write_dynamic(self, table: DynamicTable, ids: Tensor, rows: Tensor | None) -> None:
        ids = ids.to(table.index.ids)
        with table.index.lock:
            if rows is None:
                table.index.discard(ids)
            else:
                table.load_row_state({"ids": ids, "step": ids * 0, "count": ids * 0, "weight": rows})


class Update:
    """Changes of tables that lead to the state of a step: their new rows, and new dense tensors.

    Files are read from the newest one on: the newest change of an id counts. With `is_full`, rows are compared with
    those of the tables, and ids without a row are removed.
    """

    names: tuple[str, ...]  # of the last snapshot of each chain
    step: int
    time: float  # of the oldest file

    def __init__(self, tables: Mapping[str, FollowedTable], specs: Mapping[str, TableSpec], is_full: bool) -> None:
        self.tables, self.specs, self.is_full, self.dense = tables, specs, is_full, dict[str, Tensor]()
        self._changes, self._parts = defaultdict[str, list[Change]](list), defaultdict[str, dict[int, Any]](dict)
        self._ids = defaultdict[tuple[str, int], list[Tensor]](list)  # ids by table and column
        self._newer_ids = dict[tuple[str, int], Tensor]()  # those of newer files

    def read(self, path: Path, header: Values, names: Sequence[str]) -> None:
        """Read a file with this header; `names` are those of the tables of a server, by number."""
        records, removed = read_snapshot(path), list[tuple[str, Tensor]]()
        if next(records)[0] != header:
            raise StorageError(f"snapshot {path} was replaced while it was read")
        for values, tensors in records:
            fields = dict(zip(values.get("names", ()), tensors, strict=False))
            if values.get("kind") == "dense":
                self.dense = self.dense or fields
            if "table" not in values:
                continue
            name = names[values["table"]] if names else values["table"]
            if name not in self.tables:
                raise ValueError(f"table {name!r} was published, and is not in the model")
            if "seed" in fields:
                part = values["part"] if "part" in values else header["server"]
                self._parts[name].setdefault(part, fields)
            elif values["kind"] == "removed":
                removed += [(name, fields["ids"])] if self.tables[name].dynamic is not None else []
            else:
                bits, column = values.get("bits", 32), values.get("column", 0)
                rows = self.tables[name].encode(fields["ids"], fields["weight"], bits, column)
                self._add(name, fields["ids"], rows, column)
        self._newer_ids = {key: torch.cat(ids) for key, ids in self._ids.items()}
        for name, ids in removed:
            self._add(name, ids, None, 0)
        self._newer_ids = {key: torch.cat(ids) for key, ids in self._ids.items()}

    def read_checkpoint(self, path: Path, dense: Container[str], tables: Iterable[str]) -> None:
        """Read a run's checkpoint, but for tables on servers: dense tensors, those of the model at least, and all rows.
        `tables` are all paths of the model's tables. ValueError if it is damaged."""
        read_manifest(path)
        prefix, collections = "model.", tuple(name[: name.rfind(".") + 1] for name in tables)
        stored = {name[len(prefix) :]: e for name, e in stored_tensors(path).items() if name.startswith(prefix)}

        def load(names: Iterable[str]) -> dict[str, Tensor]:
            entries = {prefix + name: stored[name] for name in names if name in stored}
            tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
            load_tensors(path, tensors, ("",))
            return {name[len(prefix) :]: tensor for name, tensor in tensors.items()}

        self.dense = load(name for name in stored if name in dense or not name.startswith(collections))
        for name, table in self.tables.items():
            fields = {key[len(name) + 1 :]: t for key, t in load(f"{name}.{field}" for field in ROW_FIELDS).items()}
            if not fields:
                continue  # on servers, or missing
            if ("ids" in fields) != (table.dynamic is not None):
                raise ValueError(f"table {name!r} is dynamic either in {path} or in the model, and static in the other")
            fields = rows_by_id(fields, path)
            ids, rows = fields.get("ids", torch.arange(len(fields["weight"]))), fields["weight"]
            scales = fields.get(SCALE)
            if "ids" in fields:
                self._parts[name][0] = fields
            for at in torch.arange(len(ids)).split(max(1, BLOCK_ELEMENTS // rows.shape[1])):
                block = rows[at] if scales is None else decode_rows(rows[at], scales[at])
                self._add(name, ids[at], table.encode(ids[at], block, 32, 0), 0)
        self._newer_ids = {key: torch.cat(values) for key, values in self._ids.items()}

    def finish(self) -> None:
        """Add rows that no file has, and check that there is room for all."""
        names = {name for name, _ in self._ids} | self._parts.keys()
        if self.is_full and (missing := sorted(self.tables.keys() - names)):
            raise ValueError(f"table {missing[0]!r} of the model was not published")
        for name, spec in self.specs.items() if self.is_full else ():
            if self.tables[name].dynamic is None and (size := spec.num_embeddings) is not None:
                for ids in torch.arange(size).split(max(1, BLOCK_ELEMENTS // spec.embedding_dim)):
                    rows = spec.initial_values(ids, seed_of(self.parts(name)))  # servers have only rows that were used
                    self._add(name, ids, self.tables[name].encode(ids, rows, 32, 0), 0)
        for name, table in self.tables.items():
            if self.is_full and table.dynamic is None:
                self._check_whole(name, table.num_rows)
            if self.is_full and table.dynamic is not None:
                ids = table.dynamic.ids().cpu()
                published = self._newer_ids.get((name, 0), ids[:0])
                self._changes[name].append((ids[~torch.isin(ids, published)], None, 0))
            self._changes[name].sort(key=lambda change: change[1] is not None)  # removals make room
            self._changes[name] = merge_changes(self._changes[name])
            table.check(self._changes[name], self.parts(name))

    def write(self) -> None:
        """Write the changes to the tables; after a failure it may be called again."""
        for name, table in self.tables.items():
            table.write(self._changes[name], self.parts(name))

    def parts(self, name: str) -> Parts:
        return [part for _, part in sorted(self._parts[name].items())]

    def _check_whole(self, name: str, num_rows: int) -> None:
        """Raise ValueError unless all rows of a table were published: those of a smaller one are of other values."""
        for ids in (torch.cat(parts) for (table, _), parts in self._ids.items() if table == name):
            if num_missing := int((torch.zeros(num_rows, dtype=torch.bool).index_fill_(0, ids, True) == 0).sum()):
                text = f"{num_rows - num_missing:,} were published; use the model that is trained"
                raise ValueError(f"table {name!r} has {num_rows:,} rows, and {text}")

    def _add(self, name: str, ids: Tensor, rows: Tensor | None, column: int) -> None:
        key = name, column
        mask = ~torch.isin(ids, self._newer_ids.get(key, ids[:0]))
        self._ids[key].append(ids.clone())  # a view would hold the buffer of its record
        if self.is_full and rows is not None:
            mask &= self.tables[name].differ(ids, rows, column)
        self._changes[name].append((ids[mask], None if rows is None else rows[mask], column))


def merge_changes(changes: Iterable[Change]) -> list[Change]:
    """Concatenate successive changes of the same columns to blocks of at most 16 MiB, unless one alone is larger.

    Scoring waits while changes are written, and the fixed cost per change is that of about 1,000 rows."""
    groups, previous, num_elements = list[list[Change]](), None, 0
    for ids, rows, column in changes:
        kind = column, None if rows is None else (rows.dtype, rows.shape[1:])
        size = (ids if rows is None else rows).numel()
        if kind != previous or num_elements + size > BLOCK_ELEMENTS:
            groups.append([])
            previous, num_elements = kind, 0
        groups[-1].append((ids, rows, column))
        num_elements += size
    parts = (tuple(zip(*group, strict=True)) for group in groups)
    return [(torch.cat(ids), None if rows[0] is None else torch.cat(rows), columns[0]) for ids, rows, columns in parts]


def seed_of(parts: Parts) -> int:
    """Return the seed of a table's initial values."""
    return max(int(part["seed"]) for part in parts)
