"""Open a data set by its name, its path or the reader hosts that serve it; reader hosts: machines that read data for
trainers on other machines, over Arrow Flight."""

import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tritonemb.data.batch import Batch, BatchLayout
from tritonemb.data.click_log import ClickLog
from tritonemb.data.datasets import Dataset, load_adult, load_movielens_100k, make_synthetic
from tritonemb.data.files import LogFile, exists, find_files, fs, natural_sort_key
from tritonemb.data.loader import ShardState, read_shards
from tritonemb.data.parquet import file_of_frame
from tritonemb.data.protocol import Data, Feature, OpenOptions, PositionedBatch, ReadReport, Split, Stream, TablesMixin
from tritonemb.data.schema import ALL_ROWS, LogOptions
from tritonemb.flight import ROOTS, SCHEMES, TOKEN, Client, Message, start_server
from tritonemb.utils import Closeable, did_you_mean, join_names, require

_log = logging.getLogger(__name__)

NAMES = ("movielens-100k", "synthetic", "adult", "criteo-kaggle", "criteo-terabyte")
ALIASES = {"criteo": "criteo-kaggle"}


def kind_of(name_or_path: str) -> str:
    """Return the name in `NAMES`, with aliases resolved; "criteo-kaggle", whose preset suits any log, for a path."""
    name = ALIASES.get(name_or_path, name_or_path)
    return name if name in NAMES else "criteo-kaggle"


# Options of logs only: the rows and features of other data sets are fixed.
SCHEMA_OPTIONS = "label", "labels", "weight", "dense", "sparse", "share", "max_lengths", "sizes", "vocabulary"
READ_OPTIONS = "split", "transforms", "follow"


def open_dataset(
    name_or_path: str, path: str | Path | None = None, *, log: LogOptions | None = None, seed: int = 0
) -> "Dataset | ClickLog | RemoteData":
    """Open a data set by name, a click log by its path, or the data of reader hosts by their addresses. Raise
    ValueError, FileNotFoundError, ConnectionError or PermissionError.

    Args:
        name_or_path: one of `NAMES` or `ALIASES`; the path or URI of a file or folder: Criteo's TSV, CSV or Parquet;
            or the addresses of reader hosts, "grpc://HOST:PORT" or "grpc+tls://HOST:PORT", with commas between them.
        path: file or folder of "criteo-kaggle", "criteo-terabyte" and "adult"; the others do not take a path.
        log: options for reading a log.
        seed: seed of synthetic data.
    """
    if name_or_path.startswith(SCHEMES):
        return RemoteData(name_or_path.split(","))
    if (kind := ALIASES.get(name_or_path, name_or_path)) not in NAMES:
        if path is not None:
            raise ValueError(f"{kind!r} is not one of {NAMES} but a path; remove the second path {str(path)!r}")
        if not exists(kind):
            near = did_you_mean(kind, NAMES)
            raise FileNotFoundError(f"{kind!r} is neither a file or folder nor one of the data sets {NAMES}{near}")
        return ClickLog(kind, log)
    if log and kind in ("adult", "movielens-100k", "synthetic"):
        names = [name for name in SCHEMA_OPTIONS if getattr(log.schema, name) and (kind, name) != ("adult", "labels")]
        if names := [*names, *(name for name in READ_OPTIONS if getattr(log, name) != getattr(LogOptions(), name))]:
            raise ValueError(f"data set {kind!r} does not take {join_names(names)}, for logs only; omit it")
    if kind in ("movielens-100k", "synthetic"):
        if path is not None:
            raise ValueError(f"data set {kind!r} does not take a path, got {str(path)!r}")
        return load_movielens_100k() if kind == "movielens-100k" else make_synthetic(seed=seed)
    if path is None:
        path_kind = "file" if kind == "criteo-kaggle" else "folder"
        raise ValueError(f"data set {name_or_path!r} needs a path: the {path_kind} to read")
    return load_adult(path, log.schema.labels if log else ()) if kind == "adult" else ClickLog(path, log, name=kind)


def from_dataframe(
    frame: Any, options: LogOptions | None = None, *, validation: Any = None, test: Any = None, name: str = "data frame"
) -> ClickLog:
    """Open a data frame as a log, without a copy: pandas, Polars, a `pyarrow.Table`, any with `__arrow_c_stream__`.

    Column types are as in Parquet files. pandas stores a column of integers with missing values as floating point; use
    `convert_dtypes` to make it a sparse column. Raise ValueError for other objects, or unsuitable columns.

    Args:
        options: options for reading; without held-out frames their split rule applies, by default the last sixth.
        validation, test: frames of held-out rows with the same columns.
        name: name in messages.
    """
    frames: dict[Split, Any] = {"train": frame, "validation": validation, "test": test}
    frames = {split: data_frame for split, data_frame in frames.items() if data_frame is not None}
    suffix = " ({})" if len(frames) > 1 else ""
    files = {split: file_of_frame(frames[split], name + suffix.format(split)) for split in frames}
    return ClickLog(files, options, name=name)


