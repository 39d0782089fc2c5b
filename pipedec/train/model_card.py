"""The model card of a trained pair, written from what was measured. Knows the report of ``reference.train``, nothing else."""

from __future__ import annotations

from typing import Any

_TEXT = """---
library_name: transformers
---

# The reference pair

A small LLaMA target and its draft, trained for pipedec's demo, tests and measurements. They are real models, trained on real
text, but tiny: expect plausible library documentation, code and word problems, not knowledge or correct sums.

| | target | draft |
|---|---|---|
| parameters | {target_parameters:,} | {draft_parameters:,} |
| layers | {target_layers} | {draft_layers} |
| hidden size, heads, key-value heads | {target_shape} | {draft_shape} |

Both: vocabulary of {vocabulary:,} byte-level BPE tokens (single digits; the control tokens of chat turns and of the thread
dialects are reserved), context of 2,048 (trained on rows of {length}), tied embeddings, weights stored in bfloat16.

## Data

The Python standard library of the machine that trained it, without its tests: source files, functions (head and docstring as
the question, body as the answer), and questions whose answers are docstrings or numbered lists of what a module or class holds.
Word problems from the training split of GSM8K (MIT licence), calculator notes removed. One document in forty is held out. Shares:
{shares}. {unique_tokens:,} tokens were prepared, {seen_tokens:,} of them seen by the target.

## Training

`pipedec train reference --problems train.jsonl --out DIR --work DIR`. Steps of {batch} × {length} tokens; Muon for the
matrices, AdamW for the rest, learning rate {learning_rate}. The target started with {first_layers} layers and doubled twice
({phases}),
each new layer a silenced copy of its neighbour, the learning rate falling over the last phase. The draft learned the text
({draft_phases}), then the target's distribution ({distillation_phases}).

## Measured on held-out text

Loss in nats per token; agreement is how often the draft's k likeliest tokens hold the target's greedy one.

| text | target loss | draft loss | top 1 | top 4 | top 16 | tokens |
|---|---|---|---|---|---|---|
{rows}
"""


def model_card(report: dict[str, Any]) -> str:
    """Markdown for the pair's README, from the report that training writes as ``training.json``."""
    recipe = report["recipe"]
    rows = [
        f"| {family} | {row['target_loss']:.3f} | {row['draft_loss']:.3f} | {row['top1']:.1%} | {row['top4']:.1%} | "
        f"{row['top16']:.1%} | {row['tokens']:,} |"
        for family, row in report["held_out"].items()
    ]
    return _TEXT.format(
        target_parameters=report["parameters"]["target"],
        draft_parameters=report["parameters"]["draft"],
        target_layers=recipe["phases"][-1][0],
        draft_layers=recipe["draft_phases"][-1][0],
        target_shape=_shape(recipe["target"]),
        draft_shape=_shape(recipe["draft"]),
        vocabulary=recipe["vocabulary"],
        length=recipe["length"],
        batch=recipe["batch"],
        shares=", ".join(f"{family} {share:.0%}" for family, share in recipe["weights"].items()),
        unique_tokens=report["prepared_tokens"],
        seen_tokens=report["training_tokens"],
        learning_rate=recipe["learning_rate"],
        first_layers=recipe["phases"][0][0],
        phases=_phases(recipe["phases"]),
        draft_phases=_phases(recipe["draft_phases"]),
        distillation_phases=_phases(recipe["distillation_phases"]),
        rows="\n".join(rows),
    )


def _shape(shape: dict[str, int]) -> str:
    return f"{shape['hidden']}, {shape['heads']}, {shape['kv_heads']}"


def _phases(phases: list[list[int]]) -> str:
    return ", ".join(f"{layers} layers for {steps:,} steps" for layers, steps in phases)
