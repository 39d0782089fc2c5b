"""A running request on rank 0: its method, the text generated so far, its stop strings and its metrics."""

from __future__ import annotations

import time

from pipedec.core import Completion, Request, Step, Verdict
from pipedec.decoding import Method
from pipedec.engine.draft_tokens import DraftTokens
from pipedec.messages import completion_to_event
from pipedec.scheduler.protocol import Event
from pipedec.text.prompt import Prompter
from pipedec.text.stream import StopStrings


class Answer:
    """A running request: its method, the text generated so far, its metrics."""

    def __init__(self, request: Request, method: Method, prompter: Prompter, num_stages: int) -> None:
        self.request = request
        self.method = method
        self.completion = Completion(request.method, num_stages, len(request.prompt_token_ids))
        self.completion.seed = request.sampling.seed
        self.is_published = False  # whether the client has the completion
        self._draft_tokens = DraftTokens()
        self._text = prompter.stream()
        self._stops = StopStrings(self._text, request.sampling.stop) if request.sampling.stop else None
        self._stopped_text = ""  # with stop strings: the text of the verdict last passed to ``until_stop``
        self._started = time.perf_counter()
        self._prefilled: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason is not None

    def propose(self) -> Step | None:
        """The rows that enter the pipeline next, or None."""
        return self._draft_tokens.add(self.method.propose())

    def until_stop(self, verdict: Verdict) -> Verdict:
        """``verdict``, cut and finished at the first stop string in its text. To be called before ``add``."""
        if self._stops is None:
            return verdict
        self._stopped_text, count = self._stops.add(verdict.tokens)
        return verdict if count is None else Verdict(verdict.tokens[:count], "stop")

    def add(self, verdict: Verdict, timestep: int) -> Event:
        """Add the accepted tokens of ``verdict``. Returns the event for the client."""
        self._count(verdict, timestep)
        self.completion.token_ids.extend(verdict.tokens)
        piece = self._stopped_text if self._stops else self._text.add(verdict.tokens)
        piece += (self._stops or self._text).finish() if verdict.finished else ""
        self.completion.text += piece
        return {"token_ids": list(verdict.tokens), "text": piece}

    def completed(self) -> Event:
        """The last event for the client: the completion."""
        return completion_to_event(self.completion)

    def _count(self, verdict: Verdict, timestep: int) -> None:
        now = time.perf_counter()
        completion, metrics = self.completion, self.completion.metrics
        if self._prefilled is None:
            self._prefilled = now
        metrics.prefill_seconds = self._prefilled - self._started
        metrics.decode_seconds = now - self._prefilled
        metrics.timesteps = timestep
        completion.finish_reason = verdict.finished
        metrics.hits, metrics.misses = self.method.hits, self.method.misses
        if verdict.finished is not None:
            metrics.draft_tokens = self._draft_tokens.total()
