"""What is refused, and how: every mistake has a status, a message with the field, and no effect. Last the structures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from support.http_server import CHAT, COMPLETIONS, USER, Site, ask, filled
from support.tiny_pair import CONTEXT

from pipedec.core.sampling import StructuredOutputs
from pipedec.text.tokenizer import Tokenizer


def refused(site: Site, body: Any, path: str = COMPLETIONS, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused without reaching the engine."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = site.client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert len(response.content) < 16_000
    assert site.engine.requests == []
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"] and error["code"] == status
    assert "\n" not in error["message"]
    return error


@pytest.mark.failure_case("H1")
def test_a_body_that_is_not_json_is_refused_with_the_offset(site: Site) -> None:
    error = refused(site, b'{"prompt": "hello", 1}')
    assert error["type"] == "BadRequestError" and error["message"].endswith("at character 20")


@pytest.mark.parametrize("body", [b"[1]", b"null", b"", b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000, b"1" * 9000])
def test_a_body_that_is_no_object_is_refused(site: Site, body: bytes) -> None:
    assert "JSON" in refused(site, body)["message"]


def test_pages_of_other_origins_cannot_ask_without_a_preflight(site: Site) -> None:
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        response = site.client.post(COMPLETIONS, content=b'{"prompt": "hello"}', headers=headers)
        assert response.status_code == 400 and "application/json" in response.json()["error"]["message"]
    assert site.engine.requests == []


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
@pytest.mark.failure_case("H2")
def test_a_missing_field_is_named(site: Site, path: str, field: str) -> None:
    error = refused(site, {"model": "tiny"}, path)
    assert error["message"] == f"{field} is missing" and error["param"] == field


@pytest.mark.failure_case("H3")
def test_a_prompt_of_a_wrong_type_is_refused_in_a_short_answer(site: Site) -> None:
    for prompt in ({}, None, 1, [{}], [None] * 100_000, [[None] * 100_000], [[1], "a"], ["a", 1], [[[1]]]):
        error = refused(site, {"prompt": prompt})
        assert error["message"].startswith("prompt must be a text, a list of texts, token ids") and error["param"] == "prompt"
    for messages in ({}, "hello", [None] * 4000, [{"role": "user", "content": {}}], [{"content": "hello"}]):
        error = refused(site, {"messages": messages}, CHAT)
        assert error["message"].startswith("messages must be a list of objects") and error["param"] == "messages"


@pytest.mark.failure_case("H3")
def test_many_mistakes_make_a_short_answer(site: Site) -> None:
    body = {"prompt": "hello", "logit_bias": {f"word{number}": "x" * 50 for number in range(10_000)}}
    assert refused(site, body)["param"] == "logit_bias"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.failure_case("H5")
def test_another_model_is_not_found(site: Site, path: str) -> None:
    body = {"prompt": "hello", "messages": USER, "tokens": [1], "model": "gpt-4"}
    error = refused(site, body, path, 404)
    assert error["type"] == "NotFoundError" and error["param"] == "model" and "'gpt-4'" in error["message"]


@pytest.mark.failure_case("H6")
def test_an_empty_prompt_is_refused(site: Site) -> None:
    for prompt in ("", [], [""], [[]], ["hello", ""]):
        assert "empty" in refused(site, {"prompt": prompt})["message"]
    assert refused(site, {"messages": []}, CHAT)["param"] == "messages"


@pytest.mark.failure_case("H7")
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(site: Site) -> None:
    for body, path in (
        ({"prompt": "a b " * CONTEXT}, COMPLETIONS),
        ({"prompt": [5] * (CONTEXT + 1)}, COMPLETIONS),
        ({"messages": [{"role": "user", "content": "a b " * CONTEXT}]}, CHAT),
    ):
        assert str(CONTEXT) in refused(site, body, path)["message"]


def test_a_long_text_is_refused_before_it_is_tokenized(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    text = "x" * 200_000
    assert "200000 characters" in refused(site, {"prompt": text})["message"]
    assert "200000 characters" in refused(site, {"messages": [{"role": "user", "content": text}]}, CHAT)["message"]


@pytest.mark.failure_case("H39")
def test_more_answers_than_the_queue_ever_takes_are_refused_with_the_limit(site: Site) -> None:
    assert site.front.served is not None
    limits = site.front.served.description.settings.limits
    most = limits.max_num_seqs + limits.max_waiting
    error = refused(site, {"prompt": ["a"] * (most // 8 + 1), "n": 8})
    assert f"at most {most} " in error["message"] and error["param"] == "prompt"
    ask(site, COMPLETIONS, prompt=["a"] * (most // 8), n=8, max_tokens=1)


@pytest.mark.failure_case("H41")
def test_more_messages_parts_or_tokens_than_can_be_are_refused_before_they_are_read(site: Site) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100}] * 50
    for messages in (USER * 5000, parts, [{"role": "assistant", "tool_calls": [None] * 5000}]):
        for path in (CHAT, "/tokenize"):
            assert "at most 4096" in refused(site, {"messages": messages}, path)["message"]
    error = refused(site, {"tokens": [7] * (CONTEXT + 1)}, "/detokenize")
    assert str(CONTEXT) in error["message"] and error["param"] == "tokens"
    assert site.client.post("/detokenize", json={"tokens": [7] * CONTEXT}).status_code == 200


@pytest.mark.failure_case("H8")
def test_an_answer_that_does_not_fit_behind_the_prompt_is_refused_with_all_numbers(site: Site) -> None:
    message = refused(site, {"prompt": [5] * 48, "max_tokens": CONTEXT - 47})["message"]
    assert message.startswith(f"the prompt has 48 tokens and max_tokens asks for {CONTEXT - 47} more, but the model's context is")
    assert refused(site, {"messages": USER, "max_completion_tokens": CONTEXT}, CHAT)["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("field", "value", "shown", "allowed"),
    [
        ("temperature", -1, "-1", "at least 0"), ("temperature", float("nan"), "nan", "at least 0"),
        ("top_p", 2, "2", "at most 1"),
        ("top_k", -5, "-5", "at least -1"), ("min_p", 1.5, "1.5", "0 to 1"), ("n", 0, "0", "greater than or equal to 1"),
        ("n", 9, "9", "less than or equal to 8"), ("max_tokens", 0, "0", "at least 1"), ("max_tokens", -1, "-1", "at least 1"),
        ("presence_penalty", 3, "3", "-2 to 2"), ("frequency_penalty", -3, "-3", "-2 to 2"),
        ("repetition_penalty", 0, "0", "above 0"), ("truncate_prompt_tokens", 0, "0", "at least 1"),
        ("truncate_prompt_tokens", -2, "-2", "greater than or equal to -1"), ("min_tokens", -1, "-1", "at least 0"),
        ("logit_bias", {"5": 101}, "101", "-100 to 100"),
        ("logit_bias", {"300000": 1}, "300000", "the vocabulary has"), ("stop_token_ids", [-1], "-1", "the vocabulary has"),
        ("seed", 2**64, str(2**64), "below 2**64"), ("priority", 2**40, str(2**40), "less than"),
        ("temperature", "hot", '"hot"', "temperature: "),
    ],
)  # fmt: skip
@pytest.mark.failure_case("H11")
def test_a_value_out_of_range_is_refused_with_field_value_and_range(
    site: Site, field: str, value: Any, shown: str, allowed: str
) -> None:
    for path in (COMPLETIONS, CHAT):
        error = refused(site, filled(path, {field: value}), path)
        assert field in error["message"] and shown in error["message"] and allowed in error["message"]
        assert error["param"] == field


def test_too_many_logprobs_are_refused(site: Site) -> None:
    for path, field, given in ((COMPLETIONS, "logprobs", {}), (CHAT, "top_logprobs", {"logprobs": True})):
        for value in (21, -1):
            error = refused(site, filled(path, {**given, field: value}), path)
            assert error["param"] == field and "than or equal to" in error["message"]


@pytest.mark.failure_case("H12")
def test_what_is_not_supported_is_refused_and_never_ignored(site: Site) -> None:
    for path, fields in (
        (COMPLETIONS, {
            "best_of": 4, "suffix": "end", "prompt_embeds": "AAAA", "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required", "use_beam_search": True, "documents": [{"text": "a"}], "stop_regex": "a",
        }),
        (CHAT, {
            "functions": [{"name": "f"}], "modalities": ["text", "audio"], "audio": {"voice": "alloy"}, "function_call": "auto",
            "chat_template": "{{ messages }}", "length_penalty": 2.0, "verbosity": "low",
            "structured_outputs": {"regex": "a", "structural_tag": "b"}, "guided_whitespace_pattern": "a", "bad_words": ["no"],
            "allowed_token_ids": [1], "prompt_logprobs": 1, "structural_tag": "a", "typical_p": 0.5, "mirostat": 2,
        }),
        ("/tokenize", {"chat_template": "{{ messages }}"}),
    ):  # fmt: skip
        for field, value in fields.items():
            error = refused(site, filled(path, {field: value}), path)
            assert error["param"] == field and "not supported" in error["message"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("messages.0: images", {"role": "user", "content": "a", "images": ["AAAA"]}),
        ("messages.0: refusal", {"role": "assistant", "content": None, "refusal": "no"}),
        ("messages.0: the role function", {"role": "function", "name": "f", "content": "a"}),
        ("messages.0.content.1: a part of the type refusal", {"role": "assistant", "content": [
            {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]}),
        ("messages.0.content.0: a part of the type text without text", {"role": "user", "content": [{"type": "text"}]}),
    ],
)  # fmt: skip
@pytest.mark.failure_case("H40")
def test_what_is_not_supported_is_refused_at_every_depth(site: Site, place: str, message: dict[str, Any]) -> None:
    for path in (CHAT, "/tokenize"):
        error = refused(site, {"messages": [message]}, path)
        assert error["message"].startswith(place) and "not supported" in error["message"] and error["param"] == "messages"


@pytest.mark.failure_case("H40")
def test_what_changes_nothing_is_ignored_at_every_depth(site: Site) -> None:
    ask(site, CHAT)
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    for more in ({"prefix": False, "audio": None, "weight": 1}, {"content": [part]}, {"content": [{**part, "annotations": []}]}):
        ask(
            site, CHAT, messages=[{**USER[0], **more}], typical_p=1, grammar="", mirostat=0, n_predict=-1, cache_prompt=True,
            verbosity="medium", guided_decoding_backend="outlines", repeat_penalty=None,
        )  # fmt: skip
    assert len({request.prompt for request in site.engine.requests}) == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
    ],
)
@pytest.mark.failure_case("H12")
def test_images_audio_and_tools_in_messages_are_refused(site: Site, message: dict[str, Any]) -> None:
    error = refused(site, {"messages": [message]}, CHAT)
    assert "send text" in error["message"] and error["param"] == "messages"


@pytest.mark.parametrize("token", [-1, 5000, 2**70])
@pytest.mark.failure_case("H13")
def test_a_token_beyond_the_vocabulary_is_refused(site: Site, token: int) -> None:
    prompts = ([1, token], [[1], [token]])
    for body, path in [({"tokens": [token]}, "/detokenize"), *(({"prompt": prompt}, COMPLETIONS) for prompt in prompts)]:
        message = refused(site, body, path)["message"]
        assert str(token) in message and "vocabulary" in message


@pytest.mark.failure_case("H23")
def test_a_token_that_the_tokenizer_has_and_the_model_lacks_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many fine-tunes have a padding token more than embeddings; padded embeddings without tokens may be named."""
    run = site.front.served
    assert run is not None
    last = max(run.tokenizer.encode("hello"))
    monkeypatch.setattr(site.front, "served", replace(run, description=structs.replace(run.description, vocab_size=last)))
    for path in (COMPLETIONS, CHAT):
        for field, value in (("logit_bias", {str(last): 0}), ("stop_token_ids", [5, last])):
            assert refused(site, filled(path, {field: value}), path)["param"] == field
        assert f"names token {last}, but the vocabulary has {last} tokens" in refused(site, filled(path, {}), path)["message"]
    assert refused(site, {"prompt": [5, last]})["param"] == "prompt"
    assert last in site.client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    monkeypatch.setattr(site.front, "served", replace(run, description=structs.replace(run.description, vocab_size=1000)))
    ask(site, COMPLETIONS, prompt=[5, 999], logit_bias={"999": -1}, stop_token_ids=[999])


