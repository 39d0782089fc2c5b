"""The last stage, which outputs verdicts: it chooses the target's token after every row, and accepts tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import HiddenStates, NewRequest, RequestUpdate, Step
from pipedec.core.verdict import Accepted, Verdict
from pipedec.device import to_device, to_host
from pipedec.model import FirstForward, KVCache, LaneRows
from pipedec.sampling import Logprobs, PromptLogprobs, Sampler, greedy
from pipedec.stage.verification import Forecasts, TokenChooser, Verifier
from pipedec.stage.worker import Lane, StageWorker, known_finite
from pipedec.threads import NewSequence
from pipedec.tree import Advance, ThreadChanges

_CORRUPTED = -(2**32)  # less the number of a stage; masks are negative, too, but near 0
_TYPICAL_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, seed=0)


class SlotTokens:
    """The token in each slot of the pool, of prompts and accepted tokens; on the host.

    A request that adopts a prefix never sends its tokens again, but penalties count them.
    """

    def __init__(self, slots: int) -> None:
        self._token_ids = torch.zeros(slots, dtype=torch.int64)

    def read(self, slots: Iterable[range]) -> Tensor:
        """int64 [R], the tokens in ``slots``."""
        return torch.cat([self._token_ids[run.start : run.stop] for run in slots])

    def write(self, slots: Iterable[range], token_ids: Tensor) -> None:
        """Put ``token_ids``, int64 [R], into ``slots``."""
        first = 0
        for run in slots:
            self._token_ids[run.start : run.stop] = token_ids[first : first + len(run)]
            first += len(run)


class FinalLane(Lane):
    """One request on the last stage. After ``enter`` its rows are computed; then ``judge`` and ``result``.

    Attributes:
        num_judged: how many of the rows that entered last, from the end, need logits: of a prefill only its last token and the
            masks, unless the prompt's log-probabilities are requested.

    Raises:
        UserError: ``logit_bias`` names a token that is not in the vocabulary.
    """

    def __init__(
        self, opening: NewRequest, new_sequence: NewSequence, cache: KVCache, device: torch.device | str, vocab_size: int,
        tokens: SlotTokens, stage: int,
    ) -> None:  # fmt: skip
        super().__init__(opening, new_sequence, cache, device)
        sampling, length = opening.sampling, opening.prompt_length
        self._chooser = TokenChooser(self.forest.sequence, sampling, vocab_size, device)
        self._acceptance = Verifier(new_sequence())
        self._forecasts = Forecasts(self._chooser, min(opening.tokens_per_mask, vocab_size)) if self._has_masks else None
        self._logprobs = None if sampling.logprobs is None else Logprobs(sampling.logprobs)
        self._prompt_logprobs = None if sampling.prompt_logprobs is None else PromptLogprobs(sampling.prompt_logprobs, length)
        self._num_unread = length if sampling.prompt_hidden_states else 0  # tokens whose hidden states have yet to be read
        self._successors: list[int] = []  # the target's token after each of the N rows
        self._first_bad = torch.full((1,), torch.inf, device=device)  # the first stage with a row that was not finite
        self._stage = torch.full((1,), float(stage), device=device)
        self._entered: LaneRows
        self._chunk: Tensor  # the tokens of the prefill that entered last
        self.num_judged = 0
        self._tokens = tokens
        first, count = opening.copied
        tokens.write(cache.ranges(opening.cached - count, opening.cached), tokens.read([range(first, first + count)]))
        self._chooser.add_prompt(tokens.read(cache.ranges(0, min(opening.cached, length))))

    def enter(self, step: Step) -> LaneRows:
        entered = self._entered = super().enter(step)
        if entered.visibility is not None:
            self.num_judged = entered.num_rows
            return entered
        past, count = self.cache.past_length, entered.num_tokens
        self._chunk = step.token_ids[:count]
        self._tokens.write(self.cache.next_slots(count), self._chunk)
        self._chooser.add_prompt(self._chunk[: max(self._prompt_length - past, 0)])
        if self._prompt_logprobs is not None and self._prompt_logprobs.is_open:
            self.num_judged = entered.num_rows
        else:
            self.num_judged = 1 + entered.num_masks if past + count == self._prefill_length else 0
        return entered

    def note_corruption(self, hidden_RE: Tensor) -> None:
        """Note which stage, if any, was the first to compute one of these rows that is not finite (see ``marked``)."""
        stages_R = torch.where(hidden_RE.isnan().any(1), hidden_RE[:, 0].float(), torch.inf)
        self._first_bad = torch.minimum(self._first_bad, stages_R.amin(0, keepdim=True))

    def unread(self, hidden_RE: Tensor) -> Tensor:
        """Of the rows that entered last those of the prompt, if their hidden states are requested; else none."""
        unread_RE = hidden_RE[: self._num_unread]
        self._num_unread -= len(unread_RE)
        return unread_RE

    def judge(self, logits_RV: Tensor, is_finite: bool = False) -> Tensor:
        """Choose the tokens after the ``num_judged`` rows, from their logits.

        Args:
            is_finite: all logits are known to be finite.

        Returns:
            int64 [any number], for ``result``: the tokens, and then the predictions of masks.
        """
        bad_R = None if is_finite else ~logits_RV.isfinite().all(1)
        if bad_R is not None:
            logits_RV = logits_RV.masked_fill(bad_R[:, None], 0)  # sampling from NaN is impossible
        if self._entered.visibility is None:
            return self._judge_prefill(logits_RV, bad_R)
        num_masks, forest = self._entered.num_masks, self.forest
        num_tokens = logits_RV.shape[0] - num_masks
        rows = slice(forest.num_rows - logits_RV.shape[0], forest.num_rows - num_masks)
        chosen_R = self._chooser.choose(logits_RV[:num_tokens], forest, rows)
        if num_masks:
            chosen_R = pad(chosen_R, (0, num_masks))
        if self._logprobs is not None:
            self._logprobs.add(logits_RV, chosen_R)
        if bad_R is not None:
            chosen_R = self._corrupted(chosen_R, bad_R)
        if self._forecasts is None:
            return chosen_R
        return torch.cat((chosen_R, self._forecasts.best(logits_RV[num_tokens:], forest).flatten()))

    def _judge_prefill(self, logits_RV: Tensor, bad_R: Tensor | None) -> Tensor:
        if self._prompt_logprobs is not None and self._prompt_logprobs.is_open:
            count = self._chunk.shape[0]
            self._prompt_logprobs.add(logits_RV[:count], to_device(self._chunk, self._device))
            logits_RV = logits_RV[count - 1 :]
            bad_R = None if bad_R is None else bad_R[count - 1 :]
        if self.cache.past_length < self._prefill_length:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        token_1 = self._chooser.first(logits_RV[:1])
        if self._logprobs is not None:
            self._logprobs.accept_first(logits_RV[:1], token_1)
        if bad_R is not None:
            token_1 = self._corrupted(token_1, bad_R[:1])
        if self._forecasts is None:
            return token_1
        return torch.cat((token_1, self._forecasts.first(logits_RV[1:], self._prefill_length + 1).flatten()))

    def _corrupted(self, token_ids_R: Tensor, bad_R: Tensor) -> Tensor:
        """The token ids, int64 [R]; after bad rows (bool [R]) ids that encode the first corrupted stage."""
        stage_1 = torch.minimum(self._first_bad, self._stage)
        return torch.where(bad_R, _CORRUPTED - stage_1.nan_to_num(posinf=0).long(), token_ids_R)

    def result(self, number: int, token_ids: list[int], read: HiddenStates | None = None) -> RequestUpdate | None:
        """The first verdict after the last chunk of the prefill; later the one on the rows computed so far.

        Args:
            token_ids: the result of ``judge``, read from the device; empty if no row needed logits.
            read: the hidden states of the ``unread`` rows.

        Returns:
            the verdict with the requested log-probabilities of the accepted tokens, and of tokens of the prompt that have entered
            since the last call, and ``read``; None without any.
        """
        if self._entered.visibility is not None:
            verdict = self._verdict(token_ids)
        else:
            verdict = self._first_verdict(token_ids[0], token_ids[1:]) if token_ids else None
        scored = () if self._prompt_logprobs is None else self._prompt_logprobs.pop_rows()
        if verdict is None:
            return RequestUpdate(number, prompt_logprobs=scored, hidden_states=read) if scored or read else None
        self.has_ended = verdict.finished is not None
        logprobs = () if self._logprobs is None else self._logprobs.pop_rows()
        return RequestUpdate(number, verdict=verdict, logprobs=logprobs, prompt_logprobs=scored, hidden_states=read)

    def _first_verdict(self, token: int, best: list[int]) -> Verdict:
        """The verdict after the prefill: one token, and the predictions of the masks after it."""
        if token <= _CORRUPTED:
            return _corruption(token)
        self._acceptance.record_accepted(0, token)
        finished = self._acceptance.sequence.finished
        forecast = ((), ()) if finished or self._forecasts is None else self._forecasts.forecast(best)
        return Verdict((Accepted(0, (token,), *forecast),), finished)

    def _verdict(self, token_ids: list[int]) -> Verdict | None:
        rows, num_masks = self._entered.num_rows, self._entered.num_masks
        self._successors += token_ids[:rows]
        if self._forecasts is not None:
            self._forecasts.add(rows - num_masks, token_ids[rows:])
        walks = self._acceptance.verify(self.forest, self._successors)
        if not walks:
            return None
        if corrupted := [token for walk in walks for token in walk.tokens if token <= _CORRUPTED]:
            return _corruption(corrupted[0])
        if self._logprobs is not None:
            self._logprobs.select_rows([row for walk in walks for row in walk.rows])
        finished = self._acceptance.sequence.finished
        forecasts = None if finished else self._forecasts
        accepted = [
            Accepted(walk.thread, walk.tokens, *(((), ()) if forecasts is None else forecasts.after(self.forest, walk.rows)))
            for walk in walks
        ]
        return Verdict(tuple(accepted), finished)

    def sync(self, verdict: Verdict) -> tuple[Advance, ThreadChanges] | None:
        past = self.cache.past_length
        if (replayed := super().sync(verdict)) is None:
            return None
        advance, changes = replayed
        self._tokens.write(self.cache.ranges(past, past + advance.committed.shape[0]), advance.committed_ids)
        kept = advance.kept.tolist()
        self._successors = [self._successors[row] for row in kept]
        if self._forecasts is not None:
            self._forecasts.keep(kept)
        if self._logprobs is not None:
            self._logprobs.keep(advance.kept)
        self._chooser.replayed(changes)
        self._acceptance.replayed(changes)
        return replayed


def _corruption(token: int) -> Verdict:
    """The verdict on an answer with the id of a corrupted stage in place of a token."""
    failure = (
        f"stage {_CORRUPTED - token} computed NaN or infinity for this request, which has failed: check that stage's weights and "
        "device, or use a dtype of a wider range"
    )
    return Verdict(finished="corrupted", failure=failure)


def _hidden_states(hidden_RE: Tensor) -> HiddenStates:
    rows = to_host(hidden_RE).contiguous().view(torch.uint8).numpy()
    return HiddenStates(str(hidden_RE.dtype).removeprefix("torch."), tuple(row.tobytes() for row in rows))


class FinalStageWorker(StageWorker):
    """The last stage L_n."""

    @cached_property
    def _tokens(self) -> SlotTokens:
        return SlotTokens(self._pool.slots)

    def _rehearse(self, forward: FirstForward, hidden_RE: Tensor) -> None:
        """Choose tokens greedily and by sampling."""
        logits_RV = self._model.logits(hidden_RE[-forward.num_judged :])
        rows, device = len(logits_RV), logits_RV.device
        sampler = Sampler(_TYPICAL_SAMPLING, self._model.config.vocab_size, device)
        mask_RN, token_ids = torch.eye(rows, dtype=torch.bool, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
        drawn = sampler.choose(logits_RV, torch.arange(rows), mask_RN, token_ids)
        to_host(torch.cat((greedy(logits_RV), drawn)))

    def _new_lane(self, number: int, opening: NewRequest, cache: KVCache) -> FinalLane:
        vocab_size = self._model.config.vocab_size
        return FinalLane(opening, self._new_sequence(opening), cache, self._device, vocab_size, self._tokens, self._stage)

    def _reply(
        self, updates: tuple[RequestUpdate, ...], steps: Mapping[int, Step], activations: Mapping[int, Tensor], is_finite: bool
    ) -> tuple[RequestUpdate, ...]:
        """The results: verdicts on requests that had rows, with log-probabilities if requested. There is none for a request whose
        answer does not grow, unless there is news of its prompt. A verdict without tokens reports that a lane is
        closed, to rank 0 and then to every stage.
        """
        ends = [(update.number, update.verdict.finished) for update in updates if update.verdict is not None]
        results = {number: RequestUpdate(number, verdict=Verdict((), reason)) for number, reason in ends if reason is not None}
        for number, token_ids in self._judge(activations, is_finite).items():
            with self._faults.of(number):
                unread_RE = self._lane(number).unread(activations[number])
                read = _hidden_states(self._model.normed(unread_RE)) if len(unread_RE) else None
                if (result := self._lane(number).result(number, token_ids, read)) is not None:
                    results[number] = result
        failed = {update.number: update.failure for update in updates if update.failure} | self._faults.pop_failures()
        failures = {number: RequestUpdate(number, verdict=Verdict((), "failed", failure)) for number, failure in failed.items()}
        return tuple((failures | results).values())

    def _lane(self, number: int) -> FinalLane:
        return cast(FinalLane, self._lanes[number])

    def _judge(self, activations: Mapping[int, Tensor], is_finite: bool) -> dict[int, list[int]]:
        """Compute the logits of all requests at once, let each lane choose its tokens, and read these from the device once."""
        if not is_finite:
            for number, own_RE in activations.items():
                self._lane(number).note_corruption(own_RE)
        judging = [number for number in activations if self._lane(number).num_judged]
        chosen: dict[int, Tensor] = {}
        if judging:
            counts = [self._lane(number).num_judged for number in judging]
            rows = [activations[number][-count:] for number, count in zip(judging, counts, strict=True)]
            logits_RV = self._model.logits(torch.cat(rows))
            is_finite = known_finite(logits_RV)
            for number, own_RV in zip(judging, logits_RV.split(counts), strict=True):
                with self._faults.of(number):
                    chosen[number] = self._lane(number).judge(own_RV, is_finite)
        read = iter(to_host(torch.cat(list(chosen.values()))).tolist() if chosen else ())
        return {
            number: list(islice(read, chosen[number].shape[0])) if number in chosen else []
            for number in activations if number in self._lanes
        }  # fmt: skip
