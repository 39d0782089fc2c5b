"""OpenAI's own Python client, as its users write: answers are those of transformers, cancelled ones cost nothing, retries one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import torch
from clients.conftest import MODEL, Server, serving
from pydantic import BaseModel
from support.processes import wait_until
from support.tiny_pair import Pair
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from pipedec.verify.reference import Reference

pytestmark = pytest.mark.slow

PROMPT = "Natalia sold 12 clips in April."
INCOMPLETE = "\ufffd"
QUESTIONS = [f"{PROMPT} And {number} in May?" for number in range(6)]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def asynchronous(server: Server) -> Callable[[], openai.AsyncOpenAI]:
    return lambda: openai.AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def answered(reference: Reference, tokenizer: PreTrainedTokenizerBase) -> Callable[[str | list[int], int], str]:
    """The greedy text of transformers. Where it ends within a character the server leaves that out."""

    def text(prompt: str | list[int], tokens: int) -> str:
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        return tokenizer.decode(reference.generate(ids, tokens), skip_special_tokens=True).rstrip(INCOMPLETE)

    return text


@pytest.fixture(scope="module")
def chatted(answered: Any, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, str]], int], str]:
    """The greedy text of transformers for a conversation."""

    def text(messages: list[dict[str, str]], tokens: int) -> str:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return answered(ids, tokens)

    return text


CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": PROMPT},
    {"role": "assistant", "content": "Good."},
    {"role": "user", "content": "And in May?"},
]


def test_a_completion_is_that_of_transformers(client: openai.OpenAI, answered: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert completion.choices[0].text == answered(PROMPT, 12)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(tokenizer(PROMPT)["input_ids"]), 12)


def test_a_chat_completion_is_that_of_transformers(client: openai.OpenAI, chatted: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).object == "model"
    completion = client.chat.completions.create(model=MODEL, messages=CONVERSATION, max_completion_tokens=12, temperature=0)
    [choice] = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", chatted(CONVERSATION, 12))


def test_a_stream_says_the_same_and_its_usage_at_the_end(client: openai.OpenAI, chatted: Any) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=CONVERSATION, max_tokens=24, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    *spoken, last = chunks
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 24
    assert [chunk.choices[0].delta.role for chunk in spoken].count("assistant") == 1
    assert spoken[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == chatted(CONVERSATION, 24)
    assert [chunk.choices[0].finish_reason for chunk in spoken if chunk.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    with client.chat.completions.stream(model=MODEL, messages=CONVERSATION, max_tokens=12, temperature=0) as events:
        kinds = {event.type for event in events}
        final = events.current_completion_snapshot
    assert final.choices[0].message.content == chatted(CONVERSATION, 12)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_asynchronous_streams_do_not_mix(asynchronous: Any, answered: Any) -> None:
    async def read(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def read_all() -> list[str]:
        async with asynchronous() as client:
            return await asyncio.gather(*(read(client, text) for text in QUESTIONS))

    assert asyncio.run(read_all()) == [answered(text, 8) for text in QUESTIONS]


def test_a_stream_that_is_closed_is_cancelled(server: Server, client: openai.OpenAI) -> None:
    before = server.counter("vllm:generation_tokens_total")
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1900, stream=True, temperature=0, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert wait_until(server.is_idle)
    assert server.counter("vllm:generation_tokens_total") - before < 1900


def test_log_probabilities_are_those_of_transformers(
    server: Server, client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = AutoModelForCausalLM.from_pretrained(server.target)
    ids = tokenizer(PROMPT)["input_ids"]
    completion = client.completions.create(model=MODEL, prompt=ids, max_tokens=4, temperature=0, logprobs=2, echo=True)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.text_offset is not None
    assert len(logprobs.token_logprobs) == len(ids) + 4 and logprobs.token_logprobs[0] is None
    with torch.inference_mode():
        chosen = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(chosen.tolist(), abs=1e-4)
    assert logprobs.text_offset == sorted(logprobs.text_offset) and logprobs.text_offset[0] == 0


def test_seeds_choices_and_stop_strings(client: openai.OpenAI) -> None:
    def drawn(seed: int, n: int) -> list[str]:
        completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=1, seed=seed, n=n)
        return [choice.text for choice in completion.choices]

    both = drawn(7, 2)
    assert both == drawn(7, 2) and both[1] == drawn(8, 1)[0]
    stop = next(letter for letter in both[0][1:] if letter != INCOMPLETE)
    stopped = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=1, seed=7, stop=stop)
    assert stopped.choices[0].text.rstrip(INCOMPLETE) == both[0][: both[0].index(stop)].rstrip(INCOMPLETE)
    assert stopped.choices[0].finish_reason == "stop"


def test_mistakes_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert refused.value.param == "temperature" and "temperature: must be a number" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5000)
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        client.chat.completions.create(model=MODEL, messages=CONVERSATION, tools=tools)


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    certainty: Literal["low", "high"]


def test_the_client_parses_answers_into_its_own_classes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CONVERSATION, "max_tokens": 100, "response_format": Verdict, "seed": 1}
    completion = client.chat.completions.parse(**asked)
    assert isinstance(completion.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == completion.choices[0].message.parsed


def test_the_client_understands_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Verdict, name="judge")]
    asked: dict[str, Any] = {"model": MODEL, "messages": CONVERSATION, "max_tokens": 100, "tools": tools, "temperature": 0}
    asked |= {"tool_choice": {"type": "function", "function": {"name": "judge"}}}
    choice = client.chat.completions.parse(**asked).choices[0]
    [call] = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name == "judge" and isinstance(call.function.parsed_arguments, Verdict)
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    assert "tool_calls.function.arguments.done" in kinds


@pytest.mark.failure_case("K5")
def test_a_retry_after_503_is_charged_once(pair: Pair, tmp_path: Path) -> None:
    """The queue is full; the client waits as long as it is told, asks again with the same request, and is answered once."""
    with serving(tmp_path, pair, "--max-num-seqs", "1", "--max-waiting", "1", "--api-key", "right") as server:
        client = openai.OpenAI(base_url=server.url, api_key="right", max_retries=5, timeout=60)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        long: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "stream": True, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(model=MODEL, **long) for _ in range(2)]
        assert wait_until(lambda: server.counter("vllm:num_requests_waiting") == 1)
        with pytest.raises(openai.InternalServerError) as full:
            client.with_options(max_retries=0).completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
        assert full.value.status_code == 503 and int(full.value.response.headers["Retry-After"]) >= 1
        before = server.counter("vllm:request_prompt_tokens_count")
        answers: list[Any] = []
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
        asking = threading.Thread(target=lambda: answers.append(client.completions.with_raw_response.create(**asked)))
        refused = server.counter("pipedec:http_requests_total", status="503")
        asking.start()
        assert wait_until(lambda: server.counter("pipedec:http_requests_total", status="503") > refused)
        for stream in streams:
            stream.close()
        asking.join(60)
        assert answers[0].retries_taken >= 1 and answers[0].parse().usage.completion_tokens == 4
        assert wait_until(server.is_idle)
        assert server.counter("vllm:request_prompt_tokens_count") - before <= 1 + len(streams)
        client.close()
