"""One changed bit in a file of ours that is read back: an error that names the file, or the same content."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pyarrow")
from pyarrow import parquet

import tritonemb as te
from tests.data.logs import options, random_lines, write
from tests.training.callbacks.events import train
from tritonemb.data import ClickLog, build_vocabulary, cached_as_parquet, convert, load_vocabulary
from tritonemb.data.encode import METADATA
from tritonemb.data.files import BLOCK_BYTES, CHECKSUMS
from tritonemb.offloading.checkpoint import CHECKSUMS as CHECKSUMS_FILE
from tritonemb.sharding import ColumnWise, RowWise, ShardingPlan
from tritonemb.sharding.planner import Topology
from tritonemb.storage.checkpoint import MANIFEST
from tritonemb.storage.checkpoint import METADATA as METADATA_FILE
from tritonemb.training.callbacks.jsonl import RunLog, read_run_log
from tritonemb.training.checkpoint import CheckpointFolder, read_manifest

File = tuple[Path, Callable[[], Any]]  # and what reads it


def manifest(folder: Path) -> File:
    progress = {"step": 7, "position": {"of": 12345, "part": 0, "skip": 10, "rows": 640}}
    checkpoints = CheckpointFolder(folder)
    checkpoints.save(7, {"model.a": torch.ones(3)}, {"progress": progress, "config": {"name": "é"}})
    return checkpoints.path(7) / MANIFEST, lambda: read_manifest(checkpoints.path(7))


def plan(folder: Path) -> File:
    path = folder / "plan.json"
    ShardingPlan({"user": RowWise(), "item": ColumnWise([1, 0], [8, 24])}, 2).save(path)
    return path, lambda: ShardingPlan.load(path)


def topology(folder: Path) -> File:
    path = folder / "topology.json"
    Topology(8, 4, hbm=1e9, name="é").save(path)
    return path, lambda: Topology.load(path)


def tensors(folder: Path) -> File:
    path, read = manifest(folder)
    return path.with_name("__0_0.distcp"), read


def metadata(folder: Path) -> File:
    path, read = manifest(folder)
    return path.with_name(METADATA_FILE), read


def offloaded(folder: Path) -> File:
    def make() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return te.offload(model, torch.optim.AdamW(model.parameters()), states="host", budget="1MiB")

    model, optimizer = make()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    te.offloading.save_checkpoint(model, optimizer, folder / "saved")

    def read() -> Any:
        te.offloading.load_checkpoint(model, optimizer, folder / "saved")
        states = [value.tolist() for state in optimizer.state_dict()["state"].values() for value in state.values()]
        return [p.tolist() for p in model.parameters()], states

    return folder / "saved" / "__0_0.distcp", read


def offloaded_metadata(folder: Path) -> File:
    path, read = offloaded(folder)
    return path.with_name(METADATA_FILE), read


def offloaded_checksums(folder: Path) -> File:
    path, read = offloaded(folder)
    return path.with_name(CHECKSUMS_FILE), read


def rows(log: ClickLog) -> list[Any]:
    """Of all splits."""
    return [
        [value.tolist() for value in (batch.dense, batch.labels, batch.sparse.values(), batch.sparse.offsets())]
        for split in log.splits()
        for batch in log.open(split, 64)
    ]


def log(folder: Path, compression: str = "zstd", num_rows: int = 300) -> File:
    path = folder / "log.parquet"
    convert(write(folder, random_lines(num_rows)), path, row_group_rows=num_rows // 3, compression=compression)
    return path, lambda: rows(ClickLog(path, options()))


def plain_log(folder: Path) -> File:
    return log(folder, "none")


def long_log(folder: Path) -> File:
    """Of several blocks of bytes that have a checksum each."""
    return log(folder, "none", num_rows=12_000)


def cache(folder: Path) -> File:
    text = ClickLog(write(folder, random_lines(40)), options())
    cached_as_parquet(text, folder / "cache")
    (path,) = (folder / "cache").glob("*/log.json")
    return path, lambda: rows(cached_as_parquet(text, folder / "cache"))


def vocabulary(folder: Path) -> File:
    path, text = folder / "words.parquet", ClickLog(write(folder, random_lines(300)), options())
    build_vocabulary(text, path)

    def read() -> Any:
        result = load_vocabulary(path)
        return {name: (item.num_embeddings, item.ids(item._values).tolist()) for name, item in result.items()}

    return path, read


def run_log(folder: Path) -> File:
    path = folder / "log.jsonl"
    train([RunLog(path)])
    return path, lambda: read_run_log(path)


OFFLOADED = [offloaded, offloaded_metadata, offloaded_checksums]
FILES = [manifest, tensors, metadata, plan, topology, *OFFLOADED, vocabulary, log, plain_log, cache, run_log]


def check_flips(make: Callable[[Path], File], folder: Path, flips: int) -> None:
    path, read = make(folder)
    content, expected = path.read_bytes(), read()
    assert make is not long_log or len(content) > 2 * BLOCK_BYTES
    for bit in random.Random(0).sample(range(8 * len(content)), flips):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            actual, problem = read(), ""
        except (OSError, ValueError) as error:
            actual, problem = expected, str(error)
        assert actual == expected, f"bit {bit}"
        assert not problem or path.name in problem, f"bit {bit}: {problem}"


@pytest.mark.parametrize("make", [vocabulary, log])
def test_files_of_others_are_read_though_they_have_no_checksums_or_copy_those_of_ours(tmp_path, make):
    path, read = make(tmp_path)
    expected, table, stored = read(), parquet.read_table(path), parquet.read_metadata(path).metadata
    for copied in ((METADATA,), (METADATA, CHECKSUMS)):
        retained = table.replace_schema_metadata({name: stored[name] for name in copied if name in stored})
        parquet.write_table(retained, path, row_group_size=50)
        assert read() == expected


@pytest.mark.parametrize("remote", [False, True])
def test_page_checksums_of_others_and_of_remote_files_are_verified(tmp_path, remote):
    path, _ = plain_log(tmp_path)
    if not remote:
        parquet.write_table(parquet.read_table(path), path, compression="none", write_page_checksum=True)
    column = parquet.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    last = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1
    content[last] ^= 1
    source: str | Path = path
    path.write_bytes(content)
    if remote:
        source = "memory://damaged/log.parquet"
        pytest.importorskip("fsspec").filesystem("memory").pipe("/damaged/log.parquet", bytes(content))
    with pytest.raises(ValueError, match=r"log\.parquet is not a complete Parquet file \(.*CRC"):
        rows(ClickLog(source, options()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", FILES)
def test_a_flipped_bit_is_named_or_changes_nothing(tmp_path, make):
    check_flips(make, tmp_path, flips=10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [*FILES, long_log])
def test_any_flipped_bit_is_named_or_changes_nothing(tmp_path, make):
    check_flips(make, tmp_path, flips=400)
