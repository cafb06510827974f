"""Options of offload in a training run."""

from dataclasses import dataclass, fields
from pathlib import Path

from tritonemb.offloading.setup import parse_bytes
from tritonemb.offloading.tiers import TierName
from tritonemb.utils import Options, join_names


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(Options):
    """Offload of the layers outside tables to host memory or disk, see `te.offload`.

    Args:
        offload_states: tier of the dense optimizer's states.
        offload_params: tier of parameters while they are not in use.
        offload_grads: tier of gradients from the backward to the step.
        offload_activations: tier of activations that autograd saves for the backward pass.
        offload_path: folder of the swap file, for disk; on a local disk, and not shared with other runs.
        offload_budget: device memory for parameters in use, and host memory for states read from disk, as 8GiB or in
            bytes; a quarter of the free memory if not given.
    """

    offload_states: TierName = "device"
    offload_params: TierName = "device"
    offload_grads: TierName = "device"
    offload_activations: TierName = "device"
    offload_path: Path | None = None
    offload_budget: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        on_disk = [option.name for option in fields(self) if getattr(self, option.name) == "disk"]
        if on_disk and self.offload_path is None:
            raise ValueError(f"{join_names(on_disk)}=disk needs a folder for the swap file: set offload_path, too")
        for name, used in (("offload_path", on_disk), ("offload_budget", self.moved)):
            if getattr(self, name) is not None and not used:
                raise ValueError(f"{name}: nothing is offloaded{' to disk' * (name == 'offload_path')}")
        parse_bytes(1 if self.offload_budget is None else self.offload_budget, "offload_budget")

    @property
    def moved(self) -> list[str]:
        """Names of the options that offload something."""
        return [option.name for option in fields(self) if getattr(self, option.name) in ("host", "disk")]

    def check(self, num_ranks: int, sharded: bool, compile: bool) -> None:
        """Raise ValueError, which names an option, if a run with these options cannot offload."""
        if self.moved and num_ranks > 1 and not sharded:
            raise ValueError(
                f'{self.moved[0]} needs dense_layers="fsdp" (of te.HybridParallel: dense="fsdp"), or one process: with '
                f'"ddp" each of {num_ranks} ranks has a copy of the dense layers'
            )
        if self.moved and compile:
            raise ValueError(f"{self.moved[0]} cannot be used with compile: a compiled model needs all its weights")
