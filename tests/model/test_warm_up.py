"""What a model computes before it serves: which forwards, which of them are captured, and that nothing is left of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.bita_files import save_random_bita
from support.captures import Repeated
from support.checkpoints import save_tiny
from torch import Tensor

from pipedec.core.limits import CAPTURED_ROWS
from pipedec.model import BitaWeights, FirstForward, KVCache, LaneRows, StageModel, Usual, warm_up
from pipedec.model.warm_up import CHUNK, first_forwards, usual_rows


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny("llama", folder / "target")
    save_random_bita(folder / "bita", folder / "target", 3)
    return folder


def load(directory: Path, layers: range) -> StageModel:
    stage = StageModel.load(directory / "target", layers, torch.float32, "cpu")
    stage.attach(BitaWeights.load(directory / "bita", stage.config, layers, stage.dtype, stage.device))
    return stage


def test_a_usual_pipeline_warms_up_with_7_buckets_and_a_long_chunk() -> None:
    forwards = first_forwards(Usual(64, 4096), 100_000, is_captured=True, num_masks=0)
    assert [one.rows for one in forwards] == [64, 32, 16, 8, 4, 2, 1, CHUNK] and CHUNK > CAPTURED_ROWS
    assert forwards[-1] == FirstForward(CHUNK, CHUNK, is_prompt=True)
    assert [one.rows for one in first_forwards(Usual(23, 40), 1000, True, 0)] == [23, 16, 8, 4, 2, 1], "there are no long chunks"
    assert max(one.rows for one in first_forwards(Usual(64, 4096), 40, True, 0)) == 40, "the pool has no more"
    assert len(first_forwards(Usual(64, 4096), 100_000, is_captured=False, num_masks=3)) == 3
    assert first_forwards(Usual(8, 40), 1000, True, 0, is_recurrent=True)[-1] == FirstForward(40, 40, is_prompt=True)


@pytest.mark.parametrize("layers", [range(0, 2), range(2, 4)], ids=["first", "last"])
def test_a_warmed_up_model_computes_as_before_and_captures_nothing_usual(directory: Path, layers: range) -> None:
    cold, warm = load(directory, layers), load(directory, layers)
    cold.capture, warm.capture = Repeated(), Repeated()
    pools = cold.make_pool(1024), warm.make_pool(1024)
    [plane], [filled] = (pool.planes for pool in pools)
    filled.fill_(torch.nan)
    filled[..., pools[0].slots :, :] = plane[..., pools[0].slots :, :]  # the learned prompt
    told, used = list[tuple[int, int]](), list[FirstForward]()

    def use(forward: FirstForward, hidden_RE: Tensor) -> None:
        assert len(hidden_RE) == forward.rows and hidden_RE.isfinite().all()
        used.append(forward)

    warm_up(warm, pools[1], Usual(16, 500), use, lambda done, total: told.append((done, total)), turn=3)
    assert used == first_forwards(Usual(16, 500), 1024, True, 3) and told == [(done, len(used)) for done in range(len(used) + 1)]
    captures = warm.capture.captures
    assert captures == len(usual_rows(16)) == 5
    caches = [KVCache(pool, ((0, 512),)) for pool in pools]
    for rows in (16, 16, 3, 1, 11):
        generator = torch.Generator().manual_seed(rows)
        inputs = torch.randn(rows, warm.config.hidden_size, generator=generator) if layers.start else torch.arange(rows)
        found = [
            model.forward(inputs, [LaneRows(torch.arange(rows) + cache.past_length, cache, None, 400)])
            for model, cache in zip((cold, warm), caches, strict=True)
        ]
        assert found[0].equal(found[1])
    assert warm.capture.captures == captures


def test_after_the_warm_up_a_model_captures_what_is_new_only_in_its_turn(directory: Path) -> None:
    """Stages meet a new bucket one after the other, with the same forward: only one of them may capture it then."""
    captured = list[list[int]]()
    for turn in (1, 2):
        model = load(directory, range(2, 4))
        model.capture = capture = Repeated()
        pool = model.make_pool(4096)
        warm_up(model, pool, Usual(4, 128), lambda forward, hidden_RE: None, lambda done, total: None, turn)
        cache, captured_at, known = KVCache(pool, ((0, 4096),)), list[int](), capture.captures
        for number in range(40):
            rows = 33
            hidden_RE = torch.zeros(rows, model.config.hidden_size)
            model.forward(hidden_RE, [LaneRows(torch.arange(rows), cache, None, 4000)])
            cache.reset()
            if capture.captures > known:
                captured_at.append(number)
                known = capture.captures
        captured.append(captured_at)
    assert all(len(numbers) == 1 for numbers in captured) and captured[0] != captured[1]
