"""The recorded drafter against the draft model itself, and the trie that it answers from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from support.checkpoints import save_tiny_llama

from benchmarks.policy.recording import PROMPT, DraftMemo, RecordedDrafter
from pipedec.core import SamplingParams, UserError
from pipedec.decoding import Drafter
from pipedec.drafting import DraftModel
from pipedec.model import StageModel
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, PredictionTree

PROMPT_IDS = [1, 9, 30, 4, 51, 17, 8]
VOCAB = 64
TOKENS = 3  # so few that contexts are met again
RECORDED = 6  # children


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    path = tmp_path_factory.mktemp("draft")
    save_tiny_llama(path, layers=2, vocab=VOCAB, dtype=torch.float64)
    return StageModel.load(path, range(2), torch.float64, "cpu")


class Forwards:
    """Loads a draft model and counts the rows of its forwards."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self.rows: list[int] = []

    def load(self) -> Drafter:
        forwards = self

        class Counted(DraftModel):
            def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, object]) -> list[Candidates]:
                if requested:
                    forwards.rows.append(sum(len(entry.rows) for entry in requested))
                return super().expand(requested, prompts)

        return Counted(self._model)


def begin(drafter: Drafter) -> None:
    cached = drafter.open(0, ThreadSequence(len(PROMPT_IDS), (), 1000), PROMPT_IDS, SamplingParams())
    for token in PROMPT_IDS[cached:]:
        drafter.expand([], {0: [token]})


def expand(drafter: Drafter, tree: PredictionTree, rows: torch.Tensor, children: int) -> Candidates:
    return drafter.expand([DraftRows(0, 0, tree, rows.tolist(), children)], {})[0]


def planted(*tokens: int) -> PredictionTree:
    """A tree that is a chain of ``tokens``."""
    tree = PredictionTree()
    tree.reset(len(PROMPT_IDS))
    tree.append(torch.tensor(tokens), torch.arange(len(tokens)) - 1)
    return tree


def grow(data: st.DataObject, tree: PredictionTree) -> None:
    """Up to 4 new rows of any depth, children of a row all different."""
    if not tree.num_rows:
        tree.plant(data.draw(st.integers(0, TOKENS - 1)))
    for _ in range(data.draw(st.integers(0, 4))):
        parent, token = data.draw(st.integers(0, tree.num_rows - 1)), data.draw(st.integers(0, TOKENS - 1))
        if tree.child(parent, token) is None:
            tree.append(torch.tensor([token]), torch.tensor([parent]))


def draftable(data: st.DataObject, tree: PredictionTree, is_drafted: torch.Tensor) -> torch.Tensor:
    """Some rows that were not drafted, each after its parent."""
    rows: list[int] = []
    for row, parent in enumerate(tree.parents.tolist()):
        is_ready = parent < 0 or bool(is_drafted[parent]) or parent in rows
        if not is_drafted[row] and is_ready and data.draw(st.booleans()):
            rows.append(row)
    return torch.tensor(rows, dtype=torch.int64)


def some_request(data: st.DataObject, recorded: RecordedDrafter, expected: DraftModel) -> None:
    """Any growth, drafting, pruning and verdicts; both drafters must say the same all along."""
    tree, is_drafted = PredictionTree(block=4), torch.zeros(0, dtype=torch.bool)
    tree.reset(len(PROMPT_IDS))
    begin(recorded)
    begin(expected)
    for _ in range(data.draw(st.integers(1, 4))):
        grow(data, tree)
        is_drafted = torch.nn.functional.pad(is_drafted, (0, tree.num_rows - len(is_drafted)))
        rows = draftable(data, tree, is_drafted)
        if len(rows):
            children = data.draw(st.integers(1, RECORDED))
            same(expand(recorded, tree, rows, children), expand(expected, tree, rows, children))
            is_drafted[rows] = True
        tokens = walk(data, tree) if data.draw(st.booleans()) else None
        advance = (
            tree.keep(torch.arange(tree.num_rows)[: data.draw(st.integers(1, 2))]) if tokens is None else tree.advance(tokens)
        )
        is_drafted = is_drafted[advance.kept]
        recorded.advance(0, 0, advance.changes)
        expected.advance(0, 0, advance.changes)
    recorded.close(0)


