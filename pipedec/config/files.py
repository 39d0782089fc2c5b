"""Text, YAML and JSON files, read strictly: with limits of size and depth, without duplicate keys."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from pipedec.core import UserError
from pipedec.validation import Config, parse_json, shortened

MAX_FILE_BYTES = 1_000_000
MAX_YAML_DEPTH = 20


def load_json(kind: type[Config], path: Path) -> Config:
    """The dataclass ``kind`` from a JSON file whose keys are its fields.

    Raises:
        UserError: one line that names the file and what is wrong in it.
    """
    return parse_json(kind, read_text(path), str(path))


def read_text(path: Path) -> str:
    """Raises UserError unless it is a UTF-8 file of at most MAX_FILE_BYTES."""
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
