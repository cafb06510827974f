"""Encoding of Arrow columns as rows for a model: numbers as float32, categories as ids; and detection of bad rows.

Categories are hashed, without a pass over the data and with the same ids on every machine. The 64-bit hash of a value,
all arithmetic modulo 2^64:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    seed(feature) = the first 8 bytes, little-endian, of SHA-256 of the feature's name in UTF-8
    hash(feature, integer x) = mix(seed(feature) ^ x), x in two's complement
    hash(feature, bytes s):  h = seed(feature)
                             for each 8 bytes w of s, little-endian, the last padded with zeros: h = mix(h ^ w)
                             h = mix(h ^ length of s)

(`mix` is the finalizer of SplitMix64: Steele, Lea, Flood, OOPSLA 2014.) Strings are hashed as UTF-8 bytes. Of `n` ids,
0 is for missing values and the others for hashes: `id = 1 + ((hash >> 32) * (n - 1) >> 32)`.

Alternatively a vocabulary numbers them: a Parquet file of `build_vocabulary` with one row per value: feature (string),
value (string; integers in decimal), id (int64), count (int64). Ids of a feature begin with 1, by descending count and
then by value; 0 is for missing, unseen and rarer values. The metadata have the kind of each feature's values.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.data.batch import Array, Column, Rows, lengths_to_offsets
from tritonemb.data.files import LogFile, compute, fs, open_parquet, pa
from tritonemb.data.protocol import Feature
from tritonemb.data.schema import CATEGORIES, Schema, quote_value
from tritonemb.data.sequences import keep_last
from tritonemb.utils import LazyModule, join_names

loops: Any = LazyModule("tritonemb.data.loops")  # loads Numba
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = (np.uint64(bits) for bits in (30, 27, 31, 32))


def feature_seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def hash_integers(values: Array, seed: Any) -> Array:
    """Hash integers `[N]` to uint64 `[N]`; the seed is a scalar, or uint64 `[N]`."""
    return mix(values.astype(np.uint64) ^ seed)


def hash_strings(data: Array, offsets: Array, seed: Any) -> Array:
    """Hash strings to uint64 `[N]`: string i is `data[offsets[i] : offsets[i + 1]]`, uint8; `seed` as for integers."""
    hashes = np.full(len(offsets) - 1, seed, dtype=np.uint64)
    loops.hash_strings(read_only(data), read_only(offsets.astype(np.int64)), hashes)
    return hashes


def read_only(array: Array) -> Array:
    """View an array as read-only, as those of `pyarrow` are: loops are compiled for these types only."""
    view = array.view()
    view.flags.writeable = False
    return view


def mix(hashes: Array) -> Array:
    """Apply the finalizer of SplitMix64 in place."""
    hashes ^= hashes >> _30
    hashes *= _FIRST
    hashes ^= hashes >> _27
    hashes *= _SECOND
    hashes ^= hashes >> _31
    return hashes


def hashes_to_ids(hashes: Array, num_embeddings: Any) -> Array:
    """Map hashes to int32 ids from 1 to `num_embeddings - 1`; overwrites the hashes."""
    hashes >>= _32
    hashes *= np.uint64(num_embeddings - 1)
    hashes >>= _32
    ids = hashes.astype(np.int32)
    ids += 1
    return ids


MISSING = -(2**63)  # id of missing values in dynamic tables, where integers are their own ids
METADATA = b"tritonemb.vocabulary"
COLUMNS = ("feature", "value", "id", "count")
INFINITE = 2.0**128 - 2.0**103  # the least number that rounds to infinity in float32
_LOGARITHMS = np.log1p(np.arange(1 << 14)).astype(np.float32)
_TEXT = ("string", "large_string", "binary", "large_binary")


def is_list(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def is_text(kind: Any) -> bool:
    """Return whether a `pyarrow` type is a string or binary type, dictionary-encoded or not."""
    return str(value_type(kind)) in _TEXT


def value_type(kind: Any) -> Any:
    """Return the value type of a dictionary type; other types unchanged."""
    return kind.value_type if hasattr(kind, "index_type") else kind


def missing_mask(array: Any) -> Array:
    """Return a mask (bool `[N]`) of the nulls and NaN of a `pyarrow` array."""
    return mask_of(array.is_null(nan_is_null=True))


def mask_of(booleans: Any) -> Array:
    """Convert a `pyarrow` array of booleans without nulls to NumPy."""
    bits, stop = np.frombuffer(booleans.buffers()[1] or b"", np.uint8), booleans.offset + len(booleans)
    return np.unpackbits(bits, count=stop, bitorder="little")[booleans.offset :].view(bool)


def arrow_array(values: Array) -> Any:
    """Convert booleans or integers to a `pyarrow` array; `pyarrow.array` would import pandas, if installed."""
    data = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(data)])


def unmasked_values(array: Any) -> Array:
    """Return integers or float64, undefined under nulls; pyarrow's `to_numpy` would import pandas, if installed."""
    dtype, buffer = np.dtype(str(array.type)), array.buffers()[1]
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize) if len(array) else np.zeros(0, dtype)


