"""`Topology`: ranks and nodes of a cluster, the memory of each tier, and the rate and latency of each link."""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from tritonemb.utils import did_you_mean, read_sealed, sealed

FORMAT = 1


@dataclass(frozen=True)
class Topology:
    """What a job runs on. All ranks are alike, and so are all nodes.

    Sizes are bytes, bandwidths bytes a second in one direction, latencies seconds. A rank of a job without GPUs has its
    tables in its share of the node's memory: that is `hbm`, and `host` is 0.

    Args:
        world_size: ranks.
        local_world_size: ranks of a node; all if not given. It divides `world_size`.
        hbm: device memory of a rank.
        host: host memory of a node, for tables.
        disk: of a node, for tables.
        lookup_bandwidth: at which a rank reads random rows; `lookup_rate`: ids a second that it looks up beside that;
            `lookup_latency`: of a step's lookup, whatever it reads.
        update_bandwidth: at which it reads and writes the rows and states that a batch has used; `update_latency`.
        id_rate: ids a second that a rank groups by row, and whose gradients it finds.
        routing_rate: ids a second that a rank's host sends to their owners, and receives.
        host_bandwidth, host_latency: between a rank's device and host memory, by rows: PCIe, or NVLink-C2C.
        disk_bandwidth, disk_latency: of a node's disks, by rows.
        intra_bandwidth, intra_latency: of a rank's exchange with ranks of its node: NVLink, or PCIe.
        inter_bandwidth, inter_latency: of a rank's exchange with ranks of other nodes: its network card.
        control_bandwidth, control_latency: of a node's network for the ID exchange, and for embedding servers.
        flops: a rank's, a second, in the layers beside the tables.
        servers: embedding servers; 0 if there are none.
        server_memory: of each; `server_rows`: rows a second that each sends and updates; `server_bandwidth`.
        name: of a preset.
        machine: what calibration has measured, e.g. "x86_64, 2 CPUs, cpu"; empty for assumed rates.
        spread: of a calibration, by link: how far the measured times lie from the line through them.
        busy: whether other processes used the machine while it was calibrated.

    Raises:
        TypeError, ValueError: naming the field.
    """

    world_size: int
    local_world_size: int | None = None
    hbm: float = field(default=80e9, kw_only=True)
    host: float = field(default=2e12, kw_only=True)
    disk: float = field(default=0, kw_only=True)
    lookup_bandwidth: float = field(default=1.8e12, kw_only=True)
    lookup_rate: float = field(default=2e10, kw_only=True)
    lookup_latency: float = field(default=30e-6, kw_only=True)
    update_bandwidth: float = field(default=1.0e12, kw_only=True)
    update_latency: float = field(default=60e-6, kw_only=True)
    id_rate: float = field(default=2e9, kw_only=True)
    routing_rate: float = field(default=4e8, kw_only=True)
    host_bandwidth: float = field(default=20e9, kw_only=True)
    host_latency: float = field(default=20e-6, kw_only=True)
    disk_bandwidth: float = field(default=6e9, kw_only=True)
    disk_latency: float = field(default=100e-6, kw_only=True)
    intra_bandwidth: float = field(default=250e9, kw_only=True)
    intra_latency: float = field(default=20e-6, kw_only=True)
    inter_bandwidth: float = field(default=20e9, kw_only=True)
    inter_latency: float = field(default=50e-6, kw_only=True)
    control_bandwidth: float = field(default=20e9, kw_only=True)
    control_latency: float = field(default=100e-6, kw_only=True)
    flops: float = field(default=100e12, kw_only=True)
    servers: int = field(default=0, kw_only=True)
    server_memory: float = field(default=0, kw_only=True)
    server_rows: float = field(default=5e6, kw_only=True)
    server_bandwidth: float = field(default=10e9, kw_only=True)
    name: str = field(default="", kw_only=True)
    machine: str = field(default="", kw_only=True)
    spread: dict[str, float] = field(default_factory=dict, kw_only=True, repr=False)
    busy: bool = field(default=False, kw_only=True)

    PRESETS: ClassVar[dict[str, dict[str, Any]]]

    def __post_init__(self) -> None:
        if self.local_world_size is None:
            object.__setattr__(self, "local_world_size", self.world_size)
        for name in ("world_size", "local_world_size", "servers"):
            count, least = getattr(self, name), 0 if name == "servers" else 1
            if not isinstance(count, int) or isinstance(count, bool):
                raise TypeError(f"a topology's {name} must be an int, got {count!r}")
            if count < least:
                raise ValueError(f"a topology's {name} must be at least {least}, got {count}")
        if self.world_size % self.local_size:
            raise ValueError(
                f"a topology's local_world_size must divide world_size, got {self.local_world_size} and "
                f"{self.world_size}"
            )
        for number in _NUMBERS:
            value: Any = getattr(self, number)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"a topology's {number} must be a number, got {value!r}")
            is_rate = number in _RATES
            if not math.isfinite(value) or value < 0 or (is_rate and value == 0):
                wanted = "more than 0" if is_rate else "at least 0"
                raise ValueError(f"a topology's {number} must be {wanted} and finite, got {value}")
        if self.servers and not self.server_memory:
            raise ValueError("a topology with servers needs their server_memory, in bytes each")

    @property
    def local_size(self) -> int:
        """`local_world_size`, as an int."""
        assert self.local_world_size is not None
        return self.local_world_size

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_size

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A known cluster, with some fields changed. ValueError for a name that there is not.

        Memory and peak rates are those that its makers publish; lookups are taken at 0.6 of the memory's peak, updates
        at 0.35, links at 0.8.
        """
        if name not in cls.PRESETS:
            hint = did_you_mean(name, cls.PRESETS, f"; there are {', '.join(cls.PRESETS)}")
            raise ValueError(f"unknown topology {name!r}{hint}")
        return cls(**cls.PRESETS[name] | {"name": name} | changes)

    @classmethod
    def here(cls, world_size: int, local_world_size: int | None = None, device: str = "cpu") -> Self:
        """This machine's memory, shared by its ranks, with assumed rates. Without a GPU, nine tenths of the RAM."""
        import torch

        local = local_world_size or world_size
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device == "cuda" and torch.cuda.is_available():
            hbm = 0.9 * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            return cls(world_size, local, hbm=hbm, host=0.8 * memory)
        changes = cls.PRESETS["cpu"] | {"world_size": world_size, "local_world_size": local}
        return cls(**changes | {"hbm": 0.9 * memory / local})

    def but(self, **changes: Any) -> Self:
        """A copy with other values."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        values = asdict(self)
        return json.dumps({"format": FORMAT} | values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A topology from its text; ValueError says what is wrong with it."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"a topology must be JSON: {error}") from error
        known = {each.name for each in fields(cls)} | {"format", "sha256"}
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError(f'a topology is an object with "format": {FORMAT}')
        values.pop("sha256", None)
        if unknown := sorted(set(values) - known):
            raise ValueError(f"a topology has no field {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        if "world_size" not in values:
            raise ValueError("a topology needs a world_size")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with a digest."""
        Path(path).write_text(sealed(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read it from JSON; ValueError names the file, or says that it was calibrated on another machine."""
        content = read_sealed(Path(path))
        try:
            found = cls.from_json(content.decode())
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        found.check_machine()
        return found

    def check_machine(self) -> None:
        """Raise ValueError if the rates were measured on another machine than this one."""
        if self.machine and self.machine != (here := machine("cpu" if self.machine.endswith(", cpu") else "cuda")):
            raise ValueError(
                f"this topology was calibrated on {self.machine!r}, and this is {here!r}; run `tritonemb calibrate` "
                "here, or take a preset"
            )


def amount(size: float) -> str:
    """Bytes, with a unit of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5 or unit == "TB":
            return (
                f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if abs(size) < 1e4 else f"{size:,.0f} {unit}"
            )
        size /= 1000
    raise AssertionError


def machine(device: str = "cpu") -> str:
    """What a calibration holds for: processor, how many CPUs the process may use, and the device."""
    import torch

    shown = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device
    return f"{_processor()}, {len(os.sched_getaffinity(0))} CPUs, {shown}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_SIZES = ("hbm", "host", "disk", "server_memory")
_NUMBERS = [
    each.name for each in fields(Topology)
    if each.name in _SIZES or each.name == "flops" or each.name.endswith(("_bandwidth", "_latency", "_rate", "_rows"))
]  # fmt: skip
_RATES = [name for name in _NUMBERS if name not in _SIZES and not name.endswith("_latency")]


def _gpus(world: int, local: int, hbm: float, peak: float, **others: Any) -> dict[str, Any]:
    rates = {"lookup_bandwidth": 0.6 * peak, "update_bandwidth": 0.35 * peak}
    return {"world_size": world, "local_world_size": local, "hbm": hbm, **rates, **others}


Topology.PRESETS = {
    # Mudigere et al., ISCA 2022: per node 8 A100 (40 GB, 1.555 TB/s), 1.5 TB of DDR, one 200 Gbit/s card a GPU.
    "zionex-16x8": _gpus(
        128, 8, 40e9, 1.555e12, host=1.5e12, disk=16e12, host_bandwidth=12e9, intra_bandwidth=240e9,
        inter_bandwidth=20e9, control_bandwidth=20e9, flops=60e12,
    ),
    # Lian et al., KDD 2022: 64 A100 in 8 nodes; workers of 3,000 CPU cores; 30 embedding servers of 12 TB.
    "persia-64": _gpus(
        64, 8, 40e9, 1.555e12, host=0, intra_bandwidth=240e9, inter_bandwidth=10e9, control_bandwidth=10e9,
        flops=60e12, servers=30, server_memory=12e12, server_rows=20e6, server_bandwidth=10e9,
    ),
    "dgx-h100": _gpus(
        8, 8, 80e9, 3.35e12, host=2e12, disk=30e12, host_bandwidth=40e9, intra_bandwidth=360e9, inter_bandwidth=40e9,
        control_bandwidth=40e9, flops=400e12,
    ),
    "dgx-h200": _gpus(
        8, 8, 141e9, 4.8e12, host=2e12, disk=30e12, host_bandwidth=40e9, intra_bandwidth=360e9, inter_bandwidth=40e9,
        control_bandwidth=40e9, flops=400e12,
    ),
    "dgx-b200": _gpus(
        8, 8, 180e9, 8e12, host=4e12, disk=30e12, host_bandwidth=50e9, intra_bandwidth=720e9, inter_bandwidth=40e9,
        control_bandwidth=40e9, flops=900e12,
    ),
    # 18 trays of 4 GPUs in one NVLink domain; each GPU has half of a Grace CPU's 480 GB, over NVLink-C2C.
    "gb200-nvl72": _gpus(
        72, 72, 186e9, 8e12, host=17e12, disk=276e12, host_bandwidth=180e9, intra_bandwidth=720e9,
        inter_bandwidth=40e9, control_bandwidth=40e9, flops=900e12,
    ),
    "pcie-8": _gpus(
        8, 8, 48e9, 0.864e12, host=1e12, disk=8e12, host_bandwidth=20e9, intra_bandwidth=16e9, inter_bandwidth=10e9,
        control_bandwidth=10e9, flops=120e12,
    ),
    # One machine without a GPU: the rates of a rank with one thread.
    "cpu": {
        "world_size": 1, "local_world_size": 1, "hbm": 20e9, "host": 0, "disk": 100e9, "lookup_bandwidth": 6e9,
        "lookup_rate": 100e6, "lookup_latency": 300e-6, "update_bandwidth": 3e9, "update_latency": 500e-6,
        "id_rate": 50e6, "routing_rate": 20e6, "host_bandwidth": 4e9, "host_latency": 300e-6, "disk_bandwidth": 0.5e9,
        "disk_latency": 500e-6, "intra_bandwidth": 1.5e9, "intra_latency": 300e-6, "inter_bandwidth": 1e9,
        "inter_latency": 500e-6, "control_bandwidth": 1e9, "control_latency": 300e-6, "flops": 50e9,
        "server_rows": 2e6, "server_bandwidth": 1e9,
    },
}  # fmt: skip
