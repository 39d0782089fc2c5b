"""The same load for llama.cpp, which has a slot for each request at the same time."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path

from benchmarks.alternatives.llama_cpp import NAME, LlamaCpp
from pipedec.bench.load.benchmark import Place
from pipedec.bench.load.offered import OfferedLoad, Policy
from pipedec.bench.load.results import LoadOutcome, ServedRequest
from pipedec.bench.prompts import DrawnPrompt
from pipedec.bench.record import Row
from pipedec.core import UserError
from pipedec.methods import PlainOptions
from pipedec.model import ModelConfig
from pipedec.text.prompt import Prompter

POLICY = Policy(NAME, NAME, PlainOptions())
_LONGEST_WAIT = 0.25


class OnLlamaCpp(Place):
    """Answers requests one by one, each in a thread that waits for it."""

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def prompter(self) -> Prompter:
        return Prompter(self._model, ModelConfig.from_directory(self._model).max_positions)

    @property
    def cluster(self) -> Row:
        return {"preset": None, "run": NAME, "stages": 1, "model": str(self._model)}

    def offer(self, load: OfferedLoad) -> LoadOutcome:
        prompts = [prompt for prompt, *_ in load.conversations]
        if any(prompt.request.sampling.is_stochastic for prompt in prompts):
            raise UserError(f"{NAME} is measured with greedy answers: leave out --temperature")
        longest = max(len(prompt.token_ids) + prompt.request.sampling.max_tokens for prompt in prompts)
        loaded = LlamaCpp(self._model, longest + 8, load.max_num_seqs)
        left, open_ = list(reversed(prompts)), set[Future[ServedRequest]]()
        served: list[Future[ServedRequest]] = []
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            while left or open_:
                for _ in load.arrivals.due(time.perf_counter() - began, len(open_)):
                    served.append(threads.submit(_served, loaded, left.pop(), began))
                    open_.add(served[-1])
                due = load.arrivals.next_seconds()
                patience = _LONGEST_WAIT if due is None else min(_LONGEST_WAIT, max(0.001, due - time.perf_counter() + began))
                ended, open_ = wait(open_, patience, FIRST_COMPLETED) if open_ else (set(), open_)
                for _ in ended:
                    load.on_end()
        return LoadOutcome(tuple(one.result() for one in served))


def _served(loaded: LlamaCpp, prompt: DrawnPrompt, began: float) -> ServedRequest:
    submitted, events = time.perf_counter() - began, list[tuple[float, int]]()
    sampling = prompt.request.sampling
    loaded.stream(prompt.token_ids, sampling.max_tokens, lambda: events.append((time.perf_counter() - began, 1)))
    ended = time.perf_counter() - began
    return ServedRequest(prompt.prompt_set, prompt.index, len(prompt.token_ids), submitted, tuple(events), ended)
