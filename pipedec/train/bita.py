"""Train BiTA for a frozen target: a learned prompt and mask embeddings that guess tokens ahead (BiTA §3.1).

Owns the recipe, the loop with its checkpoints, what is measured and what is written. Which rows there are is known by
``bita_rows``, how the target computes them by ``bita_model``, where samples come from by ``bita_data``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pipedec.core import UserError
from pipedec.engine.spec import DTYPES
from pipedec.model import ModelConfig
from pipedec.model.bita import MAX_MASKS, PROMPTINGS, BitaConfig, BitaWeights, fingerprint
from pipedec.text.prompt import Prompter
from pipedec.train.bita_card import bita_card
from pipedec.train.bita_data import Samples, Sources, gather
from pipedec.train.bita_model import Learned, mask_pass, token_pass
from pipedec.train.bita_rows import MaskRows, draw_places, mask_rows, places_of
from pipedec.train.continuations import Continuation

MAX_GROUPS = 64
_TOKENS_AT_ONCE = 2048  # tokens and mask rows of one forward, with their padding
_TREE_CANDIDATES = 5  # BiTA §4.1: candidates of each mask


@dataclass(frozen=True)
class BitaRecipe:
    """Everything that decides the result; a step is ``batch`` samples, each with up to ``groups`` groups of masks.

    Masks and prompt begin as normal noise of standard deviation ``start_std``. The defaults are the best that were found for the
    shipped target, which takes large steps; the paper has batches of 128, a rate of 0.03 and a standard deviation of 0.02.
    """

    masks: int = 3
    prompt_tokens: int = 16
    prompting: str = "deep"
    groups: int = 24
    steps: int = 2000
    batch: int = 4
    learning_rate: float = 0.2
    warmup_steps: int = 20
    start_std: float = 0.5
    new_tokens: int = 96
    max_length: int = 1536
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.masks <= MAX_MASKS:
            raise UserError(f"--masks {self.masks}: give 1 to {MAX_MASKS}")
        if self.prompting not in PROMPTINGS:
            raise UserError(f"--prompting {self.prompting}: choose one of {', '.join(PROMPTINGS)}")
        if (self.prompt_tokens > 0) != (self.prompting != "none") or self.prompt_tokens < 0:
            raise UserError("--prompt-tokens must be at least 1, and is 0 with --prompting none alone")
        if not 1 <= self.groups <= MAX_GROUPS:
            raise UserError(f"--groups {self.groups}: give 1 to {MAX_GROUPS}")
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1")
        if self.new_tokens < 2:
            raise UserError("--new-tokens must be at least 2: behind an answer of one token no mask has anything to learn")
        if not 0 < self.learning_rate < math.inf:
            raise UserError("--learning-rate must be above 0")
        if not 0 < self.start_std < math.inf:
            raise UserError("--start-std must be above 0")

    def rate(self, step: int) -> float:
        """The learning rate of a step: warm up, then a cosine to 0."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * (1 + math.cos(math.pi * step / self.steps)) / 2


@dataclass(frozen=True)
class StepFigures:
    """What a step came to: its mean loss, and each mask's share of right guesses (NaN where it had no label)."""

    loss: float
    top1: list[float]


def train_bita(
    target_path: Path,
    sources: Sources,
    out: Path,
    work: Path,
    recipe: BitaRecipe,
    dtype: str,
    threads: int,
    device: torch.device,
) -> dict:
    """Train and write ``out``: the weights in bfloat16, ``training.json`` and a model card; returns what was measured.

    Args:
        work: where answers, log and checkpoint live; a second run goes on from them.
        dtype, device: what the frozen target computes in, and where.

    Raises:
        UserError: target, prompts or ``work`` are not fit for it.
    """
    torch.set_num_threads(threads)
    config = ModelConfig.from_directory(target_path)
    name = fingerprint(target_path)
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=DTYPES[dtype], local_files_only=True)
    target.to(device).eval().requires_grad_(False)
    prompter = Prompter(target_path, config.max_positions)
    answers = work / "answers" / f"{name}-{dtype}-{recipe.new_tokens}"
    samples = gather(target, prompter, sources, recipe.new_tokens, recipe.max_length, answers)
    _check_windows(config, samples.longest + recipe.masks)
    learned = Learned(target, recipe.masks, recipe.prompt_tokens, recipe.prompting, recipe.start_std, recipe.seed)
    BitaTrainer(target, learned.to(device), samples, recipe, work, name).run()
    weights = learned.rounded(target)
    weights.save(out, BitaConfig(name, recipe.masks, recipe.prompt_tokens, recipe.prompting))
    report = {
        "recipe": asdict(recipe),
        "target": name,
        "parameters": weights.num_parameters,
        "target_parameters": target.num_parameters(),
        "samples": {name: len(found) for name, found in samples.training.items()},
        "tokens": {name: sum(len(sample.ids) for sample in found) for name, found in samples.training.items()},
        "held_out": evaluate(target, weights, samples.held_out),
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "README.md").write_text(bita_card(report))
    return report