def integer_values(array: Any, fill: bool = True) -> Array:
    """Convert a `pyarrow` array of integers, booleans or nulls to NumPy; nulls become 0, or undefined unless `fill`."""
    if not pa.types.is_integer(array.type):
        array = array.cast(pa.int64())
    values = unmasked_values(array)
    return np.where(missing_mask(array), values.dtype.type(0), values) if fill and array.null_count else values


def numeric_values(array: Any) -> Array:
    """Convert a `pyarrow` array of numbers to int64, or from uint64 and floats to float64; 0 for missing values."""
    array = array.cast(value_type(array.type))
    if not pa.types.is_floating(array.type):
        values = integer_values(array)
        return values.astype(np.float64 if values.dtype == np.uint64 else np.int64, copy=False)
    array = array.cast(pa.float64())
    return np.where(missing_mask(array), 0.0, unmasked_values(array))


def scale_numbers(values: Array, logarithmic: bool) -> Array:
    """Convert numbers by float64 to float32 `[N]`, if `logarithmic` as `log(1 + max(x, 0))`, computed in float64."""
    if not logarithmic:
        return values.astype(np.float64, copy=False).astype(np.float32)
    if values.dtype.kind == "f":
        return np.log1p(np.maximum(values, 0)).astype(np.float32)
    logarithms: Array = np.take(_LOGARITHMS, values, mode="clip")  # negative values, too
    large = np.flatnonzero(values >= len(_LOGARITHMS))
    logarithms[large] = np.log1p(values[large])
    return logarithms


def to_integers(strings: Any) -> Any:
    """Parse `pyarrow` strings of decimal digits as int64; null for missing and other strings."""
    decimal = compute.match_substring_regex(strings, "^-?[0-9]{1,19}$")
    strings = compute.if_else(decimal, strings, pa.scalar(None, strings.type)).cast(pa.large_string())
    try:
        return strings.cast(pa.int64())
    except pa.ArrowInvalid:  # integers of 19 digits may overflow
        values = [None if value is None else int(value) for value in strings.to_pylist()]
        return pa.array([n if n is not None and -(1 << 63) <= n < 1 << 63 else None for n in values], pa.int64())


