"""Input distribution: send the ids of a batch to the ranks that own their rows.

A *route* is the lookup of a feature in a table; with column-wise sharding each block of columns has one. The rows of a
route are on one rank, or in blocks on several ranks. Each rank sends two messages to each rank: 40 bytes of sizes; then
the lengths of bags, the local rows of the ids, and the weights. The host waits once for sizes of all tables.

If owners return a row per id (sequence embeddings), the ids of a route may be deduplicated.

Bytes: `4 · B` of lengths per route and owner; 4 per id (8 if an owner has 2³¹ rows or more); 4 per weight; with
dynamic tables, 4 per deduplicated id for its number of occurrences.
"""

import functools
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.group import RankGroup
from tritonemb.errors import find_invalid_id
from tritonemb.jagged import KeyedJaggedTensor, key_major_order
from tritonemb.layout import partitions_of

# A destination is `owner * _STRIDE + local row`, int64: 2^40 rows per owner leave 23 bits for owners or routes.
_STRIDE = 1 << 40


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
        return max(stop - first for first, stop in pairwise((*self.first_rows, self.num_rows)))


class RowRoutes(NamedTuple):
    """Positions of ids in messages; owners use them to return a row per received id."""

    sent: list[int]  # number of ids sent to each rank
    received: list[int]  # number of ids received from each rank
    source: Tensor  # int64 `[N]`: position of each received value in the received messages, rank by rank
    positions: Tensor  # int32 `[M]`: position of each id, route by route, in the sent messages
    samples: int  # number of samples of all ranks
    inverse: Tensor | None  # int64 `[I]`: if deduplicated, the sent id of each id of the batch, route by route
    occurrences: Tensor | None  # int32 `[N]`: if deduplicated, of each received value, for dynamic tables


# Ids of all ranks' samples, in the order of ranks, with a key per route (see `route_key`); number of bags per rank
# and route: the rank's samples, or 1 if ids are deduplicated; routes of the returned rows, if rows are returned.
Received = tuple[KeyedJaggedTensor, list[int], RowRoutes | None]


def route_key(route: int) -> str:
    return str(route)


class _Sizes(NamedTuple):
    """Sizes of a message between two ranks."""

    bags: int  # per route
    ids: int  # in all routes
    weighted: int  # 1: the ids have weights; 0: they have none; -1: no ids
    failed: int  # whether the sending rank raised an error for its batch
    samples: int  # of the sending rank