@pytest.mark.failure_case("H24")
def test_stop_tokens_are_a_set_of_the_vocabulary(site: Site) -> None:
    assert "at most 300 tokens" in refused(site, {"prompt": "hello", "stop_token_ids": [7] * 301})["message"]
    ask(site, COMPLETIONS, stop_token_ids=[9, 7, 9] * 100, n=2)
    assert [request.sampling.stop_token_ids for request in site.engine.requests] == [(9, 7)] * 2


@pytest.mark.failure_case("H25")
def test_options_of_methods_have_limits_and_the_document_lists_them(site: Site) -> None:
    for options, message in (
        ({"forwards": 9}, "forwards: must be an integer (1 to 8), not 9"),
        ({"width": 4096}, "width: must be an integer (1 to 512)"),
        ({"children": 4096}, "children: must be an integer (1 to 128)"),
    ):  # fmt: skip
        assert refused(site, {"prompt": "hello", "method_options": options})["message"].startswith(message)
    ask(site, COMPLETIONS, method_options={"forwards": 8, "width": 512, "children": 128})
    document = site.client.get("/openapi.json").json()
    listed = document["components"]["schemas"]["CompletionBody"]["properties"]["method_options"]["description"]
    assert "pipedec-bestfirst: width 1 to 512, children 1 to 128, forwards 1 to 8" in listed


