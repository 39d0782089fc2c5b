"""Many requests in one draft model: each as if it were alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny_llama
from support.examples import examples
from support.toy_dialects import CONTROL, sequence_of, toy

from pipedec.core import SamplingParams
from pipedec.drafting import DraftModel
from pipedec.model import StageModel
from pipedec.threads import Sequence
from pipedec.tree import Candidates, DraftRows, PredictionTree

VOCAB = 64
TEXT = range(len(CONTROL), VOCAB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    path = tmp_path_factory.mktemp("draft")
    save_tiny_llama(path, layers=2, vocab=VOCAB, dtype=torch.float64)
    return StageModel.load(path, range(2), torch.float64, "cpu")


@dataclass
class Running:
    """A request whose tree grows at random, and what is to be drafted of it. In company every other one could open threads."""

    number: int
    prompt: list[int]
    chooser: random.Random
    alone: DraftModel
    tree: PredictionTree = field(default_factory=lambda: PredictionTree(block=4))
    entered: int = 0
    drafted: set[int] = field(default_factory=set)
    sequence: Sequence = field(init=False)

    def chunk(self) -> list[int]:
        """The next chunk of the prompt."""
        first, self.entered = self.entered, min(self.entered + self.chooser.randint(1, 4), len(self.prompt))
        self.plant()
        return self.prompt[first : self.entered]

    def begin(self, company: DraftModel) -> None:
        """In company it may adopt a prefix; alone it computes everything."""
        alone = self.sequence = Sequence(len(self.prompt), (), 1000)
        if self.number % 2:
            self.sequence = sequence_of(toy("apar"), len(self.prompt))
        self.entered = company.open(self.number, self.sequence, self.prompt, SamplingParams())
        assert self.alone.open(self.number, alone, self.prompt, SamplingParams()) == 0
        if self.entered:
            self.alone.expand([], {self.number: self.prompt[: self.entered]})
        self.plant()

    def plant(self) -> None:
        if self.entered == len(self.prompt):
            self.tree.reset(len(self.prompt))
            self.tree.plant(self.chooser.choice(TEXT))
            self.sequence.accept(0, int(self.tree.token_ids[0]))

    def rows(self) -> DraftRows | None:
        for _ in range(self.chooser.randint(0, 3)):
            parent, token = self.chooser.randrange(self.tree.num_rows), self.chooser.choice(TEXT)
            if self.tree.child(parent, token) is None:
                self.tree.append(torch.tensor([token]), torch.tensor([parent]))
        rows: list[int] = []
        for row, parent in enumerate(self.tree.parents.tolist()):
            is_ready = parent < 0 or parent in self.drafted or parent in rows
            if row not in self.drafted and is_ready and self.chooser.random() < 0.7:
                rows.append(row)
        self.drafted |= set(rows)
        return DraftRows(self.number, 0, self.tree, rows, self.chooser.randint(1, 6)) if rows else None

    def verdict(self, *drafts: DraftModel) -> None:
        row = self.chooser.randrange(self.tree.num_rows)
        path = torch.nonzero(self.tree.tree_mask[row])[1:, 0]
        tokens = [*self.tree.token_ids[path].tolist(), self.chooser.choice(TEXT)]
        for token in tokens:
            self.sequence.accept(0, token)
        advance = self.tree.advance(tokens)
        for draft in drafts:
            draft.advance(self.number, 0, advance.changes)
        _, kept = advance.renumber(torch.tensor(sorted(self.drafted), dtype=torch.int64))
        self.drafted = set(kept.tolist())
        if not self.tree.num_rows:
            self.tree.plant(tokens[-1])


def same(found: Candidates, expected: Candidates) -> None:
    assert torch.equal(found.rows, expected.rows) and torch.equal(found.token_ids, expected.token_ids)
    assert torch.allclose(found.log_probs, expected.log_probs, rtol=0, atol=1e-9)


def prompts_of(chooser: random.Random) -> list[int]:
    """Many begin with the same tokens."""
    common = list(range(chooser.choice((0, 3, 11))))
    return [*common, *(chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 9)))]


@examples(25)
@given(st.integers(0, 2**32), st.sampled_from((40, 1100, 8192)), st.sampled_from((1, 4, 16)))
def test_in_company_the_candidates_are_those_of_a_request_alone(model: StageModel, seed: int, slots: int, block: int) -> None:
    """Requests come and go; chunks of some prompts are in the forward that drafts rows of others; prefixes are shared.

    A request for which there is no memory gets no candidates, from then on.
    """
    chooser, company = random.Random(seed), DraftModel(model, slots, block)
    running: list[Running] = []
    without: set[int] = set()
    for number in range(30):
        if chooser.random() < 0.4 and len(running) < 5:
            one = Running(number, prompts_of(chooser), chooser, DraftModel(model))
            one.begin(company)
            running.append(one)
        prompts = {one.number: one.chunk() for one in running if one.entered < len(one.prompt)}
        requested = [rows for one in running if one.number not in prompts and (rows := one.rows()) is not None]
        if prompts or requested:
            found = company.expand(requested, prompts)
            by_number = {one.number: one for one in running}
            for at, chunk in prompts.items():
                by_number[at].alone.expand([], {at: chunk})
            for entry, candidates in zip(requested, found, strict=True):
                expected = by_number[entry.number].alone.expand([entry], {})[0]
                if candidates.token_ids.numel():
                    assert entry.number not in without
                    same(candidates, expected)
                else:
                    without.add(entry.number)
                    assert candidates.rows.tolist() == list(entry.rows)
        for one in [one for one in running if one.number not in prompts]:
            if chooser.random() < 0.5:
                one.verdict(company, one.alone)
            elif chooser.random() < 0.2:
                company.close(one.number)
                running.remove(one)
        assert company.num_lanes <= len(running)
    assert not without or slots < 8192
    for one in running:
        company.close(one.number)
    assert (company.num_lanes, company.used_slots) == (0, 0)


def test_a_prompt_that_is_known_is_not_computed_again(model: StageModel) -> None:
    draft, prompt = DraftModel(model), list(range(40))
    draft.open(0, Sequence(40, (), 1000), prompt, SamplingParams())
    draft.expand([], {0: prompt[:35]})
    assert draft.open(1, Sequence(40, (), 1000), prompt, SamplingParams()) == 32
    draft.expand([], {0: prompt[35:]})
    draft.close(0)
    assert draft.open(2, Sequence(42, (), 1000), [*prompt, 1, 2], SamplingParams()) == 40
    draft.forget_prefixes()
    assert draft.open(3, Sequence(40, (), 1000), prompt, SamplingParams()) == 32, "what running requests hold is known still"
    for number in (1, 2, 3):
        draft.close(number)
    draft.forget_prefixes()
    assert draft.open(4, Sequence(40, (), 1000), prompt, SamplingParams()) == 0


def test_a_request_without_memory_gets_no_candidates_and_takes_none(model: StageModel) -> None:
    draft, tree = DraftModel(model, slots=32), PredictionTree(block=4)
    draft.open(0, Sequence(20, (), 1000), list(range(20)), SamplingParams())
    draft.expand([], {0: list(range(20))})
    assert draft.open(1, Sequence(3, (), 1000), [7, 8, 9], SamplingParams()) == 3, "nothing is to be computed"
    tree.reset(3)
    tree.plant(5)
    (candidates,) = draft.expand([DraftRows(1, 0, tree, [0], 4)], {})
    assert candidates.token_ids.shape == candidates.log_probs.shape == (1, 0)
    draft.advance(1, 0, tree.advance([6]).changes)
    draft.threads_changed(1)
    draft.close(1)
    assert (draft.num_lanes, draft.used_slots) == (1, 32)