class BitaTrainer:
    """Runs the steps of one recipe and keeps a checkpoint and a log in ``work``, from which a killed run continues.

    Raises:
        UserError: ``work`` holds the checkpoint of another recipe, other samples or another target.
    """

    SAVE_EVERY = 20  # steps

    def __init__(self, target: Any, learned: Learned, samples: Samples, recipe: BitaRecipe, work: Path, target_name: str) -> None:
        self._target, self._learned, self._recipe = target, learned, recipe
        self._samples = [sample for found in samples.training.values() for sample in found]
        self._optimizer = torch.optim.AdamW(learned.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
        self._checkpoint, self._log = work / "bita.safetensors", work / "log.jsonl"
        self._identity = {**asdict(recipe), "samples": samples.digest(), "target": target_name, "dtype": str(target.dtype)}

    def run(self) -> None:
        """All steps that are still to do."""
        recipe = self._recipe
        start = self._resume()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as progress, self._log.open("a") as log:
            bar = progress.add_task("bita", total=recipe.steps, completed=start)
            for step in range(start, recipe.steps):
                figures = self._step(step)
                log.write(json.dumps({"step": step + 1, **asdict(figures)}) + "\n")
                log.flush()
                guesses = " ".join(f"{share:.0%}" for share in figures.top1)
                progress.update(bar, advance=1, description=f"bita loss {figures.loss:.3f} right {guesses}")
                if (step + 1) % self.SAVE_EVERY == 0 or step + 1 == recipe.steps:
                    self._save(step + 1)

    def _step(self, step: int) -> StepFigures:
        """One step on a batch; forwards of few tokens each add up their gradients."""
        recipe = self._recipe
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        chosen = [self._samples[number] for number in batch_of(step, len(self._samples), recipe.batch, recipe.seed)]
        drawn = [(sample, draw_places(sample, recipe.groups, generator)) for sample in chosen]
        batches = [mask_rows(*part, recipe.masks, recipe.prompt_tokens) for part in _pieces(drawn, recipe.masks)]
        num_labels = sum(int(rows.labelled.sum()) for rows in batches)
        self._optimizer.param_groups[0]["lr"] = recipe.rate(step)
        total, right, counts = 0.0, torch.zeros(recipe.masks), torch.zeros(recipe.masks)
        for rows in batches:
            loss, is_right = self._loss(rows.on(self._target.device))
            (loss / num_labels).backward()
            total += loss.item()
            masks = rows.masks[rows.labelled]
            right += torch.bincount(masks, is_right.float().cpu(), minlength=recipe.masks)
            counts += torch.bincount(masks, minlength=recipe.masks)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepFigures(round(total / num_labels, 5), [round(share, 4) for share in (right / counts).tolist()])

    def _loss(self, rows: MaskRows) -> tuple[Tensor, Tensor]:
        """The summed loss of the rows that have a label, and which of them guess it."""
        past = token_pass(self._target, rows.tokens)
        prompt = self._learned.prompt_of(self._target)
        logits = mask_pass(self._target, prompt, self._learned.masks, rows, past)
        labels = rows.labels[rows.labelled]
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), logits.detach().argmax(-1) == labels

    def _save(self, step: int) -> None:
        tensors = {f"learned.{name}": parameter.detach() for name, parameter in self._learned.named_parameters()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
        partial = self._checkpoint.with_suffix(".partial")
        metadata = {"step": str(step), "identity": json.dumps(self._identity)}
        save_file({name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)
        partial.rename(self._checkpoint)

    def _resume(self) -> int:
        """Load the checkpoint if there is one and forget what was logged after it; returns the steps already done."""
        start = 0
        if self._checkpoint.exists():
            start = self._load()
        if self._log.exists():
            kept = self._log.read_text().splitlines(keepends=True)[:start]
            self._log.with_suffix(".partial").write_text("".join(kept))
            self._log.with_suffix(".partial").rename(self._log)
        return start

    def _load(self) -> int:
        with safe_open(self._checkpoint, "pt") as stored:
            metadata = stored.metadata()
        identity = json.loads(metadata["identity"])
        differing = [key for key in self._identity if identity.get(key) != self._identity[key]]
        if differing:
            found = ", ".join(f"{key} {identity.get(key)}" for key in differing)
            raise UserError(f"{self._checkpoint} belongs to another run ({found}): give another --work, or remove it")
        tensors = load_file(self._checkpoint)
        states: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad():
            for name, parameter in self._learned.named_parameters():
                parameter.copy_(tensors[f"learned.{name}"])
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                states.setdefault(int(number), {})[key] = tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": states})
        return int(metadata["step"])


def batch_of(step: int, num_samples: int, batch: int, seed: int) -> list[int]:
    """The samples of a step. Every epoch shuffles them anew; a batch may reach into the next."""
    numbers = range(step * batch, (step + 1) * batch)
    epochs = {number // num_samples for number in numbers}
    orders = {
        epoch: torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)) for epoch in epochs
    }
    return [int(orders[number // num_samples][number % num_samples]) for number in numbers]


@torch.no_grad()
def evaluate(target: Any, weights: BitaWeights, spoken: dict[str, list[Continuation]]) -> dict[str, dict[str, Any]]:
    """How well the masks guess behind every place of the samples, per set: ``guess_figures``."""
    report = {}
    for name, samples in track(spoken.items(), "held out"):
        drawn = [(sample, places_of(sample)) for sample in samples]
        ranks, losses = [], []
        for part in _pieces(drawn, weights.num_masks):
            rows = mask_rows(*part, weights.num_masks, weights.prompt.shape[3]).on(target.device)
            logits = mask_pass(target, weights.prompt, weights.masks, rows, token_pass(target, rows.tokens))
            labels = rows.labels[rows.labelled]
            of_label = logits.gather(1, labels[:, None])
            ranks.append(_by_group(rows, (logits > of_label).sum(1).float(), weights.num_masks))
            losses.append(_by_group(rows, nn.functional.cross_entropy(logits, labels, reduction="none"), weights.num_masks))
        if ranks:
            report[name] = guess_figures(torch.cat(ranks).cpu(), torch.cat(losses).cpu())
    return report


def _by_group(rows: MaskRows, values: Tensor, num_masks: int) -> Tensor:
    """Values of the rows with a label, one line for each group, NaN where there is none: [groups, M]."""
    spread = torch.full(rows.labels.shape, torch.nan, device=values.device)
    spread[rows.labelled] = values
    groups = spread.view(-1, num_masks)
    return groups[~groups.isnan().all(1)]


def guess_figures(ranks_GM: Tensor, losses_GM: Tensor) -> dict[str, Any]:
    """What the masks of G groups are worth.

    For each mask ``top1``, ``top5`` and ``loss``; and how many tokens a pass would yield on average, its own included:
    ``chain_tokens`` with the likeliest guess of each mask, ``tree_tokens`` with five, of which the likeliest have children
    (BiTA Figure 5). The latter two count groups whose labels are all there.

    Args:
        ranks_GM: how many tokens each mask holds likelier than the label; NaN where it has none.
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


def _pieces(drawn: list[tuple[Continuation, Tensor]], num_masks: int) -> Iterator[tuple[list[Continuation], list[Tensor]]]:
    """The samples and their places in forwards of few tokens, samples of like length together."""
    piece: list[tuple[Continuation, Tensor]] = []
    rows = 0
    for sample, places in sorted(drawn, key=lambda pair: len(pair[0].ids)):
        widest = max(rows, len(places) * num_masks)
        if piece and (len(piece) + 1) * (len(sample.ids) + widest) > _TOKENS_AT_ONCE:
            yield [found for found, _ in piece], [at for _, at in piece]
            piece, widest = [], len(places) * num_masks
        piece.append((sample, places))
        rows = widest
    if piece:
        yield [found for found, _ in piece], [at for _, at in piece]


def _check_windows(config: ModelConfig, longest: int) -> None:
    windows = [window for window in config.sliding_windows if window is not None]
    if windows and min(windows) < longest:
        raise UserError(
            f"the target's attention window has {min(windows)} tokens, but samples and masks {longest}: "
            "use shorter prompts or a smaller --new-tokens"
        )