def open_for_scoring(
    data: Any, log: LogOptions, features: Sequence[Feature], extra_columns: tuple[str, ...] = (), labelled: bool = False
) -> ClickLog:
    """Open a log to score with a model trained on these features: all rows are test rows, in their order.

    Args:
        data: path or URI of a log, or a data frame as for `from_dataframe`.
        log: options as in training; the split rule is ignored.
        features: features of the model; categories are read as their kinds.
        extra_columns: additional columns to read, for `ClickLog.scan`.
        labelled: whether to read the label; if not, it may be missing, as in Criteo's test.txt.

    Raises:
        ValueError, FileNotFoundError: the log cannot be read, or has other features.
    """
    is_frame = hasattr(data, "__arrow_c_stream__")
    name = "data frame" if is_frame else str(data)
    if not (is_frame or exists(data)):
        raise FileNotFoundError(f"{name!r}: no such file or folder to score")
    trained_kinds = {feature.name: feature.kind for feature in features}
    kinds = dict.fromkeys(log.schema.integers, "integers") | {k: kind for k, kind in trained_kinds.items() if kind}
    schema = replace(log.schema, integers=tuple(name for name, kind in kinds.items() if kind == "integers"))
    log = replace(log, schema=schema, split=ALL_ROWS, follow=False)
    source: Any = {"train": file_of_frame(data, name)} if is_frame else data
    click_log = ClickLog(source, log, labelled=labelled, extra_columns=extra_columns, features=features)
    if click_log.is_endless:
        raise ValueError(f"{name} has no end, so its rows cannot be scored as a whole; write them to files")
    click_log = click_log.read_as(trained_kinds)
    if len(click_log.features) != len(features):
        raise ValueError(f"{name}: the log has {len(click_log.features)} features, the model {len(features)}")
    for feature, expected in zip(click_log.features, features, strict=True):
        if feature != expected:
            raise ValueError(f"{name}: the log has {feature}, the model was trained with {expected}")
    return click_log.all_rows_as("test")


class SharedLog:
    """Log whose files are on several reader hosts, of which each has some, for `ReaderHost` to serve as a whole. A host
    reads the other files from its peers, by name. Raise ValueError for a stream.

    Args:
        source, options, name: as of `ClickLog`; the source is the file or folder of this host.
        peers: addresses of the other hosts, or of all; token and trusted certificates are those of the environment.
    """

    def __init__(self, source: str | Path, options: LogOptions, *, peers: Sequence[str], name: str = "") -> None:
        if options.follow:
            raise ValueError(f"{source}: hosts cannot share the files of a stream; serve it without peers")
        self.name, self._options = name or Path(source).resolve().name, options
        self._files = {file.name: file for file in find_files(source)}
        self._peers = [Client(address, os.environ.get(TOKEN, ""), os.environ.get(ROOTS)) for address in peers]
        self._lock, self._owners = threading.Lock(), dict[str, list[Client]]()  # peers by file
        self._log: ClickLog | None = None

    def log(self) -> ClickLog:
        """Open the log of all files. ConnectionError: a peer does not answer; ValueError: files of one name differ."""
        with self._lock:
            if self._log is None:
                system, files = self._file_system(), dict(self._files)
                self._owners.clear()
                for client in self._peers:
                    for name, form, codec, size in client.call("files")["files"]:
                        file = LogFile(f"{client.address}/{name}", form, codec, size, stored=(system, name))
                        if replace(files.setdefault(name, file), path=file.path, modified=0) != file:
                            raise ValueError(f"{files[name].path} and {file.path} differ; give them different names")
                        self._owners.setdefault(name, []).append(client)
                names = sorted(files, key=natural_sort_key)
                self._log = ClickLog([files[name] for name in names], self._options, name=self.name)
            return self._log

    def files(self) -> Message:
        """Describe the files of this host, for its peers."""
        return {"files": [(file.name, file.format, file.codec, file.size) for file in self._files.values()]}, b""

    def read(self, name: str, offset: int, num_bytes: int) -> Message:
        """Read bytes of a file of this host, or else of a peer; ConnectionError if no host that has it answers."""
        if (file := self._files.get(name)) is not None:
            with file.open() as raw:
                return {"size": file.size}, raw.read_at(min(num_bytes, file.size), offset)
        request = {"action": "read", "name": name, "offset": offset, "num_bytes": num_bytes}
        for client in (owners := self._owners.get(name, [])):
            try:
                with closing(client.stream(request)[0]) as messages:
                    return next(messages)
            except ConnectionError as error:
                _log.warning("%s; another reader host that has %s takes its place", error, name)
                self._owners[name] = sorted(owners, key=lambda owner: owner is client)  # asked last
        raise ConnectionError(f"no reader host that has {name} answers: {join_names(c.address for c in owners)}")

    def _file_system(self) -> Any:
        # Files of peers, with the methods that Arrow calls.
        class PeerFile(require("fsspec.spec").AbstractBufferedFile):  # type: ignore[misc]
            def _fetch_range(self, start: int, end: int) -> bytes:
                return bytes(self.fs.read(self.path, start, end - start)[1])

        system = SimpleNamespace(protocol="grpc", isfile=self._owners.__contains__, read=self.read)
        system.info = lambda name: {"type": "file"} | self.read(name, 0, 0)[0]
        system.open = partial(PeerFile, system, cache_type="none")
        return fs.PyFileSystem(fs.FSSpecHandler(system))


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
        self, data: Data | SharedLog, address: str = "grpc://127.0.0.1:0", *, token: str | None = None,
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


