"""The index of items, users and items of a two-tower run, and `tritonemb predict --top`."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits
from tritonemb import utils
from tritonemb.serving import ItemIndex, encode_rows, retrieval
from tritonemb.storage.store import StorageError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
csv = pytest.importorskip("pyarrow.csv")

IDS = torch.tensor([50, 7, 1 << 40, 12])
VECTORS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0], [-1.0, -1.0]])


def test_the_best_items_are_those_of_all_scores():
    index = ItemIndex(VECTORS, IDS)
    scores, ids = index.search(torch.tensor([[1.0, 0.1], [0.0, -1.0]]), 3)
    assert ids.tolist() == [[50, 1 << 40, 7], [12, 50, 1 << 40]]  # of equal scores, the first
    torch.testing.assert_close(scores, torch.tensor([[1.0, 1.0, 0.2], [1.0, 0.0, 0.0]]))
    assert index.search(torch.ones(2, 2), 9)[1].shape == (2, 4)
    assert ItemIndex(VECTORS).search(torch.tensor([[1.0, 0.1]]), 2)[1].tolist() == [[0, 2]]


def test_excluded_items_are_left_out():
    index = ItemIndex(VECTORS, IDS)
    excluded = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([50, 99, 12, -3, 1 << 50])  # some are unknown
    scores, ids = index.search(torch.tensor([[1.0, 0.1], [0.0, -1.0]]), 4, excluded)
    assert ids.tolist() == [[1 << 40, 7, 12, -1], [50, 1 << 40, 7, -1]]
    assert scores[:, 3].tolist() == [-torch.inf] * 2


def test_an_index_is_saved_whole_or_its_damage_is_an_error(tmp_path: Path, monkeypatch):
    index = ItemIndex(VECTORS, IDS)
    index.save(tmp_path / "items")
    copy = ItemIndex.load(tmp_path / "items")
    assert_same_bits({"v": copy.vectors, "i": copy.ids}, {"v": index.vectors, "i": index.ids})
    with pytest.raises(FileExistsError):
        index.save(tmp_path / "items")
    monkeypatch.setattr(retrieval, "write_manifest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        index.save(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["items"]
    data = bytearray((tmp_path / "items" / "items.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "items" / "items.pt").write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        ItemIndex.load(tmp_path / "items")
    with pytest.raises(FileNotFoundError, match=r"it has no items\.json"):
        ItemIndex.load(tmp_path)


def test_a_disk_that_is_full_at_the_last_sync(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(utils, "sync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(StorageError, match=r"items could not be written: .*No space left on device; free disk space"):
        ItemIndex(VECTORS, IDS).save(tmp_path / "items")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("num_items", [10, 100_000])
def test_a_full_disk(small_disk: Path, num_items: int):
    """Torch's writer of archives raises errors without a reason, or ends the process."""
    index = ItemIndex(torch.zeros(num_items, 8))
    for room in (0, 4096, 20_000):
        (small_disk / "filler").write_bytes(b"")
        (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - room))
        if room == 20_000 and num_items == 10:
            index.save(small_disk / "items")
            continue
        with pytest.raises(StorageError, match=r"could not be written: .*No space left on device; free disk space"):
            index.save(small_disk / "items")
        assert [path.name for path in small_disk.iterdir()] == ["filler"]


@pytest.mark.more
def test_a_faiss_index_has_the_exact_items_or_says_its_recall():
    pytest.importorskip("faiss")
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2000, 8, generator=generator)
    index = ItemIndex(vectors, torch.randperm(5000, generator=generator)[:2000])
    queries = torch.randn(50, 8, generator=generator)
    flat = index.to_faiss()
    assert flat.search(queries.numpy(), 5)[1].tolist() == index.search(queries, 5)[1].tolist()
    assert index.recall(flat, queries, 5) == 1.0
    clusters = index.to_faiss("IVF20,Flat")  # of which one is searched
    recall = index.recall(clusters, queries, 5)
    ids = clusters.search(queries.numpy(), 5)[1].tolist()
    exact = index.search(queries, 5)[1].tolist()
    assert recall == pytest.approx(sum(len({*a} & {*b}) for a, b in zip(ids, exact, strict=True)) / 250)
    assert 0.1 < recall < 1


