"""Tables that begin with rows of a file: the rows of the file, bit by bit, and default values in all others."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tritonemb as te
from tests.helpers import Calls, assert_same_bits
from tests.sharding.models import whole_state
from tritonemb.serving.package import write_tensors
from tritonemb.sharding import ColumnWise, RowWise, ShardingPlan
from tritonemb.storage import checkpoint

ROWS, DIM = 90, 6
FORMATS = "npy", "npz", "safetensors", "parquet"


def write(path: Path, weight: Any, ids: Any = None) -> Path:
    """Write a file of rows by another library than the one that reads it, where there is one."""
    tensors = {} if ids is None else {"ids": torch.as_tensor(ids)}
    if path.suffix == ".npy":
        np.save(path, weight)
    elif path.suffix == ".npz":
        np.savez(path, weight=weight, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif path.suffix == ".safetensors":
        tensors["weight"] = torch.from_numpy(weight)
        write_tensors(path, {name: (t.dtype, [*t.shape], [t]) for name, t in tensors.items()}, {})
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = {"weight": [*weight], **{name: tensor.numpy() for name, tensor in tensors.items()}}
        parquet.write_table(pyarrow.table(columns), path, row_group_size=7)  # lists of any length
    return path


def numbers(rows: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, DIM)).astype(dtype)


def collection(config: te.TableConfig, device: str | None = None) -> te.nn.EmbeddingBagCollection:
    torch.manual_seed(3)
    return te.nn.EmbeddingBagCollection([config], te.optim.Adam(lr=0.1), device=device)


def static(path: Path | None, **options: Any) -> te.TableConfig:
    if options.get("placement", "device") != "device":
        options["cache"] = te.CacheConfig(rows=32)
    return te.TableConfig("t", ROWS, DIM, init=path, **options)


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_a_file_and_defaults_elsewhere(tmp_path, monkeypatch, kind, placement):
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 200)  # several blocks
    defaults = collection(static(None)).state_dict()
    dense = numbers(ROWS, np.float64)
    table = collection(static(write(tmp_path / f"dense.{kind}", dense), placement=placement))
    expected = {**defaults, "t.weight": torch.from_numpy(dense).float()}
    assert_same_bits(table.state_dict(), expected)
    if kind == "npy":
        big = write(tmp_path / "big.npy", dense.astype(">f8"))  # of another byte order
        assert_same_bits(collection(static(big, placement=placement)).state_dict(), expected)
        return
    ids, rows = torch.randperm(ROWS)[:40], numbers(40)
    table = collection(static(write(tmp_path / f"some.{kind}", rows, ids), placement=placement, dtype=torch.float16))
    halves = collection(static(None, dtype=torch.float16)).state_dict()
    halves["t.weight"][ids] = torch.from_numpy(rows).half()
    assert_same_bits(table.state_dict(), halves)
    # Again, after training.
    table(te.KeyedJaggedTensor.from_lists({"t": [[1, 2, 3]]})).sum().backward()
    torch.manual_seed(3)
    table["t"].reset_parameters()
    assert_same_bits({"t.weight": table.state_dict()["t.weight"]}, {"t.weight": halves["t.weight"]})


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
@pytest.mark.parametrize("kind", FORMATS[1:])
def test_dynamic_tables_begin_with_the_ids_of_a_file(tmp_path, kind, placement):
    ids, rows = torch.tensor([-(2**63), 7, 2**63 - 1, 0, 99]), numbers(5)
    path = write(tmp_path / f"rows.{kind}", rows, ids)
    config = te.TableConfig("t", None, DIM, capacity=100, init=path, placement=placement)
    model = collection(config)
    table: Any = model["t"]
    assert torch.equal(table.ids(), ids.sort()[0])
    assert torch.equal(table.lookup(ids), torch.from_numpy(rows))
    assert table.lookup([8]).abs().max() <= DIM**-0.5
    if kind == "safetensors":
        return
    # The export of such a table is such a file.
    plain = te.TableConfig("t", None, DIM, capacity=100, fallback_rows=4)
    source: Any = collection(plain)["t"]
    source.insert(ids, torch.from_numpy(rows))
    source.export(tmp_path / f"export.{kind}")
    config = te.TableConfig("t", None, DIM, capacity=100, init=str(tmp_path / f"export.{kind}"), placement=placement)
    model = collection(config)
    assert torch.equal(model["t"].lookup(ids), torch.from_numpy(rows))


def test_a_reader_of_some_rows_reads_no_others(tmp_path):
    for kind in FORMATS:
        file = checkpoint.open_pretrained(static(write(tmp_path / f"rows.{kind}", numbers(ROWS))))
        ranges = list[tuple[int, int]]()

        def read(first: int, stop: int, file: Any = file, ranges: Any = ranges) -> torch.Tensor:
            ranges.append((first, stop))
            return file.read(first, stop)

        blocks = [*file._replace(read=read).blocks(lambda ids: (ids >= 30) & (ids < 50))]
        assert (ranges[0][0], ranges[-1][1]) == (30, 50), kind
        assert torch.equal(torch.cat([rows for _, rows in blocks]), torch.from_numpy(numbers(ROWS)[30:50])), kind


def shards(rank: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    """States of sharded models, which were made whole or on the meta device."""
    states = []
    dynamic = te.TableConfig("t", None, DIM, capacity=400, init=folder / "some.npz")
    for config, sharding in (
        (static(folder / "dense.npy"), RowWise()),
        (static(folder / "dense.npy", placement="disk"), RowWise()),
        (static(folder / "some.npz"), ColumnWise([0, 1])),
        (dynamic, RowWise()),
    ):
        for device in (None, "meta"):
            model = collection(config, device)
            parallel: Any = te.HybridParallel(model, ShardingPlan({"t": sharding}, 2), device="cpu")
            states.append(whole_state(parallel.module, parallel.group))
    return states


def test_each_rank_loads_its_shards(tmp_path, ranks):
    dense, some, ids = numbers(ROWS), numbers(40), torch.randperm(ROWS)[:40]
    write(tmp_path / "dense.npy", dense)
    write(tmp_path / "some.npz", some, ids)
    for states in ranks(2).run(shards, tmp_path):
        for state in states[:4]:
            assert torch.equal(state["t.weight"], torch.from_numpy(dense))
        for state in states[4:6]:
            assert torch.equal(state["t.weight"][ids], torch.from_numpy(some))
            assert state["t.weight"].abs().amax(1).min() > 0  # others have defaults
        for state in states[6:]:
            assert torch.equal(state["t.ids"], ids.sort()[0])
            assert torch.equal(state["t.weight"], torch.from_numpy(some)[ids.sort()[1]])


@pytest.mark.parametrize("is_raw", [True, False])
def test_no_file_runs_code(tmp_path, is_raw):
    path, touched = tmp_path / "rows.npy", tmp_path / "touched"
    if is_raw:
        path.write_bytes(pickle.dumps(Calls(Path.touch, touched)))
    else:
        np.save(path, np.array([Calls(Path.touch, touched)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"table 't': init '.*rows\.npy' cannot be read"):
        collection(static(path))
    assert not touched.exists()


def test_files_that_do_not_fit_are_named(tmp_path):
    two = numbers(2)
    cases: list[tuple[str, Any, Any, str]] = [
        ("a.npy", numbers(ROWS - 1), None, rf"has rows of shape \[89, 6\] .*; expected \[{ROWS}, {DIM}\] of a float"),
        ("b.npy", numbers(ROWS)[:, :5], None, r"has rows of shape \[90, 5\]"),
        ("c.npy", numbers(ROWS).astype(np.int32), None, r"dtype torch\.int32; expected"),
        ("d.npz", two, [1, ROWS], r"has 1 ids outside of 0 to 89, such as 90"),
        ("e.safetensors", two, [1, 1], r"has the id 1 twice"),
        ("f.npz", two, [1.0, 2.0], r"has ids of shape \[2\] and dtype torch\.float32; expected int32 or int64"),
        ("j.npz", two, 3, r"has ids of shape \[\] and dtype torch\.int64; expected int32 or int64"),
        ("g.parquet", two[:, :3], [1, 2], r"lists of other than 6 numbers"),
        ("i.parquet", [[1.0, None, *[2.0] * 4]], [1], r"lists of other than 6 numbers"),
        ("h.npz", two, [1], r"has rows of shape \[2, 6\] .*; expected \[1, 6\]"),
    ]
    for name, weight, ids, text in cases:
        with pytest.raises(ValueError, match=rf"{name}.* .*{text}"):
            collection(static(write(tmp_path / name, weight, ids)))
    np.savez(tmp_path / "rows.npz", embeddings=two)
    (tmp_path / "empty.parquet").touch()
    for name, text in (("rows.npz", "cannot be read, or has no `weight`"), ("empty.parquet", "cannot be read")):
        with pytest.raises(ValueError, match=rf"table 't': init '.*{name}' {text}"):
            collection(static(tmp_path / name))
    with pytest.raises(FileNotFoundError, match=r"init '.*rows\.npy' does not exist"):
        collection(static(tmp_path / "rows.npy"))
    with pytest.raises(ValueError, match=r"init '.*rows\.pt' must be a file of \.npy, \.npz, \.parquet, \.safetensors"):
        collection(static(tmp_path / "rows.pt"))
    with pytest.raises(TypeError, match="init must be a function or a file's path, got 3"):
        te.TableConfig("t", ROWS, DIM, init=3)  # type: ignore[arg-type]
    dynamic = te.TableConfig("t", None, DIM, capacity=10, init=write(tmp_path / "dense.npy", numbers(ROWS)))
    with pytest.raises(ValueError, match="has no ids, which a dynamic table needs"):
        collection(dynamic)
    path = write(tmp_path / "many.npz", numbers(3_000), np.arange(3_000))
    with pytest.raises(ValueError, match="has 3,000 rows in its init, 3,000 of them in a partition that has room for"):
        collection(te.TableConfig("t", None, DIM, capacity=100, init=path))
    with pytest.raises(ValueError, match="this table is on embedding servers"):
        collection(static(path, placement="server"))


@pytest.mark.more
def test_runs_read_them_at_their_start_only(tmp_path, capsys):
    pytest.importorskip("tyro")
    from tritonemb.cli import main

    log, path = tmp_path / "log.csv", tmp_path / "user.npz"
    log.write_text("\n".join(["click,user,item", *(f"{i * 7 % 3 % 2},{i % 9},{i % 7}" for i in range(200))]))
    write(path, np.full((1, DIM), 3.0, np.float32), [0])
    command = ["train", "--data", str(log), "--label", "click", "--dense", "--sparse", "user", "item"]
    command += ["--num-embeddings", "50", "--embedding-dim", str(DIM), "--batch-size", "50", "--embedding-lr", "0"]
    command += ["--out", str(tmp_path / "run")]
    assert main([*command, "--epochs", "1", "--pretrained", f"user={path}"]) == 0, capsys.readouterr().err
    path.unlink()
    assert torch.equal(te.load_run(tmp_path / "run").tables["user"].lookup([0]), torch.full((1, DIM), 3.0))
    assert main([*command, "--epochs", "2", "--pretrained", f"user={path}", "--resume", "auto"]) == 0
    for arguments, text in (
        ([f"user={path}"], "user.npz' does not exist"),
        ([f"price={path}"], "pretrained names 'price', not a table; the tables are user, item"),
        ([str(path)], 'expected "name=path"'),
    ):
        assert main([*command[:-2], "--out", str(tmp_path / "bad"), "--pretrained", *arguments]) == 2
        assert text in capsys.readouterr().err
