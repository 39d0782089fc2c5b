"""From files and plain values (YAML, JSON) to a dataclass or a msgspec Struct, with types and ranges checked by msgspec.

Files are read strictly: with limits of size and depth, without duplicate keys.

Every mistake is a UserError of one line that begins with the path of the key and says what is allowed there. Ranges are in the
annotations (``msgspec.Meta``); rules among several fields are in ``__post_init__``, which raises BadValue. As msgspec's messages
name neither values nor keys of mappings, and it ignores unknown keys of dataclasses, ``_check`` finds the mistake to name.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import yaml
from msgspec import inspect

from pipedec.core.errors import BadValue, UserError
from pipedec.core.records import LARGEST

Config = TypeVar("Config")

_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_TYPES: dict[type, tuple[type, ...]] = {  # of values, by what msgspec calls their type
    inspect.BoolType: (bool,), inspect.IntType: (int,), inspect.FloatType: (float, int), inspect.StrType: (str,),
    inspect.NoneType: (type(None),), inspect.AnyType: (dict, list, str, bool, int, float, type(None)),
    inspect.ListType: (list, tuple), inspect.VarTupleType: (list, tuple), inspect.TupleType: (list, tuple),
    inspect.NamedTupleType: (list, tuple), inspect.DictType: (dict,), inspect.DataclassType: (dict,), inspect.StructType: (dict,),
}  # fmt: skip
_NAMES = {
    dict: "a mapping", list: "a list", tuple: "a list", str: "a string", bool: "true or false", int: "an integer",
    float: "a number", type(None): "empty",
}  # fmt: skip


MAX_FILE_BYTES = 1_000_000
MAX_YAML_DEPTH = 20


def read_text(path: Path) -> str:
    """The text of a file. Raises UserError unless it is UTF-8 of at most MAX_FILE_BYTES."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a UTF-8 text file") from None


def to_json(message: msgspec.Struct) -> str:
    """Raises UnicodeEncodeError for a text that is not UTF-8."""
    return msgspec.json.encode(message).decode()


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML without aliases, duplicate keys and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not allowed", problem_mark=event.start_mark)
        if self.depth == MAX_YAML_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem="keys must be strings: quote it", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {shortened(key)!r}", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> object:
    """Plain values of a YAML document. Raises UserError of one line, with the line's number where it is known."""
    for number, line in enumerate(text.splitlines(), start=1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise UserError(f"{source}:{number}: tab in the indentation: use spaces")
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line_number = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}:{line_number}: {shortened(error.problem or 'not valid YAML')}") from None
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{source}: not valid YAML") from None


