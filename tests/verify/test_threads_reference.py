"""The reference for threaded answers: independent of thread order, and equal to one forward over the whole answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from support import naive_sampling
from support.pairwise import pairwise
from support.thread_differences import first_thread_difference
from support.thread_models import CASES, DEPTHS, END, PROMPTS, SETTINGS, THREAD_DIALECTS, Case, ThreadModels, naive_answer
from support.toy_dialects import at
from torch import Tensor
from transformers import LlamaForCausalLM

from pipedec.core import SamplingParams
from pipedec.threads import BoundDialect, DecodeThread, Sequence, Start, ThreadedSequence, measure, replay
from pipedec.verify.reference import Choose
from recipes.thread_models.rows import IGNORED, TrainingRow, tree_row

ORDERS: dict[str, Choose] = {
    "oldest first": lambda running: running[0],
    "depth first": lambda running: running[-1],
    "at random": random.Random(5).choice,
}
BANNED_ANOMALIES = {"forced_token_sampled", "opener_too_deep", "opener_out_of_place", "too_many_children"}


def name(case: Case) -> str:
    return f"{case.dialect}-{case.setting}-{case.prompt[:4]}"


@pytest.mark.slow
def test_the_answers_cover_the_interesting_cases(thread_models: ThreadModels) -> None:
    """Threads, joins, cuts, natural ends and broken structure, without which the tests below mean little."""
    answers = {case: thread_models.known_answer(case) for case in CASES}
    measured = [measure(answer) for answer in answers.values()]
    assert sum(one.threads >= 3 for one in measured) >= 0.75 * len(CASES)
    assert max(one.threads for one in measured) >= 8
    for dialect in ("pasta", "parallel"):
        joined = [any(thread.joins for thread in answers[case].threads) for case in CASES if case.dialect == dialect]
        assert sum(joined) >= len(joined) / 2
    depths = {case.dialect: 0 for case in CASES}
    for case, answer in answers.items():
        depths[case.dialect] = max(depths[case.dialect], *(len(thread.path) for thread in answer.threads))
    assert depths == {"apar": 2, "pasta": 1, "parallel": 1}
    assert {answer.finished for answer in answers.values()} == {"stop", "length"}
    anomalies = {anomaly for answer in answers.values() for anomaly in answer.anomalies}
    assert {"unclosed_child", "length_exceeded", "opener_not_completed", "end_without_join"} <= anomalies
    assert {"join_without_children", "close_outside_child", "end_token_in_child"} <= anomalies
    assert not anomalies & BANNED_ANOMALIES
    promised = {thread.predicted_length for answer in answers.values() for thread in answer.threads}
    assert {4, 9} <= promised, "lengths that promises state"


@pytest.mark.fast_cases
@pytest.mark.parametrize(("dialect", "setting", "order"), pairwise(THREAD_DIALECTS, SETTINGS, ORDERS))
def test_the_order_in_which_threads_take_turns_changes_nothing(
    thread_models: ThreadModels, dialect: str, setting: str, order: str
) -> None:
    case = Case(dialect, setting)
    usual, other = thread_models.known_answer(case), thread_models.answer(case, ORDERS[order])
    assert first_thread_difference(usual, other) is None
    assert measure(usual) == measure(other)
    if usual.finished == "stop":
        assert usual.anomalies == other.anomalies
        ends = [{thread.path: thread.ended_by for thread in answer.threads} for answer in (usual, other)]
        assert ends[0] == ends[1]


class RecordingSequence(ThreadedSequence):
    """Records the banned tokens and the next position before each accepted token."""

    def __init__(self, bound: BoundDialect, prompt_length: int, end_token_ids: Iterable[int], max_tokens: int) -> None:
        super().__init__(bound, prompt_length, end_token_ids, max_tokens)
        self.before: dict[tuple[int, int], tuple[frozenset[int], int]] = {}

    def accept(self, number: int, token: int) -> list[Start]:
        self.before[number, self.threads[number].num_tokens] = self.banned(number), self.threads[number].next_position
        return super().accept(number, token)


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, flat: TrainingRow, mask: Tensor) -> Tensor:
    """[N, V]: logits of the whole answer in one forward."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    return model(flat.token_ids[None], position_ids=flat.positions[None], attention_mask=bias[None, None]).logits[0]


