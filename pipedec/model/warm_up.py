"""Forwards that a model computes before it serves, so that no request waits for one-time work.

On a GPU the first forwards load kernels and libraries, choose algorithms and capture graphs, which may take seconds each. Their
results are ignored: they use slots of the pool that no request has yet. Shapes as in ``stage_model``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipedec.core.limits import CAPTURED_ROWS
from pipedec.model.cache import KVCache, KVPool
from pipedec.model.rows import LaneRows
from pipedec.tree import Visibility

if TYPE_CHECKING:
    from pipedec.model.stage_model import StageModel

CHUNK = 2 * CAPTURED_ROWS  # rows of a prompt that are too many for a graph
_PAST = 128  # slots of a short context
_CPU_ROWS = 8  # enough to load everything on any processor
_TURNS = 16  # a model captures new buckets only in every 16th forward


@dataclass(frozen=True)
class Usual:
    """The usual size of requests to a model."""

    rows: int  # most that enter together
    context: int  # most tokens of a prompt and its answer


@dataclass(frozen=True)
class FirstForward:
    """A forward of rows of one request: of a tree, or of a prompt."""

    rows: int  # including masks
    slots: int  # slots that the rows attend to, including their own
    is_prompt: bool = False
    masks: int = 0  # how many of the rows are masks, the last ones

    @property
    def num_judged(self) -> int:
        """How many rows need logits, from the end: of a prompt only the last token's and the masks'."""
        return 1 + self.masks if self.is_prompt else self.rows

    def compute(self, model: StageModel, pool: KVPool) -> Tensor:
        """hidden_RE of tokens 0, or of activations 0. Overwrites the pool's first slots, which no request may have."""
        blocks = -(-self.slots // pool.block) * pool.block
        pool.clear(blocks)
        cache = KVCache(pool, ((0, blocks),), cached=self.slots - self.rows, with_prompt=self.masks > 0)
        past, device = cache.past_length, model.device
        positions = torch.arange(past, past + self.rows, device=device)
        if self.is_prompt:
            lane = LaneRows(positions, cache, None, self.slots, self.masks)
        else:
            seen = torch.ones(self.rows, self.rows, dtype=torch.bool, device=device).tril_()
            lane = LaneRows(positions, cache, Visibility(seen, past, lambda: positions))
        if model.is_first:
            inputs = torch.zeros(self.rows, dtype=torch.int64)
            inputs[self.rows - self.masks :] = -1 - torch.arange(self.masks)
        else:
            inputs = torch.zeros(self.rows, model.config.hidden_size, dtype=model.dtype)
        hidden_RE = model.forward(inputs.to(device), [lane])
        cache.close()
        return hidden_RE


def warm_up(
    model: StageModel, pool: KVPool, usual: Usual, use: Callable[[FirstForward, Tensor], None],
    progress: Callable[[int, int], None], turn: int = 0,
) -> None:  # fmt: skip
    """Compute forwards of every usual kind and size, the captured ones the largest first, since their graphs share memory.

    Afterwards ``model`` captures new buckets only in its turn, one forward in 16: if a new bucket passes several models, the
    first one to capture it does not hold up a timestep together with all others.

    Args:
        pool: no request may have slots in it.
        use: processes the rows of a forward, hidden_RE, and waits until the device has computed it.
        progress: called with the number of forwards computed, and their total: before each, and at the end.
        turn: number of the model among those that rows pass.
    """
    is_captured = model.capture is not None
    if not is_captured and model.device.type == "cpu":
        usual = replace(usual, rows=min(usual.rows, _CPU_ROWS))
    forwards = first_forwards(usual, pool.slots, is_captured, model.num_masks, pool.states is not None)
    for done, forward in enumerate(forwards):
        progress(done, len(forwards))
        use(forward, forward.compute(model, pool))
    progress(len(forwards), len(forwards))
    model.capture_turn = turn % _TURNS, _TURNS


def first_forwards(
    usual: Usual, slots: int, is_captured: bool, num_masks: int, is_recurrent: bool = False
) -> list[FirstForward]:  # fmt: skip
    """The forwards that ``warm_up`` computes in a pool of ``slots``: all buckets of one request, and a chunk without a bucket,
    which for recurrent layers is any; where nothing is captured, a chunk and a tree. With a BiTA (``num_masks`` > 0) also masks
    after a prompt.
    """
    context = min(usual.context, slots)
    rows = min(usual.rows, context)
    short = min(max(_PAST, rows), context)
    if is_captured:
        found = [FirstForward(count, max(count, short)) for count in reversed(usual_rows(rows))]
        if context > CAPTURED_ROWS or is_recurrent:
            found.append(FirstForward(min(CHUNK, context), min(CHUNK, context), is_prompt=True))
    else:
        found = [FirstForward(rows, rows, is_prompt=True), FirstForward(rows, short)]
    if 0 < num_masks < short:
        found.append(FirstForward(num_masks + 1, short, is_prompt=True, masks=num_masks))
    return found


def usual_rows(rows: int) -> list[int]:
    """The numbers of rows, ascending, of forwards of one request, one for each bucket up to this number."""
    return [min(1 << exponent, rows) for exponent in range((rows - 1).bit_length() + 1)]