def parse_criteo(lines: Array, num_rows: int, num_numbers: int, num_categories: int, is_labelled: bool) -> Any:
    """Parse lines (uint8) of integers, then hexadecimal categories, to `pyarrow` arrays of int64 and uint32; None if a
    line is invalid. A label, the first integer, has one digit."""
    numbers, categories = np.empty((num_numbers, num_rows), np.int64), np.empty((num_categories, num_rows), np.uint32)
    validity = np.zeros((num_numbers + num_categories, -(-num_rows // 8)), np.uint8)
    if not loops.parse_criteo(read_only(lines), is_labelled, numbers, categories, validity):
        return None
    types = [pa.int64()] * num_numbers + [pa.uint32()] * num_categories
    buffers = [list(map(pa.py_buffer, pair)) for pair in zip(validity, (*numbers, *categories), strict=True)]
    return [pa.Array.from_buffers(kind, num_rows, pair) for kind, pair in zip(types, buffers, strict=True)]


def find_invalid_values(batch: Any, schema: Schema, labelled: bool = True) -> list[tuple[str, str, Array]]:
    """Check the values of a `pyarrow.RecordBatch` with some of a schema's columns. Return for each failed check the
    column's name, the expectation, and a mask (bool `[N]`) of the bad rows."""
    problems: list[tuple[str, str, Array]] = []
    labels = [name for name in schema.label_columns if labelled and name in batch.schema.names]
    missing = [missing_mask(column.cast(value_type(column.type))) for column in map(batch.column, labels)]
    for name in labels:
        values = numeric_values(batch.column(name))
        problems.append((name, "0 or 1" + ", or nothing" * bool(schema.labels), (values != 0) & (values != 1)))
    if labels and (batch.num_columns > 1 or not schema.labels):  # of a single field, the other labels are unknown
        text = "0 or 1" + f" in at least one of {join_names(labels)}" * bool(schema.labels)
        problems.append((labels[0], text, np.all(missing, axis=0)))
    if labelled and schema.weight in batch.schema.names:
        weight = batch.column(schema.weight)
        values, absent = numeric_values(weight), missing_mask(weight.cast(value_type(weight.type)))
        invalid = absent | ~((values >= 0) & (values < INFINITE))
        problems.append((schema.weight, "a finite number of 0 or more", invalid))
    for name, column in ((name, batch.column(name)) for name in schema.dense if name in batch.schema.names):
        logarithmic = schema.is_logarithmic(name)
        if pa.types.is_floating(value_type(column.type)):
            values = numeric_values(column)
            infinite = np.isinf(values)
            problems.append((name, "a finite number or nothing", infinite))
            if not logarithmic:
                problems.append((name, "a number that fits float32", (np.abs(values) >= INFINITE) & ~infinite))
        if logarithmic and not schema.clamps(name):
            problems.append((name, "0 or more under log_transform, or clamp_negative", numeric_values(column) < 0))
    return [entry for entry in problems if entry[2].any()]


def valid_row_mask(batch: Any, invalid_values: list[tuple[str, str, Array]]) -> Array:
    return ~np.any([np.zeros(batch.num_rows, bool), *(mask for *_, mask in invalid_values)], axis=0)


def string_buffers(strings: Any) -> tuple[Array, Array]:
    """Return bytes (uint8) and offsets `[N + 1]` (int32 or int64) of a `pyarrow` array of strings or binary."""
    dtype = np.dtype(np.int64 if str(strings.type).startswith("large") else np.int32)
    if len(strings) == 0:
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=dtype)
    _, offsets, data = strings.buffers()
    ends = np.frombuffer(offsets, dtype, len(strings) + 1, strings.offset * dtype.itemsize)
    return np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, np.uint8), ends


class Numbering:
    """Map from the values of one feature to ids in `[0, num_embeddings)`: by hash, or by a vocabulary of distinct
    `pyarrow` strings or int64 and their ids, int64 from 1 on. If `dynamic`, ids are any int64: integers, or hashes."""

    def __init__(
        self, name: str, num_embeddings: int, values: Any = None, ids: Array | None = None, dynamic: bool = False
    ) -> None:
        self.name, self.num_embeddings, self.dynamic, self._seed = name, num_embeddings, dynamic, feature_seed(name)
        self._dtype: Any = np.int64 if dynamic else np.int32
        self._missing = MISSING if dynamic else 0
        self._keys: Array | None = None  # sorted keys of the vocabulary: integers, or hashes of strings
        if values is not None and ids is not None:
            keys = hash_strings(*string_buffers(values), self._seed) if is_text(values.type) else integer_values(values)
            order = np.argsort(keys, kind="stable")
            self._keys, self._ids = keys[order], ids[order].astype(np.int32)
            self._values = values.take(arrow_array(order))
            if (self._keys[1:] == self._keys[:-1]).any():
                raise ValueError(f"feature {name!r} has a duplicate value in the vocabulary; build it again")

    def ids(self, array: Any, kind: str = "") -> Array:
        """Map a `pyarrow` array of strings or integers to int32 `[N]`, 0 for missing values; to int64 and `MISSING` if
        dynamic. Strings are parsed if `kind` is "integers"; raise ValueError for a value of another kind."""
        if array.null_count == len(array) or str(value_type(array.type)) == "null":
            return np.full(len(array), self._missing, dtype=self._dtype)
        if kind and is_text(array.type) != (kind == "strings"):
            values = array.cast(value_type(array.type))
            array = to_integers(values) if kind == "integers" else pa.nulls(len(values), pa.int64())
            if len(invalid_values := values.filter(array.is_null()).drop_null()):
                invalid_value = f"{values.type} {quote_value(invalid_values[0])}"
                raise ValueError(f"feature {self.name!r} was trained with {kind}, has {invalid_value}")
        # Hash integers in one pass.
        is_integer = pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)
        if is_integer and self._keys is None and not self.dynamic:
            ids = np.empty(len(array), np.int32)
            validity = np.frombuffer(array.buffers()[0] if array.null_count else b"", np.uint8)
            values = integer_values(array, fill=False)
            if values.itemsize != 4:
                values = values.view(np.int64) if values.itemsize == 8 else values.astype(np.int64)
            arrays = read_only(values), read_only(validity)
            loops.integer_ids(*arrays, array.offset, self._seed, self.num_embeddings, ids)
            return ids
        # Map distinct values only, where that saves work.
        if hasattr(array.type, "index_type") and len(array.dictionary) > len(array):
            array = array.dictionary_decode()
        if not hasattr(array.type, "index_type") and self._keys is not None:
            array = array.dictionary_encode()
        is_encoded = hasattr(array.type, "index_type")
        ids = self._unmasked_ids(array.dictionary if is_encoded else array)
        if is_encoded:
            ids[missing_mask(array.dictionary)] = self._missing
            ids = ids.take(integer_values(array.indices, fill=False), mode="clip")  # any under nulls
        if array.null_count:
            np.putmask(ids, missing_mask(array), self._missing)
        return ids

    def _unmasked_ids(self, values: Any) -> Array:
        text, known = is_text(values.type), self._keys
        keys = hash_strings(*string_buffers(values), self._seed) if text else integer_values(values, fill=False)
        if self.dynamic:
            return keys.astype(np.int64)  # unsigned hashes keep their bits
        if known is None:
            return hashes_to_ids(keys if text else hash_integers(keys, self._seed), self.num_embeddings)
        if not len(known):
            return np.zeros(len(keys), dtype=np.int32)
        if text != (known.dtype == np.uint64):
            actual, expected = ("strings", "integers") if text else ("integers", "strings")
            raise ValueError(f"feature {self.name!r} has {actual}, the vocabulary {expected}; build it from this log")
        keys = keys.astype(known.dtype, copy=False)
        slots = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        ids: Array = np.where(known[slots] == keys, self._ids[slots], np.int32(0))
        if text:
            hits = np.flatnonzero(ids)  # compared by hash so far; compare the strings
            pairs = ((self._values, slots[hits]), (values, hits))
            equal = compute.equal(*(strings.take(arrow_array(at)).cast(pa.large_string()) for strings, at in pairs))
            ids[hits[~mask_of(compute.fill_null(equal, False))]] = 0
        return ids


