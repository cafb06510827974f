"""Base of sharded collections: local shards, their fused optimizer, and state dicts by table."""

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
    ShardGroups,
    ShardMap,
    change_tensors,
    copy_shard,
    init_shard,
    shard_seed,
)
from tritonemb.sharding.plan import Shard, ShardingPlan
from tritonemb.sharding.replicated_update import ReplicatedUpdate, ShardUpdate, WholeRowUpdate, needs_whole_rows
from tritonemb.sharding.sharded_tensor import LocalShard, TableShards
from tritonemb.tables.cached_table import CachedTable, metadata_kind
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.lookup_tables import Groups, require_gradients, table_type
from tritonemb.tables.optimizer import FusedOptimizer
from tritonemb.tables.server_table import RowStore, ServerTable, ShardedServerTables, TableService
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import PrefetchedFeatures, TableSet

MAX_GATHER_BYTES = 1 << 26  # bytes of a table per all-gather that averages replicas: bounds the temporary memory
# Batch; row groups of each replicated table set; and for each ID exchange the ids received, and their row groups for
# each table set that looks them up (None where ids of dynamic tables are assigned rows in the forward).
Exchanged = tuple[KeyedJaggedTensor, list[Groups], list[tuple[Received, list[Groups | None]]]]
# ID exchange, and the local table sets that look up the ids received.
ShardedLookup = tuple[IdExchange, list[TableSet]]
CacheCopies = tuple[CachedTable, dict[str, Tensor]]  # a cached table, and copies of its rows by name


