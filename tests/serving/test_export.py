"""Exported models: the bits of the original from tables of every kind, mapped memory, replaced tables, damage."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.export.pt2_archive._package import PT2ArchiveWriter

import tritonemb as te
from tests import durability
from tests.strategies import random_batch
from tritonemb import utils
from tritonemb.data import LogOptions, Schema, build_vocabulary, from_dataframe
from tritonemb.data.files import pa
from tritonemb.serving import package
from tritonemb.serving.package import MANIFEST
from tritonemb.storage import StorageError
from tritonemb.storage.checkpoint import read_manifest_text, write_manifest

PROGRAMS = sys.modules["tritonemb.serving.export"]  # `tritonemb.serving.export` is the function
KEYS = ["x", "y", "z"]


def config(name: str, key: str, **options: object) -> te.TableConfig:
    return te.TableConfig(name, 40, 8, features=[key], **options)


def dynamic(name: str, key: str, **options: object) -> te.TableConfig:
    return te.TableConfig(name, None, 8, features=[key], capacity=100, **options)


KINDS = {
    "device": [config("a", "x", dtype=torch.bfloat16), config("b", "y", pooling="mean"), config("c", "z")],
    "host": [config("a", "x", placement="host"), config("b", "y", pooling="mean")],
    "disk": [config("a", "x", placement="disk"), dynamic("b", "y", placement="disk")],
    "dynamic": [dynamic("a", "x"), dynamic("b", "y", fallback_rows=4, pooling="mean"), config("c", "z")],
    "empty": [dynamic("a", "x"), dynamic("b", "y", fallback_rows=4)],
    "servers": [dynamic("a", "x", placement="server"), config("b", "y", placement="server")],
    "leased": [dynamic("a", "x", placement="server"), config("b", "y", placement="server")],
}


class Model(nn.Module):
    """A collection, and a dense layer."""

    def __init__(self, tables: list[te.TableConfig], pooled: bool = True) -> None:
        super().__init__()
        kind = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
        self.tables = kind(tables, te.optim.RowWiseAdagrad(lr=0.1))
        self.top = nn.Linear(8, 3)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, batch: te.KeyedJaggedTensor) -> torch.Tensor:
        rows = self.tables(batch)
        rows = rows if isinstance(rows, torch.Tensor) else rows.values()
        return self.top(rows.float().view(-1, 8)) * self.scale


def batch_of(size: int = 40) -> te.KeyedJaggedTensor:
    return random_batch(dict.fromkeys(KEYS, size), KEYS, 9, 4, False, torch.int64, torch.int64)


def same_bits(model: nn.Module, loaded: nn.Module, size: int = 40) -> bool:
    with torch.no_grad():
        batches = [batch_of(size) for _ in range(3)]
        return all(torch.equal(model(batch), loaded(batch)) for batch in batches)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_export_has_the_bits_of_the_model(kind, tmp_path):
    tables, staleness = KINDS[kind], int(kind == "servers")
    model = Model(tables)
    with te.server.start(2) as servers:
        if "server" in tables[0].placement:
            te.server.attach(model, servers, staleness)
        for _ in range(3 * (kind != "empty")):
            model(batch_of(30)).sum().backward()
        model.eval()
        te.export(model, tmp_path / "model")
        # The tables of a new model are on the device, whatever its configs say.
        loaded = te.load_run(tmp_path / "model", model=lambda: Model(tables)).model
        assert all(table.weight.shape[0] > 0 and not table.rows.is_cached for table in loaded.tables.tables)
        assert same_bits(model, loaded, 40 if kind != "dynamic" else 30)
        ids = torch.tensor([5, 39, 5, 17])
        collections = [te.serving.run.RunTable(tables[0], m.tables, torch.device("cpu")) for m in (model, loaded)]
        assert torch.equal(*(table.lookup(ids) for table in collections))
    # An export can be exported again.
    te.export(loaded, tmp_path / "again")
    names = {file.name for file in (tmp_path / "model/tables").iterdir()}
    for name in names:
        assert (tmp_path / "again/tables" / name).read_bytes() == (tmp_path / "model/tables" / name).read_bytes()


def test_unpooled_and_quantized_collections(tmp_path):
    rows = [config(name, key, pooling="none") for name, key in zip("abc", KEYS, strict=True)]
    for number, model in enumerate(
        (Model(rows, pooled=False), te.quantize(Model(KINDS["device"]), tables={"a": "int4"}))
    ):
        folder = tmp_path / str(number)
        te.export(model, folder)
        makers = [lambda: Model(rows, pooled=False)] if not number else [lambda: Model(KINDS["device"])]
        # A quantized model is loaded into one with tables of floats, or into one that is quantized already.
        makers += [lambda: te.quantize(Model(KINDS["device"]))] * number
        for make in makers:
            assert same_bits(model, te.load_run(folder, model=make).model)
    with pytest.raises(ValueError, match="some tables of a collection are quantized, others are not"):
        te.load_run(te.export(Model(KINDS["device"]), tmp_path / "floats"), model=makers[1])


FRAME = pa.Table.from_pylist(
    [{"click": n % 2, "price": n / 7, "user": f"u{n % 13}", "item": n % 11} for n in range(90)]
)
SCHEMA = Schema("click", ("price",), ("user", "item"), num_embeddings=50)


def trained(folder: Path, schema: Schema = SCHEMA) -> te.serving.Run:
    data = from_dataframe(FRAME, LogOptions(schema=schema))
    make = lambda: te.models.DCNv2(data.tables(8), 1, top_mlp=(16,), optimizer=te.optim.SGD(lr=0.1))  # noqa: E731
    te.Trainer(make(), data, folder=folder, batch_size=16, verbose=False).fit()
    return te.load_run(folder, model=make)


def test_a_run_is_exported_with_its_vocabulary(tmp_path):
    vocabulary = tmp_path / "words.parquet"
    build_vocabulary(from_dataframe(FRAME, LogOptions(schema=SCHEMA)), vocabulary)
    run = trained(tmp_path / "run", replace(SCHEMA, num_embeddings=100_000, vocabulary=vocabulary))
    expected, ids = run.predict(FRAME), run.ids("user", ["u1", "?"])
    te.export(run, tmp_path / "export")
    vocabulary.write_text("edited in place")
    (tmp_path / "export").rename(tmp_path / "moved")
    loaded = te.load_run(tmp_path / "moved", model=run.model)
    assert np.array_equal(loaded.predict(FRAME), expected)
    assert loaded.predict({"price": 1.0, "user": "u3", "item": 4}) > 0
    assert torch.equal(loaded.ids("user", ["u1", "?"]), ids)


def private_and_mapped(path: Path) -> tuple[int, int]:
    """Private bytes of this process, and its bytes of mappings of a file."""
    private, size = 0, 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        private += int(line.split()[1]) * 1024 if line.startswith("Private_") else 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            size += end - begin
    return private, size


def test_a_large_table_is_mapped_not_read(tmp_path):
    tables = [te.TableConfig("a", 1000, 64, features=["x"])]
    folder = te.export(te.nn.EmbeddingBagCollection(tables), tmp_path / "model")
    # Give the file 8 GB of rows, without blocks on the disk.
    (path,) = (folder / "tables").iterdir()
    (_, metadata), num_rows = package.map_tensors(path), 1 << 25
    metadata["table"] = json.dumps(json.loads(metadata["table"]) | {"num_embeddings": num_rows})
    entries = {"rows": {"dtype": "F32", "shape": [num_rows, 64], "data_offsets": [0, num_rows * 256]}}
    header = package.encode_header(entries, metadata)
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(len(header) + num_rows * 256)
        file.seek(-256, 2)
        file.write(np.ones(64, np.float32))
    tables = [replace(tables[0], num_embeddings=num_rows)]
    model = te.nn.EmbeddingBagCollection(tables, device="meta")
    initial = private_and_mapped(path)[0]
    run = te.load_run(folder, model=model)
    batch = te.KeyedJaggedTensor.from_lists({"x": [[0, num_rows - 1], [num_rows // 2]]})
    with torch.no_grad():
        rows = run.model(batch)
    final, mapped = private_and_mapped(path)
    assert rows[:, 0].tolist() == [1, 0]
    assert mapped >= num_rows * 256
    assert final - initial < 0.05 * num_rows * 256


def test_tables_are_replaced(tmp_path, monkeypatch):
    models = [Model(KINDS["dynamic"]) for _ in range(2)]
    for model in models:
        model(batch_of()).sum().backward()
    folders = [te.export(model, tmp_path / str(n)) for n, model in enumerate(models)]
    old, new = ([*sorted((folder / "tables").iterdir())] for folder in folders)
    loaded = te.load_run(folders[0], model=Model(KINDS["dynamic"])).model
    for pair in zip(old, new, strict=True):
        te.serving.replace_table(*pair)
    assert same_bits(models[0].eval(), loaded)  # a loaded model keeps its tables
    loaded = te.load_run(folders[0], model=Model(KINDS["dynamic"])).model
    batch = batch_of()
    assert torch.equal(loaded.tables(batch), models[1].eval().tables(batch))
    with monkeypatch.context() as patch:
        patch.setattr(utils, "sync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(StorageError, match=r"could not be written: .*No space left"):
            te.serving.replace_table(old[0], new[0])
    # Nothing is replaced by a table of another kind, or by a damaged one.
    with pytest.raises(ValueError, match=r"cannot replace .*: name is 'b', expected 'a'"):
        te.serving.replace_table(old[0], new[1])
    with pytest.raises(
        ValueError, match=r"dense.safetensors is not the file of a table; expected one of the folder tables"
    ):
        te.serving.replace_table(old[0], folders[1] / "dense.safetensors")
    content = bytearray(new[0].read_bytes())
    content[-3] ^= 1
    new[0].write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its tensors do not have their checksum"):
        te.serving.replace_table(old[0], new[0])
    content[20] ^= 1
    new[0].write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged"):
        te.load_run(folders[1], model=Model(KINDS["dynamic"]))
    assert torch.equal(te.load_run(folders[0], model=Model(KINDS["dynamic"])).model.tables(batch), loaded.tables(batch))


def test_damage_and_other_models_are_found(tmp_path):
    model = Model(KINDS["device"])
    folder = te.export(model, tmp_path / "model")
    changed = [config("a", "x"), config("b", "y", pooling="mean"), te.TableConfig("c", 41, 8, features=["z"])]
    with pytest.raises(ValueError, match=r"is of another table: num_embeddings is 40, expected 41"):
        te.load_run(folder, model=Model(changed))
    with pytest.raises(ValueError, match=r"has the tables \['tables.a', .*the model \['tables.a', 'tables.b'\]"):
        te.load_run(folder, model=Model(changed[:2]))
    with pytest.raises(ValueError, match="has no model config"):
        te.load_run(folder)
    with pytest.raises(ValueError, match="was exported, with all rows; load it without servers"):
        te.load_run(folder, model=model, servers=[])
    for name, error in (("dense.safetensors", "does not have the checksum"), (MANIFEST, "damaged")):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content.replace(b'"', b"'", 1)[:-9] + b"123456789")
        with pytest.raises(ValueError, match=error):
            te.load_run(folder, model=Model(KINDS["device"]))
        (folder / name).write_bytes(content)
    other = Model(KINDS["device"])
    other.top = nn.Linear(8, 4)
    with pytest.raises(ValueError, match=r"is of another model; use .*\n.*size mismatch for top.weight"):
        te.load_run(folder, model=other)
    # The length of a table's header, which says where its rows begin.
    path = next((folder / "tables").iterdir())
    content = path.read_bytes()
    for bit in range(64):
        path.write_bytes((int.from_bytes(content, "little") ^ 1 << bit).to_bytes(len(content), "little"))
        with pytest.raises(ValueError, match="is damaged"):
            package.map_tensors(path)
    path.write_bytes(content)
    # A manifest cannot lead out of its folder.
    _, manifest = read_manifest_text(folder, MANIFEST)
    manifest["tables"]["tables.a"] = "../../other.safetensors"
    write_manifest(folder, {name: manifest[name] for name in manifest if name not in ("sha256", "format")}, MANIFEST)
    with pytest.raises(ValueError, match="damaged"):
        te.load_run(folder, model=Model(KINDS["device"]))


def test_what_cannot_be_exported_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="target must be one of"):
        te.export(nn.Linear(2, 2), tmp_path / "x", target="torchscript")
    with pytest.raises(ValueError, match="is on the meta device and has no"):
        te.export(te.nn.EmbeddingBagCollection(KINDS["device"], device="meta"), tmp_path / "x")
    with pytest.raises(ValueError, match=r"bag.* is a dynamic or quantized table outside of a collection"):
        te.export(nn.ModuleDict({"bag": te.nn.EmbeddingBag(None, 8, capacity=9)}), tmp_path / "x")
    with pytest.raises(ValueError, match="and none are attached"):
        te.export(Model(KINDS["servers"]), tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="no such folder to write x to"):
        te.export(nn.Linear(2, 2), tmp_path / "no" / "x")
    monkeypatch.setattr(package.checkpoint, "write_manifest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        te.export(Model(KINDS["device"]), tmp_path / "x")
    assert not [*tmp_path.iterdir()]
    monkeypatch.undo()
    te.export(Model(KINDS["device"]), tmp_path / "x")
    with pytest.raises(FileExistsError, match="exists; remove it, or choose another folder"):
        te.export(Model(KINDS["device"]), tmp_path / "x")


def tensors_of(size: int, num_ids: int) -> tuple[te.KeyedJaggedTensor, list[torch.Tensor]]:
    """A batch, and the inputs of a program."""
    lengths = torch.randint(4, (4, size))
    batch = te.KeyedJaggedTensor.from_lengths(
        [*"abcd"], torch.randint(num_ids, (int(lengths.sum()),)), lengths.flatten()
    )
    bags = [(batch[key].values(), batch[key].offsets()[:-1] - batch[key].offsets()[0]) for key in "abcd"]
    return batch, [torch.randn(size, 3), *(tensor.contiguous() for bag in bags for tensor in bag)]


ATEN_TABLES = [
    config("a", "a"), dynamic("b", "b"), dynamic("c", "c", fallback_rows=4, pooling="mean"),
    config("d", "d", pooling="mean", placement="host"),
]  # fmt: skip
DESCRIPTION = {
    "config": {}, "run": {}, "reading": {"features": [{"name": name} for name in "abcd"], "num_dense": 3},
}  # fmt: skip


def aten_model(kind: str, trained: list[te.TableConfig] = ATEN_TABLES) -> nn.Module:
    tables = [config(key, key, pooling=pooling) for key, pooling in zip("abcd", ["sum", "mean"] * 2, strict=True)]
    tables = trained if kind == "trained" else tables
    model = te.models.DLRM(tables, 3, (8,), (8,), optimizer=te.optim.SGD(lr=0.5))
    batch, (dense, *_) = tensors_of(20, 30)
    model(dense, batch).sum().backward()
    return model.eval() if kind == "trained" else te.quantize(model, "int8", tables={"b": "int4", "c": "int2"})


@pytest.mark.more
@pytest.mark.parametrize("kind", ["trained", "quantized", "bfloat16"])
def test_a_program_of_pytorchs_operators(kind, tmp_path, monkeypatch):
    narrow = [replace(table, dtype=torch.bfloat16, init_bound=1.0) for table in ATEN_TABLES[:3]] + ATEN_TABLES[3:]
    compiled, model = [], aten_model("trained", narrow) if kind == "bfloat16" else aten_model(kind)

    def compile_nothing(program: torch.export.ExportedProgram, package_path: Any) -> None:
        compiled.append(program)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_nothing)
    PROGRAMS.write_aten(tmp_path, model, DESCRIPTION)
    assert {file.name for file in tmp_path.iterdir()} == {"model.pt2", "inputs.json"}
    for size in (1, 2, 60):  # with ids that were never trained
        batch, inputs = tensors_of(size, 40)
        with torch.no_grad():
            expected, actual = torch.sigmoid(model(inputs[0], batch)), compiled[0].module()(*inputs)
        # Sums are in another order; a scale of 8 bits was rounded to float16 before.
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["trained", "quantized"])
def test_a_program_of_onnx(kind, tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(PROGRAMS, "MAX_TABLE_BYTES", 2000)
    tables = [*ATEN_TABLES[:3], te.TableConfig("d", 70, 8, features=["d"], pooling="mean")]
    model = aten_model(kind, tables)
    PROGRAMS.write_onnx(tmp_path, model, DESCRIPTION)
    outside = ["003-embeddings.d.safetensors"] * (kind == "trained")
    assert {file.name for file in tmp_path.rglob("*.*")} == {"model.onnx", "inputs.json", *outside}
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    names = [entry.name for entry in session.get_inputs()]
    assert names == json.loads((tmp_path / "inputs.json").read_text())["inputs"]
    for size in (1, 2, 60):  # with ids that were never trained
        batch, inputs = tensors_of(size, 40)
        if outside:
            table = package.map_tensors(tmp_path / "tables" / outside[0])[0]["rows"]
            inputs[-2:] = [nn.functional.embedding_bag(*inputs[-2:-1], table, inputs[-1], mode="mean")]
        values = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        with torch.no_grad():
            expected, (scores,) = torch.sigmoid(model(inputs[0], batch)), session.run(["score"], values)
        torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=0, atol=1e-6)  # sums in another order
    for bad_id in (-1, 100):
        values["a.ids"][0] = bad_id
        with pytest.raises(Exception, match="invalid index found"):
            session.run(["score"], values)


@pytest.mark.parametrize("kind", ["trained", "quantized"])
def test_the_size_of_an_onnx_program_has_a_bound(kind, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    model, written = aten_model(kind), []
    description = {**DESCRIPTION, "reading": {**DESCRIPTION["reading"], "labels": ["buy", "like"]}}
    files = package.write_package(tmp_path, model, description)
    tables = package.map_tables("embeddings", model.embeddings, tmp_path, files)
    sizes = [sum(buffer.nbytes for buffer in PROGRAMS.OnnxTable(table).buffers()) for table in tables]

    def trace(*args) -> tuple[list[str], SimpleNamespace]:
        modules = nn.ModuleList(map(args[-1], tables))
        return [type(module).__name__ for module in modules], SimpleNamespace(state_dict=modules.state_dict())

    def convert(*_, **options: object) -> SimpleNamespace:
        written.append(options["input_names"])
        return SimpleNamespace(save=lambda path: Path(path).touch())

    monkeypatch.setattr(PROGRAMS, "_trace", trace)
    monkeypatch.setattr(torch.onnx, "export", convert)
    monkeypatch.setattr(PROGRAMS, "MAX_TABLES_BYTES", sum(sizes[:2]))
    PROGRAMS.write_onnx(tmp_path, model, description)
    monkeypatch.setattr(PROGRAMS, "MAX_PROGRAM_BYTES", sum(sizes[:2]) - 1)
    with pytest.raises(ValueError, match="ONNX less than 2 GiB"):
        PROGRAMS.write_onnx(tmp_path, model, description)
    assert written == [["OnnxTable"] * 2 + ["OutsideTable"] * 2]
    assert json.loads((tmp_path / "inputs.json").read_text())["labels"] == ["buy", "like"]


def test_programs_lack_some_tables(tmp_path):
    for target in ("aten", "onnx"):
        for tables, dtype, error in (
            (ATEN_TABLES[:1], te.serving.ByFrequency(int8=1), "it is dynamic, or quantized by frequency"),
            (ATEN_TABLES[1:2], None, "has no ids yet"),
        ):
            model = te.models.DLRM(tables, 3, (8,), (8,))
            model = model if dtype is None else te.quantize(model, dtype, counts={"a": torch.ones(40)})
            with pytest.raises(ValueError, match=error):
                getattr(PROGRAMS, f"write_{target}")(tmp_path / f"{target} {dtype}", model, DESCRIPTION)


@pytest.mark.more
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_program_is_scored_in_cpp(tmp_path):
    model = aten_model("trained")
    PROGRAMS.write_aten(tmp_path, model, DESCRIPTION)
    root, program = Path(torch.__file__).parent, tmp_path / "score"
    source = Path(__file__).parents[2] / "deploy/score.cpp"
    flags = [f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", "-std=c++20", "-O0", source, "-o", program, *flags, *libraries], check=True, timeout=200)
    output = subprocess.run(
        [program, tmp_path, "3", "4"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    batch = te.KeyedJaggedTensor.from_lists({key: [[1], [2, 3]] for key in "abcd"})
    with torch.no_grad():
        expected = torch.sigmoid(model(torch.ones(2, 3), batch))
    assert [float(word) for word in output.split()] == pytest.approx(expected.tolist(), abs=1e-5)  # six digits
    assert b"libpython" not in subprocess.run(["ldd", program], check=True, capture_output=True).stdout


def test_a_full_disk(small_disk):
    """It is named, nothing is left of the export, and an earlier one is neither replaced nor changed."""
    model = Model(KINDS["dynamic"])
    te.export(model, small_disk / "earlier")

    def fill(room: int) -> None:
        (small_disk / "filler").write_bytes(b"")
        (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - room))

    for room in (0, 4096, 8192, 20_000):
        fill(room)
        with pytest.raises(StorageError, match="could not be written: No space left on device; free disk space there"):
            te.export(model, small_disk / "new")
        assert {path.name for path in small_disk.iterdir()} == {"earlier", "filler"}
        with pytest.raises(FileExistsError, match="exists; remove it, or choose another folder"):
            te.export(model, small_disk / "earlier")
    table = next((small_disk / "earlier/tables").iterdir())
    content = table.read_bytes()
    fill(4096)
    with pytest.raises(StorageError, match=r"could not be written.*free disk space there"):
        te.serving.replace_table(table, shutil.copy(table, small_disk.parent / "other"))
    assert table.read_bytes() == content
    (small_disk / "filler").unlink()
    assert same_bits(te.load_run(te.export(model, small_disk / "new"), model=model).model, model, 30)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("target", ["aten", "onnx"])
def test_a_full_disk_of_a_program(target, tmp_path, monkeypatch):
    """Whose writer would end the process in torch, or fails in the compiler."""
    run, open_full = te.serving.Run.__new__(te.serving.Run), partial(io.FileIO, "/dev/full", "w")
    run.model, run.description = Model(KINDS["device"]), DESCRIPTION

    def trace(folder: Path, model: nn.Module, values: dict, _: object) -> tuple[list[str], SimpleNamespace]:
        package.write_package(folder, model, values)
        return [], SimpleNamespace(graph=SimpleNamespace(nodes=[]), state_dict={})

    def write_archive(program: object, package_path: Any) -> None:
        with PT2ArchiveWriter(package_path) as writer:
            writer.write_bytes("program", bytes(1 << 20))

    def fail_to_compile(program: object, package_path: Any) -> None:
        raise RuntimeError("C++ compile error") from RuntimeError("cc1plus: fatal error: No space left on device")

    monkeypatch.setattr(PROGRAMS, "_trace", trace)
    monkeypatch.setattr(PROGRAMS, "ArchiveFile", lambda _, kind=PROGRAMS.ArchiveFile: kind(open_full()))
    program = SimpleNamespace(save=lambda path: open_full().write(b"program"))
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **options: program)
    for compile_program in (write_archive, fail_to_compile):
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_program)
        with pytest.raises(StorageError, match="could not be written: No space left on device; free disk space there"):
            te.export(run, tmp_path / "new", target)
        assert not [*tmp_path.iterdir()]


class Twice(nn.Module):
    """A collection and a layer under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = self.again = te.nn.EmbeddingBagCollection([config("a", "x")])
        self.first = self.second = nn.Linear(8, 8)

    def forward(self, batch: te.KeyedJaggedTensor) -> torch.Tensor:
        return self.second(self.first(self.again(batch)))


