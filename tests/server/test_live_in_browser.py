"""The pages of a server with a key, in headless Chromium and under their own content security policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.browsers import chromium, needs_chromium, sync_api
from support.http_server import COMPLETIONS, Site, ask, served
from support.processes import wait_until
from support.scripted_engine import ANSWER, attach, in_bursts

from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer

pytestmark = needs_chromium
TEXT = "pipedecLive.state().sources.flatMap((source) => source.requests.map((request) => request.text)).at(-1)"


@contextmanager
def opened(site: Site, path: str) -> Iterator[Any]:
    """A page of the server, after the key was given to it; no script of it may raise. The browser ends before its server."""
    with chromium() as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{site.port}{path}")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        yield page
        assert errors == []


@pytest.mark.slow
def test_who_gives_the_key_sees_the_answer_grow(cluster_site: Site) -> None:
    with opened(cluster_site, "/live") as page:
        assert wait_until(lambda: page.wait_for_timeout(100) or page.evaluate("pipedecLive.state().sources.length"), 60)
        for method in ("pipedec", "pipedec-bestfirst"):
            fields = {"prompt": "The pipeline is kept full", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            said = ask(cluster_site, COMPLETIONS, **fields, method=method)["choices"][0]["text"]
            assert wait_until(lambda said=said: page.wait_for_timeout(100) or said in (page.evaluate(TEXT) or ""), 60)
        assert page.evaluate("pipedecLive.state().connection") == "live"


def test_one_key_serves_the_chat_and_the_picture_beside_it(text_tokenizer: Tokenizer, answer_ids: list[int]) -> None:
    front = Front(ServerSettings(("tiny",), api_keys=("secret",)))
    engine = attach(front, text_tokenizer, lambda _: in_bursts(answer_ids, 2))
    with served(front) as site, opened(site, "/") as page:
        sync_api.expect(page.locator("#model")).to_have_text("tiny")
        status = page.frame_locator("iframe").locator("#status")
        sync_api.expect(status).to_have_attribute("data-kind", "live")
        page.fill("#question", "hello")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".answer > .text")).to_have_text(ANSWER)
        sync_api.expect(page.locator(".figures")).to_contain_text(f"{len(answer_ids)} tokens")
        engine.allowed = 1
        page.fill("#question", "and more?")
        page.keyboard.press("Enter")
        assert wait_until(lambda: page.wait_for_timeout(50) or len(engine.requests) == 2, 20)
        page.keyboard.press("Escape")
        assert wait_until(lambda: page.wait_for_timeout(50) or engine.cancelled == [1], 20)
