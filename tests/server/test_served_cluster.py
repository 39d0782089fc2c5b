"""The HTTP side in front of a real cluster: what it says is what the model says, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, Site, ask, send, status, stream, text_of
from support.processes import wait_until
from support.tiny_pair import CONTEXT, Pair
from support.tool_templates import HERMES_TEMPLATE

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core.completion import Completion
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PROMPT = "The pipeline is kept full"


def text_of_completion(completion: Completion) -> str:
    """Without half a character where it was cut off."""
    return completion.text if completion.finish_reason == "stop" else completion.text.rstrip("\ufffd")


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


@pytest.mark.parametrize("method", ["pp", "stpp", "pipedec", "bita", "pipedec-bestfirst"])
@pytest.mark.failure_case("H35")
def test_a_special_token_that_a_stop_string_names_ends_the_answer_with_every_method(cluster_site: Site, method: str) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logit_bias": {"3": 100}, "stop": ["<|user|>"]}
    document = ask(cluster_site, COMPLETIONS, **fields, method=method)
    assert (document["choices"][0]["text"], document["choices"][0]["finish_reason"]) == ("", "stop")
    assert document["usage"]["completion_tokens"] == 1
    last = stream(cluster_site, COMPLETIONS, **fields, method=method)[-1]["choices"][0]
    assert (last["text"], last["finish_reason"]) == ("", "stop")


def test_further_fields_hold_for_the_model(cluster_site: Site) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    (echoed,) = ask(cluster_site, COMPLETIONS, **fields, echo=True, logprobs=3)["choices"]
    (choice,) = ask(cluster_site, COMPLETIONS, **fields, prompt_logprobs=3, return_token_ids=True)["choices"]
    prompt, known = choice["prompt_token_ids"], echoed["logprobs"]["token_logprobs"]
    own = [shown and shown[str(token)]["logprob"] for token, shown in zip(prompt, choice["prompt_logprobs"], strict=True)]
    assert own == known[: len(prompt)] and len(choice["token_ids"]) == 20
    kept = ask(cluster_site, COMPLETIONS, **fields | {"prompt": prompt[-4:]})
    truncated = ask(cluster_site, COMPLETIONS, **fields, truncate_prompt_tokens=4)
    assert truncated["choices"] == kept["choices"] and truncated["usage"]["prompt_tokens"] == 4
    ends = {"logit_bias": {"2": 100}, "return_token_ids": True}
    for method in ("pp", "stpp", "pipedec", "bita", "pipedec-bestfirst"):
        (short,) = ask(cluster_site, COMPLETIONS, **fields, **ends, method=method)["choices"]
        (long,) = ask(cluster_site, COMPLETIONS, **fields, **ends, min_tokens=7, method=method)["choices"]
        assert (len(short["token_ids"]), len(long["token_ids"])) == (1, 8) and 2 not in long["token_ids"][:7]
        assert short["finish_reason"] == long["finish_reason"] == "stop"
    shown = {"logit_bias": {"3": 100}, "skip_special_tokens": False}
    assert ask(cluster_site, COMPLETIONS, **fields, **shown)["choices"][0]["text"] == "<|user|>" * 20
    stopped = {"stop": ["<|user|>"], "include_stop_str_in_output": True}
    (choice,) = ask(cluster_site, COMPLETIONS, **fields, **shown, **stopped)["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("<|user|>", "<|user|>")


_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "priority", "logprobs", "best_of", "min_tokens",
)  # fmt: skip
_NESTED = b"[" * 900 + b"]" * 900
_PARTS = [{"type": "text", "text": "a"}]
_CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_ASKED = [{"role": "user", "content": "a"}]
_BLOCKS = [{"type": "text", "text": "a"}]
_DEEP: dict[str, Any] = reduce(lambda inner, _: {"a": inner}, range(800), {})
_LONG = {"max_tokens": 400, "ignore_eos": True}
_CHAIN = "\n".join(f'r{number} ::= r{number + 1} | "x"' for number in range(5000))
_PATTERNS = [{"type": "string", "pattern": f".*a.{{{number}}}b.*"} for number in range(30)]
_REFERENCES = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(4000)}
_COSTLY = [
    {**_LONG, "method_options": {"forwards": 500}},
    {**_LONG, "method": "pipedec", "method_options": {"width": 4096, "children": 4096}},
    {"max_tokens": 50, "n": 8, "stop_token_ids": [7] * 300_000},
    *({"max_tokens": 200, "structured_outputs": value} for value in (
        {"grammar": f'root ::= r0\n{_CHAIN}\nr5000 ::= "y"'}, {"json": {"allOf": _PATTERNS}}, {"regex": "a{1000000}"},
        {"json": {"$ref": "#/$defs/d0", "$defs": {**_REFERENCES, "d4000": {"type": "null"}}}}, {"json": {"const": "ab" * 30_000}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, {"choice": ["<|user|>"]}, {"regex": "(" * 9000},
        {"json": {"properties": {f"p{number}": {"type": "integer"} for number in range(1000)}}},
        {"json": {"properties": {f"p{number}": {"type": "string", "pattern": "^a+$"} for number in range(3000)}}},
    )),
]  # fmt: skip
_HOSTILE: list[tuple[str, dict[str, Any] | bytes]] = [
    *((COMPLETIONS, {name: value}) for name in _NUMBERS for value in ("x", float("nan"), float("inf"), -1, 2**70, 1e308, [], {})),
    *((COMPLETIONS, {"prompt": value}) for value in (
        "", [], [[]], {}, 0, True, [None], ["a", None], [["a"]], "\0" * 100, "a" * 900_000, ["a"] * 100_000, [7] * 300_000,
        [[7]] * 1024, [[7] * 3000], [2**70], [-1], [1.5], "\ud800", " " * 200_000, ["a"] * 1024,
    )),
    *((COMPLETIONS, {"stop": value}) for value in (
        ["a" * 999 + chr(100 + number) for number in range(16)], ["<|user|>"] * 16, ["x"] * 300_000, [""], [None], {}, "\udc00",
    )),
    *((COMPLETIONS, {"stop_token_ids": value}) for value in ([300], [-1], [2**70], "x", [None], [[7]])),
    *((COMPLETIONS, {"logit_bias": value}) for value in (
        {str(token): 100 for token in range(300)}, {"5": float("nan")}, {"5": 1e400}, {"x": 1}, {"-1": 1}, {"9" * 400: 1}, [1],
        {str(token): -100 for token in range(300)},
    )),
    *((COMPLETIONS, {"method": "pp", "method_options": value}) for value in ({"a": 1}, [], {"": None}, {"width": 2**70})),
    *((COMPLETIONS, value) for value in (
        {"method": "x" * 100_000}, {"threads": "../" * 1000}, {"model": "x" * 100_000}, {"user": "x" * 900_000},
        {"stream": True, "stream_options": [1]}, {"stream": "x"},
        {"echo": True, "max_tokens": 0, "logprobs": 20, "prompt": "a" * 99}, {"temperature": 1e308, "seed": -1},
        {"n": 8, "logprobs": 20, "echo": True, "priority": -(2**31), "seed": 2**64 - 1, "temperature": 2, "top_k": 300,
         "presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1e-9, "logit_bias": {"5": 100}},
        {"temperature": 5e-324}, {"top_p": 5e-324, "temperature": 1}, {"prompt_logprobs": 1},
    )),
    *((COMPLETIONS, value) for value in (
        b"", b"{", b"null", b"\xff" * 1000, b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "a", "x": ' + _NESTED + b"}",
        b'{"prompt": "a", "prompt": 1}', b'{"prompt": "a", "n": ' + b"9" * 4000 + b"}", b'{"prompt": "a"' + b" " * 900_000 + b"}",
        b'{"prompt": "a", "x": [' + b"{}," * 300_000 + b"{}]}", b'{"prompt": "a", "temperature": -Infinity}',
    )),
    *((path, {"messages": value}) for path in (CHAT, "/tokenize") for value in (
        [], {}, "a", [None], [{}], [{"role": 1}], [{"role": "x" * 100_000, "content": "a"}], [{"role": "user"}],
        [{"role": "user", "content": [_PARTS]}], [{"role": "user", "content": _PARTS * 4095}], [_CALLED], [_CALLED] * 5000,
        [{"role": "user", "content": "a"}] * 4096, [{"role": "user", "content": _PARTS}] * 4096,
        [{"role": "user", "prefix": True}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
        [{"role": "user", "content": "a" * 900_000}], [{"role": "user", "content": "\udfff"}],
    )),
    (CHAT, b'{"messages": [{"role": "user", "content": "a", "x": ' + _NESTED + b"}]}"),
    *((CHAT, {"messages": [{"role": "user", "content": "a"}], **value}) for value in (
        {"chat_template_kwargs": {"messages": []}}, {"chat_template_kwargs": {"x": "y" * 900_000}}, {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {str(number): number for number in range(50_000)}}, {"chat_template_kwargs": {"bos_token": 5}},
        {"tools": [None]}, {"tool_choice": {}}, {"logprobs": True, "top_logprobs": 2**70}, {"reasoning_effort": "x" * 900_000},
    )),
    *(("/detokenize", {"tokens": value}) for value in ([7] * 400_000, [2**70], [-1], "x", [None], {}, [], [7] * CONTEXT)),
    *(("/tokenize", {"prompt": value}) for value in ("a" * 900_000, [7], None, "", "\ud800", {})),
    *((path, {"messages": [_CALLED], "prompt": "a", "stream": False, **value})
      for path in ("/api/chat", "/api/generate") for value in (
        {"options": {"num_predict": 2**70}}, {"options": {"num_predict": 4, "seed": 2**70, "stop": "x"}}, {"options": []},
        {"options": {"temperature": float("nan")}}, {"format": {"allOf": _PATTERNS}}, {"format": {"$ref": "#"}}, {"format": "x"},
        {"think": "x" * 900_000, "options": {"num_predict": 4}}, {"think": []}, {"keep_alive": {}}, {"model": "x" * 100_000},
        {"raw": True, "prompt": "a" * 900_000}, {"system": "a" * 900_000}, {"images": ["AAAA"]}, {"top_logprobs": 2**70},
        {"messages": [_CALLED] * 2000 + [{"role": "tool", "tool_name": "f", "content": "a"}] * 2000, "system": "\ud800"},
    )),
    *((path, value) for path in ("/api/chat", "/api/generate", "/api/show") for value in (b"", b"[1]", b"\xff" * 1000)),
    *((COMPLETIONS, {"truncate_prompt_tokens": value, "prompt": "a" * 900_000}) for value in (-1, 1, 2**70, 0, -2, "x")),
    *((COMPLETIONS, value) for value in (
        {"prompt_logprobs": 20, "prompt": "a" * 99}, {"prompt_logprobs": 2**70}, {"n_predict": -9}, {"n_predict": 2**70},
        {"repeat_penalty": float("nan")}, {"json_schema": []}, {"ebnf": "root ::= root"}, {"return_token_ids": 5},
        {"min_tokens": 2**70}, {"min_tokens": 3, "max_tokens": 2},
    )),
    *((CHAT, {"messages": [{"role": "user", "content": "a"}], "documents": value}) for value in ([[]], ["a"], [{}] * 9999)),
    *((COMPLETIONS, value) for value in _COSTLY),
    *((MESSAGES, {"messages": value}) for value in (
        [], "a", [None], [{"role": "user", "content": _BLOCKS * 4000}], [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": _BLOCKS}]}] * 2000,
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": _DEEP}]}, *_ASKED],
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "\ud800", "signature": "x" * 900_000}]}],
    )),
    *((MESSAGES, {"messages": _ASKED, **value}) for value in (
        {"max_tokens": 2**70}, {"system": _BLOCKS * 5000}, {"stop_sequences": [""] * 100}, {"tools": [{"name": "f"}] * 5000},
        {"thinking": {"type": "enabled", "budget_tokens": -1}}, {"tool_choice": {"type": "tool", "name": "\ud800"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"allOf": _PATTERNS}}}},
    )),
    *((RESPONSES, {"input": value}) for value in (
        [], "", "\ud800", [None], [{"type": "item_reference", "id": "x" * 90_000}] * 50, [{"type": "function_call_output"}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "x" * 900_000}], _ASKED * 5000,
        [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[" * 90_000}],
    )),
    *((RESPONSES, {"input": "a", **value}) for value in (
        {"previous_response_id": "../" * 30_000}, {"max_output_tokens": -1}, {"include": ["x"] * 90_000}, {"conversation": {}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}}}, {"tools": [{"type": "mcp"}] * 5000},
        {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}],
         "tool_choice": "required"},
    )),
    *((path, value) for path in ("/api/chat", "/api/generate") for value in (
        {"prompt": "a", "messages": _ASKED, "options": {"num_predict": 2**70}},
        {"prompt": "a", "messages": _ASKED, "options": []},
        {"prompt": "a", "messages": _ASKED, "format": {"allOf": _PATTERNS}, "options": {"num_predict": 4}}, {"model": "\ud800"},
        {"prompt": "a", "messages": _ASKED, "think": "x" * 90_000}, {"prompt": "\0" * 900_000, "messages": [{"role": "tool"}]},
    )),
    *(("/api/show", value) for value in ({}, {"model": 1}, {"model": "x" * 90_000}, b"\xff", b"[" * 100_000)),
    *((MESSAGES + "/count_tokens", value) for value in ({"messages": []}, {"messages": _ASKED * 4000}, b"null")),
]  # fmt: skip
_FIELDS: dict[str, dict[str, Any]] = {  # that every such body has
    COMPLETIONS: {"prompt": "a", "max_tokens": 4}, CHAT: {"max_tokens": 4}, MESSAGES: {"max_tokens": 4},
    RESPONSES: {"max_output_tokens": 4},
}  # fmt: skip


@pytest.mark.seconds(900)
@pytest.mark.failure_case("H42")
def test_no_hostile_body_hurts_a_stream_beside_it(cluster_site: Site) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    before, alone = status(cluster_site), text_of(stream(cluster_site, COMPLETIONS, **fields))

    def ask_one(path: str, hostile: dict[str, Any] | bytes) -> tuple[int, str]:
        body = hostile if isinstance(hostile, bytes) else json.dumps({**_FIELDS.get(path, {}), **hostile}).encode()
        response = cluster_site.client.post(path, content=body, headers={"content-type": "application/json"}, timeout=120)
        return response.status_code, f"{path} {body[:200]!r}: {response.status_code} {response.text[:200]}"

    assert len(_HOSTILE) > 60
    with ThreadPoolExecutor(3) as pool:
        for start in range(0, len(_HOSTILE), 50):
            beside = pool.submit(stream, cluster_site, COMPLETIONS, **fields)
            answered = list(pool.map(ask_one, *zip(*_HOSTILE[start : start + 50], strict=True)))
            wrong = [shown for code, shown in answered if code != 503 and not 200 <= code < 500]
            assert not wrong
            assert text_of(beside.result()) == alone
    after = status(cluster_site)
    assert (after.epoch, after.num_recoveries) == (before.epoch, before.num_recoveries) and not after.is_recovering


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


@pytest.mark.parametrize("fields", [{}, AS_SCHEMA], ids=["free", "schema"])
def test_a_thought_keeps_its_budget_with_every_method(
    cluster_site: Site, pair: Pair, tmp_path: Path, request: pytest.FixtureRequest, fields: dict[str, Any]
) -> None:
    shutil.copytree(pair.target, tmp_path / "thinks", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "thinks" / "chat_template.jinja").write_text("{{ messages[0].content }}<think>")
    front, served = cluster_site.front, cluster_site.front.require()
    request.addfinalizer(lambda: front.attach(served))
    front.attach(replace(served, tokenizer=Tokenizer(tmp_path / "thinks")))
    fields = {**fields, "thinking_token_budget": 6, "temperature": 1, "seed": 5, "max_tokens": 60}
    choice = ask(cluster_site, CHAT, **fields, logprobs=True)["choices"][0]
    message, tokens = choice["message"], [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
    num_thought = next(count for count in range(len(tokens)) if b"".join(tokens[count:]).startswith(b"</think>"))
    assert 0 < num_thought <= 6 and message["reasoning_content"]
    if "response_format" in fields:
        assert list(json.loads(message["content"])) == ["color", "size"]
    for method in ("pp", "stpp", "pipedec", "bita"):
        assert ask(cluster_site, CHAT, **fields, method=method)["choices"][0]["message"] == message


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
