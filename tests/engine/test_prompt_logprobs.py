"""Log-probabilities of prompts: those of transformers, however the prompt enters and whoever else is in the pipeline."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from support.kv_budgets import with_slots
from support.tiny_pair import Pair
from transformers import AutoModelForCausalLM

from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import RequestUpdate, TokenLogprobs
from pipedec.decoding import Experience, Resources, Scheduler
from pipedec.decoding.events import PromptScored, Record
from pipedec.engine.local import LocalAnswer, LocalPipeline
from pipedec.threads import Sequence, load_dialect

PROMPT = tuple(7 + (31 * index * index) % 290 for index in range(150))  # several chunks
ASKED = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=3)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def expected(pair: Pair) -> torch.Tensor:
    """transformers' log-probabilities behind every token of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return logprobs


def assert_right(answer: LocalAnswer, expected: torch.Tensor) -> None:
    """Every token from the second one on has its own log-probability first, then those of the most probable tokens."""
    prompt, num_top = answer.asked.prompt_token_ids, answer.asked.sampling.prompt_logprobs
    assert num_top is not None and len(answer.prompt_logprobs) == len(prompt) - 1
    for position, found in enumerate(answer.prompt_logprobs):
        row_V, token = expected[position], prompt[position + 1]
        assert next(iter(found)) == token
        likely = {int(top): float(row_V[top]) for top in row_V.topk(num_top).indices}
        assert found == pytest.approx({token: float(row_V[token]), **likely}, abs=TOLERANCE)


@pytest.mark.parametrize(("stages", "method"), [(1, "pp"), (4, "bita"), (2, "pipedec-bestfirst")])
def test_they_are_those_of_transformers(pair: Pair, expected: torch.Tensor, stages: int, method: str) -> None:
    pipeline = LocalPipeline.load(pair.spec(stages))
    told = [token for verdict in pipeline.run(TokenizedRequest(0, PROMPT, ASKED, method)) for token in verdict.tokens]
    assert_right(pipeline.last, expected)
    unasked = replace(ASKED, prompt_logprobs=None)
    assert told == [token for verdict in pipeline.run(TokenizedRequest(1, PROMPT, unasked, method)) for token in verdict.tokens]
    assert pipeline.last.prompt_logprobs == []


def test_in_company_and_behind_a_prompt_that_is_cached(pair: Pair, expected: torch.Tensor) -> None:
    """Nothing is adopted, since a cached token has no logits; others adopt what this request has computed."""
    pipeline = LocalPipeline.load(pair.spec(2))
    sampled = replace(ASKED, temperature=1.0, seed=4, logit_bias={9: 3.0}, repetition_penalty=1.3, logprobs=1)
    unasked = replace(ASKED, prompt_logprobs=None)
    requests = [
        TokenizedRequest(0, PROMPT, unasked), TokenizedRequest(1, PROMPT[:90], sampled), TokenizedRequest(2, PROMPT[:1], ASKED),
        TokenizedRequest(3, PROMPT, replace(ASKED, prompt_logprobs=0), "bita"),
    ]  # fmt: skip
    later = [TokenizedRequest(4, PROMPT, ASKED), TokenizedRequest(5, PROMPT, unasked)]
    list(pipeline.run_all({1: requests[:2], 3: requests[2:], 60: later}))
    answers = pipeline.answers
    for number in (1, 2, 3, 4):
        assert_right(answers[number], expected)
        assert answers[number].metrics.cached_tokens == 0
    assert len(answers[1].logprobs) == ASKED.max_tokens, "those of the answer are told, too"
    assert answers[5].metrics.cached_tokens > 0 and answers[5].prompt_logprobs == []


def test_nothing_is_told_twice_after_a_pause(pair: Pair, expected: torch.Tensor) -> None:
    pipeline = LocalPipeline.load(with_slots(pair.spec(2), 400))
    paused = TokenizedRequest(0, PROMPT, replace(ASKED, max_tokens=120), "pp", priority=5)
    urgent = TokenizedRequest(1, PROMPT[::-1], replace(ASKED, max_tokens=100, prompt_logprobs=None), "pp")
    list(pipeline.run_all({1: [paused], 25: [urgent]}))
    assert pipeline.answers[0].metrics.pauses > 0
    assert_right(pipeline.answers[0], expected)


