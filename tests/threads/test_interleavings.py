"""Whatever the order in which threads take turns, an answer is the one that a naive reader writes in document order."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.naive_threads import Model, NaiveAnswer, Path
from support.toy_dialects import (
    END,
    IDS,
    TAGS,
    WORDS,
    at,
    sequence_of,
    toy,
)

from pipedec.threads import (
    BoundDialect,
    DocumentToken,
    Sequence,
    State,
    ThreadedSequence,
    measure,
    replay,
)
from recipes.thread_models.rows import visibility

PROMPT = 7
SMALL = {"max_child_tokens": 9, "max_children": 3}
DIALECTS = {
    "apar": toy("apar", **SMALL),
    "apar, three deep": toy("apar", max_depth=3, max_children=2, no_opening_after=()),
    "pasta": toy("pasta", **SMALL, max_opener_tokens=6),
    "pasta, nested": toy(
        "pasta", max_depth=3, max_child_tokens=12, max_children=2, max_opener_tokens=5, default_length=5, max_length=8
    ),
    "pasta, fixed length": toy("pasta", length_pattern=None, default_length=3, after_join="flat"),
    "pasta, longest": toy("pasta", max_depth=2, after_join="longest"),
    "parallel": toy("parallel", **SMALL),
    "parallel, nested and flat": toy("parallel", max_depth=2, after_join="flat"),
}


def random_model(bound: BoundDialect, seed: int) -> Model:
    """Any token may follow any other; each is a function of the thread's path and of its place in the thread."""
    dialect = bound.dialect
    control = [token for token in (bound.opener, bound.child_end, bound.join, END) if token is not None]
    weights = {token: 2.0 for token in control} | {bound.opener: 4.0, bound.child_start: 0.3}
    if dialect.opener_end is not None:
        weights |= {IDS[text]: 1.0 for text in TAGS} | {IDS['"/>']: 4.0, IDS['"/>!']: 2.0}
    weights |= {IDS[text]: 0.5 for text in WORDS}

    def model(path: Path, index: int) -> int:
        source = random.Random(f"{seed} {path} {index}")
        return source.choices(list(weights), list(weights.values()))[0]

    return model


def tidy_model(bound: BoundDialect, seed: int) -> Model:
    """Answers as a trained model writes them: openers complete, children closed, joins now and then."""
    control = {bound.opener: 3.0, END: 1.0} if bound.join is None else {bound.opener: 3.0, bound.join: 1.0}
    starts = [[token] if not bound.has_tags or token != bound.opener else _promise(seed) for token in control]

    def model(path: Path, index: int) -> int:
        source = random.Random(f"{seed} {path}")
        said: list[int] = []
        while len(said) <= index:
            weights = [*control.values(), 6.0]
            said += source.choices([*starts, [IDS["a"], IDS["b"], IDS["c"]]], weights)[0]
            if len(said) > 12:
                said += [END if not path or bound.child_end is None else bound.child_end] * (index + 1)
        return said[index]

    return model


def _promise(seed: int) -> list[int]:
    return [IDS[text] for text in ("<promise", ' tokens="', str(1 + seed % 2), '"/>')]


class Run:
    """Decodes an answer with threads taking turns at random, and checks each step on the way."""

    def __init__(self, bound: BoundDialect, model: Model, max_tokens: int, turns: int) -> None:
        self.sequence = sequence_of(bound, PROMPT, max_tokens)
        self._reader = self.sequence.reader()
        self._model = model
        self._said: dict[Path, int] = {}
        self._dropped: dict[int, set[int]] = {}
        self.read: list[tuple[Path, int, bool]] = []
        turn = random.Random(turns)
        while self.sequence.finished is None:
            running = [thread for thread in self.sequence.threads if thread.state is State.RUNNING]
            self._walk(turn.choice(running).path, turn.randint(1, 4))

    def _walk(self, path: Path, most: int) -> None:
        """Some tokens of one thread in one timestep, as a verifier takes them: looked at first, then accepted."""
        sequence, number = self.sequence, at(self.sequence, path).number
        walked: list[int] = []
        banned = []
        for _ in range(most):
            token = self._model(path, self._said.get(path, 0) + len(walked))
            ends = sequence.ends_walk(number, token, walked)
            banned.append(sequence.banned(number, walked))
            walked.append(token)
            if ends:
                break
        for index, token in enumerate(walked):
            assert sequence.banned(number) == banned[index]
            ends = sequence.ends_walk(number, token)
            self._accept(number, token, ends)
            assert ends <= (index == len(walked) - 1), "the walk should have stopped here"
        self._said[path] = self._said.get(path, 0) + len(walked)

    def _accept(self, number: int, token: int, ends: bool) -> None:
        before = [thread.num_tokens for thread in self.sequence.threads]
        joins = [len(thread.joins) for thread in self.sequence.threads]
        starts = {(start.thread, start.token) for start in self.sequence.accept_token(number, token)}
        threads, thread = self.sequence.threads, self.sequence.threads[number]
        assert (thread.state is not State.RUNNING or len(thread.joins) > joins[number]) == ends
        entered = {(one.number, one.token_ids[0]) for one in threads[len(before) :]}
        for one, count in zip(threads, joins, strict=False):
            entered |= {(one.number, one.token_ids[join.index]) for join in one.joins[count:]}
        assert starts == entered
        before += [0] * (len(threads) - len(before))
        for thread, known in zip(self.sequence.threads, before, strict=True):
            for index in range(known, thread.num_tokens):
                for other, count in self.sequence.sees(thread.number, index):
                    assert not any(dropped < count for dropped in self._dropped.get(other, ())), "seen after it was released"
        for thread, needed in zip(self.sequence.threads, self.sequence.needed(), strict=True):
            self._dropped.setdefault(thread.number, set()).update(range(needed, thread.num_tokens))
        self.read += [self._seen(taken) for taken in self._reader.pop_ready()]
        document = [self._seen(taken) for taken in self.sequence.document()]
        assert self.read == document[: len(self.read)]

    def _seen(self, token: DocumentToken) -> tuple[Path, int, bool]:
        return self.sequence.threads[token.thread].path, token.token_id, token.is_control


