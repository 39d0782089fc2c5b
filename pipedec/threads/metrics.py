"""How parallel an answer is, and what its threads save (APAR Tables 1 and 2, PASTA §5.1).

All metrics cover the document, truncated at max_tokens, and so do not depend on the order of decoding. The *step* of a token is
the earliest one in which it can be decoded if every thread decodes one token per step. Forced tokens take no step, and a join
token comes no earlier than the last token of the threads it joins.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from pipedec.threads.sequence import DocumentToken, Sequence

Steps = dict[int, list[int]]


@dataclass(frozen=True)
class ThreadMetrics:
    """Metrics of one answer, finished or not.

    Fields named ``…_flat`` are of the same text without control tokens, decoded by a single thread.

    Attributes:
        threads: number of threads, the main thread included (as in APAR).
        tokens: number of tokens.
        text_tokens: number of tokens that are not control.
        longest_chain: number of tokens that must be decoded one after another.
        parallelism: text tokens / longest chain (PASTA's theoretical parallelism).
        attended_tokens: mean number of prompt and answer tokens attended to when a text token is predicted (APAR Table 2).
        max_cached_tokens: peak number of cache slots, if a slot is freed when no later token attends to it (APAR Table 1).
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


def measure(sequence: Sequence) -> ThreadMetrics:
    """The metrics of the tokens generated so far."""
    document = sequence.document()
    text = [token for token in document if not token.is_control]
    steps = _steps(sequence, document)
    longest_chain = max((thread_steps[-1] for thread_steps in steps.values()), default=0)
    prompt, count = sequence.prompt_length, len(text)
    predicting = (sequence.sees(token.thread, token.ordinal - 1) for token in text if token.ordinal)  # by the token before
    attended = sum(seen for context in predicting for _, seen in context)
    return ThreadMetrics(
        threads=max(1, len(steps)),
        tokens=len(document),
        text_tokens=count,
        longest_chain=longest_chain,
        parallelism=count / longest_chain if longest_chain else 0.0,
        attended_tokens=prompt + attended / count if count else 0.0,
        attended_tokens_flat=prompt + (count - 1) / 2 if count else 0.0,
        max_cached_tokens=prompt + _most_cached(steps, _last_seen(sequence, steps), longest_chain),
        max_cached_tokens_flat=prompt + count,
    )


def _steps(sequence: Sequence, document: list[DocumentToken]) -> Steps:
    """The step of every token of every thread. In document order, everything that a token waits for precedes it."""
    steps: Steps = defaultdict(list)
    for token in document:
        thread, own = sequence.threads[token.thread], steps[token.thread]
        opened_by = None if own else thread.parent  # a forced token enters with its opener
        before = own if opened_by is None else steps[opened_by]
        joined = (number for join in thread.joins if join.index == token.ordinal for number, _ in join.context)
        step = (before[-1] if before else 0) + (opened_by is None)
        own.append(max([step, *(steps[number][-1] for number in joined)]))
    return dict(steps)


def _last_seen(sequence: Sequence, steps: Steps) -> Steps:
    """For every token, the last step at which a token attending to it is predicted; 0 if there is none."""
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
    """The maximum over all steps of the number of tokens decoded before the step and attended to in it or later."""
    changes = [0] * (longest_chain + 2)
    for number, own in steps.items():
        for step, seen in zip(own, last[number], strict=True):
            if seen > step:
                changes[step + 1] += 1
                changes[seen + 1] -= 1
    return max(accumulate(changes))
