"""llama.cpp in this process, on a GGUF file, by the package ``xllamacpp``: single answers, and the same load as pipedec's.

Its weights stay quantised, and it rounds activations as well, so its answers are not the target's own, token for token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pipedec.bench.load.benchmark import Place
from pipedec.bench.load.offered import OfferedLoad, Policy
from pipedec.bench.load.results import LoadOutcome, ServedRequest
from pipedec.bench.options import DrawnPrompt
from pipedec.core.errors import UserError
from pipedec.families import model_config
from pipedec.gguf import is_gguf, located
from pipedec.methods import PlainOptions
from pipedec.text.prompt import Prompter

NAME = "llama.cpp"


def is_installed() -> bool:
    """Whether its package is there."""
    return find_spec("xllamacpp") is not None


class LlamaCpp:
    """A loaded model with slots for requests of ``context`` tokens. It computes with torch's number of threads, on the CPU.

    Raises UserError if the package is not installed, the model is no GGUF file, or llama.cpp does not load it.
    """

    def __init__(self, model: Path, context: int, slots: int = 1) -> None:
        if not is_installed():
            raise UserError(f"{NAME} needs the package xllamacpp: pip install xllamacpp")
        if not is_gguf(model):
            raise UserError(f"{NAME} reads GGUF files, and {model} is none")
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(located(model))
        options.n_ctx, options.n_parallel, options.n_gpu_layers = context * slots, slots, 0
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = torch.get_num_threads()
        options.port, options.verbosity = 0, -1
        try:
            self._server = xllamacpp.Server(options)
        except RuntimeError as error:
            raise UserError(f"{NAME} does not load {model}: {' '.join(str(error).split())[:160]}") from None

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer's token ids, up to an end token or ``max_tokens``."""
        choice = self._server.handle_completions(_asked(prompt_token_ids, max_tokens) | {"logprobs": 1})["choices"][0]
        return [entry["id"] for entry in choice["logprobs"]["content"]]

    def stream(self, prompt_token_ids: Sequence[int], max_tokens: int, on_token: Callable[[], None]) -> None:
        """The same; ``on_token`` is called for each of its tokens as it comes."""

        def take(event: Any) -> None:
            if event["choices"][0]["finish_reason"] is None:
                on_token()

        self._server.handle_completions(_asked(prompt_token_ids, max_tokens) | {"stream": True}, take)


def _asked(prompt_token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt": list(prompt_token_ids), "n_predict": max_tokens, "temperature": 0, "cache_prompt": False}


POLICY = Policy(NAME, NAME, PlainOptions())
_LONGEST_WAIT = 0.25


class OnLlamaCpp(Place):
    """Answers requests one by one, each in a thread that waits for it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.prompter = Prompter(model, model_config(model).max_position_embeddings)
        self.cluster = {"preset": None, "run": NAME, "stages": 1, "model": str(model)}

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