def walk(data: st.DataObject, tree: PredictionTree) -> list[int]:
    """A path from the root to any row, and one token more."""
    row = data.draw(st.integers(0, tree.num_rows - 1))
    path = torch.nonzero(tree.tree_mask[row])[1:, 0]
    return [*tree.token_ids[path].tolist(), data.draw(st.integers(0, TOKENS - 1))]


def same(found: Candidates, expected: Candidates) -> None:
    assert found.rows.tolist() == expected.rows.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.allclose(found.log_probs.double(), expected.log_probs.double(), rtol=0, atol=1e-5)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_says_what_the_draft_model_says_whatever_is_recorded(model: StageModel, data: st.DataObject) -> None:
    """Several requests after one prompt share a memo, so that each finds some of its contexts in it, anywhere in the tree."""
    memo, draft = DraftMemo(), DraftModel(model)
    for _ in range(3):
        most = data.draw(st.integers(RECORDED, RECORDED + 2))
        some_request(data, RecordedDrafter(lambda _: memo, lambda: draft, most), DraftModel(model))


def test_tells_which_tokens_of_the_answer_this_request_had_asked_for(model: StageModel) -> None:
    memo, forwards = DraftMemo(), Forwards(model)
    drafter = RecordedDrafter(lambda _: memo, forwards.load, RECORDED)
    begin(drafter)
    likeliest = expand(drafter, planted(5), torch.tensor([0]), 3).token_ids[0].tolist()
    other = next(token for token in range(VOCAB) if token not in likeliest)
    for token, is_proposed in ((likeliest[0], True), (likeliest[2], True), (other, False)):
        assert drafter.proposed(0, [5, token, 1]) == [False, is_proposed, False]
    fewer = RecordedDrafter(lambda _: memo, forwards.load, RECORDED)
    begin(fewer)
    assert fewer.proposed(0, [5, likeliest[2]]) == [False, False], "recorded, but not requested"
    expand(fewer, planted(5), torch.tensor([0]), 2)
    assert fewer.proposed(0, [5, likeliest[2]]) == [False, False]


def test_what_is_saved_is_found_again(model: StageModel, tmp_path: Path) -> None:
    path, memo, forwards = tmp_path / "draft.safetensors", DraftMemo(), Forwards(model)
    drafter = RecordedDrafter(lambda _: memo, forwards.load, RECORDED)
    begin(drafter)
    said = expand(drafter, planted(5, 6), torch.tensor([0, 1]), 4)
    assert memo.has_changed
    memo.save(path)
    assert not memo.has_changed
    loaded = DraftMemo.load(path)
    again = RecordedDrafter(lambda _: loaded, forwards.load, RECORDED)
    begin(again)
    tree, expected = planted(5, 6, 7), DraftModel(model)
    begin(expected)
    same(expand(again, tree, torch.tensor([0, 1]), 4), said)
    assert forwards.rows == [2], "a context is drafted once"
    same(expand(expected, tree, torch.tensor([0, 1]), 4), said)
    same(expand(again, tree, torch.tensor([2]), 4), expand(expected, tree, torch.tensor([2]), 4))
    assert forwards.rows == [2, 3], "contexts that were loaded can be continued: with ancestors that the memo answered"
    assert loaded.continued(PROMPT, 5) == memo.continued(PROMPT, 5) == 0 and loaded.continued(PROMPT, 6) == 3


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"
    assert not DraftMemo.load(path).knows(0, 1), "no file, no contexts"
    scalars = save({name: torch.tensor(1) for name in ("parents", "tokens", "asked", "token_ids", "log_probs")})
    for damaged in (b"nothing", scalars):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*draft.safetensors: .*; remove the file"):
            DraftMemo.load(path)
