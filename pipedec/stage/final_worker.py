"""The worker of the last stage, whose output is verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from pipedec.core import Opening, SamplingParams, Step, Update, Verdict
from pipedec.device import to_host
from pipedec.model import FirstForward, KVCache
from pipedec.sampling import Sampler, greedy
from pipedec.stage.corruption import known_finite
from pipedec.stage.final_lane import FinalLane
from pipedec.stage.slot_tokens import SlotTokens
from pipedec.stage.worker import StageWorker

_BY_CHANCE = SamplingParams(temperature=1.0, top_p=0.9, seed=0)  # as most requests that sample


class FinalStageWorker(StageWorker):
    """The last stage L_n."""

    @cached_property
    def _tokens(self) -> SlotTokens:
        return SlotTokens(self.cache_slots)

    def _rehearse(self, forward: FirstForward, hidden_RE: Tensor) -> None:
        """Choose tokens greedily and by chance."""
        logits_RV = self._model.logits(hidden_RE[-forward.num_judged :])
        rows, device = len(logits_RV), logits_RV.device
        sampler = Sampler(_BY_CHANCE, self._model.config.vocab_size, device)
        mask_RN, token_ids = torch.eye(rows, dtype=torch.bool, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
        drawn = sampler.choose(logits_RV, torch.arange(rows), mask_RN, token_ids)
        to_host(torch.cat((greedy(logits_RV), drawn)))

    def _result(self, number: int) -> Update | None:
        lane = cast(FinalLane, self._lanes[number])
        verdict, prompt = lane.verdict(), lane.take_prompt_logprobs()
        if verdict is None:
            return Update(number, prompt_logprobs=prompt) if prompt else None
        return Update(number, verdict=verdict, logprobs=lane.take_logprobs(), prompt_logprobs=prompt)

    def _reply(self, updates: tuple[Update, ...], steps: Mapping[int, Step]) -> tuple[Update, ...]:
        """The results: verdicts on requests that had rows, with log-probabilities if requested; none for those of which no
        further token is accepted, unless there are log-probabilities of their prompts. A verdict without tokens tells rank 0 that
        a lane is closed, and so on every stage.
        """
        ends = [(update.number, update.verdict.finished) for update in updates if update.verdict is not None]
        closed = (Update(number, verdict=Verdict((), reason)) for number, reason in ends if reason is not None)
        results = map(self._result, steps)
        return (*closed, *(result for result in results if result is not None))

    def _new_lane(self, number: int, opening: Opening, cache: KVCache) -> FinalLane:
        vocab_size = self._model.config.vocab_size
        return FinalLane(opening, self._new_sequence(opening), cache, self._device, vocab_size, self._tokens, self._stage)

    def _outputs(self, steps: Mapping[int, Step], hidden_RE: Tensor, counts: Sequence[int]) -> dict[int, Step]:
        """Compute the logits of all requests at once, let each lane choose its tokens, and read these from the device once."""
        lanes = [cast(FinalLane, self._lanes[number]) for number in steps]
        self._judge(list(zip(lanes, hidden_RE.split(counts), strict=True)), known_finite(hidden_RE))
        return dict(steps)

    def _judge(self, computed: list[tuple[FinalLane, Tensor]], is_finite: bool) -> None:
        for lane, own_RE in () if is_finite else computed:
            lane.note_corruption(own_RE)
        judging = [(lane, own_RE[len(own_RE) - lane.num_judged :]) for lane, own_RE in computed if lane.num_judged]
        if not judging:
            return
        logits_RV = self._model.logits(torch.cat([own_RE for _, own_RE in judging]))
        is_finite = known_finite(logits_RV)
        by_lane = zip(judging, logits_RV.split([len(own_RE) for _, own_RE in judging]), strict=True)
        chosen = [(lane, lane.judge(own_RV, is_finite)) for (lane, _), own_RV in by_lane]
        read = iter(to_host(torch.cat([token_ids for _, token_ids in chosen])).tolist())
        for lane, token_ids in chosen:
            lane.settle(list(islice(read, len(token_ids))))
