"""Ids on their way to the ranks that own their rows.

A *lane* is what one feature asks of one table (of one block of its columns, where those are spread over ranks). Its
rows lie on one rank, or in blocks on several. A batch's ids travel in two messages: how much each rank will get from
each, 32 bytes, and then, as one message, the lengths of its bags, the ids as the owner counts its rows, and their
weights. So there is one wait for the sizes, whatever the number of tables.

Where an owner sends back a row for each id, an id that comes several times in a lane may be sent once.

Bytes: `4 · B` of lengths for each lane and owner, `4` an id (8 where an owner has 2³¹ rows or more), `4` a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.group import Group
from tritonemb.errors import id_out_of_range
from tritonemb.jagged import KeyedJaggedTensor, key_by_key
from tritonemb.ops.jagged import Bucketized

_OWNER = 1 << 40  # an id on its way is its owner times this, and its row there
_READY, _REFUSED = 0, 1
_SIZES = 5  # bags a lane, values, whether they have weights, whether the batch is good, samples


class Lane(NamedTuple):
    """What a feature asks of a table.

    Attributes:
        feature, table: their names.
        num_rows: of the table.
        block: rows of each owner; the last may have fewer.
        owners: ranks of the group, by block.
    """

    feature: str
    table: str
    num_rows: int
    block: int
    owners: tuple[int, ...]


class Arrived(NamedTuple):
    """The ids that ranks have sent to this one, and what it takes to send something back.

    Attributes:
        features: the ids of all ranks' samples, in the order of ranks. A key is the number of a lane, as `key_of` says.
        batch_sizes: bags in each of a rank's lanes: samples, or 1 if ids are sent once.
        source: int64 `[N]`: value `i` of `features` was at this place of the message, in which ranks come one after
            the other.
        sent: ids sent to each rank.
        received: ids received of each rank.
        places: int32 `[M]`: where in the messages sent each id that was sent was, lane by lane.
        samples: of all ranks.
        inverse: int64 `[I]`: if ids were sent once, which of these each id of the batch is, lane by lane; else None.
    """

    features: KeyedJaggedTensor
    batch_sizes: list[int]
    source: Tensor
    sent: list[int]
    received: list[int]
    places: Tensor
    samples: int
    inverse: Tensor | None


def key_of(lane: int) -> str:
    """A lane's name among the keys that arrive."""
    return str(lane)


