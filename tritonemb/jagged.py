"""`KeyedJaggedTensor`: the ids of a batch, several per sample and feature, in one flat tensor.

Values are feature-major: all samples of key 0, then all of key 1, and so on. Bag `k * B + b` holds the values of key
`k` and sample `b`; `offsets[bag]` is where it starts.
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

    A pytree node, so that it passes through `torch.compile` and `torch.export`; method names are TorchRec's, whose
    `KeyedJaggedTensor` is accepted wherever this one is.

    Args:
        keys: `F` distinct feature names.
        values: `[N]` ids (int32 or int64), or `[N, D]` rows as `EmbeddingCollection` returns them.
        weights: `[N]` floating point, one a value, or None.
        lengths: `[F * B]` or `[F, B]` int32 or int64, values per bag.
        offsets: `[F * B + 1]` int32 or int64, ascending from 0 to `N`. Give lengths or offsets. Of both, offsets are
            kept; lengths must agree with them, which is checked on the CPU alone, and not where it is traced.

    Raises:
        TypeError, ValueError: for shapes and dtypes, always; for contents (negative lengths, offsets that descend, a
            total other than `N`) at once when they are on the CPU, else when a kernel meets them.
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
        self._check_form(lengths, offsets)
        self.is_checked = not torch.compiler.is_compiling() and is_host_readable(
            lengths if offsets is None else offsets
        )
        if self.is_checked:
            self._check_contents(lengths, offsets)
        # Both are settled here: a batch that changed when it is used would be compiled for twice.
        self._lengths = lengths if offsets is None else None
        ends: Any = torch.cumsum(lengths, 0, dtype=lengths.dtype) if offsets is None else offsets  # type: ignore
        self._offsets = torch.cat([ends.new_zeros(1), ends]) if offsets is None else offsets

    @classmethod
    def unchecked(
        cls, keys: Sequence[str], values: Tensor, weights: Tensor | None, offsets: Tensor
    ) -> "KeyedJaggedTensor":
        """Of parts that fit together, or that a kernel will check."""
        return _unflatten([values, weights, None, offsets], tuple(keys))

    @classmethod
    def from_lengths(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """From values per bag, `lengths` `[F * B]` or `[F, B]`."""
        return cls(keys, values, weights, lengths=lengths)

    @classmethod
    def from_offsets(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """From where each bag starts, `offsets` `[F * B + 1]`."""
        return cls(keys, values, weights, offsets=offsets)

    @classmethod
    def from_lists(
        cls, lists: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None, dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> "KeyedJaggedTensor":  # fmt: skip
        """From Python lists: `{"genre": [[1, 4], [], [7]]}` has one list of ids a sample, the same number for each key.

        Raises:
            TypeError, ValueError: naming the key, and the sample where sizes differ.
        """
        _check_lists("ids", lists)
        batch_sizes = {key: len(samples) for key, samples in lists.items()}
        if len(set(batch_sizes.values())) > 1:
            raise ValueError(f"each key needs the same number of samples, got {batch_sizes}")
        if weights is not None:
            _check_same_lengths(lists, weights)
        values = [_integer(key, id) for key, samples in lists.items() for sample in samples for id in sample]
        flat_weights = [w for key in lists for sample in weights[key] for w in sample] if weights is not None else None
        lengths = [len(sample) for samples in lists.values() for sample in samples]
        numbers, sizes = (torch.tensor(each, dtype=dtype, device=device) for each in (values, lengths))
        floats = None if flat_weights is None else torch.tensor(flat_weights, dtype=torch.float32, device=device)
        return cls(tuple(lists), numbers, floats, lengths=sizes)

    @staticmethod
    def concat(parts: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Join batches of the same samples with different keys.

        Raises:
            ValueError: for no parts, for batch sizes that differ, for weights that only some parts have.
        """
        parts = _list_of_parts("concat", parts)
        batch_sizes = [part.stride() for part in parts]
        if len(set(batch_sizes)) > 1:
            raise ValueError(f"concat needs parts of one batch size, got {batch_sizes}")
        keys = [key for part in parts for key in part._keys]
        values, weights = torch.cat([part.values() for part in parts]), _joined_weights(parts)
        return KeyedJaggedTensor(keys, values, weights, lengths=torch.cat([part.lengths() for part in parts]))

    @staticmethod
    def stack(parts: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Join batches of different samples with the same keys, in order, without reading them on the host.

        Raises:
            ValueError: for no parts, for keys that differ, for weights that only some parts have.
        """
        parts = _list_of_parts("stack", parts)
        keys = parts[0].keys()
        for part in parts:
            if part.keys() != keys:
                raise ValueError(f"stack needs parts of the same keys in one order, got {keys} and {part.keys()}")
        lengths = [part.lengths().reshape(len(keys), -1) for part in parts]
        values = torch.cat([part.values() for part in parts])
        source = key_major_order(lengths, values.shape[0])
        weights = _joined_weights(parts)
        weights = None if weights is None else weights[source]
        return KeyedJaggedTensor(keys, values[source], weights, lengths=torch.cat(lengths, dim=1).flatten())

    def keys(self) -> list[str]:
        return list(self._keys)

    def values(self) -> Tensor:
        return self._values

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def weights(self) -> Tensor:
        """`[N]`; raises ValueError if there are none."""
        if self._weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights; pass weights= when making it")
        return self._weights

    def lengths(self) -> Tensor:
        """`[F * B]` values per bag."""
        return torch.diff(self._offsets) if self._lengths is None else self._lengths

    def offsets(self) -> Tensor:
        """`[F * B + 1]` where each bag starts."""
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
        """Cut the keys into runs of the given sizes. Reads the offsets on the host.

        Raises:
            ValueError: for sizes that are negative or do not add up to the number of keys.
        """
        if sum(segments) != len(self._keys) or any(size < 0 for size in segments):
            raise ValueError(f"segments {list(segments)} must add up to the {len(self._keys)} keys")
        return [self._run(end - size, end) for size, end in zip(segments, accumulate(segments), strict=True)]

    def permute(self, indices: Sequence[int]) -> "KeyedJaggedTensor":
        """The keys at `indices`, in that order; keys may be left out. Reads the offsets on the host.

        Raises:
            ValueError: for an index out of range or repeated.
        """
        for index in indices:
            if not 0 <= index < len(self._keys):
                raise ValueError(f"permute: index {index} is not in [0, {len(self._keys)})")
        if len(set(indices)) != len(indices):
            raise ValueError(f"permute: an index is repeated in {list(indices)}")
        parts = [self._run(index, index + 1) for index in indices]
        return KeyedJaggedTensor.concat(parts) if parts else self._run(0, 0)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedJaggedTensor":
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "KeyedJaggedTensor":
        return self._map(lambda t: t.pin_memory())

    def __getitem__(self, key: str) -> "KeyedJaggedTensor":
        """One key's part; KeyError if there is none."""
        if key not in self._keys:
            raise KeyError(f"no key {key!r} among {self.keys()}")
        index = self._keys.index(key)
        return self._run(index, index + 1)

    def to_lists(self) -> dict[str, list[list[Any]]]:
        """The inverse of `from_lists`, without weights."""
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

    def _run(self, first: int, last: int) -> "KeyedJaggedTensor":
        batch_size = self.stride() if first < last else 0  # no keys have one offset, a 0
        bag_offsets = self._offsets[first * batch_size : last * batch_size + 1]
        begin, end = int(bag_offsets[0]), int(bag_offsets[-1])
        keys, weights = self._keys[first:last], None if self._weights is None else self._weights[begin:end]
        return KeyedJaggedTensor(keys, self._values[begin:end], weights, offsets=bag_offsets - begin)

    def _map(self, function: Any) -> "KeyedJaggedTensor":
        children, context = _flatten(self)
        return _unflatten([None if child is None else function(child) for child in children], context)

    def _check_form(self, lengths: Tensor | None, offsets: Tensor | None) -> None:
        keys = self._keys
        if any(not isinstance(key, str) for key in keys):
            raise TypeError(f"keys must be str, got {list(keys)}")
        if len(set(keys)) != len(keys):
            raise ValueError(f"a key is given twice in {list(keys)}")
        if lengths is None and offsets is None:
            raise ValueError("give lengths or offsets")
        given = {"values": self._values, "weights": self._weights, "lengths": lengths, "offsets": offsets}
        for title, value in given.items():
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
                    f"{title} has {tensor.numel()} elements, which {len(keys)} keys cannot share: "
                    f"expected a multiple of {len(keys)}" + (" plus 1" if extra else "")
                )
        if offsets is not None and offsets.numel() == 0:
            raise ValueError("offsets must have at least one element, the 0 that it starts with")
        if lengths is not None and offsets is not None and lengths.numel() != (bags := offsets.numel() - 1):
            raise ValueError(f"{bags + 1} offsets need {bags} lengths, got {lengths.numel()}; give one of them")
        if self._weights is not None:
            if self._weights.shape != self._values.shape[:1]:
                raise ValueError(
                    f"weights must have one element a value: expected shape {tuple(self._values.shape[:1])}, "
                    f"got {tuple(self._weights.shape)}"
                )
            if not self._weights.is_floating_point():
                raise TypeError(f"weights must be floating point, got {self._weights.dtype}")

    def _check_contents(self, lengths: Any, offsets: Any) -> None:
        # By NumPy: PyTorch wakes threads for it, which takes longer. Differences are taken where they are needed alone.
        total, source = (lengths.sum(), "lengths add up to") if offsets is None else (offsets[-1], "offsets end at")
        if offsets is not None and int(offsets[0]) != 0:
            raise ValueError(f"offsets must start with 0, got {int(offsets[0])}")
        ends = None if offsets is None else offsets.numpy()
        negative = lengths.numpy() < 0 if ends is None else ends[1:] < ends[:-1]
        if negative.any():
            where, bag = self._first(negative)
            raise ValueError(
                f"lengths must not be negative: {where} has {int(lengths[bag])}"
                if offsets is None
                else f"offsets must ascend: {where} goes from {int(offsets[bag])} to {int(offsets[bag + 1])}"
            )
        if ends is not None and is_host_readable(lengths) and (differ := np.diff(ends) != lengths.numpy()).any():
            where, bag = self._first(differ)
            raise ValueError(
                f"lengths and offsets disagree: {where} has the length {int(lengths[bag])}, by its offsets "
                f"{int(offsets[bag + 1] - offsets[bag])}; give one of them"
            )
        if int(total) != self._values.shape[0]:
            raise ValueError(f"{source} {int(total)} but there are {self._values.shape[0]} values")

    def _first(self, bags: np.ndarray) -> tuple[str, int]:
        bag, batch_size = int(bags.argmax()), bags.size // max(1, len(self._keys))
        return f"feature {self._keys[bag // batch_size]!r}, sample {bag % batch_size}", bag


