"""The model card of a trained BiTA, written from what was measured. Knows the report of ``bita.train_bita``, nothing else."""

from __future__ import annotations

from typing import Any

_TEXT = """# BiTA for the target {target}

A learned prompt and mask embeddings (BiTA, arXiv:2401.12522), trained by `pipedec train bita` for the target with this
fingerprint: with them it guesses tokens ahead by itself, without a draft. The target's weights and answers do not change.

{parameters:,} parameters in bfloat16 ({share:.2%} of the target's {target_parameters:,}): {masks} masks, {prompt}.

## Training

The target's own greedy answers, up to {new_tokens} tokens, to {samples}; samples of more than {max_length:,} tokens left out.
{steps:,} steps of {batch} samples, up to {groups} groups of masks behind places of each answer, drawn anew every time;
AdamW, learning rate {learning_rate:g} falling to 0 along a cosine, cross-entropy on masks alone. The whole recipe is in
`training.json`.

## Measured on held-out prompts

How often the token of the target's greedy answer is the likeliest guess of each mask (top 1) or among its five likeliest
(top 5), behind every place of the answers. Tokens a pass, its own included: `chain` with the likeliest guess of each mask,
`tree` with five, of which the likeliest have children.

| prompts | top 1 | top 5 | loss | chain | tree | groups |
|---|---|---|---|---|---|---|
{rows}
"""


def bita_card(report: dict[str, Any]) -> str:
    """Markdown for ``README.md`` beside the weights."""
    recipe = report["recipe"]
    names = ("masks", "new_tokens", "max_length", "steps", "batch", "groups", "learning_rate")
    rows = [f"| {name} | {' | '.join(held_out_cells(row))} |" for name, row in report["held_out"].items()]
    return _TEXT.format(
        **{name: recipe[name] for name in names},
        target=report["target"],
        parameters=report["parameters"],
        target_parameters=report["target_parameters"],
        share=report["parameters"] / report["target_parameters"],
        prompt=f"{recipe['prompt_tokens']} prompt tokens ({recipe['prompting']})" if recipe["prompt_tokens"] else "no prompt",
        samples=", ".join(f"{count:,} prompts of {name}" for name, count in report["samples"].items()),
        rows="\n".join(rows),
    )


def held_out_cells(row: dict[str, Any]) -> list[str]:
    """One set's figures as text: top 1, top 5 and loss of each mask, tokens a pass of chain and tree, groups."""
    shares = [" ".join(f"{share:.1%}" for share in row[key]) for key in ("top1", "top5")]
    loss = " ".join(f"{loss:.2f}" for loss in row["loss"])
    return [*shares, loss, f"{row['chain_tokens']:.2f}", f"{row['tree_tokens']:.2f}", f"{row['groups']:,}"]
