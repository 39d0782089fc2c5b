"""The part *texts*: every method, in every shape, gives the answers that the target gives, whatever happens to them meanwhile.

The answers stand in the record once, by question; a cell, a scenario by a method in a shape, says what in it differs from
them. An answer that is not clear on every processor is refused (see ``margins``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.methods import applicable_options
from golden.answers import Answer, answers
from golden.margins import close_calls
from golden.pipelines import PLAIN, SLOTS, THREADS, models
from golden.questions import QUESTIONS, Question
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.decoding import LaneSizes
from pipedec.engine.local import LocalPipeline
from pipedec.methods import METHODS

SHAPES = ("1", "4", "14 in 7")
TREES = {"width": 4, "children": 4, "depth": 2, "rows": 12, "forwards": 2}  # small ones: no limit may change a text


@dataclass(frozen=True)
class Scenario:
    """Questions, and what happens while they are answered.

    Attributes:
        apart: timesteps between the arrivals of two requests; None: one request after the other.
        said: tokens of each answer that the requests bring with them.
        slots: of KV memory. If there are few, the last request comes when the others are being decoded, and goes before them.
        losses: timesteps at which all stages lose their caches.
    """

    questions: tuple[str, ...]
    apart: int | None = None
    said: int = 0
    slots: int = SLOTS
    losses: frozenset[int] = frozenset()

    @property
    def is_scarce(self) -> bool:
        return self.slots < SLOTS


SCENARIOS = {
    "greedy": Scenario(("copytree", "baker")),
    "drawn": Scenario(("drawn", "drawn, penalised")),
    "threads": Scenario(("apar", "pasta, drawn")),
    "structured": Scenario(("json", "regex, drawn")),
    "eight in company": Scenario(
        ("copytree", "drawn", "json", "baker", "drawn, penalised", "regex, drawn", "copytree", "drawn"), apart=1
    ),
    "paused": Scenario(("baker", "drawn", "json"), apart=0, slots=96),
    "resumed": Scenario(("drawn, penalised", "json"), said=4),
    "all caches lost": Scenario(("drawn", "json"), apart=2, losses=frozenset({3, 6, 17})),
}  # fmt: skip


class Unclear(Exception):
    """An answer that another processor might give otherwise: choose another question."""


def make(scratch: Path, shapes: Sequence[str] = SHAPES) -> dict[str, Any]:
    wanted = {name: _known(question) for name, question in QUESTIONS.items()}
    for name, question in QUESTIONS.items():
        if found := close_calls(question, wanted[name].token_ids):
            raise Unclear(f"{name}, {question.prompt!r}: {'; '.join(map(str, found))}")
    described = {f"question: {name}": wanted[name].described(question) for name, question in QUESTIONS.items()}
    return {**described, **dict(_cells(wanted, shapes))}


def _known(question: Question) -> Answer:
    """By ``pp`` in one stage, alone."""
    pair = PLAIN if question.dialect is None else THREADS
    return answers(models(pair, "1").roomy, {1: [question.request(0, "pp")]})[0]


def _cells(wanted: dict[str, Answer], shapes: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for name, scenario in SCENARIOS.items():
        for shape in shapes:
            pipeline = _pipeline(scenario, shape)
            for method in METHODS:
                yield f"{name}, {method}, {shape}", list(_differences(scenario, shape, pipeline, method, wanted))


def _pipeline(scenario: Scenario, shape: str) -> LocalPipeline:
    pair = PLAIN if QUESTIONS[scenario.questions[0]].dialect is None else THREADS
    found = models(pair, shape)
    return found.pipeline(found.new_kv(scenario.slots), LaneSizes(ahead=1, growth=16)) if scenario.is_scarce else found.roomy


def _differences(
    scenario: Scenario, shape: str, pipeline: LocalPipeline, method: str, wanted: dict[str, Answer]
) -> Iterator[str]:
    """What in a cell is not as it should be, in words."""
    options = applicable_options(method, TREES)
    asked = [
        QUESTIONS[name].request(number, method, options, tuple(wanted[name].token_ids[: scenario.said]))
        for number, name in enumerate(scenario.questions)
    ]
    try:
        found = _found(scenario, pipeline, shape, asked)
    except UserError as refusal:
        yield f"refused: {refusal}"
        return
    for number, name in enumerate(scenario.questions):
        yield from (f"{name}: {line}" for line in found[number].differences(wanted[name]))
    if scenario.is_scarce and not any(answer.pauses for answer in found.values()):
        yield "no request was paused"
    if scenario.losses and sum(timestep <= len(pipeline.fill) for timestep in scenario.losses) < 2:
        yield "the answers ended before the caches were lost twice"


def _found(scenario: Scenario, pipeline: LocalPipeline, shape: str, asked: list[TokenizedRequest]) -> dict[int, Answer]:
    if scenario.apart is None:
        return {request.number: answers(pipeline, {1: [request]}, scenario.losses)[request.number] for request in asked}
    arrivals: dict[int, list[TokenizedRequest]] = {}
    if scenario.is_scarce:
        when = models(PLAIN, shape).spec.topology.num_groups + 2
        arrivals[when] = [replace(asked.pop(), priority=-1)]
    for index, request in enumerate(asked):
        arrivals.setdefault(1 + index * scenario.apart, []).append(request)
    return answers(pipeline, arrivals, scenario.losses)