class IdExchange:
    """Exchange of the ids of batches along routes. All ranks of the group create it with the same routes.

    Args:
        check_bounds: raise an error for an id out of range; otherwise the owner of its route's first block handles it.
        deduplicate: send the distinct ids of a route, without samples and weights.
        means: routes with mean pooling: weights are divided by the length of the bag.
        returns_rows: whether owners return rows, instead of pooled vectors.
        network: group of the same ranks that sends the ids to `device`. `group` sends the sizes, on the CPU.
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
        fits_int32 = all(route.max_rows < 2**31 - 1 for route in self.routes) and not self._dynamic
        self._id_dtype = torch.int32 if fits_int32 else torch.int64
        self._missing_row = 2**31 - 1 if fits_int32 else _STRIDE - 1
        self._tensors = functools.cache(torch.inference_mode(False)(self._make_tensors))

    def __call__(self, batch: KeyedJaggedTensor, error: ValueError | None = None) -> Received:
        """Exchange the ids of every rank's batch; `error` is the caller's error for this rank's batch.

        Raise the error, or ValueError for an id out of range; other ranks raise RuntimeError, which names this rank.
        """
        group, batch_size = self.group, batch.stride()
        # Ids by route: checked, and deduplicated.
        num_rows, first_rows, owners, owned, owner_ids, dynamic = self._tensors(batch.device())
        routed, inverse = self._weigh_means(self._by_route(batch)), None
        ids, route, bad_id = self._check(routed, batch, num_rows, dynamic)
        offsets, weights, error = routed.offsets(), routed.weights_or_none(), error or bad_id
        if error is not None:
            ids, route, offsets, weights = ids[:0], route[:0], torch.zeros_like(offsets), None
        if self.deduplicate:
            ids, route, offsets, inverse, weights = self._deduplicate(ids, route)
        bags = 1 if self.deduplicate else batch_size
        # Destinations: owner and local row in one number. An id of -1 gets a missing row of its route's first owner.
        row = ids
        if self._dynamic:
            row = torch.where(dynamic[route], partitions_of(ids, num_rows[route]), ids)
        global_row = route * _STRIDE + row.clamp(min=0)
        block = torch.bucketize(global_row, first_rows, right=True) - 1
        row = torch.where(row < 0, self._missing_row, global_row - first_rows[block])
        if self._dynamic:  # int64 ids do not fit beside the owner: carry their positions
            wide_ids, row = torch.where(dynamic[route], ids, row), torch.arange(len(ids), device=ids.device)
        destinations = owners[block] * _STRIDE + row
        ids, lengths, positions, weights = ops.block_bucketize(destinations, offsets, owner_ids, group.size, weights)
        ids = wide_ids[ids] if self._dynamic else ids
        # Exchange the sizes, and whether a rank has an error.
        weight_status = 1 if weights is not None else 0 if ids.numel() else -1
        local_sizes = _Sizes(bags, 0, weight_status, error is not None, batch_size)
        sizes = torch.tensor([local_sizes] * group.size, dtype=torch.int64, device=ids.device)
        sizes[:, 1] = lengths.reshape(group.size, -1).sum(1)
        widths = [len(_Sizes._fields)] * group.size
        message = group.all_to_all(sizes.flatten(), widths, widths, "sizes")().view_as(sizes)
        sent, received = ([_Sizes(*values) for values in rank_sizes.tolist()] for rank_sizes in (sizes, message))
        if error is not None:
            raise error
        if failed := [rank for rank, rank_sizes in enumerate(received) if rank_sizes.failed]:
            raise RuntimeError(f"rank {group.ranks[failed[0]]} rejected its batch; see the error on that rank")
        # Exchange lengths, ids and weights, packed to words.
        weighted, num_routes = self._is_weighted(received), [len(routes) for routes in self._owned]
        out_words = [sum(self._words(count, s, weighted)) for count, s in zip(num_routes, sent, strict=True)]
        in_words = [self._words(num_routes[group.rank], s, weighted) for s in received]
        route_lengths = lengths.reshape(group.size * len(self.routes), bags)[owned].to(torch.int32)
        ids_sent, ids_received = ([s.ids for s in rank_sizes] for rank_sizes in (sent, received))
        packed = self._pack(route_lengths, ids, weights, ids_sent).to(self._device, non_blocking=True)
        words = self._network.all_to_all(packed, out_words, [*map(sum, in_words)], "ids")()
        features, source = self._unpack(words.split([*chain(*in_words)]), received)
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
        values, offsets, weights = ops.jagged_permute(batch.values(), offsets, indices, len(keys), weights, total)
        return KeyedJaggedTensor(names, values, weights, offsets=offsets)

    def _weigh_means(self, routed: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if not self.means:
            return routed
        lengths, weights = routed.lengths().reshape(len(self.routes), -1), routed.weights_or_none()
        shares = torch.ones(lengths.shape, dtype=torch.float32, device=lengths.device)
        shares[self.means] = 1.0 / lengths[self.means].clamp(min=1)
        mean_weights = shares.flatten().repeat_interleave(routed.lengths(), output_size=routed.values().shape[0])
        weights = mean_weights if weights is None else mean_weights * weights
        return KeyedJaggedTensor(routed.keys(), routed.values(), weights, offsets=routed.offsets())

    def _check(
        self, routed: KeyedJaggedTensor, batch: KeyedJaggedTensor, num_rows: Tensor, dynamic: Tensor
    ) -> tuple[Tensor, Tensor, ValueError | None]:
        """Return every id, -1 if out of range, and its route; and the error if bounds are checked."""
        ids = routed.values().to(torch.int64)
        batch_size = routed.stride()
        edges = routed.offsets()[::batch_size] if batch_size else routed.offsets()[:1].expand(len(self.routes) + 1)
        route = torch.arange(len(self.routes), device=ids.device).repeat_interleave(edges.diff(), output_size=len(ids))
        in_range, error = (ids >= 0) & (ids < num_rows[route]) | dynamic[route], None
        if self.check_bounds and not bool(in_range.all()):
            error = find_invalid_id(batch, [r[:3] for r in self.routes if not r.dynamic])
        return torch.where(in_range, ids, -1), route, error

    def _deduplicate(self, ids: Tensor, route: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return the sorted distinct ids of each route, their routes, the offsets of routes, and the inverse.

        With dynamic tables also return occurrences, whose bits are sent as weights.
        """
        values = None
        if self._dynamic:  # int64 ids do not fit beside the route: use their ranks among all ids
            values, ids = torch.unique(ids, return_inverse=True)
        keys, inverse = torch.unique(route * _STRIDE + ids + 1, sorted=True, return_inverse=True)
        route, ids = keys // _STRIDE, keys % _STRIDE - 1
        offsets = ops.segment_offsets(route.bincount(minlength=len(self.routes)))
        if values is None:
            return ids, route, offsets, inverse, None
        return values[ids], route, offsets, inverse, inverse.bincount().to(torch.int32).view(torch.float32)

    def _is_weighted(self, sizes: Sequence[_Sizes]) -> bool:
        weighted = {s.weighted for s in sizes if s.weighted >= 0}
        if len(weighted) > 1:
            unweighted = [self.group.ranks[rank] for rank, s in enumerate(sizes) if s.weighted == 0]
            raise ValueError(f"ids have weights on some ranks only; ranks without weights: {unweighted}")
        return weighted == {1}

    def _words(self, num_routes: int, sizes: _Sizes, weighted: bool) -> list[int]:
        """Return the numbers of 4-byte words of lengths, ids and weights in a message."""
        return [num_routes * sizes.bags, sizes.ids * self._id_dtype.itemsize // 4, sizes.ids * weighted]

    def _pack(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, counts: list[int]) -> Tensor:
        """Pack lengths, ids and weights to int32 words, rank by rank."""
        id_words = self._id_dtype.itemsize // 4
        fields = [
            lengths.split([len(routes) for routes in self._owned]),
            ids.to(self._id_dtype).view(torch.int32).split([count * id_words for count in counts]),
        ]
        if weights is not None:
            fields.append(weights.to(torch.float32).view(torch.int32).split(counts))
        return torch.cat([field.flatten() for rank_fields in zip(*fields, strict=True) for field in rank_fields])

    def _unpack(self, words: tuple[Tensor, ...], received: Sequence[_Sizes]) -> tuple[KeyedJaggedTensor, Tensor]:
        """Unpack the received words to ids key by key, rank by rank; and return the position of each value."""
        owned, ids, weights = self._owned[self.group.rank], torch.cat(words[1::3]), torch.cat(words[2::3])
        lengths = [flat.reshape(len(owned), s.bags) for flat, s in zip(words[::3], received, strict=True)]
        source = key_major_order(lengths, sum(sizes.ids for sizes in received))
        value_weights = weights.view(torch.float32)[source] if self._is_weighted(received) else None
        names, bag_lengths = [route_key(route) for route in owned], torch.cat(lengths, dim=1).flatten()
        values = ids.view(self._id_dtype)[source]
        return KeyedJaggedTensor(names, values, value_weights, lengths=bag_lengths), source

    def _make_tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return rows by route, first rows and owners by block, routes by rank, `_STRIDE` and `dynamic` by route."""
        numbers = (
            [route.num_rows for route in self.routes],
            [i * _STRIDE + first_row for i, route in enumerate(self.routes) for first_row in route.first_rows],
            [owner for route in self.routes for owner in route.owners],
            [rank * len(self.routes) + route for rank, routes in enumerate(self._owned) for route in routes],
            [_STRIDE] * len(self.routes),
        )
        is_dynamic = torch.tensor([route.dynamic for route in self.routes], dtype=torch.bool, device=device)
        return *(torch.tensor(values, dtype=torch.int64, device=device) for values in numbers), is_dynamic
