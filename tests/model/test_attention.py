"""Every implementation of attention equals the paper's Algorithm 1."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.operations import reference_attention as attention_as_written
from pipedec.families import LayerShape, Reach
from pipedec.model.attention import AttentionPlan, attention_with_lse, mask_of, tree_attention
from pipedec.model.flash_lanes import merge_by_lse
from pipedec.tree import Visibility, visible_slots

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
CPU = torch.device("cpu")


def shape(window: int | None = None, **changes) -> LayerShape:
    return LayerShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, None if window is None else Reach(window), **changes)


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


def plan_for(past: int, mask: torch.Tensor, layer: LayerShape, dtype: torch.dtype) -> AttentionPlan:
    """For rows whose mask marks every ancestor, so that its marks tell positions: those of unmarked slots do not matter."""
    positions = past + mask.sum(1) - 1
    older = torch.zeros(mask.shape[1] - len(mask), dtype=torch.int64)
    for row in range(len(mask)):
        slots = torch.nonzero(mask[row])[:, 0]
        slots = slots[slots < len(older)]
        older[slots] = past + torch.arange(len(slots))
    visibility = Visibility(mask, past, lambda: torch.cat((older, positions)))
    return AttentionPlan.for_tree(visibility, positions, [mask_of(layer)], dtype)


def reference_attention(q, keys, values, past, mask=None, window=None):
    """Paper Algorithm 1; without a mask, for rows that directly follow the past."""
    rows, window = len(q), window or keys.shape[1] + 1
    if mask is None:
        positions, slots = torch.arange(past, past + rows)[:, None], torch.arange(past + rows)
        seen = (slots <= positions) & (slots > positions - window)
    else:
        seen = visible_slots(mask, mask.new_zeros(rows), 0, past) & slots_in_window(mask, past, window)
    return attention_as_written(q, keys, values, past, seen)


def slots_in_window(mask: torch.Tensor, past: int, window: int) -> torch.Tensor:
    """bool [R, P + N]: the slots within the last ``window`` positions, each tree row's own included.

    The number of a past slot is its position. A path has one tree row per position and rows enter after their parents, so the
    distance from a row to a marked ancestor is the number of marks to the right of it.
    """
    depth = mask.sum(1, keepdim=True)
    return torch.cat((torch.arange(past) > past + depth - 1 - window, depth - mask.cumsum(1) < window), dim=1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("rows", "past", "older"), [(1, 0, 0), (5, 0, 3), (9, 12, 20)])
def test_tree_attention_equals_algorithm_1(rows, past, older, window, dtype, tolerance):
    q, keys, values, mask = random_step(rows, past, older, dtype)
    expected = reference_attention(q.double(), keys.double(), values.double(), past, mask, window)
    found = tree_attention(q, keys, values, plan_for(past, mask, shape(window), dtype), shape(window))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("rows", "past"), [(6, 0), (6, 5)])
def test_prefill_equals_algorithm_1(rows, past, window):
    q, keys, values, _ = random_step(rows, past, 0, torch.float64)
    plan = AttentionPlan.for_prefill(past, rows, [mask_of(shape(window))], torch.float64, CPU)
    found = tree_attention(q, keys, values, plan, shape(window))
    torch.testing.assert_close(found, reference_attention(q, keys, values, past, None, window), atol=1e-13, rtol=0)


def with_lse(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out_RHD, lse_RH."""
    folded = q.unflatten(1, (KV_HEADS, -1)).transpose(0, 1).flatten(1, 2)
    parts = attention_with_lse(folded, keys, values, None, shape())
    out, lse = (part.unflatten(1, (len(q), -1)).transpose(0, 1).flatten(1, 2) for part in parts)
    return out, lse


def test_merging_by_log_sum_exp_equals_one_softmax():
    q, keys, values, _ = random_step(4, 10, 0, torch.float64)
    whole, lse = with_lse(q, keys, values)
    first = with_lse(q, keys[:, :9], values[:, :9])
    second = with_lse(q, keys[:, 9:], values[:, 9:])
    torch.testing.assert_close(merge_by_lse(*first, *second), (whole, lse), atol=1e-13, rtol=0)
    scores = torch.einsum("rhd,hsd->rhs", q, keys.repeat_interleave(HEADS // KV_HEADS, 0)) / HEAD_DIM**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-13, rtol=0)
    out_a, out_b = torch.full((1, 1, 2), 3.0), torch.full((1, 1, 2), 5.0)
    far, _ = merge_by_lse(out_a, torch.tensor([[-1e4]]), out_b, torch.tensor([[1e4]]))
    assert torch.equal(far, out_b)


@pytest.mark.parametrize(("window", "hidden"), [(None, 0), (5, 2)])
def test_rows_of_threads_attend_to_their_visible_slots(window, hidden):
    """Past slots are not in order of position, as when several threads commit in turn."""
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
    plan = AttentionPlan.for_tree(visibility, own_positions, [mask_of(shape(window)), mask_of(shape())], torch.float64)
    found = tree_attention(q[:rows], keys[:, : slots - hidden], values[:, : slots - hidden], plan, shape(window))
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
    plan = AttentionPlan.for_tree(visibility, torch.tensor([6, 7]), [mask_of(shape(3))], torch.float64, 2)
    found = tree_attention(q, keys, values, plan, shape(3))
    for row, slots in enumerate(([0, 1, 8], [0, 1, 8, 9])):
        chain = torch.ones(1, 1, dtype=torch.bool)
        expected = reference_attention(q[row : row + 1], keys[:, slots], values[:, slots], len(slots) - 1, chain)
        torch.testing.assert_close(found[row : row + 1], expected, atol=1e-13, rtol=0)


def as_defined(q, keys, values, seen, layer: LayerShape, sinks=None):
    """Scores of every head, scaled, capped and masked, in one softmax with the head's sink."""
    keys, values = (part.repeat_interleave(layer.group, 0) for part in (keys, values))
    scores = torch.einsum("rhd,hsd->hrs", q, keys) * (layer.scale or layer.key_dim**-0.5)
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hrs,hsd->rhd", scores.softmax(-1)[..., : keys.shape[1]], values)


VARIANTS = {
    "scaled": shape(scale=0.7),
    "capped": shape(softcap=1.5),
    "in a window": shape(3, softcap=1.5),
    "by chunks": LayerShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, Reach(4, is_chunk=True)),
    "with narrow values": LayerShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM // 2),
}


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("layer", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("rows", "past", "is_prefill"), [(6, 5, True), (5, 9, False)])
def test_scales_caps_chunks_and_sinks_are_those_of_the_definition(rows, past, is_prefill, layer, with_sinks):
    q, keys, values, mask = random_step(rows, past, 0, torch.float64)
    values = values[..., : layer.value_dim]
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64) if with_sinks else None
    if is_prefill:
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        plan = AttentionPlan.for_prefill(past, rows, [mask_of(layer)], torch.float64, CPU)
    else:
        plan = plan_for(past, mask, layer, torch.float64)
    own = past + mask.sum(1) - 1
    positions = torch.cat((torch.arange(past), own))
    seen = torch.cat((torch.ones(rows, past, dtype=torch.bool), mask), 1)
    if layer.reach is not None and layer.reach.is_chunk:
        seen &= positions // layer.reach.size == own[:, None] // layer.reach.size
    elif layer.reach is not None:
        seen &= positions > own[:, None] - layer.reach.size
    found = tree_attention(q, keys, values, plan, layer, sinks)
    torch.testing.assert_close(found, as_defined(q, keys, values, seen, layer, sinks), atol=1e-13, rtol=0)
