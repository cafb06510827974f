"""`te.export`: a trained model as a folder for serving, or as a program for machines without tritonemb.

A program is of PyTorch's own operators, compiled by AOTInductor, or of ONNX. Its inputs are `dense`, float32
`[B, num_dense]`, then of each feature its ids, int64 `[N]`, and the first position of each bag, int64 `[B]`, or of a
feature of a table outside of the program its pooled rows, float32 `[B, dim]`. It returns click probabilities, `[B]`, or
`[B, L]` of several labels, which `inputs.json` names.
"""

import copy
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tritonemb.kernels import by_torch
from tritonemb.kernels.quantized_bag import to_aten, unpack_rows
from tritonemb.layout import UNIT
from tritonemb.ops.quantized_bag import aten_bag
from tritonemb.serving.package import DENSE, MANIFEST, TABLES, collections_of, keys_of, map_tables, write_package
from tritonemb.serving.quantized_tables import QuantizedTable
from tritonemb.serving.run import LoadOptions, Run
from tritonemb.storage.checkpoint import ArchiveFile, size_and_checksum, write_manifest
from tritonemb.storage.store import StorageError
from tritonemb.utils import new_folder

Target = Literal["tritonemb", "aten", "onnx"]
PACKAGE, ONNX, DESCRIPTION = "model.pt2", "model.onnx", "inputs.json"
# Of an ONNX program, which is one message of protobuf, of less than 2 GiB; of its tables; and of a table.
MAX_PROGRAM_BYTES, MAX_TABLES_BYTES, MAX_TABLE_BYTES = (2 << 30) - (64 << 20), 1 << 30, 64 << 20
OPSET = 18  # the first with sums of duplicates in ScatterND


