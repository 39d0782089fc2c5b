"""How a model learns threads: the samples of each step, batches of their rows, and the loss.

Owns the recipe. It does not know how answers become rows, nor what is done with the model afterwards.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipedec.core.errors import UserError
from pipedec.core.values import check_fields
from pipedec.flags import Help
from pipedec.train.run import cosine_decay, linear_decay, warm_up
from recipes.thread_models.rows import IGNORED, RowWriter, TokenizedSample, TrainingRow, WrittenSample

TOKENS_PER_FORWARD = 2048
_MAX_LIKELIHOOD = 1 - 1e-5  # of a token to avoid: the loss stays finite


@dataclass(frozen=True)
class ThreadRecipe:
    """Everything that decides the result; a step is ``batch`` samples, or the fewest that have ``batch_tokens`` tokens together.

    Circle rounds come at equal distances. The mean loss of the samples has the weight 1.
    """

    steps: Annotated[int, Meta(ge=1), Help("Training steps.")] = 400
    batch_tokens: Annotated[int, Meta(ge=1), Help("Tokens of a step.")] = 4096
    batch: Annotated[Annotated[int, Meta(ge=1)] | None, Help("Samples of a step, instead of --batch-tokens.")] = None
    learning_rate: Annotated[float, Meta(gt=0), Help("Peak learning rate.")] = 2e-3
    warmup_steps: int = 20
    decay: Literal["linear", "cosine"] = "linear"
    weight_decay: float = 0.01
    control_weight: float = 2.0  # weight of the loss of a dialect's control tokens; other tokens have 1
    plain_share: Annotated[
        float, Meta(ge=0, le=1), Help("Share of answers that are learned in one thread, without the marker.")
    ] = 0.15
    max_length: Annotated[int, Meta(ge=1), Help("Leave out answers with more tokens than this, prompt included.")] = 512
    form: Annotated[
        Literal["tree", "unrolled"], Help("tree: all threads in one row, under a mask; unrolled: one row per thread.")
    ] = "tree"
    true_lengths: Annotated[
        bool, Help("Positions after a child follow from its true length, not the stated one (PASTA, Oracle).")
    ] = False
    circle_rounds: Annotated[int, Help("How often the model's own circling answers are unlearned.")] = 0
    circle_prompts: Annotated[int, Meta(ge=1), Help("Prompts that it answers in each of these rounds.")] = 96
    circle_answers: Annotated[int, Meta(ge=1)] = 8  # circling answers that a step learns from, at most
    circle_weight: Annotated[float, Meta(gt=0), Help("Weight of unlearning them beside the answers' loss.")] = 0.25
    seed: Annotated[int, Help("Seed of sample order, of plain answers and of new embeddings.")] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.circle_rounds <= self.steps:
            raise UserError("--circle-rounds must be between 0 and --steps")

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then linear decay to a twentieth, or a cosine to 0."""
        decay = linear_decay if self.decay == "linear" else cosine_decay
        return self.learning_rate * warm_up(step, self.warmup_steps) * decay(step, self.steps)

    def fills_step(self, chosen: Sequence[TokenizedSample]) -> bool:
        """Whether these samples are enough for a step."""
        if self.batch is not None:
            return len(chosen) >= self.batch
        return sum(sample.num_tokens for sample in chosen) >= self.batch_tokens


