"""A run that is served: the scores of `predict` over HTTP, for any form of a request, and a clear error otherwise."""

from __future__ import annotations

import copy
import http.client
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("uvicorn")

import torch

import tritonemb as te
from tests.serving.scorers import NAMES, arrow_stream, call, request, scores_at, start_server, train_run
from tests.training.test_run import COLUMNS, SMALL, run
from tritonemb.cli import main
from tritonemb.flight import pa, pa_flight
from tritonemb.nn.layers import MLP, compute_runs_once
from tritonemb.serving import ModelFollower
from tritonemb.serving.http import App, FlightApp
from tritonemb.serving.scorer import OverloadedError, Scorer


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def app(served):
    with Scorer(served.run) as scorer:
        yield App(scorer, "", 1 << 16, 60.0)


def scores_of(app: App, body: Any) -> Any:
    status, content = call(app, "POST", "/score", body)
    assert status == 200, content
    return np.array(content["scores"], dtype=np.float32)


def test_every_form_of_a_request_has_the_scores_of_predict(served, app):
    rows, scores = served.rows, served.scores
    assert np.array_equal(scores_of(app, rows), scores)
    assert np.array_equal(scores_of(app, rows[7]), scores[7:8])
    assert np.array_equal(scores_of(app, {"columns": {name: [row[name] for row in rows] for name in NAMES}}), scores)
    assert scores_of(app, []).shape == (0,)
    # An empty string is a missing value of a model of text.
    pairs = ([{**rows[0], "user": value}, {**rows[1], "tags": ["ü1", value]}] for value in ("", None))
    assert np.array_equal(*(scores_of(app, pair) for pair in pairs))


def test_no_rows_have_no_scores(served):
    assert served.run.predict([]).shape == (0,)
    several = copy.copy(served.run)
    several.labels = ("buy", "like")
    assert several.predict([]).shape == (0, 2)


@pytest.mark.parametrize("shared", [("user",), ("price", "user", "tags"), ("tags",), ("age", "item")])
def test_a_user_with_candidates_has_the_scores_of_the_expanded_rows(served, app, shared):
    user = {name: served.rows[3][name] for name in shared}
    candidates = [{name: row[name] for name in NAMES if name not in shared} for row in served.rows]
    expected = served.run.predict([{**user, **candidate} for candidate in candidates])
    assert np.array_equal(scores_of(app, {"user": user, "candidates": candidates}), expected)
    columns = {name: [row[name] for row in candidates] for name in candidates[0]}
    assert np.array_equal(scores_of(app, {"user": user, "candidates": columns}), expected)


def test_candidates_of_a_user_have_their_bits_by_layers_that_compute_the_user_once(served):
    rows = [{**row, **{name: served.rows[3][name] for name in ("price", "age")}} for row in served.rows * 20]
    batch, layers, inputs = served.run.encoder(rows[:301]), served.run.model.bottom, list[int]()
    hook = layers[0].register_forward_pre_hook(lambda module, args: inputs.append(len(args[0])))
    scores, forward = served.run.score(batch), vars(layers).pop("forward")
    expected, layers.forward = served.run.score(batch), forward
    hook.remove()
    assert np.array_equal(scores, expected)
    assert inputs == [served.run._request_size, 304]


def test_runs_of_equal_rows_are_computed_once():
    layers, users, inputs = MLP(5, (16, 8)), torch.randn(6, 5), list[int]()
    users[1, [0, -1]] = users[0, [0, -1]]  # rows that differ in inner columns only
    rows = users.repeat_interleave(torch.tensor([9, 2, 5, 1, 13, 2]), 0)
    layers[0].register_forward_pre_hook(lambda module, args: inputs.append(len(args[0])))
    expected = layers(rows)
    compute_runs_once(layers, 8)
    with torch.no_grad():
        assert torch.allclose(layers(rows), expected)  # other batch sizes may round otherwise
        for few in (users, users[:0], rows[:14]):
            with torch.enable_grad():
                every_row = layers(few)
            assert torch.allclose(layers(few), every_row)
    layers(rows)
    assert inputs == [32, 16, 6, 6, 0, 0, 14, 14, 32]


