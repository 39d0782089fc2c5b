"""A load: conversations drawn from prompt sets, when they arrive, and the methods that answer them.

Knows tokenizers and methods, but no clock, and neither pipelines nor answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, cycle, islice, zip_longest

from msgspec import structs

from pipedec.bench.options import DrawnPrompt, Tokenizes, draw
from pipedec.bench.policy import Policy
from pipedec.core.errors import UserError
from pipedec.data import PromptSet
from pipedec.messages.request import PromptRequest

Conversation = tuple[DrawnPrompt, ...]  # the user's text of each turn, as if it were the first


class Concurrent:
    """Arrivals of requests of which a fixed number is unfinished at any time. Seconds count from the beginning of the load.

    ``left`` is the number of requests that have not been submitted.
    """

    def __init__(self, total: int, concurrency: int) -> None:
        self.left = total
        self._concurrency = concurrency

    def due(self, seconds: float, unfinished: int) -> list[float]:
        """Requests that are to be submitted now, by the times at which they were due; they count as submitted.

        ``unfinished`` requests were submitted and have not ended.
        """
        count = min(self.left, max(0, self._concurrency - unfinished))
        self.left -= count
        return [seconds] * count

    def next_seconds(self) -> float | None:
        """When the next one is due if nothing ends before; None if that depends on ends alone."""
        return None


class AtTimes:
    """Arrivals at given times, ascending, however many requests are unfinished; otherwise like ``Concurrent``."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._times = list(seconds)[::-1]

    @property
    def left(self) -> int:
        return len(self._times)

    def due(self, seconds: float, unfinished: int) -> list[float]:
        due = []
        while self._times and self._times[-1] <= seconds:
            due.append(self._times.pop())
        return due

    def next_seconds(self) -> float | None:
        return self._times[-1] if self._times else None


Arrivals = Concurrent | AtTimes


@dataclass(frozen=True)
class Pattern:
    """Which load is offered: one of the two. Raises UserError if a number is not positive.

    Attributes:
        concurrency: requests that are always unfinished; one that ends is followed by the next.
        rate: mean number of requests per second, whose arrivals are a Poisson process that begins with one.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise UserError(f"--concurrency must be at least 1, not {self.concurrency}")
        if self.rate is not None and not 0 < self.rate < 1e6:
            raise UserError(f"--rate must be above 0 requests per second, not {self.rate:g}")

    @property
    def label(self) -> str:
        return f"{self.concurrency} concurrent" if self.concurrency is not None else f"{self.rate:g}/s"

    def arrivals(self, total: int, seed: int) -> Arrivals:
        """The arrivals of ``total`` requests."""
        if self.concurrency is not None:
            return Concurrent(total, self.concurrency)
        assert self.rate is not None
        gaps = map(random.Random(seed).expovariate, [self.rate] * (total - 1))
        return AtTimes(accumulate(gaps, initial=0.0))


@dataclass(frozen=True)
class OfferedLoad:
    """One load by one method, of at most ``max_num_seqs`` requests in the pipeline; ``on_end`` is called after each answer."""

    policy: Policy
    conversations: Sequence[Conversation]
    arrivals: Arrivals
    max_num_seqs: int
    on_end: Callable[[], None]


def drawn_in_turn(
    prompter: Tokenizes, prompt_sets: Iterable[PromptSet], asked: PromptRequest, count: int, seed: int, turns: int = 1
) -> list[Conversation]:
    """``count`` conversations, one of each set in turn; they begin anew where the sets have fewer prompts.

    The ``turns`` prompts of a conversation follow one another in a set. Those that are left over are not used, unless a set has
    too few for one conversation. Raises UserError like ``draw``.
    """
    sets = list(prompt_sets)
    drawn = draw(prompter, sets, asked, -(-count // len(sets)) * turns, seed)
    by_set: list[list[Conversation]] = []
    for one in sets:
        prompts = [prompt for prompt in drawn if prompt.prompt_set == one.name]
        if len(prompts) < turns:
            prompts = list(islice(cycle(prompts), turns))
        by_set.append([tuple(prompts[first : first + turns]) for first in range(0, len(prompts) - turns + 1, turns)])
    in_turn = [several for several in chain.from_iterable(zip_longest(*by_set)) if several is not None]
    return list(islice(cycle(in_turn), count))


def led_by(system_prompt: str, conversations: Iterable[Conversation], prompter: Tokenizes) -> list[Conversation]:
    """With a text before the first prompt of each conversation. Raises UserError if one no longer fits."""
    led: list[Conversation] = []
    for first, *others in conversations:
        request = structs.replace(first.request, prompt=f"{system_prompt}{first.request.prompt}")
        token_ids = prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens)
        led.append((replace(first, request=request, token_ids=token_ids), *others))
    return led
