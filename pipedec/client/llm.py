"""The Python API, in the shape of vLLM's: ``LLM(...).generate(prompts, SamplingParams(...))``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from pipedec.client.client import Client
from pipedec.client.resumption import Resumption
from pipedec.cluster.local import LocalCluster
from pipedec.core import DEFAULT_METHOD, MAX_NUM_SEQS, MAX_WAITING, Completion, MethodOptions, SamplingParams, UserError
from pipedec.engine.spec import Cut, Limits, Models, PipelineSpec
from pipedec.messages import PromptRequest
from pipedec.methods import find_method, make_options
from pipedec.threads import load_dialect
from pipedec.validation import byte_size

Resumable = Completion | Sequence[int] | None  # an answer so far


class LLM:
    """A resident cluster on this machine, which answers many prompts together.

    Starts in the constructor; ``close`` (or the end of a ``with`` block) stops it.

    Args:
        target, draft: checkpoint directories; the shipped pair by default, ``draft="none"`` for a pipeline without one.
        method: as ``--method``.
        stages, groups, layers, dtype, device, bita, max_model_len, max_num_seqs, max_waiting, kv_cache_memory: as the flags of
            ``pipedec generate``.
        prefix_cache: let prompts that begin alike share what is computed of them.

    Raises:
        UserError: the arguments do not fit together or do not fit the checkpoints.
        PipedecError: a rank could not start.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        method: str | None = None,
        stages: int = 4,
        groups: int | None = None,
        layers: list[int] | None = None,
        dtype: str = "float32",
        device: str = "auto",
        bita: str | Path | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_waiting: int = MAX_WAITING,
        kv_cache_memory: str | int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self._method = method
        models, cut = Models(target, draft, bita), Cut(stages, groups, layers)
        kv_bytes = None if kv_cache_memory is None else byte_size(str(kv_cache_memory), "kv_cache_memory")
        limits = Limits(max_model_len, max_num_seqs, max_waiting, kv_bytes, prefix_cache)
        spec = PipelineSpec.create(models, cut, dtype, device, limits=limits)
        self._cluster = LocalCluster(spec)
        self._cluster.start()
        assert self._cluster.scheduler is not None
        self._client = Client(self._cluster.scheduler, self._cluster.check)

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling_params: SamplingParams | None = None,
        *,
        raw_prompt: bool = False,
        options: MethodOptions | Mapping[str, Any] | None = None,
        threads: str | Path | None = None,
        priority: int | Sequence[int] = 0,
        resume: Resumable | Sequence[Resumable] = None,
        tree: object = None,
    ) -> list[Completion]:
        """Answer all prompts together. The completions are in the order of the prompts.

        Args:
            options: of the method, for example ``{"width": 16}`` or ``PipeDecOptions(width=16)`` (see ``pipedec.methods``).
            threads: the dialect in which answers may open decode threads, by name or file, as ``--threads``.
            priority: one for all prompts, or one for each. Where requests wait or compete, a lower one is served first.
            resume: for each prompt the answer so far, behind which it goes on: a completion, or its token ids, or None. A drawn
                answer needs the seed that a completion has. ``max_tokens`` counts the whole answer, and the completion contains
                all of it. The log-probabilities of its first tokens are those of the completion to resume, else empty.

        Raises:
            UserError: a prompt is empty or too long (the others are answered first), or the method has no such option, or the
                target never says what is to be resumed. ``tree`` is now called ``options``.
            RankLost, SchedulerLost: the cluster died.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if tree is not None:
            raise UserError("generate has no tree: give options, for example options={'width': 16}")
        sampling, given = sampling_params or SamplingParams(), self._checked(options)
        dialect = None if threads is None else load_dialect(threads).to_json()
        priorities = [priority] * len(texts) if isinstance(priority, int) else priority
        if len(priorities) != len(texts):
            raise UserError(f"{len(priorities)} priorities for {len(texts)} prompts: give one, or one for each prompt")
        resumptions = _resumptions(prompts, resume)
        requests = [
            PromptRequest(text, raw_prompt, self._method, sampling, given, threads=dialect, priority=own)
            for text, own in zip(texts, priorities, strict=True)
        ]
        return self._answered(requests, resumptions)

    def _answered(self, requests: list[PromptRequest], resumptions: list[Resumption | None]) -> list[Completion]:
        """The completions of requests that go on with these answers."""
        pairs = list(zip(requests, resumptions, strict=True))
        replies = self._client.ask_all([request if known is None else known.resumed(request) for request, known in pairs])
        completions = [reply.completed() for reply in replies]
        for completion, (request, known) in zip(completions, pairs, strict=True):
            if known is not None and request.sampling.logprobs is not None:
                known.complete(completion)
        return completions

    def _checked(self, options: MethodOptions | Mapping[str, Any] | None) -> Mapping[str, Any]:
        """By name, as a request sends them. Raises UserError if they are another method's."""
        method = self._method or DEFAULT_METHOD
        expected = find_method(method).options
        if isinstance(options, MethodOptions) and type(options) is not expected:
            raise UserError(f"method {method} takes {expected.__name__}, not {type(options).__name__}")
        given = asdict(options) if isinstance(options, MethodOptions) else dict(options or {})
        make_options(method, given)
        return given

    def close(self) -> None:
        """Stop the cluster. Nothing is left running."""
        self._cluster.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _resumptions(prompts: str | Sequence[str], resume: Resumable | Sequence[Resumable]) -> list[Resumption | None]:
    """For each prompt the answer so far. Raises UserError if there is not one for each."""
    count = 1 if isinstance(prompts, str) else len(prompts)
    given: Any = [None] * count if resume is None else [resume] if isinstance(prompts, str) else resume
    if not isinstance(given, Sequence) or len(given) != count:
        raise UserError(f"resume is not one answer for each of {count} prompts: give a list, with None for a prompt without one")
    return [None if said is None else Resumption.of(said) for said in given]
