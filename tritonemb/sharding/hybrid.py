"""`HybridParallel`: model-parallel (sharded) tables, with data-parallel dense layers, by DDP or FSDP2."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from tritonemb.comm.async_tensor import to_ordinary
from tritonemb.comm.gradient_exchange import GraphDataParallel, GraphShards
from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision, graph_order
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.nn import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.collections import TableCollection
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.embedding_collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from tritonemb.sharding.placement import ShardGroups
from tritonemb.sharding.plan import ShardingPlan
from tritonemb.sharding.planner import plan_job
from tritonemb.sharding.sharded_tensor import TableShards
from tritonemb.tables.server_table import ParallelModel
from tritonemb.tables.table_set import PrefetchedFeatures
from tritonemb.types import TableConfig
from tritonemb.utils import join_names, split_evenly

# Groups of DDP, kept alive by this list. If a group is destroyed before its model, DDP's reducer would drop the last
# reference to it: it holds the GIL while it joins the group's threads, and a thread of gloo may wait for the GIL.
_ddp_groups: list[Any] = []

Dense = Literal["ddp", "fsdp"]


class HybridParallel(ParallelModel):
    """Model whose fused embedding collections are sharded over the ranks of a job; dense layers are data parallel.

    Every rank calls it with its own samples, in the same order of batches. Gradients of tables and dense layers are
    averaged over ranks: if the loss is a mean over samples and all ranks have equally many, training equals that of the
    unsharded model on the global batch.

    Args:
        model: contains `EmbeddingBagCollection` or `EmbeddingCollection` modules with a fused optimizer; changed in
            place. If created on the "meta" device, parameters are initialized here: tables by torch's seed and their
            name, independently of the sharding, other layers by their `reset_parameters`. Otherwise values are copied;
            those of dense layers from rank 0.
        plan: shardings, tiers and replicas of the tables, for the ranks of one replica. By default `te.plan` makes one
            that keeps tables on their tiers; on rank 0 `plan.report` explains it.
        mesh: device mesh of all ranks; one dimension, or two, ("replicate", "shard"): replicas of the tables, shards.
        dense: "ddp" for `DistributedDataParallel`, or "fsdp" for `fully_shard`, which shards the dense layers, too.
        exchange: quantized communication: by default outputs are sent as FP16, gradients as BF16.
        device: device of the tables, and of layers on "meta"; by default the model's device, or for "meta" the current
            CUDA device if the job can use it, else the CPU.
        local_world_size: ranks per node; torchrun's value by default.
        average_every: with several replicas of the tables, gather their gradients in every step (1), or train replicas
            independently and average them every `average_every` steps, in `end_step` (local SGD).
        timeout: timeout of the tables' collectives; torch's default if None.
        pipeline: number of sub-batches per batch, all of whose exchanges start before the first is computed. For models
            that look up all embeddings at once, and whose outputs have a row per sample. Tables are updated once per
            batch; dense layers add the gradients of sub-batches, so their last bits differ. Only for pooled
            collections, and not with "fsdp".
        batch_size: samples per rank and batch, for the default plan; 1,024 if None.
        ids_over: network of the ID exchange: of the "cpu" (gloo), or of the tables' "device". By default "device" if
            the process group has another backend for it, such as NCCL, and all tables are on the device. NCCL does not
            allow concurrent use by two threads: then call `prefetch` in the training thread, as the trainer does.

    Attributes: `module` is the model, `plan` its sharding plan, `group` all ranks, `groups` the process groups;
        `prefetches_in_thread`: whether another thread may call `prefetch` during a step.

    Raises:
        ValueError: the model has no collection to shard, or the plan does not fit the ranks.

    A job of several processes must initialize `torch.distributed`: torchrun, and
    `torch.distributed.init_process_group("cpu:gloo,cuda:nccl")`. One process needs neither that nor a plan.
    """

    def __init__(
        self, model: nn.Module, plan: ShardingPlan | None = None, mesh: DeviceMesh | None = None, *,
        dense: Dense = "ddp", exchange: ExchangePrecision | None = None, device: torch.device | str | None = None,
        local_world_size: int | None = None, average_every: int = 1, timeout: timedelta | None = None,
        ids_over: Literal["cpu", "device"] | None = None, pipeline: int = 1, batch_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if dense not in get_args(Dense):
            raise ValueError(f"dense must be one of {get_args(Dense)}, got {dense!r}")
        if ids_over not in (None, "cpu", "device"):
            raise ValueError(f"ids_over must be 'cpu' or 'device', got {ids_over!r}")
        for name, value in (("average_every", average_every), ("pipeline", pipeline)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        # Collections to shard: those with a fused optimizer, unless their tables are on embedding servers.
        collections, fused = _collections_in(model)
        local_collections = [collection for collection in fused if not collection.table_set.on_servers]
        tables = [config for collection in local_collections for config in collection.configs]
        if pipeline > 1 and (dense == "fsdp" or any(isinstance(c, EmbeddingCollection) for c in local_collections)):
            raise ValueError(f'pipeline={pipeline} is for pooled collections and dense="ddp"; leave it at 1')
        # Process groups.
        if plan is not None and mesh is None and local_world_size is None:
            local_world_size = plan.local_world_size
        if plan is not None and mesh is None and plan.copies > 1:
            shape, names = (plan.copies, plan.world_size), ("replicate", "shard")
            mesh = init_device_mesh(_device_for(model, device).type, shape, mesh_dim_names=names)
        # Ids cross the network of the device. Rows of other tiers take longer to prefetch than ids: a thread does both.
        table_device, configs = _device_for(model, device), [config for c in fused for config in c.configs]
        on_device = all((config if plan is None else plan.apply(config)).placement == "device" for config in configs)
        is_gloo = RankGroup.world().backend_of(table_device) in ("", "gloo")
        over_device = ids_over == "device" or (ids_over is None and on_device and not is_gloo)
        self.prefetches_in_thread = is_gloo or not over_device
        self.groups = ShardGroups.create(mesh, local_world_size, timeout, over_device)
        self.group = self.groups.world
        if self.groups.replicas.size > 1 and any(config.is_dynamic for config in tables):
            raise ValueError("dynamic tables have no replicas; pass a mesh of one dimension")
        # The plan, which must fit the model and the ranks.
        size = self.groups.shards.size, self.groups.node.size
        job = fused[0].optimizer, self.group, *size, table_device, batch_size
        self.plan = plan_job(configs, *job) if plan is None else plan
        _check_plan(self.plan, {config.name for c in collections for config in c.configs}, tables, *size)
        # Sharded collections, then the dense layers: the called module wraps the computed one in DDP or FSDP2. Tuples
        # keep both from being submodules.
        self.average_every, self.pipeline, self.steps = average_every, pipeline, 0
        self._options = self.plan, self.groups, exchange or ExchangePrecision(), table_device, average_every == 1
        sharded_collections = _shard(local_collections, self._options)
        self.collections: tuple[ShardedCollection, ...] = tuple(sharded_collections.values())
        self._server_collections = [collection for collection in fused if collection.table_set.on_servers]
        self.module, self.training = _replace_modules(model, sharded_collections), model.training
        _materialize(self.module, table_device)
        compute_module = self.module if pipeline == 1 else _SubBatches(self.module, self.collections, pipeline)
        self._called_module = (_data_parallel(compute_module, dense, mesh, table_device, self.group),)
        self.averages_gradients = self.group.size > 1 and isinstance(self._called_module[0], DistributedDataParallel)
        graph_parallel = GraphDataParallel
        if isinstance(compute_module, FSDPModule):
            compute_module, graph_parallel = _WithoutHooks(compute_module), GraphShards
        self._compute_module = (compute_module,)
        self._graph_data_parallel = graph_parallel(self.group, compute_module)
        self._graph_input = torch.zeros(1)

    def shard_server_tables(self) -> None:
        """Shard collections on embedding servers, too: a rank leases the rows of its shards while it uses them.

        A collective, before servers are attached.
        """
        if self.groups.replicas.size > 1:
            raise ValueError("tables on embedding servers have no replicas; pass a mesh of one dimension")
        sharded, self._server_collections = _shard(self._server_collections, self._options), []
        self.collections += tuple(sharded.values())
        self.module = _replace_modules(self.module, sharded)
        called_module: Any = self._called_module[0]
        if self._compute_module[0] in sharded:
            self._compute_module = self._called_module = (self.module,)
        elif isinstance(called_module, DistributedDataParallel):
            called_module._assign_modules_buffers()  # without the collections' buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for this rank's samples; features may be those of `prefetch`, compiled to one graph.

        ValueError for an id of this rank that is out of range, RuntimeError on the others, before any table changes.
        """
        if self.pipeline > 1:
            kinds = KeyedJaggedTensor | PrefetchedFeatures
            args, kwargs = tree_map_only(kinds, self.prefetch, (args, kwargs), lambda value: isinstance(value, kinds))
        if torch.compiler.is_compiling():
            called_module: Any = self._called_module[0]
            graph_order[:] = [self._graph_input.clone(), self._graph_input.clone()]  # overwrites those of a failed call
            parallel: Any = self._graph_data_parallel
            parameters: dict[str, Tensor] = {}
            syncs = isinstance(called_module, DistributedDataParallel) and called_module.require_backward_grad_sync
            if isinstance(parallel, GraphShards):
                parameters = parallel.parameters([])
            elif syncs and torch.is_grad_enabled():
                parameters = parallel.parameters(called_module.modules_buffers)
            output = torch.func.functional_call(self._compute_module[0], parameters, args, kwargs)
            graph_order.clear()
            return output
        return tree_map_only(Tensor, to_ordinary, self._called_module[0](*args, **kwargs))

    def prefetch(self, features: Features | PrefetchedFeatures, assign: bool = True) -> PrefetchedFeatures:
        """Exchange the ids of a batch, and prefetch its rows, before `forward`; on all ranks, in the same order.

        Another thread may prefetch the next batch, unless ids cross NCCL. With `assign`, new ids of dynamic tables get
        rows now (unless gradients are disabled), and rows on servers are pulled now; without, the forward does both.
        """
        if isinstance(features, PrefetchedFeatures):
            return features
        keys, values, offsets, weights = unpack_features(features)
        batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
        if self.collections:
            batch = self.collections[0].convert_batch(batch)
        prefetched: dict[int, Any] = {id(module): module.prefetch(batch, assign) for module in self.collections}
        server_tables = [collection.table_set for collection in self._server_collections]
        pulled = {id(tables): tables.prefetch(batch) if assign else (batch, None) for tables in server_tables}
        return PrefetchedFeatures(batch, prefetched | pulled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not synchronize gradients of dense layers in backward passes of this block, for accumulation."""
        called_module = self._called_module[0]
        with ExitStack() as stack:
            if isinstance(called_module, DistributedDataParallel):
                stack.enter_context(called_module.no_sync())
            elif isinstance(called_module, FSDPModule):
                called_module.set_requires_gradient_sync(False)
                self._graph_data_parallel.syncs = False
                stack.callback(called_module.set_requires_gradient_sync, True)
                stack.callback(setattr, self._graph_data_parallel, "syncs", True)
            yield

    def end_step(self) -> None:
        """End a step: average the replicas of the tables after every `average_every` steps."""
        self.steps += 1
        if self.average_every > 1 and self.groups.replicas.size > 1 and self.steps % self.average_every == 0:
            for collection in self.collections:
                collection.local_shards.average_replicas()

    def saturated(self, only_gradients: bool = False) -> int:
        """Return how many elements on this rank have exceeded the range of the exchanges' codecs; synchronizes."""
        return sum(collection.saturated(only_gradients) for collection in self.collections)

    def table_weights(self) -> dict[str, Tensor]:
        """Return the sharded weight of each table by path."""
        weights = [(prefix, module.table_weights()) for prefix, module in _named_collections(self.module)]
        return {prefix + name: weight for prefix, by_name in weights for name, weight in by_name.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state under the keys of the unsharded model; tables are `TableShards`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors, or the values of `state_dict`; the same on every rank.

        Raises:
            RuntimeError: for missing or unexpected keys, if `strict`, for values of other shapes, for tables of another
                dtype or plan, and in a block of `accumulate`; nothing is changed.
            ValueError: for `assign` with several ranks: gradients of assigned parameters would not be averaged.
        """
        if assign and self.group.size > 1:
            raise ValueError("assign=True would replace the parameters whose gradients the ranks average; omit it")
        for collection in self.collections:
            collection.accumulator.check_closed("load_state_dict()")
        current = self.state_dict()
        configs = [(prefix, config) for prefix, module in _named_collections(self.module) for config in module.configs]
        dynamic = tuple(f"{prefix}{config.name}." for prefix, config in configs if config.is_dynamic)
        _check_state(current, state_dict, strict, dynamic)
        converted = OrderedDict((key, _to_dtensor(current.get(key), value)) for key, value in state_dict.items())
        if hasattr(state_dict, "_metadata"):
            converted._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return self.module.load_state_dict(converted, strict=strict, assign=assign)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze tables and dense layers; see `requires_grad_` of a single collection in `collections`."""
        for module in self.module.modules():
            if isinstance(module, ShardedCollection | TableCollection):
                module.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of the dense layers, under their names in the model."""
        return self.module.named_parameters(*args, **kwargs)


def _collections_in(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Collections of a model, and those with a fused optimizer; ValueError if there is none."""
    collections = [m for m in model.modules() if isinstance(m, EmbeddingBagCollection | EmbeddingCollection)]
    fused = [collection for collection in collections if collection.optimizer is not None]
    if not fused:
        raise ValueError(
            "the model has no embedding collection with a fused optimizer; construct its te.nn.EmbeddingBagCollection "
            "with an optimizer, or wrap a model without one in DistributedDataParallel"
        )
    return collections, fused


def _shard(collections: Sequence[Any], options: tuple[Any, ...]) -> dict[Any, ShardedCollection]:
    pooled, sequence = ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
    types = [pooled if isinstance(module, EmbeddingBagCollection) else sequence for module in collections]
    return {module: kind(module, *options) for module, kind in zip(collections, types, strict=True)}


def _named_collections(model: nn.Module) -> list[tuple[str, ShardedCollection]]:
    """Sharded collections, with the prefixes of their state-dict keys."""
    modules = [(path, m) for path, m in model.named_modules() if isinstance(m, ShardedCollection)]
    return [(f"{path}." if path else "", module) for path, module in modules]


def _check_plan(
    plan: ShardingPlan, names: set[str], tables: Sequence[TableConfig], world_size: int, local_world_size: int
) -> None:
    """Raise ValueError unless a plan fits the ranks, and the tables of a model; `tables` are not on servers."""
    if unknown := sorted(plan.tables.keys() - names):
        raise ValueError(f"the plan has tables that the model does not have: {join_names(unknown)}")
    if (plan.world_size, plan.local_world_size) != (world_size, local_world_size):
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, {plan.local_world_size} per node; the tables have {world_size}, "
            f"{local_world_size} per node"
        )
    if on_servers := [table.name for table in tables if plan.apply(table).placement == "server"]:
        raise ValueError(
            f"the plan has the table {on_servers[0]!r} on embedding servers; make the model with plan.apply(table)"
        )


class _WithoutHooks(nn.Module):
    """Module whose call skips the hooks of the model, since those of FSDP2 do not trace; see `GraphShards`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class _SubBatches(nn.Module):
    """Model that runs once per sub-batch; features and tensors with a row per sample are split."""

    def __init__(self, model: nn.Module, collections: Sequence[Any], num_sub_batches: int) -> None:
        super().__init__()
        self.model, self._collections, self._num_sub_batches = model, tuple(collections), num_sub_batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, structure = tree_flatten((args, kwargs), lambda value: isinstance(value, PrefetchedFeatures))
        features = [value for value in arguments if isinstance(value, PrefetchedFeatures)]
        if len(features) != 1:
            raise ValueError(f"pipeline={self._num_sub_batches} needs one argument with features, got {len(features)}")
        sizes = split_evenly(features[0].stride(), self._num_sub_batches)
        sub_batches = zip(*(self._split(value, sizes) for value in arguments), strict=True)
        calls = [tree_unflatten(list(sub_batch), structure) for sub_batch in sub_batches]
        return tree_map(_concat_outputs, *(self.model(*args, **kwargs) for args, kwargs in calls))

    def _split(self, value: Any, sizes: list[int]) -> Sequence[Any]:
        if isinstance(value, PrefetchedFeatures):
            outputs = [collection.look_up(value.of(collection), len(sizes)) for collection in self._collections]
            ids = [id(collection) for collection in self._collections]
            by_sub_batch = [dict(zip(ids, pooled, strict=True)) for pooled in zip(*outputs, strict=True)]
            return [value.sub_batch(size, pooled) for size, pooled in zip(sizes, by_sub_batch, strict=True)]
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == sum(sizes)
        return value.split(sizes) if has_rows else [value] * len(sizes)


def _concat_outputs(*outputs: Any) -> Any:
    if not all(isinstance(output, Tensor) and output.dim() for output in outputs):
        raise TypeError(f"a model with pipeline > 1 must return tensors with a row per sample, got {outputs[0]!r}")
    return torch.cat(outputs)


def _check_state(current: Mapping[str, Any], loaded: Mapping[str, Any], strict: bool, dynamic: tuple[str, ...]) -> None:
    missing, unexpected = [key for key in current if key not in loaded], [key for key in loaded if key not in current]
    problems = [f"it lacks {missing}"] if strict and missing else []
    problems += [f"the model does not have {unexpected}"] if strict and unexpected else []
    # Shapes of dynamic tables depend on the number of ids; the tables check them.
    for key in (key for key in current if key in loaded and not key.startswith(dynamic)):
        tensor, value = current[key], loaded[key]
        if isinstance(tensor, TableShards):
            problems += [f"{key}: {problem}"] if (problem := tensor.why_not_loadable(value)) else []
        elif isinstance(tensor, Tensor) and getattr(value, "shape", None) != tensor.shape:
            problems.append(f"{key} has shape {list(tensor.shape)}, got {list(getattr(value, 'shape', []))}")
    if problems:
        raise RuntimeError("this state cannot be loaded: " + "; ".join(problems))


def _to_dtensor(current: Any, value: Any) -> Any:
    if isinstance(current, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
        return distribute_tensor(value.to(current.device), current.device_mesh, current.placements, src_data_rank=None)
    return value


def _device_for(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    model_device = next(model.parameters()).device
    if model_device.type != "meta":
        return model_device
    backend = torch.distributed.get_backend_config() if torch.distributed.is_initialized() else "nccl"
    on_cuda = torch.cuda.is_available() and "nccl" in str(backend)
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


_HOOK_PREFIXES = ("_forward", "_backward", "_is_full_backward_hook")  # of a module's attributes with hooks of its calls


def _replace_modules(model: nn.Module, sharded: dict[Any, ShardedCollection]) -> nn.Module:
    """Put sharded collections in the places of others, with their mode and the hooks of their calls."""
    for collection, replacement in sharded.items():
        hooks = {name: value for name, value in vars(collection).items() if name.startswith(_HOOK_PREFIXES)}
        vars(replacement).update(hooks, training=collection.training)
    if model in sharded:
        return sharded[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # with all names of a module, unlike named_children
            if child in sharded:
                setattr(parent, name, sharded[child])
    return model


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate and initialize what is on the meta device, children before parents; shared parameters stay shared."""
    allocated: dict[Tensor, Tensor] = {}
    parents = [module for module in model.modules() if not _has_meta(module, False) and _has_meta(module, True)]
    for module in model.modules():
        if _has_meta(module, False):
            if not callable(getattr(module, "reset_parameters", None)):
                raise ValueError(
                    f"{type(module).__name__} is on the meta device and has no reset_parameters() to initialize it; "
                    "create it on a device, or define reset_parameters()"
                )
            if type(module)._apply is nn.Module._apply:
                _allocate(module, device, allocated)
            else:  # a table
                module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]
    for module in reversed(parents):
        getattr(module, "reset_parameters", lambda: None)()


def _has_meta(module: nn.Module, recurse: bool) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(recurse), *module.buffers(recurse)))


def _allocate(module: nn.Module, device: torch.device, allocated: dict[Tensor, Tensor]) -> None:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is None or not tensor.is_meta:
                continue
            if tensor not in allocated:
                empty = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                allocated[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            tensors[name] = allocated[tensor]  # type: ignore[assignment]


def _data_parallel(
    model: nn.Module, dense: Dense, mesh: DeviceMesh | None, device: torch.device, world: RankGroup
) -> nn.Module:
    trains = world.size > 1 and any(parameter.requires_grad for parameter in model.parameters())
    if trains and dense == "ddp":
        _ddp_groups.append(dist.group.WORLD)
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for tensor in (*model.parameters(), *model.buffers()) if world.size > 1 else ():  # DDP does this
        world.broadcast(values := tensor.detach().contiguous(), kind="initial values")
        tensor.detach().copy_(values)
    if trains:
        fully_shard(model, mesh=init_device_mesh(device.type, (world.size,)) if mesh is None or mesh.ndim > 1 else mesh)
    return model
