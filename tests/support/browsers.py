"""Headless Chromium for tests of pages. Modules that import this are skipped where playwright is not installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, until the end of the block."""
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def violations(page: Any) -> list[tuple[str, str]]:
    """The rules of accessibility that a page breaks, each with the first element that does."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    return [(found["id"], found["nodes"][0]["html"]) for found in axe.Axe().run(page).response["violations"]]
