"""Rank 0's loop alone, with a scheduler that says what the test wants."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event as Flag
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import to_builtins
from support.processes import wait_until
from support.tiny_pair import CONTEXT, Pair
from support.whole_scheduler import FreshRun
from transformers import AutoTokenizer

from pipedec.config import Settings
from pipedec.core.errors import EpochEnded, PipedecError, SchedulerLost, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import RequestUpdate
from pipedec.core.verdict import Verdict
from pipedec.decoding import Drafter, Experience, Resources, Scheduler
from pipedec.device import HostDevice
from pipedec.engine import request_queue
from pipedec.engine.admission import Admission
from pipedec.engine.build import load_prompter, resolve
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.rank_tasks import Wiring
from pipedec.messages.events import CompletionEvent, ErrorEvent, TokensEvent
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import RunStats
from pipedec.plan.spec import run_description
from pipedec.scheduler import Task
from pipedec.scheduler.protocol import Granted, Post, RankMessage
from pipedec.scheduler.workflow import Planned
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect
from pipedec.threads.sequences import Sequences
from pipedec.topology import Topology
from pipedec.tracing import Tracer
from pipedec.tree import Candidates, DraftRows

pytestmark = pytest.mark.usefixtures("redis_client")

TOPOLOGY = Topology.even(1, 1)
DESCRIPTION = RunDescription(Settings.of(target="target", dispatch="tasks"), ((1,),), ((0, 8),))
NO_TRANSPORT: Any = SimpleNamespace(send_message=lambda message, target: HostDevice().record_event())  # what is sent goes nowhere
REQUEST, DRAFTED = (PromptRequest("Hello", True, name, SamplingParams(max_tokens=4)).to_json() for name in ("pp", "stpp"))


class EndsAtOnce(FreshRun):
    """Every request ends with its first token.

    Args:
        meanwhile: is called before its last task is reported. A message that this brings to rank 0 comes with the reply.
    """

    def __init__(self, meanwhile: Callable[[FreshRun], object]) -> None:
        super().__init__(TOPOLOGY)
        self.begun: list[int] = []
        self._meanwhile = meanwhile
        self._tasks: deque[RankMessage] = deque()
        self.open(DESCRIPTION)

    def begin_session(self, session: int, planned: Sequence[Planned], trace_lines: int) -> None:
        number = max(self.status().running)  # the end of the one before may not be published yet
        self.begun.append(number)
        results = {"results": to_builtins([RequestUpdate(number, verdict=Verdict.of(5, finished="length"))])}
        names = {"pre": {}, "sync": results, "dec": {}, "end": {}}
        self._tasks.extend(
            RankMessage("tasks", session, (Granted(Task.compute(name, 0, 0), payload),)) for name, payload in names.items()
        )

    def wait(self, rank: int, timeout_seconds: float) -> RankMessage | None:
        return self._tasks.popleft() if self._tasks else super().wait(rank, timeout_seconds)

    def report(
        self,
        rank: int,
        done: Sequence[Task],
        planned: Sequence[Planned],
        timeout_seconds: float = 0.0,
        trace_lines: int | None = None,
    ) -> RankMessage | None:
        if done[0].name == "end":
            self._meanwhile(self)
        return self.wait(rank, 0) if timeout_seconds else None

    def wait_request(self, timeout_seconds: float) -> RankMessage | None:
        message = super().wait_request(timeout_seconds)
        assert message is not None or timeout_seconds == 0, "rank 0 waits on: the message was lost"
        return message


def test_a_request_has_its_tenant_unless_the_cluster_shares_nothing(pair: Pair) -> None:
    for shares, tenant, expected in ((True, "a", "a"), (False, "a", None), (True, None, None)):
        admission = Admission(Prompter(pair.target, CONTEXT), Sequences(pair.target), 1, 2048, shares_suffixes=shares)
        asked = PromptRequest("Hello", True, "pp", SamplingParams(max_tokens=4), tenant=tenant)
        admitted = admission.admit(RankMessage("request", number=0, text=asked.to_json()))
        assert admitted.answer.asked.tenant == expected


@pytest.mark.failure_case("H23")
@pytest.mark.parametrize(
    "fields", [{"prompt": (5, 300)}, {"prompt": "[PAD]"}, {"logit_bias": {300: 0.0}}, {"stop_token_ids": (300,)}]
)
def test_a_token_without_an_embedding_is_refused_on_rank_0(pair: Pair, tmp_path: Path, fields: dict[str, Any]) -> None:
    """The tokenizer has one token more than the target."""
    shutil.copytree(pair.target, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "target")
    spec = resolve(Settings.of(target=tmp_path / "target", draft="none", stages=1, device="cpu"))
    admission = Admission(load_prompter(spec), Sequences(spec.target), 1, 2048)
    asked = PromptRequest(fields.pop("prompt", "Hello"), True, "pp", SamplingParams(**{"max_tokens": 4, **fields}))
    with pytest.raises(UserError, match="token 300, but the vocabulary has 300 tokens"):
        admission.admit(RankMessage("request", number=0, text=asked.to_json()))
    assert run_description(spec).vocab_size == 300
    with pytest.raises(UserError, match=r"\[PAD\]"):
        admission.sequences.maker(1, asked.sampling, Dialect("own", opener="<|user|>", child_start="[PAD]").to_json())


def loop_of(scheduler: FreshRun, pair: Pair, load_drafter: Callable[[], Drafter] | None = None) -> DraftLoop:
    sequences = Sequences(pair.target)
    wiring = Wiring(scheduler, NO_TRANSPORT, TOPOLOGY, Tracer(0), sequences)
    requests = Scheduler(Resources(Experience(TOPOLOGY.num_groups)))
    admission = Admission(Prompter(pair.target, CONTEXT), sequences, TOPOLOGY.num_stages, requests.kv.capacity)
    return DraftLoop(wiring, admission, requests, load_drafter=load_drafter)


def test_a_stop_that_comes_with_the_end_of_a_request_is_obeyed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler hands a rank its next message with the reply to a report; here that message is the stop."""
    monkeypatch.setattr(request_queue, "_LOOK_SECONDS", 60.0)  # on a busy machine it might take the second request before
    scheduler = EndsAtOnce(FreshRun.stop)
    first, second = scheduler.submit(REQUEST), scheduler.submit(REQUEST)
    loop_of(scheduler, pair).serve(NO_TRANSPORT)
    assert scheduler.read_answer(second, "0", 0)[-1][1] == ErrorEvent("the cluster is being stopped")
    assert not [event for _, event in scheduler.read_answer(first, "0", 0) if isinstance(event, ErrorEvent)]


