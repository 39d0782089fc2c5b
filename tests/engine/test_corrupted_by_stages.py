"""NaN and infinite numbers: the request that they hit fails and names the first stage that made them; others go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_pair import Pair, make_pair

from pipedec.config import Settings
from pipedec.core import Request, SamplingParams
from pipedec.engine.build import resolve
from pipedec.engine.local import LocalAnswer, LocalPipeline
from pipedec.methods import METHODS, applicable_options

STAGES = 4
GOOD = (10, 11, 12, 13, 14)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def damaged(pair: Pair, folder: Path, tensor: str, row: int | None, value: float) -> Path:
    """A copy of the target in which a tensor, or one row of it, has this value."""
    shutil.copytree(pair.target, folder, dirs_exist_ok=True)
    index = folder / "model.safetensors.index.json"
    name = json.loads(index.read_text())["weight_map"][tensor] if index.exists() else "model.safetensors"
    tensors = load_file(folder / name)
    tensors[tensor][slice(None) if row is None else row] = value
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder


def pipeline(target: Path, pair: Pair) -> LocalPipeline:
    return LocalPipeline.load(resolve(Settings.of(target=target, draft=pair.draft, stages=STAGES, device="cpu")))


def answers(of: LocalPipeline, *requests: Request) -> dict[int, LocalAnswer]:
    for _ in of.run_all({1: list(requests)}):
        pass
    return {request.number: of.answers[request.number] for request in requests}


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> list[int]:
    return answers(pipeline(pair.target, pair), Request(1, GOOD, GREEDY, "pp"))[1].token_ids


@pytest.mark.fast_cases("pipedec-bestfirst")
@pytest.mark.parametrize("method", [method for method in METHODS if method != "bita"])
@pytest.mark.failure_case("S7")
def test_a_request_with_a_corrupt_token_fails_and_others_go_on(
    pair: Pair, undisturbed: list[int], method: str, tmp_path: Path
) -> None:
    rare = next(token for token in range(20, 200) if token not in undisturbed)
    target = damaged(pair, tmp_path / "nan", "model.embed_tokens.weight", rare, torch.nan)
    options = applicable_options(method, {"width": 6, "children": 4})
    found = answers(
        pipeline(target, pair),
        Request(1, GOOD, GREEDY, method, options),
        Request(2, (*GOOD[:3], rare, *GOOD), GREEDY, method, options),
        Request(3, GOOD, GREEDY, method, options),
    )
    assert (found[2].token_ids, found[2].bad_stage) == ([], 1)
    assert [found[number].token_ids for number in (1, 3)] == [undisturbed] * 2


@pytest.mark.parametrize("method", ["pp", "pipedec", "pipedec-bestfirst"])
def test_an_answer_is_ended_where_it_says_a_corrupt_token(
    pair: Pair, undisturbed: list[int], method: str, tmp_path: Path
) -> None:
    target = damaged(pair, tmp_path / "nan", "model.embed_tokens.weight", undisturbed[5], torch.nan)
    [answer] = answers(pipeline(target, pair), Request(1, GOOD, GREEDY, method)).values()
    assert answer.token_ids == undisturbed[: len(answer.token_ids)]
    assert (len(answer.token_ids) <= undisturbed.index(undisturbed[5]) + 1, answer.bad_stage) == (True, 1)


@pytest.mark.parametrize(("tensor", "stage"), [("layers.3.mlp.down_proj", 2), ("layers.6.input_layernorm", 4), ("norm", 4)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.failure_case("S7")
def test_the_first_bad_stage_is_named(pair: Pair, tensor: str, stage: int, value: float, tmp_path: Path) -> None:
    target = damaged(pair, tmp_path / "bad", f"model.{tensor}.weight", None, value)
    [answer] = answers(pipeline(target, pair), Request(1, GOOD, GREEDY, "pp")).values()
    assert (answer.token_ids, answer.bad_stage) == ([], stage)


@pytest.mark.failure_case("S7")
def test_the_next_request_does_not_adopt_what_was_corrupt(pair: Pair, undisturbed: list[int], tmp_path: Path) -> None:
    rare = next(token for token in range(100, 250) if token not in undisturbed)
    shared = tuple(range(30, 70))
    target = damaged(pair, tmp_path / "nan", "model.embed_tokens.weight", rare, torch.nan)
    one, alone = pipeline(target, pair), pipeline(pair.target, pair)
    expected = answers(alone, Request(1, shared, GREEDY, "pp"))[1].token_ids
    assert rare not in (*shared, *expected)
    for _ in one.run_all({1: [Request(1, (*shared, rare), GREEDY, "pp")], 40: [Request(2, shared, GREEDY, "pp")]}):
        pass
    assert one.answers[1].bad_stage == 1
    assert one.answers[2].token_ids == expected
