"""DLRM's interaction in a graph: products of all pairs of a sample's vectors, written as one `bmm` and an indexing.

    T = cat([x, sparse..], 1).view(B, n, d)        x [B, d], and F = n - 1 vectors of each sample
    Z = bmm(T, T.transpose(1, 2))                  [B, n, n]
    P = Z[:, li, lj]                               pairs, li and lj from literals in the graph
    R = cat([x, P], 1)                             optional

becomes `torch.ops.tritonemb.interaction(x, sparse)`, its columns permuted where the pairs come in another order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tritonemb.compiler.order import has_side_effect, is_random
from tritonemb.compiler.report import Fused, LeftAlone
from tritonemb.compiler.results import only_read
from tritonemb.compiler.values import Writer, expression, value_of
from tritonemb.ops.interaction import FLOATS, is_fused

_PRODUCTS = (torch.bmm, torch.matmul, operator.matmul)
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_RESHAPES = (torch.reshape, "reshape", "view")
_MAKE_CONSTANTS = (torch.tensor, torch.as_tensor, torch.tril_indices, torch.triu_indices, torch.arange)


class _NotServed(Exception):
    """Says why."""


@dataclass(frozen=True)
class _Vectors:
    """A sample's vectors: `dense [B, d]`, then parts whose columns side by side are `[B, F * d]`."""

    dense: Node
    sparse: tuple[Node, ...]
    dim: int


def fuse_interactions(gm: GraphModule) -> tuple[list[Fused], list[LeftAlone]]:
    """Replace every interaction that a kernel of ours serves; say why others are not."""
    fused, alone = [], []
    for node in list(gm.graph.nodes):
        both = _transposed_product(node)
        if both is None:
            continue
        try:
            vectors = _vectors(both)
            picked, pairs = _pairs(node)
            begin = both.args[0] if both.target in _RESHAPES else both
            _require(
                _is_undisturbed(begin, picked, gm),
                "a tensor or a state (gradients, autocast) is changed on the way to it",
            )
            fused.append(_rewrite(gm, node, vectors, picked, pairs))
        except _NotServed as reason:
            alone.append(LeftAlone(node.name, "interaction", str(reason)))
    return fused, alone


def _transposed_product(node: Node) -> Node | None:
    """T of `T @ T.transpose(1, 2)`, `[B, n, d]`."""
    targets = {"call_function": _PRODUCTS, "call_method": ("bmm", "matmul", "__matmul__")}.get(node.op, ())
    if node.target not in targets or len(node.args) != 2:
        return None
    left, right = node.args
    if not isinstance(left, Node) or not isinstance(right, Node) or not _is_transpose(right):
        return None
    if right.args[0] is not left or value_of(left) is None or value_of(left).dim() != 3:
        return None
    return left


def _is_undisturbed(first: Any, last: Node, gm: GraphModule) -> bool:
    """Whether no node between two has a side effect."""
    node = first.next
    while node is not last:
        if node.op != "get_attr" and has_side_effect(node, gm):
            return False
        node = node.next
    return True


def _is_transpose(node: Node) -> bool:
    if node.target is getattr:
        return node.args[1] == "mT"
    if node.target in ("transpose", "swapaxes", torch.transpose, torch.swapaxes):
        return {dim % 3 for dim in node.args[1:] if isinstance(dim, int)} == {1, 2} and len(node.args) == 3
    if node.target in ("permute", torch.permute):
        dims = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return [dim % 3 for dim in dims] == [0, 2, 1]  # type: ignore[operator]
    return False


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _NotServed(reason)


