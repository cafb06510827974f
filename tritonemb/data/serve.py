"""`tritonemb serve`: a reader host for the trainers of other machines."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tritonemb.data import open_dataset
from tritonemb.data.protocol import Data
from tritonemb.data.reader_host import TOKEN, ReaderHost
from tritonemb.data.schema import LogOptions


@dataclass(frozen=True)
class ServeOptions:
    """Read a data set for trainers on other machines, which are started with --data grpc://HOST:PORT.

    The token that they need is that of the environment (TRITONEMB_TOKEN); if there is none, a random one is printed.

    Example: tritonemb serve --data day_0.tsv --address grpc://0.0.0.0:8815

    Args:
        data: a data set's name, or the path of a log.
        path: where the data set lies, for names that need it.
        address: where to listen: grpc://HOST:PORT, or grpc+tls://HOST:PORT with a certificate.
        certificate: a PEM file for TLS.
        key: its key, a PEM file.
        seed: of synthetic data.
        read: how a log is read.
    """

    data: str
    path: Path | None = None
    address: str = "grpc://0.0.0.0:8815"
    certificate: Path | None = None
    key: Path | None = None
    seed: int = 0
    read: LogOptions = field(default_factory=LogOptions)


def serve(options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ValueError, FileNotFoundError, OSError: as `open_dataset` and `ReaderHost`.
    """
    data: Data = open_dataset(
        options.data, options.path, log=options.read, seed=options.seed, say=lambda text: print(text, file=sys.stderr)
    )
    with ReaderHost(data, options.address, certificate=options.certificate, key=options.key) as host:
        print(f"serving {data.name} at {host.address}", flush=True)
        if TOKEN not in os.environ:
            print(f"{TOKEN}={host.token}", flush=True)
        host.wait()
