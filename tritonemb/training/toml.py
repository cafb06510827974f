"""Conversion between TOML, plain values and dataclasses of options, with the key and its section in errors."""

import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tritonemb.data import LogOptions, Schema
from tritonemb.utils import did_you_mean, require

Config = TypeVar("Config")

_MISMATCH = object()  # result of `_convert` for a value of another type
# Types of TOML values that are converted to the type of a field.
_CONVERSIBLE = {Path: (str,), float: (int,), str: (int, date, datetime)}


def plain(value: Any) -> Any:
    """Convert a value to nested dicts, lists and scalars for TOML and JSON; fields that are None are omitted."""
    if is_dataclass(value):
        return {name: plain(item) for name, item in vars(value).items() if item is not None}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def to_toml(config: Any) -> str:
    """Encode a dataclass as TOML; keys whose value is None are omitted."""
    return str(require("tomli_w").dumps(plain(config)))


def read_toml(path: str | Path, base: Config) -> Config:
    """Replace values of `base` by a TOML file's. Raise FileNotFoundError; ValueError for invalid keys or values."""
    return from_plain(load_toml(path), base, str(path))


def load_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file; raises as `read_toml`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a configuration in TOML")
    try:
        return tomllib.loads(Path(path).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested plain values to pairs of path and value, with paths such as `read.schema.label`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def from_plain(values: dict[str, Any], base: Config, where: str, section: str = "", root: Any = None) -> Config:
    """Replace values of `base`, converted to the types of its fields; errors name the source, `where` and `section`."""
    # Checkpoints of versions without clamp_negative: it was implied by log_transform.
    if isinstance(base, Schema) and {"log_transform", "sizes", "dynamic", "integers"} <= values.keys():
        values = {"clamp_negative": bool(values["log_transform"])} | values
    if isinstance(base, LogOptions):  # renamed; checkpoints and config files have the old key
        values = {{"workers": "parser_threads"}.get(key, key): value for key, value in values.items()}
    hints, changes = get_type_hints(type(base)), {}
    known = sorted(option.name for option in fields(base))  # type: ignore[arg-type]
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        if key not in known:
            hint = did_you_mean(key, known, f"; known keys are {', '.join(known)}")
            hint = "; move it above the sections" if section and hasattr(root, key) else hint
            raise ValueError(f"{where}: unknown key {name!r}{hint}")
        if is_dataclass(hints[key]) and isinstance(value, dict):
            changes[key] = from_plain(value, getattr(base, key), where, name, root or base)
        elif (converted := _convert(value, hints[key])) is _MISMATCH:
            raise ValueError(f"{where}: {name} is {value!r}, expected {_describe_type(hints[key])}")
        else:
            changes[key] = converted
    try:
        return replace(base, **changes)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}{f', [{section}]' if section else ''}: {error}") from error


def _convert(value: Any, hint: Any) -> Any:
    """Convert a TOML value to the type of a field; `_MISMATCH` if it has another type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next((converted for part in args if (converted := _convert(value, part)) is not _MISMATCH), _MISMATCH)
    if origin is Literal:
        return value if value in args else _MISMATCH
    if origin is tuple and isinstance(value, list):
        item_types = args[:1] * len(value) if args[-1] is Ellipsis else args
        converted = tuple(map(_convert, value, item_types)) if len(item_types) == len(value) else (_MISMATCH,)
        return _MISMATCH if _MISMATCH in converted else converted
    if type(value) in _CONVERSIBLE.get(hint, ()):
        return hint(value)
    return value if type(value) is hint else _MISMATCH


def _describe_type(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(part) for part in args if part is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple:
        return "a list of " + _describe_type(args[0])
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    return names.get(hint, "a section" if is_dataclass(hint) else str(hint))
