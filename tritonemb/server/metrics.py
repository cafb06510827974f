"""Numbers of embedding servers and followers: for Prometheus, over HTTP, and for the report of a run."""

import re
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, chain
from typing import Any

from tritonemb.server.transport import Service, Values
from tritonemb.utils import Closeable

SECONDS = 5.0  # to answer a scrape
BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # steps, of the histogram of staleness
METRICS = {  # by key of the statistics: name, kind and meaning
    "seconds": "uptime_seconds gauge Seconds since the server was started.",
    "queue": "queue_length gauge Messages that wait for the server's thread.",
    "version": "state_version gauge How often the state was saved.",
    "log_bytes": "log_bytes gauge Bytes of the log since the state was saved.",
    "step": "follower_step gauge Steps whose updates the follower's rows have.",
    "age": "follower_age_seconds gauge Seconds since the snapshot was taken that the follower serves.",
    "failing": "follower_failing gauge 1 if the newest snapshot could not be loaded.",
    "bases": "follower_bases_total counter Whole snapshots that were loaded.",
    "increments": "follower_increments_total counter Snapshots of changes that were loaded.",
    "pulls": "pulls_total counter Batches whose rows were read.",
    "steps": "steps_total counter Steps whose gradients were applied.",
    "waiting_pulls": "waiting_pulls gauge Trainers' batches that wait for their rows.",
    "waiting_pushes": "waiting_pushes gauge Trainers' batches whose gradients have not been applied.",
    "rows": "table_rows gauge Rows that ids have.",
    "capacity": "table_capacity_rows gauge Rows that there is room for.",
    "num_bytes": "table_bytes gauge Bytes of rows, their states and their index.",
    "lookups": "table_lookups_total counter Ids of batches that were trained, as often as they occur.",
    "hits": "table_hits_total counter Of these, ids that had rows before.",
    "inserts": "table_inserts_total counter Rows that were given to new ids.",
    "refused": "table_refused_total counter Occurrences of ids that were not admitted.",
    "evictions": "table_evictions_total counter Rows that were taken from ids.",
    "staleness": "staleness_steps histogram Steps whose updates a trainer's batch has missed.",
}


def prometheus(statistics: Values, labels: Mapping[str, str] | None = None) -> str:
    """A server's or a follower's statistics in Prometheus' text format 0.0.4; each number has these labels.

    ValueError for a label with a name that is taken, or that Prometheus does not take.
    """
    for name in (labels := labels or {}):
        if not re.fullmatch("(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name in ("collection", "table", "le"):
            raise ValueError(f"a label cannot be called {name!r}")
    parts: list[tuple[Values, Mapping[str, str]]] = [(statistics, labels)]
    for collection, values in statistics["collections"].items():
        parts.append((values, {**labels, "collection": collection}))
        for table, of_table in values["tables"].items():
            parts.append((of_table, {**labels, "collection": collection, "table": table}))
    lines = []
    for key, described in METRICS.items():
        name, kind, text = described.split(" ", 2)
        samples = _histogram if kind == "histogram" else _sample
        found = [line for values, of in parts if values.get(key) is not None for line in samples(name, of, values[key])]
        lines += [f"# HELP tritonemb_{name} {text}", f"# TYPE tritonemb_{name} {kind}", *found] if found else []
    return "\n".join(lines) + "\n"


def _sample(name: str, labels: Mapping[str, str], value: float) -> list[str]:
    escaped = {key: re.sub(r'[\\"]', r"\\\g<0>", text).replace("\n", r"\n") for key, text in labels.items()}
    inside = ",".join(f'{key}="{text}"' for key, text in escaped.items())
    return [f"tritonemb_{name}{{{inside}}} {value + 0}" if inside else f"tritonemb_{name} {value + 0}"]


def _histogram(name: str, labels: Mapping[str, str], staleness: Mapping[str, int]) -> list[str]:
    counts = [0] * (len(BOUNDS) + 1)
    for steps, count in staleness.items():
        counts[bisect_left(BOUNDS, int(steps))] += count
    buckets = zip((*map(str, BOUNDS), "+Inf"), accumulate(counts), strict=True)
    lines = [_sample(f"{name}_bucket", {**labels, "le": bound}, count) for bound, count in buckets]
    lines.append(_sample(f"{name}_sum", labels, sum(int(steps) * count for steps, count in staleness.items())))
    return list(chain(*lines, _sample(f"{name}_count", labels, sum(counts))))


def scrape(service: Service, labels: Mapping[str, str] | None = None) -> str:
    """`prometheus` of a server or a follower in this process; TimeoutError if it is busy for `SECONDS`."""
    answer: Future[Values] = Future()
    service.receive(({"op": "stats", "ask": 0}, []), lambda message: answer.set_result(message[0]))
    return prometheus(answer.result(SECONDS)["stats"], labels)


def totals(statistics: Sequence[Values]) -> dict[str, Values]:
    """Of each collection, what all servers' statistics say together; `staleness` counts each server's part of a batch.

    `pulls` and `steps` are those that all servers have done; all else are sums.
    """
    found: dict[str, Values] = {}
    for name in dict.fromkeys(name for each in statistics for name in each["collections"]):
        parts = [each["collections"][name] for each in statistics if name in each["collections"]]
        tables, staleness = dict[str, Counter[str]](), Counter[str]()
        for part in parts:
            staleness.update(part["staleness"])
            for table, numbers in part["tables"].items():
                tables.setdefault(table, Counter()).update(numbers)
        found[name] = {key: min(part[key] for part in parts) for key in ("pulls", "steps")}
        found[name] |= {key: sum(part[key] for part in parts) for key in ("waiting_pulls", "waiting_pushes")}
        found[name]["staleness"] = {steps: staleness[steps] for steps in sorted(staleness, key=int)}
        found[name]["tables"] = {table: dict(numbers) for table, numbers in tables.items()}
    return found


class MetricsServer(Closeable):
    """Serves a text to Prometheus at `address`, http://127.0.0.1:PORT/metrics, which this machine alone reaches.

    Args:
        port: 0 takes a free one.
        text: is called for each scrape, by several threads; where it raises, the scrape fails with status 503.

    OSError if the port is in use.
    """

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = SECONDS

            def do_GET(self) -> None:
                status, answer = 404, f"there is no {self.path}, but /metrics\n"
                if self.path.partition("?")[0] == "/metrics":
                    try:
                        status, answer = 200, text()
                    except Exception as error:
                        status, answer = 503, f"{type(error).__name__}: {error}\n"
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(answer.encode())))
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise OSError(f"cannot serve numbers at 127.0.0.1:{port}: {error.strerror}; take another port") from error
        self.address = f"http://127.0.0.1:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
