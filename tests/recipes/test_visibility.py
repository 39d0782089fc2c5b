"""Answers as tensors for training."""

from __future__ import annotations

import pytest
import torch
from support.toy_dialects import IDS, ids, sequence_of, toy

from pipedec.threads import replay
from recipes.thread_models.rows import IGNORED, tree_row, visibility

PASTA = 'a <promise : 20 "/> <async> x y </async> <promise : 2 "/> <async> z </async> b <sync/> c <|end|>'


def test_a_written_answer_is_read_back() -> None:
    sequence = sequence_of(toy("pasta"), prompt_length=2)
    replay(sequence, ids(PASTA))
    assert sequence.finished == "stop"
    assert [token.token_id for token in sequence.document()] == ids(PASTA)
    flat = tree_row(sequence, (7, 8))
    assert flat.token_ids.tolist() == [7, 8, *ids(PASTA)]
    assert flat.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 27, 28, 29, 30, 31, 32, 33, 33, 34, 35, 36]
    targets = {2: "<promise", 6: "<promise", 7: "x", 9: "</async>", 10: None, 14: "b", 15: "z", 17: None, 19: "c", 21: None}
    assert {place: flat.targets[place].item() for place in targets} == {
        place: IGNORED if text is None else IDS[text] for place, text in targets.items()
    }
    assert flat.targets[:2].tolist() == [IGNORED, IDS["a"]]
    assert IDS["<async>"] not in flat.targets.tolist()


def test_bodies_are_seen_from_their_join_on() -> None:
    sequence = sequence_of(toy("pasta"), prompt_length=0)
    replay(sequence, ids(PASTA))
    mask = visibility(sequence)
    first, second, sync = range(5, 9), range(13, 16), 17
    assert not mask[16, first].any() and not mask[16, second].any()
    assert mask[sync, first].all() and mask[sync, second].all()
    assert mask[second, 1:5].all() and not mask[second][:, first].any(), "an earlier promise, not its body"
    assert not mask.triu(1).any()
    assert mask.diagonal().all()


def test_all_see_the_prompt_and_an_answer_of_one_thread_is_causal() -> None:
    sequence = sequence_of(toy("apar"), prompt_length=3)
    replay(sequence, ids("a b <|end|>"))
    flat = tree_row(sequence, (7, 8, 9))
    assert torch.equal(flat.mask, torch.ones(6, 6, dtype=torch.bool).tril())
    assert flat.targets.tolist() == [IGNORED, IGNORED, *ids("a b <|end|>"), IGNORED]
    empty = tree_row(sequence_of(toy("apar"), prompt_length=2), (1, 2))
    assert empty.targets.tolist() == [IGNORED, IGNORED] and empty.mask.shape == (2, 2)
    with pytest.raises(ValueError, match="the prompt has 2 tokens, but the sequence expects 3"):
        tree_row(sequence_of(toy("apar"), prompt_length=3), (1, 2))
