"""The HTTP side in front of a real cluster: what it says is what the model says, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.http_server import Site, served
from support.processes import wait_until
from support.streams import CHAT, COMPLETIONS, USER, ask, next_chunk, open_stream, stream, text_of
from support.tiny_pair import CONTEXT, Pair
from support.tool_templates import HERMES_TEMPLATE
from transformers import AutoModelForCausalLM

from pipedec.client.async_client import AsyncClient
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import Completion, SamplingParams
from pipedec.families import context_length
from pipedec.messages import PromptRequest
from pipedec.server.front import Front, ServedRun, ServerSettings
from pipedec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PROMPT = "The pipeline is kept full"


@pytest.fixture(scope="module")
def cluster(pair: Pair) -> Iterator[LocalCluster]:
    with LocalCluster(pair.spec(2)) as running:
        yield running


@pytest.fixture(scope="module")
def cluster_site(pair: Pair, cluster: LocalCluster) -> Iterator[Site]:
    """A server in front of ``cluster``."""
    front = Front(ServerSettings(("tiny",)))
    address = cluster.address
    with served(front) as site:
        client = site.run(AsyncClient.connect(address.redis_url, address.run_id))
        tokenizer = Tokenizer(pair.target)
        front.attach(
            ServedRun(
                client,
                tokenizer,
                client.description,
                context_length(pair.target, client.description.settings.limits.max_model_len),
            )
        )
        yield site
        site.run(client.aclose())


def text_of_completion(completion: Completion) -> str:
    """Without half a character where it was cut off."""
    return completion.text if completion.finish_reason == "stop" else completion.text.rstrip("\ufffd")


def status(site: Site) -> Any:
    assert site.front.served is not None
    return site.run(site.front.served.engine.status())  # type: ignore[attr-defined]


def test_answers_are_those_of_the_client(cluster_site: Site, cluster: LocalCluster) -> None:
    assert cluster.scheduler is not None
    client = Client(cluster.scheduler, cluster.check)
    for sampling in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=7)):
        expected = client.ask(PromptRequest(PROMPT, raw=True, sampling=sampling))
        fields = {"prompt": PROMPT, "max_tokens": 24, "temperature": sampling.temperature, "seed": sampling.seed}
        document = ask(cluster_site, COMPLETIONS, **fields)
        assert document["choices"][0]["text"] == text_of_completion(expected)
        assert document["usage"]["completion_tokens"] == len(expected.token_ids)
        assert document["usage"]["prompt_tokens"] == expected.prompt_tokens
        assert text_of(stream(cluster_site, COMPLETIONS, **fields)) == document["choices"][0]["text"]
    for fields in ({}, {"threads": None, "method": "pp"}):
        expected = client.ask(PromptRequest("hello", sampling=SamplingParams(max_tokens=24)))
        document = ask(cluster_site, CHAT, max_tokens=24, temperature=0, **fields)
        assert document["choices"][0]["message"]["content"] == text_of_completion(expected)


def test_choices_are_the_answers_of_their_seeds(cluster_site: Site) -> None:
    choices = ask(cluster_site, COMPLETIONS, prompt=PROMPT, n=3, seed=5, max_tokens=12)["choices"]
    alone = [ask(cluster_site, COMPLETIONS, prompt=PROMPT, seed=5 + index, max_tokens=12)["choices"][0] for index in range(3)]
    assert [choice["text"] for choice in choices] == [choice["text"] for choice in alone]


@pytest.mark.failure_case("H20")
def test_a_stop_string_inside_a_burst_ends_the_answer_there(cluster_site: Site) -> None:
    whole = ask(cluster_site, COMPLETIONS, prompt=PROMPT, max_tokens=24, temperature=0, ignore_eos=True)["choices"][0]["text"]
    stop = whole[8:11]
    fields = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stop": [stop]}
    document = ask(cluster_site, COMPLETIONS, **fields)
    parts = stream(cluster_site, COMPLETIONS, **fields, stream_options={"include_usage": True})
    assert document["choices"][0]["text"] == text_of(parts) == whole[: whole.index(stop)]
    assert document["choices"][0]["finish_reason"] == "stop" and document["usage"]["completion_tokens"] < 24
    assert parts[-1]["usage"]["completion_tokens"] == document["usage"]["completion_tokens"]


def test_echoed_log_probabilities_are_the_models(cluster_site: Site, pair: Pair) -> None:
    prompt = Tokenizer(pair.target).encode(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(pair.target)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [logits[place, token].item() for place, token in enumerate(prompt[1:])]
    document = ask(cluster_site, COMPLETIONS, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    shown = document["choices"][0]["logprobs"]
    assert shown["token_logprobs"][0] is None and shown["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    best = logits.max(-1).values[:-1].tolist()
    assert [max(entry.values()) for entry in shown["top_logprobs"][1:]] == pytest.approx(best, abs=1e-4)
    assert document["choices"][0]["text"] == PROMPT and document["usage"]["completion_tokens"] == 0


def test_log_probabilities_are_streamed_with_their_tokens(cluster_site: Site) -> None:
    fields = {"max_tokens": 16, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = ask(cluster_site, CHAT, **fields)["choices"][0]["logprobs"]["content"]
    parts = [part["choices"][0]["logprobs"] for part in stream(cluster_site, CHAT, **fields)]
    streamed = [entry for part in parts if part for entry in part["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole] and len(whole) == 16
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in whole], abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 3 for entry in whole)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_requests_of_a_client_that_leaves_free_their_memory(cluster_site: Site, streamed: bool) -> None:
    body = json.dumps({"messages": USER, "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": streamed, "n": 2}).encode()
    with cluster_site.connect() as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert wait_until(lambda: len(status(cluster_site).running) == 2)
        other = ask(cluster_site, CHAT, max_tokens=8, temperature=0)["choices"]
    assert wait_until(lambda: not status(cluster_site).running and status(cluster_site).stats.kv.used == 0)
    assert cluster_site.front.unfinished == 0
    assert ask(cluster_site, CHAT, max_tokens=8, temperature=0)["choices"] == other


def test_an_aborted_answer_ends_in_order(cluster_site: Site) -> None:
    with open_stream(cluster_site, CHAT, max_tokens=CONTEXT - 100, ignore_eos=True) as response:
        lines = response.iter_lines()
        next_chunk(lines)
        cluster_site.call(cluster_site.front.abort)
        rest = [line for line in lines if line.startswith("data: ")]
    cluster_site.front.is_aborting = False
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "abort" and rest[-1] == "data: [DONE]"


def test_many_streams_are_exact_while_others_come_and_go(cluster_site: Site) -> None:
    alone = text_of(stream(cluster_site, COMPLETIONS, prompt=PROMPT, max_tokens=20, temperature=0))

    async def leave(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster_site.port)
        body = json.dumps({"messages": USER, "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.read(1 + number * 97)
        writer.close()

    async def crowd() -> list[str]:
        asked = asyncio.gather(*(asyncio.to_thread(
            stream, cluster_site, COMPLETIONS, prompt=PROMPT, max_tokens=20, temperature=0) for _ in range(4)))  # fmt: skip
        await asyncio.gather(*(leave(number) for number in range(24)))
        return [text_of(parts) for parts in await asked]

    assert asyncio.run(crowd()) == [alone] * 4
    assert wait_until(lambda: cluster_site.front.unfinished == 0 and not status(cluster_site).running)


SIZE = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "size"], "additionalProperties": False,
}  # fmt: skip
AS_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_follow_their_schema_with_every_method_whole_and_streamed(cluster_site: Site, temperature: int) -> None:
    fields = {**AS_SCHEMA, "temperature": temperature, "seed": 3, "max_tokens": 100}
    document = ask(cluster_site, CHAT, **fields)
    text = document["choices"][0]["message"]["content"]
    found = json.loads(text)
    assert found["color"] in ("red", "green") and 0 <= found["size"] <= 99 and list(found) == ["color", "size"]
    assert text == json.dumps(found) and document["choices"][0]["finish_reason"] == "stop"
    for method in ("pp", "stpp", "pipedec", "bita"):
        assert text_of(stream(cluster_site, CHAT, **fields, method=method)) == text


def test_answers_in_company_follow_forms_of_their_own(cluster_site: Site) -> None:
    fields = {"prompt": [PROMPT, "hello"], "n": 2, "temperature": 1, "seed": 5, "max_tokens": 60}
    for form, pattern in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[a-c]{3,5}-[0-9]{2}"}, "[a-c]{3,5}-[0-9]{2}"),
        ({"guided_grammar": 'start: "a" inner "b"\ninner: ("x" | "y"){2,4}'}, "a[xy]{2,4}b"),
    ):
        choices = ask(cluster_site, COMPLETIONS, **fields, **form)["choices"]
        assert len(choices) == 4 and all(re.fullmatch(pattern, choice["text"]) for choice in choices)


def test_a_call_that_must_be_is_one(cluster_site: Site) -> None:
    """The template of this model knows no tools: calls are plain JSON."""
    tools = [{"type": "function", "function": {"name": name, "parameters": SIZE}} for name in ("paint", "sell")]
    fields = {"tools": tools, "temperature": 1, "seed": 1, "max_tokens": 200}
    choice = ask(cluster_site, CHAT, **fields, tool_choice="required", parallel_tool_calls=False)["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"]["name"] in ("paint", "sell") and json.loads(call["function"]["arguments"])["size"] <= 99
    named = {"type": "function", "function": {"name": "sell"}}
    parts = stream(cluster_site, CHAT, **fields, tool_choice=named)
    calls = [
        part["choices"][0]["delta"]["tool_calls"][0]["function"] for part in parts if "tool_calls" in part["choices"][0]["delta"]
    ]
    assert calls[0]["name"] == "sell"
    assert json.loads("".join(call["arguments"] for call in calls)).keys() == SIZE["properties"].keys()


@pytest.mark.slow
def test_calls_in_the_form_of_a_template_are_read_whole_and_streamed(
    cluster_site: Site, pair: Pair, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The server's tokenizer has a template of its own: the cluster gets token ids."""
    shutil.copytree(pair.target, tmp_path / "tools", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "tools" / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    front, served = cluster_site.front, cluster_site.front.require()
    request.addfinalizer(lambda: front.attach(served))
    front.attach(replace(served, tokenizer=Tokenizer(tmp_path / "tools")))
    tools = [{"type": "function", "function": {"name": name, "parameters": SIZE}} for name in ("paint", "sell")]
    fields = {"tools": tools, "tool_choice": "required", "temperature": 1, "seed": 4, "max_tokens": 300}
    choice = ask(cluster_site, CHAT, **fields)["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert all(json.loads(call["function"]["arguments"])["color"] in ("red", "green") for call in calls)
    parts = stream(cluster_site, CHAT, **fields, method="stpp")
    streamed = [call for part in parts for call in part["choices"][0]["delta"].get("tool_calls", ())]
    for index, call in enumerate(calls):
        pieces = [one["function"] for one in streamed if one["index"] == index]
        assert pieces[0]["name"] == call["function"]["name"]
        assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"]
