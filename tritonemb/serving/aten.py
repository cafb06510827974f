"""Exported runs as programs of PyTorch's own operators, compiled by AOTInductor: for C++ without Python.

Inputs: `dense`, float32 `[B, num_dense]`, then of each feature its ids, int64 `[N]`, and the first position of each
bag, int64 `[B]`. Result: click probabilities, float32 `[B]`.
"""

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritonemb.kernels import by_torch
from tritonemb.kernels.quantized_bag import to_aten
from tritonemb.kernels.random import UNIT
from tritonemb.ops.quantized_bag import aten_bag
from tritonemb.serving.package import collections_of, map_tables, write_package
from tritonemb.serving.quantized_tables import QuantizedTable
from tritonemb.storage.checkpoint import size_and_checksum, write_manifest

PACKAGE, DESCRIPTION = "model.pt2", "inputs.json"


class AtenTable(nn.Module):
    """Mapped table, looked up by PyTorch's operators."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.config, self.seed = table.config, getattr(table, "seed", 0)
        self.bits = table.bits if isinstance(table, QuantizedTable) else 0
        rows = table.weight.detach()
        if self.config.is_dynamic and not len(table.index.sorted_ids):
            raise ValueError(f"table {self.config.name!r} has no ids yet, so target 'aten' lacks it; train it first")
        self.register_buffer("rows", to_aten(rows, self.bits) if self.bits else rows)
        self.register_buffer("ids", table.index.sorted_ids if self.config.is_dynamic else None)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return pooled rows `[B, embedding_dim]`."""
        rows, known_ids = (self._buffers[name] for name in ("rows", "ids"))
        assert rows is not None
        if self.bits:
            pooled = aten_bag(rows, ids, offsets, self.bits)
        elif known_ids is None:
            return nn.functional.embedding_bag(ids, rows, offsets, mode=self.config.pooling)
        else:
            begins = torch.zeros(ids.shape[0] + 1, dtype=torch.int64).index_add(0, offsets, torch.ones_like(offsets))
            pooled = torch.zeros(offsets.shape[0], rows.shape[1], dtype=rows.dtype)
            pooled = pooled.index_add(0, begins.cumsum(0)[:-1] - 1, self._find(ids, rows, known_ids))
        lengths = torch.diff(offsets, append=torch.full((1,), ids.shape[0]))  # operators of quantized rows only sum
        return pooled / lengths.clamp(min=1)[:, None] if self.config.pooling == "mean" else pooled

    def _find(self, ids: Tensor, rows: Tensor, known_ids: Tensor) -> Tensor:
        """Return the rows of ids of a dynamic table; others read as fallback rows, or as initial values."""
        positions = torch.searchsorted(known_ids, ids).clamp(max=len(known_ids) - 1)
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


class AtenTables(nn.ModuleList):
    """Collection of these tables."""

    def forward(self, features: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Return pooled rows `[B, sum of dims]`."""
        return torch.cat([table(*features[name]) for table in self for name in table.config.feature_names], 1)  # type: ignore


class Program(nn.Module):
    """Model of the tensors of a batch; `names` are its features."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, dense: Tensor, *inputs: Tensor) -> Tensor:
        """Return probabilities `[B]`."""
        features = dict(zip(self.names, zip(inputs[::2], inputs[1::2], strict=True), strict=True))
        return torch.sigmoid(self.model(dense, features).float())


def write_aten(folder: Path, model: nn.Module, values: Mapping[str, Any]) -> None:
    """Compile a model into `model.pt2`, and describe its inputs in `inputs.json`."""
    names, memo = [feature["name"] for feature in values["reading"].get("features", ())], dict[int, Any]()
    if not names:
        raise ValueError("target 'aten' needs a run of te.load_run, which knows the features and their order")
    # Replace the collections of a copy.
    files = write_package(package := folder / "package", model, values)
    for path, collection in collections_of(model).items():
        if not collection.pooled:
            raise ValueError(f"{path} is not pooled, so target 'aten' lacks it; export for target 'tritonemb'")
        memo[id(collection)] = AtenTables(map(AtenTable, map_tables(path, collection, package, files)))
    program = Program(copy.deepcopy(model, memo), names).eval()
    # Trace it for any sizes, and compile it. Inputs are distinct, as the tracer merges equal ones.
    samples, num_dense = torch.export.Dim("samples"), values["reading"]["num_dense"]
    inputs = [torch.zeros(size, dtype=torch.int64) for n in range(len(names)) for size in (5 + n, 3)]
    sizes = [{0: size} for n in range(len(names)) for size in (torch.export.Dim(f"ids_{n}"), samples)]
    kernels = {getattr(torch.ops.tritonemb, n).default: getattr(by_torch, n) for n in ("interaction", "cross")}
    with torch.no_grad():
        args = torch.zeros(3, num_dense), *inputs
        traced = torch.export.export(program, args, dynamic_shapes=({0: samples}, tuple(sizes)), strict=False)
        traced = traced.run_decompositions(kernels)
        if foreign := [str(node.target) for node in traced.graph.nodes if "tritonemb" in str(node.target)]:
            raise ValueError(f"the model calls {foreign[0]}, which PyTorch lacks; export for target 'tritonemb'")
        torch._inductor.aoti_compile_and_package(traced, package_path=str(folder / PACKAGE))
    shutil.rmtree(package)
    order = ["dense", *(f"{name}.{part}" for name in names for part in ("ids", "offsets"))]
    entries = {"inputs": order, "num_dense": num_dense, "files": {PACKAGE: size_and_checksum(folder / PACKAGE)}}
    write_manifest(folder, entries, DESCRIPTION)
