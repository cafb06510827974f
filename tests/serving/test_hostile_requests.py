"""Requests that no honest client sends: a clear error of the client, scores of others as ever, bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("uvicorn")

from tests.serving.scorers import NAMES, arrow_stream, call, scores_at, served_at, train_run
from tests.serving.test_scorer import tensors_of
from tritonemb.flight import pa
from tritonemb.serving import http
from tritonemb.serving.http import App
from tritonemb.serving.scorer import Scorer, missing_row

MAX_BODY = 1 << 22


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def app(served):
    with Scorer(served.run, max_queue=1000) as scorer:
        yield App(scorer, "", MAX_BODY, 60.0)


def inputs_of(served: SimpleNamespace) -> list[dict[str, Any]]:
    """Inputs of a row."""
    return tensors_of([{**served.rows[0], "tags": ["a", "c"]}])


def score(app: App, body: Any, path: str = "/score") -> tuple[int, Any]:
    status, content = call(app, "POST", path, body)
    return status, content.get("error", content)


@pytest.mark.parametrize("last", [0, 199_999])
def test_one_of_many_keys_is_duplicate(app, last):
    """In one pass: one per key would take hours."""
    body = "{" + ",".join(f'"{index}":0' for index in range(200_000)) + f',"{last}":1}}'
    assert score(app, body.encode()) == (400, f"duplicate key '{last}'")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet="ab:\"\\\u00e9\U0001f600\n"),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text("ab:", max_size=2), values, max_size=4),
    max_leaves=25,
)  # fmt: skip


@given(value=JSON, spaces=st.booleans(), ascii_only=st.booleans())
def test_parsed_json_is_that_of_the_standard_library(value, spaces, ascii_only):
    body = json.dumps(value, indent=1 if spaces else None, ensure_ascii=ascii_only)
    expected = json.loads(body)
    for data in body.encode(), body.encode("utf-16"):
        parsed = http.parse_json(data)
        assert repr(parsed) == repr(expected)  # 1 and 1.0, 0.0 and -0.0 differ


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("form", ['{"k":%s}', "[%s]", '{"rows":[%s, {"x":"a:b"}]}'])
def test_duplicate_keys_are_seen_at_any_depth(form, depth):
    for pair in '{"x": 1,"x": 1}', '{"x" :1, "y":2, "x" :1}', '{"a:": 1, "x": ":", "x": ""}', '{"x":0,"\\u0078":1}':
        body = pair
        for _ in range(depth):
            body = form % body
        with pytest.raises(ValueError, match="duplicate key 'x'"):
            http.parse_json(body.encode())


@pytest.mark.parametrize("num_rows", [1001, 10**15])
def test_too_many_rows_are_rejected(served, app, num_rows):
    """Rows without values of their own need few bytes."""
    if num_rows < 10**6:
        status, error = score(app, {"user": served.rows[0], "candidates": [{}] * num_rows})
        assert (status, error) == (400, "the request has 1,001 rows; send up to 1,000 per request")
    inputs = inputs_of(served)
    inputs[-1] |= {"shape": [num_rows, 0], "data": []}
    status, error = score(app, {"inputs": inputs}, "/v2/models/model/infer")
    assert (status, error) == (400, f"input 'tags' has {num_rows:,} rows; send up to 1,000 per request")
    inputs[-1]["shape"] = [1, 0]
    status, content = score(app, {"inputs": inputs}, "/v2/models/model/infer")
    expected = served.run.predict([{**served.rows[0], "tags": []}])
    assert (status, np.float32(content["outputs"][0]["data"]).tolist()) == (200, expected.tolist())


@pytest.mark.parametrize("key", ["name", "datatype"])
def test_an_error_is_short(served, app, key):
    inputs = [{**inputs_of(served)[0], key: "x" * 3_000_000}]
    status, error = score(app, {"inputs": inputs}, "/v2/models/model/infer")
    assert (status, len(error)) == (400, 1000)
    assert len(score(app, {"x" * 3_000_000: 1})[1]) == 1000


@pytest.mark.parametrize("id", [7, [["7"]], None])
def test_an_id_is_a_string(served, app, id):
    status, error = score(app, {"inputs": inputs_of(served), "id": id}, "/v2/models/model/infer")
    assert (status, error) == (400, f"id must be a string, got a {type(id).__name__}")


def test_values_of_any_depth(served, app):
    """Up to the recursion limit of the parser, and beyond it."""
    for depth in (1, 50, 500, *range(940, 1000), 10_000):
        deep, tensors = "[" * depth + "]" * depth, inputs_of(served)
        tensors[0]["datatype"] = "deep"
        for path, body in {
            "/score": served.rows[0] | {"user": "deep"},
            "/v2/models/model/infer": {"inputs": tensors, "id": "deep"},
        }.items():
            status, error = score(app, json.dumps(body).replace('"deep"', deep).encode(), path)
            assert status == 400, error


def test_a_score_that_is_nan_is_an_error_of_the_request_unless_all_are(served):
    scores, run = [np.float32([0.5, np.nan]), np.float32([0.5])], served.run
    fake = SimpleNamespace(transforms=(), encoder=run.encoder, path=run.path, score=lambda batch: scores.pop(0))
    with Scorer(fake) as scorer:
        app = App(scorer, "", MAX_BODY, 60.0)
        assert score(app, served.rows[:2])[0] == 400
        scores += [np.float32([np.nan]), np.float32([np.nan])]
        status, error = score(app, served.rows[:1])
    assert (status, "training has diverged" in error) == (500, True)
    assert len(missing_row(run)) == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("zstd", "compressed or dictionary-encoded"), ("lz4", "compressed or dictionary-encoded"),
        ("V4", "a format before 1.0"), ("dictionary", "compressed or dictionary-encoded"),
        ("string_view", "'user' has the Arrow type string_view, expected"), ("list<null>", "'tags' has the Arrow"),
        ("run_end_encoded", "'user' has the Arrow type run_end_encoded"), ("list<bool>", "'tags' has the Arrow"),
        ("rows", "the request has 1,000,000,000 rows; send up to 1,000"), ("twice", "duplicate column 'user'"),
        ("missing", "missing columns: age"), ("user", "user must not be among the columns of the user"),
        ("list", "must be a JSON object"), ("nan", "not a finite number"), ("cut", "its end is missing"),
        ("more", "its end is missing, or before that of the body"), ("none", "not a valid"),
        ("offsets", "not a valid Arrow IPC stream"), ("utf-8", "not a valid Arrow IPC stream"),
    ],
)  # fmt: skip
def test_arrow_columns_whose_bytes_stand_for_many(served, app, kind, message):
    """Or that are damaged; their memory and time do not depend on what the values would take."""
    options, rows = dict[str, Any](), [row | {"user": "u"} for row in served.rows[:9]]
    columns = {name: pa.array([row[name] for row in rows]) for name in NAMES}
    user, encoded = columns["user"], {"dictionary": "dictionary_encode", "run_end_encoded": "run_end_encode"}
    if kind in encoded:
        columns["user"] = getattr(pa.compute, encoded[kind])(user)
    elif kind == "string_view":
        columns["user"] = pa.array(["u"] * 9, pa.string_view())
    elif kind.startswith("list<"):
        columns["tags"] = pa.array([None] * 9, pa.list_(pa.null() if "null" in kind else pa.bool_()))
    elif kind == "rows":
        columns = dict.fromkeys(NAMES, pa.Array.from_buffers(pa.null(), 10**9, [None]))
    elif kind == "missing":
        del columns["age"]
    elif kind in ("offsets", "utf-8"):
        buffers = user.buffers()
        damaged = {"offsets": (1, np.int32([0, *[1 << 30] * 8, 9])), "utf-8": (2, b"\xff" * 9)}
        index, content = damaged[kind]
        buffers[index] = pa.py_buffer(content)
        columns["user"] = pa.Array.from_buffers(pa.string(), 9, buffers)
    options |= {"compression": kind} if kind in ("zstd", "lz4") else {}
    options |= {"metadata_version": pa.MetadataVersion.V4} if kind == "V4" else {}
    table = pa.table(columns)
    table = table.append_column("user", user) if kind == "twice" else table
    shared = {"user": '{"user": "u"}', "list": "[]", "nan": '{"user": NaN}'}.get(kind)
    body = arrow_stream(table.replace_schema_metadata(shared and {"user": shared}), None, **options)
    body = {"cut": body[:-8], "more": 2 * body, "none": b"\xff" * 4}.get(kind, body)
    status, error = score(app, body)
    assert (status, message in error) == (400, True), error


def test_bodies_that_are_late_or_too_many(served, monkeypatch):
    """A body that never arrives ends with 408; too many bytes at once with 503, until they have gone."""
    messages: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    def scope(size: int) -> dict[str, Any]:
        return {"method": "POST", "path": "/score", "headers": [(b"content-length", str(size).encode())]}

    def receive_of(parts: list[bytes]) -> Callable[[], Any]:
        async def receive() -> dict[str, Any]:
            if not parts:
                await asyncio.sleep(3600)
            return {"body": parts.pop(), "more_body": True}

        return receive

    async def test(app: App) -> list[int]:
        await asyncio.gather(*(app(scope(1000), receive_of([bytes(900)]), send) for _ in range(9)))
        return [message["status"] for message in messages if "status" in message]

    monkeypatch.setattr(http, "READ_TIMEOUT", 0.2)
    with Scorer(served.run) as scorer:
        app = App(scorer, "", 1000, 60.0)
        assert sorted(asyncio.run(test(app))) == [408] * 8 + [503]
        assert all((b"connection", b"close") in message["headers"] for message in messages if "status" in message)
        assert "did not arrive within 0.2 seconds" in messages[-1]["body"].decode()
        monkeypatch.undo()
        assert score(app, served.rows[0])[0] == 200


# Requests over a socket.

LENGTHS = st.sampled_from(["", "0", "-1", "+5", "1e3", "5, 6", "99999999999999999999", "0x10", "4194305", "200000000"])
HEADERS = st.sampled_from(
    [
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Content-Encoding: gzip",
        "Content-Type: text/plain",
        "Connection: close",
        "Connection: Upgrade\r\nUpgrade: websocket",
        "Expect: 100-continue",
        "X: long",
        ": empty",
        "no colon",
        "ü: é",
        "A: b\r\n folded",
    ]
)
PATHS = st.sampled_from(
    ["/score", "/v2/models/model/infer", "/health", "*", "/%ff", "/sc ore", "http://a/score", "", "/\xff"]
)
METHODS = st.sampled_from(["POST", "GET", "HEAD", "PUT", "OPTIONS", "post", "CONNECT", "PRI", "\x16\x03\x01"])


@pytest.fixture(scope="module")
def server(served):
    with served_at(served.folder / "run", "--max-body", str(MAX_BODY)) as (port, program):
        yield port, psutil.Process(program.process.pid)


def exchange(port: int, data: bytes) -> bytes:
    """Send these bytes and no more, and return what the server answers until it closes the connection."""
    parts = list[bytes]()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        with contextlib.suppress(ConnectionError, BrokenPipeError):  # the server has closed, with data unread
            client.sendall(data)
        with contextlib.suppress(OSError):  # not connected any more
            client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):  # reset, after the answer
            while part := client.recv(1 << 16):
                parts.append(part)
    return b"".join(parts)


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
@given(METHODS, PATHS, st.lists(HEADERS, max_size=2), st.none() | LENGTHS, st.data())
def test_no_bytes_are_an_error_of_the_server(served, server, method, path, headers, length, data):
    content = data.draw(
        st.sampled_from([json.dumps(served.rows[0]).encode(), b"5\r\n[1,2]\r\n0\r\n\r\n", b"\0" * 99, b""])
    )
    length = str(len(content)) if length is None else length
    head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *headers, "", ""])
    message = head.replace("long", "y" * 70_000).encode("latin-1") + content
    message = message[: data.draw(st.sampled_from([len(message), len(message) // 2, len(message) - 3]))] * 2
    statuses = re.findall(rb"HTTP/1\.1 (\d\d\d) ", exchange(server[0], message))
    assert all(status in (b"100", b"200") or status[:1] == b"4" for status in statuses), statuses
    assert scores_at(server[0], served.rows[:3]) == served.scores[:3].tolist()


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
def test_memory_is_bounded_and_half_requests_stop_nobody(served, server):
    port, process = server
    body = json.dumps(served.rows).encode()
    assert scores_at(port, served.rows) == served.scores.tolist()
    initial = process.memory_info().rss
    with ExitStack() as stack:
        for part in (
            b"POST /sc",
            b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:99],
        ):
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)).sendall(part)
        # A head without an end, and a chunk whose extension has none.
        for head, part in {
            b"GET /health HTTP/1.1\r\n": b"a: " + b"b" * 65_000 + b"\r\n",
            b"POST /score HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1": b";" + b"b" * 65_000,
        }.items():
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            with pytest.raises(ConnectionError):
                client.sendall(head + part * 1000)
        assert scores_at(port, served.rows) == served.scores.tolist()
        assert process.memory_info().rss < initial + (32 << 20)