def test_bad_input():
    for vectors, ids in ((torch.ones(3), None), (VECTORS, IDS[:3]), (VECTORS, IDS.int())):
        with pytest.raises(ValueError, match=r"expected vectors \[M, D\] and ids int64 \[M\], got"):
            ItemIndex(vectors, ids)
    with pytest.raises(ValueError, match="ids must be distinct"):
        ItemIndex(VECTORS, torch.tensor([1, 2, 1, 3]))
    with pytest.raises(TypeError, match="ids must be a tensor, got a list"):
        ItemIndex(VECTORS, ["a", "b", "c", "d"])
    index, queries = ItemIndex(VECTORS), torch.ones(2, VECTORS.shape[1])
    for wrong in (queries[0], queries[:, 1:]):
        with pytest.raises(ValueError, match=r"expected queries \[B, "):
            index.search(wrong, 1)
    for row in (-1, 2):  # -1 would be the last query
        with pytest.raises(ValueError, match="excluded pairs have queries"):
            index.search(queries, 1, (torch.tensor([0, row]), torch.tensor([1, 1])))
    for pair in ((torch.tensor([0]), torch.tensor([1], dtype=torch.int32)), (torch.tensor([0]), torch.tensor([1, 2]))):
        with pytest.raises(ValueError, match="expected excluded pairs of two int64"):
            index.search(queries, 1, pair)


