"""How parallel an answer is, and what its threads save (APAR Tables 1 and 2, PASTA §5.1).

Counts tokens of the document, up to the cut at max_tokens, so nothing here depends on which thread was decoded when. A *step*
is the earliest moment at which a token can be known if every thread decodes one token per step: forced tokens take none, and a
join token enters when all it joins are known.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from pipedec.threads.document import DocumentToken
from pipedec.threads.sequence import Sequence

Steps = dict[int, list[int]]


@dataclass(frozen=True)
class ThreadMetrics:
    """Of one answer, finished or not. *Flat* is the same text written without control tokens by one thread.

    Attributes:
        threads: with the main thread, as APAR counts.
        tokens: all of them; ``text_tokens`` are those that are not control.
        longest_chain: tokens that must be decoded one after another.
        parallelism: text tokens / longest chain (PASTA's theoretical parallelism).
        attended_tokens: prompt and answer tokens seen when predicting a text token, the mean (APAR Table 2).
        max_cached_tokens: cache slots needed at the worst step, if a slot is free when no later token sees it (APAR Table 1).
    """

    threads: int
    tokens: int
    text_tokens: int
    longest_chain: int
    parallelism: float
    attended_tokens: float
    attended_tokens_flat: float
    max_cached_tokens: int
    max_cached_tokens_flat: int

    def theoretical_speedup(self, baseline_tokens: int) -> float:
        """Tokens of a sequential answer to the same prompt / longest chain (PASTA §5.1)."""
        return baseline_tokens / self.longest_chain if self.longest_chain else 0.0


def measure(sequence: Sequence) -> ThreadMetrics:
    """The metrics of what is known of an answer."""
    written = sequence.document()
    text = [token for token in written if not token.is_control]
    steps = _steps(sequence, written)
    longest_chain = max((thread_steps[-1] for thread_steps in steps.values()), default=0)
    prompt, count = sequence.prompt_length, len(text)
    attended = sum(_attended(sequence, token) for token in text)
    return ThreadMetrics(
        threads=max(1, len(steps)),
        tokens=len(written),
        text_tokens=count,
        longest_chain=longest_chain,
        parallelism=count / longest_chain if longest_chain else 0.0,
        attended_tokens=prompt + attended / count if count else 0.0,
        attended_tokens_flat=prompt + (count - 1) / 2 if count else 0.0,
        max_cached_tokens=prompt + _most_cached(steps, _last_seen(sequence, steps), longest_chain),
        max_cached_tokens_flat=prompt + count,
    )


def _steps(sequence: Sequence, written: list[DocumentToken]) -> Steps:
    """The step of every token of every thread; in document order all that a token waits for comes before it."""
    steps: Steps = defaultdict(list)
    for token in written:
        thread, own = sequence.threads[token.thread], steps[token.thread]
        opened_by = None if own else thread.parent  # of a forced token, which enters with its opener
        before = own if opened_by is None else steps[opened_by]
        joined = (number for join in thread.joins if join.index == token.ordinal for number, _ in join.context)
        step = (before[-1] if before else 0) + (opened_by is None)
        own.append(max([step, *(steps[number][-1] for number in joined)]))
    return dict(steps)


def _attended(sequence: Sequence, token: DocumentToken) -> int:
    """Answer tokens that the row before ``token`` in its thread sees."""
    if token.ordinal == 0:
        return 0
    return sum(count for _, count in sequence.sees(token.thread, token.ordinal - 1))


def _last_seen(sequence: Sequence, steps: Steps) -> Steps:
    """The last step at which a token that sees it is predicted, for every token; 0 if none is."""
    last = {number: [0] * len(own) for number, own in steps.items()}
    for number, own in steps.items():
        thread = sequence.threads[number]
        if len(own) > 1:
            last[number][-2] = max(last[number][-2], own[-1])
        starts = [0, *(join.index for join in thread.joins if join.index < len(own))]
        for start, end in zip(starts, [*starts[1:], len(own)], strict=True):
            for other, count in thread.context(start):
                last[other][count - 1] = max(last[other][count - 1], own[end - 1])
    return {number: list(accumulate(reversed(seen), max))[::-1] for number, seen in last.items()}


def _most_cached(steps: Steps, last: Steps, longest_chain: int) -> int:
    """Most tokens that are known before a step and seen in it or later."""
    changes = [0] * (longest_chain + 2)
    for number, own in steps.items():
        for step, seen in zip(own, last[number], strict=True):
            if seen > step:
                changes[step + 1] += 1
                changes[seen + 1] -= 1
    return max(accumulate(changes))
