"""Numbers of embedding servers: what they count, how Prometheus reads it, and totals."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple
from urllib.error import HTTPError, URLError

import pytest

import tritonemb as te
from tests.server.jobs import Trainers, batches, local_servers, make, train
from tritonemb.server import Servers, flush
from tritonemb.server.metrics import BOUNDS, MetricsServer, prometheus, scrape, totals
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.transport import LocalTransport
from tritonemb.serving import Follower, Publisher

NAME, LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"[a-zA-Z_][a-zA-Z0-9_]*"
SAMPLE = re.compile(rf'({NAME})(?:\{{((?:{LABEL}="(?:[^"\\\n]|\\[\\n"])*"(?:,(?!\}}))?)+)\}})? (\S+)')
DYNAMIC = {"capacity": 60, "eviction": te.EvictionConfig(protect=4)}
Samples = dict[tuple[str, frozenset], float]


class Family(NamedTuple):
    kind: str
    samples: Samples


def parse(text: str) -> dict[str, Family]:
    """Prometheus' text format 0.0.4, and no more than this module's author may write."""
    assert text.endswith("\n")
    assert "\n\n" not in text
    families: dict[str, Family] = {}
    for block in re.split(r"^(?=# HELP )", text, flags=re.MULTILINE)[1:]:
        help_, type_, *lines = block.splitlines()
        name = re.fullmatch(rf"# HELP ({NAME}) \S.*", help_)[1]
        kind = re.fullmatch(rf"# TYPE {name} (gauge|counter|histogram)", type_)[1]
        assert name not in families
        assert name.endswith("_total") == (kind == "counter")
        samples: Samples = {}
        for line in lines:
            of, labels, value = SAMPLE.fullmatch(line).groups()
            assert of in ([f"{name}_{part}" for part in ("bucket", "sum", "count")] if kind == "histogram" else [name])
            pairs = re.findall(rf'({LABEL})="((?:[^"\\]|\\.)*)"', labels or "")
            assert len(dict(pairs)) == len(pairs)
            key = of, frozenset((label, unescape(inputs)) for label, inputs in pairs)
            assert key not in samples
            samples[key] = float(value)
        assert samples
        families[name] = Family(kind, samples)
    return families


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda result: {"n": "\n"}.get(result[1], result[1]), text)


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    family = next(f for n, f in families.items() if name in (f"tritonemb_{n}", n) or name.startswith(f"{n}_"))
    return family.samples[name, frozenset(labels.items())]


def buckets(families: dict[str, Family], **labels: str) -> Iterator[float]:
    for bound in (*map(str, BOUNDS), "+Inf"):
        yield value(families, "tritonemb_staleness_steps_bucket", **labels, le=bound)


def test_statistics_as_prometheus_reads_them():
    steps, staleness = 12, 3
    with local_servers(2) as servers:
        model = make(servers, staleness, dynamic=DYNAMIC)
        train(model, steps, ahead=3)
        model.state_dict()  # read when all pushes have been taken
        statistics = servers.statistics()
        families = [parse(prometheus(statistic, {"server": str(n)})) for n, statistic in enumerate(statistics)]
        again = parse(prometheus(servers.statistics()[0], {"server": "0"}))
    for number, (item, result) in enumerate(zip(statistics, families, strict=True)):
        of = {"server": str(number), "collection": "tables"}
        assert value(result, "tritonemb_pulls_total", **of) == steps
        assert value(result, "tritonemb_steps_total", **of) == steps - staleness
        assert value(result, "tritonemb_waiting_pushes", **of) == staleness
        assert value(result, "tritonemb_waiting_pulls", **of) == 0
        # It begins with nothing to miss: 0, 1, 2, then 3.
        assert list(buckets(result, **of)) == [1, 2, 3, *[steps] * (len(BOUNDS) + 1 - 3)]
        assert value(result, "tritonemb_staleness_steps_sum", **of) == 0 + 1 + 2 + 3 * (steps - 3)
        assert value(result, "tritonemb_staleness_steps_count", **of) == steps
        for table, numbers in item["collections"]["tables"]["tables"].items():
            for name, key in (("rows", "rows"), ("evictions_total", "evictions"), ("bytes", "num_bytes")):
                assert value(result, f"tritonemb_table_{name}", **of, table=table) == numbers[key]
    uptime = value(families[0], "tritonemb_uptime_seconds", server="0")
    assert 0 < uptime < value(again, "tritonemb_uptime_seconds", server="0") < 600
    both = totals(statistics)["tables"]
    parts = [statistic["collections"]["tables"] for statistic in statistics]
    assert (both["pulls"], both["steps"], both["waiting_pushes"]) == (steps, steps - staleness, 2 * staleness)
    assert both["staleness"] == {"0": 2, "1": 2, "2": 2, "3": 2 * (steps - 3)}
    assert both["tables"]["b"]["rows"] == sum(part["tables"]["b"]["rows"] for part in parts)
    assert all("b" in part["tables"] for part in parts)
    assert both["tables"]["d"]["evictions"] > 0


def test_totals_of_servers_that_are_not_alike():
    def server(pulls: int, staleness: dict[str, int], **tables: int) -> dict:
        named = {name: {"rows": rows} for name, rows in tables.items()}
        of = {"pulls": pulls, "steps": pulls - 1, "waiting_pulls": 1, "waiting_pushes": 0, "staleness": staleness}
        return {"collections": {"x": {**of, "tables": named}}}

    assert totals([]) == {}
    result = totals([server(5, {"0": 3, "10": 1}, a=2), server(4, {"2": 1, "0": 2}, a=3, b=0), {"collections": {}}])
    assert list(result["x"]["staleness"]) == ["0", "2", "10"]
    assert result == {
        "x": {
            "pulls": 4, "steps": 3, "waiting_pulls": 2, "waiting_pushes": 0, "staleness": {"0": 5, "2": 1, "10": 1},
            "tables": {"a": {"rows": 5}, "b": {"rows": 0}},
        }
    }  # fmt: skip


def test_what_waits():
    def waiting() -> tuple[int, ...]:
        models[0].state_dict()  # read when all before it has been taken
        result = servers.statistics()[0]["collections"]["tables"]
        return tuple(result[key] for key in ("waiting_pulls", "waiting_pushes", "pulls", "steps"))

    with local_servers(1) as servers:
        models = [make(servers, group=Trainers(rank, 2)) for rank in range(2)]
        first = te.nn.prefetch(models[0], next(batches(1)))
        assert waiting() == (1, 0, 0, 0)
        second = te.nn.prefetch(models[1], next(batches(1)))
        models[0](first).sum().backward()
        assert waiting() == (0, 1, 1, 0)
        models[1](second).sum().backward()
        assert waiting() == (0, 0, 1, 1)


def test_the_log_and_the_state(tmp_path):
    server = EmbeddingServer("s", tmp_path, "disk")
    with Servers([LocalTransport(server)], [server]) as servers:
        (connection,) = servers.connections
        assert parse(scrape(server))["tritonemb_state_version"].samples == {("tritonemb_state_version", frozenset()): 0}
        model = make(servers)
        initial = connection.query("stats")["stats"]
        train(model, 2)
        flush(model)
        final = connection.query("stats")["stats"]
        assert initial["version"] == final["version"] == 1
        logged = final["log_bytes"] - initial["log_bytes"]
        assert logged > 2_000
        assert (tmp_path / "log-1").stat().st_size == final["log_bytes"]
        connection.submit("save", {}).result()
        saved = connection.query("stats")["stats"]
        assert (saved["version"], saved["log_bytes"]) == (2, 0)


def test_names_that_need_care():
    table = {"rows": 3, "evictions": 0}
    odd = 'a "b"\\n\n{c="d"},é'
    statistics = {"seconds": 0.25, "queue": 10**17, "collections": {odd: {"pulls": 1, "tables": {odd: table}}}}
    result = parse(prometheus(statistics, {"server": odd}))
    assert value(result, "tritonemb_table_rows", server=odd, collection=odd, table=odd) == 3
    assert value(result, "tritonemb_uptime_seconds", server=odd) == 0.25
    assert value(result, "tritonemb_queue_length", server=odd) == 10**17
    assert "tritonemb_staleness_steps" not in result
    for name in ("", "1a", "a-b", "__a", "table", "le", "é", "a\n"):
        with pytest.raises(ValueError, match="is not a valid label name, or is reserved"):
            prometheus(statistics, {name: "x"})


def get(address: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_a_server_is_scraped():
    with EmbeddingServer("é") as server, MetricsServer(0, lambda: scrape(server, {"server": server.name})) as metrics:
        status, kind, text = get(metrics.address)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert value(parse(text), "tritonemb_queue_length", server="é") == 0
        assert get(f"{metrics.address}?x=1")[0] == 200
        assert get(metrics.address.replace("metrics", "other"))[0] == 404
        port = int(metrics.address.split(":")[2].partition("/")[0])
        with pytest.raises(OSError, match="in use"):
            MetricsServer(port, str)
    with pytest.raises(URLError):
        get(metrics.address)
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def test_a_scrape_that_fails():
    def text() -> str:
        raise TimeoutError("é is busy")

    with MetricsServer(0, text) as metrics:
        assert get(metrics.address) == (503, "text/plain; version=0.0.4; charset=utf-8", "TimeoutError: é is busy\n")


def test_a_follower_is_scraped(tmp_path):
    with Follower(tmp_path, poll=None) as follower:
        result = parse(scrape(follower))
        assert value(result, "tritonemb_follower_failing") == 1
        assert "tritonemb_follower_age_seconds" not in result
        with local_servers(1) as servers:
            model = make(servers)
            train(model, 2)
            Publisher(tmp_path).publish(model, 2)
        follower.refresh()
        result = parse(scrape(follower, {"follower": "f"}))
        assert value(result, "tritonemb_follower_failing", follower="f") == 0
        assert value(result, "tritonemb_follower_step", follower="f") == 2
        assert value(result, "tritonemb_follower_bases_total", follower="f") == 1
        assert 0 <= value(result, "tritonemb_follower_age_seconds", follower="f") < 60
        assert value(result, "tritonemb_table_rows", follower="f", collection="tables", table="a") > 10
