"""The draft model S (PipeDec §3.2): a small model that predicts the tokens after rows of prediction trees.

Owns its weights, its KV memory, and a *lane* for each running request: its cache, and which tree rows are in it. The decoding
method decides which rows are drafted and which candidates enter the pipeline. Shapes: C accepted tokens that were never drafted,
F rows to draft, R = C + F; E hidden size, V tokens of the vocabulary.

Drafts need not be complete, so KV memory is best effort: a request without memory has no lane, and gets no candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from pipedec.core.limits import DRAFT_KNEE
from pipedec.core.sampling import SamplingParams
from pipedec.device import HOST, to_device, to_host
from pipedec.drafting.growing import brought
from pipedec.drafting.lane import DraftLane, Entering
from pipedec.families import StateCounts
from pipedec.grammar import Bitmask
from pipedec.grammar.masks import allowed_tokens
from pipedec.kv import KVManager
from pipedec.model import DraftVocabulary, FirstForward, KVCache, LaneRows, StageModel, Usual, warm_up
from pipedec.sampling import TokenPredictor
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, RowChanges

_SLOTS = 4096  # in a pool whose size is not configured
_MAX_RESERVED = 1024  # slots for tokens of the answer that a lane gets when it opens


class DraftModel:
    """A whole model on one device, with a KV pool of ``slots`` slots in blocks of ``block``. Rows of a tree may be drafted in any
    order, each after its ancestors.
    """

    def __init__(
        self, model: StageModel, slots: int = _SLOTS, block: int = 16, shares_prefixes: bool = True,
        vocabulary: DraftVocabulary | None = None, states: StateCounts | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._vocabulary = vocabulary  # None if the model has the target's tokens
        self._vocab_size = self._num_known = model.config.vocab_size  # the size of the target's; how many tokens can be proposed
        self._tokens: Tensor | None = None
        if vocabulary is not None:
            self._vocab_size = len(vocabulary.draft_ids)
            self._tokens, self._is_unknown = vocabulary.tokens.clamp(min=0), vocabulary.tokens < 0
            self._num_known -= int(self._is_unknown.sum())
        self._pool = model.make_pool(slots, block, states)
        self._kv = KVManager(slots, block, shares_prefixes and not model.config.is_recurrent)
        self._lanes: dict[int, DraftLane] = {}  # by request
        self._can_go_ahead = model.device != HOST and self._pool.states is None

    def warm_up(self, usual: Usual, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compute the forwards of usual requests before the first one arrives (see ``model.warm_up``)."""

        def use(forward: FirstForward, hidden_RE: Tensor) -> None:
            to_host(self._model.logits(hidden_RE[-forward.num_judged :]).log_softmax(-1).topk(1).indices)

        warm_up(self._model, self._pool, usual, use, progress)

    @property
    def num_lanes(self) -> int:
        """Requests that have a cache."""
        return len(self._lanes)

    @property
    def used_slots(self) -> int:
        """KV cache entries of running requests; shared ones count once."""
        return self._kv.used_slots

    @property
    def cache_slots(self) -> int:
        """KV cache entries that there are for all requests together."""
        return self._pool.slots

    def open_lane(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """Open the lane of a request. Returns how many of ``token_ids`` are cached, or all of them if there is no memory."""
        if not self._has_states_for(sequence):
            return len(token_ids)
        left = sequence.max_tokens - (len(token_ids) - sequence.prompt_length)
        lease = self._kv.allocate(number, token_ids, len(token_ids) + min(left, _MAX_RESERVED))
        lease = lease or self._kv.allocate(number, token_ids, len(token_ids))
        if lease is None:
            return len(token_ids)
        cache = KVCache(self._pool, lease.slots, lease.cached, lease.copied)
        predictor = TokenPredictor.of(sampling, self._vocab_size, self._model.device, self._tokens)
        self._lanes[number] = DraftLane(cache, sequence, self._model.device, predictor)
        return lease.cached

    def _has_states_for(self, sequence: ThreadSequence) -> bool:
        """Whether recurrent layers, if there are any, have memory for an answer. They follow none in several threads."""
        return self._pool.states is None or (self._pool.states.free[0] > 0 and not sequence.can_fork)

    def close_lane(self, number: int) -> None:
        """Drop the lane of a request, if it has one."""
        if (lane := self._lanes.pop(number, None)) is not None:
            lane.cache.close()
            self._kv.free(number)

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """Run one forward over rows of several trees, and the next chunks of other requests' prompts (see ``Drafter.expand``), or
        those of ``num_forwards``. Raises ValueError if rows of a tree are not ascending, one was drafted before, or an ancestor
        was not, nor is among them; and UserError if a structure cannot be followed. Then no lane has changed.
        """
        if not self._can_go_ahead:
            return self._computed(requested, prompts)
        ahead = [self._has_ahead(entry) for entry in requested]
        left = [entry for entry, is_ahead in zip(requested, ahead, strict=True) if not is_ahead]
        computed = iter(self._computed(left, prompts) if left or prompts else ())  # may raise, and so comes first
        return [
            self._lanes[entry.number].take_ahead(entry) if is_ahead else next(computed)
            for entry, is_ahead in zip(requested, ahead, strict=True)
        ]

    def _has_ahead(self, entry: DraftRows) -> bool:
        """Whether its rows were drafted ahead."""
        lane = self._lanes.get(entry.number)
        return lane is not None and lane.has_ahead(entry)

    def num_forwards(self, requested: Sequence[DraftRows]) -> int:
        """See ``Drafter``. On a device that is not the host, later forwards are computed with the first, so that the host waits
        once, if all requests can say what they are: the draft model alone proposes to them, and it draws nothing, follows no
        structure and no threads.
        """
        if not self._can_go_ahead:
            return 1
        requested = [entry for entry in requested if not self._has_ahead(entry)]
        if not requested:
            return 0
        lanes = [self._lanes.get(entry.number) for entry in requested]
        growths = [entry.growth for entry in requested if entry.growth is not None]
        if len(growths) < len(requested) or not all(lane is not None and lane.can_go_ahead for lane in lanes):
            return 1
        if len(growths) > 1 and sum(growth.rows for growth in growths) > DRAFT_KNEE:
            return 1
        return 1 + max(growth.forwards for growth in growths)

    def _computed(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """``expand`` for rows that were not drafted ahead."""
        goes_ahead = self.num_forwards(requested) > 1
        drafting: dict[int, Entering] = {}
        for number, entries in groupby(requested, attrgetter("number")):
            of_request = list(entries)
            if self._fit(number, of_request):
                drafting[number] = self._lanes[number].enter(of_request)
        entering = [self._lanes[number].enter_prompt(chunk) for number, chunk in prompts.items() if number in self._lanes]
        entering += drafting.values()
        answered = [entry for entry in requested if entry.number in self._lanes]
        allowed = [self._lanes[entry.number].allowed(entry) for entry in answered]  # may raise, and so comes first
        if entering:
            token_ids = to_device(torch.tensor([token for one in entering for token in one.token_ids]), self._model.device)
            hidden_RE = self._forward(token_ids, [one.rows for one in entering])
        for number in prompts.keys() & self._lanes.keys():
            self._lanes[number].settle_prompt(prompts[number])
        for number, entered in drafting.items():
            self._lanes[number].settle(entered)
        for number in (*prompts, *drafting):
            self._share(number)
        candidates = self._candidates(hidden_RE[_drafted(entering)], answered, allowed) if answered else []
        found = iter(self._grown(answered, candidates) if goes_ahead and answered else candidates)
        return [next(found) if entry.number in self._lanes else self._no_candidates(entry) for entry in requested]

    def _forward(self, token_ids: Tensor, rows: Sequence[LaneRows]) -> Tensor:
        """hidden_RE of rows of some lanes; their token ids are the target's."""
        return self._model.forward(token_ids if self._vocabulary is None else self._vocabulary.draft_ids[token_ids], rows)

    def _grown(self, requested: Sequence[DraftRows], candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        """``candidates`` on the host, which waits once, for those of the next forwards, too: computed if there is memory."""
        choices = min(max([entry.children for entry in requested]), self._num_known)
        growing = [self._lanes[entry.number].growing(entry, min(entry.children, choices)) for entry in requested]
        for one, found in zip(growing, candidates, strict=True):
            one.add(found.token_ids, found.log_probs)
        going = growing if all([self._extend(one.requested.number, sum(one.counts)) for one in growing]) else []
        while going := [one for one in going if one.next_count]:
            caches = [self._lanes[one.requested.number].cache for one in going]
            chosen = [one.choose(cache.past_length) for one, cache in zip(going, caches, strict=True)]
            rows = [LaneRows(places, cache, seen) for (_, places, seen), cache in zip(chosen, caches, strict=True)]
            hidden_RE = self._forward(torch.cat([tokens for tokens, _, _ in chosen]), rows)
            top = self._likeliest(self._log_probs(hidden_RE), choices)
            for one, ids, chances in zip(going, *(part.split([lane.num_rows for lane in rows]) for part in top), strict=True):
                one.add(ids[:, : one.requested.children], chances[:, : one.requested.children])
        forwards = brought(growing)
        for one, (_, *ahead) in zip(growing, forwards, strict=True):
            self._lanes[one.requested.number].settle_ahead(one.rows, ahead)
        return [
            Candidates(found.rows, own[0].token_ids, own[0].log_probs) for found, own in zip(candidates, forwards, strict=True)
        ]

    def _fit(self, number: int, entries: Sequence[DraftRows]) -> bool:
        """Whether there is memory for rows of a request and its chains. If not, its lane is closed."""
        lane = self._lanes.get(number)
        if lane is None:
            return False
        more = lane.next_length - lane.cache.length + sum([len(entry.rows) for entry in entries])
        if not self._pool.has_room(more) or not self._extend(number, more):
            self.close_lane(number)
            return False
        return True

    def _extend(self, number: int, rows: int) -> bool:
        """Give a lane the slots for so many more rows. Returns False if there is no memory."""
        cache = self._lanes[number].cache
        slots = self._kv.grow(number, cache.length + rows)
        cache.extend(slots or ())
        return slots is not None

    def _share(self, number: int) -> None:
        """Let other requests adopt the tokens added to a lane's past."""
        if (lane := self._lanes.get(number)) is not None and (added := lane.take_added()):
            self._kv.extend(number, added)

    def _candidates(
        self, hidden_FE: Tensor, requested: Sequence[DraftRows], allowed: Sequence[list[Bitmask]]
    ) -> list[Candidates]:
        """The most probable next tokens of the rows of ``requested``, of those that are ``allowed``."""
        counts = [len(entry.rows) for entry in requested]
        log_probs_FV = self._log_probs(hidden_FE)
        for entry, log_probs_RV, of_entry in zip(requested, log_probs_FV.split(counts), allowed, strict=True):
            if of_entry:
                log_probs_RV.copy_(self._among(log_probs_RV, of_entry))
            log_probs_RV.copy_(self._lanes[entry.number].predicted(entry, log_probs_RV))
        tokens, log_probs = self._likeliest(log_probs_FV, min(max([entry.children for entry in requested]), self._num_known))
        rows_F = torch.tensor([row for entry in requested for row in entry.rows])
        found = zip(requested, rows_F.split(counts), tokens.split(counts), log_probs.split(counts), strict=True)
        return [Candidates(rows, ids[:, : entry.children], chances[:, : entry.children]) for entry, rows, ids, chances in found]

    def _log_probs(self, hidden_FE: Tensor) -> Tensor:
        """[F, V], the draft's distribution; −∞ for tokens that the target does not have."""
        log_probs_FV = self._model.logits(hidden_FE).log_softmax(-1)
        return log_probs_FV if self._vocabulary is None else log_probs_FV.masked_fill_(self._is_unknown, -torch.inf)

    def _likeliest(self, log_probs_FV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The target's ids of the most probable tokens, and their log-probabilities: [F, count] each."""
        top = log_probs_FV.topk(count)
        return top.indices if self._vocabulary is None else self._vocabulary.tokens[top.indices], top.values

    def _among(self, log_probs_RV: Tensor, allowed: Sequence[Bitmask]) -> Tensor:
        """The distribution over the allowed tokens. −∞ for the others, and for the whole of a row without allowed ones."""
        allowed_RV = allowed_tokens(allowed, self._vocab_size, log_probs_RV.device)
        if self._tokens is not None:
            allowed_RV = allowed_RV[:, self._tokens] & ~self._is_unknown
        return log_probs_RV.masked_fill(~allowed_RV, -torch.inf).log_softmax(-1).masked_fill(~allowed_RV, -torch.inf)

    def _no_candidates(self, requested: DraftRows) -> Candidates:
        """No tokens for rows that are not computed."""
        nothing = torch.zeros(len(requested.rows), 0, device=self._model.device)
        return Candidates(torch.tensor(requested.rows), nothing.long(), nothing)

    def follow_tree(self, number: int, thread: int, changes: RowChanges) -> None:
        """Commit and prune cache entries in the same way as the thread's tree."""
        if (lane := self._lanes.get(number)) is not None:
            lane.follow_tree(thread, changes)
            self._share(number)

    def threads_changed(self, number: int) -> None:
        """Follow threads of a request that were opened, joined or ended."""
        if (lane := self._lanes.get(number)) is not None:
            lane.threads_changed()

    def forget_prefixes(self) -> None:
        """Let requests that open from now on compute their prompts, except for prefixes of running ones."""
        self._kv.forget_kept()


def _drafted(entering: Sequence[Entering]) -> slice | list[int]:
    """The requested rows of a forward: the last ones of each lane."""
    if len(entering) == 1:
        return slice(entering[0].rows.num_rows - len(entering[0].drafted), None)
    drafted, end = list[int](), 0
    for one in entering:
        end += one.rows.num_rows
        drafted += range(end - len(one.drafted), end)
    return drafted
