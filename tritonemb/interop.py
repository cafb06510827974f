"""Interop for dynamic tables: import rows from a vocabulary, TorchRec's managed collisions, or a dynamicemb dump."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tritonemb.nn import DynamicTable

__all__ = ["from_dynamicemb", "from_torchrec", "from_vocabulary"]
_INTEGERS, _FLOATS = (torch.int32, torch.int64), (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_REMAPPERS = "_managed_collision_collection._managed_collision_modules."
_DUMP = re.compile(r"(.+)_emb_(keys|values)\.rank_(\d+)\.world_size_(\d+)")


def from_vocabulary(
    table: DynamicTable, weight: Tensor, ids: Tensor | Sequence[int] | Mapping[int, int], **states: Tensor
) -> None:
    """Insert rows of a static table under the ids of its vocabulary; rows of existing ids are overwritten.

    Args:
        weight: `[n, embedding_dim]`, of any floating point dtype and on any device.
        ids: int32 or int64 `[n]`, the id of each row; or a dict from ids to rows, which may omit rows.
        states: optimizer states by name, `[n]` or `[n, embedding_dim]`; zero by default.

    Raises:
        TypeError, ValueError: for a table that is not dynamic, wrong dtypes or shapes, sharded tensors, duplicate ids,
            rows out of range, and ids beyond the capacity. The table is unchanged then.
    """
    rows = np.asarray([*ids.values()]) if isinstance(ids, Mapping) else None
    id_array = ids if isinstance(ids, Tensor) else np.asarray([*ids])
    _insert(table, id_array, rows, {"weight": weight, **states})


def from_torchrec(
    table: DynamicTable, state_dict: Mapping[str, Any], prefix: str = "", name: str | None = None, **states: Tensor
) -> None:
    """Insert rows of TorchRec's `ManagedCollisionEmbedding(Bag)Collection` under its raw ids.

    The ids are those of a `HashZchManagedCollisionModule` (MPZCH) or `MCHManagedCollisionModule`. Rows without an id
    are skipped.

    Args:
        state_dict: full (unsharded) tensors.
        prefix: prefix of the keys before `_managed_collision_collection`.
        name: TorchRec's name of the table; that of `table` by default.
        states: as in `from_vocabulary`, for all rows of TorchRec's table.

    Raise the errors of `from_vocabulary`, and ValueError for missing keys.
    """
    name, start = name or _checked(table).config.name, f"{prefix}." if prefix else ""
    kinds = "hash_zch_identities", "mch_sorted_raw_ids", "mch_remapped_ids_mapping"
    keys = [f"{start}{_REMAPPERS}{name}._{kind}" for kind in kinds]
    keys += [f"{start}_embedding_module.{kind}.{name}.weight" for kind in ("embedding_bags", "embeddings")]
    hashed, ids, rows, *weights = map(state_dict.get, keys)
    values = {"weight": weights[0] if weights[1] is None else weights[1], **states}
    if values["weight"] is None or (hashed is None and (ids is None or rows is None)):
        available = sorted(key for key in state_dict if _REMAPPERS in key)
        raise ValueError(
            f"the state dict must have {keys[3]}, and either {keys[0]} or both {keys[1]} and {keys[2]}; "
            f"it has {available}"
        )
    # The id of an empty slot is -1 (MPZCH) or 2**63 - 1 (MCH).
    _insert(table, *((ids, rows, values, 2**63 - 1) if hashed is None else (hashed, None, values, -1)))


def from_dynamicemb(
    table: DynamicTable, source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], name: str | None = None
) -> None:
    """Insert rows of all ranks from a dump of NVIDIA's dynamicemb, without its scores and optimizer states.

    Args:
        source: folder of `<name>_emb_keys.rank_<r>.world_size_<w>` (int64) and `<name>_emb_values...` (float32), or the
            paths of these files.
        name: name of the table in the dump; by default its only one, or that of `table`.

    Raise the errors of `from_vocabulary`, and ValueError for missing or surplus files, or wrong sizes.
    """
    dim, dumps = _checked(table).config.embedding_dim, dict[str, dict[tuple[str, int, int], Path]]()
    # Group the files by table, then by kind, rank and world size.
    for path in Path(source).glob("*") if isinstance(source, str | os.PathLike) else map(Path, source):
        if match := _DUMP.fullmatch(path.name):
            key = match[2], int(match[3]), int(match[4])
            if (other := dumps.setdefault(match[1], {}).setdefault(key, path)) != path:
                raise ValueError(f"{other} and {path} have the same rank; load one dump at a time")
    name = name or (next(iter(dumps)) if len(dumps) == 1 else table.config.name)
    if name not in dumps:
        raise ValueError(f"no file {name}_emb_keys.rank_*, only those of tables {sorted(dumps)}; check source and name")
    files, world = dumps[name], max(size for _, _, size in dumps[name])
    if mismatched_files := files.keys() ^ {(kind, rank, world) for kind in ("keys", "values") for rank in range(world)}:
        paths = ", ".join(
            f"{name}_emb_{kind}.rank_{rank}.world_size_{size}" for kind, rank, size in sorted(mismatched_files)
        )
        raise ValueError(f"missing or surplus files of a dump of {world} ranks: {paths}")
    # Read and concatenate the ids and rows of all ranks.
    arrays = []
    for keys, values in ((files["keys", rank, world], files["values", rank, world]) for rank in range(world)):
        num_bytes = keys.stat().st_size, values.stat().st_size
        if num_bytes[0] % 8 or num_bytes[1] != num_bytes[0] // 8 * dim * 4:
            raise ValueError(f"{keys} and {values.name} have {num_bytes} bytes, not an int64 and {dim} float32 per row")
        arrays.append((np.fromfile(keys, "<i8"), np.fromfile(values, "<f4").reshape(-1, dim)))
    ids, weight = (np.concatenate(ranks) for ranks in zip(*arrays, strict=True))
    _insert(table, ids, None, {"weight": weight})


def _checked(table: DynamicTable) -> DynamicTable:
    if not isinstance(table, DynamicTable) or table.weight.is_meta:
        raise TypeError(
            f"expected a DynamicTable not on the meta device, e.g. collection['user'], got {type(table).__name__}"
        )
    return table


def _cpu_tensor(title: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "if" else value
    if type(value) not in (Tensor, nn.Parameter) or (value.dtype not in dtypes and value.numel()):
        actual = f"{type(value).__name__} {getattr(value, 'dtype', '')}"
        raise TypeError(f"{title} must be an unsharded tensor of one of {dtypes}, got {actual}; gather sharded ones")
    return value.detach().cpu().reshape(-1).long() if dtypes is _INTEGERS else value.detach().cpu()


def _insert(table: DynamicTable, ids: Any, rows: Any, values: Mapping[str, Any], empty_id: int | None = None) -> None:
    """Insert `values[rows[i]]` under `ids[i]`, where `rows` defaults to 0, 1, …; skip ids equal to `empty_id`."""
    ids, tensors = _cpu_tensor("ids", ids, _INTEGERS), {n: _cpu_tensor(n, v, _FLOATS) for n, v in values.items()}
    row_indices = torch.arange(len(ids)) if rows is None else _cpu_tensor("rows", rows, _INTEGERS)
    counts = {name: len(tensor) if tensor.dim() else 0 for name, tensor in tensors.items()}
    if len(row_indices) != len(ids) or {*counts.values()} != {len(ids) if rows is None else counts["weight"]}:
        raise ValueError(f"{len(ids):,} ids with {len(row_indices):,} rows of {counts}: expected one row per id")
    used = slice(None) if empty_id is None else ids != empty_id
    ids, row_indices = ids[used], row_indices[used]
    first, last = (int(row_indices.min()), int(row_indices.max())) if len(ids) else (0, -1)
    if first < 0 or last >= min(counts.values()):
        raise ValueError(f"ids refer to rows {first} to {last}, but the tensors have {counts} rows")
    selected = {name: tensor[row_indices] for name, tensor in tensors.items()}
    _checked(table).insert(ids, selected.pop("weight"), **selected)
