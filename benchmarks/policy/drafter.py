"""A drafter that replays recorded candidates, and runs the draft model only for contexts that are not recorded.

Tracks which rows of each request's tree are in the draft model's cache. Contexts are those of ``recording``. Shapes: N rows in a
tree, F requested rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch

from benchmarks.policy.recording import PROMPT, DraftMemo
from pipedec.decoding import Drafter
from pipedec.kv import KVManager
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
        kv: the books of the KV memory of the device whose work is replayed; None if requests share no prefixes there.
    """

    def __init__(
        self, memo: Callable[[int], DraftMemo], load: Callable[[], Drafter], max_children: int, kv: KVManager | None = None
    ) -> None:
        self._memo = memo
        self._load = load
        self._max_children = max_children
        self._kv = kv
        self._requests: dict[int, _RecordedRequest] = {}

    def open(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int]) -> int:
        """Begin a request.

        Args:
            sequence: of an answer that cannot fork.
            token_ids: the prompt, and tokens that were accepted before.

        Returns:
            how many of ``token_ids`` need not be computed.
        """
        request = _RecordedRequest(number, sequence, token_ids, self._memo(number), self._load, self._max_children)
        self._requests[number] = request
        lease = self._kv.open(number, token_ids, len(token_ids)) if self._kv is not None else None
        return 0 if lease is None else lease.cached

    def close(self, number: int) -> None:
        """Forget a request."""
        self._requests.pop(number).close()
        if self._kv is not None and self._kv.slots_of(number):
            self._kv.close(number)

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """The ``children`` most probable children of each of the requested rows."""
        for number, token_ids in prompts.items():
            self._tell(number, token_ids)
        return [self._requests[entry.number].expand(entry) for entry in requested]

    def advance(self, number: int, thread: int, changes: RowChanges) -> None:
        """Commit and prune like the tree, in the draft model too if it is in use."""
        self._requests[number].advance(thread, changes)
        self._tell(number, changes.committed_ids)

    def _tell(self, number: int, token_ids: Sequence[int]) -> None:
        """Tokens have joined the past of a request, which others may adopt."""
        kv = self._kv
        if kv is not None and kv.slots_of(number):
            if kv.grow(number, kv.tokens_of(number) + len(token_ids)) is None:
                kv.close(number)
            else:
                kv.extend(number, token_ids)

    def threads_changed(self, number: int) -> None:
        """Nothing to do: there is one thread."""

    def forget_prefixes(self) -> None:
        """Forget those of ended requests."""
        if self._kv is not None:
            self._kv.forget_kept()

    def proposed(self, number: int, answer: Sequence[int]) -> list[bool]:
        """For each token of the accepted ``answer``: was it among the children that this request was given? No, if none was."""
        return self._requests[number].proposed(answer) if number in self._requests else [False] * len(answer)


class _RecordedRequest:
    """One request. ``token_ids``: what it begins with; ``load`` and ``max_children`` as in ``RecordedDrafter``."""

    def __init__(
        self,
        number: int,
        sequence: ThreadSequence,
        token_ids: Sequence[int],
        memo: DraftMemo,
        load: Callable[[], Drafter],
        max_children: int,
    ) -> None:
        self._number = number
        self._sequence = sequence
        self._memo = memo
        self._load = load
        self._max_children = max_children
        self._draft: Drafter | None = None  # once this request needs it
        self._begun_with = token_ids
        self._accepted: list[int] = []  # tokens after those and before the root
        self._past = PROMPT  # their context
        for token in token_ids[sequence.prompt_length :]:
            self._past = memo.continued(self._past, token)
        self._contexts: list[int | None] = []  # of each row; None until needed
        self._drafted: set[int] = set()  # rows in the draft model's cache
        self._requested: dict[int, int] = {}  # number of children by context

    def expand(self, requested: DraftRows) -> Candidates:
        tree, children = requested.tree, requested.children
        self._contexts += [None] * (tree.num_rows - len(self._contexts))
        contexts = [self._context(tree, row) for row in requested.rows]
        unknown = [row for row, context in zip(requested.rows, contexts, strict=True) if not self._memo.knows(context, children)]
        if unknown and not self._draft_rows(tree, unknown):
            rows = torch.tensor(requested.rows)
            return Candidates(rows, rows.new_zeros(len(rows), 0), torch.zeros(len(rows), 0))
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

    def _draft_rows(self, tree: DraftTree, rows: Sequence[int]) -> bool:
        """One forward over ``rows`` and their ancestors that are not in the draft model's cache. False if it has no memory."""
        missing = sorted({above for row in rows for above in tree.ancestors_of(row)} - self._drafted)
        (candidates,) = self._prefilled().expand([DraftRows(self._number, 0, tree, missing, self._max_children)], {})
        if not candidates.token_ids.numel():
            return False
        self._drafted |= set(missing)
        self._memo.add([self._context(tree, row) for row in missing], candidates, self._max_children)
        return True

    def _prefilled(self) -> Drafter:
        """The draft model, with what the request began with and the accepted tokens in its cache."""
        if self._draft is None:
            self._draft = self._load()
            cached = self._draft.open(self._number, self._sequence, self._begun_with)
            if cached < len(self._begun_with):
                self._draft.expand([], {self._number: self._begun_with[cached:]})
            rows = list(range(len(self._accepted)))
            self._draft.advance(self._number, 0, RowChanges(rows, self._accepted, [], len(rows)))
        return self._draft
