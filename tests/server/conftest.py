from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.http_server import Say, Site, cluster_served, saying, served
from support.scripted_engine import ANSWER, attach, in_bursts
from support.tiny_pair import Pair
from support.tool_templates import (
    DOCUMENTS_TEMPLATE,
    HERMES_TEMPLATE,
    ITEMS_TEMPLATE,
    LLAMA3_TEMPLATE,
    OTHER_TEMPLATE,
    THINKING_TEMPLATE,
    with_template,
)

from pipedec.cluster.local import LocalCluster
from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from support.shared_models import Residents


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
    bursts = in_bursts(answer_ids, 2)
    front = Front(ServerSettings(("tiny", "alias"), max_body_bytes=1_000_000, body_seconds=1.0, send_seconds=1.0), created=1)
    attach(front, text_tokenizer, lambda request: bursts * (20 if request.sampling.ignore_eos else 1))
    with served(front) as site:
        yield site


@pytest.fixture
def site(scripted_site: Site) -> Site:
    scripted_site.engine.reset()
    return scripted_site


@pytest.fixture(scope="package")
def say(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Say]:
    """A server whose engine generates the text that a test gives, three tokens at a time, with the template that it names."""
    folder = tmp_path_factory.mktemp("templates")
    templates = {
        "hermes": HERMES_TEMPLATE, "llama3": LLAMA3_TEMPLATE, "other": OTHER_TEMPLATE, "items": ITEMS_TEMPLATE,
        "thoughts": THINKING_TEMPLATE, "documents": DOCUMENTS_TEMPLATE,
    }  # fmt: skip
    tokenizers = {name: with_template(tokenizer_files, folder / name, template) for name, template in templates.items()}
    tokenizers["none"] = Tokenizer(tokenizer_files)
    with saying(Front(ServerSettings(("tiny",)), created=1), tokenizers) as say:
        yield say


@pytest.fixture(scope="module", params=["windows"])
def resident(request: pytest.FixtureRequest, residents: Residents) -> LocalCluster:
    """The one that other packages share. How it dispatches makes no difference here."""
    return residents.get(request.param)


@pytest.fixture(scope="module")
def cluster_site(pair: Pair, resident: LocalCluster) -> Iterator[Site]:
    """A server with the key ``secret`` in front of a cluster."""
    with cluster_served(resident, pair) as site:
        yield site