USERS, ITEMS = 8, 12


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-tower run on clicks where user and item agree modulo 4; items are strings, with a group and tags."""
    from tritonemb.cli import main

    folder = tmp_path_factory.mktemp("run")
    rows = [(user, item) for user in range(USERS) for item in range(ITEMS)] * 12
    table = {
        "clicked": [int(user % 4 == item % 4) for user, item in rows],
        "age": [float(user) for user, _ in rows],
        "user": [user for user, _ in rows],
        "item": [f"i{item}" for _, item in rows],
        "tags": [[f"t{item % 3}"] * (item % 2) for _, item in rows],
    }
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).numpy()
    parquet.write_table(pa.table(table).take(order), folder / "log.parquet")
    options = (
        "--label clicked --dense age --sparse user item tags --model two_tower --user-features user --embedding-dim 8"
        " --temperature 0.2"
    )
    training = "--top-mlp 8 --num-embeddings 1000 --batch-size 64 --epochs 6 --embedding-lr 0.1 --dense-lr 0.01"
    command = ["train", "--data", str(folder / "log.parquet"), *options.split(), *training.split()]
    # Dense layers and their states offloaded, as no other test has towers there.
    offload = ["--offload-states", "host", "--offload-params", "host"]
    assert main([*command, *offload, "--out", str(folder / "run")]) == 0
    parquet.write_table(
        pa.table({"user": list(range(USERS)), "age": [float(u) for u in range(USERS)]}), folder / "users.parquet"
    )
    items = {"item": [f"i{i}" for i in range(ITEMS)], "tags": [[f"t{i % 3}"] * (i % 2) for i in range(ITEMS)]}
    parquet.write_table(pa.table(items), folder / "items.parquet")
    return folder


@pytest.mark.more
def test_vectors_of_rows_give_the_scores_of_the_model(run_folder: Path):
    run = te.load_run(run_folder / "run")
    users, items = (parquet.read_table(run_folder / f"{name}.parquet") for name in ("users", "items"))
    vectors = encode_rows(run, "users", users, batch_size=3), encode_rows(run, "items", items.to_pydict())
    pairs = [user | item for user in users.to_pylist() for item in items.to_pylist()]
    scores = torch.from_numpy(run.predict(pairs)).view(USERS, ITEMS)
    torch.testing.assert_close((vectors[0] @ vectors[1].T / 0.2).sigmoid(), scores)
    with pytest.raises(ValueError, match="missing columns of the items: tags; the rows have item"):
        encode_rows(run, "items", items.select(["item"]))
    assert encode_rows(run, "items", items.slice(0, 0)).shape == (0, 8)


@pytest.mark.more
def test_exported_and_quantized_runs_have_towers(run_folder: Path):
    run, items = te.load_run(run_folder / "run"), parquet.read_table(run_folder / "items.parquet")
    vectors = encode_rows(run, "items", items)
    te.export(run, run_folder / "exported")
    assert torch.equal(encode_rows(te.load_run(run_folder / "exported"), "items", items), vectors)
    run.model = te.quantize(run.model, "int8")
    quantized = encode_rows(run, "items", items)
    assert not torch.equal(quantized, vectors)
    assert (quantized - vectors).abs().max() < 0.01 * vectors.abs().max()


@pytest.mark.more
def test_predict_writes_the_best_items_of_each_user(run_folder: Path, capsys):
    from tritonemb.cli import main

    paths = {name: str(run_folder / f"{name}.parquet") for name in ("users", "items", "top")}
    predict = ["predict", str(run_folder / "run"), "--data", paths["users"], "--keep", "user"]
    assert main([*predict, "--items", paths["items"], "--top", "3", "--out", paths["top"]]) == 0, (
        capsys.readouterr().err
    )
    top = parquet.read_table(paths["top"])
    assert top.column_names == ["user", "item", "tags", "score"]
    assert top["user"].to_pylist() == [user for user in range(USERS) for _ in range(3)]
    agree = [
        user % 4 == int(item[1:]) % 4
        for user, item in zip(*(top[c].to_pylist() for c in ("user", "item")), strict=True)
    ]
    assert sum(agree) > 0.9 * len(agree)
    # The score is the logit.
    run, rows = te.load_run(run_folder / "run"), [row | {"age": float(row["user"])} for row in top.to_pylist()]
    torch.testing.assert_close(top["score"].to_numpy(), torch.from_numpy(run.predict(rows)).logit().numpy())
    # The same items from CSV, but for their tags; other columns are text.
    users = parquet.read_table(paths["users"])
    users = users.append_column("account", pa.array([f"0{user}" for user in range(USERS)]))
    csv.write_csv(users, run_folder / "users.csv", csv.WriteOptions(quoting_style="none"))
    lines = (run_folder / "users.csv").read_bytes().splitlines()  # and columns that are not used may have any bytes
    (run_folder / "users.csv").write_bytes(b"".join([lines[0] + b",note\n", *(n + b",caf\xe9\n" for n in lines[1:])]))
    command = ["predict", str(run_folder / "run"), "--data", str(run_folder / "users.csv"), "--keep", "user", "account"]
    out = str(run_folder / "again.parquet")
    assert main([*command, "--items", paths["items"], "--top", "3", "--out", out]) == 0
    assert parquet.read_table(out).drop_columns("account").equals(top)
    assert parquet.read_table(out)["account"][-1].as_py() == f"0{USERS - 1}"

    def csv_file(content: str) -> str:
        (run_folder / f"{len(content)}-other.csv").write_text(f"{content}\n")
        return str(run_folder / f"{len(content)}-other.csv")

    # Errors of a user.
    for arguments, text in (
        (["--top", "3"], "pass both top and items"),
        (["--items", paths["items"]], "pass both top and items"),
        (["--top", "3", "--items", str(run_folder / "items.txt")], "--top reads .parquet files and .csv files"),
        (["--top", "3", "--items", paths["users"]], "missing columns of the items: item, tags"),
        (["--top", "3", "--items", paths["items"], "--keep", "name"], "has no column 'name' to keep; it has user, age"),
        (["--top", "3", "--items", paths["items"], "--keep", "tags"], "'tags' is a column of the items"),
        (["--top", "3", "--items", str(run_folder / "none.csv")], "none.csv: no such file"),
        (["--top", "3", "--items", csv_file("item,tags,item\na,,b")], "rows of the items: there are 2 columns 'item'"),
        (["--top", "3", "--items", csv_file("item,tags\na")], "other.csv cannot be read: CSV parse error: Expected 2"),
        (["--top", "3", "--items", csv_file("item,tags")], "other.csv has no rows, so there is no item to rank"),
        (["--top", "3", "--data", csv_file("user,age\n1,x")], "other.csv cannot be read: In CSV column #1"),
    ):
        arguments += ["--items", paths["items"]] if "other.csv cannot be read: In" in text else []
        assert main([*predict, *arguments, "--out", out]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.more
def test_other_models_have_no_towers():
    class Plain:
        model, path = torch.nn.Linear(1, 1), "runs/plain"

    with pytest.raises(ValueError, match="runs/plain has a Linear, retrieval needs a two-tower model"):
        encode_rows(Plain(), "users", pa.table({}))
