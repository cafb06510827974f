"""From the columns of a chunk to rows as a model takes them: numbers to float32, categories to ids.

Categories are hashed, with no pass over the data beforehand and the same ids on every machine. The 64-bit hash of a
value, all arithmetic modulo 2^64:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    seed(feature) = the first 8 bytes, little-endian, of SHA-256 of the feature's name in UTF-8
    hash(feature, integer x) = mix(seed(feature) ^ x), x in two's complement
    hash(feature, bytes s):  h = seed(feature)
                             for each 8 bytes w of s, little-endian, the last ones filled up with zeros: h = mix(h ^ w)
                             h = mix(h ^ length of s)

(`mix` is the finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014.) Strings are hashed as their UTF-8 bytes. Of
`n` ids, 0 stands for a missing value and the others for hashes: `id = 1 + ((hash >> 32) * (n - 1) >> 32)`.

Or a vocabulary numbers them, a Parquet file of `build_vocabulary` with a row a value: feature (string), value (string;
integers in decimal), id (int64), count (int64). Each feature's ids begin with 1, by descending count and then by value;
0 stands for missing, unseen and rarer values. The metadata name the features that have integers, or no value at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tritonemb.data.arrow import Values, string_buffers
from tritonemb.data.columns import Column, Rows
from tritonemb.data.protocol import Feature
from tritonemb.data.schema import Schema, listed
from tritonemb.utils import require

Array = np.ndarray[Any, Any]

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = (np.uint64(bits) for bits in (30, 27, 31, 32))


def feature_seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def hash_integers(values: Array, seed: np.uint64) -> Array:
    """uint64 hashes of integers `[N]`."""
    return mix(values.astype(np.uint64) ^ seed)


def hash_strings(data: Array, offsets: Array, seed: np.uint64) -> Array:
    """uint64 hashes `[N]` of strings: string i is `data[offsets[i] : offsets[i + 1]]`, uint8."""
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    padded = np.concatenate([data, np.zeros(8, dtype=np.uint8)])
    words = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,))
    hashes = np.full(len(starts), seed, dtype=np.uint64)
    active = np.flatnonzero(lengths > 0)
    place = 0
    while len(active):
        left = np.minimum(lengths[active] - place, 8)
        unused = ((8 - left) << 3).astype(np.uint64)
        word = words[starts[active] + place] << unused >> unused
        hashes[active] = mix(hashes[active] ^ word)
        place += 8
        active = active[lengths[active] > place]
    return mix(hashes ^ lengths.view(np.uint64))


def mix(hashes: Array) -> Array:
    """SplitMix64's finaliser, in place."""
    scratch = hashes >> _30
    hashes ^= scratch
    hashes *= _FIRST
    np.right_shift(hashes, _27, out=scratch)
    hashes ^= scratch
    hashes *= _SECOND
    np.right_shift(hashes, _31, out=scratch)
    hashes ^= scratch
    return hashes


def ids_of(hashes: Array, num_embeddings: int) -> Array:
    """int32 ids from 1 to `num_embeddings - 1`; overwrites the hashes."""
    hashes >>= _32
    hashes *= np.uint64(num_embeddings - 1)
    hashes >>= _32
    ids = hashes.astype(np.int32)
    ids += 1
    return ids


METADATA = b"tritonemb.vocabulary"
COLUMNS = ("feature", "value", "id", "count")
_SEED = np.uint64(0)


