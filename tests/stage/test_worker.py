"""Stage workers on a tiny checkpoint: what they pass on after a verdict is what the next stage expects."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny_llama
from support.driven_stage import DrivenStage
from support.examples import examples
from torch import Tensor
from transformers import PreTrainedModel

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Load, NewRequest, RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.families import ExpertsShape
from pipedec.model import StageModel
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import NewSequence, Sequence

PROMPT = [1, 9, 30, 4, 51]
NO_TOKEN = 64  # an end token that the vocabulary does not have
TokenPath = tuple[int, ...]
CUT = (range(0, 1), range(1, 2), range(2, 4))
SLOTS = 64


@dataclass
class Target:
    """A checkpoint and the same model in transformers, in float64."""

    path: Path
    model: PreTrainedModel
    _hidden: dict[tuple[int, ...], tuple[Tensor, ...]] = field(default_factory=dict)

    def hidden(self, path: tuple[int, ...], layer: int) -> Tensor:
        """[E] that enters ``layer`` at the last token of the prompt and ``path``."""
        if path not in self._hidden:
            with torch.inference_mode():
                output = self.model(torch.tensor([[*PROMPT, *path]]), output_hidden_states=True)
            self._hidden[path] = tuple(states[0, -1] for states in output.hidden_states)
        return self._hidden[path][layer]

    def answer(self, num_tokens: int) -> list[int]:
        said: list[int] = []
        for _ in range(num_tokens):
            said.append(int(self.model(torch.tensor([[*PROMPT, *said]])).logits[0, -1].argmax()))
        return said

    def stage(self, layers: range) -> DrivenStage:
        model = StageModel.load(self.path, layers, torch.float64, "cpu")
        return DrivenStage((FinalStageWorker if model.is_last else StageWorker)(model, new_sequence, slots=SLOTS))


def new_sequence(opening: NewRequest) -> NewSequence:
    return lambda: Sequence(opening.prompt_length, (NO_TOKEN,), opening.sampling.max_tokens)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target")
    return Target(path, save_tiny_llama(path, dtype=torch.float64))


def opening_of(sampling: SamplingParams = SamplingParams()) -> NewRequest:  # noqa: B008
    return NewRequest(len(PROMPT), sampling, slots=((0, SLOTS),))


def prompt_chunk(*token_ids: int) -> Step:
    return Step(torch.tensor(token_ids), torch.full((len(token_ids),), -1))


def rows(*pairs: tuple[int, int]) -> Step:
    """A step for the first stage from (token, parent)."""
    token_ids, parents = zip(*pairs, strict=True)
    return Step(torch.tensor(token_ids), torch.tensor(parents))


def pairs(step: Step | None) -> list[tuple[int, int]]:
    assert step is not None and step.hidden is not None and len(step.hidden) == step.num_rows
    return list(zip(step.token_ids.tolist(), step.parents.tolist(), strict=True))


@dataclass
class NaiveStage:
    """Rows are paths of tokens from the first output token on."""

    paths: list[TokenPath] = field(default_factory=list)
    pending: list[TokenPath] = field(default_factory=list)

    def decode(self, paths: list[TokenPath]) -> None:
        self.paths = self.paths + paths
        self.pending = paths

    def sync(self, said: TokenPath) -> None:
        self.paths, self.pending = ([path for path in rows if path[: len(said)] == said] for rows in (self.paths, self.pending))

    def outgoing(self) -> list[TokenPath]:
        pending, self.pending = self.pending, []
        return pending


@examples(25)
@given(st.integers(0, 10_000))
def test_rows_mean_the_same_at_every_stage(target: Target, seed: int) -> None:
    """Random rows and verdicts in lockstep: a step names its rows' parents as its receiver numbers them, and carries the
    activations that a forward of each path alone gives."""
    rng = random.Random(seed)
    stages, naive = [target.stage(layers) for layers in CUT], [NaiveStage() for _ in range(4)]  # the first is rank 0
    prefilled: Step | None = prompt_chunk(*PROMPT)
    for stage in stages:
        stage.open(1, opening_of())
        assert prefilled is not None
        stage.compute({1: prefilled})
        prefilled = stage.outgoing().get(1)
    assert prefilled is None, "nothing leaves the last stage"
    said: TokenPath = ()
    tokens: TokenPath = (5,)
    for _ in range(10):
        if tokens:
            said += tokens
            for stage, copy in zip(stages, naive[1:], strict=True):
                stage.sync(1, Verdict.of(*tokens))
                copy.sync(said)
            naive[0].sync(said)
        naive[0].decode(new_paths(naive[0].paths, said, rng))
        moving = [copy.outgoing() for copy in naive[:3]]
        steps = [numbered(moving[0], naive[1].paths), *(stage.outgoing().get(1) for stage in stages[:2])]
        for index, (step, paths) in enumerate(zip(steps, moving, strict=True)):
            check_step(target, step, paths, naive[index + 1].paths, CUT[index].start)
            if step is not None:
                stages[index].compute({1: step})
                naive[index + 1].decode(paths)
        tokens = random_tokens(naive[3].paths, naive[0].paths, said, rng) if moving[2] else ()


def new_paths(present: list[TokenPath], said: TokenPath, rng: random.Random) -> list[TokenPath]:
    """The accepted token if it is not in the tree, else children of a few rows of any depth."""
    if not present:
        return [said]
    wanted = [(*rng.choice(present), rng.randrange(6)) for _ in range(rng.randint(0, 5))]
    return [path for path in dict.fromkeys(wanted) if path not in present]


def random_tokens(final: list[TokenPath], front: list[TokenPath], said: TokenPath, rng: random.Random) -> TokenPath:
    """A walk along rows of the last stage, and one token more, which may be in flight."""
    walk = rng.choice(final)
    following = [path[-1] for path in front if path[:-1] == walk]
    last = rng.choice(following) if following and rng.random() < 0.8 else 50
    return (*walk[len(said) :], last)


def numbered(paths: list[TokenPath], present: list[TokenPath]) -> Step | None:
    parents = [present.index(path[:-1]) if path[:-1] in present else -1 for path in paths]
    return rows(*zip((path[-1] for path in paths), parents, strict=True)) if paths else None


def check_step(target: Target, step: Step | None, paths: list[TokenPath], present: list[TokenPath], layer: int) -> None:
    expected = numbered(paths, present)
    assert (step is None) == (expected is None)
    if step is None or expected is None:
        return
    assert torch.equal(step.token_ids, expected.token_ids)
    assert torch.equal(step.parents, expected.parents)
    if step.hidden is not None:
        hidden = torch.stack([target.hidden(path, layer) for path in paths])
        assert torch.allclose(step.hidden, hidden, rtol=0, atol=1e-9)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("layers", [CUT[0], range(4)], ids=["middle", "final"])
def test_nothing_is_computed_after_an_answer_was_ended(target: Target, layers: range, tokens: int) -> None:
    """By rank 0, which may have cut off tokens that the last stage has accepted; that verdict travels on."""
    answer, stage = target.answer(3), target.stage(layers)
    for _ in range(2):
        chunk = RequestUpdate(1, opening_of(), step=prompt_chunk(*PROMPT))
        stage.advance(StageMessage((chunk,)))
        reply = stage.advance(message(rows((answer[0], -1), (answer[1], 0)), Verdict.of(answer[0])))
        if layers.stop == 4:
            assert reply == message(verdict=Verdict.of(answer[1], answer[2]))
        else:
            [update] = reply.updates
            assert pairs(update.step) == [(answer[0], -1), (answer[1], 0)] and update.verdict == Verdict.of(answer[0])
        ended = Verdict.of(*answer[1 : 1 + tokens], finished="stop")
        reply = stage.advance(message(rows((9, 0)), ended))
        assert reply == message(verdict=Verdict((), "stop") if layers.stop == 4 else ended)
        assert (stage.outgoing(), stage.num_lanes) == ({}, 0)
        stage.compute({1: rows((9, 0))})
        assert stage.load == Load()
        stage.sync(1, Verdict.of(9))
        assert stage.outgoing() == {} and stage.results() == ()


@pytest.mark.parametrize("layers", CUT[1:], ids=["middle", "final"])
def test_verdicts_are_replayed_before_activations_are_awaited(target: Target, layers: range) -> None:
    """What is computed before its activations have arrived is computed from garbage."""
    stage, chunk = target.stage(layers), prompt_chunk(*PROMPT)
    hidden = torch.randn(len(PROMPT), stage._model.config.hidden_size, dtype=torch.float64)
    arriving, open_lanes = torch.full_like(hidden, torch.nan), list[int]()

    def arrive() -> None:
        open_lanes.append(stage.num_lanes)
        arriving.copy_(hidden)

    stage.open(2, opening_of())
    ended, opened = (
        RequestUpdate(2, verdict=Verdict((), "stop")),
        RequestUpdate(1, opening_of(), step=chunk.with_hidden(arriving)),
    )
    late = stage.advance(StageMessage((opened, ended), arrival=SimpleNamespace(wait=arrive)))
    assert open_lanes == [1], "request 2 was to be closed and request 1 to be opened meanwhile"
    other = target.stage(layers)
    at_once = other.advance(StageMessage((RequestUpdate(1, opening_of(), step=chunk.with_hidden(hidden)), RequestUpdate(3))))
    [found] = [update for update in late.updates if update.number == 1]
    [expected] = [update for update in at_once.updates if update.number == 1]
    if expected.step is None:
        assert found == expected
    else:
        assert torch.equal(found.step.hidden, expected.step.hidden)  # type: ignore[arg-type, union-attr]


def message(step: Step | None = None, verdict: Verdict | None = None) -> StageMessage:
    return StageMessage((RequestUpdate(1, verdict=verdict, step=step),))


def test_a_stage_counts_its_rows_and_those_that_nobody_needed(target: Target) -> None:
    """Rows that a verdict prunes, those in the trees of a request that ends, and those that arrive behind its end."""
    stage = target.stage(CUT[0])
    stage.open(1, opening_of())
    stage.compute({1: prompt_chunk(*PROMPT)})
    assert stage.advance(StageMessage(ends_session=True)) == StageMessage(ends_session=True)
    stage.sync(1, Verdict.of(5))
    for step in (rows((5, -1)), rows((7, 0), (8, 0)), rows((20, 1), (21, 2), (22, 2))):
        stage.compute({1: step})
    assert (stage.rows, stage.pruned_rows) == (len(PROMPT) + 6, 0)
    stage.sync(1, Verdict.of(8))
    assert stage.pruned_rows == 2, "7 and 20; 5 is committed, and 8, 21 and 22 are left"
    stage.sync(1, Verdict((), "cancelled"))
    assert stage.pruned_rows == 5
    stage.compute({1: rows((30, 0), (31, 0))})
    assert (stage.rows, stage.pruned_rows) == (len(PROMPT) + 6, 7)


def test_experts_are_counted_where_the_layers_count_them(target: Target) -> None:
    stage = target.stage(range(0, 2))
    stack = stage.worker._model.stack
    assert (stack.routed, stage.num_experts) == ((), 0)
    stack.routed = (ExpertsShape(64, 4),) * 2
    stage.open(1, opening_of())
    for token, read in zip(PROMPT, (None, 8, 13, None, 9), strict=True):
        stack.experts_read = read
        stage.compute({1: prompt_chunk(token)})
    assert (stage.experts, stage.expert_layers, stage.num_experts) == (30, 6, 64)
