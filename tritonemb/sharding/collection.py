"""What sharded collections share: this rank's shards, their optimizer, and the whole-table names of their state."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tritonemb.comm.gradient_exchange import ColumnBlock, SumsExchange
from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import IdExchange, IdRoute, Received
from tritonemb.comm.output_exchange import ExchangePrecision, OutputExchange
from tritonemb.errors import find_invalid_id
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.nn.collections import TableCollection
from tritonemb.optimizers import Optimizer
from tritonemb.sharding.placement import (
    PlacedShard,
    Placement,
    ShardGroups,
    change_tensors,
    copy_shard,
    init_shard,
    seed_of_shards,
)
from tritonemb.sharding.plan import Shard, ShardingPlan
from tritonemb.sharding.replicated_update import ReplicatedUpdate, ShardUpdate, WholeRowUpdate, needs_whole_rows
from tritonemb.sharding.sharded_tensor import LocalShard, TableShards
from tritonemb.tables.cached_server_table import RowStore, ShardedServerTables
from tritonemb.tables.cached_table import CachedTable, is_metadata_only, only_parameters
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.lookup import PrefetchedFeatures
from tritonemb.tables.optimizer import FusedOptimizer
from tritonemb.tables.server_table import ServerTable, TableService
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import Groups, TableSet, kind_of, require_gradients

PIECE_BYTES = 1 << 26  # of a table that are averaged over replicas at once
# A batch, the distinct rows for each table set of replicated tables, and for each ID exchange what it has received and
# the distinct rows for each table set that looks it up; None where ids of dynamic tables become rows in the forward.
Exchanged = tuple[KeyedJaggedTensor, list[Groups], list[tuple[Received, list[Groups | None]]]]
# An ID exchange, and the table sets of this rank's shards that look up what it receives.
ShardedLookup = tuple[IdExchange, list[TableSet]]


class ShardedCollection(nn.Module, ShardedServerTables):  # `apply` is of modules
    """A collection whose tables are sharded over ranks; see `ShardedEmbeddingBagCollection`.

    The shards are no parameters of this module, as nobody else may update or average them: `table_weights` has them.
    """

    pooled: bool
    optimizer: Optimizer

    def __init__(
        self, collection: TableCollection, plan: ShardingPlan, groups: ShardGroups, precision: ExchangePrecision,
        device: torch.device, sync_replicas: bool = True,
    ) -> None:  # fmt: skip
        assert collection.optimizer is not None
        nn.Module.__init__(self)
        ShardedServerTables.__init__(self, collection.optimizer)
        self.configs, self.feature_names = tuple(map(plan.apply, collection.configs)), collection.feature_names
        self.bounds_check = collection.table_set.bounds_check
        self.output_dtype = collection.table_set.dtype_of([table.weight for table in collection.tables])
        self.plan, self.groups, self.precision, self.device = plan, groups, precision, device
        self.placement = Placement(self.configs, plan, self.pooled, needs_whole_rows(collection.optimizer))
        self._nothing = torch.empty(0, device=device)
        self._no_columns = torch.empty(1, 0, device=device)  # requires a gradient as the tables do
        # The ranks that train a shard together, by whether its table is replicated; and, where such tables are cached,
        # the same ranks for prefetches: all ranks make these groups.
        self._sharers = {True: groups.world, False: groups.replicas if sync_replicas else RankGroup()}
        cached = [each for each in self.placement.shards if self.configs[each.table].placement != "device"]
        schemes = {each.scheme == "replicated" for each in cached}
        self._for_prefetch = {
            key: groups.for_prefetch(key) for key, group in self._sharers.items() if key in schemes and group.size > 1
        }
        self.locals: list[TableSet] = []
        self._local_shards: list[list[PlacedShard]] = []  # of each table set, in the order of its tables
        self._blocks: dict[tuple[int, Shard], ColumnBlock] = {}  # what cut shards are to each other
        self._whole_rows = self._make_whole_row_updates()
        self._exchanges: list[OutputExchange] = []
        self._replicas: list[SumsExchange] = []
        self._lookups = self._make_lookups()
        replicated = self.placement.on(groups.shards.rank, "replicated")
        self._replicated = self._make_tables(replicated, self.bounds_check)
        self.server_seeds = [table.seed for table in collection.tables if isinstance(table, ServerTable)]
        self._checked: list[tuple[str, str, int]] = []  # features whose ids no exchange checks
        if self._lookups and groups.shards.size > 1 and self.bounds_check == "raise":
            configs = [self.configs[each.table] for each in replicated]
            self._checked = [(key, c.name, c.num_embeddings) for c in configs for key in c.feature_names]
        self._init_shards(collection)
        self.requires_grad_(require_gradients(collection.configs, [table.weight for table in collection.tables]))
        # A compiled model's graph ends before it and begins behind it: the host reads sizes of messages.
        self._exchange_ids = torch.compiler.disable(self._exchange_ids)  # type: ignore[method-assign]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train all tables, or freeze them; on every rank alike, as the backward of trained ones is a collective."""
        for _, table, _ in self._local_tables():
            table.requires_grad_(requires_grad)
        self._no_columns.requires_grad_(requires_grad)
        return self

    def _make_lookups(self) -> list[ShardedLookup]:
        raise NotImplementedError

    def server_rows(self) -> list[dict[int, tuple[int, int]]]:
        for placed in self.placement.shards:
            config = self.configs[placed.table]
            if placed.shard.num_columns < config.embedding_dim:
                raise ValueError(
                    f"table {config.name!r} is on embedding servers, which have whole rows; shard it by rows, or not "
                    "at all"
                )
        return [
            {placed.table: (placed.shard.first_row, placed.shard.num_rows) for placed in shards}
            for shards in self._local_shards
        ]

    def attach(self, service: TableService, stores: Sequence[RowStore]) -> None:
        self.service = service
        for tables, store in zip(self.locals, stores, strict=True):
            tables.attach(store)

    @functools.cached_property
    def fused_optimizer(self) -> FusedOptimizer:
        """The fused optimizer of this rank's shards as a `torch.optim.Optimizer`."""
        return self.view(self.optimizer_states)

    def rates(self) -> list[Tensor]:
        return [tables.counters["learning_rate"] for tables in self.locals]

    def optimizer_states(self) -> list[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each shard's name, weight, and the step and states of its fused optimizer by name."""
        found = [states for tables in self.locals for states in tables.optimizer_states()]
        return found or [("", self._nothing, {})]  # a rank without tables has a learning rate too

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of several micro-batches and apply them once, when the block ends; on every rank."""
        for update in self._whole_rows.values():
            update.discard()
        with ExitStack() as stack:
            for tables in reversed(self.locals):  # the first is entered last, and so applied first, on every rank
                stack.enter_context(tables.accumulate())
            yield
        for update in self._whole_rows.values():
            update.flush()

    def scale_accumulated(self, factor: float) -> bool:
        """Multiply the gradients accumulated so far by `factor`; returns whether all of this rank's are finite then."""
        finite = [tables.scale_accumulated(factor) for tables in self.locals]
        return all(finite)

    def skipped_rows(self) -> dict[str, int]:
        """For `on_nonfinite="skip"`: how many row updates this rank has skipped so far, by table."""
        found = dict.fromkeys((config.name for config in self.configs), 0)
        counts = [count for tables in self.locals for count in tables.counters["skipped"].tolist()]
        for (each, _, _), count in zip(self._local_tables(), counts, strict=True):
            found[self.configs[each.table].name] += count
        return found

    def table_weights(self) -> dict[str, TableShards]:
        """The whole tables' weights by table, of which this rank has some shards."""
        state, _ = self._state()
        return {config.name: state[f"{config.name}.weight"] for config in self.configs}

    def prefetch(self, features: Features | PrefetchedFeatures, assign: bool = False) -> Exchanged:
        """Exchange the ids of all ranks' batches, and prefetch the rows of those received; a collective.

        May be called before `forward`, from another thread, if every rank does so in the same order. `assign`: whether
        ids of dynamic tables become rows, too.
        """
        return features.of(self) if isinstance(features, PrefetchedFeatures) else self._exchange_ids(features, assign)

    def _exchange_ids(self, features: Features, assign: bool) -> Exchanged:
        batch = self.own_batch(features)
        sent, problem = self._batch_to_send(batch), find_invalid_id(batch, self._checked)
        received = [exchange(sent, problem) for exchange, _ in self._lookups]
        if self.device.type != "cpu":
            batch, received = tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), (batch, received))
        found = list[tuple[Received, list[Groups | None]]]()
        for (_, sets), of_ids in zip(self._lookups, received, strict=True):
            ids, _, routes = of_ids
            counts = None if routes is None else routes.occurrences
            groups = [None if tables.dynamic and not assign else tables.group(ids, counts) for tables in sets]
            found.append((of_ids, groups))
        return batch, [tables.group(batch) for tables in self._replicated], found

    def _id_exchange(self, routes: Sequence[IdRoute], **options: Any) -> IdExchange:
        network, of_sizes = self.groups.ids_network, self.groups.ids
        device = None if network is of_sizes else self.device
        return IdExchange(of_sizes, routes, self.bounds_check == "raise", network=network, device=device, **options)

    def saturated(self) -> int:
        """Elements that were too large for the exchanges' codecs so far. Waits for the device."""
        exchanges: list[OutputExchange | SumsExchange] = [*self._exchanges, *self._replicas]
        return sum(codec.saturated() for exchange in exchanges for codec in exchange.codecs)

    def _batch_to_send(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return batch

    def own_batch(self, features: Features) -> KeyedJaggedTensor:
        """The batch as a `KeyedJaggedTensor` of ours, on the CPU, where ids are exchanged."""
        keys, values, offsets, weights = unpack_features(features)
        if missing := [feature for feature in self.feature_names if feature not in keys]:
            raise ValueError(f"the batch lacks the features {missing}; it has the keys {keys}")
        if weights is not None and weights.requires_grad:
            raise ValueError("per-sample weights of a sharded collection get no gradient; detach them")
        batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
        return batch.to("cpu") if self.groups.shards.size > 1 else batch

    def _make_tables(self, shards: Sequence[PlacedShard], bounds_check: Any = "ignore") -> list[TableSet]:
        """Table sets of these shards: first of those that this rank updates alone, then of those that need others."""
        parts = [part for cut in (False, True) if (part := [each for each in shards if each.cut == cut])]
        made = [
            TableSet(
                self.placement.parts(part), self.optimizer, self.device, bounds_check, torch.float32,
                pooled=self.pooled, update=self._update_of(part),
            )
            for part in parts
        ]  # fmt: skip
        self._local_shards += parts
        self.locals += made
        return made

    def _update_of(self, part: Sequence[PlacedShard]) -> ShardUpdate:
        """How shards are updated that have one scheme, and all need other ranks' columns or none does."""
        scheme, cut = part[0].scheme, part[0].cut
        group = self._sharers[scheme == "replicated"]
        if group.size == 1 and not cut:
            return ShardUpdate()
        blocks = tuple(self._blocks[each.table, each.shard] for each in part if cut)
        whole_rows = self._whole_rows[scheme] if cut else None
        shapes = [(each.shard.num_rows, each.shard.num_columns) for each in part]
        self._replicas.append(SumsExchange(group, self.precision, shapes))
        return ReplicatedUpdate(self._replicas[-1], self._for_prefetch.get(scheme == "replicated"), whole_rows, blocks)

    def _make_whole_row_updates(self) -> dict[str, WholeRowUpdate]:
        """By scheme; made by all ranks, whether they have blocks of columns or not."""
        made = {}
        for scheme in ("direct", "hierarchical"):
            cut = [(each.table, each.shard) for each in self.placement.shards if each.cut and each.scheme == scheme]
            if cut:
                ranks = sorted({shard.rank for _, shard in cut})
                rows = sorted({(table, shard.first_row) for table, shard in cut})  # each run of a table's is numbered
                for table, shard in cut:
                    run, rank = rows.index((table, shard.first_row)), ranks.index(shard.rank)
                    self._blocks[table, shard] = ColumnBlock(run, rank, shard.first_column, shard.num_columns)
                blocks = tuple(self._blocks[each] for each in cut)
                made[scheme] = WholeRowUpdate(self.groups.among(ranks), blocks, self.optimizer)
        return made

    def _local_tables(self) -> Iterator[tuple[PlacedShard, Table, RankGroup]]:
        for tables, shards in zip(self.locals, self._local_shards, strict=True):
            for each, table in zip(shards, tables.tables, strict=True):
                yield each, table, self.groups.world if each.scheme == "replicated" else self.groups.replicas

    @torch.no_grad()
    def _init_shards(self, collection: TableCollection) -> None:
        """Copy weights and states of a collection, or draw initial values if it is on the meta device."""
        drawn = collection.tables[0].weight.device.type == "meta"
        self.set_learning_rate(collection.current_learning_rate)
        for tables in self.locals if not drawn else ():
            tables.counters["step"].copy_(collection.step)
        seeds = torch.tensor([seed_of_shards(config) for config in self.configs], device=self.device)
        if not drawn:
            own = collection.tables
            seeds = seeds.new_tensor([table.seed if isinstance(table, DynamicTable) else 0 for table in own])
        if any(config.is_dynamic for config in self.configs):
            self.groups.world.broadcast(seeds, 0, "initial values")
        for each, table, same in self._local_tables():
            config = self.configs[each.table]
            if isinstance(table, ServerTable):
                continue  # servers have the values
            if isinstance(table, DynamicTable):
                whole = collection.tables[each.table]
                assert isinstance(whole, DynamicTable)
                table.reset_parameters(int(seeds[each.table]))
                if not drawn:
                    table.adopt(whole.saved() | {"seed": seeds[each.table]})
            elif not drawn:
                copy_shard(table, collection.tables[each.table].tensors(), each.shard)
            elif isinstance(table, CachedTable) and config.init is None:
                seed = torch.tensor(seed_of_shards(config), device=table.weight.device)
                same.broadcast(seed, 0, "initial values")
                table.reset_parameters(int(seed))
                continue
            else:
                init_shard(table, config, each.shard)
            if same.size > 1:
                change_tensors(table, self.device, functools.partial(same.broadcast, kind="initial values"))

    def _state(self, prefix: str = "") -> tuple[dict[str, TableShards], list[tuple[CachedTable, dict[str, Tensor]]]]:
        """What `state_dict` returns, and cached tables with the copies of their rows in it."""
        shards: defaultdict[str, defaultdict[str, list[LocalShard]]] = defaultdict(lambda: defaultdict(list))
        copies = []
        first_copy = self.groups.replicas.rank == 0
        for each, table, _ in self._local_tables():
            if isinstance(table, DynamicTable | ServerTable):
                continue
            shard, of_table, tensors = each.shard, shards[self.configs[each.table].name], table.tensors()
            if isinstance(table, CachedTable):
                copies.append((table, tensors))
            mine = first_copy and (each.scheme != "replicated" or self.groups.world.rank == 0)
            of_table["weight"].append(LocalShard(tensors["weight"], shard.first_row, shard.first_column, mine))
            for state in self.optimizer.states:
                # Ranks with other columns of the same rows have the same values of a row.
                one = mine and (state.per_element or shard.first_column == 0)
                column = shard.first_column if state.per_element else 0
                of_table[state.name].append(LocalShard(tensors[state.name], shard.first_row, column, one))
        # The number of steps is saved by the first rank with tables.
        mine = first_copy and self.groups.shards.rank == min(each.shard.rank for each in self.placement.shards)
        steps = [LocalShard(tables.counters["step"], mine=mine and not n) for n, tables in enumerate(self.locals)]
        found = {f"{prefix}step": TableShards((), torch.int64, steps)}
        if self.configs[0].placement == "server":
            for config in self.configs if not is_metadata_only() else ():
                assert self.service is not None
                of_servers: Any = self.service.tensors(config.name)
                found |= {f"{prefix}{config.name}.{name}": value for name, value in of_servers.items()}
            return found, copies
        found |= {f"{prefix}{name}": value for name, value in self._dynamic_state().items()}
        for config in (config for config in self.configs if not config.is_dynamic):
            size, own = (config.num_embeddings, config.embedding_dim), shards[config.name]
            found[f"{prefix}{config.name}.weight"] = TableShards(size, config.dtype, own["weight"])
            for state in self.optimizer.states:
                of_state = size if state.per_element else size[:1]
                found[f"{prefix}{config.name}.{state.name}"] = TableShards(of_state, torch.float32, own[state.name])
        return found, copies

    def _dynamic_state(self) -> dict[str, Any]:
        """That of dynamic tables, whose rows stand rank by rank, by id in each; a collective, if there are some."""
        found: dict[str, Any] = {}
        if only_parameters() or not any(config.is_dynamic for config in self.configs):
            return found
        held: dict[int, tuple[Shard | None, DynamicTable]] = {
            each.table: (each.shard, table) for each, table in self.dynamic_tables()
        }
        numbers = [held[number][1].num_rows if number in held else 0 for number in range(len(self.configs))]
        # Not by the group of ID exchanges, on which another thread may be prefetching.
        by_rank = self.groups.shards.all_gather(torch.tensor(numbers, device=self.device), "rows")
        for number, config in enumerate(self.configs):
            if not config.is_dynamic:
                continue
            ranks = [each.shard.rank for each in self.placement.shards if each.table == number]  # by partition
            before = ranks[: ranks.index(self.groups.shards.rank)] if number in held else []
            first_row, total = (sum(int(by_rank[rank][number]) for rank in some) for some in (before, ranks))
            if number in held:
                shard, table = held[number]
            else:
                shard, table = None, cast(DynamicTable, kind_of(config)(config, self.optimizer.states, "meta"))
            for name, value in table.saved().items():
                size, first, mine = list(value.shape), (first_row, 0), shard is not None
                if name in ("clock", "seed"):
                    mine = mine and not before
                elif name in ("sketch", "added"):
                    assert table.sketch is not None
                    size, first = table.sketch.place(name)
                elif name.startswith("rows."):  # all memory of a table on disk
                    partitions, (whole, _) = table.index.num_sets.numel(), table.index.shard.tolist()
                    size[0], first = size[0] // partitions * whole, (table.row_config.row_origin, 0)
                else:
                    size[0] = total
                parts = [LocalShard(value, *first, mine)] if shard is not None else []
                whole = TableShards(size, value.dtype, parts) if 0 not in size else value.new_empty(size)
                found[f"{config.name}.{name}"] = whole
        return found

    def _adopt_dynamic(self, state_dict: Any, prefix: str) -> list[str]:
        """Give dynamic tables what a `state_dict` has of them; what does not fit. A collective, as `_dynamic_state`."""
        problems, held = [], {each.table: table for each, table in self.dynamic_tables()}
        for number, config in enumerate(self.configs):
            of_table, table = f"{prefix}{config.name}.", held.get(number)
            if not config.is_dynamic or (ids := state_dict.get(f"{of_table}ids")) is None:
                continue
            mine = 0 if table is None else int(table.owns(_own_part(ids)).sum())
            if self.groups.shards.all_gather(torch.tensor([mine], device=self.device), "rows").sum() != ids.shape[0]:
                problems.append(f"{of_table}ids: these shards are of another plan; load a checkpoint, or whole tensors")
                continue
            given = {} if table is None else {name: state_dict.get(of_table + name) for name in table.templates(0)}
            if table is not None and not any(value is None for value in given.values()):
                try:
                    table.adopt({name: _own_part(value) for name, value in given.items()})
                except ValueError as error:
                    problems.append(str(error))
        return problems

    def _load_servers(self, service: TableService, tensors: Mapping[str, Tensor], prefix: str) -> list[str]:
        """Let servers load whole tables, as rank 0 has them; what does not fit. A collective."""
        problems: list[str] = []
        for config in self.configs if self.groups.world.rank == 0 else ():
            of_table = f"{prefix}{config.name}."
            try:
                fields = {key.removeprefix(of_table): each for key, each in tensors.items() if key.startswith(of_table)}
                service.load(config.name, fields)
            except ValueError as error:
                problems.append(str(error))
        problems = self.groups.world.all_gather_object(problems)[0]
        service.discard_leases()
        return problems

    def dynamic_tables(self) -> list[tuple[PlacedShard, DynamicTable]]:
        """This rank's parts of dynamic tables."""
        return [(each, table) for each, table, _ in self._local_tables() if isinstance(table, DynamicTable)]

    @torch.no_grad()
    def average_replicas(self) -> None:
        """Give the copies of the tables the mean of their weights and states; a collective of `groups.replicas`."""
        for _, table, _ in self._local_tables():
            change_tensors(table, self.device, lambda tensor: _average(self.groups.replicas, tensor))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Whole-table keys, `TableShards` as values."""
        destination.update(self._state(prefix)[0])

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Of whole tensors, this rank's shards are copied; `TableShards` are its own already, or are copied."""
        _, strict, missing_keys, unexpected_keys, error_msgs = args
        wanted, copies = self._state(prefix)
        dynamic = tuple(f"{prefix}{config.name}." for config in self.configs if config.is_dynamic)
        error_msgs += self._adopt_dynamic(state_dict, prefix) if self.service is None else []
        for key, here in wanted.items():
            if key not in state_dict:
                missing_keys.append(key)
            if key not in state_dict or key.startswith(dynamic) or not isinstance(here, TableShards):
                continue
            try:
                here.copy_from(state_dict[key])
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
        for table, tensors in copies:
            table.assign(tensors)
        if self.service is not None and not missing_keys:
            error_msgs += self._load_servers(self.service, {key: state_dict[key] for key in wanted}, prefix)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in wanted]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        for tables in self.locals:
            tables.convert(fn)
        self._nothing = fn(self._nothing)
        self._no_columns = fn(self._no_columns.detach()).requires_grad_(self._no_columns.requires_grad)
        self.device = self._nothing.device
        for view in self._views:
            view.refresh()
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{config.name}: {self.plan.tables[config.name]}" for config in self.configs)


def _own_part(given: Tensor) -> Tensor:
    """Of what a sharded dynamic table's `state_dict` had, this rank's."""
    if not isinstance(given, TableShards):
        return given
    return given.shards[0].tensor if given.shards else torch.empty(0, *given.shape[1:], dtype=given.dtype)


def _average(group: RankGroup, tensor: Tensor) -> None:
    """The mean over ranks, added in their order, by pieces of rows."""
    rows = max(1, PIECE_BYTES // max(1, tensor[:1].numel() * tensor.element_size()))
    for piece in tensor.split(rows):
        gathered = group.all_gather(piece, "replicas").float()
        piece.copy_(functools.reduce(torch.add, gathered) / group.size)
