"""The live page of a server with a real cluster and a key, in headless Chromium."""

from __future__ import annotations

import os
import shutil

import pytest
from support.http_server import COMPLETIONS, Site, ask
from support.processes import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: apt-get install chromium"),
]
TEXT = "pipedecLive.state().sources.flatMap((source) => source.requests.map((request) => request.text)).at(-1)"


def test_who_gives_the_key_sees_the_answer_grow(cluster_site: Site) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{cluster_site.port}/live")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        assert wait_until(lambda: page.wait_for_timeout(100) or page.evaluate("pipedecLive.state().sources.length"), 60)
        for method in ("pipedec", "pipedec-bestfirst"):
            fields = {"prompt": "The pipeline is kept full", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            said = ask(cluster_site, COMPLETIONS, **fields, method=method)["choices"][0]["text"]
            assert wait_until(lambda said=said: page.wait_for_timeout(100) or said in (page.evaluate(TEXT) or ""), 60)
        assert page.evaluate("pipedecLive.state().connection") == "live" and errors == []
        browser.close()
