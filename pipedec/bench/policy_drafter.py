"""A drafter that answers from what was recorded, and asks the draft model only for contexts that were never met.

Owns which rows of the method's tree are known and which the draft model holds. What a context is, the memo knows. Shapes: N
rows in the tree, F rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pipedec.bench.policy_memo import PROMPT, DraftMemo
from pipedec.decoding import Drafter
from pipedec.decoding.controller import CHILDREN
from pipedec.tree import Advance, Candidates, PredictionTree

_UNMET = -2


class RecordedDrafter:
    """The draft of one prompt.

    The draft model is loaded, and takes in the prompt, when a forward is needed first. Rows that the memo answered are unknown to
    it: the next forward drafts those that are ancestors of its rows, too.

    Args:
        load: the draft model, the same object every time.
        children: what a forward asks for at least, so that methods with more children find them.
    """

    def __init__(self, memo: DraftMemo, load: Callable[[], Drafter], children: int = CHILDREN[-1]) -> None:
        self._memo = memo
        self._load = load
        self._children = children
        self.begin()

    def begin(self) -> None:
        """Forget the last request."""
        self._draft: Drafter | None = None
        self._chunks: list[tuple[Tensor, int]] = []  # of the prompt
        self._accepted: list[int] = []  # tokens before the root
        self._past = PROMPT  # their context
        self._contexts = torch.zeros(0, dtype=torch.int64)  # [N] of the rows so far
        self._is_drafted = torch.zeros(0, dtype=torch.bool)  # [N] of the rows so far
        self._asked: dict[int, int] = {}  # children by context

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        """Keep the next chunk of the prompt (int64 [R]) for a draft model that may be needed."""
        self._chunks.append((token_ids, prompt_length))

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        """The likeliest ``children`` of ``rows``: int64 [F], ascending rows of the tree."""
        self._meet(tree, rows)
        contexts = self._contexts[rows]
        unknown = rows[~self._memo.knows(contexts, children)]
        if len(unknown):
            self._draft_rows(tree, unknown, max(children, self._children))
        self._asked.update(dict.fromkeys(contexts.tolist(), children))
        token_ids, log_probs = self._memo.said(contexts, children)
        return Candidates(rows, token_ids, log_probs)

    def advance(self, advance: Advance) -> None:
        """Follow the tree, and let the draft model follow it if it is in use."""
        tokens = advance.committed_ids.tolist()
        for token in tokens:
            self._past = self._memo.continued(self._past, token)
        self._accepted += tokens
        kept = advance.kept[advance.kept < len(self._contexts)]
        self._contexts, self._is_drafted = self._contexts[kept], self._is_drafted[kept]
        if self._draft is not None:
            self._draft.advance(advance)

    def named(self, answer: Sequence[int]) -> list[bool]:
        """For each token of the accepted ``answer``: was it among the children that this request asked for?"""
        is_named = [False]
        context: int | None = PROMPT
        for before, token in pairwise(answer):
            context = None if context is None else self._memo.find(context, before)
            asked = 0 if context is None else self._asked.get(context, 0)
            said = self._memo.said(torch.tensor([context]), asked)[0].flatten().tolist() if asked else []
            is_named.append(token in said)
        return is_named

    def _meet(self, tree: PredictionTree, rows: Tensor) -> None:
        """Find the contexts of ``rows`` and of their ancestors."""
        new = tree.num_rows - len(self._contexts)
        self._contexts = torch.nn.functional.pad(self._contexts, (0, new), value=_UNMET)
        self._is_drafted = torch.nn.functional.pad(self._is_drafted, (0, new))
        unmet = tree.tree_mask[rows].any(0) & (self._contexts == _UNMET)
        for row in torch.nonzero(unmet)[:, 0].tolist():
            parent = int(tree.parents[row])
            context = self._past if parent < 0 else int(self._contexts[parent])
            self._contexts[row] = self._memo.continued(context, int(tree.token_ids[row]))

    def _draft_rows(self, tree: PredictionTree, rows: Tensor, children: int) -> None:
        """One forward over ``rows`` and what the draft model lacks above them."""
        if bool(self._is_drafted[rows].any()):  # with fewer children, and a row is drafted once
            self._draft, self._is_drafted = None, torch.zeros_like(self._is_drafted)
        missing = torch.nonzero(tree.tree_mask[rows].any(0) & ~self._is_drafted)[:, 0]
        said = self._begun().expand(tree, missing, children)
        self._is_drafted[missing] = True
        self._memo.add(self._contexts[missing], said, children)

    def _begun(self) -> Drafter:
        """The draft model, behind the accepted tokens."""
        if self._draft is None:
            self._draft = self._load()
            self._draft.begin()
            for token_ids, prompt_length in self._chunks:
                self._draft.prefill(token_ids, prompt_length)
            rows = torch.arange(len(self._accepted))
            self._draft.advance(Advance(rows, torch.tensor(self._accepted, dtype=torch.int64), rows[:0], len(rows), hit=False))
        return self._draft
