"""A request that runs on rank 0: its prompt and answer, the lane that it has on the stages, and its method.

It has a *lane* from its first rows on. Before that, and while it is paused, it waits for memory. After a pause, an answer in one
thread continues after its last token; an answer in several threads starts over. Knows no other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol, TypeVar

import torch

from pipedec.core.completion import Metrics
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.stage_message import NewRequest, SlotRuns, Step
from pipedec.core.verdict import Verdict
from pipedec.decoding.budget import Claim, Demand
from pipedec.decoding.method import DraftRoom, Method, Resources, new_method
from pipedec.kv import Lease
from pipedec.methods import find_method, make_options
from pipedec.threads import NewSequence
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import apply_verdict, is_mask

_DRAFTLESS = {"proposers": ["ngrams"]}  # options of the default method while it replaces one whose draft model is being loaded

_T = TypeVar("_T")


class Phase(Enum):
    """``PAUSING``: it waits, and some stages have yet to close its lane. The same holds for ``ENDED`` at first."""

    WAITING = "waiting"  # for memory
    PREFILLING = "prefilling"  # some of its text, or of the masks after it, has yet to enter
    RUNNING = "running"
    PAUSING = "pausing"
    ENDED = "ended"


class AnswerText(Protocol):
    """The text of an answer, if rank 0 has a tokenizer."""

    def cut(self, verdict: Verdict) -> Verdict:
        """Read the accepted tokens. Returns the verdict, cut where the text ends the answer (stop strings)."""


class OnceEach:
    """Things in order that come again, from the first one on, whenever a lane is opened: only the new ones count."""

    def __init__(self) -> None:
        self._known = self._come = 0

    def lane_opened(self) -> None:
        self._come = 0

    def new(self, things: tuple[_T, ...]) -> tuple[int, tuple[_T, ...]]:
        """Those of the next ``things`` that have not come before, and the number of all before them."""
        first, known = self._known, max(self._known - self._come, 0)
        self._come += len(things)
        self._known = max(first, self._come)
        return first, things[known:]


class Request:
    """One running request. Raises UserError if its method cannot run here, or its prompt is empty.

    Args:
        new_sequence: makes the sequence of its answer with earlier tokens, again if an answer in several threads is paused.
        text: None if nothing but tokens ends the answer.

    Attributes:
        asked: the request as it arrived.
        sequence: of its answer. Only this object passes accepted tokens to it.
        method: of the whole answer.
        opening: of its lane; None without one.
        tokens: those that enter before rows of trees: the prompt and, in one thread, earlier tokens of the answer.
        adopts: tokens that may be adopted from other requests.
        entered: how many of ``tokens`` have entered, or were cached.
        drafted: how many of them are in the draft model's cache.
        past: maximum slots of tokens that verdicts have accepted. The row of the last one may be in a tree.
        new_slots: of its lane, which the stages do not know yet.
        free_slots: of its lane, without rows; set in every timestep in which it may get rows.
        waited: timesteps for which rows that must enter have waited.
        unreplayed: a verdict that the stages have yet to replay.
        is_known: whether the stages know of it. False after all lanes were lost.
        is_idle: whether no rows enter or are drafted before the next verdict.
        stays_draftless: whether it goes on without the draft model, since its own method needs more memory than there is.
        scored: the log-probabilities of the prompt's tokens, which come again after a pause.
        read: their hidden states, likewise.
    """

    def __init__(
        self, asked: TokenizedRequest, new_sequence: NewSequence, resources: Resources, text: AnswerText | None = None
    ) -> None:
        if not asked.prompt_token_ids:
            raise UserError("the prompt is empty: give at least one token")
        if asked.sampling.computes_prompt and asked.threads is not None:
            name = "prompt_hidden_states" if asked.sampling.prompt_hidden_states else "prompt_logprobs"
            raise UserError(f"{name} needs an answer in one thread: leave it, or threads, out")
        self.asked = asked
        self.number = asked.number
        self.priority = asked.priority
        self.text = text
        self.metrics = Metrics(resumed_tokens=len(asked.output_token_ids))
        self.phase = Phase.WAITING
        self.sequence = new_sequence()
        self.opening: NewRequest | None = None
        self.unreplayed: Verdict | None = None
        self.waited = 0
        self.is_known = False
        self.stays_draftless = False
        self.scored, self.read = OnceEach(), OnceEach()
        self.new_sequence = new_sequence
        self._resources = resources
        self._num_lanes = 0  # so far
        self.began = 0.0  # in seconds
        self._first_verdict: tuple[int, float] | None = None  # its timestep, and when it came, in seconds
        self.begin()

    def begin(self) -> None:
        """Set the tokens that enter first, and a new method: one without the draft model while that is being loaded, or if the
        request's own method needs more memory than there is.
        """
        accepted = [] if self.sequence.can_fork else self.sequence.main.token_ids
        self.tokens = [*self.asked.prompt_token_ids, *accepted]
        self.adopts: Sequence[int] = () if self.asked.sampling.computes_prompt else self.tokens
        self.entered = self.drafted = self.past = self._adoptable = 0
        self.new_slots: SlotRuns = ()
        self.free_slots = 0
        self.is_idle = False
        request = self.asked
        if (self._resources.awaits_drafter or self.stays_draftless) and find_method(request.method).draft != "none":
            request = replace(request, method=DEFAULT_METHOD, options=make_options(DEFAULT_METHOD, _DRAFTLESS))
        self.method: Method = _method_of(request, self.sequence, self._resources)
        prompt, answer = len(self.asked.prompt_token_ids), self.asked.sampling.max_tokens
        self.most = prompt + answer + self.method.together  # slots in one thread

    # Its lane and memory

    @property
    def has_lane(self) -> bool:
        """Whether the stages have a lane for it, or are about to open one."""
        return self.phase is Phase.PREFILLING or self.phase is Phase.RUNNING

    @property
    def fills(self) -> bool:
        """Whether rows enter while others are in flight."""
        return self.method.fills or self.phase is not Phase.RUNNING

    @property
    def lacks_drafter(self) -> bool:
        """Whether another method runs until the draft model is loaded."""
        return self.method.request is not self.asked

    @property
    def has_advanced(self) -> bool:
        """Whether a verdict has come since the lane was opened."""
        return self.sequence.main.num_tokens > len(self.tokens) - self.sequence.prompt_length

    def to_reserve(self, ahead: int) -> int:
        """Slots for a lane: the tokens that enter first, at most ``ahead`` more, and the rows that must enter together."""
        left = self.asked.sampling.max_tokens - (len(self.tokens) - self.sequence.prompt_length)
        return len(self.tokens) + min(left, ahead) + max(self.method.together, self.method.masks.count)

    def open(self, lease: Lease) -> NewRequest:
        """Open the lane, on the stages and in the draft model. Returns the message for the stages."""
        if not self._num_lanes:
            self.metrics.cached_tokens = min(lease.cached, self.sequence.prompt_length)
        self._num_lanes += 1
        self.entered = self.past = self._adoptable = lease.cached
        self.scored.lane_opened()
        self.read.lane_opened()
        self.method.lane_opened()
        drafter, asked = self.method.drafter, self.asked
        self.drafted = len(self.tokens)
        if drafter is not None:
            self.drafted = drafter.open_lane(self.number, self.sequence, self.tokens, asked.sampling)
        accepted = self.tokens[self.sequence.prompt_length :]
        self.opening = NewRequest(
            self.sequence.prompt_length, asked.sampling, self.method.masks.named, asked.threads, asked.trace, tuple(accepted),
            lease.slots, lease.cached, lease.copied, lease.snapshot, lease.snapshots,
        )  # fmt: skip
        return self.opening

    def leave_lane(self) -> None:
        """Close the lane in the draft model. Its memory is the caller's to free."""
        self.opening, self.new_slots, self.waited = None, (), 0
        if self.method.drafter is not None:
            self.method.drafter.close_lane(self.number)

    def begin_again(self, phase: Phase) -> None:
        """Wait for another lane, with a new method. An answer in threads starts over."""
        self.phase = phase
        if self.sequence.can_fork:
            self.sequence = self.new_sequence()
            self.metrics.hits = self.metrics.misses = 0
        self.begin()

    def adoptable(self) -> Sequence[int]:
        """The tokens that others may adopt from the next timestep on, and could not before. All of them are in the past."""
        prompt, answer = self.asked.prompt_token_ids, self.sequence.main.token_ids
        certain = min(self.past, len(prompt)) if self.sequence.can_fork else self.past
        if certain == self._adoptable:
            return ()
        first, self._adoptable = self._adoptable, certain
        return [*prompt[first:certain], *answer[max(first - len(prompt), 0) : max(certain - len(prompt), 0)]]

    # The rows that enter

    def claim(self, cached: int = 0) -> Claim:
        """The rows that it wants to enter at the next timestep; without a lane, all of its tokens but ``cached`` ones."""
        if self.is_idle and self.has_lane:
            return Claim(self.number, self.priority, waited=self.waited)
        if self.phase is Phase.RUNNING:
            return Claim(self.number, self.priority, self.method.demand(), waited=self.waited)
        masks = self.method.masks.count
        rows, tail = len(self.tokens) + masks - (self.entered or cached), 1 + masks
        if rows <= tail:  # the masks enter with the last token
            return Claim(self.number, self.priority, Demand(whole=rows), waited=self.waited)
        return Claim(self.number, self.priority, prompt=rows, tail=tail, waited=self.waited)

    def enter_chunk(self, rows: int) -> Step | None:
        """The next rows of its tokens, at most ``rows``, and the masks after them; None if there is no room for the last token's
        masks. They end where states are kept: no chunk has rows on both sides.
        """
        masks, tally, snapshots = self.method.masks.count, self._resources.tally, self.opening.snapshots if self.opening else ()
        left = len(self.tokens) + masks - self.entered
        rows = min([rows, *(tokens - self.entered for tokens, _ in snapshots if tokens > self.entered)])
        rows = left if left <= rows else min(rows, left - 1 - masks)
        if rows <= 0:
            return None
        chunk = self.tokens[self.entered : self.entered + rows]
        self.entered += len(chunk)
        self.past = self.entered
        if left <= rows:
            self.phase = Phase.RUNNING
            self.past = max(self.entered, self.sequence.num_past)
        tally.prompt_rows += len(chunk)
        tally.mask_rows += rows - len(chunk)
        chunk += range(-1, -1 - (rows - len(chunk)), -1)
        token_ids = torch.tensor(chunk, dtype=torch.int64)
        return Step(token_ids, torch.full_like(token_ids, -1))

    def enter_rows(self, room: int) -> Step | None:
        """The rows of its trees that enter at the next timestep, or None. At most ``room``; a step that enters whole has the
        demanded rows.
        """
        entering = self.method.enter(room)
        if entering is None:
            return None
        step, tally = entering.step, self._resources.tally
        masks = int(is_mask(step.token_ids).sum()) if self.method.masks.count else 0
        drafts = step.num_rows - entering.roots - masks
        tally.root_rows += entering.roots
        tally.drafts += entering.refills
        tally.mask_rows += masks
        tally.draft_rows += drafts
        self.metrics.draft_tokens += drafts
        return step

    def ask(self, room: DraftRoom) -> list[tuple[Method, Sequence[int]]]:
        """The rows to draft next, by method of a thread. Empty to end drafting."""
        asked = self.method.ask(room)
        if not asked:
            self.is_idle = self.method.is_idle
        return asked

    # Verdicts

    def commit(self, verdict: Verdict) -> None:
        """Advance to the accepted tokens and prune what can no longer be accepted."""
        changes = apply_verdict(self.sequence, verdict)
        hits, misses = self.method.follow(verdict, changes)
        self.metrics.hits += hits
        self.metrics.misses += misses
        self.past = max(self.entered, self.sequence.num_past)
        self.is_idle = False

    def record_times(self, timestep: int, now: float) -> None:
        """Fill the metrics with the times until this verdict. ``now`` in seconds. Timesteps count from the first verdict on."""
        first, prefilled = self._first_verdict = self._first_verdict or (timestep, now)
        self.metrics.timesteps = timestep - first
        self.metrics.prefill_seconds, self.metrics.decode_seconds = prefilled - self.began, now - prefilled

    def texts(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """The accepted tokens of each thread that has any, each after those before them: for the main thread the prompt."""
        main, *others = self.sequence.threads
        texts = [(self.asked.prompt_token_ids, main.token_ids), *(((), thread.token_ids) for thread in others)]
        return [(before, answer) for before, answer in texts if answer]


def _method_of(request: TokenizedRequest, sequence: ThreadSequence, resources: Resources) -> Method:
    """The method of the whole answer. Raises UserError as ``new_method``."""
    if not sequence.can_fork:
        return new_method(request, sequence, resources)
    from pipedec.decoding.threaded import ThreadedMethod  # only answers in threads need it

    return ThreadedMethod(request, sequence, resources)
