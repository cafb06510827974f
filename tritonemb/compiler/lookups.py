"""Match the lookups of a graph, by PyTorch's functions or tritonemb's modules, and group those that can be merged.

Independent lookups of a region with the same batch size and kind of result are merged; others are left alone, with a
reason.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import embedding, embedding_bag  # bound at import, as modules may be patched
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonemb.compiler import graph
from tritonemb.compiler.graph import NotSupported, arguments, expression, live_nodes, require, source_path, value_of
from tritonemb.layout import FusedTables
from tritonemb.ops.row_groups import ID_DTYPES
from tritonemb.types import TRAINABLE_DTYPES
from tritonemb.utils import join_names

NO_INT = "its padding_idx is a NumPy integer; use int(..)"
FUSED_BAGS = (torch.ops.tritonemb.bag_fused, torch.ops.tritonemb.bag_fused.default)
_BAGS = {torch.ops.tritonemb.bag, torch.ops.tritonemb.bag.default, *FUSED_BAGS}
_LOOKUPS = {embedding_bag, embedding, *_BAGS}
_NAMES = {"input": "ids", "values": "ids", "per_sample_weights": "sample_weights"}  # synonyms of arguments


class LeftAlone(NamedTuple):
    """Operation that is not merged."""

    name: str  # path of the module or weight, or name of the node
    what: str  # name of the function
    reason: str  # reason, in words


class LookupIds(NamedTuple):
    """Ids of a lookup: nodes in the graph, or tensors when they are concatenated."""

    ids: Any  # integers; `[B, L]` or `[N]` for bags, of any shape for single rows
    offsets: Any  # of a bag's 1-D ids, `[B]`, or `[B + 1]` if `has_last_offset`; else None
    has_last_offset: bool
    open_end: bool  # ids may follow the last offset; they are in no bag
    sample_weights: Any  # of the ids' shape, or None
    trained: Any  # ids of the rows that get gradients, `[N]`, if different; -1 for none
    single: bool  # a row per id, instead of a sum or `mean` per bag
    mean: bool
    padding_idx: int | None  # id that is ignored in a bag or, for single rows, not trained
    num_rows: int  # of the table

    @property
    def drops_padding(self) -> bool:
        return self.padding_idx is not None and not self.single

    @property
    def divides_later(self) -> bool:
        """Return whether a mean is computed as a sum, and divided by the number of ids without padding later."""
        return self.mean and self.drops_padding


@dataclass(frozen=True)
class TableLookup:
    node: Node  # the call, or the slice that drops its last bag
    table: str  # path in the user's code
    weight: Node  # `[rows, dim]`
    bags: LookupIds
    checked: bool  # an id out of range raises, else it reads as zero
    dtype: torch.dtype  # of the result
    update: FusedTables | None  # nodes of a table with a fused optimizer; None for one with an ordinary gradient
    seed_name: str  # seeds the table's stochastic rounding

    @property
    def feature(self) -> str:
        """Path of the module, or of the weight."""
        return self.table.removesuffix(".weight")

    @property
    def dim(self) -> int:
        return int(value_of(self.weight).shape[1])

    @property
    def num_bags(self) -> Any:
        """Rows of a pooled result, a number or a symbolic one."""
        if self.bags.offsets is None:
            ids = value_of(self.bags.ids)
            return ids.numel() if self.bags.single else ids.shape[0]
        return value_of(self.bags.offsets).shape[0] - int(self.bags.has_last_offset)

    @property
    def op_checks(self) -> bool:
        """Return whether the lookup checks ids; without padding, they were checked when it was removed."""
        return self.checked and not self.bags.drops_padding

    @property
    def op_dtype(self) -> torch.dtype:
        """Dtype of the op's result: a mean without padding is summed in float32, then divided."""
        return torch.float32 if self.bags.divides_later else self.dtype

    @property
    def can_be_pooled(self) -> bool:
        """Return whether rows are bags, or single rows that are bags of one id: ids `[B]` or `[B, 1]`."""
        ids: Any = self.bags.ids
        if not self.bags.single:
            return True
        if ids.op == "call_method" and ids.target in ("reshape", "view") and ids.args[1:] in ((-1,), ((-1,),)):
            ids = ids.args[0]
        shape = value_of(ids).shape
        return len(shape) == 1 or (len(shape) == 2 and isinstance(shape[1], int) and shape[1] == 1)


