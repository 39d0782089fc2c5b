"""Values that are written as text become JSON text, in whichever pieces they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pipedec.text.parsers.json_text import ALL_TYPES, as_json, properties, property_schema, standalone, types_of
from pipedec.text.parsers.source import MORE, More

TEXT = {"type": "string"}
OPTIONAL = {"anyOf": [TEXT, {"type": "null"}]}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("a \"b\" \\ \n ü😀", TEXT, "a \"b\" \\ \n ü😀"), ("5", TEXT, "5"), ("", TEXT, ""), ("5", {}, 5), (" 5\n", {}, 5),
        ('{"a": [1, null]}', {"type": "object"}, {"a": [1, None]}), ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True), ("Paris", {}, "Paris"), ("", {"type": "integer"}, ""), ("NaN", {}, "NaN"),
        ("[" * 100_000, {}, "[" * 100_000), ("None", {}, "None"), ("None", {"type": "integer"}, None), ("None", TEXT, "None"),
        ("null", TEXT, "null"), ("null", OPTIONAL, None), ("None", OPTIONAL, None), ("nul", OPTIONAL, "nul"), ("", OPTIONAL, ""),
        ("nullify", OPTIONAL, "nullify"), ('"5"', OPTIONAL, '"5"'), ("5", {"type": ["string", "integer"]}, 5),
        ("5.5", {"type": ["string", "integer"]}, "5.5"), ("5", {"type": ["string", "number"]}, 5), ("5", {"type": "array"}, 5),
        ('"a"', {"enum": ["a", 1]}, "a"), ("5", {"enum": ["5", "6"]}, "5"), ("5", {"const": "5"}, "5"),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
    ],
)  # fmt: skip
def test_text_becomes_the_value_that_its_schema_asks_for(text: str, schema: dict[str, Any], expected: Any) -> None:
    for pieces in ([text], list(text)):
        assert json.loads("".join(one for one in as_json(iter_pieces(pieces), schema) if isinstance(one, str))) == expected


def iter_pieces(pieces: list[str]) -> Iterator[str | More]:
    for piece in pieces:
        yield piece
        yield MORE


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


def test_strings_are_passed_on_as_they_come() -> None:
    assert list(as_json(iter_pieces(["a", '"']), TEXT)) == ['"', "a", MORE, '\\"', MORE, '"']
    assert list(as_json(iter_pieces(["n", "o", "t"]), OPTIONAL)) == [MORE, '"', "no", MORE, "t", MORE, '"']
    assert list(as_json(iter_pieces(["[1", ", 2]"]), {})) == [MORE, MORE, "[1, 2]"]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, "all"), ({"type": "string"}, "string"), ({"type": ["string", "null"]}, "string null"), ({"type": 5}, "all"),
        ({"type": "number"}, "integer number"), ({"type": "string", "nullable": True}, "null string"),
        ({"oneOf": [TEXT, {"type": "array"}]}, "array string"), ({"anyOf": [TEXT, {}]}, "all"), ({"anyOf": []}, "all"),
        ({"allOf": [{"type": ["string", "null"]}, TEXT]}, "string"),
        ({"enum": ["a", None, 1, 1.5]}, "integer null number string"),
        ({"const": True}, "boolean"), ({"type": "unknown"}, "all"), ({"anyOf": [True, TEXT]}, "all"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "object"}}}, "object"),
        ({"$ref": "#/anyOf/0", "anyOf": [TEXT, {"type": "null"}]}, "string"), ({"$ref": "#/$defs/no"}, "all"),
        ({"$ref": "https://example.org"}, "all"), ({"$ref": "#"}, "all"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}}}, "string"),
        ({"$ref": "#/$defs/0", "$defs": {str(one): {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in range(99)]}
                                         for one in range(99)}}, "all"),
        (deep(100_000), "all"),
    ],
)  # fmt: skip
def test_a_schema_shows_the_types_of_its_values(schema: dict[str, Any], types: str) -> None:
    assert types_of(schema) == (ALL_TYPES if types == "all" else set(types.split()))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": TEXT}}, TEXT),
        ({"properties": {"b": TEXT}}, {}),
        ({"properties": {"a": True}}, {}),
        ({}, {}),
        (None, {}),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"properties": {"a": TEXT}}}}, TEXT),
    ],
)
def test_a_property_without_a_schema_may_be_anything(schema: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert property_schema(schema, "a") == expected


def test_a_part_of_a_schema_brings_with_it_to_which_it_refers() -> None:
    b = {"anyOf": [{"$ref": "#/$defs/c~1d"}, {"$ref": "#"}]}
    whole = {
        "properties": {"a": {"items": {"$ref": "#/properties/b"}}, "b": b},
        "$defs": {"c/d": TEXT, "e": {}},
        "type": "object",
    }
    found = standalone(property_schema(whole, "a"), whole)
    assert list(found["$defs"]) == ["0", "1", "2"] and found["$defs"]["1"] == TEXT
    assert types_of(property_schema(whole, "b"), whole) == types_of(found["items"], found) == {"string", "object"}
    assert standalone(TEXT, whole) == TEXT


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"b": {}, "a": {}}, "required": ["c", "a"]}, {"b": False, "a": True, "c": True}),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}}}}, {"a": False}),
        ({"properties": [], "required": 5}, {}),
        ({"$ref": 5}, {}),
        (None, {}),
    ],
)
def test_an_object_has_properties_some_of_which_are_required(schema: dict[str, Any] | None, expected: dict[str, bool]) -> None:
    assert list(properties(schema).items()) == list(expected.items())
