"""Slices of tensors: shards of DTensors, tiles, and pieces of tensors that are stored in the order of memory."""

from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tritonemb.nn.tiled_linear import TiledLinear


def to_local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_dtensor(shard: Tensor, template: Any) -> Tensor:
    """Wrap this rank's shard like `template` if that is a DTensor."""
    if not isinstance(template, DTensor):
        return shard
    layout: Any = {"shape": template.shape, "stride": template.stride()}
    return DTensor.from_local(shard, template.device_mesh, template.placements, run_check=False, **layout)


def shard_like(values: Tensor, template: Any) -> Tensor:
    """Return this rank's shard of values of the shape of `template`, which may be sharded in another way, or not."""
    if not isinstance(template, DTensor):
        return values.full_tensor() if isinstance(values, DTensor) else values
    if not isinstance(values, DTensor):
        return values[slices_of(*shard_bounds(template))]
    is_same = values.placements == template.placements
    return to_local(values if is_same else values.redistribute(placements=template.placements))


def shard_bounds(tensor: Any) -> tuple[torch.Size, tuple[int, ...]]:
    """Return the shape of this rank's shard of a DTensor, and its offset; of a tensor its shape, and zeros."""
    if not isinstance(tensor, DTensor):
        return torch.Size(tensor.shape), (0,) * tensor.dim()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return torch.Size(shape), offset


def local_shape(tensor: Any) -> torch.Size:
    return shard_bounds(tensor)[0]


