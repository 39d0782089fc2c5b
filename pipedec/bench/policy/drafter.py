"""A drafter that answers from what was recorded, and asks the draft model only for contexts that were never met.

Owns which rows of the method's tree are known and which the draft model holds. What a context is, the memo knows. Shapes: N
rows in the tree, F rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pipedec.bench.policy.memo import PROMPT, DraftMemo
from pipedec.decoding import Drafter
from pipedec.tree import Advance, Candidates, PredictionTree


class RecordedDrafter:
    """The draft of one prompt.

    The draft model is loaded, and takes in the prompt, when a forward is needed first. Rows that the memo answered are unknown
    to it: the next forward drafts those that are ancestors of its rows, too.

    Args:
        load: the draft model, the same object every time.
        most: the most children that any method asks for; every forward asks for so many.
    """

    def __init__(self, memo: DraftMemo, load: Callable[[], Drafter], most: int) -> None:
        self._memo = memo
        self._load = load
        self._most = most
        self.begin()

    def begin(self) -> None:
        """Forget the last request."""
        self._draft: Drafter | None = None
        self._chunks: list[tuple[Tensor, int]] = []  # of the prompt
        self._accepted: list[int] = []  # tokens before the root
        self._past = PROMPT  # their context
        self._contexts: list[int | None] = []  # of the rows so far; None until it is asked for
        self._is_drafted = torch.zeros(0, dtype=torch.bool)  # by the draft model, of the rows so far
        self._asked: dict[int, int] = {}  # children by context

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        """Keep the next chunk of the prompt (int64 [R]) for a draft model that may be needed."""
        self._chunks.append((token_ids, prompt_length))

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        """The likeliest ``children`` of ``rows``: int64 [F], ascending rows of the tree."""
        new = tree.num_rows - len(self._contexts)
        self._contexts += [None] * new
        self._is_drafted = torch.nn.functional.pad(self._is_drafted, (0, new))
        contexts = [self._context(tree, row) for row in rows.tolist()]
        is_unknown = torch.tensor([not self._memo.knows(context, children) for context in contexts])
        if bool(is_unknown.any()):
            self._draft_rows(tree, rows[is_unknown])
        self._asked.update(dict.fromkeys(contexts, children))
        return Candidates(rows, *self._memo.said(contexts, children))

    def advance(self, advance: Advance) -> None:
        """Follow the tree, and let the draft model follow it if it is in use."""
        tokens = advance.committed_ids.tolist()
        for token in tokens:
            self._past = self._memo.continued(self._past, token)
        self._accepted += tokens
        kept = advance.kept[advance.kept < len(self._contexts)]
        self._contexts, self._is_drafted = [self._contexts[row] for row in kept.tolist()], self._is_drafted[kept]
        if self._draft is not None:
            self._draft.advance(advance)

    def named(self, answer: Sequence[int]) -> list[bool]:
        """For each token of the accepted ``answer``: was it among the children that this request asked for?"""
        is_named = [False]
        context = PROMPT
        for before, token in pairwise(answer):
            context = self._memo.continued(context, before)
            asked = self._asked.get(context)
            is_named.append(asked is not None and token in self._memo.said([context], asked)[0].flatten().tolist())
        return is_named

    def _context(self, tree: PredictionTree, row: int) -> int:
        """The context of ``row``, found together with those of its ancestors."""
        context = self._contexts[row]
        if context is None:
            parent = int(tree.parents[row])
            before = self._past if parent < 0 else self._context(tree, parent)
            context = self._contexts[row] = self._memo.continued(before, int(tree.token_ids[row]))
        return context

    def _draft_rows(self, tree: PredictionTree, rows: Tensor) -> None:
        """One forward over ``rows`` and what the draft model lacks above them."""
        missing = torch.nonzero(tree.tree_mask[rows].any(0) & ~self._is_drafted)[:, 0]
        said = self._begun().expand(tree, missing, self._most)
        self._is_drafted[missing] = True
        self._memo.add([self._context(tree, row) for row in missing.tolist()], said, self._most)

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
