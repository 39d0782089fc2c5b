"""A server of ``/v1/responses`` whose engine generates the texts that a test gives; its template has thoughts and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipedec.messages.request import PromptRequest
from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer
from support.http_server import Site, served
from support.scripted_engine import attach, in_bursts
from support.tiny_pair import tiny_tokenizer
from support.tool_templates import HERMES_TEMPLATE

_THINK = ["<think>", "</think>"]
# Shows the thoughts of earlier answers.
_TEMPLATE = HERMES_TEMPLATE.replace(
    '{{ message.content or "" }}',
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}",
)
Say = Callable[..., Site]


def written(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def scripted_responses(folder: Path) -> Iterator[Say]:
    """A server that keeps 8 responses. Its keys are ``a`` and ``b``; the client has ``a``."""
    fast = tiny_tokenizer()
    fast.add_tokens(_THINK)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    tokenizer = Tokenizer(folder)
    front = Front(ServerSettings(("tiny",), api_keys=("a", "b"), max_stored_responses=8), created=1)
    with served(front) as site:
        site.client.headers["Authorization"] = "Bearer a"

        def saying(*texts: str, burst: int = 3) -> Site:
            """The n-th request gets the n-th text, so many tokens at a time; the last one again and again."""
            answers = iter(texts)

            def script(request: PromptRequest) -> list[list[int]]:
                return in_bursts(tokenizer.encode(next(answers, texts[-1]), add_special_tokens=False), burst) or [[]]

            attach(front, tokenizer, script)
            return site

        yield saying
