"""Verdicts on several threads: how far each is walked, also ahead of the replay, what is banned, and whose noise it is."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from support.toy_dialects import IDS, TEXTS, ids, sequence_of, texts, toy

from pipedec.core.sampling import SamplingParams
from pipedec.core.verdict import Accepted, Verdict
from pipedec.sampling.noise import gumbel
from pipedec.stage.verification import TokenChooser, Verifier
from pipedec.threads import Sequence
from pipedec.tree import ThreadedForest

VOCAB = len(TEXTS)
GREEDY = SamplingParams()


class Stage:
    """The forest of a last stage, its choices and its acceptance. ``successors`` are the target's token after each row."""

    def __init__(self, dialect: str, sampling: SamplingParams = GREEDY, max_tokens: int = 100, said: str = "a") -> None:
        bound = toy(dialect)
        self.forest = ThreadedForest(sequence_of(bound, 10, max_tokens))
        self.chooser = TokenChooser(self.forest.sequence, sampling, VOCAB, "cpu")
        self.acceptance = Verifier(sequence_of(bound, 10, max_tokens))
        self.successors: list[int] = []
        first = int(self.chooser.first(wish(said))[0])
        self.acceptance.record_accepted(0, first)
        self.last = Verdict.of(first)
        self.replay(self.last)

    def enter(self, *rows: tuple[str, int, int, str]) -> None:
        """Rows as (token, parent, thread, the target's successor)."""
        tokens, parents, threads, successors = zip(*rows, strict=True)
        self.forest.append(torch.tensor([IDS[token] for token in tokens]), torch.tensor(parents), torch.tensor(threads))
        self.successors += [IDS[token] for token in successors]

    def verdict(self) -> dict[int, str]:
        """What is accepted of each thread."""
        walks = self.acceptance.verify(self.forest, self.successors)
        if walks:
            self.last = Verdict(tuple(Accepted(walk.thread, walk.tokens) for walk in walks))
            self.rows = [row for walk in walks for row in walk.rows]
        return {walk.thread: texts(walk.tokens) for walk in walks}

    def replay(self, verdict: Verdict) -> None:
        advance, changes, _ = self.forest.replay(verdict)
        self.chooser.replayed(changes)
        self.acceptance.replayed(changes)
        self.successors = [self.successors[row] for row in advance.kept.tolist()]


def threads_of(stage: Stage) -> list[int]:
    assert stage.forest.threads is not None
    return stage.forest.threads.tolist()  # type: ignore[no-any-return]


def wish(*best: str) -> torch.Tensor:
    """[1, V] logits that rank these tokens first."""
    logits = torch.zeros(1, VOCAB)
    for place, token in enumerate(best):
        logits[0, IDS[token]] = 20.0 - place
    return logits


def test_every_thread_is_walked_as_far_as_its_rows_go() -> None:
    stage = Stage("apar")
    stage.enter(("a", -1, 0, "[Fork]"))
    assert stage.verdict() == {0: "[Fork]"} and stage.rows == [0]
    stage.replay(stage.last)
    stage.enter(("[Fork]", -1, 0, "b"), ("[Child]", -1, 1, "x"), ("b", 0, 0, "c"), ("x", 0, 1, "y"), ("z", 0, 1, "q"))
    assert stage.verdict() == {0: "b c", 1: "x y"}
    assert stage.rows == [0, 2, 1, 3], "of each thread in turn"
    assert stage.verdict() == {}, "nothing is said twice"


def test_a_walk_goes_on_behind_an_opener_that_is_not_replayed_yet() -> None:
    stage = Stage("apar")
    stage.enter(("a", -1, 0, "[Fork]"))
    assert stage.verdict() == {0: "[Fork]"}
    opened = stage.last
    stage.enter(("[Fork]", 0, 0, "b"), ("b", 1, 0, "c"))
    assert stage.verdict() == {0: "b c"}
    behind = stage.last
    stage.replay(opened)
    assert stage.forest.token_ids.tolist() == ids("[Fork] b") and stage.verdict() == {}
    stage.replay(behind)
    stage.enter(("c", -1, 0, "e"), ("[Child]", -1, 1, "x"))
    assert stage.verdict() == {0: "e", 1: "x"}


