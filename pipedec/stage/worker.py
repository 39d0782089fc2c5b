"""The workers of the pipeline's stages: contiguous layers, their two-level cache, and a replay of the tree.

A worker gets rows and verdicts. It computes the rows, keeps its output pending until the verdict of the timestep has
pruned it (paper §3.4.3), and hands it on. The last stage also says what the target's own tokens are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import SamplingParams, Step, Verdict
from pipedec.model import StageModel
from pipedec.sampling import Logprobs, Sampler, greedy
from pipedec.stage.verifier import Verifier
from pipedec.tree import Advance, PredictionTree


class StageWorker:
    """One stage L_i (paper §3.1)."""

    def __init__(self, model: StageModel, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._cache = model.make_cache()
        self._tree = PredictionTree(device)
        self._device = device
        self._prompt_length = 0
        self._pending_rows = torch.zeros(0, dtype=torch.int64, device=device)
        self._pending_hidden: Tensor | None = None

    @property
    def cache_slots(self) -> int:
        """Rows that the cache has room for: it grows as needed and stays."""
        return self._cache.slots

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        """Forget the last request and prepare for one whose prompt has ``prompt_length`` tokens."""
        self._prompt_length = prompt_length
        self._cache.reset()
        self._tree.reset(prompt_length)
        self._pending_hidden = None

    def prefill(self, chunk: Step) -> Step:
        """Compute the prompt's next chunk; returns it with this stage's activations."""
        first = self._cache.past_length
        positions = torch.arange(first, first + chunk.num_rows, device=self._device)
        inputs = chunk.token_ids if chunk.hidden is None else chunk.hidden
        hidden = self._model.forward(inputs, positions, self._cache, mask_RN=None, prefill_length=self._prompt_length)
        return Step(chunk.token_ids, chunk.parents, hidden)

    def decode(self, step: Step) -> None:
        """Add the step's rows to the tree and compute them; the output waits for this timestep's verdict."""
        rows = self._tree.append(step.token_ids, step.parents)
        self._pending_hidden = self._model.forward(
            step.token_ids if step.hidden is None else step.hidden,
            self._tree.positions[rows],
            self._cache,
            mask_RN=self._tree.tree_mask[rows],
        )
        self._pending_rows = torch.arange(rows.start, rows.stop, device=self._device)

    def sync(self, verdict: Verdict) -> None:
        """Replay the verdict: commit and prune tree, cache and pending output. Without tokens there is nothing to replay."""
        if not verdict.tokens:
            return
        self._replay(self._tree.advance(verdict.tokens))

    def _replay(self, advance: Advance) -> None:
        """Follow the tree with everything that is kept beside it."""
        self._cache.advance(advance.committed, advance.kept)
        if self._pending_hidden is not None:
            is_kept, self._pending_rows = advance.renumber(self._pending_rows)
            self._pending_hidden = self._pending_hidden[is_kept]

    def outgoing(self) -> Step | None:
        """Hand over what is left of the pending output, numbered as the next stage's tree will number it."""
        hidden, self._pending_hidden = self._pending_hidden, None
        if hidden is None or not len(self._pending_rows):
            return None
        rows = self._pending_rows
        return Step(self._tree.token_ids[rows], self._tree.parents[rows], hidden)


class FinalStageWorker(StageWorker):
    """The last stage L_n: its output is not passed on but judged."""

    def __init__(self, model: StageModel, eos_token_ids: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        super().__init__(model, device)
        self._eos_token_ids = eos_token_ids
        self._successors = torch.zeros(0, dtype=torch.int64, device=device)  # the target's token after each row of the tree
        self._verifier = Verifier(SamplingParams(), eos_token_ids)
        self._sampler: Sampler | None = None  # None: the likeliest token
        self._num_logprobs: int | None = None
        self._logprobs: Logprobs | None = None  # of the successors, if asked for
        self._accepted_logprobs: list[list[tuple[int, float]]] = []

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        super().begin(prompt_length, sampling)
        self._successors = self._successors[:0]
        self._verifier = Verifier(sampling, self._eos_token_ids)
        self._sampler = Sampler.create(sampling, self._model.config.vocab_size, self._device)
        self._num_logprobs = sampling.logprobs
        self._logprobs = None
        self._accepted_logprobs = []

    def prefill(self, chunk: Step) -> Step:
        if self._sampler is not None:
            self._sampler.add_prompt(chunk.token_ids)
        return super().prefill(chunk)

    def decode(self, step: Step) -> None:
        super().decode(step)
        assert self._pending_hidden is not None
        logits = self._model.logits(self._pending_hidden)
        successors = greedy(logits) if self._sampler is None else self._sampled(self._sampler, logits)
        self._successors = torch.cat([self._successors, successors])
        if self._num_logprobs is not None:
            logprobs = Logprobs.of(logits, successors, self._num_logprobs)
            self._logprobs = logprobs if self._logprobs is None else self._logprobs.followed_by(logprobs)

    def _sampled(self, sampler: Sampler, logits: Tensor) -> Tensor:
        """The token after each of the rows that have just been computed."""
        tree, rows = self._tree, self._pending_rows
        return sampler.choose(logits, tree.positions[rows] + 1, tree.tree_mask[rows], tree.token_ids)

    def sync(self, verdict: Verdict) -> None:
        super().sync(verdict)
        self._verifier.replayed(verdict)

    def _replay(self, advance: Advance) -> None:
        super()._replay(advance)
        self._successors = self._successors[advance.kept]
        if self._sampler is not None:
            self._sampler.add_accepted(advance.committed_ids)
        if self._logprobs is not None:
            self._logprobs = self._logprobs.of_rows(advance.kept)

    def first_verdict(self, last_chunk: Step) -> Verdict:
        """The verdict on prefill, from the output of the prompt's last chunk."""
        assert last_chunk.hidden is not None
        logits, tree = self._model.logits(last_chunk.hidden[-1:]), self._tree
        if self._sampler is None:
            token = greedy(logits)
        else:
            position = torch.tensor([self._prompt_length], device=self._device)
            token = self._sampler.choose(logits, position, tree.tree_mask.new_zeros(1, 0), tree.token_ids)
        if self._num_logprobs is not None:
            self._accepted_logprobs += Logprobs.of(logits, token, self._num_logprobs).as_lists()
        return self._verifier.first(int(token[0]))

    def verdict(self) -> Verdict | None:
        """What the rows computed so far say after the last verdict; None if nothing new."""
        verdict = self._verifier.judge(self._tree, self._successors)
        if verdict is not None and self._logprobs is not None:
            self._accepted_logprobs += self._logprobs.of_rows(self._verifier.judged_rows).as_lists()
        return verdict

    def take_logprobs(self) -> list[list[tuple[int, float]]]:
        """Per token accepted since the last call, if asked for: it and the top tokens, each (id, log-probability)."""
        taken, self._accepted_logprobs = self._accepted_logprobs, []
        return taken
