"""One answer through a pipeline without stages: the answer is known, and with it the timestep of every verdict.

Owns the rows in flight and the emulated time. Loop and method are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.bench.policy.drafter import RecordedDrafter
from pipedec.bench.policy.losses import Losses, losses
from pipedec.core import Envelope, Request, Step, Verdict
from pipedec.decoding import Experience, create_method
from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.choices import Choices
from pipedec.engine.emulated_time import EmulatedClock, Pacer, TimestepLoad
from pipedec.engine.loop import decode
from pipedec.engine.recorder import Recorder, Timestep
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.plan.emulation import Emulation
from pipedec.threads import single_thread
from pipedec.topology import Topology
from pipedec.tree import PredictionTree


@dataclass(frozen=True)
class Replayed:
    """The cost of one answer: ``tokens`` are the decoded tokens, all except the first; ``decode_ms`` is emulated."""

    tokens: int
    timesteps: int
    hits: int
    misses: int
    decode_ms: float
    losses: Losses


class WatchedExperience(Experience):
    """Experience that also reports which accepted tokens had been proposed."""

    def __init__(self, passage: int) -> None:
        super().__init__(passage)
        self._is_proposed: list[bool] = []

    def acceptance(self, request: Request, prior: tuple[float, ...], device: torch.device | str) -> Acceptance:
        return _WatchedAcceptance(super().acceptance(request, prior, device), self._is_proposed)

    def take_proposed(self, tokens: int) -> list[bool]:
        """For each of the ``tokens`` of the last verdict: was it among the choices? False for all if there were no choices."""
        is_proposed = self._is_proposed[:] or [False] * tokens
        self._is_proposed.clear()
        return is_proposed


class _WatchedAcceptance(Acceptance):
    """Records the result of ``observe`` for every accepted token."""

    def __init__(self, watched: Acceptance, is_proposed: list[bool]) -> None:
        self._watched = watched
        self._is_proposed = is_proposed

    def log_chances(self, choices: Choices) -> Tensor:
        return self._watched.log_chances(choices)

    def observe(self, choices: Choices, row: int, token: int) -> bool | None:
        is_proposed = self._watched.observe(choices, row, token)
        self._is_proposed.append(bool(is_proposed))
        return is_proposed


class ReplayedPipeline:
    """Replays one answer at a time through the groups of ``topology``."""

    def __init__(self, emulation: Emulation, topology: Topology) -> None:
        self._emulation = emulation
        self._topology = topology

    def run(
        self, request: Request, answer: tuple[int, ...], drafter: RecordedDrafter | None, experience: WatchedExperience
    ) -> Replayed:
        """The cost of ``request`` if the target generates ``answer``.

        Raises:
            UserError: the method does not accept the request.
        """
        clock, recorder = EmulatedClock(self._emulation, self._topology), Recorder(Pacer(None, 0))
        sequence = single_thread(len(request.prompt_token_ids), (), len(answer))
        if drafter is not None:
            drafter.begin(sequence)  # also if the method does not draft
        timed = None if drafter is None else TimedDrafter(drafter, recorder.drafting)
        method = create_method(request, sequence, timed, experience)
        stages = _Stages(self._topology, answer, clock, recorder)
        is_proposed: list[bool] = []
        for verdict in decode(request, method, stages):
            is_proposed += experience.take_proposed(len(verdict.tokens))
        if drafter is not None:
            is_proposed = [one or other for one, other in zip(is_proposed, drafter.proposed(answer), strict=True)]
        causes = losses(stages.entries, is_proposed[:-1], self._topology.num_groups)
        return Replayed(len(answer) - 1, stages.timesteps, method.hits, method.misses, clock.total_ms, causes)


class _Stages:
    """The ``Pipeline`` of the decode loop without stages: the rows in flight, by group, with the first stage's row numbers.

    A row is computed once it has passed the last group; the recorded answer then gives the next token.

    Attributes:
        entries: the timesteps in which the rows of accepted tokens entered, in order.
        timesteps: so far.
    """

    def __init__(self, topology: Topology, answer: tuple[int, ...], clock: EmulatedClock, recorder: Recorder) -> None:
        self._topology = topology
        self._answer = answer
        self._clock = clock
        self._recorder = recorder
        self._num_accepted = 0  # tokens of the answer
        self._tree = PredictionTree()
        self._entered = torch.zeros(0, dtype=torch.int64)  # [N], timesteps
        self._is_computed = torch.zeros(0, dtype=torch.bool)  # [N]
        self._arrivals: list[Tensor | None] = [None] * topology.num_groups  # rows at each group
        self.entries: list[int] = []
        self.timesteps = 0

    def prefill(self, chunks: Sequence[list[int]], compute: Callable[[Tensor], None]) -> Verdict:
        for chunk in chunks:
            compute(torch.tensor(chunk, dtype=torch.int64))
        return self._verdict(1)

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        self.timesteps, load = number, TimestepLoad()
        self._sync(entering.verdict)
        self._transmit(entering.step, number, load)
        self._recorder.restart()
        meanwhile()
        load.drafted = self._recorder.drafted
        verdict = self._compute(load)
        timing = self._clock.add(load)
        return Timestep(number, entering.step, verdict, timing if number >= self._topology.num_groups else None, load)

    def close(self, last: Verdict) -> None:
        self._sync(last)

    def _sync(self, verdict: Verdict | None) -> None:
        """Prune rows that can no longer be accepted."""
        if verdict is None:
            return
        advance = self._tree.advance(verdict.tokens)
        self.entries += self._entered[advance.committed].tolist()
        self._entered, self._is_computed = self._entered[advance.kept], self._is_computed[advance.kept]
        pruned = [None if rows is None else advance.renumber(rows)[1] for rows in self._arrivals]
        self._arrivals = [rows if rows is not None and len(rows) else None for rows in pruned]

    def _transmit(self, step: Step | None, timestep: int, load: TimestepLoad) -> None:
        """``step`` enters the first group; the other rows move on by one group."""
        entering = None if step is None else self._enter(step, timestep)
        self._arrivals = [entering, *self._arrivals[:-1]]
        for sender, rows in zip((0, *self._topology.exit_ranks), self._arrivals, strict=False):
            if rows is not None:
                load.sent[sender] = len(rows)

    def _compute(self, load: TimestepLoad) -> Verdict | None:
        """Every group computes the rows that have arrived; the last group may yield a verdict."""
        for group, rows in zip(self._topology.groups, self._arrivals, strict=True):
            if rows is not None:
                load.computed.update(dict.fromkeys(group, len(rows)))
                load.sent.update(dict.fromkeys(group[:-1], len(rows)))
        computed = self._arrivals[-1]
        if computed is None:
            return None
        self._is_computed[computed] = True
        return self._verify()

    def _enter(self, step: Step, timestep: int) -> Tensor:
        rows = self._tree.append(step.token_ids, step.parents)
        self._entered = torch.nn.functional.pad(self._entered, (0, step.num_rows), value=timestep)
        self._is_computed = torch.nn.functional.pad(self._is_computed, (0, step.num_rows))
        return torch.arange(rows.start, rows.stop)

    def _verify(self) -> Verdict | None:
        """Accept tokens of the answer along computed rows; None if the root is not computed."""
        row, tokens = 0 if self._tree.num_rows else None, 0
        while row is not None and bool(self._is_computed[row]) and self._num_accepted + tokens < len(self._answer):
            row = self._tree.child(row, self._answer[self._num_accepted + tokens])
            tokens += 1
        return self._verdict(tokens) if tokens else None

    def _verdict(self, tokens: int) -> Verdict:
        """The next ``tokens`` of the answer. The finish reason makes no difference to methods."""
        first, self._num_accepted = self._num_accepted, self._num_accepted + tokens
        finished = "length" if self._num_accepted == len(self._answer) else None
        return Verdict.of(*self._answer[first : self._num_accepted], finished=finished)
