"""Draft models that say what a test wants, and know what they have drafted as one with a cache does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipedec import threads
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import RequestUpdate, Step
from pipedec.core.verdict import Verdict
from pipedec.decoding import Drafter, Experience, Resources, Scheduler
from pipedec.decoding.controller import Controller
from pipedec.tree import Candidates, DraftRows, DraftTree, RowChanges

PROMPT = (1, 2, 3, 4, 5)
RARE = ((60, 0.02), (61, 0.01))
Line = Sequence[tuple[int, float]]  # the likeliest next tokens with their probabilities


class Switch(Controller):
    """Speculates only when the test wants it."""

    is_speculating = False


class IdleDrafter:
    """Takes no notice of what becomes of answers, and has cached nothing."""

    def open_lane(self, number: int, sequence: threads.Sequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        return 0

    def close_lane(self, number: int) -> None: ...
    def num_forwards(self, requested: Sequence[DraftRows]) -> int:
        return 1

    def follow_tree(self, number: int, thread: int, changes: RowChanges) -> None: ...
    def threads_changed(self, number: int) -> None: ...
    def forget_prefixes(self) -> None: ...


class ScriptedDrafter(IdleDrafter):
    """Answers from a table of bigrams."""

    def __init__(self, bigrams: Mapping[int, Line]) -> None:
        self.begun = 0
        self.drafted: set[int] = set()
        self.skipped = 0
        self.expanded: list[list[int]] = []
        self.prompt: list[int] = []
        self._bigrams = bigrams

    def open_lane(self, number: int, sequence: threads.Sequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        self.begun += 1
        return 0

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        for chunk in prompts.values():
            self.prompt += chunk
        assert {entry.thread for entry in requested} <= {0} and len(requested) <= 1
        return [self._expand(entry.tree, entry.rows, entry.children) for entry in requested]

    def _expand(self, tree: DraftTree, rows: Sequence[int], children: int) -> Candidates:
        assert list(rows) == sorted(rows), "rows are in ascending order"
        assert not self.drafted & set(rows), "a row is drafted once"
        self.drafted |= set(rows)
        assert {above for row in rows for above in tree.ancestors_of(row)} <= self.drafted, "ancestors are drafted first"
        table = [self.line(tree, row)[:children] for row in rows]
        self.expanded.append(tree.tokens_of(rows))
        return Candidates(
            torch.tensor(rows),
            torch.tensor([[token for token, _ in line] for line in table]),
            torch.tensor([[probability for _, probability in line] for line in table]).log(),
        )

    def line(self, tree: DraftTree, row: int) -> Line:
        """What may follow ``row``."""
        return self._bigrams.get(tree.tokens_of([row])[0], RARE)

    def follow_tree(self, number: int, thread: int, changes: RowChanges) -> None:
        self.skipped += changes.num_rows - len(self.drafted)
        self.drafted = {index for index, row in enumerate(changes.kept) if row in self.drafted}


class Alone:
    """A scheduler of one request, whose prompt has entered."""

    def __init__(self, scheduler: Scheduler, request: TokenizedRequest, sequence: threads.Sequence) -> None:
        self.scheduler = scheduler
        self.request = scheduler.prepare(request, lambda: sequence)
        scheduler.open(self.request)
        self.method = self.request.method
        self.masks = self.method.masks
        entered: list[int] = []
        while (step := self.propose()) is not None:
            assert set(step.parents.tolist()) == {-1}
            entered += step.token_ids.tolist()
            self.draft()
        assert entered == [*request.prompt_token_ids, *range(-1, -1 - self.masks.count, -1)]

    @property
    def hits(self) -> int:
        return self.request.metrics.hits

    @property
    def misses(self) -> int:
        return self.request.metrics.misses

    def propose(self) -> Step | None:
        return next((update.step for update in self.scheduler.entering().updates), None)

    def draft(self) -> None:
        self.scheduler.draft()

    def apply(self, verdict: Verdict) -> None:
        self.scheduler.take(RequestUpdate(self.request.number, verdict=verdict), 1)


def begun(
    request: TokenizedRequest, drafter: Drafter | None = None, experience: Experience | None = None, trained_masks: int = 0
) -> Alone:
    """An answer in one thread whose prompt has entered."""
    scheduler = Scheduler(Resources(experience or Experience(2), drafter, trained_masks=trained_masks))
    return Alone(scheduler, request, threads.Sequence(len(request.prompt_token_ids), (), 10_000))


def rows(step: Step | None) -> list[tuple[int, int]]:
    """(token, parent) of every row."""
    assert step is not None and step.hidden is None
    return list(zip(step.token_ids.tolist(), step.parents.tolist(), strict=True))