class SlowRun:
    """The run, whose batches wait for the gate; `sizes` are those of the batches."""

    transforms, score_names = (), ("score",)

    def __init__(self, run: te.serving.Run) -> None:
        self.encoder, self.path, self._run, self.sizes = run.encoder, run.path, run, list[int]()
        self.gate, self.busy = threading.Event(), threading.Event()

    def score(self, batch: Any) -> Any:
        self.busy.set()
        assert self.gate.wait(60)
        self.sizes.append(len(batch))
        return self._run.score(batch)


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError, PermissionError, OverflowError])
def test_an_error_of_the_model_is_not_one_of_the_request(served, kind):
    class BrokenRun:
        transforms, encoder, path = (), served.run.encoder, served.run.path

        def score(self, batch: Any) -> Any:
            raise kind("broken")

    with Scorer(BrokenRun()) as scorer:
        status, content = call(App(scorer, "", 1 << 20, 60.0), "POST", "/score", served.rows[0])
    assert status == 500
    assert "the model failed" in content["error"]


def test_requests_share_batches_and_bad_ones_fail_alone(served):
    slow, encoder = SlowRun(served.run), served.run.encoder
    raws = [encoder.raw_rows([row]) for row in served.rows[:20]]
    user = {"user": served.rows[5]["user"]}
    raws.append(encoder.raw_rows([{n: r[n] for n in NAMES if n != "user"} for r in served.rows], user))
    raws.insert(4, encoder.raw_rows([{**served.rows[0], "age": "old"}]))
    with Scorer(slow, max_queue=82) as scorer:
        first = scorer.submit(raws[0], 60.0)
        assert slow.busy.wait(60)
        futures = [scorer.submit(raw, 60.0) for raw in raws]
        late = scorer.submit(raws[0], -1.0)
        with pytest.raises(OverloadedError, match="82 rows are queued; try again later"):
            scorer.submit(raws[0])
        slow.gate.set()
        with pytest.raises(ValueError, match="row 1: column 'age' is 'old'"):
            futures.pop(4).result(60)
        with pytest.raises(TimeoutError, match="the rows waited"):
            late.result(60)
        results = np.concatenate([future.result(60) for future in [first, *futures]])
    expected = [served.scores[0], *served.scores[:20], *served.run.predict([{**row, **user} for row in served.rows])]
    assert results.tolist() == expected
    assert sum(slow.sizes) == 81
    assert len(slow.sizes) < 8
    with pytest.raises(OverloadedError, match="stopping"):
        scorer.submit(raws[0])
    values = scorer.statistics()
    assert (values["requests"], values["errors"], values["rejected"], values["scored_rows"]) == (24, 2, 2, 81)


@pytest.mark.parametrize("source", ["run", "published"])
def test_a_state_of_rows_that_are_encoded_differently_is_refused(served, tmp_path, source):
    """All tensors have the shapes of the served ones: the dense columns are in another order, or a kind differs."""
    order = [{"price": "age", "age": "price"}.get(word, word) for word in COLUMNS]
    files = ("--data", served.folder / "clicks.csv", "--out", tmp_path / "run", "--publish", tmp_path / "published")
    assert run("train", *files, *order, *SMALL) == 0
    follower = ModelFollower(served.run, tmp_path / source, poll=None)
    assert "has a model of another run: encoding of rows differ from the served run" in follower.problem
    assert follower.step is None
    assert np.array_equal(served.run.predict(served.rows), served.scores)
    other = te.load_run(tmp_path / "run")
    expected = other.predict(served.rows)
    follower = ModelFollower(other, tmp_path / source, poll=None)
    assert (follower.problem, follower.step) == (None, 4)
    assert np.array_equal(other.predict(served.rows), expected)


class Updates:
    """Updates that add to the model's last bias; the second fails."""

    step, age, problem = 1, 0.5, None

    def __init__(self, model: Any) -> None:
        self.bias, self.steps = model.top[-1].bias, [2, 3]

    def pending(self) -> bool:
        return bool(self.steps)

    def apply(self) -> None:
        self.step = self.steps.pop(0)
        if self.step == 3:
            raise RuntimeError("half of it")
        self.bias.data += 1.0