Numberings = Mapping[str, Numbering]


def load_vocabulary(path: str | Path) -> dict[str, Numbering]:
    """Load the numberings in a file of `build_vocabulary`; raise FileNotFoundError, or ValueError for other files."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such vocabulary; build it with `tritonemb vocab`")
    file = LogFile(path, "parquet", None, path.stat().st_size, stored=(fs.LocalFileSystem(), str(path)))
    try:
        with open_parquet(file) as (source, verify):
            for group in range(source.num_row_groups):
                verify(group)
            table = source.read().select(COLUMNS)
        numberings = {}
        for name, kind in json.loads(table.schema.metadata[METADATA]).items():
            feature_table = table.filter(compute.equal(table["feature"], name))
            values, ids = feature_table["value"].combine_chunks(), integer_values(feature_table["id"].combine_chunks())
            values = values.cast(pa.int64()) if kind == "integer" else values
            numberings[name] = Numbering(name, max(2, int(ids.max(initial=0)) + 1), values, ids)
    except (AttributeError, pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a vocabulary of `tritonemb vocab` ({error})") from error
    return numberings


def make_numberings(schema: Schema) -> dict[str, Numbering]:
    """Return the numbering of each sparse column. Raise FileNotFoundError; ValueError if the vocabulary lacks one."""
    sizes, shared = schema.sizes_by_name(), schema.shared_tables()
    tables = {name: shared.get(name, name) for name in schema.sparse}
    if schema.vocabulary is None:
        default, dynamic = schema.num_embeddings, schema.dynamic
        return {name: Numbering(t, sizes.get(t, default), dynamic=dynamic) for name, t in tables.items()}
    if sizes:
        raise ValueError("schema: sizes are for hashed categories; the vocabulary determines its sizes")
    vocabulary = load_vocabulary(schema.vocabulary)
    if unknown := [table for table in tables.values() if table not in vocabulary]:
        known = join_names(vocabulary)
        raise ValueError(f"{schema.vocabulary}: the vocabulary has no feature {unknown[0]!r}, only {known}")
    return {name: vocabulary[table] for name, table in tables.items()}


def encode_categories(column: Any, num_train: int, min_count: int = 1) -> tuple[Tensor, int]:
    """Number the categories of a `pyarrow` array by frequency in its first `num_train` rows; return int32 ids and their
    number. Id 0 is for missing and unseen values, and those in fewer than `min_count` of these rows."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    frequent = most_frequent(count_values(array[:num_train]), min_count)
    numbering = Numbering("", len(frequent) + 1, frequent["value"].combine_chunks(), np.arange(1, len(frequent) + 1))
    return torch.from_numpy(numbering.ids(array)), len(frequent) + 1


