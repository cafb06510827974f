"""Random problems, new in every run, against the references in float64."""

from __future__ import annotations

import random

import pytest
import torch

import tritonemb as te
from tests import plain
from tests.gpu.problems import fresh_seed
from tests.strategies import DIMS, ID_DTYPES, TABLE_DTYPES, random_batch, random_weights, rows_of
from tritonemb.kernels.embedding_bag import sample_weight_gradient_reference
from tritonemb.kernels.row_groups import row_groups_reference
from tritonemb.kernels.row_update import row_update_reference_
from tritonemb.layout import make_layout
from tritonemb.ops.registry import kernel
from tritonemb.optim import OPTIMIZERS

pytestmark = [pytest.mark.gpu, pytest.mark.more]

CUDA = torch.device("cuda")
NUM_PROBLEMS = 8
# Float32 sums of some tens of normal values; dot products of up to 1024 of them.
SUMS = {"rtol": 2e-5, "atol": 2e-5}
DOTS = {"rtol": 1e-5, "atol": 1e-3}


class Problem:
    """Tables of random dims, dtypes and pooling, and a batch with hot ids, on the CPU and on the GPU."""

    def __init__(self, draw: random.Random, pooled: bool, dtypes=TABLE_DTYPES) -> None:
        dim = draw.choice((*DIMS, 100, 512, 1024))
        self.pooled = pooled
        self.configs = [
            te.TableConfig(
                f"table{index}",
                draw.choice((1, 7, 300, 5000)),
                draw.choice((*DIMS, 100, 512, 1024)) if pooled else dim,
                features=draw.sample(["a", "b", "c"], draw.randint(1, 3)) if pooled else [f"feature{index}"],
                pooling=draw.choice(("sum", "mean")) if pooled else "none",
                dtype=draw.choice(dtypes),
            )
            for index in range(draw.randint(1, 5))
        ]
        rows = rows_of(self.configs)
        size, longest = draw.choice(((1, 300), (33, 40), (500, 12), (0, 3)))
        self.batch = random_batch(
            rows, list(rows), size, longest, draw.random() < 0.5, draw.choice(ID_DTYPES), draw.choice(ID_DTYPES),
            seed=draw.getrandbits(31),
        )  # fmt: skip
        self.weights = random_weights(self.configs, draw.getrandbits(31))
        self.layout = make_layout(self.configs, self.batch.keys(), pooled)
        self.gpu_layout = make_layout(self.configs, self.batch.keys(), pooled, CUDA)
        self.gpu_batch = self.batch.to(CUDA)
        self.gpu_weights = [weight.to(CUDA) for weight in self.weights]

    @property
    def num_outputs(self) -> int:
        return self.batch.stride() if self.pooled else self.batch.values().numel()

    def grad(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.num_outputs, self.layout.width, generator=generator)


def problems(pooled: bool, **options):
    draw = random.Random(fresh_seed())
    for _ in range(NUM_PROBLEMS):
        yield Problem(draw, pooled, **options)


@pytest.mark.parametrize("pooled", [True, False])
def test_lookups(pooled):
    for p in problems(pooled):
        x = p.gpu_batch
        look_up = kernel("embedding_bag", CUDA, tuple(weight.dtype for weight in p.gpu_weights))
        out = look_up(p.gpu_weights, x.values(), x.offsets(), x.weights_or_none(), p.gpu_layout, True)
        wide = [weight.double() for weight in p.weights]
        truth = plain.pooled_lookup if pooled else plain.unpooled_lookup
        expected = truth(p.configs, wide, p.batch, p.batch.weights_or_none())
        torch.testing.assert_close(out.double().cpu(), expected, **SUMS)
    te.check_errors()


@pytest.mark.parametrize("pooled", [True, False])
def test_gradients_of_per_sample_weights(pooled):
    for seed, p in enumerate(problems(pooled)):
        grad, x = p.grad(seed), p.gpu_batch
        gradient = kernel("sample_weight_gradient", CUDA, tuple(weight.dtype for weight in p.gpu_weights))
        found = gradient(p.gpu_weights, x.values(), x.offsets(), grad.to(CUDA), p.gpu_layout)
        wide = [weight.double() for weight in p.weights]
        expected = sample_weight_gradient_reference(wide, p.batch.values(), p.batch.offsets(), grad.double(), p.layout)
        torch.testing.assert_close(found.double().cpu(), expected, **DOTS)


@pytest.mark.parametrize("pooled", [True, False])
def test_groups(pooled):
    for p in problems(pooled):
        found = kernel("row_groups", CUDA)(p.gpu_batch.values(), p.gpu_batch.offsets(), p.gpu_layout)
        expected = row_groups_reference(p.batch.values(), p.batch.offsets(), p.layout)
        for name, one, other in zip(("rows", "starts", "order", "num_groups"), found, expected, strict=True):
            assert torch.equal(one.cpu(), other), name


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(name, pooled):
    """One step on float32 tables from random states; 16-bit ones are compared bit by bit elsewhere."""
    for seed, p in enumerate(problems(pooled, dtypes=(torch.float32,))):
        spec = OPTIMIZERS[name](lr=0.05, weight_decay=0.02, weight_decay_mode="l2")
        grad = p.grad(seed)
        states = [
            torch.rand(weight.shape if state.per_element else weight.shape[:1])
            for state in spec.states
            for weight in p.weights
        ]
        groups = row_groups_reference(p.batch.values(), p.batch.offsets(), p.layout)
        wide = [t.double() for t in p.weights], [t.double() for t in states]
        narrow = p.gpu_weights, [t.to(CUDA) for t in states]
        for where, (weights, kept) in (("cpu", wide), (CUDA, narrow)):
            x, layout = (p.batch, p.layout) if where == "cpu" else (p.gpu_batch, p.gpu_layout)
            update = row_update_reference_ if where == "cpu" else kernel("row_update_", CUDA, (weights[0].dtype,))
            counts = torch.zeros(1 + len(weights), dtype=torch.int64, device=where)
            update(
                weights, kept, counts[0], counts[1:], torch.tensor(0.05, device=where), grad.to(where, wide[0][0].dtype)
                if where == "cpu" else grad.to(where), x.offsets(), x.weights_or_none(), spec.name,
                spec.hyperparameters, tuple(group.to(where) for group in groups), layout,
            )  # fmt: skip
            assert int(counts[0]) == 1
        for one, other in zip([*narrow[0], *narrow[1]], [*wide[0], *wide[1]], strict=True):
            # Sums of hundreds of gradients; optimizers divide by their size.
            torch.testing.assert_close(one.double().cpu(), other, rtol=1e-3, atol=2e-4)
