"""The input distribution: the ids of a batch go to the ranks that own their rows.

A *route* is what one feature looks up in one table (in one block of its columns, where ranks share those). Its rows
are on one rank, or in blocks on several. A batch's ids travel in two messages: how much each rank will get from
each, 40 bytes, and then, as one message, the lengths of its bags, the ids as the owner counts its rows, and their
weights. So there is one wait for the sizes, whatever the number of tables.

Where an owner sends back a row for each id, an id that comes several times in a route may be sent once.

Bytes: `4 · B` of lengths for each route and owner, `4` an id (8 where an owner has 2³¹ rows or more), `4` a weight,
or what a deduplicated id of dynamic tables has instead: how often it occurs.
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

_OWNER = 1 << 40  # an id is sent as its owner times this, plus its row there


class IdRoute(NamedTuple):
    """Where the ids of a feature go that look up a table."""

    feature: str
    table: str
    num_rows: int  # of the table
    first_rows: tuple[int, ...]  # of each owner, ascending
    owners: tuple[int, ...]  # ranks of the group, by block
    dynamic: bool = False  # any int64 is an id; rows are partitions

    @property
    def most_rows(self) -> int:
        """Of an owner."""
        return max(stop - first for first, stop in pairwise((*self.first_rows, self.num_rows)))


class RowRoutes(NamedTuple):
    """How the ranks with the rows send back one for each id that they have received."""

    sent: list[int]  # number of ids sent to each rank
    received: list[int]  # number of ids received from each rank
    source: Tensor  # int64 `[N]`: the position of each value received in the messages, rank by rank
    positions: Tensor  # int32 `[M]`: the position of each id, route by route, in the messages sent
    samples: int  # of all ranks
    inverse: Tensor | None  # int64 `[I]`: if deduplicated, which id sent each id of the batch is, route by route
    occurrences: Tensor | None  # int32 `[N]`: if deduplicated, of each value received, where dynamic tables count them


# The ids of all ranks' samples, in the order of ranks, whose keys are those of routes (see `route_key`); how many bags
# of each route are a rank's: its samples, or 1 if ids are deduplicated; and how rows go back, if they do.
Received = tuple[KeyedJaggedTensor, list[int], RowRoutes | None]


def route_key(route: int) -> str:
    """The key of a route's ids where they are received."""
    return str(route)


class _Sizes(NamedTuple):
    """What a rank must know of the message to it."""

    bags: int  # in each route
    ids: int  # in all of them
    weighted: int  # 1 if the ids have weights, 0 if not, -1 if there are no ids to tell by
    refused: int  # whether the sending rank has refused its batch
    samples: int  # of the sending rank


