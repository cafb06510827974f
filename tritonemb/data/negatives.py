"""Negative items of retrieval: sampled uniformly, by frequency, or both beside the items of a batch."""

import numpy as np
import torch
from torch import Tensor

from tritonemb.data.batch import Array


class NegativeSampler:
    """Sampler of negative items, with replacement, with the exact probability of each item.

    An item has the probability `count^power / sum of count^power`: with power 0 all items are alike, with 1 they occur
    as in the batches, and 0.75 is usual between (Mikolov et al., NeurIPS 2013). Samples depend only on seed, step and
    stream (counter-based: Philox4x64-10, Salmon et al., SC 2011), in any process and with any number of workers.

    Args:
        items: number of items, with the ids 0 to `items - 1`, or their distinct ids, int64 `[M]`.
        counts: uses of each item in the training rows, at least 0, `[M]`; needed unless `power` is 0. Counts of a
            dynamic table are those of all its lookups, so they include sampled items that it has looked up.
        power: exponent of the counts, at least 0.
        seed: key of the samples.
    """

    def __init__(self, items: int | Tensor, counts: Tensor | None = None, *, power: float = 0.0, seed: int = 0) -> None:
        is_number = not isinstance(items, Tensor) or items.dim() == 0
        ids = torch.arange(max(int(items), 0)) if is_number else torch.as_tensor(items).cpu()
        self._ids, order = (tensor.numpy() for tensor in ids.sort())
        if not len(self._ids) or (self._ids[1:] == self._ids[:-1]).any() or ids.is_floating_point():
            raise ValueError("items must be a number of at least 1, or ids that are distinct integers")
        if not 0 <= power < np.inf:
            raise ValueError(f"power must be a finite number of 0 or more, got {power}")
        if (counts is None and power != 0) or (counts is not None and len(counts) != len(ids)):
            text = "None" if counts is None else f"{len(counts)} for {len(ids)} items"
            raise ValueError(f"power={power} needs the counts of all items, got {text}")
        weights = np.ones(len(ids)) if counts is None else counts.cpu().numpy().astype(np.float64)[order]
        if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
            raise ValueError("counts must be at least 0, and one of them above 0")
        self._seed, self._power, self._shares = seed, power, weights / weights.sum()
        with np.errstate(over="ignore"):
            weights = weights**power if power else np.ones(len(ids))
        if not np.isfinite(weights.sum()):
            raise ValueError(f"counts to the power of {power} are too large; lower the power")
        self._probabilities, cumulative = weights / weights.sum(), weights.cumsum()
        self._limits = cumulative / cumulative[-1]  # the last is 1, above every random number

    def sample(self, shape: int | tuple[int, ...], step: int, stream: int = 0) -> Tensor:
        """Return item ids int64 of this shape, those of a step; with several ranks, `stream` may be the rank."""
        shape = (shape,) if isinstance(shape, int) else shape
        counter = np.array([0, 0, stream, step], dtype=np.uint64)  # of 256 bits: 2^128 numbers per step and stream
        words = np.random.Philox(key=self._seed, counter=counter).random_raw(int(np.prod(shape)))
        numbers = (words >> np.uint64(11)) * 2.0**-53
        if self._power == 0:
            positions = (numbers * len(self._ids)).astype(np.int64)
        else:
            positions = self._limits.searchsorted(numbers, side="right")
        return torch.from_numpy(self._ids[positions].reshape(shape))

    def log_q(self, ids: Tensor, *, batch_size: int = 0, num_negatives: int = 1) -> Tensor:
        """Return the log probability float32 of ids of any shape, for the logQ correction of a softmax.

        Mixed negatives are the positives of a batch and samples: with their numbers `batch_size` and `num_negatives`
        an item's probability is the mean of its share of all counts and that of a sample, weighted by these numbers
        (Yang et al., WWW 2020). `num_negatives=0` is for negatives of the batch alone.

        Raises:
            ValueError: an id is not that of an item, or the item's probability is 0.
        """
        if min(batch_size, num_negatives) < 0 or not batch_size + num_negatives:
            text = f"got batch_size={batch_size}, num_negatives={num_negatives}"
            raise ValueError(f"a softmax needs negatives: numbers of at least 0, and one above 0, {text}")
        values = ids.cpu().numpy()
        positions = self._ids.searchsorted(values).clip(max=len(self._ids) - 1)
        sum_q = batch_size * self._shares[positions] + num_negatives * self._probabilities[positions]
        if (bad := (self._ids[positions] != values) | (sum_q == 0)).any():
            raise ValueError(f"item {values[bad].flat[0]} is never sampled: it is unknown, or its count is 0")
        result: Array = np.log(sum_q / (batch_size + num_negatives))
        return torch.from_numpy(result.astype(np.float32)).to(ids.device)
