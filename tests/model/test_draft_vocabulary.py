"""The tokens that a draft knows: what is written is read again, and damaged files are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipedec.core.errors import UserError
from pipedec.model import DraftVocabulary


def test_tokens_are_mapped_there_and_back(tmp_path: Path) -> None:
    assert DraftVocabulary.load(tmp_path) is None, "such a draft knows all tokens"
    vocabulary = DraftVocabulary.create(torch.tensor([7, 2, 5]), 9, "abc")
    assert vocabulary.tokens.tolist() == [-1, 7, 2, 5]
    assert vocabulary.draft_ids.tolist() == [0, 0, 2, 0, 0, 3, 0, 1, 0]
    vocabulary.save(tmp_path)
    found = DraftVocabulary.load(tmp_path)
    assert found is not None and found.of == "abc"
    assert torch.equal(found.tokens, vocabulary.tokens) and torch.equal(found.draft_ids, vocabulary.draft_ids)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UserError, match="is damaged"):
        DraftVocabulary.load(tmp_path)


@pytest.mark.failure_case("M15")
def test_embeddings_of_target_and_draft_may_be_padded_to_different_numbers(tmp_path: Path) -> None:
    assert DraftVocabulary.between(tmp_path, 9, 9) is None
    fewer, more = DraftVocabulary.between(tmp_path, 3, 5), DraftVocabulary.between(tmp_path, 5, 3)
    assert fewer is not None and more is not None
    assert (fewer.tokens.tolist(), fewer.draft_ids.tolist()) == ([0, 1, 2], [0, 1, 2, 2, 2])
    assert (more.tokens.tolist(), more.draft_ids.tolist()) == ([0, 1, 2, -1, -1], [0, 1, 2])
    DraftVocabulary.create(torch.tensor([7, 2, 5]), 9, "abc").save(tmp_path)
    fewer, more = DraftVocabulary.between(tmp_path, 4, 11), DraftVocabulary.between(tmp_path, 4, 7)
    assert fewer is not None and more is not None
    assert (fewer.tokens.tolist(), fewer.draft_ids.tolist()) == ([-1, 7, 2, 5], [0, 0, 2, 0, 0, 3, 0, 1, 0, 0, 0])
    assert (more.tokens.tolist(), more.draft_ids.tolist()) == ([-1, -1, 2, 5], [0, 0, 2, 0, 0, 3, 0])


@pytest.mark.parametrize("tokens", [[1, 1], [9], [-1, 2]])
def test_tokens_must_be_the_targets(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="different, and below 9"):
        DraftVocabulary.create(torch.tensor(tokens), 9, "abc")
