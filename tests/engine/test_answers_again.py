"""Answers that are resumed, or said again after a pause: nothing is told twice, and the whole is what it would have been."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipedec.client.reply import Delta, Reply
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import TokenLogprobs
from pipedec.core.verdict import Accepted, Verdict
from pipedec.directories import reference_pair
from pipedec.engine.output import Answer
from pipedec.engine.threaded_output import EarlierOutput, ThreadedAnswer
from pipedec.messages.events import CompletionEvent, Event, LogprobsEvent, ThreadNews
from pipedec.scheduler.protocol import published_token_ids
from pipedec.text.prompt import Prompter
from pipedec.threads import load_dialect
from pipedec.threads.sequences import Sequences

TARGET = reference_pair() / "target"
SEQUENCES = Sequences(TARGET)
PROMPT = (20, 21, 22)
END = "<|end|>"
# What the threads of an answer say, by path; the children of a thread open where it says so.
THREADS = {(): f"One.[Fork] Two.[Fork] Three.{END}", (0,): f" first, and on{END}", (1,): f" second{END}"}


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(TARGET, 2048)


@dataclass
class Client:
    """What a client hears of an answer, and what it takes from it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    threads: dict[tuple[int, ...], str] = field(default_factory=dict)
    counts: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reply = Reply(0, self._take)

    def hear(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            self._reply.take("0", event)
            if isinstance(event, LogprobsEvent):
                self.logprobs |= dict(enumerate(event.logprobs, start=event.index))

    def _take(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        for news in delta.threads:
            self._note(news)

    @property
    def told(self) -> tuple[int, ...]:
        """As the journal has it."""
        return published_token_ids(self.events)

    def _note(self, news: ThreadNews) -> None:
        assert news.tokens >= self.counts.get(news.path, 0), "nobody unsays anything"
        self.threads[news.path] = self.threads.get(news.path, "") + news.text
        self.counts[news.path] = news.tokens


def ids(prompter: Prompter, text: str) -> list[int]:
    found: list[int] = prompter.tokenizer.encode(text, add_special_tokens=False)
    return found


def of(
    prompter: Prompter, dialect: str | None, said: tuple[int, ...] = (), told: tuple[int, ...] = (), **sampling: Any
) -> Answer:
    """An answer of which the request brings ``said`` with it, and another process has told ``told`` behind that."""
    params = SamplingParams(**{"max_tokens": 200, **sampling})
    threads = None if dialect is None else load_dialect(dialect).to_json()
    heard = (*said, *told)
    new_sequence = SEQUENCES.maker(len(PROMPT), params, threads, () if threads else heard)
    asked = TokenizedRequest(0, PROMPT, params, threads=threads, output_token_ids=() if threads else heard)
    if threads is None:
        return Answer(asked, prompter, 2, len(said), new_sequence().finished)
    brought, known = (
        EarlierOutput(SEQUENCES.maker(len(PROMPT), params, threads, ids), len(ids)) if ids else None for ids in (said, heard)
    )
    answer = ThreadedAnswer(asked, prompter, 2, new_sequence, brought, known, show_threads=True)
    answer.lane_opened()
    return answer


def take(answer: Answer, verdict: Verdict, logprobs: TokenLogprobs = ()) -> list[Event]:
    """What the client hears of a verdict."""
    answer.cut(verdict)
    return answer.news(logprobs)


class Telling:
    """Says the tokens of THREADS in an order of its own; ``step`` says a piece of it."""

    def __init__(self, prompter: Prompter, rng: random.Random) -> None:
        self._rng = rng
        self._left = {path: ids(prompter, text) for path, text in THREADS.items()}
        self._sequence = SEQUENCES.maker(len(PROMPT), SamplingParams(max_tokens=200), load_dialect("apar").to_json())()

    @property
    def has_ended(self) -> bool:
        return self._sequence.finished is not None

    def step(self) -> tuple[Verdict, TokenLogprobs]:
        """A verdict on some threads, with log-probabilities that tell whose tokens they are of."""
        accepted, rows = [], []
        for thread in list(self._sequence.threads):
            count = self._rng.choice([0, 1, 1, 2])
            said, left = self._left[thread.path][:count], self._left[thread.path][count:]
            self._left[thread.path] = left
            if said:
                first = len(THREADS[thread.path]) * 100 - len(left) - len(said)
                rows += [((token, -float(first + index)),) for index, token in enumerate(said)]
                accepted.append(Accepted(thread.number, tuple(said)))
                for token in said:
                    self._sequence.accept_token(thread.number, token)
        return Verdict(tuple(accepted), self._sequence.finished), tuple(rows)


def tell_all(answer: Answer, telling: Telling, client: Client) -> CompletionEvent:
    while not telling.has_ended:
        client.hear(take(answer, *telling.step()))
    return answer.completed()


def logprobs_of(event: CompletionEvent, client: Client) -> list[Any]:
    assert event.sampled is not None
    return [None if ordinal < 0 else client.logprobs[ordinal] for ordinal in event.sampled]


@given(st.integers(0, 999), st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_threads_said_again_in_any_order_tell_nothing_twice(prompter: Prompter, seed: int, cuts: list[int]) -> None:
    """Whenever they were interrupted, and however often."""
    rng = random.Random(seed)
    plain, heard = of(prompter, "apar"), Client()
    wanted = tell_all(plain, Telling(prompter, rng), heard)
    paused, client = of(prompter, "apar"), Client()
    for cut in cuts:
        telling = Telling(prompter, rng)
        for _ in range(cut):
            if not telling.has_ended:
                verdict, logprobs = telling.step()
                if verdict.finished is None:
                    client.hear(take(paused, verdict, logprobs))
        paused.lane_opened()
    found = tell_all(paused, Telling(prompter, rng), client)
    assert (client.text, client.token_ids, client.threads) == (heard.text, heard.token_ids, heard.threads)
    assert (found.completion.text, found.completion.token_ids) == (client.text, client.token_ids)
    assert found.completion.finish_reason == wanted.completion.finish_reason
    assert logprobs_of(found, client) == logprobs_of(wanted, heard)
    assert len(client.logprobs) == len(heard.logprobs)


@given(st.integers(0, 999), st.integers(0, 9), st.integers(0, 20), st.booleans())
@example(0, 0, 4, False)  # resumed behind an opener: the forced token of the thread is news
def test_another_process_goes_on_with_threads_and_nothing_is_heard_twice(
    prompter: Prompter, seed: int, cut: int, said: int, twice: bool
) -> None:
    """Whatever the first one has said of a request that may itself go on with an answer; and the second one may be lost, too."""
    rng = random.Random(seed)
    whole, heard = of(prompter, "apar"), Client()
    wanted = tell_all(whole, Telling(prompter, rng), heard)
    said = min(said, len(heard.token_ids) - 1)
    brought, client = tuple(heard.token_ids[:said]), Client()
    for _ in range(1 + twice):
        lost, telling = of(prompter, "apar", brought, client.told), Telling(prompter, rng)
        for _ in range(cut):
            verdict, logprobs = telling.step() if not telling.has_ended else (Verdict((), "stop"), ())
            if verdict.finished is None:
                client.hear(take(lost, verdict, logprobs))
    found = tell_all(of(prompter, "apar", brought, client.told), Telling(prompter, rng), client)
    assert client.token_ids == heard.token_ids[said:] and heard.text.endswith(client.text)
    assert all(text.endswith(client.threads.get(path, "")) for path, text in heard.threads.items())
    assert said or client.threads == heard.threads
    assert (found.completion.text, found.completion.token_ids) == (heard.text, heard.token_ids)
    assert logprobs_of(found, client) == logprobs_of(wanted, heard)


def test_threads_that_are_cancelled_while_they_are_said_again_end_as_they_were_told(prompter: Prompter) -> None:
    answer, client, rng = of(prompter, "apar"), Client(), random.Random(3)
    telling = Telling(prompter, rng)
    while len(client.token_ids) < 6:
        client.hear(take(answer, *telling.step()))
    answer.lane_opened()
    client.hear(take(answer, *Telling(prompter, rng).step()))
    client.hear(take(answer, Verdict((), "cancelled")))
    completion = answer.completed().completion
    assert (completion.token_ids, completion.text) == (client.token_ids, client.text)
    assert len(completion.token_ids) >= 6 and completion.finish_reason == "cancelled"


@given(
    st.lists(st.sampled_from([*"ab é東 \n", "<|user|>"]), min_size=3, max_size=30).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(0, 4),
    st.sampled_from([(), ("b a",), ("é東", "\nb"), ("b<|user|>", "a")]),
    st.sampled_from([{}, {"skip_special_tokens": False}, {"min_tokens": 4, "include_stop_str_in_output": True}]),
)
@pytest.mark.failure_case("S2")
def test_another_process_goes_on_behind_any_token(
    prompter: Prompter, text: str, cuts: list[int], said: int, stop: tuple[str, ...], params: dict[str, Any]
) -> None:
    """Text and tokens come once, whatever of them the processes before it held back; log-probabilities have their ordinals.

    Also inside a character, or inside what may be a stop string, which may have special tokens.
    """
    tokens = ids(prompter, text)
    whole, heard = of(prompter, None, stop=stop, **params), Client()
    verdict = whole.cut(Verdict.of(*tokens))
    heard.hear(whole.news(tuple(((token, -1.0),) for token in tokens)))
    tokens = list(verdict.tokens)
    brought, client = tuple(tokens[: min(said, len(tokens) - 1)]), Client()
    for cut in (*cuts, len(tokens)):
        first = len(brought) + len(client.told)
        answer = of(prompter, None, brought, client.told, stop=stop, **params)
        if not answer.is_complete:
            following = tokens[first : first + cut]
            client.hear(take(answer, Verdict.of(*following), tuple(((token, -1.0),) for token in following)))
    assert client.token_ids == tokens[len(brought) :] and heard.text.endswith(client.text)
    completion = answer.completed().completion
    assert (completion.text, completion.token_ids, completion.finish_reason) == (heard.text, tokens, verdict.finished)
    assert completion.stop_reason == whole.completion.stop_reason
    assert completion.metrics.resumed_tokens == first
    assert client.logprobs == {index: [(token, -1.0)] for index, token in enumerate(tokens) if index >= len(brought)}


@pytest.mark.parametrize(
    ("text", "sampling", "reason", "shown"),
    [
        ("One two" + END, {}, "stop", "One two"),
        ("One two" + END, {"skip_special_tokens": False}, "stop", "One two"),
        ("One" + END, {"skip_special_tokens": False, "include_stop_str_in_output": True}, "stop", "One" + END),
        ("One two three", {"stop": ("two",)}, "stop", "One "),
        ("One two three", {"max_tokens": 3}, "length", None),
    ],
    ids=["end", "special tokens shown", "end shown", "stop string", "max_tokens"],
)
def test_an_answer_that_was_complete_is_complete(
    prompter: Prompter, text: str, sampling: dict[str, Any], reason: str, shown: str | None
) -> None:
    answer = of(prompter, None, tuple(ids(prompter, text)), **sampling)
    completion = answer.completed().completion
    assert answer.is_complete and completion.finish_reason == reason
    assert shown is None or completion.text == shown
    assert len(completion.token_ids) <= sampling.get("max_tokens", 200)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((5, -1), "tokens that the target lacks"),
        ((5, 10**6), "tokens that the target lacks"),
        ((END, 5), "the answer to resume is impossible: tokens follow the end of the answer"),
    ],
    ids=["negative", "large", "behind the end"],
)
def test_what_no_answer_says(prompter: Prompter, tokens: tuple[Any, ...], message: str) -> None:
    said = tuple(token if isinstance(token, int) else ids(prompter, token)[0] for token in tokens)
    with pytest.raises(UserError, match=message):
        of(prompter, None, said)
