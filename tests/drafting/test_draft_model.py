"""The draft model on a tree against one forward of transformers per path."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny
from support.examples import examples
from support.toy_structures import ToyStructure
from torch import Tensor
from transformers import PreTrainedModel

from pipedec.core import SamplingParams
from pipedec.drafting import DraftModel
from pipedec.model import DraftVocabulary, StageModel
from pipedec.sampling import Sampler
from pipedec.threads import Sequence
from pipedec.tree import Candidates, DraftRows, PredictionTree

PROMPT = [1, 9, 30, 4, 51, 17, 8]
VOCAB = 64
SEQUENCE = Sequence(len(PROMPT), (), 1000)


@dataclass
class Pair:
    """The same draft twice: ours and transformers'."""

    ours: StageModel
    theirs: PreTrainedModel

    def log_probs(self, path: tuple[int, ...]) -> Tensor:
        """[V] after the prompt and a path of tokens."""
        with torch.inference_mode():
            return self.theirs(torch.tensor([[*PROMPT, *path]])).logits[0, -1].log_softmax(-1)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Mistral's window is so short that it ends inside the tree."""
    path = tmp_path_factory.mktemp("draft")
    window = {"sliding_window": 4} if request.param == "mistral" else {}
    theirs = save_tiny(request.param, path, layers=2, vocab=VOCAB, dtype=torch.float64, **window)
    return Pair(StageModel.load(path, range(2), torch.float64, "cpu"), theirs)


def begun(pair: Pair) -> tuple[DraftModel, PredictionTree]:
    """A draft that has taken in the prompt but its last token, which is the root of the tree."""
    draft, tree = DraftModel(pair.ours), PredictionTree(block=4)
    draft.open(0, SEQUENCE, PROMPT, SamplingParams())
    draft.expand([], {0: PROMPT[:3]})
    draft.expand([], {0: PROMPT[3:]})
    tree.reset(len(PROMPT))
    return draft, tree