HIDDEN = SamplingParams(max_tokens=6, ignore_eos=True, prompt_hidden_states=True)


def hidden_states(answer: LocalAnswer) -> torch.Tensor:
    numbers = torch.frombuffer(bytearray(b"".join(answer.hidden_states)), dtype=torch.float32)
    return numbers.view(len(answer.asked.prompt_token_ids), -1)


def test_hidden_states_come_once_each_for_every_token_of_the_prompt(pair: Pair) -> None:
    """In company, behind a prompt that is cached, with log-probabilities, after a pause, and of an answer that is resumed."""
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).get_decoder()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).last_hidden_state[0]
    pipeline = LocalPipeline.load(with_slots(pair.spec(2), 400))
    paused = TokenizedRequest(0, PROMPT, replace(HIDDEN, max_tokens=120), "pp", priority=5)
    urgent = TokenizedRequest(1, PROMPT[::-1], replace(HIDDEN, max_tokens=100, prompt_hidden_states=False), "pp")
    cached = TokenizedRequest(2, PROMPT, replace(HIDDEN, prompt_logprobs=0))
    short, resumed = (
        TokenizedRequest(3, PROMPT[:1], HIDDEN, "bita"),
        TokenizedRequest(4, PROMPT[:20], replace(HIDDEN, max_tokens=60), output_token_ids=PROMPT[20:70]),
    )
    list(pipeline.run_all({1: [paused], 25: [urgent], 800: [cached, short], 1600: [resumed]}))
    assert pipeline.answers[0].metrics.pauses > 0 and pipeline.answers[1].hidden_states == []
    for number in (0, 2, 3, 4):
        found = hidden_states(pipeline.answers[number])
        torch.testing.assert_close(found, expected[: len(found)], atol=1e-4, rtol=1e-4)
    assert pipeline.answers[2].metrics.cached_tokens == 0 and len(pipeline.answers[2].prompt_logprobs) == len(PROMPT) - 1


def test_an_answer_that_is_resumed_scores_its_prompt_only(pair: Pair, expected: torch.Tensor) -> None:
    pipeline = LocalPipeline.load(pair.spec(2))
    list(pipeline.run(TokenizedRequest(0, PROMPT[:20], replace(ASKED, max_tokens=60), output_token_ids=PROMPT[20:70])))
    assert_right(pipeline.last, expected)


def test_a_pause_in_the_middle_of_a_prompt() -> None:
    noted, rows = list[Record](), tuple(((token, -1.0),) for token in range(9))
    scheduler = Scheduler(Resources(Experience(2)), listeners=[noted.append])
    scheduler.open(scheduler.prepare(TokenizedRequest(0, PROMPT, ASKED, "pp"), lambda: Sequence(len(PROMPT), (), 6)))

    def begin() -> None:
        scheduler.interrupt()
        assert [one.opening is not None for one in scheduler.entering().updates] == [True]

    def scored(*chunks: TokenLogprobs) -> TokenLogprobs:
        """What listeners learn of these results."""
        noted.clear()
        for chunk in chunks:
            assert scheduler.take(RequestUpdate(0, prompt_logprobs=chunk), 1) is None
        new = [record for record in noted if isinstance(record, PromptScored)]
        assert [rows[record.first : record.first + len(record.logprobs)] for record in new] == [record.logprobs for record in new]
        return tuple(row for record in new for row in record.logprobs)

    begin()
    assert scored(rows[:3], rows[3:5]) == rows[:5]
    for _ in range(2):
        begin()
        assert scored(rows[:4]) == ()
    assert scored(rows[4:9]) == rows[5:]
    begin()
    assert scored(rows) == ()


@pytest.mark.parametrize(("asked", "name"), [(ASKED, "prompt_logprobs"), (HIDDEN, "prompt_hidden_states")])
def test_where_they_cannot_be_had(asked: SamplingParams, name: str) -> None:
    threads = load_dialect("pasta").to_json()
    with pytest.raises(UserError, match=f"{name} needs an answer in one thread"):
        scheduler = Scheduler(Resources(Experience(2)))
        scheduler.prepare(TokenizedRequest(0, PROMPT, asked, "pp", threads=threads), lambda: Sequence(len(PROMPT), (), 6))