def key_major_order(lengths: Sequence[Tensor], num_values: int) -> Tensor:
    """Where the `num_values` values of parts that lie one after the other come from when they are to lie key by key.

    `lengths`: of each part, `[K, B]`: values a bag; `B` may differ. Returns int64 `[num_values]`: the place, part by
    part, of what is wanted here: by key, then part, then sample.
    """
    # A run is one key of one part. Runs lie part by part; they are wanted key by key.
    run_lengths = torch.stack([part.sum(1, dtype=torch.int64) for part in lengths])
    run_starts = torch.cumsum(run_lengths.flatten(), 0).reshape(run_lengths.shape) - run_lengths
    wanted_lengths, wanted_starts = run_lengths.T.flatten(), run_starts.T.flatten()
    shifts = wanted_starts - (torch.cumsum(wanted_lengths, 0) - wanted_lengths)
    source = torch.arange(num_values, device=run_lengths.device)
    return source + torch.repeat_interleave(shifts, wanted_lengths, output_size=num_values)


def batch_size_of(offsets: Tensor, key_starts: Tensor) -> int:
    """Samples in a batch: offsets `[K * B + 1]`, `Layout.key_starts` `[K + 1]`."""
    num_keys = key_starts.numel() - 1
    return (offsets.numel() - 1) // num_keys if num_keys else 0


