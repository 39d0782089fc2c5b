"""Trees that grow on a device: rows, their order and their probabilities are those of one forward after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny
from support.counted_device import DEVICE, CountedDevice
from support.examples import examples
from support.tiny_pair import Pair

from pipedec.core.errors import UserError
from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Load, StageMessage
from pipedec.decoding.acceptance import Line
from pipedec.decoding.injection import InjectionTree
from pipedec.device import HOST
from pipedec.drafting import DraftModel, lane
from pipedec.drafting.growing import RowsAhead
from pipedec.engine.build import load_drafter, load_stage, new_scheduler
from pipedec.engine.local import LocalPipeline
from pipedec.grammar import Bitmask
from pipedec.methods import BestFirstOptions, StaticTreeOptions
from pipedec.model import KVCache, LaneRows, StageModel
from pipedec.model.row_tables import RowTables
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, Growth, Visibility

PROMPT = [1, 9, 30, 4, 51, 17, 8]
VOCAB = 64
FORWARDS = 4
METHODS: dict[str, tuple[str, MethodOptions]] = {
    "best first": ("pipedec-bestfirst", BestFirstOptions(8, 4, FORWARDS, ("draft",))),
    "layers": ("stpp", StaticTreeOptions(width=8, children=4, depth=FORWARDS)),
    "layers, best rows": ("stpp", StaticTreeOptions(children=4, depth=FORWARDS, rows=12)),
}


class Noted(DraftModel):
    """Notes what is drafted: rows, their tokens and positions, and their candidates."""

    def expand(self, requested: Sequence[DraftRows], prompts: object) -> list[Candidates]:  # type: ignore[override]
        found = super().expand(requested, prompts)  # type: ignore[arg-type]
        for entry, one in zip(requested, found, strict=True):
            of_rows = entry.tree.tokens_of(entry.rows), entry.tree.positions_of(entry.rows)
            self.noted.append([entry.number, list(entry.rows), *of_rows, one.token_ids.tolist(), one.log_probs.tolist()])
        return found


def answers(pair: Pair, device: torch.device, asked: tuple[str, MethodOptions], count: int) -> tuple[list[object], list[object]]:
    """The answers to some requests, and what is drafted for them."""
    spec = pair.spec(2)
    drafter = load_drafter(spec, device)
    assert isinstance(drafter, DraftModel)
    drafter.__class__, drafter.noted = Noted, []  # type: ignore[attr-defined]
    pipeline = LocalPipeline(spec, [load_stage(spec, rank, HOST) for rank in (1, 2)], new_scheduler(spec, drafter, device))
    requests = [request(asked, number) for number in range(1, count + 1)]
    return [str(one) for one in pipeline.run_all({1: requests})], drafter.noted  # type: ignore[attr-defined]


def request(asked: tuple[str, MethodOptions], number: int, max_tokens: int = 24) -> TokenizedRequest:
    method, options = asked
    return TokenizedRequest(
        number, tuple(range(5, 20 + number)), SamplingParams(max_tokens=max_tokens), method=method, options=options
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", METHODS)
def test_trees_are_those_of_one_forward_after_another(pair: Pair, kind: str, count: int) -> None:
    said, drafted = answers(pair, HOST, METHODS[kind], count)
    assert (said, drafted) == answers(pair, DEVICE, METHODS[kind], count) and len(drafted) > FORWARDS


@pytest.mark.parametrize("kind", METHODS)
def test_the_host_waits_once_per_timestep(pair: Pair, kind: str) -> None:
    """And neither a first nor a middle stage ever does."""
    spec, counted, waits, forwards = pair.spec(3), CountedDevice(), list[int](), list[int]()
    with counted:
        drafter = load_drafter(spec, DEVICE)
        scheduler = new_scheduler(spec, drafter, DEVICE)
        stages = [load_stage(spec, rank, DEVICE) for rank in (1, 2, 3)]
        pipeline = LocalPipeline(spec, stages, scheduler)
        for number, stage in enumerate(stages, start=1):
            stage.advance = partial(_within, counted, f"stage {number}", stage.advance)  # type: ignore[method-assign]
        draft = scheduler.draft

        def noted(load: Load, count: int) -> AbstractContextManager[None]:
            forwards.append(count)
            return nullcontext()

        def drafted() -> None:
            before, scheduler.draft_rounds.time_forward = counted.reads.total(), noted
            with counted.working("draft"):
                draft()
            waits.append(counted.reads.total() - before)

        scheduler.draft = drafted  # type: ignore[method-assign]
        for _ in pipeline.run_all({1: [request(METHODS[kind], number) for number in (1, 2)]}):
            pass
    assert counted.mixed.total() == 0
    assert waits.count(1) > 4 and set(waits) <= {0, 1}
    assert forwards.count(FORWARDS) == waits.count(1) and set(forwards) <= {1, FORWARDS}, (
        "chunks of prompts alone are one forward"
    )
    assert {who for who, _ in counted.reads} == {"draft", "stage 3"}


def _within(counted: CountedDevice, who: str, work: Callable[..., StageMessage], *args: Any) -> StageMessage:
    with counted.working(who):
        return work(*args)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[torch.device, StageModel]:
    """One model on both devices. Mistral's window is so short that it ends inside the tree."""
    path = tmp_path_factory.mktemp("draft")
    window = {"sliding_window": 4} if request.param == "mistral" else {}
    save_tiny(request.param, path, layers=2, vocab=VOCAB, dtype=torch.float64, **window)
    return {device: StageModel.load(path, range(2), torch.float64, device) for device in (HOST, DEVICE)}


