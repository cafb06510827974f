"""Interop: load tables from the `state_dict` of another library, into sharded or unsharded collections."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from tritonemb.nn.collections import TableCollection
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.sharded_tensor import TableShards, dtype_and_shape, slice_shard
from tritonemb.types import TableConfig
from tritonemb.utils import join_names

_TORCHREC = r"(^|\.)(embedding_bags|embeddings)\.[^.]*\.weight$"  # keys of TorchRec's collections
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")


class _Table(NamedTuple):
    path: str  # in the model
    name: str
    type: str  # dtype and shape of its weight
    assign: Callable[[Tensor], object]
    problem: str = ""  # why it cannot be filled


@torch.no_grad()
def load_tables(
    model: nn.Module, state_dict: Mapping[str, Any], keys: Mapping[str, str] | None = None, strict: bool = True
) -> dict[str, str]:
    """Fill the weights of a model's tables from full tensors of another library.

    Table "user" is filled from the key `<path>.user.weight`, as of a `torch.nn.EmbeddingBag` or `Embedding` of that
    name, or from `<path>.embedding_bags.user.weight` or `<path>.embeddings.user.weight` of TorchRec's collections.
    Other entries, such as dense layers, are ignored. Optimizer states are not loaded and stay unchanged.

    Every rank of a sharded model calls it with the same keys. A DTensor is gathered, one table at a time.

    Args:
        model: contains collections of `te.nn`, sharded or not.
        state_dict: full tensors `[num_embeddings, embedding_dim]` or DTensors, on any device.
        keys: `{table: key}` for tables whose key does not follow from their name; a table is named by its name, or by
            its path in the model where several have that name.
        strict: raise if a table of the model has no key, or if a key of TorchRec's collections has no table.

    Returns:
        the key that each table was filled from, by the table's path in the model.

    Raises:
        ValueError, TypeError: tables without a key or with several, keys of TorchRec's collections without a table,
            shapes or dtypes that differ, dynamic tables and tables on servers; all are listed, and nothing is copied.
    """
    if not (tables := _tables(model)):
        raise ValueError(f"{type(model).__name__} has no tables, i.e. no collection of te.nn, sharded or not")
    key_of, problems = _match(tables, state_dict, dict(keys or {}), strict)
    matches = [(table, key_of[table.path]) for table in tables if table.path in key_of]
    for table, key in matches:
        problems += _check_value(table, key, state_dict[key])
    if problems:
        raise ValueError("the tables cannot be loaded:\n  " + join_names(problems, 20, "\n  ", "\n  "))
    for table, key in matches:
        value = state_dict[key]
        table.assign(value.full_tensor() if isinstance(value, DTensor) else value)
    return key_of


def _tables(model: nn.Module) -> list[_Table]:
    """Tables of the collections of a model."""
    modules = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
    collections = [(prefix, m) for prefix, m in modules if isinstance(m, TableCollection | ShardedCollection)]
    return [_table_of(module, prefix, config) for prefix, module in collections for config in module.configs]


def _table_of(module: TableCollection | ShardedCollection, prefix: str, config: TableConfig) -> _Table:
    dtype, problem = config.row_dtype, ""
    if isinstance(module, TableCollection):
        weight = module[config.name].weight
        dtype, problem = weight.dtype, "on the meta device; call to_empty() of its module first" * weight.is_meta
    problem = "dynamic; insert rows by te.interop.from_vocabulary" if config.is_dynamic else problem
    problem = "on embedding servers; call load_state_dict of the model" if config.placement == "server" else problem
    text = dtype_and_shape(dtype, (config.num_embeddings, config.embedding_dim))
    return _Table(f"{prefix}{config.name}", config.name, text, partial(_assign, module, config.name), problem)


def _assign(module: TableCollection | ShardedCollection, name: str, weight: Tensor) -> None:
    if isinstance(module, TableCollection):
        module[name].assign({"weight": weight})
        return
    for placed, table, _ in module.local_shards.tables():
        if module.configs[placed.table].name == name:
            table.assign({"weight": slice_shard(weight, placed.shard)})


def _unwrapped(path: str) -> str:
    """Path without the names of wrapper modules."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _match(
    tables: list[_Table], state_dict: Mapping[str, Any], keys: dict[str, str], strict: bool
) -> tuple[dict[str, str], list[str]]:
    """Keys by table path, and problems."""
    key_of: dict[str, str] = {}
    problems: list[str] = []
    # Candidates: weights whose module has the table's name.
    candidates: dict[str, list[str]] = {}
    for key in state_dict:
        *_, name, field = ("", *key.split("."))
        if field == "weight":
            candidates.setdefault(name, []).append(key)
    for table in tables:
        if table.path in keys or table.name in keys:
            key = keys.get(table.path, keys.get(table.name, ""))
            if key in state_dict:
                key_of[table.path] = key
            else:
                problems.append(f"table {table.path}: keys= names {key!r}, which the state dict does not have")
            continue
        matches = candidates.get(table.name, [])
        expected_key = f"{_unwrapped(table.path)}.weight"
        matches = [key for key in matches if _unwrapped(key) == expected_key] or matches
        if len(matches) == 1:
            key_of[table.path] = matches[0]
        elif matches or strict:
            problem = f"several keys, {', '.join(matches)}" if matches else f"no key, such as {table.name}.weight"
            problems.append(f"table {table.path} has {problem}; pass its key as keys={{{table.name!r}: ...}}")
    # Unknown tables in `keys`, keys that several tables match, and TorchRec tables without a match.
    known = {name for table in tables for name in (table.path, table.name)}
    problems += [f"keys has {name!r}, which is not a table of the model" for name in keys if name not in known]
    used: dict[str, str] = {}
    for path, key in key_of.items():
        first_path = used.setdefault(key, path)
        if first_path != path:
            problems.append(f"tables {first_path} and {path} would both be filled from {key}; pass their keys")
    problems += [
        f"{key} is a TorchRec table that this model does not have"
        for key in state_dict
        if strict and re.search(_TORCHREC, key) and key not in used
    ]
    return key_of, problems


def _check_value(table: _Table, key: str, value: Any) -> list[str]:
    if isinstance(value, ShardedTensor | TableShards):
        raise TypeError(
            f"{key} is a {type(value).__name__}, this rank has only a shard; gather it into a full tensor first"
        )
    if not isinstance(value, Tensor):
        raise TypeError(f"{key} is a {type(value).__name__}; expected a tensor, {table.type}")
    if table.problem:
        return [f"table {table.path} is {table.problem}"]
    actual, same_shape = dtype_and_shape(value.dtype, value.shape), table.type.endswith(f" {[*value.shape]}")
    hint = "; convert it first" * same_shape
    return [] if actual == table.type else [f"{key} is {actual}, table {table.path} is {table.type}{hint}"]
