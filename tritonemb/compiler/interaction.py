"""DLRM's interaction in a graph: products of all pairs of a sample's vectors, written as one `bmm` and an indexing.

    T = cat([x, sparse..], 1).view(B, n, d)        x [B, d], and F = n - 1 vectors of each sample
    Z = bmm(T, T.transpose(1, 2))                  [B, n, n]
    P = Z[:, li, lj]                               pairs, li and lj from literals in the graph; or of Z.view(B, n * n)
    R = cat([x, P], 1)                             optional

becomes `torch.ops.tritonemb.interaction(x, sparse)`, its columns permuted where the pairs come in another order.
Without it, on a CPU a training step of a DLRM with 26 tables of dim 64 takes 1.3 to 1.8 times as long, inference 1.3.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from tritonemb.compiler.graph import (
    CONCATENATIONS,
    NotServed,
    Writer,
    erase_unused,
    expression,
    has_side_effect,
    is_joined,
    is_random,
    joined_dim,
    joined_parts,
    only_read,
    require,
    value_of,
)
from tritonemb.compiler.lookups import LeftAlone
from tritonemb.ops.interaction import FLOATS, is_fused

_PRODUCTS = (torch.bmm, torch.matmul, operator.matmul, "bmm", "matmul", "__matmul__")
_RESHAPES = (torch.reshape, "reshape", "view")
_FLATTENS = (*_RESHAPES, torch.flatten, "flatten")
_TRANSPOSES = (
    getattr, torch.ops.aten.mT, torch.transpose, torch.swapaxes, torch.permute, "transpose", "swapaxes", "permute"
)  # fmt: skip


def fuse_interactions(gm: GraphModule) -> tuple[dict[str, str], list[LeftAlone]]:
    """Replace every interaction that a kernel of ours serves, and say what by; say why others are not."""
    fused, alone = {}, []
    for node in list(gm.graph.nodes):
        both = _transposed_product(node)
        try:
            if both is not None:
                fused[node.name] = _fuse(gm, node, both)
        except NotServed as reason:
            alone.append(LeftAlone(node.name, "interaction", str(reason)))
    if fused:
        erase_unused(gm)
    return fused, alone


def _transposed_product(node: Node) -> Node | None:
    """T of `T @ T.transpose(1, 2)`, `[B, n, d]`."""
    if node.target not in _PRODUCTS or len(node.args) != 2:
        return None
    left, right = node.args
    if not isinstance(left, Node) or not isinstance(right, Node) or right.target not in _TRANSPOSES:
        return None
    both = value_of(left)
    if right.args[:1] != (left,) or both is None or both.dim() != 3 or both.layout != torch.strided:
        return None
    strides, wanted = ([*map(expression, tensor.stride())] for tensor in (value_of(right), both.mT))
    return left if strides == wanted else None


def _fuse(gm: GraphModule, product: Node, both: Node) -> str:
    parts, dim = _vectors(both), value_of(both).shape[2]
    picked, pairs = _pairs(product)
    begin: Any = both.args[0] if both.target in _RESHAPES else both
    require(_is_undisturbed(begin, picked, gm), "a tensor or a state (gradients, autocast) is changed on the way to it")
    dtype = value_of(product).dtype
    require(dtype in FLOATS, f"its products are {dtype}")
    example = value_of(product).new_empty(0)
    require(is_fused(example, example), f"no kernel of ours serves {dtype} on {example.device}")
    write = Writer(gm, product)
    dense, *sparse = (_matrix(part, dtype, write) for part in parts)
    joined = sparse[0] if len(sparse) == 1 else write(torch.cat, sparse, 1)
    out = write(torch.ops.tritonemb.interaction.default, dense, joined)
    # `cat([x, P], 1)` is the op's own result, where nothing is rounded that was not.
    whole = _is_joined_with(parts[0], picked, dtype, gm)
    begin = 0 if whole else dim
    wanted = [*range(begin, dim), *(dim + i * (i - 1) // 2 + j for i, j in pairs)]
    if wanted != list(range(begin, value_of(out).shape[1])):
        out = write(torch.index_select, out, 1, write.constant(torch.tensor(wanted, device=example.device), "pairs"))
    elif not whole:
        out = write.item(out, (slice(None), slice(begin, None)))
        out = out if only_read(picked) else write(torch.clone, out)
    (next(iter(picked.users)) if whole else picked).replace_all_uses_with(out)
    return f"the interaction of {len(pairs)} pairs of vectors became one kernel"


def _vectors(both: Node) -> list[Node]:
    """A sample's vectors: `[B, d]`, then parts whose columns side by side are `[B, F * d]`."""
    batch, _, dim = value_of(both).shape
    require(isinstance(dim, int), "the vectors' dim differs from call to call")
    reshaped = both.target in _RESHAPES
    joined: Any = both.args[0] if reshaped else both
    found = is_joined(joined) or (not reshaped and joined.target is torch.stack and joined_dim(joined) == 1)
    if reshaped and found:
        found = value_of(joined).dim() == 2 and expression(value_of(joined).shape[0]) == expression(batch)
    require(found, "its vectors are not put together by torch.cat or torch.stack")
    parts: list[Any] = [part for part in joined_parts(joined) if isinstance(part, Node)]
    if joined.target in CONCATENATIONS and not reshaped:  # `x` instead of `x.unsqueeze(1)`
        unsqueezed = ("unsqueeze", torch.unsqueeze)
        parts = [part.args[0] if part.target in unsqueezed and part.args[1] in (1, -2) else part for part in parts]
    require(len(parts) > 1, "it has one vector only")
    widths = [math.prod(value_of(part).shape[1:]) for part in parts]
    require(widths[0] == dim, "the first of its parts is not the one dense vector")
    require(
        all(isinstance(width, int) and width % dim == 0 for width in widths),
        "its vectors have several dims, or a dim that differs from call to call",
    )
    return parts


