"""``/v1/responses``: items to a prompt, answers to items whole and streamed, and the responses that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.http_server import Site, served
from support.scripted_responses import Say, scripted_responses, written
from support.tiny_pair import CONTEXT

from pipedec.core.errors import RequestFailed
from pipedec.server.errors import ApiError
from pipedec.server.front import Front, ServerSettings
from pipedec.server.openai.response_store import ResponseStore

RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function", "name": "weather", "description": "Of today", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
PATCH = {
    "type": "custom", "name": "patch", "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "***"'},
}  # fmt: skip
AGENTS = {"type": "namespace", "name": "agents", "description": "Others", "tools": [{"type": "function", "name": "spawn"}]}
BUILT_IN = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"}, {"type": "mcp", "server_label": "a"}]
TOOLS = [WEATHER, PATCH, AGENTS, *BUILT_IN]


CALL = written("weather", city="Bonn")
CALLED = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bonn"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def say(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Say]:
    with scripted_responses(tmp_path_factory.mktemp("tokenizer")) as saying:
        yield saying


def create(site: Site, given: Any = "hello", **fields: Any) -> dict[str, Any]:
    response = site.client.post(RESPONSES, json={"input": given, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(site: Site, given: Any = "hello", **fields: Any) -> list[dict[str, Any]]:
    """Those of a stream, whose names and numbers are as they should be."""
    response = site.client.post(RESPONSES, json={"input": given, "stream": True, **fields})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"), response.text
    found = re.findall(r"event: (.+)\ndata: (.+)\n\n", response.text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found) == response.text
    documents = [json.loads(data) for _, data in found]
    assert [one["type"] for one in documents] == [name for name, _ in found]
    assert [one["sequence_number"] for one in documents] == list(range(len(documents)))
    return documents


def prompt(site: Site, index: int = -1) -> str:
    return site.engine.tokenizer.decode(site.engine.requests[index].prompt, skip_special_tokens=False)


def shape(output: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The types and texts of items, without their ids, which are unique."""
    ids = [item[name] for item in output for name in ("id", "call_id") if name in item]
    assert len(set(ids)) == len(ids)
    found = []
    for item in output:
        parts = [part["text"] for part in item.get("content", ())]
        given = [item[name] for name in ("namespace", "name", "arguments", "input") if name in item]
        found.append((item["type"], item["status"], *parts, *given))
    return found


