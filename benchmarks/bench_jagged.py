"""What an exchange of ids needs: the keys of a batch in another order, and its ids by the rank that owns their rows.

Peers: what one writes with PyTorch's operators, and FBGEMM's `permute_2D_sparse_data` and
`block_bucketize_sparse_features`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring.cases import OURS, Case, contenders, equal, fbgemm_op
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.peers import has_fbgemm
from tritonemb import ops

NUM_KEYS, NUM_ROWS, NUM_RANKS = 26, 1_000_000, 8
INT64, INT32 = 8, 4


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for batch_size, bag_size in ((8, 2),) if tiny else ((8192, 1), (512, 20)):
        shape = f"B{batch_size} T{NUM_KEYS} L{bag_size} on average"
        yield Case("jagged permute", shape, partial(permute, batch_size, bag_size))
        yield Case("block bucketize", f"{shape} W{NUM_RANKS}", partial(bucketize, batch_size, bag_size))


def draw(batch_size: int, bag_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """int64 values, lengths of bags from 0 to twice `bag_size`, and their offsets."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2 * bag_size + 1, (NUM_KEYS * batch_size,), generator=generator)
    values = torch.randint(NUM_ROWS, (int(lengths.sum()),), generator=generator)
    offsets = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
    return values.to(device), lengths.to(device), offsets.to(device)


def permute(batch_size: int, bag_size: int, clock: Clock) -> list[Contender]:
    device = clock.device
    values, lengths, offsets = draw(batch_size, bag_size, device)
    keys = torch.randperm(NUM_KEYS, generator=torch.Generator().manual_seed(0)).tolist()
    order = torch.tensor(keys, device=device)
    order_int32 = order.int()
    sizes = lengths.view(NUM_KEYS, -1).sum(1).tolist()  # PyTorch needs them on the host

    def by_torch() -> tuple[Tensor, Tensor]:
        parts = values.split(sizes)
        ends = torch.cumsum(lengths.view(NUM_KEYS, -1)[order].view(-1), 0)
        return torch.cat([parts[key] for key in keys]), torch.cat([ends.new_zeros(1), ends])

    def by_fbgemm() -> tuple[Tensor, None]:
        op = fbgemm_op("permute_2D_sparse_data")
        return op(order_int32, lengths.view(NUM_KEYS, -1), values, None, values.numel())[1], None

    runs = {OURS: lambda: ops.jagged_permute(values, offsets, order, NUM_KEYS)[:2], "torch": by_torch}
    if has_fbgemm():
        runs["fbgemm"] = by_fbgemm
    num_bytes = 2 * (values.nbytes + offsets.nbytes)
    return contenders(runs, num_bytes, device, equal(*by_torch()))


def bucketize(batch_size: int, bag_size: int, clock: Clock) -> list[Contender]:
    device = clock.device
    values, lengths, offsets = draw(batch_size, bag_size, device)
    num_ids, num_bags = values.numel(), lengths.numel()
    block = -(-NUM_ROWS // NUM_RANKS)
    block_sizes = torch.full((NUM_KEYS,), block, device=device)

    def by_torch() -> tuple[Tensor, Tensor, Tensor]:
        owner = values // block
        order = torch.argsort(owner, stable=True)
        bag = torch.repeat_interleave(lengths, output_size=num_ids)
        counts = torch.zeros(NUM_RANKS * num_bags, dtype=torch.int64, device=device)
        counts.scatter_add_(0, owner * num_bags + bag, torch.ones_like(owner))
        place = torch.empty_like(order)
        place[order] = torch.arange(num_ids, device=device)
        return (values % block)[order], counts, place

    def by_fbgemm() -> tuple[Tensor, Tensor, Tensor]:
        op = fbgemm_op("block_bucketize_sparse_features")
        counts, result, _, _, place = op(lengths, values, False, True, block_sizes, NUM_RANKS, None)
        return result, counts, place

    runs = {OURS: lambda: ops.block_bucketize(values, offsets, block_sizes, NUM_RANKS)[:3], "torch": by_torch}
    if has_fbgemm():
        runs["fbgemm"] = by_fbgemm
    # Read ids and offsets; write ids, lengths for each rank, and the way back.
    num_bytes = (2 * INT64 + INT32) * num_ids + INT64 * num_bags * (1 + NUM_RANKS)
    return contenders(runs, num_bytes, device, equal(*by_torch()))


def bench_jagged(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
