"""Encoding of requests, a few rows of raw values, as a batch: the same numbers and ids as for a log's rows.

Logs are encoded column by column, with a fixed cost per column; here all columns are hashed at once.
"""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tritonemb.data import encode
from tritonemb.data.batch import Array, Batch, lengths_to_offsets
from tritonemb.data.encode import Numberings
from tritonemb.data.files import pa
from tritonemb.data.protocol import Feature
from tritonemb.data.schema import CATEGORIES, Schema, quote_value
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.utils import did_you_mean, join_names

_NUMBER = re.compile(r"([-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?)?")
_DECIMAL, _HEXADECIMAL = re.compile("-?[0-9]{1,19}"), re.compile("[0-9a-fA-F]{1,8}")


class RequestEncoder:
    """Encoder of rows, dictionaries of raw values by column, as the batch that `ClickLog` would read.

    A value is a number or a string, None or NaN if missing, or a list for a multi-hot feature. Decimal strings are
    parsed for features trained with integers, numbers in strings for models of text; other columns are ignored.
    With `from_text`, of a model trained on text, empty strings are missing and Criteo's categories hexadecimal."""

    def __init__(
        self, schema: Schema, features: Sequence[Feature], numberings: Numberings, from_text: bool = False
    ) -> None:
        self.schema, self.features, self._numberings, self._from_text = schema, tuple(features), numberings, from_text
        self._keys = tuple(feature.name for feature in features)
        self._seeds = np.array(list(map(encode.feature_seed, self._keys)), dtype=np.uint64)
        self._sizes = np.array([feature.num_embeddings for feature in features])
        self._logarithmic = np.array(list(map(schema.is_logarithmic, schema.dense)), dtype=bool)

    def __call__(self, rows: Sequence[Mapping[str, Any]], first: int = 0) -> Batch:
        """Encode rows, with labels of 0; ValueError names row (counted from `first`), column and invalid value."""
        # Check and convert value by value, so that errors name row and column.
        names, bags = self.schema.dense, list[list[Sequence[Any]]]()
        numbers = np.zeros((len(rows), len(names)))
        for index, row in enumerate(rows):
            try:
                if missing := [name for name in (*names, *self._keys) if name not in row]:
                    near = did_you_mean(missing[0], row)
                    columns = f"missing columns: {join_names(missing)}; the row has {join_names(row) or 'none'}{near}"
                    raise ValueError(f"{columns}; pass None for a missing value")
                numbers[index] = [self._number(row[name], name) for name in names]
                bags.append([self._items(row[feature.name], feature) for feature in self.features])
            except ValueError as error:
                raise ValueError(f"row {first + index + 1}: {error}") from None
        dense = encode.scale_numbers(numbers, False)
        dense[:, self._logarithmic] = encode.scale_numbers(np.ascontiguousarray(numbers[:, self._logarithmic]), True)
        # Order the bags by feature, then row; hash the values of all features at once.
        by_feature = [bag for bags_of_feature in zip(*bags, strict=True) for bag in bags_of_feature]
        lengths = np.array([len(bag) for bag in by_feature], dtype=np.int64)
        feature_indices = np.repeat(np.arange(len(lengths)) // max(1, len(rows)), lengths)
        ids = torch.from_numpy(self._ids([value for bag in by_feature for value in bag], feature_indices))
        sparse = KeyedJaggedTensor.unchecked(self._keys, ids, None, torch.from_numpy(lengths_to_offsets(lengths)))
        return Batch(torch.from_numpy(dense), sparse, torch.zeros(len(rows)))

    def ids(self, feature: str, values: Sequence[Any]) -> torch.Tensor:
        """Encode values of one feature as ids int64 `[N]`; ValueError names a value that cannot be encoded."""
        if feature not in (names := self._keys):
            near = did_you_mean(feature, names)
            raise ValueError(f"unknown feature {feature!r}; features: {join_names(names)}{near}")
        feature_index = names.index(feature)
        items = [self._item(value, self.features[feature_index]) for value in values]
        return torch.from_numpy(self._ids(items, np.full(len(items), feature_index)).astype(np.int64))

    def _number(self, value: Any, name: str) -> float:
        if self._from_text and isinstance(value, str) and _NUMBER.fullmatch(value):
            value = float(value) if value else None
        if value is None:
            return 0.0
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise _value_error(name, value, "a number or nothing")
        if math.isnan(number := float(value)):
            return 0.0
        if math.isinf(number):
            raise _value_error(name, number, "a finite number or nothing")
        if self.schema.is_logarithmic(name):
            if number < 0 and not self.schema.clamps(name):
                raise _value_error(name, number, "0 or more under log_transform, or clamp_negative")
        elif abs(number) >= encode.INFINITE:
            raise _value_error(name, number, "a number that fits float32")
        return number

    def _items(self, value: Any, feature: Feature) -> Sequence[Any]:
        if not feature.multi_hot:
            return (self._item(value, feature),)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ()
        if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
            raise _value_error(feature.name, value, "a list of values, or nothing")
        return [self._item(item, feature) for item in value]

    def _item(self, value: Any, feature: Feature) -> Any:
        if value is None or (isinstance(value, float) and math.isnan(value)) or (self._from_text and value == ""):
            return None
        if isinstance(value, str | bytes):
            text = value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
            if feature.kind != "integers":
                return text.encode(errors="surrogateescape")
            if self._from_text and feature.name in CATEGORIES and self.schema.sparse == CATEGORIES:
                if _HEXADECIMAL.fullmatch(text):
                    return int(text, 16)
                raise _value_error(feature.name, value, "up to 8 hexadecimal digits or nothing")
            if _DECIMAL.fullmatch(text) and -(1 << 63) <= int(text) < 1 << 63:
                return int(text)
            raise _value_error(feature.name, value, "an integer or nothing, as in training")
        try:
            integer = operator.index(value)
        except TypeError:
            raise _value_error(feature.name, value, "an integer, a string or nothing") from None
        if feature.kind == "strings":
            raise _value_error(feature.name, value, "a string or nothing, as in training")
        return integer

    def _ids(self, values: Sequence[Any], feature_indices: Array) -> Array:
        # Hash strings and integers of all features at once.
        dynamic = self.schema.dynamic
        hashes, present = np.zeros(len(values), np.uint64), np.array([value is not None for value in values], bool)
        is_text = np.array([isinstance(value, bytes) for value in values], dtype=bool)
        texts, positions = [value for value in values if isinstance(value, bytes)], np.flatnonzero(is_text)
        if texts:
            offsets = lengths_to_offsets(np.array([len(text) for text in texts]))
            data, seeds = np.frombuffer(b"".join(texts), np.uint8), self._seeds[feature_indices[positions]]
            hashes[positions] = encode.hash_strings(data, offsets, seeds)
        if len(positions := np.flatnonzero(present & ~is_text)):
            numbers = np.array([values[index] & 0xFFFFFFFFFFFFFFFF for index in positions.tolist()], dtype=np.uint64)
            seeds = self._seeds[feature_indices[positions]]
            hashes[positions] = numbers if dynamic else encode.hash_integers(numbers, seeds)
        if dynamic:
            return np.where(present, hashes.view(np.int64), encode.MISSING)
        # Map hashes to ids; with a vocabulary, look up feature by feature.
        ids = np.where(present, encode.hashes_to_ids(hashes, self._sizes[feature_indices]), np.int32(0))
        for index, feature in enumerate(self.features) if self.schema.vocabulary is not None else ():
            begin, end = np.searchsorted(feature_indices, [index, index + 1])
            array = pa.array(values[begin:end], pa.string() if is_text[begin:end].any() else pa.int64())
            ids[begin:end] = self._numberings[feature.name].ids(array, feature.kind)
        return ids


def _value_error(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"column {name!r} is {quote_value(value)}, expected {expected}")
