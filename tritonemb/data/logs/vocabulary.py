"""Vocabularies of logs: which value of which feature has which id, kept in a file that `build_vocabulary` writes.

The file is Parquet, a row a value: feature (string), value (string; integers in decimal), id (int64), count (int64).
Each feature's ids begin with 1, by descending count and then by value; 0 stands for missing, unseen and rarer values.
The file's metadata say which features have integers, and which have no value at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tritonemb.data.logs.hashing import hash_strings
from tritonemb.data.logs.problems import listed
from tritonemb.data.logs.values import Values, string_buffers
from tritonemb.utils import require

Array = np.ndarray[Any, Any]

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
