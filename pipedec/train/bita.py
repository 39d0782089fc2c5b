"""Train BiTA for a frozen target: a learned prompt and mask embeddings that predict tokens ahead (BiTA §3.1), then a Markov table
for the frozen masks (DSpark).

Owns the recipe, the gradients of a step, what is written and what is measured on held-out answers. The rows, and how the target
computes them, are known by ``mask_rows``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from rich.progress import track
from torch import Tensor, nn

from pipedec.checkpoints import fingerprint
from pipedec.core.errors import UserError
from pipedec.core.values import check_fields
from pipedec.families import model_config
from pipedec.flags import Help
from pipedec.model.bita import MAX_MASKS, BitaConfig, BitaWeights, check_attention, checked_bita
from pipedec.plan.training import training_cut
from pipedec.train.continuations import Continuation, Continuations, SplitPrompts, answer
from pipedec.train.markov import MarkovHead, markov_bias
from pipedec.train.mask_rows import (
    Learned,
    MaskRows,
    TargetLayers,
    draw_places,
    mask_rows,
    places_of,
    sample_batches,
)
from pipedec.train.pipelining import MaskPipeline
from pipedec.train.run import CARDS, Figures, Run, TrainingLoop, bita_cells, card, cosine_decay, epoch_batch, print_table, warm_up
from pipedec.train.targets import FrozenTarget, LoadedTarget
from pipedec.verify.reference import load_transformers

_TREE_CANDIDATES = 5  # BiTA §4.1: candidates of each mask
MAX_GROUPS = 64
_OF_MASKS = (  # fields of a recipe that decide how masks and prompt are trained
    "masks", "prompt_tokens", "prompting", "steps", "learning_rate", "start_std",
)  # fmt: skip


@dataclass(frozen=True)
class BitaRecipe:
    """Everything that decides the result; a step is ``batch`` samples, each with up to ``groups`` groups of masks.

    Masks and prompt begin as normal noise of standard deviation ``start_std``. The defaults are the best found for the shipped
    target, which needs large learning rates; the paper has batches of 128, a rate of 0.03 and a standard deviation of 0.02.
    """

    masks: Annotated[int, Meta(ge=1, le=MAX_MASKS), Help("Masks in a group.")] = 3
    prompt_tokens: Annotated[int, Help("Tokens of the learned prompt; 0 with --prompting none.")] = 16
    prompting: Annotated[
        Literal["deep", "shallow", "none"],
        Help(
            "What is learned: keys and values of each layer (deep), input embeddings (shallow), or no prompt (none)."  # words: ok
        ),
    ] = "deep"
    groups: Annotated[int, Meta(ge=1, le=MAX_GROUPS), Help("Maximum number of groups of masks in a sample.")] = 24
    steps: Annotated[int, Meta(ge=1), Help("Training steps.")] = 2000
    batch: Annotated[int, Meta(ge=1), Help("Samples in a step.")] = 4
    learning_rate: Annotated[float, Meta(gt=0), Help("Peak learning rate (the paper's: 0.03).")] = 0.2
    warmup_steps: int = 20
    start_std: Annotated[float, Meta(gt=0), Help("Standard deviation of initial values (the paper's: 0.02).")] = 0.5
    markov_rank: Annotated[int, Meta(ge=0), Help("Rank of the Markov table; 0 for none.")] = 32
    markov_steps: Annotated[int, Meta(ge=1), Help("Training steps of the Markov table.")] = 400
    markov_learning_rate: Annotated[float, Meta(gt=0), Help("Peak learning rate of the Markov table.")] = 0.004
    new_tokens: Annotated[
        int, Meta(ge=2), Help("Maximum number of tokens of an answer; masks learn nothing from answers of one token.")
    ] = 96
    max_length: int = 1536
    seed: Annotated[int, Help("Seed of initial values, sample order and mask positions.")] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.prompt_tokens > 0) != (self.prompting != "none") or self.prompt_tokens < 0:
            raise UserError("--prompt-tokens must be at least 1, or 0 with --prompting none")

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then a cosine to 0."""
        return self.learning_rate * warm_up(step, self.warmup_steps) * cosine_decay(step, self.steps)

    def markov_rate(self, step: int) -> float:
        """The learning rate of a step of the Markov table, likewise."""
        return self.markov_learning_rate * warm_up(step, self.warmup_steps) * cosine_decay(step, self.markov_steps)


