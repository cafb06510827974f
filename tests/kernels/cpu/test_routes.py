"""Routes of ids to embedding servers."""

from __future__ import annotations

import pytest
import torch

from tritonemb.kernels.cpu.row_cache import route_ids
from tritonemb.layout import partitions_of

ANY = (-(2**63), 2**63 - 1)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_ids_are_at_the_servers_of_their_partitions(servers):
    generator = torch.Generator().manual_seed(servers)
    tables = torch.tensor([(1, *ANY), (700, *ANY), (64, 10, 99), (1024, *ANY)])
    sizes = [40, 300, 120, 0]
    ids = torch.randint(-(2**63), 2**63 - 1, (sum(sizes),), generator=generator)
    ids[340:] = torch.arange(120)
    starts = torch.stack([torch.arange(servers + 1) * int(number) // servers for number in tables[:, 0]])
    order, counts = route_ids(ids, sizes, tables, starts)
    expected, first = [[[] for _ in sizes] for _ in range(servers)], 0
    for table, size in enumerate(sizes):
        for position in range(first, first + size):
            partition = int(partitions_of(ids[position : position + 1], int(tables[table, 0])))
            server = max(n for n in range(servers) if starts[table, n] <= partition)
            if tables[table, 1] <= ids[position] <= tables[table, 2]:
                expected[server][table].append(position)
        first += size
    assert order.tolist() == [position for lists in expected for subset in lists for position in subset]
    assert counts.tolist() == [[len(subset) for subset in lists] for lists in expected]


def test_ids_beside_the_partitions_of_all_servers_are_at_none():
    ids = torch.arange(1_000)
    order, counts = route_ids(ids, [1_000], torch.tensor([(64, *ANY)]), torch.tensor([(16, 32)]))
    partitions = partitions_of(ids, 64)
    positions = ((partitions >= 16) & (partitions < 32)).nonzero()[:, 0]
    assert torch.equal(order, positions)
    assert counts.tolist() == [[len(positions)]]
