"""The model card of a model tuned for threads, written from what was measured. Knows the report of ``tune``, nothing else."""

from __future__ import annotations

from typing import Any

_TEXT = """---
library_name: transformers
---

# A model that answers in threads

The model with the fingerprint {target}, fine-tuned by `pipedec train apar` or `pasta-sft` for {dialects}: it says by
control tokens which parts of an answer do not depend on each other. Its chat template takes the variable `threads`:
`tokenizer.apply_chat_template(messages, threads="{first}", add_generation_prompt=True)` asks for an answer in this dialect by a
system message `threads: {first}`; without it the model answers in one thread. {parameters:,} parameters, stored in bfloat16.

## Training

{samples}.
{plain:.0%} of the answers drawn were learned in one thread, without the system message.

{steps:,} steps of {batch_tokens:,} tokens or a little more ({seen_tokens:,} in all), learned from prompts with answers of up to
{max_length:,} tokens; learning rate {learning_rate:g} falling to a twentieth, {form}.
{loss}
Control tokens count {control_weight:g} times. One subject in forty is held out. The whole recipe is in `training.json`.

## Measured on held-out answers

Loss in nats per token of the written answers; the same answers in one thread are `plain`.

| answers | text loss | tokens | control token loss | tokens |
|---|---|---|---|---|
{losses}
{before}{tables}"""

_ANSWERS = """
## Its own greedy answers to held-out prompts

By how the written answer is structured (`none`: it is said in one thread). Forked: answers with two threads or more. Chain: the
longest sequence of tokens that must be decoded one after another. Speed-up: tokens of the model's answer in one thread /
chain, the theoretical one. Parallelism and speed-up are geometric means, the others arithmetic ones.

| dialect | written | answers | forked | threads | tokens | chain | parallelism | speed-up | finished |
|---|---|---|---|---|---|---|---|---|---|
{rows}
"""

_AGREEMENT = """
## Agreement with the teacher's answers

How often the model's k likeliest tokens hold the next one of the teacher's greedy answers in threads to held-out prompts, control
tokens included, before → after.

| dialect | written | top 1 | top 4 | top 16 | tokens |
|---|---|---|---|---|---|
{rows}
"""


def thread_card(report: dict[str, Any]) -> str:
    """Markdown for ``README.md`` beside the weights."""
    recipe, dialects = report["recipe"], list(report["samples"])
    names = ("steps", "batch_tokens", "max_length", "learning_rate", "control_weight")
    return _TEXT.format(
        **{name: recipe[name] for name in names},
        target=report["target"],
        dialects=" and ".join(dialects),
        first=dialects[0],
        parameters=report["parameters"],
        samples=";\n".join(map(_samples, report["samples"].items())),
        plain=recipe["plain_share"],
        seen_tokens=report["seen_tokens"],
        form="threads beside each other under a mask" if recipe["form"] == "tree" else "each thread in a row of its own",
        loss=_loss(report["teacher"]),
        losses="\n".join(f"| {name} | {' | '.join(loss_cells(row))} |" for name, row in report["held_out_loss"].items() if row),
        before=_before(report["before"]) if report["teacher"] is None else "",
        tables=_answers(report["held_out"]) if "held_out" in report else _agreement(report["before"], report["agreement"]),
    )


def loss_cells(row: dict[str, Any]) -> list[str]:
    """Losses and token counts as text; empty where there are no control tokens."""
    control = [f"{row['control_loss']:.3f}", f"{row['control_tokens']:,}"] if "control_loss" in row else ["", ""]
    return [f"{row['loss']:.3f}", f"{row['tokens']:,}", *control]


def answer_cells(row: dict[str, Any]) -> list[str]:
    """One line of how answers in threads are."""
    means = (f"{row[name]:.1f}" for name in ("threads", "tokens", "longest_chain"))
    ratios = (f"{row[name]:.2f}" for name in ("parallelism", "speedup"))
    return [str(row["answers"]), f"{row['forked']:.0%}", *means, *ratios, f"{row['finished']:.0%}"]


def agreement_cells(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line of how well answers are foreseen."""
    return [*(f"{before[key]:.1%} → {after[key]:.1%}" for key in ("top1", "top4", "top16")), f"{after['tokens']:,}"]


def _samples(entry: tuple[str, dict[str, int]]) -> str:
    dialect, counts = entry
    return f"{counts['answers']:,} answers annotated as {dialect}, {counts['structured']:,} of them in several threads"


def _loss(teacher: str | None) -> str:
    if teacher is None:
        return "Cross-entropy with the written answers."
    return f"Cross-entropy with the distribution of a teacher, the model with the fingerprint {teacher}."


def _before(before: dict[str, Any]) -> str:
    return f"\nBefore, the text loss of `plain` was {before['plain']['loss']:.3f}.\n" if before.get("plain") else ""


def _answers(held_out: dict[str, Any]) -> str:
    lines = ((dialect, rule, row) for dialect, by_rule in held_out.items() for rule, row in by_rule.items())
    return _ANSWERS.format(
        rows="\n".join(f"| {dialect} | {rule} | {' | '.join(answer_cells(row))} |" for dialect, rule, row in lines)
    )


def _agreement(before: dict[str, Any], after: dict[str, Any]) -> str:
    rows = [
        f"| {dialect} | {rule} | {' | '.join(agreement_cells(before[dialect][rule], row))} |"
        for dialect, by_rule in after.items()
        for rule, row in by_rule.items()
    ]
    return _AGREEMENT.format(rows="\n".join(rows))
