"""A configuration as TOML and back: nested frozen dataclasses of plain values, tuples and paths."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tritonemb.utils import require

Config = TypeVar("Config")


def to_plain(config: Any) -> dict[str, Any]:
    """A dataclass as nested dicts of what TOML and JSON know; fields that are None are left out."""
    return {
        field.name: plain(value)
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) is not None
    }


def to_toml(config: Any) -> str:
    """A dataclass as TOML; None is the absence of a key."""
    text: str = require("tomli_w").dumps(to_plain(config))
    return text


def read_toml(path: str | Path, base: Config) -> Config:
    """`base` with the values of a TOML file in place of its own.

    Raises:
        FileNotFoundError, ValueError: the file is missing or not valid TOML; an unknown key, with the nearest known
            one; a value of a wrong type or out of range.
    """
    return from_plain(load_toml(path), base, str(path))


def load_toml(path: str | Path) -> dict[str, Any]:
    """The contents of a TOML file.

    Raises:
        FileNotFoundError, ValueError: as `read_toml`.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a configuration in TOML")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def from_plain(values: dict[str, Any], base: Config, where: str) -> Config:
    """`base` with these values in place of its own; `where` names their source in errors. Keys may be left out.

    Raises:
        ValueError: as `read_toml`.
    """
    return _merged(values, base, where, "")


def plain(value: Any) -> Any:
    """A value as nested lists and dicts of what TOML and JSON know."""
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    return value


def _merged(values: dict[str, Any], base: Any, where: str, section: str) -> Any:
    known, hints, changed = {field.name for field in dataclasses.fields(base)}, get_type_hints(type(base)), {}
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        if key not in known:
            found = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
            hint = f"; did you mean {found[0]!r}?" if found else f"; known are {', '.join(sorted(known))}"
            raise ValueError(f"{where}: unknown key {name!r}{hint}")
        current = getattr(base, key)
        if dataclasses.is_dataclass(current) and isinstance(value, dict):
            changed[key] = _merged(value, current, where, name)
        elif (converted := _as(value, hints[key])) is _NO:
            raise ValueError(f"{where}: {name} is {value!r}, expected {_words(hints[key])}")
        else:
            changed[key] = converted
    try:
        return dataclasses.replace(base, **changed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}{f', [{section}]' if section else ''}: {error}") from error


_NO = object()


def _as(value: Any, hint: Any) -> Any:
    """The value as a field of this type has it; `_NO` where it is of another type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next((found for part in parts if (found := _as(value, part)) is not _NO), _NO)
    if origin is Literal:
        return value if value in parts else _NO
    if origin is tuple and isinstance(value, list):
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) != len(value):
            return _NO
        found = tuple(map(_as, value, kinds))
        return _NO if _NO in found else found
    if origin is dict and isinstance(value, dict):
        entries = {key: _as(part, parts[1]) for key, part in value.items()}
        return _NO if _NO in entries.values() else entries
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _NO


def _words(hint: Any) -> str:
    """What is expected of a value of this type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(part) for part in parts if part is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if origin is tuple:
        return "a list of " + _words(parts[0])
    if dataclasses.is_dataclass(hint):
        return "a section"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    return names.get(hint, str(hint))
