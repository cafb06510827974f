"""Metrics of a trainer, as Prometheus scrapes them while it trains."""

from __future__ import annotations

import urllib.request
from types import SimpleNamespace
from urllib.error import URLError

import pytest

pytest.importorskip("psutil")

from tests.server.test_metrics import parse, value
from tests.training import jobs
from tests.training.callbacks.events import end, log, start, step
from tritonemb.training.callbacks import Callback
from tritonemb.training.callbacks.trackers import Prometheus
from tritonemb.training.config import OutputOptions, TrainConfig
from tritonemb.training.job import _callbacks


def scrape(prometheus):
    with urllib.request.urlopen(prometheus.address, timeout=30) as response:
        return parse(response.read().decode())


def samples_of(families, name):
    return {tuple(sorted(labels)): number for (_, labels), number in families[f"tritonemb_{name}"].samples.items()}


def test_counters_are_sums_and_levels_are_current():
    dynamic = {"t": {"rows": 5, "capacity": 9, "num_bytes": 80, "lookups": 2.5, "hits": 2.0, "evictions": 0.1}}
    cache = {"rows": 30.0, "hit_rate": 0.9, "read": 100.0, "written": 7.5, "stall": 0.25}
    servers = {"tables": {"staleness": {"0": 1, "3": 5}, "pulls": 6, "steps": 3, "tables": {}}}
    waits = {"data": 0.125, "ranks": 0.0, "rows": 0.25}
    prometheus = Prometheus(0, 3)
    prometheus.on_start(start(first_step=100, samples_done=500))
    assert samples_of(scrape(prometheus), "train_steps_total") == {(("rank", "3"),): 100}
    for number in (110, 130):
        prometheus.on_log(log(number, loss=number / 1000, cache=cache, dynamic=dynamic, servers=servers, waits=waits))
    prometheus.on_step(step(131))
    families = scrape(prometheus)
    expected = {
        "train_steps_total": 131, "train_samples_total": step(131).samples, "train_loss": 0.13,
        "cache_rows_total": 30 * 30, "cache_hits_total": 27 * 30, "cache_read_bytes_total": 3000,
    }  # fmt: skip
    for name, number in expected.items():
        assert value(families, f"tritonemb_{name}", rank="3") == pytest.approx(number), name
    for name, number in {"rows": 5, "capacity_rows": 9, "bytes": 80, "lookups_total": 75, "evictions_total": 3}.items():
        assert value(families, f"tritonemb_table_{name}", rank="3", table="t") == pytest.approx(number), name
    for stage, share in waits.items():
        assert value(families, "tritonemb_train_stage_wait_ratio", rank="3", stage=stage) == share
    of = {"rank": "3", "collection": "tables"}
    assert value(families, "tritonemb_train_staleness_steps_bucket", **of, le="2") == 1
    assert value(families, "tritonemb_train_staleness_steps_count", **of) == 6
    prometheus.on_end(end())
    with pytest.raises(URLError):
        scrape(prometheus)


def test_a_port_that_is_in_use_is_refused():
    first = Prometheus(0)
    first.on_start(start())
    with pytest.raises(OSError, match=r"cannot serve metrics at 127.0.0.1:.*; choose another port"):
        Prometheus(int(first.address.split(":")[2].split("/")[0])).on_start(start())
    first.on_end(None)


class Scraper(Callback):
    """Scrapes at some steps, after the log of an earlier one."""

    def __init__(self, prometheus, steps) -> None:
        self.prometheus, self.steps, self.results = prometheus, steps, []

    def on_log(self, log):
        self.log = log

    def on_step(self, step):
        if step.step in self.steps:
            families = scrape(self.prometheus)
            labels, loss = self.prometheus._labels, getattr(self, "log", None) and self.log.loss
            logged = None if loss is None else value(families, "tritonemb_train_loss", **labels) == loss
            names = ("train_steps_total", "train_samples_total")
            self.results.append([value(families, f"tritonemb_{name}", **labels) for name in names] + [logged])


def train(rank):
    prometheus = Prometheus(0, rank)
    scraper = Scraper(prometheus, (2, 7))
    size = 50 if jobs.dist.is_initialized() else 100
    trainer = jobs.make_trainer(jobs.planted(), callbacks=[prometheus, scraper], batch_size=size, epochs=1)
    trainer.fit()
    log = scraper.log
    assert log.ids_per_second > 0
    assert 0 <= sum(log.waits.values()) <= log.data_wait + 1e-9
    return scraper.results


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_serves_its_metrics(ranks, size):
    expected = [[2, 200, None], [7, 700, True]]
    assert (ranks(2).run(train) if size == 2 else [train(0)]) == [expected] * size


def test_local_ranks_have_ports_in_turn(tmp_path):
    config = TrainConfig(output=OutputOptions(tmp_path, metrics_port=9100))
    folder = SimpleNamespace(config=None)
    for rank, port in ((0, 9100), (3, 9101)):
        callbacks = _callbacks(config, folder, SimpleNamespace(rank=rank, local_world_size=2))
        (prometheus,) = (callback for callback in callbacks if isinstance(callback, Prometheus))
        assert (prometheus._port, prometheus._labels) == (port, {"rank": str(rank)})
    assert not _callbacks(TrainConfig(), folder, SimpleNamespace(rank=1, local_world_size=2))
    with pytest.raises(ValueError, match="metrics_port"):
        OutputOptions(metrics_port=0)