def expand(draft: DraftModel, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
    return draft.expand([DraftRows(0, 0, tree, rows.tolist(), children)], {})[0]


def add_random_rows(data: st.DataObject, tree: PredictionTree, paths: list[tuple[int, ...]], prefix: tuple[int, ...]) -> None:
    """Up to 5 new rows of any depth, behind ``prefix`` (what has been accepted)."""
    if not paths:
        paths.append((*prefix, data.draw(st.integers(0, VOCAB - 1))))
        tree.append(torch.tensor([paths[0][-1]]), torch.tensor([-1]))
    for _ in range(data.draw(st.integers(0, 5))):
        parent = data.draw(st.integers(0, len(paths) - 1))
        path = (*paths[parent], data.draw(st.integers(0, VOCAB - 1)))
        if path not in paths:
            tree.append(torch.tensor([path[-1]]), torch.tensor([parent]))
            paths.append(path)


def check(pair: Pair, candidates: Candidates, rows: list[int], paths: list[tuple[int, ...]], children: int) -> None:
    assert candidates.rows.tolist() == rows
    assert candidates.token_ids.shape == candidates.log_probs.shape == (len(rows), children)
    for line, row in enumerate(rows):
        best = pair.log_probs(paths[row]).topk(children)
        assert candidates.token_ids[line].tolist() == best.indices.tolist()
        assert torch.allclose(candidates.log_probs[line], best.values, rtol=0, atol=1e-9)


def some_rows(data: st.DataObject, tree: PredictionTree, done: set[int]) -> list[int]:
    """Rows that may come next: not in ``done``, every parent there or among them."""
    rows: list[int] = []
    for row, parent in enumerate(tree.parents.tolist()):
        if row not in done and (parent < 0 or parent in done or parent in rows) and data.draw(st.booleans()):
            rows.append(row)
    return rows


@examples(25)
@given(st.data())
def test_expand_equals_one_forward_per_path(pair: Pair, data: st.DataObject) -> None:
    """Whatever rows are drafted, in whatever order, and whatever becomes of them, drafted or not."""
    draft, tree = begun(pair)
    accepted: tuple[int, ...] = ()
    paths: list[tuple[int, ...]] = []
    drafted: set[tuple[int, ...]] = set()
    for _ in range(data.draw(st.integers(1, 5))):
        add_random_rows(data, tree, paths, accepted)
        for _ in range(data.draw(st.integers(0, 2))):
            rows = some_rows(data, tree, {row for row, path in enumerate(paths) if path in drafted})
            if rows:
                check(pair, expand(draft, tree, torch.tensor(rows), 5), rows, paths, 5)
                drafted |= {paths[row] for row in rows}
        if data.draw(st.booleans()):
            kept = sorted({0, *some_rows(data, tree, set())})
            kept = [row for row in kept if row == 0 or int(tree.parents[row]) in kept]
            draft.advance(0, 0, tree.keep(torch.tensor(kept)).changes)
            paths = [paths[row] for row in kept]
        if data.draw(st.booleans()):
            walked = data.draw(st.sampled_from(paths))
            token = data.draw(st.integers(0, VOCAB - 1))
            draft.advance(0, 0, tree.advance([*walked[len(accepted) + 1 :], token]).changes)
            accepted = walked
            paths = [path for path in paths if path[: len(walked) + 1] == (*walked, token)]
        drafted &= set(paths)
    if not paths:
        add_random_rows(data, tree, paths, accepted)
    rest = [row for row, path in enumerate(paths) if path not in drafted]
    if rest:
        check(pair, expand(draft, tree, torch.tensor(rest), 5), rest, paths, 5)


def test_accepted_rows_that_were_never_drafted_share_the_next_forward(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, tree = begun(pair)
    tree.append(torch.tensor([3, 4, 5, 6]), torch.tensor([-1, 0, 1, 2]))
    expand(draft, tree, torch.tensor([0, 1]), 2)
    forwards: list[list[int]] = []
    forward = pair.ours.forward

    def counting(token_ids: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        forwards.append(token_ids.tolist())
        return forward(token_ids, *arguments, **keywords)

    monkeypatch.setattr(pair.ours, "forward", counting)
    draft.advance(0, 0, tree.advance([4, 5]).changes)  # commits the rows of 3 and 4, which were drafted
    draft.advance(0, 0, tree.advance([6]).changes)  # commits the row of 5, which was not
    draft.advance(0, 0, tree.advance([7]).changes)  # and that of 6
    assert forwards == []
    tree.append(torch.tensor([7, 8]), torch.tensor([-1, 0]))
    check(pair, expand(draft, tree, torch.tensor([0]), 3), [0], [(3, 4, 5, 6, 7)], 3)
    check(pair, expand(draft, tree, torch.tensor([1]), 3), [1], [(), (3, 4, 5, 6, 7, 8)], 3)
    assert forwards == [[5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0], "drafted twice"),
        ([1, 3], "after their ancestors"),
        ([3], "after their ancestors"),
        ([2, 1], "ascending"),
        ([1, 1], "ascending"),
    ],
)
def test_rows_that_cannot_be_drafted_are_refused(pair: Pair, rows: list[int], message: str) -> None:
    draft, tree = begun(pair)
    tree.append(torch.tensor([3, 4, 5, 6]), torch.tensor([-1, 0, 0, 2]))
    expand(draft, tree, torch.tensor([0]), 2)
    with pytest.raises(ValueError, match=message):
        expand(draft, tree, torch.tensor(rows), 2)
    check(pair, expand(draft, tree, torch.tensor([2, 3]), 4), [2, 3], [(3,), (3, 4), (3, 5), (3, 5, 6)], 4)


def test_more_children_than_tokens(pair: Pair) -> None:
    draft, tree = begun(pair)
    tree.append(torch.tensor([3]), torch.tensor([-1]))
    candidates = expand(draft, tree, torch.tensor([0]), VOCAB + 100)
    assert sorted(candidates.token_ids[0].tolist()) == list(range(VOCAB))
    assert float(candidates.log_probs.exp().sum()) == pytest.approx(1)


def test_with_a_structure_only_what_it_allows_is_a_candidate(pair: Pair) -> None:
    """With the chances that are left to it, also where fewer tokens are allowed than are asked for, and where none is."""
    allowed = {(): {3, 5, 40, 63}, (5,): {7}, (5, 7): set(), (3,): set(range(VOCAB)) - {9}}
    root = 12
    grammar = ToyStructure(lambda said: frozenset({root} if not said else allowed[said[1:]]))
    grammar.advance((root,))
    draft, tree = DraftModel(pair.ours), PredictionTree()
    draft.open(0, Sequence(len(PROMPT), (), 1000, grammar), PROMPT, SamplingParams())  # type: ignore[arg-type]
    draft.expand([], {0: PROMPT})
    tree.reset(len(PROMPT))
    tree.append(torch.tensor([root, 5, 3, 7]), torch.tensor([-1, 0, 0, 1]))
    found = expand(draft, tree, torch.arange(4), 3)
    for line, path in enumerate([(), (5,), (3,), (5, 7)]):
        kept = sorted(allowed[path])
        log_probs = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
        log_probs[kept] = pair.log_probs((root, *path))[kept].log_softmax(-1)
        best = log_probs.topk(3)
        assert torch.allclose(found.log_probs[line], best.values, rtol=0, atol=1e-9)
        possible = found.log_probs[line] > -torch.inf
        assert found.token_ids[line][possible].tolist() == best.indices[possible].tolist()


def test_of_tokens_that_are_sampled_it_knows_the_noise(pair: Pair) -> None:
    """Each is the first candidate if the target computes the same logits, with and without a structure."""

    def rule(said: tuple[int, ...]) -> frozenset[int]:
        return frozenset(token for token in range(VOCAB) if (token + len(said) + 1) % 3)

    grammar = ToyStructure(rule)
    grammar.advance((9,))
    for seed, structure in itertools.product(range(4), (None, grammar)):
        sampling = SamplingParams(1.5, seed=seed)
        draft, tree = DraftModel(pair.ours), PredictionTree()
        draft.open(0, Sequence(len(PROMPT), (), 1000, structure), PROMPT, sampling)  # type: ignore[arg-type]
        draft.expand([], {0: PROMPT})
        tree.reset(len(PROMPT))
        tree.append(torch.tensor([9, 5, 3, 7]), torch.tensor([-1, 0, 0, 1]))
        found = expand(draft, tree, torch.arange(4), 3)
        for line, path in enumerate([(), (5,), (3,), (5, 7)]):
            logits = pair.log_probs((9, *path))
            if structure is not None:
                logits = logits.index_fill(0, torch.tensor(sorted(set(range(VOCAB)) - rule((9, *path)))), -torch.inf)
            position = torch.tensor([len(PROMPT) + 1 + len(path)])
            nothing = torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
            assert found.token_ids[line, 0] == Sampler(sampling, VOCAB).choose(logits[None], position, *nothing)


def test_a_draft_that_knows_few_tokens_proposes_those(pair: Pair) -> None:
    """Its own token 0 stands for all others, and is never proposed."""
    torch.manual_seed(0)
    tokens = torch.randperm(1000)[: VOCAB - 1]
    vocabulary = DraftVocabulary.create(tokens, 1000, "abc")
    known, others = DraftModel(pair.ours, vocabulary=vocabulary), sorted(set(range(1000)) - set(tokens.tolist()))
    prompt = [int(tokens[3]), others[0], int(tokens[50]), others[5]]
    of_draft = [4, 0, 51, 0]
    known.open(0, SEQUENCE, prompt, SamplingParams())
    known.expand([], {0: prompt})
    tree = PredictionTree(block=4)
    tree.reset(len(prompt))
    tree.append(torch.tensor([int(tokens[8])]), torch.tensor([-1]))
    found = expand(known, tree, torch.tensor([0]), VOCAB)
    with torch.inference_mode():
        wanted = pair.theirs(torch.tensor([[*of_draft, 9]])).logits[0, -1].log_softmax(-1)
    assert found.token_ids.shape == (1, VOCAB - 1) and set(found.token_ids[0].tolist()) == set(tokens.tolist())
    torch.testing.assert_close(found.log_probs[0], wanted[vocabulary.draft_ids[found.token_ids[0]]])


def test_where_a_structure_allows_only_unknown_tokens_nothing_is_proposed(pair: Pair) -> None:
    """The target's token 0 is unknown, too: it is not the draft's."""
    vocabulary = DraftVocabulary.create(torch.arange(1, VOCAB), 1000, "abc")
    grammar = ToyStructure(lambda said: frozenset({0} if said else {9}))
    grammar.advance((9,))
    draft, tree = DraftModel(pair.ours, vocabulary=vocabulary), PredictionTree()
    draft.open(0, Sequence(len(PROMPT), (), 1000, grammar), PROMPT, SamplingParams())  # type: ignore[arg-type]
    draft.expand([], {0: PROMPT})
    tree.reset(len(PROMPT))
    tree.plant(9)
    assert bool(expand(draft, tree, torch.tensor([0]), 3).log_probs.isneginf().all())
