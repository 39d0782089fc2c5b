"""LocalPipeline: all stages in one process, without Redis. The distributed pipeline must give the same answers.

The simplest place to debug a method: one timestep after another in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipedec.core import Envelope, Metrics, Request, Step, UserError, Verdict
from pipedec.decoding import Drafter, Experience, TimestepTiming, create_method
from pipedec.engine.draft_tokens import DraftTokens
from pipedec.engine.emulated_time import EmulatedClock, Pacer, TimestepLoad
from pipedec.engine.loop import decode
from pipedec.engine.recorder import Recorder, Timestep
from pipedec.engine.sequences import Sequences
from pipedec.engine.spec import PipelineSpec
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.plan.emulation import Emulation
from pipedec.sampling import seeded
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import Sequence as ThreadSequence
from pipedec.topology import Topology
from pipedec.transport import LocalTransport

_IDLE_TIMESTEPS = 16


class LocalPipeline:
    """Runs one request at a time through stages 1..n, which are grouped as ``topology`` says.

    Attributes of the last request:
        metrics: its counters.
        seed: with which its tokens were sampled.
        logprobs: as in ``Completion``.
        emulated_ms: how long decoding would take on the emulated devices; None without an emulation.
        sequence: its decode threads.
        fill: for each timestep the number of rows in each group.
    """

    def __init__(
        self,
        stages: list[StageWorker],
        topology: Topology,
        sequences: Sequences,
        drafter: Drafter | None = None,
        device: torch.device | str = "cpu",
        emulation: Emulation | None = None,
        trained_masks: int = 0,
    ) -> None:
        if len(stages) != topology.num_stages:
            raise ValueError(f"{len(stages)} stages do not fill a topology of {topology.num_stages}")
        if not isinstance(stages[-1], FinalStageWorker):
            raise ValueError("the last stage must be a FinalStageWorker")
        self._stages = stages
        self._topology = topology
        self._sequences = sequences
        self._recorder = Recorder(Pacer(None, 0))
        self._drafter = None if drafter is None else TimedDrafter(drafter, self._recorder.drafting)
        self._device = device
        self._emulation = emulation
        self._trained_masks = trained_masks
        self._experience = Experience(topology.num_groups)
        self.metrics = Metrics()
        self.seed: int | None = None
        self.logprobs: list[dict[int, float]] = []
        self.emulated_ms: float | None = None
        self.sequence: ThreadSequence | None = None
        self.fill: list[list[int]] = []
        self._began = 0.0

    @classmethod
    def load(cls, spec: PipelineSpec) -> LocalPipeline:
        """All stages of ``spec``, and its draft, in this process."""
        device = spec.torch_device()
        stages = [spec.load_stage(rank, device) for rank in range(1, spec.num_stages + 1)]
        drafter, masks = spec.load_drafter(device), spec.trained_masks()
        return cls(stages, spec.topology, Sequences(spec.target), drafter, device, spec.emulation, masks)

    def run(self, request: Request) -> Iterator[Verdict]:
        """Decode ``request`` and yield every verdict.

        Raises:
            UserError: the request has stop strings (there is no tokenizer here), or its method needs a draft or a BiTA and there
            is none.
        """
        if request.sampling.stop:
            raise UserError("stop strings need a tokenizer, which LocalPipeline does not have: use stop_token_ids")
        request = replace(request, sampling=seeded(request.sampling))
        self.metrics, self.seed, self.logprobs, self.fill = Metrics(), request.sampling.seed, [], []
        new_sequence = self._sequences.maker(len(request.prompt_token_ids), request.sampling, request.threads)
        self.sequence = new_sequence()
        method = create_method(request, self.sequence, self._drafter, self._experience, self._device, self._trained_masks)
        for stage in self._stages:
            stage.begin(new_sequence, request.sampling, method.masks.named)
        draft_tokens = DraftTokens()
        clock = EmulatedClock(self._emulation, self._topology) if self._emulation else None
        pipeline = _Stages(self._stages, self._topology, self._recorder, clock, self._device)
        self._began = time.perf_counter()
        for verdict in decode(request, method, pipeline, listeners=(self._note, draft_tokens.count)):
            if not self.fill:
                self.metrics.prefill_seconds = time.perf_counter() - self._began
            self.logprobs += map(dict, self._stages[-1].take_logprobs())
            self.metrics.hits, self.metrics.misses = method.hits, method.misses
            yield verdict
        self.metrics.draft_tokens = draft_tokens.total()
        self.emulated_ms = clock.total_ms if clock else None

    def _note(self, timestep: Timestep) -> None:
        """Listens to the timesteps of the answer."""
        assert timestep.load is not None
        self.fill.append([timestep.load.computed.get(rank, 0) for rank in self._topology.entry_ranks])
        self.metrics.timesteps = timestep.number
        self.metrics.decode_seconds = time.perf_counter() - self._began - self.metrics.prefill_seconds


class _Stages:
    """The ``Pipeline`` of the decode loop in which every stage learns a verdict at once (PipeDec §3.4.3)."""

    def __init__(
        self,
        workers: list[StageWorker],
        topology: Topology,
        recorder: Recorder,
        clock: EmulatedClock | None,
        device: torch.device | str,
    ) -> None:
        self._workers = dict(enumerate(workers, start=1))
        self._topology = topology
        self._recorder = recorder
        self._clock = clock
        self._device = device
        self._transports = LocalTransport.connect(topology.num_stages + 1)
        self._arrivals = [0] * topology.num_groups  # rows that enter each group in this timestep
        self._load = TimestepLoad()
        self._slowest_seconds = 0.0  # the slowest group of the current timestep
        self._idle_timesteps = 0

    def prefill(self, chunks: Sequence[list[int]], compute: Callable[[Tensor], None]) -> Verdict:
        for chunk in chunks:
            token_ids = torch.tensor(chunk, dtype=torch.int64, device=self._device)
            compute(token_ids)
            step: Step | None = Step(token_ids, torch.full_like(token_ids, -1))
            for worker in self._workers.values():
                assert step is not None
                worker.prefill(step)
                step = worker.outgoing()
        verdict = self._workers[self._topology.final_rank].verdict()
        assert verdict is not None
        return verdict

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        self._load = TimestepLoad()
        self._sync(entering.verdict)
        self._transmit(entering.step)
        self._recorder.restart()
        meanwhile()
        verdict = self._compute()
        timing = self._timing()
        is_full = number >= self._topology.num_groups
        return Timestep(number, entering.step, verdict, timing if is_full else None, self._load)

    def close(self, last: Verdict) -> None:
        self._sync(last)

    def _sync(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            for worker in self._workers.values():
                worker.sync(verdict)

    def _transmit(self, entering: Step | None) -> None:
        """Pass the remaining rows of every group to the next one."""
        moved = [self._pass_on(entering, 0)]
        for exit_rank, num_rows in zip(self._topology.exit_ranks[:-1], self._arrivals[:-1], strict=True):
            moved.append(self._pass_on(self._workers[exit_rank].outgoing(), exit_rank) if num_rows else 0)
        self._arrivals = moved
        self._idle_timesteps = 0 if any(moved) else self._idle_timesteps + 1
        if self._idle_timesteps == _IDLE_TIMESTEPS:
            raise RuntimeError(f"no row has entered the pipeline for {_IDLE_TIMESTEPS} timesteps, and the answer has not ended")

    def _compute(self) -> Verdict | None:
        """Every group computes its rows, stage by stage; the last group may yield a verdict."""
        self._slowest_seconds = 0.0
        for group, num_rows in zip(self._topology.groups, self._arrivals, strict=True):
            started = time.perf_counter()
            for rank in group if num_rows else ():
                step = self._transports[rank].receive(num_rows, rank - 1)
                self._load.computed[rank] = step.num_rows
                self._workers[rank].decode(step)
                if not self._topology.is_exit(rank):
                    self._pass_on(self._workers[rank].outgoing(), rank)
            self._slowest_seconds = max(self._slowest_seconds, time.perf_counter() - started)
        return self._workers[self._topology.final_rank].verdict() if self._arrivals[-1] else None

    def _pass_on(self, step: Step | None, rank: int) -> int:
        if step is None:
            return 0
        self._load.sent[rank] = step.num_rows
        self._transports[rank].send(step, rank + 1)
        return step.num_rows

    def _timing(self) -> TimestepTiming:
        """As rank 0 would measure it if every stage had a device of its own, or an emulated one."""
        self._load.drafted = self._recorder.drafted
        forwards = self._recorder.timing().forward_seconds
        if self._clock is not None:
            return self._clock.add(self._load)
        drafting = sum(forwards)
        return TimestepTiming(max(self._slowest_seconds, drafting), max(self._slowest_seconds - drafting, 0.0), forwards)
