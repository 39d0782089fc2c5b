"""With ``pad_rows`` the bits of an answer in float32 do not depend on what else is in the pipeline, where the CPU allows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lane_scripts import LIKELY, Script, run, sequences

from pipedec.core.sampling import SamplingParams
from pipedec.directories import reference_pair
from pipedec.families import model_config
from pipedec.model import StageModel
from pipedec.model.matrices import PADDED_ROWS, DenseMatrix
from pipedec.stage import FinalStageWorker, StageWorker

TARGET = reference_pair() / "target"
CUT = (range(0, 4), range(4, 24))


@pytest.fixture(scope="module")
def workers() -> Iterator[list[StageWorker]]:
    config, threads = model_config(TARGET), torch.get_num_threads()
    torch.set_num_threads(1)
    models = [StageModel.load(TARGET, layers, torch.float32, "cpu", config) for layers in CUT]
    for model in models:
        model.stack.products.pad_rows = True
    yield [(FinalStageWorker if model.is_last else StageWorker)(model, sequences, slots=1024) for model in models]
    torch.set_num_threads(threads)


def scripts() -> list[Script]:
    return [
        Script(
            number=number, seed=number, arrival=number % 5, chunks=[7, 1 + number % 20], has_masks=False, has_threads=False,
            delay=number % 3, patience=60,
            sampling=SamplingParams(temperature=number % 2, seed=number, max_tokens=12, logprobs=1, logit_bias=LIKELY),
        )
        for number in range(10)
    ]  # fmt: skip


def test_every_product_has_as_many_rows(workers: list[StageWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()
    linear = DenseMatrix.linear
    monkeypatch.setattr(DenseMatrix, "linear", lambda self, rows, bias: counts.append(len(rows)) or linear(self, rows, bias))
    run(workers, scripts()[:1])
    assert min(counts) == PADDED_ROWS


def test_the_bits_are_those_of_the_request_alone(workers: list[StageWorker]) -> None:
    if not products_are_equal():
        pytest.skip("on this CPU products of 16 rows and more depend on the number of rows")
    together = scripts()
    run(workers, together)
    for number, alone in enumerate(scripts()):
        run(workers, [alone])
        assert alone.verdicts == together[number].verdicts
        for one, other in zip(alone.seen, together[number].seen, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def products_are_equal() -> bool:
    config = model_config(TARGET)
    sizes = {config.hidden_size, config.inner_size, config.layers[0].num_heads * config.layers[0].key_dim}
    generator = torch.Generator().manual_seed(0)
    for inner in sizes:
        rows, matrix = (torch.randn(count, inner, generator=generator) for count in (300, config.hidden_size))
        weight = DenseMatrix(matrix).prepared()
        whole = weight.linear(rows)
        counts = (PADDED_ROWS, PADDED_ROWS + 1, 47, 64)
        if not all(torch.equal(weight.linear(rows[:count]), whole[:count]) for count in counts):
            return False
    return True
