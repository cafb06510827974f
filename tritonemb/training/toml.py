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
    """`base` with what a TOML file says in place of its values.

    Raises:
        FileNotFoundError, ValueError: the file is missing or no TOML; an unknown key, with the nearest known one; a
            value of a wrong type or out of range.
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
        raise ValueError(f"{path} is no TOML: {error}") from error


def from_plain(values: dict[str, Any], base: Config, where: str) -> Config:
    """`base` with these values, which `where` is their source of; the inverse of `to_plain` where keys are left out.

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
    known = {field.name for field in dataclasses.fields(base)}
    hints = get_type_hints(type(base))
    changed = {}
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        if key not in known:
            raise ValueError(f"{where}: unknown key {name!r}{_nearest(key, base)}")
        changed[key] = _converted(value, hints[key], getattr(base, key), where, name)
    try:
        return dataclasses.replace(base, **changed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}{f', [{section}]' if section else ''}: {error}") from error


def _nearest(key: str, base: Any) -> str:
    known = sorted(field.name for field in dataclasses.fields(base))
    found = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else f"; known are {', '.join(known)}"


def _converted(value: Any, hint: Any, base: Any, where: str, name: str) -> Any:
    """The value as the field's type wants it."""
    if dataclasses.is_dataclass(base) and isinstance(value, dict):
        return _merged(value, base, where, name)
    for choice in _choices(hint):
        found = _as(value, choice)
        if found is not _NO:
            return found
    raise ValueError(f"{where}: {name} is {value!r}, expected {_words(hint)}")


_NO = object()


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _as(value: Any, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        return value if value in get_args(hint) else _NO
    if origin is tuple and isinstance(value, list):
        parts = get_args(hint)
        kinds = [parts[0]] * len(value) if len(parts) == 2 and parts[1] is Ellipsis else list(parts)
        if len(kinds) != len(value):
            return _NO
        found = [next((f for c in _choices(k) if (f := _as(v, c)) is not _NO), _NO) for v, k in zip(value, kinds)]  # noqa: B905
        return _NO if _NO in found else tuple(found)
    if origin is dict and isinstance(value, dict):
        kind = get_args(hint)[1]
        entries = {key: _as(part, kind) for key, part in value.items()}
        return _NO if any(part is _NO for part in entries.values()) else entries
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if isinstance(hint, type) and type(value) is hint else _NO


def _words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
    words = []
    for choice in _choices(hint):
        origin = get_origin(choice)
        if origin is Literal:
            words.append("one of " + ", ".join(repr(value) for value in get_args(choice)))
        elif origin is tuple:
            words.append("a list of " + _words(get_args(choice)[0]))
        elif dataclasses.is_dataclass(choice):
            words.append("a section")
        elif choice is not type(None):
            words.append(names.get(choice, str(choice)))
    return " or ".join(words)
