"""Requests as JSON: what arrives is what was sent, and whatever cannot be meant is refused in one line before any rank has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipedec.core import SamplingParams, Share, TreeParams, UserError, Verdict
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
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": True}, "temperature must be a number, not 'True'"),
        ({"temperature": None}, "temperature must be a number, not 'None'"),
        ({"temperature": float("nan")}, "temperature must be finite and at least 0, not nan"),
        ({"temperature": -1}, "temperature must be finite and at least 0, not -1"),
        ({"top_k": 1.5}, "top_k must be a whole number, not '1.5'"),
        ({"top_p": [1]}, "top_p must be a number, not '[1]'"),
        ({"min_p": {}}, "min_p must be a number, not '{}'"),
        ({"seed": 0.5}, "seed must be a whole number, not '0.5'"),
        ({"seed": "x" * 500}, "seed must be a whole number"),
        ({"max_tokens": None}, "max_tokens must be a whole number, not 'None'"),
        ({"logprobs": False}, "logprobs must be a whole number, not 'False'"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
        ({"repetition_penalty": "1"}, "repetition_penalty must be a number, not '1'"),
        ({"temperature": 10**400}, "temperature must be finite and at least 0"),
        ({"repetition_penalty": 10**400}, "repetition_penalty must be finite and above 0"),
        ({"presence_penalty": 10**400}, "presence_penalty must be between -2 and 2"),
        ({"stop": 5}, "stop must be texts"),
        ({"stop": ["a", 5]}, "stop must be texts"),
        ({"stop": None}, "stop must be texts"),
        ({"stop": ""}, "stop must be texts that are not empty"),
        ({"stop": "\ud800"}, "stop is not UTF-8 text"),
        ({"stop_token_ids": 5}, "stop_token_ids must be whole numbers"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be whole numbers"),
        ({"logit_bias": [1, 2]}, "logit_bias must give numbers to token ids"),
        ({"logit_bias": {"five": 1}}, "logit_bias must give numbers to token ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias must give numbers to token ids"),
        ({"logit_bias": {"5": "1"}}, "logit_bias must give numbers to token ids"),
        ({"logit_bias": {"5": 1000}}, "logit_bias must be between -100 and 100"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not '1'"),
        ({"colour": "red"}, "cannot be read"),
        ([], "cannot be read"),
        (None, "cannot be read"),
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


@pytest.mark.parametrize(
    "tree", [TreeParams(), TreeParams(3, 4, 5, 6, 7, ("ngrams",), "full"), TreeParams(depth=2, shape="straightforward")]
)
def test_tree_limits_arrive_as_they_were(tree: TreeParams) -> None:
    assert PromptRequest.from_json(PromptRequest("Hello", tree=tree).to_json()).tree == tree


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": "round"}, "tree shape must be one of likeliest, efficient, straightforward, full, not round"),
        ({"shape": 5}, "tree shape must be a text"),
        ({"shape": None}, "tree shape must be a text"),
        ({"shape": ["full"]}, "tree shape must be a text"),
        ({"shape": "x" * 500}, "tree shape must be one of likeliest, efficient, straightforward, full, not x"),
        ({"depth": "deep"}, "cannot be read"),
        ({"depth": 1.5}, "tree depth must be a whole number, not '1.5'"),
        ({"depth": True}, "tree depth must be a whole number, not 'True'"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_tree_limits(values: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        PromptRequest.from_json(json.dumps({"prompt": "Hello", "method": "bita", "tree": values}))
    assert message in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("show_threads", [True, False])
@pytest.mark.parametrize("threads", [None, load_dialect("pasta").to_json()], ids=["one", "threads"])
def test_wishes_for_threads_arrive_as_they_were(threads: str | None, show_threads: bool) -> None:
    sent = PromptRequest("Hello", threads=threads, show_threads=show_threads)
    assert PromptRequest.from_json(sent.to_json()) == sent


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threads": 5}, "threads must be the text of a dialect, not '5'"),
        ({"threads": {"name": "apar"}}, "threads must be the text of a dialect, not"),
        ({"threads": ["x" * 500]}, "threads must be the text of a dialect, not"),
        ({"show_threads": 1}, "show_threads must be true or false, not '1'"),
        ({"show_threads": None}, "show_threads must be true or false, not 'None'"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_wishes_for_threads(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        PromptRequest.from_json(json.dumps({"prompt": "Hello", **fields}))
    assert message in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 300