def match_lookup(node: Node) -> TableLookup | LeftAlone | None:
    """Match a node: return its lookup, or the reason why it cannot be merged; None for other nodes."""
    call, closed = _closed_bags(node)
    if call.op != "call_function" or call.target not in _LOOKUPS or any(_closed_bags(user)[1] for user in node.users):
        return None
    args = {_NAMES.get(name, name): value for name, value in arguments(call).items()}
    if closed is not None:
        args |= {"ids": closed.args[0], "offsets": closed.args[1], "trained": None, "include_last_offset": True}
    if call.target in FUSED_BAGS:
        args["weight"] = args["weights"][0]
    weight = args.get("weight")
    table = source_path(weight) if isinstance(weight, Node) else node.name
    try:
        require(bool(args), "its arguments do not fit its signature")
        return replace(_read(call, args, table), node=node)
    except NotSupported as reason:
        return LeftAlone(table.removesuffix(".weight"), graph.name_of(call), str(reason))


def _closed_bags(node: Node) -> tuple[Any, Any]:
    """Return the lookup whose last bag a node slices off, with its call of `close_bags`; else the node, and None."""
    call: Any = node.args[0] if node.target is getitem and node.args[1:] == (slice(None, -1, None),) else None
    offsets = arguments(call).get("offsets") if isinstance(call, Node) and call.target in _BAGS else None
    closed = offsets.args[0] if isinstance(offsets, Node) and offsets.target is getitem else None
    return (call, closed) if getattr(closed, "target", None) is torch.ops.tritonemb.close_bags else (node, None)


def _read(node: Node, args: dict[str, Any], table: str) -> TableLookup:
    """Build the lookup of a call from its arguments, with defaults for those that its function does not have."""
    mode = args.get("mode", "mean" if args.get("mean") else "sum")
    is_single = node.target is embedding or not args.get("pooled", True)
    require(mode in ("sum", "mean"), f'mode="{mode}" has no fused kernel')
    weight = _tensor_of(args, "weight")
    _check_weight(args["weight"], weight)
    trains = weight.requires_grad and value_of(node).requires_grad
    require(args.get("max_norm") is None, "max_norm changes rows of the weight in the forward")
    require(not (trains and args.get("scale_grad_by_freq")), "scale_grad_by_freq=True has no fused gradient")
    require(
        not (trains and args.get("sparse")),
        "sparse=True gives sparse gradients, a fused lookup gives dense ones; leave out sparse, or fuse the optimizer "
        "(te.nn.EmbeddingBag(.., optimizer=..))",
    )
    padding_idx = args.get("padding_idx")
    require(not isinstance(padding_idx, Node), NO_INT)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    ended = bool(args.get("include_last_offset", True))
    open_end = padding_idx is None and "include_last_offset" in args and ended
    bags = LookupIds(
        args["ids"], None if is_single else args.get("offsets"), ended, open_end, args.get("sample_weights"),
        args.get("trained"), is_single, mode == "mean", padding_idx, int(weight.shape[0]),
    )  # fmt: skip
    update = FusedTables(*[args[name] for name in FusedTables._fields]) if node.target in FUSED_BAGS else None
    dtype, checked = args.get("dtype", weight.dtype), args.get("checked", True)
    lookup = TableLookup(node, table, args["weight"], bags, checked, dtype, update, args.get("name", ""))
    _check_bags(lookup, weight, args)
    return lookup


def _tensor_of(args: dict[str, Any], name: str) -> Any:
    node = args.get(name)
    require(node is None or isinstance(value_of(node), Tensor), f"its {name} is not a tensor of the graph")
    return value_of(node)


def _check_weight(node: Node, weight: Tensor) -> None:
    require(node.op in ("placeholder", "get_attr"), "its weight is computed in the graph, not a parameter or input")
    require(
        weight.dim() == 2 and weight.is_contiguous() and not is_traceable_wrapper_subclass(weight),
        "its weight is not an ordinary contiguous matrix",
    )
    require(all(isinstance(size, int) for size in weight.shape), "its weight's shape differs from call to call")
    require(0 not in weight.shape, f"its weight is empty: {list(weight.shape)}")
    require(weight.dtype in TRAINABLE_DTYPES, f"there is no fast kernel for {weight.dtype} tables")
    require(weight.device.type in ("cpu", "cuda"), f"there are no kernels for {weight.device}")


