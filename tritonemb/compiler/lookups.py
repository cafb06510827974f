"""The lookups of a graph, by PyTorch's functions or our modules, and which of them become one.

Merged are independent lookups of a region, with one batch size and one kind of result; others are left alone, with a
reason.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonemb import ops as _ops  # registers torch.ops.tritonemb
from tritonemb.compiler.graph import (
    LeftAlone,
    NotServed,
    arguments,
    bodies,
    dependencies,
    depths,
    expression,
    grad_states,
    is_tensor,
    is_transformed,
    listed,
    live_nodes,
    module_path,
    regions,
    require,
    source_path,
    value_of,
)
from tritonemb.ops.row_groups import ID_DTYPES
from tritonemb.types import TRAINABLE_DTYPES

assert _ops
DEVICES = ("cpu", "cuda")
NOTHING_TO_MERGE = "nothing to merge with"
_MODES = {0: "sum", 1: "mean", 2: "max"}  # of torch.embedding_bag
_ROWS = (F.embedding, torch.embedding)
FUSED_BAGS = (torch.ops.tritonemb.bag_fused, torch.ops.tritonemb.bag_fused.default)
_OURS = (torch.ops.tritonemb.bag, torch.ops.tritonemb.bag.default, *FUSED_BAGS)
_LOOKUPS = {F.embedding_bag, torch.embedding_bag, *_ROWS, *_OURS}
# The same argument has several names.
_NAMES = {"input": "ids", "indices": "ids", "values": "ids", "per_sample_weights": "sample_weights"}


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


@dataclass(frozen=True)
class TableLookup:
    """One use of one table."""

    node: Node  # the call
    results: tuple[Node, ...]  # the nodes that have its result: `node`, or items of a tuple
    feature: str  # these three: what users call them
    kind: str
    table: str
    weight: Node  # `[rows, dim]`
    ids: Node  # integers; `[B, L]` or `[N]` for bags, of any shape for single rows
    offsets: Node | None  # of a bag's 1-D ids, `[B]`, or `[B + 1]` if `has_last_offset`; else None
    has_last_offset: bool
    sample_weights: Node | None  # of the ids' shape, or None
    trained: Node | None  # ids that the gradient goes to, `[N]`, if others; -1 for none
    single: bool  # a row for each id, instead of a sum, or a `mean`, for each bag
    mean: bool
    padding_idx: int | None  # an id that has no part in a bag; of single rows, that is not trained
    checked: bool  # an id out of range is an error, not a zero
    dtype: torch.dtype  # of the result
    update: FusedUpdate | None  # None for a weight with an ordinary gradient

    @property
    def shape(self) -> list[int]:
        """Of the table."""
        return [int(size) for size in value_of(self.weight).shape]

    @property
    def dim(self) -> int:
        return self.shape[1]

    @property
    def num_bags(self) -> Any:
        """Rows of the result if it is pooled, a number or a symbolic one."""
        if self.offsets is None:
            ids = value_of(self.ids)
            return ids.numel() if self.single else ids.shape[0]
        return value_of(self.offsets).shape[0] - int(self.has_last_offset)

    @property
    def drops_padding(self) -> bool:
        """Whether some ids of a bag have no part in it."""
        return self.padding_idx is not None and not self.single

    @property
    def divides_later(self) -> bool:
        """Whether a mean is a sum that is divided by the number of ids that are not padding."""
        return self.mean and self.drops_padding

    @property
    def op_checks(self) -> bool:
        """Whether the lookup itself checks ids; where padding is left out, that was done before."""
        return self.checked and not self.drops_padding

    @property
    def op_dtype(self) -> torch.dtype:
        """Of what the op returns: a mean without its padding is summed in float32, and then divided."""
        return torch.float32 if self.divides_later else self.dtype

    @property
    def can_be_pooled(self) -> bool:
        """Bags, and single rows that are also bags of one id: ids `[B]` or `[B, 1]`."""
        ids: Any = self.ids
        if not self.single:
            return True
        if ids.op == "call_method" and ids.target in ("reshape", "view") and ids.args[1:] in ((-1,), ((-1,),)):
            ids = ids.args[0]
        shape = value_of(ids).shape
        return len(shape) == 1 or (len(shape) == 2 and isinstance(shape[1], int) and shape[1] == 1)


def recognise(node: Node, grad_enabled: bool) -> TableLookup | str | None:
    """The lookup that a node is; a reason if it is one that stays as it is; None if it is something else."""
    if node.op != "call_function" or node.target not in _LOOKUPS:
        return None
    try:
        lookup = _read(node, grad_enabled)
        _check(lookup)
    except NotServed as reason:
        return str(reason)
    return lookup


def names_of(node: Node) -> tuple[str, str]:
    """A lookup's module path, or a function's name in the graph behind that path; and its module or function."""
    path, module = module_path(node)
    if module is not None and issubclass(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        package = "te.nn" if module.__module__.startswith("tritonemb.") else "nn"
        return path or node.name, f"{package}.{module.__name__}"
    return f"{path}.{node.name}" if path else node.name, getattr(node.target, "__name__", str(node.target))


def _read(node: Node, grad_enabled: bool) -> TableLookup:
    """Every function has some of the same arguments; those that it lacks have these defaults."""
    args = {_NAMES.get(name, name): value for name, value in arguments(node).items()}
    require(bool(args), "its arguments do not fit its signature")
    for one, several in (("weight", "weights"), ("step", "steps"), ("skipped", "skipped")):
        if node.target in FUSED_BAGS:  # whose lists have one table
            (args[one],) = args[several]
    mode: Any = args.get("mode", "mean" if args.get("mean") else "sum")
    mode = _MODES.get(mode, mode)
    single = node.target in _ROWS or not args.get("pooled", True)
    weight, ids, offsets = args["weight"], args["ids"], None if single else args.get("offsets")
    require(mode in ("sum", "mean"), f'mode="{mode}" has no fused kernel')
    require(is_tensor(weight) and is_tensor(ids), "its weight or its ids are not a tensor of the graph")
    _check_options(args, trains=grad_enabled and value_of(weight).requires_grad)
    _check_weight(weight)
    padding_idx = args.get("padding_idx")
    if padding_idx is not None and padding_idx < 0:
        padding_idx = None if node.target is torch.embedding else padding_idx + value_of(weight).shape[0]
    update = None
    if node.target in FUSED_BAGS:
        values: list[Any] = [args[name] for name in FusedUpdate._fields]
        values = [tuple(value) if isinstance(value, (list, tuple)) else value for value in values]
        update = FusedUpdate(*values)
    results = tuple(node.users) if node.target is torch.embedding_bag else (node,)
    items = all(result is node or (result.target is operator.getitem and result.args[1] == 0) for result in results)
    require(items, "more than the pooled rows is used of what torch.embedding_bag returns")
    return TableLookup(
        node, results, *names_of(node), source_path(weight), weight, ids, offsets,
        has_last_offset=offsets is not None and bool(args.get("include_last_offset", True)),
        sample_weights=args.get("sample_weights"), trained=args.get("trained"), single=single, mean=mode == "mean",
        padding_idx=padding_idx, checked=args.get("checked", True), dtype=args.get("dtype", value_of(weight).dtype),
        update=update,
    )  # fmt: skip


def _check_options(args: dict[str, Any], trains: bool) -> None:
    require(args.get("max_norm") is None, "max_norm changes rows of the weight in the forward")
    frequency, sparse = trains and args.get("scale_grad_by_freq"), trains and args.get("sparse")
    require(not frequency, "scale_grad_by_freq=True has no fused gradient")
    require(
        not sparse,
        "sparse=True gives sparse gradients, a fused lookup gives dense ones; leave out sparse, or fuse the optimizer "
        "(te.nn.EmbeddingBag(.., optimizer=..))",
    )


def _check_weight(node: Node) -> None:
    weight = value_of(node)
    require(node.op in ("placeholder", "get_attr"), "its weight is computed in the graph, not a parameter or input")
    ordinary = weight.dim() == 2 and weight.is_contiguous() and not is_traceable_wrapper_subclass(weight)
    require(ordinary, "its weight is not an ordinary contiguous matrix")
    require(all(isinstance(size, int) for size in weight.shape), "its weight's shape differs from call to call")
    require(0 not in weight.shape, f"its weight is empty: {list(weight.shape)}")
    require(weight.dtype in TRAINABLE_DTYPES, f"there is no fast kernel for {weight.dtype} tables")
    require(weight.device.type in DEVICES, f"there are no kernels for {weight.device}")


def _check(lookup: TableLookup) -> None:
    """What the ids of every lookup must be."""
    for name, node in (("offsets", lookup.offsets), ("per_sample_weights", lookup.sample_weights)):
        require(node is None or is_tensor(node), f"its {name} are not a tensor of the graph")
    nodes = (lookup.weight, lookup.ids, lookup.offsets, lookup.sample_weights, lookup.trained)
    weight, ids, offsets, sample_weights, trained = map(value_of, nodes)
    require(ids.dtype in ID_DTYPES, f"its ids are {ids.dtype}, not int32 or int64")
    require(not is_traceable_wrapper_subclass(ids) and not ids.is_nested, "its ids are not an ordinary tensor")
    tensors = (weight, ids, offsets, sample_weights, trained)
    devices = {tensor.device for tensor in tensors if tensor is not None}
    require(len(devices) == 1, f"its weight, ids and offsets are on different devices: {sorted(map(str, devices))}")
    if sample_weights is not None:
        require(not lookup.mean, "per_sample_weights go with the sum only")
        require(sample_weights.dtype == weight.dtype, "per_sample_weights have not the weight's dtype")
        require(sample_weights.shape == ids.shape, "per_sample_weights have not the ids' shape")
    if offsets is not None:
        require(ids.dim() == 1 and offsets.dim() == 1, "its ids or offsets are not 1-D")
        require(offsets.dtype in ID_DTYPES, "its offsets are not int32 or int64")
    elif not lookup.single:
        require(ids.dim() == 2, "its ids are neither 2-D nor have offsets")
        require(not _is_zero(ids.shape[1]), "its bags have no ids")
    require(not _is_zero(lookup.num_bags), "the batch is empty")


def _is_zero(size: Any) -> bool:
    return isinstance(size, int) and size == 0


@dataclass(frozen=True)
class LookupGroup:
    """Lookups of a region that become one: none depends on another.

    `pooled`: rows are bags, side by side, not ids, one below the other; `idle`: no backward pass reaches them.
    """

    lookups: Sequence[TableLookup]
    pooled: bool
    region: list[Node]
    idle: bool = False


def next_group(gm: GraphModule, grad_enabled: bool) -> LookupGroup | None:
    """The first group that is found in a graph; pooled ones first."""
    if is_transformed(gm):
        return None
    found, learning = _recognised(gm, grad_enabled), live_nodes(gm, learning=True)
    for pooled in (True, False):
        for region in regions(gm):
            lookups = [lookup for node in region if isinstance(lookup := found.get(node), TableLookup)]
            for members in _sets(region, lookups, pooled, learning):
                if len(members) > 1:
                    return LookupGroup(tuple(members), pooled, region, members[0].node not in learning)
    return None


def left_alone(gm: GraphModule, grad_enabled: bool, merged: list[LookupGroup]) -> list[LeftAlone]:
    """The lookups that are still there, and why."""
    found, transformed = _recognised(gm, grad_enabled), is_transformed(gm)
    lookups = [lookup for lookup in found.values() if isinstance(lookup, TableLookup)]
    alone = []
    for node, lookup in found.items():
        if lookup is not None:
            reason = lookup if isinstance(lookup, str) else _why_alone(lookup, lookups, merged)
            reason = "its graph uses transforms of torch.func" if transformed else reason
            alone.append(LeftAlone(*names_of(node), reason))
        for body in bodies(node, gm) if isinstance(node.target, torch._ops.HigherOrderOperator) else []:
            inside = [part for part in body.graph.nodes if recognise(part, True) is not None]
            reason = f"it is inside {node.target}, whose graph is left alone"
            alone += [LeftAlone(*names_of(part), reason) for part in inside]
    return alone


def check_fused_tables(gm: GraphModule, merged: list[LookupGroup]) -> None:
    """Raise ValueError if a table with a fused optimizer is looked up in two places that did not become one."""
    tables: list[tuple[Node, str]] = []  # one for each update
    for group in merged:
        updated = {} if group.idle else {lookup.weight: lookup.table for lookup in group.lookups if lookup.update}
        tables += updated.items()
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
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            for body in bodies(node, gm):
                inner = [part for part in body.graph.nodes if part.op == "placeholder"]
                outer = [arg for arg in node.args if isinstance(arg, Node) and arg.op != "get_attr"]
                known = dict(zip(inner, outer, strict=False))
                yield from (known.get(weight, weight) for weight in _fused_weights(body))


def _recognised(gm: GraphModule, grad_enabled: bool) -> dict[Node, TableLookup | str | None]:
    """What `recognise` says of each node that is used: the weight of another lookup would get zeros instead of none."""
    recording, live = grad_states(gm, grad_enabled), live_nodes(gm)
    return {node: recognise(node, recording[node]) for node in gm.graph.nodes if node in live}


def _sets(
    region: list[Node], lookups: list[TableLookup], pooled: bool, learning: set[Node]
) -> Iterator[list[TableLookup]]:
    """Lookups that go together by what they are, then by what they depend on."""
    # One update needs one lookup: a fused table that also gives sequences of rows is not pooled.
    in_rows = {lookup.weight for lookup in lookups if lookup.update and not lookup.can_be_pooled}
    by_key: dict[Hashable, list[TableLookup]] = defaultdict(list)
    for lookup in lookups:
        if (lookup.can_be_pooled and not (lookup.single and lookup.weight in in_rows)) if pooled else lookup.single:
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
    """What lookups that become one have in common, named as in `_difference`."""
    update = lookup.update
    return (
        None if pooled else lookup.single,
        expression(lookup.num_bags) if pooled else lookup.dim,
        value_of(lookup.weight).device,
        lookup.op_dtype,
        lookup.op_checks,
        update and (update.optimizer, update.hyperparameters, update.learning_rate),
    )


def _why_alone(lookup: TableLookup, lookups: list[TableLookup], merged: list[LookupGroup]) -> str:
    """Why a lookup that could be merged is not."""
    pooled = lookup.can_be_pooled
    mine = _key(lookup, pooled)
    others = [other for other in lookups if other.node is not lookup.node]
    groups: list[Sequence[TableLookup]] = [group.lookups for group in merged if group.pooled == pooled]
    groups += [[other] for other in others if other.can_be_pooled == pooled]
    for same in groups:
        if mine == _key(same[0], pooled):
            return (
                f"it depends on {listed([one.feature for one in same], 3)}, or they on it, or between them a "
                "tensor or a state (gradients, autocast) is changed"
            )
    if not others:
        return NOTHING_TO_MERGE
    differences = dict.fromkeys(_difference(lookup, other) for other in others)
    return f"{NOTHING_TO_MERGE}: the other lookups differ in {listed(differences, 3)}"


def _difference(lookup: TableLookup, other: TableLookup) -> str:
    """The first difference that keeps two lookups from being merged."""
    pooled = lookup.can_be_pooled
    if pooled != other.can_be_pooled:
        return "bags or rows"
    names = ("bags or rows", "batch size" if pooled else "dim", "device", "dtype", "padding", "optimizer")
    keys = zip(names, _key(lookup, pooled), _key(other, pooled), strict=True)
    return next((name for name, mine, theirs in keys if mine != theirs), "place")