def _handle_request(data: Any, stop_event: threading.Event, request: dict[str, Any]) -> Iterator[Message]:
    action, is_shared = request.pop("action"), isinstance(data, SharedLog)
    if action in ("files", "read"):
        if not is_shared:
            raise ValueError(f"{data.name}: this reader host does not share its files; start it with peers")
        yield getattr(data, action)(**request)
        return
    data = data.log() if is_shared else data
    if action == "describe":
        values = {name: getattr(data, name) for name in ("name", "num_dense", "encoding", "best_auc")}
        values |= {"contents": getattr(data, "contents", {}), "splits": data.splits()}
        values |= {"is_stream": getattr(data, "is_stream", False), "is_shared": is_shared}
        values |= {"labels": getattr(data, "labels", ()), "has_weights": getattr(data, "has_weights", False)}
        yield values | {"features": [astuple(feature) for feature in data.features]}, b""
    elif action == "missing":
        yield {"sizes": data.sizes_on_peers(request["split"], tuple(request["shard"]))}, b""
    elif action in ("shard_rows", "check_rows"):  # of logs
        yield {"result": getattr(data, action)(**request) if hasattr(data, action) else None}, b""
    elif action == "rows":
        yield {"rows": data.num_rows(**request), "estimated": data.estimated_rows(**request)}, b""
    else:
        index, count = request.pop("shard")
        for item in read_shards(data, [ShardState(index, count, position=request.pop("position"))], request):
            if stop_event.is_set():
                raise ConnectionError("the reader host has been closed")
            yield _to_message(item)
            del item  # free it while the next one is read


