"""The draft model S: a small model that predicts the tokens after rows of prediction trees, with its own two-level KV caches.

Owns the draft model's weights, and a *lane* for each running request: its cache, and which tree rows are in it. The decoding
method decides which rows are drafted and which candidates enter the pipeline. Shapes: N tree slots of a lane's cache, C accepted
tokens that were never drafted, F rows to draft, R = C + F.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from pipedec.drafting.lane import DraftLane, Entering
from pipedec.model import StageModel
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, RowChanges


class DraftModel:
    """A whole model on one device. Rows of a tree may be drafted in any order, each after its ancestors."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._pool = model.make_pool()
        self._lanes: dict[int, DraftLane] = {}  # by request

    @property
    def num_lanes(self) -> int:
        """Requests that have a cache."""
        return len(self._lanes)

    @property
    def cache_slots(self) -> int:
        """KV cache entries that all requests together have room for."""
        return self._pool.slots

    def open(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int]) -> int:
        """Make the lane of a request.

        Args:
            sequence: its threads, read only. The caller passes accepted tokens to it before it calls ``advance``.
            token_ids: prompt, and what was said before.

        Returns:
            how many of ``token_ids`` need not be computed.
        """
        self._lanes[number] = DraftLane(self._pool.open(), sequence, self._model.device)
        return 0

    def close(self, number: int) -> None:
        """Drop the lane of a request."""
        self._lanes.pop(number).close()

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """Run one forward over rows of several trees and the next chunks of several prompts.

        Args:
            requested: at most one entry for each thread of a request; those of one request stand together. None of a request
                with a chunk.
            prompts: by request, token ids.

        Returns:
            the candidates for each entry of ``requested``.

        Raises:
            ValueError: rows of a tree are not ascending, one was drafted before, or an ancestor was not and is not among them.
        """
        lanes = [(self._lanes[number], list(rows)) for number, rows in groupby(requested, lambda entry: entry.number)]
        drafting = [(lane, lane.enter(rows)) for lane, rows in lanes]
        entering = [self._lanes[number].enter_prompt(chunk) for number, chunk in prompts.items()]
        entering += [entered for _, entered in drafting]
        token_ids = torch.tensor([token for of_lane in entering for token in of_lane.token_ids], device=self._model.device)
        hidden_RE = self._model.forward(token_ids, [of_lane.rows for of_lane in entering])
        for lane, entered in drafting:
            lane.settle(entered)
        return self._candidates(hidden_RE[_drafted(entering)], requested) if requested else []

    def advance(self, number: int, thread: int, changes: RowChanges) -> None:
        """Commit and prune cache entries as the thread's tree was."""
        self._lanes[number].advance(thread, changes)

    def threads_changed(self, number: int) -> None:
        """To be called when threads of a request were opened, joined or ended."""
        self._lanes[number].threads_changed()

    def _candidates(self, hidden_FE: Tensor, requested: Sequence[DraftRows]) -> list[Candidates]:
        """The most probable next tokens of the rows of ``requested``."""
        log_probs_FV = self._model.logits(hidden_FE).log_softmax(-1)
        most = min(max(entry.children for entry in requested), log_probs_FV.shape[-1])
        top = log_probs_FV.topk(most)
        counts = [len(entry.rows) for entry in requested]
        rows_F = torch.tensor([row for entry in requested for row in entry.rows], device=self._model.device)
        found = zip(requested, rows_F.split(counts), top.indices.split(counts), top.values.split(counts), strict=True)
        return [
            Candidates(rows, token_ids[:, : entry.children], log_probs[:, : entry.children])
            for entry, rows, token_ids, log_probs in found
        ]


def _drafted(entering: Sequence[Entering]) -> slice | list[int]:
    """The requested rows of a forward: the last ones of each lane's."""
    if len(entering) == 1:
        return slice(entering[0].rows.num_rows - len(entering[0].drafted), None)
    ends = accumulate(of_lane.rows.num_rows for of_lane in entering)
    return [row for end, of_lane in zip(ends, entering, strict=True) for row in range(end - len(of_lane.drafted), end)]