def parse_json(kind: type[Config], text: str | bytes, source: str = "") -> Config:
    """The object of class ``kind`` from the text of a JSON object whose keys are its fields.

    A mistake is a UserError of one line that begins with ``source``, for example the path of the file.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys)
    except UserError as error:
        raise UserError(joined(source, str(error))) from None
    except (ValueError, RecursionError):
        raise UserError(joined(source, "not valid JSON")) from None
    return validated(kind, document, source)


def validated(kind: type[Config], document: object, source: str = "") -> Config:
    """As ``parse_json``, from plain values that JSON can hold."""
    try:
        json.dumps(document, default=_refuse, ensure_ascii=False).encode()
        _check(_type_info(cast(Any, kind)), document, "")
        return msgspec.convert(document, kind, str_keys=True)
    except (UserError, msgspec.ValidationError) as error:
        raise UserError(joined(source, str(error))) from None
    except UnicodeEncodeError:
        raise UserError(joined(source, "a text that is not UTF-8")) from None
    except (ValueError, RecursionError):
        raise UserError(joined(source, "a number of too many digits, or nested too deeply")) from None


_type_info = functools.cache(inspect.type_info)


def _check(kind: inspect.Type, value: Any, path: str) -> None:
    """Raises UserError (``PATH: must be …, not …``) for the first mistake in a value that should be of this type."""
    members = list(_members(kind))
    if isinstance(value, dict) and len(tags := {one.tag: one for one, _ in members if isinstance(one, inspect.StructType)}) > 1:
        return _check_inside(_tagged(tags, value, path), value, path)
    wrong = []  # members that take values of this type, but not this one
    for member, description in members:
        if isinstance(member, inspect.LiteralType):
            if value in member.values and type(value) is not bool:
                return
        elif type(value) in _TYPES[type(member)]:
            if isinstance(value, dict | list | tuple):
                return _check_inside(member, value, path)
            if (rule := _broken_rule(member, value)) is None:
                return
            wrong.append(description or rule)
    if wrong == ["not empty"]:
        raise UserError(joined(path, "must not be empty"))
    literals = [_one_of(member.values) for member, _ in members if isinstance(member, inspect.LiteralType)]
    plain = [type(member) for member, _ in members if not isinstance(member, inspect.LiteralType | inspect.NoneType)]
    others = list(dict.fromkeys(_NAMES[_TYPES[one][0]] for one in plain))
    required = " or ".join(wrong or literals + others)
    if wrong or literals:
        shown = repr(shortened(value)) if isinstance(value, str) else shortened(value)
    else:
        quote = "a string" in others and not isinstance(value, dict | list | tuple | None)
        shown = _NAMES[type(value)] + ": quote it" * quote
    raise UserError(joined(path, f"must be {required}, not {shown}"))


def _tagged(tags: dict[Any, inspect.StructType], value: dict[str, Any], path: str) -> inspect.StructType:
    """The struct that a mapping describes, by its tag."""
    field = str(next(iter(tags.values())).tag_field)
    if field not in value:
        raise UserError(joined(joined(path, field, "."), "missing"))
    tag = value[field]
    if not isinstance(tag, str) or tag not in tags:
        raise UserError(joined(path, unknown_name(field, str(tag), tags)))
    return tags[tag]


def _check_inside(kind: Any, value: Any, path: str) -> None:
    """As ``_check``, for the parts of a mapping or a list, then for ``__post_init__``."""
    match kind:
        case inspect.DataclassType() | inspect.StructType():
            known = {field.encode_name: field for field in kind.fields}
            for key in value if getattr(kind, "forbid_unknown_fields", True) else ():
                if key not in known and key != getattr(kind, "tag_field", None):
                    raise UserError(joined(path, unknown_name("key", key, known)))
            for name, field in known.items():
                if name in value:
                    _check(field.type, value[name], joined(path, name, "."))
                elif field.required:
                    raise UserError(joined(joined(path, name, "."), "missing"))
            try:
                msgspec.convert(value, kind.cls, str_keys=True)
            except msgspec.ValidationError as error:
                if (reason := error.__cause__) is not None:  # of ``__post_init__``
                    raise UserError(joined(path, str(reason), "." if isinstance(reason, BadValue) else ": ")) from None
        case inspect.DictType():
            for key, inner in value.items():
                if not isinstance(kind.key_type, inspect.IntType):
                    _check(kind.key_type, key, path)
                elif re.fullmatch("-?[0-9]+", key) is None:
                    raise UserError(joined(path, f"must be an integer, not {shortened(key)!r}"))
                _check(kind.value_type, inner, joined(path, key, "."))
        case inspect.ListType() | inspect.VarTupleType():
            for index, inner in enumerate(value):
                _check(kind.item_type, inner, f"{path}[{index}]")
        case inspect.TupleType() | inspect.NamedTupleType():
            kinds = kind.item_types if isinstance(kind, inspect.TupleType) else [field.type for field in kind.fields]
            if len(kinds) != len(value):
                raise UserError(joined(path, f"must be a list of {len(kinds)}, not of {len(value)}"))
            for index, inner in enumerate(value):
                _check(kinds[index], inner, f"{path}[{index}]")


def _members(kind: inspect.Type, description: str = "") -> Iterator[tuple[inspect.Type, str]]:
    """The types that a value may have, each with the description of its range, if it has one."""
    if isinstance(kind, inspect.Metadata):
        yield from _members(kind.type, (kind.extra_json_schema or {}).get("description", ""))
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _members(member, description)
    else:
        yield kind, description


def _broken_rule(kind: inspect.Type, value: Any) -> str | None:
    match kind:
        case inspect.FloatType() if isinstance(value, int) and abs(value) > LARGEST:
            return "finite"
        case inspect.IntType() | inspect.FloatType():
            if kind.le is not None and not value <= kind.le:
                return f"at most {kind.le:.12g}"
            if kind.ge is not None and value < kind.ge:
                return f"at least {kind.ge:.12g}"
            if kind.gt is not None and value <= kind.gt:
                return f"more than {kind.gt:.12g}"
        case inspect.StrType():
            if len(value) < (kind.min_length or 0):
                return "not empty"
            if kind.pattern is not None and re.search(kind.pattern, value) is None:
                return f"text like {kind.pattern}"
    return None


def _one_of(values: Iterable[object]) -> str:
    names = [str(value) for value in values]
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]


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
    """``text`` after ``prefix`` if there is one."""
    return f"{prefix}{separator}{text}" if prefix else text


def shortened(value: object) -> str:
    """In one line of at most 60 characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def byte_size(text: str, name: str) -> int:
    """A number of bytes like ``4GiB``, ``512MB`` or ``1000000``. Raises BadValue, which begins with ``name``, for other texts."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)", text, re.ASCII)
    size = int(float(found[1]) * _BYTES[found[2]]) if found and found[2] in _BYTES else 0
    if size < 1:
        raise BadValue(f"{name} must be a number of bytes like 4GiB, 512MB or 1000000, not {shortened(text)!r}")
    return size


def shown_bytes(count: int) -> str:
    """Like ``2.0 GiB``."""
    power = next((power for power in (3, 2, 1) if count >= 1024**power), 0)
    return f"{count:,} bytes" if not power else f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
