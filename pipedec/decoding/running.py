"""A request in the company: what of its prompt has entered, how many slots of KV memory its rows take, and its method.

A request has a *lane* on the stages from its first rows on. Before, and after it was paused, it waits for memory. An answer in
one thread goes on behind what it has said; an answer in several threads begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipedec.core import Opening, Request, Step
from pipedec.decoding.budget import Claim, Wish
from pipedec.decoding.method import Method
from pipedec.kv import Lease
from pipedec.threads import NewSequence
from pipedec.threads import Sequence as ThreadSequence


class Running:
    """One request.

    Args:
        new_sequence: makes the sequence of its answer, with the tokens in it that ``request.said`` names.
        new_method: makes its method.

    Attributes:
        sequence: of its answer. Only the method passes accepted tokens to it.
        text: prompt, and what was said before the lane opened.
        entered: how many tokens of it have entered, or were cached.
        drafted: how many of them are in the draft model's cache.
        told: how many tokens others may adopt, of the text and of what follows.
        cached_tokens: of the prompt, when the first lane opened.
        has_lane: whether the stages have a lane for it, as far as they have been told.
        is_closing: whether stages may still have a lane that was paused.
        is_prefilling: whether something of the text, or of the masks behind it, has yet to enter.
        rests: nothing of it enters, and nothing is drafted for it, before the next verdict.
    """

    def __init__(
        self, request: Request, new_sequence: NewSequence, new_method: Callable[[Request, ThreadSequence], Method]
    ) -> None:
        self.request = request
        self.number = request.number
        self.sequence = new_sequence()
        self.cached_tokens: int | None = None
        self.has_lane = False
        self.is_closing = False
        self._new_sequence = new_sequence
        self._new_method = new_method
        self._begin()

    def _begin(self) -> None:
        """Wait for a lane."""
        said = [] if self.sequence.can_fork else self.sequence.main.token_ids
        self.text = [*self.request.prompt_token_ids, *said]
        self.entered = 0
        self.drafted = 0
        self.told = 0
        self.is_prefilling = True
        self.rests = False
        self._method: Method | None = None
        self._hits, self._misses = 0, 0

    @property
    def age(self) -> tuple[int, int]:
        """Lower ones are served first."""
        return self.request.priority, self.number

    @property
    def method(self) -> Method:
        """The present method. It counts the hits and misses of those before it, too."""
        if self._method is None:
            self._method = self._new_method(self.request, self.sequence)
            self._method.hits, self._method.misses = self._hits, self._misses
        return self._method

    @property
    def is_drafted(self) -> bool:
        """Whether the whole text has entered, and the draft model has computed it if the method uses it."""
        return not self.is_prefilling and self.drafted >= len(self.text)

    @property
    def undrafted(self) -> Sequence[int]:
        """Tokens of the text that have entered and are not in the draft model's cache."""
        return self.text[self.drafted : self.entered]

    def to_reserve(self, ahead: int) -> int:
        """Slots for a lane: the text, at most ``ahead`` tokens that follow, and the rows that must enter together."""
        left = self.request.sampling.max_tokens - (len(self.text) - self.sequence.prompt_length)
        return len(self.text) + min(left, ahead) + max(self.method.together, self.method.masks.count)

    @property
    def most(self) -> int:
        """Slots that suffice to the end of an answer in one thread."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens + self.method.together

    @property
    def past(self) -> int:
        """Slots of tokens that verdicts have accepted, at most. The row of the last one may be in a tree."""
        if self.is_prefilling:
            return self.entered
        sequence = self.sequence
        if not sequence.can_fork:
            return max(self.entered, sequence.prompt_length + sequence.main.num_tokens - 1)
        pending = sum(thread.pending is not None for thread in sequence.threads)
        return sequence.prompt_length + sum(sequence.needed()) + pending

    def certain_rows(self, wish: Wish) -> int:
        """Rows of a wish that are certain or must enter together, at most: threads may share the rows of a step otherwise."""
        if wish.whole and self.sequence.can_fork:
            return self.method.together
        return wish.whole or wish.certain

    def claim(self, cached: int = 0) -> Claim:
        """What it would let enter at the next timestep.

        Args:
            cached: of a request without a lane: how many tokens need not enter.
        """
        priority, number = self.age
        if self.rests and self.has_lane:
            return Claim(number, priority)
        if not self.is_prefilling:
            return Claim(number, priority, self.method.wish())
        rows, tail = len(self.text) + self.method.masks.count - (self.entered or cached), self._tail
        if rows <= tail:
            return Claim(number, priority, Wish(whole=rows))
        return Claim(number, priority, prompt=rows, tail=tail)

    @property
    def _tail(self) -> int:
        """Rows that enter together: the masks enter with the last token."""
        return 1 + self.method.masks.count

    def open(self, lease: Lease, drafted: int) -> Opening:
        """Begin a lane.

        Args:
            drafted: tokens that are in the draft model's cache already.
        """
        self.has_lane = True
        self.entered = self.told = lease.cached
        self.drafted = drafted if self.method.has_drafter else len(self.text)
        if self.cached_tokens is None:
            self.cached_tokens = min(lease.cached, self.sequence.prompt_length)
        request, said = self.request, self.text[self.sequence.prompt_length :]
        return Opening(
            self.sequence.prompt_length, request.sampling, self.method.masks.named, request.threads, request.trace, tuple(said),
            lease.slots, lease.cached, lease.copied,
        )  # fmt: skip

    def pause(self, is_closing: bool = True) -> None:
        """Give up the lane, and wait for another one; also for another method, if it has no lane.

        Args:
            is_closing: whether stages have yet to close the lane.
        """
        method = self.method
        self.has_lane, self.is_closing = False, is_closing
        if self.sequence.can_fork:
            self.sequence = self._new_sequence()
            self._begin()
        else:
            self._begin()
            self._hits, self._misses = method.hits, method.misses

    def next_chunk(self, rows: int) -> Step | None:
        """Take up to ``rows`` rows of the text, and the masks behind it; None if there is no room for the last token's masks."""
        masks = self.method.masks.count
        left = len(self.text) + masks - self.entered
        rows = left if left <= rows else min(rows, left - self._tail)
        if rows <= 0:
            return None
        chunk = self.text[self.entered : self.entered + rows]
        self.entered += len(chunk)
        self.is_prefilling = left > rows
        chunk += range(-1, -1 - (rows - len(chunk)), -1)
        token_ids = torch.tensor(chunk, dtype=torch.int64)
        return Step(token_ids, torch.full_like(token_ids, -1))

    def take_told(self) -> Sequence[int]:
        """The tokens that others may adopt from the next timestep on, and could not before: all of them are in the past."""
        prompt, answer = self.request.prompt_token_ids, self.sequence.main.token_ids
        certain = min(self.past, len(prompt)) if self.sequence.can_fork else self.past
        first, self.told = self.told, certain
        return [*prompt[first:certain], *answer[max(first - len(prompt), 0) : max(certain - len(prompt), 0)]]
