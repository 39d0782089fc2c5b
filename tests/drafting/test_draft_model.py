"""The draft model on a tree against one forward of transformers per path."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from checkpoints import save_tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from pipedec.drafting import DraftModel
from pipedec.model import StageModel
from pipedec.tree import Candidates, PredictionTree

PROMPT = [1, 9, 30, 4, 51, 17, 8]
VOCAB = 64


@dataclass
class Pair:
    """The same draft twice: ours and transformers'."""

    ours: StageModel
    theirs: PreTrainedModel

    def log_probs(self, path: tuple[int, ...]) -> Tensor:
        """[V] after the prompt and a path of tokens."""
        with torch.inference_mode():
            return self.theirs(torch.tensor([[*PROMPT, *path]])).logits[0, -1].log_softmax(-1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("draft")
    theirs = save_tiny_llama(path, layers=2, vocab=VOCAB, dtype=torch.float64)
    return Pair(StageModel.load(path, range(2), torch.float64, "cpu"), theirs)


def begun(pair: Pair) -> tuple[DraftModel, PredictionTree]:
    """A draft that has taken in the prompt but its last token, which is the root of the tree."""
    draft, tree = DraftModel(pair.ours), PredictionTree(block=4)
    draft.prefill(torch.tensor(PROMPT[:3]), len(PROMPT))
    draft.prefill(torch.tensor(PROMPT[3:]), len(PROMPT))
    tree.reset(len(PROMPT))
    return draft, tree


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


def check(pair: Pair, candidates: Candidates, paths: list[tuple[int, ...]], drafted: int, children: int) -> None:
    assert candidates.rows.tolist() == list(range(drafted, len(paths)))
    assert candidates.token_ids.shape == candidates.log_probs.shape == (len(paths) - drafted, children)
    for line, row in enumerate(candidates.rows.tolist()):
        best = pair.log_probs(paths[row]).topk(children)
        assert candidates.token_ids[line].tolist() == best.indices.tolist()
        assert torch.allclose(candidates.log_probs[line], best.values, rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_expand_equals_one_forward_per_path(pair: Pair, data: st.DataObject) -> None:
    draft, tree = begun(pair)
    accepted: tuple[int, ...] = ()
    paths: list[tuple[int, ...]] = []
    drafted = 0
    for _ in range(data.draw(st.integers(1, 4))):
        add_random_rows(data, tree, paths, accepted)
        if len(paths) > drafted:
            check(pair, draft.expand(tree, 5), paths, drafted, 5)
            drafted = len(paths)
        if data.draw(st.booleans()):
            walked = data.draw(st.sampled_from(paths))
            token = data.draw(st.integers(0, VOCAB - 1))
            draft.advance(tree.advance([*walked[len(accepted) + 1 :], token]))
            accepted = walked
            paths = [path for path in paths if path[: len(walked) + 1] == (*walked, token)]
            drafted = len(paths)
            if not paths:  # a miss: the token is accepted but has yet to enter
                paths.append((*accepted, token))
                tree.append(torch.tensor([token]), torch.tensor([-1]))


def test_more_children_than_tokens(pair: Pair) -> None:
    draft, tree = begun(pair)
    tree.append(torch.tensor([3]), torch.tensor([-1]))
    candidates = draft.expand(tree, VOCAB + 100)
    assert sorted(candidates.token_ids[0].tolist()) == list(range(VOCAB))
    assert float(candidates.log_probs.exp().sum()) == pytest.approx(1)


def test_begin_forgets_the_last_request(pair: Pair) -> None:
    draft, tree = begun(pair)
    tree.append(torch.tensor([3, 4]), torch.tensor([-1, 0]))
    first = draft.expand(tree, 4)
    draft.begin()
    draft.prefill(torch.tensor(PROMPT), len(PROMPT))
    again = draft.expand(tree, 4)
    assert torch.equal(first.token_ids, again.token_ids)
    assert torch.allclose(first.log_probs, again.log_probs, rtol=0, atol=1e-12)
