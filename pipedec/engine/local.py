"""LocalPipeline: all stages in one process, without Redis. The distributed pipeline must give the same answers.

The simplest place to debug a method: one timestep after another in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import torch

from pipedec.core import Metrics, Request, Step, UserError, Verdict
from pipedec.decoding import Drafter, Experience, Method, TimestepTiming, create_method, create_threaded
from pipedec.engine.clock import TimestepClock
from pipedec.engine.dialects import Dialects
from pipedec.engine.draft_tokens import DraftTokens
from pipedec.engine.emulated_time import EmulatedClock, TimestepLoad
from pipedec.engine.prefill import prefill_chunks
from pipedec.engine.spec import PipelineSpec
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.plan.emulation import Emulation
from pipedec.sampling import seeded
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import NewSequence
from pipedec.threads import Sequence as ThreadSequence
from pipedec.topology import Topology
from pipedec.transport import LocalTransport

_IDLE_TIMESTEPS = 16


class LocalPipeline:
    """Runs one request at a time through stages 1..n, which are grouped as ``topology`` says."""

    def __init__(
        self,
        stages: list[StageWorker],
        topology: Topology,
        drafter: Drafter | None = None,
        device: torch.device | str = "cpu",
        emulation: Emulation | None = None,
        trained_masks: int = 0,
        dialects: Dialects | None = None,
    ) -> None:
        if len(stages) != topology.num_stages:
            raise ValueError(f"{len(stages)} stages do not fill a topology of {topology.num_stages}")
        final = stages[-1]
        if not isinstance(final, FinalStageWorker):
            raise ValueError("the last stage must be a FinalStageWorker")
        self._stages = dict(enumerate(stages, start=1))
        self._final = final
        self._topology = topology
        self._drafter = None if drafter is None else TimedDrafter(drafter, self._drafting)
        self._device = device
        self._emulation = emulation
        self._trained_masks = trained_masks
        self._dialects = dialects
        self._load = TimestepLoad()
        self._draft_tokens = DraftTokens()
        self._experience = Experience(topology.num_groups)
        self._drafting_clock = TimestepClock()
        self._slowest_seconds = 0.0  # the slowest group of the current timestep
        self.metrics = Metrics()
        self.seed: int | None = None
        self.logprobs: list[dict[int, float]] = []
        self.emulated_ms: float | None = None
        self.sequence: ThreadSequence | None = None
        self.fill: list[list[int]] = []

    @classmethod
    def load(cls, spec: PipelineSpec) -> LocalPipeline:
        """All stages of ``spec``, and its draft, in this process."""
        device = spec.torch_device()
        stages = [spec.load_stage(rank, device) for rank in range(1, spec.num_stages + 1)]
        drafter, masks = spec.load_drafter(device), spec.trained_masks()
        return cls(stages, spec.topology, drafter, device, spec.emulation, masks, Dialects(spec.target))

    def run(self, request: Request) -> Iterator[Verdict]:
        """Decode ``request`` and yield every verdict.

        Afterwards these attributes describe the request: ``metrics``; ``seed``, with which its tokens were sampled; ``logprobs``
        as in ``Completion``; ``emulated_ms``, how long decoding would take on the emulated devices (None without an emulation);
        ``sequence``, the threads of an answer in several threads; ``fill``, for each timestep the number of rows in each group.

        Raises:
            UserError: the request has stop strings (there is no tokenizer here), or its method needs a draft or a BiTA and there
            is none.
        """
        if request.sampling.stop:
            raise UserError("stop strings need a tokenizer, which LocalPipeline does not have: use stop_token_ids")
        sampling = seeded(request.sampling)
        self.metrics, self.seed, self.logprobs, self.fill = Metrics(), sampling.seed, [], []
        self._draft_tokens = DraftTokens()
        clock = EmulatedClock(self._emulation, self._topology) if self._emulation else None
        self._transports = LocalTransport.connect(self._topology.num_stages + 1)
        request = replace(request, sampling=sampling)
        new_sequence = self._new_sequence(request)
        method = self._create_method(request, new_sequence)
        for stage in self._stages.values():
            stage.begin(len(request.prompt_token_ids), sampling, method.masks.named, new_sequence)

        started = time.perf_counter()
        verdict: Verdict | None = self._prefill(request, method)
        prefilled = time.perf_counter()
        self.metrics.prefill_seconds = prefilled - started
        arrivals = [0] * self._topology.num_groups  # rows that enter each group in this timestep
        self._load = TimestepLoad()
        for timestep in count(1):
            if verdict is not None:
                self._apply(verdict, method)
                self.logprobs += map(dict, self._final.take_logprobs())
                yield verdict
                if verdict.finished:
                    break
            arrivals = self._transmit(method, arrivals)
            self.fill.append(list(arrivals))
            self._check_progress()
            method.draft()
            verdict = self._compute(arrivals)
            measured = self._timing()
            timing = measured if clock is None else clock.add(self._load)
            if timestep >= self._topology.num_groups:
                method.observe(timing)
            self._load = TimestepLoad()
            self.metrics.timesteps = timestep
            self.metrics.decode_seconds = time.perf_counter() - prefilled
        self.metrics.hits, self.metrics.misses = method.hits, method.misses
        self.metrics.draft_tokens = self._draft_tokens.total()
        self.emulated_ms = clock.total_ms if clock else None

    def _check_progress(self) -> None:
        """Raises RuntimeError if the pipeline has been empty for longer than any method leaves it empty."""
        if not any(map(any, self.fill[-_IDLE_TIMESTEPS:])) and len(self.fill) >= _IDLE_TIMESTEPS:
            raise RuntimeError(f"no row has entered the pipeline for {_IDLE_TIMESTEPS} timesteps, and the answer has not ended")

    def _new_sequence(self, request: Request) -> NewSequence | None:
        if request.threads is None:
            return None
        if self._dialects is None:
            raise UserError("threads need a tokenizer, which this pipeline was made without: use LocalPipeline.load")
        return self._dialects.new_sequence(request.threads, len(request.prompt_token_ids), request.sampling)

    def _create_method(self, request: Request, new_sequence: NewSequence | None) -> Method:
        self.sequence = None if new_sequence is None else new_sequence()
        if self.sequence is None:
            return create_method(request, self._drafter, self._experience, self._device, self._trained_masks)
        drafter = None if self._drafter is None else self._drafter.for_threads(self.sequence)
        return create_threaded(request, self.sequence, drafter, self._experience, self._device, self._trained_masks)

    def _prefill(self, request: Request, method: Method) -> Verdict:
        for chunk_ids in prefill_chunks(request.prompt_token_ids, method.masks.count):
            token_ids = torch.tensor(chunk_ids, dtype=torch.int64, device=self._device)
            method.prefill(token_ids)
            chunk = Step(token_ids, torch.full_like(token_ids, -1))
            for stage in self._stages.values():
                chunk = stage.prefill(chunk)
        return self._final.first_verdict(chunk)

    def _compute(self, arrivals: list[int]) -> Verdict | None:
        """Every group computes its rows, stage by stage; the last group may yield a verdict."""
        self._slowest_seconds = 0.0
        for group, num_rows in zip(self._topology.groups, arrivals, strict=True):
            started = time.perf_counter()
            for rank in group if num_rows else ():
                step = self._transports[rank].receive(num_rows, rank - 1)
                self._load.computed[rank] = step.num_rows
                self._stages[rank].decode(step)
                if not self._topology.is_exit(rank):
                    self._pass_on(self._stages[rank].outgoing(), rank)
            self._slowest_seconds = max(self._slowest_seconds, time.perf_counter() - started)
        return self._final.verdict() if arrivals[-1] else None

    def _apply(self, verdict: Verdict, method: Method) -> None:
        method.apply(verdict)
        for stage in self._stages.values():
            stage.sync(verdict)

    def _transmit(self, method: Method, arrivals: list[int]) -> list[int]:
        """Pass the remaining rows of every group to the next one. Returns the number of rows that enter each group."""
        self._stages[self._topology.final_rank].outgoing()
        moved = [self._pass_on(self._draft_tokens.add(method.propose()), 0)]
        for group, num_rows in zip(self._topology.groups[:-1], arrivals[:-1], strict=True):
            exit_rank = group[-1]
            moved.append(self._pass_on(self._stages[exit_rank].outgoing(), exit_rank) if num_rows else 0)
        return moved

    def _pass_on(self, step: Step | None, rank: int) -> int:
        if step is None:
            return 0
        self._load.sent[rank] = step.num_rows
        self._transports[rank].send(step, rank + 1)
        return step.num_rows

    @contextmanager
    def _drafting(self, rows: int) -> Iterator[None]:
        self._load.drafted.append(rows)
        with self._drafting_clock.forward():
            yield

    def _timing(self) -> TimestepTiming:
        """What rank 0 would measure if every stage had a device of its own."""
        forwards = self._drafting_clock.finish_timestep().forward_seconds
        drafting = sum(forwards)
        return TimestepTiming(max(self._slowest_seconds, drafting), max(self._slowest_seconds - drafting, 0.0), forwards)
