"""Ranks learn each other's distinct rows, or that one has refused its batch."""

from __future__ import annotations

import pytest
import torch

from tritonemb.comm.gradient_exchange import all_gather_rows
from tritonemb.comm.group import RankGroup

GIVEN = [
    ([[1, 5, 7], [5, 6]], [1, 5, 6, 7]),
    ([[], [2**40, 2**40 + 1]], [2**40, 2**40 + 1]),
    ([[], []], []),
]


def gathered(rank: int) -> list[list[int]]:
    group = RankGroup.world()
    found = []
    for by_rank, _ in GIVEN:
        rows = all_gather_rows(group, torch.tensor(by_rank[rank], dtype=torch.int64))
        assert rows.dtype == torch.int64
        found.append(rows.tolist())
    return found


def test_every_rank_gets_the_rows_of_all_once_in_ascending_order(ranks):
    for found in ranks(2).run(gathered):
        assert found == [expected for _, expected in GIVEN]


def test_one_rank_keeps_its_own():
    rows = torch.tensor([3, 9])
    assert torch.equal(all_gather_rows(RankGroup(), rows), rows)
    with pytest.raises(ValueError, match="as wanted"):
        all_gather_rows(RankGroup(), rows, ValueError("as wanted"))


def refused(rank: int) -> tuple[str, list[int]]:
    group, rows = RankGroup.world(), torch.tensor([rank])
    with pytest.raises(RuntimeError if rank == 0 else ValueError) as caught:
        all_gather_rows(group, rows, ValueError("as wanted") if rank == 1 else None)
    return str(caught.value), all_gather_rows(group, rows).tolist()


def test_a_rank_that_refuses_its_batch_is_named_to_the_others(ranks):
    (told, first), (own, second) = ranks(2).run(refused)
    assert told == "rank 1 has refused its batch; its own error says why"
    assert own == "as wanted"
    assert first == second == [0, 1]
