"""`LocalShards`: a rank's shards of a collection's tables, their initial values, and their state under any sharding."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from tritonemb.comm.group import RankGroup
from tritonemb.nn.collections import TableCollection
from tritonemb.optimizers import Optimizer
from tritonemb.sharding.placement import PlacedShard, ShardGroups
from tritonemb.sharding.sharded_tensor import LocalShard, TableShards, slice_shard
from tritonemb.storage.store import row_states
from tritonemb.tables.cached_rows import metadata_kind
from tritonemb.tables.dynamic_table import FALLBACK, DynamicTable
from tritonemb.tables.server_table import TableService, make_table
from tritonemb.tables.table import Table, draw_weight
from tritonemb.tables.table_set import TableSet
from tritonemb.types import TableConfig

MAX_GATHER_BYTES = 1 << 26  # bytes of a table per all-gather that averages replicas: bounds the temporary memory
CacheCopies = tuple[Table, Mapping[str, Tensor]]  # a cached table, and copies of its rows by name


@dataclass(eq=False)
class LocalShards:
    """Shards of a collection's tables on this rank, in table sets.

    Its state has a `TableShards` for each table and tensor, under the keys of the unsharded collection.
    """

    configs: Sequence[TableConfig]
    optimizer: Optimizer
    groups: ShardGroups
    all_shards: Sequence[PlacedShard]  # of all ranks
    device: torch.device
    service: TableService | None = None  # of tables on embedding servers, once attached
    table_sets: list[TableSet] = field(default_factory=list)
    by_set: list[list[PlacedShard]] = field(default_factory=list)  # in the order of a set's tables

    def tables(self) -> Iterator[tuple[PlacedShard, Any, RankGroup]]:
        """Local shards, their tables, and the ranks with replicas of them."""
        for tables, shards in zip(self.table_sets, self.by_set, strict=True):
            for placed, table in zip(shards, tables.tables, strict=True):
                yield placed, table, self.groups.world if placed.scheme == "replicated" else self.groups.replicas

    def dynamic_tables(self) -> list[tuple[PlacedShard, DynamicTable]]:
        """Return the local shards of dynamic tables."""
        return [(placed, table) for placed, table, _ in self.tables() if table.index.assigns_rows]

    @torch.no_grad()
    def init(self, collection: TableCollection | None) -> None:
        """Copy weights and states of a collection; draw initial values if it is on the meta device, or None."""
        # Seeds of dynamic tables, which rank 0 draws.
        sources, seeds = None, torch.tensor([_shard_seed(config) for config in self.configs], device=self.device)
        if collection is not None and not collection.tables[0].weight.is_meta:
            sources = collection.tables
            seeds = seeds.new_tensor([table.seed if table.index.assigns_rows else 0 for table in sources])
        for tables in self.table_sets:
            tables.counters["step"].fill_(0 if collection is None or sources is None else int(collection.step))
        if any(config.is_dynamic for config in self.configs):
            self.groups.world.broadcast(seeds, 0, "initial values")
        # Shards: copied, or drawn, then broadcast to replicas.
        for placed, table, group in self.tables():
            config, source = self.configs[placed.table], None if sources is None else sources[placed.table]
            if table.rows.is_pulled:
                continue  # servers have the initial values
            if table.index.assigns_rows:
                table.reset_parameters(int(seeds[placed.table]))
                if source is not None:
                    state = cast(DynamicTable, source).get_state()
                    table.load_state(state | {"seed": seeds[placed.table]})
                else:
                    table.load_pretrained(config)
            elif source is not None:
                table.assign({name: slice_shard(t, placed.shard) for name, t in source.tensors().items()})
            elif config.init_function is None:
                seed = torch.tensor(_shard_seed(config), device=table.weight.device)
                group.broadcast(seed, 0, "initial values")
                table.reset_parameters(int(seed))
                table.load_pretrained(config)
                continue
            else:
                table.reset_parameters(0)  # for its states: a shard has no `init`
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(_shard_seed(config))
                    table.assign({"weight": slice_shard(draw_weight(config), placed.shard)})  # of the whole, on the CPU
            if group.size > 1:
                _change_tensors(table, self.device, functools.partial(group.broadcast, kind="initial values"))

    @torch.no_grad()
    def average_replicas(self) -> None:
        """Average the weights and states of the tables' replicas, in place; a collective of `groups.replicas`."""
        for _, table, _ in self.tables():
            _change_tensors(table, self.device, lambda tensor: _average(self.groups.replicas, tensor))

    def state(self, prefix: str = "") -> tuple[dict[str, Any], list[CacheCopies]]:
        """Return the state dict, and cached tables with the copies of their rows in it."""
        first_replica, shards = self.groups.replicas.rank == 0, defaultdict[tuple[str, str], list[LocalShard]](list)
        # The first rank with tables saves the step.
        saves_step = first_replica and self.groups.shards.rank == min(placed.shard.rank for placed in self.all_shards)
        counters = [tables.counters["step"] for tables in self.table_sets]
        steps = [LocalShard(step, is_primary=saves_step and not n) for n, step in enumerate(counters)]
        result: dict[str, Any] = {f"{prefix}step": TableShards((), torch.int64, steps)}
        if self.configs[0].placement == "server":
            for config in self.configs if not metadata_kind.get() else ():
                assert self.service is not None
                tensors: Mapping[str, Any] = self.service.tensors(config.name)
                result |= {f"{prefix}{config.name}.{name}": value for name, value in tensors.items()}
            return result, []
        # Shards of tables that are not dynamic, by table and tensor. A tensor with a value per row is the same on all
        # ranks with columns of these rows; the first block saves it.
        copies = list[CacheCopies]()
        for placed, table, _ in self.tables():
            if table.index.assigns_rows:
                continue
            shard, tensors = placed.shard, table.tensors()
            copies += [(table, tensors)] if table.rows.is_cached else []
            is_primary = first_replica and (placed.scheme != "replicated" or self.groups.world.rank == 0)
            for name, tensor in tensors.items():
                column = shard.first_column if tensor.dim() == 2 else 0
                saves = is_primary and (tensor.dim() == 2 or shard.first_column == 0)
                entry = LocalShard(tensor, shard.first_row, column, saves)
                shards[self.configs[placed.table].name, name].append(entry)
        result |= {f"{prefix}{name}": value for name, value in self._dynamic_state().items()}
        optimizer_states = self.optimizer.states
        for config in (config for config in self.configs if not config.is_dynamic):
            size, states = (config.num_embeddings, config.embedding_dim), row_states(config.dtype, optimizer_states)
            fields = [("weight", 2, config.dtype), *((s.name, 1 + s.per_element, torch.float32) for s in states)]
            for name, num_dims, dtype in fields:
                result[f"{prefix}{config.name}.{name}"] = TableShards(size[:num_dims], dtype, shards[config.name, name])
        return result, copies

    def _dynamic_state(self) -> dict[str, Any]:
        """Return the state of dynamic tables, with rows by rank, then by id; a collective if there are such tables."""
        result: dict[str, Any] = {}
        if metadata_kind.get() == "parameters" or not any(config.is_dynamic for config in self.configs):
            return result
        local_tables = {placed.table: table for placed, table in self.dynamic_tables()}
        num_rows = [local_tables[n].num_rows if n in local_tables else 0 for n in range(len(self.configs))]
        # Not over the group of ID exchanges, which a prefetch thread may be using.
        by_rank = self.groups.shards.all_gather(torch.tensor(num_rows, device=self.device), "rows")
        for index, config in enumerate(self.configs):
            if not config.is_dynamic:
                continue
            ranks = [placed.shard.rank for placed in self.all_shards if placed.table == index]  # by partition
            is_local, counts = index in local_tables, [int(by_rank[rank][index]) for rank in ranks]
            partition = ranks.index(self.groups.shards.rank) if is_local else 0
            # Without a local shard, a table on "meta" has the names and shapes.
            table: Any = local_tables[index] if is_local else make_table(config, self.optimizer.states, "meta")
            # Size of the global tensor, and offset of this rank's rows in it.
            for name, value in table.get_state().items():
                size, first, is_primary = list(value.shape), (sum(counts[:partition]), 0), True
                if name in ("clock", "seed"):
                    is_primary = partition == 0
                elif name in ("sketch", "added"):
                    size, first = table.index.sketch.shard_spec(name)
                elif name.startswith(("rows.", FALLBACK)):  # all storage slots of a table on disk; fallback rows
                    per_partition = size[0] // table.index.num_partitions
                    size[0], first = (per_partition * number for number in table.index.shard)
                    first = (first, 0)
                else:
                    size[0] = sum(counts)
                local_shards = [LocalShard(value, *first, is_primary)] if is_local else []
                shards = value.new_empty(size) if 0 in size else TableShards(size, value.dtype, local_shards)
                result[f"{config.name}.{name}"] = shards
        return result

    @torch.no_grad()
    def load(self, state_dict: Any, prefix: str) -> tuple[list[str], list[str], list[str]]:
        """Copy the local shards from full tensors or from `TableShards`. Return known keys, missing keys and problems.

        A collective if tables are dynamic or on embedding servers.
        """
        state, copies = self.state(prefix)
        dynamic = tuple(f"{prefix}{config.name}." for config in self.configs if config.is_dynamic)
        problems = self._load_dynamic(state_dict, prefix) if self.service is None else []
        for key in (key for key in state if key in state_dict and not key.startswith(dynamic)):
            try:
                if isinstance(state[key], TableShards):
                    state[key].copy_from(state_dict[key])
            except ValueError as error:
                problems.append(f"{key}: {error}")
        for table, tensors in copies:
            table.assign(tensors)
        missing = [key for key in state if key not in state_dict]
        if self.service is not None and not any(key.endswith((".ids", ".weight")) for key in missing):
            tensors = {key: state_dict[key] for key in state if key in state_dict}
            problems += self._load_servers(self.service, tensors, prefix)
        return list(state), missing, problems

    def _load_dynamic(self, state_dict: Any, prefix: str) -> list[str]:
        """Load dynamic tables from a state dict; return problems. A collective, like `_dynamic_state`."""
        problems, local_tables = [], {placed.table: table for placed, table in self.dynamic_tables()}
        for index, config in enumerate(self.configs):
            path, table = f"{prefix}{config.name}.", local_tables.get(index)
            if not config.is_dynamic or (ids := state_dict.get(f"{path}ids")) is None:
                continue
            num_owned = 0 if table is None else int(table.index.owns(_local_tensor(ids)).sum())
            owned = self.groups.shards.all_gather(torch.tensor([num_owned], device=self.device), "rows")
            if owned.sum() != ids.shape[0]:
                problems.append(f"{path}ids: these shards are of another plan; load a checkpoint, or full tensors")
                continue
            names = () if table is None else table.templates(0, state_dict, path)
            tensors = {name: state_dict[path + name] for name in names if path + name in state_dict}
            if table is not None and "weight" in tensors:
                try:
                    table.load_state({name: _local_tensor(value, name) for name, value in tensors.items()})
                except ValueError as error:
                    problems.append(str(error))
        return problems

    def _load_servers(self, service: TableService, tensors: Mapping[str, Tensor], prefix: str) -> list[str]:
        """Let embedding servers load the full tables of rank 0; return problems. A collective."""
        problems: list[str] = []
        for config in self.configs if self.groups.world.rank == 0 else ():
            table_prefix = f"{prefix}{config.name}."
            matches = {key: tensor for key, tensor in tensors.items() if key.startswith(table_prefix)}
            try:
                service.load(config.name, {key.removeprefix(table_prefix): tensor for key, tensor in matches.items()})
            except ValueError as error:
                problems.append(str(error))
        problems = self.groups.world.all_gather_object(problems)[0]
        service.discard_leases()
        return problems


