"""Recommendation models as people write them in plain PyTorch: nothing here knows of tritonemb."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(widths):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Naumov et al., arXiv:1906.00091, in the form of its public code: bags, `bmm`, the triangle below the diagonal."""

    def __init__(self, rows: list[int], dim: int, num_dense: int = 13, sparse: bool = False, width: int = 32) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(count, dim, mode="sum", sparse=sparse) for count in rows])
        self.bot_l = mlp(num_dense, width, dim)
        vectors = len(rows) + 1
        self.top_l = mlp(dim + vectors * (vectors - 1) // 2, width, 1)

    def interact(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense: Tensor, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        ly = [bag(i, o) for bag, i, o in zip(self.emb_l, ids, offsets, strict=True)]
        return self.top_l(self.interact(self.bot_l(dense), ly)).squeeze(1)


class DCN(nn.Module):
    """Deep and cross network v2 (Wang et al., WWW 2021): one id a field, of a width that depends on its rows."""

    def __init__(self, rows: list[int], num_dense: int = 13, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {f"field_{k}": nn.Embedding(count, 4 if count < 50 else 8) for k, count in enumerate(rows)}
        )
        total = num_dense + sum(embedding.embedding_dim for embedding in self.embeddings.values())
        self.cross = nn.ModuleList([nn.Linear(total, total) for _ in range(depth)])
        self.deep = mlp(total, width, width)
        self.out = nn.Linear(total + width, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        vectors = [embedding(sparse[:, k]) for k, embedding in enumerate(self.embeddings.values())]
        x0 = torch.cat([dense, *vectors], dim=-1)
        x = x0
        for layer in self.cross:
            x = x0 * layer(x) + x
        return self.out(torch.cat([x, self.deep(x0)], dim=1)).squeeze(-1)


class DeepFM(nn.Module):
    """Guo et al., IJCAI 2017: every field has a vector and, in a table of its own, a weight of the first order."""

    def __init__(self, rows: list[int], dim: int = 8, width: int = 32) -> None:
        super().__init__()
        self.second = nn.ModuleList([nn.Embedding(count, dim) for count in rows])
        self.first = nn.ModuleList([nn.Embedding(count, 1) for count in rows])
        self.deep = mlp(len(rows) * dim, width, 1)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, sparse: Tensor) -> Tensor:
        linear = sum(emb(sparse[:, k]) for k, emb in enumerate(self.first))
        vectors = torch.stack([emb(sparse[:, k]) for k, emb in enumerate(self.second)], dim=1)
        square_of_sum, sum_of_squares = vectors.sum(1).square(), vectors.square().sum(1)
        pairs = 0.5 * (square_of_sum - sum_of_squares).sum(1, keepdim=True)
        return (linear + pairs + self.deep(vectors.flatten(1)) + self.bias).squeeze(1)


class TwoTower(nn.Module):
    """Users and items, each by an id and by what else is known of them; in-batch softmax."""

    def __init__(self, num_users: int, num_countries: int, num_items: int, num_genres: int, dim: int = 16) -> None:
        super().__init__()
        self.user_id, self.country = nn.Embedding(num_users, dim), nn.Embedding(num_countries, 4)
        self.item_id = nn.Embedding(num_items, dim)
        self.genres = nn.EmbeddingBag(num_genres, dim, mode="mean", include_last_offset=True)
        self.user_tower, self.item_tower = mlp(dim + 4, 32, dim), mlp(2 * dim, 32, dim)

    def forward(self, user: Tensor, country: Tensor, item: Tensor, genres: Tensor, genre_offsets: Tensor) -> Tensor:
        query = self.user_tower(torch.cat([self.user_id(user), self.country(country)], 1))
        key = self.item_tower(torch.cat([self.item_id(item), self.genres(genres, genre_offsets)], 1))
        return F.normalize(query, dim=1) @ F.normalize(key, dim=1).T


class SequenceTower(nn.Module):
    """Users by their history of items (padded with 0), items by the same table."""

    def __init__(self, num_users: int, num_items: int, dim: int = 16) -> None:
        super().__init__()
        self.user_id = nn.Embedding(num_users, dim)
        self.item_id = nn.Embedding(num_items, dim, padding_idx=0)
        self.tower = mlp(2 * dim, 32, dim)

    def forward(self, user: Tensor, history: Tensor, item: Tensor) -> Tensor:
        rows = self.item_id(history)
        mask = (history != 0).unsqueeze(-1)
        pooled = (rows * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.tower(torch.cat([self.user_id(user), pooled], 1)) @ self.item_id(item).T
