"""`TableShards`: the `state_dict` value of a sharded table, with the shards of this rank.

`torch.distributed.checkpoint` (DCP) reads from it which chunks this rank writes and which it loads, and reshards
between the two: a table saved under one plan loads under any other, and into a plain tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tritonemb.comm.group import RankGroup, control_device
from tritonemb.sharding.plan import Shard

PIECE_BYTES = 1 << 27  # bytes per chunk of a checkpoint and per broadcast: a reader loads whole chunks into host memory
_INSTEAD = (
    "this rank has only some of its rows and columns. Use gather() for the full tensor, copy_from() to fill it, "
    "the tensors in `shards` for local rows, or torch.distributed.checkpoint to save and load it"
)


class Rectangle(NamedTuple):
    """Rows and columns of a table; an optimizer state with one value per row counts as one column."""

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int

    def __str__(self) -> str:
        rows = f"rows {self.first_row}:{self.first_row + self.num_rows}"
        return f"{rows}, columns {self.first_column}:{self.first_column + self.num_columns}"


class LocalShard(NamedTuple):
    """Rows and columns of a table, or of one of its optimizer states, on this rank."""

    tensor: Tensor  # [rows, columns], or [rows] for a state with one value per row
    first_row: int = 0  # in the full table
    first_column: int = 0
    is_primary: bool = True  # this rank saves the shard; replicas on other ranks only load it

    @property
    def offset(self) -> tuple[int, ...]:
        return (self.first_row, self.first_column)[: self.tensor.dim()]

    @property
    def rectangle(self) -> Rectangle:
        rows, columns = (*self.tensor.shape, 1, 1)[:2]
        return Rectangle(self.first_row, rows, self.first_column, columns)


class TableShards(Tensor):
    """State-dict value of a sharded table: its weight `[rows, columns]`, or a state of that shape or `[rows]`.

    It has the shape and dtype of the full tensor, and shares memory with the module. It can be saved, loaded, gathered,
    filled and copied; other operators raise, as no rank has the full tensor. The primary shards of all ranks cover each
    element exactly once.

    Args:
        size: shape of the full tensor.
        dtype: of the full tensor, and of every shard.
        shards: this rank's shards; may be empty.

    Raises:
        ValueError: a shard is outside of the full tensor, or has another dtype.
    """

    shards: tuple[LocalShard, ...]
    _written: dict[tuple[int, ...], Tensor]  # pieces of the current save, by offset; empty during a load

    @staticmethod
    def __new__(cls, size: Iterable[int], dtype: torch.dtype, shards: Iterable[LocalShard]) -> "TableShards":
        shape, local_shards = torch.Size(size), tuple(shards)
        _check(shape, dtype, local_shards)
        # Shards of a module without memory are on "meta". A wrapper on "meta" would look like a tensor to materialize.
        device = next((s.tensor.device for s in local_shards if not s.tensor.is_meta), torch.device("cpu"))
        table: TableShards = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        table.shards = tuple(s._replace(tensor=s.tensor.detach()) for s in local_shards if s.tensor.numel())
        table._written = {}
        return table

    def rectangles(self) -> list[Rectangle]:
        """Rectangles that this rank saves."""
        return [shard.rectangle for shard in self.shards if shard.is_primary]

    def bytes_to_save(self) -> int:
        """Bytes that this rank saves."""
        return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in self.shards if shard.is_primary)

    def map(self, function: Callable[[Tensor], Tensor], only_primary: bool = False) -> Self:
        """Return the same shards with `function(tensor)` of each, of the same shape."""
        shards = [shard for shard in self.shards if shard.is_primary or not only_primary]
        return type(self)(self.shape, self.dtype, [shard._replace(tensor=function(shard.tensor)) for shard in shards])

    def why_not_loadable(self, source: Any) -> str | None:
        """Return why a full or sharded tensor cannot be copied into this one; None if it can."""
        if not isinstance(source, Tensor) or (source.shape, source.dtype) != (self.shape, self.dtype):
            kind = type(source).__name__
            actual = dtype_and_shape(source.dtype, source.shape) if isinstance(source, Tensor) else kind
            return f"expected a tensor of {dtype_and_shape(self.dtype, self.shape)}, got {actual}"
        rectangles = {shard.rectangle for shard in (source if isinstance(source, TableShards) else self).shards}
        if any(shard.rectangle not in rectangles for shard in self.shards):
            remedy = "load a checkpoint with torch.distributed.checkpoint, or full tensors"
            return f"these shards are of another plan; {remedy}"
        return None

    @torch.no_grad()
    def copy_from(self, source: Tensor) -> None:
        """Fill this rank's shards from the full tensor, of the same shape and dtype, on any device; or from shards.

        Raises:
            ValueError: for another shape or dtype, or shards of another plan.
        """
        if (problem := self.why_not_loadable(source)) is not None:
            raise ValueError(problem)
        tensors = {s.rectangle: s.tensor for s in source.shards} if isinstance(source, TableShards) else {}
        for shard in self.shards:
            part = tensors[shard.rectangle] if tensors else slice_shard(source, shard.rectangle)
            if part.data_ptr() != shard.tensor.data_ptr():  # not the same memory
                shard.tensor.copy_(part)

    @torch.no_grad()
    def gather(self, group: RankGroup | None = None, device: torch.device | str = "cpu") -> Tensor:  # type: ignore[override]
        """Return the full tensor, on every rank and on `device`; a collective.

        Args:
            group: ranks that have the table's shards; None if this rank has all of them.
            device: of the result.

        Raises:
            ValueError: on every rank, if the shards do not cover the table exactly once.
        """
        group = RankGroup() if group is None else group
        by_rank: list[list[Rectangle]] = group.all_gather_object(self.rectangles())
        check_coverage(self.shape, [rectangle for of_rank in by_rank for rectangle in of_rank])
        result = torch.empty(self.shape, dtype=self.dtype, device=device)
        for _, piece, tensor in self._pieces():
            slice_shard(result, piece).copy_(tensor)
        for rank, rectangles in enumerate(by_rank if group.size > 1 else []):
            for piece in (piece for rectangle in rectangles for piece in _pieces(rectangle, self.dtype)):
                target = slice_shard(result, piece)
                message = target.to(control_device(group)).contiguous()
                group.broadcast(message, rank, "gather")
                target.copy_(message)
        return result

    # Protocol of torch.distributed.checkpoint, which calls these methods by name.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, pieces = TensorProperties(dtype=self.dtype), {offset: piece for offset, _, piece in self._pieces()}
        self._written |= pieces
        chunks = [ChunkStorageMetadata(torch.Size(offset), piece.shape) for offset, piece in pieces.items()]
        data = [TensorWriteData(chunk, properties, self.shape) for chunk in chunks]
        return [WriteItem(MetadataIndex(fqn, d.chunk.offsets), WriteItemType.SHARD, tensor_data=d) for d in data]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._written = {}
        for shard in self.shards:
            if shard.tensor.is_meta:
                raise RuntimeError(f"{self!r} has no memory; call to_empty() of its module before it is loaded")
        return [ChunkStorageMetadata(torch.Size(shard.offset), shard.tensor.shape) for shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the shard to load, by its index in the chunk list, or the piece to save, by its offset."""
        assert index.offset is not None, index
        if not self._written and index.index is not None:
            return self.shards[index.index].tensor
        tensors = self._written or {shard.offset: shard.tensor for shard in self.shards}
        if tuple(index.offset) not in tensors:
            raise ValueError(f"{index.fqn} has no shard at {tuple(index.offset)} on this rank: {self!r}")
        return tensors[tuple(index.offset)]

    def _pieces(self) -> Iterator[tuple[tuple[int, ...], Rectangle, Tensor]]:
        """Pieces that this rank saves: offset, rectangle and tensor."""
        for shard in self.shards:
            for piece in _pieces(shard.rectangle, self.dtype) if shard.is_primary else ():
                rows = slice(piece.first_row - shard.first_row, piece.first_row - shard.first_row + piece.num_rows)
                offset = (piece.first_row, piece.first_column)[: self.dim()]
                yield offset, piece, shard.tensor[rows] if self.dim() else shard.tensor

    # Operators that torch calls on the values of a state_dict.

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0].map(lambda tensor: tensor)
        if func is torch.ops.aten.clone.default:
            return args[0].map(torch.clone)
        # Python would replace a TypeError in `table + 1` by its own text.
        raise NotImplementedError(f"{func} cannot work on a sharded table: {_INSTEAD}")

    def __copy__(self) -> Self:
        return self.map(lambda tensor: tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.map(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"a sharded table cannot be pickled, by torch.save for example: {_INSTEAD}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shards = "; ".join(
            f"{shard.rectangle} on {shard.tensor.device}{'' if shard.is_primary else ', saved by another rank'}"
            for shard in self.shards
        )
        return f"TableShards({dtype_and_shape(self.dtype, self.shape)}: {shards or 'no local shards'})"

    __str__ = __repr__


def check_coverage(size: torch.Size, rectangles: Iterable[Rectangle]) -> None:
    """Raise ValueError unless each element of a tensor of this size is in exactly one of the rectangles."""
    num_rows, num_columns = (*size, 1, 1)[:2]
    weighted = [(Rectangle(0, num_rows, 0, num_columns), -1), *((rectangle, 1) for rectangle in rectangles)]
    rows = sorted({edge for r, _ in weighted for edge in (r.first_row, r.first_row + r.num_rows)})
    columns = sorted({edge for r, _ in weighted for edge in (r.first_column, r.first_column + r.num_columns)})
    row_of, column_of = ({edge: n for n, edge in enumerate(edges)} for edges in (rows, columns))
    counts = torch.zeros(len(rows) - 1, len(columns) - 1, dtype=torch.int64)  # surplus of each cell between edges
    for r, count in weighted:
        row_range = slice(row_of[r.first_row], row_of[r.first_row + r.num_rows])
        counts[row_range, column_of[r.first_column] : column_of[r.first_column + r.num_columns]] += count
    for row, column in counts.nonzero().tolist():
        gap = Rectangle(rows[row], rows[row + 1] - rows[row], columns[column], columns[column + 1] - columns[column])
        savers = "no rank" if counts[row, column] < 0 else "two ranks"
        raise ValueError(f"{gap} of a sharded table are saved by {savers}")


def _check(size: torch.Size, dtype: torch.dtype, shards: tuple[LocalShard, ...]) -> None:
    if len(size) > 2 or 0 in size:
        raise ValueError(f"a sharded table or its state has up to two dimensions of at least 1, got {list(size)}")
    for shard in shards:
        tensor = shard.tensor
        if tensor.dim() != len(size) or tensor.dtype != dtype:
            actual = dtype_and_shape(tensor.dtype, tensor.shape)
            raise ValueError(
                f"a shard of {dtype_and_shape(dtype, size)} is {actual}: it must have the "
                "dtype and the number of dimensions of the full tensor"
            )
        if len(size) == 1 and shard.first_column:
            raise ValueError(f"a shard of {list(size)} begins at column {shard.first_column}, but there are no columns")
        ends = [first + n for first, n in zip(shard.offset, tensor.shape, strict=True)]
        if min(shard.offset, default=0) < 0 or any(end > limit for end, limit in zip(ends, size, strict=True)):
            raise ValueError(f"a shard has {shard.rectangle}, outside of the full tensor {list(size)}")


def _pieces(rectangle: Rectangle, dtype: torch.dtype) -> Iterator[Rectangle]:
    """Split into blocks of rows of at most `PIECE_BYTES`, and of at least one row."""
    rows_per_piece = max(1, PIECE_BYTES // (rectangle.num_columns * dtype.itemsize))
    for first in range(0, rectangle.num_rows, rows_per_piece):
        rows = min(rows_per_piece, rectangle.num_rows - first)
        yield rectangle._replace(first_row=rectangle.first_row + first, num_rows=rows)


def slice_shard(tensor: Tensor, rectangle: Rectangle | Shard) -> Tensor:
    """Return a view of the rectangle of a table or of its state; a state with one value per row has no columns."""
    if not tensor.dim():
        return tensor
    rows = tensor[rectangle.first_row :][: rectangle.num_rows]
    return rows if tensor.dim() == 1 else rows[:, rectangle.first_column :][:, : rectangle.num_columns]


def dtype_and_shape(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Text of a tensor's dtype and shape, such as "float32 [4, 2]"."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