def test_modules_under_two_names(tmp_path):
    model = Twice()
    loaded = te.load_run(te.export(model, tmp_path / "model"), model=Twice).model
    assert same_bits(model, loaded)
    assert (loaded.again, loaded.second) == (loaded.tables, loaded.first)


def test_a_table_that_is_replaced_while_it_is_mapped(tmp_path, monkeypatch):
    """Rows and ids are of one of the files."""
    for name, size in (("old", 3), ("new", 5)):
        rows, ids = torch.full((size, 4), float(size)), torch.arange(size)
        sources = {"rows": (rows.dtype, (*rows.shape,), [rows]), "ids": (ids.dtype, (size,), [ids])}
        package.write_tensors(tmp_path / name, sources, {})
    read_header = package.read_header

    def replace_after(path: Path, *args: Any) -> Any:
        tensors = read_header(path, *args)
        (tmp_path / "new").rename(path)
        return tensors

    monkeypatch.setattr(package, "read_header", replace_after)
    tensors, _ = package.map_tensors(tmp_path / "old")
    assert tensors["rows"].tolist() == [[3.0] * 4] * 3
    assert tensors["ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("bits", "dim"), [("int4", 3), ("int2", 5), ("int2", 7)])
def test_programs_have_rows_that_do_not_fill_bytes(bits, dim):
    collection = te.quantize(te.nn.EmbeddingBagCollection([te.TableConfig("a", 40, dim, pooling="mean")]), bits)
    ids, offsets = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 2, 2])
    expected = collection(te.KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([2, 0, 3])))
    torch.testing.assert_close(PROGRAMS.AtenTable(collection["a"])(ids, offsets), expected, rtol=0, atol=1e-6)


@durability.LINUX
@pytest.mark.parametrize("target", ["tritonemb", "aten"])
def test_a_folder_with_its_name_is_on_the_disk(target, tmp_path, monkeypatch):
    monkeypatch.setitem(PROGRAMS._WRITERS, "aten", lambda folder, *_: (folder / "model.pt2").write_bytes(b"program"))
    disk = durability.Durability(monkeypatch, tmp_path)
    te.export(Model(KINDS["device"]), tmp_path / "model", target)
    assert disk.check() == []
