"""Requests as JSON: what arrives is what was sent, and whatever cannot be meant is refused in one line before any rank has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipedec.core import SamplingParams, Share, UserError, Verdict
from pipedec.engine.payloads import verdict_from_payload, verdict_to_payload
from pipedec.messages import PromptRequest
from pipedec.threads import load_dialect

FULL = SamplingParams(
    temperature=0.6,
    top_k=80,
    top_p=0.9,
    min_p=0.01,
    seed=2**64 - 1,
    max_tokens=7,
    stop=("\n\n", "END"),
    stop_token_ids=(3, 4),
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias={5: -3.0, 0: 1},
    logprobs=4,
    ignore_eos=True,
)


@pytest.mark.parametrize("sampling", [FULL, SamplingParams()])
def test_sampling_parameters_arrive_as_they_were(sampling: SamplingParams) -> None:
    assert PromptRequest.from_json(PromptRequest("Hello", sampling=sampling).to_json()).sampling == sampling


def test_one_stop_string_may_be_given_as_it_is() -> None:
    text = json.dumps({"prompt": "Hello", "sampling": {"stop": "END", "logit_bias": None, "seed": None, "logprobs": None}})
    assert PromptRequest.from_json(text).sampling == SamplingParams(stop=("END",))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "sampling.temperature: must be a number, not a string"),
        ({"temperature": True}, "sampling.temperature: must be a number, not true or false"),
        ({"temperature": None}, "sampling.temperature: must be a number, not empty"),
        ({"temperature": float("nan")}, "temperature must be finite and at least 0, not nan"),
        ({"temperature": -1}, "temperature must be finite and at least 0, not -1"),
        ({"top_k": 1.5}, "sampling.top_k: must be an integer, not a number"),
        ({"top_p": [1]}, "sampling.top_p: must be a number, not a list"),
        ({"min_p": {}}, "sampling.min_p: must be a number, not a mapping"),
        ({"seed": 0.5}, "sampling.seed: must be an integer, not a number"),
        ({"seed": "x" * 500}, "sampling.seed: must be an integer, not a string"),
        ({"max_tokens": None}, "sampling.max_tokens: must be an integer, not empty"),
        ({"logprobs": False}, "sampling.logprobs: must be an integer, not true or false"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
        ({"repetition_penalty": "1"}, "sampling.repetition_penalty: must be a number, not a string"),
        ({"temperature": 10**400}, "temperature must be finite and at least 0"),
        ({"repetition_penalty": 10**400}, "repetition_penalty must be finite and above 0"),
        ({"presence_penalty": 10**400}, "presence_penalty must be between -2 and 2"),
        ({"stop": 5}, "sampling.stop: must be a string or a list, not an integer"),
        ({"stop": ["a", 5]}, "sampling.stop[1]: must be a string, not an integer: quote it"),
        ({"stop": None}, "sampling.stop: must be a string or a list, not empty"),
        ({"stop": ""}, "stop must be strings that are not empty"),
        ({"stop": "\ud800"}, "the request: a text that is not UTF-8"),
        ({"stop_token_ids": 5}, "sampling.stop_token_ids: must be a list, not an integer"),
        ({"stop_token_ids": [True]}, "sampling.stop_token_ids[0]: must be an integer, not true or false"),
        ({"logit_bias": [1, 2]}, "sampling.logit_bias: must be a mapping, not a list"),
        ({"logit_bias": {"five": 1}}, "sampling.logit_bias: must be an integer, not 'five'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias must be of token ids, which are at least 0"),
        ({"logit_bias": {"5": "1"}}, "sampling.logit_bias.5: must be a number, not a string"),
        ({"logit_bias": {"5": 1000}}, "logit_bias must be between -100 and 100"),
        ({"ignore_eos": 1}, "sampling.ignore_eos: must be true or false, not an integer"),
        ({"colour": "red"}, "sampling: unknown key 'colour': known: temperature, top_k"),
        ([], "sampling: must be a mapping, not a list"),
        (None, "sampling: must be a mapping, not empty"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_sampling_parameters(values: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        PromptRequest.from_json(json.dumps({"prompt": "Hello", "sampling": values}))
    assert message in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict((5, 6), None, ((7, 8), (9, 10), (11, 12))),
        Verdict((), "cancelled"),
        Verdict((2**40,), "stop"),
        Verdict((1, 2), None, ()),
        Verdict((1, 2, 3), None, ((7, 8),), (Share(40, 2, 1), Share(0, 1, 0))),
    ],
    ids=lambda verdict: str(verdict)[:40],
)
def test_verdicts_arrive_as_they_were(verdict: Verdict) -> None:
    assert verdict_from_payload(json.loads(json.dumps(verdict_to_payload(verdict)))) == verdict


def test_options_arrive_as_they_were() -> None:
    options = {"width": 3, "proposers": ["ngrams"]}
    assert PromptRequest.from_json(PromptRequest("Hello", options=options).to_json()).options == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the request: not valid JSON"),
        ("[" * 100_000, "the request: not valid JSON"),
        ("[]", "the request: must be a mapping, not a list"),
        ("{}", "the request: prompt: missing"),
        ('{"prompt": "a", "prompt": "b"}', "the request: duplicate key 'prompt'"),
        ('{"prompt": 5}', "the request: prompt: must be a string, not an integer: quote it"),
        ('{"prompt": "\\ud800"}', "the request: a text that is not UTF-8, or nested too deeply"),
        ('{"prompt": "a", "promt": "b"}', "the request: unknown key 'promt': did you mean prompt?"),
        ('{"prompt": "a", "tree": {}}', "the request: unknown key 'tree': known: prompt, raw, method, sampling, options"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_request(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        PromptRequest.from_json(text)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


@pytest.mark.parametrize("show_threads", [True, False])
@pytest.mark.parametrize("threads", [None, load_dialect("pasta").to_json()], ids=["one", "threads"])
def test_wishes_for_threads_arrive_as_they_were(threads: str | None, show_threads: bool) -> None:
    sent = PromptRequest("Hello", threads=threads, show_threads=show_threads)
    assert PromptRequest.from_json(sent.to_json()) == sent


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threads": 5}, "threads: must be a string, not an integer"),
        ({"threads": {"name": "apar"}}, "threads: must be a string, not a mapping"),
        ({"threads": ["x" * 500]}, "threads: must be a string, not a list"),
        ({"show_threads": 1}, "show_threads: must be true or false, not an integer"),
        ({"show_threads": None}, "show_threads: must be true or false, not empty"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_wishes_for_threads(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        PromptRequest.from_json(json.dumps({"prompt": "Hello", **fields}))
    assert message in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 300
