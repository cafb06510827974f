"""Negative samples: probabilities, reproducibility, corrections."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tritonemb.data import NegativeSampler

IDS, COUNTS = torch.tensor([70, 5, 1 << 40, 12]), torch.tensor([1, 2, 3, 0])


@pytest.mark.parametrize(
    ("power", "weights"), [(0.0, [1, 1, 1, 1]), (1.0, [1, 2, 3, 0]), (0.5, [1, 2**0.5, 3**0.5, 0])]
)
def test_items_are_sampled_with_their_probabilities(power, weights):
    sampler = NegativeSampler(IDS, COUNTS, power=power, seed=3)
    samples = sampler.sample((100, 400), step=9)
    assert samples.shape == (100, 400)
    for item, weight in zip(IDS, weights, strict=True):
        probability = weight / sum(weights)
        # Six standard deviations of the share of 40,000 samples.
        assert abs((samples == item).double().mean() - probability) <= 6 * math.sqrt(probability / 40_000)
        if weight:
            assert sampler.log_q(item[None]).item() == pytest.approx(math.log(probability), rel=1e-6)


def test_samples_depend_on_seed_step_and_stream_alone():
    numbers = (np.int64(1000), torch.tensor(1000))
    assert all(torch.equal(NegativeSampler(n).sample(9, 1), NegativeSampler(1000).sample(9, 1)) for n in numbers)
    first, again = (NegativeSampler(1000, seed=5) for _ in range(2))
    samples = first.sample(50, 7)
    first.sample(3, 8)
    assert torch.equal(first.sample(50, 7), samples)
    assert torch.equal(again.sample((5, 10), 7).flatten(), samples)
    assert torch.equal(again.sample(20, 7), samples[:20])
    changed = [again.sample(50, 8), again.sample(50, 7, stream=1), NegativeSampler(1000, seed=6).sample(50, 7)]
    assert not any(torch.equal(other, samples) for other in changed)
    assert samples[:4].tolist() == [762, 306, 974, 690]  # on every machine


def test_mixed_negatives_have_the_mean_of_both_probabilities():
    sampler = NegativeSampler(IDS, COUNTS, power=0.0)
    ids = torch.tensor([[5, 12], [70, 5]])
    counts = {70: 1, 5: 2, 12: 0}
    expected = [[math.log((8 * counts[i] / 6 + 24 / 4) / 32) for i in row] for row in ids.tolist()]
    torch.testing.assert_close(sampler.log_q(ids, batch_size=8, num_negatives=24), torch.tensor(expected))
    in_batch = sampler.log_q(torch.tensor([5]), batch_size=8, num_negatives=0)
    assert in_batch.item() == pytest.approx(math.log(2 / 6))


def test_bad_input():
    for items in (0, -2, torch.tensor([3, 1, 3]), torch.tensor([0.5, 1.0])):
        with pytest.raises(ValueError, match="at least 1, or ids that are distinct integers"):
            NegativeSampler(items)
    for numbers in ((0, 0), (-1, 2), (2, -1)):
        with pytest.raises(ValueError, match="and one above 0, got batch_size="):
            NegativeSampler(3, torch.ones(3)).log_q(torch.tensor([1]), batch_size=numbers[0], num_negatives=numbers[1])
    with pytest.raises(ValueError, match=r"power=0\.75 needs the counts of all items, got None"):
        NegativeSampler(4, power=0.75)
    with pytest.raises(ValueError, match="got 4 for 3 items"):
        NegativeSampler(3, COUNTS)
    for counts in (torch.zeros(3), torch.tensor([1, -1, 2]), torch.tensor([1, torch.nan, 2])):
        with pytest.raises(ValueError, match="counts must be at least 0"):
            NegativeSampler(3, counts, power=1)
    for power in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"power must be a finite number of 0 or more, got {power}"):
            NegativeSampler(IDS, COUNTS, power=power)
    with pytest.raises(ValueError, match="counts to the power of 200 are too large; lower the power"):
        NegativeSampler(2, torch.tensor([1, 100]), power=200)
    sampler = NegativeSampler(IDS, COUNTS, power=1)
    for item in (6, 12, 1 << 50):
        with pytest.raises(ValueError, match=f"item {item} is never sampled: it is unknown"):
            sampler.log_q(torch.tensor([5, item]))
