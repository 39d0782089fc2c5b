"""Earlier answers as a draft source: whose they are, how many are kept, and what they are good for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drafters import Alone, begun, rows

from pipedec.core.request import TokenizedRequest
from pipedec.core.verdict import Verdict
from pipedec.decoding import Experience
from pipedec.decoding.proposers import LENGTHS, Occurrences
from pipedec.decoding.shared_texts import SharedTexts
from pipedec.methods import BestFirstOptions

SHORTEST = 3
FEW = 8  # occurrences
PROMPT = (1, 2, 3, 4)
ANSWER = (11, 12, 13, 14, 15, 16, 17, 18, 19, 20)


def found(texts: SharedTexts, text: list[int], tenant: str = "a") -> Occurrences:
    """The tokens after the end of ``text`` in texts of ``tenant``."""
    return texts.find(tenant, text[-LENGTHS[-1] :])


def naive_search(texts: list[list[int]], context: list[int]) -> tuple[int, list[int]]:
    """By comparing everything: the length of the longest n-gram that occurs before some token, and the tokens after all that are
    long enough.
    """
    best, tokens = 0, list[int]()
    for text in texts:
        for place in range(1, len(text)):
            lengths = [length for length in LENGTHS if length <= place and text[place - length : place] == context[-length:]]
            if max(lengths, default=0) >= SHORTEST:
                best = max(best, *lengths)
                tokens.append(text[place])
    return best, tokens


@given(st.integers(0, 2**32))
def test_what_is_found_equals_a_naive_search(seed: int) -> None:
    """In both generations. N-grams never reach from one text into the next; of many occurrences some are left out."""
    chooser = random.Random(seed)
    store, texts = SharedTexts(30), list[list[int]]()
    for _ in range(chooser.randint(1, 4)):
        texts.append([chooser.choice((0, 1, 2)) for _ in range(chooser.randint(1, 12))])
        store.add("a", (), texts[-1])
    for _ in range(5):
        context = [chooser.choice((0, 1, 2)) for _ in range(chooser.randint(1, 12))]
        best, tokens = naive_search(texts, context)
        matches = found(store, context)
        assert set(matches) <= set(tokens) if len(tokens) > FEW else set(matches) == set(tokens)
        assert next((match.length for match in matches.values()), 0) == best


def test_the_end_of_the_prompt_leads_to_the_first_tokens() -> None:
    texts = SharedTexts()
    texts.add("a", (*range(100, 200), *PROMPT), ANSWER)
    assert list(found(texts, list(PROMPT))) == [11]
    assert texts.num_tokens == LENGTHS[-1] + len(ANSWER) + 1, "no more of the prompt is kept"


@given(st.lists(st.integers(1, 150), max_size=30))
def test_memory_is_bounded_for_all_tenants_together(lengths: list[int]) -> None:
    texts = SharedTexts(100)
    for number, length in enumerate(lengths):
        text = [1000 * number + token for token in range(length)]
        texts.add(f"tenant {number % 3}", (), text)
        assert texts.num_tokens <= 200
        if length > SHORTEST:
            assert list(found(texts, text[-4:-1], f"tenant {number % 3}")) == [text[-1]], "the latest is always there"


def answering(experience: Experience, tenant: str | None, method: str = "pipedec-bestfirst") -> Alone:
    """A request after its prompt, without a draft model."""
    options = BestFirstOptions(width=16, proposers=("ngrams",)) if method == "pipedec-bestfirst" else None
    return begun(TokenizedRequest(0, PROMPT, method=method, options=options, tenant=tenant), experience=experience)


def entered(experience: Experience, tenant: str | None) -> list[int]:
    """The tokens that enter in the timestep after the first one, when the answer has begun."""
    method = answering(experience, tenant)
    for token in ANSWER[:3]:
        method.apply(Verdict.of(token))
    method.propose()
    method.draft()
    step = method.propose()
    return [] if step is None else [token for token, _ in rows(step)]


@pytest.mark.parametrize("method", ["pipedec-bestfirst", "pp"])
@pytest.mark.parametrize("ending", ["stop", "cancelled"])
def test_an_answer_that_repeats_an_earlier_one_enters_at_once(method: str, ending: str) -> None:
    """Whichever method gave the earlier one, and even if it was cancelled."""
    experience = Experience(2)
    first = answering(experience, "a", method)
    for token in ANSWER:
        first.apply(Verdict.of(token))
    if ending == "cancelled":
        first.scheduler.cancel(0)
    else:
        first.apply(Verdict.of(21, finished="stop"))
    assert entered(experience, "a")[:7] == list(ANSWER[3:])
    assert entered(experience, "b") == entered(experience, None) == []


def test_without_a_tenant_nothing_is_kept() -> None:
    experience = Experience(2)
    first = answering(experience, None)
    first.apply(Verdict.of(ANSWER[0], finished="stop"))
    assert experience.shared_texts.num_tokens == 0
