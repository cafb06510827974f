"""`Topology`: ranks and nodes of a cluster, the memory of each tier, the rate and latency of each link."""

import math
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch

from tritonemb.types import checked_number, checked_size
from tritonemb.utils import JsonFile, cpu_model, did_you_mean


@dataclass(frozen=True)
class Topology(JsonFile):
    """Topology of a cluster with equal nodes; ranks may differ in memory and speed.

    Sizes are bytes, bandwidths bytes per second in one direction, latencies seconds. A job without GPUs has its tables
    in host memory: `hbm` is a rank's share of the node's memory, and `host` is 0.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node, a divisor of `world_size`; all ranks by default.
        hbm, host, disk: memory for tables: device memory per rank, host memory and disk per node.
        rank_memory, rank_speed: by rank, if ranks differ: its share of `hbm`, and of the rates below; in (0, 1].
        lookup_bandwidth, lookup_rate, lookup_latency: per rank: bytes of random rows, and ids, per second.
        update_bandwidth, update_latency: per rank: bytes of rows and optimizer states, read and written.
        id_rate: ids per second that a rank groups by row, and whose gradients it gathers.
        routing_rate: ids per second that a rank's host sends and receives in the ID exchange.
        host_bandwidth, host_latency: between a rank's device and host memory, by rows: PCIe, or NVLink-C2C.
        disk_bandwidth, disk_latency: of a node's disks, by rows.
        intra_bandwidth, intra_latency: of a rank's exchange in its node: NVLink, or PCIe.
        inter_bandwidth, inter_latency: of a rank's exchange with other nodes: its network card.
        control_bandwidth, control_latency: of a node's network for the ID exchange and embedding servers.
        ids_over: network of the ids of tables on devices, as in `HybridParallel`: "cpu", the one above; or "device",
            the links of exchanges, as the presets of GPUs have it.
        flops: floating-point operations per second of a rank in the other layers.
        servers: number of embedding servers, each with `server_memory`. A server sends and updates `server_rows` per
            second, and sends and receives at `server_bandwidth`.
        readers: number of reader hosts.
        node_price, server_price, reader_price: price per hour of a node, an embedding server and a reader host.
        name: name of the preset; empty without one.
        machine: the calibrated machine, e.g. "x86_64, 2 CPUs, cpu"; empty for assumed rates.
        spread: largest relative distance of a calibration's times from the fitted line, by link.
        busy: whether other processes used the machine during calibration.

    Raises:
        TypeError, ValueError: naming the field.
    """

    world_size: int
    local_world_size: int = 0
    _: KW_ONLY
    hbm: float = 80e9
    host: float = 2e12
    disk: float = 0.0
    rank_memory: Sequence[float] = ()
    rank_speed: Sequence[float] = ()
    lookup_bandwidth: float = 1.8e12
    lookup_rate: float = 2e10
    lookup_latency: float = 30e-6
    update_bandwidth: float = 1.0e12
    update_latency: float = 60e-6
    id_rate: float = 2e9
    routing_rate: float = 4e8
    host_bandwidth: float = 20e9
    host_latency: float = 20e-6
    disk_bandwidth: float = 6e9
    disk_latency: float = 100e-6
    intra_bandwidth: float = 250e9
    intra_latency: float = 20e-6
    inter_bandwidth: float = 20e9
    inter_latency: float = 50e-6
    control_bandwidth: float = 20e9
    control_latency: float = 100e-6
    ids_over: Literal["cpu", "device"] = "cpu"
    flops: float = 100e12
    servers: int = 0
    server_memory: float = 0.0
    server_rows: float = 5e6
    server_bandwidth: float = 10e9
    readers: int = 0
    node_price: float = 0.0
    server_price: float = 0.0
    reader_price: float = 0.0
    name: str = ""
    machine: str = ""
    spread: dict[str, float] = field(default_factory=dict, repr=False)
    busy: bool = False

    TITLE, REQUIRED = "a topology", ("world_size",)
    PRESETS: ClassVar[dict[str, dict[str, Any]]]

    def __post_init__(self) -> None:
        vars(self).update(local_world_size=self.local_world_size or self.world_size)
        for name, least in (("world_size", 1), ("local_world_size", 1), ("servers", 0), ("readers", 0)):
            checked_size(f"a topology's {name}", getattr(self, name), least)
        if self.world_size % self.local_world_size:
            raise ValueError(
                f"a topology's local_world_size must divide world_size, got {self.local_world_size} and "
                f"{self.world_size}"
            )
        for name in ("rank_memory", "rank_speed"):
            vars(self)[name] = shares = tuple(getattr(self, name))
            in_range = all(0 < checked_number(f"a topology's {name}", share) <= 1 for share in shares)
            if not in_range or len(shares) not in (0, self.world_size):
                raise ValueError(
                    f"a topology's {name} must be {self.world_size} numbers in (0, 1], one per rank, got {shares}"
                )
        for member in fields(self):
            if isinstance(member.default, float):
                value = checked_number(f"a topology's {member.name}", getattr(self, member.name))
                is_rate = member.name.endswith(("_bandwidth", "_rate", "_rows", "flops"))
                if not 0 <= value < math.inf or (is_rate and value == 0):
                    valid = "more than 0" if is_rate else "at least 0"
                    raise ValueError(f"a topology's {member.name} must be {valid} and finite, got {value}")
        if self.ids_over not in ("cpu", "device"):
            raise ValueError(f"a topology's ids_over must be 'cpu' or 'device', got {self.ids_over!r}")
        if self.servers and not self.server_memory:
            raise ValueError("a topology with servers needs their server_memory, in bytes each")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a known cluster, with `changes` to its fields. ValueError for an unknown name.

        Memory and peak rates are the makers'; lookups are assumed at 0.6 of the memory's peak bandwidth, updates at
        0.35, links at 0.8 of their peak.
        """
        if name not in cls.PRESETS:
            hint = did_you_mean(name, cls.PRESETS, f"; there are {', '.join(cls.PRESETS)}")
            raise ValueError(f"unknown topology {name!r}{hint}")
        return cls(**cls.PRESETS[name] | {"name": name} | changes)

    @classmethod
    def detect(cls, world_size: int, local_world_size: int = 0, device: str = "cpu") -> Self:
        """Return a topology with this machine's memory and assumed rates. Without a GPU, 0.9 of the RAM is used."""
        local = local_world_size or world_size
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device == "cuda" and torch.cuda.is_available():
            hbm = 0.9 * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            return cls(world_size, local, hbm=hbm, host=0.8 * memory, ids_over="device")
        changes = {"world_size": world_size, "local_world_size": local, "hbm": 0.9 * memory / local}
        return cls(**cls.PRESETS["cpu"] | changes)

    def but(self, **changes: Any) -> Self:
        """Return a copy with `changes`."""
        return replace(self, **changes)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a topology from JSON. ValueError for an invalid file, or one calibrated on another machine."""
        topology = super().load(path)
        this_machine = machine("cpu" if topology.machine.endswith(", cpu") else "cuda")
        if topology.machine not in ("", this_machine):
            raise ValueError(
                f"this topology was calibrated on {topology.machine!r}, but this machine is {this_machine!r}; run "
                "`tritonemb calibrate` on this machine, or use a preset"
            )
        return topology


def machine(device: str = "cpu") -> str:
    """Return the identity of a calibrated machine: processor, CPUs available to the process, device."""
    device_name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device
    return f"{cpu_model()}, {len(os.sched_getaffinity(0))} CPUs, {device_name}"


Topology.MEMBERS = [member.name for member in fields(Topology)]
# Ranks, ranks per node; memory of a GPU and its peak bandwidth; host memory and disk per node; bandwidths of a GPU's
# link to host memory, of its links in the node, and of its network card, which the ID exchange shares; flops.
_GPUS = {
    # Mudigere et al., ISCA 2022: per node 8 A100 (40 GB, 1.555 TB/s), 1.5 TB of DDR, one 200 Gbit/s card per GPU.
    "zionex-16x8": (128, 8, 40e9, 1.555e12, 1.5e12, 16e12, 12e9, 240e9, 20e9, 60e12),
    # Lian et al., KDD 2022: 64 A100 in 8 nodes; workers of 3,000 CPU cores; 30 embedding servers of 12 TB.
    "persia-64": (64, 8, 40e9, 1.555e12, 0, 0, 20e9, 240e9, 10e9, 60e12),
    "dgx-h100": (8, 8, 80e9, 3.35e12, 2e12, 30e12, 40e9, 360e9, 40e9, 400e12),
    "dgx-h200": (8, 8, 141e9, 4.8e12, 2e12, 30e12, 40e9, 360e9, 40e9, 400e12),
    "dgx-b200": (8, 8, 180e9, 8e12, 4e12, 30e12, 50e9, 720e9, 40e9, 900e12),
    # 18 trays of 4 GPUs in one NVLink domain; each GPU has half of a Grace CPU's 480 GB, over NVLink-C2C.
    "gb200-nvl72": (72, 72, 186e9, 8e12, 17e12, 276e12, 180e9, 720e9, 40e9, 900e12),
    "pcie-8": (8, 8, 48e9, 0.864e12, 1e12, 8e12, 20e9, 16e9, 10e9, 120e12),
}
Topology.PRESETS = {
    name: {
        "world_size": ranks, "local_world_size": local, "hbm": hbm, "host": host, "disk": disk,
        "lookup_bandwidth": 0.6 * peak, "update_bandwidth": 0.35 * peak, "host_bandwidth": to_host,
        "intra_bandwidth": intra, "inter_bandwidth": inter, "control_bandwidth": inter, "flops": flops,
        "ids_over": "device",
    } for name, (ranks, local, hbm, peak, host, disk, to_host, intra, inter, flops) in _GPUS.items()
}  # fmt: skip
Topology.PRESETS["persia-64"] |= {"servers": 30, "server_memory": 12e12, "server_rows": 20e6, "server_bandwidth": 10e9}
Topology.PRESETS["cpu"] = {  # one machine without a GPU: the rates of a rank with one thread
    "world_size": 1, "local_world_size": 1, "hbm": 20e9, "host": 0, "disk": 100e9, "lookup_bandwidth": 6e9,
    "lookup_rate": 100e6, "lookup_latency": 300e-6, "update_bandwidth": 3e9, "update_latency": 500e-6,
    "id_rate": 50e6, "routing_rate": 20e6, "host_bandwidth": 4e9, "host_latency": 300e-6, "disk_bandwidth": 0.5e9,
    "disk_latency": 500e-6, "intra_bandwidth": 1.5e9, "intra_latency": 300e-6, "inter_bandwidth": 1e9,
    "inter_latency": 500e-6, "control_bandwidth": 1e9, "control_latency": 300e-6, "flops": 50e9,
    "server_rows": 2e6, "server_bandwidth": 1e9,
}  # fmt: skip