class Reread:
    """A finished answer, replayed, and the model's choice at each of its tokens."""

    def __init__(self, models: ThreadModels, case: Case, answer: Sequence) -> None:
        self._prompt = list(models.prompt_ids(case.prompt))
        self._sampling, self._model = models.sampling(case), models.target(case.depth)
        self.sequence = RecordingSequence(models.bound(case.dialect), len(self._prompt), (END,), self._sampling.max_tokens)
        replay(self.sequence, (token.token_id for token in answer.document()))
        self.flat = tree_row(self.sequence, tuple(self._prompt))

    def wrong_places(self, mask: Tensor, counted: Tensor) -> list[tuple[tuple[int, ...], int]]:
        """(path, index) of the tokens that differ from the choice of one forward over the whole answer.

        Args:
            mask: bool [N, N], the tokens that each token sees.
            counted: bool [N, N], the tokens that penalties count at each token.
        """
        logits, start = logits_of(self._model, self.flat, mask), len(self._prompt)
        written = self.sequence.document()
        wrong = []
        for place, target in enumerate(self.flat.targets.tolist()):
            if target == IGNORED:
                continue
            number, index = (0, 0) if place < start else (written[place - start].thread, written[place - start].ordinal + 1)
            thread = self.sequence.threads[number]
            banned, position = self.sequence.before[number, index]
            said = self.flat.token_ids[start:][counted[place, start:]].tolist()
            row = logits[place].double().tolist()
            if naive_sampling.choose(row, self._prompt, said, self._sampling, position, thread.noise_stream, banned) != target:
                wrong.append((thread.path, index))
        return wrong


@pytest.mark.fast_cases
@pytest.mark.parametrize("case", CASES, ids=name)
def test_one_forward_over_the_whole_answer_gives_the_same_tokens(thread_models: ThreadModels, case: Case) -> None:
    """With mask and positions as in training, and naive filters and penalties."""
    reread = Reread(thread_models, case, thread_models.known_answer(case))
    num_targets = int((reread.flat.targets != IGNORED).sum())
    assert num_targets == sum(1 for token in reread.sequence.document() if token.thread == 0 or token.ordinal)
    assert reread.wrong_places(reread.flat.mask, reread.flat.mask) == []


@pytest.mark.fast_cases
@pytest.mark.parametrize("setting", ["greedy", "drawn"])
@pytest.mark.parametrize("dialect", ["apar", "pasta", "parallel"])
def test_a_wrong_mask_gives_other_tokens(thread_models: ThreadModels, dialect: str, setting: str) -> None:
    case = Case(dialect, setting)
    reread = Reread(thread_models, case, thread_models.known_answer(case))
    assert reread.wrong_places(torch.ones_like(reread.flat.mask).tril(), reread.flat.mask)


@pytest.mark.slow
def test_penalties_count_visible_tokens_of_other_threads(thread_models: ThreadModels) -> None:
    for dialect in ("apar", "pasta", "parallel"):
        wrong = []
        for setting, prompt in [("greedy penalised", PROMPTS[0]), ("filtered", PROMPTS[1])]:
            case = Case(dialect, setting, prompt)
            reread = Reread(thread_models, case, thread_models.known_answer(case))
            start, written = reread.sequence.prompt_length, reread.sequence.document()
            own = reread.flat.mask.clone()
            threads = torch.tensor([token.thread for token in written])
            own[start:, start:] &= threads[:, None] == threads[None, :]
            wrong += reread.wrong_places(reread.flat.mask, own)
        assert wrong, f"{dialect}: a thread's own tokens alone would give the same"


@pytest.mark.fast_cases
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_answer_in_one_thread_equals_the_plain_answer(thread_models: ThreadModels, depth: int) -> None:
    model, bound = thread_models.target(depth), thread_models.bound("apar")
    for prompt in PROMPTS:
        ids = thread_models.prompt_ids(prompt)

        def generated(end: int | None, ids: tuple[int, ...] = ids) -> list[int]:
            tensor = torch.tensor([ids])
            output = model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=5,
            )
            return output[0, len(ids) :].tolist()

        whole = generated(None)
        sampling = SamplingParams(max_tokens=30, logit_bias={bound.opener: -100.0})
        answer = naive_answer(model, bound, ids, sampling, ())
        assert (answer.main.token_ids, answer.finished, len(answer.threads)) == (whole, "length", 1)
        assert answer.main.positions == list(range(len(ids), len(ids) + 30))
        ended = naive_answer(model, bound, ids, sampling, (whole[12],))
        assert (ended.main.token_ids, ended.finished) == (generated(whole[12]), "stop")
        assert len(ended.main.token_ids) <= 13


