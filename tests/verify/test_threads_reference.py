"""The reference for threaded answers: independent of thread order, and equal to one forward over the whole answer."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from support import naive_sampling
from support.pairwise import pairwise
from support.thread_differences import written
from support.thread_models import CASES, END, PROMPTS, SETTINGS, THREAD_DIALECTS, Case, ThreadModels, naive_answer
from torch import Tensor
from transformers import LlamaForCausalLM

from pipedec.core.sampling import SamplingParams
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


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases
@pytest.mark.parametrize(("dialect", "setting", "order"), pairwise(THREAD_DIALECTS, SETTINGS, ORDERS))
def test_the_order_in_which_threads_take_turns_changes_nothing(
    thread_models: ThreadModels, dialect: str, setting: str, order: str
) -> None:
    case = Case(dialect, setting)
    usual, other = thread_models.known_answer(case), thread_models.answer(case, ORDERS[order])
    assert written(usual) == written(other)
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

    def accept_token(self, number: int, token: int) -> list[Start]:
        self.before[number, self.threads[number].num_tokens] = self.banned(number), self.threads[number].next_position
        return super().accept_token(number, token)


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, flat: TrainingRow) -> Tensor:
    """[N, V]: logits of the whole answer in one forward."""
    bias = torch.zeros(flat.mask.shape).masked_fill(~flat.mask, -torch.inf)
    return model(flat.token_ids[None], position_ids=flat.positions[None], attention_mask=bias[None, None]).logits[0]


class Reread:
    """A finished answer, replayed, and the model's choice at each of its tokens."""

    def __init__(self, models: ThreadModels, case: Case, answer: Sequence) -> None:
        self._prompt = list(models.prompt_ids(case.prompt))
        self._sampling, self._model = models.sampling(case), models.target(case.depth)
        self.sequence = RecordingSequence(models.bound(case.dialect), len(self._prompt), (END,), self._sampling.max_tokens)
        replay(self.sequence, (token.token_id for token in answer.document()))
        self.flat = tree_row(self.sequence, tuple(self._prompt))

    def wrong_places(self) -> list[tuple[tuple[int, ...], int]]:
        """(path, index) of the tokens that differ from the choice of one forward over the whole answer."""
        logits, start = logits_of(self._model, self.flat), len(self._prompt)
        written = self.sequence.document()
        wrong = []
        for place, target in enumerate(self.flat.targets.tolist()):
            if target == IGNORED:
                continue
            number, index = (0, 0) if place < start else (written[place - start].thread, written[place - start].ordinal + 1)
            thread = self.sequence.threads[number]
            banned, position = self.sequence.before[number, index]
            said = self.flat.token_ids[start:][self.flat.mask[place, start:]].tolist()
            row = logits[place].double().tolist()
            if naive_sampling.choose(row, self._prompt, said, self._sampling, position, thread.noise_stream, banned) != target:
                wrong.append((thread.path, index))
        return wrong


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases
@pytest.mark.parametrize("case", CASES, ids=name)
def test_one_forward_over_the_whole_answer_gives_the_same_tokens(thread_models: ThreadModels, case: Case) -> None:
    """With mask and positions as in training, and naive filters and penalties."""
    reread = Reread(thread_models, case, thread_models.known_answer(case))
    num_targets = int((reread.flat.targets != IGNORED).sum())
    assert num_targets == sum(1 for token in reread.sequence.document() if token.thread == 0 or token.ordinal)
    assert reread.wrong_places() == []


def test_an_answer_in_one_thread_equals_the_plain_answer(thread_models: ThreadModels) -> None:
    model, bound = thread_models.target(), thread_models.bound("apar")
    ids = thread_models.prompt_ids(PROMPTS[0])
    tensor = torch.tensor([ids])
    output = model.generate(
        tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=5
    )
    whole = output[0, len(ids) :].tolist()
    sampling = SamplingParams(max_tokens=30, logit_bias={bound.opener: -100.0})
    answer = naive_answer(model, bound, ids, sampling, ())
    assert (answer.main.token_ids, answer.finished, len(answer.threads)) == (whole, "length", 1)
    assert answer.main.positions == list(range(len(ids), len(ids) + 30))
    ended = naive_answer(model, bound, ids, sampling, (whole[12],))
    assert (ended.main.token_ids, ended.finished) == (whole[: whole.index(whole[12]) + 1], "stop")


def test_stochastic_sampling_needs_a_seed(thread_models: ThreadModels) -> None:
    with pytest.raises(ValueError, match="needs a seed"):
        naive_answer(thread_models.target(), thread_models.bound("apar"), (3, 4), SamplingParams(1.0), (END,))


def test_threads_at_the_same_position_use_different_noise() -> None:
    """Parent and child have the same positions; with the same noise they would tend to sample the same tokens."""
    paths = [(), (0,), (1,), (0, 0), (0, 1), (10,)]
    streams = [DecodeThread(path=path).noise_stream for path in paths]
    assert streams[0] == 0 and len(set(streams)) == len(paths) and all(0 <= stream < 2**32 for stream in streams)