def test_an_abort_that_comes_with_the_end_of_a_request_is_raised(pair: Pair) -> None:
    scheduler = EndsAtOnce(lambda scheduler: scheduler.abort(1, "went away"))
    scheduler.submit(REQUEST)
    with pytest.raises(PipedecError, match="rank 1: went away"):
        loop_of(scheduler, pair).serve(NO_TRANSPORT)


def test_a_run_whose_keys_are_gone_is_given_up(pair: Pair) -> None:
    scheduler = FreshRun(TOPOLOGY)  # never opened: as after a FLUSHALL
    with pytest.raises(SchedulerLost, match="its keys were deleted"):
        loop_of(scheduler, pair).serve(NO_TRANSPORT)


class NotedDrafter:
    """Notes which requests it drafts for; has computed every prompt and proposes nothing."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def open_lane(self, number: int, sequence: object, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        self.opened.append(number)
        return len(token_ids)

    def close_lane(self, number: int) -> None: ...
    def follow_tree(self, number: int, thread: int, changes: object) -> None: ...
    def threads_changed(self, number: int) -> None: ...
    def forget_prefixes(self) -> None: ...

    def num_forwards(self, requested: Sequence[DraftRows]) -> int:
        return 1

    def expand(self, requested: Sequence[DraftRows], prompts: object) -> list[Candidates]:
        return [Candidates(torch.tensor(entry.rows), *torch.zeros(2, len(entry.rows), 0)) for entry in requested]


class Patient(EndsAtOnce):
    """Rank 0 may have to wait for a request until the end of the one before it is published, but not for ever."""

    def __init__(self, meanwhile: Callable[[FreshRun], object]) -> None:
        super().__init__(meanwhile)
        self._until = time.monotonic() + 30

    def wait_request(self, timeout_seconds: float) -> RankMessage | None:
        assert time.monotonic() < self._until, "rank 0 waits on"
        return FreshRun.wait_request(self, timeout_seconds)


def test_a_draft_model_that_is_loaded_late_is_used_as_soon_as_it_is_there(pair: Pair) -> None:
    """As after the recovery of rank 0: until then methods that need one do without."""
    drafter, may_load = NotedDrafter(), Flag()

    def meanwhile(scheduler: FreshRun) -> None:
        assert may_load.is_set() or not drafter.opened
        may_load.set()
        if drafter.opened:
            scheduler.stop()
        else:
            scheduler.submit(DRAFTED)

    def load() -> Drafter:
        assert may_load.wait(60)
        return drafter

    scheduler = Patient(meanwhile)
    first = scheduler.submit(DRAFTED)
    loop_of(scheduler, pair, load).serve(NO_TRANSPORT)
    assert drafter.opened == scheduler.begun[-1:] != [first]


def lose_rank(scheduler: FreshRun) -> None:
    """Rank 1 is lost, if it was not, and the next epoch begins."""
    scheduler.enter(scheduler.recover([1], "rank 1 was killed"))
    scheduler.open(DESCRIPTION, recovers=True)


class Fatal(FreshRun):
    """Rank 1 is lost as soon as a request begins."""

    def begin_session(self, session: int, planned: Sequence[Planned], trace_lines: int) -> None:
        self.recover([1], "rank 1 was killed")
        super().begin_session(session, planned, trace_lines)


@pytest.mark.parametrize("is_new", [True, False], ids=["a new process", "the same process"])
def test_a_request_that_three_epochs_did_not_outlive_is_refused_with_the_cause(pair: Pair, is_new: bool) -> None:
    scheduler = Fatal(TOPOLOGY)
    scheduler.open(DESCRIPTION, recovers=True)
    number, loop = scheduler.submit(REQUEST), loop_of(scheduler, pair)
    if is_new:
        scheduler.pop_requests(1)
    for _ in range(3):
        if not is_new:
            with pytest.raises(EpochEnded):
                loop.serve(NO_TRANSPORT)
        lose_rank(scheduler)
    scheduler.stop()
    loop.serve(NO_TRANSPORT)
    *_, (_, event) = scheduler.read_answer(number, "0", 0)
    assert isinstance(event, ErrorEvent)
    assert "lost ranks 3 times while it answered this request" in event.message and "rank 1 was killed" in event.message
    assert scheduler.status().running == ()


class Unheard(EndsAtOnce):
    """Rank 1 is lost before anything is published in the first epoch."""

    def publish_all(self, posts: Sequence[Post], stats: RunStats | None = None) -> None:
        if posts and self.epoch == 0:
            self.recover([1], "rank 1 was killed")
        super().publish_all(posts, stats)


def test_what_could_not_be_published_is_published_in_the_next_epoch(pair: Pair) -> None:
    """And what has ended is not begun again, though the journal has it."""
    scheduler = Unheard(lambda scheduler: wait_until(lambda: scheduler.current_epoch() == 1))
    number, loop = scheduler.submit(REQUEST), loop_of(scheduler, pair)
    with pytest.raises(EpochEnded):
        loop.serve(NO_TRANSPORT)
    assert scheduler.read_answer(number, "0", 0) == []
    lose_rank(scheduler)
    scheduler.stop()
    loop.serve(NO_TRANSPORT)
    tokens, completion = (event for _, event in scheduler.read_answer(number, "0", 0))
    assert isinstance(tokens, TokensEvent) and tokens.token_ids == [5] and isinstance(completion, CompletionEvent)
    assert scheduler.status().running == () and scheduler.begun == [number]
