"""Measures on training prompts which proposals of a draft the target accepts. The result is kept beside the draft.

The default method decodes the target's greedy answers again, with fixed limits, in one stage, which knows them, so that what it
learns does not depend on how fast the machine is. Every process that uses the draft begins with it (``engine.experience_files``).

A draft is right more often on prompts that it was trained on than on others. So weights move only a part of the way from the
built-in ones to the measured ones (docs/results/policies.md, "The first tokens").
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

import torch
from msgspec.structs import replace
from rich.progress import track
from torch import Tensor
from torch.nn.functional import one_hot

from pipedec.config import Settings
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import Experience
from pipedec.decoding.learned import LearnedAcceptance
from pipedec.decoding.proposers import DRAFT_PRIOR, NgramProposer, SeenTokens
from pipedec.device import HOST
from pipedec.engine.build import load_drafter, new_scheduler, resolve
from pipedec.engine.experience_files import SHIPPED_FILE, write_learned
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.families.llama import LlamaConfig
from pipedec.methods import BestFirstOptions
from pipedec.model import LaneRows, StageModel
from pipedec.plan.budgets import kv_slots
from pipedec.stage import FinalStageWorker
from pipedec.threads.sequences import Sequences
from pipedec.train.continuations import Continuation, SplitPrompts, continued
from pipedec.train.run import Run
from pipedec.train.targets import FrozenTarget

NUM_PROMPTS = 24
_SHARE = 0.25  # how much of their difference from the built-in weights is kept
_LIMITS = BestFirstOptions(width=16, forwards=2)


class _KnownAnswer(StageModel):
    """In place of a target: after a token at any place of ``ids``, int64 [T], it predicts the next one of these."""

    ids: Tensor

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        for lane in lanes:
            lane.append()
        positions = torch.cat([lane.positions for lane in lanes])
        return self.ids[(positions + 1).clamp(max=len(self.ids) - 1)][:, None].float()

    def logits(self, hidden_RE: Tensor) -> Tensor:
        return one_hot(hidden_RE[:, 0].long(), self.config.vocab_size).float()


def some_answers(
    target: FrozenTarget, prompts: dict[str, SplitPrompts], new_tokens: int, run: Run, count: int = NUM_PROMPTS
) -> list[Continuation]:
    """The target's answers to ``count`` of the training prompts, some of every set, which ``run.work`` keeps."""
    chosen = list(islice(_in_turn(prompts), count))
    found = continued(target, chosen, new_tokens, run.work / "acceptance", run.replicas)
    by_prompt = {tuple(one.ids[: one.prompt_length]): one for one in found}
    return [by_prompt[tuple(prompt)] for prompt in chosen]


def measure_acceptance(target: Path, draft: Path, answered: list[Continuation], out: Path) -> None:
    """Decode the answers again and write ``acceptance.json`` to ``out``."""
    chosen = {"target": target, "draft": draft, "bita": "none", "stages": 1, "device": "cpu"}
    spec = resolve(Settings.of(**chosen, priors=False, prefix_cache=False, dtype="float32", draft_dtype="float32"))
    experience = Experience(spec.settings.passage, expected_ms=spec.expected_ms)
    smallest = LlamaConfig(
        model_type="llama", hidden_size=2, vocab_size=model_config(target).vocab_size, num_hidden_layers=1,
        intermediate_size=2, num_attention_heads=1,
    )  # fmt: skip
    known = _KnownAnswer(smallest, range(1), torch.float32, HOST)
    stage = FinalStageWorker(known, Sequences(target).of, slots=kv_slots(spec), block=spec.kv_block)
    pipeline = LocalPipeline(spec, [stage], new_scheduler(spec, load_drafter(spec, HOST), HOST, experience=experience))
    for number, one in enumerate(track(answered, "acceptance")):
        known.ids, sampling = torch.tensor(one.ids), SamplingParams(max_tokens=len(one.ids) - one.prompt_length)
        for _ in pipeline.run(TokenizedRequest(number, tuple(one.ids[: one.prompt_length]), sampling, DEFAULT_METHOD, _LIMITS)):
            continue  # the method learns
    out.mkdir(parents=True, exist_ok=True)
    write_learned(out / SHIPPED_FILE, shrunk(experience.acceptance), mode=0o644)


def shrunk(learned: LearnedAcceptance) -> LearnedAcceptance:
    """The weights, of which only ``_SHARE`` of their difference from the built-in ones is kept."""
    built_in = {"draft": DRAFT_PRIOR, "ngrams": NgramProposer.prior, "seen": SeenTokens.prior}
    kinds = {}
    for kind, rates in learned.kinds.items():
        weights = {
            source: {
                feature: _SHARE * weight + (1 - _SHARE) * built_in.get(source, {}).get(feature, 0.0)
                for feature, weight in features.items()
            }
            for source, features in rates.acceptance.items()
        }
        kinds[kind] = replace(rates, acceptance=weights)
    return replace(learned, kinds=kinds)


def _in_turn(prompts: dict[str, SplitPrompts]) -> chain[list[int]]:
    """The training prompts, the first of each set, then the second of each, and so on."""
    rounds = zip_longest(*(part.training for part in prompts.values()))
    return chain.from_iterable((prompt for prompt in each if prompt is not None) for each in rounds)
