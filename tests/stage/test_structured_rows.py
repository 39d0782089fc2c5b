"""What a structure allows, as masks of logits."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from pipedec.grammar import NOTHING, Bitmask
from pipedec.grammar.masks import allowed_tokens, mask_logits


@examples(40)
@given(sets=st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=5), width=st.integers(1, 70))
def test_masks_become_tensors_of_any_width(sets: list[set[int]], width: int) -> None:
    """A model may have tokens that its tokenizer does not have."""
    allowed_RV = allowed_tokens([Bitmask.of(*tokens) for tokens in sets], width, "cpu")
    assert allowed_RV.tolist() == [[token in tokens for token in range(width)] for tokens in sets]


def test_a_row_on_an_impossible_path_keeps_its_logits() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    masked_RV = mask_logits(logits_RV, [NOTHING, Bitmask.of(1)])
    assert masked_RV.tolist() == [[1.0, 2.0, 3.0], [-torch.inf, 2.0, -torch.inf]]
    assert logits_RV.isfinite().all(), "the logits themselves are needed for log-probabilities"
