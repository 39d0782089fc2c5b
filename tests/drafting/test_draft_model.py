"""The draft model on trees of many requests and threads against one forward of transformers per path."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny
from support.examples import examples
from support.toy_dialects import CONTROL, ids, sequence_of, toy
from support.toy_structures import ToyStructure
from torch import Tensor
from transformers import PreTrainedModel

from pipedec.core.sampling import SamplingParams
from pipedec.core.verdict import Accepted, Verdict
from pipedec.drafting import DraftModel
from pipedec.model import DraftVocabulary, KVCache, StageModel
from pipedec.sampling import Sampler
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, DraftRows, PredictionTree, ThreadedForest

PROMPT = [1, 9, 30, 4, 51, 17, 8]
VOCAB = 64
SEQUENCE = Sequence(len(PROMPT), (), 1000)


@dataclass
class Pair:
    """The same draft twice: ours and transformers'."""

    ours: StageModel
    theirs: PreTrainedModel

    def log_probs(self, path: Iterable[int], prompt: Iterable[int] = PROMPT) -> Tensor:
        """[V] after the prompt and a path of tokens."""
        with torch.inference_mode():
            return self.theirs(torch.tensor([[*prompt, *path]])).logits[0, -1].log_softmax(-1)


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
    draft.open_lane(0, SEQUENCE, PROMPT, SamplingParams())
    draft.expand([], {0: PROMPT[:3]})
    draft.expand([], {0: PROMPT[3:]})
    tree.reset(len(PROMPT))
    return draft, tree


def expand(draft: DraftModel, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
    return draft.expand([DraftRows(0, 0, tree, rows.tolist(), children)], {})[0]


def check(pair: Pair, candidates: Candidates, rows: list[int], paths: list[Any], children: int, prompt: Any = PROMPT) -> None:
    """They are the likeliest after the prompt and the path of each row."""
    assert candidates.rows.tolist() == rows
    assert candidates.token_ids.shape == candidates.log_probs.shape == (len(rows), children)
    for line, row in enumerate(rows):
        best = pair.log_probs(paths[row], prompt).topk(children)
        assert candidates.token_ids[line].tolist() == best.indices.tolist()
        assert torch.allclose(candidates.log_probs[line], best.values, rtol=0, atol=1e-9)


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
    draft.follow_tree(0, 0, tree.advance_to([4, 5]).changes)  # commits the rows of 3 and 4, which were drafted
    draft.follow_tree(0, 0, tree.advance_to([6]).changes)  # commits the row of 5, which was not
    draft.follow_tree(0, 0, tree.advance_to([7]).changes)  # and that of 6
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
    grammar.consume((root,))
    draft, tree = DraftModel(pair.ours), PredictionTree()
    draft.open_lane(0, Sequence(len(PROMPT), (), 1000, grammar), PROMPT, SamplingParams())  # type: ignore[arg-type]
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
    grammar.consume((9,))
    for seed, structure in itertools.product(range(4), (None, grammar)):
        sampling = SamplingParams(1.5, seed=seed)
        draft, tree = DraftModel(pair.ours), PredictionTree()
        draft.open_lane(0, Sequence(len(PROMPT), (), 1000, structure), PROMPT, sampling)  # type: ignore[arg-type]
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
    known.open_lane(0, SEQUENCE, prompt, SamplingParams())
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
    grammar.consume((9,))
    draft, tree = DraftModel(pair.ours, vocabulary=vocabulary), PredictionTree()
    draft.open_lane(0, Sequence(len(PROMPT), (), 1000, grammar), PROMPT, SamplingParams())  # type: ignore[arg-type]
    draft.expand([], {0: PROMPT})
    tree.reset(len(PROMPT))
    tree.plant(9)
    assert bool(expand(draft, tree, torch.tensor([0]), 3).log_probs.isneginf().all())


TEXT = range(len(CONTROL), VOCAB)


@dataclass
class Running:
    """A request whose tree grows at random, and what is to be drafted of it. In company every other one could open threads."""

    number: int
    prompt: list[int]
    chooser: random.Random
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
        self.sequence = Sequence(len(self.prompt), (), 1000)
        if self.number % 2:
            self.sequence = sequence_of(toy("apar"), len(self.prompt))
        self.entered = company.open_lane(self.number, self.sequence, self.prompt, SamplingParams())
        self.plant()

    def plant(self) -> None:
        if self.entered == len(self.prompt):
            self.tree.reset(len(self.prompt))
            self.tree.plant(self.chooser.choice(TEXT))
            self.sequence.accept_token(0, int(self.tree.token_ids[0]))

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

    def verdict(self, draft: DraftModel) -> None:
        row = self.chooser.randrange(self.tree.num_rows)
        path = torch.nonzero(self.tree.tree_mask[row])[:, 0]
        if self.chooser.random() < 0.2:
            self._follow(draft, self.tree.keep(path))
            return
        tokens = [*self.tree.token_ids[path[1:]].tolist(), self.chooser.choice(TEXT)]
        for token in tokens:
            self.sequence.accept_token(0, token)
        self._follow(draft, self.tree.advance_to(tokens))
        if not self.tree.num_rows:
            self.tree.plant(tokens[-1])

    def _follow(self, draft: DraftModel, advance: Advance) -> None:
        draft.follow_tree(self.number, 0, advance.changes)
        _, kept = advance.renumber(torch.tensor(sorted(self.drafted), dtype=torch.int64))
        self.drafted = set(kept.tolist())

    def check(self, pair: Pair, entry: DraftRows, candidates: Candidates) -> None:
        said = self.sequence.main.token_ids[:-1]
        paths = [[*said, *self.tree.tokens_of(self.tree.ancestors_of(row)[::-1])] for row in range(self.tree.num_rows)]
        check(pair, candidates, list(entry.rows), paths, entry.children, self.prompt)


def prompts_of(chooser: random.Random) -> list[int]:
    """Many begin with the same tokens."""
    common = list(range(chooser.choice((0, 3, 11))))
    return [*common, *(chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 9)))]