def count_values(array: Any) -> Any:
    """Count distinct values: a table of value (large string or int64) and count, without missing values."""
    if is_list(array.type):
        array = compute.list_flatten(array)
    array = array.cast(value_type(array.type)).drop_null()
    is_string = is_text(array.type)
    array = array.cast(pa.large_string()) if is_string else arrow_array(integer_values(array).astype(np.int64))
    counts = compute.value_counts(array)
    return pa.table({"value": counts.field("values"), "count": counts.field("counts")})


def most_frequent(counts: Any, min_count: int, max_size: int | None = None) -> Any:
    """Return the `max_size` most frequent values of a table of `count_values`, by descending count; ties by value."""
    frequent = counts.filter(compute.greater_equal(counts["count"], min_count))
    return frequent.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, max_size)


def encode(
    batch: Any,
    schema: Schema,
    features: Sequence[Feature],
    numberings: Numberings,
    labelled: bool,
    from_text: bool = False,
) -> Rows:
    """Encode a `pyarrow.RecordBatch` as rows; labels are 0 and weights 1 unless `labelled`.

    With `from_text`, for a model trained on text, strings are read as there: empty ones are missing, and Criteo's
    categories hexadecimal.
    """
    dense = np.empty((batch.num_rows, len(schema.dense)), dtype=np.float32)
    for column_index, name in enumerate(schema.dense):
        dense[:, column_index] = scale_numbers(numeric_values(batch.column(name)), schema.is_logarithmic(name))
    labels, weights = np.zeros((batch.num_rows, *[len(schema.labels)] * bool(schema.labels)), np.float32), None
    if labelled and not schema.labels:
        labels = numeric_values(batch.column(schema.label)).astype(np.float32)
    for label_index, column in enumerate(map(batch.column, schema.labels if labelled else ())):
        absent = missing_mask(column.cast(value_type(column.type)))
        labels[:, label_index] = np.where(absent, np.nan, numeric_values(column))
    if labelled and schema.weight:
        weights = torch.from_numpy(numeric_values(batch.column(schema.weight)).astype(np.float32))
    lengths = schema.lengths_by_name()
    columns = []
    for feature in features:
        array, offsets, name = batch.column(feature.name), None, feature.name
        if feature.multi_hot and pa.types.is_null(array.type):
            array = pa.nulls(len(array), pa.list_(pa.null()))
        if is_list(array.type):
            offsets = torch.from_numpy(lengths_to_offsets(integer_values(compute.list_value_length(array))))
            array = compute.list_flatten(array)
        if from_text and is_text(array.type):
            array = _values_of_text(array, name, is_hexadecimal=name in CATEGORIES and schema.sparse == CATEGORIES)
        column = Column(torch.from_numpy(numberings[name].ids(array, feature.kind)), offsets)
        columns.append(keep_last(column, lengths[name]) if name in lengths and offsets is not None else column)
    return Rows(torch.from_numpy(dense), tuple(columns), torch.from_numpy(labels), weights)


def _values_of_text(strings: Any, name: str, is_hexadecimal: bool) -> Any:
    """Convert `pyarrow` strings to what a text file with them has: null for empty ones, and hexadecimal numbers."""
    is_binary = "binary" in str(value_type(strings.type))
    strings = strings.cast(pa.large_binary() if is_binary else pa.large_string())
    empty = pa.scalar(b"" if is_binary else "", strings.type)
    strings = compute.if_else(compute.equal(strings, empty), pa.scalar(None, strings.type), strings)
    if not is_hexadecimal:
        return strings
    texts = compute.fill_null(strings, empty)
    lines = compute.binary_join_element_wise(texts, empty, pa.scalar("\n").cast(strings.type))  # lines of one field
    data, ends = string_buffers(lines)
    if (columns := parse_criteo(data[: ends[-1]], len(texts), 0, 1, False)) is None:
        (invalid, *_) = texts.filter(compute.invert(compute.match_substring_regex(texts, "^[0-9a-fA-F]{0,8}$")))
        raise ValueError(
            f"column {name!r} is {quote_value(invalid.as_py())}, expected up to 8 hexadecimal digits or nothing"
        )
    return columns[0]
