"""Retrieval with a two-tower model: vectors of users and items of a run, an index of items, and its export to faiss."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tritonemb.data.files import arrow_csv, compute, pa, parquet
from tritonemb.data.schema import check_columns
from tritonemb.models.two_tower import TwoTower
from tritonemb.storage.checkpoint import ArchiveFile, check_files, read_manifest_text, size_and_checksum, write_manifest
from tritonemb.storage.store import storage_errors
from tritonemb.training.ranking import top_items
from tritonemb.utils import join_names, new_folder, require

MANIFEST, TENSORS = "items.json", "items.pt"


class ItemIndex:
    """Index of item vectors, searched exactly: the k items with the largest dot products, of equal ones the first.

    Args:
        vectors: `[M, D]`, for example `model.items(features)` or rows of a table.
        ids: distinct ids of the items, int64 `[M]`; their numbers if not given.

    Attributes:
        vectors, ids: these tensors, the vectors as float32.
    """

    def __init__(self, vectors: Tensor, ids: Tensor | None = None) -> None:
        if not (ids is None or isinstance(ids, Tensor)):
            raise TypeError(f"ids must be a tensor, got a {type(ids).__name__}; number items that have other ids")
        ids = torch.arange(len(vectors)) if ids is None else ids.cpu()
        if vectors.dim() != 2 or ids.shape != vectors.shape[:1] or ids.dtype != torch.int64:
            shapes = f"{list(vectors.shape)} and {ids.dtype} {list(ids.shape)}"
            raise ValueError(f"expected vectors [M, D] and ids int64 [M], got {shapes}")
        self.vectors, self.ids = vectors.detach().float(), ids
        self._sorted, self._order = ids.sort()
        if (self._sorted[1:] == self._sorted[:-1]).any():
            raise ValueError("ids must be distinct")

    def search(self, queries: Tensor, k: int, excluded: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return scores float32 and item ids int64 `[B, min(k, M)]`, best first, for queries `[B, D]`.

        Args:
            excluded: pairs of query and item id, such as items that a user has seen, two int64 `[P]`; where a query has
                fewer others than k, the score is -inf and the id -1. Ids that the index lacks are ignored.
        """
        if queries.dim() != 2 or queries.shape[1] != self.vectors.shape[1]:
            raise ValueError(f"expected queries [B, {self.vectors.shape[1]}], got {list(queries.shape)}")
        if excluded is not None and len(self.ids):
            rows, ids = (tensor.cpu() for tensor in excluded)
            if {rows.dtype, ids.dtype} != {torch.int64} or rows.shape != ids.shape or rows.dim() != 1:
                shapes = f"{rows.dtype} {list(rows.shape)} and {ids.dtype} {list(ids.shape)}"
                raise ValueError(f"expected excluded pairs of two int64 [P], got {shapes}")
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(queries):
                raise ValueError(
                    f"excluded pairs have queries {int(rows.min())} to {int(rows.max())} of {len(queries)}"
                )
            places = torch.searchsorted(self._sorted, ids).clamp(max=len(self.ids) - 1)
            known = self._sorted[places] == ids
            device = self.vectors.device
            excluded = rows[known].to(device), self._order[places[known]].to(device)
        scores, numbers = top_items(queries.detach().to(self.vectors), self.vectors, k, excluded)
        numbers = numbers.cpu()
        return scores, self.ids[numbers].masked_fill(numbers < 0, -1)

    def save(self, folder: str | Path) -> None:
        """Write the index to a new folder, with checksums; it appears under its name when it is complete.

        Raise FileExistsError for a folder that is not empty, and StorageError, which leaves nothing, for a full disk.
        """
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        errors = storage_errors(f"{folder} could not be written", "check the disk")
        with new_folder(Path(folder), errors) as temporary:
            with ArchiveFile(FileIO(temporary / TENSORS, "w")) as file:
                torch.save({"vectors": self.vectors.cpu(), "ids": self.ids}, file)
            write_manifest(temporary, {"files": {TENSORS: size_and_checksum(temporary / TENSORS)}}, MANIFEST)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read an index. Raise FileNotFoundError if the folder has none, ValueError if it is damaged."""
        manifest = read_manifest_text(path := Path(folder), MANIFEST)[1]
        check_files(path, manifest["files"], 0, 1)
        tensors = torch.load(path / TENSORS, weights_only=True)
        return cls(tensors["vectors"], tensors["ids"])

    def to_faiss(self, factory: str = "Flat") -> Any:
        """Return a faiss index of the items for inner products, for example "HNSW32" or "IVF256,Flat"; see `recall`."""
        faiss, vectors = require("faiss", "faiss"), np.ascontiguousarray(self.vectors.cpu().numpy())
        index = faiss.IndexIDMap2(faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT))
        if not index.is_trained:
            index.train(vectors)
        index.add_with_ids(vectors, self.ids.numpy())
        return index

    def recall(self, index: Any, queries: Tensor, k: int) -> float:
        """Return the mean share of the exact k items that `index.search(queries, k)` of another library returns, too.

        Of equal scores it may return others, which then count as missing.
        """
        exact, other = self.search(queries, k)[1], index.search(queries.detach().float().cpu().numpy(), k)[1]
        return float((exact[:, :, None] == torch.from_numpy(other)[:, None, :]).any(2).float().mean())


@torch.no_grad()
def encode_rows(run: Any, tower: str, rows: Any, batch_size: int = 8192) -> Tensor:
    """Return the vectors `[N, dim]` of raw rows of the users or the items of a two-tower run.

    Args:
        run: run of `te.load_run`.
        tower: "users" or "items".
        rows: Arrow table or dictionary of columns, with those of the tower; others are ignored.

    Raises:
        ValueError: the run has another model, or the rows lack a column or have an invalid value.
    """
    if not isinstance(run.model, TwoTower):
        raise ValueError(f"{run.path} has a {type(run.model).__name__}, retrieval needs a two-tower model")
    module, schema = getattr(run.model, tower), run.encoder.schema
    names = [*module.embeddings.feature_names, *(schema.dense if tower == "users" else ())]
    table = pa.table(rows) if isinstance(rows, Mapping) else rows
    if missing := [name for name in names if name not in table.column_names]:
        text = f"the rows have {join_names(table.column_names)}"
        raise ValueError(f"missing columns of the {tower}: {join_names(missing)}; {text}")
    check_columns(table.column_names, names, f"rows of the {tower}")
    absent = dict.fromkeys(name for name in (*schema.dense, *schema.sparse) if name not in names)

    def vectors() -> Iterator[Tensor]:
        for first in range(0, table.num_rows, batch_size):
            columns = table.select(names).slice(first, batch_size).to_pydict()
            batch = run.encoder.encode([run.encoder.raw_columns(columns, absent)], first).to(run.device)
            yield module(batch.sparse, batch.dense if tower == "users" else None)

    return torch.cat([torch.empty(0, module.dim, device=run.device), *vectors()])


def top_rows(
    run: Any, data: str, items: str | None, k: int | None, keep: Sequence[str], batch_size: int
) -> Generator[Any, None, None]:
    """Yield Arrow tables with k rows per user, best first: columns `keep` of the user, those of the item, the logit.

    Args:
        data, items: files of users and of items, Parquet or CSV with a header.

    Raises:
        ValueError, FileNotFoundError: a file cannot be read, or lacks a column.
    """
    if items is None or k is None:
        raise ValueError("the top items are those of a file: pass both top and items")
    users, candidates = _read_rows(run, data, keep), _read_rows(run, items)
    if not candidates.num_rows:
        raise ValueError(f"{items} has no rows, so there is no item to rank")
    index = ItemIndex(encode_rows(run, "items", candidates, batch_size))
    names = run.model.items.embeddings.feature_names
    if common := [name for name in keep if name in names]:
        raise ValueError(f"{common[0]!r} is a column of the items, which the result has; rename the users', or omit it")
    if missing := [name for name in keep if name not in users.column_names]:
        raise ValueError(f"{data} has no column {missing[0]!r} to keep; it has {join_names(users.column_names)}")
    check_columns(users.column_names, keep, data)
    for first in range(0, users.num_rows, batch_size):
        rows = users.slice(first, batch_size)
        scores, numbers = index.search(encode_rows(run, "users", rows, batch_size), k)
        of_users = rows.select([*keep]).take(np.arange(len(scores)).repeat(scores.shape[1]))
        of_items = candidates.select(names).take(numbers.flatten().numpy())
        logits = scores.flatten().cpu().numpy() / run.model.temperature
        columns = [*of_users.columns, *of_items.columns, pa.array(logits)]
        yield pa.table(columns, [*keep, *names, "score"])


def _read_rows(run: Any, path: str, keep: Sequence[str] = ()) -> Any:
    """Read a file of raw rows; of CSV, as the run's logs: columns to keep are strings, those not used are bytes."""
    if run.transforms:
        raise ValueError(f"{path}: --top does not apply transforms; pass transformed columns to te.serving.encode_rows")
    if not path.endswith((".csv", ".parquet")):
        raise ValueError(f"{path}: --top reads .parquet files and .csv files with a header")
    try:
        return parquet.read_table(path) if path.endswith(".parquet") else _read_csv(run, path, keep)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file") from error
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_csv(run: Any, path: str, keep: Sequence[str]) -> Any:
    options, schema = run.log_options, run.encoder.schema
    parsing = arrow_csv.ParseOptions(delimiter=options.delimiter or ",", newlines_in_values=options.quoted_newlines)
    with arrow_csv.open_csv(path, parse_options=parsing) as file:
        kinds = dict.fromkeys(file.schema.names, pa.binary())
    kinds |= dict.fromkeys([*keep, *(feature.name for feature in run.features)], pa.string())
    kinds |= dict.fromkeys(schema.dense, pa.float64())
    lists = [feature.name for feature in run.features if feature.multi_hot]
    kinds |= {f.name: pa.int64() for f in run.features if f.kind == "integers" and not f.multi_hot}
    conversion = arrow_csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True)
    table = arrow_csv.read_csv(path, parse_options=parsing, convert_options=conversion)
    for index, name in enumerate(table.column_names):
        if name in lists and options.list_separator:
            table = table.set_column(index, name, compute.split_pattern(table[name], options.list_separator))
    return table