def _local_tensor(value: Tensor, name: str = "") -> Tensor:
    """Return a tensor of a dynamic table with this rank's rows, or in full size if it has a shape of its partitions."""
    if not isinstance(value, TableShards):
        return value
    if name in ("sketch", "added") or name.startswith(FALLBACK):
        result = torch.empty(value.shape, dtype=value.dtype)
        for shard in value.shards:
            slice_shard(result, shard.rectangle).copy_(shard.tensor)
        return result
    return value.shards[0].tensor if value.shards else torch.empty(0, *value.shape[1:], dtype=value.dtype)


def _average(group: RankGroup, tensor: Tensor) -> None:
    """Replace `tensor` by its mean over ranks, added in their order, by chunks of rows."""
    rows_per_chunk = max(1, MAX_GATHER_BYTES // max(1, tensor[:1].numel() * tensor.element_size()))
    for chunk in tensor.split(rows_per_chunk):
        replicas = group.all_gather(chunk, "replicas").float()
        chunk.copy_(functools.reduce(torch.add, replicas) / group.size)


def _change_tensors(table: Table, device: torch.device, change: Callable[[Tensor], None]) -> None:
    """Change a table's weight and states in place; `change` gets them on `device`."""

    def change_fields(fields: Mapping[str, Tensor]) -> None:
        for tensor in fields.values():
            staged = tensor.to(device).contiguous()
            change(staged)
            tensor.copy_(staged)

    table.rows.update(table, change_fields)


def _shard_seed(config: TableConfig) -> int:
    """Return the seed of initial values: of the table's name and torch's seed, which `torch.manual_seed` sets.

    A value depends on it, on its row and on its column, so a rank draws its shard alone, and sharding changes no value.
    """
    return (config.seed ^ torch.initial_seed()) & (2**63 - 1)