class Vocabulary:
    """The numberings of a vocabulary file, by feature."""

    def __init__(self, features: Mapping[str, FeatureVocabulary], path: Path) -> None:
        self.features, self.path = dict(features), path

    def feature(self, name: str) -> FeatureVocabulary:
        """ValueError, listing the features, if there is none of this name."""
        if name not in self.features:
            raise ValueError(f"{self.path}: the vocabulary has no feature {name!r}, only {listed(self.features)}")
        return self.features[name]

    @staticmethod
    def load(path: str | Path) -> Vocabulary:
        """Read a file that `build_vocabulary` wrote.

        Raises:
            FileNotFoundError, ValueError: it is not there, or not such a file.
        """
        pa, parquet = require("pyarrow"), require("pyarrow.parquet")
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such vocabulary; `tritonemb vocab` makes one")
        try:
            table = parquet.read_table(path)
            metadata = json.loads(table.schema.metadata[METADATA])
            columns = [table[name].combine_chunks() for name in COLUMNS]
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a vocabulary that `tritonemb vocab` made ({error})") from error
        features, (names, values, ids, _) = {}, columns
        codes = names.dictionary_encode()
        places = {name: place for place, name in enumerate(codes.dictionary.to_pylist())}
        indices = codes.indices.to_numpy()
        for name, kind in metadata.items():
            chosen = pa.array(np.flatnonzero(indices == places.get(name, -1)))
            features[name] = FeatureVocabulary(
                name, values.take(chosen), ids.take(chosen).to_numpy(), kind == "integer"
            )
        return Vocabulary(features, path)


class FeatureVocabulary:
    """One feature's numbering.

    Args:
        name: for messages.
        values: `pyarrow` strings, of integers in decimal if `integers`.
        ids: int64 `[len(values)]`.
    """

    def __init__(self, name: str, values: Any, ids: Array, integers: bool) -> None:
        pa = require("pyarrow")
        self._name = name
        self.num_embeddings = max(2, int(ids.max()) + 1) if len(ids) else 2
        self._integers = integers
        keys = values.cast(pa.int64()).to_numpy() if integers else hash_strings(*string_buffers(values), _SEED)
        order = np.argsort(keys, kind="stable")
        self._keys: Array = keys[order]
        self._ids: Array = ids[order].astype(np.int32)
        self._strings = None if integers else values.take(pa.array(order))
        if len(keys) and (self._keys[1:] == self._keys[:-1]).any():
            raise ValueError(f"feature {name!r} has a value twice in the vocabulary; build it again")

    def ids(self, values: Values) -> Array:
        """int32 `[N]`; 0 for what is missing or not in the vocabulary. Looks up each distinct value once."""
        pa = require("pyarrow")
        if values.strings is None:
            encoded = pa.array(values.numbers.astype(np.int64)).dictionary_encode()
            distinct, codes = encoded.dictionary.to_numpy(), encoded.indices.to_numpy()
            self._check_kind("integers", self._integers)
            found = self._lookup(distinct)
        else:
            codes = values.numbers
            self._check_kind("strings", not self._integers)
            found = self._strings_of(values.strings)
        ids: Array = found[codes] if len(found) else np.zeros(len(codes), dtype=np.int32)
        if values.missing is not None:
            ids[values.missing] = 0
        return ids

    def _check_kind(self, found: str, fits: bool) -> None:
        if not fits and len(self._keys):
            other = "integers" if self._integers else "strings"
            raise ValueError(
                f"feature {self._name!r} has {found}, but {other} in the vocabulary; build it from this log"
            )

    def _lookup(self, keys: Array) -> Array:
        if not len(self._keys):
            return np.zeros(len(keys), dtype=np.int32)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        ids: Array = np.where(self._keys[places] == keys, self._ids[places], np.int32(0))
        return ids

    def _strings_of(self, strings: Any) -> Array:
        """By hash, and then by the strings themselves."""
        if self._strings is None:
            return np.zeros(len(strings), dtype=np.int32)
        pa, compute = require("pyarrow"), require("pyarrow.compute")
        hashes = hash_strings(*string_buffers(strings), _SEED)
        ids = self._lookup(hashes)
        hits = np.flatnonzero(ids)
        if len(hits):
            known = self._strings.take(pa.array(np.searchsorted(self._keys, hashes[hits])))
            same = compute.equal(known.cast(pa.large_string()), strings.take(pa.array(hits)).cast(pa.large_string()))
            ids[hits[~same.to_numpy(zero_copy_only=False)]] = 0
        return ids


