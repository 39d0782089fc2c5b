"""Structured outputs through LocalPipeline: by every method, number of stages and in any company, the target's own answer among
those that the structure allows; and it is what the structure asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
import torch
from support.kv_budgets import with_slots
from support.naive_sampling import choose
from transformers import LlamaForCausalLM

from benchmarks.structured import Case, load_cases
from pipedec.config import Settings
from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams, StructuredOutputs, ThoughtForm
from pipedec.decoding import LaneSizes
from pipedec.directories import reference_pair
from pipedec.engine.build import resolve
from pipedec.engine.local import LocalPipeline
from pipedec.methods import METHODS, BestFirstOptions, BitaOptions, PipeDecOptions, StaticTreeOptions
from pipedec.plan.spec import PipelineSpec
from pipedec.text.prompt import Prompter
from pipedec.threads.sequences import Sequences

SLOW = pytest.mark.slow
TARGET = reference_pair() / "target"
MAX_TOKENS = 160
STAGES = (1, 4, 14)
CASES = load_cases()
SAMPLE = [case for case in CASES if case.kind in {"$ref to $defs", "pattern", "anyOf", "array of strings"}]
DRAWN = {"temperature": 0.9, "seed": 7, "top_p": 0.95, "repetition_penalty": 1.2}
OTHERS: list[tuple[str, MethodOptions]] = [
    ("pipedec", PipeDecOptions(1, 4)), ("pipedec", PipeDecOptions(5, 2)), ("stpp", StaticTreeOptions(4, 4, depth=3)),
    ("stpp", StaticTreeOptions(16, 4, depth=2, rows=6)), ("pipedec-bestfirst", BestFirstOptions(width=1)),
    ("pipedec-bestfirst", BestFirstOptions(width=20, forwards=3)), ("pipedec-bestfirst", BestFirstOptions(proposers=("ngrams",))),
    *(("bita", BitaOptions(shape=shape)) for shape in ("straightforward", "efficient", "full")),
]  # fmt: skip
EVERY_METHOD: list[tuple[str, MethodOptions | None]] = [(method, None) for method in METHODS]
KINDS: dict[str, StructuredOutputs] = {
    "regex": StructuredOutputs(regex=r"(yes|no), [a-z]{2,8}( [a-z]{2,8}){0,3}\."),
    "choice": StructuredOutputs(choice=("positive", "negative", "positively not")),
    "grammar": StructuredOutputs(grammar='start: "[" item (", " item)~1..3 "]"\nitem: /[0-9]{1,2}/ | "none"'),
    "json_object": StructuredOutputs(json_object=True),
}
THOUGHTS: dict[str, tuple[StructuredOutputs, str]] = {  # and the form of the answer's text
    "tokens, JSON": (
        StructuredOutputs(
            json={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False},
            thought=ThoughtForm("<Path>", "</Path>", is_optional=False, max_tokens=9),
        ),
        r'<Path>.*</Path>\n{0,2}\{"ok": (true|false)\}',
    ),
    "text, choice": (
        StructuredOutputs(
            choice=("positive", "negative"), thought=ThoughtForm("<think>", "</think>", is_open=True, max_tokens=5, before="So: ")
        ),
        "(?!.*<think>).*</think>So: (positive|negative)",
    ),
    "free text": (
        StructuredOutputs(thought=ThoughtForm("<Path>", "</think>", is_optional=False, max_tokens=7)),
        "<Path>.*</think>.*",
    ),
}  # fmt: skip


@cache
def prompter() -> Prompter:
    return Prompter(TARGET, 2048)


def prompt_of(text: str) -> tuple[int, ...]:
    return prompter().token_ids(text, False, MAX_TOKENS)


def sampling_of(case: Case, **sampling: Any) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, structured_outputs=case.structure, **sampling)


@cache
def spec_of(stages: int) -> PipelineSpec:
    """In float64, where no order of summation can tip a choice."""
    return resolve(Settings.of(stages=stages, device="cpu", dtype="float64"))


@cache
def pipeline_of(stages: int) -> LocalPipeline:
    return LocalPipeline.load(spec_of(stages))


@cache
def transformers_target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float64)


@cache
def expected(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """Token by token with transformers: of the tokens that the structure allows, the one that the target chooses."""
    sequence = Sequences(TARGET).maker(len(prompt), sampling)()
    said: list[int] = []
    assert sequence.grammar is not None
    model, past, ids = transformers_target(), None, torch.tensor([prompt])
    while sequence.finished is None:
        with torch.inference_mode():
            output = model(ids, past_key_values=past, use_cache=True)
        logits = output.logits[0, -1].tolist()
        allowed = sequence.grammar.allowed()
        banned = {token for token in range(len(logits)) if token not in allowed}
        said.append(choose(logits, prompt, said, sampling, banned=banned))
        sequence.accept_token(0, said[-1])
        past, ids = output.past_key_values, torch.tensor([[said[-1]]])
    return tuple(said)


def answer(pipeline: LocalPipeline, prompt: tuple[int, ...], sampling: SamplingParams, method: str = "pp",
           options: MethodOptions | None = None, tenant: str | None = None) -> tuple[int, ...]:  # fmt: skip
    verdicts = list(pipeline.run(TokenizedRequest(0, prompt, sampling, method, options, tenant=tenant)))
    return tuple(token for verdict in verdicts for token in verdict.tokens)


def check_valid(case: Case, token_ids: Sequence[int]) -> None:
    """An answer that has ended by itself is a document of its schema."""
    document = json.loads(prompter().text(list(token_ids)))
    assert jsonschema_rs.is_valid(case.schema, document, validate_formats=True), document


def check_same(pipeline: LocalPipeline, cases: Iterable[Case], methods: Iterable[tuple[str, MethodOptions | None]],
               **sampling: Any) -> None:  # fmt: skip
    """Every method says what the target says."""
    for case in cases:
        prompt, params = prompt_of(case.prompt), sampling_of(case, **sampling)
        wanted = expected(prompt, params)
        for method, options in methods:
            assert answer(pipeline, prompt, params, method, options) == wanted, (case.kind, method, options)
            if pipeline.last.finished == "stop":
                check_valid(case, wanted)
        assert pipeline.last.finished == "stop" or sampling, f"greedy, the target ends its answer: {case.kind}"


def test_every_method_says_what_the_target_says_among_what_is_allowed() -> None:
    """Drawn and penalised; the tests below are greedy."""
    check_same(pipeline_of(4), [case for case in CASES if case.kind == "format date"], EVERY_METHOD, **DRAWN)


def test_earlier_answers_change_no_structured_answer() -> None:
    """The second request finds the whole answer to the first among the earlier ones, the third an answer of another structure."""
    pipeline, other = pipeline_of(4), sampling_of(SAMPLE[1])
    prompt, params = prompt_of(SAMPLE[0].prompt), sampling_of(SAMPLE[0])
    wanted, timesteps = expected(prompt, params), []
    for _ in range(2):
        assert answer(pipeline, prompt, params, "pipedec-bestfirst", BestFirstOptions(width=20, forwards=3), "a") == wanted
        timesteps.append(pipeline.last.metrics.timesteps)
    assert timesteps[1] < timesteps[0]
    assert answer(pipeline, prompt, other, "pipedec-bestfirst", tenant="a") == expected(prompt, other)


def a_third(turn: int) -> list[Case]:
    """Thirty schemas are shared among the numbers of stages."""
    assert len(CASES) == len({case.kind for case in CASES}) == 30
    return CASES[turn % len(STAGES) :: len(STAGES)]


@SLOW
@pytest.mark.in_turn(5)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("how", ["greedy", "drawn", "other options"])
def test_thirty_schemas(how: str, stages: int) -> None:
    """By every method, greedy and drawn with penalties, and every third by other options of the methods."""
    turn = STAGES.index(stages)
    if how == "greedy":
        check_same(pipeline_of(stages), a_third(turn), EVERY_METHOD)
    elif how == "drawn":
        check_same(pipeline_of(stages), a_third(turn + 1), EVERY_METHOD, **DRAWN)
    else:
        check_same(pipeline_of(stages), a_third(turn)[::3], OTHERS)


@pytest.mark.fast_cases("choice")
@pytest.mark.parametrize("kind", KINDS)
def test_other_structures(kind: str) -> None:
    prompt, params = prompt_of("Is the sky blue?"), SamplingParams(max_tokens=24, structured_outputs=KINDS[kind])
    wanted = expected(prompt, params)
    for method in METHODS:
        assert answer(pipeline_of(4), prompt, params, method) == wanted
    text = prompter().text(list(wanted))
    if kind == "regex":
        assert re.fullmatch(KINDS[kind].regex or "", text)
    elif kind == "choice":
        assert text in (KINDS[kind].choice or ())
    elif kind == "grammar":
        assert re.fullmatch(r"\[(\d{1,2}|none)(, (\d{1,2}|none)){1,3}\]", text)
    elif pipeline_of(4).last.finished == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.fast_cases("greedy-tokens, JSON")
@pytest.mark.parametrize("kind", THOUGHTS)
@pytest.mark.parametrize("how", ["greedy", "drawn"])
def test_a_thought_with_a_budget_before_the_structure(how: str, kind: str) -> None:
    structure, form = THOUGHTS[kind]
    sampling = SamplingParams(max_tokens=32, structured_outputs=structure, **(DRAWN if how == "drawn" else {}))
    prompt = prompt_of("Is the sky blue?")
    wanted = expected(prompt, sampling)
    for method in METHODS:
        assert answer(pipeline_of(4), prompt, sampling, method) == wanted, method
    text = prompter().tokenizer.decode(wanted, skip_special_tokens=False).removesuffix("<|end|>")
    assert re.fullmatch(form, text, re.DOTALL)


@SLOW
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("slots", "losses"), [(352, frozenset()), (None, frozenset({9, 21, 30, 44}))], ids=["memory", "losses"])
def test_in_company(slots: int | None, losses: frozenset[int]) -> None:
    """Two requests of every method, with schemas and without, which come one after the other; each says what it says alone, also
    when memory is short, and when the stages lose everything.
    """
    spec = spec_of(4) if slots is None else with_slots(spec_of(4), slots)
    pipeline, arrivals = LocalPipeline.load(spec, LaneSizes(ahead=1)), dict[int, list[TokenizedRequest]]()
    for number, method in enumerate((*METHODS, *METHODS)):
        case = SAMPLE[number % len(SAMPLE)]
        sampling = sampling_of(case, **(DRAWN if number % 4 == 1 else {}))
        if number % 3 == 2:
            sampling = SamplingParams(max_tokens=20)
        arrivals.setdefault(1 + 4 * number, []).append(TokenizedRequest(number, prompt_of(case.prompt), sampling, method))
    list(pipeline.run_all(arrivals, losses=losses))
    for one in (one for requests in arrivals.values() for one in requests):
        alone = answer(pipeline_of(1), one.prompt_token_ids, one.sampling)
        assert tuple(pipeline.answers[one.number].sequence.main.token_ids) == alone, one.number
    paused = [one for one in pipeline.answers.values() if one.metrics.pauses and one.asked.sampling.structured_outputs]
    assert paused or slots is None


@pytest.mark.in_turn(4)
@pytest.mark.fast_cases("pipedec-bestfirst")
@pytest.mark.parametrize("method", METHODS)
def test_behind_what_was_said_before(method: str) -> None:
    """Also in the middle of what is forced."""
    case = SAMPLE[0]
    prompt, params = prompt_of(case.prompt), sampling_of(case)
    wanted = expected(prompt, params)
    for count in range(1, len(wanted), 9):
        request = TokenizedRequest(0, prompt, params, method, output_token_ids=wanted[:count])
        verdicts = list(pipeline_of(4).run(request))
        assert (*wanted[:count], *(token for verdict in verdicts for token in verdict.tokens)) == wanted


def test_what_is_forced_costs_no_timesteps_of_its_own() -> None:
    """By ``pp`` alone: a passage for every token that is not forced, and none for those that are."""
    case = next(case for case in CASES if case.kind == "const object")
    pipeline = pipeline_of(14)
    said = answer(pipeline, prompt_of(case.prompt), sampling_of(case))
    assert len(said) > 20 and pipeline.last.metrics.timesteps == 14
