"""Pages of other origins, such as a front-end on another port: which may ask, with which headers, and which may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.http_server import CHAT, USER, Site, served
from support.scripted_engine import attach, in_bursts

from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer

OURS, OTHER = "http://localhost:3000", "https://evil.example"
HEADERS = (
    "authorization", "content-type", "x-api-key", "anthropic-version", "anthropic-beta", "x-request-id",
    "anthropic-dangerous-direct-browser-access", "x-stainless-os",
)  # fmt: skip
PATHS = [CHAT, "/v1/completions", "/v1/messages", "/v1/models", "/api/chat", "/api/generate", "/api/tags", "/tokenize"]
Serve = Callable[..., Site]


@pytest.fixture
def serve(text_tokenizer: Tokenizer, answer_ids: list[int]) -> Iterator[Serve]:
    """A server with a key and with settings of CORS."""
    with ExitStack() as stack:

        def serving(**settings: Any) -> Site:
            front = Front(ServerSettings(("tiny",), api_keys=("secret",), **settings))
            attach(front, text_tokenizer, lambda request: in_bursts(answer_ids))
            return stack.enter_context(served(front))

        yield serving


def preflight(site: Site, path: str, origin: str, method: str = "POST", **more: str) -> Any:
    asked = {"access-control-request-method": method, "access-control-request-headers": ", ".join(HEADERS)}
    return site.client.options(path, headers={"origin": origin, **asked, **more})


@pytest.mark.parametrize("path", PATHS)
def test_named_origins_may_ask_with_the_headers_of_every_client(serve: Serve, path: str) -> None:
    site = serve(allowed_origins=(OURS,))
    allowed = preflight(site, path, OURS)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == OURS
    assert set(HEADERS) <= set(allowed.headers["access-control-allow-headers"].lower().split(", "))
    assert "Origin" in allowed.headers["vary"] and "access-control-allow-credentials" not in allowed.headers
    refused = preflight(site, path, OTHER)
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("key", [{"authorization": "Bearer secret"}, {"x-api-key": "secret"}])
def test_answers_and_errors_can_be_read_by_named_origins_alone(serve: Serve, key: dict[str, str]) -> None:
    site = serve(allowed_origins=(OURS,))
    for origin, seen in ((OURS, OURS), (OTHER, None)):
        for headers, status in ((key, 200), ({}, 401)):
            response = site.client.post(CHAT, json={"messages": USER, "stream": True}, headers={**headers, "origin": origin})
            assert response.status_code == status
            assert response.headers.get("access-control-allow-origin") == seen
            assert "X-Request-Id" in response.headers["access-control-expose-headers"]


def test_a_page_on_another_network_may_ask_if_it_is_named(serve: Serve) -> None:
    asked = {"access-control-request-private-network": "true"}
    allowed = preflight(serve(allowed_origins=(OURS,)), CHAT, OURS, **asked)
    assert allowed.headers["access-control-allow-private-network"] == "true"
    assert preflight(serve(allowed_origins=("*",)), CHAT, OTHER, **asked).status_code == 400


def test_every_origin_may_ask_without_credentials(serve: Serve) -> None:
    site = serve(allowed_origins=("*",))
    response = site.client.get("/v1/models", headers={"origin": OTHER, "x-api-key": "secret", "cookie": "a=b"})
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers
    assert preflight(site, CHAT, OTHER).status_code == 200


def test_credentials_go_to_named_origins(serve: Serve) -> None:
    site = serve(allowed_origins=(OURS,), allow_credentials=True)
    assert preflight(site, CHAT, OURS).headers["access-control-allow-credentials"] == "true"
    assert preflight(site, CHAT, OTHER).status_code == 400


def test_methods_and_headers_can_be_limited(serve: Serve) -> None:
    site = serve(allowed_origins=(OURS,), allowed_methods=("GET",), allowed_headers=("x-api-key",))
    assert preflight(site, "/v1/models", OURS, "GET").status_code == 400, "other headers are asked for, too"
    asked = {"origin": OURS, "access-control-request-method": "GET", "access-control-request-headers": "x-api-key"}
    assert site.client.options("/v1/models", headers=asked).status_code == 200
    assert site.client.options(CHAT, headers=asked | {"access-control-request-method": "POST"}).status_code == 400


def test_without_origins_no_page_may_ask(serve: Serve) -> None:
    response = preflight(serve(), CHAT, OURS)
    assert response.status_code == 405 and "access-control-allow-origin" not in response.headers
