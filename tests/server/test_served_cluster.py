"""The HTTP side in front of a real cluster: what it says is what the model says, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, Site, ask, send, stream, text_of
from support.processes import wait_until
from support.tiny_pair import CONTEXT, Pair
from support.tool_templates import HERMES_TEMPLATE

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import Completion, SamplingParams
from pipedec.messages import PromptRequest
from pipedec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PROMPT = "The pipeline is kept full"


def text_of_completion(completion: Completion) -> str:
    """Without half a character where it was cut off."""
    return completion.text if completion.finish_reason == "stop" else completion.text.rstrip("\ufffd")


def status(site: Site) -> Any:
    assert site.front.served is not None
    return site.run(site.front.served.engine.status())  # type: ignore[attr-defined]


def test_answers_are_those_of_the_client(cluster_site: Site, resident: LocalCluster) -> None:
    assert resident.scheduler is not None
    client = Client(resident.scheduler, resident.check)
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


@pytest.mark.parametrize("streamed", [False, True])
def test_the_requests_of_a_client_that_leaves_free_their_memory(cluster_site: Site, streamed: bool) -> None:
    with cluster_site.connect() as connection:
        send(cluster_site, CHAT, connection, max_tokens=CONTEXT - 100, ignore_eos=True, stream=streamed, n=2)
        assert wait_until(lambda: len(status(cluster_site).running) == 2)
        other = ask(cluster_site, CHAT, max_tokens=8, temperature=0)["choices"]
    assert wait_until(lambda: not status(cluster_site).running and status(cluster_site).stats.kv.used == 0)
    assert cluster_site.front.unfinished == 0
    assert ask(cluster_site, CHAT, max_tokens=8, temperature=0)["choices"] == other


def test_many_streams_are_exact_while_others_come_and_go(cluster_site: Site) -> None:
    alone = text_of(stream(cluster_site, COMPLETIONS, prompt=PROMPT, max_tokens=20, temperature=0))

    def leave(number: int) -> None:
        with cluster_site.connect() as connection:
            send(cluster_site, CHAT, connection, max_tokens=200, stream=True, ignore_eos=True)
            connection.recv(1 + number * 97)

    with ThreadPoolExecutor(28) as pool:
        fields = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        asked = [pool.submit(stream, cluster_site, COMPLETIONS, **fields) for _ in range(4)]
        list(pool.map(leave, range(24)))
        assert [text_of(one.result()) for one in asked] == [alone] * 4
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
