"""Reader hosts: machines that read data for trainers on other machines, over Arrow Flight."""

import os
import secrets
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tritonemb.data.batch import Batch, BatchLayout
from tritonemb.data.loader import ShardState, read_shards
from tritonemb.data.protocol import Data, Feature, OpenOptions, PositionedBatch, ReadReport, Split, Stream, TablesMixin
from tritonemb.flight import ROOTS, TOKEN, Client, Message, start_server
from tritonemb.utils import Closeable


class ReaderHost(Closeable):
    """Server that sends the batches of `data` to clients with the token, over Arrow Flight.

    Every stream uses the threads and memory of `data.open`, and pauses while its client reads no batches. Raise
    ValueError or OSError if the server cannot listen at `address`.

    Args:
        address: `grpc://HOST:PORT`, or `grpc+tls://HOST:PORT`; port 0 selects a free port.
        token: token that clients must send; by default that of the environment (TRITONEMB_TOKEN), else a random one.
        certificate, key: PEM files for TLS.

    Attributes `address` (with the port) and `token`: for clients.
    """

    def __init__(
        self, data: Data, address: str = "grpc://127.0.0.1:0", *, token: str | None = None,
        certificate: str | Path | None = None, key: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.token = token or os.environ.get(TOKEN) or secrets.token_hex(32)
        self._closing = threading.Event()
        handler = partial(_handle_request, data, self._closing)
        self._server = start_server(handler, address, self.token, certificate, key)
        self.address = f"{address.rpartition(':')[0]}:{self._server.port}"

    def wait(self) -> None:
        """Wait until `close`, SIGINT or SIGTERM; call it in the main thread."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: self._closing.set())
        self._closing.wait()

    def close(self) -> None:
        """Stop the server; open streams fail."""
        self._closing.set()
        self._server.stop()


def _handle_request(data: Data, stop_event: threading.Event, request: dict[str, Any]) -> Iterator[Message]:
    if (action := request.pop("action")) == "describe":
        values = {name: getattr(data, name) for name in ("name", "num_dense", "encoding", "best_auc")}
        values |= {"contents": getattr(data, "contents", {}), "splits": data.splits()}
        yield values | {"features": [astuple(feature) for feature in data.features]}, b""
    elif action == "rows":
        yield {"rows": data.num_rows(**request), "estimated": data.estimated_rows(**request)}, b""
    else:
        index, count = request.pop("shard")
        shard = ShardState(index, count, position=request.pop("position"))
        for item in read_shards(data, [shard], request):
            if stop_event.is_set():
                raise ConnectionError("the reader host has been closed")
            yield _to_message(item)
            del item  # free it while the next one is read


class RemoteData(TablesMixin):
    """Data set read by reader hosts: a `Data` for `te.Trainer` and for custom loops. Raise ConnectionError if a host
    does not answer, PermissionError for a wrong token, ValueError for invalid addresses or different data.

    Args:
        addresses: addresses of hosts with the same data; host `i % len(addresses)` reads shard i.
        token: token of the hosts; by default that of the environment (TRITONEMB_TOKEN).
        roots: PEM file of trusted certificates for TLS; by default that in TRITONEMB_TLS_ROOTS, else the system's.
    """

    def __init__(
        self, addresses: str | Sequence[str], *, token: str | None = None, roots: str | Path | None = None
    ) -> None:
        self._addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self._addresses:
            raise ValueError("expected the address of a reader host, got none")
        self._token, self._roots = token or os.environ.get(TOKEN, ""), roots or os.environ.get(ROOTS)
        description, *descriptions = (self._client(index).call("describe") for index in range(len(self._addresses)))
        for address, other_description in zip(self._addresses[1:], descriptions, strict=True):
            if other_description != description:
                raise ValueError(f"the reader hosts {self._addresses[0]} and {address} have different data")
        self.name, self.encoding = str(description["name"]), str(description["encoding"])
        self.features = tuple(Feature(*feature) for feature in description["features"])
        self.num_dense: int = description["num_dense"]
        self.contents: dict[str, str] = description.get("contents", {})
        self.best_auc: float | None = description["best_auc"]
        self._splits: tuple[Split, ...] = tuple(description["splits"])

    def splits(self) -> tuple[Split, ...]:
        """Return the splits of the data set."""
        return self._splits

    def num_rows(self, split: Split) -> int | None:
        """Return the number of rows of a split; None if unknown to the host before it has read the split."""
        return self._client(0).call("rows", {"split": split})["rows"]

    def estimated_rows(self, split: Split) -> int | None:
        """Estimate the number of rows of a split; None if that is impossible."""
        return self._client(0).call("rows", {"split": split})["estimated"]

    def open(self, split: Split, batch_size: int, **kwargs: Any) -> Stream:
        """Open a split; see `tritonemb.data.protocol.Data.open`. Batches and positions are those of the host's data
        set; its errors are raised as built-in types. Raise ConnectionError, also in `next`, if it does not answer."""
        request = {"action": "open"} | asdict(OpenOptions(split, batch_size, **kwargs))
        pin_memory = request.pop("pin_memory")
        messages, cancel = self._client(request["shard"][0]).stream(request)
        items = _to_items(messages, pin_memory)
        first = next(items)
        return Stream(items, first.position, first.report, on_stop=cancel)

    def _client(self, shard: int) -> Client:
        return Client(self._addresses[shard % len(self._addresses)], self._token, self._roots)


def _to_message(item: PositionedBatch) -> Message:
    values: dict[str, Any] = {"position": item.position, "report": asdict(item.report), "layout": None}
    if item.batch is None or item.batch.buffer is None:
        return values, b""
    layout = item.batch.layout
    return values | {"layout": asdict(layout)}, memoryview(item.batch.buffer.numpy())[: layout.bytes_before_offsets]


def _to_items(messages: Generator[Message, None, None], pin_memory: bool) -> Iterator[PositionedBatch]:
    with closing(messages):
        for values, data in messages:
            batch = None if values["layout"] is None else _to_batch(BatchLayout(**values["layout"]), data, pin_memory)
            yield PositionedBatch(batch, values["position"], ReadReport.from_json(values["report"]))
            del data, batch  # free them while the next batch is received


def _to_batch(layout: BatchLayout, data: Any, pin_memory: bool) -> Batch:
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    buffer.numpy()[: layout.bytes_before_offsets] = data
    lengths, offsets = (view.numpy() for view in layout.views(buffer)[3:])
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])  # offsets are not sent
    return layout.batch(buffer)