class IdExchange:
    """Sends the ids of batches along their routes; every rank of the group makes it with the same routes.

    Args:
        check_bounds: raise for an id that its table does not have; else its owner finds it out of range.
        deduplicate: send an id that comes several times in a route once, without its samples and weights.
        means: routes whose ids' weights are multiplied with one over the length of their bag.
        returns_rows: whether rows go back, instead of pooled vectors.
        network: the same ranks, for ids, which arrive on `device`. The host waits for sizes, by `group`, on the CPU.
    """

    def __init__(
        self, group: RankGroup, routes: Sequence[IdRoute], check_bounds: bool = True, deduplicate: bool = False,
        means: Sequence[int] = (), returns_rows: bool = False, network: RankGroup | None = None,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self._network, self._device = network or group, device
        self.group, self.routes, self.means = group, tuple(routes), list(means)
        self.check_bounds, self.deduplicate, self.returns_rows = check_bounds, deduplicate, returns_rows
        # The routes that each rank has rows of, rank by rank.
        self._owned = [[i for i, route in enumerate(self.routes) if rank in route.owners] for rank in range(group.size)]
        self._dynamic = any(route.dynamic for route in self.routes)
        narrow = all(route.most_rows < 2**31 - 1 for route in self.routes) and not self._dynamic
        self._id_dtype = torch.int32 if narrow else torch.int64
        self._nowhere = 2**31 - 1 if narrow else _OWNER - 1
        self._tensors = PerDevice(self._make_tensors)

    def __call__(self, batch: KeyedJaggedTensor, problem: ValueError | None = None) -> Received:
        """Exchange the ids of every rank's batch; `problem` is what the caller has found wrong with this rank's.

        ValueError for an id out of range, or the problem; the other ranks get a RuntimeError that names this one.
        """
        group = self.group
        num_rows, firsts, owners, owned, owner_ids, dynamic = self._tensors(batch.device())
        by_route, inverse = self._weigh_means(self._by_route(batch)), None
        ids, route, bad_id = self._check(by_route, batch, num_rows, dynamic)
        offsets, weights, problem = by_route.offsets(), by_route.weights_or_none(), problem or bad_id
        if problem is not None:
            ids, route, offsets, weights = ids[:0], route[:0], torch.zeros_like(offsets), None
        if self.deduplicate:
            ids, route, offsets, inverse, weights = self._distinct(ids, route)
        bags = 1 if self.deduplicate else batch.stride()
        # Each id's owner and its row there, in one number; an id of -1 is a row that its route's first owner lacks.
        row = ids
        if self._dynamic:
            row = torch.where(dynamic[route], partitions_of(ids, num_rows[route]), ids)
        number = route * _OWNER + row.clamp(min=0)
        block = torch.bucketize(number, firsts, right=True) - 1
        row = torch.where(row < 0, self._nowhere, number - firsts[block])
        if self._dynamic:  # whose ids are too large for that: their positions are sent along
            wide, row = torch.where(dynamic[route], ids, row), torch.arange(len(ids))
        destinations = owners[block] * _OWNER + row
        ids, lengths, positions, weights = ops.block_bucketize(destinations, offsets, owner_ids, group.size, weights)
        ids = wide[ids] if self._dynamic else ids
        tells_weights = 1 if weights is not None else 0 if ids.numel() else -1
        to_each = _Sizes(bags, 0, tells_weights, problem is not None, batch.stride())
        sizes = torch.tensor([to_each] * group.size, dtype=torch.int64, device=ids.device)
        sizes[:, 1] = lengths.reshape(group.size, -1).sum(1)
        widths = [len(_Sizes._fields)] * group.size
        message = group.all_to_all(sizes.flatten(), widths, widths, "sizes").view_as(sizes)
        sent, received = ([_Sizes(*each) for each in of_ranks.tolist()] for of_ranks in (sizes, message))
        if problem is not None:
            raise problem
        if refused := [rank for rank, each in enumerate(received) if each.refused]:
            raise RuntimeError(f"rank {group.ranks[refused[0]]} has refused its batch; its own error says why")
        weighted = self._is_weighted(received)
        out_words = [self._words(len(mine), each, weighted) for mine, each in zip(self._owned, sent, strict=True)]
        in_words = [self._words(len(self._owned[group.rank]), each, weighted) for each in received]
        of_routes = lengths.reshape(group.size * len(self.routes), bags)[owned].to(torch.int32)
        ids_sent, ids_received = ([each.ids for each in of_ranks] for of_ranks in (sent, received))
        packed = self._pack(of_routes, ids, weights, ids_sent).to(self._device, non_blocking=True)
        words = self._network.all_to_all(packed, out_words, in_words, "ids")
        features, source = self._unpack(words, received, in_words, weighted)
        batch_sizes, samples = [each.bags for each in received], sum(each.samples for each in received)
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
        own = shares.flatten().repeat_interleave(by_route.lengths(), output_size=by_route.values().shape[0])
        weights = own if weights is None else own * weights
        return KeyedJaggedTensor(by_route.keys(), by_route.values(), weights, offsets=by_route.offsets())

    def _check(
        self, by_route: KeyedJaggedTensor, batch: KeyedJaggedTensor, num_rows: Tensor, dynamic: Tensor
    ) -> tuple[Tensor, Tensor, ValueError | None]:
        """Every id and its route; -1 for an id that its table does not have, and what is wrong if that is checked."""
        ids = by_route.values().to(torch.int64)
        batch_size = by_route.stride()
        edges = by_route.offsets()[::batch_size] if batch_size else by_route.offsets()[:1].expand(len(self.routes) + 1)
        route = torch.arange(len(self.routes), device=ids.device).repeat_interleave(edges.diff(), output_size=len(ids))
        inside, problem = (ids >= 0) & (ids < num_rows[route]) | dynamic[route], None
        if self.check_bounds and not bool(inside.all()):
            problem = find_invalid_id(batch, [each[:3] for each in self.routes if not each.dynamic])
        return torch.where(inside, ids, -1), route, problem

    def _distinct(self, ids: Tensor, route: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The distinct ids of each route, ascending, their routes, where each route begins, and the inverse.

        With dynamic tables occurrences too, whose bits are sent as weights.
        """
        values = None
        if self._dynamic:  # ids are too large for that: their numbers are not
            values, ids = torch.unique(ids, return_inverse=True)
        found, inverse = torch.unique(route * _OWNER + ids + 1, sorted=True, return_inverse=True)
        route, ids = found // _OWNER, found % _OWNER - 1
        offsets = ops.segment_offsets(route.bincount(minlength=len(self.routes)))
        if values is None:
            return ids, route, offsets, inverse, None
        return values[ids], route, offsets, inverse, inverse.bincount().to(torch.int32).view(torch.float32)

    def _is_weighted(self, sizes: Sequence[_Sizes]) -> bool:
        found = {each.weighted for each in sizes if each.weighted >= 0}
        if len(found) > 1:
            without = [self.group.ranks[rank] for rank, each in enumerate(sizes) if each.weighted == 0]
            raise ValueError(f"ids have weights on some ranks only; those without are {without}")
        return found == {1}

    def _words(self, num_routes: int, sizes: _Sizes, weighted: bool) -> int:
        """4-byte words of a message."""
        return num_routes * sizes.bags + sizes.ids * (self._id_dtype.itemsize // 4 + weighted)

    def _pack(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, counts: list[int]) -> Tensor:
        """Lengths, ids and weights for each rank, one rank after the other, as int32 words."""
        wide = self._id_dtype.itemsize // 4
        fields = [
            lengths.split([len(mine) for mine in self._owned]),
            ids.to(self._id_dtype).view(torch.int32).split([count * wide for count in counts]),
        ]
        if weights is not None:
            fields.append(weights.to(torch.float32).view(torch.int32).split(counts))
        return torch.cat([piece.flatten() for of_rank in zip(*fields, strict=True) for piece in of_rank])

    def _unpack(
        self, words: Tensor, received: Sequence[_Sizes], in_words: list[int], weighted: bool
    ) -> tuple[KeyedJaggedTensor, Tensor]:
        """What was received, rank by rank, key by key; and where each value was."""
        wide, owned = self._id_dtype.itemsize // 4, self._owned[self.group.rank]
        fields = [[len(owned) * sizes.bags, sizes.ids * wide, sizes.ids * weighted] for sizes in received]
        parts = [part.split(of_rank) for part, of_rank in zip(words.split(in_words), fields, strict=True)]
        flat, ids, weights = zip(*parts, strict=True)
        lengths = [each.reshape(len(owned), sizes.bags) for each, sizes in zip(flat, received, strict=True)]
        source = key_major_order(lengths, sum(sizes.ids for sizes in received))
        values = torch.cat(ids).view(self._id_dtype)[source]
        per_bag = torch.cat(lengths, dim=1).flatten()
        of_values = torch.cat(weights).view(torch.float32)[source] if weighted else None
        return KeyedJaggedTensor([route_key(route) for route in owned], values, of_values, lengths=per_bag), source

    def _make_tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Rows of each route, first rows and owners of blocks, routes of each rank, what numbers owners, dynamic."""
        found = (
            [route.num_rows for route in self.routes],
            [number * _OWNER + first for number, route in enumerate(self.routes) for first in route.first_rows],
            [owner for route in self.routes for owner in route.owners],
            [rank * len(self.routes) + route for rank, mine in enumerate(self._owned) for route in mine],
            [_OWNER] * len(self.routes),
        )
        is_dynamic = torch.tensor([route.dynamic for route in self.routes], dtype=torch.bool, device=device)
        return *(torch.tensor(values, dtype=torch.int64, device=device) for values in found), is_dynamic
