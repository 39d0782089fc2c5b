"""Measures on training prompts which proposals of a draft the target accepts. The result is kept beside the draft.

The default method decodes the prompts greedily, with fixed limits, in one stage, so that what it learns does not depend on how
fast the machine is. Every process that uses the draft begins with it (``engine.experience_files``).

A draft is right more often on prompts that it was trained on than on others. So weights move only a part of the way from the
built-in ones to the measured ones (docs/results/policies.md, "The first tokens").
"""

from __future__ import annotations

from itertools import chain, islice, zip_longest
from pathlib import Path

from msgspec.structs import replace
from rich.progress import track

from pipedec.config import Settings
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import Experience
from pipedec.decoding.learned import LearnedAcceptance
from pipedec.decoding.proposers import DRAFT_PRIOR, NgramProposer, SeenTokens
from pipedec.engine.build import resolve
from pipedec.engine.experience_files import SHIPPED_FILE, write_learned
from pipedec.engine.local import LocalPipeline
from pipedec.methods import BestFirstOptions
from pipedec.train.continuations import SplitPrompts

NUM_PROMPTS = 24
_SHARE = 0.25  # how much of their difference from the built-in weights is kept
_LIMITS = BestFirstOptions(width=16, forwards=2)


def measure_acceptance(
    target: Path, draft: Path, prompts: dict[str, SplitPrompts], new_tokens: int, out: Path, count: int = NUM_PROMPTS
) -> None:
    """Decode ``count`` of the training prompts, some of every set, and write ``acceptance.json`` to ``out``."""
    spec = resolve(
        Settings.of(target=target, draft=draft, bita="none", stages=1, priors=False, dtype="float32", draft_dtype="float32")
    )
    experience = Experience(spec.settings.passage, expected_ms=spec.expected_ms)
    pipeline = LocalPipeline.load(spec, experience=experience)
    sampling = SamplingParams(max_tokens=new_tokens)
    chosen = list(islice(_in_turn(prompts), count))
    for number, token_ids in enumerate(track(chosen, "acceptance")):
        for _ in pipeline.run(TokenizedRequest(number, tuple(token_ids), sampling, DEFAULT_METHOD, _LIMITS)):
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
