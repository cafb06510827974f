"""Metrics for Prometheus over HTTP, of embedding servers, followers and trainers; totals of servers for logs."""

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

from tritonemb.server.transport import Service, Values
from tritonemb.utils import Closeable

TIMEOUT = 5.0  # seconds to answer a scrape
BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # steps, of the staleness histogram
METRICS = {  # by key of the statistics: name, type and help text
    "seconds": "uptime_seconds gauge Seconds since the start of the server.",
    "queue": "queue_length gauge Messages queued for the server's thread.",
    "version": "state_version gauge Version of the server's snapshot.",
    "log_bytes": "log_bytes gauge Bytes of the log since the last snapshot.",
    "step": "follower_step gauge Steps whose updates the follower's rows have.",
    "age": "follower_age_seconds gauge Seconds since the follower's snapshot was taken.",
    "failing": "follower_failing gauge 1 if the newest snapshot could not be loaded.",
    "bases": "follower_bases_total counter Full snapshots that were loaded.",
    "increments": "follower_increments_total counter Incremental snapshots that were loaded.",
    "pulls": "pulls_total counter Batches whose rows were read.",
    "steps": "steps_total counter Steps whose gradients were applied.",
    "waiting_pulls": "waiting_pulls gauge Pending pulls.",
    "waiting_pushes": "waiting_pushes gauge Pushes that have not been applied.",
    "rows": "table_rows gauge Rows in use.",
    "capacity": "table_capacity_rows gauge Maximum number of rows.",
    "num_bytes": "table_bytes gauge Bytes of rows, optimizer states and index.",
    "lookups": "table_lookups_total counter Occurrences of ids in trained batches.",
    "hits": "table_hits_total counter Lookups of ids that had rows already.",
    "inserts": "table_inserts_total counter Rows inserted for new ids.",
    "refused": "table_refused_total counter Occurrences of ids that were not admitted.",
    "evictions": "table_evictions_total counter Rows evicted.",
    "staleness": "staleness_steps histogram Steps whose updates a pull has missed.",
}


def prometheus(statistics: Values, labels: Mapping[str, str] | None = None) -> str:
    """Format the statistics of a server or a follower for Prometheus, text format 0.0.4; each sample has these labels.

    ValueError for a label name that is reserved or not valid.
    """
    for name in (labels := labels or {}):
        if not re.fullmatch("(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name in ("collection", "table", "le"):
            raise ValueError(f"{name!r} is not a valid label name, or is reserved")
    groups: list[tuple[Values, Mapping[str, str]]] = [(statistics, labels)]
    for collection, values in statistics["collections"].items():
        groups.append((values, {**labels, "collection": collection}))
        for table, table_values in values["tables"].items():
            groups.append((table_values, {**labels, "collection": collection, "table": table}))
    return format_metrics(METRICS, groups)


def format_metrics(metrics: Mapping[str, str], groups: Sequence[tuple[Values, Mapping[str, str]]]) -> str:
    """Format groups of values, each with its labels, for Prometheus; `metrics` is like `METRICS`."""
    lines = []
    for key, metric in metrics.items():
        name, kind, text = metric.split(" ", 2)
        samples = [_samples(name, labels, values[key]) for values, labels in groups if values.get(key) is not None]
        header = [f"# HELP tritonemb_{name} {text}", f"# TYPE tritonemb_{name} {kind}"]
        lines += [*header, *chain(*samples)] if samples else []
    return "\n".join(lines) + "\n"


def _samples(name: str, labels: Mapping[str, str], value: float | Mapping[str, int]) -> list[str]:
    """Format a number, or a histogram, whose `value` has a count by number of steps."""
    if not isinstance(value, Mapping):
        escaped = {key: re.sub(r'[\\"]', r"\\\g<0>", text).replace("\n", r"\n") for key, text in labels.items()}
        label_text = ",".join(f'{key}="{text}"' for key, text in escaped.items())
        return [f"tritonemb_{name}{{{label_text}}} {value + 0}" if label_text else f"tritonemb_{name} {value + 0}"]
    lines = []
    for bound in (*BOUNDS, math.inf):
        count = sum(count for steps, count in value.items() if int(steps) <= bound)
        lines += _samples(f"{name}_bucket", {**labels, "le": "+Inf" if bound == math.inf else str(bound)}, count)
    lines += _samples(f"{name}_sum", labels, sum(int(steps) * count for steps, count in value.items()))
    return lines + _samples(f"{name}_count", labels, sum(value.values()))


def scrape(service: Service, labels: Mapping[str, str] | None = None) -> str:
    """Format the statistics of a server or a follower in this process; TimeoutError if it is busy for `TIMEOUT`."""
    reply: Future[Values] = Future()
    service.receive(({"op": "stats", "query": 0}, []), lambda message: reply.set_result(message[0]))
    return prometheus(reply.result(TIMEOUT)["stats"], labels)


def totals(statistics: Sequence[Values]) -> dict[str, Values]:
    """Aggregate the statistics of all servers, by collection; `staleness` counts a pull once per server or tablet.

    `pulls` and `steps` are the minimum over servers, all other values are sums.
    """
    result: dict[str, Values] = {}
    parts = [(key.partition("#")[0], part) for server in statistics for key, part in server["collections"].items()]
    for name in dict.fromkeys(name for name, _ in parts):
        servers = [part for collection, part in parts if collection == name]
        result[name] = _sums(servers) | {key: min(server[key] for server in servers) for key in ("pulls", "steps")}
        result[name]["staleness"] = dict(sorted(result[name]["staleness"].items(), key=lambda item: int(item[0])))
    return result


def _sums(values: Sequence[Values]) -> Values:
    """Sum numbers by key, also in nested dicts; a dict may lack a key."""
    columns = {key: [value[key] for value in values if key in value] for key in chain(*values)}
    return {key: _sums(column) if isinstance(column[0], dict) else sum(column) for key, column in columns.items()}


class MetricsServer(Closeable):
    """HTTP server of metrics at `address`, http://127.0.0.1:PORT/metrics, reachable from this machine only.

    Args:
        port: 0 selects a free port.
        text: called for each scrape, by several threads; if it raises, the scrape fails with status 503.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = TIMEOUT

            def do_GET(self) -> None:
                status, body = 404, f"unknown path {self.path}; use /metrics\n"
                if self.path.partition("?")[0] == "/metrics":
                    try:
                        status, body = 200, text()
                    except Exception as error:
                        status, body = 503, f"{type(error).__name__}: {error}\n"
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: Any) -> None:
                """Log nothing."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise OSError(f"cannot serve metrics at 127.0.0.1:{port}: {error.strerror}; choose another port") from error
        self.address = f"http://127.0.0.1:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
