"""From plain values (YAML, JSON) to a dataclass, with types and ranges checked by pydantic.

Every mistake is a UserError of one line that begins with the path of the key and says what is allowed there. The classes are
plain dataclasses: ranges stand in their annotations (``annotated_types``), rules among several fields in ``__post_init__``, as
a BadValue. pydantic is loaded when something is validated, so that a client starts without it.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pipedec.core import BadValue, UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Config = TypeVar("Config")
_Detail = Mapping[str, Any]  # one entry of pydantic's ValidationError.errors()

_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_TYPES = {
    dict: "a mapping", list: "a list", str: "a string", bool: "true or false", int: "an integer", float: "a number",
    type(None): "empty",
}  # fmt: skip
_TYPE_ERRORS = {
    "int_type": int, "int_from_float": int, "float_type": float, "bool_type": bool, "string_type": str, "tuple_type": list,
    "dict_type": dict, "mapping_type": dict, "dataclass_type": dict,
}  # fmt: skip
_RANGE_ERRORS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda rule: f"at least {rule['ge']:.12g}",
    "less_than_equal": lambda rule: f"at most {rule['le']:.12g}",
    "greater_than": lambda rule: f"more than {rule['gt']:.12g}",
    "literal_error": lambda rule: _one_of(rule["expected"]),
    "int_parsing": lambda rule: "an integer",
    "predicate_failed": lambda rule: "a name of letters, digits, '.', '_' and '-'",
}


def parse_json(kind: type[Config], text: str, source: str = "") -> Config:
    """The dataclass ``kind`` from the text of a JSON object whose keys are its fields.

    Args:
        source: what an error message begins with, for example the path of the file.

    Raises:
        UserError: one line.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys)
    except UserError as error:
        raise UserError(joined(source, str(error))) from None
    except (ValueError, RecursionError):
        raise UserError(joined(source, "not valid JSON")) from None
    return validated(kind, document, source)


def validated(kind: type[Config], document: object, source: str = "") -> Config:
    """As ``parse_json``, from plain values: what JSON can hold."""
    from pydantic import ValidationError

    try:
        # In JSON, unlike in Python, pydantic's strict mode takes a list for a tuple and a mapping for a dataclass.
        text = json.dumps(document, default=_refuse)
        adapter: TypeAdapter[Config] = _adapter(cast(Any, kind))
        return adapter.validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise UserError(joined(source, one_line(error.errors(include_url=False), kind))) from None
    except UserError as error:
        raise UserError(joined(source, str(error))) from None
    except (ValueError, RecursionError):
        raise UserError(joined(source, "a number of too many digits, or nested too deeply")) from None


def load_validator(kind: type) -> None:
    """Load pydantic and build the validator of ``kind`` now, so that nothing has to wait for it later."""
    _adapter(kind)


def one_line(details: Iterable[_Detail], kind: type) -> str:
    """The first mistake that pydantic found, unknown keys before all others, as ``KEY: must be …, not …``."""
    ordered = sorted(details, key=lambda one: one["type"] != "unexpected_keyword_argument")
    first = ordered[0]
    if first["type"] == "json_invalid":
        return "a text that is not UTF-8, or nested too deeply"
    places = [_Place.of(kind, one["loc"]) for one in ordered]
    if not places[0].in_union:
        return _message(first, places[0], [first])
    # Every member of a union complains: take the one that got farthest into the value, or name all that is allowed.
    same = [(one, place) for one, place in zip(ordered, places, strict=True) if place.path.startswith(places[0].path)]
    deepest, place = max(same, key=lambda pair: len(pair[1].path))
    return _message(deepest, place, [one for one, other in same if other.path == place.path])


