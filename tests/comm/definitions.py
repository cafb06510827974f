"""What exchanges do, told by one process that knows all ranks' inputs."""

from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import tritonemb as te
from tritonemb.comm.id_exchange import IdRoute
from tritonemb.types import CODECS

FEATURES = ("a", "b", "c")


class IdsCase(NamedTuple):
    """Lanes, and for each rank a batch as lists by feature, ids and weights."""

    lanes: tuple[IdRoute, ...]
    ids: tuple[dict[str, list[list[int]]], ...]
    weights: tuple[dict[str, list[list[float]]], ...] | None
    dtype: torch.dtype
    check: bool
    once: bool

    def batch(self, rank: int) -> te.KeyedJaggedTensor:
        """Built by hand, as weights of a batch without ids are still weights."""
        bags = [bag for key in FEATURES for bag in self.ids[rank][key]]
        lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
        values = torch.tensor([value for bag in bags for value in bag], dtype=self.dtype)
        weights = None
        if self.weights is not None:
            bags_of_weights = [bag for key in FEATURES for bag in self.weights[rank][key]]
            weights = torch.tensor([weight for bag in bags_of_weights for weight in bag], dtype=torch.float32)
        return te.KeyedJaggedTensor(list(FEATURES), values, weights, lengths=lengths)

    def is_inside(self, lane: int, value: int) -> bool:
        return 0 <= value < self.lanes[lane].num_rows

    def owner(self, lane: int, value: int) -> tuple[int, int | None]:
        """Who has an id's row, and where; an id that the table does not have goes to the first owner."""
        of = self.lanes[lane]
        if not self.is_inside(lane, value):
            return of.owners[0], None
        block = bisect_right(of.first_rows, value) - 1
        return of.owners[block], value - of.first_rows[block]

    def arriving(self, rank: int) -> dict[str, list[list[tuple[int | None, float]]]]:
        """What a rank gets: by lane, the bags of all ranks' samples, as rows and weights; None for no row."""
        result: dict[str, list[list[tuple[int | None, float]]]] = {}
        for lane, of in enumerate(self.lanes):
            if rank not in of.owners:
                continue
            bags = result[str(lane)] = []
            for source in range(len(self.ids)):
                inputs = self.ids[source][of.feature]
                with_weights = self.weights[source][of.feature] if self.weights is not None else None
                if self.once:
                    flat = {value if self.is_inside(lane, value) else -1 for bag in inputs for value in bag}
                    inputs, with_weights = [sorted(flat)], None
                for number, bag in enumerate(inputs):
                    local = []
                    for place, value in enumerate(bag):
                        owner, row = self.owner(lane, value)
                        if owner == rank:
                            weight = with_weights[number][place] if with_weights is not None else 1.0
                            local.append((row, weight))
                    bags.append(local)
        return result

    def requests(self, rank: int) -> list[tuple[int, int]]:
        """A rank's ids, lane by lane: lane and id."""
        return [(n, v) for n, lane in enumerate(self.lanes) for bag in self.ids[rank][lane.feature] for v in bag]


@st.composite
def ids_cases(draw: st.DrawFn, world: int, wild: bool = False) -> IdsCase:
    lanes = []
    for number in range(draw(st.integers(1, 4))):
        rows = draw(st.sampled_from((1, 2, 5, 64, 1000, 2**31 - 1, 2**31, 2**33 + 5)))
        owners = draw(st.permutations(range(world)))[: draw(st.integers(1, world))]
        firsts = range(0, rows, -(-rows // len(owners)))
        if draw(st.booleans()):
            firsts = [0, *sorted(draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=min(len(owners), rows) - 1)))]
        feature = draw(st.sampled_from(FEATURES))
        lanes.append(IdRoute(feature, f"t{number}", rows, tuple(firsts), tuple(owners[: len(firsts)])))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    # Past what int32 holds there are ids of int64 only.
    fewest = {key: min([lane.num_rows for lane in lanes if lane.feature == key], default=9) for key in FEATURES}
    top = {key: min(rows, 2**31 - 1 if dtype == torch.int32 else rows) - 1 for key, rows in fewest.items()}
    batches, of_weights = [], []
    for _ in range(world):
        size = draw(st.sampled_from((0, 1, 2, 5)))
        ids, weights = {}, {}
        for key in FEATURES:
            bags = []
            for _ in range(size):
                values = st.one_of(st.integers(0, top[key]), st.integers(max(0, top[key] - 2), top[key]))
                if wild:
                    values = st.one_of(values, st.sampled_from((-1, -(2**31), 2**31 - 1)))
                bags.append(draw(st.lists(values, max_size=4)))
            ids[key] = bags
            weights[key] = [[draw(st.integers(-8, 8)) / 4 for _ in bag] for bag in bags]
        batches.append(ids)
        of_weights.append(weights)
    weighted = draw(st.booleans())
    all_weights = tuple(of_weights) if weighted else None
    return IdsCase(tuple(lanes), tuple(batches), all_weights, dtype, not wild, draw(st.booleans()))


