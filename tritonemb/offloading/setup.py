"""`te.offload`: parameters, gradients, optimizer states and activations of a model in host memory or on disk."""

import os
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tritonemb.nn.collections import FusedModule
from tritonemb.nn.tiled_linear import TiledLinear
from tritonemb.offloading.dispatch import ActivationStore, ModuleCalls, OffloadedTensor, is_offloaded, source_of
from tritonemb.offloading.gradients import check_caller, check_not_replicated
from tritonemb.offloading.optimizer import OffloadedOptimizer
from tritonemb.offloading.parameters import OffloadedParam, ParameterCache
from tritonemb.offloading.safetensors import PretrainedWeights
from tritonemb.offloading.shards import as_dtensor, check_memory, shard_bounds, slices_of, tensor_slices, to_local
from tritonemb.offloading.states import StatePlacement
from tritonemb.offloading.tiers import Arena, Tier, TierName, make_tier
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import TableSet
from tritonemb.utils import join_names, on_error

PIECE_ELEMENTS = 4096  # pieces of a parameter begin at multiples of it, which are whole pages in any dtype
SUB_GROUP_ELEMENTS = 16 << 20  # limit per sub-group: enough for a disk's full rate, little beside host memory
BUFFER_ELEMENT_BYTES = 14  # bytes per element in a buffer: two fp32 states, master weight, 16-bit weight
MIN_SUB_GROUPS = 8  # sub-groups that fit into the buffers, if parameters, states or gradients are on disk
Init = Callable[[nn.Module], object] | None
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def parse_bytes(value: int | str, name: str = "a budget") -> int:
    """Parse a number of bytes, or a string like "8GiB" or "500 MB"; ValueError for others."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        number, unit, binary = match.groups()
        steps = " KMGT".index(unit.upper() or " ")
        value = int(float(number) * (1024**steps if binary else 1000**steps))
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f'{name} must be a positive number of bytes, or a string like "8GiB", got {value!r}')
    return value


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    match = re.search(r"^MemAvailable: *([0-9]+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


def offload(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, params: TierName = "device", states: TierName = "device",
    grads: TierName = "device", activations: TierName = "device", path: Folders = None,
    budget: int | str | None = None, ratio: float = 0.0, device: torch.device | str | None = None, init: Init = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> tuple[nn.Module, OffloadedOptimizer]:  # fmt: skip
    """Offload a model's parameters, gradients, optimizer states and activations (ZeRO-Infinity, SC 2021).

    Tiers are the "device", "host" memory (CPU offload in ZeRO) and "disk" (NVMe). Losses and parameters are bitwise
    identical on all tiers, if the optimizer steps on the same device. For several ranks shard the model by
    `fully_shard` first; each rank then offloads its shards.

    Args:
        model: changed in place, and returned. Modules on the "meta" device are materialized one by one into the tier,
            from `checkpoint`, by `init` or their `reset_parameters`. Buffers that none of them sets are initialized by
            `_init_weights` of an enclosing module, such as a `transformers.PreTrainedModel`.
        optimizer: any element-wise `torch.optim` optimizer of the model's parameters. Its states are taken over, and it
            can no longer step.
        params: tier of parameters while unused. `model.state_dict()` copies them to host memory.
        states: tier of optimizer states, and of fp32 master weights of 16-bit parameters. Unless on the "device", the
            optimizer steps on the CPU.
        grads: tier of gradients from the backward to the step, where a parameter's is stored as soon as its backward
            ends; not in `.grad`. On the "device", they are in `.grad`, of offloaded parameters in host memory; or in
            the "host" tier if the states of parameters on a GPU are off it.
        activations: tier of tensors that autograd saves for the backward.
        path: folder of the swap file, for "disk", on a local disk; or several folders, on different disks, which are
            used round-robin.
        budget: bytes, or a string like "8GiB", of device memory for parameters in use, and of host memory for buffers
            of sub-groups on disk; by default a quarter of the free memory.
        ratio: share of the states that stays in memory with states="disk".
        device: compute device; by default that of the parameters, or for "meta" the current GPU or the CPU.
        init: `init(module)` initializes the parameters of one module, without its children; with `checkpoint` only
            those that it lacks.
        checkpoint: safetensors file of a pretrained model, or folder of such files in the layout of Hugging Face,
            loaded tensor by tensor. Floating-point values are cast to the model's dtype.

    Returns:
        The model, and the optimizer that replaces `optimizer`.

    Raises:
        ValueError: for other tiers, a budget that is too small for a layer, an optimizer that is not element-wise, or
            a checkpoint with other names, shapes or kinds of dtypes than the model, or damaged; nothing is changed.
        StorageError: the swap file cannot be created or is in use.
    """
    # Check the arguments.
    for name, value in (("params", params), ("states", states), ("grads", grads), ("activations", activations)):
        if value not in get_args(TierName):
            raise ValueError(f"{name} must be one of {get_args(TierName)}, got {value!r}")
    folders = [Path(folder) for folder in ((path,) if isinstance(path, str | os.PathLike) else path or ())]
    if "disk" in (params, states, grads, activations) and not folders:
        raise ValueError("offloading to disk needs a folder of the swap file: pass path=")
    if len({folder.absolute() for folder in folders}) < len(folders):
        raise ValueError(f"path= names a folder twice: {', '.join(map(str, folders))}")
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be between 0 and 1, got {ratio}")
    if isinstance(optimizer, OffloadedOptimizer) or getattr(model, "_offload", None) is not None:
        raise ValueError("the model or its optimizer is offloaded already")
    weights = None if checkpoint is None else PretrainedWeights(model, checkpoint)
    if weights is not None:
        weights.check_names(init is not None)
    loaded: set[Any] = set() if weights is None else {*weights.targets}
    compute_device = _device_of(model, device)
    if compute_device.type == "cuda" and states != "device" and params == grads == "device":
        grads = "host"  # where the optimizer steps
    check_not_replicated(model, params == grads == "device")
    # Split the budget into the arena and the buffers of sub-groups.
    budget_bytes = parse_bytes(budget) if budget is not None else available_bytes(compute_device) // 4
    arena_bytes = budget_bytes if states != "disk" else budget_bytes // 2
    if any(isinstance(m, FSDPModule) and m._get_fsdp_state()._is_root is not None for m in model.modules()):
        raise ValueError("a model sharded by fully_shard must be offloaded before its first forward")
    known = set(model.parameters())
    if unknown := [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in known]:
        raise ValueError(f"the model lacks {len(unknown)} of the optimizer's parameters, of shapes {unknown[:3]}")
    buffer_bytes = budget_bytes - (arena_bytes if params != "device" else 0) if states == "disk" else budget_bytes // 8
    elements = SUB_GROUP_ELEMENTS
    if "disk" in (params, states, grads):
        elements = min(elements, buffer_bytes // (MIN_SUB_GROUPS * BUFFER_ELEMENT_BYTES))
        elements = max(PIECE_ELEMENTS, elements // PIECE_ELEMENTS * PIECE_ELEMENTS)

    # Create tiers and the offloaded counterparts, which may raise; then move values, which changes the model.
    names = dict.fromkeys((params, states, grads, activations))
    tiers: dict[TierName, Tier] = {name: make_tier(name, compute_device, folders) for name in names if name != "device"}
    with on_error(lambda: [tier.close() for tier in tiers.values()]):
        arena = Arena(arena_bytes if params != "device" else 0, compute_device)
        calls = ModuleCalls(ParameterCache(arena), compute_device)
        move = ParameterMove(model, calls, tiers.get(params), elements, init, loaded)
        placement = StatePlacement(tiers.get(states), tiers.get(grads), compute_device, elements, buffer_bytes, ratio)
        offloaded_optimizer = OffloadedOptimizer(optimizer, move.offloaded, move.replacements, placement)
    plain_states = optimizer.state.copy()
    _disable(optimizer)  # the first change
    move.commit()
    if weights is not None:
        weights.load(model)
    offloaded_optimizer.load_plain_states(plain_states, move.replacements)
    if grads in tiers:
        _extend_zero_grad(model, offloaded_optimizer)
        model.register_forward_pre_hook(check_caller)
    if activations in tiers:
        excluded = [t for t in (*model.parameters(), *model.buffers()) if not is_offloaded(t)]
        store = ActivationStore(tiers[activations], compute_device, budget_bytes // 8, excluded)
        calls.pack = store.pack
        if any(isinstance(m, FSDPModule) for m in model.modules()):
            calls.on_enter = store.storages.clear  # weights are gathered into the same storage, with the same version
    if move.offloaded or activations in tiers:
        calls.register_hooks(model, move.offloaded)
    model._offload = calls.cache, tiers  # type: ignore[assignment]
    return model, offloaded_optimizer


@dataclass(frozen=True)
class OffloadReport:
    """Counters of offloading since `te.offload`.

    Attributes:
        moved: bytes read and written, by tier.
        arena_bytes, arena_peak: size of the arena, and its peak use.
        uses, waits: uses of parameters, and those that had to wait for a read.
        unexpected: uses in another order than the last time, which prefetch mispredicted.
    """

    moved: dict[str, tuple[int, int]]
    arena_bytes: int
    arena_peak: int
    uses: int
    waits: int
    unexpected: int


def report(model: nn.Module) -> OffloadReport:
    """Return the counters of an offloaded model; ValueError if it is not offloaded."""
    cache, tiers = _offloaded(model)
    moved: Any = {name: tuple(tier.bytes_moved) for name, tier in tiers.items()}
    return OffloadReport(moved, cache.arena.num_bytes, cache.arena.peak, cache.uses, cache.waits, cache.unexpected)


def close(model: nn.Module) -> None:
    """Wait for pending I/O, and remove the swap file. Model and optimizer are unusable afterwards."""
    for tier in _offloaded(model)[1].values():
        tier.close()


def _offloaded(model: nn.Module) -> tuple[ParameterCache, dict[TierName, Tier]]:
    state: Any = getattr(model, "_offload", None)
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not offloaded; pass the model that te.offload returned")
    return state


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    default = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return next((to_local(p).device for p in model.parameters() if not p.is_meta), default)


class ParameterMove:
    """Planned replacement of a model's parameters by offloaded ones; `commit` carries it out."""

    def __init__(
        self, model: nn.Module, calls: ModuleCalls, tier: Tier | None, elements: int, init: Init, loaded: set[Any]
    ) -> None:
        self.offloaded: dict[Any, OffloadedParam] = {}  # by parameter
        # By parameter of the model, the new parameters, each with its index in the old one.
        self.replacements: defaultdict[Any, list[tuple[Any, Any]]] = defaultdict(list)
        self._new_parameter: dict[Any, Any] = {}
        self._calls, self._init, self._initialized = calls, init, set[Any]()
        self._loaded = loaded  # parameters and buffers whose values a checkpoint has
        # Linear layers that would fill the arena are replaced by tiled ones.
        max_bytes, tiles = calls.cache.arena.num_bytes // 4, dict[Any, tuple[Any, Any]]()
        self._tiled_layers = list(_tiled_layers(model, max_bytes, tiles)) if tier is not None else []
        excluded: set[nn.Module] = {layer for _, _, layer, _ in self._tiled_layers}
        excluded |= {module for module in model.modules() if isinstance(module, Table | TableSet)}
        self._modules = [(name, module) for name, module in model.named_modules() if module not in excluded]
        for name, _, _, tiled in self._tiled_layers:
            self._modules += [(f"{name}.{inner}", module) for inner, module in tiled.named_modules() if inner]
        self._loaded |= {tile for tile, (parameter, _) in tiles.items() if parameter in self._loaded}
        # New parameters: offloaded, or on the device for those on "meta".
        fused = {p for m in model.modules() if isinstance(m, FusedModule) and m.optimizer for p in m.parameters()}
        check_memory(model, {*model.parameters()} - fused if tier is not None else set())
        self._initializers = {module: self._initializer(model, name, module) for name, module in self._modules}
        for name, module in self._modules:
            for attribute, p in module._parameters.items():
                if p is None or p in self._new_parameter or is_offloaded(p):
                    continue
                if tier is not None and p not in fused:
                    param = OffloadedParam(f"{name}.{attribute}".removeprefix("."), p, tier, calls.device, elements)
                    if param.sharded and to_local(p).is_meta and p not in self._loaded:
                        raise ValueError(
                            f"parameter {param.name!r} is a shard on the meta device; pass checkpoint= to te.offload, "
                            "or allocate and initialize the model first, by its to_empty"
                        )
                    if not param.sharded:
                        param.parameter = nn.Parameter(OffloadedTensor(param, calls), requires_grad=p.requires_grad)
                    self.offloaded[param.parameter], self._new_parameter[p] = param, param.parameter
                elif to_local(p).is_meta:
                    tensor = torch.empty_like(p, device=calls.device)
                    self._new_parameter[p] = nn.Parameter(tensor, requires_grad=p.requires_grad)
        for old, new in self._new_parameter.items():
            if new is not old:  # share the dicts of hooks, so that their handles still remove them
                with torch._C.DisableTorchFunctionSubclass():
                    (self.offloaded[new].leaf if new in self.offloaded else new)._backward_hooks = old._backward_hooks
                    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
            parameter, index = tiles.get(old, (old, ...))
            self.replacements[parameter].append((new, index))

    def commit(self) -> None:
        """Move the values to their tier, module by module, and replace the parameters."""
        for _, module in self._modules:
            self._materialize(module)
            for attribute, p in [*module._parameters.items()]:
                if p is not None and p in self._new_parameter:
                    self._move(p)
                    if not isinstance(p, DTensor):
                        setattr(module, attribute, self._new_parameter[p])
            if any(is_offloaded(p) for p in module._parameters.values()):
                module.register_state_dict_post_hook(_fill_state_dict)
                # Copy values with `assign=True`, too: the optimizer steps these parameters, not assigned ones.
                module.register_load_state_dict_pre_hook(lambda *args: args[3].update(assign_to_params_buffers=False))
        for _, (parent, attribute), layer, tiled in self._tiled_layers:
            setattr(parent, attribute, tiled.train(layer.training))
            for p in layer.parameters():
                if not p.is_meta:
                    p.data = torch.empty(0, dtype=p.dtype, device=p.device)

    def _initializer(self, model: nn.Module, name: str, module: nn.Module) -> Init:
        """Return the function that sets a module's own tensors on "meta"; None if a checkpoint has all of them."""
        tensors = [*module._parameters.items(), *module._buffers.items()]
        unset = {key: t for key, t in tensors if t is not None and to_local(t).is_meta and t not in self._loaded}
        if not unset or self._init is not None:
            return self._init if unset else None
        if (reset := getattr(module, "reset_parameters", None)) is not None:
            return lambda _: reset()
        if not unset.keys() & module._parameters.keys():
            owners = (m for path, m in model.named_modules() if f".{name}.".startswith(f".{path}.".replace("..", ".")))
            initializers: list[Any] = [m._init_weights for m in owners if hasattr(m, "_init_weights")]
            if initializers and _sets_buffers(initializers[-1], module, [*unset]):
                return initializers[-1]  # of the innermost
        raise ValueError(
            f"module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters; pass init= "
            f"to te.offload, which sets {join_names(map(repr, unset), 5)}, or checkpoint= with pretrained weights"
        )

    def _materialize(self, module: nn.Module) -> None:
        """Allocate a module's own parameters and buffers that are on "meta", and set those that no checkpoint has."""
        for attribute, p in [*module._parameters.items()]:
            if p is not None and to_local(p).is_meta and p not in self._initialized:
                new = self._new_parameter[p]
                if new in self.offloaded and p in self._loaded:
                    continue  # it needs no memory
                temporary = nn.Parameter(torch.empty_like(p, device="cpu")) if is_offloaded(new) else new
                self._new_parameter[temporary] = new
                self._initialized.add(p)
                setattr(module, attribute, temporary)
        for attribute, buffer in [*module._buffers.items()]:
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = torch.empty_like(buffer, device=self._calls.device)
        if (initialize := self._initializers[module]) is not None:
            with torch.no_grad():
                initialize(module)

    def _move(self, p: Any) -> None:
        """Write a parameter to its tier, unless a checkpoint has its values, and free its memory."""
        new = self._new_parameter[p]
        if p in self._initialized or (offloaded := self.offloaded.get(new)) is None:
            return
        if p not in self._loaded:
            offloaded.write(to_local(p))
        self._initialized.add(p)
        if offloaded.sharded:  # `new` is `p`: let FSDP2 read an `OffloadedTensor`
            if to_local(p).is_meta:  # a tensor cannot change its device
                values = torch.empty((), dtype=p.dtype, device=self._calls.device).expand(offloaded.shard_shape)
                torch.utils.swap_tensors(p, nn.Parameter(as_dtensor(values, p), requires_grad=p.requires_grad))
            shard = new._local_tensor
            shard.untyped_storage().resize_(0)
            new._local_tensor = OffloadedTensor(offloaded, self._calls, shard.device)
        else:
            new.grad = p.grad
            if p._base is None:  # else it is a view of a tiled layer's parameter
                p.data = torch.empty(0, dtype=p.dtype, device=p.device)