def _joined_weights(parts: Sequence[KeyedJaggedTensor]) -> Tensor | None:
    weighted = [part.weights_or_none() is not None for part in parts]
    if any(weighted) and not all(weighted):
        raise ValueError(f"weights are needed in all parts or in none, got {weighted}")
    return torch.cat([part.weights() for part in parts]) if all(weighted) else None


def _list_of_parts(method: str, parts: Any) -> list[KeyedJaggedTensor]:
    found = list(parts) if isinstance(parts, Iterable) else [parts]
    if isinstance(parts, KeyedJaggedTensor) or not all(isinstance(part, KeyedJaggedTensor) for part in found):
        raise TypeError(f"{method} expects a list of tritonemb.KeyedJaggedTensor, got {parts!r}")
    if not found:
        raise ValueError(f"{method} needs at least one KeyedJaggedTensor")
    return found


def _check_lists(title: str, lists: Any) -> None:
    if not isinstance(lists, Mapping):
        raise TypeError(f"from_lists expects {{key: a list of {title} for each sample}}, got {lists!r}")
    for key, samples in lists.items():
        try:
            [len(sample) for sample in samples]
        except TypeError:
            raise TypeError(f"{key!r} needs a list of {title} for each sample, got {samples!r}") from None


def _check_same_lengths(lists: Mapping[str, Sequence[Sequence[Any]]], weights: Mapping[str, Any]) -> None:
    _check_lists("weights", weights)
    for key, samples in lists.items():
        if key not in weights:
            raise ValueError(f"weights lack the key {key!r}")
        if len(weights[key]) != len(samples):
            raise ValueError(f"weights of {key!r} have {len(weights[key])} samples, its ids have {len(samples)}")
        for index, (ids, sample_weights) in enumerate(zip(samples, weights[key], strict=True)):
            if len(ids) != len(sample_weights):
                raise ValueError(f"{key!r}, sample {index}: {len(ids)} ids but {len(sample_weights)} weights")


