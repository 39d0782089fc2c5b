"""The workers of the pipeline's stages: contiguous layers, their two-level KV cache, and a copy of the answer's prediction trees.

A worker receives rows and verdicts. It computes the rows, holds its output until the verdict of the timestep has pruned it
(PipeDec §3.4.3), and passes it on.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from pipedec.core import Envelope, SamplingParams, Step, Verdict
from pipedec.forest import Forest, ThreadChanges
from pipedec.model import StageModel
from pipedec.threads import NewSequence
from pipedec.tree import Advance, is_mask


class StageWorker:
    """One stage L_i (PipeDec §3.1). ``begin`` must be called before anything else."""

    def __init__(self, model: StageModel, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._cache = model.make_cache()
        self._device = device
        self._forest: Forest
        self._has_masks = False
        self._pending_chunk: Step | None = None  # of the prompt
        self._pending_hidden: Tensor | None = None  # [R, E], of the newest R rows of the forest

    @property
    def cache_slots(self) -> int:
        """Capacity of the KV cache in rows. It grows as needed and never shrinks."""
        return self._cache.slots

    def begin(self, new_sequence: NewSequence, sampling: SamplingParams, tokens_per_mask: int = 0) -> None:
        """Forget the previous request and prepare for the next.

        Args:
            new_sequence: makes the sequence of the answer.
            tokens_per_mask: number of tokens that each mask row predicts in forecasts; 0 for a request without masks.
        """
        self._forest = Forest(new_sequence(), self._device)
        self._has_masks = tokens_per_mask > 0
        self._cache.reset()
        self._pending_chunk = self._pending_hidden = None

    def prefill(self, chunk: Step) -> None:
        """Compute the next chunk of the prompt. Masks may follow its tokens. The output is pending until ``outgoing``."""
        self._pending_chunk = Step(
            chunk.token_ids, chunk.parents, self._compute_chunk(chunk, chunk.num_rows - self._count_masks(chunk))
        )

    def decode(self, step: Step) -> None:
        """Add the step's rows to the forest and compute them. The output is pending until ``sync`` and ``outgoing``."""
        self._pending_hidden = self._compute(step, self._count_masks(step))

    def sync(self, verdict: Verdict) -> None:
        """Replay a verdict: commit and prune forest, cache and pending output. A verdict without tokens changes nothing."""
        if verdict.tokens:
            self._replay(*self._forest.advance(verdict))

    def outgoing(self) -> Step | None:
        """Take the pending output, with parents as the next stage's trees will number them; None if no row is left."""
        chunk, hidden = self._pending_chunk, self._pending_hidden
        self._pending_chunk = self._pending_hidden = None
        if hidden is None or not len(hidden):
            return chunk
        forest, rows = self._forest, slice(self._forest.num_rows - len(hidden), self._forest.num_rows)
        threads = None if forest.threads is None else forest.threads[rows]
        return Step(forest.token_ids[rows].clone(), forest.parents[rows].clone(), hidden, threads)

    def verdict(self) -> Verdict | None:
        """None: only the final stage verifies rows."""
        return None

    def take_logprobs(self) -> list[list[tuple[int, float]]]:
        """Nothing: only the final stage has log-probabilities."""
        return []

    def advance(self, envelope: Envelope) -> Envelope:
        """One timestep: replay the verdict, then compute the step. After a verdict with ``finished`` nothing is computed.

        Returns:
            what goes to the next rank: the rows that leave this stage and the same verdict; from the final stage to rank 0 its
            own verdict instead, or the one that ended the answer.
        """
        if envelope.verdict is not None:
            self.sync(envelope.verdict)
            if envelope.verdict.finished is not None:
                return Envelope(verdict=envelope.verdict)
        if envelope.step is not None:
            self.decode(envelope.step)
        return self._reply(envelope)

    def _reply(self, envelope: Envelope) -> Envelope:
        return Envelope(self.outgoing(), envelope.verdict)

    def _compute_chunk(self, chunk: Step, num_tokens: int) -> Tensor:
        """The activations of the next chunk of the prompt, ``num_tokens`` tokens and then masks: [R, E]."""
        first = self._cache.past_length
        positions = torch.arange(first, first + num_tokens, device=self._device)
        inputs = chunk.token_ids if chunk.hidden is None else chunk.hidden
        prompt_length = self._forest.sequence.prompt_length
        hidden = self._model.forward(inputs[:num_tokens], positions, self._cache, None, prompt_length)
        if num_tokens == chunk.num_rows:
            return hidden
        return torch.cat((hidden, self._masks_after_prompt(inputs[num_tokens:], chunk.token_ids[num_tokens:])))

    def _masks_after_prompt(self, inputs: Tensor, token_ids: Tensor) -> Tensor:
        """The activations of a group of masks after the prompt. Neither forest nor cache keeps these rows."""
        chain = torch.arange(-1, len(token_ids) - 1, device=self._device)
        hidden = self._activations(self._forest.append(token_ids, chain), inputs, len(token_ids))
        self._forest.reset()
        self._cache.advance(chain[:0], chain[:0])
        return hidden

    def _compute(self, step: Step, num_masks: int) -> Tensor:
        """Add the step's rows, of which the last ``num_masks`` are masks, to the forest; returns their activations: [R, E]."""
        rows = self._forest.append(step.token_ids, step.parents, step.threads)
        inputs = step.token_ids if step.hidden is None else step.hidden
        return self._activations(rows, inputs, num_masks)

    def _activations(self, rows: slice, inputs: Tensor, num_masks: int) -> Tensor:
        """The activations of the rows just added, of which the last ``num_masks`` are masks."""
        visibility, positions = self._forest.visibility(rows), self._forest.positions[rows]
        return self._model.forward(inputs, positions, self._cache, visibility, num_masks=num_masks)

    def _count_masks(self, step: Step) -> int:
        """The number of masks in a step, which are its last rows. Requests without masks avoid the device synchronisation."""
        return int(is_mask(step.token_ids).sum()) if self._has_masks else 0

    def _replay(self, advance: Advance, changes: ThreadChanges) -> None:
        """Apply the forest's changes to the cache and to the pending output."""
        self._cache.advance(advance.committed, advance.kept)
        if changes.affects_threads and (kept := self._forest.release()) is not None:
            self._cache.release(kept)
        if self._pending_hidden is not None:
            first = advance.num_rows - len(self._pending_hidden)
            kept = advance.kept[bisect_left(advance.kept.tolist(), first) :]
            self._pending_hidden = self._pending_hidden[kept - first]
