"""Encoding of requests, a few rows of raw values, as a batch: the same numbers and ids as for a log's rows.

Logs are encoded column by column, with a fixed cost per column; here all columns are converted and hashed at once.
"""

import math
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, pairwise
from struct import unpack_from
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch

from tritonemb.data import encode
from tritonemb.data.batch import Array, Batch, lengths_to_offsets, segment_positions
from tritonemb.data.encode import Numberings
from tritonemb.data.files import pa
from tritonemb.data.protocol import Feature
from tritonemb.data.schema import CATEGORIES, Names, Schema, quote_value
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.utils import did_you_mean, join_names

_NUMBER = re.compile(r"([-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?)?")
_WRONG_TYPES = {"integers": str, "strings": int}  # of JSON, by kind of the feature
_DECIMAL, _HEXADECIMAL = re.compile("-?[0-9]{1,19}"), re.compile("[0-9a-fA-F]{1,8}")
_ARROW_TYPES = re.compile("u?int(8|16|32|64)|halffloat|float|double|(large_)?(string|binary)")
ARROW_MARK = b"\xff" * 4  # continuation indicator: before each message of an Arrow IPC stream, and the 0 at its end


class RawRows(NamedTuple):
    """Raw rows of a request: `columns` have a value per row by name, `shared` one value for all rows."""

    columns: Mapping[str, Sequence[Any]]
    num_rows: int
    shared: Mapping[str, Any]


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
        self._label_shape = [len(schema.labels)] * bool(schema.labels)
        self._names, self._multi_hot = (*schema.dense, *self._keys), any(feature.multi_hot for feature in features)
        seeds = [encode.feature_seed(feature.table or feature.name) for feature in features]
        self._seeds, self._max_lengths = np.array(seeds, dtype=np.uint64), schema.lengths_by_name()
        self._sizes = np.array([feature.num_embeddings for feature in features])
        self._logarithmic = np.array(list(map(schema.is_logarithmic, schema.dense)), dtype=bool)
        nonnegative = [schema.is_logarithmic(name) and not schema.clamps(name) for name in schema.dense]
        self._minimum = np.where(nonnegative, 0.0, -np.nextafter(encode.INFINITE, 0))

    def __call__(self, rows: Sequence[Mapping[str, Any]], first: int = 0) -> Batch:
        """Encode rows, with labels of 0; ValueError names row (counted from `first`), column and invalid value."""
        return self.encode([self.raw_rows(rows, first=first)], first)

    def raw_rows(
        self, rows: Sequence[Mapping[str, Any]], shared: Mapping[str, Any] = {}, first: int = 0, names: Names = ()
    ) -> RawRows:
        """Return the columns of rows that are not `shared`, by default those of dense and sparse features; ValueError
        names a row without one of them."""
        required = names or self._names
        columns = dict.fromkeys(name for name in required if name not in shared)
        for index, row in enumerate(rows):
            if row.keys() != columns.keys() and not (row.keys() >= columns.keys() and row.keys().isdisjoint(shared)):
                self._check_columns(row, shared, f"row {first + index + 1}", required)
        return RawRows({name: [row[name] for row in rows] for name in columns}, len(rows), shared)

    def raw_columns(self, columns: Mapping[str, Sequence[Any]], shared: Mapping[str, Any]) -> RawRows:
        """Check columns with a value per row; ValueError if one is missing, or they differ in length."""
        self._check_columns(columns, shared, "columns", self._names)
        if len({*(sizes := {name: len(column) for name, column in columns.items()}).values()}) > 1:
            raise ValueError(f"columns must have as many values as one another, got {sizes}")
        return RawRows(columns, next(iter(sizes.values()), 1), shared)

    def encode(self, requests: Sequence[RawRows], first: int = 0) -> Batch:
        """Encode the rows of requests as a batch; shared values are encoded once. ValueError names a row of the first
        request, or the user, column and value."""
        num_rows = sum(raw.num_rows for raw in requests)
        # Numbers.
        values, columns, positions = _collect(self.schema.dense, requests)
        numbers: Array | None = None
        if {*map(type, values)} <= {int, float, NoneType}:
            with suppress(OverflowError):
                numbers = np.array(values, dtype=np.float64)
                numbers[np.isnan(numbers)] = 0.0
        if numbers is None or (numbers >= encode.INFINITE).any() or (numbers < self._minimum[columns]).any():
            convert = partial(_convert, self.schema.dense, requests[0].shared, first)
            rows = np.arange(len(columns)) - np.searchsorted(columns, columns)
            numbers = np.array(convert(self._number, values, columns, rows), dtype=np.float64)
        dense, logarithmic = encode.scale_numbers(numbers, False), self._logarithmic[columns]
        dense[logarithmic] = encode.scale_numbers(numbers[logarithmic], True)
        dense = dense[positions].reshape(len(self.schema.dense), num_rows).T
        # Ids: bags by feature, request and row, or one that rows share.
        items, features, positions = _collect(self._keys, requests)
        # Positions in the columns, which ascend.
        rows, lengths = np.arange(len(features)) - np.searchsorted(features, features), np.ones_like(positions)
        convert = partial(_convert, self.features, requests[0].shared, first)
        if self._multi_hot:
            bags = convert(self._bag, items, features, rows)
            lengths = np.fromiter(map(len, bags), np.int64, len(bags))
            items, features, rows = list(chain.from_iterable(bags)), features.repeat(lengths), rows.repeat(lengths)
        if not self._is_canonical(items, features):
            items = convert(self._item, items, features, rows)
        if self._multi_hot:
            positions, lengths = segment_positions(lengths_to_offsets(lengths), positions)
        ids, offsets = self._ids(items, features)[positions], lengths_to_offsets(lengths)
        sparse = KeyedJaggedTensor.unchecked(self._keys, torch.from_numpy(ids), None, torch.from_numpy(offsets))
        return Batch(torch.from_numpy(np.ascontiguousarray(dense)), sparse, torch.zeros(num_rows, *self._label_shape))

    def _check_columns(self, columns: Iterable[str], shared: Mapping[str, Any], place: str, required: Names) -> None:
        if missing := [name for name in required if name not in columns and name not in shared]:
            text = f"missing columns: {join_names(missing)}; the row has {join_names(columns) or 'none'}"
            near = did_you_mean(missing[0], islice(columns, 1000))
            raise ValueError(f"{place}: {text}{near}; pass None for a missing value")
        if shared and (names := [name for name in columns if name in shared]):
            raise ValueError(f"{place}: {join_names(names)} must not be among the columns of the user, too")

    def _is_canonical(self, items: Sequence[Any], features: Array) -> bool:
        """Return whether all items are as `_item` would return them."""
        kinds = {*map(type, items)}
        if not kinds <= {int, str, NoneType} or (str in kinds and self._from_text and "" in items):
            return False
        if kinds & {_WRONG_TYPES.get(feature.kind) for feature in self.features}:
            bounds = pairwise(np.searchsorted(features, np.arange(len(self.features) + 1)).tolist())
            segments = ({*map(type, items[begin:end])} for begin, end in bounds)
            if any(_WRONG_TYPES.get(f.kind) in s for f, s in zip(self.features, segments, strict=True)):
                return False
        with suppress(OverflowError):
            np.array(items if kinds == {int} else [item for item in items if type(item) is int], dtype=np.int64)
            return True
        return False

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
        try:
            number = float(value)
        except OverflowError:
            raise _value_error(name, value, "a number that fits float32") from None
        if math.isnan(number):
            return 0.0
        if math.isinf(number):
            raise _value_error(name, number, "a finite number or nothing")
        if self.schema.is_logarithmic(name):
            if number < 0 and not self.schema.clamps(name):
                raise _value_error(name, number, "0 or more under log_transform, or clamp_negative")
        elif abs(number) >= encode.INFINITE:
            raise _value_error(name, number, "a number that fits float32")
        return number

    def _bag(self, value: Any, feature: Feature) -> Sequence[Any]:
        if not feature.multi_hot:
            return (value,)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ()
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            raise _value_error(feature.name, value, "a list of values, or nothing")
        values = list(value)
        return values[-self._max_lengths.get(feature.name, len(values)) :]

    def _item(self, value: Any, feature: Feature) -> Any:
        is_empty = self._from_text and isinstance(value, str | bytes) and not value
        if value is None or is_empty or (isinstance(value, float) and math.isnan(value)):
            return None
        if isinstance(value, str | bytes):
            text = value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
            if feature.kind != "integers":
                return text
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
        if not -(1 << 63) <= integer < 1 << (64 if self.schema.vocabulary is None else 63):
            raise _value_error(feature.name, value, "an integer of 64 bits")
        return integer if integer < 1 << 63 else integer - (1 << 64)

    def _ids(self, values: Sequence[Any], feature_indices: Array) -> Array:
        # Hash strings and integers of all features at once.
        dynamic = self.schema.dynamic
        hashes, present = np.zeros(len(values), np.uint64), np.ones(len(values), dtype=bool)
        is_text, kinds = ~present, {*map(type, values)}
        if kinds != {int}:
            present = np.array([value is not None for value in values], dtype=bool)
            is_text = np.array([isinstance(value, str) for value in values], dtype=bool)  # NumPy's strings, too
        if len(positions := np.flatnonzero(is_text)):
            texts = values if kinds == {str} else [value for value in values if isinstance(value, str)]
            content = "".join(texts).encode(errors="surrogateescape")
            lengths = np.fromiter(map(len, texts), np.int64, len(texts))
            if len(content) > lengths.sum():  # not ASCII: bytes are counted, not characters
                lengths = np.array([len(text.encode(errors="surrogateescape")) for text in texts])
            data, seeds = np.frombuffer(content, np.uint8), self._seeds[feature_indices[positions]]
            hashes[positions] = encode.hash_strings(data, lengths_to_offsets(lengths), seeds)
        if len(positions := np.flatnonzero(present & ~is_text)):
            integers = values if len(positions) == len(values) else [values[index] for index in positions.tolist()]
            numbers = np.array(integers, dtype=np.int64).view(np.uint64)
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


