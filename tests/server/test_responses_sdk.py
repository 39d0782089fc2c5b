"""OpenAI's own client against ``/v1/responses``, as its users write; every object is what its types say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.responses import ResponseTextDeltaEvent
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel
from support.http_server import Site
from support.scripted_responses import Say, scripted_responses, written

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
WEATHER: Any = {"type": "function", "name": "weather", "strict": True, "parameters": SCHEMA}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edits files"}
CALL = written("weather", city="Bonn")
THOUGHTFUL = f"<think>Hm</think>I look.\n{CALL}"


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def say(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Say]:
    with scripted_responses(tmp_path_factory.mktemp("tokenizer")) as saying:
        yield saying


def client(site: Site) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{site.port}/v1", api_key="a", max_retries=0, timeout=20)


def valid(response: Response) -> Response:
    """The response itself, which fits its type: the client does not look."""
    Response.model_validate(response.model_dump(mode="json", by_alias=True, warnings=False), strict=False)
    return response


def test_a_response_has_its_text_and_usage(say: Say) -> None:
    response = valid(client(say("It rains.")).responses.create(model="tiny", input="hello", instructions="Be kind."))
    assert (response.output_text, response.status, response.model) == ("It rains.", "completed", "tiny")
    assert response.usage is not None and response.usage.total_tokens == response.usage.input_tokens + 9
    again = client(say("It rains.")).responses.create(model="tiny", input="hello", max_output_tokens=3)
    assert again.status == "incomplete" and again.incomplete_details is not None
    assert (again.output_text, again.incomplete_details.reason) == ("It ", "max_output_tokens")


def test_tools_are_called_and_answered(say: Say) -> None:
    site = say(THOUGHTFUL, "It rains.")
    api = client(site)
    first = valid(api.responses.create(model="tiny", input="hello", tools=[WEATHER], tool_choice="auto"))
    thought, _, call = first.output
    assert isinstance(thought, ResponseReasoningItem) and thought.content is not None and thought.content[0].text == "Hm"
    assert isinstance(call, ResponseFunctionToolCall) and (call.name, call.arguments) == ("weather", '{"city": "Bonn"}')
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = api.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "It rains."
    history: Any = [{"role": "user", "content": "hello"}, *first.output, result]
    third = api.responses.create(model="tiny", input=history, tools=[WEATHER], store=False)
    assert third.output_text == "It rains."
    assert site.engine.requests[1].prompt == site.engine.requests[2].prompt


def test_the_stream_helper_adds_a_response_up(say: Say) -> None:
    with client(say(THOUGHTFUL)).responses.stream(model="tiny", input="hello", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)) == "I look."
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    calls = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(thoughts) == "Hm" and calls[-1].snapshot == '{"city": "Bonn"}'
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"] and final.output_text == "I look."
    for event in events:
        type(event).model_validate(event.model_dump(mode="json", by_alias=True, warnings=False))


def test_custom_tools_are_called_with_text(say: Say) -> None:
    api = client(say(written("patch", input="*** ß")))
    [call] = valid(api.responses.create(model="tiny", input="hello", tools=[PATCH])).output
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("patch", "*** ß")
    stream = api.responses.create(model="tiny", input="hello", tools=[PATCH], stream=True)
    assert "*** ß" in [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]


def test_an_answer_is_parsed_as_a_model(say: Say) -> None:
    site = say('{"name": "Köln", "people": 1}')
    parsed = client(site).responses.parse(model="tiny", input="hello", text_format=City).output_parsed
    assert parsed == City(name="Köln", people=1)
    structure = site.engine.requests[-1].sampling.structured_outputs
    assert structure is not None and "people" in str(structure.json)


def test_responses_are_found_listed_and_deleted(say: Say) -> None:
    api = client(say("Yes."))
    first = api.responses.create(model="tiny", input="hello", metadata={"a": "b"})
    second = api.responses.create(model="tiny", input="And now?", previous_response_id=first.id)
    assert api.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert [item.type for item in api.responses.input_items.list(second.id, limit=1)] == ["message"] * 3
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.cancel(second.id)
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="8 responses are kept"):
        api.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
        api.responses.create(model="tiny", input="hello", previous_response_id=first.id)


def test_log_probabilities_come_with_the_text(say: Say) -> None:
    include: Any = ["message.output_text.logprobs"]
    response = client(say("Yes.")).responses.create(model="tiny", input="hello", top_logprobs=2, include=include)
    [message] = valid(response).output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs is not None and "".join(entry.token for entry in logprobs) == "Yes." and len(logprobs[0].top_logprobs) == 2


def test_the_asynchronous_client_streams(say: Say) -> None:
    async def read() -> tuple[str, str]:
        api = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{site.port}/v1", api_key="a", max_retries=0)
        async with api, api.responses.stream(model="tiny", input="hello") as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return "".join(texts), (await stream.get_final_response()).output_text

    site = say("It rains.")
    assert asyncio.run(read()) == ("It rains.", "It rains.")