@examples(25)
@given(st.integers(0, 2**32), st.sampled_from((40, 1100, 8192)), st.sampled_from((1, 4, 16)))
def test_candidates_in_company_are_those_of_one_forward_per_path(pair: Pair, seed: int, slots: int, block: int) -> None:
    """Requests come and go; chunks of some prompts are in the forward that drafts rows of others; prefixes are shared. Whatever
    rows are drafted, in whatever order, and whatever becomes of them, drafted or not.

    A request for which there is no memory gets no candidates, from then on.
    """
    chooser, company = random.Random(seed), DraftModel(pair.ours, slots, block)
    running: list[Running] = []
    without: set[int] = set()
    for number in range(30):
        if chooser.random() < 0.4 and len(running) < 5:
            one = Running(number, prompts_of(chooser), chooser)
            one.begin(company)
            running.append(one)
        prompts = {one.number: one.chunk() for one in running if one.entered < len(one.prompt)}
        requested = [rows for one in running if one.number not in prompts and (rows := one.rows()) is not None]
        if prompts or requested:
            found = company.expand(requested, prompts)
            by_number = {one.number: one for one in running}
            for entry, candidates in zip(requested, found, strict=True):
                if candidates.token_ids.numel():
                    assert entry.number not in without
                    by_number[entry.number].check(pair, entry, candidates)
                else:
                    without.add(entry.number)
                    assert candidates.rows.tolist() == list(entry.rows)
        for one in [one for one in running if one.number not in prompts]:
            if chooser.random() < 0.5:
                one.verdict(company)
            elif chooser.random() < 0.2:
                company.close_lane(one.number)
                running.remove(one)
        assert company.num_lanes <= len(running)
    assert not without or slots < 8192
    for one in running:
        company.close_lane(one.number)
    assert (company.num_lanes, company.used_slots) == (0, 0)


