"""Ranking metrics of retrieval by full ranking: Recall, hit rate, NDCG and MRR at k, over all items in blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_ITEMS = 8192  # items per block: scores of 1,024 queries against a block take 32 MiB


@torch.no_grad()
def top_items(
    queries: Tensor,
    items: Tensor,
    k: int,
    excluded: tuple[Tensor, Tensor] | None = None,
    first_item: int = 0,
    block_items: int = BLOCK_ITEMS,
) -> tuple[Tensor, Tensor]:
    """Return scores float32 and numbers int64 `[B, min(k, M)]` of the items with the largest dot products, best first.

    Excluded items are not among them: where a query has fewer others, the score is -inf and the number -1.
    Items are scored in blocks, so that memory does not grow with their number. Equal scores are ordered by item, in any
    blocks. Items of several ranks: call it with each shard and its `first_item`, concatenate the results in order of
    the shards, and sort them by score, stable.

    Args:
        queries: `[B, D]`, for example users.
        items: `[M, D]`.
        excluded: pairs of query and item, such as training rows, two int64 `[P]`.
        first_item: number of the first of these items.

    Raises:
        ValueError: `k` is less than 1, or a score is NaN.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)  # keys: score, then item in reverse
    for start in range(0, len(items), block_items):
        with torch.autocast("cpu" if queries.is_meta else queries.device.type, enabled=False):
            scores = queries.float() @ items[start : start + block_items].float().T
        if excluded is not None:
            inside = (excluded[1] >= first_item + start) & (excluded[1] < first_item + start + scores.shape[1])
            scores[excluded[0][inside], excluded[1][inside] - first_item - start] = -torch.inf
        # Of equal scores at the boundary topk takes any: then all scores of the block get keys.
        values, numbers = scores.topk(min(k + 1, scores.shape[1]))
        if bool(values.isnan().any()):  # they count as the largest
            raise ValueError(f"scores of items {first_item + start} and following are NaN")
        if values.shape[1] > k and bool((values[:, k - 1] == values[:, k]).any()):
            values, numbers = scores, torch.arange(scores.shape[1], device=scores.device)
        # Order-preserving integers of the scores' bits, above the item's number: all keys differ.
        bits = (values + 0.0).view(torch.int32)  # no -0.0
        ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
        keys = torch.cat([best, (ordered << 32) + (0xFFFFFFFF - start - numbers)], dim=1)
        best = keys.topk(min(k, keys.shape[1]), dim=1).values
    bits = (best >> 32).int()
    scores = (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(torch.float32)
    numbers = 0xFFFFFFFF - (best & 0xFFFFFFFF) + first_item
    return scores, numbers if excluded is None else numbers.masked_fill(scores == -torch.inf, -1)


class RankingMetrics:
    """Means over queries of Recall, hit rate, NDCG and MRR at each k, of batches of `top_items`.

    Queries without relevant items are left out. With several ranks, each adds its queries; all-reduce `sums`.

    Args:
        ks: cutoffs; a batch needs the items of the largest, unless there are fewer items.

    Attributes:
        sums: float64 `[1 + 4 * len(ks)]`: number of queries, then sums of the four metrics by cutoff.
    """

    NAMES = "recall", "hit_rate", "ndcg", "mrr"

    def __init__(self, ks: Sequence[int] = (10,)) -> None:
        if not ks or min(ks) < 1:
            raise ValueError(f"ks must be cutoffs of at least 1, got {list(ks)}")
        self.ks = tuple(ks)
        self.sums = torch.zeros(1 + len(self.NAMES) * len(ks), dtype=torch.float64)

    def update(self, items: Tensor, relevant: Tensor, offsets: Tensor) -> None:
        """Add queries: ranked `items` int64 `[B, K]`, -1 where a query has fewer, and the relevant items of query b,
        `relevant[offsets[b] : offsets[b + 1]]`, each of which counts once. ValueError for an item that is ranked twice
        for a query, or shapes that do not agree."""
        items, relevant, offsets = items.cpu(), relevant.cpu(), offsets.cpu()
        counts = offsets.diff()
        if len(counts) != len(items) or int(counts.sum()) != len(relevant):
            shapes = f"{list(items.shape)}, {list(relevant.shape)} and {list(offsets.shape)}"
            raise ValueError(f"expected items [B, K], relevant [N] and offsets [B + 1] that end with N, got {shapes}")
        queries = torch.repeat_interleave(torch.arange(len(counts)), counts)
        # Hits: pairs of query and item that are both ranked and relevant, as single integers; ids are numbered densely.
        distinct, numbers = torch.cat([items.flatten(), relevant]).unique(return_inverse=True)
        indices = torch.cat([torch.arange(len(items)).repeat_interleave(items.shape[1]), queries])
        predicted, expected = (indices * len(distinct) + numbers).split([items.numel(), len(relevant)])
        pairs, uses = predicted[items.flatten() != -1].unique(return_counts=True)
        if len(repeated := pairs[uses > 1]):
            query, number = divmod(int(repeated[0]), len(distinct))
            raise ValueError(f"item {distinct[number]} is ranked twice for query {query}; remove duplicates")
        expected = expected.unique()
        counts = (expected // max(len(distinct), 1)).bincount(minlength=len(items))
        hits = (torch.isin(predicted, expected).view(items.shape) & (items != -1))[counts > 0].double()
        counts, hits = counts[counts > 0].double(), F.pad(hits, (0, 1))  # a column for argmax, also without items
        discounts = 1 / torch.arange(2, max(self.ks) + 2, dtype=torch.float64).log2()
        ideal = discounts.cumsum(0)
        rows = [torch.tensor([len(counts)], dtype=torch.float64)]
        for k in self.ks:
            top = hits[:, :k]
            first = top.argmax(1) + 1
            is_hit = top.any(1).double()
            gains = top @ discounts[: top.shape[1]] / ideal[counts.clamp(max=k).long() - 1]
            rows.append(torch.stack([(top.sum(1) / counts).sum(), is_hit.sum(), gains.sum(), (is_hit / first).sum()]))
        self.sums += torch.cat(rows)

    def compute(self) -> dict[str, float]:
        """Return the means by name, such as `ndcg@10`. Raise ValueError if no query has relevant items."""
        if not self.sums[0]:
            raise ValueError("no query has relevant items, so no metric is defined")
        names = [f"{name}@{k}" for k in self.ks for name in self.NAMES]
        return dict(zip(names, (self.sums[1:] / self.sums[0]).tolist(), strict=True))
