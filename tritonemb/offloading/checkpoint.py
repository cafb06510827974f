"""Checkpoints of offloaded models by `torch.distributed.checkpoint`, and safetensors, streamed from and into the tiers.

A checkpoint is what `dcp.save({"model": ..., "optim": ...})` writes of the state dicts of
`torch.distributed.checkpoint`'s `get_state_dict`, so it loads into plain and sharded models, other numbers of ranks and
other tiers, and back. Beside its files stands `checksums.json`, by which damage is found before anything is loaded.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tritonemb.nn.tiled_linear import TiledLinear
from tritonemb.offloading.optimizer import OffloadedOptimizer
from tritonemb.offloading.parameters import is_offloaded, local, local_part, rectangle, replaced, source_of
from tritonemb.offloading.sub_groups import MASTER
from tritonemb.storage import checkpoint as files
from tritonemb.storage.checkpoint import FORMAT, METADATA, checkpoint_errors, size_and_checksum
from tritonemb.storage.io import sync
from tritonemb.utils import atomic_write, on_error, require, seal

BLOCK_BYTES = 64 << 20  # read and written at once
WRITING, CHECKSUMS = ".writing-", "checksums.json"


class Block(NamedTuple):
    """Whole rows of a part of a tensor on this rank: their place in the whole, and in the part, whose elements
    `read(begin, end)` and `write(begin, values)` read and write."""

    offset: tuple[int, ...]
    size: torch.Size
    begin: int
    read: Callable[[int, int], Tensor]
    write: Callable[[int, Tensor], None]


class StoredTensor(Tensor):
    """A parameter or a state whose values are read and written block by block; it has the shape of the whole."""

    blocks: dict[tuple[int, ...], Block]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, blocks: list[Block]) -> "StoredTensor":
        make: Any = Tensor._make_wrapper_subclass
        made: StoredTensor = make(cls, shape, dtype=dtype, device="cpu")
        made.blocks = {each.offset: each for each in blocks}
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} cannot work on a tensor of a checkpoint; load it into a model")

    # What torch.distributed.checkpoint asks; it knows these names.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, shard = TensorProperties(dtype=self.dtype), WriteItemType.SHARD
        chunks = [TensorWriteData(chunk, properties, self.shape) for chunk in self.__create_chunk_list__()]
        return [WriteItem(MetadataIndex(fqn, each.chunk.offsets), shard, tensor_data=each) for each in chunks]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(b.offset), b.size) for b in self.blocks.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        block = self._block(index)
        self._current = block.read(block.begin, block.begin + block.size.numel()).view(block.size)
        return self._current

    def commit(self, index: MetadataIndex) -> None:
        """Write the block that `__get_tensor_shard__` has returned last."""
        block = self._block(index)
        block.write(block.begin, self._current.reshape(-1))

    def _block(self, index: MetadataIndex) -> Block:
        assert index.offset is not None
        return self.blocks[tuple(index.offset)]


class LoadPlanner(files.CheckpointPlanner):
    """Writes what was read to its tier."""

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        found = self.state_dict[read_item.dest_index.fqn]
        if isinstance(found, StoredTensor):
            found.commit(read_item.dest_index)


class StoredPlace(NamedTuple):
    """A parameter's name and shape in a state dict, and the part of it that it is: a tile, or a rank's shard."""

    name: str
    shape: torch.Size
    offset: tuple[int, ...]
    size: torch.Size
    is_tile: bool = False

    @property
    def fqn(self) -> str:
        """As a checkpoint names it, whether or not modules are compiled."""
        return self.name.replace("_orig_mod.", "")

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the part in the whole."""
        return rectangle(self.size, self.offset)

    def stored(self, dtype: torch.dtype, read: Any, write: Any) -> list[Block]:
        """Blocks of rows; `read(begin, end)` and `write(begin, values)` are of elements of this rank's part."""
        if 0 in self.size:
            return []
        if not self.size:
            return [Block((), torch.Size(), 0, read, write)]
        width = torch.Size(self.size[1:]).numel()
        step = max(1, BLOCK_BYTES // (width * dtype.itemsize))
        blocks = []
        for first in range(0, self.size[0], step):
            size = torch.Size((min(step, self.size[0] - first), *self.size[1:]))
            blocks.append(Block((self.offset[0] + first, *self.offset[1:]), size, first * width, read, write))
        return blocks


def places(model: nn.Module) -> Iterator[tuple[Any, StoredPlace]]:
    """Every parameter and persistent buffer, once for each of its names."""
    tiles: dict[Any, tuple[str, torch.Size, tuple[int, ...]]] = {}
    others: list[tuple[str, Any]] = [*model.named_parameters(remove_duplicate=False)]
    for prefix, module in model.named_modules():
        for layer, row, column in module.grid() if isinstance(module, TiledLinear) else ():
            whole = torch.Size((module.out_features, module.in_features))
            tiles[layer.weight] = f"{prefix}.weight", whole, (row, column)
            if layer.bias is not None:
                tiles[layer.bias] = f"{prefix}.bias", whole[:1], (row,)
        names = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        others += [(f"{prefix}.{name}", module._buffers[name]) for name in names if module._buffers[name] is not None]
    for name, p in others:
        size, at = local_part(p)
        key, whole, origin = tiles.get(p, (name, torch.Size(p.shape), (0,) * p.dim()))
        at = tuple(a + b for a, b in zip(origin, at, strict=True))
        yield p, StoredPlace(key.removeprefix("."), whole, at, size, p in tiles)


def _is_mine(p: Any) -> bool:
    """Whether this rank saves its part of a parameter: of replicas the first does."""
    if not isinstance(p, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinates: Any = p.device_mesh.get_coordinate() or []
    return all(at == 0 for at, placement in zip(coordinates, p.placements, strict=True) if placement.is_replicate())


def _model_and_states(model: nn.Module, optimizer: OffloadedOptimizer, for_saving: bool) -> dict[str, Any]:
    """What a checkpoint has, by name; on this rank, what it saves or loads."""
    parts: dict[str, tuple[torch.Size, torch.dtype, list[Block]]] = {}
    found: dict[str, Any] = {}

    def add(key: str, place: StoredPlace, dtype: torch.dtype, read: Any, write: Any, mine: bool) -> None:
        _, _, blocks = parts.setdefault(key, (place.shape, dtype, []))
        blocks += place.stored(dtype, read, write) if mine or not for_saving else []

    unseen = {p for group in optimizer.param_groups for p in group["params"]}
    for p, place in places(model):
        mine = _is_mine(p)
        if not isinstance(p, nn.Parameter):
            found[f"model.{place.fqn}"] = p
        elif is_offloaded(p):
            slot = source_of(p)
            add(f"model.{place.fqn}", place, slot.dtype, slot.read_range, slot.write_range, mine)
        else:
            values = local(p).detach()

            def read(begin: int, end: int, values: Tensor = values) -> Tensor:
                return values.reshape(-1)[begin:end].cpu()

            def write(begin: int, new: Tensor, values: Tensor = values) -> None:
                replaced(values, begin, new.to(values.device))

            add(f"model.{place.fqn}", place, p.dtype, read, write, mine)
        if p in unseen and (optimizer.is_ready(p) or not for_saving):
            unseen.discard(p)  # a tied parameter has a name for each of its places, and states by the first
            small, arrays = optimizer.layout_of(p)
            prefix = f"optim.state.{place.fqn}."
            found |= {prefix + name: value for name, value in small.items()}
            for name, dtype in arrays.items():
                read_state = partial(optimizer.read_state, p, name)
                write_state = partial(optimizer.write_state, p, name)
                add(prefix + name, place, dtype, read_state, write_state, mine)
    stored = {key: StoredTensor(shape, dtype, blocks) for key, (shape, dtype, blocks) in parts.items()}
    return {**found, **stored}


def _nested(state: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """As torch's `get_state_dict` nests them."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith("optim.state."):
            path, _, name = key.removeprefix("optim.state.").rpartition(".")
            states.setdefault(path, {})[name] = value
    of_model = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    return {"model": of_model, "optim": {"state": states, "param_groups": groups}}


def _groups(model: nn.Module, optimizer: OffloadedOptimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group, and the names of its parameters."""
    names: dict[Any, str] = {}
    for p, place in places(model):
        names.setdefault(p, place.fqn)
    return [
        {**group, "params": list(dict.fromkeys(names[p] for p in group["params"]))} for group in optimizer.param_groups
    ]


class OffloadWriter(FileSystemWriter):
    """Writes a checkpoint, each rank its files; it gets its checksums and its name when all of it is on the disk."""

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        done = super().write_data(plan, planner)
        results: list[Any] = done.value()
        paths = Path(self.path).glob(f"{plan.storage_data.prefix}*")
        results.append({path.name: size_and_checksum(path) for path in paths})
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        entries = {name: entry for of_rank in results for name, entry in of_rank.pop().items()}
        super().finish(metadata, results)
        aside = Path(self.path)
        sync(aside / METADATA)  # torch does so before all of it is written
        entries[METADATA] = size_and_checksum(aside / METADATA)
        atomic_write(aside / CHECKSUMS, seal(json.dumps({"format": FORMAT, "files": entries}, indent=1)))
        sync(aside)
        os.replace(aside, aside.with_name(aside.name.removeprefix(WRITING)))
        sync(aside.parent)


def save_checkpoint(model: nn.Module, optimizer: OffloadedOptimizer, path: str | os.PathLike[str]) -> None:
    """Save an offloaded model and its optimizer to a folder; all ranks together, block by block.

    The folder gets its name when all of it is on the disk, so a run that is killed meanwhile leaves the last one whole,
    and `.writing-<name>`, which may be removed. A save that fails leaves nothing.

    Raises:
        ValueError: the folder exists and is not empty.
        StorageError: a rank could not write its part.
    """
    path = Path(path)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} exists and is not empty; save to another folder")
    aside = path.absolute().with_name(f"{WRITING}{path.name}")
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def remove() -> None:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)

    remove()  # what a process that was killed has left
    state = _nested(_model_and_states(model, optimizer, True), _groups(model, optimizer))
    with on_error(remove), checkpoint_errors(f"{path} cannot be saved"):
        save(state, storage_writer=OffloadWriter(aside), no_dist=not dist.is_initialized())


def _check(path: Path) -> None:
    """Compare the files with their checksums, some on each rank; ValueError on all if they differ. What has none, as of
    `dcp.save` and of old versions, is a warning."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problems = [""] * ranks
    try:
        files.check_files(path, files.read_manifest_text(path, CHECKSUMS)[1]["files"], rank, ranks)
    except FileNotFoundError:
        warnings.warn(f"{path} has no {CHECKSUMS}, so damage to it may not be found", stacklevel=3)
    except (OSError, ValueError) as error:
        problems[rank] = str(error)
    if ranks > 1:
        dist.all_gather_object(problems, problems[rank])
    if any(problems):
        raise ValueError(max(problems))


def load_checkpoint(model: nn.Module, optimizer: OffloadedOptimizer, path: str | os.PathLike[str]) -> None:
    """Load what `save_checkpoint` or `dcp.save` has written into the tiers of this model; all ranks together.

    Runs no code of the checkpoint. Checksums are compared, where it has them.

    Raises:
        ValueError: the folder is no checkpoint, or damaged, or a parameter of the model is not in it, or has another
            shape; nothing was changed then. Or a file could run code when it is read.
        StorageError: a rank could not read its part.
    """
    path = Path(path)
    if not (path / METADATA).is_file():
        raise ValueError(f"{path} is not a checkpoint: it has no {METADATA}")
    _check(path)
    reader = files.CheckpointReader(path)
    there: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    state = _model_and_states(model, optimizer, False)
    for key, value in state.items():
        shape = getattr(there.get(key), "size", None)
        if key.startswith("model.") and key not in there and value.numel():
            raise ValueError(f"{path} has no {key.removeprefix('model.')!r}")
        if isinstance(value, StoredTensor) and shape is not None and shape != value.shape:
            raise ValueError(f"{key}: the checkpoint has shape {list(shape)}, the model {list(value.shape)}")
    wanted = {key: value for key, value in state.items() if key in there}
    groups = _groups(model, optimizer)
    for number, group in enumerate(groups):
        for name in [name for name in group if f"optim.param_groups.{number}.{name}" not in there]:
            del group[name]
    nested = _nested(wanted, groups)
    with optimizer.loading():
        with checkpoint_errors(f"{path} cannot be loaded, some of it may be; load another checkpoint"):
            load(nested, storage_reader=reader, planner=LoadPlanner(), no_dist=not dist.is_initialized())
        optimizer.apply_settings(nested["optim"]["param_groups"])
        for p, place in places(model):
            if small := nested["optim"]["state"].get(place.fqn):
                plain = {name: value for name, value in small.items() if not isinstance(value, StoredTensor)}
                optimizer.end_load(p, plain, MASTER in small)


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True, rename: Callable[[str], str] | None = None
) -> list[str]:
    """Load a pretrained model's safetensors into an offloaded model's tiers, tensor by tensor.

    Never more than one tensor is in memory, so a model that is larger than memory can be loaded: make it on "meta",
    offload it with `init=lambda module: None`, and load it.

    Args:
        path: a file, or a folder with the shards of a model, as Hugging Face saves it.
        strict: every parameter must be in the files.
        rename: the model's name of a tensor in the files.

    Returns:
        Names in the files that the model has not.

    Raises:
        ValueError: a parameter is missing, or has another shape; parameters before it are loaded then.
    """
    safe_open = require("safetensors", "frameworks").safe_open
    path = Path(path)
    shards = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not shards:
        raise ValueError(f"{path} has no .safetensors files")
    targets: dict[str, list[tuple[Any, StoredPlace]]] = {}
    for p, place in places(model):
        targets.setdefault(place.fqn, []).append((p, place))
    strange, written = [], set[Any]()
    for file in shards:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # not a mapping
                parts = targets.get(key if rename is None else rename(key))
                if parts is None:
                    strange.append(key)
                    continue
                values, shape = tensors.get_tensor(key), parts[0][1].shape
                if values.shape != shape:
                    raise ValueError(f"{file}: {key!r} has shape {list(values.shape)}, the model {list(shape)}")
                for target, place in parts:
                    mine = values[place.slices]
                    if is_offloaded(target):
                        source_of(target).write(mine.to(target.dtype))
                    else:
                        local(target).detach().copy_(mine)
                    written.add(target)
    every = {name: p for name, parts in targets.items() for p, _ in parts if isinstance(p, nn.Parameter)}
    missing = [name for name, p in every.items() if p not in written]
    if strict and missing:
        raise ValueError(f"{path} has no {missing[:5]}, {len(missing)} in all; strict=False leaves them as they are")
    return strange