def test_stochastic_sampling_needs_a_seed(thread_models: ThreadModels) -> None:
    with pytest.raises(ValueError, match="needs a seed"):
        naive_answer(thread_models.target(), thread_models.bound("apar"), (3, 4), SamplingParams(1.0), (END,))


def test_threads_at_the_same_position_use_different_noise(thread_models: ThreadModels) -> None:
    """Parent and child have the same positions; with the same noise they would tend to sample the same tokens."""
    paths = [(), (0,), (1,), (0, 0), (0, 1), (10,)]
    streams = [DecodeThread(path=path).noise_stream for path in paths]
    assert streams[0] == 0 and len(set(streams)) == len(paths) and all(0 <= stream < 2**32 for stream in streams)
    case = Case("apar", "drawn")
    reread = Reread(thread_models, case, thread_models.known_answer(case))
    for thread in reread.sequence.threads:
        thread.path = ()
    assert reread.wrong_places(reread.flat.mask, reread.flat.mask)


# The first difference between two answers.

Say = Callable[..., Sequence]


@pytest.fixture
def say(thread_models: ThreadModels) -> Say:
    """Builds an answer from (path, text) turns, by default behind a prompt of ten tokens."""

    def answer(
        *turns: tuple[tuple[int, ...], str], dialect: str = "apar", prompt_length: int = 10, max_tokens: int = 50
    ) -> Sequence:
        sequence = ThreadedSequence(thread_models.bound(dialect), prompt_length, (END,), max_tokens)
        for path, text in turns:
            for token in thread_models.ids(text):
                sequence.accept(at(sequence, path).number, token)
        return sequence

    return answer


TWO_CHILDREN = [((), "a [Fork] b [Fork] c <|end|>"), ((0,), "d e <|end|>"), ((1,), "f <|end|>")]


def test_the_order_of_opening_threads_makes_no_difference(say: Say) -> None:
    grandchildren = [((0,), "d [Fork] e <|end|>"), ((0, 0), "g <|end|>")]
    one = say(((), "a [Fork] b [Fork] c <|end|>"), *grandchildren, ((1,), "f <|end|>"))
    other = say(((), "a [Fork]"), *grandchildren, ((), "b [Fork]"), ((1,), "f <|end|>"), ((), "c <|end|>"))
    assert [thread.path for thread in one.threads] != [thread.path for thread in other.threads]
    assert first_thread_difference(one, other) is None


def test_the_first_difference_in_document_order_is_named(say: Say, thread_models: ThreadModels) -> None:
    expected = say(*TWO_CHILDREN)
    found = say(((), "a [Fork] b [Fork] g <|end|>"), ((0,), "d h <|end|>"), ((1,), "f <|end|>"))
    wanted, token = thread_models.ids("e h")
    assert first_thread_difference(expected, found) == f"thread (0,), token 2 is {token}, not {wanted}"


def test_a_thread_that_ends_early_or_late_is_named(say: Say, thread_models: ThreadModels) -> None:
    expected = say(*TWO_CHILDREN)
    running = say(TWO_CHILDREN[0], ((0,), "d"), TWO_CHILDREN[2])
    (token,) = thread_models.ids("e")
    assert first_thread_difference(expected, running) == f"thread (0,), token 2 is None, not {token}"
    assert first_thread_difference(running, expected) == f"thread (0,), token 2 is {token}, not None"
    unended = say(((), "a [Fork] b [Fork] c"), *TWO_CHILDREN[1:])
    assert first_thread_difference(expected, unended) == f"thread (), token 5 is None, not {END}"


def test_positions_and_finish_reasons_count(say: Say, thread_models: ThreadModels) -> None:
    (token,) = thread_models.ids("a")
    moved = first_thread_difference(say(*TWO_CHILDREN), say(*TWO_CHILDREN, prompt_length=11))
    assert moved == f"thread (), token 0 ({token}): its position is 11, not 10"
    cancelled = say(((), "a b"))
    cancelled.end_all("cancelled")
    assert first_thread_difference(say(((), "a b")), cancelled) == "the answer's finish reason is cancelled, not None"


def test_tokens_behind_the_cut_are_not_compared(say: Say) -> None:
    one = say(((), "a [Fork] b c"), ((0,), "d e"), max_tokens=5)
    other = say(((), "a [Fork]"), ((0,), "d e"), max_tokens=5)
    assert one.finished == other.finished == "length" and one.main.num_tokens > other.main.num_tokens
    assert first_thread_difference(one, other) is None