class IdsExchange:
    """Sends the ids of batches along `lanes`; every rank of the group makes it with the same lanes.

    Args:
        check_bounds: raise for an id that its table does not have; else its owner finds it out of range.
        once: send an id that comes several times in a lane once; what samples the ids are of is not told then, nor
            their weights.
        means: lanes whose ids go with one over the length of their bag as a factor of their weights.
    """

    def __init__(
        self,
        group: Group,
        lanes: Sequence[Lane],
        check_bounds: bool = True,
        once: bool = False,
        means: Sequence[int] = (),
    ) -> None:
        self.group = group
        self.means = list(means)
        self.lanes = tuple(lanes)
        self.check_bounds, self.once = check_bounds, once
        # The lanes that each rank has rows of, rank by rank.
        self._owned = [[i for i, lane in enumerate(self.lanes) if rank in lane.owners] for rank in range(group.size)]
        narrow = all(lane.block < 2**31 - 1 for lane in self.lanes)
        self._id_dtype = torch.int32 if narrow else torch.int64
        self._nowhere = 2**31 - 1 if narrow else _OWNER - 1
        self._constants: dict[torch.device, _Constants] = {}

    @property
    def owned(self) -> list[int]:
        """The lanes that this rank has rows of."""
        return self._owned[self.group.rank]

    def __call__(self, batch: KeyedJaggedTensor, problem: ValueError | None = None) -> Arrived:
        """Exchange the ids of every rank's batch; a collective.

        Args:
            problem: what the caller has found wrong with this rank's batch.

        Raises:
            ValueError: for an id out of range, or the problem; the other ranks get a RuntimeError that names this one.
        """
        group, constants = self.group, self._on(batch.device())
        lanes, inverse = self._weigh(self._lane_by_lane(batch)), None
        ids = lane = lanes.values()[:0].to(torch.int64)
        if problem is None:
            try:
                ids, lane = self._checked(lanes, batch, constants)
            except ValueError as error:
                problem = error
        offsets = lanes.offsets() if problem is None else torch.zeros_like(lanes.offsets())
        weights = None if self.once or problem is not None else lanes.weights_or_none()
        if self.once:
            ids, lane, offsets, inverse = self._distinct(ids, lane)
        sorted_ids = ops.block_bucketize(
            self._addresses(ids, lane, constants), offsets, constants.blocks, group.size, weights
        )
        lengths, sizes = self._sizes(sorted_ids, weights is not None, problem is None, batch.stride(), constants)
        told = group.all_to_all(sizes.flatten(), [_SIZES] * group.size, [_SIZES] * group.size, "sizes")
        told_of, telling = told.reshape(-1, _SIZES).tolist(), sizes.tolist()
        if problem is not None:
            raise problem
        refusing = [rank for rank, size in enumerate(told_of) if size[3] != _READY]
        if refusing:
            raise RuntimeError(f"rank {group.ranks[refusing[0]]} has refused its batch; its own error says why")
        sent, received = [size[1] for size in telling], [size[1] for size in told_of]
        weighted = self._weighted(told_of)
        batch_sizes = [size[0] for size in told_of]
        out_words = [
            self._words(len(owned) * size[0], size[1], weighted)
            for owned, size in zip(self._owned, telling, strict=True)
        ]
        in_words = [self._words(len(self.owned) * size[0], size[1], weighted) for size in told_of]
        arrived = group.all_to_all(self._pack(sorted_ids, lengths, sent, weighted), out_words, in_words, "ids")
        features, source = self._unpack(arrived, batch_sizes, received, in_words, weighted)
        samples = sum(size[4] for size in told_of)
        return Arrived(features, batch_sizes, source, sent, received, sorted_ids.unbucketize, samples, inverse)

    def _lane_by_lane(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with the feature of each lane, in their order, as its keys."""
        keys = batch.keys()
        order = [keys.index(lane.feature) for lane in self.lanes]
        names = [key_of(lane) for lane in range(len(self.lanes))]
        if order == list(range(len(keys))):
            return KeyedJaggedTensor(names, batch.values(), batch.weights_or_none(), offsets=batch.offsets())
        batch_size, offsets = batch.stride(), batch.offsets()
        edges = offsets[::batch_size].tolist() if batch_size else [0] * (len(keys) + 1)
        total = sum(edges[key + 1] - edges[key] for key in order)
        place = torch.tensor(order, dtype=torch.int64, device=batch.device())
        moved = ops.jagged_permute(batch.values(), offsets, place, len(keys), batch.weights_or_none(), total)
        return KeyedJaggedTensor(names, moved.values, moved.weights, offsets=moved.offsets)

    def _weigh(self, lanes: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if not self.means:
            return lanes
        lengths, weights = lanes.lengths().reshape(len(self.lanes), -1), lanes.weights_or_none()
        shares = torch.ones(lengths.shape, dtype=torch.float32, device=lengths.device)
        shares[self.means] = 1.0 / lengths[self.means].clamp(min=1)
        own = shares.flatten().repeat_interleave(lanes.lengths(), output_size=lanes.values().shape[0])
        weights = own if weights is None else own * weights
        return KeyedJaggedTensor(lanes.keys(), lanes.values(), weights, offsets=lanes.offsets())

    def _checked(
        self, lanes: KeyedJaggedTensor, batch: KeyedJaggedTensor, constants: _Constants
    ) -> tuple[Tensor, Tensor]:
        """Every id and its lane; -1 for an id that its table does not have."""
        ids = lanes.values().to(torch.int64)
        batch_size = lanes.stride()
        edges = lanes.offsets()[::batch_size] if batch_size else lanes.offsets()[:1].expand(len(self.lanes) + 1)
        lane = torch.repeat_interleave(
            torch.arange(len(self.lanes), device=ids.device), torch.diff(edges), output_size=ids.shape[0]
        )
        inside = (ids >= 0) & (ids < constants.num_rows[lane])
        if self.check_bounds and not bool(inside.all()):
            first = int((~inside).nonzero()[0])
            self._refuse(first, int(lane[first]), lanes, batch)
        return torch.where(inside, ids, -1), lane

    def _distinct(self, ids: Tensor, lane: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The distinct ids of each lane, ascending, their lanes, where each lane begins, and which each id is."""
        found, inverse = torch.unique(lane * _OWNER + ids + 1, sorted=True, return_inverse=True)
        lane = found // _OWNER
        counts = torch.bincount(lane, minlength=len(self.lanes))
        return found % _OWNER - 1, lane, ops.segment_offsets(counts), inverse

    def _addresses(self, ids: Tensor, lane: Tensor, constants: _Constants) -> Tensor:
        """Each id's owner and its row there, in one number; an id of -1 is a row that its lane's first owner lacks."""
        block = constants.rows[lane]
        number = torch.where(ids < 0, 0, ids // block)
        row = torch.where(ids < 0, self._nowhere, ids - number * block)
        return constants.owners[lane, number] * _OWNER + row

    def _refuse(self, place: int, lane: int, lanes: KeyedJaggedTensor, batch: KeyedJaggedTensor) -> None:
        """Raise for the id at a place, lane by lane; its position is told as the batch has it."""
        bag = int(torch.searchsorted(lanes.offsets(), place, right=True)) - 1
        sample, of = bag % batch.stride(), self.lanes[lane]
        first = batch.offsets()[batch.keys().index(of.feature) * batch.stride() + sample]
        position = int(first + place - lanes.offsets()[bag])
        raise id_out_of_range(of.table, of.feature, sample, position, int(lanes.values()[place]), of.num_rows)

    def _sizes(
        self, ids: Bucketized, weighted: bool, good: bool, samples: int, constants: _Constants
    ) -> tuple[Tensor, Tensor]:
        """Lengths of the bags of each rank's lanes, rank by rank, and what each rank is told of the message to it."""
        world, bags = self.group.size, 1 if self.once else samples
        lengths = ids.lengths.reshape(world * len(self.lanes), bags)
        sizes = torch.empty(world, _SIZES, dtype=torch.int64, device=lengths.device)
        sizes[:, 0] = bags
        sizes[:, 1] = lengths.reshape(world, -1).sum(1)
        sizes[:, 2] = 1 if weighted else 0 if ids.values.shape[0] else -1
        sizes[:, 3] = _READY if good else _REFUSED
        sizes[:, 4] = samples
        return lengths[constants.owned].to(torch.int32), sizes

    def _weighted(self, sizes: Sequence[Sequence[int]]) -> bool:
        """Whether the ranks' ids have weights: -1 says that a rank has neither ids nor weights to tell by."""
        said = {size[2] for size in sizes if size[2] >= 0}
        if len(said) > 1:
            without = [self.group.ranks[rank] for rank, size in enumerate(sizes) if size[2] == 0]
            raise ValueError(f"ids have weights on some ranks only; those without are {without}")
        return said == {1}

    def _words(self, num_lengths: int, num_ids: int, weighted: bool) -> int:
        """4-byte words of a message."""
        wide = self._id_dtype == torch.int64
        return num_lengths + num_ids * (2 if wide else 1) + num_ids * weighted

    def _pack(self, ids: Bucketized, lengths: Tensor, sent: Sequence[int], weighted: bool) -> Tensor:
        """Lengths, ids and weights for each rank, one rank after the other, as int32 words."""
        narrow = ids.values.to(self._id_dtype).view(torch.int32)
        weights = None
        if weighted:
            weights = torch.zeros(0) if ids.weights is None else ids.weights.to(torch.float32)
            weights = weights.to(narrow.device).view(torch.int32)
        wide, pieces, lane, first = narrow.shape[0] // max(1, ids.values.shape[0]), [], 0, 0
        for owned, number in zip(self._owned, sent, strict=True):
            pieces += [lengths[lane : lane + len(owned)].flatten(), narrow[first * wide : (first + number) * wide]]
            if weights is not None:
                pieces.append(weights[first : first + number])
            lane, first = lane + len(owned), first + number
        return torch.cat(pieces)

    def _unpack(
        self, words: Tensor, batch_sizes: list[int], received: list[int], in_words: list[int], weighted: bool
    ) -> tuple[KeyedJaggedTensor, Tensor]:
        """What has arrived, rank by rank, key by key; and where each value was."""
        wide = 2 if self._id_dtype == torch.int64 else 1
        lengths, ids, weights = [], [], []
        for part, batch_size, number in zip(words.split(in_words), batch_sizes, received, strict=True):
            of_lengths, of_ids, of_weights = part.split(
                [
                    len(self.owned) * batch_size,
                    number * wide,
                    part.shape[0] - len(self.owned) * batch_size - number * wide,
                ]
            )
            lengths.append(of_lengths.reshape(len(self.owned), batch_size))
            ids.append(of_ids)
            weights.append(of_weights)
        total = sum(received)
        source = key_by_key(lengths, total)
        values = torch.cat(ids).view(self._id_dtype)[source]
        keys = [key_of(lane) for lane in self.owned]
        per_bag = torch.cat(lengths, dim=1).flatten()
        of_values = torch.cat(weights).view(torch.float32)[source] if weighted else None
        return KeyedJaggedTensor(keys, values, of_values, lengths=per_bag), source

    def _on(self, device: torch.device) -> _Constants:
        """What the lanes say, as tensors."""
        found = self._constants.get(device)
        if found is None:
            with torch.inference_mode(False):
                found = _Constants.of(self.lanes, self._owned, device)
            self._constants[device] = found
        return found


class _Constants(NamedTuple):
    """The lanes as tensors: `[V]`; `owners` `[V, most blocks]`; `owned`, ranks and lanes as pairs, flat."""

    num_rows: Tensor
    rows: Tensor
    owners: Tensor
    owned: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, lanes: Sequence[Lane], owned: Sequence[Sequence[int]], device: torch.device) -> _Constants:
        most = max([1, *[len(lane.owners) for lane in lanes]])
        owners = [[*lane.owners, *[0] * (most - len(lane.owners))] for lane in lanes]
        pairs = [rank * len(lanes) + lane for rank, mine in enumerate(owned) for lane in mine]
        return cls(
            torch.tensor([lane.num_rows for lane in lanes], dtype=torch.int64, device=device),
            torch.tensor([lane.block for lane in lanes], dtype=torch.int64, device=device),
            torch.tensor(owners, dtype=torch.int64, device=device).reshape(len(lanes), most),
            torch.tensor(pairs, dtype=torch.int64, device=device),
            torch.full((len(lanes),), _OWNER, dtype=torch.int64, device=device),
        )
