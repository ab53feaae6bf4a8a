"""What is wrong with a written scenario, in one sentence: the key, what it may be, and the nearest key or value that there is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def sentence(error: msgspec.ValidationError, written: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """The error that converting `written` to `kind` gave, for people. Tables are named as in TOML, with dots."""
    parted = _PLACE.fullmatch(str(error))
    what, path = (str(error), "") if parted is None else (parted["what"], parted["path"] or "")
    declared: inspect.Type = inspect.type_info(kind)
    value: Any = written
    for key, number in _STEP.findall(path):
        declared, value = _inside(declared, value, key, number)
    unknown, missing = _UNKNOWN.fullmatch(what), _MISSING.fullmatch(what)
    if unknown:
        return f"{_joined(path, unknown[1])} is unknown: {_near(unknown[1], declared, inspect.type_info(kind))}"
    if missing:
        needed, _ = _inside(declared, {}, missing[1], "")
        return f"{_joined(path, missing[1])} is missing: it must be {_allowed(needed)}"
    if not path:
        return str(error)
    listed = path.endswith("]") and not isinstance(declared, inspect.StructType)
    name = f"each of {path.rpartition('[')[0]}" if listed else path
    return f"{name} must be {_allowed(declared)}, not {value!r}{_meant(value, declared)}"


def _inside(declared: inspect.Type, value: Any, key: str, number: str) -> tuple[inspect.Type, Any]:
    """One step down, by the key of a table or the number of an item; types that are not known further are AnyType."""
    if number:
        item = declared.item_type if isinstance(declared, inspect.VarTupleType) else inspect.AnyType()
        return item, value[int(number)]
    types = {field.encode_name: field.type for field in _fields(declared)}
    below = types.get(key, inspect.AnyType())
    if isinstance(below, inspect.UnionType):
        below = next(each for each in below.types if not isinstance(each, inspect.NoneType))
    return below, value.get(key)


def _fields(declared: inspect.Type) -> Sequence[inspect.Field]:
    return declared.fields if isinstance(declared, inspect.StructType) else ()


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _near(key: str, declared: inspect.Type, whole: inspect.Type) -> str:
    """The same key of another table, or the key of this table that is most like `key`, or all that there are."""
    known = [field.encode_name for field in _fields(declared)]
    elsewhere = [full for full in _all_keys(whole) if full.rpartition(".")[2] == key]
    near = elsewhere or difflib.get_close_matches(key, known, 1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"


def _all_keys(declared: inspect.Type) -> Iterator[str]:
    for field in _fields(declared):
        yield field.encode_name
        yield from (f"{field.encode_name}.{below.encode_name}" for below in _fields(field.type))


def _allowed(declared: inspect.Type) -> str:
    """What a value of this type is, in words."""
    if isinstance(declared, inspect.LiteralType):
        return f"one of {', '.join(map(str, declared.values))}"
    if isinstance(declared, inspect.IntType | inspect.FloatType):
        word = "a whole number" if isinstance(declared, inspect.IntType) else "a number"
        return f"{word}{_bounds(declared)}"
    if isinstance(declared, inspect.VarTupleType):
        return f"a list, each of it {_allowed(declared.item_type)}"
    if isinstance(declared, inspect.StrType):
        return "a text of at least one character" if declared.min_length else "a text"
    if isinstance(declared, inspect.BoolType):
        return "true or false"
    if isinstance(declared, inspect.StructType):
        return f"a table with the keys {', '.join(field.encode_name for field in declared.fields)}"
    return "a table"


def _bounds(declared: inspect.IntType | inspect.FloatType) -> str:
    low, high, above = declared.ge, declared.le, declared.gt
    if low is not None:
        return f" from {low:g}" + (f" to {high:,}" if high is not None else "")
    return f" above {above:g}" if above is not None else ""


def _meant(value: Any, declared: inspect.Type) -> str:
    if not isinstance(declared, inspect.LiteralType) or not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value, [str(each) for each in declared.values], 1)
    return f": did you mean {near[0]}?" if near else ""
