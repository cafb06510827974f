"""Serving: requests per second and latency of `tritonemb serve`, beside plain PyTorch behind FastAPI.

`python -m benchmarks.bench_serving` starts both servers in turns, on this machine, with a DLRM of 26 tables. A request
is one row, or MLPerf's shape: a user with 100 to 700 candidates, 270 on average. First the peak, with connections that
send one request after another; then requests at half of our peak, at random times, whether or not others are answered.
`--soak N` sends N single rows to tritonemb, for `--soak-minutes` at most: scores must stay the same, and memory flat.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring.report import publish

NUM_DENSE, NUM_TABLES, DIM, ROWS = 13, 26, 64, 20_000
DENSE, SPARSE = [f"d{i}" for i in range(NUM_DENSE)], [f"c{i}" for i in range(NUM_TABLES)]
USER_COLUMNS = [*DENSE, *SPARSE[:13]]  # of a user; the others are those of a candidate
MLP = ("512", "256")
CONNECTIONS = {"1 row": 32, "user, 270 candidates": 4}
GOAL, P99_GOAL_MS = 3.0, 60.0
MAX_GROWTH_MIB = 16.0  # of a soak's memory, after its first tenth


def make_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    dense, ids = generator.random((count, NUM_DENSE)).round(4), generator.integers(1 << 30, size=(count, NUM_TABLES))
    pairs = zip(dense.tolist(), ids.tolist(), strict=True)
    return [dict(zip(DENSE + SPARSE, [*numbers, *row_ids], strict=True)) for numbers, row_ids in pairs]


def train_run(folder: Path, num_embeddings: int = ROWS) -> Path:
    """Train a run for one step, on a log of random rows; also write its weights for the peer."""
    rows = make_rows(600)
    with (folder / "log.csv").open("w") as file:
        file.write(",".join(["click", *DENSE, *SPARSE]) + "\n")
        for index, row in enumerate(rows):
            file.write(",".join(map(str, [index % 2, *row.values()])) + "\n")
    command = ["train", "--data", folder / "log.csv", "--out", folder / "run", "--label", "click", "--dense", *DENSE]
    command += ["--sparse", *SPARSE, "--integers", *SPARSE, "--num-embeddings", num_embeddings, "--embedding-dim", DIM]
    command += ["--bottom-mlp", *MLP, "--top-mlp", *MLP, "--max-steps", 1, "--log-transform", "false"]
    subprocess.run([sys.executable, "-m", "tritonemb", *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    return folder / "run"


@contextmanager
def server(command: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Process id and port of a server, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen([word.format(port=port) for word in command], env=environment)
    try:
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
                connection.request("GET", "/")  # answered when the model is loaded
                connection.getresponse().read()
                break
            except ConnectionError:
                if process.poll() is not None:
                    raise RuntimeError(f"{command} has ended") from None
                time.sleep(0.05)
        yield process.pid, port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()


class Connection(asyncio.Protocol):
    """Keep-alive connection with one request at a time; `answered` is called once with its status and body, 0 if the
    connection is lost."""

    answered: Callable[[int, bytes], None] | None = None
    _data = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if separator and len(body) >= int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]):
            self._data = b""
            self._finish(int(head[9:12]), body)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(0, repr(error).encode())

    def _finish(self, status: int, body: bytes) -> None:
        answered, self.answered = self.answered, None
        if answered is not None:
            answered(status, body)


def encode(body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def send(
    port: int, requests: Sequence[bytes], connections: int, seconds: float, rate: float = 0,
    answers: dict[bytes, bytes] | None = None,
) -> list[float]:  # fmt: skip
    """Send requests for a time, and return their latencies; with a rate, at times of a Poisson process. RuntimeError if
    one fails, or has another answer than in `answers` of earlier calls."""
    loop, generator, latencies = asyncio.get_running_loop(), np.random.default_rng(1), list[float]()
    idle, due, failures, index = list[Connection](), list[float](), list[str](), 0
    end = loop.time() + seconds

    def start() -> None:
        nonlocal index
        while idle and due:
            connection, begin = idle.pop(0), due.pop(0)  # in turns: idle ones are closed after some seconds
            request = requests[index % len(requests)]
            connection.answered = partial(finish, connection, begin, request)
            connection.transport.write(request)
            index += 1

    def finish(connection: Connection, begin: float, request: bytes, status: int, body: bytes) -> None:
        if status != 200 or (answers is not None and answers.setdefault(request, body) != body):
            failures.append(f"status {status}, {body[:200]!r}, of the request {request[-200:]!r}")
        latencies.append(loop.time() - begin)
        idle.append(connection)
        if not rate and loop.time() < end:
            due.append(loop.time())
        start()

    for _ in range(connections):
        _, protocol = await loop.create_connection(Connection, "127.0.0.1", port)
        idle.append(protocol)
    if not rate:
        due += [loop.time()] * connections
        start()
    arrival = loop.time()
    while not failures and (loop.time() < end or len(idle) < connections):
        if rate and loop.time() < end:
            arrival += generator.exponential(1 / rate)
            await asyncio.sleep(max(0.0, arrival - loop.time()))
            due.append(arrival)
            start()
        else:
            await asyncio.sleep(0.01)
    for connection in idle:
        connection.transport.close()
    if failures:
        raise RuntimeError(failures[0])
    return latencies


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(process: int) -> float:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def measure(
    port: int, process: int, requests: Sequence[bytes], connections: int, seconds: float, rate: float = 0
) -> Any:
    """Rate, percentiles in ms, and the server's CPU time per request."""
    cpu, begin = cpu_seconds(process), time.perf_counter()
    latencies = asyncio.run(send(port, requests, connections, seconds, rate))
    elapsed = time.perf_counter() - begin
    p50, p99 = (np.percentile(latencies, [50, 99]) * 1e3).tolist()
    cpu_ms = (cpu_seconds(process) - cpu) / len(latencies) * 1e3
    return {"requests_per_s": len(latencies) / elapsed, "p50_ms": p50, "p99_ms": p99, "cpu_ms": cpu_ms}


