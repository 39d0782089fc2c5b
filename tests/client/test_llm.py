"""``LLM`` and ``AsyncLLM`` with texts, token ids and conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.processes import deadline
from support.tiny_pair import SENTENCES, Pair

from pipedec import LLM, AsyncLLM, Completion, SamplingParams, StructuredOutputs
from pipedec.core.errors import UserError
from pipedec.text.tokenizer import Tokenizer

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
CONVERSATION = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": SENTENCES[1]},
]


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Iterator[LLM]:
    with LLM(pair.target, pair.draft, stages=1) as running:
        yield running


def test_token_ids_are_a_prompt_in_every_shape(llm: LLM, pair: Pair) -> None:
    ids = Tokenizer(pair.target).encode(SENTENCES[0])
    [text] = llm.generate(SENTENCES[0], SHORT, raw_prompt=True)
    assert [one.token_ids for one in llm.generate(ids, SHORT)] == [text.token_ids], "a list of integers is one prompt"
    several = llm.generate([ids, {"prompt_token_ids": ids}, {"prompt": SENTENCES[0]}, SENTENCES[0]], SHORT, raw_prompt=True)
    assert [one.token_ids for one in several] == [text.token_ids] * 4
    with pytest.raises(UserError, match="neither text nor token ids"):
        llm.generate([{"text": "x"}], SHORT)


def test_a_conversation_is_rendered_by_the_target_s_template(llm: LLM, pair: Pair) -> None:
    ids = Tokenizer(pair.target).apply_chat_template(CONVERSATION)
    [expected] = llm.generate([ids], SHORT)
    [one] = llm.chat(CONVERSATION, SHORT)
    first, second = llm.chat([CONVERSATION, CONVERSATION[:1]], SHORT)
    assert one.token_ids == first.token_ids == expected.token_ids and one.prompt_tokens == len(ids)
    assert second.prompt_tokens < len(ids)
    [question] = llm.generate(CONVERSATION[0]["content"], SHORT)
    assert second.token_ids == question.token_ids


def test_no_progress_is_shown_where_there_is_no_terminal(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    assert all(isinstance(one, Completion) for one in llm.generate(SENTENCES, SHORT))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_the_asynchronous_llm_says_the_same(llm: LLM, pair: Pair) -> None:
    expected = [one.text for one in llm.generate(SENTENCES[:2], SHORT)]
    [chatted] = llm.chat(CONVERSATION, SHORT)

    async def said(running: AsyncLLM, prompt: str) -> str:
        return "".join([delta.text async for delta in running.generate(prompt, SHORT)])

    async def body(running: AsyncLLM) -> None:
        assert await asyncio.gather(*(said(running, prompt) for prompt in SENTENCES[:2])) == expected
        async with running:
            assert (await (await running.chat(CONVERSATION, SHORT)).completed()).token_ids == chatted.token_ids
            with pytest.raises(UserError, match="empty"):
                await said(running, "")
            endless = running.generate("x", SamplingParams(max_tokens=1500, ignore_eos=True))
            assert await anext(endless)
            await endless.aclose()
            while (await running.status()).running:
                await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks that ask first at the same time share a connection"

    with deadline(60):
        asyncio.run(body(AsyncLLM(pair.target, pair.draft, stages=1)))


def test_an_answer_may_be_held_to_a_form(llm: LLM) -> None:
    for seed in range(3):
        sampling = SamplingParams(temperature=1, seed=seed, structured_outputs=StructuredOutputs(choice=["yes", "no"]))
        assert {one.text for one in llm.generate(SENTENCES, sampling)} <= {"yes", "no"}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    [one] = llm.chat(CONVERSATION, SamplingParams(structured_outputs=StructuredOutputs(json=schema)))
    assert one.text in ('{"a": 1}', '{"a": 2}') and one.finish_reason == "stop"
    with pytest.raises(UserError, match="unclosed group"):
        llm.generate("Hello", SamplingParams(structured_outputs=StructuredOutputs(regex="(a")))


def test_an_answer_that_is_repeated_takes_fewer_timesteps(llm: LLM) -> None:
    """Earlier answers are a draft source. A fixed width speculates, whether or not it pays on this machine."""
    sampling = SamplingParams(1.5, seed=5, max_tokens=40, ignore_eos=True)
    answers = [llm.generate("Twelve crows", sampling, options={"proposers": ["ngrams"], "width": 8})[0] for _ in range(2)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].metrics.timesteps < answers[0].metrics.timesteps / 1.5