def _check_bags(lookup: TableLookup, weight: Tensor, args: dict[str, Any]) -> None:
    names = "ids", "offsets", "sample_weights", "trained"
    ids, offsets, sample_weights, trained = (_tensor_of(args, name) for name in names)
    require(ids.dtype in ID_DTYPES, f"its ids are {ids.dtype}, not int32 or int64")
    require(not is_traceable_wrapper_subclass(ids) and not ids.is_nested, "its ids are not an ordinary tensor")
    devices = {tensor.device for tensor in (weight, ids, offsets, sample_weights, trained) if tensor is not None}
    require(len(devices) == 1, f"its weight, ids and offsets are on different devices: {sorted(map(str, devices))}")
    if sample_weights is not None:
        require(not lookup.bags.mean, "per_sample_weights go with the sum only")
        require(sample_weights.dtype == weight.dtype, "per_sample_weights have not the weight's dtype")
        require(sample_weights.shape == ids.shape, "per_sample_weights have not the ids' shape")
    if lookup.bags.offsets is not None:
        require(ids.dim() == 1 and offsets.dim() == 1, "its ids or offsets are not 1-D")
        require(offsets.dtype in ID_DTYPES, "its offsets are not int32 or int64")
    elif not lookup.bags.single:
        require(ids.dim() == 2, "its ids are neither 2-D nor have offsets")
        require(expression(ids.shape[1]) != 0, "its bags have no ids")
    require(expression(lookup.num_bags) != 0, "the batch is empty")


@dataclass(frozen=True)
class LookupGroup:
    """Independent lookups of a region, to be merged."""

    lookups: Sequence[TableLookup]
    pooled: bool  # results have a row per bag and are joined by columns; else a row per id, joined by rows
    region: list[Node]
    idle: bool = False  # not reached by a backward pass


def next_group(gm: GraphModule) -> LookupGroup | None:
    """Return the first group of a graph, pooled ones first; None if there is none."""
    recognized, trainable = _match_lookups(gm), live_nodes(gm, trainable=True)
    for pooled in (True, False):
        for region in graph.regions(gm):
            lookups = [lookup for node in region if isinstance(lookup := recognized.get(node), TableLookup)]
            for members in _sets(region, lookups, pooled, trainable):
                if len(members) > 1:
                    return LookupGroup(tuple(members), pooled, region, members[0].node not in trainable)
    return None


def left_alone(gm: GraphModule, merged: list[LookupGroup]) -> list[LeftAlone]:
    """Lookups that were not merged, with reasons."""
    recognized = _match_lookups(gm)
    lookups = [lookup for lookup in recognized.values() if isinstance(lookup, TableLookup)]
    unmerged = []
    for node, lookup in recognized.items():
        if isinstance(lookup, TableLookup):
            unmerged.append(_named(lookup, _why_alone(lookup, lookups, merged)))
        elif lookup is not None:
            unmerged.append(lookup)
        for body in graph.bodies(node, gm):
            nested = [match for match in map(match_lookup, body.graph.nodes) if match is not None]
            unmerged += [_named(match, f"it is inside {node.target}, whose graph is left alone") for match in nested]
    if graph.is_transformed(gm):
        unmerged = [_named(match, "its graph uses transforms of torch.func") for match in unmerged]
    return unmerged


def _named(operation: TableLookup | LeftAlone, reason: str) -> LeftAlone:
    if isinstance(operation, LeftAlone):
        return operation._replace(reason=reason)
    return LeftAlone(operation.feature, graph.name_of(_closed_bags(operation.node)[0]), reason)