class Both:
    """One tree, and a draft on either device; only one of them may go ahead."""

    def __init__(
        self, models: dict[torch.device, StageModel], slots: int, chooser: random.Random, by_layer: bool = False
    ) -> None:  # fmt: skip
        self._chooser, self._tree, self.taken, self._by_layer = chooser, InjectionTree(), 0, by_layer
        self._drafts = [DraftModel(models[HOST]), DraftModel(models[DEVICE], slots, 4)]
        for draft in self._drafts:
            draft.open_lane(0, ThreadSequence(len(PROMPT), (), 1000), PROMPT, SamplingParams())
            draft.expand([], {0: PROMPT})
        self._tree.set_root_position(len(PROMPT), 0)
        self._tree.plant(11)

    def timestep(self) -> None:
        """Some forwards, as a method asks for them. It may ask for fewer rows than it has announced, or for others."""
        chooser = self._chooser
        count, forwards, children = chooser.randint(1, 6), chooser.randint(1, 5), chooser.randint(1, 5)
        least = chooser.choice((-torch.inf, -9.0))
        for left in range(forwards, 0, -1):
            asked = chooser.randint(1, 6) if chooser.random() < 0.1 else count
            rows = self._tree.undrafted(asked, least)
            if not rows:
                break
            frontier = partial(self._tree.frontier, rows, (left - 1) * count)
            growth = Growth(left - 1, count, self._by_layer, lambda log_probs: log_probs / 2, frontier)
            self._tree.add(rows, self._lines(DraftRows(0, 0, self._tree, rows, children, growth)))

    def _lines(self, entry: DraftRows) -> list[Line]:
        self.taken += not self._drafts[1].num_forwards([entry])
        mine, ahead = (draft.expand([entry], {})[0] for draft in self._drafts)
        assert mine.rows.tolist() == ahead.rows.tolist() == list(entry.rows)
        if ahead.token_ids.numel():
            assert mine.token_ids.tolist() == ahead.token_ids.tolist()
            torch.testing.assert_close(ahead.log_probs, mine.log_probs, rtol=1e-12, atol=1e-12)
        chances = (mine.log_probs / 2).tolist()
        return [Line(ids, of_row, None, 0) for ids, of_row in zip(mine.token_ids.tolist(), chances, strict=True)]

    def verdict(self) -> None:
        row = self._chooser.randrange(self._tree.num_rows)
        tokens = [*self._tree.path(row), self._chooser.randrange(VOCAB)]
        changes, hit, _ = self._tree.advance_to(tokens)
        for draft in self._drafts:
            draft.follow_tree(0, 0, changes)
        if not hit:
            self._tree.plant(tokens[-1])