def _integer(key: str, id: Any) -> int:
    try:
        return operator.index(id)
    except TypeError:
        raise TypeError(f"ids of {key!r} must be integers, got {id!r}") from None


def is_host_readable(tensor: Tensor | None) -> bool:
    """Whether looking at the contents costs nothing: plain memory of this process."""
    return type(tensor) is Tensor and tensor.is_cpu and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _flatten(kjt: KeyedJaggedTensor) -> tuple[list[Tensor | None], tuple[str, ...]]:
    return [kjt._values, kjt._weights, kjt._lengths, kjt._offsets], kjt._keys


def _unflatten(children: Iterable[Any], keys: tuple[str, ...]) -> KeyedJaggedTensor:
    """Rebuild without checks: a tree's leaves need not be tensors while it is being mapped."""
    kjt = object.__new__(KeyedJaggedTensor)
    kjt._values, kjt._weights, kjt._lengths, kjt._offsets = children
    kjt._keys = tuple(keys)
    return kjt


def _flatten_with_keys(kjt: KeyedJaggedTensor) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    children, context = _flatten(kjt)
    names = ("values", "weights", "lengths", "offsets")
    return [(pytree.GetAttrKey(name), child) for name, child in zip(names, children, strict=True)], context


pytree.register_pytree_node(
    KeyedJaggedTensor, _flatten, _unflatten, serialized_type_name="tritonemb.KeyedJaggedTensor",
    to_dumpable_context=list, from_dumpable_context=tuple, flatten_with_keys_fn=_flatten_with_keys,
)  # fmt: skip


class Features(Protocol):
    """What a batch must offer: tritonemb's or TorchRec's `KeyedJaggedTensor`."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


def unpack_features(features: Features) -> tuple[list[str], Tensor, Tensor, Tensor | None]:
    """Keys, values, offsets and weights; raises TypeError or ValueError for what is no such batch."""
    for method in ("keys", "values", "offsets", "weights_or_none"):
        if not callable(getattr(features, method, None)):
            raise TypeError(f"expected a KeyedJaggedTensor, got {type(features).__name__}, which has no {method}()")
    if getattr(features, "variable_stride_per_key", bool)():  # TorchRec's
        raise ValueError(
            "the batch has another number of samples for each feature; give every feature a bag, perhaps an empty one, "
            "for every sample"
        )
    return list(features.keys()), features.values(), features.offsets(), features.weights_or_none()
