"""CPU twin of `kernels/interaction.py`: a sample's vectors stay in the first cache while all their pairs are met."""

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu.jit import FEW_ELEMENTS, FLOAT32, inlined, parallel
from tritonemb.kernels.cpu.simd import dot, float32_row, prefetch, sum_float32_rows

TASKS_PER_THREAD = 4


@inlined
def _find_vectors(vectors, dense, sparse, sample, num_features, dim):
    vectors[0] = dense + sample * dim * 4
    for feature in range(num_features):
        vectors[feature + 1] = sparse + (sample * num_features + feature) * dim * 4


@parallel
def _multiply(task, num_tasks, num_samples, num_features, dim, dense, sparse, out, width):
    """Samples of a task. Addresses of float32: `dense [B, dim]`, `sparse [B, F * dim]`, `out [B, width]`."""
    vectors = np.empty(num_features + 1, dtype=np.int64)
    for sample in range(num_samples * task // num_tasks, num_samples * (task + 1) // num_tasks):
        prefetch(sparse + (sample + 1) * num_features * dim * 4, num_features * dim * 4)
        _find_vectors(vectors, dense, sparse, sample, num_features, dim)
        row = float32_row(out + sample * width * 4, width)
        first = float32_row(vectors[0], dim)
        for d in range(dim):
            row[d] = first[d]
        place = dim
        for i in range(1, num_features + 1):
            for j in range(i):
                row[place] = dot(vectors[i], vectors[j], dim, FLOAT32)
                place += 1


@parallel
def _derive(task, num_tasks, num_samples, num_features, dim, grad, width, dense, sparse, grad_dense, grad_sparse):
    """Samples of a task: x_i's gradient is the sum of all x_j, each by the gradient of its product with x_i."""
    num_vectors = num_features + 1
    vectors = np.empty(num_vectors, dtype=np.int64)
    pairs = np.zeros((num_vectors, num_vectors), dtype=np.float32)
    for sample in range(num_samples * task // num_tasks, num_samples * (task + 1) // num_tasks):
        prefetch(sparse + (sample + 1) * num_features * dim * 4, num_features * dim * 4)
        _find_vectors(vectors, dense, sparse, sample, num_features, dim)
        row = float32_row(grad + sample * width * 4, width)
        place = dim
        for i in range(1, num_vectors):
            for j in range(i):
                pairs[i, j] = pairs[j, i] = row[place]
                place += 1
        to_dense = grad_dense + sample * dim * 4
        factors = pairs.ctypes.data
        sum_float32_rows(to_dense, vectors.ctypes.data, factors, num_vectors, dim)
        first = float32_row(to_dense, dim)
        for d in range(dim):
            first[d] += row[d]
        for i in range(1, num_vectors):
            to = grad_sparse + (sample * num_features + i - 1) * dim * 4
            sum_float32_rows(to, vectors.ctypes.data, factors + i * num_vectors * 4, num_vectors, dim)


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """See `kernels/interaction.py`. 16-bit inputs are multiplied in float32 and rounded once."""
    dtype, dim = dense.dtype, dense.shape[1]
    dense, sparse = _float32(dense), _float32(sparse)
    num_features = sparse.shape[1] // dim
    out = dense.new_empty(dense.shape[0], dim + num_features * (num_features + 1) // 2)
    _multiply(
        *_tasks(out, num_features), num_features, dim, dense.data_ptr(), sparse.data_ptr(), out.data_ptr(), out.shape[1]
    )
    return out.to(dtype)


def interaction_gradient(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels/interaction.py`."""
    dtype, dim = dense.dtype, dense.shape[1]
    grad, dense, sparse = _float32(grad), _float32(dense), _float32(sparse)
    num_features = sparse.shape[1] // dim
    grad_dense, grad_sparse = torch.empty_like(dense), torch.empty_like(sparse)
    _derive(
        *_tasks(grad, num_features), num_features, dim, grad.data_ptr(), grad.shape[1], dense.data_ptr(),
        sparse.data_ptr(), grad_dense.data_ptr(), grad_sparse.data_ptr(),
    )  # fmt: skip
    return grad_dense.to(dtype), grad_sparse.to(dtype)


def _float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32).contiguous()


def _tasks(products: Tensor, num_features: int) -> tuple[int, int, int, int]:
    """Threads, tasks, and again tasks and samples as the kernels take them; products `[B, ..]`."""
    num_samples, num_threads = products.shape[0], torch.get_num_threads()
    few = products.numel() * (num_features + 1) < FEW_ELEMENTS
    num_tasks = 1 if few else min(TASKS_PER_THREAD * num_threads, num_samples)
    return num_threads, num_tasks, num_tasks, num_samples
