"""Passes of mask rows through the stages of a target: each of torchrun's processes has some of its layers, and batches of rows go
from one to the next by ``torch.distributed.pipelining``. A single process is the only stage.

Knows rows and layers, but neither losses nor steps. Shapes as in ``mask_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
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

    def learn(self, batches: Sequence[MaskRows], loss: Consume) -> None:
        """Add the gradients of the losses of all batches, on all stages alike. Raises RankLost if another stage is lost."""
        self._run_all(batches, loss, is_learning=True)
        self.together.sum_gradients((self.learned if self.markov is None else self.markov).parameters())

    @torch.no_grad()
    def predict(self, batches: Sequence[MaskRows], consume: Consume) -> None:
        """Hand over the logits of all batches. Raises RankLost if another stage is lost."""
        self._run_all(batches, consume, is_learning=False)

    def forward(self, *received: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        """A batch of the run through this stage. Returns the logits of the rows with a label on the last one."""
        rows = self._batches[int(number)].on(self.target.device)
        sources = (rows.tokens, rows.masks, rows.before)
        if self.target.span.first:
            tokens, masks = self.target.embedded(rows.tokens), self.learned.masks.to(self.target.dtype)[rows.masks]
            before = [] if self.markov is None else [self.markov.vectors(rows.before)]
        else:
            tokens, masks, *before = (
                part[: ids.numel()].view(*ids.shape, -1) for part, ids in zip(received, sources, strict=False)
            )
        tokens, past = self.target.token_pass(tokens)
        masks = self.target.mask_pass(masks, self.learned.prompt_of(self.target), rows, past)
        if not self.target.span.last:
            sizes = _sizes(self._batches)
            return tuple(
                functional.pad(part.flatten(0, 1), (0, 0, 0, size - ids.numel()))
                for part, ids, size in zip((tokens, masks, *before), sources, sizes, strict=False)
            )
        logits = self.target.logits(masks, rows)
        if self.markov is not None:
            logits = logits + self.markov.bias(before[0][rows.labelled], rows.masks[rows.labelled])
        return logits

    def _run_all(self, batches: Sequence[MaskRows], consume: Consume, is_learning: bool) -> None:
        """In runs that bound the memory of messages."""
        at_once = BATCHES_AT_ONCE * self.together.size
        for first in range(0, len(batches), at_once):

            def consume_of(logits: Tensor, number: int, first: int = first) -> Tensor:
                return consume(logits, first + number)

            self._run(batches[first : first + at_once], consume_of, is_learning)

    def _run(self, batches: Sequence[MaskRows], consume: Consume, is_learning: bool) -> None:
        self._batches, together = batches, self.together
        if together.size == 1:
            for number in range(len(batches)):
                loss = consume(self(number=torch.tensor(number)), number)
                if is_learning:
                    loss.backward()
            return
        message = self._message(is_learning)
        stage = PipelineStage(self, together.rank, together.size, self.target.device, input_args=message, output_args=message)
        schedule = (Schedule1F1B if is_learning and len(batches) >= together.size else ScheduleGPipe)(
            stage, len(batches), lambda logits, number: consume(logits, int(number)), scale_grads=False
        )
        numbers = torch.arange(len(batches))
        with reporting_losses():
            (schedule.step if is_learning else schedule.eval)(target=numbers, number=numbers, return_outputs=False)

    def _message(self, is_learning: bool) -> tuple[Tensor, ...]:
        """What goes from stage to stage, without memory: known to all of them, so nothing is pickled to find out."""
        tokens, masks, before = _sizes(self._batches)
        config, dtype, learned = self.target.config, self.target.dtype, self.learned.masks.requires_grad
        parts = [
            torch.empty(tokens, config.hidden_size, dtype=dtype, device="meta"),
            torch.empty(masks, config.hidden_size, dtype=dtype, device="meta", requires_grad=is_learning and learned),
        ]
        if self.markov is not None:
            rank = self.markov.gates.shape[1]
            parts.append(torch.empty(before, rank, device="meta", requires_grad=is_learning))
        return tuple(parts)


def _sizes(batches: Sequence[MaskRows]) -> tuple[int, int, int]:
    """The most tokens, mask rows and tokens before these of any batch."""
    tokens, masks = (max(getattr(rows, name).numel() for rows in batches) for name in ("tokens", "masks"))
    return tokens, masks, masks