_LOGARITHMS = np.log1p(np.arange(1 << 12)).astype(np.float32)


class Numbering(Protocol):
    """How the values of one feature become ids."""

    @property
    def num_embeddings(self) -> int: ...

    def ids(self, values: Values) -> Array:
        """int32 `[N]`, 0 where missing."""
        ...


class Hashed:
    """By the hash of this module."""

    def __init__(self, name: str, num_embeddings: int) -> None:
        self.num_embeddings = num_embeddings
        self._seed = feature_seed(name)

    def ids(self, values: Values) -> Array:
        if values.strings is None:
            ids = ids_of(hash_integers(values.numbers, self._seed), self.num_embeddings)
        else:
            ids = ids_of(hash_strings(*string_buffers(values.strings), self._seed), self.num_embeddings)
            ids = ids[values.numbers] if len(ids) else np.zeros(len(values.numbers), dtype=np.int32)
        if values.missing is not None:
            ids[values.missing] = 0
        return ids


def numberings(schema: Schema) -> dict[str, Numbering]:
    """One for each sparse column.

    Raises:
        FileNotFoundError, ValueError: the vocabulary is not there, or not one of these columns.
    """
    if schema.vocabulary is not None:
        if schema.sizes:
            raise ValueError("schema: sizes are of hashed categories; a vocabulary has sizes of its own")
        vocabulary = Vocabulary.load(schema.vocabulary)
        return {name: vocabulary.feature(name) for name in schema.sparse}
    sizes = schema.sizes_by_name()
    return {name: Hashed(name, sizes.get(name, schema.num_embeddings)) for name in schema.sparse}


class Encoder:
    """A sink for the columns of one chunk; `rows` is what they came to.

    Args:
        features: in the order of the ids' columns.
        numberings: one for each of them.
    """

    def __init__(self, schema: Schema, features: tuple[Feature, ...], numberings: dict[str, Numbering]) -> None:
        self._schema, self._features, self._numberings = schema, features, numberings
        self._places = {name: place for place, name in enumerate(schema.dense)}
        self._dense: Array | None = None
        self._labels: Array | None = None
        self._columns: dict[str, Column] = {}

    def put(self, name: str, values: Values) -> None:
        if name == self._schema.label:
            self._labels = values.numbers.astype(np.float32)
        elif name in self._places:
            if self._dense is None:
                self._dense = np.empty((len(values.numbers), len(self._places)), dtype=np.float32)
            self._dense[:, self._places[name]] = numbers(values, self._schema.is_logarithmic(name))
        elif name in self._numberings:
            ids = torch.from_numpy(self._numberings[name].ids(values))
            self._columns[name] = Column(ids, None if values.offsets is None else torch.from_numpy(values.offsets))

    def rows(self) -> Rows:
        columns = tuple(self._columns[feature.name] for feature in self._features)
        # A log that is scored may have no labels.
        labels = np.zeros(len(columns[0]), dtype=np.float32) if self._labels is None else self._labels
        dense = np.empty((len(labels), 0), dtype=np.float32) if self._dense is None else self._dense
        return Rows(torch.from_numpy(dense), columns, torch.from_numpy(labels))


def numbers(values: Values, logarithmic: bool) -> Array:
    """float32 `[N]`, 0 where missing; `log(1 + max(x, 0))` if asked for, in float64 before it is rounded."""
    found = values.numbers
    if values.missing is not None:
        found = np.where(values.missing, found.dtype.type(0), found)
    if not logarithmic:
        with np.errstate(over="ignore"):  # in bad rows
            return found.astype(np.float32)
    if found.dtype.kind == "f":
        return np.log1p(np.maximum(found, 0)).astype(np.float32)
    found = np.maximum(found, 0)
    logarithms: Array = np.take(_LOGARITHMS, found, mode="clip")
    large = np.flatnonzero(found >= len(_LOGARITHMS))
    logarithms[large] = np.log1p(found[large])
    return logarithms
