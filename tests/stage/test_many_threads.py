"""A step of 200 rows of 40 threads through a chain of stages, and the verdict on all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from support.checkpoints import save_tiny_llama
from support.driven_stage import DrivenStage
from support.toy_dialects import IDS, TEXTS, ids, sequence_of, toy

from pipedec.core import Accepted, NewRequest, SamplingParams, Step, Verdict
from pipedec.model import StageModel
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import BoundDialect, NewSequence

NUMBER = 7
THREADS, ROWS_PER_THREAD = 40, 5
PROMPT = ids("q r s")
SLOTS = 1024
FORK, CHILD = IDS["[Fork]"], IDS["[Child]"]


class Chain:
    """A middle and a final stage. The final one chooses what ``wished`` says of the next rows, and records its logits."""

    def __init__(self, path: Path) -> None:
        self.model = save_tiny_llama(path, layers=2, vocab=len(TEXTS), dtype=torch.float64)
        models = [StageModel.load(path, range(layer, layer + 1), torch.float64, "cpu") for layer in range(2)]
        bound = toy("apar", max_children=THREADS)
        kinds, new_sequence = (StageWorker, FinalStageWorker), self._sequences(bound)
        workers = [DrivenStage(kind(model, new_sequence, slots=SLOTS)) for kind, model in zip(kinds, models, strict=True)]
        self.middle, self.final = workers
        self.wished: list[int] = []
        self._head = models[1].logits
        models[1].logits = self._logits  # type: ignore[method-assign]
        for worker in (self.middle, self.final):
            worker.open(NUMBER, NewRequest(len(PROMPT), SamplingParams(max_tokens=1000), slots=((0, SLOTS),)))

    def _sequences(self, bound: BoundDialect) -> Callable[[NewRequest], NewSequence]:
        return lambda opening: lambda: sequence_of(bound, opening.prompt_length)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits = self._head(hidden)
        return torch.nn.functional.one_hot(torch.tensor(self.wished), len(TEXTS)).double()

    def prefill(self, token: int) -> None:
        self.wished = [token]
        self.middle.compute({NUMBER: Step(torch.tensor(PROMPT), torch.full((len(PROMPT),), -1))})
        self.final.compute(self.middle.outgoing())
        assert self.final.outgoing() == {}

    def decode(self, rows: list[tuple[int, int, int]], wished: list[int]) -> None:
        """Rows as (token, parent, thread)."""
        self.wished = wished
        token_ids, parents, threads = (torch.tensor(column) for column in zip(*rows, strict=True))
        self.middle.compute({NUMBER: Step(token_ids, parents, threads=threads)})
        step = self.middle.outgoing()[NUMBER]
        assert step.threads is not None
        columns = step.token_ids.tolist(), step.parents.tolist(), step.threads.tolist()
        assert list(zip(*columns, strict=True)) == rows
        self.final.compute({NUMBER: step})

    def replay(self) -> Verdict:
        [update] = self.final.results()
        verdict = update.verdict
        assert verdict is not None and update.number == NUMBER
        for worker in (self.middle, self.final):
            worker.sync(NUMBER, verdict)
        assert self.final.outgoing() == {} and self.final.results() == ()
        return verdict


def test_a_step_of_200_rows_of_40_threads(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    opening = [token for number in range(THREADS - 1) for token in (IDS["abcdef"[number % 6]], FORK)]
    chain.prefill(opening[0])
    assert chain.replay() == Verdict.of(opening[0])
    last = IDS["z"]
    chain.decode([(token, row - 1, 0) for row, token in enumerate(opening)], [*opening[1:], last])
    assert chain.replay() == Verdict.of(*opening[1:], last)

    said = {number: [*PROMPT, *opening[: 2 * number], CHILD] for number in range(1, THREADS)} | {0: [*PROMPT, *opening, last]}
    words = {number: [IDS["ghijk"[(number + depth) % 5]] for depth in range(4)] for number in said}
    rows, wished, paths = list[tuple[int, int, int]](), list[int](), list[list[int]]()
    rng, entered = random.Random(3), dict.fromkeys(said, 0)
    while len(rows) < THREADS * ROWS_PER_THREAD:
        number = rng.choice([number for number, count in entered.items() if count < ROWS_PER_THREAD])
        row, likely = entered[number], words[number]
        entered[number] += 1
        # the root, three words after each other, and a wrong word next to the last of them
        token, parent = (said[number][-1], -1) if row == 0 else (likely[row - 1], row - 1) if row < 4 else (IDS["y"], 2)
        rows.append((token, parent, number))
        wished.append(likely[row] if row < 4 else IDS["x"])
        paths.append(said[number] + (likely[:row] if row < 4 else [*likely[:2], token]))
    chain.decode(rows, wished)
    for path, logits in zip(paths, chain.logits, strict=True):
        with torch.inference_mode():
            expected = chain.model(torch.tensor([path])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
    verdict = chain.replay()
    assert sorted(verdict.accepted) == [Accepted(number, tuple(words[number])) for number in range(THREADS)]
    assert verdict.finished is None
    for worker in (chain.middle, chain.final):
        forest = worker._lanes[NUMBER].forest
        assert forest.num_rows == 0, "of every thread the last token was not there yet"
        sequence = forest.sequence
        assert {number: sequence.threads[number].token_ids[-4:] for number in words} == words
    chain.decode([(words[number][-1], -1, number) for number in reversed(range(THREADS))], [IDS["a"]] * THREADS)
    assert sorted(chain.replay().accepted) == [Accepted(number, (IDS["a"],)) for number in range(THREADS)]
