"""Ways to get the target's greedy answer in one process: generation by ``transformers``, and pipedec's methods.

Owns loading and calling each, and counts the target's passes and rows. Knows neither clocks nor tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import logging

from pipedec.bench.llama_cpp import NAME, LlamaCpp, is_installed
from pipedec.config import AUTO
from pipedec.core import DEFAULT_METHOD, Request, SamplingParams, UserError
from pipedec.engine.build import DTYPES, load_drafter
from pipedec.engine.devices import chosen_device
from pipedec.engine.local import LocalPipeline
from pipedec.engine.sequences import Sequences
from pipedec.gguf import is_gguf
from pipedec.methods import METHODS
from pipedec.model import BitaWeights, DraftVocabulary, LaneRows, ModelConfig, StageModel, load_transformers
from pipedec.plan.spec import PipelineSpec
from pipedec.stage import FinalStageWorker, StageWorker

LOOKUP_TOKENS = 10
_LLAMA_CPP_TOKENS = 4096


@dataclass
class PassCount:
    """The target's work: passes through all of its layers, and the rows in these passes."""

    passes: float = 0.0
    rows: float = 0.0

    def add(self, rows: int, share: float = 1.0) -> None:
        """Count a forward of ``rows`` rows through ``share`` of the target's layers."""
        self.passes += share
        self.rows += rows * share


class Contender(Protocol):
    """One way to generate an answer; ``count`` accumulates over answers."""

    name: str
    count: PassCount

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer's token ids, up to an end token or ``max_tokens``."""


class TransformersContender:
    """``generate`` of a loaded target, always with a KV cache, whatever its generation config sets."""

    def __init__(self, name: str, target: Any, **options: Any) -> None:
        self.name = name
        self.count = PassCount()
        self._target = target
        self._options = options

    @torch.inference_mode()
    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        prompt = torch.tensor([list(prompt_token_ids)], device=self._target.device)
        counting = self._target.register_forward_hook(self._count_pass, with_kwargs=True)
        try:
            output = self._target.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False, use_cache=True,
                pad_token_id=0, **self._options,
            )  # fmt: skip
        finally:
            counting.remove()
        return [int(token) for token in output[0, prompt.shape[1] :]]

    def _count_pass(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        self.count.add(keywords["input_ids"].shape[1])


class PipelineContender:
    """One method of pipedec, all stages and the draft in this process."""

    def __init__(self, name: str, pipeline: LocalPipeline, method: str, count: PassCount) -> None:
        self.name = name
        self.count = count
        self._pipeline = pipeline
        self._method = method

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        request = Request(0, tuple(prompt_token_ids), SamplingParams(max_tokens=max_tokens), method=self._method)
        return [token for verdict in self._pipeline.run(request) for token in verdict.tokens]


class LlamaCppContender:
    """llama.cpp, whose passes are those of greedy decoding."""

    name = f"{NAME} greedy"

    def __init__(self, model: Path) -> None:
        self.count = PassCount()
        self._loaded = LlamaCpp(model, _LLAMA_CPP_TOKENS)

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        token_ids = self._loaded.answer(prompt_token_ids, max_tokens)
        self.count.add(len(prompt_token_ids))
        for _ in token_ids[1:]:
            self.count.add(1)
        return token_ids


class CountedStage(StageModel):
    """A stage that counts every forward as its share of the target's layers. ``count`` must be set after loading."""

    count: PassCount

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        self.count.add(len(inputs), self.num_layers / self.config.num_layers)
        return super().forward(inputs, lanes)


def load_contenders(spec: PipelineSpec) -> list[Contender]:
    """Greedy ``transformers`` first; contenders that need a draft model or BiTA only if ``spec`` has one; llama.cpp where the
    target is a GGUF file and the package ``xllamacpp`` is installed.

    The default method runs in one stage and in the stages of ``spec``; other methods gain nothing from stages in one process.

    Raises:
        UserError: ``transformers`` does not accept the draft model.
    """
    device = chosen_device(spec.settings.cut.device)
    target = load_transformers(spec.target, DTYPES[spec.dtype], device, attn_implementation="sdpa")
    contenders: list[Contender] = [TransformersContender("transformers greedy", target)]
    if spec.draft is not None and DraftVocabulary.load(spec.draft) is None:  # transformers knows no draft with few tokens
        draft = load_transformers(spec.draft, DTYPES[spec.dtype], device, attn_implementation="sdpa")
        if draft.config.vocab_size != target.config.vocab_size:
            raise UserError(
                f"transformers' assisted generation needs models of equal vocab_size, not {target.config.vocab_size} "
                f"and {draft.config.vocab_size}: use another draft, or --draft none"
            )
        contenders.append(TransformersContender("transformers assisted", target, assistant_model=draft))
    contenders.append(TransformersContender("transformers lookup", target, prompt_lookup_num_tokens=LOOKUP_TOKENS))
    if is_gguf(spec.target) and is_installed():
        contenders.append(LlamaCppContender(spec.target))
    return contenders + _pipelines(spec, device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides the warnings and progress bars of transformers inside the block."""
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _pipelines(spec: PipelineSpec, device: torch.device) -> list[Contender]:
    spec = spec.replaced(prefix_cache=False)  # every answer computes its prompt
    whole = replace(spec.replaced(stages=1, groups=None, layers=AUTO), layers=((spec.layers[0][0], spec.layers[-1][1]),))
    pipeline, count = _load_counted(whole, device)
    has_draft, has_bita = spec.draft is not None, spec.bita is not None
    compared = ("pp", "stpp", DEFAULT_METHOD, "bita")
    methods = [method for method in compared if METHODS[method].missing(has_draft, has_bita) is None]
    contenders: list[Contender] = [PipelineContender(f"pipedec {method}, 1 stage", pipeline, method, count) for method in methods]
    if spec.draft is not None:
        pipeline, count = _load_counted(spec, device)
        contenders.append(PipelineContender(f"pipedec, {spec.settings.cut.stages} stages", pipeline, DEFAULT_METHOD, count))
    return contenders


def _load_counted(spec: PipelineSpec, device: torch.device) -> tuple[LocalPipeline, PassCount]:
    """Like ``LocalPipeline.load``, with stages that count their forwards."""
    config, count, sequences = ModelConfig.from_directory(spec.target), PassCount(), Sequences(spec.target)
    stages: list[StageWorker] = []
    for first, last in spec.layers:
        model = CountedStage.load(spec.target, range(first, last), DTYPES[spec.dtype], device, config=config)
        assert isinstance(model, CountedStage)
        model.count = count
        if spec.bita is not None:
            model.attach(BitaWeights.load(spec.bita, config, range(first, last), DTYPES[spec.dtype], device))
        kind = FinalStageWorker if model.is_last else StageWorker
        stages.append(kind(model, sequences.of, device, slots=spec.kv_slots, block=spec.kv_block))
    return LocalPipeline(spec, stages, load_drafter(spec, device), device, kv=spec.kv_manager()), count
