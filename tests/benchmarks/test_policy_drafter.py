"""The recorded drafter against the draft model itself, and the trie that it answers from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from support.checkpoints import save_tiny_llama

from benchmarks.policy.recording import PROMPT, DraftMemo, RecordedDrafter
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import Drafter
from pipedec.drafting import DraftModel
from pipedec.model import StageModel
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, PredictionTree

PROMPT_IDS = [1, 9, 30, 4, 51, 17, 8]
VOCAB = 64
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
    cached = drafter.open_lane(0, ThreadSequence(len(PROMPT_IDS), (), 1000), PROMPT_IDS, SamplingParams())
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


def same(found: Candidates, expected: Candidates) -> None:
    assert found.rows.tolist() == expected.rows.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.allclose(found.log_probs.double(), expected.log_probs.double(), rtol=0, atol=1e-5)


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
