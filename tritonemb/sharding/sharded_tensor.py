"""`TableShards`: a whole table in a `state_dict`, of which each rank has some shards.

`torch.distributed.checkpoint` asks such a value what this rank writes and what it has room for, and cuts what was
saved to what is loaded. So a table that was saved under one plan is loaded under any other, and into a plain tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tritonemb.comm.group import RankGroup, control_device
from tritonemb.sharding.plan import Shard

PIECE_BYTES = 1 << 27  # what is written, read and sent at once: a reader fetches whole pieces into host memory
_INSTEAD = (
    "this rank has only some rows and columns of it. Use gather() for the whole tensor, copy_from() to fill it, "
    "the tensors in `shards` for the parts, or torch.distributed.checkpoint to save and load it"
)


class Rectangle(NamedTuple):
    """Rows and columns of a table; a state of one value a row counts as one column."""

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int

    def __str__(self) -> str:
        rows = f"rows {self.first_row}:{self.first_row + self.num_rows}"
        return f"{rows}, columns {self.first_column}:{self.first_column + self.num_columns}"


class LocalShard(NamedTuple):
    """Rows and columns of a table, or of a state of it, on this rank."""

    tensor: Tensor  # [rows, columns], or [rows] for a state of one value a row
    first_row: int = 0  # in the whole
    first_column: int = 0
    mine: bool = True  # this rank saves it; others that have the same only load it

    @property
    def offset(self) -> tuple[int, ...]:
        return (self.first_row, self.first_column)[: self.tensor.dim()]

    @property
    def rectangle(self) -> Rectangle:
        rows, columns = (*self.tensor.shape, 1, 1)[:2]
        return Rectangle(self.first_row, rows, self.first_column, columns)


class TableShards(Tensor):
    """What a `state_dict` has for a sharded table's weight `[rows, columns]` or its state, of that shape or `[rows]`.

    It has the shape and dtype of the whole, and shares memory with the module. It can be saved, loaded, gathered,
    filled and copied; operators refuse it, since there is no whole tensor here. Of all ranks' shards that are `mine`,
    each element is in exactly one.

    Args:
        size: of the whole.
        dtype: of the whole, and of every shard.
        shards: what this rank has; may be none.

    Raises:
        ValueError: a shard does not fit into the whole, or has another dtype.
    """

    shards: tuple[LocalShard, ...]
    _written: dict[tuple[int, ...], Tensor]  # the pieces that are asked for; none where shards are to be filled

    @staticmethod
    def __new__(cls, size: Iterable[int], dtype: torch.dtype, shards: Iterable[LocalShard]) -> "TableShards":
        shape, held = torch.Size(size), tuple(shards)
        _check(shape, dtype, held)
        # A module without memory yet has shards on "meta"; the whole is not to look as if it could be made anew.
        device = next((s.tensor.device for s in held if not s.tensor.is_meta), torch.device("cpu"))
        made: TableShards = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.shards = tuple(s._replace(tensor=s.tensor.detach()) for s in held if s.tensor.numel())
        made._written = {}
        return made

    def rectangles(self) -> list[Rectangle]:
        """The parts of the whole that this rank saves."""
        return [shard.rectangle for shard in self.shards if shard.mine]

    def bytes_to_save(self) -> int:
        """The size of what this rank saves."""
        return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in self.shards if shard.mine)

    def map(self, function: Callable[[Tensor], Tensor], only_mine: bool = False) -> Self:
        """The same shards with other tensors of their shapes, e.g. copies of them."""
        kept = [shard for shard in self.shards if shard.mine or not only_mine]
        return type(self)(self.shape, self.dtype, [shard._replace(tensor=function(shard.tensor)) for shard in kept])

    def why_not_loadable(self, given: Any) -> str | None:
        """Why this cannot be filled from a tensor, whole or sharded; None if it can."""
        if not isinstance(given, Tensor) or (given.shape, given.dtype) != (self.shape, self.dtype):
            found = described(given.dtype, given.shape) if isinstance(given, Tensor) else type(given).__name__
            return f"expected a tensor of {described(self.dtype, self.shape)}, got {found}"
        there = {shard.rectangle for shard in (given if isinstance(given, TableShards) else self).shards}
        if any(shard.rectangle not in there for shard in self.shards):
            remedy = "load a checkpoint with torch.distributed.checkpoint, or whole tensors"
            return f"these shards are of another plan; {remedy}"
        return None

    @torch.no_grad()
    def copy_from(self, given: Tensor) -> None:
        """Fill this rank's shards from the whole tensor, of the same shape and dtype, on any device; or from shards.

        ValueError for another shape or dtype, or shards of another plan.
        """
        if (problem := self.why_not_loadable(given)) is not None:
            raise ValueError(problem)
        parts = {s.rectangle: s.tensor for s in given.shards} if isinstance(given, TableShards) else {}
        for shard in self.shards:
            found = parts[shard.rectangle] if parts else cut(given, shard.rectangle)
            if found.data_ptr() != shard.tensor.data_ptr():  # not its own
                shard.tensor.copy_(found)

    @torch.no_grad()
    def gather(self, group: RankGroup | None = None, device: torch.device | str = "cpu") -> Tensor:  # type: ignore[override]
        """The whole tensor, on every rank and on `device`; all ranks call it together.

        `group`: the ranks that have the table; None if this one has all of it. ValueError on every rank if their shards
        do not make up the whole.
        """
        group = RankGroup() if group is None else group
        held: list[list[Rectangle]] = group.all_gather_object(self.rectangles())
        refuse_gaps(self.shape, [rectangle for of_rank in held for rectangle in of_rank])
        whole = torch.empty(self.shape, dtype=self.dtype, device=device)
        for _, piece, tensor in self._pieces():
            cut(whole, piece).copy_(tensor)
        for rank, rectangles in enumerate(held if group.size > 1 else []):
            for piece in (piece for rectangle in rectangles for piece in _pieces(rectangle, self.dtype)):
                target = cut(whole, piece)
                message = target.to(control_device(group)).contiguous()
                group.broadcast(message, rank, "gather")
                target.copy_(message)
        return whole

    # What torch.distributed.checkpoint asks; it knows these names.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, pieces = TensorProperties(dtype=self.dtype), {place: part for place, _, part in self._pieces()}
        self._written |= pieces
        chunks = [ChunkStorageMetadata(torch.Size(place), part.shape) for place, part in pieces.items()]
        data = [TensorWriteData(chunk, properties, self.shape) for chunk in chunks]
        return [WriteItem(MetadataIndex(fqn, d.chunk.offsets), WriteItemType.SHARD, tensor_data=d) for d in data]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._written = {}
        for shard in self.shards:
            if shard.tensor.is_meta:
                raise RuntimeError(f"{self!r} has no memory; call to_empty() of its module before it is loaded")
        return [ChunkStorageMetadata(torch.Size(shard.offset), shard.tensor.shape) for shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The shard to fill, by its number in the list of chunks, or the piece to write, by its place in the whole."""
        assert index.offset is not None, index
        if not self._written and index.index is not None:
            return self.shards[index.index].tensor
        there = self._written or {shard.offset: shard.tensor for shard in self.shards}
        if tuple(index.offset) not in there:
            raise ValueError(f"{index.fqn} has no shard at {tuple(index.offset)} on this rank: {self!r}")
        return there[tuple(index.offset)]

    def _pieces(self) -> Iterator[tuple[tuple[int, ...], Rectangle, Tensor]]:
        """What this rank writes, piece by piece, and where each begins."""
        for shard in self.shards:
            for piece in _pieces(shard.rectangle, self.dtype) if shard.mine else ():
                rows = slice(piece.first_row - shard.first_row, piece.first_row - shard.first_row + piece.num_rows)
                place = (piece.first_row, piece.first_column)[: self.dim()]
                yield place, piece, shard.tensor[rows] if self.dim() else shard.tensor

    # What torch does with the values of a state_dict.

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0].map(lambda tensor: tensor)
        if func is torch.ops.aten.clone.default:
            return args[0].map(torch.clone)
        # A TypeError in `table + 1` would be replaced by Python's own.
        raise NotImplementedError(f"{func} cannot work on a sharded table: {_INSTEAD}")

    def __copy__(self) -> Self:
        return self.map(lambda tensor: tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = self.map(torch.clone)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"a sharded table cannot be pickled, by torch.save for example: {_INSTEAD}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = "; ".join(
            f"{shard.rectangle} on {shard.tensor.device}{'' if shard.mine else ', saved by another'}"
            for shard in self.shards
        )
        return f"TableShards({described(self.dtype, self.shape)}: {held or 'nothing of it here'})"

    __str__ = __repr__


