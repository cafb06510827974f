"""Data loader workers and reader hosts for all tests of data: starting a process takes seconds."""

import copy

import pytest
import torch

from tests.data.bundle import SIZES, Bundle
from tests.helpers import process_ends
from tritonemb.data import ClickLog, DataLoaderWorkers, ReaderHost, RemoteData, convert, make_synthetic


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    from tests.data.logs import line, options, write

    folder = tmp_path_factory.mktemp("bundle")
    data = {}
    for size in SIZES:
        lines = [line(integers={1: str(number)}) for number in range(size)]
        plain, packed = write(folder, lines, f"log_{size}.txt"), write(folder, lines, f"log_{size}.txt.gz")
        convert(plain, folder / f"log_{size}.parquet", row_group_rows=17)
        (folder / f"files_{size}").mkdir()
        for start in range(0, size, 25):
            write(folder / f"files_{size}", lines[start : start + 25], f"part_{start}.txt")
        paths = {
            "tsv": plain,
            "gz": packed,
            "parquet": folder / f"log_{size}.parquet",
            "files": folder / f"files_{size}",
        }
        for kind, path in paths.items():
            data[f"{kind}-{size}"] = ClickLog(path, options(log_transform=False, shuffle_rows=20, chunk_bytes=1000))
        data[f"memory-{size}"] = make_synthetic(size, 50)
        data[f"memory-{size}"].train.dense[:, 0] = torch.arange(size)
    bad = write(folder, [*(line() for _ in range(40)), "bad"], "bad.txt")
    data["strict"] = ClickLog(bad, options(chunk_bytes=1000))
    data["lenient"] = ClickLog(bad, options(chunk_bytes=1000, on_bad_row="skip"))
    return Bundle(data, folder)


@pytest.fixture(scope="session")
def workers(bundle):
    """By their number; 0 is none. All share their processes, which end with them."""
    with DataLoaderWorkers(bundle, 3) as three:
        one = copy.copy(three)
        one._num_workers = 1
        yield {0: None, 1: one, 3: three}
        pids = three.pids
    assert all(map(process_ends, pids))


@pytest.fixture(scope="session")
def remote(bundle):
    """The bundle, as two reader hosts of this process serve it."""
    with ReaderHost(bundle) as one, ReaderHost(bundle, token=one.token) as two:
        yield RemoteData([one.address, two.address], token=one.token)
