"""Calibration: lines through times, and topologies that are measured, here on tables too small to say anything."""

import os
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from tritonemb.comm.group import RankGroup
from tritonemb.sharding.planner import calibrate as module
from tritonemb.sharding.planner.calibrate import calibrate, fit, measure
from tritonemb.sharding.planner.topology import Topology, machine
from tritonemb.training.job import CalibrateOptions, run_calibration

SMALL = {"NUM_ROWS": 100, "LAYER": 8, "WIDTH": 8, "SIZES": (1, 2, 4, 8, 30), "ROUNDS": 1}
LINKS = {"lookup", "update", "id", "host", "disk", "flops", "routing"}


def small(**options):
    """Calibrate as fast as can be; the machine may be busy."""
    with mock.patch.multiple(module, **SMALL):
        return calibrate(**{"allow_busy": True} | options)


def test_a_line_is_found():
    amounts = np.array([[1, 9], [2, 3], [7, 1], [20, 5], [60, 90]], dtype=float)
    points = np.column_stack([3 + amounts @ [2, 0.5], amounts]).tolist()
    costs, spread = fit(points)
    assert costs == pytest.approx([3, 2, 0.5])
    assert spread == pytest.approx(0, abs=1e-9)


def test_costs_are_not_negative_and_errors_are_relative():
    costs, spread = fit([[size - 0.5, size] for size in (1.0, 2.0, 4.0, 8.0, 30.0)])
    assert costs[0] == 0
    assert 0.5 < costs[1] < 1
    assert spread == pytest.approx(max(abs(1 - (size - 0.5) / (costs[1] * size)) for size in (1, 2, 4, 8, 30)))
    assert fit([[1.0, size] for size in (9.0, 1.0, 5.0)]) == (pytest.approx([1, 0]), pytest.approx(0, abs=1e-9))


def test_a_message_is_measured_until_it_has_arrived():
    run, num_bytes = module._messages(RankGroup())(3)
    assert run().numel() == num_bytes == 3 * 1024  # an all-to-all itself returns a function that waits for this


def test_a_topology_is_measured(tmp_path):
    topology = small(disk_folder=tmp_path)
    assumed = Topology.detect(1)
    assert set(topology.spread) == LINKS
    assert (topology.world_size, topology.machine) == (1, machine())
    assert (topology.hbm, topology.host) == (assumed.hbm, assumed.host)
    assert 0 < topology.disk < 1e16
    changed = [name for name in vars(assumed) if getattr(topology, name) != getattr(assumed, name)]
    measured = {
        f"{link}_{quantity}" for link in ("lookup", "update", "host", "disk") for quantity in ("bandwidth", "latency")
    }
    measured |= {"lookup_rate", "id_rate", "routing_rate", "control_latency", "flops", "disk", "machine", "spread"}
    assert set(changed) - {"busy"} == measured
    topology.save(tmp_path / "topology.json")
    assert Topology.load(tmp_path / "topology.json") == topology


def test_a_busy_machine():
    idle = mock.patch.object(os, "getloadavg", return_value=(1.4, 0, 0))
    with mock.patch.object(os, "getloadavg", return_value=(1.6, 0, 0)):
        with pytest.raises(ValueError, match=r"the machine is busy: its load average is 1.6 with 1 ranks"):
            small(allow_busy=False)
        assert small().busy
    with idle, mock.patch.object(module, "MAX_VARIATION", np.inf):
        assert not small(allow_busy=False).busy
    with idle, mock.patch.object(module, "MAX_VARIATION", -1.0), pytest.raises(ValueError, match="loop varies by"):
        small(allow_busy=False)


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="device must be 'cpu'"):
        small(device="tpu")


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    text = run_calibration(CalibrateOptions(out=tmp_path / "found.json", allow_busy=True, disk=tmp_path))
    assert text.startswith(f"{machine()}: 1 ranks")
    assert "found.json was written" in text
    assert [line.split()[0] for line in text.splitlines() if "assumed" in line] == [
        "intra_bandwidth", "intra_latency", "inter_bandwidth", "inter_latency", "control_bandwidth"
    ]  # fmt: skip
    assert text.count("spread") == 13
    assert Topology.load(tmp_path / "found.json").world_size == 1
    for options in ({"out": tmp_path / "nowhere" / "found.json"}, {"disk": tmp_path / "nowhere"}):
        with pytest.raises(ValueError, match=r"no such folder: .*nowhere"):
            run_calibration(CalibrateOptions(**options))


def measure_together(rank):
    group = RankGroup.world()
    with mock.patch.multiple(module, SIZES=(1, 2), ROUNDS=3):
        slow = measure(group, torch.device("cpu"), lambda size: (partial(time.sleep, 0.01 * size * rank), size, rank))
    two = [small(), small(group=RankGroup(group.process_group, local_world_size=1))]
    return slow, [topology.to_json() for topology in two], [sorted(topology.spread) for topology in two]


@pytest.mark.more
def test_ranks_measure_together(ranks):
    first, second = ranks(2).run(measure_together)
    assert first == second
    slow, (one_node, two_nodes), (links, _) = first
    assert [amounts for _, *amounts in slow] == [[1, 1], [2, 1]]  # of rank 1, which was slower
    assert all(seconds >= 0.01 * size for seconds, size, _ in slow)
    assert set(links) == LINKS | {"control", "intra", "inter"}
    one, two = Topology.from_json(one_node), Topology.from_json(two_nodes)
    assert (one.world_size, one.local_world_size, two.local_world_size) == (2, 2, 1)
    assert (one.inter_bandwidth, one.inter_latency) == (one.intra_bandwidth, one.intra_latency)
    assert "intra" not in two.spread
    assert two.intra_bandwidth == Topology.detect(2, 1).intra_bandwidth
    assert two.inter_bandwidth != Topology.detect(2, 1).inter_bandwidth
