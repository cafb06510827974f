"""`te.offload`: parameters, optimizer states and activations of a model in host memory or on disk."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tritonemb.nn.tiled_linear import TiledLinear
from tritonemb.offloading.activations import ActivationStore
from tritonemb.offloading.optimizer import OffloadedOptimizer
from tritonemb.offloading.parameters import Engine, Slot, is_offloaded, like, local, local_part, rectangle, source_of
from tritonemb.offloading.tiers import Arena, TierName, make_tier
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import TableSet
from tritonemb.utils import on_error

PIECE = 4096  # elements; pieces of a parameter begin at multiples of it, which are whole pages
SUB_GROUP = 16 << 20  # elements that are stepped at once, at most
ELEMENT_BYTES = 14  # in a buffer of a sub-group: two fp32 states, the master weight and the 16-bit one
LEAST_SUB_GROUPS = 8  # that buffers hold, if parameters or states are on disk
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def parse_bytes(value: int | str, name: str = "a budget") -> int:
    """Bytes of a number, or of a text like "8GiB" or "500 MB"; ValueError for others."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        number, unit, binary = found.groups()
        steps = " KMGT".index(unit.upper() or " ")
        value = int(float(number) * (1024**steps if binary else 1000**steps))
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f'{name} must be a positive number of bytes, or text like "8GiB", got {value!r}')
    return value


