"""The decode loop alone, with a pipeline and a method that record what they are asked to do."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipedec
from pipedec.core import NO_MASKS, Envelope, MaskParams, Request, Step, Verdict
from pipedec.decoding import TimestepTiming
from pipedec.engine import loop
from pipedec.engine.loop import decode
from pipedec.engine.recorder import Timestep

PACKAGE = Path(pipedec.__file__).parent
TIMING = TimestepTiming(0.01, 0.005, (0.001,))


class Recorded:
    """Pipeline and method in one. ``results`` are the verdicts of prefill and of every timestep."""

    def __init__(self, *results: Verdict | None, masks: MaskParams = NO_MASKS, filling: int = 0) -> None:
        self.calls: list[Any] = []
        self.masks = masks
        self._results = list(results)
        self._filling = filling

    def prefill(self, chunks: Any, compute: Callable[[Tensor], None] | None = None) -> Verdict | None:
        if compute is None:
            self.calls.append(("drafts prompt", chunks.tolist()))
            return None
        for chunk in chunks:
            compute(torch.tensor(chunk))
        return self._results.pop(0)

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        self.calls.append(("advance", number, entering.step and entering.step.token_ids.tolist(), entering.verdict))
        meanwhile()
        return Timestep(number, entering.step, self._results.pop(0), TIMING if number > self._filling else None)

    def close(self, last: Verdict) -> None:
        self.calls.append(("close", last))

    def apply(self, verdict: Verdict) -> None:
        self.calls.append(("apply", verdict))

    def propose(self) -> Step | None:
        return Step(torch.tensor([7]), torch.tensor([-1]))

    def draft(self) -> None:
        self.calls.append("draft")

    def observe(self, timing: TimestepTiming) -> None:
        self.calls.append("observe")


def run(recorded: Any, prompt: Sequence[int] = (1, 2), **changes: Any) -> list[Verdict]:
    return list(decode(Request(0, tuple(prompt)), recorded, recorded, **changes))


def test_a_timestep_is_propose_advance_accept_apply() -> None:
    first, last = Verdict.of(3), Verdict.of(4, 5, finished="stop")
    recorded = Recorded(first, None, last)
    assert run(recorded) == [first, last]
    assert recorded.calls == [
        ("drafts prompt", [1, 2]),
        ("apply", first),
        ("advance", 1, [7], first), "draft", "observe",
        ("advance", 2, [7], None), "draft", "observe",
        ("apply", last),
        ("close", last),
    ]  # fmt: skip


def test_what_accept_cuts_is_what_method_and_pipeline_get() -> None:
    cut = Verdict.of(4, finished="stop")
    recorded = Recorded(Verdict.of(3), Verdict.of(4, 5))
    assert run(recorded, accept=lambda verdict: cut if verdict.tokens == (4, 5) else verdict) == [Verdict.of(3), cut]
    assert recorded.calls[-2:] == [("apply", cut), ("close", cut)]


def test_a_first_token_that_ends_the_answer_takes_no_timestep() -> None:
    last = Verdict.of(3, finished="length")
    recorded = Recorded(last)
    assert run(recorded) == [last]
    assert recorded.calls[1:] == [("apply", last), ("close", last)]


def test_the_last_verdict_is_seen_before_the_pipeline_is_closed() -> None:
    recorded = Recorded(Verdict.of(3, finished="length"))
    verdicts = decode(Request(0, (1,)), recorded, recorded)  # type: ignore[arg-type]
    next(verdicts)
    assert "close" not in {call[0] for call in recorded.calls}
    with pytest.raises(StopIteration):
        next(verdicts)
    assert recorded.calls[-1][0] == "close"


def test_listeners_get_every_timestep_and_timings_only_of_a_full_pipeline() -> None:
    heard: list[Timestep] = []
    recorded = Recorded(Verdict.of(3), None, None, Verdict.of(4, finished="length"), filling=2)
    run(recorded, listeners=(heard.append,))
    assert [timestep.number for timestep in heard] == [1, 2, 3]
    assert recorded.calls.count("observe") == 1


def test_masks_follow_the_prompt() -> None:
    recorded = Recorded(Verdict.of(3, finished="length"), masks=MaskParams(2, 4))
    run(recorded)
    assert recorded.calls[0] == ("drafts prompt", [1, 2, -1, -2])


def test_the_loop_fits_on_a_screen_and_the_architecture_quotes_it() -> None:
    lines = inspect.getsourcelines(decode)[0]
    assert len(lines) <= 40
    [node] = ast.parse("".join(lines)).body
    assert isinstance(node, ast.FunctionDef)
    quoted = lines[: node.body[0].lineno - 1] + lines[node.body[1].lineno - 1 :]
    document = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "".join(quoted) in document


def test_nothing_else_asks_a_method_for_its_rows() -> None:
    """Who asks for the rows that enter advances timesteps."""
    askers = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "propose"
    ]
    outside = {asker for asker in askers if not asker.startswith("decoding/")}
    assert outside == {Path(loop.__file__).relative_to(PACKAGE).as_posix()}
