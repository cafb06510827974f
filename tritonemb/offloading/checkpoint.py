"""Checkpoints of offloaded models by `torch.distributed.checkpoint` (DCP), streamed by blocks.

The format is that of `dcp.save({"model": ..., "optim": ...})` for the state dicts of DCP's `get_state_dict`, so a
checkpoint loads into plain and sharded models, other numbers of ranks and other tiers, and vice versa. A file
`checksums.json` beside it detects damage before anything is loaded.
"""

import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tritonemb.comm.group import RankGroup
from tritonemb.offloading.dispatch import is_offloaded, source_of
from tritonemb.offloading.optimizer import OffloadedOptimizer
from tritonemb.offloading.shards import DeviceElements, StoredElements, TensorSlice, tensor_slices, to_local
from tritonemb.offloading.states import MASTER, StateArray
from tritonemb.storage import checkpoint as files
from tritonemb.storage.checkpoint import METADATA, checkpoint_errors
from tritonemb.tables.table import Table
from tritonemb.utils import WRITING, join_names, on_error, publish

BLOCK_BYTES = 64 << 20  # of a tensor in memory at a time
CHECKSUMS = "checksums.json"


class Block(NamedTuple):
    """Block of rows of this rank's slice of a tensor."""

    offset: tuple[int, ...]  # in the full tensor
    size: torch.Size
    begin: int  # first element in the slice
    elements: StoredElements  # of the slice


class StoredTensor(Tensor):
    """Parameter or state in a state dict, read and written by blocks; it has the shape of the full tensor."""

    blocks: dict[tuple[int, ...], Block]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype) -> "StoredTensor":
        make_wrapper: Any = Tensor._make_wrapper_subclass
        tensor: StoredTensor = make_wrapper(cls, shape, dtype=dtype, device="cpu")
        tensor.blocks = {}
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} does not support tensors of a checkpoint; load it into a model")

    # Protocol of torch.distributed.checkpoint, which calls these methods by name.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, shard = TensorProperties(dtype=self.dtype), WriteItemType.SHARD
        chunks = [TensorWriteData(chunk, properties, self.shape) for chunk in self.__create_chunk_list__()]
        return [WriteItem(MetadataIndex(fqn, item.chunk.offsets), shard, tensor_data=item) for item in chunks]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(b.offset), b.size) for b in self.blocks.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        self._block = block = self.blocks[tuple(index.offset)]
        self._current = block.elements.read_range(block.begin, block.begin + block.size.numel()).view(block.size)
        return self._current

    def commit(self) -> None:
        """Write the block that `__get_tensor_shard__` returned last."""
        self._block.elements.write_range(self._block.begin, self._current.reshape(-1))


class LoadPlanner(files.CheckpointPlanner):
    """Load planner that writes loaded blocks to their tier."""

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        target = self.state_dict[read_item.dest_index.fqn]
        if isinstance(target, StoredTensor):
            target.commit()


