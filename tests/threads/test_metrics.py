"""The papers' metrics, on answers small enough to count by hand."""

from __future__ import annotations

import pytest
from support.toy_dialects import say, sequence_of, toy

from pipedec.threads import ThreadMetrics, measure


def test_apar() -> None:
    sequence = sequence_of(toy("apar"), prompt_length=10)
    say(sequence, (), "a [Fork] b c d <|end|>")  # steps 1 to 6
    say(sequence, (0,), "x y z <|end|>")  # [Child] at step 2, then 3 to 6
    # Attended, besides the prompt: a 0, x 3, y 4, z 5, b 2, c 3, d 4.
    # Before step 6 all is cached but what nobody sees any more: a [Fork] b c d, [Child] x y z.
    assert measure(sequence) == ThreadMetrics(
        threads=2, tokens=11, text_tokens=7, longest_chain=6, parallelism=7 / 6,
        attended_tokens=pytest.approx(10 + 21 / 7), attended_tokens_flat=10 + 3,
        max_cached_tokens=10 + 9, max_cached_tokens_flat=10 + 7,
    )  # fmt: skip


def test_pasta_joins_lie_on_the_chain() -> None:
    sequence = sequence_of(toy("pasta"), prompt_length=0)
    say(sequence, (), '<promise : 20 "/> <promise : 20 "/> <sync/>')  # steps 1 to 9
    say(sequence, (0,), "a b c d e f g </async>")  # <async> at step 4, then 5 to 12
    say(sequence, (1,), "h </async>")  # <async> at step 8, then 9 and 10
    say(sequence, (), "i <|end|>")  # the join enters at step 12, then 13 and 14
    metrics = measure(sequence)
    assert metrics.longest_chain == 14
    assert metrics.parallelism == 9 / 14
    assert metrics.max_cached_tokens == 8 + 9 + 3 + 2, "before the end token everything"
    assert metrics.theoretical_speedup(baseline_tokens=28) == 2.0


def test_nothing_said_yet() -> None:
    metrics = measure(sequence_of(toy("apar"), prompt_length=3))
    assert (metrics.threads, metrics.tokens, metrics.parallelism, metrics.max_cached_tokens) == (1, 0, 0.0, 3)
    assert metrics.theoretical_speedup(5) == 0.0
