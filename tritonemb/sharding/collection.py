"""What sharded collections share: this rank's shards, their optimizer, and the whole-table names of their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonemb.comm.codec import ExchangePrecision
from tritonemb.comm.gradient_exchange import ColumnBlock
from tritonemb.comm.group import RankGroup
from tritonemb.errors import id_out_of_range
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.optimizers import Optimizer
from tritonemb.sharding.init import begin_elsewhere, copy_shard, fill_shard, tensors_of
from tritonemb.sharding.local_shards import ReplicatedUpdate, ShardUpdate
from tritonemb.sharding.placement import Held, Placement, named_parts, split
from tritonemb.sharding.plan import ShardingPlan
from tritonemb.sharding.process_groups import ShardGroups
from tritonemb.sharding.replicated_update import Columns, Gathering, WholeRowUpdate, needs_whole_rows
from tritonemb.sharding.sharded_features import SentIds
from tritonemb.sharding.sharded_tensor import LocalShard, TableShards
from tritonemb.tables.cached_table import TieredTable
from tritonemb.tables.lookup import Features, parts_of
from tritonemb.tables.optimizer import FusedOptimizer
from tritonemb.tables.prefetched import SentFeatures
from tritonemb.tables.table_set import TableSet
from tritonemb.types import TableConfig

PIECE_BYTES = 1 << 26  # of a table that are averaged over replicas at once


class ShardedCollection(nn.Module):
    """A collection whose tables are spread over ranks; see `ShardedEmbeddingBagCollection`.

    The shards are no parameters of this module, as nobody else may update or average them: `table_weights` has them.
    """

    pooled: bool

    def __init__(
        self,
        collection: TableSet,
        plan: ShardingPlan,
        groups: ShardGroups,
        precision: ExchangePrecision,
        device: torch.device,
        gather_replicas: bool = True,
    ) -> None:
        super().__init__()
        if collection.optimizer is None:
            raise ValueError(
                "only collections with a fused optimizer can be sharded, as ordinary gradients are averaged over whole "
                f"parameters; give the collection of tables {[c.name for c in collection.configs]} an optimizer"
            )
        if plan.world_size != groups.shards.size:
            raise ValueError(f"the plan is for {plan.world_size} ranks, the tables have {groups.shards.size}")
        self.configs = collection.configs
        self.optimizer: Optimizer = collection.optimizer
        self.bounds_check = collection.bounds_check
        self.output_dtype = collection.dtype_of([table.weight for table in collection.tables])
        self.plan, self.groups, self.precision, self.device = plan, groups, precision, device
        self._gather_replicas = gather_replicas and groups.replicas.size > 1
        self.placement = Placement.of(self.configs, plan, self.pooled)
        self._learning_rate = collection.current_learning_rate
        self._fused_optimizer: FusedOptimizer | None = None
        self._nothing = torch.empty(0, device=device)
        self._world_ahead, self._replicas_ahead = self._groups_ahead()
        self.locals, self._held = self._make_locals()
        self._begin(collection)
        # A compiled model's graphs end before it and begin behind it: sizes of what is sent are read on the host, and
        # gathered updates exchange as many rows as a batch happens to have.
        self.forward = torch.compiler.disable(self.forward)

    def _groups_ahead(self) -> tuple[RankGroup | None, RankGroup | None]:
        """The world and the replicas, where these train tables together that live elsewhere than on the device.

        Made by all ranks, whether they hold such tables or not.
        """
        elsewhere = [h for h in self.placement.held if self.configs[h.table].placement != "device"]
        everywhere = any(h.way == "everywhere" for h in elsewhere) and self.groups.world.size > 1
        copied = any(h.way != "everywhere" for h in elsewhere) and self._gather_replicas
        world = self.groups.world_ahead() if everywhere else None
        return world, self.groups.replicas_ahead() if copied else None

    def _make_locals(self) -> tuple[tuple[TableSet, ...], tuple[tuple[Held, ...], ...]]:
        """Collections of this rank's shards, and the shards in each, in their order."""
        raise NotImplementedError

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The keys that a batch must bring, each once, in the order of tables."""
        return tuple(dict.fromkeys(feature for config in self.configs for feature in config.feature_names))

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The fused optimizer of this rank's shards as a `torch.optim.Optimizer`."""
        if self._fused_optimizer is None:
            self._fused_optimizer = FusedOptimizer(self)
        return self._fused_optimizer

    @property
    def current_learning_rate(self) -> float:
        """What the learning rate was last set to."""
        return self._learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the fused optimizer, on this rank; every rank is to set the same."""
        for tables in self.locals:
            tables.set_learning_rate(lr)
        self._learning_rate = float(lr)
        if self._fused_optimizer is not None:
            self._fused_optimizer.show_learning_rate()

    def optimizer_states(self) -> list[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each shard's name, weight, and the step and states of its fused optimizer by name."""
        found = [states for tables in self.locals for states in tables.optimizer_states()]
        return found or [("", self._nothing, {})]  # a rank without tables has a learning rate too

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gather the gradients of several micro-batches and apply them once, when the block ends; on every rank."""
        for update in self._whole_rows.values():
            update.discard()
        with ExitStack() as stack:
            for tables in reversed(self.locals):  # the first is entered last, and so applied first, on every rank
                stack.enter_context(tables.accumulate())
            yield
        for update in self._whole_rows.values():
            update.flush()

    def scale_accumulated(self, factor: float) -> bool:
        """Multiply the gradients gathered so far by `factor`; returns whether all of this rank's are finite then."""
        finite = [tables.scale_accumulated(factor) for tables in self.locals]
        return all(finite)

    def skipped_rows(self) -> dict[str, int]:
        """For `nonfinite="skip"`: how many row updates this rank has skipped so far, by table."""
        found = dict.fromkeys((config.name for config in self.configs), 0)
        for tables, held in zip(self.locals, self._held, strict=True):
            for each, count in zip(held, tables.skipped.tolist(), strict=True):
                found[self.configs[each.table].name] += count
        return found

    def table_weights(self) -> dict[str, TableShards]:
        """The whole tables' weights by table, of which this rank holds some shards."""
        return {name: tensors["weight"] for name, tensors in self._table_tensors().items()}

    def send(self, features: Features | SentFeatures) -> SentIds:
        """Send the ids of this rank's batch to the ranks that own their rows, and group what arrives; a collective.

        May be called ahead of `forward`, from another thread, if every rank does so in the same order.
        """
        raise NotImplementedError

    def saturated(self) -> int:
        """Elements that were too large for the exchanges' codecs so far. Waits for the device."""
        raise NotImplementedError

    def _sent(self, features: Features | SentFeatures) -> SentIds:
        sent: SentIds = features.of(self) if isinstance(features, SentFeatures) else self.send(features)
        return sent

    def _own_batch(self, features: Features) -> KeyedJaggedTensor:
        """The batch as one of ours, on the CPU, where ids travel."""
        keys, values, offsets, weights = parts_of(features)
        missing = [feature for feature in self.feature_names if feature not in keys]
        if missing:
            raise ValueError(f"the batch lacks the features {missing}; it has the keys {keys}")
        if weights is not None and weights.requires_grad:
            raise ValueError("per-sample weights of a sharded collection get no gradient; detach them")
        batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
        return batch.to("cpu") if self.groups.shards.size > 1 else batch

    def _refusal(self, batch: KeyedJaggedTensor) -> ValueError | None:
        """What is wrong with ids of tables that every rank has: the others are to hear of it, not to wait.

        Ids of other tables are looked at when they are sent.
        """
        if self.groups.shards.size == 1 or self.bounds_check != "raise":
            return None
        keys, size = batch.keys(), batch.stride()
        for held in self.placement.on(self.groups.shards.rank, "everywhere"):
            config = self.configs[held.table]
            for feature in config.feature_names:
                ends = batch.offsets()[keys.index(feature) * size :][: size + 1]
                ids = batch.values()[int(ends[0]) : int(ends[-1])]
                bad = ((ids < 0) | (ids >= config.num_embeddings)).nonzero()
                if bad.numel():
                    place = int(bad[0]) + int(ends[0])
                    sample = int(torch.searchsorted(ends, place, right=True)) - 1
                    value = int(batch.values()[place])
                    return id_out_of_range(config.name, feature, sample, place, value, config.num_embeddings)
        return None

    def _to_device(self, sent: SentIds) -> SentIds:
        """Where the tables are."""
        if self.device.type == "cpu":
            return sent
        return sent.map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _local(self, held: Sequence[Held], bounds_check: bool = False) -> list[tuple[TableSet, tuple[Held, ...]]]:
        """Collections of these shards: first of those that are updated here alone, then of those that need others."""
        made = []
        alone, cut = self._split(held)
        for part in (alone, cut):
            if not part:
                continue
            everywhere = part[0].way == "everywhere"
            group: RankGroup | None = self.groups.world if everywhere else self.groups.replicas
            if group is None or group.size == 1 or not (everywhere or self._gather_replicas):
                group = None
            ahead = None
            if group is not None and any(self.configs[each.table].placement != "device" for each in part):
                ahead = self._world_ahead if everywhere else self._replicas_ahead
            how = ShardUpdate()
            if part is cut:
                update = self._whole_rows[part[0].way]
                size = 1 if group is None else group.size
                how = ReplicatedUpdate(Gathering(group, size, update, self._blocks(part), ahead))
            elif group is not None:
                how = ReplicatedUpdate(Gathering(group, group.size, ahead=ahead))
            tables = TableSet(
                named_parts(self.placement, part), self.optimizer, self.device,
                self.bounds_check if bounds_check else "ignore", torch.float32, pooled=self.pooled, update=how,
            )  # fmt: skip
            made.append((tables, tuple(part)))
        return made

    def _split(self, held: Sequence[Held]) -> tuple[list[Held], list[Held]]:
        """Shards that are updated by what this rank knows, and those for which others' columns are needed."""
        return split(held, lambda each: each.cut and needs_whole_rows(self.optimizer))

    def _blocks(self, held: Sequence[Held]) -> tuple[ColumnBlock, ...]:
        """Shards as blocks of columns among the ranks that have such blocks; each run of a table's rows is numbered."""
        cut = self._cut(held[0].way)
        ranks = sorted({h.shard.rank for h in cut})
        rows = sorted({(h.table, h.shard.first_row) for h in cut})
        return tuple(
            ColumnBlock(
                rows.index((h.table, h.shard.first_row)),
                ranks.index(h.shard.rank),
                h.shard.first_column,
                h.shard.num_columns,
            )
            for h in held
        )

    def _cut(self, way: str) -> list[Held]:
        return [h for h in self.placement.held if h.cut and h.way == way]

    def _make_whole_row_updates(self) -> None:
        """Made by all ranks, whether they hold blocks of columns or not."""
        self._whole_rows: dict[str, WholeRowUpdate] = {}
        for way in ("direct", "by node"):
            cut = self._cut(way)
            if cut and needs_whole_rows(self.optimizer):
                among = self.groups.among(sorted({h.shard.rank for h in cut}))
                self._whole_rows[way] = WholeRowUpdate(Columns(among, self._blocks(cut)), self.optimizer)

    @torch.no_grad()
    def _begin(self, collection: TableSet) -> None:
        """Take over values and states of a collection, or draw them if it has none yet."""
        drawn = collection.tables[0].weight.device.type == "meta"
        for tables, held in zip(self.locals, self._held, strict=True):
            for each, table in zip(held, tables.tables, strict=True):
                if isinstance(table, TieredTable):
                    source_of = None if drawn else collection.tables[each.table]
                    begin_elsewhere(table, self.configs[each.table], each.shard, source_of, self._same_as(each))
                    continue
                if drawn:
                    fill_shard(table.weight, self.configs[each.table], each.shard)
                    continue
                source = collection.tables[each.table]
                copy_shard(table.weight, source.weight, each.shard)
                for name, state in table.named_buffers():
                    copy_shard(state, source.state(name), each.shard)
            if not drawn:
                tables.step.copy_(collection.step)
            tables.set_learning_rate(self._learning_rate)
            for each, table in zip(held, tables.tables, strict=True):
                if not isinstance(table, TieredTable):
                    for tensor in (table.weight, *table.buffers()):
                        self._same_as(each).broadcast(tensor.detach(), 0, "initial values")

    def _same_as(self, held: Held) -> RankGroup:
        """The ranks with the same shard."""
        return self.groups.world if held.way == "everywhere" else self.groups.replicas

    def _table_tensors(self) -> dict[str, dict[str, TableShards]]:
        """By table: its weight and states by name, as this rank holds them."""
        shards: dict[str, dict[str, list[LocalShard]]] = {
            config.name: {"weight": [], **{state.name: [] for state in self.optimizer.states}}
            for config in self.configs
        }
        first_copy = self.groups.replicas.rank == 0
        for tables, held in zip(self.locals, self._held, strict=True):
            for each, table in zip(held, tables.tables, strict=True):
                shard, of_table = each.shard, shards[self.configs[each.table].name]
                tensors = tensors_of(table)
                mine = first_copy and (each.way != "everywhere" or self.groups.world.rank == 0)
                weight = LocalShard(tensors["weight"], shard.first_row, shard.first_column, mine)
                of_table["weight"].append(weight)
                for state in self.optimizer.states:
                    # Ranks with other columns of the same rows hold the same values of a row.
                    one = mine and (state.per_element or shard.first_column == 0)
                    column = shard.first_column if state.per_element else 0
                    of_table[state.name].append(LocalShard(tensors[state.name], shard.first_row, column, one))
        return {config.name: self._whole(config, shards[config.name]) for config in self.configs}

    def _whole(self, config: TableConfig, shards: dict[str, list[LocalShard]]) -> dict[str, TableShards]:
        size = (config.num_embeddings, config.embedding_dim)
        found = {"weight": TableShards(size, config.dtype, shards["weight"])}
        for state in self.optimizer.states:
            found[state.name] = TableShards(size if state.per_element else size[:1], torch.float32, shards[state.name])
        return found

    def _step_shards(self) -> TableShards:
        """The number of steps; saved by the first rank that has tables."""
        holders = sorted({h.shard.rank for h in self.placement.held})
        mine = self.groups.replicas.rank == 0 and self.groups.shards.rank == holders[0]
        return TableShards(
            (), torch.int64, [LocalShard(tables.step, mine=mine and not n) for n, tables in enumerate(self.locals)]
        )

    @torch.no_grad()
    def average_replicas(self) -> None:
        """Give the copies of the tables the mean of their weights and states; a collective of `groups.replicas`."""
        for tables in self.locals:
            for table in tables.tables:
                if isinstance(table, TieredTable):
                    table.change(self._average_fields)
                    continue
                for tensor in (table.weight.detach(), *table.buffers()):
                    _average(self.groups.replicas, tensor)

    def _average_fields(self, fields: Mapping[str, Tensor]) -> None:
        for values in fields.values():
            moved = values.to(self.device)
            _average(self.groups.replicas, moved)
            values.copy_(moved)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Whole-table keys, `TableShards` as values."""
        destination = {} if destination is None else destination
        destination[f"{prefix}step"] = self._step_shards()
        for table, tensors in self._table_tensors().items():
            for name, value in tensors.items():
                destination[f"{prefix}{table}.{name}"] = value
        return destination

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Whole tensors are cut; `TableShards` are this rank's own already, or are copied shard by shard."""
        wanted = self.state_dict(prefix=prefix)
        for key, here in wanted.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            try:
                _load(here, state_dict[key])
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
        self._store(wanted, prefix)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in wanted]

    def _store(self, loaded: Mapping[str, TableShards], prefix: str) -> None:
        """Bring what was loaded to where tables live that are not on the device."""
        for tables, held in zip(self.locals, self._held, strict=True):
            for each, table in zip(held, tables.tables, strict=True):
                if isinstance(table, TieredTable):
                    name, shard = self.configs[each.table].name, each.shard
                    own = {}
                    for field in table.record.fields:
                        of_table = loaded[f"{prefix}{name}.{field.name}"]
                        column = 0 if field.one_a_row else shard.first_column
                        own[field.name] = next(
                            of.tensor
                            for of in of_table.shards
                            if (of.first_row, of.first_column) == (shard.first_row, column)
                        )
                    table.assign(own)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedCollection:
        for tables in self.locals:
            tables._apply(fn, recurse)
        self._nothing = fn(self._nothing)
        self.device = self._nothing.device
        if self._fused_optimizer is not None:
            self._fused_optimizer.refresh()
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{config.name}: {self.plan.tables[config.name]}" for config in self.configs)


