"""Every implementation of attention is that of its definition, which without caps and sinks is the paper's Algorithm 1."""

from __future__ import annotations

import pytest
import torch

from pipedec.families import LayerShape, Reach
from pipedec.model.attention import AttentionPlan, mask_of, tree_attention
from pipedec.tree import Visibility

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


def plan_for(past: int, mask: torch.Tensor, layer: LayerShape, dtype: torch.dtype) -> tuple[AttentionPlan, torch.Tensor]:
    """The plan, and the positions of all slots, for rows whose mask marks every ancestor, so that its marks tell positions.

    Those of unmarked slots do not matter.
    """
    positions = past + mask.sum(1) - 1
    older = torch.zeros(mask.shape[1] - len(mask), dtype=torch.int64)
    for row in range(len(mask)):
        slots = torch.nonzero(mask[row])[:, 0]
        slots = slots[slots < len(older)]
        older[slots] = past + torch.arange(len(slots))
    slot_positions = torch.cat((older, positions))
    visibility = Visibility(mask, past, lambda: slot_positions)
    plan = AttentionPlan.for_tree(visibility, positions, [mask_of(layer)], dtype)
    return plan, torch.cat((torch.arange(past), slot_positions))


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
    "plain": shape(),
    "in a window of one": shape(1),
    "scaled": shape(scale=0.7),
    "capped in a window": shape(3, softcap=1.5),
    "by chunks": LayerShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, Reach(4, is_chunk=True)),
    "with narrow values": LayerShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM // 2),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("layer", VARIANTS.values(), ids=VARIANTS)
def test_attention_is_that_of_the_definition(layer, with_sinks, dtype, tolerance):
    """For the rows of a prompt, with and without a past, and for those of a tree, alone and behind older ones."""
    sinks = torch.linspace(-1, 2, HEADS, dtype=dtype) if with_sinks else None
    for rows, past, older in ((6, 0, None), (6, 5, None), (1, 7, 0), (5, 0, 3), (9, 12, 20)):
        q, keys, values, mask = random_step(rows, past, older or 0, dtype)
        values = values[..., : layer.value_dim]
        if older is None:
            mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        plan, positions = plan_for(past, mask, layer, dtype)
        if older is None:
            plan = AttentionPlan.for_prefill(past, rows, [mask_of(layer)], dtype, CPU)
        own = positions[-rows:, None]
        seen = torch.cat((torch.ones(rows, past, dtype=torch.bool), mask), 1)
        if layer.reach is not None and layer.reach.is_chunk:
            seen &= positions // layer.reach.size == own // layer.reach.size
        elif layer.reach is not None:
            seen &= positions > own - layer.reach.size
        found = tree_attention(q, keys, values, plan, layer, sinks)
        exact = as_defined(*(part.double() for part in (q, keys, values)), seen, layer, None if sinks is None else sinks.double())
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=0)


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
    near[torch.arange(len(own)), own] = True
    used = slice(0, slots - hidden)
    expected = as_defined(q[:rows], keys[:, used], values[:, used], near[:rows, used], shape())
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)


def test_masks_of_threads_see_the_learned_prompt_too():
    q, keys, values, _ = random_step(2, 8, 0, torch.float64)
    seen = torch.tensor(
        [[True, True, False, True, False, False, True, False], [True, True, True, False, False, False, True, True]]
    )
    visibility = Visibility(seen[:, 2:], 2, lambda: torch.arange(2, 8))
    plan = AttentionPlan.for_tree(visibility, torch.tensor([6, 7]), [mask_of(shape(3))], torch.float64, 2)
    found = tree_attention(q, keys, values, plan, shape(3))
    near = torch.zeros(2, 10, dtype=torch.bool)
    near[0, [0, 1, 8]] = near[1, [0, 1, 8, 9]] = True
    torch.testing.assert_close(found, as_defined(q, keys, values, near, shape()), atol=1e-13, rtol=0)