def test_updates_are_applied_between_batches_and_a_failed_one_ends_scoring(served):
    updates = Updates(served.run.model)
    slow, raw = SlowRun(served.run), served.run.encoder.raw_rows(served.rows[:9])
    steps, updates.steps = updates.steps, []
    with Scorer(slow, updates=updates) as scorer:
        app = App(scorer, "", 1 << 16, 60.0)
        first = scorer.submit(raw)
        assert slow.busy.wait(60)
        updates.steps = steps[:1]
        second = scorer.submit(raw)
        slow.gate.set()
        assert np.array_equal(first.result(60), served.scores[:9])
        assert (second.result(60) > served.scores[:9]).all()
        updates.problem = "a file is damaged"
        assert call(app, "GET", "/health")[1]["status"] == "degraded"
        updates.steps = steps[1:]
        with pytest.raises(RuntimeError, match="its state is undefined"):
            scorer.submit(raw).result(60)
        assert call(app, "GET", "/v2/health/live")[0] == 503
        assert call(app, "GET", "/health")[1]["status"] == "failed"
        assert "tritonemb_model_step 3" in call(app, "GET", "/metrics")[1]
    updates.bias.data -= 1.0


def test_published_steps_reach_the_served_model(served, tmp_path):
    trained, loaded_run = (te.load_run(served.folder / "run") for _ in range(2))
    publisher, weights = te.serving.Publisher(tmp_path), dict(trained.model.named_parameters())
    raw = loaded_run.encoder.raw_rows(served.rows)

    def publish(step: int) -> list[float]:
        for weight in weights.values():
            weight.data.mul_(1.5)
        publisher.publish(trained.model, step)
        return trained.predict(served.rows).tolist()

    expected = publish(7)
    updates = te.serving.ModelFollower(loaded_run, tmp_path, poll=None)
    with Scorer(loaded_run, updates=updates) as scorer:
        app = App(scorer, "", 1 << 16, 60.0)
        assert scorer.submit(raw, 60.0).result(60).tolist() == expected
        expected = publish(8)
        assert updates.refresh(), updates.problem
        assert scorer.submit(raw, 60.0).result(60).tolist() == expected
        health = call(app, "GET", "/health")[1]
    assert (health["status"], health["step"]) == ("ok", 8)
    assert expected != served.scores.tolist()


ERRORS = {
    "row 2: column 'age' is 'x', expected a number or nothing": [{}, {"age": "x"}],
    "row 1: column 'item' is '1.5', expected an integer": [{"item": 1.5}],
    "row 1: column 'item' is .*expected an integer of 64 bits": [{"item": 1 << 64}],
    "row 1: column 'age' is .*expected a number that fits float32": [{"age": 10**400}],
    "row 1: column 'age' is '1e\\+39', expected a number that fits float32": [{"age": 1e39}],
    "row 1: column 'user' is '3', expected a string or nothing, as in training": [{"user": 3}],
    "row 1: column 'user' is .* expected an integer, a string or nothing": [{"user": {"a": 1}}],
    "row 1: column 'tags' is 'a', expected a list of values": [{"tags": "a"}],
    "row 1: column 'tags' is .* expected an integer, a string or nothing": [{"tags": [["a"]]}],
}


