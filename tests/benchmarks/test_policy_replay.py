"""The replay against LocalPipeline: the same timesteps, counters and emulated time, and where the timesteps went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from support.checkpoints import save_tiny_llama
from support.specs import bare_spec

from benchmarks.policy.recording import DraftMemo, RecordedDrafter
from benchmarks.policy.replay import (
    Replayed,
    ReplayedAnswer,
    ReplayedPipeline,
    TimestepLosses,
    WatchedExperience,
    losses,
    round_ms,
)
from pipedec.config import paper_cluster
from pipedec.core.limits import DRAFTED_ROWS
from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Load
from pipedec.decoding import Drafter
from pipedec.engine.build import load_drafter
from pipedec.engine.local import LocalPipeline
from pipedec.kv import KVManager
from pipedec.methods import MAX_CHILDREN, BestFirstOptions, PipeDecOptions, PlainOptions, StaticTreeOptions
from pipedec.plan.budgets import kv_slots
from pipedec.plan.emulation import Emulation, with_stages
from pipedec.plan.partition import plan
from pipedec.plan.spec import PipelineSpec

LAYERS, VOCAB = 14, 200
PROMPTS = ((1, 9, 30, 4, 51, 17, 8, 22, 40, 3), (5, 6, 7, 5, 6, 7, 5, 6))
# Presets, stages, and tokens of an answer; the last has 14 stages in 7 groups.
SHAPES = {"1": ("paper-14", 1, 7), "4": ("paper-14", 4, 7), "14": ("paper-14", None, 4), "14x7": ("paper-7", None, 4)}
POLICIES = {
    "pp": ("pp", PlainOptions()),
    "stpp": ("stpp", StaticTreeOptions(6, 4, depth=3)),
    "stpp, rows": ("stpp", StaticTreeOptions(6, 4, depth=3, rows=5)),
    "pipedec": ("pipedec", PipeDecOptions(6, 4)),
    "best-first": ("pipedec-bestfirst", BestFirstOptions(6, 4, forwards=2)),
    "best-first, n-grams": ("pipedec-bestfirst", BestFirstOptions(4, 4, forwards=1, proposers=("ngrams",))),
    "best-first, its own limits": ("pipedec-bestfirst", BestFirstOptions()),
}


def manager(spec: PipelineSpec) -> KVManager:
    return KVManager(kv_slots(spec), spec.kv_block, spec.shares_prefixes)


CASES = [("4", policy) for policy in POLICIES]
CASES += [("1", "pipedec"), ("14", "best-first"), ("14x7", "pipedec"), ("14x7", "best-first")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft that is often right."""
    folder = tmp_path_factory.mktemp("models")
    target = save_tiny_llama(folder / "target", layers=LAYERS, vocab=VOCAB, eos_token_id=VOCAB - 1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    target.save_pretrained(folder / "draft")
    return folder


def make_emulation(preset: str, stages: int | None) -> Emulation:
    cluster = paper_cluster()
    emulation = Emulation.of_plan(plan(cluster if stages is None else with_stages(cluster, preset, stages), preset))
    return replace(emulation, counts_own_work=False)


def make_spec(models: Path, preset: str, stages: int | None) -> PipelineSpec:
    emulation = make_emulation(preset, stages)
    count = len(emulation.stages)
    shape = count, 7 if preset == "paper-7" else count
    spec = bare_spec(models / "target", LAYERS, shape, models / "draft", draft_dtype="float32")
    return replace(spec, emulation=emulation)


class Both:
    """The same requests through LocalPipeline and through the replay."""

    def __init__(self, spec: PipelineSpec) -> None:
        assert spec.emulation is not None
        self.groups = spec.topology.num_groups
        self.pipeline = LocalPipeline.load(spec)
        self.spec = spec
        self._experience = WatchedExperience(self.groups)
        self._memos: dict[int, DraftMemo] = {}  # by request
        self._kv, self._draft_kv = manager(spec), manager(spec)
        draft = load_drafter(spec, torch.device("cpu"))
        assert draft is not None
        self.draft: Drafter = draft

    def answer(self, prompt: tuple[int, ...], method: str, options: MethodOptions, tokens: int = 7) -> Replayed:
        """What the replay says, after the pipeline's own answer and figures."""
        request = TokenizedRequest(
            PROMPTS.index(prompt), prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), method, options
        )
        said = tuple(token for verdict in self.pipeline.run(request) for token in verdict.tokens)
        return self.replay().run_alone(request, said)

    def _memo(self, number: int) -> DraftMemo:
        return self._memos.setdefault(number, DraftMemo())

    def replay(self) -> ReplayedPipeline:
        """An empty pipeline whose drafter knows the prompts by the number of their request."""
        drafter = RecordedDrafter(self._memo, lambda: self.draft, VOCAB, self._draft_kv)
        assert self.spec.emulation is not None
        return ReplayedPipeline(self.spec.emulation, self.spec.topology, drafter, self._experience, self._kv)