def _sets_buffers(initialize: Callable[[nn.Module], object], module: nn.Module, names: list[str]) -> bool:
    """Return whether a function writes buffers of a module, by a trial with others; the module stays as it is."""
    buffers: dict[str, Any] = dict(module._buffers)
    trial = {name: torch.empty_like(buffers[name], device="cpu") for name in names}
    module._buffers.update(trial)
    try:
        with torch.no_grad():
            initialize(module)
        return all(module._buffers[name] is not buffer or buffer._version for name, buffer in trial.items())
    finally:
        module._buffers.update(buffers)


def _fill_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace offloaded parameters in a state dict by copies in host memory."""
    for attribute, p in module._parameters.items():
        if is_offloaded(p) and prefix + attribute in state:
            state[prefix + attribute] = as_dtensor(source_of(p).read(), p)


def _tiled_layers(
    model: nn.Module, max_bytes: int, tiles: dict[Any, tuple[Any, Any]]
) -> Iterator[tuple[str, tuple[nn.Module, str], nn.Linear, TiledLinear]]:
    """Yield a `TiledLinear` for each linear layer above `max_bytes`: path, parent and name, layer, replacement.

    `tiles` gets each tile's parameter and its index there.
    """
    parameters = [p for module in model.modules() for p in module._parameters.values()]
    layers = [layer for module in model.modules() for layer in module._modules.values()]
    for path, parent in [*model.named_modules()]:
        for name, layer in [*parent.named_children()]:
            if type(layer) is not nn.Linear or layer.weight.nbytes <= max_bytes or isinstance(layer.weight, DTensor):
                continue
            if sum(p is layer.weight for p in parameters) > 1 or sum(child is layer for child in layers) > 1:
                continue  # tied: other modules use the full weight
            hooks = [value for key, value in vars(layer).items() if key.endswith("_hooks") or key == "forward"]
            if any(hooks) or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in layer.parameters()):
                continue  # they get full tensors
            # Splits: of the inputs only if a row exceeds the limit.
            max_elements = max(max_bytes // layer.weight.element_size(), 1)
            in_splits = -(-layer.in_features // max_elements)
            out_splits = min(layer.out_features, -(-layer.weight.numel() // in_splits // max_elements))
            splits: Any = {"in_splits": in_splits, "out_splits": out_splits}
            splits |= {"bias": layer.bias is not None, "device": "meta", "dtype": layer.weight.dtype}
            tiled = TiledLinear(layer.in_features, layer.out_features, **splits)
            # Tiles are views of the layer's parameters until they are moved.
            for tile, tensor_slice in tensor_slices(tiled):
                parameter, index = getattr(layer, tensor_slice.name), tensor_slice.slices
                if not parameter.is_meta:
                    torch.utils.swap_tensors(tile, nn.Parameter(parameter.detach()[index]))
                tiles[tile.requires_grad_(parameter.requires_grad)] = parameter, index
            yield f"{path}.{name}".removeprefix("."), (parent, name), layer, tiled


def _disable(optimizer: torch.optim.Optimizer) -> None:
    """Make a step of the original optimizer raise, and free its states."""

    def step(*_: Any, **__: Any) -> None:
        raise RuntimeError("this optimizer was offloaded; step the one that te.offload returned")

    optimizer.__dict__["step"] = step
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []


def _extend_zero_grad(model: nn.Module, optimizer: OffloadedOptimizer) -> None:
    """Make the model's `zero_grad` discard stored gradients, too: Hugging Face's Trainer calls no other."""
    model_ref, optimizer_ref = weakref.ref(model), weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        owner, stepped = model_ref(), optimizer_ref()
        assert owner is not None
        type(owner).zero_grad(owner, set_to_none)
        if stepped is not None:
            stepped.zero_grad(set_to_none)

    model.__dict__["zero_grad"] = zero_grad


@contextmanager
def gather_parameters(module: nn.Module, modify: bool = False) -> Iterator[nn.Module]:
    """Gather the full parameters of a module and its children in host memory, for the duration of the block.

    Args:
        modify: write the parameters back at the end of the block, unless it raises.

    A collective if `fully_shard` sharded the model; all ranks must make the same changes.
    """
    parameters = [(owner, name, p) for owner in module.modules() for name, p in owner._parameters.items()]
    locations: list[tuple[nn.Module, str, Any]] = [location for location in parameters if is_offloaded(location[2])]
    gathered: dict[Any, nn.Parameter] = {}
    for owner, name, p in locations:
        if p not in gathered:
            values: Any = as_dtensor(source_of(p).read(), p)
            values = values.full_tensor() if isinstance(values, DTensor) else values
            gathered[p] = nn.Parameter(values, requires_grad=p.requires_grad)
        setattr(owner, name, gathered[p])
    try:
        yield module
        if modify:
            for p, new_parameter in gathered.items():
                values = new_parameter.detach()
                source_of(p).write(values[slices_of(*shard_bounds(p))] if isinstance(p, DTensor) else values)
    finally:
        for owner, name, p in locations:
            setattr(owner, name, p)
