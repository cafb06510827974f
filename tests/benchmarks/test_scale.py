"""The study of scale: simulated schedules against ones made by hand, ranks in network namespaces, and the page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.measuring import report, result_files
from benchmarks.studies import published, scale
from benchmarks.studies.scale import EXACT, HALF, STALE, Grid, How, Stage, period, simulate, timeline
from tritonemb.layout import INDEX_BYTES
from tritonemb.sharding.planner import PlanError, Topology, plan
from tritonemb.sharding.planner.statistics import TableStats
from tritonemb.types import TableConfig

pytestmark = pytest.mark.more


def by_hand(ahead: int) -> list[Stage]:
    """Two ranks, of which the second fetches longer: 2 s of ids, then 3 or 4 of rows, 4 of compute, 1 of exchange."""
    return [
        Stage("ids", ("control",), np.array([2.0, 1.0]), (("exchange", 1 + ahead),), True),
        Stage("fetch", ("link",), np.array([3.0, 4.0]), (("ids", 0),)),
        Stage("compute", ("device",), np.array([4.0, 4.0]), (("fetch", 0), ("exchange", 1))),
        Stage("exchange", ("network",), np.array([1.0, 1.0]), (("compute", 0),), True),
    ]


def ends(spans, stage, rank):
    return [span.end for span in sorted(spans) if (span.stage, span.rank) == (stage, rank)]


def test_without_overlap_steps_follow_each_other():
    spans = simulate(by_hand(0), 4)
    assert ends(spans, "ids", -1) == [2, 13, 24, 35]
    assert ends(spans, "fetch", 0) == [5, 16, 27, 38]
    assert ends(spans, "fetch", 1) == [6, 17, 28, 39]
    assert ends(spans, "compute", 0) == [9, 20, 31, 42]
    assert ends(spans, "exchange", -1) == [11, 22, 33, 44]  # when the slower rank has computed
    assert period(spans) == 11


def test_with_overlap_ids_and_rows_come_ahead():
    spans = simulate(by_hand(1), 4)
    assert ends(spans, "ids", -1) == [2, 4, 13, 18]  # the third waits for the first exchange
    assert ends(spans, "fetch", 1) == [6, 10, 17, 22]  # one after the other
    assert ends(spans, "compute", 1) == [10, 15, 21, 26]
    assert ends(spans, "exchange", -1) == [11, 16, 22, 27]
    assert period(simulate(by_hand(2), 40)) == 5  # compute and exchange alone


def test_of_two_that_wait_the_older_batch_is_first():
    stages = [
        Stage("read", ("device",), np.array([1.0])),
        Stage("send", ("network",), np.array([5.0]), (("read", 0),), True),
        Stage("write", ("device",), np.array([2.0]), (("send", 0),)),
    ]
    spans = simulate(stages, 7)
    assert ends(spans, "read", 0) == [1, 2, 3, 4, 5, 6, 9]  # while the last waits, the first write is ready
    assert ends(spans, "write", 0)[0] == 8
    with pytest.raises(ValueError, match="stage 'read' has a resource of an exchange"):
        simulate([stages[0], stages[1]._replace(resources=("device",))], 1)


def test_steps_are_those_of_the_cost_model_and_shorter_with_the_pipeline():
    tables = [TableConfig(f"t{n}", 10**6, 64, dtype=torch.float16) for n in range(8)]
    stats = {table.name: TableStats(4.0, published.zipf(10**6)) for table in tables}
    created = plan(tables, Topology(4, 2, host=2e12, hbm=5e8), batch_size=512, stats=stats)
    single = period(timeline(created.report.model, created, How(ahead=0)))
    assert single == pytest.approx(created.report.prediction.step, rel=0.02)
    assert period(timeline(created.report.model, created, How())) < single


@pytest.fixture
def permitted() -> Iterator[None]:
    """Skips where this process may not make network namespaces and limit their links; none may be left."""
    try:
        with scale.network(1):
            pass
    except OSError as error:
        pytest.skip(f"network namespaces with tbf are not permitted: {error}")
    yield
    assert not list(Path("/run/netns").glob(f"{scale.PREFIX}-{os.getpid()}-*"))


SMALL = Grid((2,), (1,), (EXACT,), batch_size=128, num_train=128 * 60, num_test=512)


def test_the_smallest_cell_is_measured_once_and_its_network_removed(permitted, tmp_path, monkeypatch):
    path = tmp_path / "scaling.json"
    scale.measure(SMALL, path)
    results = result_files.read(path)
    assert [(row["study"], row["gbit"]) for row in results["rows"]] == [
        ("link", 0), ("cell", 0), ("link", 1), ("cell", 1)
    ]  # fmt: skip
    free, _, limited, cell = results["rows"]
    assert limited["stream"] * 8 < 1.1e9  # a burst more than the rate
    assert free["stream"] > limited["stream"]
    assert cell["step_s"] > 0
    assert cell["curve"][-1][0] == 60
    # A rank sends outputs of 4 tables for the other's 64 samples, as many gradients, ids, and gradients of layers.
    assert 2 * 64 * 4 * 64 * 4 < cell["sent"] < 3 * 64 * 4 * 64 * 4 + 1e6
    monkeypatch.setattr(scale, "network", None)
    scale.measure(SMALL, path)  # has nothing left to measure
    assert result_files.read(path) == results


def test_networks_are_removed_after_errors_and_after_killed_processes(permitted):
    with pytest.raises(KeyboardInterrupt), scale.network(2):
        raise KeyboardInterrupt
    stale = f"{scale.PREFIX}-{2**22 + 1}-0"  # no process has this number
    scale.run(f"ip netns add {stale}")
    with scale.network(1) as created:
        assert not Path("/run/netns", stale).exists()
        assert all(Path("/run/netns", name).exists() for name in (*created.names, created.bridge))


def results_of(step: float, bandwidth: float) -> dict:
    """Results of two ranks with a known step without a limit, and links of this bandwidth."""
    used = {"step_s": step, "sent": 1e6, "received": 2e6}
    rows = [{"study": "stages", "prepare_s": 1e-6, "lookup_s": 1e-6, "update_s": 1e-6}]
    for gbit, rate in ((0, 1e12), (1, bandwidth)):
        rows.append({
            "study": "link", "ranks": 2, "gbit": gbit, "stream": rate, "delay": 0.0, "exchange_2": rate,
            "exchange_4": rate,
        })  # fmt: skip
        cell = {"study": "cell", "ranks": 2, "gbit": gbit, **used}
        rows += [cell | {"method": method} for method in (EXACT, HALF, STALE)]
    return {"rows": rows, "grid": SMALL._asdict()}


def test_a_slow_link_costs_its_messages_and_staleness_hides_pulls():
    sim = scale.Simulation(results_of(0.02, 1e8))
    everywhere, on_servers = (scale.of(sim.rows, "cell", gbit=0, method=method)[0] for method in (EXACT, STALE))
    for base in (everywhere, on_servers):
        assert sim.step(base, 0) == pytest.approx(0.02, rel=1e-3)
    outputs = 64 * 4 * 64 * 4  # bytes to the other rank, there and back
    layers = 4 * sim.options["dense_parameters"]  # of a ring of two
    # The all-reduce and the gradients of outputs share the network; ids cross while a step computes.
    assert sim.step(everywhere, 1) - 0.02 == pytest.approx((2 * outputs + layers) / 1e8, rel=0.1)
    # All that is sent is waited for; what is received, and takes nearly as long as a step, is not.
    assert sim.step(on_servers, 1) - 0.02 == pytest.approx(1e6 / 1e8, rel=0.1)


def test_nothing_is_extrapolated_from_a_simulation_that_is_off():
    sim = scale.Simulation(results_of(0.02, 1e8))
    assert scale.extrapolated(sim).startswith("Not extrapolated, as the simulation is off by more than 15 % in ")
    for cell in scale.of(sim.rows, "cell", gbit=1):
        cell["step_s"] = sim.predict(cell)
    table = scale.extrapolated(sim).splitlines()
    assert len(table) == 2 + 3
    assert table[-1].startswith(f"| {STALE} | 1 | ")


def test_an_auc_is_reached_between_two_points():
    curve = [(10, 1.0, 0.6), (20, 3.0, 0.8), (30, 4.0, 0.79)]
    assert scale.seconds_to(curve, 0.7) == pytest.approx(2.0)
    assert scale.seconds_to(curve, 0.55) == pytest.approx(0.5)
    assert scale.seconds_to(curve, 0.81) == float("inf")


def test_tables_have_the_shape_that_is_asked_for():
    for name, shape in published.MODELS.items():
        tables, _ = published.tables_of(name)
        dims = [table.embedding_dim for table in tables]
        assert (len(tables), np.mean(dims)) == (shape.tables, pytest.approx(shape.dims[1], rel=0.001))
        assert shape.dims[0] <= min(dims) <= max(dims) <= shape.dims[2]
        assert sum(t.num_embeddings * t.embedding_dim for t in tables) == pytest.approx(shape.parameters, rel=0.001)


def test_a_hundred_trillion_parameters_fit_in_16_bits_alone():
    refused, fits = published.persia(100, torch.float32), published.persia(100)
    assert "26 tables need 406 TB with optimizer states" in refused["error"]
    assert "short by " in refused["error"]
    assert "16-bit tables" in refused["error"]
    assert fits["row_bytes"] == 64 * 2 + 4 + INDEX_BYTES
    assert fits["bytes_a_server"] * 30 < 360e12
    assert fits["step_s"] == pytest.approx(published.persia(6.25)["step_s"], rel=0.05)


def test_twelve_trillion_parameters_do_not_fit_into_16_tb_of_host_memory():
    with pytest.raises(PlanError, match=r"need 24\.2 TB with optimizer states.*short by .*it fits with 256 ranks, or "):
        published.planned("F1", 128, 1e12)


def test_the_page_has_the_figures_of_the_files():
    page = (report.ROOT / scale.PAGE).read_text()
    assert published.filled(page, result_files.read(result_files.newest("scale"))["rows"]) == page
    results = result_files.read(result_files.newest(scale.KIND))
    assert scale.filled(page, scale.Simulation(results), results["environment"]) == page
