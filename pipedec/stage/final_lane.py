"""A lane of the last stage, which chooses the target's token after every row and verifies rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipedec.core import Accepted, Opening, Step, TokenLogprobs, Verdict
from pipedec.device import to_device
from pipedec.forest import ThreadChanges
from pipedec.model import KVCache, LaneRows
from pipedec.sampling import Logprobs, PromptLogprobs
from pipedec.stage.acceptance import Acceptance
from pipedec.stage.corruption import bad_stage, corrupted_tokens, first_stage
from pipedec.stage.forecasts import Forecasts
from pipedec.stage.lane import Lane
from pipedec.stage.slot_tokens import SlotTokens
from pipedec.stage.token_chooser import TokenChooser
from pipedec.threads import NewSequence
from pipedec.tree import Advance


class FinalLane(Lane):
    """One request on the last stage, whose output is verdicts.

    Args:
        vocab_size: V.
        tokens: those of the pool's slots.
        stage: number of the last stage.

    Raises:
        UserError: ``logit_bias`` names a token that is not in the vocabulary.
    """

    def __init__(
        self,
        opening: Opening,
        new_sequence: NewSequence,
        cache: KVCache,
        device: torch.device | str,
        vocab_size: int,
        tokens: SlotTokens,
        stage: int,
    ) -> None:
        super().__init__(opening, new_sequence, cache, device)
        self._chooser = TokenChooser(self._forest.sequence, opening.sampling, vocab_size, device)
        self._acceptance = Acceptance(new_sequence())
        self._forecasts = Forecasts(self._chooser, min(opening.tokens_per_mask, vocab_size))
        self._logprobs = Logprobs(opening.sampling.logprobs)
        self._prompt_logprobs = PromptLogprobs(opening.sampling.prompt_logprobs, opening.prompt_length)
        self._chunk = torch.zeros(0, dtype=torch.int64)  # the tokens of the prefill that entered last
        self._successors: list[int] = []  # the target's token after each of the N rows
        self._first_verdict: Verdict | None = None
        self._first_bad = torch.full((1,), torch.inf, device=device)  # the first stage of which any row was not finite
        self._stage = torch.full((1,), float(stage), device=device)
        self._is_corrupted = False
        self._entered: LaneRows
        self._tokens = tokens
        self._adopt(opening)

    def _adopt(self, opening: Opening) -> None:
        """Learn the tokens of the adopted prefix, which do not enter."""
        first, count = opening.copied
        copied = self._tokens.read([range(first, first + count)])
        self._tokens.write(self._cache.ranges(opening.cached - count, opening.cached), copied)
        of_prompt = self._cache.ranges(0, min(opening.cached, opening.prompt_length))
        self._chooser.add_prompt(self._tokens.read(of_prompt))

    @property
    def has_ended(self) -> bool:
        return self._is_corrupted or self._acceptance.finished is not None

    @property
    def num_judged(self) -> int:
        """How many of the rows that entered last, from the end, need logits: of a prefill only its last token and the masks,
        unless the prompt's log-probabilities are requested.
        """
        entered = self._entered
        if entered.visibility is not None or self._prompt_logprobs.is_open:
            return entered.num_rows
        return 1 + entered.num_masks if self._cache.past_length == self._prefill_length else 0

    def enter(self, step: Step) -> LaneRows:
        self._entered = super().enter(step)
        if self._entered.visibility is None:
            self._enter_chunk(step.token_ids[: self._entered.num_tokens])
        return self._entered

    def note_corruption(self, hidden_RE: Tensor) -> None:
        """Note which stage, if any, was the first to compute one of these rows that is not finite."""
        self._first_bad = torch.minimum(self._first_bad, first_stage(hidden_RE))

    def _enter_chunk(self, token_ids: Tensor) -> None:
        """Learn the tokens of a chunk, the first of which belong to the prompt, the others to what was said before."""
        self._chunk = token_ids
        self._tokens.write(self._cache.slots_behind(len(token_ids)), token_ids)
        self._chooser.add_prompt(token_ids[: max(self._prompt_length - self._cache.past_length, 0)])

    def judge(self, logits_RV: Tensor, is_finite: bool = False) -> Tensor:
        """Choose the tokens after the ``num_judged`` rows, whose logits these are.

        Args:
            is_finite: they are known to be.

        Returns:
            int64 [any number], what ``settle`` must be told: the tokens, and then what masks predict.
        """
        bad_R = None if is_finite else ~logits_RV.isfinite().all(1)
        if bad_R is not None:
            logits_RV = logits_RV.masked_fill(bad_R[:, None], 0)  # nothing can be drawn from NaN
        if self._entered.visibility is not None:
            return self._judge_rows(logits_RV, bad_R)
        if self._prompt_logprobs.is_open:
            self._prompt_logprobs.add(logits_RV[: len(self._chunk)], to_device(self._chunk, self._device))
            logits_RV = logits_RV[len(self._chunk) - 1 :]
        if self._cache.past_length < self._prefill_length:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return self._judge_prefill(logits_RV, None if bad_R is None else bad_R[len(bad_R) - len(logits_RV) :])

    def settle(self, token_ids: list[int]) -> None:
        """What ``judge`` has returned, read from the device; after a prefill this is the first verdict."""
        if self._entered.visibility is None:
            if token_ids:
                self._settle_prefill(token_ids[0], token_ids[1:])
            return
        rows, num_masks = self._entered.num_rows, self._entered.num_masks
        self._successors += token_ids[:rows]
        self._forecasts.add(rows - num_masks, token_ids[rows:])

    def _judge_prefill(self, logits_RV: Tensor, bad_R: Tensor | None) -> Tensor:
        token = self._chooser.first(logits_RV[:1])
        self._logprobs.accept_first(logits_RV[:1], token)
        forecast = self._forecasts.first(logits_RV[1:], self._prefill_length + 1)
        return torch.cat((self._marked(token, None if bad_R is None else bad_R[:1]), forecast.flatten()))

    def _settle_prefill(self, token: int, forecast: list[int]) -> None:
        if (stage := bad_stage((token,))) is not None:
            self._first_verdict = self._corrupted(stage)
            return
        self._acceptance.accept_first(token)
        finished = self._acceptance.finished
        said = () if finished else self._forecasts.forecast(forecast)
        self._first_verdict = Verdict.of(token, finished=finished, forecast=said)

    def _judge_rows(self, logits_RV: Tensor, bad_R: Tensor | None) -> Tensor:
        num_masks, forest = self._entered.num_masks, self._forest
        num_tokens = len(logits_RV) - num_masks
        rows = slice(forest.num_rows - len(logits_RV), forest.num_rows - num_masks)
        chosen = pad(self._chooser.choose(logits_RV[:num_tokens], forest, rows), (0, num_masks))
        self._logprobs.add(logits_RV, chosen)
        return torch.cat((self._marked(chosen, bad_R), self._forecasts.best(logits_RV[num_tokens:], forest).flatten()))

    def _marked(self, chosen_R: Tensor, bad_R: Tensor | None) -> Tensor:
        return chosen_R if bad_R is None else corrupted_tokens(chosen_R, bad_R, torch.minimum(self._first_bad, self._stage))

    def _corrupted(self, stage: int) -> Verdict:
        self._is_corrupted = True
        return Verdict(finished="corrupted", bad_stage=stage)

    def verdict(self) -> Verdict | None:
        """After the last chunk of the prefill the first verdict, later the one on the rows computed so far.

        Returns:
            None if no further token is accepted.
        """
        first, self._first_verdict = self._first_verdict, None
        return first or self._verdict_on_rows()

    def _verdict_on_rows(self) -> Verdict | None:
        forest, walks = self._forest, self._acceptance.verify(self._forest, self._successors)
        if not walks:
            return None
        if (stage := bad_stage(tuple(token for walk in walks for token in walk.tokens))) is not None:
            return self._corrupted(stage)
        self._logprobs.accept([row for walk in walks for row in walk.rows])
        finished = self._acceptance.finished
        forecasts = [() if finished else self._forecasts.after(forest, walk.rows) for walk in walks]
        accepted = (Accepted(walk.thread, walk.tokens, forecast) for walk, forecast in zip(walks, forecasts, strict=True))
        return Verdict(tuple(accepted), finished)

    def take_logprobs(self) -> TokenLogprobs:
        """The log-probabilities of tokens accepted since the last call, if requested (see ``Logprobs.take``)."""
        return tuple(map(tuple, self._logprobs.take()))

    def take_prompt_logprobs(self) -> TokenLogprobs:
        """Those of tokens of the prompt that have entered since the last call, if requested (see ``PromptLogprobs.take``)."""
        return tuple(map(tuple, self._prompt_logprobs.take()))

    def _replay(self, advance: Advance, changes: ThreadChanges) -> None:
        past = self._cache.past_length
        super()._replay(advance, changes)
        self._tokens.write(self._cache.ranges(past, past + len(advance.committed_ids)), advance.committed_ids)
        kept = advance.kept.tolist()
        self._successors = [self._successors[row] for row in kept]
        self._forecasts.keep(kept)
        self._logprobs.keep(advance.kept)
        self._chooser.replayed(changes)
        self._acceptance.replayed(changes)
