"""Passes of mask rows through the stages of a target: each of torchrun's processes has some of its layers, and batches of rows go
from one to the next by ``torch.distributed.pipelining``. A single process is the only stage.

Knows rows and layers, but neither losses nor steps. Shapes as in ``mask_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedec.plan.training import BATCHES_AT_ONCE
from pipedec.train.markov import MarkovHead
from pipedec.train.mask_rows import TOKENS_PER_FORWARD, Learned, MaskRows, TargetLayers
from pipedec.train.replicas import ALONE, Replicas, reporting_losses

PATIENCE = timedelta(minutes=10)  # for another stage, which may still read its weights

# From the logits of a batch, [labelled, V], and its number to its loss; called on the last stage.
Consume = Callable[[Tensor, int], Tensor]


class MaskPipeline(nn.Module):
    """A stage of the target, as ``PipelineStage`` calls it.

    Between stages go the hidden states of tokens, [N, E], and of mask rows, [N, E], and for a Markov table the vectors of the
    tokens before these, [N, r], each padded to the largest batch of the run.
    """

    def __init__(
        self, target: TargetLayers, learned: Learned, together: Replicas = ALONE, markov: MarkovHead | None = None
    ) -> None:
        super().__init__()
        self.target, self.learned, self.markov, self.together = target, learned, markov, together
        self._batches: Sequence[MaskRows] = ()

    @property
    def batch_tokens(self) -> int:
        """The most tokens and mask rows of a batch, so that as many batches as there are stages make up a forward pass."""
        return TOKENS_PER_FORWARD // self.together.size

    def run(self, batches: Sequence[MaskRows], consume: Consume, is_learning: bool) -> None:
        """Hand over the logits of all batches. If it is learning, ``consume`` returns losses, whose gradients are added on all
        stages alike. Raises RankLost if another stage is lost.
        """
        self._batches = batches
        with torch.set_grad_enabled(is_learning):
            for numbers in torch.arange(len(batches)).split(
                BATCHES_AT_ONCE * self.together.size
            ):  # which bounds messages' memory
                (self._run_alone if self.together.size == 1 else self._run_staged)(numbers, consume, is_learning)
        if is_learning:
            self.together.sum_gradients(self.parameters())

    def forward(self, *received: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        """A batch through this stage, to its message to the next one, or from the last one the logits of rows with a label."""
        rows = self._batches[int(number)].on(self.target.device)
        shapes = (rows.tokens.shape, rows.masks.shape, rows.masks.shape)
        if self.target.span.first:
            tokens, masks = self.target.embedded(rows.tokens), self.learned.masks.to(self.target.dtype)[rows.masks]
            before = [] if self.markov is None else [self.markov.vectors(rows.before)]
        else:
            parts = zip(received, shapes, strict=False)
            tokens, masks, *before = (part[: shape.numel()].view(*shape, -1) for part, shape in parts)
        with torch.no_grad():
            tokens, past = self.target.token_pass(tokens)
        masks = self.target.mask_pass(masks, self.learned.prompt_of(self.target), rows, past)
        if not self.target.span.last:
            flat = [part.flatten(0, 1) for part in (tokens, masks, *before)]
            return tuple(
                functional.pad(part, (0, 0, 0, len(whole) - len(part)))
                for part, whole in zip(flat, self._message(False), strict=True)
            )
        logits = self.target.logits(masks, rows)
        if self.markov is not None:
            logits = logits + self.markov.bias(before[0][rows.labelled], rows.masks[rows.labelled])
        return logits

    def _run_alone(self, numbers: Tensor, consume: Consume, is_learning: bool) -> None:
        for number in numbers:
            loss = consume(self(number=number), int(number))
            if is_learning:
                loss.backward()

    def _run_staged(self, numbers: Tensor, consume: Consume, is_learning: bool) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # which takes a second

        message, together = self._message(is_learning), self.together
        stage = PipelineStage(self, together.rank, together.size, self.target.device, input_args=message, output_args=message)
        schedule = (Schedule1F1B if is_learning and len(numbers) >= together.size else ScheduleGPipe)(
            stage, len(numbers), lambda logits, number: consume(logits, int(number)), scale_grads=False
        )
        with reporting_losses():
            (schedule.step if is_learning else schedule.eval)(target=numbers, number=numbers, return_outputs=False)

    def _message(self, is_learning: bool) -> tuple[Tensor, ...]:
        """Messages between stages, without memory: known to all of them, so nothing is pickled to find out."""
        tokens, masks = (max(getattr(rows, name).numel() for rows in self._batches) for name in ("tokens", "masks"))
        dtype, width, learns_masks = self.target.dtype, self.target.config.hidden_size, self.learned.masks.requires_grad
        kinds = [(tokens, width, dtype, False), (masks, width, dtype, learns_masks)]
        if self.markov is not None:
            kinds.append((masks, self.markov.gates.shape[1], torch.float32, True))
        return tuple(
            torch.empty(rows, columns, dtype=kind, device="meta", requires_grad=is_learning and learns)
            for rows, columns, kind, learns in kinds
        )
