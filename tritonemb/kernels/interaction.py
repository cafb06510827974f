"""DLRM's feature interaction: the dense vector, then the dot products of all pairs of a sample's vectors.

`x_0` is a sample's dense vector, `x_1 .. x_F` its pooled rows, all of dim `D` (Naumov et al., arXiv:1906.00091,
section 2); `G` is the symmetric matrix of the products' gradients, with a zero diagonal:

    out = [x_0, x_1·x_0, x_2·x_0, x_2·x_1, x_3·x_0, ..]         D + F (F + 1) / 2 numbers
    grad x_i = Σ_j G_ij x_j, plus the first D gradients for x_0

Vectors are read in place; neither stacked vectors nor the matrices are materialized. Sums are float32, without atomics;
an output is rounded once, to the inputs' dtype. A sample's result does not depend on the rest of the batch.

Bytes, for elements of `e` bytes, `n = F + 1` and `P` products: forward `B e (n D + D + P)` for `B n² D` multiply-adds,
of which half are needed; backward `B e (2 n D + D + P)` for `B n² D`. For 27 vectors of 128 bfloat16: 7.9 KB and 15 KB
per sample, 24 and 13 operations per byte, so that with tensor cores both are bound by memory.
"""

from typing import Any

import torch
from torch import Tensor

from tritonemb.kernels.by_torch import interaction as interaction_reference  # noqa: F401
from tritonemb.kernels.by_torch import interaction_gradient as interaction_gradient_reference  # noqa: F401
from tritonemb.kernels.triton_utils import cdiv, jit, launch, next_power_of_2, readable, tl


@jit
def _rows(sparse, first, block, F, D, ROWS, SIZE):
    """Load `[ROWS, SIZE]` of a sample's vectors from `x_first`, element `block` on; zeros for x_0 and x_F+1 on."""
    vector = first + tl.arange(0, ROWS)[:, None]
    column = block + tl.arange(0, SIZE)[None, :]
    pointers = sparse + ((vector - 1) * D + column)
    return tl.load(pointers, mask=(vector > 0) & (vector <= F) & (column < D), other=0.0)


@jit
def _vectors(dense, sparse, first, block, F, D, ROWS, SIZE):
    """Load `[ROWS, SIZE]` as `_rows`, with x_0 in its row."""
    column = block + tl.arange(0, SIZE)[None, :]
    head = tl.load(dense + column, mask=column < tl.where(first == 0, D, 0), other=0.0)
    return tl.where(first + tl.arange(0, ROWS)[:, None] == 0, head, _rows(sparse, first, block, F, D, ROWS, SIZE))


