"""The worker of the last stage, which chooses the target's token after every row and verifies rows."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from pipedec.core import Accepted, Envelope, SamplingParams, Step, Verdict
from pipedec.forest import ThreadChanges
from pipedec.sampling import Logprobs
from pipedec.stage.acceptance import Acceptance
from pipedec.stage.forecasts import Forecasts
from pipedec.stage.token_chooser import TokenChooser
from pipedec.stage.worker import StageWorker
from pipedec.threads import NewSequence
from pipedec.tree import Advance


class FinalStageWorker(StageWorker):
    """The last stage L_n. Its output is verdicts; nothing is ever pending."""

    def begin(self, new_sequence: NewSequence, sampling: SamplingParams, tokens_per_mask: int = 0) -> None:
        super().begin(new_sequence, sampling, tokens_per_mask)
        vocab_size = self._model.config.vocab_size
        self._chooser = TokenChooser(self._forest.sequence, sampling, vocab_size, self._device)
        self._acceptance = Acceptance(new_sequence())
        self._forecasts = Forecasts(self._chooser, min(tokens_per_mask, vocab_size), self._device)
        self._logprobs = Logprobs(sampling.logprobs)
        self._successors = torch.zeros(0, dtype=torch.int64, device=self._device)  # [N], the target's token after each row
        self._first_verdict: Verdict | None = None

    def prefill(self, chunk: Step) -> None:
        """Compute the next chunk of the prompt; with the last one the first verdict is reached."""
        num_tokens = chunk.num_rows - self._count_masks(chunk)
        hidden = self._compute_chunk(chunk, num_tokens)
        self._chooser.add_prompt(chunk.token_ids[:num_tokens])
        if self._cache.past_length < self._forest.sequence.prompt_length:
            return
        logits = self._model.logits(hidden[num_tokens - 1 :])  # of the last token and of the masks after it
        token = self._chooser.first(logits[:1])
        self._logprobs.accept_first(logits[:1], token)
        self._acceptance.accept_first(int(token[0]))
        finished = self._acceptance.finished
        forecast = () if finished else self._forecasts.first(logits[1:], self._forest.sequence.prompt_length + 1)
        self._first_verdict = Verdict.of(int(token[0]), finished=finished, forecast=forecast)

    def decode(self, step: Step) -> None:
        """Add the step's rows to the forest, compute them, and choose the tokens after them."""
        num_masks, forest = self._count_masks(step), self._forest
        logits, num_tokens = self._model.logits(self._compute(step, num_masks)), step.num_rows - num_masks
        rows = slice(forest.num_rows - step.num_rows, forest.num_rows - num_masks)
        chosen = pad(self._chooser.choose(logits[:num_tokens], forest, rows), (0, num_masks))
        self._successors = torch.cat((self._successors, chosen))
        self._forecasts.add(logits, forest, num_masks)
        self._logprobs.add(logits, chosen)

    def verdict(self) -> Verdict | None:
        """After the last chunk of the prompt the first verdict, later the one on the rows computed so far.

        Returns:
            None if no further token is accepted.
        """
        first, self._first_verdict = self._first_verdict, None
        return first or self._verdict_on_rows()

    def _verdict_on_rows(self) -> Verdict | None:
        forest, walks = self._forest, self._acceptance.verify(self._forest, self._successors)
        if not walks:
            return None
        self._logprobs.accept([row for walk in walks for row in walk.rows])
        finished = self._acceptance.finished
        forecasts = [() if finished else self._forecasts.after(forest, walk.rows) for walk in walks]
        accepted = (Accepted(walk.thread, walk.tokens, forecast) for walk, forecast in zip(walks, forecasts, strict=True))
        return Verdict(tuple(accepted), finished)

    def take_logprobs(self) -> list[list[tuple[int, float]]]:
        """The log-probabilities of tokens accepted since the last call, if requested (see ``Logprobs.take``)."""
        return self._logprobs.take()

    def _reply(self, envelope: Envelope) -> Envelope:
        return Envelope(verdict=None if envelope.step is None else self.verdict())

    def _replay(self, advance: Advance, changes: ThreadChanges) -> None:
        super()._replay(advance, changes)
        self._successors = self._successors[advance.kept]
        self._forecasts.keep(advance.kept)
        self._logprobs.keep(advance.kept)
        self._chooser.replayed(changes)
        self._acceptance.replayed(changes)