def check(sequence: Sequence, naive: NaiveAnswer) -> None:
    """Tokens, paths, positions, control, visibility and metrics are the naive reader's."""
    document = [(sequence.threads[token.thread], token) for token in sequence.document()]
    assert [(thread.path, token.token_id) for thread, token in document] == [(one.path, one.token) for one in naive.tokens]
    assert [thread.positions[token.ordinal] for thread, token in document] == [one.position for one in naive.tokens]
    assert [token.is_control for _, token in document] == [one.is_control for one in naive.tokens]
    mask = visibility(sequence)
    assert [set(torch.nonzero(row)[:, 0].tolist()) for row in mask] == [one.seen for one in naive.tokens]
    metrics = measure(sequence)
    assert metrics.threads == max(1, len({one.path for one in naive.tokens}))
    assert metrics.longest_chain == max((one.step for one in naive.tokens), default=0)
    assert metrics.max_cached_tokens == PROMPT + naive.most_cached()
    text = [one for one, (_, token) in zip(naive.tokens, document, strict=True) if not token.is_control]
    assert (metrics.tokens, metrics.text_tokens) == (len(naive.tokens), len(text))
    if text:
        assert metrics.attended_tokens == pytest.approx(PROMPT + sum(len(one.before or ()) for one in text) / len(text))


@pytest.mark.parametrize("make_model", [random_model, tidy_model])
@pytest.mark.parametrize("name", DIALECTS)
@examples(40)
@given(seed=st.integers(0, 2**32), max_tokens=st.integers(1, 120), turns=st.integers(0, 2**32))
def test_every_interleaving_is_the_document_of_a_naive_reader(name, make_model, seed, max_tokens, turns) -> None:
    """Readers get the whole document, which can be read back into threads."""
    bound = DIALECTS[name]
    model = make_model(bound, seed)
    naive = NaiveAnswer(bound, model, PROMPT, max_tokens).write()
    first, second = (Run(bound, model, max_tokens, turns + other) for other in range(2))
    runs, document = [first.sequence, second.sequence], first.sequence.document()
    assert first.read == [(first.sequence.threads[token.thread].path, token.token_id, token.is_control) for token in document]
    again = sequence_of(bound, PROMPT, max_tokens)
    replay(again, (token.token_id for token in document))
    for sequence in (*runs, again):
        check(sequence, naive)
    assert runs[0].finished == runs[1].finished
    assert asdict(measure(runs[0])) == asdict(measure(runs[1]))
    if runs[0].finished == "stop":
        assert runs[0].anomalies == runs[1].anomalies
        ends = [{thread.path: thread.ended_by for thread in sequence.threads} for sequence in runs]
        assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["pasta", "pasta, nested", "pasta, fixed length", "pasta, longest"])
@examples(40)
@given(seed=st.integers(0, 2**32), max_tokens=st.integers(1, 60), room=st.integers(0, 40))
def test_no_token_stands_beyond_the_models_context(name, seed, max_tokens, room) -> None:
    """A prompt and ``max_tokens`` fit, so all tokens do, whatever lengths an answer promises."""
    bound = toy("pasta", max_depth=3, max_length=1000, default_length=400, after_join=DIALECTS[name].dialect.after_join)
    most = PROMPT + max_tokens + room
    sequence = ThreadedSequence(bound, PROMPT, (END,), max_tokens, most)
    model, turn = (random_model if seed % 2 else tidy_model)(bound, seed), random.Random(seed)
    said: dict[Path, int] = {}
    while sequence.finished is None:
        thread = turn.choice([thread for thread in sequence.threads if thread.state is State.RUNNING])
        sequence.accept_token(thread.number, model(thread.path, said.get(thread.path, 0)))
        said[thread.path] = said.get(thread.path, 0) + 1
    for thread in sequence.threads:
        never_entered = thread.is_cut and thread.num_tokens == 1
        assert never_entered or all(position < most for position in thread.positions)


def test_a_promise_is_clamped_to_what_the_context_has_room_for() -> None:
    sequence = ThreadedSequence(toy("pasta"), PROMPT, (END,), 20, PROMPT + 30)
    for token in (IDS[text] for text in ("<promise", ' tokens="', "20", '"/>')):
        sequence.accept_token(0, token)
    assert sequence.threads[0].next_position == PROMPT + 4 + 6, "of 30 places 20 are left for tokens, and 4 were said"
    assert sequence.anomalies == {"length_clamped": 1}
    free = ThreadedSequence(toy("pasta"), PROMPT, (END,), 20)
    for token in (IDS[text] for text in ("<promise", ' tokens="', "20", '"/>')):
        free.accept_token(0, token)
    assert free.threads[0].next_position == PROMPT + 4 + 20 and free.anomalies == {}