def test_nothing_is_walked_behind_a_join() -> None:
    stage = Stage("parallel")
    stage.enter(("a", -1, 0, "<Parallel>"))
    stage.verdict()
    stage.replay(stage.last)
    stage.enter(("<Parallel>", -1, 0, "<Conclusion>"), ("<Conclusion>", 0, 0, "c"), ("c", 1, 0, "d"), ("<Path>", -1, 1, "x"))
    assert stage.verdict() == {0: "<Conclusion>", 1: "x"}
    assert stage.verdict() == {}
    stage.replay(stage.last)
    stage.enter(("x", -1, 1, "</Path>"), ("</Path>", 0, 1, "q"))
    assert stage.verdict() == {1: "</Path>"}, "nor behind the end of a thread"
    stage.replay(stage.last)
    assert stage.forest.token_ids.tolist() == ids("</Path>")
    stage.enter(("<Conclusion>", -1, 0, "c"))
    assert stage.verdict() == {0: "c"}


def test_a_join_whose_children_have_ended_waits_for_its_replay() -> None:
    """What it sees is known at once, but rows that were guessed behind it saw something else."""
    stage = Stage("parallel")
    stage.enter(("a", -1, 0, "<Parallel>"))
    stage.verdict()
    stage.replay(stage.last)
    stage.enter(("<Parallel>", -1, 0, "b"), ("<Path>", -1, 1, "</Path>"), ("b", 0, 0, "c"))
    assert stage.verdict() == {0: "b c", 1: "</Path>"}
    ended = stage.last
    stage.enter(("c", 1, 0, "<Conclusion>"), ("<Conclusion>", 2, 0, "d"))
    assert stage.verdict() == {0: "<Conclusion>"}
    joined = stage.last
    stage.replay(ended)
    stage.replay(joined)
    assert stage.verdict() == {} and 0 not in threads_of(stage)


def chosen(stage: Stage, logits: torch.Tensor) -> list[str]:
    """What follows the last rows that have entered."""
    rows = slice(stage.forest.num_rows - len(logits), stage.forest.num_rows)
    return [TEXTS[token] for token in stage.chooser.choose(logits, stage.forest, rows).tolist()]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.01, seed=3)], ids=["greedy", "drawn"])
def test_banned_tokens_are_never_chosen(sampling: SamplingParams) -> None:
    assert Stage("apar", sampling, said="b").forest.sequence.main.token_ids == ids("b")
    stage = Stage("apar", sampling)
    assert TokenChooser(sequence_of(toy("apar")), sampling, VOCAB, "cpu").first(wish("[Child]", "c")).tolist() == ids("c")
    stage = Stage("apar", sampling)
    stage.enter(("a", -1, 0, "a"), ("b", 0, 0, "a"), ("[Fork]", 0, 0, "a"))
    logits = torch.cat((wish("[Child]", "[Fork]"), wish("[Fork]", "d"), wish("[Fork]", "[Child]", "d")))
    assert chosen(stage, logits) == ["[Fork]", "[Fork]", "d"], "no opener stands right behind an opener"
    assert (logits > 0).sum() == 7, "the logits are the caller's"


@pytest.mark.parametrize(
    ("ends", "chosen"),
    [({IDS["c"]}, "d"), ({IDS["c"], VOCAB, VOCAB + 9}, "d"), (range(VOCAB), "c"), (range(VOCAB + 9), "c")],
    ids=["one", "some beyond the vocabulary", "all", "more than all"],
)
def test_end_tokens_are_banned_before_min_tokens_unless_none_remains(ends: Iterable[int], chosen: str) -> None:
    chooser = TokenChooser(Sequence(10, ends, 100, min_tokens=1), GREEDY, VOCAB, "cpu")
    assert chooser.first(wish("c", "d")).tolist() == ids(chosen)


def test_masks_of_each_thread_predict_with_its_noise() -> None:
    stage = Stage("apar", SamplingParams(temperature=1.0, seed=11))
    stage.enter(("a", -1, 0, "[Fork]"))
    stage.verdict()
    stage.replay(stage.last)
    positions, threads = torch.arange(20, 60), torch.arange(40) % 2
    predicted = stage.chooser.predicted(torch.zeros(40, VOCAB), positions, threads).argmax(-1).tolist()
    noises = [gumbel(11, positions, VOCAB, stage.forest.sequence.threads[number].noise_stream) for number in (0, 1)]
    assert predicted == [int(noises[row % 2][row].argmax()) for row in range(40)]