def test_a_prompt_that_is_known_is_not_computed_again(pair: Pair) -> None:
    draft, prompt = DraftModel(pair.ours), list(range(40))
    draft.open_lane(0, Sequence(40, (), 1000), prompt, SamplingParams())
    draft.expand([], {0: prompt[:35]})
    assert draft.open_lane(1, Sequence(40, (), 1000), prompt, SamplingParams()) == 32
    draft.expand([], {0: prompt[35:]})
    draft.close_lane(0)
    assert draft.open_lane(2, Sequence(42, (), 1000), [*prompt, 1, 2], SamplingParams()) == 40
    draft.forget_prefixes()
    assert draft.open_lane(3, Sequence(40, (), 1000), prompt, SamplingParams()) == 32, "what running requests hold is known still"
    for number in (1, 2, 3):
        draft.close_lane(number)
    draft.forget_prefixes()
    assert draft.open_lane(4, Sequence(40, (), 1000), prompt, SamplingParams()) == 0


def test_a_request_without_memory_gets_no_candidates_and_takes_none(pair: Pair) -> None:
    draft, tree = DraftModel(pair.ours, slots=32), PredictionTree(block=4)
    draft.open_lane(0, Sequence(20, (), 1000), list(range(20)), SamplingParams())
    draft.expand([], {0: list(range(20))})
    assert draft.open_lane(1, Sequence(3, (), 1000), [7, 8, 9], SamplingParams()) == 3, "nothing is to be computed"
    tree.reset(3)
    tree.plant(5)
    (candidates,) = draft.expand([DraftRows(1, 0, tree, [0], 4)], {})
    assert candidates.token_ids.shape == candidates.log_probs.shape == (1, 0)
    draft.follow_tree(1, 0, tree.advance_to([6]).changes)
    draft.threads_changed(1)
    draft.close_lane(1)
    assert (draft.num_lanes, draft.used_slots) == (1, 32)


GREEDY = SamplingParams()


class Draft:
    """A draft beside the forest that its owner replays."""

    def __init__(self, pair: Pair, dialect: str, sampling: SamplingParams = GREEDY) -> None:
        self._pair = pair
        self.forest = ThreadedForest(sequence_of(toy(dialect), len(PROMPT)))
        self.draft = DraftModel(pair.ours)
        self.draft.open_lane(0, self.forest.sequence, PROMPT, sampling)
        self.draft.expand([], {0: PROMPT})

    def accept(self, **texts: str) -> None:
        """As a method does: trees are advanced, then the draft, then it is told what became of the threads."""
        before = {number: tree.num_rows for number, tree in self.forest.trees.items()}
        copies = {number: _copy(tree) for number, tree in self.forest.trees.items()}
        _, changes, _ = self.forest.replay(
            Verdict(tuple(Accepted(int(name[1:]), tuple(ids(text))) for name, text in texts.items()))
        )
        for number, tokens in changes.accepted.items():
            self.draft.follow_tree(0, number, copies[number].advance_to(tokens).changes)
        for number in changes.remaining:
            if number in before and copies[number].num_rows > self.forest.trees[number].num_rows:
                kept = torch.arange(self.forest.trees[number].num_rows)
                self.draft.follow_tree(0, number, copies[number].keep(kept).changes)
        if changes.affects_threads:
            self.draft.threads_changed(0)

    def enter(self, *rows: tuple[str, int, int]) -> None:
        texts, parents, threads = zip(*rows, strict=True)
        self.forest.append(torch.tensor(ids(" ".join(texts))), torch.tensor(parents), torch.tensor(threads))

    def check(self, asked: dict[int, list[int]], *paths: str) -> None:
        """Draft rows of some threads in one forward."""
        asks = [DraftRows(0, number, self.forest.trees[number], rows, 3) for number, rows in asked.items()]
        found = self.draft.expand(asks, {})
        left = iter(paths)
        for candidates, rows in zip(found, asked.values(), strict=True):
            check(self._pair, candidates, rows, {row: ids(next(left)) for row in rows}, 3)


def _copy(tree: PredictionTree) -> PredictionTree:
    copy = PredictionTree()
    copy.reset(tree.root_position)
    copy.append(tree.token_ids, tree.parents)
    return copy


