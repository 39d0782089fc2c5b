"""The training loop: killed runs continue to the same weights, other runs' checkpoints are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from pipedec.core.errors import UserError
from pipedec.train.run import (
    Backward,
    TrainingLoop,
    cosine_decay,
    epoch_batch,
    linear_decay,
    muon_and_adamw,
    warm_up,
)


class Layered(nn.Module):
    """An embedding and one layer, in which Muon and AdamW both have something to do."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(3, 4, generator=generator))
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})
        with torch.no_grad():
            for parameter in self.decoder.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


class Mixed(Layered):
    """With the matrices of two experts in one parameter, and a convolution whose weights have as many dimensions."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.decoder["layers"][0]  # type: ignore[index]
        layer.experts = nn.Linear(4, 4, bias=False)
        layer.experts.weight = nn.Parameter(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1)))
        layer.convolution = nn.Conv1d(4, 4, 2)
        with torch.no_grad():
            layer.convolution.weight.fill_(1.0)
            layer.convolution.bias.fill_(1.0)


def steps_of(model: Layered, dies_at: int | None = None) -> Backward:
    def backward(step: int) -> dict[str, float]:
        if step == dies_at:
            raise KeyboardInterrupt
        loss = (model.decoder["layers"][0](model.embedding) - step).square().mean()
        if isinstance(model, Mixed):
            loss = loss + expert_loss(model, step)
        loss.backward()
        return {"loss": loss.item(), "shares": [1.0, 0.5]}  # type: ignore[dict-item]

    return backward


def experts_of(model: Mixed) -> nn.Parameter:
    return model.decoder["layers"][0].experts.weight  # type: ignore[index]


def expert_loss(model: Mixed, step: int) -> torch.Tensor:
    return (experts_of(model).cumsum(0) - step).square().mean()


def loop_of(model: Layered, work: Path, seed: int = 0) -> TrainingLoop:
    return TrainingLoop("toy", model, muon_and_adamw(model, 0.1, 0.01), work, {"seed": seed, "phases": ((1, 2),)})


@pytest.mark.parametrize("kind", [Layered, Mixed])
@pytest.mark.parametrize("dies_at", [1, 5])
def test_a_killed_run_continues_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int, kind: type[Layered]
) -> None:
    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 4)
    models = kind(), kind(), kind()
    loop_of(models[0], tmp_path / "whole").run(9, lambda step: 0.1, steps_of(models[0]))
    with pytest.raises(KeyboardInterrupt):
        loop_of(models[1], tmp_path / "killed").run(9, lambda step: 0.1, steps_of(models[1], dies_at))
    loop_of(models[2], tmp_path / "killed").run(9, lambda step: 0.1, steps_of(models[2]))
    assert all(torch.equal(one, other) for one, other in zip(models[0].parameters(), models[2].parameters(), strict=True))
    logs = [(tmp_path / name / "toy.jsonl").read_text() for name in ("whole", "killed")]
    assert logs[0] == logs[1] and [json.loads(line)["step"] for line in logs[0].splitlines()] == list(range(1, 10))


def test_slow_steps_are_saved_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, saved = Layered(), []
    for seconds in (1e9, -1.0):
        monkeypatch.setattr(TrainingLoop, "SAVE_SECONDS", seconds)
        with pytest.raises(KeyboardInterrupt):
            loop_of(model, tmp_path).run(9, lambda step: 0.1, steps_of(model, 3))
        saved.append((tmp_path / "toy.safetensors").exists())
    assert saved == [False, True]
    with safe_open(tmp_path / "toy.safetensors", "pt") as stored:
        assert stored.metadata()["step"] == "3"


@pytest.mark.parametrize("dies_at", [3, 8])
def test_the_weights_of_the_highest_score_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 2)
    monkeypatch.setattr(TrainingLoop, "SCORE_EVERY", 2)
    scores = {2: 0.1, 4: 0.7, 6: 0.3, 8: 0.7, 9: 0.2}

    def run(work: Path, steps: int, dies_at: int | None = None) -> Layered:
        model, done = Layered(), []

        def backward(step: int) -> dict[str, float]:
            done.append(step)
            return steps_of(model, dies_at)(step)

        loop_of(model, work).run(steps, lambda step: 0.1, backward, lambda: scores[done[-1] + 1])
        return model

    wanted = Layered()
    loop_of(wanted, tmp_path / "four").run(4, lambda step: 0.1, steps_of(wanted))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", 9, dies_at)
    found = run(tmp_path / "killed", 9)
    assert all(torch.equal(one, other) for one, other in zip(wanted.parameters(), found.parameters(), strict=True))
    logged = [json.loads(line) for line in (tmp_path / "killed" / "toy.jsonl").read_text().splitlines()]
    assert {line["step"]: line["score"] for line in logged if "score" in line} == scores


def test_a_finished_run_is_only_loaded(tmp_path: Path) -> None:
    model, again = Layered(), Layered()
    loop_of(model, tmp_path).run(3, lambda step: 0.1, steps_of(model))
    loop_of(again, tmp_path).run(3, lambda step: 0.1, steps_of(again, dies_at=0))
    assert torch.equal(model.embedding, again.embedding) and not again.training


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    model = Layered()
    loop_of(model, tmp_path).run(1, lambda step: 0.1, steps_of(model))
    with pytest.raises(UserError, match=r"belongs to another run \(seed 0\): give another --work"):
        loop_of(model, tmp_path, seed=1).run(1, lambda step: 0.1, steps_of(model))
    path = tmp_path / "toy.safetensors"
    with safe_open(path, "pt") as stored:
        metadata = stored.metadata()
    save_file({f"learned.{name}": tensor for name, tensor in load_file(path).items()}, path, metadata)
    with pytest.raises(UserError, match="was written by another version: give another --work"):
        loop_of(model, tmp_path).run(1, lambda step: 0.1, steps_of(model))


def test_gradients_are_clipped_unless_told_otherwise(tmp_path: Path) -> None:
    moved = []
    for max_norm in (0.001, None):
        parameter = nn.Parameter(torch.zeros(1))
        model = nn.ParameterList([parameter])
        loop = TrainingLoop("toy", model, [torch.optim.SGD(model.parameters())], tmp_path / str(max_norm), {}, max_norm)

        def backward(step: int, parameter: nn.Parameter = parameter) -> dict[str, float]:
            (5 * parameter).sum().backward()
            return {"loss": 0.0}

        loop.run(1, lambda step: 1.0, backward)
        moved.append(-parameter.item())
    assert moved == [pytest.approx(0.001, rel=1e-2), 5.0]


def test_learning_rates_rise_and_fall() -> None:
    assert [warm_up(step, 4) for step in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert [linear_decay(step, 10) for step in (0, 10)] == pytest.approx([1, 0.05])
    assert [cosine_decay(step, 10) for step in (0, 5, 10)] == pytest.approx([1, 0.5, 0])


def test_every_sample_comes_once_before_any_comes_again() -> None:
    drawn = [number for step in range(7) for number in epoch_batch(step, 10, 3, seed=5)]
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(10)) and drawn[:10] != drawn[10:20]


def test_experts_learn_as_matrices_of_their_own() -> None:
    model = Mixed()
    experts, alone = experts_of(model), [nn.Parameter(matrix.clone()) for matrix in experts_of(model).detach()]
    muon, adamw = muon_and_adamw(model, 0.1, 0.01)
    separate = torch.optim.Muon(alone, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        expert_loss(model, step).backward()
        (torch.stack([*alone]).cumsum(0) - step).square().mean().backward()
        for optimizer in (muon, separate):
            optimizer.step()
            optimizer.zero_grad()
        assert experts.grad is None and torch.equal(experts, torch.stack([*alone])), step
    convolution = model.decoder["layers"][0].convolution.weight  # type: ignore[index]
    assert any(parameter is convolution for parameter in adamw.param_groups[0]["params"])