class _Place:
    """Where in the document an error is.

    Attributes:
        path: like ``partitions.small.layers[2]``.
        known: the keys that the mapping around it may have, if that is a dataclass.
        in_union: the value may be of several types.
    """

    def __init__(self) -> None:
        self.path = ""
        self.known: list[str] = []
        self.in_union = False

    @classmethod
    def of(cls, kind: Any, loc: tuple[int | str, ...]) -> _Place:
        place = cls()
        for part in loc[:-2] if loc and loc[-1] == "[key]" else loc:
            members = _members(kind)
            if len(members) > 1:  # this part of ``loc`` names the member of the union
                place.in_union = True
                kind = next((member for member in members if get_origin(member) is tuple), None)
                continue
            kind = members[0]
            if isinstance(part, int):
                place.path += f"[{part}]"
                kind = get_args(kind)[0]
                continue
            if is_dataclass(kind):
                place.known = [item.name for item in fields(kind)]
                kind = get_type_hints(kind, include_extras=True).get(part)
            else:
                kind = get_args(kind)[1]
            place.path = joined(place.path, part, ".")
        return place


def _members(kind: Any) -> list[Any]:
    """The types that a value may have, without None and annotations."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [one for member in get_args(kind) if member is not type(None) for one in _members(member)]
    return [kind]


def _message(detail: _Detail, place: _Place, alternatives: list[_Detail]) -> str:
    kind, value, path = detail["type"], detail["input"], place.path
    if kind == "unexpected_keyword_argument":
        parent, _, name = path.rpartition(".")
        return joined(parent, unknown_name("key", name, place.known))
    if kind == "missing":
        return joined(path, "missing")
    if kind == "string_too_short":
        return joined(path, "must not be empty")
    if kind == "value_error":
        return joined(path, str(detail["ctx"]["error"]), "." if isinstance(detail["ctx"]["error"], BadValue) else ": ")
    required = " or ".join(dict.fromkeys(_required(one) for one in alternatives))
    if kind not in _TYPE_ERRORS:
        shown = repr(shortened(value)) if isinstance(value, str) else shortened(value)
        return joined(path, f"must be {required}, not {shown}")
    quote = ": quote it" if kind == "string_type" and not isinstance(value, dict | list | None) else ""
    return joined(path, f"must be {required}, not {_TYPES[type(value)]}{quote}")


def _required(detail: _Detail) -> str:
    kind = detail["type"]
    if kind in _TYPE_ERRORS:
        return _TYPES[_TYPE_ERRORS[kind]]
    return _RANGE_ERRORS[kind](detail.get("ctx", {})) if kind in _RANGE_ERRORS else f"valid ({detail['msg']})"


def _one_of(expected: str) -> str:
    """From pydantic's ``'a', 'b' or 'c'``."""
    names = expected.replace("'", "").replace(" or ", ", ")
    return f"one of {names}" if "," in names else names


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise UserError(f"duplicate key {shortened(key)!r}")
        seen.add(key)
    return dict(pairs)


def _refuse(value: object) -> object:
    raise UserError(f"{shortened(value)}: a {type(value).__name__} is not allowed: quote it if it is text")


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown WHAT NAME``, with the closest of the known names, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    suggestion = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
    return f"unknown {what} {shortened(name)!r}: {suggestion}"


def joined(prefix: str, text: str, separator: str = ": ") -> str:
    """``text`` behind ``prefix`` if there is one."""
    return f"{prefix}{separator}{text}" if prefix else text


def shortened(value: object) -> str:
    """In one line of at most 60 characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def byte_size(text: str, name: str) -> int:
    """The bytes that ``text`` says, like ``4GiB``, ``512MB`` or ``1000000``; at least 1.

    Raises:
        BadValue: it says none; the message begins with ``name``.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)", text, re.ASCII)
    size = int(float(found[1]) * _BYTES[found[2]]) if found and found[2] in _BYTES else 0
    if size < 1:
        raise BadValue(f"{name} must be a number of bytes like 4GiB, 512MB or 1000000, not {shortened(text)!r}")
    return size


def shown_bytes(count: int) -> str:
    """Like ``2.0 GiB``."""
    power = next((power for power in (3, 2, 1) if count >= 1024**power), 0)
    return f"{count:,} bytes" if not power else f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