@jit
def _forward(dense, sparse, out, F, D, ROWS, SIZE, DENSE, PRECISION):
    """Multiply ROWS vectors of a sample with all its preceding vectors."""
    sample = tl.program_id(0).to(tl.int64)
    first = 0 if ROWS > F else tl.program_id(1) * ROWS  # a constant if there is only one tile
    dense, sparse, out = dense + sample * D, sparse + sample * (F * D), out + sample * (D + F * (F + 1) // 2)
    # Copy the dense vector.
    if first == 0:
        column = tl.arange(0, DENSE)
        tl.store(out + column, tl.load(dense + column, mask=column < D), mask=column < D)
    # Multiply tiles, accumulating over SIZE columns at a time.
    row = first + tl.arange(0, ROWS)[:, None]
    for first_partner in range(0, 1 if ROWS > F else first + 1, ROWS):
        products = tl.zeros((ROWS, ROWS), tl.float32)
        for block in range(0, D, SIZE):
            vectors = _vectors(dense, sparse, first, block, F, D, ROWS, SIZE)
            partners = vectors if ROWS > F else _vectors(dense, sparse, first_partner, block, F, D, ROWS, SIZE)
            products = tl.dot(vectors, tl.trans(partners), products, input_precision=PRECISION)
        # Store the lower triangle, packed by rows.
        partner = first_partner + tl.arange(0, ROWS)[None, :]
        packed = out + D + (row * (row - 1) // 2 + partner)
        tl.store(packed, products.to(out.dtype.element_ty), mask=(partner < row) & (row <= F))


@jit
def _backward(grad, dense, sparse, grad_dense, grad_sparse, F, D, ROWS, PARTNERS, SIZE, SEPARATE_DENSE, PRECISION):
    """Compute the gradients of ROWS vectors of a sample, summed over PARTNERS vectors at a time.

    SEPARATE_DENSE: x_0 is not a row of the dots; its term is added separately.
    """
    sample = tl.program_id(0).to(tl.int64)
    first = 0 if ROWS > F else tl.program_id(1) * ROWS  # a constant if there is only one tile
    dense, sparse, grad = dense + sample * D, sparse + sample * (F * D), grad + sample * (D + F * (F + 1) // 2)
    row = first + tl.arange(0, ROWS)[:, None]
    for block in range(0, D, SIZE):
        column = block + tl.arange(0, SIZE)[None, :]
        # Multiply a tile of the symmetric matrix, unpacked from the triangle, with a tile of vectors.
        total = tl.zeros((ROWS, SIZE), tl.float32)
        for start in range(0, F + 1, PARTNERS):
            partner = start + tl.arange(0, PARTNERS)[None, :]
            high, low = tl.maximum(row, partner), tl.minimum(row, partner)
            is_pair = (high <= F) & (high != low)
            pairs = tl.load(grad + D + (high * (high - 1) // 2 + low), mask=is_pair, other=0.0)
            if SEPARATE_DENSE:
                vectors = _rows(sparse, start, block, F, D, PARTNERS, SIZE)
            else:
                vectors = _vectors(dense, sparse, start, block, F, D, PARTNERS, SIZE)
            total = tl.dot(pairs, vectors, total, input_precision=PRECISION)
        if SEPARATE_DENSE:
            scale = tl.load(grad + D + row * (row - 1) // 2, mask=(row > 0) & (row <= F), other=0.0)
            total += scale * tl.load(dense + column, mask=column < D, other=0.0)
        # The gradient of the copied dense vector is added to that of x_0.
        dense_grad = tl.load(grad + column, mask=column < tl.where(first == 0, D, 0), other=0.0)
        total += tl.where(row == 0, dense_grad, 0.0)
        total = total.to(grad_dense.dtype.element_ty)
        tl.store(
            grad_sparse + sample * (F * D) + ((row - 1) * D + column), total, mask=(row > 0) & (row <= F) & (column < D)
        )
        if first == 0:
            tl.store(grad_dense + sample * D + column + row * 0, total, mask=(row == 0) & (column < D))


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """Launch the forward.

    float32 products are exact (`ieee`), unless the user allows TF32 by `torch.backends.cuda.matmul`.

    Shapes: `dense [B, D]`, `sparse [B, F * D]` of one dtype, float32, float16 or bfloat16; returns
    `[B, D + F (F + 1) / 2]`.
    """
    dtype = dense.dtype
    dense, sparse = readable(dense), readable(sparse)
    F, D = sparse.shape[1] // dense.shape[1], dense.shape[1]
    tiles = _tiles(F, D, dense)
    out = dense.new_empty(dense.shape[0], D + F * (F + 1) // 2)
    if tiles["ROWS"] <= F:
        tiles["num_warps"] *= 2  # the dots have two distinct tiles, not one with itself
    grid = dense.shape[0], cdiv(F + 1, tiles["ROWS"])
    launch(_forward, grid, dense, sparse, out, F=F, D=D, DENSE=next_power_of_2(D), **tiles)
    return out.to(dtype)


def interaction_gradient(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the backward: the gradients of `dense` and `sparse` from that of the output, all of one dtype."""
    dtype = dense.dtype
    grad, dense, sparse = readable(grad), readable(dense), readable(sparse)
    F, D = sparse.shape[1] // dense.shape[1], dense.shape[1]
    tiles = _tiles(F, D, dense)
    rows = tiles["ROWS"]
    is_float32 = dense.dtype == torch.float32  # exact dots keep operands in registers: fewer rows, and x_0 separately
    grad_dense, grad_sparse = torch.empty_like(dense), torch.empty_like(sparse)
    args, grid = (grad, dense, sparse, grad_dense, grad_sparse), (dense.shape[0], cdiv(F + 1, rows))
    tiles |= {"PARTNERS": 16 if is_float32 and rows == 64 else min(rows, 32)}
    launch(_backward, grid, *args, F=F, D=D, SEPARATE_DENSE=is_float32 and rows > 16, **tiles)
    return grad_dense.to(dtype), grad_sparse.to(dtype)


def _tiles(F: int, D: int, dense: Tensor) -> dict[str, Any]:
    """Choose tile sizes, warps and the precision of products.

    Tuned by ptxas's register counts for sm_80, sm_90 and sm_100: no spills, at most 128 registers per thread without
    TF32.
    """
    rows = min(64, max(16, next_power_of_2(F + 1)))
    size = 64 if rows <= F or D > 128 or dense.dtype == torch.float32 else 128
    if dense.dtype == torch.float32 and rows == 64:
        size = 16  # exact dots keep operands in registers
    size = max(16, min(size, next_power_of_2(D)))
    tf32 = torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {"ROWS": rows, "SIZE": size, "PRECISION": "tf32" if tf32 else "ieee", "num_warps": rows // 8}
