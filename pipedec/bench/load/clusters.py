"""Load on a cluster that runs, in real processes and real time; one that emulates devices may run in slow motion."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipedec.bench.load.arrivals import Arrivals
from pipedec.bench.load.questions import Conversation, continued_text
from pipedec.bench.load.served import Outcome, Served
from pipedec.bench.prompts import DrawnPrompt
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.core import UserError

_LONGEST_WAIT = 0.25


@dataclass(frozen=True)
class _Asked:
    """One turn of a conversation: the whole prompt, and what the user says in the turns behind it."""

    prompt: DrawnPrompt
    turn: int
    left: Conversation

    def following(self, answer: str) -> _Asked | None:
        if not self.left:
            return None
        return _Asked(continued_text(self.prompt, answer, self.left[0]), self.turn + 1, self.left[1:])


@dataclass
class _Crowd:
    """Requests at the cluster, and what became of those that have ended. Times are divided by ``slow_motion``."""

    client: Client
    slow_motion: float
    began: float = field(default_factory=time.perf_counter)
    submitted: int = 0
    replies: dict[int, tuple[int, _Asked]] = field(default_factory=dict)  # open, by number: order of submission
    served: dict[int, Served] = field(default_factory=dict)
    overran: int = 0
    timesteps: int = 0

    def now(self) -> float:
        return (time.perf_counter() - self.began) / self.slow_motion

    def submit(self, asked: _Asked) -> None:
        order, prompt = self.submitted, asked.prompt
        self.submitted += 1
        try:
            self.replies[self.client.submit(prompt.request).number] = order, asked
        except UserError as error:  # the queue is full
            now = self.now()
            self.served[order] = Served(prompt.prompt_set, prompt.index, 0, now, (), now, turn=asked.turn, refused=str(error))

    def end(self, reply: Reply) -> None:
        """An answer is complete, or was refused; then the next turn of its conversation is submitted."""
        order, asked = self.replies.pop(reply.number)
        prompt = asked.prompt
        submitted = (reply.arrivals.submitted - self.began) / self.slow_motion
        events = tuple((submitted + at / self.slow_motion, tokens) for at, tokens in reply.arrivals.events)
        if reply.completion is None:
            self.served[order] = Served(
                prompt.prompt_set, prompt.index, 0, submitted, events, self.now(), turn=asked.turn, refused=str(reply.error)
            )
            return
        metrics = reply.completion.metrics
        self.overran += len(reply.overran)
        self.timesteps += metrics.timesteps
        self.served[order] = Served(
            prompt.prompt_set, prompt.index, reply.completion.prompt_tokens, submitted, events,
            submitted + (metrics.e2e_seconds or 0.0) / self.slow_motion, (metrics.queue_seconds or 0.0) / self.slow_motion,
            metrics.timesteps, metrics.hits, metrics.misses, metrics.draft_tokens, turn=asked.turn,
            cached_tokens=metrics.cached_tokens, pauses=metrics.pauses,
        )  # fmt: skip
        following = asked.following(reply.completion.text)
        if following is not None:
            self.submit(following)


def offer(
    client: Client,
    conversations: Sequence[Conversation],
    arrivals: Arrivals,
    slow_motion: float = 1.0,
    on_end: Callable[[], None] = lambda: None,
) -> Outcome:
    """Offer ``conversations``, in their order, as ``arrivals`` says. What is refused is counted, and the others go on.

    Raises:
        RankLost, SchedulerLost: the cluster died or stopped answering.
    """
    left = deque(_Asked(first, 1, tuple(others)) for first, *others in conversations)
    with client.cancelling():
        crowd = _Crowd(client, slow_motion)
        while left or crowd.replies:
            for _ in arrivals.due(crowd.now(), len(crowd.replies)):
                crowd.submit(left.popleft())
            for reply in client.read(_patience(arrivals, crowd)):
                crowd.end(reply)
                on_end()
    served = tuple(crowd.served[order] for order in range(crowd.submitted))
    return Outcome(served, overran=crowd.overran / max(1, crowd.timesteps))


def _patience(arrivals: Arrivals, crowd: _Crowd) -> float:
    """Seconds to wait for events before the next request is due."""
    due = arrivals.next_seconds()
    if due is None:
        return _LONGEST_WAIT
    return min(_LONGEST_WAIT, max(0.001, (due - crowd.now()) * crowd.slow_motion))
