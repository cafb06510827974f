"""The lookups of a graph, by PyTorch's functions or our modules, and which of them become one.

Merged are independent lookups of a region, with one batch size and kind of result; others are left alone for a reason.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import embedding, embedding_bag  # bound here, as others may be put in their place
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonemb.compiler.graph import (
    NotServed,
    arguments,
    bodies,
    dependencies,
    depths,
    expression,
    is_transformed,
    live_nodes,
    name_of,
    regions,
    require,
    source_path,
    value_of,
)
from tritonemb.ops.row_groups import ID_DTYPES  # with it, torch.ops.tritonemb is registered
from tritonemb.types import TRAINABLE_DTYPES
from tritonemb.utils import join_names

NO_INT = "its padding_idx is a NumPy integer; use int(..)"
FUSED_BAGS = (torch.ops.tritonemb.bag_fused, torch.ops.tritonemb.bag_fused.default)
_BAGS = {torch.ops.tritonemb.bag, torch.ops.tritonemb.bag.default, *FUSED_BAGS}
_LOOKUPS = {embedding_bag, embedding, *_BAGS}
_NAMES = {"input": "ids", "values": "ids", "per_sample_weights": "sample_weights"}  # of the same arguments


class LeftAlone(NamedTuple):
    """An operation that stays as it was."""

    name: str  # of what it looks up, as users write it, or its own in the graph
    what: str  # the function
    reason: str  # why, in words


class FusedUpdate(NamedTuple):
    """What a lookup with a fused optimizer updates beside its table: nodes, then the optimizer's name and values.

    `name` seeds the table's stochastic rounding.
    """

    states: tuple[Node, ...]
    step: Node
    skipped: Node
    learning_rate: Node
    optimizer: str
    hyperparameters: tuple[float, ...]
    name: str


class LookupIds(NamedTuple):
    """The ids of one lookup: nodes in the graph, tensors where a batch is made of several."""

    ids: Any  # integers; `[B, L]` or `[N]` for bags, of any shape for single rows
    offsets: Any  # of a bag's 1-D ids, `[B]`, or `[B + 1]` if `has_last_offset`; else None
    has_last_offset: bool
    open_end: bool  # ids may lie behind the last offset, which belong to no bag
    sample_weights: Any  # of the ids' shape, or None
    trained: Any  # ids that the gradient goes to, `[N]`, if others; -1 for none
    single: bool  # a row for each id, instead of a sum, or a `mean`, for each bag
    mean: bool
    padding_idx: int | None  # an id that has no part in a bag; of single rows, that is not trained
    num_rows: int  # of the table

    @property
    def drops_padding(self) -> bool:
        """Whether some ids of a bag have no part in it."""
        return self.padding_idx is not None and not self.single

    @property
    def divides_later(self) -> bool:
        """Whether a mean is a sum that is divided by the number of ids that are not padding."""
        return self.mean and self.drops_padding


@dataclass(frozen=True)
class TableLookup:
    """One use of one table."""

    node: Node  # the call, or what leaves its last bag out
    table: str  # as users call it
    weight: Node  # `[rows, dim]`
    bags: LookupIds
    checked: bool  # an id out of range is an error, not a zero
    dtype: torch.dtype  # of the result
    update: FusedUpdate | None  # None for a weight with an ordinary gradient

    @property
    def feature(self) -> str:
        """What users call the module, or the weight."""
        return self.table.removesuffix(".weight")

    @property
    def dim(self) -> int:
        """Columns of the table."""
        return int(value_of(self.weight).shape[1])

    @property
    def num_bags(self) -> Any:
        """Rows of the result if it is pooled, a number or a symbolic one."""
        if self.bags.offsets is None:
            ids = value_of(self.bags.ids)
            return ids.numel() if self.bags.single else ids.shape[0]
        return value_of(self.bags.offsets).shape[0] - int(self.bags.has_last_offset)

    @property
    def op_checks(self) -> bool:
        """Whether the lookup itself checks ids; where padding is left out, that was done before."""
        return self.checked and not self.bags.drops_padding

    @property
    def op_dtype(self) -> torch.dtype:
        """Of what the op returns: a mean without its padding is summed in float32, and then divided."""
        return torch.float32 if self.bags.divides_later else self.dtype

    @property
    def can_be_pooled(self) -> bool:
        """Bags, and single rows that are also bags of one id: ids `[B]` or `[B, 1]`."""
        ids: Any = self.bags.ids
        if not self.bags.single:
            return True
        if ids.op == "call_method" and ids.target in ("reshape", "view") and ids.args[1:] in ((-1,), ((-1,),)):
            ids = ids.args[0]
        shape = value_of(ids).shape
        return len(shape) == 1 or (len(shape) == 2 and isinstance(shape[1], int) and shape[1] == 1)


def recognise(node: Node) -> TableLookup | LeftAlone | None:
    """The lookup that a node is; a reason if it is one that stays as it is; None if it is something else."""
    call, closed = _closed_bags(node)
    if call.op != "call_function" or call.target not in _LOOKUPS or any(_closed_bags(user)[1] for user in node.users):
        return None
    args = {_NAMES.get(name, name): value for name, value in arguments(call).items()}
    if closed is not None:
        args |= {"ids": closed.args[0], "offsets": closed.args[1], "trained": None, "include_last_offset": True}
    if call.target in FUSED_BAGS:  # whose lists have one table
        args |= {one: args[f"{one}s"][0] for one in ("weight", "step")} | {"skipped": args["skipped"][0]}
    weight = args.get("weight")
    table = source_path(weight) if isinstance(weight, Node) else node.name
    try:
        require(bool(args), "its arguments do not fit its signature")
        return replace(_read(call, args, table), node=node)
    except NotServed as reason:
        return LeftAlone(table.removesuffix(".weight"), name_of(call), str(reason))


def _closed_bags(node: Node) -> tuple[Any, Any]:
    """The lookup of which a node leaves the last bag out, and the call of `close_bags` that made that; or itself."""
    call: Any = node.args[0] if node.target is getitem and node.args[1:] == (slice(None, -1, None),) else None
    offsets = arguments(call).get("offsets") if isinstance(call, Node) and call.target in _BAGS else None
    closed = offsets.args[0] if isinstance(offsets, Node) and offsets.target is getitem else None
    return (call, closed) if getattr(closed, "target", None) is torch.ops.tritonemb.close_bags else (node, None)


def _read(node: Node, args: dict[str, Any], table: str) -> TableLookup:
    """Every function has some of the same arguments; those that it lacks have these defaults."""
    mode = args.get("mode", "mean" if args.get("mean") else "sum")
    single = node.target is embedding or not args.get("pooled", True)
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
        args["ids"], None if single else args.get("offsets"), ended, open_end, args.get("sample_weights"),
        args.get("trained"), single, mode == "mean", padding_idx, int(weight.shape[0]),
    )  # fmt: skip
    update = None
    if node.target in FUSED_BAGS:
        values: list[Any] = [args[name] for name in FusedUpdate._fields]
        values = [tuple(value) if isinstance(value, (list, tuple)) else value for value in values]
        update = FusedUpdate(*values)
    dtype = args.get("dtype", weight.dtype)
    lookup = TableLookup(node, table, args["weight"], bags, args.get("checked", True), dtype, update)
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
    devices = {each.device for each in (weight, ids, offsets, sample_weights, trained) if each is not None}
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
    """Lookups of a region that become one: none depends on another."""

    lookups: Sequence[TableLookup]
    pooled: bool  # rows are bags, side by side, not ids, one below the other
    region: list[Node]
    idle: bool = False  # no backward pass reaches them


def next_group(gm: GraphModule) -> LookupGroup | None:
    """The first group that is found in a graph; pooled ones first."""
    found, learning = _recognised(gm), live_nodes(gm, learning=True)
    for pooled in (True, False):
        for region in regions(gm):
            lookups = [lookup for node in region if isinstance(lookup := found.get(node), TableLookup)]
            for members in _sets(region, lookups, pooled, learning):
                if len(members) > 1:
                    return LookupGroup(tuple(members), pooled, region, members[0].node not in learning)
    return None


def left_alone(gm: GraphModule, merged: list[LookupGroup]) -> list[LeftAlone]:
    """The lookups that are still there, and why."""
    found = _recognised(gm)
    lookups = [lookup for lookup in found.values() if isinstance(lookup, TableLookup)]
    alone = []
    for node, lookup in found.items():
        if isinstance(lookup, TableLookup):
            alone.append(_named(lookup, _why_alone(lookup, lookups, merged)))
        elif lookup is not None:
            alone.append(lookup)
        for body in bodies(node, gm):
            inside = [part for part in map(recognise, body.graph.nodes) if part is not None]
            alone += [_named(part, f"it is inside {node.target}, whose graph is left alone") for part in inside]
    if is_transformed(gm):
        alone = [_named(part, "its graph uses transforms of torch.func") for part in alone]
    return alone


def _named(part: TableLookup | LeftAlone, reason: str) -> LeftAlone:
    if isinstance(part, LeftAlone):
        return part._replace(reason=reason)
    return LeftAlone(part.feature, name_of(_closed_bags(part.node)[0]), reason)


def check_fused_tables(gm: GraphModule, merged: list[LookupGroup]) -> None:
    """Raise ValueError if a table with a fused optimizer is looked up in two places that did not become one."""
    # One for each update.
    groups = [{each.weight: each.table for each in group.lookups if each.update} for group in merged if not group.idle]
    tables = [table for updated in groups for table in updated.items()]
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
    """The table of each lookup, in a graph and in those that it runs, that an update in the backward may follow."""
    learning = live_nodes(gm, learning=True)
    for node in gm.graph.nodes:
        if node.op != "call_function" or node not in learning:
            continue
        if node.target in FUSED_BAGS:
            yield from node.args[0]
        for body in bodies(node, gm):
            inner = [part for part in body.graph.nodes if part.op == "placeholder"]
            outer = [arg for arg in node.args if isinstance(arg, Node) and arg.op != "get_attr"]
            known = dict(zip(inner, outer, strict=False))
            yield from (known.get(weight, weight) for weight in _fused_weights(body))


def _recognised(gm: GraphModule) -> dict[Node, TableLookup | LeftAlone | None]:
    """What `recognise` says of each node that is used: the weight of another lookup would get zeros instead of none."""
    live = live_nodes(gm)
    return {node: recognise(node) for node in gm.graph.nodes if node in live}


def _sets(
    region: list[Node], lookups: list[TableLookup], pooled: bool, learning: set[Node]
) -> Iterator[list[TableLookup]]:
    """Lookups that go together by what they are, then by what they depend on."""
    # One update needs one lookup: a fused table that also gives sequences of rows is not pooled.
    in_rows = {lookup.weight for lookup in lookups if lookup.update and not lookup.can_be_pooled}
    by_key: dict[Hashable, list[TableLookup]] = defaultdict(list)
    for lookup in lookups:
        single = lookup.bags.single
        if (lookup.can_be_pooled and not (single and lookup.weight in in_rows)) if pooled else single:
            # Merged with others that a backward pass reaches, an unreached table would get zeros.
            idle = value_of(lookup.weight).requires_grad and lookup.node not in learning
            by_key[idle, _key(lookup, pooled)].append(lookup)
    before = dependencies(region) if len(by_key) < len(lookups) else {}
    for members in by_key.values():
        if len(members) > 1:
            depth = depths(before, {lookup.node for lookup in members})
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
        update and (update.optimizer, update.hyperparameters, update.learning_rate),
    )


def _why_alone(lookup: TableLookup, lookups: list[TableLookup], merged: list[LookupGroup]) -> str:
    pooled, others = lookup.can_be_pooled, [other for other in lookups if other.node is not lookup.node]
    near = [other for group in merged if group.pooled == pooled for other in group.lookups]
    near += [other for other in others if other.can_be_pooled == pooled]
    same = [other.feature for other in near if _key(other, pooled) == _key(lookup, pooled)]
    if same:
        return (
            f"it depends on {join_names(same, 3)}, or they on it, or between them a tensor or a state (gradients, "
            "autocast) is changed"
        )
    size = "batch size" if pooled else "dim"
    alike = f": no other lookup has its {size}, device, dtype, padding and optimizer"
    return "nothing to merge with" + (alike if others else "")