def train_bita(
    target_path: Path, prompts: dict[str, SplitPrompts], recipe: BitaRecipe, run: Run, start: Path | None = None
) -> dict[str, Any]:
    """Train and write ``run.out``: the weights in bfloat16, ``training.json`` and a model card; returns ``training.json``.

    Several processes (``run.replicas``) are the stages of the target, of whose layers each reads its own; all of them need the
    directory ``run.work``, the first one writes, and the others return {}.

    Args:
        start: a BiTA that was trained by this function: it only gets a new Markov table.

    Raises UserError if target, prompts, ``start`` or ``run.work`` do not fit.
    """
    torch.set_num_threads(run.threads)
    config, name = model_config(target_path), fingerprint(target_path)
    check_attention(config, "choose another target")
    earlier = None if start is None else _earlier(start, target_path)
    if earlier is not None:
        recipe = replace(recipe, **{key: earlier["recipe"][key] for key in _OF_MASKS})
    together = run.replicas
    if together.size > 1 and recipe.prompting == "shallow":
        raise UserError("--prompting shallow needs all layers in one process: use deep or none, or train without torchrun")
    span = training_cut(config, together.size)[together.rank] if together.size > 1 else None
    load = cache(lambda: load_transformers(target_path, run.torch_dtype, run.device, span).requires_grad_(False))
    answered = target_answers(LoadedTarget(lambda _: load()) if span is None else None, target_path, prompts, recipe, run)
    target = TargetLayers(load(), span)
    samples = usable(answered, recipe.max_length)
    longest = samples.longest + recipe.masks
    windows = [layer.reach.size for layer in config.attention_layers if layer.reach is not None]
    if windows and min(windows) < longest:
        raise UserError(
            f"the target's attention window has {min(windows)} tokens, but samples with masks have {longest}: "
            "use shorter prompts or a smaller --new-tokens"
        )
    identity = {**asdict(recipe), "samples": samples.digest(), "target": name, "dtype": str(target.dtype)}
    if start is None:
        learned = Learned(target, recipe.masks, recipe.prompt_tokens, recipe.prompting, recipe.start_std, recipe.seed).to(
            run.device
        )
        optimizer = torch.optim.AdamW(learned.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
        loop = TrainingLoop("bita", learned, [optimizer], run.work, identity, max_norm=None, replicas=together)
        loop.run(recipe.steps, recipe.rate, MaskSteps(MaskPipeline(target, learned, together), samples, recipe))
        weights = learned.rounded(target)
    else:
        weights = BitaWeights.load(start, config, range(config.num_hidden_layers), torch.bfloat16, run.device)
    pipeline = MaskPipeline(target, Learned.frozen(target, weights), together)
    markov = _train_markov(pipeline, samples, recipe, run, identity) if recipe.markov_rank else {}
    held_out = evaluate(pipeline, samples.held_out, markov=markov)
    if not together.is_first:
        return {}
    weights.save(run.out, BitaConfig(name, recipe.masks, recipe.prompt_tokens, recipe.prompting, recipe.markov_rank), markov)
    report = {
        "recipe": asdict(recipe),
        "target": name,
        "parameters": weights.prompt.numel() + weights.masks.numel(),
        "markov_parameters": sum(tensor.numel() for tensor in markov.values()),
        "target_parameters": config.parameters,
        "markov_samples": {},  # if they are others
        "samples": {name: len(found) for name, found in samples.training.items()},
        "tokens": {name: sum(len(sample.ids) for sample in found) for name, found in samples.training.items()},
        "held_out": held_out,
    }
    if earlier is not None:
        report |= {"markov_samples": report["samples"]} | {key: earlier[key] for key in ("samples", "tokens")}
    run.write_report(report, card(CARDS / "bita.md.jinja", report))
    return report


def target_answers(
    target: FrozenTarget | None, path: Path, prompts: dict[str, SplitPrompts], recipe: BitaRecipe, run: Run
) -> Continuations:
    """The target's answers to all prompts, which ``run.work`` keeps. Raises UserError as ``answer``."""
    store = run.work / "answers" / f"{fingerprint(path)}-{run.dtype}-{recipe.new_tokens}"
    return answer(target, prompts, recipe.new_tokens, store, run.replicas)


def _earlier(start: Path, target_path: Path) -> dict[str, Any]:
    """The ``training.json`` of a trained BiTA. Raises UserError if it was trained for another target or has none."""
    checked_bita(start, target_path)
    try:
        report: dict[str, Any] = json.loads((start / "training.json").read_text(encoding="utf-8"))
        if all(key in report["recipe"] for key in _OF_MASKS) and {"samples", "tokens"} <= report.keys():
            return report
        raise ValueError("it lacks a field")
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{start} has no sound training.json: give a directory that pipedec train bita wrote") from None


def _train_markov(
    pipeline: MaskPipeline, samples: Continuations, recipe: BitaRecipe, run: Run, identity: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a Markov table for these masks."""
    target, learned, together = pipeline.target, pipeline.learned, pipeline.together
    head = MarkovHead(target, recipe.masks, recipe.markov_rank, recipe.seed).to(run.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.markov_learning_rate, weight_decay=0.01)
    loop = TrainingLoop("markov", head, [optimizer], run.work, identity, max_norm=None, replicas=together)
    loop.run(recipe.markov_steps, recipe.markov_rate, MaskSteps(MaskPipeline(target, learned, together, head), samples, recipe))
    return head.rounded(together)


def usable(answered: Continuations, max_length: int) -> Continuations:
    """Prompts with answers of at least two tokens (else no mask has a label) and together at most ``max_length`` tokens. Raises
    UserError if nothing is left to learn from.
    """
    training, held_out = (
        {name: [one for one in found if len(one.ids) <= max_length and len(places_of(one))] for name, found in part.items()}
        for part in (answered.training, answered.held_out)
    )
    if not any(training.values()):
        raise UserError("nothing to learn from: every answer is shorter than two tokens, or every sample is too long")
    return Continuations(training, held_out)


class MaskSteps:
    """The steps of a recipe: each adds the gradients of the mean loss of its samples' masks."""

    def __init__(self, pipeline: MaskPipeline, samples: Continuations, recipe: BitaRecipe) -> None:
        self._pipeline, self._recipe = pipeline, recipe
        self._samples = [sample for found in samples.training.values() for sample in found]

    def __call__(self, step: int) -> Figures:
        """The gradients of a step, in small forward passes; returns its loss and each mask's share of correct predictions.

        A mask without a label in this step has the share NaN.
        """
        recipe, pipeline = self._recipe, self._pipeline
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        chosen = [self._samples[number] for number in epoch_batch(step, len(self._samples), recipe.batch, recipe.seed)]
        drawn: list[tuple[Continuation, Tensor]] = [(sample, draw_places(sample, recipe.groups, generator)) for sample in chosen]
        parts = sample_batches(drawn, recipe.masks, pipeline.batch_tokens)
        batches = [mask_rows(*part, recipe.masks, recipe.prompt_tokens) for part in parts]
        counts = torch.bincount(torch.cat([rows.masks[rows.labelled] for rows in batches]), minlength=recipe.masks)
        num_labels = int(counts.sum())
        figures = torch.zeros(1 + recipe.masks, dtype=torch.float64)  # the sum of losses; correct predictions of each mask

        def loss_of(logits: Tensor, number: int) -> Tensor:
            rows = batches[number]
            labels = rows.labels[rows.labelled].to(logits.device)
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
            is_correct = (logits.detach().argmax(-1) == labels).float().cpu()
            figures[0] += loss.item()
            figures[1:] += torch.bincount(rows.masks[rows.labelled], is_correct, minlength=recipe.masks)
            return loss / num_labels

        pipeline.run(batches, loss_of, is_learning=True)
        total, *correct = pipeline.together.total(figures.to(pipeline.target.device)).tolist()
        shares = torch.tensor(correct) / counts
        return {"loss": total / num_labels, "top1": [round(share, 4) for share in shares.tolist()]}


def evaluate(
    pipeline: MaskPipeline, answered: dict[str, list[Continuation]], most: int | None = None,
    markov: dict[str, Tensor] | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """``guess_figures`` of every place of the samples, by set, on all stages alike.

    Args:
        pipeline: with weights that are learned.
        most: tokens and mask rows of a forward pass; by default those of a training step's.
        markov: tensors of the Markov table, if there is one: the token before each mask's is the answer's.
    """
    report, learned, device = {}, pipeline.learned, pipeline.target.device
    for name, samples in track(answered.items(), "held out", disable=not pipeline.together.is_first):
        drawn = [(sample, places_of(sample)) for sample in samples]
        parts = sample_batches(drawn, len(learned.masks), most or pipeline.batch_tokens)
        batches = [mask_rows(*part, len(learned.masks), learned.prompt.shape[3]) for part in parts]
        found = [torch.zeros(2, int(rows.labelled.sum()), device=device) for rows in batches]  # ranks and losses of labels

        def measure(logits: Tensor, number: int, batches: list[MaskRows] = batches, found: list[Tensor] = found) -> Tensor:
            rows = batches[number].on(device)
            labels = rows.labels[rows.labelled]
            if markov:
                logits += markov_bias(markov, rows.before[rows.labelled], rows.masks[rows.labelled])
            ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
            found[number] = torch.stack((ranks, nn.functional.cross_entropy(logits, labels, reduction="none")))
            return found[number]

        pipeline.run(batches, measure, is_learning=False)
        if batches:
            values = pipeline.together.total(torch.cat(found, 1)).cpu().split([part.shape[1] for part in found], 1)
            groups = [
                [_by_group(rows, part, len(learned.masks)) for part in pair] for rows, pair in zip(batches, values, strict=True)
            ]
            report[name] = guess_figures(*(torch.cat(parts) for parts in zip(*groups, strict=True)))
    return report


def _by_group(rows: MaskRows, values: Tensor, num_masks: int) -> Tensor:
    """Values of the rows with a label, one line per group, NaN without a label: [groups, M]."""
    spread = torch.full(rows.labels.shape, torch.nan, device=values.device)
    spread[rows.labelled] = values
    groups = spread.view(-1, num_masks)
    return groups[~groups.isnan().all(1)]


def guess_figures(ranks_GM: Tensor, losses_GM: Tensor) -> dict[str, Any]:
    """Figures of the predictions of G groups of masks.

    For each mask ``top1``, ``top5`` and ``loss``; and the mean number of tokens per pass, the target's own included:
    ``chain_tokens`` with the top prediction of each mask, ``tree_tokens`` with its top five, of which only the first has children
    (BiTA Figure 5). Tokens per pass count only groups in which every mask has a label.

    Args:
        ranks_GM: number of tokens that a mask ranks above its label; NaN if it has none.
        losses_GM: NaN likewise.
    """
    has_label = ~ranks_GM.isnan()
    whole = ranks_GM[has_label.all(1)]
    is_first = whole == 0
    run = is_first.long().cumprod(1).sum(1)
    then = torch.cat((whole, torch.full_like(whole[:, :1], torch.inf)), 1).gather(1, run[:, None])[:, 0]
    shares = {
        f"top{k}": [round(float((ranks[has] < k).float().mean()), 4) for ranks, has in zip(ranks_GM.T, has_label.T, strict=True)]
        for k in (1, 5)
    }
    return {
        **shares,
        "loss": [round(loss, 4) for loss in losses_GM.nanmean(0).tolist()],
        "chain_tokens": round(1 + float(run.float().mean()), 4),
        "tree_tokens": round(1 + float((run + (then < _TREE_CANDIDATES)).float().mean()), 4),
        "groups": len(ranks_GM),
    }


def print_bita(report: dict[str, Any]) -> None:
    """Print how well the masks predict the target's own answers."""
    print_table(
        "Held-out prompts: predictions of each mask, tokens per pass",
        ("prompts", "top 1", "top 5", "loss", "chain", "tree", "groups"),
        [(name, *bita_cells(row)) for name, row in report["held_out"].items()],
    )
