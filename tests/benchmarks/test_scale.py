"""The study of scale: a simulated schedule against one made by hand, refusals, and the page's figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.measuring import result_files
from benchmarks.studies import scale, scale_page
from benchmarks.studies.scale import How, Stage, period, simulate
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


def small(host: float = 2e12) -> tuple:
    tables = [TableConfig(f"t{n}", 10**6, 64, dtype=torch.float16) for n in range(8)]
    stats = {table.name: TableStats(4.0, scale.zipf(10**6)) for table in tables}
    made = plan(tables, Topology(4, 2, host=host, hbm=5e8), batch_size=512, stats=stats)
    return made.report.model, made


def test_steps_are_those_of_the_cost_model_and_fewer_with_the_pipeline():
    model, made = small()
    alone = scale.steps(model, made, How(pipeline=False))["step_s"]
    assert alone == pytest.approx(made.report.prediction.step, rel=0.02)
    assert (
        scale.steps(model, made)["step_s"]
        < alone
        < scale.steps(model, made, How(pipeline=False, fused=False))["step_s"]
    )


def test_tables_have_the_shape_that_is_asked_for():
    for name, shape in scale.MODELS.items():
        tables, _ = scale.tables_of(name)
        dims = [table.embedding_dim for table in tables]
        assert (len(tables), np.mean(dims)) == (shape.tables, pytest.approx(shape.dims[1], rel=0.001))
        assert shape.dims[0] <= min(dims) <= max(dims) <= shape.dims[2]
        assert sum(t.num_embeddings * t.embedding_dim for t in tables) == pytest.approx(shape.parameters, rel=0.001)


def test_a_hundred_trillion_parameters_fit_in_16_bits_alone():
    refused, fits = scale.persia(100, torch.float32), scale.persia(100)
    assert "26 tables need 406 TB with optimizer states" in refused["error"]
    assert "short by " in refused["error"]
    assert "16-bit tables" in refused["error"]
    assert fits["row_bytes"] == 64 * 2 + 4 + INDEX_BYTES
    assert fits["bytes_a_server"] * 30 < 360e12
    assert fits["step_s"] == pytest.approx(scale.persia(6.25)["step_s"], rel=0.05)


def test_twelve_trillion_parameters_do_not_fit_into_16_tb_of_host_memory():
    with pytest.raises(PlanError, match=r"need 24\.2 TB with optimizer states.*short by .*it fits with 256 ranks, or "):
        scale.planned("F1", 128, (), 1e12)


def test_offloaded_layers_need_gradients_on_disk():
    for case in scale.OFFLOADED:
        on_host, on_disk = scale.offload(case)
        assert (on_host["grads"], on_disk["grads"]) == ("host", "disk")
        assert (on_host["fits"], on_disk["fits"]) == (False, True)
        assert on_disk["bytes"] == pytest.approx(16e12 if case.nodes == 1 else 16 * 32e12, rel=0.01)
        assert on_disk["host_a_node"] <= 1.5e12 < on_host["host_a_node"]
        assert on_disk["disk_a_node"] * case.nodes >= on_disk["bytes"]
        assert on_disk["step_s"] > on_disk["compute_s"]


def test_the_page_has_the_figures_of_the_file():
    rows = result_files.read(result_files.newest("scale"))["rows"]
    page = (scale_page.ROOT / scale_page.PAGE).read_text()
    assert scale_page.filled(page, rows) == page


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    scale_page.draw(result_files.read(result_files.newest("scale"))["rows"], tmp_path)
    assert all(path.stat().st_size > 10_000 for path in tmp_path.glob("scale-*.png"))
    assert len(list(tmp_path.iterdir())) == 3
