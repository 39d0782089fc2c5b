"""The workers of the pipeline's stages: contiguous layers, their two-level KV cache, and a copy of the prediction tree.

A worker receives rows and verdicts. It computes the rows, holds its output until the verdict of the timestep has pruned it
(PipeDec §3.4.3), and passes it on. The worker of the last stage also chooses the target's tokens and verifies rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pipedec.core import MAX_VERDICT_TOKENS, Part, SamplingParams, Step, Verdict
from pipedec.forest import Forest, ThreadChanges
from pipedec.model import StageModel
from pipedec.sampling import Logprobs, Sampler, greedy
from pipedec.stage.thread_verifier import ThreadVerifier
from pipedec.stage.verifier import Verifier
from pipedec.threads import NewSequence
from pipedec.tree import Advance, PredictionTree, is_mask


class StageWorker:
    """One stage L_i (PipeDec §3.1)."""

    def __init__(self, model: StageModel, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._cache = model.make_cache()
        self._tree = PredictionTree(device)
        self._forest: Forest | None = None  # instead of the tree, for an answer in several threads
        self._device = device
        self._has_masks = False
        self._prompt_length = 0
        self._pending_rows = torch.zeros(0, dtype=torch.int64, device=device)
        self._pending_hidden: Tensor | None = None

    @property
    def cache_slots(self) -> int:
        """Capacity of the KV cache in rows. It grows as needed and never shrinks."""
        return self._cache.slots

    @property
    def _rows(self) -> PredictionTree | Forest:
        """The tree or forest that holds the rows in flight."""
        return self._tree if self._forest is None else self._forest

    def begin(
        self, prompt_length: int, sampling: SamplingParams, tokens_per_mask: int = 0, new_sequence: NewSequence | None = None
    ) -> None:
        """Forget the previous request and prepare for one whose prompt has ``prompt_length`` tokens.

        Args:
            tokens_per_mask: number of tokens that each mask row predicts in forecasts; 0 for a request without masks.
            new_sequence: creates the sequence of an answer in several threads; None for an answer in one thread.
        """
        self._forest = None if new_sequence is None else Forest(new_sequence(), self._device)
        self._has_masks = tokens_per_mask > 0
        self._prompt_length = prompt_length
        self._cache.reset()
        self._tree.reset(prompt_length)
        self._pending_hidden = None

    def prefill(self, chunk: Step) -> Step:
        """Compute the next chunk of the prompt; returns it with this stage's activations. Masks may follow its tokens."""
        first, num_tokens = self._cache.past_length, chunk.num_rows - self._count_masks(chunk)
        positions = torch.arange(first, first + num_tokens, device=self._device)
        inputs = chunk.token_ids if chunk.hidden is None else chunk.hidden
        hidden = self._model.forward(inputs[:num_tokens], positions, self._cache, None, self._prompt_length)
        if num_tokens < chunk.num_rows:
            hidden = torch.cat((hidden, self._masks_after_prompt(inputs[num_tokens:], chunk.token_ids[num_tokens:])))
        return Step(chunk.token_ids, chunk.parents, hidden)

    def _masks_after_prompt(self, inputs: Tensor, token_ids: Tensor) -> Tensor:
        """The activations of a group of masks after the prompt. Neither tree nor cache keeps these rows."""
        chain = torch.arange(-1, len(token_ids) - 1, device=self._device)
        hidden = self._activations(self._append(Step(token_ids, chain)), inputs, len(token_ids))
        self._rows.reset(self._prompt_length)
        self._cache.advance(chain[:0], chain[:0])
        return hidden

    def _append(self, step: Step) -> slice:
        if self._forest is None:
            return self._tree.append(step.token_ids, step.parents)
        threads = torch.zeros_like(step.parents) if step.threads is None else step.threads
        return self._forest.append(step.token_ids, step.parents, threads)

    def _activations(self, rows: slice, inputs: Tensor, num_masks: int) -> Tensor:
        """The activations of the rows just added, of which the last ``num_masks`` are masks."""
        positions = self._rows.positions[rows]
        if self._forest is not None:
            return self._model.forward(inputs, positions, self._cache, num_masks=num_masks, sight=self._forest.sight(rows))
        return self._model.forward(inputs, positions, self._cache, self._tree.tree_mask[rows], num_masks=num_masks)

    def _count_masks(self, step: Step) -> int:
        """The number of masks in a step, which are its last rows. Requests without masks avoid the device synchronisation."""
        return int(is_mask(step.token_ids).sum()) if self._has_masks else 0

    def decode(self, step: Step) -> None:
        """Add the step's rows to the tree and compute them. The output is pending until ``sync`` and ``outgoing``."""
        rows = self._append(step)
        inputs = step.token_ids if step.hidden is None else step.hidden
        self._pending_hidden = self._activations(rows, inputs, self._count_masks(step))
        self._pending_rows = torch.arange(rows.start, rows.stop, device=self._device)

    def sync(self, verdict: Verdict) -> None:
        """Replay a verdict: commit and prune tree, cache and pending output. A verdict without tokens changes nothing."""
        if not verdict.tokens:
            return
        if self._forest is None:
            self._replay(self._tree.advance(verdict.tokens))
        else:
            self._replay_threads(self._forest, verdict)

    def _replay_threads(self, forest: Forest, verdict: Verdict) -> ThreadChanges:
        advance, changes = forest.advance(verdict)
        self._replay(advance)
        if changes.affects_threads and (kept := forest.release()) is not None:
            self._cache.release(kept)
        return changes

    def _replay(self, advance: Advance) -> None:
        """Apply the tree's changes to the cache and to the pending output."""
        self._cache.advance(advance.committed, advance.kept)
        if self._pending_hidden is not None:
            is_kept, self._pending_rows = advance.renumber(self._pending_rows)
            self._pending_hidden = self._pending_hidden[is_kept]

    def outgoing(self) -> Step | None:
        """Take the pending output, with parents as the next stage's tree will number them; None if no row is left."""
        hidden, self._pending_hidden = self._pending_hidden, None
        if hidden is None or not len(self._pending_rows):
            return None
        rows, threads = self._pending_rows, None if self._forest is None else self._forest.threads[self._pending_rows]
        return Step(self._rows.token_ids[rows], self._rows.parents[rows], hidden, threads)


