"""How often the target accepts what a draft proposes, measured on training prompts and kept beside the draft.

The default method decodes the prompts greedily, with fixed limits, in one stage, so that what it learns does not depend on how
fast the machine is. Every process that uses the draft begins with it (``engine.experience_files``).
"""

from __future__ import annotations

from itertools import chain, islice, zip_longest
from pathlib import Path

from rich.progress import track

from pipedec.config import Settings
from pipedec.core import DEFAULT_METHOD, Request, SamplingParams
from pipedec.decoding import Experience
from pipedec.engine.build import resolve
from pipedec.engine.experience_files import SHIPPED_FILE, write_learned
from pipedec.engine.local import LocalPipeline
from pipedec.methods import BestFirstOptions
from pipedec.train.continuations import SplitPrompts

NUM_PROMPTS = 24
_LIMITS = BestFirstOptions(width=16, forwards=2)


def measure_acceptance(
    target: Path, draft: Path, prompts: dict[str, SplitPrompts], new_tokens: int, out: Path, count: int = NUM_PROMPTS
) -> None:
    """Decode ``count`` of the training prompts, some of every set, and write ``acceptance.json`` to ``out``."""
    spec = resolve(
        Settings.of(target=target, draft=draft, bita="none", stages=1, priors=False, dtype="float32", draft_dtype="float32")
    )
    experience = Experience(spec.topology.num_groups)
    pipeline = LocalPipeline.load(spec, experience=experience)
    sampling = SamplingParams(max_tokens=new_tokens)
    chosen = list(islice(_in_turn(prompts), count))
    for number, token_ids in enumerate(track(chosen, "acceptance")):
        for _ in pipeline.run(Request(number, tuple(token_ids), sampling, DEFAULT_METHOD, _LIMITS)):
            continue  # the method learns
    out.mkdir(parents=True, exist_ok=True)
    write_learned(out / SHIPPED_FILE, experience.acceptance, mode=0o644)


def _in_turn(prompts: dict[str, SplitPrompts]) -> chain[list[int]]:
    """The training prompts, the first of each set, then the second of each, and so on."""
    rounds = zip_longest(*(part.training for part in prompts.values()))
    return chain.from_iterable((prompt for prompt in each if prompt is not None) for each in rounds)
