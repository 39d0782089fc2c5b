"""A drafter that replays recorded candidates, and runs the draft model only for contexts that are not recorded.

Tracks which rows of each request's tree are in the draft model's cache. Contexts are defined by ``memo``. Shapes: N rows in a
tree, F requested rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch

from pipedec.bench.policy.memo import PROMPT, DraftMemo
from pipedec.decoding import Drafter
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, DraftTree, RowChanges


class RecordedDrafter:
    """The drafter of requests whose answers cannot fork.

    The draft model is loaded when the first forward is needed, and a request is prefilled when its own first forward is. Rows
    whose candidates came from a memo are not in the draft model's cache: the next forward includes those that are ancestors of
    its rows.

    Args:
        memo: returns the memo of a request's prompt. Requests with the same prompt may share one.
        load: returns the draft model, the same object each time.
        max_children: the largest number of children that any method requests; every forward records that number.
    """

    def __init__(self, memo: Callable[[int], DraftMemo], load: Callable[[], Drafter], max_children: int) -> None:
        self._memo = memo
        self._load = load
        self._max_children = max_children
        self._requests: dict[int, _RecordedRequest] = {}

    def open(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int]) -> int:
        """Begin a request.

        Args:
            sequence: of an answer that cannot fork.
            token_ids: prompt, and what was said before.

        Returns:
            how many of ``token_ids`` need not be computed.
        """
        self._requests[number] = _RecordedRequest(number, sequence, self._memo(number), self._load, self._max_children)
        return 0

    def close(self, number: int) -> None:
        """Forget a request."""
        self._requests.pop(number).close()

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """The ``children`` most probable children of each of the requested rows."""
        for number, token_ids in prompts.items():
            self._requests[number].prefill(token_ids)
        return [self._requests[entry.number].expand(entry) for entry in requested]

    def advance(self, number: int, thread: int, changes: RowChanges) -> None:
        """Commit and prune like the tree, in the draft model too if it is in use."""
        self._requests[number].advance(thread, changes)

    def threads_changed(self, number: int) -> None:
        """Nothing to do: there is one thread."""

    def proposed(self, number: int, answer: Sequence[int]) -> list[bool]:
        """For each token of the accepted ``answer``: was it among the children that this request was given? No, if none was."""
        return self._requests[number].proposed(answer) if number in self._requests else [False] * len(answer)


class _RecordedRequest:
    """One request. ``load`` and ``max_children`` as in ``RecordedDrafter``."""

    def __init__(
        self, number: int, sequence: ThreadSequence, memo: DraftMemo, load: Callable[[], Drafter], max_children: int
    ) -> None:
        self._number = number
        self._sequence = sequence
        self._memo = memo
        self._load = load
        self._max_children = max_children
        self._draft: Drafter | None = None  # once this request needs it
        self._chunks: list[Sequence[int]] = []  # of the prompt
        self._accepted: list[int] = []  # tokens before the root
        self._past = PROMPT  # their context
        self._contexts: list[int | None] = []  # of each row; None until needed
        self._drafted: set[int] = set()  # rows in the draft model's cache
        self._requested: dict[int, int] = {}  # number of children by context

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Keep the next chunk of the prompt in case the draft model is needed."""
        self._chunks.append(token_ids)

    def expand(self, requested: DraftRows) -> Candidates:
        tree, children = requested.tree, requested.children
        self._contexts += [None] * (tree.num_rows - len(self._contexts))
        contexts = [self._context(tree, row) for row in requested.rows]
        unknown = [row for row, context in zip(requested.rows, contexts, strict=True) if not self._memo.knows(context, children)]
        if unknown:
            self._draft_rows(tree, unknown)
        self._requested.update(dict.fromkeys(contexts, children))
        return Candidates(torch.tensor(requested.rows), *self._memo.children(contexts, children))

    def advance(self, thread: int, changes: RowChanges) -> None:
        for token in changes.committed_ids:
            self._past = self._memo.continued(self._past, token)
        self._accepted += changes.committed_ids
        self._contexts = [self._contexts[row] for row in changes.kept if row < len(self._contexts)]
        self._drafted = {number for number, row in enumerate(changes.kept) if row in self._drafted}
        if self._draft is not None:
            self._draft.advance(self._number, thread, changes)

    def close(self) -> None:
        if self._draft is not None:
            self._draft.close(self._number)

    def proposed(self, answer: Sequence[int]) -> list[bool]:
        is_proposed = [False]
        context = PROMPT
        for before, token in pairwise(answer):
            context = self._memo.continued(context, before)
            children = self._requested.get(context)
            is_proposed.append(children is not None and token in self._memo.children([context], children)[0].flatten().tolist())
        return is_proposed

    def _context(self, tree: DraftTree, row: int) -> int:
        """The context of ``row``; also finds those of its ancestors."""
        new: list[int] = []
        before = self._past
        for above in tree.ancestors_of(row):
            if (known := self._contexts[above]) is not None:
                before = known
                break
            new.append(above)
        for above, token in zip(new[::-1], tree.tokens_of(new[::-1]), strict=True):
            before = self._contexts[above] = self._memo.continued(before, token)
        return before

    def _draft_rows(self, tree: DraftTree, rows: Sequence[int]) -> None:
        """One forward over ``rows`` and their ancestors that are not in the draft model's cache."""
        missing = sorted({above for row in rows for above in tree.ancestors_of(row)} - self._drafted)
        (candidates,) = self._prefilled().expand([DraftRows(self._number, 0, tree, missing, self._max_children)], {})
        self._drafted |= set(missing)
        self._memo.add([self._context(tree, row) for row in missing], candidates, self._max_children)

    def _prefilled(self) -> Drafter:
        """The draft model, with the prompt and the accepted tokens in its cache."""
        if self._draft is None:
            self._draft = self._load()
            self._draft.open(self._number, self._sequence, [token for chunk in self._chunks for token in chunk])
            for token_ids in self._chunks:
                self._draft.expand([], {self._number: token_ids})
            rows = list(range(len(self._accepted)))
            self._draft.advance(self._number, 0, RowChanges(rows, self._accepted, [], len(rows)))
        return self._draft
