"""Safetensors files of pretrained models, loaded tensor by tensor into a model on any tier.

Tensors are read, not mapped: `safe_open` of the package maps the whole file privately, which counts as memory of the
process, so a file larger than memory may fail to open.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from tritonemb.offloading.dispatch import is_offloaded, source_of
from tritonemb.offloading.shards import tensor_slices, to_local
from tritonemb.storage.checkpoint import FLOATS, METADATA, FileTensor, read_header
from tritonemb.utils import join_names

INDEX = "model.safetensors.index.json"


def find_files(path: Path) -> list[Path]:
    """Return the files of a model: `path`, or in a folder those of its index, `model.safetensors`, or all others."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("model.safetensors")) or sorted(path.glob("*.safetensors"))
    if (path / INDEX).is_file():
        try:
            names = {str(name) for name in json.loads((path / INDEX).read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / INDEX} is not an index of safetensors files: {error!r}") from error
        files = [path / name for name in sorted(names)]
        if absent := [file.name for file in files if file.parent != path or not file.is_file()]:
            raise ValueError(f"{path} has no {join_names(map(repr, absent), 5)}, which its {INDEX} names")
    if not files:
        hint = "; load it by te.offloading.load_checkpoint after te.offload" if (path / METADATA).is_file() else ""
        raise ValueError(f"{path} has no .safetensors files{hint}")
    return files


class PretrainedWeights:
    """Tensors of safetensors files by the names of a model, against which they are checked before any is loaded.

    Attributes:
        targets: parameters and persistent buffers of the model that the files have.
        missing: names of parameters that they lack; a tied parameter needs one of its names.
        unexpected: names in the files that the model lacks.
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str], rename: Callable[[str], str] = str) -> None:
        self.path = Path(path)
        self._tensors: dict[str, FileTensor] = {}
        names: dict[str, str] = {}  # in the files, by the model's name
        for file in find_files(self.path):
            for name, tensor in read_header(file).items():
                previous = self._tensors.setdefault(rename(name), tensor)
                names[rename(name)] = name
                if previous is not tensor:
                    raise ValueError(f"{self.path} has {name!r} in {previous.path.name} and in {file.name}; remove one")
        # Compare shapes, dtypes, and the values of tied parameters.
        self.targets: dict[Any, FileTensor] = {}
        problems, first_names = [], dict[Any, str]()
        for target, tensor_slice in tensor_slices(model):
            name = tensor_slice.fqn
            first_names.setdefault(target, name)
            if (file_tensor := self._tensors.get(name)) is None:
                continue
            names.pop(name, None)
            if file_tensor.shape != tensor_slice.shape:
                problems.append(f"{name!r} has shape {list(file_tensor.shape)}, the model {list(tensor_slice.shape)}")
            elif file_tensor.dtype != target.dtype and not {file_tensor.dtype, target.dtype} <= FLOATS:
                problems.append(f"{name!r} has {file_tensor.dtype}, the model {target.dtype}")
            elif not self.targets.setdefault(target, file_tensor).has_values_of(file_tensor):
                problems.append(f"{name!r} differs from {first_names[target]!r}, to which the model ties it")
        if problems:
            problem = join_names(problems, 5, "; ", "; ")
            raise ValueError(f"{self.path}: {problem}; create the model from the configuration of these files")
        missing = [target for target in first_names if isinstance(target, nn.Parameter) and target not in self.targets]
        self.missing = [first_names[target] for target in missing]
        self.unexpected = [*names.values()]

    def check_names(self, allow_missing: bool) -> None:
        """Raise ValueError if files and model differ in names; `allow_missing`: the files may lack parameters."""
        missing, unexpected = ([] if allow_missing else self.missing), self.unexpected
        problem = ""
        if missing:
            problem = f" lacks {join_names(map(repr, missing), 5)} (initialize them by init=, or tie weights first)"
        if unexpected:
            problem += f"{'; it' * bool(problem)} has {join_names(map(repr, unexpected), 5)}, which the model lacks "
            problem += "(map names by rename= of te.offloading.load_safetensors, after te.offload without checkpoint=)"
        if problem:
            raise ValueError(f"{self.path}{problem}")

    def load(self, model: nn.Module) -> None:
        """Load the tensors into the tiers of the model, which may be tiled since it was checked."""
        loaded = set[Any]()
        for target, tensor_slice in tensor_slices(model):
            if target in loaded or (tensor := self._tensors.get(tensor_slice.fqn)) is None:
                continue
            loaded.add(target)
            values = tensor.read(tensor_slice.slices).to(target.dtype)
            if is_offloaded(target):
                source_of(target).write(values)
            else:
                to_local(target).detach().copy_(values)


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True, rename: Callable[[str], str] | None = None
) -> list[str]:
    """Load a pretrained model's safetensors into an offloaded model's tiers, tensor by tensor.

    At most one tensor is in memory. A model with the names of the files needs only `te.offload(..., checkpoint=path)`.

    Args:
        path: a file, or a folder with the shards of a model in the layout of Hugging Face.
        strict: raise if a parameter is not in the files.
        rename: map a name in the files to the model's name.

    Returns:
        Names in the files without a parameter in the model.

    Raises:
        ValueError: a parameter is missing, or has another shape or another kind of dtype, or a file is damaged;
            nothing is loaded.
    """
    weights = PretrainedWeights(model, path, rename or str)
    if strict and weights.missing:
        raise ValueError(
            f"{path} has no {join_names(map(repr, weights.missing), 5)}; strict=False leaves them unchanged"
        )
    weights.load(model)
    return weights.unexpected