def _collect(names: Sequence[str], requests: Sequence[RawRows]) -> tuple[list[Any], Array, Array]:
    """Values by column, request and row, the column of each, and by row the position of its value."""
    values, sizes, repeats = list[Any](), list[int](), list[int]()
    for name in names:
        for raw in requests:
            is_shared = name in raw.shared
            values.extend((raw.shared[name],) if is_shared else raw.columns[name])
            sizes.append(1 if is_shared else raw.num_rows)
            repeats.append(raw.num_rows if is_shared else 1)
    counts = np.array(sizes, dtype=np.int64).reshape(len(names), len(requests)).sum(1)
    positions = np.repeat(np.arange(len(values)), np.repeat(np.array(repeats, dtype=np.int64), sizes))
    return values, np.repeat(np.arange(len(names)), counts), positions


def _convert(owners: Any, shared: Any, first: int, convert: Any, values: Any, columns: Array, rows: Array) -> list[Any]:
    """Convert values one by one; ValueError names the row, counted from `first`, or the user."""
    results = []
    for value, column, row in zip(values, columns.tolist(), rows.tolist(), strict=True):
        try:
            results.append(convert(value, owners[column]))
        except ValueError as error:
            is_shared = getattr(owners[column], "name", owners[column]) in shared
            raise ValueError(f"{'user' if is_shared else f'row {first + row + 1}'}: {error}") from None
    return results


