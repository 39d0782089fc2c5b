"""Answers in threads as tensors for training, and from a model: from a cache as without one, with figures that are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import save_tiny
from support.toy_dialects import END, IDS, TEXTS, ids, sequence_of, texts, toy

from pipedec.threads import BoundDialect, Sequence, State, measure, replay
from recipes.thread_models.answers import ModelAnswers, SeededPrompt
from recipes.thread_models.figures import agreement, answer_all, geometric_mean, text_of, thread_figures
from recipes.thread_models.rows import IGNORED, tree_row, visibility

ASKED = [SeededPrompt((20, 21, 22), 1), SeededPrompt((30, 25), 2), SeededPrompt((33, 34, 35, 36, 37), 3), SeededPrompt((29,), 4)]
APAR = "a [Fork] [Child] x y z <|end|> b [Fork] [Child] x <|end|> c <|end|>"


def talkative(path: Path, bound: BoundDialect) -> Any:
    """A random model that often says control tokens."""
    model = save_tiny("llama", path, vocab=len(TEXTS), dtype=torch.float64)
    with torch.no_grad():
        for token in bound.control:
            model.lm_head.weight[token] *= 2.5 if token == bound.join else 1.4
    return model


@torch.no_grad()
def without_cache(model: Any, bound: BoundDialect, asked: SeededPrompt, max_tokens: int) -> Sequence:
    """The greedy answer, from one forward over all of it for every step."""
    prompt = len(asked.prompt_ids)
    sequence = sequence_of(bound, prompt, max_tokens)
    while sequence.finished is None:
        flat = tree_row(sequence, asked.prompt_ids)
        logits = model(flat.token_ids[None], attention_mask=flat.mask[None, None], position_ids=flat.positions[None]).logits[0]
        places = {(token.thread, token.ordinal): place for place, token in enumerate(sequence.document(), start=prompt)}
        for thread in [thread for thread in sequence.threads if thread.state is State.RUNNING]:
            if sequence.finished is None:
                row = logits[places.get((thread.number, thread.num_tokens - 1), prompt - 1)]
                row[list(sequence.banned(thread.number))] = -torch.inf
                sequence.accept_token(thread.number, int(row.argmax()))
    return sequence


@pytest.mark.fast_cases("parallel")
@pytest.mark.parametrize("name", ["parallel", "pasta"])
def test_greedy_answers_are_those_without_a_cache(name: str, tmp_path: Path) -> None:
    bound = toy(name, max_child_tokens=12)
    model = talkative(tmp_path, bound)
    found = ModelAnswers(model, bound, (END,), 50).answer(ASKED)
    expected = [without_cache(model, bound, asked, 50) for asked in ASKED]
    assert [texts(token.token_id for token in answer.document()) for answer in found] == [
        texts(token.token_id for token in answer.document()) for answer in expected
    ]
    assert [answer.finished for answer in found] == [answer.finished for answer in expected]
    if name != "pasta":  # a random model completes no tag
        assert sum(len(answer.threads) for answer in found) > 7
        assert any(thread.joins for answer in found for thread in answer.threads)


def written(sequence: Sequence) -> str:
    return texts(token.token_id for token in sequence.document())


def said(text: str, name: str = "apar") -> Sequence:
    sequence = sequence_of(toy(name), prompt_length=2)
    replay(sequence, ids(text))
    return sequence


def test_figures_are_means_of_what_is_measured() -> None:
    answers = [said(APAR), said("a b c <|end|>")]
    chains = [measure(answer).longest_chain for answer in answers]
    figures = thread_figures(answers, [20, 8])
    assert figures["forked"] == 0.5 and figures["threads"] == 2.0 and figures["answers"] == 2 and figures["finished"] == 1.0
    assert figures["longest_chain"] == sum(chains) / 2 and figures["tokens"] == (len(ids(APAR)) + 4) / 2
    assert figures["speedup"] == pytest.approx((20 / chains[0] * 8 / chains[1]) ** 0.5, abs=1e-4)
    assert thread_figures([said("a b")], [4])["finished"] == 0.0
    assert thread_figures([said("a <promise b <|end|>", "pasta")], [4])["anomalies"] == {"opener_not_completed": 1}
    assert geometric_mean([2.0, 8.0, 0.0]) == 4.0 and geometric_mean([]) == 0.0


def test_text_is_what_readers_see() -> None:
    def decode(tokens: list[int]) -> str:
        return "".join(TEXTS[token] for token in tokens)

    assert text_of(said(APAR), decode) == "axyzbxc"
    assert text_of(said('a <promise : 2 "/>! <async> x </async> b <|end|>', "pasta"), decode) == "a!xb"


def test_agreement_counts_every_token_of_every_thread(tmp_path: Path) -> None:
    bound = toy("apar")
    model = talkative(tmp_path, toy("apar"))
    answered = answer_all(ModelAnswers(model, bound, (END,), 60), ASKED, "all")
    flats = [tree_row(sequence, prompt) for prompt, sequence in answered]
    figures = agreement(model, answered)
    assert figures["tokens"] == sum(int((flat.targets >= 0).sum()) for flat in flats)
    assert figures["top1"] > 0.7 and figures["top16"] > 0.95, "all but what bans keep it from saying"
    other = save_tiny("llama", tmp_path / "other", vocab=len(TEXTS), seed=5)
    assert agreement(other, answered)["top1"] < 0.5


def test_a_batch_computes_a_prompt_once_and_drops_what_has_finished(tmp_path: Path) -> None:
    bound = toy("apar")
    model = talkative(tmp_path, bound)
    usual = model(torch.tensor([[20, 21, 22]])).logits
    answers = ModelAnswers(model, bound, (END,), 40, temperature=1.0)
    asked = [replace(one, seed=seed) for seed in range(3) for one in ASKED]
    alone = [written(answers.answer([one])[0]) for one in asked]
    batches: list[int] = []
    counting = model.register_forward_pre_hook(lambda _, __, inputs: batches.append(len(inputs["input_ids"])), with_kwargs=True)
    assert [written(sequence) for sequence in answers.answer(asked)] == alone, "which depends on their seeds alone"
    counting.remove()
    assert len(set(alone[:: len(ASKED)])) == 3
    assert [prompt for prompt, _ in answer_all(answers, ASKED * 3, "all")] == [one.prompt_ids for one in ASKED] * 3
    assert batches[0] == len(ASKED), "each prompt is computed once"
    assert batches[1] > batches[-1] and batches[1:] == sorted(batches[1:], reverse=True), "fewer and fewer answers run"
    assert torch.equal(model(torch.tensor([[20, 21, 22]])).logits, usual), "the model attends as before"


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