class ShardedCollection(nn.Module, ShardedServerTables):  # nn.Module first: its `apply` takes precedence
    """Collection whose tables are sharded over ranks; see `ShardedEmbeddingBagCollection`.

    Shards are not parameters of this module, so that no other optimizer or DDP touches them: see `table_weights`.
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
        # Tables, as the plan places them.
        self.configs, self.feature_names = tuple(map(plan.apply, collection.configs)), collection.feature_names
        self.bounds_check = collection.table_set.bounds_check
        self.output_dtype = collection.table_set.dtype_of([table.weight for table in collection.tables])
        self.plan, self.groups, self.precision, self.device = plan, groups, precision, device
        self.shard_map = ShardMap(self.configs, plan, self.pooled, needs_whole_rows(collection.optimizer))
        self._empty = torch.empty(0, device=device)
        self._no_columns = torch.empty(1, 0, device=device)  # requires_grad as of the tables
        # Ranks with replicas of a shard, by whether its table is data-parallel; where such tables are cached, separate
        # groups of the same ranks for prefetches. All ranks create all groups.
        self._replica_groups = {True: groups.world, False: groups.replicas if sync_replicas else RankGroup()}
        cached = [placed for placed in self.shard_map.shards if self.configs[placed.table].placement != "device"]
        schemes = {placed.scheme == "replicated" for placed in cached}
        shared = [key for key, group in self._replica_groups.items() if key in schemes and group.size > 1]
        self._prefetch_groups = {key: groups.for_prefetch(key) for key in shared}
        # Table sets of the local shards, with their updates and lookups.
        self.table_sets: list[TableSet] = []
        self._local_shards: list[list[PlacedShard]] = []  # by table set, in the order of its tables
        self._column_blocks: dict[tuple[int, Shard], ColumnBlock] = {}  # of shards that need whole rows
        self._whole_row_updates = self._make_whole_row_updates()
        self._exchanges: list[OutputExchange] = []
        self._sums_exchanges: list[SumsExchange] = []
        self._lookups = self._make_lookups()
        replicated = self.shard_map.shards_on(groups.shards.rank, "replicated")
        self._replicated_tables = self._make_table_sets(replicated, self.bounds_check)
        self.server_seeds = [table.seed for table in collection.tables if isinstance(table, ServerTable)]
        self._bounds_checked: list[tuple[str, str, int]] = []  # feature, table, rows: ids that no exchange checks
        if self._lookups and groups.shards.size > 1 and self.bounds_check == "raise":
            configs = [self.configs[placed.table] for placed in replicated]
            self._bounds_checked = [(key, c.name, c.num_embeddings) for c in configs for key in c.feature_names]
        self._init_shards(collection)
        self.requires_grad_(require_gradients(collection.configs, [table.weight for table in collection.tables]))
        # Graph break: the host reads the sizes of messages.
        self._exchange_ids = torch.compiler.disable(self._exchange_ids)  # type: ignore[method-assign]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze all tables; the same on every rank, as their backward is a collective."""
        for _, table, _ in self._local_tables():
            table.requires_grad_(requires_grad)
        self._no_columns.requires_grad_(requires_grad)
        return self

    def _make_lookups(self) -> list[ShardedLookup]:
        """Make the table sets and exchanges of sharded tables."""
        raise NotImplementedError

    def server_rows(self) -> list[dict[int, tuple[int, int]]]:
        for placed in self.shard_map.shards:
            config = self.configs[placed.table]
            if placed.shard.num_columns < config.embedding_dim:
                raise ValueError(
                    f"table {config.name!r} is on embedding servers, which store whole rows; use a row-wise or "
                    "table-wise sharding"
                )
        return [
            {placed.table: (placed.shard.first_row, placed.shard.num_rows) for placed in shards}
            for shards in self._local_shards
        ]

    def attach(self, service: TableService, stores: Sequence[RowStore]) -> None:
        self.service = service
        for tables, store in zip(self.table_sets, stores, strict=True):
            tables.attach(store)

    @functools.cached_property
    def fused_optimizer(self) -> FusedOptimizer:
        """Fused optimizer of the local shards, as a `torch.optim.Optimizer`."""
        return self.view(self.optimizer_states)

    def rates(self) -> list[Tensor]:
        return [tables.counters["learning_rate"] for tables in self.table_sets]

    def optimizer_states(self) -> list[tuple[str, Tensor, dict[str, Tensor]]]:
        """Return name, weight, and optimizer states by name (step included), per local shard."""
        entries = [entry for tables in self.table_sets for entry in tables.optimizer_states()]
        return entries or [("", self._empty, {})]  # a rank without tables still has a learning rate

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients of micro-batches, and apply them once when the block ends; on all ranks."""
        for update in self._whole_row_updates.values():
            update.discard()
        with ExitStack() as stack:
            for tables in reversed(self.table_sets):  # entered last, so applied first, on every rank
                stack.enter_context(tables.accumulate())
            yield
        for update in self._whole_row_updates.values():
            update.flush()

    def scale_accumulated(self, factor: float) -> bool:
        """Multiply the accumulated gradients by `factor`; return whether all local results are finite."""
        finite = [tables.scale_accumulated(factor) for tables in self.table_sets]
        return all(finite)

    def skipped_rows(self) -> dict[str, int]:
        """Return the number of row updates that this rank skipped so far, by table; see `on_nonfinite="skip"`."""
        skipped = dict.fromkeys((config.name for config in self.configs), 0)
        counts = [count for tables in self.table_sets for count in tables.counters["skipped"].tolist()]
        for (placed, _, _), count in zip(self._local_tables(), counts, strict=True):
            skipped[self.configs[placed.table].name] += count
        return skipped

    def table_weights(self) -> dict[str, TableShards]:
        """Return the sharded weight of each table by name."""
        state, _ = self._get_state()
        return {config.name: state[f"{config.name}.weight"] for config in self.configs}

    def prefetch(self, features: Features | PrefetchedFeatures, assign: bool = False) -> Exchanged:
        """Exchange the ids of all ranks' batches, and prefetch the rows of the ids received; a collective.

        May be called before `forward`, from another thread, in the same order on every rank. `assign`: whether new ids
        of dynamic tables are assigned rows now.
        """
        return features.of(self) if isinstance(features, PrefetchedFeatures) else self._exchange_ids(features, assign)

    def _exchange_ids(self, features: Features, assign: bool) -> Exchanged:
        """Exchange ids on the CPU, then group and prefetch their rows on the device; see `prefetch`."""
        batch = self.convert_batch(features)
        sent, problem = self._batch_to_send(batch), find_invalid_id(batch, self._bounds_checked)
        received = [exchange(sent, problem) for exchange, _ in self._lookups]
        if self.device.type != "cpu":
            batch, received = tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), (batch, received))
        prefetched = list[tuple[Received, list[Groups | None]]]()
        for (_, sets), received_ids in zip(self._lookups, received, strict=True):
            ids, _, routes = received_ids
            counts = None if routes is None else routes.occurrences
            groups = [None if tables.dynamic and not assign else tables.group(ids, counts) for tables in sets]
            prefetched.append((received_ids, groups))
        return batch, [tables.group(batch) for tables in self._replicated_tables], prefetched

    def _id_exchange(self, routes: Sequence[IdRoute], **options: Any) -> IdExchange:
        group, network, check = self.groups.ids, self.groups.ids_network, self.bounds_check == "raise"
        device = None if network is group else self.device
        return IdExchange(group, routes, check, network=network, device=device, **options)

    def saturated(self) -> int:
        """Number of elements that saturated in the exchanges' codecs so far; synchronizes with the device."""
        exchanges: list[OutputExchange | SumsExchange] = [*self._exchanges, *self._sums_exchanges]
        return sum(codec.saturated() for exchange in exchanges for codec in exchange.codecs)

    def _batch_to_send(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch for the ID exchange."""
        return batch

    def convert_batch(self, features: Features) -> KeyedJaggedTensor:
        """Convert features to a `te.KeyedJaggedTensor`, on the CPU if ids are exchanged between ranks."""
        keys, values, offsets, weights = unpack_features(features)
        if missing := [feature for feature in self.feature_names if feature not in keys]:
            raise ValueError(f"the batch lacks the features {missing}; it has the keys {keys}")
        if weights is not None and weights.requires_grad:
            raise ValueError("per-sample weights of a sharded collection get no gradient; detach them")
        batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
        return batch.to("cpu") if self.groups.shards.size > 1 else batch

    def _make_table_sets(self, shards: Sequence[PlacedShard], bounds_check: Any = "ignore") -> list[TableSet]:
        """Make table sets of these shards: first of those updated locally, then of those that need whole rows."""
        by_need = [[placed for placed in shards if placed.needs_whole_rows == need] for need in (False, True)]
        shard_lists = [shard_list for shard_list in by_need if shard_list]
        table_sets = [
            TableSet(
                self.shard_map.shard_configs(shard_list), self.optimizer, self.device, bounds_check, torch.float32,
                pooled=self.pooled, update=self._make_update(shard_list),
            )
            for shard_list in shard_lists
        ]  # fmt: skip
        self._local_shards += shard_lists
        self.table_sets += table_sets
        return table_sets

    def _make_update(self, shards: Sequence[PlacedShard]) -> ShardUpdate:
        """Make the update of shards with one scheme, all of which need whole rows, or none."""
        scheme, needs_whole_rows = shards[0].scheme, shards[0].needs_whole_rows
        group = self._replica_groups[scheme == "replicated"]
        if group.size == 1 and not needs_whole_rows:
            return ShardUpdate()
        blocks = tuple(self._column_blocks[placed.table, placed.shard] for placed in shards if needs_whole_rows)
        whole_row_update = self._whole_row_updates[scheme] if needs_whole_rows else None
        shapes = [(placed.shard.num_rows, placed.shard.num_columns) for placed in shards]
        self._sums_exchanges.append(SumsExchange(group, self.precision, shapes))
        prefetch_group = self._prefetch_groups.get(scheme == "replicated")
        return ReplicatedUpdate(self._sums_exchanges[-1], prefetch_group, whole_row_update, blocks)

    def _make_whole_row_updates(self) -> dict[str, WholeRowUpdate]:
        """Make whole-row updates by scheme, on all ranks, with or without such shards."""
        updates = {}
        for scheme in ("direct", "hierarchical"):
            needing = (placed for placed in self.shard_map.shards if placed.needs_whole_rows)
            if shards := [(placed.table, placed.shard) for placed in needing if placed.scheme == scheme]:
                ranks = sorted({shard.rank for _, shard in shards})
                rows = sorted({(table, shard.first_row) for table, shard in shards})  # blocks of rows, numbered
                for table, shard in shards:
                    block = rows.index((table, shard.first_row)), ranks.index(shard.rank)
                    self._column_blocks[table, shard] = ColumnBlock(*block, shard.first_column, shard.num_columns)
                blocks = tuple(self._column_blocks[key] for key in shards)
                updates[scheme] = WholeRowUpdate(self.groups.subset(ranks), blocks, self.optimizer)
        return updates

    def _local_tables(self) -> Iterator[tuple[PlacedShard, Table, RankGroup]]:
        """Local shards, their tables, and the ranks with replicas of them."""
        for tables, shards in zip(self.table_sets, self._local_shards, strict=True):
            for placed, table in zip(shards, tables.tables, strict=True):
                yield placed, table, self.groups.world if placed.scheme == "replicated" else self.groups.replicas

    @torch.no_grad()
    def _init_shards(self, collection: TableCollection) -> None:
        """Copy weights and states of a collection; draw initial values if it is on the meta device."""
        on_meta = collection.tables[0].weight.device.type == "meta"
        # Learning rate, step, and seeds of dynamic tables, which rank 0 draws.
        self.set_learning_rate(collection.current_learning_rate)
        for tables in self.table_sets if not on_meta else ():
            tables.counters["step"].copy_(collection.step)
        seeds = torch.tensor([shard_seed(config) for config in self.configs], device=self.device)
        if not on_meta:
            seeds = seeds.new_tensor([t.seed if isinstance(t, DynamicTable) else 0 for t in collection.tables])
        if any(config.is_dynamic for config in self.configs):
            self.groups.world.broadcast(seeds, 0, "initial values")
        # Shards: copied, or drawn, then broadcast to replicas.
        for placed, table, group in self._local_tables():
            config = self.configs[placed.table]
            if isinstance(table, ServerTable):
                continue  # servers have the initial values
            if isinstance(table, DynamicTable):
                source = collection.tables[placed.table]
                assert isinstance(source, DynamicTable)
                table.reset_parameters(int(seeds[placed.table]))
                if not on_meta:
                    table.load_state(source.get_state() | {"seed": seeds[placed.table]})
            elif not on_meta:
                copy_shard(table, collection.tables[placed.table].tensors(), placed.shard)
            elif isinstance(table, CachedTable) and config.init is None:
                seed = torch.tensor(shard_seed(config), device=table.weight.device)
                group.broadcast(seed, 0, "initial values")
                table.reset_parameters(int(seed))
                continue
            else:
                init_shard(table, config, placed.shard)
            if group.size > 1:
                change_tensors(table, self.device, functools.partial(group.broadcast, kind="initial values"))

    def _get_state(self, prefix: str = "") -> tuple[dict[str, TableShards], list[CacheCopies]]:
        """Return the state dict, and cached tables with the copies of their rows in it."""
        shards: defaultdict[str, defaultdict[str, list[LocalShard]]] = defaultdict(lambda: defaultdict(list))
        copies = []
        first_replica = self.groups.replicas.rank == 0
        # Shards of tables that are not dynamic, by table and tensor.
        for placed, table, _ in self._local_tables():
            if isinstance(table, DynamicTable | ServerTable):
                continue
            shard, fields, tensors = placed.shard, shards[self.configs[placed.table].name], table.tensors()
            if isinstance(table, CachedTable):
                copies.append((table, tensors))
            primary = first_replica and (placed.scheme != "replicated" or self.groups.world.rank == 0)
            fields["weight"].append(LocalShard(tensors["weight"], shard.first_row, shard.first_column, primary))
            for state in self.optimizer.states:
                # Row-wise states are the same on all ranks with columns of these rows; the first block saves them.
                state_primary = primary and (state.per_element or shard.first_column == 0)
                column = shard.first_column if state.per_element else 0
                fields[state.name].append(LocalShard(tensors[state.name], shard.first_row, column, state_primary))
        # The first rank with tables saves the step.
        first_rank = min(placed.shard.rank for placed in self.shard_map.shards)
        primary = first_replica and self.groups.shards.rank == first_rank
        counters = [tables.counters["step"] for tables in self.table_sets]
        steps = [LocalShard(step, is_primary=primary and not n) for n, step in enumerate(counters)]
        result = {f"{prefix}step": TableShards((), torch.int64, steps)}
        if self.configs[0].placement == "server":
            for config in self.configs if not metadata_kind() else ():
                assert self.service is not None
                server_tensors: Any = self.service.tensors(config.name)
                result |= {f"{prefix}{config.name}.{name}": value for name, value in server_tensors.items()}
            return result, copies
        result |= {f"{prefix}{name}": value for name, value in self._get_dynamic_state().items()}
        for config in (config for config in self.configs if not config.is_dynamic):
            size, fields = (config.num_embeddings, config.embedding_dim), shards[config.name]
            result[f"{prefix}{config.name}.weight"] = TableShards(size, config.dtype, fields["weight"])
            for state in self.optimizer.states:
                state_size = size if state.per_element else size[:1]
                state_shards = TableShards(state_size, torch.float32, fields[state.name])
                result[f"{prefix}{config.name}.{state.name}"] = state_shards
        return result, copies

    def _get_dynamic_state(self) -> dict[str, Any]:
        """Return the state of dynamic tables, with rows by rank, then by id; a collective if there are such tables."""
        result: dict[str, Any] = {}
        if metadata_kind() == "parameters" or not any(config.is_dynamic for config in self.configs):
            return result
        local_tables = {placed.table: table for placed, table in self.dynamic_tables()}
        num_rows = [local_tables[n].num_rows if n in local_tables else 0 for n in range(len(self.configs))]
        # Not over the group of ID exchanges, which a prefetch thread may be using.
        by_rank = self.groups.shards.all_gather(torch.tensor(num_rows, device=self.device), "rows")
        for index, config in enumerate(self.configs):
            if not config.is_dynamic:
                continue
            ranks = [placed.shard.rank for placed in self.shard_map.shards if placed.table == index]  # by partition
            is_local, counts = index in local_tables, [int(by_rank[rank][index]) for rank in ranks]
            partition = ranks.index(self.groups.shards.rank) if is_local else 0
            first_row, total = sum(counts[:partition]), sum(counts)
            # Without a local shard, a table on "meta" has the names and shapes.
            meta_table = None if is_local else table_type(config)(config, self.optimizer.states, "meta")
            table = local_tables[index] if is_local else cast(DynamicTable, meta_table)
            # Size of the global tensor, and offset of this rank's rows in it.
            for name, value in table.get_state().items():
                size, first, is_primary = list(value.shape), (first_row, 0), True
                if name in ("clock", "seed"):
                    is_primary = partition == 0
                elif name in ("sketch", "added"):
                    assert table.sketch is not None
                    size, first = table.sketch.shard_spec(name)
                elif name.startswith("rows."):  # all storage slots of a table on disk
                    partitions, (all_partitions, _) = table.index.num_sets.numel(), table.index.shard.tolist()
                    size[0], first = size[0] // partitions * all_partitions, (table.row_config.row_origin, 0)
                else:
                    size[0] = total
                local_shards = [LocalShard(value, *first, is_primary)] if is_local else []
                shards = value.new_empty(size) if 0 in size else TableShards(size, value.dtype, local_shards)
                result[f"{config.name}.{name}"] = shards
        return result

    def _load_dynamic(self, state_dict: Any, prefix: str) -> list[str]:
        """Load dynamic tables from a state dict; return problems. A collective, like `_get_dynamic_state`."""
        problems, local_tables = [], {placed.table: table for placed, table in self.dynamic_tables()}
        for index, config in enumerate(self.configs):
            path, table = f"{prefix}{config.name}.", local_tables.get(index)
            if not config.is_dynamic or (ids := state_dict.get(f"{path}ids")) is None:
                continue
            num_owned = 0 if table is None else int(table.owns(_local_tensor(ids)).sum())
            owned = self.groups.shards.all_gather(torch.tensor([num_owned], device=self.device), "rows")
            if owned.sum() != ids.shape[0]:
                problems.append(f"{path}ids: these shards are of another plan; load a checkpoint, or full tensors")
                continue
            tensors = {} if table is None else {name: state_dict.get(path + name) for name in table.templates(0)}
            if table is not None and not any(value is None for value in tensors.values()):
                try:
                    table.load_state({name: _local_tensor(value) for name, value in tensors.items()})
                except ValueError as error:
                    problems.append(str(error))
        return problems

    def _load_servers(self, service: TableService, tensors: Mapping[str, Tensor], prefix: str) -> list[str]:
        """Let embedding servers load the full tables of rank 0; return problems. A collective."""
        problems: list[str] = []
        for config in self.configs if self.groups.world.rank == 0 else ():
            table_prefix = f"{prefix}{config.name}."
            try:
                matches = {key: tensor for key, tensor in tensors.items() if key.startswith(table_prefix)}
                service.load(config.name, {key.removeprefix(table_prefix): tensor for key, tensor in matches.items()})
            except ValueError as error:
                problems.append(str(error))
        problems = self.groups.world.all_gather_object(problems)[0]
        service.discard_leases()
        return problems

    def dynamic_tables(self) -> list[tuple[PlacedShard, DynamicTable]]:
        """Return the local shards of dynamic tables."""
        return [(placed, table) for placed, table, _ in self._local_tables() if isinstance(table, DynamicTable)]

    @torch.no_grad()
    def average_replicas(self) -> None:
        """Average the weights and states of the tables' replicas, in place; a collective of `groups.replicas`."""
        for _, table, _ in self._local_tables():
            change_tensors(table, self.device, lambda tensor: _average(self.groups.replicas, tensor))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add one `TableShards` per table and state, under the keys of the unsharded collection."""
        destination.update(self._get_state(prefix)[0])

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Copy the local shards from full tensors or from `TableShards`."""
        _, strict, missing_keys, unexpected_keys, error_msgs = args
        state, copies = self._get_state(prefix)
        dynamic = tuple(f"{prefix}{config.name}." for config in self.configs if config.is_dynamic)
        error_msgs += self._load_dynamic(state_dict, prefix) if self.service is None else []
        for key, value in state.items():
            if key not in state_dict:
                missing_keys.append(key)
            if key not in state_dict or key.startswith(dynamic) or not isinstance(value, TableShards):
                continue
            try:
                value.copy_from(state_dict[key])
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
        for table, tensors in copies:
            table.assign(tensors)
        if self.service is not None and not missing_keys:
            error_msgs += self._load_servers(self.service, {key: state_dict[key] for key in state}, prefix)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in state]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        for tables in self.table_sets:
            tables.convert(fn)
        self._empty = fn(self._empty)
        self._no_columns = fn(self._no_columns.detach()).requires_grad_(self._no_columns.requires_grad)
        self.device = self._empty.device
        for view in self._views:
            view.refresh()
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{config.name}: {self.plan.tables[config.name]}" for config in self.configs)


def _local_tensor(value: Tensor) -> Tensor:
    """Return the local tensor of a sharded dynamic table's state."""
    if not isinstance(value, TableShards):
        return value
    return value.shards[0].tensor if value.shards else torch.empty(0, *value.shape[1:], dtype=value.dtype)


def _average(group: RankGroup, tensor: Tensor) -> None:
    """Replace `tensor` by its mean over ranks, added in their order, by chunks of rows."""
    rows_per_chunk = max(1, MAX_GATHER_BYTES // max(1, tensor[:1].numel() * tensor.element_size()))
    for chunk in tensor.split(rows_per_chunk):
        replicas = group.all_gather(chunk, "replicas").float()
        chunk.copy_(functools.reduce(torch.add, replicas) / group.size)