def _pairs(product: Node) -> tuple[Node, list[tuple[int, int]]]:
    """The node that picks products, which is their only use, and the pairs, the larger index first."""
    n = value_of(product).shape[1]
    require(isinstance(n, int), "the number of vectors differs from call to call")
    pick = _only_user(product)
    flat = pick.target in _FLATTENS and [*map(expression, value_of(pick).shape[1:])] == [n * n]
    pick = _only_user(pick) if flat else pick
    index: Any = pick.args[1] if pick.target is operator.getitem else None
    by_lists = isinstance(index, tuple) and len(index) == (2 if flat else 3) and index[0] == slice(None)
    require(by_lists, "its pairs are not picked by indices")
    places = [_constant(part) for part in index[1:]]
    left, right = (places[0] // n, places[0] % n) if flat else places
    require(left.dim() == 1 and left.shape == right.shape, "its pairs are not picked by lists of one length")
    pairs = [(max(pair), min(pair)) for pair in zip((left % n).tolist(), (right % n).tolist(), strict=True)]
    require(all(i != j for i, j in pairs), "it takes products of vectors with themselves")
    require(len(pairs) > 0, "it takes no pairs")
    return pick, pairs


def _only_user(node: Node) -> Node:
    require(len(node.users) == 1, "not only its pairs are used, but the whole matrix of products")
    return next(iter(node.users))


def _constant(node: Any) -> Tensor:
    if isinstance(node, (list, tuple)):
        return torch.tensor(node)
    require(isinstance(node, Node), "its pairs are not picked by tensors")
    changeable = "its indices are an input or a buffer, which may change; make them in forward, from numbers"
    require(node.op in ("call_function", "call_method") and not is_random(node), changeable)
    args, kwargs = map_arg(node.args, _constant), map_arg(node.kwargs, _constant)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def _is_undisturbed(first: Node, last: Node, gm: GraphModule) -> bool:
    while (first := first.next) is not last and not has_side_effect(first, gm):
        pass
    return first is last


def _is_joined_with(dense: Node, picked: Node, dtype: torch.dtype, gm: GraphModule) -> bool:
    """Whether the only use of P is `cat([x, P], 1)`, of one dtype."""
    node = next(iter(picked.users), None)
    if node is None or len(picked.users) > 1 or not is_joined(node) or joined_parts(node) != [dense, picked]:
        return False
    return value_of(dense).dtype == dtype and _is_undisturbed(picked, node, gm)


def _matrix(part: Node, dtype: torch.dtype, write: Writer) -> Node:
    tensor = part if value_of(part).dim() == 2 else write(torch.flatten, part, 1)
    return tensor if value_of(part).dtype == dtype else write(torch.ops.aten.to.dtype, tensor, dtype)