def available_bytes(device: torch.device) -> int:
    """Memory of a device that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def offload(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, params: TierName = "device", states: TierName = "device",
    activations: TierName = "device", path: Folders = None, budget: int | str | None = None,
    ratio: float = 0.0, device: torch.device | str | None = None, init: Callable[[nn.Module], object] | None = None,
) -> tuple[nn.Module, OffloadedOptimizer]:  # fmt: skip
    """Offload a model's parameters, optimizer states and activations (ZeRO-Infinity: Rajbhandari et al., SC 2021).

    Each goes to the "device", to "host" memory (what ZeRO calls CPU) or to "disk" (NVMe). Losses and parameters are
    bitwise identical wherever they are, as long as the step runs on the same device. Over several ranks the model is
    to be sharded by `fully_shard` first; then each rank offloads its shards.

    Args:
        model: changed in place, and returned. What is on the "meta" device is materialised module by module into its
            tier, by `init` or the module's `reset_parameters`.
        optimizer: any element-wise `torch.optim` optimizer of its parameters. Its states go on; it cannot step any
            longer.
        params: where parameters are while nobody uses them. `model.state_dict()` has them in host memory.
        states: where optimizer states are, with fp32 master weights of 16-bit parameters. Unless on the "device", they
            are stepped on the CPU, and gradients are in host memory.
        activations: where tensors that autograd saves for the backward are.
        path: folder of the swap file; for "disk". On a disk of this node; or several folders, on different disks, which
            are used in turn.
        budget: bytes, or text like "8GiB", of device memory for parameters in use, and of host memory for what is
            stepped from disk; a quarter of what is free if not given.
        ratio: share of the states that stays in memory, though `states` says "disk".
        device: that computes; that of the parameters, or for those on "meta" the current GPU or the CPU.
        init: `init(module)` gives a module's own parameters their values.

    Returns:
        The model, and the optimizer to use instead of the given one.

    Raises:
        ValueError: for other tiers, a budget that is too small for a layer, or an optimizer that is not element-wise.
        StorageError: the swap file cannot be made or is in use.
    """
    for name, value in (("params", params), ("states", states), ("activations", activations)):
        if value not in get_args(TierName):
            raise ValueError(f"{name} must be one of {get_args(TierName)}, got {value!r}")
    folders = [Path(each) for each in ((path,) if isinstance(path, str | os.PathLike) else path or ())]
    if "disk" in (params, states, activations) and not folders:
        raise ValueError("path= must name a folder for what is offloaded to disk")
    if len({each.absolute() for each in folders}) < len(folders):
        raise ValueError(f"path= names a folder twice: {', '.join(map(str, folders))}")
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be between 0 and 1, got {ratio}")
    if isinstance(optimizer, OffloadedOptimizer) or getattr(model, "_offload", None) is not None:
        raise ValueError("the model or its optimizer is offloaded already")
    on = _device_of(model, device)
    given = parse_bytes(budget) if budget is not None else available_bytes(on) // 4
    arena_bytes = given if states != "disk" else given // 2
    if any(isinstance(each, FSDPModule) and each._get_fsdp_state()._is_root is not None for each in model.modules()):
        raise ValueError("a model sharded by fully_shard must be offloaded before its first forward")
    known = set(model.parameters())
    strange = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in known]
    if strange:
        raise ValueError(f"the optimizer has {len(strange)} parameters that the model has not, of shapes {strange[:3]}")
    most = given - (arena_bytes if params != "device" else 0) if states == "disk" else given // 8
    elements = SUB_GROUP
    if "disk" in (params, states):
        elements = max(PIECE, min(SUB_GROUP, most // (LEAST_SUB_GROUPS * ELEMENT_BYTES)) // PIECE * PIECE)

    names = dict.fromkeys((params, states, activations))
    tiers: dict[str, Any] = {name: make_tier(name, on, folders) for name in names if name != "device"}
    with on_error(lambda: _close(tiers)):
        engine = Engine(Arena(arena_bytes if params != "device" else 0, on), tiers.get(params), on)
        moved = ParameterMove(model, engine, elements, on, params != "device", init)
        stepped = OffloadedOptimizer(optimizer, moved.slots, moved.now, tiers.get(states), on, elements, most, ratio)
    old = optimizer.state.copy()
    _retire(optimizer)  # nothing was changed until here
    moved.commit()
    stepped.take_states(old, moved.now)
    if activations in tiers:
        kept = [each for each in (*model.parameters(), *model.buffers()) if not is_offloaded(each)]
        store = ActivationStore(tiers[activations], on, given // 8, kept)
        engine.pack, engine.unpack = store.pack, store.unpack
    if moved.slots or activations in tiers:
        engine.watch(model, moved.slots)
    model._offload = engine, tiers  # type: ignore[assignment]
    return model, stepped


@dataclass(frozen=True)
class OffloadReport:
    """What offloading has done so far. Bytes by tier, read and written; of the arena its size and the most in use.

    `waits` of the `uses` of parameters had to wait, `unexpected` came in another order than the last time.
    """

    moved: dict[str, tuple[int, int]]
    arena_bytes: int
    arena_peak: int
    uses: int
    waits: int
    unexpected: int


def report(model: nn.Module) -> OffloadReport:
    """What offloading of a model has done so far; ValueError if it is not offloaded."""
    engine, tiers = _offloaded(model)
    moved = {name: (tier.moved[0], tier.moved[1]) for name, tier in tiers.items()}
    arena = engine.arena
    return OffloadReport(moved, arena.num_bytes, arena.peak, engine.uses, engine.waits, engine.unexpected)


def close(model: nn.Module) -> None:
    """Wait for what is in flight and remove the swap file. Neither model nor optimizer can be used after."""
    _close(_offloaded(model)[1])


def _close(tiers: dict[str, Any]) -> None:
    for tier in tiers.values():
        tier.close()


def _offloaded(model: nn.Module) -> tuple[Engine, dict[str, Any]]:
    found: Any = getattr(model, "_offload", None)
    if found is None:
        raise ValueError(f"this {type(model).__name__} is not a model that te.offload has returned")
    return found


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = next((local(p).device for p in model.parameters() if not p.is_meta), None)
    if found is not None:
        return found
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class ParameterMove:
    """The parameters of a model as they will be when it is offloaded; `commit` makes them so.

    `now` says what a parameter of the model becomes: other parameters, and which part of it each is.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, elements: int, device: torch.device, offloads: bool,
        init: Callable[[nn.Module], object] | None,
    ) -> None:  # fmt: skip
        self.slots: dict[Any, Slot] = {}
        self.now: dict[Any, list[tuple[Any, Any]]] = {}
        self._becomes: dict[Any, Any] = {}
        self._device, self._init, self._written = device, init, set[Any]()
        self._tiled = list(_tiled_layers(model, engine.arena.num_bytes // 4, self.now)) if offloads else []
        replaced = {id(layer) for _, _, layer, _ in self._tiled}
        self._modules: list[tuple[str, nn.Module]] = []
        for name, module in model.named_modules():
            if id(module) not in replaced and not isinstance(module, Table | TableSet):
                self._modules.append((name, module))
        for name, _, _, tiled in self._tiled:
            self._modules += [(f"{name}.{inner}", module) for inner, module in tiled.named_modules() if inner]
        for name, module in self._modules:
            if self._init is None and _on_meta(module) and not hasattr(module, "reset_parameters"):
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters; "
                    "give te.offload init="
                )
            for attribute, p in module._parameters.items():
                if p is None or p in self._becomes or is_offloaded(p):
                    continue
                if offloads:
                    slot = Slot(engine, f"{name}.{attribute}".removeprefix("."), p, elements)
                    self.slots[slot.parameter], self._becomes[p] = slot, slot.parameter
                elif local(p).is_meta:
                    made = torch.empty_like(p, device=device)
                    self._becomes[p] = nn.Parameter(made, requires_grad=p.requires_grad)
        tiles = {id(each) for parts in self.now.values() for each, _ in parts}
        for parts in self.now.values():
            parts[:] = [(self._becomes.get(each, each), part) for each, part in parts]
        self.now.update({was: [(new, ...)] for was, new in self._becomes.items() if id(was) not in tiles})

    def commit(self) -> None:
        """Move the values, module by module, to where they will be."""
        for _, module in self._modules:
            self._materialise(module)
            for attribute, p in [*module._parameters.items()]:
                if p is not None and p in self._becomes:
                    self._move(p)
                    if not isinstance(p, DTensor):
                        setattr(module, attribute, self._becomes[p])
            if any(is_offloaded(p) for p in module._parameters.values()):
                module.register_state_dict_post_hook(_with_values)
        for _, (parent, attribute), layer, tiled in self._tiled:
            setattr(parent, attribute, tiled.train(layer.training))
            for p in layer.parameters():
                if not p.is_meta:
                    p.data = torch.empty(0, dtype=p.dtype, device=p.device)

    def _materialise(self, module: nn.Module) -> None:
        """Give a module's own parameters and buffers that are on "meta" memory and values."""
        if not _on_meta(module):
            return
        for attribute, p in [*module._parameters.items()]:
            if p is not None and local(p).is_meta and p not in self._written:
                new = self._becomes[p]
                made = nn.Parameter(torch.empty_like(p, device="cpu")) if is_offloaded(new) else new
                self._becomes[made] = new
                self._written.add(p)
                setattr(module, attribute, made)
        for attribute, buffer in [*module._buffers.items()]:
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = torch.empty_like(buffer, device=self._device)
        reset: Any = getattr(module, "reset_parameters", None)
        with torch.no_grad():
            reset() if self._init is None else self._init(module)

    def _move(self, p: Any) -> None:
        new = self._becomes[p]
        slot = self.slots.get(new)
        if p in self._written or slot is None:
            return
        slot.write(local(p), from_outside=False)
        self._written.add(p)
        if slot.sharded:
            slot.hide_shard()
        else:
            new.grad = p.grad
            if p._base is None:  # else it is a part of a layer that was tiled
                p.data = torch.empty(0, dtype=p.dtype, device=p.device)


def _on_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(each is not None and local(each).is_meta for each in own)


def _with_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A state dict has the values of offloaded parameters, in host memory."""
    for attribute, p in module._parameters.items():
        if is_offloaded(p) and prefix + attribute in state:
            state[prefix + attribute] = like(source_of(p).read(), p)


def _tiled_layers(
    model: nn.Module, most: int, now: dict[Any, list[tuple[Any, Any]]]
) -> Iterator[tuple[str, tuple[nn.Module, str], nn.Linear, TiledLinear]]:
    """For linear layers with a weight of more than `most` bytes of their own: a `TiledLinear` with tiles of fewer."""
    places = [p for module in model.modules() for p in module._parameters.values()]
    layers = [layer for module in model.modules() for layer in module._modules.values()]
    for path, parent in [*model.named_modules()]:
        for name, layer in [*parent.named_children()]:
            if type(layer) is not nn.Linear or layer.weight.nbytes <= most or isinstance(layer.weight, DTensor):
                continue
            if sum(p is layer.weight for p in places) > 1 or sum(each is layer for each in layers) > 1:
                continue  # tied: others use all of it
            limit = max(most // layer.weight.element_size(), 1)
            in_splits = -(-layer.in_features // limit)
            out_splits = min(layer.out_features, -(-layer.weight.numel() // in_splits // limit))
            splits: Any = {"in_splits": in_splits, "out_splits": out_splits}
            biased, dtype = layer.bias is not None, layer.weight.dtype
            tiled = TiledLinear(layer.in_features, layer.out_features, biased, device="meta", dtype=dtype, **splits)
            for tile in tiled.grid():
                rows = slice(tile.first_row, tile.first_row + tile.layer.out_features)
                columns = slice(tile.first_column, tile.first_column + tile.layer.in_features)
                for attribute, part in (("weight", (rows, columns)), ("bias", rows)):
                    whole = getattr(layer, attribute)
                    if getattr(tile.layer, attribute) is not None:
                        values = torch.empty_like(whole[part]) if whole.is_meta else whole.detach()[part]
                        made = nn.Parameter(values, requires_grad=whole.requires_grad)
                        setattr(tile.layer, attribute, made)
                        now.setdefault(whole, []).append((made, part))
            yield f"{path}.{name}".removeprefix("."), (parent, name), layer, tiled


def _retire(optimizer: torch.optim.Optimizer) -> None:
    def step(*_: Any, **__: Any) -> None:
        raise RuntimeError("this optimizer was offloaded; step the one that te.offload returned")

    optimizer.__dict__["step"] = step
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []


@contextmanager
def gather_parameters(module: nn.Module, modify: bool = False) -> Iterator[nn.Module]:
    """Within the block a module and those in it have whole parameters in host memory.

    Args:
        modify: what the block changes in them is written back, if it does not raise.

    Ranks of a model that `fully_shard` sharded call it together, and change the same.
    """
    places: list[tuple[nn.Module, str, Any]] = [
        (each, name, p) for each in module.modules() for name, p in each._parameters.items() if is_offloaded(p)
    ]
    whole: dict[Any, nn.Parameter] = {}
    for each, name, p in places:
        if p not in whole:
            values: Any = like(source_of(p).read(), p)
            values = values.full_tensor() if isinstance(values, DTensor) else values
            whole[p] = nn.Parameter(values, requires_grad=p.requires_grad)
        setattr(each, name, whole[p])
    try:
        yield module
        if modify:
            for p, changed in whole.items():
                values = changed.detach()
                if isinstance(p, DTensor):
                    values = values[rectangle(*local_part(p))]
                source_of(p).write(values)
    finally:
        for each, name, p in places:
            setattr(each, name, p)