def refuse_gaps(size: torch.Size, rectangles: Iterable[Rectangle]) -> None:
    """Raise ValueError unless each element of a tensor of this size is in exactly one of the rectangles."""
    num_rows, num_columns = (*size, 1, 1)[:2]
    counted = [(Rectangle(0, num_rows, 0, num_columns), -1), *((rectangle, 1) for rectangle in rectangles)]
    rows = sorted({edge for r, _ in counted for edge in (r.first_row, r.first_row + r.num_rows)})
    columns = sorted({edge for r, _ in counted for edge in (r.first_column, r.first_column + r.num_columns)})
    row_of, column_of = ({edge: n for n, edge in enumerate(edges)} for edges in (rows, columns))
    times = torch.zeros(len(rows) - 1, len(columns) - 1, dtype=torch.int64)  # too often, between these edges
    for r, count in counted:
        of_rows = slice(row_of[r.first_row], row_of[r.first_row + r.num_rows])
        times[of_rows, column_of[r.first_column] : column_of[r.first_column + r.num_columns]] += count
    for row, column in times.nonzero().tolist():
        where = Rectangle(rows[row], rows[row + 1] - rows[row], columns[column], columns[column + 1] - columns[column])
        who = "no rank" if times[row, column] < 0 else "two ranks"
        raise ValueError(f"{where} of a sharded table are saved by {who}")