@pytest.mark.parametrize("text", [b"\\ud800", b"a\\udc00b"])
@pytest.mark.failure_case("H14")
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(site: Site, text: bytes) -> None:
    refused(site, b'{"prompt": "%s"}' % text)
    refused(site, b'{"messages": [{"role": "user", "content": "%s"}]}' % text, CHAT)
    refused(site, b'{"messages": [{"role": "user", "content": "a", "more": {"%s": ["%s"]}}], "n": 0}' % (text, text), CHAT)
    refused(site, b'{"prompt": "a", "stop": "%s"}' % text)
    for structure in (b'"regex": "%s"', b'"choice": ["%s"]', b'"json": {"const": "%s"}'):
        refused(site, b'{"prompt": "a", "structured_outputs": {%s}}' % (structure % text))
    refused(site, b'{"prompt": "a", "%s": 1, "n": 0}' % text)
    refused(site, b'{"prompt": "a", "model": "%s"}' % text, status=404)


@pytest.mark.failure_case("H14")
def test_a_nul_character_is_a_character(site: Site) -> None:
    assert site.client.post(COMPLETIONS, json={"prompt": "a\0b"}).status_code == 200
    assert site.client.post(CHAT, json={"messages": [{"role": "user", "content": "a\0b"}]}).status_code == 200