@pytest.mark.parametrize("message", ERRORS)
def test_an_error_names_row_column_and_value(served, app, message):
    status, content = call(app, "POST", "/score", [{**served.rows[0], **row} for row in ERRORS[message]])
    assert status == 400
    assert re.match(message, content["error"]), content


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"), (b'{"a": 1', "not valid JSON"), (b'"\xff"', "not valid JSON"),
        (b"[" * 60_000, "nested too deep"), (b"[" * 900 + b"]" * 900, "expected a row"),
        (b'{"age": NaN}', "NaN is not a finite number"), (b'{"age": -Infinity}', "not a finite"),
        (b'{"age": 1e999}', "not a finite"), (b"7", "expected a row"), (b'{"age": 1, "age": 2}', "duplicate key 'age'"),
        (b'["a"]', "expected a row"), (b"null", "expected a row"), (b'{"age": ' + b"9" * 5_000 + b"}", "digits"),
        (b'{"user": "\\ud800"}', "not valid JSON"), (b'{"age": 1}', "row 1: missing columns: price, user, item, tags"),
        (b'{"columns": {"age": 3}}', "column 'age' must be a list"),
        (b'{"columns": {"age": [3]}}', "columns: missing columns: price"),
        (
            b'{"user": {"age": 1}, "candidates": [{"age": 2, "price": 1, "user": "a", "item": 1, "tags": []}]}',
            "row 1: age must not be among",
        ),
        (
            b'{"user": {"user": 7, "price": 1, "item": 1, "tags": []}, "candidates": [{"age": 2}]}',
            "user: column 'user' is '7'",
        ),
    ],
)  # fmt: skip
def test_a_malformed_body_is_rejected(app, body, message):
    status, content = call(app, "POST", "/score", body)
    assert (status, message in content["error"]) == (400, True), content


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["ü1", "a"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3), max_size=3), st.data())
def test_any_values_are_scored_as_by_predict_or_rejected(served, app, changes, data):
    rows = [{**served.rows[index], **change} for index, change in enumerate(changes)]
    status, content = call(app, "POST", "/score", rows)
    expected = None
    if "NaN" not in json.dumps(rows) and "Infinity" not in json.dumps(rows):
        with suppress(ValueError):
            expected = served.run.predict(rows).tolist() if rows else []
    assert (np.float32(content["scores"]).tolist() if status == 200 else None) == expected
    assert status in (200, 400)
    cut = data.draw(st.integers(0, len(json.dumps(rows))))
    assert call(app, "POST", "/score", json.dumps(rows).encode()[:cut])[0] in (200, 400)


