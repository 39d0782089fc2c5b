"""Responses of both endpoints: texts, choices, usage and log-probabilities, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from support.http_server import BOTH, CHAT, COMPLETIONS, Site, ask, content, stream, text_of
from support.scripted_engine import ANSWER, logprobs_of
from support.tiny_pair import CONTEXT

from pipedec.core.sampling import SamplingParams
from pipedec.text.tokenizer import Tokenizer


def text_in(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


@BOTH
def test_an_answer_is_the_engines_whole_and_streamed(site: Site, answer_ids: list[int], path: str) -> None:
    document = ask(site, path, max_tokens=200)
    assert document["model"] == "tiny" and document["id"].startswith("chatcmpl-" if path == CHAT else "cmpl-")
    assert document["object"] == ("chat.completion" if path == CHAT else "text_completion")
    (choice,) = document["choices"]
    assert (text_in(choice), choice["finish_reason"], choice["logprobs"]) == (ANSWER, "stop", None)
    prompt = len(site.engine.requests[0].prompt)
    assert document["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": len(answer_ids), "total_tokens": prompt + len(answer_ids),
        "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    parts = stream(site, path, max_tokens=200, stream_options={"include_usage": True})
    assert text_of(parts) == ANSWER and len(parts) > 10
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == document["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 2) + ["stop"]
    assert len({part["id"] for part in parts}) == 1


@BOTH
def test_usage_comes_with_every_chunk_or_with_none(site: Site, path: str, answer_ids: list[int]) -> None:
    parts = stream(site, path, max_tokens=200, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == len(answer_ids)
    assert all("usage" not in part and part["choices"] for part in stream(site, path))


def test_the_role_stands_in_the_first_chunk_which_has_text(site: Site) -> None:
    first, *deltas = [part["choices"][0]["delta"] for part in stream(site, CHAT)]
    assert first["role"] == "assistant" and first["content"]
    assert all("role" not in delta for delta in deltas) and all(delta["content"] for delta in deltas[:-1])


@BOTH
@pytest.mark.failure_case("H19")
def test_no_half_character_is_streamed(site: Site, path: str) -> None:
    for max_tokens in (1, 2, 3, 4, 5, 11, 12, 13, 14):
        parts = stream(site, path, max_tokens=max_tokens)
        assert "\ufffd" not in text_of(parts)
        assert ANSWER.startswith(text_of(parts))
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        assert text_in(ask(site, path, max_tokens=max_tokens)["choices"][0]) == text_of(parts)


@BOTH
@pytest.mark.parametrize("stop", [["zzz", "naïve café"], "京 a", ["need", "and"]])
@pytest.mark.failure_case("H20")
def test_text_and_usage_end_exactly_at_a_stop_string(site: Site, text_tokenizer: Tokenizer, path: str, stop: Any) -> None:
    expected = ANSWER[: min(place for text in ([stop] if isinstance(stop, str) else stop) if (place := ANSWER.find(text)) >= 0)]
    document = ask(site, path, stop=stop, max_tokens=200)
    parts = stream(site, path, stop=stop, max_tokens=200, stream_options={"include_usage": True})
    assert text_in(document["choices"][0]) == text_of(parts) == expected
    assert document["choices"][0]["finish_reason"] == "stop" and document["usage"] == parts[-1]["usage"]
    assert document["usage"]["completion_tokens"] < len(text_tokenizer.encode(ANSWER))


@BOTH
def test_choices_have_the_seeds_behind_the_first_one(site: Site, path: str) -> None:
    document = ask(site, path, n=3, seed=2**64 - 2, max_tokens=4)
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in site.engine.requests] == [2**64 - 2, 2**64 - 1, 0]
    assert document["usage"]["completion_tokens"] == 12
    assert document["usage"]["prompt_tokens"] == len(site.engine.requests[0].prompt)
    parts = stream(site, path, n=8, max_tokens=200)
    assert [text_of(parts, index) for index in range(8)] == [ANSWER] * 8
    assert {part["choices"][0]["index"] for part in parts[:8]} != {0}


@pytest.mark.parametrize("prompt", ["hi", ["hi", "you"], [5, 6, 7], [[5, 6], [7]]])
def test_prompts_may_be_texts_and_token_ids(site: Site, text_tokenizer: Tokenizer, prompt: Any) -> None:
    document = ask(site, COMPLETIONS, prompt=prompt, n=2)
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    given = [tuple(text_tokenizer.encode(one) if isinstance(one, str) else one) for one in prompts]
    assert [request.prompt for request in site.engine.requests] == [one for one in given for _ in range(2)]
    assert all(request.raw for request in site.engine.requests)
    assert [choice["index"] for choice in document["choices"]] == list(range(2 * len(given)))
    assert document["usage"]["prompt_tokens"] == sum(map(len, given))


def test_messages_reach_the_template_whole(site: Site, text_tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None}, {"role": "user", "content": "d", "name": "eve"},
    ]  # fmt: skip
    flat = [message | {"content": "a\nb"} if isinstance(message["content"], list) else message for message in messages]
    for options in ({}, {"add_generation_prompt": False}):
        ask(site, CHAT, messages=messages, **options)
        assert site.engine.requests[-1].prompt == tuple(text_tokenizer.apply_chat_template(flat, **options))


def test_all_sampling_fields_reach_the_engine(site: Site) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ("x", "y"), "stop_token_ids": (4,),
        "presence_penalty": 0.3, "frequency_penalty": -0.2, "repetition_penalty": 1.5, "logit_bias": {5: -1.5},
        "ignore_eos": True, "max_tokens": 11,
    }  # fmt: skip
    ask(site, CHAT, **fields, priority=-5, method="pp", top_logprobs=3, logprobs=True)
    (request,) = site.engine.requests
    assert request.sampling == SamplingParams(**fields, logprobs=3)
    assert (request.priority, request.method) == (-5, "pp")


@BOTH
@pytest.mark.failure_case("H4")
def test_unknown_fields_and_nulls_are_accepted(site: Site, path: str) -> None:
    nulls = dict.fromkeys((
        "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "logprobs",
        "logit_bias", "stream", "stream_options", "user", "tools", "tool_choice", "best_of", "suffix", "echo", "response_format",
        "presence_penalty", "stop_token_ids", "priority", "method", "threads", "functions", "guided_json", "ignore_eos",
    ))  # fmt: skip
    ask(site, path, **nulls, something_else={"a": [1]}, metadata={}, store=False)
    sampling = site.engine.requests[0].sampling
    assert sampling == SamplingParams(temperature=1.0, max_tokens=sampling.max_tokens)


def test_what_asks_for_nothing_special_is_accepted(site: Site) -> None:
    ask(
        site, CHAT, tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"], length_penalty=1.0,
        functions=[], use_beam_search=False, skip_special_tokens=True, min_tokens=0, bad_words=[], seed=-1,
    )  # fmt: skip
    ask(site, COMPLETIONS, best_of=1, suffix="", min_tokens=8, max_tokens=8, ignore_eos=True)


@BOTH
@pytest.mark.failure_case("H36")
def test_the_seed_minus_one_is_none_and_lower_ones_are_seeds(site: Site, path: str) -> None:
    for seed in (-1, -2, -(2**63)):
        ask(site, path, seed=seed, n=2)
    seeds = [request.sampling.seed for request in site.engine.requests]
    assert seeds == [None, None, 2**64 - 2, 2**64 - 1, 2**63, 2**63 + 1]


def test_max_tokens_has_an_alias_and_defaults(site: Site) -> None:
    for path, given in ((COMPLETIONS, {}), (CHAT, {}), (CHAT, {"max_tokens": 5}), (CHAT, {"max_completion_tokens": 6}),
                        (COMPLETIONS, {"max_completion_tokens": 7}), (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}),
                        (COMPLETIONS, {"prompt": [5] * (CONTEXT - 3)})):  # fmt: skip
        ask(site, path, **given)
    room = CONTEXT - len(site.engine.requests[1].prompt)
    assert [request.sampling.max_tokens for request in site.engine.requests] == [16, room, 5, 6, 7, 6, 3]


def test_logprobs_of_completions(site: Site, text_tokenizer: Tokenizer, answer_ids: list[int]) -> None:
    shown = ask(site, COMPLETIONS, logprobs=2, max_tokens=200)["choices"][0]["logprobs"]
    assert shown["tokens"] == [text_tokenizer.token(token) for token in answer_ids]
    assert shown["token_logprobs"] == [-1.0] * len(answer_ids)
    first = logprobs_of(answer_ids[0], 2)
    assert shown["top_logprobs"][0] == {text_tokenizer.token(token): value for token, value in first.items()}
    encoded = [text_tokenizer.token_bytes(token) for token in answer_ids]
    starts = [len(b"".join(encoded[:count]).decode(errors="ignore")) for count in range(len(encoded))]
    assert shown["text_offset"] == starts
    streamed = [part["choices"][0]["logprobs"] for part in stream(site, COMPLETIONS, logprobs=2, max_tokens=200)]
    assert {name: [entry for part in streamed for entry in part[name]] for name in shown} == shown


def test_logprobs_of_chats(site: Site, text_tokenizer: Tokenizer, answer_ids: list[int]) -> None:
    shown = ask(site, CHAT, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in shown for byte in entry["bytes"]).decode() == ANSWER
    assert [entry["token"] for entry in shown] == [text_tokenizer.token(token) for token in answer_ids]
    assert [entry["logprob"] for entry in shown] == [-1.0] * len(answer_ids)
    assert [entry["logprob"] for entry in shown[0]["top_logprobs"]] == [-0.5, -1.0]
    parts = stream(site, CHAT, logprobs=True, top_logprobs=2)
    streamed = [part["choices"][0]["logprobs"] for part in parts]
    assert [entry for part in streamed if part for entry in part["content"]] == shown
    assert all(part["choices"][0]["logprobs"] and content(part) for part in parts[:-1])


def test_logprobs_without_alternatives_and_with_ids(site: Site, answer_ids: list[int]) -> None:
    assert ask(site, COMPLETIONS, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"] == [-1.0] * 16
    shown = ask(site, CHAT, logprobs=True, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in shown] == [[], []]
    shown = ask(site, COMPLETIONS, logprobs=1, max_tokens=2, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert shown["tokens"] == [f"token_id:{token}" for token in answer_ids[:2]]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echo_comes_with_log_probabilities_of_the_prompt(
    site: Site, text_tokenizer: Tokenizer, answer_ids: list[int], max_tokens: int
) -> None:
    prompt = text_tokenizer.encode("hello you")
    given = {"prompt": [prompt, prompt[:2]], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    document = ask(site, COMPLETIONS, **given)
    *parts, usage = stream(site, COMPLETIONS, **given, stream_options={"include_usage": True})
    streamed = next(part["choices"][0] for part in parts if part["choices"][0]["index"] == 0)
    assert document["usage"]["completion_tokens"] == usage["usage"]["completion_tokens"] == 2 * max_tokens
    for choice in (document["choices"][0], streamed):
        shown = choice["logprobs"]
        assert shown["tokens"] == [text_tokenizer.token(token) for token in [*prompt, *answer_ids[:max_tokens]]]
        assert shown["token_logprobs"] == [None, *[-1.0] * (len(prompt) + max_tokens - 1)]
        assert shown["top_logprobs"][0] is None and len(shown["text_offset"]) == len(shown["tokens"])
        assert choice["text"].startswith("hello you") and choice["finish_reason"] == "length"
        assert (choice["text"] == "hello you") == (max_tokens == 0)
    for request in site.engine.requests:
        assert (request.sampling.prompt_logprobs, request.sampling.max_tokens) == (1, max(1, max_tokens))


def test_an_echo_without_log_probabilities_begins_the_stream(site: Site) -> None:
    parts = stream(site, COMPLETIONS, prompt="hello", echo=True, max_tokens=200)
    assert text_of(parts) == "hello" + ANSWER and len(parts) > 10
    assert site.engine.requests[0].sampling.prompt_logprobs is None


def test_aliases_answer_to_their_own_name(site: Site) -> None:
    assert ask(site, CHAT, model="alias")["model"] == "alias"
    assert [card["id"] for card in site.client.get("/v1/models").json()["data"]] == ["tiny", "alias"]
    assert site.client.get("/v1/models/alias").json()["max_model_len"] == CONTEXT
    assert site.client.get("/v1/models/gpt-4").status_code == 404


def test_tokenize_and_detokenize(site: Site, text_tokenizer: Tokenizer) -> None:
    def post(path: str, **body: Any) -> dict[str, Any]:
        return site.client.post(path, json=body).json()

    tokens = text_tokenizer.encode(ANSWER)
    assert post("/tokenize", prompt=ANSWER) == {"count": len(tokens), "max_model_len": CONTEXT, "tokens": tokens}
    long = "many words " * 400  # not on the event loop
    assert post("/tokenize", prompt=long)["tokens"] == text_tokenizer.encode(long)
    named = post("/tokenize", prompt="hello", return_token_strs=True)
    assert named["token_strs"] == [text_tokenizer.token(token) for token in named["tokens"]]
    messages = [{"role": "user", "content": "hello"}]
    assert post("/tokenize", messages=messages)["tokens"] == text_tokenizer.apply_chat_template(messages)
    assert post("/detokenize", tokens=tokens) == {"prompt": ANSWER}
    assert site.client.post("/tokenize", json={}).status_code == 400
