"""8,192 tokens of context on four stages, in company of short requests: prefilled in chunks and decoded, as transformers does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from lane_scripts import LIKELY, MASKS, Script, assert_close, run
from lane_targets import Target
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny_llama
from support.slot_books import SlotAllocator
from support.toy_dialects import TEXTS

from pipedec.core import SamplingParams

CONTEXT, CHUNK, SAID = 8192, 256, 24
CUT = [range(layer, layer + 1) for layer in range(4)]
SLOTS, BLOCK = 16_384, 16


def short_ones(count: int) -> list[Script]:
    """Requests that come and go while the long one is prefilled and decoded."""
    return [
        Script(
            number=number, seed=number, arrival=4 * number, chunks=[5, 9], has_masks=number % 3 == 0, has_threads=number % 4 == 1,
            delay=number % 3, patience=60,
            sampling=SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=20, logprobs=1, logit_bias=LIKELY),
        )
        for number in range(1, count + 1)
    ]  # fmt: skip


@pytest.mark.slow
def test_a_long_context_in_company_of_short_ones(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path, layers=4, vocab=len(TEXTS), dtype=torch.float64, max_position_embeddings=2 * CONTEXT)
    target = Target(tmp_path, save_random_bita(tmp_path / "bita", tmp_path, MASKS))
    workers = target.workers(BLOCK, CUT, SLOTS)
    allocator = SlotAllocator(SLOTS, BLOCK, random.Random(1))
    long = Script(
        0, 5, 0, [CHUNK] * (CONTEXT // CHUNK), SamplingParams(max_tokens=SAID), has_masks=False, has_threads=False, delay=1,
        patience=500,
    )  # fmt: skip
    short = short_ones(10)
    run(workers, [long, *short], allocator)
    assert long.prompt is not None and len(long.answer) == SAID and allocator.num_taken == 0
    with torch.inference_mode():
        logits = model(torch.tensor([[*long.prompt, *long.answer]]), logits_to_keep=SAID + 1).logits[0, :-1]
    assert long.answer == tuple(logits.argmax(-1).tolist())
    for alone, in_company in zip(short_ones(10), short, strict=True):
        run(workers, [alone])
        assert in_company.verdicts == alone.verdicts
        assert_close(in_company.logprobs, alone.logprobs)