def _blocks(tensor_slice: TensorSlice, dtype: torch.dtype, elements: StoredElements) -> Iterator[Block]:
    """Split a slice into blocks of rows of its elements."""
    offset, size = tensor_slice.offset, tensor_slice.size
    if not size:
        yield Block((), size, 0, elements)
    width = torch.Size(size[1:]).numel()
    step = max(1, BLOCK_BYTES // max(1, width * dtype.itemsize))
    for first in range(0, size[0], step) if size.numel() and size else ():
        block_size = torch.Size((min(step, size[0] - first), *size[1:]))
        yield Block((offset[0] + first, *offset[1:]), block_size, first * width, elements)


class ModuleEntries(NamedTuple):
    """Entries of a module in `state_dict` besides its parameters and buffers: rows of tables, or its extra state."""

    module: nn.Module
    prefix: str
    values: dict[str, Any]  # by key in its `state_dict`
    unsaved_ids: set[int]  # of its parameters and buffers that are slots of a cache, or memory of a dynamic table

    def name(self, key: str) -> str:
        """Name of an entry in checkpoints."""
        return self.prefix.replace("_orig_mod.", "") + key

    def check(self, stored_names: Collection[str], path: Path) -> None:
        """Raise ValueError if a checkpoint lacks the rows of a table; warn if it lacks other entries."""
        names = [key for key in self.values if self.name(key) not in stored_names]
        if isinstance(self.module, Table) and (rows := [self.name(key) for key in names if key in ("ids", "weight")]):
            raise ValueError(f"{path} has no {join_names(map(repr, rows))}")
        if lacking := [self.name(key) for key in names if flatten_state_dict({key: self.values[key]})[0]]:
            warnings.warn(f"{path} has no {join_names(map(repr, lacking))}: kept as in the model", stacklevel=3)

    def load(self, values: Mapping[str, Any]) -> None:
        """Load entries of a checkpoint; ValueError if they do not fit."""
        errors: list[str] = []
        state = {self.prefix + key: values[name] for key in self.values if (name := self.name(key)) in values}
        metadata = {"version": self.module._version}
        self.module._load_from_state_dict(state, self.prefix, metadata, False, [], [], errors)
        if errors:
            raise ValueError("; ".join(errors))


def _collect_entries(model: nn.Module) -> list[ModuleEntries]:
    """Collect the entries of modules that save others than their parameters and buffers."""
    known, entries = {id(tensor) for tensor, _ in tensor_slices(model)}, list[ModuleEntries]()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix, saved = f"{path}." if path else "", dict[str, Any]()
        module._save_to_state_dict(saved, prefix, True)
        values = {key.removeprefix(prefix): value for key, value in saved.items() if id(value) not in known}
        tensors = (*module._parameters.values(), *module._buffers.values())
        unsaved_ids = {id(tensor) for tensor in tensors} - {id(value) for value in saved.values()}
        if values:
            entries.append(ModuleEntries(module, prefix, values, unsaved_ids))
    return entries


def _collect_state(
    model: nn.Module, optimizer: OffloadedOptimizer, entries: Sequence[ModuleEntries], for_saving: bool
) -> dict[str, Any]:
    """Collect the tensors of a checkpoint, nested like torch's `get_state_dict`, with the blocks of this rank; entries
    of modules only for saving, as they are loaded in the sizes of the checkpoint."""
    unsaved_ids = {number for entry in entries for number in entry.unsaved_ids}
    tensors: dict[str, Any] = {e.name(key): value for e in entries for key, value in e.values.items() if for_saving}
    states: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    names: dict[Any, str] = {}

    def add(target: dict[str, Any], name: str, dtype: torch.dtype, elements: StoredElements) -> None:
        # Replicas have the same blocks; DCP saves one of each.
        tensor = target.setdefault(name, StoredTensor(tensor_slice.shape, dtype))
        tensor.blocks |= {block.offset: block for block in _blocks(tensor_slice, dtype, elements)}

    for p, tensor_slice in tensor_slices(model):
        fqn, is_saved = tensor_slice.fqn, id(p) not in unsaved_ids
        if not isinstance(p, nn.Parameter):  # a buffer
            tensors |= {fqn: p} if is_saved else {}
            continue
        if is_saved:
            add(tensors, fqn, p.dtype, source_of(p) if is_offloaded(p) else DeviceElements(to_local(p).detach()))
        # A tied parameter has several names, and states under the first.
        if names.setdefault(p, fqn) == fqn and (optimizer.store.is_ready(p) or not for_saving):
            layout = optimizer.store.layout(p)
            states[fqn].update(layout.scalars)
            for name, dtype in layout.dtypes.items():
                add(states[fqn], name, dtype, StateArray(optimizer.store, p, name))
    groups = [{**group, "params": [*{names[p]: None for p in group["params"]}]} for group in optimizer.param_groups]
    return {"model": tensors, "optim": {"state": states, "param_groups": groups}}


class OffloadWriter(files.ChecksumWriter):
    """Writer that adds a file of checksums, and publishes the folder when all files are on disk."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        folder = Path(self.path)
        entries = {name: entry for rank_results in results for name, entry in rank_results.pop().items()}
        files.write_manifest(folder, {"files": entries | self.finish_files(metadata, results)}, CHECKSUMS)
        publish(folder, folder.with_name(folder.name.removeprefix(WRITING)))


def save_checkpoint(model: nn.Module, optimizer: OffloadedOptimizer, path: str | os.PathLike[str]) -> None:
    """Save an offloaded model and its optimizer to a folder, block by block; a collective.

    Rows of tables that are dynamic, or not on the device, are copied to host memory.

    The folder is renamed from `.writing-<name>` when all files are on disk, so a killed run leaves only the temporary
    folder, which may be removed. A failed save leaves nothing.

    Raises:
        ValueError: the folder exists and is not empty.
        StorageError: a rank could not write its files.
    """
    path = Path(path)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} exists and is not empty; save to another folder")
    temporary = path.absolute().with_name(f"{WRITING}{path.name}")
    group = RankGroup.world()

    def remove() -> None:
        if group.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)

    remove()  # remains of a killed process
    optimizer.raise_if_failed()
    optimizer.update_masters([p for group in optimizer.param_groups for p in group["params"]])
    state = _collect_state(model, optimizer, _collect_entries(model), True)
    with on_error(remove), checkpoint_errors(f"{path} cannot be saved"):
        save(state, storage_writer=OffloadWriter(temporary), no_dist=group.process_group is None)


def load_checkpoint(model: nn.Module, optimizer: OffloadedOptimizer, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint of `save_checkpoint` or `dcp.save` into the tiers of a model; a collective.

    No code in the checkpoint is executed. Checksums are verified if it has them.

    Raises:
        ValueError: the folder is not a checkpoint, or damaged, or a parameter of the model is missing, or has another
            shape; nothing is changed. Also for a file that could execute code when it is read.
        StorageError: a rank could not read a file.
    """
    path, group = Path(path), RankGroup.world()
    if not (path / METADATA).is_file():
        raise ValueError(f"{path} is not a checkpoint: it has no {METADATA}")
    # Verify the checksums of the files, spread over ranks; checkpoints of `dcp.save` and of old versions have none.
    problem = ""
    try:
        files.check_files(path, files.read_manifest_text(path, CHECKSUMS)[1]["files"], group.rank, group.size)
    except FileNotFoundError:
        warnings.warn(f"{path} has no {CHECKSUMS}, so damage may go undetected", stacklevel=2)
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem := max(group.all_gather_object(problem)):
        raise ValueError(problem)
    # Compare keys and shapes with the model.
    reader, entries = files.CheckpointReader(path), _collect_entries(model)
    stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    collected = _collect_state(model, optimizer, entries, False)
    state, paths = flatten_state_dict(collected)
    saved_paths = {key: steps for key, steps in (reader.read_metadata().planner_data or {}).items() if len(steps) > 1}
    saved_paths = {key: steps for key, steps in saved_paths.items() if steps[0] == "model"}
    for entry in entries:
        entry.check({steps[1] for steps in saved_paths.values()}, path)
    names = {entry.name(key) for entry in entries for key in entry.values}
    for key, steps in saved_paths.items():
        if steps[1] in names:
            info, paths[key] = stored[key], steps  # None is replaced by a value other than a tensor
            state[key] = torch.empty(info.size, dtype=info.properties.dtype) if hasattr(info, "size") else None
    examples = zip(collected["optim"]["param_groups"], optimizer.example_states, strict=True)
    expected = {f"optim.state.{name}": example.keys() for group, example in examples for name in group["params"]}
    for key in sorted(stored.keys() - state.keys()):
        prefix, _, name = key.rpartition(".")
        if name not in expected.get(prefix, {name}) and name != MASTER and getattr(stored[key], "size", None):
            raise ValueError(
                f"{path} has {key.removeprefix('optim.state.')!r}, which this optimizer lacks; construct it with the "
                "options of the optimizer that was saved, before te.offload"
            )
    for key, value in state.items():
        shape = getattr(stored.get(key), "size", None)
        if key.startswith("model.") and key not in stored and value.numel():
            raise ValueError(f"{path} has no {key.removeprefix('model.')!r}")
        if isinstance(value, Tensor) and shape is not None and shape != value.shape:
            raise ValueError(f"{key}: the checkpoint has shape {list(shape)}, the model {list(value.shape)}")
    # Load what the checkpoint has, and finish the optimizer's states.
    nested: Any = unflatten_state_dict({key: value for key, value in state.items() if key in stored}, paths)
    with optimizer.loading():
        with checkpoint_errors(f"{path} cannot be loaded, and the model is partially updated; load another checkpoint"):
            load(nested, storage_reader=reader, planner=LoadPlanner(), no_dist=group.process_group is None)
        for entry in entries:
            entry.load(nested.get("model", {}))
        optimizer.load_hyperparameters(nested["optim"]["param_groups"])
        for p, tensor_slice in tensor_slices(model):
            if param_states := nested["optim"].get("state", {}).get(tensor_slice.fqn):
                scalars = {name: value for name, value in param_states.items() if not isinstance(value, StoredTensor)}
                optimizer.finish_load(p, scalars, MASTER in param_states)
