"""A server for agents that others wrote, whose model reads and edits files as a script has it; and the requests that it saw."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipedec.messages.request import PromptRequest
from pipedec.server.front import Front, HttpExchange, Observer, ServerSettings
from pipedec.text.tokenizer import Tokenizer
from support.http_server import Site, served
from support.scripted_engine import attach, in_bursts
from support.tool_templates import THINKING_TEMPLATE, with_template

MODEL = "tiny"
ASIDE = "A title."  # the answer to a request without tools
MAX_MODEL_LEN = 1 << 20  # the tokenizer has 300 tokens, and agents send a hundred thousand characters
_RESULT, _TOOLS = "<|user|><tool_response>", "<tools></tools>"  # the template's: before each result, and if there are tools


@dataclass
class AgentSite:
    """A server with a scripted model. ``exchanges``: the requests that it has answered, in order."""

    site: Site
    exchanges: list[HttpExchange] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.site.port}"

    @property
    def answered(self) -> list[tuple[str, str, int]]:
        """Method, route and status of each request."""
        return [(one.method, one.route, one.status) for one in self.exchanges]

    @property
    def prompts(self) -> list[str]:
        """Each prompt that the model has read, as the template made it."""
        return [_prompt(request, self.site.engine.tokenizer) for request in self.site.engine.requests]


class _Exchanges(Observer):
    def __init__(self, exchanges: list[HttpExchange]) -> None:
        self._exchanges = exchanges

    def responded(self, exchange: HttpExchange) -> None:
        self._exchanges.append(exchange)


def call(name: str, **arguments: object) -> str:
    """A call of a tool, as a model writes it in Hermes' form."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


@contextmanager
def scripted_agent(tokenizer_files: Path, folder: Path, answers: Sequence[str], *names: str) -> Iterator[AgentSite]:
    """Serve a model that says ``answers[n]`` after ``n`` results of tools, the last one also after more, and ``ASIDE`` where it
    has no tools.

    Args:
        tokenizer_files: a tokenizer, of which ``folder`` gets a copy with a template that knows tools and thoughts.
        names: by which clients may ask for the model, besides ``MODEL``.
    """
    tokenizer = with_template(tokenizer_files, folder, THINKING_TEMPLATE, "<think>", "</think>")

    def script(request: PromptRequest) -> list[list[int]]:
        prompt = _prompt(request, tokenizer)
        step = min(prompt.count(_RESULT), len(answers) - 1)
        return in_bursts(tokenizer.encode(answers[step] if _TOOLS in prompt else ASIDE, add_special_tokens=False), 3)

    exchanges: list[HttpExchange] = []
    front = Front(ServerSettings((MODEL, *names)), [_Exchanges(exchanges)])
    attach(front, tokenizer, script, MAX_MODEL_LEN)
    with served(front) as site:
        yield AgentSite(site, exchanges)


def _prompt(request: PromptRequest, tokenizer: Tokenizer) -> str:
    assert not isinstance(request.prompt, str), "the server has made tokens of it"
    return tokenizer.decode(request.prompt, skip_special_tokens=False)
