"""Transforms: functions of a user on Arrow batches of a log, called in the parser threads before rows are encoded."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from tritonemb.data.files import LogFile, Part, pa
from tritonemb.data.parquet import ColumnTypes, drop_bad_rows, plain_schema
from tritonemb.data.pipeline import LogSource, ParsedChunk
from tritonemb.data.schema import LogOptions, Names, Schema
from tritonemb.utils import did_you_mean

SAMPLE_BYTES = 1 << 16  # of the first chunk of a log, which shows the types of the results


def transform(*, reads: Iterable[str] = (), makes: Iterable[str] = ()) -> Callable[[Any], Any]:
    """Declare the columns that a transform reads besides those of the schema, and those that the log does not have."""

    def decorate(function: Any) -> Any:
        vars(function).update(reads=tuple(reads), makes=tuple(makes))
        return function

    return decorate


class Transforms:
    """Functions, "module:function", that map a `pyarrow.RecordBatch` of valid rows in this order to one with as many
    rows. `schema`, `multi_hot`, `kinds` and `freeze` are those of the results, as of `LogSource`."""

    def __init__(self, names: Names) -> None:
        self._functions = {name: _load(name) for name in names}
        self._inputs, self._outputs = Names(), Names()  # columns of the log, besides those of the schema; new columns
        for function in self._functions.values():
            self._inputs += tuple(name for name in getattr(function, "reads", ()) if name not in self._outputs)
            self._outputs += tuple(getattr(function, "makes", ()))

    def columns(self, schema: Schema) -> Names:
        """Return the columns of a row of the log that results without labels need."""
        features = (name for name in (*schema.dense, *schema.sparse) if name not in self._outputs)
        return tuple(dict.fromkeys((*features, *self._inputs)))

    def open(
        self, source_class: Callable[..., LogSource], files: tuple[LogFile, ...], options: LogOptions, labelled: bool,
        extra_columns: Names,
    ) -> LogSource:  # fmt: skip
        """Open the columns of a log that the functions read; see `LogSource` for the arguments. Map its first rows:
        ValueError if a function fails, columns are missing, or the result of a row depends on other rows."""
        # Columns of the log; there may be no category among them.
        schema = copy.copy(options.schema)
        for role in ("dense", "sparse"):
            vars(schema)[role] = tuple(name for name in getattr(schema, role) if name not in self._outputs)
        # If they make a label, the other labels and the weight are read as columns, and checked after the transforms.
        makes_label = labelled and not {*schema.label_columns}.isdisjoint(self._outputs)
        remaining = [n for n in (*schema.label_columns, schema.weight) if makes_label and n and n not in self._outputs]
        vars(schema)["weight"] = "" if schema.weight in self._outputs else schema.weight
        columns = tuple(dict.fromkeys((*extra_columns, *self._inputs, *remaining)))
        source = source_class(files, replace(options, schema=schema), labelled and not makes_label, columns)
        # Columns of the results.
        self._labelled, self._extra_columns, self._checked = labelled, extra_columns, None
        self._types = ColumnTypes(options.schema if options.schema.label_columns else source.schema, labelled)
        if self._functions:
            self._map_first_rows(source)
        result: LogSource | ColumnTypes = self._types if self._functions else source
        self.schema, self.multi_hot, self.kinds = result.schema, result.multi_hot, result.kinds
        self.freeze = result.freeze
        return source

    def _map_first_rows(self, source: LogSource) -> None:
        for number in range(len(source.files)):
            for chunk in source.chunks(Part(number), number, SAMPLE_BYTES, 0, 0):
                parsed = source.parse(chunk)
                if not (batch := parsed.batch).num_rows:
                    continue
                location = partial(_row_range, parsed, partial(source.location, Part(number), chunk))
                whole, middle = self._map(batch, location), -(-batch.num_rows // 2)
                parts = (part for part in (batch.slice(0, middle), batch.slice(middle)) if part.num_rows)
                rows = [row for part in parts for row in self._map(part, location).to_pylist()]
                if str(rows) != str(whole.to_pylist()):  # as text: NaN differs from itself
                    names = ", ".join(self._functions)
                    raise ValueError(f"transforms {names}: a row's result depends on other rows of its batch")
                self._empty = whole.slice(0, 0)
                return
        raise ValueError(f"{source.files[0].path}: there are no valid rows to transform")

    def __call__(self, parsed: ParsedChunk, locate: Callable[[int], str]) -> ParsedChunk:
        """Map the valid rows of a chunk, and check their values; `locate` returns the location of a line of it."""
        if not self._functions or not parsed.batch.num_rows:
            return replace(parsed, batch=self._empty) if self._functions else parsed
        batch = self._map(parsed.batch, partial(_row_range, parsed, locate))
        return drop_bad_rows(replace(parsed, batch=batch), self.schema, self._labelled, " after transforms")

    def _map(self, batch: Any, location: Callable[[], str]) -> Any:
        result = batch
        for name, function in self._functions.items():
            try:
                if not isinstance(result := function(result), pa.RecordBatch):
                    raise TypeError(f"expected a pyarrow.RecordBatch, got a {type(result).__name__}")
                result = result.cast(plain_schema(result.schema))
                if result.num_rows != batch.num_rows:
                    raise ValueError(f"expected {batch.num_rows} rows, got {result.num_rows}")
            except Exception as error:
                raise ValueError(f"transform {name}, {location()}: {type(error).__name__}: {error}") from error
        # Columns of the schema; others, such as times, as they were.
        if result.schema != self._checked:
            self._types.check(result.schema, f"{location()}, after transforms")
            self._checked = result.schema  # of the latest result
        columns = {name: batch.column(name) for name in self._extra_columns}
        columns |= {name: result.column(name) for name in self._types.schema.columns(self._labelled)}
        return pa.RecordBatch.from_pydict(columns)


def _row_range(parsed: ParsedChunk, locate: Callable[[int], str]) -> str:
    first, last = (locate(int(parsed.lines[parsed.rows[index]])) for index in (0, -1))
    return f"{first} to {last.rpartition(', ')[2]}"


def _load(name: str) -> Callable[[Any], Any]:
    module, _, attribute = name.partition(":")
    try:
        names = vars(resolve_name(module))
        if callable(names.get(attribute)):
            return names[attribute]
        error: object = f"{module} has no function {attribute!r}{did_you_mean(attribute, names)}"
    except (ImportError, AttributeError, ValueError) as raised:
        error = raised
    raise ValueError(f"transform {name!r} must be MODULE:FUNCTION, installed or on PYTHONPATH: {error}")
