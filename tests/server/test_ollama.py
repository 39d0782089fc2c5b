"""Ollama's API over HTTP: what the model reads, answers whole and line by line, lists of models, and errors."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, USER, Say, Site, ask, send, served
from support.processes import wait_until
from support.scripted_engine import ANSWER, attach, in_bursts
from support.tiny_pair import CONTEXT

from pipedec.core.errors import QueueFull, RankLost
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer

API_CHAT, GENERATE = "/api/chat", "/api/generate"
BOTH = pytest.mark.parametrize("path", [API_CHAT, GENERATE])
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {"city": "Ulm"}}\n</tool_call>'


def filled(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny"} | ({"messages": USER} if path == API_CHAT else {"prompt": "hello"}) | fields


def whole(site: Site, path: str, **fields: Any) -> dict[str, Any]:
    response = site.client.post(path, json=filled(path, {"stream": False} | fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def lines(site: Site, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a stream, which is the default: none is empty, and the last alone is done."""
    response = site.client.post(path, json=filled(path, fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson" and response.text.endswith("\n")
    found = [json.loads(line) for line in response.text.removesuffix("\n").split("\n")]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def answer(document: dict[str, Any]) -> dict[str, Any]:
    return document.get("message", document)


def joined(found: list[dict[str, Any]], field: str) -> str:
    return "".join(answer(line).get(field, "") for line in found)


def prompt_text(site: Site, index: int = -1) -> str:
    return site.engine.tokenizer.decode(site.engine.requests[index].prompt, skip_special_tokens=False)


def refused(site: Site, path: str, body: Any, status: int = 400) -> str:
    """The error of a request that must be refused without reaching the engine."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = site.client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"] and site.engine.requests == []
    return response.json()["error"]


@BOTH
def test_an_answer_comes_whole_and_line_by_line(site: Site, answer_ids: list[int], path: str) -> None:
    document, field = whole(site, path), "content" if path == API_CHAT else "response"
    assert answer(document)[field] == ANSWER and document["model"] == "tiny"
    if path == API_CHAT:
        assert document["message"] == {"role": "assistant", "content": ANSWER}
    assert document["done"] and document["done_reason"] == "stop"
    assert document["prompt_eval_count"] == len(site.engine.requests[0].prompt)
    assert document["eval_count"] == len(answer_ids)
    for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"):
        assert type(document[name]) is int and document[name] > 0
    assert datetime.fromisoformat(document["created_at"]).utcoffset() is not None
    found = lines(site, path)
    assert joined(found, field) == ANSWER and len(found) > 10 and answer(found[-1])[field] == ""
    assert set(found[-1]) == set(document) and "eval_count" not in found[0]


def test_the_prompt_is_that_of_the_same_chat_at_openais_route(site: Site) -> None:
    ask(site, CHAT)
    ask(site, CHAT, messages=[{"role": "system", "content": "be brief"}, *USER])
    whole(site, API_CHAT)
    whole(site, GENERATE)
    whole(site, GENERATE, system="be brief")
    whole(site, GENERATE, raw=True)
    ask(site, COMPLETIONS)
    plain, briefly, *others = [request.prompt for request in site.engine.requests]
    assert others == [plain, plain, briefly, others[-1], others[-1]] and others[-1] != plain


@BOTH
def test_options_reach_the_engine(site: Site, path: str) -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["x", "y"], "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
    }  # fmt: skip
    loading = {
        "num_ctx": 8192,
        "num_batch": 512,
        "num_gpu": 99,
        "use_mmap": True,
        "num_keep": 5,
        "repeat_last_n": 64,
        "mirostat": 0,
    }
    whole(site, path, options=options | loading | {"num_predict": 11, "repeat_penalty": 1.5}, keep_alive="5m", context=[1, 2])
    expected = options | {"stop": ("x", "y"), "max_tokens": 11, "repetition_penalty": 1.5}
    assert site.engine.requests[0].sampling == SamplingParams(**expected)


@BOTH
@pytest.mark.parametrize("num_predict", [None, -1, -2, 0])
def test_an_answer_without_a_limit_may_fill_the_context(site: Site, path: str, num_predict: int | None) -> None:
    for raw in (False, True):
        whole(site, path, options={"num_predict": num_predict}, **({"raw": raw} if path == GENERATE else {}))
        request = site.engine.requests[-1]
        assert request.sampling.max_tokens == CONTEXT - len(request.prompt)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", None), (None, None), ("json", StructuredOutputs(json_object=True)), (SCHEMA, StructuredOutputs(json=SCHEMA)),
    ],
)  # fmt: skip
def test_a_format_is_a_structure(site: Site, given: Any, expected: StructuredOutputs | None) -> None:
    for path, more in ((API_CHAT, {}), (GENERATE, {}), (GENERATE, {"raw": True})):
        whole(site, path, format=given, **more)
        assert site.engine.requests[-1].sampling.structured_outputs == expected


@BOTH
def test_an_answer_that_is_cut_says_so(site: Site, path: str) -> None:
    assert whole(site, path, options={"num_predict": 3})["done_reason"] == "length"
    assert lines(site, path, options={"num_predict": 3})[-1]["done_reason"] == "length"


@BOTH
def test_log_probabilities_come_with_their_tokens(
    site: Site, text_tokenizer: Tokenizer, answer_ids: list[int], path: str
) -> None:
    shown = whole(site, path, logprobs=True, top_logprobs=2)["logprobs"]
    assert [entry["token"] for entry in shown] == [text_tokenizer.token(token) for token in answer_ids]
    assert [len(entry["top_logprobs"]) for entry in shown] == [2] * len(answer_ids) and shown[0]["logprob"] == -1.0
    streamed = lines(site, path, logprobs=True, top_logprobs=2)
    assert [entry for line in streamed for entry in line.get("logprobs", [])] == shown
    assert "logprobs" not in whole(site, path, top_logprobs=2)


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_without_messages_or_a_prompt_the_model_is_only_loaded(site: Site, path: str, streamed: bool) -> None:
    for empty in ({"prompt": "", "messages": []}, {"prompt": None, "messages": None}):
        response = site.client.post(path, json={"model": "tiny", "stream": streamed, "keep_alive": 0, **empty})
        (document,) = [json.loads(line) for line in response.text.splitlines()]
        assert response.status_code == 200 and (document["done"], document["done_reason"]) == (True, "load")
        assert answer(document)["content" if path == API_CHAT else "response"] == ""
    assert site.engine.requests == []


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I look.\n{CALL}", "I look.", [("weather", {"city": "Köln"})]),
        (f"{CALL}\n{OTHER}", "", [("weather", {"city": "Köln"}), ("time", {"city": "Ulm"})]),
        ("It rains.", "It rains.", []),
    ],
)
def test_calls_come_as_objects_each_in_one_line(say: Say, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    site = say("hermes", text)
    document, found = whole(site, API_CHAT, tools=TOOLS), lines(site, API_CHAT, tools=TOOLS)
    streamed = [call for line in found for call in line["message"].get("tool_calls", [])]
    for made in (document["message"].get("tool_calls", []), streamed):
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in made] == calls
        assert [call["function"]["index"] for call in made] == list(range(len(calls)))
        assert len({call["id"] for call in made}) == len(calls)
    assert document["message"]["content"] == joined(found, "content") == content
    assert document["done_reason"] == found[-1]["done_reason"] == "stop"


def test_a_call_that_is_cut_off_has_its_text_as_argument(say: Say) -> None:
    site = say("hermes", CALL)
    document = whole(site, API_CHAT, tools=TOOLS, options={"num_predict": 52})
    ((name, arguments),) = [(one["function"]["name"], one["function"]["arguments"]) for one in document["message"]["tool_calls"]]
    assert name == "weather" and '{"city": "Köln"}'.startswith(arguments["arguments"]) and document["done_reason"] == "length"


def test_calls_and_results_reach_the_template_with_ids(say: Say) -> None:
    site = say("hermes", "It rains.")
    calls = [{"function": {"index": index, "name": name, "arguments": {"city": "Köln"}}}
             for index, name in enumerate(("weather", "time"))]  # fmt: skip
    told = [
        *USER, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "time", "content": "noon"}, {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]  # fmt: skip
    whole(site, API_CHAT, messages=told, tools=TOOLS)
    assert CALL in prompt_text(site) and "<tool_response>noon</tool_response>" in prompt_text(site)
    same = [
        *USER, {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
            {"id": f"00001000{index}", "type": "function", "function": {"name": name, "arguments": '{"city": "Köln"}'}}
            for index, name in enumerate(("weather", "time"))
        ]},
        {"role": "tool", "name": "time", "tool_call_id": "000010001", "content": "noon"},
        {"role": "tool", "name": "weather", "tool_call_id": "000010000", "content": "rain"},
    ]  # fmt: skip
    site.engine.tokenizer.render_chat = lambda messages, *_, **__: json.dumps(messages)  # type: ignore[method-assign]
    whole(site, API_CHAT, messages=told)
    ask(site, CHAT, messages=same)
    ours, theirs = (json.loads(prompt_text(site, index)) for index in (-2, -1))
    del site.engine.tokenizer.render_chat
    ours[1]["reasoning_content"] = ours[1].pop("thinking")
    assert ours == theirs


@pytest.mark.parametrize(
    ("think", "seen"), [(None, "<|assistant|>"), (True, "<|assistant|>"), (False, "<|assistant|><think></think>"),
                        ("high", "<|high|><|assistant|>")],
)  # fmt: skip
@BOTH
def test_thoughts_are_asked_for_and_shown_apart(say: Say, path: str, think: Any, seen: str) -> None:
    site = say("thoughts", "It rains." if think is False else "<think>Hm, rain?</think>It rains.")
    document, found = whole(site, path, think=think), lines(site, path, think=think)
    assert prompt_text(site).endswith(seen)
    assert joined(found, "content" if path == API_CHAT else "response") == "It rains."
    assert answer(document).get("thinking", "") == joined(found, "thinking") == ("" if think is False else "Hm, rain?")


def test_without_thinking_no_thought_is_shown(say: Say) -> None:
    site = say("thoughts", "<think>Hm, rain?</think>It rains.")
    assert whole(site, API_CHAT, think=False)["message"] == {"role": "assistant", "content": "It rains."}
    assert joined(lines(site, API_CHAT, think=False), "thinking") == ""


@BOTH
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}], "images": ["AAAA"]}, "images is not supported"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"suffix": "end"}, "suffix is not supported"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"num_predict": CONTEXT}}, "options.num_predict asks for"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"stop": ["x"] * 17}}, "options.stop must have at most 16"),
        ({"options": {"mirostat": 2}}, "mirostat is not supported"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z is not supported"),
        ({"options": [1]}, "options"),
        ({"format": "yaml"}, 'format must be json, or a JSON schema: format is "yaml"'),
        ({"format": {"type": "obj"}}, "format"),
        ({"format": 5}, "format must be json"),
        ({"think": {}}, "think must be true, false, low, medium or high"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"stream": "x"}, "stream"),
        ({"prompt": "\ud800", "messages": [{"role": "user", "content": "\udfff"}]}, "surrogate"),
        ({"prompt": "a b " * CONTEXT, "messages": [{"role": "user", "content": "a b " * CONTEXT}]}, str(CONTEXT)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_body_is_refused_with_ollamas_name_of_the_field(site: Site, path: str, fields: Any, message: str) -> None:
    error = refused(site, path, filled(path, fields))
    assert message in error and "\n" not in error and len(error) < 1100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": TOOLS}, "knows no tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"messages": [{"role": "tool", "tool_name": "f", "content": "42"}]}, "messages[0] is of a tool"),
        ({"messages": {}}, "messages must be a list"),
        ({"messages": USER * 5000}, "at most 4096"),
    ],
)
def test_a_chat_that_cannot_be_is_refused(site: Site, fields: dict[str, Any], message: str) -> None:
    assert message in refused(site, API_CHAT, filled(API_CHAT, fields))


def test_a_prompt_that_cannot_be_is_refused(site: Site) -> None:
    assert "system goes without raw" in refused(site, GENERATE, {"prompt": "a", "raw": True, "system": "b"})
    assert "prompt" in refused(site, GENERATE, {"prompt": [5]})


@pytest.mark.parametrize("path", [API_CHAT, GENERATE, "/api/show"])
def test_errors_have_ollamas_shape(site: Site, path: str) -> None:
    assert "'gpt-4'" in refused(site, path, {"model": "gpt-4"}, 404)
    for content in (b"", b"{", b"null", b"[1]", b"\xff", b"[" * 9999):
        assert "JSON" in refused(site, path, content)
    assert site.client.get("/api/chat").json()["error"].startswith("wrong method")
    for missing in ("pull", "create", "embed", "embeddings", "copy"):
        assert "no such page" in refused(site, f"/api/{missing}", {"model": "tiny"}, 404)


@BOTH
def test_what_the_cluster_cannot_do_now_is_said_before_and_within_a_stream(site: Site, path: str) -> None:
    site.engine.full = QueueFull("1000 requests are unfinished: try again later")
    response = site.client.post(path, json=filled(path, {}))
    assert response.status_code == 503 and "unfinished" in response.json()["error"] and "retry-after" in response.headers
    site.engine.reset()
    site.engine.allowed = 4
    with site.client.stream("POST", path, json=filled(path, {})) as response:
        rest = response.iter_lines()
        assert not json.loads(next(rest))["done"]
        site.engine.failure = RankLost("rank 2 died")
        *_, last = rest
    assert list(json.loads(last)) == ["error"] and "rank 2 died" in last
    assert site.front.unfinished == 0


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.failure_case("K1")
def test_the_request_of_a_client_that_leaves_is_cancelled(site: Site, path: str, streamed: bool) -> None:
    site.engine.allowed = 2
    with site.connect() as connection:
        send(site, path, connection, stream=streamed)
        assert wait_until(lambda: site.front.unfinished == 1)
    assert wait_until(lambda: site.front.unfinished == 0 and site.engine.cancelled == [0])


def test_a_silent_stream_has_no_pings(text_tokenizer: Tokenizer, answer_ids: list[int]) -> None:
    front = Front(ServerSettings(("tiny",), ping_seconds=0.02))
    engine = attach(front, text_tokenizer, lambda request: in_bursts(answer_ids))
    engine.allowed = 4
    with served(front) as site, site.client.stream("POST", API_CHAT, json=filled(API_CHAT, {})) as response:
        rest = response.iter_lines()
        first = [json.loads(next(rest))]
        assert not wait_until(lambda: site.front.unfinished == 0, 0.2)
        engine.allowed = 1000
        assert joined([*first, *map(json.loads, rest)], "content") == ANSWER


def test_models_are_listed_with_a_tag_and_found_with_and_without_it(site: Site) -> None:
    for path in ("/api/tags", "/api/ps"):
        models = site.client.get(path).json()["models"]
        assert [(model["name"], model["model"]) for model in models] == [(f"{name}:latest",) * 2 for name in ("tiny", "alias")]
        assert all(len(model["digest"]) == 64 and model["details"]["format"] == "safetensors" for model in models)
    assert models[0]["context_length"] == CONTEXT
    for name in ("tiny", "tiny:latest", "alias:latest"):
        assert whole(site, API_CHAT, model=name)["model"] == name
    for name in ("tiny:7b", "tiny:latest:latest", ":latest", ""):
        assert "there is no model" in refused_after(site, {"model": name, "messages": USER})
    assert ask(site, CHAT, model="tiny:latest")["model"] == "tiny"


def refused_after(site: Site, body: dict[str, Any]) -> str:
    site.engine.requests.clear()
    return refused(site, API_CHAT, body, 404)


def test_a_name_with_a_tag_of_its_own_keeps_it(text_tokenizer: Tokenizer) -> None:
    front = Front(ServerSettings(("org/tiny:awq",)))
    with served(front) as site:
        assert [model["name"] for model in site.client.get("/api/tags").json()["models"]] == ["org/tiny:awq"]
        assert site.client.get("/api/ps").json() == {"models": []}
        response = site.client.post("/api/show", json={"model": "org/tiny:awq"})
        assert response.status_code == 503 and "loading" in response.json()["error"]
        attach(front, text_tokenizer, lambda request: [])
        assert [model["name"] for model in site.client.get("/api/ps").json()["models"]] == ["org/tiny:awq"]


@pytest.mark.parametrize(
    ("template", "can"),
    [("none", ["completion"]), ("hermes", ["completion", "tools"]), ("thoughts", ["completion", "tools", "thinking"]),
     ("other", ["completion"])],
)  # fmt: skip
def test_the_details_of_a_model_say_what_it_can_do(say: Say, template: str, can: list[str]) -> None:
    site = say(template, "")
    for body in ({"model": "tiny"}, {"name": "tiny:latest", "verbose": True}):
        shown = site.client.post("/api/show", json=body).json()
        family = shown["model_info"]["general.architecture"]
        assert shown["capabilities"] == can and shown["model_info"][f"{family}.context_length"] == CONTEXT
        assert "temperature 1.0" in shown["parameters"] and bool(shown["template"])


def test_ollamas_clients_find_the_server(site: Site) -> None:
    assert site.client.head("/").status_code == 200
    major, minor, _ = map(int, site.client.get("/api/version").json()["version"].split("."))
    assert (major, minor) >= (0, 6), "Visual Studio Code refuses older ones"


def test_lists_need_a_key_where_chats_do(text_tokenizer: Tokenizer) -> None:
    front = Front(ServerSettings(("tiny",), api_keys=("secret",)))
    attach(front, text_tokenizer, lambda request: [])
    with served(front) as site:
        for method, path in (("GET", "/api/tags"), ("GET", "/api/v0/models"), ("POST", API_CHAT), ("POST", GENERATE)):
            response = site.client.request(method, path, json={"model": "tiny"} if method == "POST" else None)
            assert response.status_code == 401 and list(response.json()) == ["error"]
            assert "key" in response.json()["error"]
            key = {"authorization": "Bearer secret"}
            assert site.client.request(method, path, headers=key, json={} if method == "POST" else None).status_code == 200


def test_lm_studios_list_has_state_and_context(site: Site) -> None:
    document = site.client.get("/api/v0/models").json()
    assert document["object"] == "list" and [model["id"] for model in document["data"]] == ["tiny", "alias"]
    model = site.client.get("/api/v0/models/tiny").json()
    assert model == document["data"][0] and (model["type"], model["state"]) == ("llm", "loaded")
    assert model["max_context_length"] == model["loaded_context_length"] == CONTEXT
    assert site.client.get("/api/v0/models/gpt-4").status_code == 404
    assert site.client.get("/v1/models/tiny").json()["context_length"] == CONTEXT


@pytest.mark.parametrize("fields", [{}, {"raw": True}], ids=["chat", "raw"])
@BOTH
def test_the_decoding_method_and_the_priority_are_the_clients(say: Say, path: str, fields: dict[str, Any]) -> None:
    site = say("hermes", "It rains.")
    whole(site, path, method="pp", priority=-3, **fields)
    request = site.engine.requests[-1]
    assert (request.method, request.priority) == ("pp", -3)
    for wrong in ({"method": "x"}, {"priority": 2**40}):
        refused = site.client.post(path, json={"model": "tiny", "messages": USER, "prompt": "hello", **wrong})
        assert refused.status_code == 400 and next(iter(wrong)) in refused.json()["error"]
