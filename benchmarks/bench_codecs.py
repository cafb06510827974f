"""Codecs: packing float32 vectors of 26 tables into messages to 8 ranks, tables in turn, and unpacking them.

Peers: PyTorch's casts, a rank at a time; for int8, which quantizes each vector by itself, FBGEMM's row-wise
quantization and, on the CPU, PyTorch's. Those two leave the vectors in the matrix's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring.cases import OURS, Case, close, copy_contender, fbgemm_op
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.peers import has_fbgemm
from tritonemb.ops import make_packing, quantize_pack, quantize_unpack
from tritonemb.types import CODECS

NUM_TABLES, NUM_RANKS = 26, 8


class Codec(NamedTuple):
    """A way to pack `[R, T * D]`, and to unpack what it packed."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    num_rows = 8 if tiny else 16384 if device.type == "cuda" else 2048
    for name, direction in product(CODECS, ("pack", "unpack")):
        for dim in (64, 128, 256) if name == "int8" and device.type == "cuda" else (128,):
            shape = f"rows {num_rows:,} T{NUM_TABLES} D{dim}"
            yield Case(f"codec {name} {direction}", shape, partial(make, name, direction, num_rows, dim))


def make(name: str, direction: str, num_rows: int, dim: int, clock: Clock) -> list[Contender]:
    device = clock.device
    torch.manual_seed(0)
    matrix = torch.randn(num_rows, NUM_TABLES * dim, device=device)
    codecs = {OURS: our_codec(name, dim, device)}
    if name != "int8":
        codecs["torch"] = casts(CODECS[name].dtype, num_rows, dim)
    elif device.type == "cpu":
        byte_ops = torch.ops.quantized
        codecs["torch"] = by_rows(byte_ops.embedding_bag_byte_prepack, byte_ops.embedding_bag_byte_unpack, dim)
    if name == "int8" and has_fbgemm():
        codecs["fbgemm"] = by_rows(
            lambda rows: fbgemm_op("FloatToFused8BitRowwiseQuantized")(rows),
            lambda rows: fbgemm_op("Fused8BitRowwiseQuantizedToFloat")(rows),
            dim,
        )
    message = codecs[OURS].pack(matrix)
    # Each element is read once and written once, in the two formats; "int8" adds a scale and an offset a row and piece.
    num_bytes = matrix.nbytes + message.nbytes
    # What a cast rounds to; of int8, half a step of a vector's range over 255.
    step = 0.5 * float(matrix.max() - matrix.min()) / 255
    # Below 2^-9: subnormal float8.
    rtol, atol = (1e-6, step) if name == "int8" else (torch.finfo(CODECS[name].dtype).eps, 2**-9)
    right = close(matrix, rtol=rtol, atol=atol)
    results = []
    for item, (pack, unpack) in codecs.items():
        if direction == "pack":
            run, check = partial(pack, matrix), lambda message, unpack=unpack: right(unpack(message))
        else:
            packed = cache(partial(pack, matrix))  # the first time off the clock, in the check
            run, check = lambda unpack=unpack, packed=packed: unpack(packed()), right
        results.append(Contender(item, lambda number: None, lambda _, run=run: run(), num_bytes, check))
    return [*results, copy_contender(num_bytes, device)]


def our_codec(name: str, dim: int, device: torch.device) -> Codec:
    tables = range(NUM_TABLES)
    parts = [[(table * dim, dim) for table in tables[rank::NUM_RANKS]] for rank in range(NUM_RANKS)]
    packing = make_packing(parts, NUM_TABLES * dim, name, device)
    saturated = torch.zeros((), dtype=torch.int64, device=device)
    return Codec(
        lambda matrix: quantize_pack(matrix, packing, saturated),
        lambda message: quantize_unpack(message, packing, torch.float32, saturated),
    )


def casts(dtype: torch.dtype, num_rows: int, dim: int) -> Codec:
    """What one writes in PyTorch: each rank's tables cast, then joined; and back."""
    sizes = [num_rows * len(range(NUM_TABLES)[rank::NUM_RANKS]) * dim * dtype.itemsize for rank in range(NUM_RANKS)]

    def pack(matrix: Tensor) -> Tensor:
        tables = matrix.view(num_rows, NUM_TABLES, dim)
        return torch.cat(
            [tables[:, rank::NUM_RANKS].to(dtype).contiguous().view(torch.uint8).view(-1) for rank in range(NUM_RANKS)]
        )

    def unpack(message: Tensor) -> Tensor:
        tables = torch.empty(num_rows, NUM_TABLES, dim, device=message.device)
        for rank, part in enumerate(message.split(sizes)):
            tables[:, rank::NUM_RANKS] = part.view(dtype).view(num_rows, -1, dim).float()
        return tables.view(num_rows, -1)

    return Codec(pack, unpack)


def by_rows(pack: Callable[[Tensor], Tensor], unpack: Callable[[Tensor], Tensor], dim: int) -> Codec:
    """Ops that quantize each row of `[R * T, D]`."""
    return Codec(lambda matrix: pack(matrix.view(-1, dim)), lambda message: unpack(message).view(-1, NUM_TABLES * dim))


def bench_codecs(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