@dataclass(frozen=True)
class PaddedRows:
    """Rows padded to N tokens. Padding attends only to itself and has no target."""

    token_ids: Tensor  # int64 [B, N], as are positions and targets
    positions: Tensor
    targets: Tensor
    mask: Tensor  # bool [B, 1, N, N]
    is_avoided: Tensor  # bool [B]: the targets are to become unlikely

    @classmethod
    def of(cls, rows: list[TrainingRow], device: torch.device) -> PaddedRows:
        token_ids = pad_sequence([row.token_ids for row in rows], batch_first=True)
        positions = pad_sequence([row.positions for row in rows], batch_first=True)
        targets = pad_sequence([row.targets for row in rows], batch_first=True, padding_value=IGNORED)
        mask = torch.eye(token_ids.shape[1], dtype=torch.bool).repeat(len(rows), 1, 1, 1)
        for number, row in enumerate(rows):
            mask[number, 0, : len(row.mask), : len(row.mask)] = row.mask
        is_avoided = torch.tensor([row.is_avoided for row in rows])
        return cls(*(tensor.to(device) for tensor in (token_ids, positions, targets, mask, is_avoided)))

    @property
    def learned(self) -> Tensor:
        """The targets, row by row: int64 [L]."""
        return self.targets[self.targets != IGNORED]


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """A context in which forward passes of a float32 model compute in ``dtype``."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def learned_logits(model: Callable[..., Any], batch: PaddedRows) -> Tensor:
    """Logits at the tokens with a target, row by row: float32 [L, V]."""
    output = model(input_ids=batch.token_ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False)
    logits: Tensor = output.logits[batch.targets != IGNORED]
    return logits.float()


def answer_log_probs(model: Callable[..., Any], batch: PaddedRows) -> Tensor:
    """Log probability of all targets of each row: float32 [B]."""
    losses = nn.functional.cross_entropy(learned_logits(model, batch), batch.learned, reduction="none")
    rows = (batch.targets != IGNORED).nonzero()[:, 0]
    return losses.new_zeros(len(batch.targets)).index_add(0, rows, -losses)


def batches(rows: Iterable[TrainingRow], device: torch.device, tokens: int = TOKENS_PER_FORWARD) -> Iterator[PaddedRows]:
    """The rows in forward passes of at most so many tokens, padding included, rows of similar length together."""
    piece: list[TrainingRow] = []
    for row in sorted(rows, key=lambda row: len(row.token_ids)):
        if piece and (len(piece) + 1) * len(row.token_ids) > tokens:
            yield PaddedRows.of(piece, device)
            piece = []
        piece.append(row)
    if piece:
        yield PaddedRows.of(piece, device)


def digest(samples: list[TokenizedSample]) -> str:
    """A short name for the samples, equal for equal tokens."""
    total = hashlib.sha256()
    for sample in samples:
        total.update(f"{sample.dialect} {sample.prompt} {sample.answer}".encode())
    return total.hexdigest()[:16]


def plan(
    written: list[WrittenSample], writer: RowWriter, recipe: ThreadRecipe, answered: list[TokenizedSample] | None = None
) -> list[list[TokenizedSample]]:
    """The samples of every step. All are used once before any is used again; some are in one thread instead.

    If a model's own answers are given (``answered``), every second sample is one of them. Raises UserError if no sample is short
    enough.
    """
    fitting = [[one for one in found if one.num_tokens <= recipe.max_length] for found in (written, answered or [])]
    sources = [_drawn(found, writer, recipe) for found in fitting if found]
    if not sources:
        raise UserError(f"nothing to learn from: no answer with its prompt has at most {recipe.max_length} tokens")
    steps: list[list[TokenizedSample]] = []
    chosen: list[TokenizedSample] = []
    drawn = itertools.cycle(sources)
    while len(steps) < recipe.steps:
        chosen.append(next(next(drawn)))
        if recipe.fills_step(chosen):
            steps.append(chosen)
            chosen = []
    return steps


def _drawn(samples: Sequence[TokenizedSample], writer: RowWriter, recipe: ThreadRecipe) -> Iterator[TokenizedSample]:
    """An endless stream of the samples in random orders, some of them in one thread."""
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        order = torch.randperm(len(samples), generator=generator).tolist()
        is_plain = (torch.rand(len(samples), generator=generator) < recipe.plain_share).tolist()
        for number, plain in zip(order, is_plain, strict=True):
            sample = samples[number]
            yield writer.sample(sample.record, None) if plain and isinstance(sample, WrittenSample) else sample


@dataclass(frozen=True)
class TokenLosses:
    """The losses of the targets, whether they are control tokens, and whether they are to become unlikely: [L] each."""

    values: Tensor
    is_control: Tensor
    is_avoided: Tensor


@dataclass(frozen=True)
class ThreadLoss:
    """The loss of batches: cross-entropy with the written tokens or, with a teacher, with the teacher's distribution.

    A target that is to become unlikely has the loss -log(1 - p) (Welleck et al. 2020, unlikelihood).
    """

    model: Any
    controls: Tensor  # int64, the ids of all control tokens
    computes: torch.dtype = torch.float32  # number format of forward passes
    teacher: Any = None

    def of(self, batch: PaddedRows) -> TokenLosses:
        """The losses of a batch, with gradients if they are enabled."""
        targets = batch.learned
        logits = self._logits(self.model, batch)
        wanted = targets
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self._logits(self.teacher, batch).softmax(-1)
        losses = nn.functional.cross_entropy(logits, wanted, reduction="none")
        is_avoided = batch.is_avoided[:, None].expand_as(batch.targets)[batch.targets != IGNORED]
        if bool(is_avoided.any()):
            likelihood = nn.functional.cross_entropy(logits, targets, reduction="none").neg().exp()
            losses = torch.where(is_avoided, -torch.log1p(-likelihood.clamp(max=_MAX_LIKELIHOOD)), losses)
        return TokenLosses(losses, torch.isin(targets, self.controls), is_avoided)

    def _logits(self, model: Any, batch: PaddedRows) -> Tensor:
        with computing_in(self.computes, model.device):
            return learned_logits(model, batch)


@dataclass(frozen=True)
class ThreadSteps:
    """The steps of a recipe: each adds the gradients of the weighted mean loss of its samples."""

    loss: ThreadLoss
    writer: RowWriter
    steps: list[list[TokenizedSample]]
    recipe: ThreadRecipe
    avoided: Callable[[int], list[TrainingRow]] = lambda step: []  # further rows of a step, whose targets are to become unlikely

    def __call__(self, step: int) -> dict[str, float]:
        """Add the gradients of a step, in small forward passes; returns what is logged."""
        rows = [row for sample in self.steps[step] for row in self.writer.rows(sample, self.recipe.form)]
        avoided = self.avoided(step)
        is_control = torch.isin(torch.cat([row.targets[row.targets != IGNORED] for row in rows]), self.loss.controls.cpu())
        total = float(self._weights(is_control).sum())
        total_avoided = max(sum(int((row.targets != IGNORED).sum()) for row in avoided), 1)
        loss, control_loss, avoided_loss = 0.0, 0.0, 0.0
        for batch in batches(rows + avoided, self.loss.model.device):
            losses = self.loss.of(batch)
            learned, avoiding = (losses.values[which] for which in (~losses.is_avoided, losses.is_avoided))
            is_control_learned = losses.is_control[~losses.is_avoided]
            weighted = (learned * self._weights(is_control_learned)).sum() / total
            (weighted + self.recipe.circle_weight * avoiding.sum() / total_avoided).backward()
            loss += weighted.item()
            control_loss += learned.detach()[is_control_learned].sum().item()
            avoided_loss += avoiding.detach().sum().item() / total_avoided
        figures = {
            "loss": loss,
            "control_loss": control_loss / max(int(is_control.sum()), 1),
            "tokens": sum(len(row.token_ids) for row in rows),
        }
        return figures | ({"circles": len(avoided), "circle_loss": avoided_loss} if avoided else {})

    def _weights(self, is_control: Tensor) -> Tensor:
        return 1 + (self.recipe.control_weight - 1) * is_control


@torch.no_grad()
def held_out_loss(loss: ThreadLoss, writer: RowWriter, samples: Iterable[TokenizedSample]) -> dict[str, float | int]:
    """Mean losses and token counts of the samples, separately for text and control tokens."""
    found = [
        loss.of(batch) for batch in batches((row for sample in samples for row in writer.rows(sample, "tree")), loss.model.device)
    ]
    if not found:
        return {}
    values, is_control = (torch.cat([getattr(losses, name) for losses in found]).cpu() for name in ("values", "is_control"))
    report: dict[str, float | int] = {"loss": round(float(values[~is_control].mean()), 4), "tokens": int((~is_control).sum())}
    if bool(is_control.any()):
        report |= {"control_loss": round(float(values[is_control].mean()), 4), "control_tokens": int(is_control.sum())}
    return report
