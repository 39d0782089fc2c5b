"""Fields that ask for a structure: what the engine gets of them, and how one that cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.http_server import Site
from support.streams import CHAT, COMPLETIONS, ask, filled
from test_refused_requests import refused

from pipedec.core import StructuredOutputs

PATHS = (COMPLETIONS, CHAT)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, {"json_object": True}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, {"json": SCHEMA}),
        ("structured_outputs", {"regex": None, "json_object": False}, None),
        ("structured_outputs", {"json": SCHEMA, "regex": None, "disable_fallback": False}, {"json": SCHEMA}),
        ("structured_outputs", {"json": '{"type": "object"}', "disable_any_whitespace": True}, {"json": '{"type": "object"}'}),
        ("structured_outputs", {"regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ("structured_outputs", {"choice": ["yes", "no"], "json_object": False}, {"choice": ("yes", "no")}),
        ("structured_outputs", {"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ("structured_outputs", {"json_object": True}, {"json_object": True}),
        ("guided_json", SCHEMA, {"json": SCHEMA}),
        ("guided_regex", "a|b", {"regex": "a|b"}),
        ("guided_choice", ["a", "b"], {"choice": ("a", "b")}),
        ("guided_grammar", 'start: "a"', {"grammar": 'start: "a"'}),
    ],
)
def test_a_structure_reaches_the_engine(site: Site, field: str, value: Any, expected: dict[str, Any] | None) -> None:
    for path in PATHS:
        ask(site, path, **{field: value})
        found = site.engine.requests[-1].sampling.structured_outputs
        assert found == (None if expected is None else StructuredOutputs(**expected))


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("response_format", {"type": "json_schema"}, "json_schema is missing"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema.schema is missing"),
        ("response_format", {"type": "yaml"}, "response_format.type"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "obj"}}}, "obj"),
        ("structured_outputs", {"json": {"properties": {"a": {"type": "number", "minimum": "x"}}}}, "minimum"),
        ("structured_outputs", {"json": "{not JSON"}, "JSON"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "choice"),
        ("structured_outputs", {"regex": 5}, "structured_outputs.regex"),
        ("structured_outputs", {"choice": []}, "choice"),
        ("guided_choice", [1], "guided_choice"),
        ("guided_regex", "a(b", "unclosed group"),
        ("guided_regex", "(?=a)b", "look-around"),
        ("guided_grammar", 'start: "a" item', "item"),
        ("guided_grammar", 'start: "a" "b', "1(14)"),
        ("guided_json", {"$ref": "#/$defs/none"}, "none"),
        ("guided_regex", "a" * 200_001, "200001 characters, but may have 200000"),
        ("guided_choice", [str(number) for number in range(5001)], "5001 choices, but may have 5000"),
        ("guided_json", {"enum": ["x" * 300_000]}, "but may have 200000"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.failure_case("H21")
def test_a_structure_that_cannot_be_is_refused_with_its_place(site: Site, field: str, value: Any, place: str) -> None:
    for path in PATHS:
        error = refused(site, filled(path, {field: value}), path)
        assert error["param"] == field and place in error["message"]


def test_two_wishes_that_exclude_each_other_are_refused(site: Site) -> None:
    for path in PATHS:
        for more in ({"ignore_eos": True}, {"guided_choice": ["a"]}, {"response_format": {"type": "json_object"}}):
            error = refused(site, filled(path, {"guided_regex": "a", **more}), path)
            assert error["param"] in ("guided_regex", *more)


def test_a_schema_that_is_nested_too_deeply_is_refused(site: Site) -> None:
    nested = "{" + '"items":{' * 900 + "}" * 901
    for path, first in ((COMPLETIONS, '"prompt": "a"'), (CHAT, '"messages": [{"role": "user", "content": "a"}]')):
        error = refused(site, f'{{{first}, "structured_outputs": {{"json": {nested}}}}}'.encode(), path)
        assert error["param"] in ("structured_outputs", None)
