"""The model card of a model that prefers quick and good answers. Knows the report of ``bonbon.prefer``, nothing else."""

from __future__ import annotations

from typing import Any

from pipedec.train.thread_card import answer_cells

_TEXT = """---
library_name: transformers
---

# A model that answers in threads, by preference

The model with the fingerprint {model}, continued by `pipedec train pasta-bonbon` (PASTA §4): of its own sampled answers in the
dialect pasta it learned to prefer those with the higher score, speed-up + λ · quality.

## Training

{samples} samples at temperature {temperature:g} to each of {prompts:,} prompts; {ended:,} of {answers:,} ended within
{max_tokens} tokens, with a mean theoretical speed-up of {speedup:.2f} against the answers of the sequential model with the
fingerprint {baseline}, and a mean quality of {quality:.2f} (judge: {judge}). λ = {quality_weight:g}. {pairs:,} pairs of the best
and the worst answer to a prompt; {steps:,} steps of {batch} pairs, learning rate {learning_rate:g} falling to a twentieth. The
loss is α · SFT on the best + (1 − α) · IPO with α = {alpha:g} and 1/β = {gap:.2f}.

## Greedy answers to held-out prompts

| | answers | forked | threads | tokens | chain | parallelism | speed-up | finished | quality |
|---|---|---|---|---|---|---|---|---|---|
{rows}
"""


def bonbon_card(report: dict[str, Any]) -> str:
    """Markdown for ``README.md`` beside the weights."""
    recipe = report["recipe"]
    names = ("samples", "temperature", "max_tokens", "quality_weight", "steps", "batch", "learning_rate", "alpha")
    rows = ((name, report[key]) for name, key in (("before", "before"), ("after", "held_out")) if report[key])
    return _TEXT.format(
        **{name: recipe[name] for name in names},
        **{name: report[name] for name in ("model", "baseline", "judge", "prompts", "pairs")},
        **{name: report["samples"][name] for name in ("answers", "ended", "speedup", "quality")},
        gap=1 / recipe["beta"],
        rows="\n".join(f"| {name} | {' | '.join(bonbon_cells(row))} |" for name, row in rows),
    )


def bonbon_cells(row: dict[str, Any]) -> list[str]:
    """One line of how answers are."""
    return [*answer_cells(row), f"{row['quality']:.2f}"]
