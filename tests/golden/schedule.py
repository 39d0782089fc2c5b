"""The part *schedule*: what happens in every timestep, by the computed clock of the paper's clusters without rank 0's own work.

Cases of the shipped models depend on the kind of processor, as the draft's chances do; the scripted ones do not.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from support.instruction_sets import kernels

from golden.pipelines import PLAIN, THREADS, models
from golden.questions import QUESTIONS
from golden.record import PROCESSOR, ROUNDED
from golden.scripted import VOCABULARY, scripted
from golden.watched import watched
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.methods import METHODS

SHAPES = ("1", "4", "14")
ALL = tuple(METHODS)
WITHOUT_BITA = tuple(name for name, entry in METHODS.items() if not entry.needs_bita)
EIGHT = ("copytree", "drawn", "json", "baker", "drawn, penalised", "regex, drawn", "copytree", "drawn")
APART = 2  # timesteps between two arrivals
TOKENS = 32  # of an answer alone: enough for a method to tune itself
Case = tuple[str, dict[str, Any]]


def make(scratch: Path, with_rounded: bool = True) -> dict[str, Any]:
    exact = {f"scripted, {name}": case for name, case in _scripted()}
    rounded = {ROUNDED + name: case for name, case in _rounded()} if with_rounded else {}
    return {**exact, PROCESSOR: processor(), **rounded}


def processor() -> str:
    """The kind of this processor, which kernels torch takes on it, and in how many threads."""
    path = Path("/proc/cpuinfo")
    found = re.findall(r"^(?:vendor_id|cpu family|model)\s*:\s*(.+)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return f"{platform.machine()} {' '.join(found[:3])}, threads {torch.get_num_threads()}: {kernels()}"


def _scripted() -> Iterator[Case]:
    for shape in SHAPES:
        for method in WITHOUT_BITA:
            yield f"{method}, {shape}", scripted(models(PLAIN, shape).spec, {1: [_script(0, method)]})
    for company, methods in (("the default method", (DEFAULT_METHOD,)), ("mixed", WITHOUT_BITA)):
        asked = [_script(number, method) for number, method in zip(range(8), cycle(methods), strict=False)]
        yield f"eight, {company}, 14", scripted(models(PLAIN, "14").spec, _one_by_one(asked))


def _rounded() -> Iterator[Case]:
    for shape in SHAPES:
        for method in ALL:
            yield f"{method}, {shape}", watched(models(PLAIN, shape), {1: [_alone("baker", method)]})
    for company, methods in (("the default method", (DEFAULT_METHOD,)), ("mixed", ALL)):
        pairs = enumerate(zip(EIGHT, cycle(methods), strict=False))
        asked = [QUESTIONS[name].request(number, method) for number, (name, method) in pairs]
        yield f"eight, {company}, 4", watched(models(PLAIN, "4"), _one_by_one(asked))
    yield f"threads, {DEFAULT_METHOD}, 4", watched(models(THREADS, "4"), {1: [_alone("apar", DEFAULT_METHOD)]})


def _alone(name: str, method: str) -> TokenizedRequest:
    asked = QUESTIONS[name].request(0, method)
    return replace(asked, sampling=structs.replace(asked.sampling, max_tokens=TOKENS))


def _script(number: int, method: str) -> TokenizedRequest:
    """A request whose prompt is of no matter but for its length."""
    prompt = tuple(token % VOCABULARY for token in range(number, 20 + 9 * number))
    return TokenizedRequest(number, prompt, SamplingParams(max_tokens=24 + number), method)


def _one_by_one(asked: Sequence[TokenizedRequest]) -> dict[int, Iterable[TokenizedRequest]]:
    return {1 + APART * index: [request] for index, request in enumerate(asked)}
