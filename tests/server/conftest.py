from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.http_server import Site, served
from support.scripted_engine import ANSWER, ScriptedEngine
from support.tiny_pair import CONTEXT

from pipedec.config import Settings
from pipedec.messages import RunDescription
from pipedec.server.front import Front, ServedRun, ServerSettings
from pipedec.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def text_tokenizer(tokenizer_files: Path) -> Tokenizer:
    return Tokenizer(tokenizer_files)


@pytest.fixture(scope="session")
def answer_ids(text_tokenizer: Tokenizer) -> list[int]:
    """Tokens of ``ANSWER``; the tokenizer splits its characters."""
    return text_tokenizer.encode(ANSWER)


@pytest.fixture(scope="package")
def scripted_site(text_tokenizer: Tokenizer, answer_ids: list[int]) -> Iterator[Site]:
    """A server whose engine says ``ANSWER``, two tokens at a time, again and again if it may."""
    bursts = [answer_ids[place : place + 2] for place in range(0, len(answer_ids), 2)]
    engine = ScriptedEngine(text_tokenizer, lambda request: bursts * (20 if request.sampling.ignore_eos else 1))
    front = Front(ServerSettings(("tiny", "alias"), max_body_bytes=1_000_000, body_seconds=1.0, send_seconds=1.0), created=1)
    front.attach(
        ServedRun(engine, text_tokenizer, RunDescription(Settings.of(target="target"), ((1, 2),), ((0, 4), (4, 8))), CONTEXT)
    )
    with served(front) as site:
        yield site


@pytest.fixture
def site(scripted_site: Site) -> Site:
    scripted_site.engine.reset()
    return scripted_site