def _average(group: RankGroup, tensor: Tensor) -> None:
    """The mean over ranks, added in their order, by pieces of rows."""
    rows = max(1, PIECE_BYTES // max(1, tensor[:1].numel() * tensor.element_size()))
    for piece in tensor.split(rows):
        gathered = group.all_gather(piece, "replicas")
        mean = gathered[0].float()
        for more in gathered[1:]:
            mean += more
        piece.copy_(mean / group.size)


def why_not(here: TableShards, given: Any) -> str | None:
    """Why a table or a state of it cannot be filled from a tensor, whole or sharded; None if it can."""
    if not isinstance(given, Tensor) or (given.shape, given.dtype) != (here.shape, here.dtype):
        found = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        return f"expected a tensor of {here.dtype} {list(here.shape)}, got {found}"
    if isinstance(given, TableShards) and any(_place(shard) not in map(_place, given.shards) for shard in here.shards):
        return "these shards are of another plan; load a checkpoint with torch.distributed.checkpoint, or whole tensors"
    return None


def _place(shard: LocalShard) -> tuple[int, int, torch.Size]:
    return shard.first_row, shard.first_column, shard.tensor.shape


def _load(here: TableShards, given: Tensor) -> None:
    problem = why_not(here, given)
    if problem is not None:
        raise ValueError(problem)
    if not isinstance(given, TableShards):
        here.copy_from(given)
        return
    places = {_place(shard): shard.tensor for shard in given.shards}
    for shard in here.shards:
        found = places[_place(shard)]
        if found.data_ptr() != shard.tensor.data_ptr():
            shard.tensor.copy_(found)
