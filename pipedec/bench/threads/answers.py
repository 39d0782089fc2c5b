"""Answers of one emulated pipeline in several styles.

Owns the pipelines, one per style, so that a method learns from answers of one kind only.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipedec.bench.record import Row
from pipedec.bench.threads.exchange import Exchange
from pipedec.bench.threads.styles import Style
from pipedec.core import SamplingParams
from pipedec.engine.build import load_prompter
from pipedec.engine.local import LocalPipeline
from pipedec.messages import PromptRequest
from pipedec.plan.spec import PipelineSpec


class ThreadAnswers:
    """Generates answers, each in one of ``styles``, and the figures of their rows."""

    def __init__(self, spec: PipelineSpec, styles: Mapping[str, Style]) -> None:
        self._spec = spec
        self._styles = styles
        self._prompter = load_prompter(spec)
        self._pipelines: dict[str, LocalPipeline] = {}

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int) -> tuple[int, ...]:
        """The prompt in the style in which it is longest. Raises UserError like ``Prompter.token_ids``."""
        request = PromptRequest(prompt, raw, sampling=SamplingParams(max_tokens=max_tokens))
        return max((style.prompt(self._prompter, request) for style in self._styles.values()), key=len)

    def generate(self, request: PromptRequest, style: str) -> Row:
        """The figures of the answer to ``request``."""
        exchange = Exchange(self._pipeline(style), self._prompter, request)
        written = self._styles[style].answer(exchange)
        return {**exchange.costs.to_row(), **written.to_row()}

    def _pipeline(self, style: str) -> LocalPipeline:
        """Loaded for the first answer that has to be generated."""
        if style not in self._pipelines:
            self._pipelines[style] = LocalPipeline.load(self._spec)
        return self._pipelines[style]
