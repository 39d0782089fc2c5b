"""``python -m benchmarks.agreement``: how often the top k of a draft hold the target's next token (PipeDec, Figure 3).

The target answers greedily, here or on a running cluster; then the draft reads each answer once. Any model with the target's
vocabulary is a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
from msgspec.structs import replace

from benchmarks.alternatives import quiet_transformers
from benchmarks.output import titled_table
from pipedec.bench.options import Draft, Drawing, DrawnPrompt, Target, draw
from pipedec.bench.record import ROWS_FILE, Grid, Row, SweepProgress, plain
from pipedec.bench.sweep.pipelines import Measurable, RunningShape, as_it_is
from pipedec.bench.sweep.runners import Runner, runner_of
from pipedec.checkpoints import weights_digest
from pipedec.cli.benchmarks.shared import OutDirectory, ProgressBar, PromptTexts, make_directory, print_files, print_table
from pipedec.cli.options import MaxTokens, Prompts, RunningFlags, running_options
from pipedec.config import Settings
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet, PromptSource
from pipedec.engine.build import resolve
from pipedec.families import model_config
from pipedec.flags import options_of, own_options, run_command
from pipedec.messages.request import PromptRequest
from pipedec.text.prompt import Prompter
from pipedec.train.measuring import TOP_K, MeasuredDraft

SCHEMA = "pipedec.agreement/1"


@dataclass(frozen=True)
class AgreementFlags:
    """The models, and the prompts of the target's answers."""

    target: Target = None
    draft: Draft = None
    sources: Prompts = ()
    texts: PromptTexts = ()
    max_tokens: MaxTokens = 64

    def prompt_sets(self) -> list[PromptSet]:
        """Raises UserError if there are none."""
        texts = [PromptSet("prompt", self.texts)] if self.texts else []
        if sets := [*(PromptSource.parse(source).read() for source in self.sources), *texts]:
            return sets
        raise UserError("no prompts: give --prompts FILE or --prompt TEXT")


@torch.no_grad()
def ranks_of(draft: MeasuredDraft, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """For each token of an answer its rank among the draft's predictions after all tokens before it, from 0."""
    ids, first = torch.tensor([[*prompt, *answer]]), len(prompt)
    ranks: list[int] = draft.top_ranks(draft.logits(ids)[:, first - 1 : -1], ids[:, first:])[0].tolist()
    return ranks


def measure_agreement(
    shape: Measurable,
    target: Path,
    draft: Path,
    prompt_sets: Sequence[PromptSet],
    max_tokens: int,
    drawing: Drawing,
    out: Path,
    progress: SweepProgress,
) -> list[Row]:
    """A row for each answer, those of an earlier run included. Raises UserError if no prompt fits, or the models do not."""
    sampling = SamplingParams(max_tokens=max_tokens)
    config = model_config(target)
    measured, prompter = MeasuredDraft.load(draft, config.vocab_size), Prompter(target, config.context_length)
    grid, digest = Grid(SCHEMA, out, progress), weights_digest(draft)[:12]
    progress.start(sum(min(drawing.samples, len(one.prompts)) for one in prompt_sets))
    progress.busy(shape.label)
    with runner_of(shape, "computed") as runner:
        template = PromptRequest("", drawing.raw_prompts, method="pp", sampling=sampling)
        for prompt in draw(prompter, prompt_sets, template, drawing.samples, drawing.seed):
            identity = {
                "pair": {**shape.pair, "draft": str(draft), "draft_digest": digest}, "prompt_set": prompt.prompt_set,
                "prompt_index": prompt.index, "sampling": plain(sampling),
            }  # fmt: skip
            grid.row(identity, list(prompt.token_ids), partial(_row, runner, measured, prompt), lambda row: None)
    return grid.rows


def _row(runner: Runner, draft: MeasuredDraft, prompt: DrawnPrompt) -> Row:
    request = replace(prompt.request, prompt=prompt.token_ids, raw=True)
    return {"ranks": ranks_of(draft, prompt.token_ids, runner.answer(request).token_ids)}


def ranks_by_set(rows: Sequence[Row]) -> dict[str, list[int]]:
    """The ranks of all tokens by prompt set, and of all sets together if there are several."""
    sets: dict[str, list[int]] = {}
    for row in rows:
        sets.setdefault(row["prompt_set"], []).extend(row["ranks"])
    return sets | ({"all": [rank for ranks in sets.values() for rank in ranks]} if len(sets) > 1 else {})


def shares(ranks: Sequence[int]) -> list[float]:
    """The share of tokens among the top k, for each of ``TOP_K``."""
    return [sum(rank < k for rank in ranks) / len(ranks) for k in TOP_K]


@click.command()
@options_of(AgreementFlags, "asked")
@options_of(Drawing, "drawing", only=("samples", "seed", "raw_prompts"))
@running_options
@own_options
def agreement(asked: AgreementFlags, drawing: Drawing, place: RunningFlags, out: OutDirectory) -> None:
    """Measure how often the top k predictions of --draft hold the next token of --target's greedy answers.

    With --redis, --run or --running the answers are those of the running cluster; --target is then a directory with the target's
    config.json and tokenizer, its weights are not needed. Answers that OUT/rows.jsonl already contains are not measured again.
    """
    spec = resolve(Settings.of(target=asked.target, draft=asked.draft, bita="none", stages=1, dtype="float32"))
    if spec.draft is None:
        raise UserError("--draft none: give the directory of a draft to measure")
    shape = RunningShape(place.connect()) if place.are_given else as_it_is(spec.settings)
    prompt_sets = asked.prompt_sets()
    make_directory(out)
    with quiet_transformers(), ProgressBar() as bar:
        rows = measure_agreement(shape, spec.target, spec.draft, prompt_sets, asked.max_tokens, drawing, out, bar)
    table = titled_table("The target's next token is among the top k", ("prompts", *(f"k = {k}" for k in TOP_K), "tokens"))
    for name, ranks in ranks_by_set(rows).items():
        table.add_row(name, *(f"{share:.1%}" for share in shares(ranks)), str(len(ranks)))
    print_table(table, 100)
    print_files(out / ROWS_FILE)


if __name__ == "__main__":
    run_command(agreement)
