"""Dynamic tables from what others keep: a vocabulary, TorchRec's managed collisions, dumps of dynamicemb."""

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
    """Insert rows of a static table under the ids of its vocabulary; ids that are there already get them, too.

    Args:
        weight: `[n, embedding_dim]`, of any floating point dtype and on any device.
        ids: int32 or int64 `[n]`, the id of each row; or a dict of ids and their rows, which may leave rows out.
        states: of the table's optimizer, by name, `[n]` or `[n, embedding_dim]`; zero if not given.

    Raises:
        TypeError, ValueError: for another kind of table, wrong dtypes or shapes, parts of sharded tensors, ids given
            twice, rows that do not exist, and ids that find no room. Nothing has changed then.
    """
    rows = np.asarray([*ids.values()]) if isinstance(ids, Mapping) else None
    found = ids if isinstance(ids, Tensor) else np.asarray([*ids])
    _insert(table, found, rows, {"weight": weight, **states})


def from_torchrec(
    table: DynamicTable, state_dict: Mapping[str, Any], prefix: str = "", name: str | None = None, **states: Tensor
) -> None:
    """Insert rows of TorchRec's `ManagedCollisionEmbedding(Bag)Collection` under the ids that it keeps.

    Ids are kept by a `HashZchManagedCollisionModule` (MPZCH) or `MCHManagedCollisionModule`. Rows without one stay out.

    Args:
        state_dict: of whole tensors; gather those of a sharded model.
        prefix, name: what its keys have before `_managed_collision_collection`; the table there, `table`'s by default.
        states: as in `from_vocabulary`, of all rows of TorchRec's table.

    Raises as `from_vocabulary`, and ValueError for keys that are not there.
    """
    name, start = name or _checked(table).config.name, f"{prefix}." if prefix else ""
    kinds = "hash_zch_identities", "mch_sorted_raw_ids", "mch_remapped_ids_mapping"
    keys = [f"{start}{_REMAPPERS}{name}._{kind}" for kind in kinds]
    keys += [f"{start}_embedding_module.{kind}.{name}.weight" for kind in ("embedding_bags", "embeddings")]
    hashed, ids, rows, *weights = map(state_dict.get, keys)
    values = {"weight": weights[0] if weights[1] is None else weights[1], **states}
    if values["weight"] is None or (hashed is None and (ids is None or rows is None)):
        there = sorted(key for key in state_dict if _REMAPPERS in key)
        raise ValueError(f"no {keys[0]}, or no {keys[1]} and {keys[2]}, or no {keys[3]}; there are {there}")
    # An empty slot has the id -1, or the largest one.
    _insert(table, *((ids, rows, values, 2**63 - 1) if hashed is None else (hashed, None, values, -1)))


def from_dynamicemb(
    table: DynamicTable, source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], name: str | None = None
) -> None:
    """Insert rows that NVIDIA's dynamicemb has dumped, those of all ranks; not its scores and optimizer states.

    Args:
        source: the folder of `<name>_emb_keys.rank_<r>.world_size_<w>` (int64) and `<name>_emb_values...` (float32),
            or the paths of these files.
        name: of the table there; if not given, of the only one, or that of `table`.

    Raises as `from_vocabulary`, and ValueError for files that are missing or too many, or of another size.
    """
    dim, found, parts = _checked(table).config.embedding_dim, dict[str, dict[tuple[str, int, int], Path]](), []
    for path in Path(source).glob("*") if isinstance(source, str | os.PathLike) else map(Path, source):
        if match := _DUMP.fullmatch(path.name):
            found.setdefault(match[1], {})[match[2], int(match[3]), int(match[4])] = path
    name = name or (next(iter(found)) if len(found) == 1 else table.config.name)
    if name not in found:
        raise ValueError(f"there is no {name}_emb_keys.rank_*, only tables {sorted(found)}; give source and name")
    files, world = found[name], max(size for _, _, size in found[name])
    if wrong := files.keys() ^ {(kind, rank, world) for kind in ("keys", "values") for rank in range(world)}:
        listed = ", ".join(f"{name}_emb_{kind}.rank_{rank}.world_size_{size}" for kind, rank, size in sorted(wrong))
        raise ValueError(f"of a dump of {world} ranks, these files are missing or too many: {listed}")
    for keys, values in ((files["keys", rank, world], files["values", rank, world]) for rank in range(world)):
        num_bytes = keys.stat().st_size, values.stat().st_size
        if num_bytes[0] % 8 or num_bytes[1] != num_bytes[0] // 8 * dim * 4:
            raise ValueError(f"{keys} and {values.name} have {num_bytes} bytes: not int64 and {dim} float32 for each")
        parts.append((np.fromfile(keys, "<i8"), np.fromfile(values, "<f4").reshape(-1, dim)))
    ids, weight = (np.concatenate(each) for each in zip(*parts, strict=True))
    _insert(table, ids, None, {"weight": weight})


def _checked(table: DynamicTable) -> DynamicTable:
    if not isinstance(table, DynamicTable) or table.weight.is_meta:
        raise TypeError(f"expected a DynamicTable with memory, say collection['user'], got {type(table).__name__}")
    return table


def _whole(title: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "if" else value
    if type(value) not in (Tensor, nn.Parameter) or (value.dtype not in dtypes and value.numel()):
        found = f"{type(value).__name__} {getattr(value, 'dtype', '')}"
        raise TypeError(f"{title} must be a whole tensor of one of {dtypes}, got {found}; gather a sharded one first")
    return value.detach().cpu().reshape(-1).long() if dtypes is _INTEGERS else value.detach().cpu()


def _insert(table: DynamicTable, ids: Any, rows: Any, given: Mapping[str, Any], empty: int | None = None) -> None:
    """`rows` of the values for each id; by default the first one's is the first row, and so on. Not `empty` ids."""
    ids, values = _whole("ids", ids, _INTEGERS), {name: _whole(name, value, _FLOATS) for name, value in given.items()}
    places = torch.arange(len(ids)) if rows is None else _whole("rows", rows, _INTEGERS)
    counts = {name: len(value) if value.dim() else 0 for name, value in values.items()}
    if len(places) != len(ids) or (rows is None and {*counts.values()} != {len(ids)}):
        raise ValueError(f"{len(ids):,} ids with {len(places):,} rows of {counts}: give a row for each id")
    used = slice(None) if empty is None else ids != empty
    ids, places = ids[used], places[used]
    if len(ids) and not 0 <= int(places.min()) <= int(places.max()) < min(counts.values()):
        raise ValueError(f"ids have the rows {int(places.min())} to {int(places.max())}, and there are {counts}")
    picked = {name: value[places] for name, value in values.items()}
    _checked(table).insert(ids, picked.pop("weight"), **picked)
