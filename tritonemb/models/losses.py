"""Losses of retrieval over sampled negatives: sampled softmax with logQ corrections, BPR, cosine contrastive loss.

Each is a mean over N queries, such as users, with one positive item each. Shapes: `queries` and `positives [N, D]`;
`negatives [K, D]`, which all queries share, or `[N, K, D]`. Scores are dot products, at least in float32. With
`positive_ids` int64 `[N]` and `negative_ids` int64 `[K]` or `[N, K]`, accidental hits are left out: negatives that are
the positive of their query.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def sampled_softmax(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    positive_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    log_q: tuple[Tensor, Tensor] | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Compute `mean_n -log(exp(p_n) / (exp(p_n) + sum_k exp(s_nk)))` with logits `p` of positives, `s` of negatives.

    A logit is `score / temperature - log_q`: with the correction its gradient estimates that of the softmax over all
    items. Source: Bengio and Senécal, IEEE TNN 2008; Yi et al., RecSys 2019, section 3.

    Args:
        log_q: log probabilities to sample the positives, `[N]`, and the negatives, `[K]` or `[N, K]`, up to one common
            constant; see `te.data.NegativeSampler`. None if negatives are uniform.
        temperature: divisor of the scores, above 0.

    Raises:
        ValueError: shapes do not agree, only one of the ids is given, or the temperature is not above 0.
    """
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    positive, negative = _scores(queries, positives, negatives)
    positive, negative = positive / temperature, negative / temperature
    if log_q is not None:
        _check_shapes("log_q", *log_q, negative)
        positive, negative = positive - log_q[0], negative - log_q[1]
    if (hits := _accidental_hits(positive_ids, negative_ids, negative)) is not None:
        negative = negative.masked_fill(hits, -torch.inf)
    return (torch.cat([positive[:, None], negative], dim=1).logsumexp(dim=1) - positive).mean()


def in_batch_softmax(
    queries: Tensor,
    positives: Tensor,
    *,
    positive_ids: Tensor | None = None,
    log_q: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Compute `sampled_softmax` with the positives of all other queries as negatives.

    Frequent items are negatives often, which `log_q [N]` corrects, see `NegativeSampler.log_q`.
    Source: Yi et al., RecSys 2019, equation 5.

    Args:
        positive_ids: int64 `[N]`; other queries' positives with the id of a query's positive are left out.
    """
    ids = torch.arange(len(positives), device=positives.device) if positive_ids is None else positive_ids
    pair = None if log_q is None else (log_q, log_q)
    return sampled_softmax(
        queries, positives, positives, positive_ids=ids, negative_ids=ids, log_q=pair, temperature=temperature
    )


def bpr(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    positive_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
) -> Tensor:
    """Compute `mean_nk -log(sigmoid(p_n - s_nk))` with the scores `p` of positives and `s` of negatives.

    Source: Rendle et al., UAI 2009, section 4.1, without its regularization: use an optimizer's weight decay.
    """
    positive, negative = _scores(queries, positives, negatives)
    losses = F.softplus(negative - positive[:, None])
    return _mean_of_pairs(losses, _accidental_hits(positive_ids, negative_ids, losses)).mean()


def cosine_contrastive(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    margin: float = 0.9,
    negative_weight: float = 150.0,
    positive_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
) -> Tensor:
    """Compute `mean_n (1 - p_n) + negative_weight * mean_k max(0, s_nk - margin)` with cosines `p` and `s`.

    Source: SimpleX (Mao et al., CIKM 2021), equation 1.

    Args:
        margin: cosine up to which a negative costs nothing.
        negative_weight: weight of the negatives beside the positive.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    vectors = (F.normalize(tensor.to(dtype), dim=-1) for tensor in (queries, positives, negatives))
    positive, negative = _scores(*vectors)
    losses = _mean_of_pairs((negative - margin).relu(), _accidental_hits(positive_ids, negative_ids, negative))
    return (1 - positive + negative_weight * losses).mean()


def _scores(queries: Tensor, positives: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Return dot products of queries with positives `[N]` and with negatives `[N, K]`; raise ValueError for shapes."""
    fits = negatives.shape[-1] == queries.shape[-1] and (negatives.dim() == 2 or len(negatives) == len(queries))
    if queries.dim() != 2 or positives.shape != queries.shape or negatives.dim() not in (2, 3) or not fits:
        raise ValueError(
            "expected queries [N, D], positives [N, D] and negatives [K, D] or [N, K, D], got "
            f"{list(queries.shape)}, {list(positives.shape)} and {list(negatives.shape)}"
        )
    dtype = torch.promote_types(queries.dtype, torch.float32)
    queries, positives, negatives = queries.to(dtype), positives.to(dtype), negatives.to(dtype)
    shared = negatives.dim() == 2
    with torch.autocast(
        "cpu" if queries.is_meta else queries.device.type, enabled=False
    ):  # it would round the scores of negatives only
        negative = queries @ negatives.T if shared else torch.bmm(negatives, queries[:, :, None]).squeeze(2)
    return (queries * positives).sum(1), negative


def _check_shapes(name: str, positive: Tensor, negative: Tensor, scores: Tensor) -> None:
    """Raise ValueError unless values of positives are `[N]`, and those of negatives `[K]` or `[N, K]`, as scores."""
    size, count = scores.shape
    if positive.shape != (size,) or negative.shape not in ((count,), (size, count)):
        actual = f"{list(positive.shape)} and {list(negative.shape)}"
        raise ValueError(f"{name}: expected [{size}] and [{count}] or [{size}, {count}], got {actual}")


def _accidental_hits(positive_ids: Tensor | None, negative_ids: Tensor | None, scores: Tensor) -> Tensor | None:
    """Return a mask `[N, K]` of negatives that are the positive of their query; None without ids."""
    if (positive_ids is None) != (negative_ids is None):
        raise ValueError("positive_ids and negative_ids are compared with each other; pass both, or neither")
    if positive_ids is None or negative_ids is None:
        return None
    _check_shapes("ids", positive_ids, negative_ids, scores)
    return torch.eq(positive_ids[:, None], negative_ids)


def _mean_of_pairs(losses: Tensor, hits: Tensor | None) -> Tensor:
    """Return means over the negatives of each query `[N]`, without accidental hits; ValueError without negatives."""
    if not losses.shape[1]:
        raise ValueError("the loss is a mean over negatives, and got none; sample at least one per query")
    if hits is None:
        return losses.mean(1)
    return losses.masked_fill(hits, 0.0).sum(1) / (~hits).sum(1).clamp(min=1)
