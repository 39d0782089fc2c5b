"""The draft model on the trees of several threads: as for one tree, and as one forward of transformers per path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.checkpoints import save_tiny
from support.toy_dialects import TEXTS, ids, sequence_of, toy
from torch import Tensor
from transformers import PreTrainedModel

from pipedec.core import Accepted, SamplingParams, Verdict
from pipedec.drafting import DraftModel
from pipedec.model import LaneRows, StageModel
from pipedec.sampling import Sampler
from pipedec.threads import Sequence
from pipedec.tree import Candidates, DraftRows, PredictionTree, ThreadedForest

PROMPT = [30, 41, 28, 50, 33]
VOCAB = len(TEXTS)
GREEDY = SamplingParams()


class Model:
    """The same draft twice: ours and transformers'."""

    def __init__(self, path: Path, family: str) -> None:
        window = {"sliding_window": 6} if family == "mistral" else {}
        self.theirs: PreTrainedModel = save_tiny(family, path, layers=2, vocab=VOCAB, dtype=torch.float64, **window)
        stage = StageModel.load(path, range(2), torch.float64, "cpu")
        compute = stage.forward

        def forward(inputs: Tensor, lanes: Iterable[LaneRows]) -> Tensor:
            [lane] = lanes
            self.cache = lane.cache  # of the latest draft
            return compute(inputs, [lane])

        stage.forward = forward  # type: ignore[method-assign,assignment]
        self._stage = stage

    def begun(self, sequence: Sequence, sampling: SamplingParams) -> DraftModel:
        draft = DraftModel(self._stage)
        draft.open(0, sequence, PROMPT, sampling)
        draft.expand([], {0: PROMPT})
        return draft

    @torch.inference_mode()
    def log_probs(self, path: str) -> Tensor:
        """[V] after the prompt and a path without gaps."""
        log_probs: Tensor = self.theirs(torch.tensor([[*PROMPT, *ids(path)]])).logits[0, -1].log_softmax(-1)
        return log_probs

    def check(self, candidates: Candidates, paths: list[str]) -> None:
        """They are the likeliest after the prompt and each of ``paths``, which stand without gaps."""
        for line, path in enumerate(paths):
            best = self.log_probs(path).topk(candidates.token_ids.shape[1])
            assert candidates.token_ids[line].tolist() == best.indices.tolist(), path
            assert torch.allclose(candidates.log_probs[line], best.values, rtol=0, atol=1e-9)
        assert len(candidates.rows) == len(paths)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("draft"), request.param)


class Draft:
    """A draft beside the forest that its owner replays."""

    def __init__(self, model: Model, dialect: str, sampling: SamplingParams = GREEDY) -> None:
        self._model = model
        self.forest = ThreadedForest(sequence_of(toy(dialect), len(PROMPT)))
        self.draft = model.begun(self.forest.sequence, sampling)

    def accept(self, **texts: str) -> None:
        """As a method does: trees are advanced, then the draft, then it is told what became of the threads."""
        before = {number: tree.num_rows for number, tree in self.forest.trees.items()}
        copies = {number: _copy(tree) for number, tree in self.forest.trees.items()}
        _, changes, _ = self.forest.advance(
            Verdict(tuple(Accepted(int(name[1:]), tuple(ids(text))) for name, text in texts.items()))
        )
        for number, tokens in changes.accepted.items():
            self.draft.advance(0, number, copies[number].advance(tokens).changes)
        for number in changes.remaining:
            if number in before and copies[number].num_rows > self.forest.trees[number].num_rows:
                kept = torch.arange(self.forest.trees[number].num_rows)
                self.draft.advance(0, number, copies[number].keep(kept).changes)
        if changes.affects_threads:
            self.draft.threads_changed(0)

    def enter(self, *rows: tuple[str, int, int]) -> None:
        texts, parents, threads = zip(*rows, strict=True)
        self.forest.append(torch.tensor(ids(" ".join(texts))), torch.tensor(parents), torch.tensor(threads))

    def check(self, asked: dict[int, list[int]], *paths: str) -> None:
        """Draft rows of some threads in one forward."""
        asks = [DraftRows(0, number, self.forest.trees[number], rows, 3) for number, rows in asked.items()]
        found = self.draft.expand(asks, {})
        left = list(paths)
        for candidates, rows in zip(found, asked.values(), strict=True):
            self._model.check(candidates, [left.pop(0) for _ in rows])


def _copy(tree: PredictionTree) -> PredictionTree:
    copy = PredictionTree()
    copy.reset(tree.root_position)
    copy.append(tree.token_ids, tree.parents)
    return copy


def test_rows_of_two_threads_in_one_forward(model: Model) -> None:
    draft = Draft(model, "apar")
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


def test_accepted_rows_that_were_never_drafted_are_a_chain_of_their_thread(model: Model) -> None:
    draft = Draft(model, "apar")
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


def test_a_child_drafts_on_when_its_parent_has_ended(model: Model) -> None:
    """The parent's tokens behind the opener are forgotten, those before it are not."""
    draft = Draft(model, "apar")
    draft.accept(t0="a")
    draft.enter(("a", -1, 0))
    draft.accept(t0="[Fork]")
    draft.enter(("[Fork]", -1, 0), ("[Child]", -1, 1))
    draft.check({0: [0], 1: [0]}, "a [Fork]", "a [Fork] [Child]")
    draft.accept(t0="b", t1="x")
    draft.enter(("b", -1, 0), ("x", -1, 1))
    draft.check({0: [0], 1: [0]}, "a [Fork] b", "a [Fork] [Child] x")
    draft.accept(t0="<|end|>", t1="y")
    assert model.cache.past_length == len(PROMPT) + 4, "a [Fork] [Child] x"
    draft.enter(("y", -1, 1))
    draft.check({1: [0]}, "a [Fork] [Child] x y")


@pytest.mark.parametrize(
    ("dialect", "opener", "child"), [("apar", "[Fork]", "[Child]"), ("pasta", '<promise : 20 "/>', "<async>")]
)
def test_of_tokens_that_are_sampled_it_knows_the_noise_of_their_thread(
    model: Model, dialect: str, opener: str, child: str
) -> None:
    """Also after positions that are left empty: noise belongs to a position."""
    for seed in range(8):
        draft = Draft(model, dialect, sampling := SamplingParams(2.0, seed=seed))
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
            drawn = sampler.choose(model.log_probs(path)[None], torch.tensor([thread.next_position]), *nothing)
            assert candidates.token_ids[0, 0] == drawn
