"""Answers in decode threads over HTTP: what reaches the template and the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.http_server import BOTH, CHAT, USER, Site, ask, served, stream, text_of
from support.scripted_engine import ANSWER, attach, in_bursts

from pipedec.directories import reference_threads
from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import load_dialect


@pytest.fixture(scope="module")
def served_threads() -> Iterator[Site]:
    """With the tokenizer of the shipped model that opens threads."""
    tokenizer = Tokenizer(reference_threads() / "target")
    front = Front(ServerSettings())
    attach(front, tokenizer, lambda request: in_bursts(tokenizer.encode(ANSWER)))
    with served(front) as site:
        yield site


@pytest.fixture
def threads_site(served_threads: Site) -> Site:
    served_threads.engine.reset()
    return served_threads


@BOTH
def test_threads_reach_the_engine_and_come_back(threads_site: Site, path: str) -> None:
    document = ask(threads_site, path, threads="parallel", max_tokens=200)
    assert document["choices"][0]["threads"]["threads"][0]["text"] == ANSWER
    parts = stream(threads_site, path, threads="parallel", max_tokens=200)
    assert text_of(parts) == ANSWER
    news = [one for part in parts for one in part["choices"][0].get("threads", [])]
    assert all((one["path"], one["state"]) == ([], "running") for one in news)
    assert "".join(one["text"] for one in news) == ANSWER
    expected = load_dialect("parallel").to_json()
    assert [(one.threads, one.show_threads) for one in threads_site.engine.requests] == [(expected, False), (expected, True)]


def test_the_template_knows_the_dialect(threads_site: Site) -> None:
    ask(threads_site, CHAT, threads="apar")
    ask(threads_site, CHAT)
    rendered = threads_site.engine.tokenizer.apply_chat_template
    with_dialect, without = (rendered(USER, **given) for given in ({"threads": "apar"}, {}))
    assert [request.prompt for request in threads_site.engine.requests] == [tuple(with_dialect), tuple(without)]
    assert with_dialect != without


def test_log_probabilities_of_threads_come_with_the_end_of_the_stream(threads_site: Site) -> None:
    parts = stream(threads_site, CHAT, threads="parallel", logprobs=True)
    assert [part["choices"][0]["logprobs"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts[-1]["choices"][0]["logprobs"]["content"]) == len(threads_site.engine.tokenizer.encode(ANSWER))