def slices_of(shape: torch.Size, offset: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


class TensorSlice(NamedTuple):
    """Slice of a state dict's tensor, of full shape `shape`: a tile, or a rank's shard."""

    name: str
    shape: torch.Size
    offset: tuple[int, ...]
    size: torch.Size
    is_tile: bool = False

    @property
    def fqn(self) -> str:
        """Name in checkpoints, whether or not modules are compiled."""
        return self.name.replace("_orig_mod.", "")

    @property
    def slices(self) -> tuple[slice, ...]:
        return slices_of(self.size, self.offset)


def tensor_slices(model: nn.Module) -> Iterator[tuple[Any, TensorSlice]]:
    """Yield all parameters and persistent buffers, once per name."""
    tiles: dict[Any, tuple[str, torch.Size, tuple[int, ...]]] = {}
    named: list[tuple[str, Any]] = [*model.named_parameters(remove_duplicate=False)]
    for prefix, module in model.named_modules():
        for layer, row, column in module.grid() if isinstance(module, TiledLinear) else ():
            shape = torch.Size((module.out_features, module.in_features))
            tiles[layer.weight] = f"{prefix}.weight", shape, (row, column)
            if layer.bias is not None:
                tiles[layer.bias] = f"{prefix}.bias", shape[:1], (row,)
        names = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        named += [(f"{prefix}.{name}", module._buffers[name]) for name in names if module._buffers[name] is not None]
    for name, p in named:
        slice_shape, offset = shard_bounds(p)
        key, shape, origin = tiles.get(p, (name, torch.Size(p.shape), (0,) * p.dim()))
        offset = tuple(a + b for a, b in zip(origin, offset, strict=True))
        yield p, TensorSlice(key.removeprefix("."), shape, offset, slice_shape, p in tiles)


def check_memory(model: nn.Module, moved: Set[Any]) -> None:
    """Raise ValueError if a tensor that is `moved` shares memory with another: they would become independent."""
    spans = list[tuple[int, int, str, bool]]()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shard = to_local(tensor)
        if not shard.is_meta and torch._C._has_storage(shard) and shard.numel() and (begin := shard.data_ptr()):
            last = sum((size - 1) * stride for size, stride in zip(shard.shape, shard.stride(), strict=True))
            spans.append((begin, begin + (last + 1) * shard.itemsize, name, tensor in moved))
    ends = {True: (0, ""), False: (0, "")}  # largest so far, of moved tensors and of others
    for begin, end, name, is_moved in sorted(spans):
        if begin < (latest := max(ends.values()) if is_moved else ends[True])[0]:
            raise ValueError(
                f"{latest[1]!r} and {name!r} share memory, which offload would separate; tie them as one parameter: "
                "assign the same nn.Parameter to both modules"
            )
        ends[is_moved] = max(ends[is_moved], (end, name))


def padded_shape(tensor: Any) -> torch.Size:
    """Return the shape of a shard in FSDP2's all-gather: that of the largest shard."""
    shape = list(tensor.shape)
    for dim, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // tensor.device_mesh.size(dim))
    return torch.Size(shape)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill memory without gaps, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # preserves dense strides only


def flat_view(tensor: Tensor) -> Tensor:
    """Return a view `[numel]` of the elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: Tensor, template: Tensor) -> Tensor:
    """Return the elements in the order of `template`'s memory; a view if the strides are the same."""
    if tensor.stride() != template.stride():
        tensor = torch.empty_strided(template.shape, template.stride(), dtype=tensor.dtype).copy_(tensor)
    return flat_view(tensor)


def replace_range(tensor: Tensor, begin: int, values: Tensor) -> Tensor:
    """Replace elements from `begin` on, in row-major order; return the tensor."""
    elements = tensor.reshape(-1)
    elements[begin : begin + values.numel()] = values
    return tensor if elements.data_ptr() == tensor.data_ptr() else tensor.copy_(elements.view(tensor.shape))


class Piece:
    """Elements `begin` to `end` of a tensor, in the order of memory; those of an offloaded parameter have a `span`."""

    span: Any = None

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end, self.numel = begin, end, end - begin

    @staticmethod
    def split(numel: int, max_elements: int) -> list["Piece"]:
        return [Piece(begin, min(begin + max_elements, numel)) for begin in range(0, numel, max_elements)]


P = TypeVar("P", bound=Piece)


def overlaps(pieces: Iterable[P], begin: int, end: int) -> Iterator[tuple[P, slice, slice]]:
    """Yield each piece of a tensor that has elements `begin` to `end`, its slice, and the slice of the range."""
    for piece in pieces:
        first, last = max(begin, piece.begin), min(end, piece.end)
        if first < last:
            yield piece, slice(first - piece.begin, last - piece.begin), slice(first - begin, last - begin)


class StoredElements:
    """Tensor whose elements are stored in the order of memory; read and written by ranges in row-major order."""

    shard_shape: torch.Size  # of this rank's shard
    strides: tuple[int, ...] | None = None  # order of the elements in memory; None for row-major order

    def load_elements(self, begin: int, end: int) -> Tensor:
        """Return a copy of elements `begin` to `end`, in the order of memory, on the CPU."""
        raise NotImplementedError

    def store_elements(self, begin: int, values: Tensor) -> None:
        """Replace elements from `begin` on, in the order of memory."""
        raise NotImplementedError

    def read(self) -> Tensor:
        values, shape = self.load_elements(0, self.shard_shape.numel()), self.shard_shape
        return values.view(shape) if self.strides is None else values.as_strided(shape, self.strides)

    def read_range(self, begin: int, end: int) -> Tensor:
        """Return a copy of elements `begin` to `end` on the CPU."""
        return self.load_elements(begin, end) if self.strides is None else self.read().reshape(-1)[begin:end]

    def write_range(self, begin: int, values: Tensor) -> None:
        """Replace elements from `begin` on."""
        if self.strides is not None:
            begin, values = 0, flat_view(replace_range(self.read(), begin, values))
        self.store_elements(begin, values)


class DeviceElements(StoredElements):
    """Tensor in memory."""

    def __init__(self, values: Tensor) -> None:
        self._values, self.shard_shape = values, values.shape

    def load_elements(self, begin: int, end: int) -> Tensor:
        return self._values.reshape(-1)[begin:end].cpu()

    def store_elements(self, begin: int, values: Tensor) -> None:
        replace_range(self._values, begin, values.to(self._values.device))