@examples(40)
@given(st.integers(0, 2**32), st.sampled_from((24, 4096)))
def test_any_tree_grows_ahead(models: dict[torch.device, StageModel], seed: int, slots: int) -> None:
    """Whatever is asked for: rows that were drafted ahead are taken, others are computed, and too little memory stops it all."""
    both = Both(models, slots, random.Random(seed))
    for _ in range(5):
        both.timestep()
        if random.Random(seed).random() < 0.8:
            both.verdict()


def test_rows_are_drafted_ahead_unless_the_method_changes_its_mind(models: dict[torch.device, StageModel]) -> None:
    both = Both(models, 4096, random.Random(1))
    for _ in range(30):
        both.timestep()
        both.verdict()
    assert both.taken > 30


def test_rows_are_taken_in_another_order_than_they_were_drafted(
    models: dict[torch.device, StageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the device had rounded chances that are nearly equal otherwise than the host."""
    orders = list[list[int]]()

    class Noting(RowsAhead):
        def take(self, requested: DraftRows) -> tuple[dict[int, int], Candidates]:
            slots, candidates = super().take(requested)
            orders.append(list(slots.values()))
            return slots, candidates

    monkeypatch.setattr(lane, "RowsAhead", Noting)
    both = Both(models, 4096, random.Random(1), by_layer=True)
    for _ in range(60):
        both.timestep()
        both.timestep()  # enters rows below those
        both.verdict()
    assert sum(order != sorted(order) for order in orders) >= 3


def test_a_structure_that_cannot_be_followed_leaves_rows_ahead_to_other_requests(models: dict[torch.device, StageModel]) -> None:
    draft = DraftModel(models[DEVICE])
    trees = [InjectionTree() for _ in range(2)]
    for number, tree in enumerate(trees):
        tree.set_root_position(len(PROMPT), 0)
        tree.plant(11)
        draft.open_lane(number, ThreadSequence(len(PROMPT), (), 1000), PROMPT, SamplingParams())
        draft.expand([], {number: PROMPT})

    def entry(number: int, forwards: int) -> DraftRows:
        tree = trees[number]
        rows = tree.undrafted(2)
        return DraftRows(
            number, 0, tree, rows, 3, Growth(forwards, 2, False, lambda chances: chances, partial(tree.frontier, rows, 2))
        )

    first = entry(0, 1)
    [found] = draft.expand([first], {})
    trees[0].add(
        first.rows,
        [Line(ids, of_row, None, 0) for ids, of_row in zip(found.token_ids.tolist(), found.log_probs.tolist(), strict=True)],
    )
    ahead, other = entry(0, 0), entry(1, 0)
    assert draft.num_forwards([ahead]) == 0

    def allowed(of_lane: lane.DraftLane, requested: DraftRows) -> list[Bitmask]:
        if requested.number == 1:
            raise UserError("the structure cannot be followed")
        return []

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lane.DraftLane, "allowed", allowed)
        with pytest.raises(UserError, match="cannot be followed"):
            draft.expand([ahead, other], {})
    draft.close_lane(1)
    assert draft.num_forwards([ahead]) == 0, "it is drafted still"
    [taken] = draft.expand([ahead], {})
    assert taken.rows.tolist() == list(ahead.rows) and taken.token_ids.shape == (len(ahead.rows), 3)


def test_masks_and_positions_of_the_device_enter_the_table_there(models: dict[torch.device, StageModel]) -> None:
    tables = list[RowTables]()
    seen, positions = torch.ones(3, 5).tril(2).bool(), torch.arange(5) + 3
    for place in (HOST, DEVICE):
        model, counted = models[place], CountedDevice()
        with counted:
            on_place = seen.to(place), positions.to(place)
            cache = KVCache(model.make_pool(32), ((0, 32),), cached=3)
            cache.append(2)
            rows = LaneRows(torch.arange(3, device=place), cache, Visibility(on_place[0], 3, lambda: on_place[1]))  # noqa: B023
            tables.append(RowTables(torch.zeros(200, dtype=torch.int32, device=place), 4, 2, [16]))
            tables[-1].fill([rows], with_positions=True)
        assert not counted.reads and not counted.mixed
    assert tables[0].table.tolist() == tables[1].table.tolist()