def check_fused_tables(gm: GraphModule, merged: list[LookupGroup]) -> None:
    """Raise ValueError if a table with a fused optimizer is looked up in two places that did not become one."""
    # Count the updates of each table: one per group, and one per remaining lookup.
    fused = [[lookup for lookup in group.lookups if lookup.update] for group in merged if not group.idle]
    tables = [table for lookups in fused for table in {lookup.weight: lookup.table for lookup in lookups}.items()]
    tables += [(weight, source_path(weight)) for weight in _fused_weights(gm)]
    names, uses = dict(tables), Counter(weight for weight, _ in tables)
    for weight, count in uses.items():
        if count > 1:
            raise ValueError(
                f"table {names[weight]!r} has a fused optimizer and is looked up in {count} places of one graph that "
                "cannot be merged, so that one step would become several. Look it up once, on the ids of all uses "
                "together, or leave out the module's optimizer and use one of torch.optim"
            )


def _fused_weights(gm: GraphModule) -> Iterator[Node]:
    """Weights with a fused optimizer of lookups that a backward pass reaches, in a graph and its subgraphs."""
    trainable = live_nodes(gm, trainable=True)
    for node in gm.graph.nodes:
        if node.op != "call_function" or node not in trainable:
            continue
        if node.target in FUSED_BAGS:
            yield from node.args[0]
        for body in graph.bodies(node, gm):
            inner = [placeholder for placeholder in body.graph.nodes if placeholder.op == "placeholder"]
            outer = [arg for arg in node.args if isinstance(arg, Node) and arg.op != "get_attr"]
            outer_of = dict(zip(inner, outer, strict=False))
            yield from (outer_of.get(weight, weight) for weight in _fused_weights(body))


def _match_lookups(gm: GraphModule) -> dict[Node, TableLookup | LeftAlone | None]:
    """Match each live node; a merged dead lookup would give its weight a zero gradient instead of None."""
    live = live_nodes(gm)
    return {node: match_lookup(node) for node in gm.graph.nodes if node in live}


def _sets(
    region: list[Node], lookups: list[TableLookup], pooled: bool, trainable: set[Node]
) -> Iterator[list[TableLookup]]:
    """Group lookups by their keys, then by depth, so that those of a group are independent."""
    # A fused table needs one lookup per update: if it is also looked up unpooled, all its lookups are.
    in_rows = {lookup.weight for lookup in lookups if lookup.update and not lookup.can_be_pooled}
    by_key: dict[Hashable, list[TableLookup]] = defaultdict(list)
    for lookup in lookups:
        single = lookup.bags.single
        if (lookup.can_be_pooled and not (single and lookup.weight in in_rows)) if pooled else single:
            # Merged with lookups that a backward pass reaches, an unreached table would get a zero gradient.
            idle = value_of(lookup.weight).requires_grad and lookup.node not in trainable
            by_key[idle, _key(lookup, pooled)].append(lookup)
    predecessors = graph.dependencies(region) if len(by_key) < len(lookups) else {}
    for members in by_key.values():
        if len(members) > 1:
            depth = graph.depths(predecessors, {lookup.node for lookup in members})
            by_depth: dict[int, list[TableLookup]] = defaultdict(list)
            for lookup in members:
                by_depth[depth[lookup.node]].append(lookup)
            yield from by_depth.values()


def _key(lookup: TableLookup, pooled: bool) -> tuple[Hashable, ...]:
    update = lookup.update
    return (
        expression(lookup.num_bags) if pooled else lookup.dim,
        value_of(lookup.weight).device,
        lookup.op_dtype,
        lookup.op_checks,
        update and (update.optimizer, tuple(update.hyperparameters), update.learning_rate),
    )


def _why_alone(lookup: TableLookup, lookups: list[TableLookup], merged: list[LookupGroup]) -> str:
    pooled, other_lookups = lookup.can_be_pooled, [other for other in lookups if other.node is not lookup.node]
    candidates = [other for group in merged if group.pooled == pooled for other in group.lookups]
    candidates += [other for other in other_lookups if other.can_be_pooled == pooled]
    blocked = [other.feature for other in candidates if _key(other, pooled) == _key(lookup, pooled)]
    if blocked:
        return (
            f"it depends on {join_names(blocked, 3)}, or they on it, or between them a tensor or a state (gradients, "
            "autocast) is changed"
        )
    size = "batch size" if pooled else "dim"
    no_match = f": no other lookup has its {size}, device, dtype, padding and optimizer"
    return "nothing to merge with" + (no_match if other_lookups else "")
