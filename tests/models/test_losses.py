"""Losses of retrieval against loops over queries and negatives."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import tritonemb as te
from tritonemb.models.losses import bpr, cosine_contrastive, in_batch_softmax, sampled_softmax

N, K, D = 5, 7, 3


def make_case(shared: bool, seed: int = 0):
    """Vectors of queries, positives and negatives, and ids of items, of which some negatives are positives."""
    torch.manual_seed(seed)
    shape = (K,) if shared else (N, K)
    vectors = [torch.randn(*size, D, dtype=torch.float64, requires_grad=True) for size in ((N,), (N,), shape)]
    ids = torch.randint(2 * N, shape)
    ids[..., 0] = 3  # an accidental hit
    return vectors, torch.arange(N), ids


def cosine(x, y):
    return (x @ y) / (x @ x).sqrt() / (y @ y).sqrt()


def loops(loss, vectors, ids=None, log_q=None):
    """Mean over queries of `loss(query, positive, negatives)`, without accidental hits, from pairs of item and logQ."""
    queries, positives, negatives = vectors
    total = 0.0
    for n in range(N):
        row = negatives if negatives.dim() == 2 else negatives[n]
        pairs = []
        for k in range(len(row)):
            place = k if negatives.dim() == 2 else (n, k)
            if ids is None or ids[1][place] != ids[0][n]:
                pairs.append((row[k], 0.0 if log_q is None else log_q[1][place]))
        total = total + loss(queries[n], (positives[n], 0.0 if log_q is None else log_q[0][n]), pairs)
    return total / N


def softmax_of(query, positive, negatives, temperature=1.0):
    logits = [(query @ item) / temperature - correction for item, correction in (positive, *negatives)]
    return -(logits[0].exp() / sum(logit.exp() for logit in logits)).log()


def bpr_of(query, positive, negatives):
    losses = [-(query @ positive[0] - query @ item).sigmoid().log() for item, _ in negatives]
    return sum(losses) / len(losses)


def contrastive_of(query, positive, negatives, margin, weight):
    losses = [max(cosine(query, item) - margin, torch.zeros(())) for item, _ in negatives]
    return 1 - cosine(query, positive[0]) + weight * sum(losses) / len(losses)


LOSSES = {
    "softmax": (sampled_softmax, softmax_of),
    "temperature": (partial(sampled_softmax, temperature=0.3), partial(softmax_of, temperature=0.3)),
    "bpr": (bpr, bpr_of),
    "contrastive": (
        partial(cosine_contrastive, margin=0.2, negative_weight=5.0),
        partial(contrastive_of, margin=0.2, weight=5.0),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_losses_and_gradients_are_those_of_loops(name, shared, masked):
    vectors, positive_ids, negative_ids = make_case(shared)
    ids = {"positive_ids": positive_ids, "negative_ids": negative_ids} if masked else {}
    function, reference = LOSSES[name]
    actual = function(*vectors, **ids)
    expected = loops(reference, vectors, (positive_ids, negative_ids) if masked else None)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, vectors), torch.autograd.grad(expected, vectors))


@pytest.mark.parametrize("shared", [True, False])
def test_log_q_is_subtracted_from_the_logits(shared):
    vectors, positive_ids, negative_ids = make_case(shared)
    log_q = torch.rand(N).log(), torch.rand(negative_ids.shape).log()
    actual = sampled_softmax(*vectors, positive_ids=positive_ids, negative_ids=negative_ids, log_q=log_q)
    torch.testing.assert_close(actual, loops(softmax_of, vectors, (positive_ids, negative_ids), log_q))


def test_in_batch_softmax_has_the_other_positives_as_negatives():
    (queries, positives, _), _, _ = make_case(True)
    ids, log_q = torch.tensor([3, 1, 3, 0, 1]), torch.rand(N).log()
    expected = loops(softmax_of, (queries, positives, positives), (ids, ids), (log_q, log_q))
    torch.testing.assert_close(in_batch_softmax(queries, positives, positive_ids=ids, log_q=log_q), expected)
    full = torch.nn.functional.cross_entropy(queries @ positives.T, torch.arange(N))
    torch.testing.assert_close(in_batch_softmax(queries, positives), full)


def test_the_correction_makes_up_for_a_skewed_sampler():
    """With negatives of a skewed distribution the loss is near that of all items only by its probabilities."""
    torch.manual_seed(0)
    query, items = torch.randn(1, D, dtype=torch.float64), torch.randn(20, D, dtype=torch.float64)
    shares = torch.arange(1, 21).double() ** 2
    draws = torch.multinomial(shares, 20_000, replacement=True)
    options = {"positive_ids": torch.zeros(1, dtype=torch.int64), "negative_ids": draws}
    corrected, uniform = (
        sampled_softmax(query, items[:1], items[draws], log_q=(torch.zeros(1), q.log()[draws]), **options)
        for q in (len(draws) * shares / shares.sum(), torch.full((20,), len(draws) / 20))
    )  # expected numbers of samples, so that the sum is that over all items
    full = torch.nn.functional.cross_entropy(query @ items.T, torch.zeros(1, dtype=torch.int64))
    assert abs(corrected - full) < 0.03 < 0.1 < abs(uniform - full)


def test_half_precision_is_summed_in_float32():
    vectors = make_case(False)[0]
    vectors = [vector.detach().bfloat16() for vector in vectors]
    exact = sampled_softmax(*(vector.float() for vector in vectors))
    assert torch.equal(sampled_softmax(*vectors), exact)
    assert exact.dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_scores_under_autocast_are_in_float32(name):
    vectors = [vector.detach().float() for vector in make_case(True)[0]]
    exact = LOSSES[name][0](*vectors)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(LOSSES[name][0](*vectors), exact)
    rounded = [vector.bfloat16() for vector in vectors]
    assert torch.equal(LOSSES[name][0](*rounded), LOSSES[name][0](*(vector.float() for vector in rounded)))


def test_queries_whose_negatives_are_all_accidental_hits_cost_nothing():
    vectors, ids = [torch.randn(2, D), torch.randn(2, D), torch.randn(2, 4, D)], torch.tensor([8, 9])
    negative_ids = ids[:, None].expand(2, 4)
    for function in (sampled_softmax, bpr):
        assert function(*vectors, positive_ids=ids, negative_ids=negative_ids) == 0


def test_bad_input():
    vectors, positive_ids, _ = make_case(True)
    with pytest.raises(ValueError, match=r"got \[5, 3\], \[4, 3\] and \[7, 3\]"):
        bpr(vectors[0], vectors[1][:4], vectors[2])
    with pytest.raises(ValueError, match=r"negatives \[K, D\] or \[N, K, D\], got"):
        sampled_softmax(vectors[0], vectors[1], torch.randn(4, K, D))
    with pytest.raises(ValueError, match="pass both, or neither"):
        cosine_contrastive(*vectors, positive_ids=positive_ids)
    for negative_ids in (positive_ids[:1], positive_ids[None, :1].expand(3, 1)):
        with pytest.raises(ValueError, match=r"ids: expected \[5\] and \[7\] or \[5, 7\], got \[5\] and"):
            bpr(*vectors, positive_ids=positive_ids, negative_ids=negative_ids)
    for function in (bpr, cosine_contrastive):
        with pytest.raises(ValueError, match="a mean over negatives, and got none"):
            function(*vectors[:2], vectors[2][:0])
    with pytest.raises(ValueError, match=r"log_q: expected \[5\] and"):
        sampled_softmax(*vectors, log_q=(torch.zeros(5, 1), torch.zeros(7)))
    for temperature in (0.0, -0.1):
        with pytest.raises(ValueError, match=f"temperature must be above 0, got {temperature}"):
            in_batch_softmax(*vectors[:2], temperature=temperature)
    with pytest.raises(ValueError, match="power must be a finite number of 0 or more, got -1"):
        te.data.NegativeSampler(3, torch.tensor([0, 1, 2]), power=-1)
