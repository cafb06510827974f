"""CPU twin of `kernels/interaction.py`: a sample's vectors stay in the L1 cache while all pairs are multiplied."""

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu.jit import FEW_ELEMENTS, FLOAT32, inlined, parallel
from tritonemb.kernels.cpu.simd import dot, float32_row, make_float32_sums, prefetch

TASKS_PER_THREAD = 4
_sum_scaled_rows, _ = make_float32_sums(scaled=True)


@inlined
def _fill_addresses(vectors, dense, sparse, sample, num_features, dim):
    vectors[0] = dense + sample * dim * 4
    for feature in range(num_features):
        vectors[feature + 1] = sparse + (sample * num_features + feature) * dim * 4


@parallel
def _forward(task, num_tasks, sizes, dense, sparse, out, width):
    """Forward of a task's samples. Addresses of float32: `dense [B, dim]`, `sparse [B, F * dim]`, `out [B, width]`."""
    num_samples, num_features, dim = sizes
    vectors = np.empty(num_features + 1, dtype=np.int64)
    for sample in range(num_samples * task // num_tasks, num_samples * (task + 1) // num_tasks):
        prefetch(sparse + (sample + 1) * num_features * dim * 4, num_features * dim * 4)
        _fill_addresses(vectors, dense, sparse, sample, num_features, dim)
        out_row = float32_row(out + sample * width * 4, width)
        dense_vector = float32_row(vectors[0], dim)
        for d in range(dim):
            out_row[d] = dense_vector[d]
        index = dim
        for i in range(1, num_features + 1):
            for j in range(i):
                out_row[index] = dot(vectors[i], vectors[j], dim, FLOAT32)
                index += 1


@parallel
def _backward(task, num_tasks, sizes, grad, width, inputs, gradients):
    """Backward of a task's samples: x_i's gradient is the sum of all x_j, scaled by the gradient of x_i · x_j."""
    (num_samples, num_features, dim), (dense, sparse), (grad_dense, grad_sparse) = sizes, inputs, gradients
    num_vectors = num_features + 1
    vectors = np.empty(num_vectors, dtype=np.int64)
    pairs = np.zeros((num_vectors, num_vectors), dtype=np.float32)
    for sample in range(num_samples * task // num_tasks, num_samples * (task + 1) // num_tasks):
        prefetch(sparse + (sample + 1) * num_features * dim * 4, num_features * dim * 4)
        _fill_addresses(vectors, dense, sparse, sample, num_features, dim)
        # Unpack the products' gradients into the symmetric matrix.
        grad_row = float32_row(grad + sample * width * 4, width)
        index = dim
        for i in range(1, num_vectors):
            for j in range(i):
                pairs[i, j] = pairs[j, i] = grad_row[index]
                index += 1
        # Gradient of the dense vector, with that of its copy in the output; then of the sparse ones.
        dense_target = grad_dense + sample * dim * 4
        factors = pairs.ctypes.data
        _sum_scaled_rows(dense_target, vectors.ctypes.data, factors, num_vectors, dim)
        dense_gradient = float32_row(dense_target, dim)
        for d in range(dim):
            dense_gradient[d] += grad_row[d]
        for i in range(1, num_vectors):
            target = grad_sparse + (sample * num_features + i - 1) * dim * 4
            _sum_scaled_rows(target, vectors.ctypes.data, factors + i * num_vectors * 4, num_vectors, dim)


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """See `kernels/interaction.py`. 16-bit inputs are multiplied in float32 and rounded once."""
    dtype, dim = dense.dtype, dense.shape[1]
    dense, sparse = _float32(dense), _float32(sparse)
    num_features = sparse.shape[1] // dim
    out = dense.new_empty(dense.shape[0], dim + num_features * (num_features + 1) // 2)
    addresses = map(Tensor.data_ptr, (dense, sparse, out))
    _forward(*_tasks(out, num_features, dim), *addresses, out.shape[1])
    return out.to(dtype)


def interaction_gradient(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    dtype, dim = dense.dtype, dense.shape[1]
    grad, dense, sparse = _float32(grad), _float32(dense), _float32(sparse)
    num_features = sparse.shape[1] // dim
    grad_dense, grad_sparse = torch.empty_like(dense), torch.empty_like(sparse)
    inputs, gradients = (dense.data_ptr(), sparse.data_ptr()), (grad_dense.data_ptr(), grad_sparse.data_ptr())
    _backward(*_tasks(grad, num_features, dim), grad.data_ptr(), grad.shape[1], inputs, gradients)
    return grad_dense.to(dtype), grad_sparse.to(dtype)


def _float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32).contiguous()


def _tasks(products: Tensor, num_features: int, dim: int) -> tuple[int, int, int, tuple[int, int, int]]:
    """Return the kernels' first arguments: threads, tasks, tasks again, sizes; for products `[B, ..]`."""
    num_samples, num_threads = products.shape[0], torch.get_num_threads()
    is_small = products.numel() * (num_features + 1) < FEW_ELEMENTS
    num_tasks = 1 if is_small else min(TASKS_PER_THREAD * num_threads, num_samples)
    return num_threads, num_tasks, num_tasks, (num_samples, num_features, dim)
