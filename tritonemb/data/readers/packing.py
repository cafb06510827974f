"""A data set on its way to reader processes: its arrays lie in a file that all of them map, so memory has them once."""

from __future__ import annotations

import io
import mmap
import pickle
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch

ALIGNMENT = 64


class _Pickler(pickle.Pickler):
    """Leaves the contents of arrays, and of tensors as arrays, to `buffer_callback`."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and type(value) is torch.Tensor and _as_array(value):
            return torch.from_numpy, (value.detach().contiguous().numpy(),)
        return NotImplemented


def _as_array(tensor: torch.Tensor) -> bool:
    usual = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.dtype != torch.bfloat16
    return usual and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def pack(data: Any, file: Path) -> dict[str, Any]:
    """Write the arrays to the file; what is returned makes `data` again together with it.

    Raises:
        TypeError: it can not be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    text = io.BytesIO()
    try:
        _Pickler(text, protocol=5, buffer_callback=buffers.append).dump(data)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"reader processes need a data set that can be pickled; {type(data).__name__} can not: {error}"
        ) from error
    ranges, place = [], 0
    with file.open("wb") as target:
        for buffer in buffers:
            raw = buffer.raw()
            target.seek(place)
            target.write(raw)
            ranges.append((place, len(raw)))
            place = -(-(place + len(raw)) // ALIGNMENT) * ALIGNMENT
        target.truncate(max(place, 1))
    main = {key: value for key, value in spawn.get_preparation_data("reader").items() if key.startswith("init_main")}
    return {"pickle": text.getvalue(), "file": str(file), "ranges": ranges, "main": main}


def unpack(packed: dict[str, Any]) -> Any:
    """In another process. Whatever is written to the arrays stays in this process."""
    with open(packed["file"], "rb") as source:
        mapped = memoryview(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY))
    buffers = [mapped[start : start + size] for start, size in packed["ranges"]]
    return _Unpickler(packed["pickle"], buffers, packed["main"]).load()


class _Unpickler(pickle.Unpickler):
    """Runs the program's main module only if something of it is in the pickle."""

    def __init__(self, text: bytes, buffers: list[memoryview], main: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(text), buffers=buffers)
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main:
            main, self._main = self._main, {}
            spawn.prepare(main)
        return super().find_class(module, name)
