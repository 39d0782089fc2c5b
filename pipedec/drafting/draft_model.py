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

from pipedec.core.sampling import SamplingParams
from pipedec.device import to_device, to_host
from pipedec.drafting.lane import DraftLane, Entering
from pipedec.families import StateCounts
from pipedec.grammar import Bitmask
from pipedec.grammar.masks import allowed_tokens
from pipedec.kv import KVManager
from pipedec.model import DraftVocabulary, FirstForward, KVCache, StageModel, Usual, warm_up
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
        """Run one forward over rows of several trees, and the next chunks of other requests' prompts (see ``Drafter.expand``).
        Raises ValueError if rows of a tree are not ascending, one was drafted before, or an ancestor was not, nor is among them;
        and UserError if a structure cannot be followed. Then no lane has changed.
        """
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
            inputs = token_ids if self._vocabulary is None else self._vocabulary.draft_ids[token_ids]
            hidden_RE = self._model.forward(inputs, [one.rows for one in entering])
        for number in prompts.keys() & self._lanes.keys():
            self._lanes[number].settle_prompt(prompts[number])
        for number, entered in drafting.items():
            self._lanes[number].settle(entered)
        for number in (*prompts, *drafting):
            self._share(number)
        found = iter(self._candidates(hidden_RE[_drafted(entering)], answered, allowed) if answered else ())
        return [next(found) if entry.number in self._lanes else self._no_candidates(entry) for entry in requested]

    def _fit(self, number: int, entries: Sequence[DraftRows]) -> bool:
        """Whether there is memory for rows of a request and its chains. If not, its lane is closed."""
        lane = self._lanes.get(number)
        if lane is None:
            return False
        length = lane.next_length + sum([len(entry.rows) for entry in entries])
        slots = self._kv.grow(number, length) if self._pool.has_room(length - lane.cache.length) else None
        if slots is None:
            self.close_lane(number)
            return False
        lane.cache.extend(slots)
        return True

    def _share(self, number: int) -> None:
        """Let other requests adopt the tokens added to a lane's past."""
        if (lane := self._lanes.get(number)) is not None and (added := lane.take_added()):
            self._kv.extend(number, added)

    def _candidates(
        self, hidden_FE: Tensor, requested: Sequence[DraftRows], allowed: Sequence[list[Bitmask]]
    ) -> list[Candidates]:
        """The most probable next tokens of the rows of ``requested``, of those that are ``allowed``."""
        counts = [len(entry.rows) for entry in requested]
        log_probs_FV = self._model.logits(hidden_FE).log_softmax(-1)
        if self._vocabulary is not None:
            log_probs_FV.masked_fill_(self._is_unknown, -torch.inf)
        for entry, log_probs_RV, of_entry in zip(requested, log_probs_FV.split(counts), allowed, strict=True):
            if of_entry:
                log_probs_RV.copy_(self._among(log_probs_RV, of_entry))
            log_probs_RV.copy_(self._lanes[entry.number].predicted(entry, log_probs_RV))
        top = log_probs_FV.topk(min(max([entry.children for entry in requested]), self._num_known))
        tokens = top.indices if self._vocabulary is None else self._vocabulary.tokens[top.indices]
        rows_F = torch.tensor([row for entry in requested for row in entry.rows])
        found = zip(requested, rows_F.split(counts), tokens.split(counts), top.values.split(counts), strict=True)
        return [Candidates(rows, ids[:, : entry.children], chances[:, : entry.children]) for entry, rows, ids, chances in found]

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
