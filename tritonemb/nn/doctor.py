"""Which kernel serves each op on a device, and whether a training step by them has the reference's result."""

from __future__ import annotations

import copy

import torch

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.nn.collections import EmbeddingBagCollection
from tritonemb.ops.errors import check_errors
from tritonemb.ops.registry import REFERENCE, forced, ops, why
from tritonemb.optimizers import RowWiseAdagrad
from tritonemb.types import TableConfig

# Sums of at most 8 products of numbers of about 1: a few units in the last place.
TOLERANCE = 1e-5


def serving(device: torch.device) -> list[tuple[str, str, str]]:
    """For every op: its name, the kernel that serves float32 tables, and why."""
    return [(op, *why(op, device)) for op in ops()]


def check_step(device: torch.device) -> float:
    """The largest difference between a step by the kernels that serve `device` and one by the references.

    Two tables, pooled by sum and by mean, with repeated ids and empty bags; forward, backward and update.
    """
    tables = [TableConfig("sums", 50, 16), TableConfig("means", 7, 16, pooling="mean")]
    torch.manual_seed(0)
    served = EmbeddingBagCollection(tables, RowWiseAdagrad(lr=0.1), device=device)
    reference = copy.deepcopy(served)
    lengths = torch.tensor([2, 0, 3, 1, 1, 0, 4, 2])
    ids = torch.randint(7, (int(lengths.sum()),))
    batch = KeyedJaggedTensor.from_lengths(["sums", "means"], ids, lengths).to(device)
    gradient = torch.randn(4, 32, device=device)
    outputs = []
    for module, name in ((served, None), (reference, REFERENCE)):
        if name is None:
            output = module(batch)
            output.backward(gradient)
        else:
            with forced(name):
                output = module(batch)
                output.backward(gradient)
        outputs.append(output.detach())
    check_errors(device)
    pairs = [(outputs[0], outputs[1])]
    pairs += list(zip(served.state_dict().values(), reference.state_dict().values(), strict=True))
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
