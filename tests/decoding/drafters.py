"""Draft models that say what a test wants, and know what they have drafted as one with a cache does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipedec import threads
from pipedec.core import Request, Step
from pipedec.decoding import Drafter, Experience, Method, create_method
from pipedec.tree import Advance, Candidates, PredictionTree, RowsToDraft

PROMPT = (1, 2, 3, 4, 5)
RARE = ((60, 0.02), (61, 0.01))
Line = Sequence[tuple[int, float]]  # the likeliest next tokens with their probabilities


class ScriptedDrafter:
    """Answers from a table of bigrams."""

    def __init__(self, bigrams: Mapping[int, Line]) -> None:
        self.begun = 0
        self.drafted = torch.zeros(0, dtype=torch.int64)
        self.skipped = 0
        self.expanded: list[list[int]] = []
        self.prompt: list[int] = []
        self._bigrams = bigrams

    def begin(self, sequence: threads.Sequence) -> None:
        self.begun += 1

    def prefill(self, token_ids: Tensor) -> None:
        self.prompt += token_ids.tolist()

    def threads_changed(self) -> None: ...

    def expand(self, requested: list[RowsToDraft], children: int) -> list[Candidates]:
        ((number, tree, rows),) = requested
        assert number == 0
        return [self._expand(tree, rows, children)]

    def _expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        assert (rows.diff() > 0).all(), "rows are in ascending order"
        self.drafted = torch.cat((self.drafted, rows))
        assert len(self.drafted.unique()) == len(self.drafted), "a row is drafted once"
        assert torch.isin(torch.nonzero(tree.tree_mask[rows])[:, 1], self.drafted).all(), "ancestors are drafted first"
        table = [self.line(tree, row)[:children] for row in rows.tolist()]
        self.expanded.append(tree.token_ids[rows].tolist())
        return Candidates(
            rows,
            torch.tensor([[token for token, _ in line] for line in table]),
            torch.tensor([[probability for _, probability in line] for line in table]).log(),
        )

    def line(self, tree: PredictionTree, row: int) -> Line:
        """What may follow ``row``."""
        return self._bigrams.get(int(tree.token_ids[row]), RARE)

    def advance(self, thread: int, advance: Advance) -> None:
        self.skipped += advance.num_rows - len(self.drafted)
        _, self.drafted = advance.renumber(self.drafted)


def begun(
    request: Request, drafter: Drafter | None = None, experience: Experience | None = None, trained_masks: int = 0
) -> Method:
    """The method of an answer in one thread that has taken in the prompt."""
    sequence = threads.single_thread(len(request.prompt_token_ids), (), 10_000)
    method = create_method(request, sequence, drafter, experience or Experience(passage=2), "cpu", trained_masks)
    method.prefill(torch.tensor(request.prompt_token_ids))
    return method


def rows(step: Step | None) -> list[tuple[int, int]]:
    """(token, parent) of every row."""
    assert step is not None and step.hidden is None
    return list(zip(step.token_ids.tolist(), step.parents.tolist(), strict=True))
