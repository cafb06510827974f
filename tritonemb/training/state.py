"""Everything that a run needs to go on as if it had never stopped, out of a trainer's parts and back into them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tritonemb.tables.cached_table import CachedTable, metadata_only

PLAIN = (int, float, str, bool, type(None))


@dataclass
class Progress:
    """Where a run stands.

    Args:
        step: optimizer steps done.
        epoch: epochs done.
        samples: samples trained on.
        position: where the epoch's next batch begins, on this rank; None at the beginning of an epoch.
        epoch_samples: samples trained on in this epoch.
        logged_samples: samples trained on since the last log.
        losses: mean training loss of each epoch done.
        best: the best value of the metric that is watched, and the step when it was reached.
        evaluations_since_best: how many have not been better.
        seconds: time trained.
        ended: why the run is over, "" while it is not.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    position: dict[str, Any] | None = None
    epoch_samples: int = 0
    logged_samples: int = 0
    losses: list[float] = field(default_factory=list)
    best: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    seconds: float = 0.0
    ended: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        return cls(**values)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """`model.<key>` for every entry of the model's `state_dict`, sharing memory with the model.

    An `DiskTensor` stands for each tensor of a table on disk.

    Raises:
        TypeError: for an entry that is no tensor.
    """
    with metadata_only():
        state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the model's state_dict has {name!r} of type {type(value).__name__}; checkpoints hold tensors only"
            )
    return {f"model.{name}": value.detach() for name, value in state.items()}


def read_again(model: nn.Module) -> None:
    """What of tables in host memory is on the device comes anew from there, where values have been loaded."""
    for table in model.modules():
        if isinstance(table, CachedTable) and table.config.placement == "host":
            table.reload_cached_rows()


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """`optimizer.<parameter>.<state>` for every tensor that the optimizer of the dense part keeps."""
    found = {}
    for name, parameter in _parameters_of(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items() if optimizer is not None else ():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return found


def optimizer_plain(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps of each parameter that is no tensor, by the parameter's name.

    Raises:
        TypeError: for a value that JSON does not know.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in _parameters_of(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items() if optimizer is not None else ():
            if isinstance(value, Tensor):
                continue
            if not isinstance(value, PLAIN):
                raise TypeError(
                    f"{type(optimizer).__name__} keeps {key!r} of type {type(value).__name__} for {name}; checkpoints "
                    "hold tensors and plain values only"
                )
            found.setdefault(name, {})[key] = value
    return found


def optimizer_templates(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, stored: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Room for those stored optimizer states whose parameters this optimizer has: on the CPU, or where the parameter is
    a DTensor cut as that is.
    """
    owners: dict[str, Tensor] = {f"optimizer.{name}": parameter for name, parameter in _parameters_of(model, optimizer)}
    found: dict[str, Tensor] = {}
    for name, entry in stored.items():
        parameter = owners.get(name.rpartition(".")[0])
        if isinstance(parameter, DTensor) and parameter.shape == entry.size:
            found[name] = torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
        elif parameter is not None:
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return found


def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give the optimizer what `optimizer_tensors` and `optimizer_plain` took out of one like it."""
    names = {id(parameter): name for name, parameter in _parameters_of(model, optimizer)}
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed["state"] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        prefix = f"optimizer.{names[id(parameter)]}."
        state: dict[str, Any] = dict(plain.get(names[id(parameter)], {}))
        state |= {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if state:
            packed["state"][number] = state
    optimizer.load_state_dict(packed)


def rng_tensors(device: torch.device, rank: int | None = None) -> dict[str, Tensor]:
    """torch's generators, of the CPU and of the device that trains: `rng.<device>`, or `rng.<rank>.<device>`."""
    prefix = "rng." if rank is None else f"rng.{rank}."
    found = {f"{prefix}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found[f"{prefix}cuda"] = torch.cuda.get_rng_state(device)
    return found


def rng_templates(stored: Mapping[str, TensorStorageMetadata], rank: int, device: torch.device) -> dict[str, Tensor]:
    """Room for the generators of a rank, as far as a checkpoint has them; one process counts as rank 0."""
    found = {}
    for name in rng_tensors(device):
        kind = name.removeprefix("rng.")
        for there in [f"rng.{rank}.{kind}", *([name] if rank == 0 else [])]:
            if there in stored:
                found[there] = torch.empty(stored[there].size, dtype=torch.uint8)
    return found


def rng_manifest(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`rng_plain` of all ranks: that of the first, and where there are more, those of all."""
    return {"rng": every[0], **({"rng_of_ranks": list(every)} if len(every) > 1 else {})}


def set_rng(
    tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], seed: int, rank: int, device: torch.device
) -> None:
    """Set all generators to what a checkpoint has for this rank; a rank that it does not know begins anew."""
    plain = manifest.get("rng_of_ranks", [manifest["rng"]])
    if rank >= len(plain):
        seed_rank(seed, rank)
        return
    for name, tensor in tensors.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(tensor)
        else:
            torch.cuda.set_rng_state(tensor, device)
    set_rng_plain(plain[rank])


def seed_rank(seed: int, rank: int) -> None:
    """Generators of a rank's own, which depend on nothing else."""
    state = [int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3, np.uint32)]
    torch.manual_seed(state[0])
    random.seed(state[1])
    np.random.seed(state[2])  # noqa: NPY002


def rng_plain() -> dict[str, Any]:
    """The generators of Python and NumPy."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
    }


def set_rng_plain(values: dict[str, Any]) -> None:
    version, numbers, gauss = values["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002


def _parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters under their names in the model's `state_dict`, which wrappers of the model keep."""
    if optimizer is None:
        return []
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named: dict[int, tuple[str, nn.Parameter]] = {}
    with metadata_only():
        entries = model.state_dict(keep_vars=True)
    for name, value in entries.items():
        if id(value) in owned:
            named.setdefault(id(value), (name, value))
    return list(named.values())
