"""Interop: tables that another library has trained, from its `state_dict` into ours, sharded or not."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from tritonemb.nn.collections import TableCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.sharding.sharded_tensor import TableShards, described
from tritonemb.utils import join_names

_TORCHREC = r"(^|\.)(embedding_bags|embeddings)\.[^.]*\.weight$"  # what TorchRec's collections call their tables
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")


class _Ours(NamedTuple):
    path: str  # of the table in the model
    name: str
    weight: Tensor


@torch.no_grad()
def load_tables(
    model: nn.Module, state_dict: Mapping[str, Any], keys: Mapping[str, str] | None = None, strict: bool = True
) -> dict[str, str]:
    """Fill the weights of a model's tables from whole tensors of another library.

    A table called "user" is filled from the key `<path>.user.weight`, as a `torch.nn.EmbeddingBag` or `Embedding` of
    that name has it, or from `<path>.embedding_bags.user.weight` or `<path>.embeddings.user.weight` of TorchRec's
    collections. Other entries, the dense part's for example, are left alone, and so are optimizer states, ours too.

    Every rank of a sharded model calls it with the same keys. A DTensor is gathered, one table at a time.

    Args:
        model: with our collections, sharded or not, anywhere inside.
        state_dict: whole tensors `[num_embeddings, embedding_dim]` or DTensors, on any device.
        keys: `{table: key}` for tables whose key does not follow from their name; a table goes by its name, or by its
            path in the model where several have that name.
        strict: raise if a table of ours has no key, or if one of TorchRec's has no table here.

    Returns:
        the key that each table was filled from, by its path in the model.

    Raises:
        ValueError, TypeError: tables without a key or with several, entries of TorchRec's without a table, shapes or
            dtypes that differ; all are listed, and nothing has been copied then.
    """
    if not (tables := _tables(model)):
        raise ValueError(f"{type(model).__name__} has no tables: no collection of tritonemb.nn, sharded or not")
    found, problems = _match(tables, state_dict, dict(keys or {}), strict)
    chosen = [(table, found[table.path]) for table in tables if table.path in found]
    for table, key in chosen:
        problems += _misfits(table, key, state_dict[key])
    if problems:
        raise ValueError("the tables cannot be loaded:\n  " + join_names(problems, 20, "\n  ", "\n  "))
    for table, key in chosen:
        value = state_dict[key]
        copy = table.weight.copy_from if isinstance(table.weight, TableShards) else table.weight.copy_
        copy(value.full_tensor() if isinstance(value, DTensor) else value)
    return found


def _tables(model: nn.Module) -> list[_Ours]:
    """Every table once, with its path: of the outermost modules with tables, but for `HybridParallel` itself."""
    found: list[_Ours] = []
    taken: list[str] = []  # what the paths inside such modules begin with
    for path, module in model.named_modules():
        weights: Mapping[str, Tensor] = {}
        if isinstance(module, HybridParallel) or any(path.startswith(other) for other in taken):
            continue
        if callable(getattr(module, "table_weights", None)):
            weights = module.table_weights()
        elif isinstance(module, TableCollection):
            weights = {table.config.name: table.weight for table in module.tables}
        if weights:
            prefix = f"{path}." if path else ""
            taken.append(prefix)
            found += [_Ours(f"{prefix}{name}", name, weight) for name, weight in weights.items()]
    return found


def _unwrapped(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _match(
    tables: list[_Ours], state_dict: Mapping[str, Any], given: dict[str, str], strict: bool
) -> tuple[dict[str, str], list[str]]:
    found: dict[str, str] = {}
    problems: list[str] = []
    candidates: dict[str, list[str]] = {}
    for key in state_dict:
        *_, name, field = ("", *key.split("."))
        if field == "weight":
            candidates.setdefault(name, []).append(key)
    for table in tables:
        if table.path in given or table.name in given:
            key = given.get(table.path, given.get(table.name, ""))
            if key in state_dict:
                found[table.path] = key
            else:
                problems.append(f"table {table.path}: the key {key!r} that is given for it is not there")
            continue
        fitting = candidates.get(table.name, [])
        exact = f"{_unwrapped(table.path)}.weight"
        fitting = [key for key in fitting if _unwrapped(key) == exact] or fitting
        if len(fitting) == 1:
            found[table.path] = fitting[0]
        elif fitting or strict:
            what = f"has several keys, {', '.join(fitting)}" if fitting else f"has no key, such as {table.name}.weight"
            problems.append(f"table {table.path} {what}; give its key as keys={{{table.name!r}: ...}}")
    known = {name for table in tables for name in (table.path, table.name)}
    problems += [f"keys has {name!r}, and there is no such table" for name in given if name not in known]
    used: dict[str, str] = {}
    for path, key in found.items():
        other = used.setdefault(key, path)
        if other != path:
            problems.append(f"tables {other} and {path} would both be filled from {key}; give their keys")
    problems += [
        f"{key} is a table of TorchRec's that this model does not have"
        for key in state_dict
        if strict and re.search(_TORCHREC, key) and key not in used
    ]
    return found, problems


def _misfits(table: _Ours, key: str, value: Any) -> list[str]:
    if isinstance(value, ShardedTensor | TableShards):
        raise TypeError(
            f"{key} is a {type(value).__name__}, so this rank has a part of it; gather it into a whole tensor first"
        )
    if not isinstance(value, Tensor):
        raise TypeError(f"{key} is a {type(value).__name__}; expected a tensor {list(table.weight.shape)}")
    if table.weight.is_meta:
        raise ValueError(f"table {table.path} is on the meta device; give it memory first, by to_empty for example")
    there, here = (described(tensor.dtype, tensor.shape) for tensor in (value, table.weight))
    hint = "; convert it first" if value.shape == table.weight.shape else ""
    return [] if there == here else [f"{key} is {there}, table {table.path} is {here}{hint}"]