class FinalStageWorker(StageWorker):
    """The last stage L_n, which chooses the token after every row and verifies the tree."""

    def __init__(self, model: StageModel, eos_token_ids: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        super().__init__(model, device)
        self._eos_token_ids = eos_token_ids
        self._successors = torch.zeros(0, dtype=torch.int64, device=device)  # the target's token after each row of the tree
        self._verifier = Verifier(SamplingParams(), eos_token_ids)
        self._sampler: Sampler | None = None  # None: greedy
        self._thread_verifier: ThreadVerifier | None = None  # instead of verifier and sampler, for an answer in several threads
        self._num_logprobs: int | None = None
        self._logprobs: Logprobs | None = None  # of the successors, if requested
        self._accepted_logprobs: list[list[tuple[int, float]]] = []
        self._mask_predictions: Tensor | None = None  # int64 [N, K], best first, unused rows 0; None without masks

    def begin(
        self, prompt_length: int, sampling: SamplingParams, tokens_per_mask: int = 0, new_sequence: NewSequence | None = None
    ) -> None:
        super().begin(prompt_length, sampling, tokens_per_mask, new_sequence)
        vocab_size = self._model.config.vocab_size
        self._successors = self._successors[:0]
        self._verifier = Verifier(sampling, self._eos_token_ids)
        self._thread_verifier = self._sampler = None
        if new_sequence is None:
            self._sampler = Sampler.create(sampling, vocab_size, self._device)
        else:
            self._thread_verifier = ThreadVerifier(new_sequence(), sampling, vocab_size, self._device)
        self._num_logprobs = sampling.logprobs
        self._logprobs = None
        self._accepted_logprobs = []
        num_predictions = min(tokens_per_mask, vocab_size)
        self._mask_predictions = self._successors.new_zeros(0, num_predictions) if num_predictions else None

    def prefill(self, chunk: Step) -> Step:
        chooser = self._thread_verifier or self._sampler
        if chooser is not None:
            chooser.add_prompt(chunk.token_ids[: chunk.num_rows - self._count_masks(chunk)])
        return super().prefill(chunk)

    def decode(self, step: Step) -> None:
        super().decode(step)
        assert self._pending_hidden is not None
        logits = self._model.logits(self._pending_hidden)
        num_tokens = step.num_rows - self._count_masks(step)
        successors = greedy(logits)  # unused for mask rows
        rows, mask_rows = self._pending_rows[:num_tokens], self._pending_rows[num_tokens:]
        if self._thread_verifier is not None and self._forest is not None:
            successors[:num_tokens] = self._thread_verifier.choose(logits[:num_tokens], self._forest, rows)
        elif self._sampler is not None:
            successors[:num_tokens] = self._sampled(self._sampler, logits[:num_tokens], rows)
        self._successors = torch.cat([self._successors, successors])
        if self._mask_predictions is not None:
            threads = None if self._forest is None else self._forest.threads[mask_rows]
            previous, positions = self._mask_predictions, self._rows.positions[mask_rows] + 1
            of_masks = self._predict(logits[num_tokens:], positions, previous.shape[1], threads)
            self._mask_predictions = torch.cat((previous, previous.new_zeros(num_tokens, previous.shape[1]), of_masks))
        if self._num_logprobs is not None:
            logprobs = Logprobs.of(logits, successors, self._num_logprobs)
            self._logprobs = logprobs if self._logprobs is None else self._logprobs.followed_by(logprobs)

    def _sampled(self, sampler: Sampler, logits: Tensor, rows: Tensor) -> Tensor:
        """The token after each of ``rows``, none of which is a mask."""
        tree = self._tree
        return sampler.choose(logits, tree.positions[rows] + 1, tree.tree_mask[rows], tree.token_ids.clamp(min=0))

    def _predict(self, logits: Tensor, positions: Tensor, count: int, threads: Tensor | None = None) -> Tensor:
        """The tokens that mask rows predict, best first: int64 [R, count]. They are ranked as the sampler will choose.

        Args:
            positions: int64 [R], position ids of the predicted tokens.
            threads: int64 [R], thread of each mask; None if all are in the main thread.
        """
        scores = logits
        if self._thread_verifier is not None:
            scores = self._thread_verifier.scores(logits, torch.zeros_like(positions) if threads is None else threads, positions)
        elif self._sampler is not None:
            scores = self._sampler.scores(logits, positions)
        return scores.topk(count, dim=1).indices

    def sync(self, verdict: Verdict) -> None:
        super().sync(verdict)
        self._verifier.replayed(verdict)

    def _replay_threads(self, forest: Forest, verdict: Verdict) -> ThreadChanges:
        changes = super()._replay_threads(forest, verdict)
        if self._thread_verifier is not None:
            self._thread_verifier.replayed(forest, changes)
        return changes

    def _replay(self, advance: Advance) -> None:
        super()._replay(advance)
        self._successors = self._successors[advance.kept]
        if self._mask_predictions is not None:
            self._mask_predictions = self._mask_predictions[advance.kept]
        if self._sampler is not None:
            self._sampler.add_accepted(advance.committed_ids)
        if self._logprobs is not None:
            self._logprobs = self._logprobs.of_rows(advance.kept)

    def first_verdict(self, last_chunk: Step) -> Verdict:
        """The verdict after prefill, from the output of the prompt's last chunk."""
        assert last_chunk.hidden is not None
        num_masks = self._count_masks(last_chunk)
        all_logits, tree = self._model.logits(last_chunk.hidden[-1 - num_masks :]), self._tree
        logits = all_logits[:1]
        if self._thread_verifier is not None:
            token = self._thread_verifier.first(logits)
        elif self._sampler is None:
            token = greedy(logits)
        else:
            position = torch.tensor([self._prompt_length], device=self._device)
            token = self._sampler.choose(logits, position, tree.tree_mask.new_zeros(1, 0), tree.token_ids)
        if self._num_logprobs is not None:
            self._accepted_logprobs += Logprobs.of(logits, token, self._num_logprobs).as_lists()
        if self._thread_verifier is None:
            verdict = self._verifier.first(int(token[0]))
        else:
            verdict = Verdict.of_parts([Part(0, (int(token[0]),))], self._thread_verifier.finished)
        if self._mask_predictions is None or verdict.finished is not None:
            return verdict
        positions = torch.arange(num_masks, device=self._device) + self._prompt_length + 1
        forecast = _as_tuples(self._predict(all_logits[1:], positions, self._mask_predictions.shape[1]))
        if self._thread_verifier is not None:
            return Verdict.of_parts([Part(0, verdict.tokens, forecast)])
        return replace(verdict, forecast=forecast)

    def verdict(self) -> Verdict | None:
        """The verdict on the rows computed so far; None if no further token is accepted."""
        if self._thread_verifier is not None and self._forest is not None:
            return self._threaded_verdict(self._thread_verifier, self._forest)
        verdict = self._verifier.verify(self._tree, self._successors)
        if verdict is None:
            return None
        if self._logprobs is not None:
            self._accepted_logprobs += self._logprobs.of_rows(self._verifier.verified_rows).as_lists()
        if self._mask_predictions is None or verdict.finished is not None:
            return verdict
        return replace(verdict, forecast=self._forecast(self._mask_predictions, self._verifier.verified_rows))

    def _threaded_verdict(self, verifier: ThreadVerifier, forest: Forest) -> Verdict | None:
        parts = verifier.verify(forest, self._successors)
        if self._logprobs is not None and verifier.verified_rows:
            rows = torch.tensor(verifier.verified_rows, device=self._device)
            self._accepted_logprobs += self._logprobs.of_rows(rows).as_lists()
        if not parts or self._mask_predictions is None or verifier.finished is not None:
            return Verdict.of_parts(parts, verifier.finished) if parts else None
        room = MAX_VERDICT_TOKENS - sum(len(part.tokens) + 1 for part in parts)
        with_forecasts, first = [], 0
        for part in parts:
            verified_rows = verifier.verified_rows[first : first + len(part.tokens)]
            first += len(part.tokens)
            forecast = self._forecast(self._mask_predictions, verified_rows)
            size = sum(map(len, forecast))
            with_forecasts.append(part._replace(forecast=forecast if size <= room else ()))
            room -= size if size <= room else 0
        return Verdict.of_parts(with_forecasts)

    def _forecast(self, predictions: Tensor, verified_rows: list[int]) -> tuple[tuple[int, ...], ...]:
        """The predictions for the positions after the last accepted token, by the masks below the last row that has any.

        If that row has ``num_later`` verified rows below it, its first ``num_later`` masks stand for tokens that are accepted
        already, and are skipped.
        """
        for num_later, row in enumerate(reversed(verified_rows)):
            if masks := self._masks_below(row):
                return _as_tuples(predictions[masks[num_later:]])
        return ()

    def _masks_below(self, row: int) -> list[int]:
        """The rows of the group of masks below ``row``, in order; empty if it has none."""
        masks: list[int] = []
        child = self._rows.child(row, -1)
        while child is not None:
            masks.append(child)
            child = self._rows.child(child, -1 - len(masks))
        return masks

    def take_logprobs(self) -> list[list[tuple[int, float]]]:
        """The log-probabilities of tokens accepted since the last call, if requested.

        Returns:
            for each token, the (id, log-probability) of the token itself and then of the top tokens.
        """
        taken, self._accepted_logprobs = self._accepted_logprobs, []
        return taken


def _as_tuples(token_ids: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, token_ids.tolist()))
