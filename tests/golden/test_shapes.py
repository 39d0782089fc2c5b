"""Shapes of JSON: every field is a path, and what varies from time to time is none."""

from __future__ import annotations

from golden.shapes import shape_of, shape_of_schema


def test_fields_of_several_values_are_paths_with_types() -> None:
    values = {"id": "a", "choices": [{"index": 0, "end": None}, {"end": "stop"}]}, {"id": 7, "choices": [], "usage": None}
    assert shape_of(*values) == {"choices[].end": "string", "choices[].index": "number", "id": "number | string", "usage": "null"}


def test_keys_that_are_data_are_one_path() -> None:
    assert shape_of({"top": [{"a": -1.0}, {"b": True}]}, maps=["top[]"]) == {"top[].*": "boolean | number"}


def test_what_holds_nothing_is_shown() -> None:
    assert shape_of({"served": [], "options": {}}) == {"options": "object", "served": "array"}
    assert shape_of({}) == {"": "object"}


def test_a_schema_tells_rules_defaults_and_what_is_required() -> None:
    host = {"type": "object", "properties": {"name": {"type": "string", "title": "Name"}}, "required": ["name"]}
    number = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None}
    schema = {
        "type": "object",
        "$defs": {"Host": host},
        "properties": {"hosts": {"type": "array", "items": {"$ref": "#/$defs/Host"}}, "count": number},
    }
    assert shape_of_schema(schema) == {
        "hosts[].name": "type string, required", "count": "minimum 1, type integer | type null | default null",
    }  # fmt: skip
