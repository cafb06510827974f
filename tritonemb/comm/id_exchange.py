"""Input distribution: send the ids of a batch to the ranks that own their rows.

A *route* is a feature's lookup of a table (of one column block, for column-wise sharding). The rows of a route are on
one rank, or in blocks on several. The ids of a batch are sent in two messages to each rank: the sizes, 40 bytes; then
lengths of bags, local rows of the ids, and weights. So the host waits once for sizes, for any number of tables.

If owners return a row per id (sequence embeddings), the ids of a route may be deduplicated.

Bytes: `4 · B` of lengths per route and owner, `4` per id (8 if an owner has 2³¹ rows or more), `4` per weight, or per
number of occurrences of a deduplicated id of dynamic tables.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.group import PerDevice, RankGroup
from tritonemb.errors import find_invalid_id
from tritonemb.jagged import KeyedJaggedTensor, key_major_order
from tritonemb.layout import partitions_of

_OWNER = 1 << 40  # an id's destination is its owner times this, plus its local row


class IdRoute(NamedTuple):
    """Owners of the rows that a feature looks up in a table."""

    feature: str
    table: str
    num_rows: int  # of the table
    first_rows: tuple[int, ...]  # of each block, ascending
    owners: tuple[int, ...]  # ranks of the group, by block
    dynamic: bool = False  # any int64 is an id; rows are partitions

    @property
    def max_rows(self) -> int:
        """Rows of the largest block."""
        return max(stop - first for first, stop in pairwise((*self.first_rows, self.num_rows)))


class RowRoutes(NamedTuple):
    """Positions of ids in messages, by which owners return a row per received id."""

    sent: list[int]  # number of ids sent to each rank
    received: list[int]  # number of ids received from each rank
    source: Tensor  # int64 `[N]`: position of each received value in the received messages, rank by rank
    positions: Tensor  # int32 `[M]`: position of each id, route by route, in the sent messages
    samples: int  # of all ranks
    inverse: Tensor | None  # int64 `[I]`: if deduplicated, the sent id of each id of the batch, route by route
    occurrences: Tensor | None  # int32 `[N]`: if deduplicated, of each received value, for dynamic tables


# The ids of all ranks' samples, in the order of ranks, with a key per route (see `route_key`); bags of each rank per
# route: its samples, or 1 if ids are deduplicated; and the routes of returned rows, if any.
Received = tuple[KeyedJaggedTensor, list[int], RowRoutes | None]


def route_key(route: int) -> str:
    """Return the key of a route's received ids."""
    return str(route)


class _Sizes(NamedTuple):
    """Sizes of a message between two ranks."""

    bags: int  # per route
    ids: int  # in all routes
    weighted: int  # 1: the ids have weights; 0: they do not; -1: no ids
    refused: int  # whether the sending rank has refused its batch
    samples: int  # of the sending rank


