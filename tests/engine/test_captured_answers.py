"""Answers of a pipeline whose forwards are captured, draft included: the tokens of transformers, by every method."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures import Repeated
from test_local_pipeline import NUM_TOKENS, OPTIONS, PROMPT, answer, expected, make_pipeline, models, request

from pipedec.methods import METHODS, BitaOptions

__all__ = ["models"]  # a fixture
CHOSEN = {method: choices[0] for method, choices in OPTIONS.items()} | {"bita": BitaOptions()}


@pytest.mark.fast_cases("pipedec-bestfirst-float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_captured_pipelines_give_the_tokens_of_transformers(models: Path, method: str, dtype: str) -> None:
    captures = list[Repeated]()

    def capture(device: object) -> Repeated:
        captures.append(Repeated())
        return captures[-1]

    pipeline = make_pipeline(models, (4, 4), None if method == "bita" else "near", dtype, capture=capture)
    tokens, _ = answer(pipeline, request(method=method, options=CHOSEN[method], ignore_eos=True))
    assert tokens == expected(models / "target", PROMPT, NUM_TOKENS, dtype)
    used = [capture for capture in captures if capture.captures]
    assert len(used) == (4 if method in ("pp", "bita") else 5), "every stage, and the draft if there is one"
    assert all(capture.replays > capture.captures for capture in used)
