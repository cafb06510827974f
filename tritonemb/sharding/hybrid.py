"""`HybridParallel`: tables sharded over ranks (model parallel), other layers data parallel, or sharded by FSDP2."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from tritonemb.comm.async_tensor import ordinary
from tritonemb.comm.data_parallel import GraphDataParallel
from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision, graph_order
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.nn import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.collections import TableCollection
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.embedding_bag_collection import ShardedEmbeddingBagCollection
from tritonemb.sharding.embedding_collection import ShardedEmbeddingCollection
from tritonemb.sharding.placement import ShardGroups
from tritonemb.sharding.plan import ShardingPlan
from tritonemb.sharding.planner import plan_job
from tritonemb.sharding.sharded_tensor import TableShards
from tritonemb.tables.cached_server_table import ParallelModel
from tritonemb.tables.lookup import PrefetchedFeatures
from tritonemb.utils import join_names, split_evenly

Dense = Literal["ddp", "fsdp"]


class HybridParallel(ParallelModel):
    """A model whose fused embedding collections are sharded over the ranks of a job; other layers are on each rank.

    Every rank calls it with its own samples, in step with the others. Gradients of tables and other layers are averaged
    over ranks: with a loss that is a mean over as many samples on each rank, it trains as the model itself does on all.

    Args:
        model: with `EmbeddingBagCollection` or `EmbeddingCollection` modules that have a fused optimizer; changed in
            place. If made on the "meta" device, parameters are drawn here: those of a table by torch's seed and the
            table's name, the same however it is sharded; those of other layers by their `reset_parameters`. Otherwise
            values are copied; of layers that every rank has, rank 0's.
        plan: how tables are sharded, for the ranks of one replica, on which tiers, and in how many copies. If not
            given, `te.plan` makes one for tables that stay on their tiers; on rank 0 `plan.report` says why.
        mesh: of all ranks; one dimension, or two: ("replicate", "shard"), whose first counts copies of the tables.
        dense: "ddp" for `DistributedDataParallel`, or "fsdp" for `fully_shard`, which shards the other layers too.
        exchange: quantized communication of vectors and gradients.
        device: of the tables, and of layers made on "meta"; by default the model's own, or for "meta" the current CUDA
            device if the job can use it, else the CPU.
        local_world_size: ranks of a node; what torchrun says by default.
        average_every: with several copies of the tables, their gradients are gathered in every step (1); or the copies
            train alone and are averaged every so many steps, when `end_step` is called (local SGD).
        timeout: of collectives between tables; torch's default if not given.
        pipeline: compute a batch in so many sub-batches, whose exchanges have all begun before the first is computed,
            for a model that reads its embeddings at once. Its results have a row for each sample. Tables are updated
            once, by the whole batch; other layers add the gradients of sub-batches, so their last bits differ. For
            pooled collections, and not with "fsdp".
        batch_size: samples of a rank, for the plan that is made if none is given; 1,024 if not given.
        ids_over: the network that ids cross: that of the "cpu", or of the tables' "device". NCCL is not safe in two
            threads at once: then, on GPUs, `prefetch` in the thread that trains, and use `Trainer(pipeline=False)`.

    `module` is the model, `plan` says how its tables are sharded, `groups` has the process groups.

    Raises:
        ValueError: the model has no collection to shard, or plan and ranks do not fit together.

    `torch.distributed` must be initialized in a job of several processes: torchrun, and
    `torch.distributed.init_process_group("cpu:gloo,cuda:nccl")`. One process needs nothing, and no plan.
    """

    def __init__(
        self, model: nn.Module, plan: ShardingPlan | None = None, mesh: DeviceMesh | None = None, *,
        dense: Dense = "ddp", exchange: ExchangePrecision | None = None, device: torch.device | str | None = None,
        local_world_size: int | None = None, average_every: int = 1, timeout: timedelta | None = None,
        ids_over: Literal["cpu", "device"] = "cpu", pipeline: int = 1, batch_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if dense not in get_args(Dense):
            raise ValueError(f"dense must be one of {get_args(Dense)}, got {dense!r}")
        if ids_over not in ("cpu", "device"):
            raise ValueError(f"ids_over must be 'cpu' or 'device', got {ids_over!r}")
        for name, least in (("average_every", average_every), ("pipeline", pipeline)):
            if least < 1:
                raise ValueError(f"{name} must be at least 1, got {least}")
        kinds = EmbeddingBagCollection | EmbeddingCollection
        fused = [module for module in model.modules() if isinstance(module, kinds) and module.optimizer is not None]
        found = [collection for collection in fused if not collection.table_set.on_servers]
        if not fused:
            raise ValueError(
                "the model has no embedding collection with a fused optimizer; give its te.nn.EmbeddingBagCollection "
                "an optimizer, or wrap a model without one in DistributedDataParallel"
            )
        tables = [config for collection in found for config in collection.configs]
        sequences = [each for each in found if isinstance(each, EmbeddingCollection)]
        if pipeline > 1 and (dense == "fsdp" or sequences):
            raise ValueError(f'pipeline={pipeline} is for pooled collections and dense="ddp"; leave it at 1')
        if plan is not None and mesh is None and local_world_size is None:
            local_world_size = plan.local_world_size
        if plan is not None and mesh is None and plan.copies > 1:
            shape, names = (plan.copies, plan.world_size), ("replicate", "shard")
            mesh = init_device_mesh(_device_for(model, device).type, shape, mesh_dim_names=names)
        self.groups = ShardGroups.create(mesh, local_world_size, timeout, ids_over == "device")
        if self.groups.replicas.size > 1 and any(config.is_dynamic for config in tables):
            raise ValueError("dynamic tables have no replicas; give a mesh of one dimension")
        size, node = self.groups.shards.size, self.groups.node.size
        table_device = _device_for(model, device)
        job = fused[0].optimizer, self.groups.world, size, node, table_device, batch_size
        self.plan = plan_job([config for each in fused for config in each.configs], *job) if plan is None else plan
        named = {config.name for module in model.modules() if isinstance(module, kinds) for config in module.configs}
        if unknown := sorted(self.plan.tables.keys() - named):
            raise ValueError(f"the plan has tables that the model does not have: {join_names(unknown)}")
        if (self.plan.world_size, self.plan.local_world_size) != (size, node):
            raise ValueError(
                f"the plan is for {self.plan.world_size} ranks, {self.plan.local_world_size} a node; the tables have "
                f"{size}, {node} a node"
            )
        if away := [t.name for t in tables if self.plan.apply(t).placement == "server"]:
            raise ValueError(
                f"the plan has the table {away[0]!r} on embedding servers; make the model with plan.apply(table)"
            )
        self.exchange = ExchangePrecision() if exchange is None else exchange
        self.average_every, self._steps = average_every, 0
        self._table_device = table_device
        sharded = self._sharded(found)
        self.collections: tuple[ShardedCollection, ...] = tuple(sharded.values())
        self._on_servers = [collection for collection in fused if collection.table_set.on_servers]
        self.module = _replace(model, sharded)
        _materialise(self.module, table_device)
        self.pipeline = pipeline
        computed = self.module if pipeline == 1 else _SubBatches(self.module, self.collections, pipeline)
        self._computed = (computed,)
        self._called = (_parallel(computed, dense, mesh, table_device, self.groups.world),)
        self._in_graphs, self._some = GraphDataParallel(self.groups.world, computed), torch.zeros(1)

    def _sharded(self, collections: Sequence[Any]) -> dict[Any, ShardedCollection]:
        options = self.plan, self.groups, self.exchange, self._table_device, self.average_every == 1
        pooled, unpooled = ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
        kinds = {each: pooled if isinstance(each, EmbeddingBagCollection) else unpooled for each in collections}
        return {each: kind(each, *options) for each, kind in kinds.items()}

    def shard_server_tables(self) -> None:
        """Shard collections on embedding servers, too: each rank holds the rows of its shards while it uses them.

        A collective, before servers are attached.
        """
        if self.groups.replicas.size > 1:
            raise ValueError("tables on embedding servers have no replicas; give a mesh of one dimension")
        sharded, self._on_servers = self._sharded(self._on_servers), []
        self.collections += tuple(sharded.values())
        self.module = _replace(self.module, sharded)
        called: Any = self._called[0]
        if self._computed[0] in sharded:
            self._computed = self._called = (self.module,)
        elif isinstance(called, DistributedDataParallel):
            called._assign_modules_buffers()  # without those of the collections

    @property
    def group(self) -> RankGroup:
        """All ranks of the job."""
        return self.groups.world

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for this rank's samples. Features may be given as `prefetch` returns them.

        Compiled with prefetched features it is one graph, unless `dense` is "fsdp"; else ids are exchanged before it.
        """
        if self.pipeline > 1:
            whole = KeyedJaggedTensor | PrefetchedFeatures
            args, kwargs = tree_map_only(whole, self.prefetch, (args, kwargs), lambda value: isinstance(value, whole))
        if torch.compiler.is_compiling() and not isinstance(self.module, FSDPModule):
            called: Any = self._called[0]
            graph_order[:] = [self._some.clone(), self._some.clone()]  # whatever a call that failed has left
            syncs = isinstance(called, DistributedDataParallel) and called.require_backward_grad_sync
            averaged = syncs and torch.is_grad_enabled()
            parameters = self._in_graphs.parameters(called.modules_buffers) if averaged else {}
            result = torch.func.functional_call(self._computed[0], parameters, args, kwargs)
            graph_order.clear()
            return result
        return tree_map_only(Tensor, ordinary, self._called[0](*args, **kwargs))

    def prefetch(self, features: Features | PrefetchedFeatures, assign: bool = True) -> PrefetchedFeatures:
        """Exchange the ids of a batch, and prefetch its rows, before `forward`; all ranks, in the same order.

        Another thread may do so for the next batch while this one is computed. New ids of dynamic tables get rows now
        unless gradients are disabled, or, without `assign`, in the forward.
        """
        if isinstance(features, PrefetchedFeatures):
            return features
        keys, values, offsets, weights = unpack_features(features)
        batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
        for each in self.collections[:1]:
            batch = each.convert_batch(batch)
        found: dict[int, Any] = {id(each): each.prefetch(batch, assign) for each in self.collections}
        others = [collection.table_set for collection in self._on_servers]
        return PrefetchedFeatures(batch, found | {id(each): each.prefetch(batch) for each in others})

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block leave gradients of the other layers on their ranks, for accumulation."""
        called = self._called[0]
        with ExitStack() as stack:
            if isinstance(called, DistributedDataParallel):
                stack.enter_context(called.no_sync())
            elif isinstance(called, FSDPModule):
                called.set_requires_gradient_sync(False)
                stack.callback(called.set_requires_gradient_sync, True)
            yield

    def end_step(self) -> None:
        """To be called after each step where `average_every` is not 1: averages copies of the tables if it is time."""
        self._steps += 1
        if self.average_every > 1 and self.groups.replicas.size > 1 and self._steps % self.average_every == 0:
            for collection in self.collections:
                collection.average_replicas()

    def saturated(self) -> int:
        """Elements that were too large for the exchanges' codecs so far, on this rank. Waits for the device."""
        return sum(collection.saturated() for collection in self.collections)

    def table_weights(self) -> dict[str, Tensor]:
        """The whole tables' weights by path, of which this rank has some shards."""
        prefixed = self._by_prefix()
        return {prefix + name: weight for prefix, each in prefixed for name, weight in each.table_weights().items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The keys of the model itself; tables are `TableShards`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Whole tensors, or what `state_dict` returned; every rank is to be given the same.

        Raises:
            RuntimeError: for keys that are missing or unexpected, if `strict`, for values of other shapes, and for
                tables of another dtype or plan; nothing has been changed then.
        """
        own = self.state_dict()
        of_dynamic = [f"{prefix}{c.name}." for prefix, each in self._by_prefix() for c in each.configs if c.is_dynamic]
        _check_state(own, state_dict, strict, tuple(of_dynamic))
        given = OrderedDict((key, _as_distributed(own.get(key), value)) for key, value in state_dict.items())
        if hasattr(state_dict, "_metadata"):
            given._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return self.module.load_state_dict(given, strict=strict, assign=assign)

    def _by_prefix(self) -> list[tuple[str, ShardedCollection]]:
        """Sharded collections, each with the prefix of its tables' keys."""
        modules = self.module.named_modules()
        return [(f"{path}." if path else "", each) for path, each in modules if isinstance(each, ShardedCollection)]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train tables and other layers, or freeze them; a collection of `collections` has its own `requires_grad_`."""
        for module in self.module.modules():
            if isinstance(module, ShardedCollection | TableCollection):
                module.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the other layers, under their names in the model."""
        return self.module.named_parameters(*args, **kwargs)


class _SubBatches(nn.Module):
    """Calls a model once for each sub-batch, with parts of what has a row for each sample."""

    def __init__(self, model: nn.Module, collections: Sequence[Any], number: int) -> None:
        super().__init__()
        self.model, self._collections, self._number = model, tuple(collections), number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given, structure = tree_flatten((args, kwargs), lambda value: isinstance(value, PrefetchedFeatures))
        features = [value for value in given if isinstance(value, PrefetchedFeatures)]
        if len(features) != 1:
            raise ValueError(f"pipeline={self._number} needs one argument with features, got {len(features)}")
        sizes = split_evenly(features[0].stride(), self._number)
        by_part = zip(*(self._parts(value, sizes) for value in given), strict=True)
        calls = [tree_unflatten(list(part), structure) for part in by_part]
        return tree_map(_joined, *(self.model(*args, **kwargs) for args, kwargs in calls))

    def _parts(self, value: Any, sizes: list[int]) -> Sequence[Any]:
        if isinstance(value, PrefetchedFeatures):
            outputs = zip(*(each.look_up(value.of(each), len(sizes)) for each in self._collections), strict=True)
            by_id = [dict(zip(map(id, self._collections), of_part, strict=True)) for of_part in outputs]
            return [value.sub_batch(size, found) for size, found in zip(sizes, by_id, strict=True)]
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == sum(sizes)
        return value.split(sizes) if has_rows else [value] * len(sizes)


def _joined(*parts: Any) -> Any:
    if not all(isinstance(part, Tensor) and part.dim() for part in parts):
        raise TypeError(f"a model in sub-batches returns tensors with a row for each sample, got {parts[0]!r}")
    return torch.cat(parts)


def _check_state(own: Mapping[str, Any], given: Mapping[str, Any], strict: bool, dynamic: tuple[str, ...]) -> None:
    missing, unexpected = [key for key in own if key not in given], [key for key in given if key not in own]
    problems = [f"it lacks {missing}"] if strict and missing else []
    problems += [f"the model does not have {unexpected}"] if strict and unexpected else []
    for key, here in own.items():
        if key.startswith(dynamic):
            continue  # whose shapes change as rows come: a table checks its own
        if key in given and isinstance(here, TableShards):
            problem = here.why_not_loadable(given[key])
            problems += [] if problem is None else [f"{key}: {problem}"]
        elif key in given and isinstance(here, Tensor) and getattr(given[key], "shape", None) != here.shape:
            problems.append(f"{key} has shape {list(here.shape)}, got {list(getattr(given[key], 'shape', []))}")
    if problems:
        raise RuntimeError("this state cannot be loaded: " + "; ".join(problems))


def _as_distributed(here: Any, given: Any) -> Any:
    if isinstance(here, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
        return distribute_tensor(given.to(here.device), here.device_mesh, here.placements, src_data_rank=None)
    return given


def _device_for(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    own = next(model.parameters()).device
    if own.type != "meta":
        return own
    backend = torch.distributed.get_backend_config() if torch.distributed.is_initialized() else "nccl"
    on_cuda = torch.cuda.is_available() and "nccl" in str(backend)
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def _replace(model: nn.Module, sharded: dict[Any, ShardedCollection]) -> nn.Module:
    if model in sharded:
        return sharded[model]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in sharded:
                setattr(parent, name, sharded[child])
    return model


def _materialise(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            if not callable(getattr(module, "reset_parameters", None)):
                raise ValueError(
                    f"{type(module).__name__} was made on the meta device and has no reset_parameters() to fill it; "
                    "make it on a device, or give it one"
                )
            module.to_empty(device=device, recurse=False).reset_parameters()  # type: ignore[operator]


def _parallel(
    model: nn.Module, dense: Dense, mesh: DeviceMesh | None, device: torch.device, world: RankGroup
) -> nn.Module:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if world.size == 1 or not trained:
        return model
    if dense == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    ranks = init_device_mesh(device.type, (world.size,)) if mesh is None or mesh.ndim > 1 else mesh
    fully_shard(model, mesh=ranks)
    return model