class AtenTable(nn.Module):
    """Mapped table, looked up by PyTorch's operators."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.config, self.seed = table.config, getattr(table, "seed", 0)
        self.bits = table.bits if isinstance(table, QuantizedTable) else 0
        rows = table.weight.detach()
        if self.config.is_dynamic and not len(table.index.sorted_ids):
            raise ValueError(f"table {self.config.name!r} has no ids yet, so programs lack it; train it first")
        self.register_buffer("rows", to_aten(rows, self.bits) if self.bits else rows)
        self.register_buffer("ids", table.index.sorted_ids if self.config.is_dynamic else None)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return pooled rows `[B, embedding_dim]`."""
        rows, known_ids = (self._buffers[name] for name in ("rows", "ids"))
        assert rows is not None
        if self.bits:
            pooled = aten_bag(rows, ids, offsets, self.bits)[:, : self.config.embedding_dim]  # they fill whole bytes
        elif known_ids is None and rows.dtype == torch.float32:
            return nn.functional.embedding_bag(ids, rows, offsets, mode=self.config.pooling)
        else:  # 16-bit rows are summed in float32
            values = self._rows(ids, rows) if known_ids is None else self._find(ids, rows, known_ids)
            dtype = torch.promote_types(rows.dtype, torch.float32)
            pooled = torch.zeros(offsets.shape[0], rows.shape[1], dtype=dtype)
            pooled = pooled.index_add(0, self._bags(ids, offsets), values.to(dtype))
        return self._mean(pooled, ids, offsets)  # operators of quantized rows only sum

    def _bags(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the bag of each id, int64 `[N]`."""
        begins = torch.zeros(ids.shape[0] + 1, dtype=torch.int64).scatter_add(0, offsets, torch.ones_like(offsets))
        return begins.cumsum(0)[:-1] - 1

    def _mean(self, pooled: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """Divide sums by the lengths of bags if the table takes means."""
        if self.config.pooling == "sum":
            return pooled
        lengths = torch.diff(offsets, append=torch.full((1,), ids.shape[0]))
        return pooled / lengths.clamp(min=1)[:, None]

    def _rows(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the rows of ids of a static table; negative ones, which would count from the end, are out of range."""
        return rows[torch.where(ids < 0, len(rows), ids)]

    def _search(self, ids: Tensor, known_ids: Tensor) -> Tensor:
        """Return how many known ids are less than each id."""
        return torch.searchsorted(known_ids, ids)

    def _find(self, ids: Tensor, rows: Tensor, known_ids: Tensor) -> Tensor:
        """Return the rows of ids of a dynamic table; others read as fallback rows, or as initial values."""
        positions = self._search(ids, known_ids).clamp(max=len(known_ids) - 1)
        known_mask = known_ids[positions] == ids
        if self.config.fallback_rows:
            mixed = ids  # `partitions_of`, which uses NumPy
            for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                mixed = (mixed ^ (mixed >> bits & 2 ** (64 - bits) - 1)) * (factor - 2**64)
            fallback = (mixed ^ mixed >> 31 & 2**33 - 1) >> 32 & 2**32 - 1
            return rows[
                torch.where(known_mask, positions, len(known_ids) + (fallback * (len(rows) - len(known_ids)) >> 32))
            ]
        return torch.where(known_mask[:, None], rows[positions], self._initial_values(ids).to(rows.dtype))

    def _initial_values(self, ids: Tensor) -> Tensor:
        """Return initial values of ids, float32 `[N, dim]`, as `kernels/random.py`, in int64 as ATen has no uint64."""
        mask, dim = 2**32 - 1, self.config.embedding_dim
        row, c0 = torch.broadcast_tensors(ids[:, None], torch.arange(-(-dim // 4)))
        c1, c2, c3, k0, k1 = row & mask, row >> 32 & mask, torch.zeros_like(row), self.seed & mask, self.seed >> 32
        for _ in range(10):
            product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
            c0, c1 = (product1 >> 32 & mask) ^ c1 ^ k0, product1 & mask
            c2, c3 = (product0 >> 32 & mask) ^ c3 ^ k1, product0 & mask
            k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
        words = torch.stack([c0, c1, c2, c3], dim=-1).flatten(1)[:, :dim].to(torch.int32)
        return (words >> 8).float() * self.config.bound * UNIT


class OnnxTable(AtenTable):
    """Mapped table, looked up by operators that ONNX has: codes of quantized rows are a byte each."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        assert (rows := self._buffers["rows"]) is not None
        scale = bias = None
        if self.bits:
            rows, scale, bias = unpack_rows(table.weight, self.bits, self.config.embedding_dim)
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @staticmethod
    def num_bytes(table: Any) -> int:
        """Return the bytes of the buffers for a table."""
        if isinstance(table, QuantizedTable):
            return len(table.weight) * (table.config.embedding_dim + 8)  # scale and bias are float32
        return table.weight.nbytes + (table.index.sorted_ids.nbytes if table.config.is_dynamic else 0)

    def _search(self, ids: Tensor, known_ids: Tensor) -> Tensor:
        positions, size = torch.zeros_like(ids), len(known_ids)
        for step in (1 << bit for bit in reversed(range(size.bit_length()))):
            ends = positions + step
            is_less = (ends <= size) & (known_ids[ends.clamp(max=size) - 1] < ids)
            positions = torch.where(is_less, ends, positions)
        return positions

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return pooled rows, float32 `[B, embedding_dim]`."""
        rows, scale, bias, known_ids = (self._buffers[name] for name in ("rows", "scale", "bias", "ids"))
        assert rows is not None
        values = (self._rows(ids, rows) if known_ids is None else self._find(ids, rows, known_ids)).float()
        if scale is not None and bias is not None:
            values = values * self._rows(ids, scale) + self._rows(ids, bias)
        pooled = torch.zeros(offsets.shape[0], values.shape[1])
        pooled = pooled.index_put((self._bags(ids, offsets),), values, accumulate=True)
        return self._mean(pooled, ids, offsets)


class OutsideTable(nn.Module):
    """Table that is looked up outside of a program."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.config = table.config

    def forward(self, rows: Tensor) -> Tensor:
        return rows


class ProgramTables(nn.ModuleList):
    """Collection of these tables."""

    def forward(self, features: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
        """Return pooled rows `[B, sum of dims]`."""
        return torch.cat([table(*features[name]) for table in self for name in table.config.feature_names], 1)  # type: ignore


class Program(nn.Module):
    """Model of the tensors of a batch; `inputs` are the names of those of features, in their order."""

    def __init__(self, model: nn.Module, inputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, dense: Tensor, *tensors: Tensor) -> Tensor:
        """Return probabilities, `[B]` or `[B, L]`."""
        features = dict[str, tuple[Tensor, ...]]()
        for name, tensor in zip(self.inputs, tensors, strict=True):
            feature = name.rpartition(".")[0]
            features[feature] = *features.get(feature, ()), tensor
        return torch.sigmoid(self.model(dense, features).float())


def write_aten(folder: Path, model: nn.Module, values: Mapping[str, Any]) -> None:
    """Compile a model into `model.pt2`, and describe its inputs in `inputs.json`."""
    inputs, program = _trace(folder, model, values, AtenTable)
    if foreign := [str(node.target) for node in program.graph.nodes if "tritonemb" in str(node.target)]:
        raise ValueError(f"the model calls {foreign[0]}, which PyTorch lacks; export for target 'tritonemb'")
    with ArchiveFile(io.FileIO(folder / PACKAGE, "w")) as file:
        torch._inductor.aoti_compile_and_package(program, package_path=file)
    shutil.rmtree(folder / TABLES)
    _describe(folder, inputs, values, PACKAGE)


def write_onnx(folder: Path, model: nn.Module, values: Mapping[str, Any]) -> None:
    """Write a model as `model.onnx`, describe its inputs in `inputs.json`, and leave tables in `tables` that exceed
    `MAX_TABLE_BYTES`, or with those before them `MAX_TABLES_BYTES`."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError("target 'onnx' needs onnx and onnxscript: pip install 'tritonemb[onnx]'") from error

    num_bytes = 0

    def create(table: Any) -> nn.Module:
        nonlocal num_bytes
        size = OnnxTable.num_bytes(table)
        if size > min(MAX_TABLE_BYTES, MAX_TABLES_BYTES - num_bytes):
            return OutsideTable(table)
        num_bytes += size
        return OnnxTable(table)

    inputs, program = _trace(folder, model, values, create)
    if (size := sum(tensor.nbytes for tensor in program.state_dict.values())) > MAX_PROGRAM_BYTES:
        raise ValueError(
            f"the program has {size:,} bytes, ONNX less than 2 GiB; export for target 'aten' or 'tritonemb'"
        )
    try:
        onnx = torch.onnx.export(
            program, input_names=inputs, output_names=["score"], opset_version=OPSET, external_data=False, verbose=False
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ValueError("ONNX lacks an operator of the model; export for target 'aten' or 'tritonemb'") from error
    assert onnx is not None
    onnx.save(str(folder / ONNX))
    _describe(folder, inputs, values, ONNX)


def _trace(
    folder: Path, model: nn.Module, values: Mapping[str, Any], create: Callable[[Any], nn.Module]
) -> tuple[list[str], torch.export.ExportedProgram]:
    """Trace a model whose tables are those that `create` makes of its mapped tables; write these into `folder`.

    Return the names of its inputs, and the program.
    """
    names, memo = [feature["name"] for feature in values["reading"].get("features", ())], dict[int, Any]()
    if not names:
        raise ValueError("a program needs a run of te.load_run, which knows the features and their order")
    # Replace the collections of a copy.
    files, dims_of_inputs = write_package(folder, model, values), dict[str, int]()
    for path, collection in collections_of(model).items():
        if not collection.pooled:
            raise ValueError(f"{path} is not pooled, so only target 'tritonemb' has it; export for that")
        tables = [create(table) for table in map_tables(path, collection, folder, files)]
        memo[id(collection)] = ProgramTables(tables)
        for key, table in zip(keys_of(path, collection), tables, strict=True):
            if isinstance(table, OutsideTable):
                dims_of_inputs |= dict.fromkeys(table.config.feature_names, table.config.embedding_dim)
            else:
                (folder / files[key]).unlink()  # its mapping stays
    # Trace it for any sizes. Inputs are distinct, as the tracer merges equal ones.
    samples, num_dense = torch.export.Dim("samples"), values["reading"]["num_dense"]
    inputs, tensors, sizes = ["dense"], [torch.zeros(3, num_dense)], [{0: samples}]
    for number, name in enumerate(names):
        if name in dims_of_inputs:
            inputs.append(f"{name}.rows")
            tensors.append(torch.zeros(3, dims_of_inputs[name]))
            sizes.append({0: samples})
        else:
            inputs += [f"{name}.ids", f"{name}.offsets"]
            tensors += [torch.zeros(5 + number, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)]
            sizes += [{0: torch.export.Dim(f"ids_{number}")}, {0: samples}]
    kernels = {getattr(torch.ops.tritonemb, n).default: getattr(by_torch, n) for n in ("interaction", "cross")}
    program = Program(copy.deepcopy(model, memo), inputs[1:]).eval()
    with torch.no_grad():
        shapes = sizes[0], tuple(sizes[1:])
        traced = torch.export.export(program, tuple(tensors), dynamic_shapes=shapes, strict=False)
        return inputs, traced.run_decompositions(kernels)


def _describe(folder: Path, inputs: Sequence[str], values: Mapping[str, Any], name: str) -> None:
    for file in (folder / MANIFEST, folder / DENSE, *folder.glob("vocabulary*")):
        file.unlink()
    if (tables := folder / TABLES).exists() and not any(tables.iterdir()):
        tables.rmdir()
    reading = values["reading"]
    entries = {"inputs": inputs, "num_dense": reading["num_dense"], "labels": [*reading.get("labels", ())]}
    write_manifest(folder, {**entries, "files": {name: size_and_checksum(folder / name)}}, DESCRIPTION)


def export(model: nn.Module | Run, folder: str | Path, target: Target = "tritonemb") -> Path:
    """Write a trained model for serving into a new folder, which appears under its name when it is complete.

    Args:
        model: a run of `te.load_run`, which is exported with the encoding of raw rows, or a model.
        folder: its parent folder must exist; it must not, or be empty.
        target: "tritonemb", for `te.load_run(folder)`: tables are files that are mapped into memory. "aten", for C++
            without Python: a run of pooled tables as a program that AOTInductor compiles. "onnx", for ONNX Runtime and
            others: such a run with its small tables; rows of large ones are inputs. See docs/export.md.

    Raises:
        ValueError: the model cannot be exported; the message says why, and what to do.
        FileExistsError, FileNotFoundError: for a folder that is not empty, and one without a parent.
        StorageError: the disk is full, or that of the compiler's temporary files; nothing is left.
    """
    folder = Path(folder)
    if target not in get_args(Target):
        raise ValueError(f"target must be one of {get_args(Target)}, got {target!r}")
    try:
        with new_folder(folder) as temporary:
            run = model if isinstance(model, Run) else None
            values = {"config": {}, "reading": {}, "run": {}} if run is None else run.description
            _WRITERS[target](temporary, model.model if isinstance(model, Run) else model, values)
    except Exception as error:
        if (reason := _full_disk(error)) is None:
            raise
        places = f"there, and for 'aten' in {tempfile.gettempdir()}, where it is compiled"
        raise StorageError(f"{folder} could not be written: {reason}; free disk space {places}") from error
    return folder


def _full_disk(error: BaseException | None) -> str | None:
    """Return the text of an error of a full disk, or None for another one; torch and compilers hide it in theirs."""
    while error is not None:
        for code in (errno.ENOSPC, errno.EDQUOT):
            if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
                return os.strerror(code)
        error = error.__cause__ or error.__context__
    return None


_WRITERS: dict[str, Callable[..., object]] = dict(tritonemb=write_package, aten=write_aten, onnx=write_onnx)  # noqa: C408


@dataclass(frozen=True, kw_only=True)
class ExportOptions(LoadOptions):
    """Write a trained model for serving into a new folder.

    Example: tritonemb export runs/mine --out models/mine

    Args:
        checkpoint: checkpoint, or folder of a run: its best checkpoint, or its newest if none is marked best.
        out: folder to write; it must not exist.
        target: tritonemb, for tritonemb predict, evaluate and te.load_run; aten, for C++ without Python; or onnx.
        model: MODULE:FUNCTION that builds the model, for a run of te.Trainer.
        transforms: those of the run, MODULE:FUNCTION; a checkpoint does not select code by itself.
    """

    out: Path
    target: Target = "tritonemb"


def run_export(options: ExportOptions) -> str:
    """Export a run; return a message. Raise the errors of `export` and of `load_run`."""
    run = options.load()
    folder = export(run, options.out, options.target)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{folder}: {run.path} for {options.target}, {size:,} bytes"