ANSWERS: list[tuple[str, list[tuple[str, ...]], str]] = [
    ("It rains.", [("message", "completed", "It rains.")], "completed"),
    ("<think>\nHm, rain?\n</think>\n\nYes.", [("reasoning", "completed", "Hm, rain?"), ("message", "completed", "Yes.")],
     "completed"),
    (f"I look.\n{CALL}", [("message", "completed", "I look."),
                          ("function_call", "completed", "weather", '{"city": "Bonn"}')], "completed"),
    (f"<think>A</think>{CALL}\n{written('agents__spawn')}",
     [("reasoning", "completed", "A"), ("function_call", "completed", "weather", '{"city": "Bonn"}'),
      ("function_call", "completed", "agents", "spawn", "{}")], "completed"),
    (written("patch", input='*** "Begin"\nß'), [("custom_tool_call", "completed", "patch", '*** "Begin"\nß')], "completed"),
    (written("patch", file="a"), [("custom_tool_call", "completed", "patch", '{"file": "a"}')], "completed"),
    (written("web_search"), [("message", "completed", written("web_search"))], "completed"),
    ("", [], "completed"),
    ("It rains. " * 30, [("message", "incomplete", ("It rains. " * 30)[:200])], "incomplete"),
    ("<think>" + "Hm. " * 60, [("reasoning", "incomplete", ("Hm. " * 60)[:199].strip())], "incomplete"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "output", "status"), ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize("burst", [1, 3, 500])
def test_a_stream_adds_up_to_the_whole_response(
    say: Say, text: str, output: list[tuple[str, ...]], status: str, burst: int
) -> None:
    site, asked = say(text, burst=burst), {"tools": TOOLS, "max_output_tokens": 200, "include": ["reasoning.encrypted_content"]}
    whole, found = create(site, **asked), events(site, **asked)
    last = found[-1]["response"]
    assert (shape(whole["output"]), whole["status"]) == (output, status)
    assert (shape(last["output"]), last["status"], found[-1]["type"]) == (output, status, f"response.{status}")
    assert whole["usage"] == last["usage"] and whole["incomplete_details"] == last["incomplete_details"]
    assert (whole["incomplete_details"] or {}).get("reason") == ("max_output_tokens" if status == "incomplete" else None)
    assert added_up(found) == last["output"]


def added_up(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events of a stream make, whose order is checked."""
    assert [one["type"] for one in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    items: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    for one in found[2:-1]:
        kind = one["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None and one["output_index"] == len(items) and one["item"]["status"] == "in_progress"
            open_item, texts = one["item"], {"delta": "", "done": ""}
            continue
        assert open_item is not None and one["output_index"] == len(items)
        if kind == "output_item.done":
            assert one["item"]["id"] == open_item["id"] and texts["delta"] == texts["done"]
            items.append(one["item"])
            open_item = None
            continue
        assert one["item_id"] == open_item["id"]
        if kind.endswith(".delta"):
            texts["delta"] += one["delta"]
        elif kind == "content_part.done":
            assert one["part"]["text"] == texts["done"]
        elif kind.endswith(".done"):
            texts["done"] = one.get("text", one.get("arguments", one.get("input")))
    assert open_item is None
    return items


def test_usage_counts_thoughts_and_what_was_cached(say: Say) -> None:
    site = say("<think>Hm</think>Yes.")
    usage = create(site)["usage"]
    num_prompt = len(site.engine.requests[0].prompt)
    assert usage == {
        "input_tokens": num_prompt, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 8, "output_tokens_details": {"reasoning_tokens": 4}, "total_tokens": num_prompt + 8,
    }  # fmt: skip


def test_a_response_has_the_fields_of_its_request(say: Say) -> None:
    asked = {
        "instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0.5,
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False, "max_output_tokens": 7, "user": "me", "prompt_cache_key": "k", "safety_identifier": "s",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "store": False, "top_p": 0.25,
    }  # fmt: skip
    found = create(
        say(CALL), **asked, tools=TOOLS, truncation="auto", service_tier="flex", reasoning={"effort": "low", "summary": "auto"}
    )
    assert {name: found[name] for name in asked if name != "text"} == {name: asked[name] for name in asked if name != "text"}
    assert found["text"] == {"format": {"type": "text"}} and found["reasoning"] == {"effort": "low", "summary": None}
    assert found["tools"] == [WEATHER, PATCH, AGENTS], "those that the model was offered"
    assert (found["object"], found["model"], found["truncation"], found["error"]) == ("response", "tiny", "disabled", None)
    assert found["id"].startswith("resp_") and found["created_at"] <= found["completed_at"]
    defaults = create(say("Yes."))
    assert (defaults["temperature"], defaults["tool_choice"], defaults["store"]) == (1.0, "auto", True)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("hello", "<|user|>hello"),
        ([USER], "<|user|>hello"),
        ([{"type": "message", **USER, "id": "msg_1", "status": "completed"}], "<|user|>hello"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}], "<|user|>a\nb"),
        ([{"role": "developer", "content": "x"}, {"role": "system", "content": "y"}, USER], "<|system|>x\n\ny<|user|>hello"),
        ([USER, {"role": "developer", "content": "x"}, USER], "<|user|>hello<|system|>x<|user|>hello"),
        ([USER, {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}, USER],
         "<|user|>hello<|assistant|>a<|user|>hello"),
        ([USER, CALLED, RESULT], f"<|user|>hello<|assistant|>{CALL}<|user|><tool_response>rain</tool_response>"),
        ([USER, CALLED, {**RESULT, "output": [{"type": "input_text", "text": "rain"}]}],
         f"<|user|>hello<|assistant|>{CALL}<|user|><tool_response>rain</tool_response>"),
        ([USER, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
          {"role": "assistant", "content": "I look."}, CALLED, {**CALLED, "call_id": "call_2"}, RESULT,
          {**RESULT, "call_id": "call_2"}],
         f"<|user|>hello<|assistant|><think>Hm</think>I look.{CALL}{CALL}" + 2 * "<|user|><tool_response>rain</tool_response>"),
        ([USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "encrypted_content": "gAAA"}, CALLED],
         f"<|user|>hello<|assistant|><think>Hm</think>{CALL}"),
        ([USER, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, CALLED], f"<|user|>hello<|assistant|>{CALL}"),
        ([USER, CALLED, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}, CALLED],
         f"<|user|>hello<|assistant|>{CALL}<|assistant|><think>Hm</think>{CALL}"),
        ([USER, {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "***"},
          {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}],
         f"<|user|>hello<|assistant|>{written('patch', input='***')}<|user|><tool_response>done</tool_response>"),
        ([USER, {**CALLED, "namespace": "agents", "name": "spawn", "arguments": "{}"}],
         f"<|user|>hello<|assistant|>{written('agents__spawn')}"),
        ([USER, {"type": "local_shell_call", "id": "ls_1", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
          {"type": "local_shell_call_output", "id": "c", "output": "a b"}],
         f"<|user|>hello<|assistant|>{written('local_shell', type='exec', command=['ls'])}"
         "<|user|><tool_response>a b</tool_response>"),
    ],
    ids=range(16),
)  # fmt: skip
def test_items_reach_the_chat_template_as_messages(say: Say, items: Any, expected: str) -> None:
    site = say("Yes.")
    create(site, items)
    assert prompt(site) == f"{expected}<|assistant|>"


def test_instructions_come_first(say: Say) -> None:
    site = say("Yes.")
    create(site, [{"role": "developer", "content": "Be kind."}, USER], instructions="Be brief.")
    assert prompt(site) == "<|system|>Be brief.\n\nBe kind.<|user|>hello<|assistant|>"


def test_tools_are_offered_as_functions_and_those_that_the_server_would_run_are_left_out(say: Say) -> None:
    site = say("Yes.")
    create(site, tools=TOOLS)
    shown = [json.loads(line)["function"] for line in re.findall(r'{"type": "function".*?}(?={|</tools>)', prompt(site))]
    assert [one["name"] for one in shown] == ["weather", "patch", "agents__spawn"]
    assert shown[0]["parameters"] == WEATHER["parameters"] and "parameters" not in shown[2]
    assert shown[1]["description"] == 'Edits files\n\nThe input follows this grammar:\nstart: "***"'
    assert shown[1]["parameters"] == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    create(site, tools=BUILT_IN)
    assert "<tools>" not in prompt(site)


@pytest.mark.parametrize(
    ("choice", "required", "offered"),
    [
        ("auto", (), ("weather", "patch", "spawn")),
        ("none", (), ()),
        ("required", ("weather", "patch", "spawn"), ("weather", "patch", "spawn")),
        ({"type": "function", "name": "weather"}, ("weather",), ("weather", "patch", "spawn")),
        ({"type": "custom", "name": "patch"}, ("patch",), ("weather", "patch", "spawn")),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}, (), ("patch",)),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
         ("weather",), ("weather",)),
    ],
)  # fmt: skip
def test_tool_choice_decides_what_is_offered_and_what_must_be_called(
    say: Say, choice: Any, required: tuple[str, ...], offered: tuple[str, ...]
) -> None:
    site = say("Yes.")
    create(site, tools=TOOLS, tool_choice=choice)
    structure = site.engine.requests[-1].sampling.structured_outputs
    grammar = "" if structure is None else str(structure.grammar)
    for name in ("weather", "patch", "spawn"):
        assert (name in grammar) == (name in required)
        assert (f'{name}"' in prompt(site)) == (name in offered)


def test_text_may_have_a_format(say: Say) -> None:
    site, schema = say('{"a": 1}'), {"type": "object", "properties": {"a": {"type": "integer"}}}
    create(site, text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    create(site, text={"format": {"type": "json_object"}})
    first, second = (request.sampling.structured_outputs for request in site.engine.requests)
    assert first is not None and json.loads(str(first.json)) == schema
    assert second is not None and second.json_object


def test_further_fields_reach_the_engine(say: Say) -> None:
    site = say("Yes.")
    create(site, temperature=0.25, top_p=0.5, top_k=4, seed=3, priority=-2, method="pp", max_output_tokens=9, client_metadata={})
    request = site.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.25, 0.5, 4, 3, 9)
    assert (request.priority, request.method) == (-2, "pp")


@pytest.mark.parametrize("burst", [1, 3, 500])
def test_log_probabilities_are_those_of_the_tokens_after_the_thoughts(say: Say, burst: int) -> None:
    site = say("<think>Hm</think>Größe", burst=burst)
    whole = create(site, top_logprobs=2)["output"][-1]["content"][0]["logprobs"]
    assert bytes(byte for entry in whole for byte in entry["bytes"]).decode() == "Größe"
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    found = events(site, top_logprobs=2)
    deltas = [entry for one in found if one["type"] == "response.output_text.delta" for entry in one["logprobs"]]
    assert deltas == whole == found[-1]["response"]["output"][-1]["content"][0]["logprobs"]
    plain = create(site, include=["message.output_text.logprobs"])["output"][-1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in plain] == [entry["token"] for entry in whole] and plain[0]["top_logprobs"] == []


def test_thoughts_come_back_from_clients_that_keep_only_what_is_encrypted(say: Say) -> None:
    site = say(f"<think>Größe?</think>{CALL}", "Rain.")
    first = create(site, store=False, tools=TOOLS, include=["reasoning.encrypted_content"])["output"]
    thought = {"type": "reasoning", "summary": [], "encrypted_content": first[0]["encrypted_content"]}
    create(site, [USER, thought, first[1], {**RESULT, "call_id": first[1]["call_id"]}], store=False)
    assert f"<|assistant|><think>Größe?</think>{CALL}<|user|>" in prompt(site)
    assert "encrypted_content" not in create(say("<think>A</think>B"))["output"][0]


def test_a_conversation_goes_on_from_a_response_that_is_kept(say: Say) -> None:
    site = say(f"<think>Hm</think>{CALL}", "It rains.", "Bye.")
    first = create(site, instructions="Be kind.", tools=TOOLS)
    result = {**RESULT, "call_id": first["output"][1]["call_id"]}
    second = create(site, [result], previous_response_id=first["id"])
    turn = f"<|user|>hello<|assistant|><think>Hm</think>{CALL}<|user|><tool_response>rain</tool_response><|assistant|>"
    assert prompt(site) == turn, "instructions are of one response only"
    assert second["previous_response_id"] == first["id"]
    third = events(site, "Thanks.", previous_response_id=second["id"])[-1]["response"]
    assert prompt(site) == f"{turn}It rains.<|user|>Thanks.<|assistant|>"
    fourth = create(site, None, previous_response_id=third["id"])
    assert prompt(site) == f"{turn}It rains.<|user|>Thanks.<|assistant|>Bye.<|assistant|>"
    assert site.client.get(f"{RESPONSES}/{fourth['id']}").json() == fourth
    assert site.client.get(f"{RESPONSES}/{third['id']}").json() == third


def test_items_of_outputs_can_be_sent_as_references(say: Say) -> None:
    site = say(CALL, "It rains.")
    item = create(site, tools=TOOLS)["output"][0]
    create(site, [USER, {"type": "item_reference", "id": item["id"]}, {**RESULT, "call_id": item["call_id"]}])
    assert f"<|assistant|>{CALL}<|user|>" in prompt(site)
    create(site, [USER, {"id": item["id"]}])
    assert prompt(site).endswith(f"<|assistant|>{CALL}<|assistant|>")


def test_the_input_of_a_response_is_listed_in_pages(say: Say) -> None:
    site = say("Yes.")
    first = create(site, [{"role": "user", "content": str(number)} for number in range(3)])
    second = create(site, "3", previous_response_id=first["id"])

    def page(**query: Any) -> tuple[list[str], bool, list[str]]:
        found = site.client.get(f"{RESPONSES}/{second['id']}/input_items", params=query).json()
        ids = [item["id"] for item in found["data"]]
        assert found["object"] == "list" and len(set(ids)) == len(ids)
        assert (found["first_id"], found["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        contents = [item["content"] if item["role"] == "user" else item["content"][0]["text"] for item in found["data"]]
        return contents, found["has_more"], ids

    assert page()[:2] == (["3", "Yes.", "2", "1", "0"], False)
    contents, has_more, ids = page(order="asc", limit=2)
    assert (contents, has_more) == (["0", "1"], True)
    assert page(order="asc", limit=3, after=ids[-1])[:2] == (["2", "Yes.", "3"], False)
    assert page(after=ids[0])[:2] == ([], False)


def test_a_deleted_response_is_gone_with_its_items(say: Say) -> None:
    site = say("Yes.")
    found = create(site)
    path = f"{RESPONSES}/{found['id']}"
    assert site.client.post(f"{path}/cancel").status_code == 400
    assert site.client.delete(path).json() == {"id": found["id"], "object": "response", "deleted": True}
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
        assert site.client.request(method, where).status_code == 404
    assert site.client.post(RESPONSES, json={"input": [{"id": found["output"][0]["id"]}]}).status_code == 404


def test_another_tenant_does_not_find_a_response(say: Say) -> None:
    site = say("Yes.")
    found = create(site)
    other = {"Authorization": "Bearer b"}
    for method, where in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert site.client.request(method, f"{RESPONSES}/{found['id']}{where}", headers=other).status_code == 404
    for body in ({"input": "a", "previous_response_id": found["id"]}, {"input": [{"id": found["output"][0]["id"]}]}):
        assert site.client.post(RESPONSES, json=body, headers=other).status_code == 404
    assert site.client.get(f"{RESPONSES}/{found['id']}").status_code == 200


def test_a_response_that_is_not_kept_says_how_many_are(say: Say) -> None:
    site = say("Yes.")
    found = create(site)
    for _ in range(8):
        create(site)
    for missing in (found["id"], create(site, store=False)["id"], "resp_\né"):
        response = site.client.post(RESPONSES, json={"input": "a", "previous_response_id": missing})
        error = response.json()["error"]
        assert response.status_code == 404 and "\n" not in error["message"]
        assert "the latest 8 responses are kept (--max-stored-responses)" in error["message"]
        assert error["param"] == "previous_response_id" and "send the whole conversation as input" in error["message"]


def document(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"{name}_item", "text": text}]}


def kept(store: ResponseStore, tenant: str | None, *names: str) -> list[str]:
    """Those of the responses that are there."""
    found = []
    for name in names:
        try:
            store.item(tenant, f"{name}_item")
            found.append(name)
        except ApiError as error:
            assert error.status_code == 404
    return found


def test_the_response_that_was_not_used_for_longest_is_forgotten_first() -> None:
    store = ResponseStore(2)
    for name in ("a", "b"):
        store.put(None, document(name), [])
    store.get(None, "a")
    store.put("t", document("c"), [])
    assert kept(store, None, "a", "b", "c") == ["a"] and kept(store, "t", "a", "b", "c") == ["c"]


def test_a_store_is_bounded_in_characters() -> None:
    store = ResponseStore(100, 5000)
    for name in "abc":
        store.put(None, document(name, "x" * 600), [])
    assert kept(store, None, *"abc") == ["a", "b", "c"]
    store.put(None, document("d"), [{"id": "1", "text": "x" * 4000}])
    assert kept(store, None, *"abcd") == ["d"]
    store.put(None, document("e", "x" * 6000), [])
    assert kept(store, None, *"abcde") == ["d"]


def test_a_server_may_keep_nothing(say: Say) -> None:
    site = say("Yes.")
    front = Front(ServerSettings(max_stored_responses=0))
    assert site.front.served is not None
    front.attach(site.front.served)
    with served(front) as other:
        found = create(other)
        assert found["store"] is False
        response = other.client.post(RESPONSES, json={"input": "a", "previous_response_id": found["id"]})
        assert response.status_code == 404 and "no responses are kept" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field", "place"),
    [
        ({}, "input", "input is missing"),
        ({"input": None}, "input", "input is missing"),
        ({"input": 5}, "input", "input must be a text or a list of items"),
        ({"input": [5]}, "input", "input.0"),
        ({"input": []}, "input", "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", "input.0.role"),
        ({"input": [{"role": "user"}]}, "input", "message without content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "function_call without call_id"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input", "web_search_call"),
        ({"input": [{}]}, "input", "item_reference without id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input", "input_image"),
        ({"input": [USER, CALLED, {**RESULT, "output": [{"type": "input_file", "file_id": "a"}]}]}, "input", "input_file"),
        ({"input": [USER, RESULT]}, "input", "'call_1'"),
        ({"input": [USER] * 5000}, "input", "at most 4096"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 5000}]}, "input", "at most 4096"),
        ({"input": "a b " * CONTEXT}, "input", str(CONTEXT)),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"max_output_tokens": CONTEXT}, "max_output_tokens", f"max_output_tokens asks for {CONTEXT}"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens"),
        ({"messages": [USER]}, "messages", "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format"),
        ({"background": True}, "background", "background"),
        ({"conversation": "conv_1"}, "conversation", "conversation"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt"),
        ({"n": 2}, "n", "n is not supported"),
        ({"metadata": {"a": 1}}, "metadata", "metadata.a"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"top_logprobs": 99}, "top_logprobs", "top_logprobs"),
        ({"top_logprobs": 2, "tools": TOOLS}, "top_logprobs", "without tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "required", "tools": BUILT_IN}, "tool_choice", "needs tools"),
        ({"tool_choice": 5, "tools": TOOLS}, "tool_choice", "tool_choice must be none, auto, required"),
        ({"tool_choice": {"type": "web_search"}, "tools": TOOLS}, "tool_choice", "web_search"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice", "'x'"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two of the name weather"),
        ({"tools": [{"type": "function"}]}, "tools", "function without name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools.a b.name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools", "tools.f.parameters"),
        ({"tools": [{"type": "function", "name": f"f{number}"} for number in range(200)]}, "tools", "at most 128"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "text.format.schema is missing"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text", "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "tools": TOOLS}, "text", "text.format goes without tools"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "thinking_token_budget"),
    ],
    ids=range(43),
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_field(say: Say, body: dict[str, Any], field: str, place: str) -> None:
    site = say("Yes.")
    response = site.client.post(RESPONSES, json=body if not body or "input" in body else {"input": "hello", **body})
    error = response.json()["error"]
    assert response.status_code == 400 and site.engine.requests == []
    assert error["param"] == field and place in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("path", ["?stream=true", "/input_items?limit=0", "/input_items?order=up", "/input_items?after=x"])
def test_queries_that_cannot_be_are_refused(say: Say, path: str) -> None:
    site = say("Yes.")
    assert site.client.get(f"{RESPONSES}/{create(site)['id']}{path}").status_code == 400


NESTED: Any = []
for _ in range(600):
    NESTED = [NESTED]
JUNK: list[Any] = [
    True, -1, 2**70, 1e308, float("nan"), "", "\ud800", "x\0", [], [None], [[]], {}, {"a": NESTED}, NESTED, [{}], {"type": None},
    {"type": "message"},
    [{"type": "message", "role": "user", "content": [{"type": "input_text"}]}], {"format": NESTED}, ["\ud800"],
]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_no_body_makes_an_internal_error(say: Say, junk: Any) -> None:
    site = say("Yes.")
    fields = ["input", "instructions", "previous_response_id", "include", "metadata", "reasoning", "text", "tools", "tool_choice",
              "top_logprobs", "store", "truncation", "stream", "extra", "prompt_cache_key"]  # fmt: skip
    bodies = [{"input": "hello", field: junk} for field in fields]
    names = ("call_id", "id", "content", "output", "action", "input", "name", "arguments", "summary", "encrypted_content", "x")
    for kind in ("message", "function_call", "custom_tool_call", "local_shell_call", "reasoning", junk):
        bodies.append({"input": [{"type": kind, "role": "user", **dict.fromkeys(names, junk)}]})
    for kind in ("function", "custom", "namespace", junk):
        bodies.append(
            {"input": "a", "tools": [{"type": kind, "name": "f", **dict.fromkeys(("parameters", "format", "tools"), junk)}]}
        )
    for body in bodies:
        response = site.client.post(RESPONSES, content=json.dumps(body), headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code == 200 and response.headers["content-type"] == "application/json":
            stored = site.client.get(f"{RESPONSES}/{response.json()['id']}")
            assert stored.status_code in (200, 404)


def test_a_failure_within_a_stream_ends_it_as_failed(say: Say) -> None:
    site = say("It rains. It rains.")
    site.engine.refusal = RequestFailed("the stage has failed")
    found = events(site)
    last = found[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the stage has failed"}
    response = site.client.post(RESPONSES, json={"input": "a"})
    assert response.status_code == 500 and response.json()["error"]["message"] == "the stage has failed"


def test_an_answer_that_the_server_cuts_is_no_complete_response(say: Say) -> None:
    site = say("It rains.")
    site.engine.allowed = 1
    with site.client.stream("POST", RESPONSES, json={"input": "a", "stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if line == "event: response.output_text.delta")
        site.call(site.front.abort)
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[-2:] == ["response.output_item.done", "response.failed"]
    site.front.is_aborting = False
