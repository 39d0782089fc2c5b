"""Fields of vLLM, llama.cpp, SGLang, DeepSeek and Moonshot beyond OpenAI's: what the model reads, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
from support.http_server import BOTH, CHAT, COMPLETIONS, USER, Say, Site, ask, filled, stream, text_of
from support.scripted_engine import ANSWER
from support.tiny_pair import CONTEXT

from pipedec.core.sampling import SamplingParams
from pipedec.text.tokenizer import Tokenizer

BEGUN = [*USER, {"role": "assistant", "content": "The answer"}]
LONG = "many words " * 2000


def refused(site: Site, path: str, **fields: Any) -> str:
    """The message of a refusal, which names its field."""
    response = site.client.post(path, json=filled(path, fields))
    error = response.json()["error"]
    assert response.status_code == 400 and site.engine.requests == []
    assert error["param"] in fields
    return str(error["message"])


def prompt_text(site: Site, index: int = -1) -> str:
    return site.engine.tokenizer.decode(site.engine.requests[index].prompt, skip_special_tokens=False)


def text_in(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


@BOTH
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_tokens": 5}, {"min_tokens": 5}),
        ({"min_tokens": 300}, {"min_tokens": 300}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"include_stop_str_in_output": True, "stop": "x"}, {"include_stop_str_in_output": True, "stop": ("x",)}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"n_predict": 7, "max_tokens": None}, {"max_tokens": 7}),
        ({"n_predict": 7, "max_tokens": 9}, {"max_tokens": 9}),
        ({"n_predict": 7, "max_tokens": 9, "max_completion_tokens": 8}, {"max_tokens": 8}),
    ],
    ids=str,
)
def test_a_parameter_reaches_the_engine(site: Site, path: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    ask(site, path, **{"max_tokens": 400} | fields)
    assert site.engine.requests[0].sampling == SamplingParams(**{"temperature": 1.0, "max_tokens": 400} | expected)


@BOTH
@pytest.mark.parametrize("n_predict", [-1, -2])
def test_without_a_limit_llama_cpps_name_changes_nothing(site: Site, path: str, n_predict: int) -> None:
    ask(site, path)
    ask(site, path, n_predict=n_predict)
    first, second = site.engine.requests
    assert first.sampling == second.sampling


@BOTH
def test_more_tokens_at_least_than_at_most_are_refused(site: Site, path: str) -> None:
    assert "min_tokens must be at most 5" in refused(site, path, min_tokens=6, max_tokens=5)
    assert f"min_tokens must be at most {CONTEXT - 1}" in refused(
        site, COMPLETIONS, prompt=[5], min_tokens=CONTEXT, max_tokens=CONTEXT - 1
    )
    assert "min_tokens" in refused(site, path, min_tokens=2, regex="a")


@BOTH
@pytest.mark.parametrize("included", [False, True])
def test_what_ended_an_answer_is_named_and_may_be_shown(
    site: Site, path: str, included: bool, answer_ids: list[int], text_tokenizer: Tokenizer
) -> None:
    token = answer_ids[12]
    for stop, reason, expected in (
        ({"stop": ["zzz", "naïve"]}, "naïve", ANSWER[: ANSWER.index("naïve")] + ("naïve" if included else "")),
        ({"stop_token_ids": [token]}, token, None),
        ({"max_tokens": 200}, None, ANSWER),
    ):
        fields = {"max_tokens": 200, "include_stop_str_in_output": included, **stop}
        (choice,), parts = ask(site, path, **fields)["choices"], stream(site, path, **fields)
        last = parts[-1]["choices"][0]
        assert choice["finish_reason"] == last["finish_reason"] == "stop"
        assert choice["stop_reason"] == last["stop_reason"] == reason
        assert text_in(choice) == text_of(parts) and expected in (None, text_in(choice))
    expected = text_tokenizer.decode(answer_ids[: answer_ids.index(token) + included]).rstrip("\ufffd")
    assert text_in(ask(site, path, stop_token_ids=[token], include_stop_str_in_output=included)["choices"][0]) == expected


@BOTH
def test_special_tokens_may_be_text(say: Say, path: str) -> None:
    site = say("none", "<|user|>a<|assistant|>")
    for skips, expected in ((None, "a"), (True, "a"), (False, "<|user|>a<|assistant|>")):
        (choice,) = ask(site, path, skip_special_tokens=skips)["choices"]
        assert text_in(choice) == text_of(stream(site, path, skip_special_tokens=skips)) == expected


@BOTH
def test_token_ids_come_with_the_answer(site: Site, path: str, answer_ids: list[int]) -> None:
    fields = {"return_token_ids": True, "max_tokens": 200, "n": 2}
    document, parts = ask(site, path, **fields), stream(site, path, **fields)
    prompt = list(site.engine.requests[0].prompt)
    assert [choice["token_ids"] for choice in document["choices"]] == [answer_ids] * 2
    for index in range(2):
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert [token for choice in own for token in choice["token_ids"]] == answer_ids
        assert [choice.get("prompt_token_ids") for choice in own] == [prompt if path == COMPLETIONS else None] + [None] * (
            len(own) - 1
        )
    if path == COMPLETIONS:
        assert [choice["prompt_token_ids"] for choice in document["choices"]] == [prompt] * 2
    else:
        assert document["prompt_token_ids"] == parts[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in part for part in parts[1:])
    assert "token_ids" not in ask(site, path)["choices"][0]


def test_no_token_id_is_lost_while_a_call_is_held_back(say: Say) -> None:
    text = 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    site, tools = say("hermes", text), [{"type": "function", "function": {"name": "f"}}]
    parts = stream(site, CHAT, tools=tools, return_token_ids=True)
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == site.engine.tokenizer.encode(text)


def test_an_echo_alone_has_no_token_ids(site: Site) -> None:
    (choice,) = ask(site, COMPLETIONS, prompt=[5, 6], echo=True, max_tokens=0, return_token_ids=True)["choices"]
    assert choice["token_ids"] == [] and choice["prompt_token_ids"] == [5, 6]


@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_of_a_prompt_have_vllms_shape(site: Site, text_tokenizer: Tokenizer, echo: bool) -> None:
    fields = {"prompt": [5, 6], "prompt_logprobs": 2, "max_tokens": 3, "echo": echo}
    (choice,) = ask(site, COMPLETIONS, **fields)["choices"]
    shown = [(6, -1.0, None), (8, -0.5, 1), (9, -1.0, 2)]
    expected = {
        str(token): {"logprob": value, "rank": rank, "decoded_token": text_tokenizer.token(token)} for token, value, rank in shown
    }
    assert choice["prompt_logprobs"] == [None, expected] and choice["logprobs"] is None
    *parts, last = [part["choices"][0] for part in stream(site, COMPLETIONS, **fields)]
    assert last["prompt_logprobs"] == choice["prompt_logprobs"] and not any("prompt_logprobs" in part for part in parts)
    assert site.engine.requests[0].sampling.prompt_logprobs == 2
    assert "prompt_logprobs" not in ask(site, COMPLETIONS)["choices"][0]


def test_the_same_log_probabilities_are_not_shown_twice(site: Site) -> None:
    assert "prompt_logprobs goes without echo" in refused(site, COMPLETIONS, prompt_logprobs=1, logprobs=1, echo=True)
    assert "21" in refused(site, COMPLETIONS, prompt_logprobs=21)
    assert "not supported" in refused(site, CHAT, prompt_logprobs=1)


@pytest.mark.parametrize(
    ("given", "max_tokens", "kept"),
    [(5, 4, 5), (1, 4, 1), (CONTEXT - 4, 4, CONTEXT - 4), (-1, 4, CONTEXT - 4), (-1, 50, CONTEXT - 50)],
)
def test_the_end_of_a_long_prompt_is_kept(site: Site, text_tokenizer: Tokenizer, given: int, max_tokens: int, kept: int) -> None:
    whole, fields = text_tokenizer.encode(LONG), {"truncate_prompt_tokens": given, "max_tokens": max_tokens}
    for prompt in (LONG, whole):
        (choice,) = ask(site, COMPLETIONS, prompt=prompt, echo=True, **fields)["choices"]
        assert list(site.engine.requests[-1].prompt) == whole[-kept:]
        assert choice["text"].startswith(text_tokenizer.decode(whole[-kept:]))
    messages = [{"role": "user", "content": LONG}]
    ask(site, CHAT, messages=messages, **fields)
    assert list(site.engine.requests[-1].prompt) == text_tokenizer.apply_chat_template(messages)[-kept:]


@BOTH
@pytest.mark.parametrize("given", [-1, 500, CONTEXT + 1, 2**70])
def test_a_short_prompt_is_kept_whole(site: Site, path: str, given: int) -> None:
    ask(site, path, max_tokens=9)
    ask(site, path, max_tokens=9, truncate_prompt_tokens=given)
    first, second = site.engine.requests
    assert first.prompt == second.prompt


def test_a_prompt_that_is_still_too_long_is_refused(site: Site) -> None:
    response = site.client.post(COMPLETIONS, json={"prompt": LONG, "truncate_prompt_tokens": CONTEXT, "max_tokens": 1})
    assert response.status_code == 400 and str(CONTEXT) in response.json()["error"]["message"]
    assert "max_tokens asks for" in refused(site, COMPLETIONS, prompt=LONG, truncate_prompt_tokens=-1, max_tokens=CONTEXT)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": BEGUN, "continue_final_message": True},
        {"messages": [*USER, BEGUN[1] | {"prefix": True}]},
        {"messages": [*USER, BEGUN[1] | {"partial": True}]},
    ],
    ids=["vllm", "short", "deepseek", "moonshot"],
)
@pytest.mark.parametrize("template", ["none", "hermes"])
def test_an_answer_goes_on_with_the_last_message(say: Say, template: str, fields: dict[str, Any]) -> None:
    site = say(template, " is 4.")
    (choice,), parts = ask(site, CHAT, **fields)["choices"], stream(site, CHAT, **fields)
    assert prompt_text(site) == "<|user|>hello<|assistant|>The answer"
    assert choice["message"]["content"] == text_of(parts) == " is 4."
    counted = site.client.post("/tokenize", json=fields).json()
    assert counted["tokens"] == list(site.engine.requests[0].prompt)
    echoed = ask(site, CHAT, **fields, echo=True)["choices"][0]["message"]["content"]
    assert echoed == text_of(stream(site, CHAT, **fields, echo=True)) == "The answer is 4."


def test_an_echo_is_nothing_without_a_message_of_the_assistant(say: Say) -> None:
    site = say("none", "Yes.")
    assert ask(site, CHAT, echo=True)["choices"][0]["message"]["content"] == "Yes."


def test_an_answer_cannot_both_go_on_and_begin(site: Site) -> None:
    assert "goes without" in refused(site, CHAT, messages=BEGUN, continue_final_message=True, add_generation_prompt=True)
    tokenize = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}
    assert site.client.post("/tokenize", json=tokenize).status_code == 400


def test_the_tokenizers_own_tokens_are_added_to_a_chat_on_request(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, encode = [], Tokenizer.encode

    def noting(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(add_special_tokens)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    for given in (None, False, True):
        ask(site, CHAT, add_special_tokens=given)
        site.client.post("/tokenize", json={"messages": USER, "add_special_tokens": given})
    assert seen == [False] * 4 + [True] * 2


def test_documents_reach_the_template(say: Say) -> None:
    site, documents = say("documents", "Yes."), [{"title": "A", "text": "red"}, {"text": "blue"}]
    ask(site, CHAT, documents=documents)
    assert prompt_text(site) == "<red><blue><|user|>hello"
    ask(site, CHAT)
    assert prompt_text(site) == "<|user|>hello"


def test_thoughts_are_left_out_on_request(say: Say) -> None:
    site = say("thoughts", "<think>Hm.</think>Yes.")
    for included, thoughts in ((None, "Hm."), (True, "Hm."), (False, "")):
        message = ask(site, CHAT, include_reasoning=included)["choices"][0]["message"]
        deltas = [part["choices"][0]["delta"] for part in stream(site, CHAT, include_reasoning=included)]
        streamed = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert (message["content"], message.get("reasoning_content", ""), streamed) == ("Yes.", thoughts, thoughts)