@pytest.mark.failure_case("H15")
def test_too_many_stop_strings_and_empty_ones_are_refused(site: Site) -> None:
    for stop in (["x"] * 17, [f"a{number}" for number in range(1000)], "", ["a", ""], ["x" * 1001], 5):
        assert refused(site, {"prompt": "hello", "stop": stop})["param"] == "stop"


def test_unknown_methods_options_and_dialects_are_refused(site: Site) -> None:
    assert "choose one of" in refused(site, {"prompt": "hello", "method": "magic"})["message"]
    assert "needs a draft model" in refused(site, {"prompt": "hello", "method": "stpp"})["message"]
    assert "no option" in refused(site, {"prompt": "hello", "method": "pp", "method_options": {"width": 3}})["message"]
    assert refused(site, {"prompt": "hello", "threads": "/etc/passwd"})["param"] == "threads"
    assert "no token" in refused(site, {"prompt": "hello", "threads": "apar"})["message"]


def test_unknown_paths_and_methods_have_the_same_shape(site: Site) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/health", 405)):
        response = site.client.request(method, path)
        assert response.status_code == status and response.json()["error"]["code"] == status
    assert site.client.get(COMPLETIONS).headers["allow"] == "POST"


def test_what_does_not_go_with_the_rest_is_refused(site: Site) -> None:
    assert refused(site, {"prompt": "hello", "stream_options": {"include_usage": True}})["param"] == "stream_options"
    assert refused(site, {"messages": USER, "chat_template_kwargs": {"messages": []}}, CHAT)["param"] == "chat_template_kwargs"


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, {"json_object": True}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "description": "b", "schema": SCHEMA}},
            {"json": SCHEMA},
        ),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, {"json": SCHEMA}),
        ("response_format", {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}, {"json": SCHEMA}),
        ("response_format", {"type": "json", "value": SCHEMA}, {"json": SCHEMA}),
        ("structured_outputs", {"regex": None, "json_object": False}, None),
        ("structured_outputs", {"json": SCHEMA, "regex": None, "disable_fallback": False}, {"json": SCHEMA}),
        ("structured_outputs", {"json": '{"type": "object"}', "disable_any_whitespace": True}, {"json": '{"type": "object"}'}),
        ("structured_outputs", {"regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ("structured_outputs", {"choice": ["yes", "no"], "json_object": False}, {"choice": ("yes", "no")}),
        ("structured_outputs", {"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ("structured_outputs", {"json_object": True}, {"json_object": True}),
        ("guided_json", SCHEMA, {"json": SCHEMA}),
        ("guided_regex", "a|b", {"regex": "a|b"}),
        ("guided_choice", ["a", "b"], {"choice": ("a", "b")}),
        ("guided_grammar", 'start: "a"', {"grammar": 'start: "a"'}),
        ("json_schema", SCHEMA, {"json": SCHEMA}),
        ("json_schema", '{"type": "object"}', {"json": '{"type": "object"}'}),
        ("regex", "a|b", {"regex": "a|b"}),
        ("regex", "", None),
        ("grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        ("ebnf", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
    ],
)
@pytest.mark.failure_case("H33")
def test_a_structure_reaches_the_engine(site: Site, field: str, value: Any, expected: dict[str, Any] | None) -> None:
    for path in (COMPLETIONS, CHAT):
        ask(site, path, **{field: value})
        found = site.engine.requests[-1].sampling.structured_outputs
        assert found == (None if expected is None else StructuredOutputs(**expected))


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("response_format", {"type": "json_schema"}, "json_schema is missing"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema.schema is missing"),
        ("response_format", {"type": "yaml"}, "response_format.type"),
        ("response_format", {"type": "json"}, "response_format.value is missing"),
        ("response_format", {"type": "text", "schema": SCHEMA}, "its type is text"),
        ("response_format", {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}}, "several schemas"),
        ("response_format", {"type": "json_object", "jsonschema": SCHEMA}, "response_format: jsonschema is not supported"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {}, "shcema": SCHEMA}},
            "json_schema: shcema is not",
        ),
        ("structured_outputs", {"regex": "a", "pattern": "b"}, "structured_outputs: pattern is not supported"),
        ("guided_json", {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(30)]}, "it takes more than"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "obj"}}}, "obj"),
        ("structured_outputs", {"json": {"properties": {"a": {"type": "number", "minimum": "x"}}}}, "minimum"),
        ("structured_outputs", {"json": "{not JSON"}, "JSON"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "choice"),
        ("structured_outputs", {"regex": 5}, "structured_outputs.regex"),
        ("structured_outputs", {"choice": []}, "choice"),
        ("guided_choice", [1], "guided_choice"),
        ("guided_regex", "a(b", "unclosed group"),
        ("regex", "a(b", "regex: "),
        ("ebnf", "root ::= x", "ebnf: "),
        ("json_schema", {"type": "obj"}, "json_schema: "),
        ("json_schema", [1], "json_schema"),
        ("guided_regex", "(?=a)b", "look-around"),
        ("guided_grammar", 'start: "a" item', "item"),
        ("guided_grammar", 'start: "a" "b', "1(14)"),
        ("guided_json", {"$ref": "#/$defs/none"}, "none"),
        ("guided_regex", "a" * 200_001, "200001 characters, but may have 200000"),
        ("guided_choice", [str(number) for number in range(5001)], "5001 choices, but may have 5000"),
        ("guided_json", {"enum": ["x" * 300_000]}, "but may have 200000"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.failure_case("H21", "H33")
def test_a_structure_that_cannot_be_is_refused_with_its_place(site: Site, field: str, value: Any, place: str) -> None:
    for path in (COMPLETIONS, CHAT):
        error = refused(site, filled(path, {field: value}), path)
        assert error["param"] == field and place in error["message"]


def test_two_wishes_that_exclude_each_other_are_refused(site: Site) -> None:
    for path in (COMPLETIONS, CHAT):
        for more in ({"ignore_eos": True}, {"guided_choice": ["a"]}, {"response_format": {"type": "json_object"}}):
            error = refused(site, filled(path, {"guided_regex": "a", **more}), path)
            assert error["param"] in ("guided_regex", *more)


def test_a_schema_that_is_nested_too_deeply_is_refused(site: Site) -> None:
    nested = "{" + '"items":{' * 900 + "}" * 901
    for path, first in ((COMPLETIONS, '"prompt": "a"'), (CHAT, '"messages": [{"role": "user", "content": "a"}]')):
        error = refused(site, f'{{{first}, "structured_outputs": {{"json": {nested}}}}}'.encode(), path)
        assert error["param"] in ("structured_outputs", None)