def soak(port: int, process: int, requests: Sequence[bytes], count: int, minutes: float) -> list[dict[str, float]]:
    """Send single rows, and measure the server's memory up to 20 times."""
    rows, answers, num_requests = list[dict[str, float]](), dict[bytes, bytes](), 0
    begin = time.monotonic()
    while num_requests < count and (seconds := time.monotonic() - begin) < 60 * minutes:
        num_requests += len(asyncio.run(send(port, requests, CONNECTIONS["1 row"], 2.0, answers=answers)))
        if num_requests >= (len(rows) + 1) * count / 20:
            rows.append({"requests": num_requests, "seconds": seconds, "resident_mib": resident_mib(process)})
            print("{requests:,} requests, {seconds:,.0f} s: {resident_mib:,.1f} MiB".format(**rows[-1]), flush=True)
    return rows


def soak_problems(rows: Sequence[dict[str, float]], count: int) -> list[str]:
    if not rows or rows[-1]["requests"] < count:
        return [f"--soak-minutes have passed after {rows[-1]['requests'] if rows else 0:,} of {count:,} requests"]
    growth = rows[-1]["resident_mib"] - min(row["resident_mib"] for row in rows if row["requests"] >= count / 10)
    return [f"memory has grown by {growth:.0f} MiB"] * (growth > MAX_GROWTH_MIB)


def make_requests() -> dict[str, list[bytes]]:
    """Requests by shape, in the same form for both servers."""
    generator, rows = np.random.default_rng(2), make_rows(2_000, seed=3)
    sizes = (100 + 600 * generator.beta(1.4, 3.54, size=50)).astype(int)
    shapes: dict[str, list[bytes]] = {"1 row": [encode(row) for row in rows[:500]], "user, 270 candidates": []}
    for size in sizes:
        user, *chosen = (rows[index] for index in generator.integers(len(rows), size=size + 1))
        candidates = [{name: row[name] for name in SPARSE[13:]} for row in chosen]
        request = {"user": {name: user[name] for name in USER_COLUMNS}, "candidates": candidates}
        shapes["user, 270 candidates"].append(encode(request))
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=int, default=0, help="number of single rows")
    parser.add_argument("--soak-minutes", type=float, default=25.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run, shapes = train_run(Path(name)), make_requests()
        commands = {
            "tritonemb": [sys.executable, "-m", "tritonemb", "serve", str(run), "--address", "http://127.0.0.1:{port}"],
            "FastAPI": [sys.executable, "-m", "benchmarks.serving_peer", "{port}"],
        }
        if options.soak:
            timeouts = "--timeout-ms", "60000", "--slow-ms", "60000"  # other programs may take the machine's time
            with server([*commands["tritonemb"], *timeouts]) as (process, port):
                rows = soak(port, process, shapes["1 row"], options.soak, options.soak_minutes)
            publish("serving-soak", rows, soak_problems(rows, options.soak))
            return
        # Peaks in turns; the best of each, since other programs may take the machine's time.
        best = dict[tuple[str, str], Any]()
        for _ in range(options.rounds):
            for implementation, command in commands.items():
                with server(command) as (process, port):
                    for shape, requests in shapes.items():
                        measure(port, process, requests, CONNECTIONS[shape], 1.0)
                        result = measure(port, process, requests, CONNECTIONS[shape], options.seconds)
                        key = implementation, shape
                        best[key] = max(best.get(key, result), result, key=lambda values: values["requests_per_s"])
                        print(implementation, shape, {k: round(float(v), 2) for k, v in result.items()}, flush=True)
        for shape in shapes:
            ratio = best["tritonemb", shape]["requests_per_s"] / best["FastAPI", shape]["requests_per_s"]
            print(f"{shape}: {ratio:.2f} times as many requests per second, goal {GOAL}")
        with server(commands["tritonemb"]) as (process, port):
            for shape, requests in shapes.items():
                rate = best["tritonemb", shape]["requests_per_s"] / 2
                results = [measure(port, process, requests, 64, options.seconds, rate) for _ in range(options.rounds)]
                values = min(results, key=lambda values: values["p99_ms"])
                times = f"p50 {values['p50_ms']:.2f} ms, p99 {values['p99_ms']:.2f} ms"
                print(f"{shape}, {rate:,.0f} requests/s: {times}, goal {P99_GOAL_MS}")


if __name__ == "__main__":
    main()
