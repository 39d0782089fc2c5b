"""The Python API, in the shape of vLLM's: ``LLM(...).generate(prompts, SamplingParams(...))``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipedec.client.client import Client
from pipedec.client.resident import ChatMessage, Prompt, Resident, prompt_list
from pipedec.client.resumption import Resumption
from pipedec.core import Completion, MethodOptions, SamplingParams, UserError
from pipedec.messages import PromptRequest

Resumable = Completion | Sequence[int] | None  # an answer so far


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
        each = prompt_list(prompts)
        priorities = [priority] * len(each) if isinstance(priority, int) else priority
        if len(priorities) != len(each):
            raise UserError(f"{len(priorities)} priorities for {len(each)} prompts: give one, or one for each prompt")
        resumptions = _resumptions(len(each), each == [prompts], resume)
        requests = [
            self._request(prompt, sampling_params, raw_prompt, options, threads, own)
            for prompt, own in zip(each, priorities, strict=True)
        ]
        return self._answered(requests, resumptions, use_tqdm)

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
        """Answer one conversation, or several together, each a list of ``{"role": ..., "content": ...}``.

        Args:
            use_tqdm, options, threads, priority: as of ``generate``.

        Raises:
            UserError: as ``generate``; or the target has no chat template, or its template refuses the messages.
            RankLost, SchedulerLost: the cluster died.
        """
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self._rendered(conversation, threads) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, options=options, threads=threads, priority=priority)

    def _answered(self, requests: list[PromptRequest], resumptions: list[Resumption | None], use_tqdm: bool) -> list[Completion]:
        """The completions of requests that continue these answers."""
        pairs = list(zip(requests, resumptions, strict=True))
        with _progress(len(requests), use_tqdm) as on_end:
            replies = self._client.ask_all(
                [request if known is None else known.resumed(request) for request, known in pairs], on_end=on_end
            )
        completions = [reply.completed() for reply in replies]
        for completion, (request, known) in zip(completions, pairs, strict=True):
            if known is not None and request.sampling.logprobs is not None:
                known.complete(completion)
        return completions

    def close(self) -> None:
        """Stop the cluster. No process keeps running."""
        self._cluster.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@contextmanager
def _progress(count: int, is_wanted: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar of ended answers on standard error, if that is a terminal and there are several."""
    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (is_wanted and count > 1 and console.is_terminal)) as bar:
        task = bar.add_task("prompts", total=count)
        yield lambda index: bar.advance(task)


def _resumptions(count: int, is_single: bool, resume: Resumable | Sequence[Resumable]) -> list[Resumption | None]:
    """The answer so far for each prompt. Raises UserError if their numbers differ."""
    given: Any = [None] * count if resume is None else [resume] if is_single else resume
    if not isinstance(given, Sequence) or len(given) != count:
        raise UserError(f"resume is not one answer for each of {count} prompts: give a list, with None for a prompt without one")
    return [None if said is None else Resumption.of(said) for said in given]
