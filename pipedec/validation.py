"""Text files and JSON, read with limits of size and depth, as dataclasses and msgspec Structs; numbers of bytes.

Every mistake is a UserError of one line that begins with the path of the file and of the key (``core.values``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import yaml

from pipedec.core.errors import BadValue, UserError
from pipedec.core.values import joined, shortened, value_of

Config = TypeVar("Config")

_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

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
        if issubclass(kind, msgspec.Struct):  # for a dataclass it would ignore unknown keys
            return cast(Config, _decoder(cast(Any, kind)).decode(text))
    except UserError as error:  # raised by ``__post_init__``
        raise UserError(joined(source, str(error))) from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass  # read again to name the mistake
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise UserError(joined(source, "not valid JSON")) from None
    return validated(kind, document, source)


_decoder = functools.cache(msgspec.json.Decoder)


def validated(kind: type[Config], document: object, source: str = "") -> Config:
    """As ``parse_json``, from plain values that JSON can hold."""
    try:
        return cast(Config, value_of(kind, document))
    except UserError as error:
        raise UserError(joined(source, str(error))) from None


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