@pytest.fixture(scope="module")
def both(models: Path) -> Callable[[str], Both]:
    """Each shape, loaded once."""
    return cache(lambda shape: Both(make_spec(models, *SHAPES[shape][:2])))


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("4-best-first")
@pytest.mark.parametrize(("shape", "policy"), CASES)
def test_counts_and_lasts_what_the_pipeline_does(both: Callable[[str], Both], shape: str, policy: str) -> None:
    """What verdicts taught is kept from answer to answer, and the first prompt's contexts are known the second time."""
    here, tokens = both(shape), SHAPES[shape][2]
    for prompt in (*PROMPTS, PROMPTS[0]) if tokens > 4 else PROMPTS[:1]:
        replayed, metrics = here.answer(prompt, *POLICIES[policy], tokens), here.pipeline.last.metrics
        assert (replayed.timesteps, replayed.hits, replayed.misses) == (metrics.timesteps, metrics.hits, metrics.misses)
        assert replayed.decode_ms == pytest.approx(1000 * metrics.decode_seconds, rel=1e-9)
        assert replayed.losses.timesteps == replayed.timesteps
        assert replayed.losses.together + replayed.losses.tokens == replayed.tokens - 1 == tokens - 2


def test_a_round_lasts_as_long_as_the_replay_counts_it(both: Callable[[str], Both]) -> None:
    """Without speculation, a token is a round of one row; what it attends to and rank 0's sending are little."""
    here, emulation = both("4"), both("4").spec.emulation
    plain = here.answer(PROMPTS[0], "pp", PlainOptions())
    assert emulation is not None and emulation.draft is not None
    assert plain.decode_ms / plain.tokens == pytest.approx(round_ms(emulation, 1, 0), rel=0.01)
    forwards_ms = round_ms(emulation, 1, 3) - round_ms(emulation, 1, 0)
    assert forwards_ms == pytest.approx(3 * emulation.draft.compute_ms(Load(DRAFTED_ROWS)))


def in_company(method: str, tokens: int = 6, urgent: int | None = None) -> list[TokenizedRequest]:
    """Requests of 10 to 168 prompt tokens, of which every other one shares a beginning."""
    prompts = [(*PROMPTS[number % 2], *range(3, 3 + 40 * number)) for number in range(5)]
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        TokenizedRequest(number, prompt, sampling, *POLICIES[method], priority=-1 if number == urgent else 0)
        for number, prompt in enumerate(prompts)
    ]


