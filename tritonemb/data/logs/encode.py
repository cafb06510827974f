"""From the columns of a chunk to rows as a model takes them: numbers to float32, categories to ids."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from tritonemb.data.columns import Column, Rows
from tritonemb.data.logs.hashing import feature_seed, hash_integers, hash_strings, ids_of
from tritonemb.data.logs.schema import Schema
from tritonemb.data.logs.values import Values, string_buffers
from tritonemb.data.logs.vocabulary import Vocabulary
from tritonemb.data.protocol import Feature

Array = np.ndarray[Any, Any]

_LOGARITHMS = np.log1p(np.arange(1 << 12)).astype(np.float32)


class Numbering(Protocol):
    """How the values of one feature become ids."""

    @property
    def num_embeddings(self) -> int: ...

    def ids(self, values: Values) -> Array:
        """int32 `[N]`, 0 where missing."""
        ...


class Hashed:
    """By the hash of `tritonemb.data.logs.hashing`."""

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
