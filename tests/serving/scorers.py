"""A small run, and `tritonemb serve` of it in a process."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import tritonemb as te
from tests.programs import Program
from tests.training.test_run import COLUMNS, SMALL, make_rows, run, write_csv
from tritonemb.flight import pa

NAMES = ("price", "age", "user", "item", "tags")


def train_run(folder: Path) -> SimpleNamespace:
    """A run, rows of requests and their scores."""
    rows = make_rows(300)
    assert (
        run("train", "--data", write_csv(folder / "clicks.csv", rows), "--out", folder / "run", *COLUMNS, *SMALL) == 0
    )
    loaded_run = te.load_run(folder / "run")
    requests = [{name: row[name] for name in NAMES} for row in rows[:60]]
    return SimpleNamespace(run=loaded_run, rows=requests, scores=loaded_run.predict(requests), folder=folder)


def start_server(run_folder: Path, *options: str) -> Program:
    """`tritonemb serve` at a free port, which it prints when it is ready."""
    words = ("serve", str(run_folder), "--address", "http://127.0.0.1:0", "--timeout-ms", "60000", *options)
    return Program("tritonemb", *words, variables={"OMP_WAIT_POLICY": "passive"})


def port_of(program: Program) -> int:
    """The port of a server, once it is ready; EOFError if it ends before."""
    for line in program.output:
        if line.startswith("serving "):
            return int(line.rpartition(":")[2])
    raise EOFError("the server has ended")


def arrow_stream(table: Any, batch_size: int | None = 7, **options: Any) -> bytes:
    """The bytes of a table in Arrow's IPC format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, batch_size)
    return sink.getvalue().to_pybytes()


@contextmanager
def served_at(run_folder: Path, *options: str) -> Iterator[tuple[int, Program]]:
    """Port and process of a server."""
    program = start_server(run_folder, *options)
    try:
        yield port_of(program), program
    finally:
        program.process.kill()
        program.finish()


def request(port: int, method: str, path: str, body: Any = None) -> Any:
    """The content of an answer with status 200; OSError or HTTPException if the server is gone."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        content = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, content
    return content


def call(app: Any, method: str, path: str, body: Any = b"", headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and content of a request, by the app itself."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    pairs = {"content-length": str(len(data)), **(headers or {})}
    messages: list[dict[str, Any]] = []
    halves = [{"body": data[:7], "more_body": True}, {"body": data[7:], "more_body": False}]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", **halves.pop(0)}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    scope = {"method": method, "path": path, "headers": [(k.encode(), v.encode()) for k, v in pairs.items()]}
    asyncio.run(app(scope, receive, send))
    start, content = messages
    is_json = (b"content-type", b"application/json") in start["headers"]
    return start["status"], json.loads(content["body"]) if is_json else content["body"].decode()


def scores_at(port: int, rows: list[dict[str, Any]]) -> list[float]:
    """The scores of rows by a server, as float32."""
    return np.float32(request(port, "POST", "/score", rows)["scores"]).tolist()
