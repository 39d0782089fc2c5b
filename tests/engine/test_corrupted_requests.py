"""Requests for which a stage computes NaN or infinity: they fail and name the stage, and nobody else notices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny_llama

from pipedec.config import Settings
from pipedec.core import Request, SamplingParams
from pipedec.engine.build import resolve
from pipedec.engine.local import LocalAnswer, LocalPipeline

RARE = 61  # a token
SANE, BAD = (1, 9, 30, 4, 51, 17), (1, 9, RARE, 4, 51, 17)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corrupted") / "target"
    save_tiny_llama(folder, layers=4, max_position_embeddings=512)
    return folder


def _damage(target: Path, folder: Path, name: str, value: float, row: int | None) -> Path:
    """A copy of the checkpoint in which a tensor, or one row of it, has this value."""
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].clone()
    tensors[name][slice(None) if row is None else row] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _answers(target: Path, prompts: list[tuple[int, ...]], **sampling: object) -> list[LocalAnswer]:
    pipeline = LocalPipeline.load(resolve(Settings.of(target=target, draft="none", stages=4, device="cpu")))
    wish = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    requests = [Request(number, prompt, wish, "pp") for number, prompt in enumerate(prompts, start=1)]
    for _ in pipeline.run_all({1: requests}):
        pass
    return list(pipeline.answers.values())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"logprobs": 2, "prompt_logprobs": 1}])
@pytest.mark.failure_case("S7")
def test_a_token_with_damaged_weights_fails_its_own_requests_only(
    target: Path, tmp_path: Path, sampling: dict[str, object]
) -> None:
    damaged = _damage(target, tmp_path / "nan", "model.embed_tokens.weight", torch.nan, RARE)
    sane, bad, again = _answers(damaged, [SANE, BAD, SANE[::-1]], **sampling)
    assert (bad.finished, bad.bad_stage, bad.token_ids) == ("corrupted", 1, [])
    undisturbed = _answers(target, [SANE, SANE[::-1]], **sampling)
    assert [answer.token_ids for answer in (sane, again)] == [answer.token_ids for answer in undisturbed]
    assert all(answer.is_closed for answer in (sane, bad, again))


@pytest.mark.parametrize("name, stage", [("model.layers.1.mlp.down_proj.weight", 2), ("lm_head.weight", 4)])
def test_the_first_bad_stage_is_named(target: Path, tmp_path: Path, name: str, stage: int) -> None:
    (answer,) = _answers(_damage(target, tmp_path / "inf", name, torch.inf, None), [SANE])
    assert (answer.finished, answer.bad_stage) == ("corrupted", stage)