class RemoteData(TablesMixin):
    """Data set read by reader hosts: a `Data` for `te.Trainer` and for custom loops. If a host fails, the next one
    continues its shards at their positions: batches are the same. Raise ConnectionError if none answers,
    PermissionError for a wrong token, ValueError for invalid addresses or different data.

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
        self._description = description = dict[str, Any]()
        self.num_hosts = len(self._addresses)
        for number in range(self.num_hosts):
            self.ask(lambda client: None, self._addresses[number:] + self._addresses[:number])
        self.name, self.encoding = str(description["name"]), str(description["encoding"])
        self.features = tuple(Feature(*feature) for feature in description["features"])
        self.num_dense: int = description["num_dense"]
        self.contents: dict[str, str] = description.get("contents", {})
        self.best_auc: float | None = description["best_auc"]
        self.is_stream: bool = description.get("is_stream", False)
        self.labels: tuple[str, ...] = tuple(description.get("labels", ()))
        self.has_weights: bool = description.get("has_weights", False)
        self._splits: tuple[Split, ...] = tuple(description["splits"])

    def splits(self) -> tuple[Split, ...]:
        return self._splits

    def num_rows(self, split: Split) -> int | None:
        """Return the number of rows of a split; None if unknown to the host before it has read the split."""
        return self.ask(lambda client: client.call("rows", {"split": split})["rows"])

    def shard_rows(self, split: Split, count: int) -> list[int] | None:
        """Return the number of rows of each of `count` shards of a split; None if it is unknown to the host."""
        return self.ask(lambda client: client.call("shard_rows", {"split": split, "count": count})["result"])

    def check_rows(self, split: Split) -> None:
        """Raise ValueError if a split of a log has no rows."""
        self.ask(lambda client: client.call("check_rows", {"split": split}))

    def estimated_rows(self, split: Split) -> int | None:
        """Estimate the number of rows of a split; None if that is impossible."""
        return self.ask(lambda client: client.call("rows", {"split": split})["estimated"])

    def open(self, split: Split, batch_size: int, **kwargs: Any) -> Stream:
        """Open a split; see `tritonemb.data.protocol.Data.open`. Batches and positions are those of the hosts' data
        set; their errors are raised as built-in types. Raise ConnectionError, also in `next`, if no host answers."""
        return _RemoteStream(self, OpenOptions(split, batch_size, **kwargs))

    def ask(self, request: Callable[[Client], Any], addresses: Sequence[str] = ()) -> Any:
        """Return the result of a request to the first of these hosts, or of all, that answers."""
        remaining = list(addresses or self._addresses)
        while True:
            client = Client(remaining.pop(0), self._token, self._roots)
            try:
                description = client.call("describe")
                self._description.update({} if self._description else description)
                if description != self._description:
                    raise ValueError(f"the reader hosts {self._addresses[0]} and {client.address} have different data")
                return request(client)
            except ConnectionError as error:
                if not remaining:
                    raise
                _log.warning("%s; the next reader host takes its place", error)

    def hosts_of(self, options: OpenOptions, tried: Sequence[str]) -> list[str]:
        """Return addresses in the order in which hosts should read a shard: first the host with most of its rows, last
        those already `tried`. Raise ConnectionError if a file of the shard is on no host that answers."""
        (index, count), missing = options.shard, dict[str, dict[str, float]]()
        addresses = [self._addresses[(index + number) % self.num_hosts] for number in range(self.num_hosts)]
        for address in addresses if self._description.get("is_shared") else ():
            with suppress(ConnectionError):  # this host is asked last
                missing[address] = Client(address, self._token, self._roots).call("missing", asdict(options))["sizes"]
        if 0 < len(missing) < self.num_hosts and (names := set.intersection(*map(set, missing.values()))):
            lost, hosts = join_names(sorted(names)), f"{join_names(missing)}, of {join_names(addresses)}"
            raise ConnectionError(f"shard {index} of {count} needs {lost}, which no host that answers has: {hosts}")
        return sorted(addresses, key=lambda a: (a in tried, a not in missing, sum(missing.get(a, {}).values())))


class _RemoteStream(Stream):
    """Stream of one host, and if that fails of the next one, from the same position on."""

    def __init__(self, data: RemoteData, options: OpenOptions) -> None:
        self._data, self._options, self.position = data, options, options.position or {}
        self._tried: list[str] = []  # addresses of hosts, since the last batch
        data.ask(self._open, data.hosts_of(options, self._tried))

    def _open(self, client: Client) -> None:
        request = {"action": "open"} | asdict(replace(self._options, position=self.position or None))
        pin_memory = request.pop("pin_memory")
        messages, cancel = client.stream(request)
        items = _to_items(messages, pin_memory)
        first = next(items)
        self._tried.append(client.address)
        super().__init__(items, first.position, first.report, on_stop=cancel)

    def __next__(self) -> Batch:
        try:
            batch = super().__next__()
        except ConnectionError as error:
            if len(self._tried) > self._data.num_hosts:
                raise
            _log.warning("%s; the next reader host continues shard %d", error, self._options.shard[0])
            self._data.ask(self._open, self._data.hosts_of(self._options, self._tried))
            return next(self)
        del self._tried[:-1]
        return batch


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
    lengths, offsets = (view.numpy() for view in layout.views(buffer)[-2:])
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])  # offsets are not sent
    return layout.batch(buffer)


@dataclass(frozen=True)
class ReaderOptions:
    """Read a data set for trainers on other machines, which connect with --data grpc://HOST:PORT.

    Clients need the token in the environment (TRITONEMB_TOKEN); without one, a random token is printed.

    Example: tritonemb reader --data day_0.tsv --address grpc+tls://0.0.0.0:8815 --certificate tls.crt --key tls.key

    Args:
        data: name of a data set, or path of a log.
        path: file or folder of the data set, for names that need it.
        address: grpc://HOST:PORT for this machine only, or grpc+tls://HOST:PORT with a certificate.
        certificate: PEM file for TLS.
        key: PEM file of the certificate's key.
        peers: addresses of the other hosts, if each has only some files of the log.
        seed: seed of synthetic data.
        read: options for reading a log.
    """

    data: str
    path: Path | None = None
    address: str = "grpc://127.0.0.1:8815"
    certificate: Path | None = None
    key: Path | None = None
    peers: tuple[str, ...] = ()
    seed: int = 0
    read: LogOptions = field(default_factory=LogOptions)


def run_reader(options: ReaderOptions) -> None:
    data: Any = options.peers and SharedLog(options.path or options.data, options.read, peers=options.peers)
    data = data or open_dataset(options.data, options.path, log=options.read, seed=options.seed)
    with ReaderHost(data, options.address, certificate=options.certificate, key=options.key) as host:
        print(f"serving {data.name} at {host.address}", flush=True)
        if not os.environ.get(TOKEN):
            print(f"{TOKEN}={host.token}", flush=True)
        host.wait()