def test_paths_tokens_and_sizes(served, app):
    assert call(app, "GET", "/nowhere")[0] == 404
    assert call(app, "DELETE", "/score")[0] == 404
    status, content = call(app, "POST", "/score", b" " * ((1 << 16) + 1))
    assert (status, content["error"]) == (413, "the body has more than 65,536 bytes; send fewer rows per request")
    with Scorer(served.run) as scorer:
        private = App(scorer, "secret", 1 << 16, 60.0)
        assert call(private, "POST", "/score", served.rows[0])[0] == 401
        assert call(private, "GET", "/metrics")[0] == 401
        assert call(private, "GET", "/v2/health/ready") == (200, {"ready": True})
        headers = {"authorization": "Bearer secret"}
        assert call(private, "POST", "/score", served.rows[0], headers)[1]["scores"] == [served.scores[0]]
        text = call(private, "GET", "/metrics", headers=headers)[1]
        assert "tritonemb_scored_rows_total 1\n" in text
        assert "tritonemb_request_milliseconds_count 1\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--address", "http://0.0.0.0:0"], "other machines can reach http://0.0.0.0:0: set TRITONEMB_TOKEN"),
        (["--address", "https://127.0.0.1:0"], "expected http://HOST:PORT, or https://HOST:PORT with a certificate"),
        (["--address", "127.0.0.1:0"], "invalid address"),
        (["--flight", "grpc://127.0.0.1"], "invalid address 'grpc://127.0.0.1': a server needs a port"),
        (["--flight", "127.0.0.1:0"], "invalid address '127.0.0.1:0': expected grpc://HOST:PORT"),
        (["--flight", "grpc+tls://127.0.0.1:0"], "TLS needs a grpc+tls:// address, a certificate and its key"),
        (["--flight", "grpc://0.0.0.0:0"], "other machines can reach grpc://0.0.0.0:0: set TRITONEMB_TOKEN"),
        (["--data", "x.csv"], "to read a log for trainers: tritonemb reader"),
    ],
)
def test_a_server_that_cannot_start_says_why(served, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("tritonemb.serving.http.ServeOptions.load", None)  # errors come before the model is loaded
    assert main(["serve", str(served.folder / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err


def tensors_of(rows: list[dict[str, Any]], shared: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Inputs of the Open Inference Protocol; lists of tags are as long as one another."""
    kinds = {"price": "FP64", "age": "INT64", "user": "BYTES", "item": "INT64", "tags": "BYTES"}
    columns = {name: [row[name] for row in rows[: 1 if name in shared else None]] for name in NAMES}
    shapes = {name: [len(column), *([2] if name == "tags" else [])] for name, column in columns.items()}
    return [{"name": n, "shape": shapes[n], "datatype": kinds[n], "data": columns[n]} for n in NAMES]


def test_tensors_of_the_open_inference_protocol_have_the_scores_of_predict(served, app):
    rows = [{**row, "tags": ["a", "c"]} for row in served.rows[:9]]
    status, content = call(app, "POST", "/v2/models/model/infer", {"inputs": tensors_of(rows), "id": "7"})
    (output,) = content["outputs"]
    assert (status, content["id"], output["shape"], output["datatype"]) == (200, "7", [9], "FP32"), content
    assert np.float32(output["data"]).tolist() == served.run.predict(rows).tolist()
    shared = [{**row, "user": rows[0]["user"], "tags": rows[0]["tags"]} for row in rows]
    content = call(app, "POST", "/v2/models/model/infer", {"inputs": tensors_of(shared, ("user", "tags"))})[1]
    assert np.float32(content["outputs"][0]["data"]).tolist() == served.run.predict(shared).tolist()
    assert {entry["name"] for entry in call(app, "GET", "/v2/models/model")[1]["inputs"]} == {*NAMES}
    assert call(app, "GET", "/v2/models/model/ready") == (200, {"ready": True})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [8]}, "input 'age': shape [8] has 8 values, data has 9"), ({"data": "x"}, "data must be a list"),
        ({"shape": [3, 3]}, "shape must be [N] or [N, 1]"), ({"shape": [-9]}, "shape must be"),
        ({"shape": 9}, "shape must be"), ({"shape": []}, "shape must be"), ({"datatype": "INT7"}, "datatype 'INT7'"),
        ({"name": "price"}, "the name must be new"), ({"name": 3}, "input 3"),
        ({"name": "years"}, "missing columns: age"), ({"data": [*range(8), "x"]}, "row 9: column 'age' is 'x'"),
        ({"data": list(range(8)), "shape": [8]}, "as many values as one another"),
    ],
)  # fmt: skip
def test_malformed_tensors_are_rejected(served, app, change, message):
    inputs = tensors_of([{**row, "tags": ["a", "c"]} for row in served.rows[:9]])
    inputs[1] |= change
    status, content = call(app, "POST", "/v2/models/model/infer", {"inputs": inputs})
    assert (status, message in content["error"]) == (400, True), content
    assert call(app, "POST", "/v2/models/model/infer", {"inputs": 3})[0] == 400


def test_an_idle_model_waits_for_others_and_slow_requests_are_logged(served, caplog):
    slow, encoder = SlowRun(served.run), served.run.encoder
    slow.gate.set()
    with Scorer(slow, max_wait=60.0, batch_size=3, slow=0.0) as scorer:
        futures = [scorer.submit(encoder.raw_rows([row])) for row in served.rows[:3]]
        assert [future.result(60)[0] for future in futures] == served.scores[:3].tolist()
    assert slow.sizes == [3]
    assert "slow request: 1 rows took" in caplog.text


# Arrow Flight.


def ask(address: str, body: Any, token: str = "", roots: bytes | None = None) -> Any:
    """The table that answers a ticket."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    options = pa_flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())] if token else [])
    with pa_flight.connect(address, tls_root_certs=roots) as client:
        return client.do_get(pa_flight.Ticket(data), options).read_all()


@contextmanager
def over_flight(scorer: Any, timeout: float = 60.0, token: str = "", scheme: str = "grpc", tls: Any = (None, None)):
    """Address of a server of Arrow Flight."""
    pytest.importorskip("pyarrow.flight")
    server = FlightApp(scorer, 1 << 16, timeout).start(f"{scheme}://localhost:0", token, *tls)
    try:
        yield f"{scheme}://localhost:{server.port}"
    finally:
        server.shutdown()


@pytest.fixture(scope="module")
def address(app):
    with over_flight(app._scorer) as address:
        yield address


def test_tickets_of_flight_have_the_scores_of_predict(served, address):
    rows, user, scores = served.rows, {"user": "u1"}, served.run.predict(served.rows)
    candidates = [{name: value for name, value in row.items() if name != "user"} for row in rows]
    for body, expected in {
        json.dumps(rows): scores,
        json.dumps(rows[7]): scores[7:8],
        json.dumps({"columns": {name: [row[name] for row in rows] for name in NAMES}}): scores,
        json.dumps({"user": user, "candidates": candidates}): served.run.predict([{**row, **user} for row in rows]),
        "[]": scores[:0],
    }.items():
        table = ask(address, body.encode())
        assert table.schema == pa.schema([("score", pa.float32())])
        assert table["score"].to_pylist() == expected.tolist()


@given(JSON | st.binary(max_size=9), st.data())
def test_any_ticket_is_scored_as_over_http_or_rejected(served, app, address, value, data):
    row = {**served.rows[0], data.draw(st.sampled_from(NAMES)): value} if not isinstance(value, bytes) else value
    body = row if isinstance(row, bytes) else json.dumps(data.draw(st.sampled_from([row, [row], value]))).encode()
    status, content = call(app, "POST", "/score", body)
    if status == 200:
        assert ask(address, body)["score"].to_pylist() == np.float32(content["scores"]).tolist()
    else:
        with pytest.raises(pa.ArrowInvalid) as failure:
            ask(address, body)
        assert (status, content["error"][:99] in str(failure.value)) == (400, True)


@pytest.mark.parametrize("shared", [(), ("user",), ("price", "tags", "item")])
def test_arrow_columns_have_the_scores_of_predict(served, app, address, shared):
    user = {name: served.rows[3][name] for name in shared}
    table = pa.table({name: [row[name] for row in served.rows] for name in NAMES if name not in shared})
    table = table.append_column("unused", pa.array([b"\xff"] * len(table)))
    body = arrow_stream(table.replace_schema_metadata({"user": json.dumps(user)} if shared else None))
    expected = served.run.predict([{**row, **user} for row in served.rows]).tolist()
    assert scores_of(app, body).tolist() == expected
    assert ask(address, body)["score"].to_pylist() == expected
    assert ask(address, arrow_stream(table[:0].replace_schema_metadata({"user": json.dumps(user)}))).num_rows == 0


ARROW = {
    "int8": st.integers(-128, 127), "uint64": st.integers(0, 2**64 - 1), "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32), "float64": st.floats(), "bool_": st.booleans(), "null": st.none(),
    "string": st.text(max_size=9) | st.sampled_from(["ü1", "7", ""]), "binary": st.binary(max_size=9),
    "duration": st.none(),
}  # fmt: skip


@given(st.sampled_from(NAMES), st.sampled_from([*ARROW]), st.booleans(), st.data())
def test_any_arrow_column_is_scored_as_by_predict_or_rejected(served, app, address, name, kind, is_list, data):
    values, arrow_type = st.none() | ARROW[kind], pa.duration("s") if kind == "duration" else getattr(pa, kind)()
    if is_list:
        values, arrow_type = st.none() | st.lists(values, max_size=3), pa.list_(arrow_type)
    rows = [row | {name: data.draw(values)} for row in served.rows[:3]]
    arrays = {n: pa.array([row[n] for row in rows], arrow_type if n == name else None) for n in NAMES}
    body, expected = arrow_stream(pa.table(arrays)), None
    if kind != "duration" and not (is_list and kind in ("null", "bool_")):
        with suppress(ValueError):
            expected = served.run.predict(rows).tolist()
    status, content = call(app, "POST", "/score", body)
    if status == 200:
        assert ask(address, body)["score"].to_pylist() == np.float32(content["scores"]).tolist() == expected
    else:
        with pytest.raises(pa.ArrowInvalid) as failure:
            ask(address, body)
        assert (status, content["error"][:99] in str(failure.value), expected) == (400, True, None)
    position = data.draw(st.integers(0, len(body) - 1))
    assert call(app, "POST", "/score", body[:position])[0] == 400
    changed = body[:position] + bytes([data.draw(st.integers(0, 255))]) + body[position + 1 :]
    assert call(app, "POST", "/score", changed)[0] in (200, 400)


def test_errors_of_flight_have_a_status(served, address):
    for body, message in {b" " * 70_000: "more than 65,536 bytes", b'"\\ud800"': "not valid JSON"}.items():
        with pytest.raises(pa.ArrowInvalid, match=message):
            ask(address, body)
    with pytest.raises(pa.ArrowInvalid, match="duplicate key"):  # in many more bytes than characters
        ask(address, '{"KEY": 1, "KEY": 2}'.replace("KEY", "\U0001f600" * 900).encode())
    with pa_flight.connect(address) as client:
        with pytest.raises(pa.ArrowNotImplementedError):
            list(client.list_flights())
        with pytest.raises(pa.ArrowNotImplementedError):
            client.do_put(pa_flight.FlightDescriptor.for_command(b""), pa.schema([("age", pa.int64())]))[0].close()
    slow = SlowRun(served.run)
    with Scorer(slow, max_queue=3) as scorer, over_flight(scorer) as address, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(ask, address, served.rows[:1])]
        assert slow.busy.wait(60)
        with pytest.raises(pa.ArrowInvalid, match="the request has 4 rows; send up to 3 per request"):
            ask(address, served.rows[:4])
        futures.append(pool.submit(ask, address, served.rows[:3]))
        while scorer.statistics()["queued_rows"] < 3:
            pass
        with pytest.raises(pa_flight.FlightUnavailableError, match="3 rows are queued; try again later"):
            ask(address, served.rows[:1])
        slow.gate.set()
        assert [len(future.result(60)) for future in futures] == [1, 3]
        with over_flight(scorer, -1.0) as late, pytest.raises(pa_flight.FlightTimedOutError, match="the rows waited"):
            ask(late, served.rows[:1])
    with pytest.raises(pa_flight.FlightUnavailableError):
        ask(address, served.rows[:1])


def test_flight_with_token_and_tls(served, certificate):
    roots, files = (certificate / "pem").read_bytes(), (certificate / "pem", certificate / "key")
    with Scorer(served.run) as scorer, over_flight(scorer, 60.0, "secret", "grpc+tls", files) as address:
        assert (
            ask(address, served.rows, "secret", roots)["score"].to_pylist() == served.run.predict(served.rows).tolist()
        )
        for token in ("", "wrong"):
            with pytest.raises(pa_flight.FlightUnauthenticatedError, match="the token is missing or wrong"):
                ask(address, served.rows, token, roots)


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
def test_a_process_serves_until_it_is_stopped(served, tmp_path):
    """Over HTTP and Flight, what a publisher writes; a request that has begun is finished."""
    te.serving.Publisher(tmp_path).publish(te.load_run(served.folder / "run").model, 7)
    options = ("--flight", "grpc://127.0.0.1:0", "--warm-up", str(served.folder / "clicks.csv"))
    program = start_server(served.folder / "run", *options, "--follow", str(tmp_path))
    rows, scores = served.rows, served.scores.tolist()
    try:
        lines = [program.output.readline()]
        while not lines[-1].startswith("serving "):
            lines.append(program.output.readline())
        (flight,) = (line.split()[-1] for line in lines if line.startswith("Arrow Flight at grpc://"))
        assert ask(flight, rows)["score"].to_pylist() == scores
        port = int(lines[-1].rpartition(":")[2])
        assert request(port, "GET", "/health")["step"] == 7
        with ThreadPoolExecutor(8) as pool:
            assert [score for (score,) in pool.map(partial(scores_at, port), rows)] == scores
        # A request whose body arrives after the signal is finished, too.
        body = json.dumps(rows).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:100])
            assert scores_at(port, rows[:1]) == scores[:1]  # the server has read the head
            program.process.terminate()
            client.sendall(body[100:])
            response = http.client.HTTPResponse(client)
            response.begin()
            assert np.float32(json.loads(response.read())["scores"]).tolist() == scores
        assert program.finish()[0] == 0
    finally:
        program.process.kill()
