"""The tensors of one checkpoint into a folder, by one process or by all ranks together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tritonemb.comm.group import RankGroup
from tritonemb.sharding.sharded_tensor import PIECE_BYTES, LocalShard, TableShards
from tritonemb.training.checkpoints.files import checksum
from tritonemb.training.checkpoints.tensors import is_part
from tritonemb.training.checkpoints.together import alone, together


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], group: RankGroup | None) -> dict[str, list[int]]:
    """Write what the ranks hold; every rank gets the size and checksum of each file, in order of their names.

    Raises:
        OSError: on every rank, if writing failed on some; in one process, whatever it raised.
    """
    # Copying ahead from a device sorts tensors and waits for its stream, for nothing if all are in host memory.
    copy_ahead = 10_000_000 if any(tensor.is_cuda for tensor in tensors.values()) else 0
    writer = _Writer(folder, sync_files=True, per_thread_copy_ahead=copy_ahead)
    if alone(group):
        with as_one_process():
            save(_in_pieces(tensors), storage_writer=writer, no_dist=True)
    else:
        assert group is not None
        save(dict(tensors), storage_writer=writer, process_group=group.process_group)
    every = together(group, lambda: _files_of(writer, folder, group), OSError)
    return dict(sorted((name, entry) for of_rank in every for name, entry in of_rank.items()))


def _in_pieces(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Large tensors as ones that are written, and so read again, piece by piece: a writer copies a whole piece of a
    table in host memory, as its rows do not stand one behind the other there, and a reader holds a whole one.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        if not is_part(tensor) and tensor.dim() in (1, 2) and tensor.nbytes > PIECE_BYTES:
            found[name] = TableShards(tensor.shape, tensor.dtype, [LocalShard(tensor)])
    return found


@contextmanager
def as_one_process() -> Iterator[None]:
    """Without the warning that there is only one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


class _Writer(FileSystemWriter):
    """Keeps what goes wrong, to be raised when all ranks have come to the end.

    The exception itself would be sent to the other ranks by pickle; where that fails, they would wait in vain.
    """

    failure: BaseException | None = None

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except BaseException as error:
            self.failure = error
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing

    def finish(self, metadata: Any, results: Any) -> None:
        try:
            super().finish(metadata, results)
        except BaseException as error:
            self.failure = self.failure or error


def _files_of(writer: _Writer, folder: Path, group: RankGroup | None) -> dict[str, list[int]]:
    """The files that this rank has written."""
    if isinstance(writer.failure, RuntimeError):  # what torch.save makes of a full disk
        raise OSError(str(writer.failure)) from writer.failure
    if writer.failure is not None:
        raise writer.failure
    rank = 0 if group is None else group.rank
    paths = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    return {path.name: [path.stat().st_size, checksum(path)] for path in paths}
