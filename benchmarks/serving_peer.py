"""Peer of `bench_serving`: the same DLRM in plain PyTorch, behind FastAPI and uvicorn. `python -m ... PORT`"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import Body, FastAPI
from torch import Tensor, nn

from benchmarks.bench_serving import DENSE, DIM, MLP, NUM_DENSE, NUM_TABLES, ROWS, SPARSE


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, next_width in pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
    return nn.Sequential(*layers)


class PlainDLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(NUM_TABLES))
        widths = tuple(map(int, MLP))
        self.bottom = mlp(NUM_DENSE, *widths, DIM)
        self.top = nn.Sequential(mlp(DIM + NUM_TABLES * (NUM_TABLES + 1) // 2, *widths), nn.Linear(widths[-1], 1))
        self.rows, self.columns = torch.tril_indices(NUM_TABLES + 1, NUM_TABLES + 1, offset=-1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        vector = self.bottom(dense)
        vectors = torch.stack([vector, *(bag(ids[:, [i]]) for i, bag in enumerate(self.bags))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.rows, self.columns]
        return torch.sigmoid(self.top(torch.cat([vector, products], dim=1)).squeeze(1))


app, model = FastAPI(), PlainDLRM().eval()


@app.post("/score")
def score(body: Annotated[Any, Body()]) -> dict[str, list[float]]:
    """Score a row, or a user with candidates."""
    rows = [{**body["user"], **row} for row in body["candidates"]] if "user" in body else [body]
    dense = torch.tensor([[row[name] for name in DENSE] for row in rows])
    ids = torch.tensor([[row[name] for name in SPARSE] for row in rows]) % ROWS
    with torch.inference_mode():
        return {"scores": model(dense, ids).tolist()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
