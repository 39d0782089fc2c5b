"""Plain values of files, options and arguments against annotated types: the one check of what users write.

Types and ranges (``Literal``, ``msgspec.Meta``) stand in annotations and are checked by msgspec; rules among several fields in
``__post_init__``, which raises BadValue. A mistake is one line that begins with the path of the key and names what is allowed.
msgspec's own messages name neither values nor keys of mappings, and it ignores unknown keys of dataclasses.
"""

from __future__ import annotations

import difflib
import functools
import re
import reprlib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, structs

from pipedec.core.errors import BadValue
from pipedec.core.records import LARGEST

_NAMES: dict[Any, str] = {
    int: "an integer", float: "a number", str: "a string", bool: "true or false", list: "a list", tuple: "a list",
    dict: "a mapping", type(None): "empty",
}  # fmt: skip
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 1  # the inside of a list or a mapping may hold a password
_LIMITS = {
    "ge": "at least {:.12g}", "gt": "above {:.12g}", "le": "at most {:.12g}", "max_length": "length at most {}",
    "min_length": "not empty",
}  # fmt: skip


def value_of(hint: Any, value: Any, path: str = "") -> Any:
    """The value of the annotated type ``hint`` that a plain value describes: a mapping describes a dataclass or a Struct.

    Numbers in a range are finite. Raises BadValue for the first mistake, with its path: ``path``, then keys and indices.
    """
    for inner, part, place in _parts(hint, value, path) if isinstance(value, dict | list | tuple) else ():
        value_of(inner, part, place)
    try:
        if isinstance(value, str):
            value.encode()
        if not isinstance(value, float) or isfinite(value) or not range_of(hint):
            return msgspec.convert(value, hint, str_keys=True)
    except UnicodeEncodeError:
        raise BadValue(joined(path, "a text that is not UTF-8")) from None
    except msgspec.ValidationError as error:
        if isinstance(reason := error.__cause__, BadValue):
            raise BadValue(joined(path, str(reason), ".")) from None
        if lacking := re.match("Object missing required field `(.+)`", str(error)):
            raise BadValue(joined(joined(path, lacking[1], "."), "missing")) from None
    raise BadValue(joined(path, f"must be {allowed(hint)}, not {_shown(hint, value)}"))


def _shown(hint: Any, value: Any) -> str:
    """A value that is not allowed; only its type where a string belongs, as it may be a password."""
    kinds = [kind for kind, _ in members(hint)]
    if value is not None and (str not in kinds or type(value) in kinds):
        return _SHORT.repr(value)
    can_be_quoted = not isinstance(value, dict | list | tuple | None)
    return _NAMES.get(type(value), f"a {type(value).__name__}") + ": quote it" * can_be_quoted


def check_fields(record: Any, path: str = "") -> None:
    """Check the fields of a dataclass or a Struct that was made in Python. Raises BadValue as ``value_of``."""
    kind: Any = type(record)
    values = {name: getattr(record, name) for name in field_hints(kind)}
    try:
        msgspec.convert(values, _without_rules(kind))
    except msgspec.ValidationError:
        value_of(_without_rules(kind), values, path)


@functools.cache
def _without_rules(kind: Any) -> type[Struct]:
    """The same fields, which msgspec checks in one pass, without what ``__post_init__`` does."""
    return msgspec.defstruct(kind.__name__, list(field_hints(kind).items()))


def _parts(hint: Any, value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """The annotated type, the value and the path of each part of a mapping or a list; BadValue for an unknown key."""
    for member, _ in members(hint):
        origin, arguments = get_origin(member) or member, get_args(member)
        if isinstance(value, dict) and _is_record(member):
            hints = field_hints(member)
            config = getattr(member, "__struct_config__", None)
            for key, part in value.items():
                if key in hints:
                    yield hints[key], part, joined(path, key, ".")
                elif config is None or config.forbid_unknown_fields:
                    raise BadValue(joined(path, unknown_name("key", key, hints)))
        elif isinstance(value, dict) and arguments and issubclass(origin, Mapping):
            for key, part in value.items():
                if not _is_number(arguments[0]):  # which is written as text
                    yield arguments[0], key, path
                yield arguments[1], part, joined(path, str(key), ".")
        elif isinstance(value, list | tuple) and arguments and origin in (list, tuple):
            entries = arguments if origin is tuple and ... not in arguments else arguments[:1] * len(value)
            yield from (
                (entry, part, f"{path}[{index}]") for index, (entry, part) in enumerate(zip(entries, value, strict=False))
            )


def _is_number(hint: Any) -> bool:
    return any(kind is int for kind, _ in members(hint))


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, Struct))


@functools.cache
def field_hints(kind: Any) -> dict[str, Any]:
    """The annotated types of the fields of a dataclass or a Struct, by their names in files."""
    if issubclass(kind, Struct):
        return {item.encode_name: item.type for item in structs.fields(kind)}
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in fields(kind)}


def members(hint: Any, ranges: tuple[Meta, ...] = ()) -> Iterator[tuple[Any, tuple[Meta, ...]]]:
    """The types that a value may have, each with its ranges; without None."""
    if get_origin(hint) is Annotated:
        yield from members(get_args(hint)[0], ranges + tuple(note for note in hint.__metadata__ if isinstance(note, Meta)))
    elif get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from members(member, ranges)
    elif hint is not type(None):
        yield hint, ranges


def choices(hint: Any) -> tuple[Any, ...]:
    """The values that an annotated type names."""
    return tuple(choice for member, _ in members(hint) if get_origin(member) is Literal for choice in get_args(member))


def allowed(hint: Any) -> str:
    """The values of an annotated type in words, like ``auto or an integer (at least 1)``."""
    named, words = ", ".join(map(str, choices(hint))), []
    if named:
        words.append(f"one of {named}" if ", " in named else named)
    for member, ranges in members(hint):
        origin, arguments = get_origin(member) or member, get_args(member)
        within = f" ({limits})" if (limits := range_words(ranges)) else ""
        described = next((one.description for one in ranges if one.description), None)
        if origin is tuple and ... not in arguments:
            words.append(f"a list of {len(arguments)}")
        elif arguments and origin not in (Literal, list, tuple) and _is_number(arguments[0]):
            words.append(f"a mapping from {allowed(arguments[0])}")
        elif origin is not Literal:
            words.append(described or _NAMES.get(origin, "a mapping") + within)
    return " or ".join(dict.fromkeys(words))


def range_words(ranges: Iterable[Meta]) -> str:
    """Ranges of a type like ``1 to 9``, ``above 0, at most 1``; empty without any."""
    found = {name: limit for one in ranges for name in _LIMITS if (limit := getattr(one, name)) not in (None, LARGEST)}
    if "ge" in found and "le" in found:
        return f"{found['ge']:.12g} to {found['le']:.12g}"
    return ", ".join(_LIMITS[name].format(limit) for name, limit in found.items())


def range_of(hint: Any) -> str:
    """The range of an annotated number in words; empty without one, and where a string is allowed, too."""
    found = dict(members(hint))
    return "" if str in found else next((range_words(found[kind]) for kind in (int, float) if kind in found), "")


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown WHAT NAME``, with the closest of the known names, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    suggestion = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
    return f"unknown {what} {shortened(name)!r}: {suggestion}"


def joined(prefix: str, text: str, separator: str = ": ") -> str:
    """``text`` after ``prefix`` if there is one."""
    return f"{prefix}{separator}{text}" if prefix else text


def shortened(value: object) -> str:
    """In one line of at most 60 characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
