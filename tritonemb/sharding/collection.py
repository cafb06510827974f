"""Base of sharded collections: local shards, their fused optimizer, and state dicts by table."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tritonemb.comm.gradient_exchange import all_gather_rows
from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import IdExchange, IdRoute, Received
from tritonemb.comm.output_exchange import ExchangePrecision, OutputExchange
from tritonemb.errors import find_invalid_id
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.nn.collections import TableCollection
from tritonemb.ops.registry import graph_break
from tritonemb.ops.row_groups import ID_DTYPES, check_ids
from tritonemb.optimizers import Optimizer
from tritonemb.sharding.local_shards import LocalShards
from tritonemb.sharding.placement import PlacedShard, ShardGroups, ShardMap
from tritonemb.sharding.plan import ShardingPlan
from tritonemb.sharding.replicated_update import ShardUpdates, needs_whole_rows
from tritonemb.sharding.sharded_tensor import TableShards
from tritonemb.tables.lookup_tables import Groups, require_gradients
from tritonemb.tables.optimizer import FusedOptimizer
from tritonemb.tables.server_table import RowStore, ShardedServerTables, TableService
from tritonemb.tables.table_set import PrefetchedFeatures, TableSet

# Batch; row groups of each replicated table set; and for each ID exchange the ids received, and their row groups for
# each table set that looks them up (None where ids of dynamic tables are assigned rows in the forward).
Exchanged = tuple[KeyedJaggedTensor, list[Groups], list[tuple[Received, list[Groups | None]]]]
# ID exchange, and the local table sets that look up the ids received.
ShardedLookup = tuple[IdExchange, list[TableSet]]


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
        self._empty = torch.empty(0, dtype=torch.float32, device=device)
        self._no_columns = torch.empty(1, 0, dtype=torch.float32, device=device)  # requires a gradient if the tables do
        # Table sets of the local shards, with their updates and lookups.
        self.local_shards = LocalShards(self.configs, collection.optimizer, groups, self.shard_map.shards, device)
        self.table_sets = self.local_shards.table_sets
        shards = self.shard_map.shards
        self._updates = ShardUpdates(self.configs, collection.optimizer, groups, shards, precision, sync_replicas)
        self._exchanges: list[OutputExchange] = []
        self._lookups = self._make_lookups()
        replicated = self.shard_map.shards_on(groups.shards.rank, "replicated")
        self._replicated_tables = self._make_table_sets(replicated, self.bounds_check)
        self.server_seeds = [table.seed for table in collection.tables if table.rows.is_pulled]
        configs, self._report_group = _unchecked_tables(self, [self.configs[placed.table] for placed in replicated])
        self._bounds_checked = [(key, c.name, c.num_embeddings) for c in configs for key in c.feature_names]
        self.set_learning_rate(collection.current_learning_rate)
        self.local_shards.init(collection)
        self.requires_grad_(require_gradients(collection.configs, [table.weight for table in collection.tables]))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze all tables; the same on every rank, as their backward is a collective."""
        for _, table, _ in self.local_shards.tables():
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
                remedy = "use a row-wise or table-wise sharding"
                raise ValueError(f"table {config.name!r} is on embedding servers, which store whole rows; {remedy}")
        return [
            {placed.table: (placed.shard.first_row, placed.shard.num_rows) for placed in shards}
            for shards in self.local_shards.by_set
        ]

    def attach(self, service: TableService, stores: Sequence[RowStore]) -> None:
        self.service = self.local_shards.service = service
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
        for update in self._updates.of_whole_rows.values():
            update.discard()
        with self.accumulator.open(list.clear), ExitStack() as stack:  # also open on ranks without tables
            for tables in reversed(self.table_sets):  # entered last, so applied first, on every rank
                stack.enter_context(tables.accumulate())
            yield
        for update in self._updates.of_whole_rows.values():
            update.flush()

    def scale_accumulated(self, factor: float) -> bool:
        """Multiply the accumulated gradients by `factor`; return whether all local results are finite."""
        return min([tables.scale_accumulated(factor) for tables in self.table_sets], default=True)

    def skipped_rows(self) -> dict[str, int]:
        """Return the number of row updates that this rank skipped so far, by table; see `on_nonfinite="skip"`."""
        skipped = dict.fromkeys((config.name for config in self.configs), 0)
        counts = [count for tables in self.table_sets for count in tables.counters["skipped"].tolist()]
        for (placed, _, _), count in zip(self.local_shards.tables(), counts, strict=True):
            skipped[self.configs[placed.table].name] += count
        return skipped

    def table_weights(self) -> dict[str, TableShards]:
        """Return the sharded weight of each table by name."""
        state, _ = self.local_shards.state()
        return {config.name: state[f"{config.name}.weight"] for config in self.configs}

    def prefetch(self, features: Features | PrefetchedFeatures, assign: bool = False) -> Exchanged:
        """Exchange the ids of all ranks' batches, and prefetch the rows of the ids received; a collective.

        Another thread may call it before `forward`, in the same order on every rank. With `assign`, new ids of dynamic
        tables get rows now, otherwise in the forward. ValueError for an id out of range; RuntimeError on other ranks.
        """
        return features.of(self) if isinstance(features, PrefetchedFeatures) else self._exchange_ids(features, assign)

    @graph_break(
        "the host reads the sizes of other ranks' messages; for one graph call the compiled model with prefetched "
        "features, model.prefetch(features)"
    )
    def _exchange_ids(self, features: Features, assign: bool) -> Exchanged:
        batch = self.convert_batch(features)
        sent, problem = self._batch_to_send(batch), find_invalid_id(batch, self._bounds_checked)
        if self._report_group is not None:
            all_gather_rows(self._report_group, torch.empty(0, dtype=torch.int64, device="cpu"), problem)
        received = [exchange(sent, problem) for exchange, _ in self._lookups]
        if self.device.type != "cpu":
            batch, received = tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), (batch, received))
        prefetched = list[tuple[Received, list[Groups | None]]]()
        for (_, sets), (ids, sizes, routes) in zip(self._lookups, received, strict=True):
            counts = None if routes is None else routes.occurrences
            groups = [tables.group(ids, counts) if assign or not tables.dynamic else None for tables in sets]
            prefetched.append(((ids, sizes, routes), groups))
        return batch, [tables.group(batch) for tables in self._replicated_tables], prefetched

    def _id_exchange(self, routes: Sequence[IdRoute], **options: Any) -> IdExchange:
        group, network, check = self.groups.ids, self.groups.ids_network, self.bounds_check == "raise"
        device = None if network is group else self.device
        return IdExchange(group, routes, check, network=network, device=device, **options)

    def saturated(self, only_gradients: bool = False) -> int:
        """Return how many elements have exceeded the range of the exchanges' codecs; synchronizes with the device."""
        codecs = [codec for exchange in self._exchanges for codec in exchange.codecs[2 * only_gradients :]]
        codecs += [codec for exchange in self._updates.exchanges for codec in exchange.codecs]
        return sum(codec.saturated() for codec in codecs)

    def _batch_to_send(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return batch

    def convert_batch(self, features: Features) -> KeyedJaggedTensor:
        """Convert features to a `te.KeyedJaggedTensor`, on the CPU if ids are exchanged between ranks."""
        keys, values, offsets, weights = unpack_features(features)
        if missing := [feature for feature in self.feature_names if feature not in keys]:
            raise ValueError(f"the batch lacks the features {missing}; it has the keys {keys}")
        if weights is not None and weights.requires_grad:
            raise ValueError("per-sample weights of a sharded collection get no gradient; detach them")
        if values.dtype not in ID_DTYPES or values.dim() != 1:
            check_ids(values)
        batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
        return batch.to("cpu") if self.groups.shards.size > 1 else batch

    def _make_table_sets(self, shards: Sequence[PlacedShard], bounds_check: Any = "ignore") -> list[TableSet]:
        """Make table sets of these shards: first of those updated locally, then of those that need whole rows."""
        by_need = [[placed for placed in shards if placed.needs_whole_rows == need] for need in (False, True)]
        shard_lists = [shard_list for shard_list in by_need if shard_list]
        table_sets = [
            TableSet(
                self.shard_map.shard_configs(shard_list), self.optimizer, self.device, bounds_check, torch.float32,
                pooled=self.pooled, update=self._updates.make(shard_list),
            )
            for shard_list in shard_lists
        ]  # fmt: skip
        self.local_shards.by_set += shard_lists
        self.table_sets += table_sets
        return table_sets

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update(self.local_shards.state(prefix)[0])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _, strict, missing_keys, unexpected_keys, error_msgs = args
        keys, missing, problems = self.local_shards.load(state_dict, prefix)
        missing_keys += missing
        error_msgs += problems
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in keys]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        for tables in self.table_sets:
            tables.convert(fn)
        self._empty = fn(self._empty)
        self._no_columns = fn(self._no_columns.detach()).requires_grad_(self._no_columns.requires_grad)
        self.device = self.local_shards.device = self._empty.device
        for view in self._views:
            view.refresh()
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{config.name}: {self.plan.tables[config.name]}" for config in self.configs)


def _unchecked_tables(collection: ShardedCollection, replicated: Sequence[Any]) -> tuple[Any, RankGroup | None]:
    """Return the tables whose ids no ID exchange of all ranks checks, and a CPU group of all ranks to report an invalid
    id, unless such an exchange does."""
    groups, is_cpu = collection.groups, collection.device.type == "cpu"
    if groups.world.size == 1 or collection.bounds_check != "raise" or not (is_cpu or groups.shards.size > 1):
        return [], None
    if collection._lookups and groups.replicas.size == 1:
        return replicated, None
    return [config for config in collection.configs if not config.is_dynamic], groups.prefetch
