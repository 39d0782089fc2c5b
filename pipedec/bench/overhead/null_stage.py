"""Stages that compute nothing, and a rank 0 whose proposals are always accepted: what remains of a timestep is its fixed cost.

They run in the real ``StageLoop`` and ``DraftLoop``: tasks, messages and transfers are real, only the models are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Request, SamplingParams, Step, Verdict
from pipedec.decoding import Method, TimestepTiming
from pipedec.engine.answer import Answer
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.rank_tasks import Wiring
from pipedec.messages import Event
from pipedec.scheduler import GrantedTask
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.text.prompt import Prompter
from pipedec.threads import NewSequence, single_thread

_TOKEN = 7


class Probe:
    """Records the clocks and the Redis commands of one rank at each sync with a verdict.

    Attributes:
        wall_seconds, cpu_seconds, round_trips: one entry per sync of the current request, starting with the prefill's.
    """

    def __init__(self, round_trips: Callable[[], int]) -> None:
        self._round_trips = round_trips
        self.reset()

    def reset(self) -> None:
        """Start a new request."""
        self.wall_seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.round_trips: list[int] = []

    def note(self) -> None:
        """Called at each sync."""
        self.wall_seconds.append(time.perf_counter())
        self.cpu_seconds.append(time.process_time())
        self.round_trips.append(self._round_trips())


class NullStage(StageWorker):
    """A stage that passes on the rows it receives, without pruning any; its activations are zeros [R, E].

    ``on_finished`` is called at the last sync of each request.
    """

    def __init__(self, hidden_size: int, probe: Probe, on_finished: Callable[[], None]) -> None:
        self._hidden_size = hidden_size
        self._probe = probe
        self._on_finished = on_finished
        self._zeros: dict[int, Tensor] = {}
        self._computed: Step | None = None

    @property
    def cache_slots(self) -> int:
        return 0

    def begin(self, new_sequence: NewSequence, sampling: SamplingParams, tokens_per_mask: int = 0) -> None:
        self._probe.reset()
        self._computed = None

    def prefill(self, chunk: Step) -> None:
        self.decode(chunk)

    def decode(self, step: Step) -> None:
        if step.num_rows not in self._zeros:
            self._zeros[step.num_rows] = torch.zeros(step.num_rows, self._hidden_size)
        self._computed = Step(step.token_ids, step.parents, self._zeros[step.num_rows])

    def sync(self, verdict: Verdict) -> None:
        self._probe.note()
        if verdict.finished:
            self._on_finished()

    def outgoing(self) -> Step | None:
        computed, self._computed = self._computed, None
        return computed


class NullFinalStage(NullStage, FinalStageWorker):
    """The last stage: accepts one token per timestep until ``max_tokens``."""

    def begin(self, new_sequence: NewSequence, sampling: SamplingParams, tokens_per_mask: int = 0) -> None:
        super().begin(new_sequence, sampling)
        self._left = sampling.max_tokens

    def outgoing(self) -> Step | None:
        return None

    def verdict(self) -> Verdict:
        self._left = max(0, self._left - 1)
        return Verdict.of(_TOKEN, finished="length" if self._left == 0 else None)

    def take_logprobs(self) -> list[list[tuple[int, float]]]:
        return []


class ScriptedMethod:
    """``num_rows`` rows enter at every timestep; verdicts change nothing."""

    masks = NO_MASKS

    def __init__(self, num_rows: int, probe: Probe) -> None:
        self.hits = self.misses = 0
        self._probe = probe
        self._step = Step(torch.full((num_rows,), _TOKEN), torch.full((num_rows,), -1))

    def prefill(self, token_ids: Tensor) -> None:
        """There is no draft."""

    def draft(self) -> None:
        """There is no draft."""

    def apply(self, verdict: Verdict) -> None:
        self._probe.note()

    def propose(self) -> Step:
        return self._step

    def observe(self, timing: TimestepTiming) -> None:
        """Timestep timing is not used."""


class OneWordPrompter:
    """A detokenizer in which every token is the same word."""

    def stream(self) -> OneWordPrompter:
        return self

    def add(self, tokens: Sequence[int]) -> str:
        return " word" * len(tokens)

    def finish(self) -> str:
        return ""


class ScriptedDraftLoop(DraftLoop):
    """Rank 0 without a draft model, a tokenizer and a request queue."""

    def __init__(self, probe: Probe, wiring: Wiring) -> None:
        self._prompts = cast(Prompter, OneWordPrompter())
        super().__init__(self._prompts, None, 0, wiring)
        self._probe = probe
        self._granted: list[GrantedTask] = []

    def run_scripted(self, number: int, num_rows: int, max_tokens: int, trace: bool = False) -> list[GrantedTask]:
        """Run one request of ``max_tokens`` verdicts; returns the scheduler's trace of it if ``trace``.

        Raises:
            PipedecError: the run was aborted, or a rank or Redis was lost.
        """
        self._probe.reset()
        self._granted = []
        request = Request(number, (_TOKEN,), SamplingParams(max_tokens=max_tokens), "scripted", trace=trace)
        answer = Answer(request, single_thread(1, (), max_tokens), self._prompts, self._wiring.topology.num_stages)
        self.answer(answer, cast(Method, ScriptedMethod(num_rows, self._probe)))
        return self._granted

    def _trace(self, answer: Answer) -> list[Event]:
        if answer.request.trace:
            self._granted = self._scheduler.trace()
        return super()._trace(answer)