def test_rows_of_two_threads_in_one_forward(pair: Pair) -> None:
    draft = Draft(pair, "apar")
    draft.accept(t0="a")
    draft.enter(("a", -1, 0), ("b", 0, 0))
    draft.check({0: [0, 1]}, "a", "a b")
    draft.accept(t0="b [Fork]")
    draft.enter(("[Fork]", -1, 0), ("[Child]", -1, 1), ("c", 0, 0), ("x", 0, 1), ("y", 1, 1))
    draft.check({0: [0], 1: [0, 1]}, "a b [Fork]", "a b [Fork] [Child]", "a b [Fork] [Child] x")
    draft.check({0: [1], 1: [2]}, "a b [Fork] c", "a b [Fork] [Child] x y")
    draft.accept(t0="c d", t1="x z")
    draft.enter(("d", -1, 0), ("z", -1, 1))
    draft.check({0: [0], 1: [0]}, "a b [Fork] c d", "a b [Fork] [Child] x z")


def test_accepted_rows_that_were_never_drafted_are_a_chain_of_their_thread(pair: Pair) -> None:
    draft = Draft(pair, "apar")
    draft.accept(t0="a")
    draft.enter(("a", -1, 0))
    draft.accept(t0="[Fork]")
    draft.enter(("[Fork]", -1, 0), ("[Child]", -1, 1))
    draft.accept(t0="b", t1="x")
    draft.enter(("b", -1, 0), ("x", -1, 1))
    draft.accept(t0="c", t1="y")
    draft.enter(("c", -1, 0), ("y", -1, 1), ("z", 0, 1))
    draft.check({1: [0, 1]}, "a [Fork] [Child] x y", "a [Fork] [Child] x y z")
    draft.check({0: [0]}, "a [Fork] b c")


def test_a_child_drafts_on_when_its_parent_has_ended(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's tokens behind the opener are forgotten, those before it are not."""
    caches, forward = list[KVCache](), pair.ours.forward
    monkeypatch.setattr(pair.ours, "forward", lambda ids, lanes: caches.append(lanes[0].cache) or forward(ids, lanes))
    draft = Draft(pair, "apar")
    draft.accept(t0="a")
    draft.enter(("a", -1, 0))
    draft.accept(t0="[Fork]")
    draft.enter(("[Fork]", -1, 0), ("[Child]", -1, 1))
    draft.check({0: [0], 1: [0]}, "a [Fork]", "a [Fork] [Child]")
    draft.accept(t0="b", t1="x")
    draft.enter(("b", -1, 0), ("x", -1, 1))
    draft.check({0: [0], 1: [0]}, "a [Fork] b", "a [Fork] [Child] x")
    draft.accept(t0="<|end|>", t1="y")
    assert caches[-1].past_length == len(PROMPT) + 4, "a [Fork] [Child] x"
    draft.enter(("y", -1, 1))
    draft.check({1: [0]}, "a [Fork] [Child] x y")


@pytest.mark.parametrize(
    ("dialect", "opener", "child"), [("apar", "[Fork]", "[Child]"), ("pasta", '<promise : 20 "/>', "<async>")]
)
def test_of_tokens_that_are_sampled_it_knows_the_noise_of_their_thread(pair: Pair, dialect: str, opener: str, child: str) -> None:
    """Also after positions that are left empty: noise belongs to a position."""
    for seed in range(8):
        draft = Draft(pair, dialect, sampling := SamplingParams(2.0, seed=seed))
        for word in f"a {opener}".split():
            draft.accept(t0=word)
            draft.enter((word, -1, 0))
        draft.enter((child, -1, 1))
        trees, threads = draft.forest.trees, draft.forest.sequence.threads
        assert threads[0].next_position - len(PROMPT) - len(ids(f"a {opener}")) == (20 if dialect == "pasta" else 0)
        found = draft.draft.expand([DraftRows(0, number, trees[number], [0], 3) for number in (0, 1)], {})
        for thread, path, candidates in zip(threads, (f"a {opener}", f"a {opener} {child}"), found, strict=True):
            sampler = Sampler(sampling, VOCAB, stream=thread.noise_stream)
            nothing = torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
            drawn = sampler.choose(pair.log_probs(ids(path))[None], torch.tensor([thread.next_position]), *nothing)
            assert candidates.token_ids[0, 0] == drawn
