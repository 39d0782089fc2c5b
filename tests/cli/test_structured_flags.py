"""The flags of structured answers, with a resident cluster behind them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipedec.cluster.local import LocalCluster

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Pipedec = Callable[..., Any]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def test_submit_prints_answers_of_a_form(pipedec: Pipedec, known_resident: LocalCluster, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "<" ("a" | "b"){2} ">"')
    for flags, possible in (
        (["--json-schema", json.dumps(SCHEMA)], {'{"a": 1}', '{"a": 2}'}),
        (["--json-schema", schema], {'{"a": 1}', '{"a": 2}'}),
        (["--regex", "[xy]{1,2}"], {"x", "y", "xx", "xy", "yx", "yy"}),
        (["--choice", "first", "--choice", "last"], {"first", "last"}),
        (["--grammar", grammar], {"<aa>", "<ab>", "<ba>", "<bb>"}),
    ):
        answered = pipedec("submit", "--prompt", "Hello", "--temperature", "1", *flags)
        assert answered.status == 0 and answered.out.rstrip("\n") in possible


def test_chat_keeps_to_a_form(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    address = known_resident.address
    chatted = pipedec(
        "chat", "--redis", address.redis_url, "--run", address.run_id, "--choice", "yes", "--choice", "no", stdin=b"Hello\n"
    )
    assert chatted.status == 0 and chatted.out.strip() in ("yes", "no")
