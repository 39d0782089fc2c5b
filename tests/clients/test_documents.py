"""What the documents promise: every operation of ``/openapi.json``, and the examples of ``docs/serving.md`` as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from clients.conftest import MODEL, Server, client_python, serving
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.examples import examples
from support.tiny_pair import Pair

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
EXAMPLES = [(kind, text) for kind, text in re.findall(r"^```(bash|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
RUN_SECONDS = 120
_MOST_TOKENS = 4


@pytest.fixture(scope="module")
def server(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the name that the examples use, too."""
    with serving(tmp_path_factory.mktemp("server"), pair, "--served-model-name", "smollm2") as running:
        yield running


def short(body: Any, path: str) -> Any:
    """The same body, if it is one, for a short answer of the model that there is."""
    if not isinstance(body, dict):
        return body
    usual = "max_output_tokens" if path.startswith("/v1/responses") else "max_tokens"
    names = (usual, "max_completion_tokens")
    lengths = {name: _MOST_TOKENS for name in names if type(value := body.get(name)) is int and value > _MOST_TOKENS}
    return {**body, "model": MODEL, **({usual: _MOST_TOKENS} if body.get(usual) is None else {}), **lengths}


def test_every_operation_answers_as_documented(server: Server) -> None:
    """Whatever is sent, the answer has a documented status and body, and is never a 500."""
    schema = schemathesis.openapi.from_url(f"{server.root}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"} <= {
        operation.path for operation in operations
    }
    for operation in operations:

        @hypothesis.settings(examples(40), suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(case=operation.as_strategy())
        def keeps_its_word(case: Any) -> None:
            case.body = short(case.body, case.path)
            response = case.call(timeout=60)
            case.validate_response(response, checks=CHECKS)

        keeps_its_word()


@pytest.mark.parametrize(("kind", "text"), EXAMPLES, ids=[f"{kind}{number}" for number, (kind, _) in enumerate(EXAMPLES)])
def test_the_examples_of_the_page_work(server: Server, kind: str, text: str, tmp_path: Path) -> None:
    """But for the port. What needs a package of its own runs where ``make test-clients`` has installed it."""
    assert "http://127.0.0.1:8000" in text
    python = client_python("langchain") if "langchain" in text else sys.executable
    script = tmp_path / "example"
    script.write_text(text.replace("http://127.0.0.1:8000", server.root))
    command = ["bash", "-e", str(script)] if kind == "bash" else [str(python), str(script)]
    environment = {**os.environ, "HOME": str(tmp_path)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment, check=False)
    assert (ran.returncode, ran.stderr) == (0, "") and ran.stdout.strip(), (ran.stdout, ran.stderr)
    assert '"error"' not in ran.stdout
