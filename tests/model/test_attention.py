"""Every implementation of attention equals the paper's Algorithm 1."""

from __future__ import annotations

import pytest
import torch

from pipedec.model import attention
from pipedec.model.attention import (
    AttentionPlan,
    attention_by_parts,
    attention_with_lse,
    merge_by_lse,
    reference_attention,
    tree_attention,
)
from pipedec.tree import Visibility

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
CPU = torch.device("cpu")


def random_step(rows: int, past: int, older: int, dtype: torch.dtype):
    """Queries, keys, values and mask for a random tree of ``older`` rows, followed by ``rows`` new ones."""
    generator = torch.Generator().manual_seed(rows * 100 + past * 10 + older)
    total = older + rows
    ancestors = torch.zeros(total, total, dtype=torch.bool)
    for row in range(total):
        parent = int(torch.randint(-1, row, (1,), generator=generator)) if row else -1
        if parent >= 0:
            ancestors[row] = ancestors[parent]
        ancestors[row, row] = True
    shape = (KV_HEADS, past + total, HEAD_DIM)
    q = torch.randn(rows, HEADS, HEAD_DIM, generator=generator, dtype=dtype)
    keys, values = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    return q, keys, values, ancestors[older:]


def plan_for(past: int, mask: torch.Tensor, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    """For rows whose mask marks every ancestor, so that its marks tell positions: those of unmarked slots do not matter."""
    positions = past + mask.sum(1) - 1
    older = torch.zeros(mask.shape[1] - len(mask), dtype=torch.int64)
    for row in range(len(mask)):
        slots = torch.nonzero(mask[row])[:, 0]
        slots = slots[slots < len(older)]
        older[slots] = past + torch.arange(len(slots))
    visibility = Visibility(mask, past, lambda: torch.cat((older, positions)))
    return AttentionPlan.for_tree(visibility, positions, [window], HEADS // KV_HEADS, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize(("rows", "past", "older"), [(1, 0, 0), (1, 7, 0), (5, 0, 3), (9, 12, 20)])
def test_tree_attention_equals_algorithm_1(rows, past, older, window, dtype, tolerance):
    q, keys, values, mask = random_step(rows, past, older, dtype)
    expected = reference_attention(q.double(), keys.double(), values.double(), past, mask, window)
    found = tree_attention(q, keys, values, plan_for(past, mask, window, dtype), window)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("rows", "past"), [(1, 0), (6, 0), (6, 5)])
def test_prefill_equals_algorithm_1(rows, past, window):
    q, keys, values, _ = random_step(rows, past, 0, torch.float64)
    plan = AttentionPlan.for_prefill(past, rows, [window], torch.float64, CPU)
    found = tree_attention(q, keys, values, plan, window)
    torch.testing.assert_close(found, reference_attention(q, keys, values, past, None, window), atol=1e-13, rtol=0)


def test_a_prompt_chunk_equals_a_tree_that_is_a_chain():
    q, keys, values, _ = random_step(6, 5, 0, torch.float64)
    chain = torch.ones(6, 6, dtype=torch.bool).tril()
    for window in (None, 3):
        torch.testing.assert_close(
            reference_attention(q, keys, values, 5, chain, window), reference_attention(q, keys, values, 5, None, window)
        )


def test_merging_by_log_sum_exp_equals_one_softmax():
    q, keys, values, _ = random_step(4, 10, 0, torch.float64)
    whole, lse = attention_with_lse(q, keys, values, None)
    first = attention_with_lse(q, keys[:, :9], values[:, :9], None)
    second = attention_with_lse(q, keys[:, 9:], values[:, 9:], None)
    torch.testing.assert_close(merge_by_lse(*first, *second), whole, atol=1e-13, rtol=0)
    torch.testing.assert_close(torch.logaddexp(first[1], second[1]), lse, atol=1e-13, rtol=0)
    scores = torch.einsum("rhd,hsd->rhs", q, keys.repeat_interleave(HEADS // KV_HEADS, 0)) / HEAD_DIM**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-13, rtol=0)


def test_merging_survives_scores_far_apart():
    out_a, out_b = torch.full((1, 1, 2), 3.0), torch.full((1, 1, 2), 5.0)
    far = merge_by_lse(out_a, torch.tensor([[-1e4]]), out_b, torch.tensor([[1e4]]))
    assert torch.equal(far, out_b)


def test_attention_by_parts_equals_algorithm_1():
    q, keys, values, mask = random_step(5, 8, 4, torch.float64)
    bias = plan_for(8, mask, None, torch.float64).biases[None]
    found = attention_by_parts(q, keys, values, 8, bias, lambda *past: attention_with_lse(*past, None))
    torch.testing.assert_close(found, reference_attention(q, keys, values, 8, mask), atol=1e-13, rtol=0)


def flash_attn_stand_in(q, k, v, causal=False, window_size=(-1, -1), return_attn_probs=False):
    """``flash_attn_func`` in plain operations: queries [1, R, H, D], keys [1, S, K, D], causal mask aligned to the last key."""
    rows, slots = q.shape[1], k.shape[1]
    reach = slots if window_size[0] < 0 else window_size[0]
    gap = torch.arange(slots - rows, slots)[:, None] - torch.arange(slots)
    hidden = (gap < 0) | (gap > reach) if causal else torch.zeros(rows, slots, dtype=torch.bool)
    bias = torch.zeros(rows, slots).masked_fill(hidden, -torch.inf).repeat_interleave(q.shape[2] // k.shape[2], 0)
    out, lse = attention_with_lse(q[0], k[0].transpose(0, 1), v[0].transpose(0, 1), bias)
    return (out[None], lse.transpose(0, 1)[None], None) if return_attn_probs else out[None]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("past", [0, 7])
def test_the_flash_attention_path_equals_algorithm_1(monkeypatch, past, window):
    monkeypatch.setattr(attention, "flash_attention", lambda: flash_attn_stand_in)
    monkeypatch.setattr(attention, "flash_applies", lambda dtype, device: True)
    q, keys, values, mask = random_step(5, past, 3, torch.float64)
    found = tree_attention(q, keys, values, plan_for(past, mask, window, torch.float64), window)
    torch.testing.assert_close(found, reference_attention(q, keys, values, past, mask, window), atol=1e-13, rtol=0)
    plan = AttentionPlan.for_prefill(past + 3, 5, [window], torch.float64, CPU)
    found = tree_attention(q, keys, values, plan, window)
    torch.testing.assert_close(found, reference_attention(q, keys, values, past + 3, None, window), atol=1e-13, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("hidden", [0, 2])
@pytest.mark.parametrize("uses_flash", [False, True])
def test_rows_of_threads_attend_to_their_visible_slots(monkeypatch, window, hidden, uses_flash):
    """Past slots are not in order of position, as when several threads commit in turn."""
    if uses_flash:
        monkeypatch.setattr(attention, "flash_attention", lambda: flash_attn_stand_in)
        monkeypatch.setattr(attention, "flash_applies", lambda dtype, device: True)
    rows, shared, slots = 4, 3, 14
    q, keys, values, _ = random_step(rows, slots - rows, 0, torch.float64)
    generator = torch.Generator().manual_seed(5)
    seen = torch.rand(rows, slots, generator=generator) < 0.5
    seen[:, :shared] = True
    own = torch.arange(slots - rows, slots)
    seen[torch.arange(rows), own] = True
    seen[:, slots - hidden :] = False
    whole = Visibility(seen[:, shared:], shared, lambda: positions[shared:])
    rows -= hidden
    positions = torch.cat((torch.arange(shared), torch.randint(shared, 9, (slots - shared,), generator=generator)))
    own_positions = positions[own[:rows]]
    visibility = whole.of(slice(0, rows), slots - hidden)
    plan = AttentionPlan.for_tree(visibility, own_positions, [window, None], HEADS // KV_HEADS, torch.float64)
    found = tree_attention(q[:rows], keys[:, : slots - hidden], values[:, : slots - hidden], plan, window)
    near = seen if window is None else seen & (positions > positions[own][:, None] - window)
    for row in range(rows):
        here = near[row].clone()
        here[own[row]] = False
        order = torch.cat((torch.nonzero(here)[:, 0], own[row : row + 1]))
        chain = torch.ones(1, 1, dtype=torch.bool)
        expected = reference_attention(q[row : row + 1], keys[:, order], values[:, order], len(order) - 1, chain)
        torch.testing.assert_close(found[row : row + 1], expected, atol=1e-13, rtol=0)


def test_masks_of_threads_see_the_learned_prompt_too():
    q, keys, values, _ = random_step(2, 8, 0, torch.float64)
    seen = torch.tensor(
        [[True, True, False, True, False, False, True, False], [True, True, True, False, False, False, True, True]]
    )
    visibility = Visibility(seen[:, 2:], 2, lambda: torch.arange(2, 8))
    plan = AttentionPlan.for_tree(visibility, torch.tensor([6, 7]), [3], HEADS // KV_HEADS, torch.float64, 2)
    assert plan.past_length == 4
    found = tree_attention(q, keys, values, plan, 3)
    for row, slots in enumerate(([0, 1, 8], [0, 1, 8, 9])):
        chain = torch.ones(1, 1, dtype=torch.bool)
        expected = reference_attention(q[row : row + 1], keys[:, slots], values[:, slots], len(slots) - 1, chain)
        torch.testing.assert_close(found[row : row + 1], expected, atol=1e-13, rtol=0)
