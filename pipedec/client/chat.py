"""Conversations: one answer after the other, from a cluster or from any server with OpenAI's HTTP API.

Turns a conversation into a request, and its answer into text. Knows no terminal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2
from msgspec.structs import replace

from pipedec.client.client import Client
from pipedec.core import Completion, UserError
from pipedec.families import context_length
from pipedec.messages import PromptRequest, RunDescription
from pipedec.text.tokenizer import Tokenizer

_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)

Message = Mapping[str, str]


@dataclass(frozen=True)
class ChatAnswer:
    """An answer and its figures, when it has ended.

    Attributes:
        prompt_tokens, tokens: None if the server does not report them.
        ttft_seconds: time to first token; None if there was none.
        seconds: until the end.
        completion: of a cluster's answer.
    """

    finish_reason: str
    prompt_tokens: int | None
    tokens: int | None
    ttft_seconds: float | None
    seconds: float
    completion: Completion | None = None


class Partner(Protocol):
    """A model that answers."""

    name: str

    def answer(self, messages: Sequence[Message], on_text: Callable[[str], None]) -> ChatAnswer:
        """Answer the last message. An exception, such as Ctrl-C, cancels the answer and is raised again.

        Raises:
            UserError: the messages were refused; other messages may be accepted.
            PipedecError: there will be no more answers.
        """


class ClusterPartner:
    """A model in a running cluster.

    Args:
        description: of the client's run.
        asked: everything of a request but its prompt; the answer may have ``max_tokens``, or as many as fit into the context.
        tokenizer_directory: directory of the target's tokenizer; None for the one in the run's description.

    Raises:
        UserError: there is no tokenizer with a chat template.
    """

    def __init__(
        self, client: Client, description: RunDescription, asked: PromptRequest, tokenizer_directory: Path | None = None
    ) -> None:
        directory = tokenizer_directory or Path(description.target)
        self.name = Path(description.target).name
        self._client = client
        self._asked = asked
        try:
            self._tokenizer = Tokenizer(directory)
        except UserError as error:
            raise UserError(f"{error}; give --tokenizer DIR if it is elsewhere") from None
        if not self._tokenizer.has_chat_template:
            raise UserError(f"{directory} has no chat template: use `pipedec generate` or `pipedec submit` with this model")
        self._context = context_length(directory, description.settings.limits.max_model_len)

    def answer(self, messages: Sequence[Message], on_text: Callable[[str], None]) -> ChatAnswer:
        prompt = self._tokenizer.apply_chat_template(messages)
        room = self._context - len(prompt)
        if room < 1:
            raise UserError(f"the conversation has {len(prompt)} tokens, but the context is {self._context}: /reset starts over")
        sampling = replace(self._asked.sampling, max_tokens=min(room, self._asked.sampling.max_tokens))
        completion = self._client.ask(replace(self._asked, prompt=tuple(prompt), sampling=sampling), on_text)
        metrics = completion.metrics
        return ChatAnswer(
            str(completion.finish_reason), completion.prompt_tokens, len(completion.token_ids), metrics.ttft_seconds,
            metrics.e2e_seconds or 0.0, completion,
        )  # fmt: skip


class HttpPartner:
    """A model at an OpenAI-compatible URL.

    Args:
        url: up to and including ``/v1``.
        model: None for the first in the server's list.
        body: more fields of every request.

    Raises:
        UserError: the server cannot be reached, or refuses the key.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None, body: Mapping[str, Any]) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url {url}: give one like http://127.0.0.1:8000/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = url.rstrip("/")
        self._http = httpx2.Client(headers=headers, timeout=_TIMEOUT)
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        if model is None:
            with self._exchange("GET", "models") as response:
                response.read()
                models = _object(response.text).get("data") or []
            if not models:
                raise UserError(f"{self._url}/models lists no model: give --model NAME")
            model = str(models[0]["id"])
        self.name = model

    def answer(self, messages: Sequence[Message], on_text: Callable[[str], None]) -> ChatAnswer:
        began, first, finish = time.perf_counter(), None, "stop"
        usage: dict[str, int] = {}
        for chunk in self._chunks({**self._body, "model": self.name, "messages": list(messages)}):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", []):
                if text := choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter() - began
                    on_text(text)
                finish = choice.get("finish_reason") or finish
        return ChatAnswer(finish, usage.get("prompt_tokens"), usage.get("completion_tokens"), first, time.perf_counter() - began)

    def _chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a stream. Raises UserError for an error in place of the stream or in it."""
        with self._exchange("POST", "chat/completions", json=body) as response:
            for line in response.iter_lines():
                name, _, data = line.partition(":")
                if name != "data" or data.strip() == "[DONE]":
                    continue
                chunk = _object(data)
                if "error" in chunk:
                    raise UserError(f"{self._url}: {_message(chunk)}")
                yield chunk

    @contextmanager
    def _exchange(self, method: str, path: str, **body: Any) -> Iterator[httpx2.Response]:
        """A response that is not read yet. Raises UserError for an error, and if the server cannot be reached."""
        try:
            with self._http.stream(method, f"{self._url}/{path}", **body) as response:
                if response.status_code >= 400:
                    response.read()
                    raise UserError(f"{self._url} answers {response.status_code}: {_message(_object(response.text))}")
                yield response
        except httpx2.HTTPError as error:
            raise UserError(f"{self._url} cannot be reached: {str(error) or type(error).__name__}") from None


def _object(text: str) -> dict[str, Any]:
    """A JSON object; any other content becomes an error message."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"error": text.strip()[:200]}


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error", body)
    text = str(error.get("message", error) if isinstance(error, Mapping) else error)
    return " ".join(text.split())[:300]
