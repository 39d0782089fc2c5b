"""The Python API, in the shape of vLLM's: ``LLM(...).generate(prompts, SamplingParams(...))``, and ``AsyncLLM`` for programs
with an event loop. Each object owns a cluster on this machine.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipedec.client.async_client import AsyncClient, AsyncReply
from pipedec.client.client import Client
from pipedec.client.reply import Delta
from pipedec.client.resumption import Resumption
from pipedec.cluster.local import LocalCluster, resolve_apart
from pipedec.config import Settings
from pipedec.config.settings import keyword_arguments
from pipedec.core.completion import Completion
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, MethodOptions
from pipedec.core.sampling import SamplingParams
from pipedec.grammar.apart import check_apart
from pipedec.messages.request import LOCAL_TENANT, PromptRequest
from pipedec.methods import find_method, make_options
from pipedec.scheduler import RunStatus
from pipedec.text.prompt import load_tokenizer
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import load_dialect

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}
ChatMessage = Mapping[str, str]
Resumable = Completion | Sequence[int] | None  # an answer so far


class Resident:
    """Owns a cluster on this machine, which its constructor starts and a subclass stops.

    Args:
        target, draft: as ``--target`` and ``--draft``; ``draft="none"`` for a pipeline without one.
        method: as ``--method``.
        settings: any other setting of ``pipedec.config.settings`` by name, like ``stages=4`` or ``kv_cache_memory="4GiB"``: the
            options of ``pipedec generate --help``, with underscores.

    Raises:
        UserError: there is no such setting, or the settings do not fit together or do not fit the checkpoints.
        PipedecError: a rank could not start.
    """

    def __init__(
        self, target: str | Path | None = None, draft: str | Path | None = None, *, method: str | None = None, **settings: Any
    ) -> None:
        self._method = method
        self._tokenizer: Tokenizer | None = None
        self._check = lru_cache(maxsize=16)(lambda structure: check_apart(structure, Path(self._cluster.spec.target)))
        chosen, sentence = Settings.of(target=target, draft=draft, **settings).for_answers()
        self._cluster = LocalCluster(resolve_apart(chosen))
        if sentence is not None:
            logger.warning(sentence)
        self._cluster.start()

    def _request(
        self, prompt: Prompt, sampling: SamplingParams | None, raw_prompt: bool,
        options: MethodOptions | Mapping[str, Any] | None, threads: str | Path | None, priority: int,
    ) -> PromptRequest:  # fmt: skip
        """See ``LLM.generate``. Raises UserError if the method has no such option, or a prompt is neither text nor token ids."""
        given: Any = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        if not isinstance(given, str):
            if not isinstance(given, Sequence) or not all(isinstance(token, int) for token in given):
                forms = 'give a string, a list of integers or {"prompt_token_ids": [...]}'
                raise UserError(f"a prompt is neither text nor token ids: {forms}")
            given = tuple(given)
        dialect = None if threads is None else load_dialect(threads).to_json()
        named = named_options(self._method or DEFAULT_METHOD, options)
        if sampling is not None and sampling.structured_outputs is not None:
            self._check(sampling.structured_outputs)
        return PromptRequest(
            given, raw_prompt, self._method, sampling or SamplingParams(), named, threads=dialect, priority=priority,
            tenant=LOCAL_TENANT,
        )  # fmt: skip

    def _rendered(self, messages: Sequence[ChatMessage], threads: str | Path | None) -> tuple[int, ...]:
        """The token ids of a conversation. Raises UserError if the target has no chat template, or it refuses the messages."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(Path(self._cluster.spec.target))
        if not self._tokenizer.has_chat_template:
            raise UserError("the target has no chat template: use generate with a prompt")
        named: dict[str, Any] = {} if threads is None else {"threads": load_dialect(threads).name}
        return tuple(self._tokenizer.apply_chat_template(list(messages), **named))


Resident.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(one for one in inspect.signature(Resident.__init__).parameters.values() if one.kind is not one.VAR_KEYWORD),
        *(one for one in keyword_arguments() if one.name not in ("target", "draft")),
    ]
)  # every setting by name


