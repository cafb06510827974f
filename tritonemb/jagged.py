"""`KeyedJaggedTensor`: the ids of a batch, any number per sample and feature, in one flat tensor.

Values are feature-major: all samples of key 0, then all of key 1, and so on. Bag `k * B + b` holds the values of key
`k` and sample `b`; it starts at `offsets[bag]`.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

OFFSET_DTYPES = (torch.int32, torch.int64)


class KeyedJaggedTensor:
    """Jagged values of several keys over one batch of `B` samples.

    A pytree node, so it works with `torch.compile` and `torch.export`. Method names are TorchRec's, whose
    `KeyedJaggedTensor` is accepted wherever this one is.

    Args:
        keys: `F` distinct feature names.
        values: `[N]` ids (int32 or int64), or `[N, D]` rows as `EmbeddingCollection` returns them.
        weights: `[N]` floating point, one per value, or None.
        lengths: `[F * B]` or `[F, B]` int32 or int64, values per bag.
        offsets: `[F * B + 1]` int32 or int64, ascending from 0 to `N`. Pass lengths or offsets. If both are passed,
            offsets are used; lengths must agree with them, which is checked on the CPU only, and not under tracing.

    Raises:
        TypeError, ValueError: for shapes and dtypes, always; for contents (negative lengths, descending offsets, a
            total other than `N`) immediately on the CPU, else when a kernel reads them.
    """

    is_checked = False  # whether offsets ascend from 0 to the number of values

    def __init__(
        self, keys: Sequence[str], values: Tensor, weights: Tensor | None = None, lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:  # fmt: skip
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise TypeError(f"keys must be a list of feature names, got {keys!r}")
        self._keys, self._values, self._weights = tuple(keys), values, weights
        lengths = lengths.reshape(-1) if isinstance(lengths, Tensor) and lengths.dim() == 2 else lengths
        _check_shapes(self, lengths, offsets)
        self.is_checked = not torch.compiler.is_compiling() and is_host_readable(
            lengths if offsets is None else offsets
        )
        if self.is_checked:
            _check_contents(self, lengths, offsets)
        # Computed eagerly: a lazily computed attribute would change the batch, and so recompile, at its first use.
        self._lengths = lengths if offsets is None else None
        ends: Any = torch.cumsum(lengths, 0, dtype=lengths.dtype) if offsets is None else offsets  # type: ignore
        self._offsets = torch.cat([ends.new_zeros(1), ends]) if offsets is None else offsets

    @classmethod
    def unchecked(
        cls, keys: Sequence[str], values: Tensor, weights: Tensor | None, offsets: Tensor
    ) -> "KeyedJaggedTensor":
        """Construct without checks, for consistent components or those that a kernel will check."""
        return _unflatten([values, weights, None, offsets], tuple(keys))

    @classmethod
    def from_lengths(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """Construct from `lengths` `[F * B]` or `[F, B]`, values per bag."""
        return cls(keys, values, weights, lengths=lengths)

    @classmethod
    def from_offsets(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """Construct from `offsets` `[F * B + 1]`, the start of each bag and the end of the last."""
        return cls(keys, values, weights, offsets=offsets)

    @classmethod
    def from_lists(
        cls, lists: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None, dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> "KeyedJaggedTensor":  # fmt: skip
        """Construct from Python lists: `{"genre": [[1, 4], [], [7]]}` has one list of ids per sample, for each key.

        TypeError or ValueError names the key, and the sample if sizes differ.
        """
        _check_lists(lists, weights)
        limit = _limit_of(dtype)
        values = [_integer(key, id, limit) for key, samples in lists.items() for sample in samples for id in sample]
        flat_weights = [w for key in lists for sample in weights[key] for w in sample] if weights is not None else None
        lengths = [len(sample) for samples in lists.values() for sample in samples]
        ids, sizes = (torch.tensor(numbers, dtype=dtype, device=device) for numbers in (values, lengths))
        floats = None if flat_weights is None else torch.tensor(flat_weights, dtype=torch.float32, device=device)
        return cls(tuple(lists), ids, floats, lengths=sizes)

    @staticmethod
    def concat(batches: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Join batches of the same samples with different keys.

        ValueError for an empty list, for different batch sizes, for weights that only some batches have.
        """
        batches = _checked_batches("concat", batches)
        batch_sizes = [batch.stride() for batch in batches]
        if len(set(batch_sizes)) > 1:
            raise ValueError(f"concat needs batches of one size, got {batch_sizes}")
        keys = [key for batch in batches for key in batch._keys]
        values, weights = torch.cat([batch.values() for batch in batches]), _joined_weights(batches)
        return KeyedJaggedTensor(keys, values, weights, lengths=torch.cat([batch.lengths() for batch in batches]))

    @staticmethod
    def stack(batches: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Join batches of different samples with the same keys, in order, without a device-to-host copy.

        ValueError for an empty list, for different keys, for weights that only some batches have.
        """
        batches = _checked_batches("stack", batches)
        keys = batches[0].keys()
        for batch in batches:
            if batch.keys() != keys:
                raise ValueError(f"stack needs batches with the same keys in one order, got {keys} and {batch.keys()}")
        lengths = [batch.lengths().reshape(len(keys), -1 if keys else 0) for batch in batches]
        values = torch.cat([batch.values() for batch in batches])
        source = key_major_order(lengths, values.shape[0])
        weights = _joined_weights(batches)
        weights = None if weights is None else weights[source]
        return KeyedJaggedTensor(keys, values[source], weights, lengths=torch.cat(lengths, dim=1).flatten())

    def keys(self) -> list[str]:
        return list(self._keys)

    def values(self) -> Tensor:
        return self._values

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def weights(self) -> Tensor:
        """`[N]`; raises ValueError for a batch without weights."""
        if self._weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights; pass weights= to its constructor")
        return self._weights

    def lengths(self) -> Tensor:
        """Values per bag, `[F * B]`."""
        return torch.diff(self._offsets) if self._lengths is None else self._lengths

    def offsets(self) -> Tensor:
        """Start of each bag, and the end of the last, `[F * B + 1]`."""
        return self._offsets

    def lengths_or_none(self) -> Tensor | None:
        return self._lengths

    offsets_or_none = offsets

    def stride(self) -> int:
        """Batch size."""
        return (self._offsets.numel() - 1) // len(self._keys) if self._keys else 0

    def device(self) -> torch.device:
        return self._values.device

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """Split the keys into consecutive groups of these sizes. Reads the offsets on the host.

        ValueError for sizes that are negative or do not sum to the number of keys.
        """
        if sum(segments) != len(self._keys) or any(size < 0 for size in segments):
            raise ValueError(f"segments {list(segments)} must add up to the {len(self._keys)} keys")
        return [_key_range(self, end - size, end) for size, end in zip(segments, accumulate(segments), strict=True)]

    def permute(self, indices: Sequence[int]) -> "KeyedJaggedTensor":
        """Select the keys at `indices`, in that order; keys may be omitted. Reads the offsets on the host.

        ValueError for an index out of range or repeated.
        """
        for index in indices:
            if not 0 <= index < len(self._keys):
                raise ValueError(f"permute: index {index} is not in [0, {len(self._keys)})")
        if len(set(indices)) != len(indices):
            raise ValueError(f"permute: an index is repeated in {list(indices)}")
        batches = [_key_range(self, index, index + 1) for index in indices]
        return KeyedJaggedTensor.concat(batches) if batches else _key_range(self, 0, 0)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedJaggedTensor":
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "KeyedJaggedTensor":
        return self._map(lambda t: t.pin_memory())

    def __getitem__(self, key: str) -> "KeyedJaggedTensor":
        """Select one key; raise KeyError if it is unknown."""
        if key not in self._keys:
            raise KeyError(f"no key {key!r} among {self.keys()}")
        index = self._keys.index(key)
        return _key_range(self, index, index + 1)

    def to_lists(self) -> dict[str, list[list[Any]]]:
        """Convert to Python lists, the inverse of `from_lists`, without weights."""
        values, offsets, batch_size = self._values.tolist(), self.offsets().tolist(), self.stride()
        return {
            key: [values[offsets[k * batch_size + b] : offsets[k * batch_size + b + 1]] for b in range(batch_size)]
            for k, key in enumerate(self._keys)
        }

    def __repr__(self) -> str:
        return (
            f"KeyedJaggedTensor(keys={self.keys()}, batch_size={self.stride()}, values={tuple(self._values.shape)} "
            f"{self._values.dtype}, weighted={self._weights is not None}, device={self._values.device})"
        )

    def _map(self, function: Any) -> "KeyedJaggedTensor":
        children, context = _flatten(self)
        return _unflatten([None if child is None else function(child) for child in children], context)


def _key_range(batch: KeyedJaggedTensor, first: int, last: int) -> KeyedJaggedTensor:
    batch_size = batch.stride() if first < last else 0  # without keys, offsets are [0]
    bag_offsets, weights = batch._offsets[first * batch_size : last * batch_size + 1], batch._weights
    begin, end = int(bag_offsets[0]), int(bag_offsets[-1])
    weights = None if weights is None else weights[begin:end]
    return KeyedJaggedTensor(batch._keys[first:last], batch._values[begin:end], weights, offsets=bag_offsets - begin)


def _check_shapes(batch: KeyedJaggedTensor, lengths: Tensor | None, offsets: Tensor | None) -> None:
    keys, values, weights = batch._keys, batch._values, batch._weights
    if any(not isinstance(key, str) for key in keys):
        raise TypeError(f"keys must be str, got {list(keys)}")
    if len(set(keys)) != len(keys):
        raise ValueError(f"duplicate key in {list(keys)}")
    if lengths is None and offsets is None:
        raise ValueError("pass lengths or offsets")
    tensors = {"values": values, "weights": weights, "lengths": lengths, "offsets": offsets}
    for title, value in tensors.items():
        dense = isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0
        if not dense and (value is not None or title == "values"):
            raise TypeError(
                f"{title} must be a dense tensor of at least one dimension, got "
                f"{getattr(value, 'layout', type(value).__name__)}; make one with torch.tensor(..) or .to_dense(), "
                "or a batch of Python lists with KeyedJaggedTensor.from_lists"
            )
    for title, tensor, extra in (("lengths", lengths, 0), ("offsets", offsets, 1)):
        if tensor is None:
            continue
        if tensor.dtype not in OFFSET_DTYPES:
            raise TypeError(f"{title} must be int32 or int64, got {tensor.dtype}")
        if tensor.dim() != 1:
            raise ValueError(f"{title} must be 1-D, got shape {tuple(tensor.shape)}")
        if keys and (tensor.numel() - extra) % len(keys):
            raise ValueError(
                f"{title} has {tensor.numel()} elements; for {len(keys)} keys, "
                f"expected a multiple of {len(keys)}" + (" plus 1" if extra else "")
            )
    if offsets is not None and offsets.numel() == 0:
        raise ValueError("offsets must have at least one element, a leading 0")
    if lengths is not None and offsets is not None and lengths.numel() != (bags := offsets.numel() - 1):
        raise ValueError(f"{bags + 1} offsets need {bags} lengths, got {lengths.numel()}; pass only one of them")
    if weights is not None:
        if weights.shape != values.shape[:1]:
            raise ValueError(
                f"weights must have one element per value: expected shape {tuple(values.shape[:1])}, "
                f"got {tuple(weights.shape)}"
            )
        if not weights.is_floating_point():
            raise TypeError(f"weights must be floating point, got {weights.dtype}")


def _check_contents(batch: KeyedJaggedTensor, lengths: Any, offsets: Any) -> None:
    # NumPy, because PyTorch starts its thread pool for this, which takes longer.
    total, source = (lengths.sum(), "lengths sum to") if offsets is None else (offsets[-1], "offsets end at")
    if offsets is not None and int(offsets[0]) != 0:
        raise ValueError(f"offsets must start with 0, got {int(offsets[0])}")
    ends = None if offsets is None else offsets.numpy()
    negative = lengths.numpy() < 0 if ends is None else ends[1:] < ends[:-1]
    if negative.any():
        location, bag = _first(batch, negative)
        raise ValueError(
            f"lengths must not be negative: {location} has {int(lengths[bag])}"
            if offsets is None
            else f"offsets must ascend: {location} goes from {int(offsets[bag])} to {int(offsets[bag + 1])}"
        )
    if ends is not None and is_host_readable(lengths) and (differ := np.diff(ends) != lengths.numpy()).any():
        location, bag = _first(batch, differ)
        raise ValueError(
            f"lengths and offsets disagree: {location} has length {int(lengths[bag])}, but by its offsets "
            f"{int(offsets[bag + 1] - offsets[bag])}; pass only one of them"
        )
    if int(total) != batch._values.shape[0]:
        raise ValueError(f"{source} {int(total)} but there are {batch._values.shape[0]} values")


def _first(batch: KeyedJaggedTensor, bags: np.ndarray) -> tuple[str, int]:
    """Return the feature and sample, and the index, of the first bag that is flagged."""
    bag, batch_size = int(bags.argmax()), bags.size // max(1, len(batch._keys))
    return f"feature {batch._keys[bag // batch_size]!r}, sample {bag % batch_size}", bag


def key_major_order(lengths: Sequence[Tensor], num_values: int) -> Tensor:
    """Compute the permutation that makes the values of concatenated batches key-major.

    `lengths`: `[K, B]` values per bag, for each batch; `B` may differ. Returns int64 `[num_values]`: for each position
    in the order of key, batch and sample, the source position in the order of batch, key and sample.
    """
    # A run is one key of one batch. Transpose the runs: source starts and lengths, in target order.
    run_lengths = torch.stack([batch.sum(1, dtype=torch.int64) for batch in lengths])
    run_starts = torch.cumsum(run_lengths.flatten(), 0).reshape(run_lengths.shape) - run_lengths
    target_lengths, source_starts = run_lengths.T.flatten(), run_starts.T.flatten()
    shifts = source_starts - (torch.cumsum(target_lengths, 0) - target_lengths)
    target = torch.arange(num_values, device=run_lengths.device)
    return target + torch.repeat_interleave(shifts, target_lengths, output_size=num_values)


def batch_size_of(offsets: Tensor, key_starts: Tensor) -> int:
    """Samples per batch, from offsets `[K * B + 1]` and `Layout.key_starts` `[K + 1]`."""
    num_keys = key_starts.numel() - 1
    return (offsets.numel() - 1) // num_keys if num_keys else 0


def _joined_weights(batches: Sequence[KeyedJaggedTensor]) -> Tensor | None:
    weighted = [batch.weights_or_none() is not None for batch in batches]
    if any(weighted) and not all(weighted):
        raise ValueError(f"all batches or none must have weights, got {weighted}")
    return torch.cat([batch.weights() for batch in batches]) if all(weighted) else None


def _checked_batches(method: str, batches: Any) -> list[KeyedJaggedTensor]:
    checked = list(batches) if isinstance(batches, Iterable) else [batches]
    if isinstance(batches, KeyedJaggedTensor) or not all(isinstance(batch, KeyedJaggedTensor) for batch in checked):
        raise TypeError(f"{method} expects a list of tritonemb.KeyedJaggedTensor, got {batches!r}")
    if not checked:
        raise ValueError(f"{method} needs at least one KeyedJaggedTensor")
    return checked


def _check_lists(lists: Any, weights: Any) -> None:
    """Raise TypeError or ValueError unless ids have one list per sample for each key, and weights, if any, the same."""
    for title, by_key in (("ids", lists), ("weights", {} if weights is None else weights)):
        if not isinstance(by_key, Mapping):
            raise TypeError(f"from_lists expects {{key: a list of {title} for each sample}}, got {by_key!r}")
        for key, samples in by_key.items():
            try:
                [len(sample) for sample in samples]
            except TypeError:
                raise TypeError(f"{key!r} needs a list of {title} for each sample, got {samples!r}") from None
    batch_sizes = {key: len(samples) for key, samples in lists.items()}
    if len(set(batch_sizes.values())) > 1:
        raise ValueError(f"each key needs the same number of samples, got {batch_sizes}")
    for key, samples in lists.items() if weights is not None else ():
        if key not in weights:
            raise ValueError(f"weights have no key {key!r}")
        if len(weights[key]) != len(samples):
            raise ValueError(f"weights of {key!r} have {len(weights[key])} samples, its ids have {len(samples)}")
        for index, (ids, sample_weights) in enumerate(zip(samples, weights[key], strict=True)):
            if len(ids) != len(sample_weights):
                raise ValueError(f"{key!r}, sample {index}: {len(ids)} ids but {len(sample_weights)} weights")


def _limit_of(dtype: torch.dtype) -> int:
    if dtype not in OFFSET_DTYPES:
        raise TypeError(f"dtype must be torch.int32 or torch.int64, got {dtype}")
    return -torch.iinfo(dtype).min


def _integer(key: str, id: Any, limit: int) -> int:
    try:
        value = operator.index(id)
    except TypeError:
        raise TypeError(f"ids of {key!r} must be integers, got {id!r}") from None
    if not -limit <= value < limit:
        raise ValueError(f"ids of {key!r} must lie in [{-limit}, {limit}), got {value}; hash larger ones")
    return value


def is_host_readable(tensor: Tensor | None) -> bool:
    """Return whether the contents can be read without a synchronization or a graph break: a plain CPU tensor."""
    return type(tensor) is Tensor and tensor.is_cpu and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


_CHILDREN = [*map(pytree.GetAttrKey, ("values", "weights", "lengths", "offsets"))]


def _flatten(kjt: KeyedJaggedTensor) -> tuple[list[Tensor | None], tuple[str, ...]]:
    return [kjt._values, kjt._weights, kjt._lengths, kjt._offsets], kjt._keys


def _unflatten(children: Iterable[Any], keys: tuple[str, ...]) -> KeyedJaggedTensor:
    """Rebuild without checks: leaves of a pytree are arbitrary objects while it is being mapped."""
    kjt = object.__new__(KeyedJaggedTensor)
    kjt._values, kjt._weights, kjt._lengths, kjt._offsets = children
    kjt._keys = tuple(keys)
    return kjt


pytree.register_pytree_node(
    KeyedJaggedTensor, _flatten, _unflatten, serialized_type_name="tritonemb.KeyedJaggedTensor",
    to_dumpable_context=list, from_dumpable_context=tuple,
    flatten_with_keys_fn=lambda kjt: ([*zip(_CHILDREN, _flatten(kjt)[0], strict=True)], kjt._keys),
)  # fmt: skip


class Features(Protocol):
    """Interface of a batch: tritonemb's or TorchRec's `KeyedJaggedTensor`."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


def unpack_features(features: Features) -> tuple[list[str], Tensor, Tensor, Tensor | None]:
    """Return keys, values, offsets and weights; raise TypeError or ValueError for an unsupported batch."""
    for method in ("keys", "values", "offsets", "weights_or_none"):
        if not callable(getattr(features, method, None)):
            raise TypeError(f"expected a KeyedJaggedTensor, got {type(features).__name__}, which has no {method}()")
    if getattr(features, "variable_stride_per_key", bool)():  # TorchRec's
        raise ValueError(
            "the batch has a variable batch size per feature (variable_stride_per_key), which is not supported; give "
            "every feature a bag, possibly empty, for every sample"
        )
    return list(features.keys()), features.values(), features.offsets(), features.weights_or_none()
