"""Requests as JSON: what arrives is what was sent, and whatever cannot be meant is refused in one line before any rank has it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import convert, to_builtins
from support.run_stats import described_ranks

from pipedec.config import Settings
from pipedec.core.completion import Completion, Metrics
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.sampling import SamplingParams, StructuredOutputs, ThoughtForm
from pipedec.core.stage_message import HiddenStates, NewRequest
from pipedec.core.verdict import Accepted, Verdict
from pipedec.messages.events import (
    AbortEvent,
    AddressEvent,
    CacheSlotsEvent,
    CancelledEvent,
    CardEvent,
    CompletionEvent,
    ErrorEvent,
    Event,
    HiddenStatesEvent,
    LoadedEvent,
    LogprobsEvent,
    OverranEvent,
    PausedEvent,
    PromptLogprobsEvent,
    ResumedEvent,
    ThreadNews,
    TokensEvent,
    TraceEvents,
    event_from_json,
)
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import Choice, LinkSpeed, RankDescription, RunDescription
from pipedec.methods import LayerTreeOptions
from pipedec.threads import load_dialect
from pipedec.tracing import TraceEvent
from pipedec.validation import parse_json, to_json, validated

FULL = SamplingParams(
    temperature=0.6, top_k=80, top_p=0.9, min_p=0.01, seed=2**64 - 1, max_tokens=7, stop=("\n\n", "END"), stop_token_ids=(3, 4),
    repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={5: -3.0, 0: 1}, logprobs=4,
    ignore_eos=True, prompt_logprobs=0, min_tokens=7, include_stop_str_in_output=True, skip_special_tokens=False,
    shown_special_tokens=(7, 5),
)  # fmt: skip
STRUCTURED = [
    SamplingParams(structured_outputs=structure)
    for structure in (
        StructuredOutputs(json={"type": "object", "properties": {"größe": {"enum": [1, None]}}}),
        StructuredOutputs(choice=("yes", "nö")),
        StructuredOutputs(json_object=True),
        StructuredOutputs(choice=("yes",), thought=ThoughtForm("<think>", "</think>", True, False, None, "ö")),
        StructuredOutputs(thought=ThoughtForm("<think>", "</think>", max_tokens=0, marks=("<tool_call>", "</tool_call>"))),
    )
]


REQUESTS = [
    *(PromptRequest("Hello", sampling=sampling) for sampling in (FULL, SamplingParams(), *STRUCTURED)),
    PromptRequest((5, 0, 2**40), resume=(5, 2**40), tenant="local"),
    PromptRequest("Hello", options={"width": 3, "proposers": ["ngrams"]}, tenant="x" * 64),
    PromptRequest("Hello", threads=load_dialect("pasta").to_json(), show_threads=True),
]


@pytest.mark.parametrize("sent", REQUESTS, ids=lambda sent: str(sent)[:40])
def test_requests_arrive_as_they_were(sent: PromptRequest) -> None:
    assert PromptRequest.from_json(sent.to_json()) == sent


def test_what_a_request_may_leave_out_or_abbreviate() -> None:
    text = json.dumps({"prompt": "Hello", "sampling": {"stop": "END", "logit_bias": None, "seed": None, "logprobs": None}})
    assert PromptRequest.from_json(text) == PromptRequest("Hello", sampling=SamplingParams(stop=("END",)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "sampling.temperature: must be a number (at least 0), not 'hot'"),
        ({"temperature": True}, "sampling.temperature: must be a number (at least 0), not True"),
        ({"temperature": None}, "sampling.temperature: must be a number (at least 0), not empty"),
        ({"temperature": float("nan")}, "the request: not valid JSON"),
        ({"temperature": -1}, "sampling.temperature: must be a number (at least 0), not -1"),
        ({"temperature": 10**400}, "sampling.temperature: must be a number (at least 0), not 1000"),
        ({"top_k": 1.5}, "sampling.top_k: must be an integer (at least -1), not 1.5"),
        ({"top_p": [1]}, "sampling.top_p: must be a number (above 0, at most 1), not [1]"),
        ({"seed": "x" * 500}, "sampling.seed: must be an integer, not 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
        ({"logit_bias": {"5": 10**400}}, "sampling.logit_bias.5: must be a number (-100 to 100), not 1000"),
        ({"stop": 5}, "sampling.stop: must be a string (not empty) or a list, not an integer"),
        ({"stop": ["a", 5]}, "sampling.stop[1]: must be a string (not empty), not an integer: quote it"),
        ({"stop": "\ud800"}, "the request: not valid JSON"),
        ({"stop_token_ids": [True]}, "sampling.stop_token_ids[0]: must be an integer, not True"),
        ({"logit_bias": [1, 2]}, "sampling.logit_bias: must be a mapping from an integer (at least 0), not [1, 2]"),
        ({"logit_bias": {"five": 1}}, "sampling.logit_bias: must be a mapping from an integer (at least 0), not {'five': 1}"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: must be a mapping from an integer (at least 0), not {'-1': 1}"),
        ({"ignore_eos": 1}, "sampling.ignore_eos: must be true or false, not 1"),
        ({"colour": "red"}, "sampling: unknown key 'colour': known: temperature, top_k"),
        ([], "sampling: must be a mapping, not []"),
        ({"structured_outputs": {}}, "structured_outputs must have one of json, regex, choice"),
        ({"structured_outputs": {"json": 3}}, "sampling.structured_outputs.json: must be a string or a mapping or true or false"),
        (
            {"structured_outputs": {"regex": "a", "thought": {"begin": "a", "end": "b", "max_tokens": -1}}},
            "sampling.structured_outputs.thought.max_tokens: must be an integer (0 to 2147483647), not -1",
        ),
        ({"structured_outputs": {"regex": "a", "thought": {"begin": "a"}}}, "sampling.structured_outputs.thought.end: missing"),
        ({"structured_outputs": {"schema": {}}}, "sampling.structured_outputs: unknown key 'schema': known: json, regex, choice"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_sampling_parameters(values: Any, message: str) -> None:
    assert message in refused({"prompt": "Hello", "sampling": values})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the request: not valid JSON"),
        ("[" * 100_000, "the request: not valid JSON"),
        ("[]", "the request: must be a mapping, not []"),
        ("{}", "the request: prompt: missing"),
        ({"prompt": 5}, "the request: prompt: must be a string or a list, not an integer: quote it"),
        ({"prompt": "\ud800"}, "the request: not valid JSON"),
        ({"prompt": "a", "tenant": ""}, "the request: tenant: must be a string (length at most 64, not empty), not ''"),
        ({"prompt": "a", "tenant": "x" * 65}, "the request: tenant: must be a string (length at most 64, not empty), not 'xxx"),
        ({"prompt": "a", "tenant": 5}, "the request: tenant: must be"),
        ({"prompt": "a", "promt": "b"}, "the request: unknown key 'promt': did you mean prompt?"),
        ({"prompt": "a", "tree": {}}, "the request: unknown key 'tree': known: prompt, raw, method, sampling, options"),
        ({"prompt": "a", "threads": ["x" * 500]}, "the request: threads: must be a string, not a list"),
        ({"prompt": "a", "show_threads": 1}, "the request: show_threads: must be true or false, not 1"),
        ({"prompt": "a", "resume": "abc"}, "the request: resume: must be a list, not 'abc'"),
        ({"prompt": "a", "resume": [1, "2"]}, "the request: resume[1]: must be an integer, not '2'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_request(text: Any, message: str) -> None:
    assert refused(text).startswith(message)


def refused(request: Any) -> str:
    """The one short line that says why a request, or its text, is refused."""
    with pytest.raises(UserError) as raised:
        PromptRequest.from_json(request if isinstance(request, str) else json.dumps(request))
    message = str(raised.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_a_prompt_that_is_not_utf8_is_refused_before_it_is_sent() -> None:
    with pytest.raises(UserError, match=r"^the request: a text that is not UTF-8$"):
        PromptRequest("a\udcff").to_json()


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict.of(5, 6, forecast=((7, 8), (9, 10), (11, 12))),
        Verdict((), "cancelled"),
        Verdict.of(2**40, finished="stop"),
        Verdict((Accepted(40, (1, 2), ((7, 8),)), Accepted(0, (3,)), Accepted(1, ())), "cache_full"),
    ],
    ids=lambda verdict: str(verdict)[:40],
)
def test_verdicts_arrive_as_they_were(verdict: Verdict) -> None:
    assert convert(json.loads(json.dumps(to_builtins(verdict))), Verdict) == verdict


@pytest.mark.parametrize("sampling", [FULL, SamplingParams(), *STRUCTURED])
def test_openings_arrive_as_they_were(sampling: SamplingParams) -> None:
    dialect = load_dialect("pasta").to_json()
    sent = NewRequest(70_000, sampling, 3, dialect, True, (5, 2**40), ((16, 32), (2**40, 16)), 47, (96, 15))
    assert validated(NewRequest, json.loads(to_json(sent))) == sent


METRICS = Metrics(9, 4, 3, 20, 0.25, 1.5, None, 0.125, cached_tokens=32, pauses=2)
THREADS = {"threads": [{"path": [0], "text": "a"}], "metrics": {"parallelism": 1.5}, "anomalies": {}}


@pytest.mark.parametrize(
    "event",
    [
        TokensEvent([5, 2**40], "é\n"),
        TokensEvent([], "", [ThreadNews((), "a", "waiting", 3), ThreadNews((0, 1), "b", "ended", 0)]),
        LogprobsEvent([[(5, -0.5), (7, -9999.0)], []]),
        PromptLogprobsEvent([[(5, -0.5)], [(7, -9999.0), (5, -1.0)]]),
        HiddenStatesEvent(HiddenStates("bfloat16", (b"\x00\xff", b"ab")), 3),
        TraceEvents([TraceEvent(-1, "1F1", "dec", 1_763_800_000_000_000, 1_763_800_000_000_001)]),
        OverranEvent([1, 5]),
        CacheSlotsEvent(2, 1024),
        PausedEvent(),
        ResumedEvent(),
        CompletionEvent(Completion("pp", 4, 3, [5, 6], "ab", "stop", METRICS, 2**63)),
        CompletionEvent(Completion("pp", 4, 3, [5], "ab", None, METRICS, None, [{5: -0.5, 6: -1.0}], threads=THREADS), [3, -1]),
        CompletionEvent(Completion("pp", 4, 3, stop_reason="END")),
        CompletionEvent(Completion("pp", 4, 3, stop_reason=7)),
        CompletionEvent(Completion("pp", 4, 3, prompt_logprobs=[None, {5: -0.5, 6: -1.0}, {}])),
        ErrorEvent("no such method"),
        CancelledEvent(),
        AbortEvent('rank 2: "é"'),
        CardEvent(3, "server-1", "boot-1", "10.0.0.1", {"torch": "2.13.0"}, {"target": "ab"}),
        AddressEvent(3, "fe80::1", 40_000, {"target": {"model.norm.weight": "ab"}}),
        LoadedEvent(RankDescription(3, "a", "cpu", *(Choice(name, "w") for name in ("float32", "gloo", "eth0", "SDPA")), ("é",))),
        LoadedEvent(described_ranks([LinkSpeed(0.0401, 12.25e6)])[0]),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_arrive_as_they_were(event: Event) -> None:
    text = to_json(event)
    assert event_from_json(text) == event_from_json(text.encode()) == event
    assert "kind" in json.loads(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Input data was truncated"),
        ("[" * 100_000, "Expected `object`, got `array`"),
        ("5", "Expected `object`, got `int`"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "Object missing required field `kind`"),
        ('{"kind": "news"}', "Invalid value 'news' - at `$.kind`"),
        ('{"kind": ["tokens"]}', "Expected `str` - at `$.kind`"),
        ('{"kind": "tokens", "token_ids": [1]}', "Object missing required field `text`"),
        ('{"kind": "tokens", "token_ids": ["a"], "text": ""}', "Expected `int`, got `str` - at `$.token_ids[0]`"),
        ('{"kind": "abort", "text": 5}', "Expected `str`, got `int` - at `$.text`"),
        ('{"kind": "card", "rank": 1, "tank": 2}', "Object contains unknown field `tank`"),
        ('{"kind": "completion", "completion": {"method": "pp"}}', "Object missing required field `stages` - at `$.completion`"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_no_event(text: str, reason: str) -> None:
    with pytest.raises(PipedecError) as refused:
        event_from_json(text)
    message = str(refused.value)
    assert message.startswith(f"the cluster sent an event that this version does not understand: {reason}")
    assert "\n" not in message and len(message) < 400 and not isinstance(refused.value, UserError)


def test_descriptions_of_a_run_arrive_as_they_were() -> None:
    settings = Settings.of(
        target="t", draft="d", bita="b", dtype="bfloat16", device="cpu", dispatch="tasks", max_model_len=99,
        tree=LayerTreeOptions(8, 4),
    )  # fmt: skip
    ranks = described_ranks([LinkSpeed(0.04, 1e7), None, LinkSpeed(0.02, 1e9), None])
    full = RunDescription(settings, ((1, 2), (3,)), ((0, 2), (2, 3), (3, 6)), emulation="paper-14", ranks=ranks)
    assert full.ring_latency_seconds == pytest.approx(0.06)
    for sent in (full, RunDescription(Settings.of(target="t"), ((1,),), ((0, 6),))):
        assert parse_json(RunDescription, to_json(sent)) == sent
    with pytest.raises(UserError, match=r"^the description of the run: layers: missing"):
        parse_json(RunDescription, '{"settings": {}, "groups": [[1]]}', "the description of the run")