class IdExchange:
    """Exchange of the ids of batches along routes. All ranks of the group create it with the same routes.

    Args:
        check_bounds: raise an error for an id out of range; otherwise its owner handles it.
        deduplicate: send the distinct ids of a route, without samples and weights.
        means: routes with mean pooling: weights are divided by the length of the bag.
        returns_rows: whether owners return rows, instead of pooled vectors.
        network: group of the same ranks for the ids, which arrive on `device`. Sizes are sent by `group` on the CPU.
    """

    def __init__(
        self, group: RankGroup, routes: Sequence[IdRoute], check_bounds: bool = True, deduplicate: bool = False,
        means: Sequence[int] = (), returns_rows: bool = False, network: RankGroup | None = None,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self._network, self._device = network or group, device
        self.group, self.routes, self.means = group, tuple(routes), list(means)
        self.check_bounds, self.deduplicate, self.returns_rows = check_bounds, deduplicate, returns_rows
        # The routes with rows on each rank.
        self._owned = [[i for i, route in enumerate(self.routes) if rank in route.owners] for rank in range(group.size)]
        self._dynamic = any(route.dynamic for route in self.routes)
        narrow = all(route.max_rows < 2**31 - 1 for route in self.routes) and not self._dynamic
        self._id_dtype = torch.int32 if narrow else torch.int64
        self._nowhere = 2**31 - 1 if narrow else _OWNER - 1
        self._tensors = PerDevice(self._make_tensors)

    def __call__(self, batch: KeyedJaggedTensor, problem: ValueError | None = None) -> Received:
        """Exchange the ids of every rank's batch; `problem` is an error of this rank's batch from the caller.

        Raises the problem, or a ValueError for an id out of range; other ranks a RuntimeError that names this rank.
        """
        group = self.group
        # Ids by route: checked, and deduplicated.
        num_rows, firsts, owners, owned, owner_ids, dynamic = self._tensors(batch.device())
        by_route, inverse = self._weigh_means(self._by_route(batch)), None
        ids, route, bad_id = self._check(by_route, batch, num_rows, dynamic)
        offsets, weights, problem = by_route.offsets(), by_route.weights_or_none(), problem or bad_id
        if problem is not None:
            ids, route, offsets, weights = ids[:0], route[:0], torch.zeros_like(offsets), None
        if self.deduplicate:
            ids, route, offsets, inverse, weights = self._distinct(ids, route)
        bags = 1 if self.deduplicate else batch.stride()
        # Destinations: owner and local row in one number. An id of -1 gets a missing row of its route's first owner.
        row = ids
        if self._dynamic:
            row = torch.where(dynamic[route], partitions_of(ids, num_rows[route]), ids)
        number = route * _OWNER + row.clamp(min=0)
        block = torch.bucketize(number, firsts, right=True) - 1
        row = torch.where(row < 0, self._nowhere, number - firsts[block])
        if self._dynamic:  # int64 ids do not fit beside the owner: carry their positions
            wide, row = torch.where(dynamic[route], ids, row), torch.arange(len(ids))
        destinations = owners[block] * _OWNER + row
        ids, lengths, positions, weights = ops.block_bucketize(destinations, offsets, owner_ids, group.size, weights)
        ids = wide[ids] if self._dynamic else ids
        # Exchange the sizes, which also tell the ranks of an error.
        tells_weights = 1 if weights is not None else 0 if ids.numel() else -1
        own_sizes = _Sizes(bags, 0, tells_weights, problem is not None, batch.stride())
        sizes = torch.tensor([own_sizes] * group.size, dtype=torch.int64, device=ids.device)
        sizes[:, 1] = lengths.reshape(group.size, -1).sum(1)
        widths = [len(_Sizes._fields)] * group.size
        message = group.all_to_all(sizes.flatten(), widths, widths, "sizes").view_as(sizes)
        sent, received = ([_Sizes(*values) for values in of_ranks.tolist()] for of_ranks in (sizes, message))
        if problem is not None:
            raise problem
        if refused := [rank for rank, sizes_of_rank in enumerate(received) if sizes_of_rank.refused]:
            raise RuntimeError(f"rank {group.ranks[refused[0]]} has refused its batch; its own error says why")
        # Exchange lengths, ids and weights, packed to words.
        weighted, num_routes = self._is_weighted(received), [len(routes) for routes in self._owned]
        out_words = [self._words(count, s, weighted) for count, s in zip(num_routes, sent, strict=True)]
        in_words = [self._words(num_routes[group.rank], s, weighted) for s in received]
        of_routes = lengths.reshape(group.size * len(self.routes), bags)[owned].to(torch.int32)
        ids_sent, ids_received = ([s.ids for s in of_ranks] for of_ranks in (sent, received))
        packed = self._pack(of_routes, ids, weights, ids_sent).to(self._device, non_blocking=True)
        words = self._network.all_to_all(packed, out_words, in_words, "ids")
        features, source = self._unpack(words, received, in_words, weighted)
        batch_sizes, samples = [s.bags for s in received], sum(s.samples for s in received)
        if not self.returns_rows:
            return features, batch_sizes, None
        occurrences = None
        if self.deduplicate and self._dynamic:
            occurrences = features.weights().view(torch.int32)
            features = KeyedJaggedTensor(features.keys(), features.values(), offsets=features.offsets())
        routes = RowRoutes(ids_sent, ids_received, source, positions, samples, inverse, occurrences)
        return features, batch_sizes, routes

    def _by_route(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys, weights = batch.keys(), batch.weights_or_none()
        order = [keys.index(route.feature) for route in self.routes]
        names = [route_key(route) for route in range(len(self.routes))]
        if order == list(range(len(keys))):
            return KeyedJaggedTensor(names, batch.values(), weights, offsets=batch.offsets())
        batch_size, offsets = batch.stride(), batch.offsets()
        edges = offsets[::batch_size].tolist() if batch_size else [0] * (len(keys) + 1)
        total = sum(edges[key + 1] - edges[key] for key in order)
        indices = torch.tensor(order, dtype=torch.int64, device=batch.device())
        values, ends, weights = ops.jagged_permute(batch.values(), offsets, indices, len(keys), weights, total)
        return KeyedJaggedTensor(names, values, weights, offsets=ends)

    def _weigh_means(self, by_route: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if not self.means:
            return by_route
        lengths, weights = by_route.lengths().reshape(len(self.routes), -1), by_route.weights_or_none()
        shares = torch.ones(lengths.shape, dtype=torch.float32, device=lengths.device)
        shares[self.means] = 1.0 / lengths[self.means].clamp(min=1)
        mean_weights = shares.flatten().repeat_interleave(by_route.lengths(), output_size=by_route.values().shape[0])
        weights = mean_weights if weights is None else mean_weights * weights
        return KeyedJaggedTensor(by_route.keys(), by_route.values(), weights, offsets=by_route.offsets())

    def _check(
        self, by_route: KeyedJaggedTensor, batch: KeyedJaggedTensor, num_rows: Tensor, dynamic: Tensor
    ) -> tuple[Tensor, Tensor, ValueError | None]:
        """Return every id, -1 if out of range, and its route; and the error if bounds are checked."""
        ids = by_route.values().to(torch.int64)
        batch_size = by_route.stride()
        edges = by_route.offsets()[::batch_size] if batch_size else by_route.offsets()[:1].expand(len(self.routes) + 1)
        route = torch.arange(len(self.routes), device=ids.device).repeat_interleave(edges.diff(), output_size=len(ids))
        inside, problem = (ids >= 0) & (ids < num_rows[route]) | dynamic[route], None
        if self.check_bounds and not bool(inside.all()):
            problem = find_invalid_id(batch, [r[:3] for r in self.routes if not r.dynamic])
        return torch.where(inside, ids, -1), route, problem

    def _distinct(self, ids: Tensor, route: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return the sorted distinct ids of each route, their routes, the offsets of routes, and the inverse.

        With dynamic tables also return occurrences, whose bits are sent as weights.
        """
        values = None
        if self._dynamic:  # int64 ids do not fit beside the route: use their ranks among all ids
            values, ids = torch.unique(ids, return_inverse=True)
        keys, inverse = torch.unique(route * _OWNER + ids + 1, sorted=True, return_inverse=True)
        route, ids = keys // _OWNER, keys % _OWNER - 1
        offsets = ops.segment_offsets(route.bincount(minlength=len(self.routes)))
        if values is None:
            return ids, route, offsets, inverse, None
        return values[ids], route, offsets, inverse, inverse.bincount().to(torch.int32).view(torch.float32)

    def _is_weighted(self, sizes: Sequence[_Sizes]) -> bool:
        weighted = {s.weighted for s in sizes if s.weighted >= 0}
        if len(weighted) > 1:
            without = [self.group.ranks[rank] for rank, s in enumerate(sizes) if s.weighted == 0]
            raise ValueError(f"ids have weights on some ranks only; those without are {without}")
        return weighted == {1}

    def _words(self, num_routes: int, sizes: _Sizes, weighted: bool) -> int:
        """Return the number of 4-byte words of a message."""
        return num_routes * sizes.bags + sizes.ids * (self._id_dtype.itemsize // 4 + weighted)

    def _pack(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, counts: list[int]) -> Tensor:
        """Pack lengths, ids and weights to int32 words, rank by rank."""
        wide = self._id_dtype.itemsize // 4
        fields = [
            lengths.split([len(routes) for routes in self._owned]),
            ids.to(self._id_dtype).view(torch.int32).split([count * wide for count in counts]),
        ]
        if weights is not None:
            fields.append(weights.to(torch.float32).view(torch.int32).split(counts))
        return torch.cat([piece.flatten() for of_rank in zip(*fields, strict=True) for piece in of_rank])

    def _unpack(
        self, words: Tensor, received: Sequence[_Sizes], in_words: list[int], weighted: bool
    ) -> tuple[KeyedJaggedTensor, Tensor]:
        """Unpack the received words to ids key by key, rank by rank; and return the position of each value."""
        wide, owned = self._id_dtype.itemsize // 4, self._owned[self.group.rank]
        fields = [[len(owned) * sizes.bags, sizes.ids * wide, sizes.ids * weighted] for sizes in received]
        messages = [message.split(widths) for message, widths in zip(words.split(in_words), fields, strict=True)]
        flat, ids, weights = zip(*messages, strict=True)
        lengths = [part.reshape(len(owned), sizes.bags) for part, sizes in zip(flat, received, strict=True)]
        source = key_major_order(lengths, sum(sizes.ids for sizes in received))
        values = torch.cat(ids).view(self._id_dtype)[source]
        per_bag = torch.cat(lengths, dim=1).flatten()
        of_values = torch.cat(weights).view(torch.float32)[source] if weighted else None
        return KeyedJaggedTensor([route_key(route) for route in owned], values, of_values, lengths=per_bag), source

    def _make_tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return rows by route, first rows and owners by block, routes by rank, `_OWNER` and `dynamic` by route."""
        numbers = (
            [route.num_rows for route in self.routes],
            [number * _OWNER + first for number, route in enumerate(self.routes) for first in route.first_rows],
            [owner for route in self.routes for owner in route.owners],
            [rank * len(self.routes) + route for rank, routes in enumerate(self._owned) for route in routes],
            [_OWNER] * len(self.routes),
        )
        is_dynamic = torch.tensor([route.dynamic for route in self.routes], dtype=torch.bool, device=device)
        return *(torch.tensor(values, dtype=torch.int64, device=device) for values in numbers), is_dynamic