class ColumnsCase(NamedTuple):
    """Which columns of the result each rank has, samples of each, and the seed of the values."""

    runs: tuple[tuple[tuple[int, int], ...], ...]
    width: int
    rows: tuple[int, ...]
    forward: str
    backward: str
    seed: int
    large: bool = False

    def matrix(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        result = torch.randn(sum(self.rows), sum(size for _, size in self.runs[rank]), generator=generator)
        return result * 1e9 if self.large else result

    def gradient(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 64 + 32 + rank)
        return torch.randn(self.rows[rank], self.width, generator=generator) / max(1, sum(self.rows))

    def forwarded(self, rank: int) -> Tensor:
        """The sum over ranks, in their order, of what they have for a rank's samples, each rounded on its way."""
        first = sum(self.rows[:rank])
        actual: dict[tuple[int, int], Tensor] = {}
        for other, runs in enumerate(self.runs):
            crossed = rounded(self.matrix(other)[first : first + self.rows[rank]], self.forward)
            pieces = crossed.split([size for _, size in runs], dim=1) if runs else []
            for run, piece in zip(runs, pieces, strict=True):
                actual[run] = actual[run] + piece if run in actual else piece
        result = torch.zeros(self.rows[rank], self.width)
        for (start, size), piece in actual.items():
            result[:, start : start + size] = piece
        return result

    def back(self, rank: int, average: int, scale: float) -> Tensor:
        """Of all ranks' gradients the columns that a rank has."""
        parts = []
        for other in range(len(self.rows)):
            grad = rounded(self.gradient(other) * scale, self.backward) * (1.0 / (scale * average))
            columns = [grad[:, start : start + size] for start, size in self.runs[rank]]
            parts.append(torch.cat(columns, dim=1) if columns else grad[:, :0])
        return torch.cat(parts)


@st.composite
def columns_cases(draw: st.DrawFn, world: int, codecs: tuple[str, str] | None = None) -> ColumnsCase:
    """Runs of columns in any order on the ranks, some on several of them; ranks without any."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    place = 0
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.sampled_from((1, 3, 4, 8, 16)))
        number = draw(st.sampled_from((1, 1, 2, world)))
        for rank in draw(st.permutations(range(world)))[:number]:
            runs[rank].append((place, size))
        place += size
    mixed = tuple(tuple(draw(st.permutations(run))) for run in runs)
    rows = tuple(draw(st.sampled_from((0, 1, 3, 7))) for _ in range(world))
    names = sorted(set(CODECS) - {"int8"})
    forward, backward = codecs or (draw(st.sampled_from(names)), draw(st.sampled_from(names)))
    return ColumnsCase(mixed, place, rows, forward, backward, draw(st.integers(0, 999)))


def rounded(values: Tensor, codec: str) -> Tensor:
    """Values after they crossed: to nearest, what is too large at the largest."""
    if codec == "fp32":
        return values
    dtype = CODECS[codec].dtype
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).float()


def lists_of(features: te.KeyedJaggedTensor, limit: int) -> dict[str, Any]:
    """Rows and weights of bags, by key; a row from `limit` on is None."""
    weights = features.weights_or_none()
    flat = torch.ones(features.values().shape) if weights is None else weights
    pairs = [
        (None if row >= limit else row, weight)
        for row, weight in zip(features.values().tolist(), flat.tolist(), strict=True)
    ]
    offsets, size = features.offsets().tolist(), features.stride()
    return {
        key: [pairs[offsets[n * size + s] : offsets[n * size + s + 1]] for s in range(size)]
        for n, key in enumerate(features.keys())
    }