def _vectors(both: Node) -> _Vectors:
    """What T is made of."""
    batch, _, dim = value_of(both).shape
    _require(isinstance(dim, int), "the vectors' dim differs from call to call")
    if both.target in _RESHAPES:
        joined: Any = both.args[0]
        _require(
            _is_join(joined, 2) and expression(value_of(joined).shape[0]) == expression(batch),
            "its vectors are not put together by torch.cat or torch.stack",
        )
        parts = _parts(joined)
    elif both.target is torch.stack:
        _require(_dim_of(both) in (1, -2), "its vectors are not stacked along dim 1")
        parts = _parts(both)
    else:
        _require(_is_join(both, 3), "its vectors are not put together by torch.cat or torch.stack")
        parts = [_as_rows(part, batch) for part in _parts(both)]
    parts = [part for part in parts if isinstance(part, Node)]
    _require(len(parts) > 1, "it has one vector only")
    columns = [_columns(part) for part in parts]
    _require(columns[0] == dim, "the first of its parts is not the one dense vector")
    _require(
        all(isinstance(width, int) and width % dim == 0 for width in columns),
        "its vectors have several dims, or a dim that differs from call to call",
    )
    return _Vectors(parts[0], tuple(parts[1:]), dim)


def _columns(part: Node) -> Any:
    """Columns of `[B, columns]` or of `[B, F, d]` taken as a matrix."""
    shape = value_of(part).shape
    return shape[1] if len(shape) == 2 else shape[1] * shape[2]


def _as_rows(part: Node, batch: Any) -> Node:
    """`x` instead of `x.unsqueeze(1)`."""
    if part.target in ("unsqueeze", torch.unsqueeze) and part.args[1] in (1, -2):
        return part.args[0]  # type: ignore[return-value]
    return part


def _is_join(node: Any, rank: int) -> bool:
    return (
        isinstance(node, Node) and node.target in _JOINS and value_of(node).dim() == rank and _dim_of(node) % rank == 1
    )


def _dim_of(node: Node) -> int:
    dim: Any = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
    return int(dim)


def _parts(node: Any) -> list[Any]:
    return list(node.args[0] if node.args else node.kwargs["tensors"])


def _pairs(product: Node) -> tuple[Node, list[tuple[int, int]]]:
    """The node that picks products, and which: the only use of them."""
    n = value_of(product).shape[1]
    _require(isinstance(n, int), "the number of vectors differs from call to call")
    users = list(product.users)
    _require(len(users) == 1, "not only its pairs are used, but the whole matrix of products")
    user = users[0]
    if user.target is operator.getitem:
        index: Any = user.args[1]
        _require(
            isinstance(index, tuple) and len(index) == 3 and index[0] == slice(None),
            "its pairs are not picked by two indices",
        )
        left, right = _constant(index[1]), _constant(index[2])
        _require(
            left.dim() == 1 == right.dim() and len(left) == len(right),
            "its pairs are not picked by two lists of one length",
        )
        return user, _within(list(zip(left.tolist(), right.tolist(), strict=True)), n)
    _require(_is_flatten(user, n), "its pairs are not picked by indices")
    users = list(user.users)
    _require(len(users) == 1, "not only its pairs are used, but the whole matrix of products")
    pick = users[0]
    if pick.target is operator.getitem:
        index = pick.args[1]
        _require(isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None), "its pairs are not columns")
        places = _constant(index[1])
    else:
        args = [*pick.args[1:], *pick.kwargs.values()]
        _require(pick.target in ("index_select", torch.index_select) and args[:1] == [1], "its pairs are not columns")
        places = _constant(args[1])
    _require(places.dim() == 1, "its pairs are not a list")
    flat = [place % (n * n) for place in places.tolist()]
    return pick, _within([divmod(place, n) for place in flat], n)


def _is_flatten(node: Node, n: int) -> bool:
    value = value_of(node)
    reshaped = node.target in (*_RESHAPES, "flatten", torch.flatten)
    return reshaped and value.dim() == 2 and isinstance(value.shape[1], int) and value.shape[1] == n * n


def _within(pairs: list[tuple[int, int]], n: int) -> list[tuple[int, int]]:
    found = [(i % n, j % n) for i, j in pairs]
    _require(all(i != j for i, j in found), "it takes products of vectors with themselves")
    _require(len(found) > 0, "it takes no pairs")
    return found


