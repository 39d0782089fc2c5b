"""Anthropic's own Python client, as its users write, against a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.http_server import Say, Site, saying
from support.scripted_agents import call
from support.scripted_engine import ANSWER
from support.tool_templates import THINKING_TEMPLATE, with_template

from pipedec.core.errors import QueueFull, RankLost
from pipedec.server.front import Front, ServerSettings

anthropic = pytest.importorskip("anthropic")

KEY = "secret"
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Today's", "input_schema": SCHEMA}]
CALL = call("weather", city="Köln")
THINKING = {"type": "enabled", "budget_tokens": 1024}
THOUGHTFUL = f"<think>\nHm, rain?\n</think>\n\nI look.\n{CALL}"


@pytest.fixture(scope="module")
def say(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Say]:
    folder = tmp_path_factory.mktemp("templates") / "thoughts"
    tokenizer = with_template(tokenizer_files, folder, THINKING_TEMPLATE, "<think>", "</think>")
    with saying(Front(ServerSettings(("tiny", "small"), api_keys=(KEY,)), created=1), {"thoughts": tokenizer}) as say:
        yield say


def client_of(site: Site, **options: Any) -> Any:
    return anthropic.Anthropic(**{"base_url": f"http://127.0.0.1:{site.port}", "api_key": KEY, "max_retries": 0, **options})


def created(site: Site, **fields: Any) -> Any:
    with client_of(site) as client:
        return client.messages.create(**{"model": "tiny", "max_tokens": 500, "messages": [USER], **fields})


def test_a_message_is_the_models_answer(say: Say) -> None:
    site = say("thoughts", ANSWER)
    message = created(site, system="Be kind.", metadata={"user_id": "x"}, extra_body={"temperature": 0.5, "method": "pp"})
    assert isinstance(message, anthropic.types.Message)
    [block] = message.content
    assert (block.type, block.text, message.stop_reason, message.model) == ("text", ANSWER, "end_turn", "tiny")
    assert message.usage.input_tokens > 0 and message.usage.cache_read_input_tokens == 1
    [request] = site.engine.requests
    assert (request.sampling.temperature, request.method) == (0.5, "pp")


def test_a_stream_makes_the_same_message(say: Say) -> None:
    site, asked = say("thoughts", THOUGHTFUL), {"model": "tiny", "max_tokens": 500, "messages": [USER], "tools": TOOLS}
    whole = created(site, tools=TOOLS, thinking=THINKING)
    with client_of(site) as client, client.messages.stream(**asked, thinking=THINKING) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thought, text, use = message.content
    assert (thought.thinking, text.text, use.name, use.input) == ("Hm, rain?", "I look.", "weather", {"city": "Köln"})
    assert thought.signature and message.stop_reason == "tool_use" and message.usage == whole.usage
    assert [block.model_dump(exclude={"id"}) for block in whole.content] == [
        block.model_dump(exclude={"id"}) for block in message.content
    ]


def test_a_conversation_goes_on_with_the_results_of_tools(say: Say) -> None:
    site = say("thoughts", THOUGHTFUL)
    first = created(site, tools=TOOLS)
    site = say("thoughts", "It rains.")
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "rain"}
    turns = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert created(site, tools=TOOLS, messages=turns).content[0].text == "It rains."
    prompt = site.engine.tokenizer.decode(site.engine.requests[0].prompt, skip_special_tokens=False)
    assert f"<think>Hm, rain?</think>I look.{CALL}<|user|><tool_response>rain</tool_response>" in prompt


def test_asynchronous_streams_give_their_text(say: Say) -> None:
    site = say("thoughts", ANSWER)

    async def read(client: Any) -> str:
        async with client.messages.stream(model="tiny", max_tokens=500, messages=[USER]) as stream:
            return "".join([text async for text in stream.text_stream])

    async def read_all() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{site.port}", api_key=KEY) as client:
            return await asyncio.gather(*(read(client) for _ in range(3)))

    assert asyncio.run(read_all()) == [ANSWER] * 3


class Verdict(BaseModel):
    answer: bool


def test_an_answer_is_parsed_into_the_form_that_was_asked_for(say: Say) -> None:
    site = say("thoughts", '{"answer": true}')
    with client_of(site) as client:
        message = client.messages.parse(model="tiny", max_tokens=500, messages=[USER], output_format=Verdict)
    assert message.parsed_output == Verdict(answer=True)
    structure = site.engine.requests[0].sampling.structured_outputs
    assert structure is not None and "answer" in str(structure.json)


def test_tokens_are_counted_and_models_listed(say: Say) -> None:
    site = say("thoughts", ANSWER)
    used = created(site, tools=TOOLS).usage
    with client_of(site) as client:
        counted = client.messages.count_tokens(model="tiny", messages=[USER], tools=TOOLS)
        models, small = list(client.models.list()), client.models.retrieve("small")
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert [model.id for model in models] == ["tiny", "small"] and models[1] == small


@pytest.mark.parametrize(
    ("options", "fields", "error"),
    [
        ({"api_key": "other"}, {}, "AuthenticationError"),
        ({}, {"model": "claude-opus-4-8"}, "NotFoundError"),
        ({}, {"max_tokens": -1}, "BadRequestError"),
        ({}, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "BadRequestError"),
    ],
)
def test_mistakes_are_the_clients_exceptions(say: Say, options: dict[str, Any], fields: dict[str, Any], error: str) -> None:
    site = say("thoughts", ANSWER)
    with client_of(site, **options) as client, pytest.raises(getattr(anthropic, error)) as caught:
        client.messages.create(**{"model": "tiny", "max_tokens": 500, "messages": [USER], **fields})
    assert caught.value.request_id and caught.value.body["error"]["message"] in str(caught.value)


def test_a_full_server_and_a_lost_one_are_the_clients_exceptions(say: Say) -> None:
    site = say("thoughts", ANSWER)
    site.engine.full, site.engine.full_after = QueueFull("1000 requests are unfinished: try again later"), 0
    with client_of(site) as client, pytest.raises(anthropic.InternalServerError):
        client.messages.create(model="tiny", max_tokens=500, messages=[USER])
    site.engine.full, site.engine.allowed, site.engine.failure = None, 2, RankLost("rank 2 died")
    with client_of(site) as client, pytest.raises(anthropic.APIStatusError, match="rank 2 died"):
        list(client.messages.create(model="tiny", max_tokens=500, messages=[USER], stream=True))
