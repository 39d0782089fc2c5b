"""Conversations: one answer after the other, from a cluster or from any server with OpenAI's HTTP API.

Turns a conversation into a request, and its answer into text. Knows no terminal.
"""

from __future__ import annotations

import codecs
import io
import ipaddress
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.request import proxy_bypass

import httpx2
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from pipedec.checkpoints.download import pinned
from pipedec.client.client import Client
from pipedec.config.environment import named_proxies
from pipedec.config.settings import Models
from pipedec.core.completion import Completion
from pipedec.core.errors import UserError
from pipedec.families import context_length
from pipedec.hub import HubName
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.text.prompt import load_tokenizer

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
        name = HubName.of(description.target)
        if name is not None and tokenizer_directory is None:
            pinned(Models(target=description.target))  # on a host without ranks
        directory = tokenizer_directory or Path(description.target)
        self.name = Path(description.target if name is None else name.repo).name
        self._client = client
        self._asked = asked
        try:
            self._tokenizer = load_tokenizer(directory)
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
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL:
            parsed = httpx2.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UserError(f"--url {url}: give one like http://127.0.0.1:8000/v1")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UserError("the API key has characters that no HTTP header can carry: it is another one, or damaged")
        self._url = url.rstrip("/")
        self._proxy = _proxy_variable(parsed)
        self._http = _http_client(parsed, {} if api_key is None else {"Authorization": f"Bearer {api_key}"}, self._proxy)
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        if model is None:
            with self._exchange("GET", "models") as response:
                models = self._decoded(response.read(), _Models).data
            if not models:
                raise UserError(f"{self._url}/models lists no model: give --model NAME")
            model = models[0].id
        self.name = model

    def answer(self, messages: Sequence[Message], on_text: Callable[[str], None]) -> ChatAnswer:
        began, first, finish = time.perf_counter(), None, "stop"
        usage = _Usage()
        for chunk in self._chunks({**self._body, "model": self.name, "messages": list(messages)}):
            usage = chunk.usage or usage
            for choice in chunk.choices or ():
                if text := choice.delta and choice.delta.content:
                    first = first or time.perf_counter() - began
                    on_text(text.encode(errors="replace").decode())  # half of a surrogate pair is no text
                finish = choice.finish_reason or finish
        return ChatAnswer(finish, usage.prompt_tokens, usage.completion_tokens, first, time.perf_counter() - began)

    def _chunks(self, body: Mapping[str, Any]) -> Iterator[_Chunk]:
        """The objects of a stream. Raises UserError for an error in place of the stream or in it, and if it breaks off."""
        is_complete = False
        with self._exchange("POST", "chat/completions", json=body) as response:
            for data in server_sent_events(response.iter_bytes()):
                if data.strip() == "[DONE]":
                    is_complete = True
                    continue
                chunk = self._decoded(data, _Chunk)
                if chunk.error is not None:
                    raise UserError(f"{self._url}: {_message(chunk.error)}")
                is_complete |= any(choice.finish_reason for choice in chunk.choices or ())
                yield chunk
        if not is_complete:
            raise UserError(f"{self._url}: the answer broke off: its stream ends without [DONE]")

    def _decoded(self, content: str | bytes, kind: type[_Body]) -> _Body:
        try:
            return msgspec.convert(json.loads(content, strict=False), kind)  # strings may hold raw control characters
        except (msgspec.ValidationError, ValueError, RecursionError):
            text = content if isinstance(content, str) else content.decode(errors="replace")
            raise UserError(f"{self._url}: not an answer of OpenAI's API: {_message(text)}") from None

    @contextmanager
    def _exchange(self, method: str, path: str, **body: Any) -> Iterator[httpx2.Response]:
        """A response that is not read yet. Raises UserError for an error, and if the server cannot be reached."""
        try:
            with self._http.stream(method, f"{self._url}/{path}", **body) as response:
                if response.status_code >= 400:
                    response.read()
                    said: Any = response.text
                    with suppress(ValueError, RecursionError):
                        said = json.loads(said)
                    raise UserError(f"{self._url} answers {response.status_code}: {_message(said)}")
                yield response
        except (httpx2.HTTPError, UnicodeError) as error:  # or the host's name, or a text of the request, is none
            through = f" through the proxy in {self._proxy}" if self._proxy else ""
            raise UserError(f"{self._url} cannot be reached{through}: {str(error) or type(error).__name__}") from None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: tuple[_Model, ...] | None = None


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(Struct):
    choices: tuple[_Choice, ...] | None = None
    usage: _Usage | None = None
    error: Any = None


_Body = TypeVar("_Body", bound=Struct)


def server_sent_events(pieces: Iterable[bytes]) -> Iterator[str]:
    """The data of each event in a stream. Lines end at CR, LF and CRLF, and nowhere else: data may hold U+2028."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True)
    line, data = "", list[str]()
    for piece in pieces:
        *ended, line = (line + decoder.decode(piece)).split("\n")
        for field in ended:
            name, _, value = field.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
            elif not field:
                if text := "\n".join(data):
                    yield text
                data.clear()
    if text := "\n".join(data):  # the last event lacks its blank line
        yield text


def _http_client(url: httpx2.URL, headers: Mapping[str, str], proxy: str | None) -> httpx2.Client:
    """A client for ``url``, with the environment's proxies if its variable ``proxy`` names one. UserError for SOCKS proxies."""
    try:
        return httpx2.Client(headers=headers, timeout=_TIMEOUT, transport=None if proxy else httpx2.HTTPTransport())
    except (ImportError, ValueError, httpx2.InvalidURL):
        socks = next((name for name, value in named_proxies().items() if value.lower().startswith("socks")), None)
        wrong = f"{socks} names a SOCKS proxy, which pipedec cannot use" if socks else f"{proxy} names no HTTP proxy"
        raise UserError(f"{wrong}: unset it, or set NO_PROXY={url.host}") from None


def _proxy_variable(url: httpx2.URL) -> str | None:
    """The environment variable that names the proxy for ``url``; None if there is none. This machine is reached without one."""
    try:
        address = ipaddress.ip_address(url.host)
        is_here = address.is_loopback or address.is_unspecified
    except ValueError:
        is_here = url.host == "localhost" or url.host.endswith(".localhost")
    if is_here or proxy_bypass(url.host):
        return None
    return next((name for scheme in (url.scheme, "all") for name in named_proxies() if name.lower() == f"{scheme}_proxy"), None)


def _message(error: Any) -> str:
    """The message in an ``error`` object, in one line."""
    while isinstance(error, Mapping) and (inner := error.get("error", error.get("message"))) is not None:
        error = inner
    return " ".join(str(error).split())[:300]