def both_in_company(spec: PipelineSpec, draft: Drafter, requests: list[TokenizedRequest]) -> dict[int, ReplayedAnswer]:
    """Requests that come at different timesteps, one of them when all others have ended: the pipeline and the replay agree."""
    coming = {1: [0, 1], 4: [2], 9: [3], 500: [4]}
    pipeline, replay, begun = LocalPipeline.load(spec), replay_of(spec, draft), dict[int, ReplayedAnswer]()
    for _ in pipeline.run_all({timestep: [requests[number] for number in numbers] for timestep, numbers in coming.items()}):
        pass
    expected = pipeline.answers

    def admit() -> None:
        soon = replay.timesteps + 1 if replay.num_running else min(coming, default=0)
        for timestep in [timestep for timestep in coming if timestep <= soon]:
            for number in coming.pop(timestep):
                begun[number] = replay.begin(requests[number], tuple(expected[number].token_ids))

    for _ in replay.run(admit):
        pass
    assert begun.keys() == expected.keys()
    for number, answer in begun.items():
        assert answer.metrics == expected[number].metrics, number
    assert 1000 * replay.clock.seconds() == pytest.approx(pipeline.emulated_ms, rel=1e-9)
    return begun


@pytest.mark.fast_cases("stpp-4")
@pytest.mark.parametrize(("method", "shape"), [("best-first", "4"), ("pp", "1"), ("stpp", "4"), ("pipedec", "14x7")])
def test_requests_in_company_count_and_last_what_they_do_in_the_pipeline(
    both: Callable[[str], Both], shape: str, method: str
) -> None:
    begun = both_in_company(both(shape).spec, both(shape).draft, in_company(method))
    assert begun[4].metrics.cached_tokens > 0, "the fifth prompt begins like the third"


def test_pauses_count_and_last_what_they_do_in_the_pipeline(both: Callable[[str], Both]) -> None:
    """The fourth request is urgent, and there is no memory for it beside the others."""
    here = both("4")
    assert here.spec.emulation is not None
    scarce = replace(here.spec, emulation=replace(here.spec.emulation, kv_tokens=256))
    begun = both_in_company(scarce, here.draft, in_company("pp", 12, urgent=3))
    assert begun[2].metrics.pauses == 1 and begun[3].metrics.pauses == 0


def replay_of(spec: PipelineSpec, draft: Drafter) -> ReplayedPipeline:
    """A pipeline and a drafter that have learned nothing."""
    drafter = RecordedDrafter(lambda number: DraftMemo(), lambda: draft, VOCAB, manager(spec))
    assert spec.emulation is not None
    experience = WatchedExperience(spec.topology.num_groups)
    return ReplayedPipeline(spec.emulation, spec.topology, drafter, experience, manager(spec))


def test_misses_are_told_apart_by_who_had_named_the_token(both: Callable[[str], Both]) -> None:
    """A plain pipeline names nothing; with many children, more is named than with few."""
    here = both("4")
    plain = here.answer(PROMPTS[0], "pp", PlainOptions()).losses
    assert plain.unnamed > 0 and plain.named == plain.late == plain.together == 0
    wide = here.answer(PROMPTS[0], "pipedec", PipeDecOptions(2, MAX_CHILDREN)).losses
    narrow = here.answer(PROMPTS[0], "pipedec", PipeDecOptions(2, 2)).losses
    assert wide.named > 0 and wide.unnamed < narrow.unnamed
    first = here.answer(PROMPTS[0], "pipedec-bestfirst", BestFirstOptions(1, MAX_CHILDREN, forwards=1)).losses
    assert first.named + first.late > 0 and first.unnamed < narrow.unnamed


@pytest.mark.parametrize(
    ("entries", "is_proposed", "expected"),
    [
        ([], [], TimestepLosses()),
        ([1], [False], TimestepLosses(first=4)),
        ([1, 4], [False, True], TimestepLosses(first=4, tokens=1, late=2)),
        ([1, 5], [False, True], TimestepLosses(first=4, tokens=1, named=3)),
        ([1, 5], [True, False], TimestepLosses(first=4, tokens=1, unnamed=3)),
        ([2, 2, 7, 8], [False, False, False, True], TimestepLosses(first=5, together=1, tokens=2, unnamed=4)),
    ],
)
def test_causes(entries: list[int], is_proposed: list[bool], expected: TimestepLosses) -> None:
    assert losses(entries, is_proposed, passage=4) == expected
