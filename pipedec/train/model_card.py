"""The model card of a trained pair, written from what was measured.

Knows the report of ``reference.train`` and what ``draft.continue_draft`` adds to it, nothing else.
"""

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
Word problems from the training split of GSM8K (MIT licence), calculator notes removed. One document in forty is held out; a
held-out function may still stand in a source file that is not. Shares: {shares}.
{unique_tokens:,} tokens were prepared, {seen_tokens:,} of them seen by the target.

## Training

`pipedec train reference --problems train.jsonl --out DIR --work DIR`. Steps of {batch} × {length} tokens; Muon for the
matrices, AdamW for the rest, learning rate {learning_rate}. The target started with {first_layers} layers and doubled twice
({phases}),
each new layer a silenced copy of its neighbour, the learning rate falling over the last phase. The draft learned the text
({draft_phases}), then the target's distribution ({distillation_phases}).
{continuations}
## Measured on held-out text

Loss in nats per token; agreement is how often the draft's k likeliest tokens hold the target's greedy one.

| text | target loss | draft loss | top 1 | top 4 | top 16 | tokens |
|---|---|---|---|---|---|---|
{rows}
{on_policy}"""

_CONTINUATION = """
The draft was then continued against the finished target: `pipedec train draft --problems train.jsonl --out DIR --work DIR`.
{steps:,} steps of {batch} × {length} tokens, learning rate {learning_rate} falling to a twentieth: {seen_tokens:,} tokens,
{passes:.1f} passes over {text_tokens:,} tokens of the text above ({text_shares})
and {on_policy_tokens:,} tokens of prompts from it ({prompts})
with what the target says to them by itself (greedy, up to {new_tokens} tokens). The loss is the cross-entropy with the
target's distribution ({distribution:.0%}) and its likeliest token ({greedy:.0%}).
"""

_LONG_CONTINUATION = """
The draft was continued once more, by the same command with another recipe, for long prompts and for prompts unlike the text
above. A step has {batch} × {length} and {long_batch} × {long_length:,} tokens; {steps:,} steps, learning rate {learning_rate}
falling to a twentieth: {seen_tokens:,} tokens. The short rows ({passes:.1f} passes) are {text_tokens:,} tokens of text
({text_shares}) and {on_policy_tokens:,} tokens of prompts
({prompts}) with what the target says to
them by itself (greedy, up to {new_tokens} tokens). The long rows ({long_passes:.1f} passes) are {long_tokens:,} tokens of
{passages:,} passages and the target's answers; what a row's end cuts off comes again in the next. Requests and passages are made
by rule: templates of questions and instructions, filled with docstrings, Python's help topics, word problems, and invented
words; a passage has 256 tokens or more. The loss is the cross-entropy with the target's distribution ({distribution:.0%})
and its likeliest token ({greedy:.0%}); a token that the target said by itself counts {answer_weight:g} times. The target never
saw more than {length} tokens at once: what it says to longer prompts, and the draft learns to foresee, is mostly repetition.
"""

_ON_POLICY = """
Before it was continued{last_time}, the draft measured:

| text | draft loss | top 1 | top 4 | top 16 |
|---|---|---|---|---|
{before_rows}

## Measured on the target's own words

What decoding meets: the target's greedy continuations of {num_prompts} held-out prompts of each kind, and how often the draft's
k likeliest tokens hold the next one, before → after the draft was continued{last_time}.

| text | top 1 | top 4 | top 16 | tokens |
|---|---|---|---|---|
{rows}
"""


def model_card(report: dict[str, Any]) -> str:
    """Markdown for the pair's README, from the report that training writes as ``training.json``."""
    recipe = report["recipe"]
    rows = [
        f"| {family} | {row['target_loss']:.3f} | {row['draft_loss']:.3f} | {_shares(row)} | {row['tokens']:,} |"
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
        shares=_percentages(recipe["weights"]),
        unique_tokens=report["prepared_tokens"],
        seen_tokens=report["training_tokens"],
        learning_rate=recipe["learning_rate"],
        first_layers=recipe["phases"][0][0],
        phases=_phases(recipe["phases"]),
        draft_phases=_phases(recipe["draft_phases"]),
        distillation_phases=_phases(recipe["distillation_phases"]),
        rows="\n".join(rows),
        continuations="".join(_continuation(continuation) for continuation in report.get("continuations", [])),
        on_policy=_on_policy(report) if "continuations" in report else "",
    )


def _continuation(continuation: dict[str, Any]) -> str:
    recipe, tokens = continuation["recipe"], dict(continuation["row_tokens"])
    num_prompts = dict(recipe["num_prompts"])
    values = {key: recipe[key] for key in ("steps", "batch", "length", "learning_rate", "new_tokens")}
    wording, seen_long = _CONTINUATION, 0
    if "long_batch" in recipe:
        wording, seen_long = _LONG_CONTINUATION, recipe["steps"] * recipe["long_batch"] * recipe["long_length"]
        long_tokens = tokens.pop("passages")
        values |= {key: recipe[key] for key in ("long_batch", "long_length", "answer_weight")}
        values |= {"batch": recipe["batch"] - recipe["long_batch"], "long_passes": seen_long / long_tokens}
        values |= {"long_tokens": long_tokens, "passages": num_prompts.pop("passages")}
    return wording.format(
        **values,
        seen_tokens=continuation["seen_tokens"],
        passes=(continuation["seen_tokens"] - seen_long) / sum(tokens.values()),
        text_tokens=tokens["text"],
        text_shares=_percentages(recipe["text_weights"]),
        on_policy_tokens=sum(tokens.values()) - tokens["text"],
        prompts=", ".join(f"{count:,} {family}" for family, count in num_prompts.items()),
        distribution=1 - recipe["greedy_share"],
        greedy=recipe["greedy_share"],
    )


def _on_policy(report: dict[str, Any]) -> str:
    last = report["continuations"][-1]
    before = last["before"]
    rows = []
    for family, row in report["on_policy"].items():
        changes = (f"{before['on_policy'][family][key]:.1%} → {row[key]:.1%}" for key in ("top1", "top4", "top16"))
        rows.append(f"| {family} | {' | '.join(changes)} | {row['tokens']:,} |")
    return _ON_POLICY.format(
        before_rows="\n".join(
            f"| {family} | {row['draft_loss']:.3f} | {_shares(row)} |" for family, row in before["held_out"].items()
        ),
        num_prompts=last["recipe"]["num_held_out_prompts"],
        last_time=" for the last time" if len(report["continuations"]) > 1 else "",
        rows="\n".join(rows),
    )


def _percentages(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _shares(row: dict[str, float]) -> str:
    return " | ".join(f"{row[key]:.1%}" for key in ("top1", "top4", "top16"))


def _shape(shape: dict[str, int]) -> str:
    return f"{shape['hidden']}, {shape['heads']}, {shape['kv_heads']}"


def _phases(phases: list[list[int]]) -> str:
    return ", ".join(f"{layers} layers for {steps:,} steps" for layers, steps in phases)