def _constant(node: Any) -> torch.Tensor:
    """The value of an index that the graph itself makes."""
    if isinstance(node, (list, tuple)):
        return torch.tensor(node)
    _require(isinstance(node, Node), "its pairs are not picked by tensors")
    changeable = "its indices are an input or a buffer, which may change; make them in forward, from numbers"
    _require(node.op not in ("placeholder", "get_attr"), changeable)
    if node.op == "call_function" and node.target in _MAKE_CONSTANTS and not node.all_input_nodes:
        kwargs = {name: value for name, value in node.kwargs.items() if name in ("offset", "dtype")}
        return node.target(*node.args, **kwargs)
    if node.target is operator.getitem:
        return _constant(node.args[0])[node.args[1]]
    if node.target in ("to", "long", "cuda", "contiguous"):
        return _constant(node.args[0])
    if node.target in (operator.add, operator.mul, torch.add, torch.mul) and not node.kwargs:
        left, right = (_constant(arg) if isinstance(arg, Node) else arg for arg in node.args)
        return node.target(left, right)
    raise _NotServed(changeable)


def _rewrite(gm: GraphModule, product: Node, vectors: _Vectors, picked: Node, pairs: list[tuple[int, int]]) -> Fused:
    """Put the op where the products were."""
    dtype, dim = value_of(product).dtype, vectors.dim
    _require(dtype in FLOATS, f"its products are {dtype}")
    example = value_of(product).new_empty(0)
    _require(is_fused(example, example), f"no kernel of ours serves {dtype} on {example.device}")
    write = Writer(gm, product)
    sparse = [_cast(_matrix(part, write), dtype, write) for part in vectors.sparse]
    joined = sparse[0] if len(sparse) == 1 else write.call(torch.cat, sparse, 1)
    dense = _cast(_matrix(vectors.dense, write), dtype, write)
    out = write.call(torch.ops.tritonemb.interaction.default, dense, joined)
    places = [dim + max(i, j) * (max(i, j) - 1) // 2 + min(i, j) for i, j in pairs]
    last = dim + value_of(joined).shape[1] // dim * (value_of(joined).shape[1] // dim + 1) // 2
    whole = places == list(range(dim, last))
    result = _cat_with_dense(picked, vectors, dtype, gm)
    if result is None:
        columns = write.item(out, (slice(None), slice(dim, None))) if whole else _picked(out, places, write)
        if whole and not only_read(picked):
            columns = write.method("clone", columns)
        picked.replace_all_uses_with(columns)
    else:
        result.replace_all_uses_with(out if whole else _picked(out, [*range(dim), *places], write))
    _erase_unused([result or picked], gm)
    return Fused(f"the interaction of {len(pairs)} pairs of vectors became one kernel", (product.name,))


def _erase_unused(nodes: list[Node], gm: GraphModule) -> None:
    """Erase what nobody needs any more of `nodes` and what they were computed from."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        pure = node.op in ("call_function", "call_method") and not has_side_effect(node, gm) and not is_random(node)
        if pure and not node.users and not node._erased:
            waiting.extend(node.all_input_nodes)
            gm.graph.erase_node(node)


def _picked(out: Node, places: list[int], write: Writer) -> Node:
    index = write.constant(torch.tensor(places, device=value_of(out).device), "pairs")
    return write.call(torch.index_select, out, 1, index)


def _matrix(part: Node, write: Writer) -> Node:
    """`[B, F * d]`"""
    return part if value_of(part).dim() == 2 else write.call(torch.flatten, part, 1)


def _cast(node: Node, dtype: torch.dtype, write: Writer) -> Node:
    return node if value_of(node).dtype == dtype else write.method("to", node, dtype)


def _cat_with_dense(picked: Node, vectors: _Vectors, dtype: torch.dtype, gm: GraphModule) -> Node | None:
    """`cat([x, P], 1)`, where it is the only use of P, and nothing is rounded that was not."""
    users = list(picked.users)
    if len(users) != 1 or not _is_join(users[0], 2) or value_of(vectors.dense).dtype != dtype:
        return None
    if not _is_undisturbed(picked, users[0], gm):
        return None
    parts = _parts(users[0])
    return users[0] if len(parts) == 2 and parts[0] is vectors.dense and parts[1] is picked else None
