"""NaN and infinite numbers: the request that they hit fails and names the first stage that made them; others go on."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_pair import Pair

from benchmarks.methods import applicable_options
from pipedec.config import Settings
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import resolve
from pipedec.engine.local import LocalAnswer, LocalPipeline

STAGES = 4
GOOD, SHARED = (10, 11, 12, 13, 14), tuple(range(30, 70))
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def damaged(pair: Pair, folder: Path, tensor: str, row: int | None, value: float) -> Path:
    """A copy of the target in which a tensor, or one row of it, has this value."""
    shutil.copytree(pair.target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.{tensor}.weight"][slice(None) if row is None else row] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def pipeline(target: Path, pair: Pair) -> LocalPipeline:
    return LocalPipeline.load(resolve(Settings.of(target=target, draft=pair.draft, stages=STAGES, device="cpu")))


def answers(of: LocalPipeline, *requests: TokenizedRequest, **later: TokenizedRequest) -> dict[int, LocalAnswer]:
    """``later`` come at a timestep of their own: ``at_40=...``."""
    for _ in of.run_all({1: list(requests), **{int(name[3:]): [request] for name, request in later.items()}}):
        pass
    return of.answers


def stage_of(answer: LocalAnswer) -> int:
    """The stage that its failure names."""
    found = re.match(r"stage (\d) computed NaN or infinity", answer.failure or "")
    assert found
    return int(found[1])


@cache
def undisturbed(pair: Pair, prompt: tuple[int, ...] = GOOD, sampling: SamplingParams = GREEDY) -> list[int]:
    return answers(pipeline(pair.target, pair), TokenizedRequest(1, prompt, sampling, "pp"))[1].token_ids


@pytest.mark.parametrize(
    ("method", "wishes"),
    [
        ("pp", {"logprobs": 2, "prompt_logprobs": 1}), ("stpp", {"temperature": 1.0, "seed": 3}), ("pipedec", {}),
        ("pipedec-bestfirst", {}),
    ],
    ids=["pp", "stpp", "pipedec", "pipedec-bestfirst"],
)  # fmt: skip
@pytest.mark.failure_case("S7")
def test_a_request_with_a_corrupt_token_fails_and_others_go_on(
    pair: Pair, method: str, wishes: dict[str, Any], tmp_path: Path
) -> None:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **wishes)
    wanted = undisturbed(pair, GOOD, sampling)
    rare = next(token for token in range(20, 200) if token not in wanted)
    target = damaged(pair, tmp_path / "nan", "embed_tokens", rare, torch.nan)
    options = applicable_options(method, {"width": 6, "children": 4})
    prompts = (GOOD, (*GOOD[:3], rare, *GOOD), GOOD)
    requests = [TokenizedRequest(number, prompt, sampling, method, options) for number, prompt in enumerate(prompts)]
    good, bad, again = answers(pipeline(target, pair), *requests).values()
    assert (bad.finished, stage_of(bad), bad.token_ids) == ("corrupted", 1, [])
    assert good.token_ids == again.token_ids == wanted
    assert all(answer.is_closed for answer in (good, bad, again))


@pytest.mark.parametrize("method", ["pp", "pipedec-bestfirst"])
def test_an_answer_is_ended_where_it_says_a_corrupt_token(pair: Pair, method: str, tmp_path: Path) -> None:
    wanted = undisturbed(pair)
    target = damaged(pair, tmp_path / "nan", "embed_tokens", wanted[5], torch.nan)
    answer = answers(pipeline(target, pair), TokenizedRequest(1, GOOD, GREEDY, method))[1]
    assert answer.token_ids == wanted[: len(answer.token_ids)]
    assert (len(answer.token_ids) <= wanted.index(wanted[5]) + 1, stage_of(answer)) == (True, 1)


@pytest.mark.parametrize(
    ("tensor", "value", "stage"),
    [("layers.3.mlp.down_proj", torch.nan, 2), ("layers.6.input_layernorm", torch.inf, 4), ("norm", torch.inf, 4)],
)
@pytest.mark.failure_case("S7")
def test_the_first_bad_stage_is_named(pair: Pair, tensor: str, value: float, stage: int, tmp_path: Path) -> None:
    target = damaged(pair, tmp_path / "bad", tensor, None, value)
    answer = answers(pipeline(target, pair), TokenizedRequest(1, GOOD, GREEDY, "pp"))[1]
    assert (answer.token_ids, answer.finished, stage_of(answer)) == ([], "corrupted", stage)


@pytest.mark.failure_case("S7")
def test_the_next_request_does_not_adopt_what_was_corrupt(pair: Pair, tmp_path: Path) -> None:
    wanted = undisturbed(pair, SHARED)
    rare = next(token for token in range(100, 250) if token not in wanted)
    one = pipeline(damaged(pair, tmp_path / "nan", "embed_tokens", rare, torch.nan), pair)
    found = answers(one, TokenizedRequest(1, (*SHARED, rare), GREEDY, "pp"), at_40=TokenizedRequest(2, SHARED, GREEDY, "pp"))
    assert stage_of(found[1]) == 1 and found[2].token_ids == wanted