def _check(size: torch.Size, dtype: torch.dtype, shards: tuple[LocalShard, ...]) -> None:
    if len(size) > 2 or 0 in size:
        raise ValueError(f"a sharded table or its state has up to two dimensions of at least 1, got {list(size)}")
    for shard in shards:
        tensor = shard.tensor
        if tensor.dim() != len(size) or tensor.dtype != dtype:
            raise ValueError(
                f"a shard of {described(dtype, size)} is {described(tensor.dtype, tensor.shape)}: it must have the "
                "dtype and the number of dimensions of the whole"
            )
        if len(size) == 1 and shard.first_column:
            raise ValueError(f"a shard of {list(size)} begins at column {shard.first_column}, but there are no columns")
        ends = [first + n for first, n in zip(shard.offset, tensor.shape, strict=True)]
        if min(shard.offset, default=0) < 0 or any(end > whole for end, whole in zip(ends, size, strict=True)):
            raise ValueError(f"a shard has {shard.rectangle}, outside of the whole {list(size)}")


def _pieces(rectangle: Rectangle, dtype: torch.dtype) -> Iterator[Rectangle]:
    """Blocks of rows of at most `PIECE_BYTES`, but of at least one row."""
    at_once = max(1, PIECE_BYTES // (rectangle.num_columns * dtype.itemsize))
    for first in range(0, rectangle.num_rows, at_once):
        rows = min(at_once, rectangle.num_rows - first)
        yield rectangle._replace(first_row=rectangle.first_row + first, num_rows=rows)


def cut(whole: Tensor, rectangle: Rectangle | Shard) -> Tensor:
    """A view of the rows, and the columns if it has several, of a table or a state of it."""
    if not whole.dim():
        return whole
    rows = whole[rectangle.first_row :][: rectangle.num_rows]
    return rows if whole.dim() == 1 else rows[:, rectangle.first_column :][:, : rectangle.num_columns]


def described(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """A tensor's dtype and shape, in words."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