def _value_error(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"column {name!r} is {quote_value(value)}, expected {expected}")


def read_arrow(body: bytes, names: Collection[str], max_rows: int) -> tuple[dict[str, Sequence[Any]], int, bytes]:
    """Read an Arrow IPC stream: columns, of which `names` are converted, the number of rows, and the metadata `user`.

    Bytes and rows bound what it costs: ValueError for too many rows, and for columns whose bytes may stand for many."""
    try:
        for message in pa.MessageReader.open_stream(source := pa.BufferReader(body)):
            is_batch, is_old = message.type == "record batch", message.metadata_version != pa.MetadataVersion.V5
            if is_old or (_is_compressed(message) if is_batch else message.type != "schema"):
                text = "compressed or dictionary-encoded Arrow data, or a format before 1.0, are not supported"
                raise ValueError(f"{text}; send plain columns")
        if source.tell() < len(body) or not body.endswith(ARROW_MARK + bytes(4)):
            raise pa.ArrowInvalid("its end is missing, or before that of the body")
        table, columns = pa.ipc.open_stream(body).read_all(), dict[str, Sequence[Any]]()
        if table.num_rows > max_rows:
            raise ValueError(f"the request has {table.num_rows:,} rows; send up to {max_rows:,} per request")
        for name, column in zip(table.column_names, table.columns, strict=True):
            if name in columns:
                raise ValueError(f"duplicate column {name!r}")
            columns[name] = _arrow_values(name, column) if name in names else range(table.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"the body is not a valid Arrow IPC stream: {error}") from None
    return columns, table.num_rows, (table.schema.metadata or {}).get(b"user", b"{}")


def _is_compressed(message: Any) -> bool:
    """Return whether the verified flatbuffer of a record batch has the field `compression`."""
    data = message.metadata.to_pybytes()
    table = unpack_from("<I", data)[0]
    for field in (2, 3):  # `header` of a message, `compression` of a record batch
        vtable, entry = table - unpack_from("<i", data, table)[0], 4 + 2 * field
        shift = unpack_from("<H", data, vtable + entry)[0] if entry < unpack_from("<H", data, vtable)[0] else 0
        if not shift:
            return False
        table += shift + unpack_from("<I", data, table + shift)[0]
    return True


def _arrow_values(name: str, column: Any) -> list[Any]:
    """Values of a `pyarrow` chunked array as JSON would have them; ValueError for an unsupported type."""
    kind = column.type
    item_type = str(kind.value_type if encode.is_list(kind) else kind)
    if not _ARROW_TYPES.fullmatch(item_type) and str(kind) not in ("null", "bool"):
        text = "integers, floating-point numbers, strings or lists of these; cast it"
        raise ValueError(f"column {name!r} has the Arrow type {str(kind)[:100]}, expected {text}")
    column.validate(full=True)
    is_float = pa.types.is_floating(kind)
    if column.null_count or not (is_float or pa.types.is_integer(kind)):
        return list(column.to_pylist())
    chunks = column.cast(pa.float64()).chunks if is_float else column.chunks
    return [value for chunk in chunks for value in encode.unmasked_values(chunk).tolist()]