def named_options(method: str, options: MethodOptions | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A method's options by name, as in a request. Raises UserError if they are another method's."""
    expected = find_method(method).options
    if isinstance(options, MethodOptions) and type(options) is not expected:
        raise UserError(f"method {method} takes {expected.__name__}, not {type(options).__name__}")
    given = asdict(options) if isinstance(options, MethodOptions) else dict(options or {})
    make_options(method, given)
    return given


class LLM(Resident):
    """A resident cluster on this machine, which answers many prompts together. Its arguments are those of ``Resident``.

    Starts in the constructor; ``close`` (or the end of a ``with`` block) stops it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        assert self._cluster.scheduler is not None
        self._client = Client(self._cluster.scheduler, self._cluster.check)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        raw_prompt: bool = False,
        options: MethodOptions | Mapping[str, Any] | None = None,
        threads: str | Path | None = None,
        priority: int | Sequence[int] = 0,
        resume: Resumable | Sequence[Resumable] = None,
        tree: object = None,
    ) -> list[Completion]:
        """Answer all prompts together. The completions are in the order of the prompts.

        Args:
            prompts: texts, token ids, or ``{"prompt_token_ids": [...]}``; token ids are used unchanged.
            use_tqdm: show a progress bar, if there are several prompts and standard error is a terminal.
            options: of the method, for example ``{"width": 16}`` or ``PipeDecOptions(width=16)`` (see ``pipedec.methods``).
            threads: the dialect in which answers may open decode threads, by name or file, as ``--threads``.
            priority: one for all prompts, or one for each. Where requests wait or compete, lower values are served first.
            resume: for each prompt the answer so far, after which it continues: a completion, its token ids, or None. A drawn
                answer needs the seed of its completion. ``max_tokens`` counts the whole answer, and the completion contains
                all of it. The log-probabilities of its first tokens are those of the completion to resume, else empty.

        Raises:
            UserError: a prompt is empty or too long (the others are answered first), or the method has no such option, or the
                answer to resume is impossible. ``tree`` is now called ``options``.
            RankLost, SchedulerLost: the cluster died.
        """
        if tree is not None:
            raise UserError("generate has no tree: give options, for example options={'width': 16}")
        given: Any = prompts
        is_single = isinstance(given, str | Mapping) or (bool(given) and all(isinstance(token, int) for token in given))
        each: list[Prompt] = [given] if is_single else list(given)
        priorities = [priority] * len(each) if isinstance(priority, int) else priority
        if len(priorities) != len(each):
            raise UserError(f"{len(priorities)} priorities for {len(each)} prompts: give one, or one for each prompt")
        answers: Any = [None] * len(each) if resume is None else [resume] if is_single else resume
        if not isinstance(answers, Sequence) or len(answers) != len(each):
            count = f"one answer for each of {len(each)} prompts"
            raise UserError(f"resume is not {count}: give a list, with None for a prompt without one")
        resumptions = [None if answer is None else Resumption.of(answer) for answer in answers]
        requests = [
            self._request(prompt, sampling_params, raw_prompt, options, threads, own)
            for prompt, own in zip(each, priorities, strict=True)
        ]
        pairs = zip(requests, resumptions, strict=True)
        asked = [request if known is None else known.resumed(request) for request, known in pairs]
        console = Console(stderr=True)
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        is_shown = use_tqdm and len(asked) > 1 and console.is_terminal
        with Progress(*columns, console=console, disable=not is_shown) as bar:
            task = bar.add_task("prompts", total=len(asked))
            completions = [reply.completed() for reply in self._client.ask_all(asked, on_end=lambda index: bar.advance(task))]
        for completion, request, known in zip(completions, requests, resumptions, strict=True):
            if known is not None and request.sampling.logprobs is not None:
                known.complete(completion)
        return completions

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        options: MethodOptions | Mapping[str, Any] | None = None,
        threads: str | Path | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Answer one conversation, or several together, each a list of ``{"role": ..., "content": ...}``; otherwise as
        ``generate``. Raises UserError also if the target has no chat template, or its template refuses the messages.
        """
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self._rendered(conversation, threads) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, options=options, threads=threads, priority=priority)

    def close(self) -> None:
        """Stop the cluster. No process keeps running."""
        self._cluster.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLLM(Resident):
    """A resident cluster on this machine, for one event loop. Its arguments are those of ``Resident``.

    Starts in the constructor, as ``LLM``; the end of an ``async with`` block, or ``aclose``, stops it. To use a cluster that is
    already running, see ``AsyncClient.connect``.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()  # for the first call of several tasks

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        raw_prompt: bool = False,
        options: MethodOptions | Mapping[str, Any] | None = None,
        threads: str | Path | None = None,
        priority: int = 0,
    ) -> AsyncReply:
        """Begin an answer, to iterate over, wait for (``completed``) or ``cancel``. The arguments are those of ``LLM.generate``.

        Raises:
            QueueFull: as many requests run and wait as the cluster allows.
            UserError: the prompt has no valid form, or the method has no such option.
            RankLost, SchedulerLost: the cluster died.
        """
        client = await self._connected()
        request = await asyncio.to_thread(self._request, prompt, sampling_params, raw_prompt, options, threads, priority)
        return await client.submit(request)

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **named: Any) -> AsyncIterator[Delta]:
        """The answer in pieces, otherwise as ``submit``. Leaving the iteration (``aclose``) cancels it."""
        reply = await self.submit(prompt, sampling_params, **named)
        try:
            async for delta in reply:
                yield delta
            await reply.completed()
        finally:
            await reply.cancel()

    async def chat(
        self, messages: Sequence[ChatMessage], sampling_params: SamplingParams | None = None, **named: Any
    ) -> AsyncReply:
        """Begin the next answer of a conversation, a list of ``{"role": ..., "content": ...}``; otherwise as ``submit``."""
        return await self.submit(self._rendered(messages, named.get("threads")), sampling_params, **named)

    async def status(self) -> RunStatus:
        """The state of the run, including the running and waiting requests. Raises SchedulerLost if Redis cannot be reached."""
        return await (await self._connected()).status()

    async def aclose(self) -> None:
        """Cancel open requests and stop the cluster. No process keeps running."""
        if self._client is not None:
            await self._client.aclose()
        self._cluster.stop()

    async def __aenter__(self) -> AsyncLLM:
        await self._connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _connected(self) -> AsyncClient:
        async with self._connecting:
            if self._client is None:
                address = self._cluster.address
                self._client = await AsyncClient.connect(address.redis_url, address.run_id, check=self._cluster.check)
            return self._client
