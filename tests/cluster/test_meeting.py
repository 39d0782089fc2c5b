"""Ranks meet over a real Redis: who fits, who does not, which interface, who cannot be reached, what their GPUs hold."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from msgspec import structs
from support.clock import Clock
from support.clusters import client_of, status_of
from support.gguf_files import save_gguf
from support.obedient_ranks import GPU_BYTES, free_file, pretend_gpus
from support.prepared_ranks import PreparedRanks
from support.processes import wait_until
from support.tiny_pair import SENTENCES, Pair
from support.whole_scheduler import WholeScheduler

from pipedec.checkpoints import weights_digest
from pipedec.cluster.local import LocalCluster, serve_rank
from pipedec.cluster.meeting import (
    LOOPBACK,
    Interface,
    Meeting,
    Met,
    RankMemory,
    check_cards,
    check_nccl,
    choose_interface,
    use_interface,
)
from pipedec.cluster.network import machine_id
from pipedec.cluster.place import RankPlace, RunAddress, checked_host
from pipedec.cluster.processes import RankProcesses
from pipedec.cluster.rank import check_device
from pipedec.config import ServerConfig
from pipedec.core.errors import PipedecError, RankLost, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.messages.events import AddressEvent, CardEvent
from pipedec.messages.request import PromptRequest
from pipedec.messages.stats import ActivityReport
from pipedec.plan.budgets import rank_needs
from pipedec.plan.kv_memory import GpuMemory, tokens_beside
from pipedec.plan.placement import Placement
from pipedec.plan.spec import PipelineSpec, run_description
from pipedec.scheduler import EmbeddedRedis, connect
from pipedec.transport.rendezvous import MEETING_SECONDS

GB = 10**9
HERE = CardEvent(1, "a", machine_id(), "10.0.0.1", {"pipedec": "1", "torch": "2"}, {"target": "x"})
FIRST = CardEvent(0, "b", "elsewhere", "10.0.0.2", {"pipedec": "1", "torch": "2"}, {"target": "x"})


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@dataclass
class Gpu:
    """A GPU of 4 GB of which so much is free."""

    name: str
    free: int
    asked: int = 0

    def ask(self, device: torch.device) -> GpuMemory:
        self.asked += 1
        return GpuMemory(self.free, 4 * GB)


class Run:
    """A run of two stages whose ranks meet in threads of this process."""

    def __init__(self, url: str, name: str, spec: PipelineSpec) -> None:
        self._url, self._name, self.spec = url, name, spec
        self.threads = ThreadPoolExecutor(3)
        self.scheduler = self.connect()

    def connect(self) -> WholeScheduler:
        return WholeScheduler(connect(self._url), self._name, self.spec.topology)

    def meet(
        self, rank: int, local_rank: int | None = None, local_world_size: int = 3, epoch: int = 0, gpu: Gpu | None = None,
        **more: Any,
    ) -> Future[Met]:  # fmt: skip
        """As a rank of one host, unless a smaller local world says otherwise.

        Args:
            gpu: on which it is about to load its weights.
        """
        place = RankPlace(rank, 3, rank if local_rank is None else local_rank, local_world_size, "here", **more)
        scheduler, memory = self.connect(), None
        scheduler.enter(epoch)
        if gpu is not None:
            memory = RankMemory(self.spec, place, torch.device("cuda", 0), gpu.name, gpu.ask, patience_seconds=0)
        return self.threads.submit(self._hold, Meeting(scheduler, place, self.spec, memory))

    @staticmethod
    def _hold(meeting: Meeting) -> Met:
        with meeting.hold() as met:
            met.rendezvous.store.set(f"rank {met.rendezvous.rank}", "is here")
            met.rendezvous.store.wait(["rank 0", "rank 1", "rank 2"])
            return met

    @property
    def num_posted(self) -> int:
        """What the ranks have told each other so far."""
        return len(self.scheduler.read_answer(self.scheduler.keys.meeting, "0", 0))

    def meet_all(self, **more: Any) -> list[Met]:
        """Ranks on one host."""
        return [future.result(30) for future in [self.meet(rank, **more) for rank in range(3)]]

    def post(self, rank: int, **different: Any) -> None:
        self.scheduler.publish(self.scheduler.keys.meeting, self.card(rank, **different))

    def card(self, rank: int, **different: Any) -> CardEvent:
        """What a rank on another machine posts: the same as here, but for what is ``different``."""
        own = Meeting(self.connect(), RankPlace(0, 3, 0, 1, "here"), self.spec).card
        return structs.replace(own, **{"rank": rank, "host": f"host-{rank}", "machine": f"machine-{rank}"} | different)


@pytest.fixture
def run(server: EmbeddedRedis, pair: Pair, request: pytest.FixtureRequest, state_directory: Path) -> Iterator[Run]:
    made = Run(server.url, re.sub(r"[^a-z_]", "-", request.node.name), pair.spec(2))
    yield made
    made.threads.shutdown()
    made.scheduler.clear()


@pytest.fixture(autouse=True)
def nccl_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that meet in this process tell NCCL their interface."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")


@pytest.fixture
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_ranks_of_one_machine_meet_on_its_loopback(run: Run, no_interface: None) -> None:
    met = run.meet_all()
    assert {(one.interface.name, one.interface.address) for one in met} == {("lo", LOOPBACK)}
    assert [one.rendezvous.rank for one in met] == [0, 1, 2]
    assert met[0].digests == {}, "the ranks of one machine read the same files"
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_a_rank_that_does_not_come_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, no_interface: None) -> None:
    clock = Clock(monkeypatch)
    run.spec = replace(run.spec, places=tuple(Placement(host, "cpu", 0) for host in ("here", "here", "there")))
    waiting = [run.meet(rank) for rank in (0, 1)]
    assert wait_until(lambda: run.num_posted == 2)
    clock.advance(MEETING_SECONDS)
    for future in waiting:
        with pytest.raises(RankLost, match=rf"^rank 2 \(stage 2\) on there did not come within {MEETING_SECONDS:.0f} s$"):
            future.result(30)


def test_a_rank_that_downloads_its_part_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch, no_interface: None) -> None:
    clock, third = Clock(monkeypatch), run.connect()
    waiting = [run.meet(rank) for rank in (0, 1)]
    assert wait_until(lambda: run.num_posted == 2)
    third.renew_lease(2, ActivityReport("loading"))
    clock.advance(MEETING_SECONDS)
    with pytest.raises(TimeoutError):
        waiting[0].result(1)
    assert [future.result(30).rendezvous.rank for future in [*waiting, run.meet(2)]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"configs": {"target": "another"}}, r"has another target than rank 0 \(draft\) on host-0: copy"),
        (
            {"settings": {"KV slots": "32 in blocks of 16"}},
            r"has KV slots [\d,]+ in blocks of 16, but rank 0 \(draft\) on host-0 has 32 in blocks",
        ),
        ({"settings": {"--wire-dtype": "int8"}}, r"has --wire-dtype auto, but rank 0 \(draft\) on host-0 has int8: give both"),
        (  # as where torchrun starts one without a plan on a host with GPUs and on one without
            {"settings": {"weights": "bfloat16", "weights of the draft": "bfloat16", "KV slots": "512 in blocks of 256"}},
            r"has weights float32, but rank 0 \(draft\) on host-0 has bfloat16: "
            r"give both the same flags, --device and --dtype if their GPUs differ$",
        ),
    ],
    ids=["checkpoint", "flags", "wire", "dtype"],
)
@pytest.mark.failure_case("M7")
def test_another_checkpoint_and_other_flags_are_found_before_anything_is_loaded(
    run: Run, no_interface: None, different: dict[str, Any], message: str
) -> None:
    run.post(0, **different)
    run.post(2)
    with pytest.raises(UserError, match=rf"^rank 1 \(stage 1\) on here {message}"):
        run.meet(1, 0, 1).result(30)


@pytest.mark.failure_case("M7")
def test_files_of_the_same_model_in_other_formats_do_not_meet(run: Run, pair: Pair, tmp_path: Path) -> None:
    cards = []
    for kind in ("Q8_0", "Q4_0"):
        target = save_gguf(tmp_path / f"{kind}.gguf", pair.target, kind)
        run.spec = run.spec.replaced(target=str(target))
        cards.append(run.card(0).configs["target"].partition(", "))
    assert cards[0][0] == cards[1][0] and [card[2] for card in cards] == ["GGUF: Q8_0", "GGUF: Q4_0"]


@pytest.mark.failure_case("M2")
def test_weights_that_differ_in_one_byte_are_found(run: Run) -> None:
    """Rank 0 has listed all tensors of its host. Their names, configurations and tokenizers are equal."""
    listed = {"target": {"model.layers.3.mlp.up_proj.weight": "f" * 64}}
    with socket.create_server((LOOPBACK, 0)) as other_host:
        for rank in (0, 2):
            run.post(rank)
            address = AddressEvent(rank, LOOPBACK, other_host.getsockname()[1], listed if rank == 0 else {})
            run.scheduler.publish(run.scheduler.keys.meeting, address)
        named = r"^rank 1 \(stage 1\) on here has other weights of the target than rank 0 .* on host-0 \(model\.lay"
        with pytest.raises(UserError, match=named):
            run.meet(1, 0, 1).result(30)


def test_a_rank_that_takes_over_must_have_the_weights_with_which_the_run_began(run: Run) -> None:
    for rank in (0, 2):
        run.post(rank)
    begun = {"target": {"model.layers.0.input_layernorm.weight": "f" * 64}, "draft": {"model.norm.weight": "f" * 64}}
    with pytest.raises(
        UserError, match=r"^rank 1 .* other weights of the target than the run began with \(.*: copy .* `pipedec d"
    ):
        run.meet(1, 0, 1, digests=begun).result(30)


def test_each_rank_digests_what_it_reads_and_rank_zero_all_if_it_is_to(
    run: Run, monkeypatch: pytest.MonkeyPatch, no_interface: None
) -> None:
    """As on three machines. The models have the digests that they have where one host digests all of them."""
    monkeypatch.setattr("pipedec.cluster.meeting.choose_interface", lambda *_: Interface("lo", LOOPBACK, "all are here"))
    met = [future.result(30) for future in [run.meet(rank, 0, 1, lists=rank == 0) for rank in range(3)]]
    whole = {"target": run.spec.target, "draft": run.spec.draft, "bita": run.spec.bita}
    assert [sorted(one.own) for one in met] == [["bita", "draft", "target"], ["bita", "target"], ["bita", "target"]]
    assert [one.digests for one in met] == [{key: weights_digest(path) for key, path in whole.items() if path}] * 3
    told = [event for _, event in run.scheduler.read_answer(run.scheduler.keys.meeting, "0", 0)]
    digests = {event.rank: event.digests for event in told if isinstance(event, AddressEvent)}
    assert {rank: sorted(found) for rank, found in digests.items()} == {
        0: ["bita", "draft", "target"], 1: ["bita", "target"], 2: ["bita", "target"]
    }  # fmt: skip
    assert digests[1]["target"].items() | digests[2]["target"].items() == digests[0]["target"].items()
    assert not digests[1]["target"].keys() & digests[2]["target"].keys()


def test_a_host_that_cannot_be_reached_is_named_with_its_address(run: Run) -> None:
    with socket.create_server((LOOPBACK, 0)) as other_host, socket.socket() as closed:
        closed.bind((LOOPBACK, 0))  # nobody listens there
        ports = {0: other_host.getsockname()[1], 2: closed.getsockname()[1]}
        for rank, port in ports.items():
            run.post(rank)
            run.scheduler.publish(run.scheduler.keys.meeting, AddressEvent(rank, LOOPBACK, port, {}))
        expected = (
            rf"^rank 1 .* on here cannot connect to rank 2 .* on host-2 at 127\.0\.0\.1, port {ports[2]} \(connection refused\)"
        )
        with pytest.raises(RankLost, match=expected):
            run.meet(1, 0, 1).result(30)


def test_only_what_both_ranks_have_is_compared() -> None:
    check_cards(HERE, FIRST)
    check_cards(structs.replace(HERE, configs={}), FIRST)
    with pytest.raises(UserError) as refused:
        check_cards(structs.replace(HERE, versions={"pipedec": "1", "torch": "3"}), FIRST)
    expected = "rank 1 (stage 1) on a has torch 3, but rank 0 (draft) on b has 2: install the same version on both"
    assert str(refused.value) == expected


def nccl_cards(*builds: str | None) -> list[CardEvent]:
    """Cards of stages with these builds of torch; None requests no NCCL."""
    versions = [{"torch": "2"} | ({} if build is None else {"torch build": build, "NCCL": "2.27.7"}) for build in builds]
    return [structs.replace(HERE, rank=rank, host=f"host-{rank}", versions=one) for rank, one in enumerate(versions, start=1)]


@pytest.mark.failure_case("S3d")
def test_over_nccl_builds_for_another_cuda_are_found() -> None:
    """Not where one stage has no GPU of its own, and all use gloo, as rank 0 always does."""
    mine = {"torch build": "2.13.0+cu126", "NCCL": "2.27.7"}
    stages = nccl_cards("2.13.0+cu130", "2.13.0+cu126")
    with pytest.raises(UserError) as refused:
        check_nccl(stages[1], stages, mine)
    assert str(refused.value) == (
        "rank 2 (stage 2) on host-2 has torch build 2.13.0+cu126, but rank 1 (stage 1) on host-1 has 2.13.0+cu130: "
        "install the same build on both, or give --transport gloo"
    )
    with pytest.raises(UserError, match=r"has NCCL 2\.26\.2, but rank 1 \(stage 1\) on host-1 has 2\.27\.7: install the same"):
        check_nccl(stages[1], stages, {"NCCL": "2.26.2"})
    mixed = nccl_cards("2.13.0+cu130", "2.13.0+cu126", None)
    check_nccl(mixed[1], mixed, mine)
    check_nccl(mixed[2], mixed, {})
    check_nccl(FIRST, nccl_cards("2.13.0+cu130", "2.13.0+cu130"), {})


def test_stages_that_request_nccl_tell_their_builds(run: Run, no_interface: None) -> None:
    mine = {"torch build": "2.13.0+cu126", "NCCL": "2.27.7"}
    meeting = Meeting(run.connect(), RankPlace(2, 3, 2, 3, "here"), run.spec, nccl_versions=mine)
    for rank in (0, 1):
        card = run.card(rank)
        theirs = structs.replace(card, versions={**card.versions, **mine, "torch build": "2.13.0+cu130"}) if rank else card
        run.scheduler.publish(run.scheduler.keys.meeting, theirs)
    with (
        pytest.raises(UserError, match=r"^rank 2 \(stage 2\) on here has torch build 2\.13\.0\+cu126, but rank 1 \(stage 1\)"),
        meeting.hold(),
    ):
        pass


def test_the_interface_towards_the_others_is_chosen_unless_one_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the host of Redis itself, from which Redis is reached over the loopback."""
    assert choose_interface(HERE, [FIRST, HERE], "lo") == Interface("lo", LOOPBACK, "configured")
    with pytest.raises(UserError, match=r"^rank 1 \(stage 1\) on a has no network interface ib7 with an address"):
        choose_interface(HERE, [FIRST, HERE], "ib7")
    interfaces = {"lo": LOOPBACK, "eth7": "10.0.0.1"}
    entries = {name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    route_to = {"10.0.0.2": "10.0.0.1"}.get
    assert choose_interface(HERE, [FIRST, HERE], None, route_to) == Interface("eth7", "10.0.0.1", "it routes to Redis")
    beside_redis = structs.replace(HERE, address="127.0.1.1")
    assert choose_interface(beside_redis, [FIRST, beside_redis], None, route_to) == Interface(
        "eth7", "10.0.0.1", "it routes to b"
    )
    alone = structs.replace(FIRST, address="10.9.9.9")
    with pytest.raises(UserError, match="has no route to the other hosts: set its interface"):
        choose_interface(beside_redis, [alone, beside_redis], None, route_to)


def test_nccl_uses_the_interface_between_hosts_unless_it_was_told_another(
    monkeypatch: pytest.MonkeyPatch, no_interface: None
) -> None:
    use_interface(Interface("eth7", "10.0.0.1", ""))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth7"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_interface(Interface("eth8", "10.0.0.1", ""))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_a_rank_on_another_host_than_planned_says_the_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "beta")
    places = tuple(Placement(host, "cpu", 0) for host in ("alpha.invalid", "alpha.invalid", "beta"))
    servers = ServerConfig("alpha.invalid", {"cpu": 1}), ServerConfig("beta", {"cpu": 1})
    assert checked_host(RankPlace(2, 3, 0, 1), places, servers) == "beta"
    with pytest.raises(UserError) as refused:
        checked_host(RankPlace(1, 3, 1, 2), places, servers)
    assert str(refused.value).startswith(
        "rank 1 (stage 1) was started on beta, but the plan puts it on alpha.invalid: "
        "start the hosts in the order alpha.invalid, beta"
    )
    # Who started a rank may know its host by a name that nothing resolves.
    assert checked_host(RankPlace(1, 3, 1, 3, host="alpha.invalid"), places, servers) == "alpha.invalid"
    with pytest.raises(UserError, match=r"set its hostname in cluster.yaml"):
        checked_host(RankPlace(1, 3, 1, 3), places[:2], servers[:1])
    assert checked_host(RankPlace(1, 3, 1, 3), None, ()) == "beta", "without a plan any host will do"
    check_device(RankPlace(1, 3, 1, 3), pair.spec(2), torch.device("cpu"))


@pytest.mark.usefixtures("leaves_nothing")
def test_a_rank_that_dies_before_the_others_come_is_noticed(run: Run, server: EmbeddedRedis) -> None:
    """Ranks hold their leases from the beginning, which also keep what they have posted."""
    ranks = RankProcesses()
    try:
        for rank in (0, 1):  # rank 2 never comes
            address = RunAddress(server.url, run.scheduler.keys.run_id)
            ranks.start(rank, serve_rank, RankPlace(rank, 3, rank, 3), run.spec, address)
        posted = run.scheduler.keys.answer(run.scheduler.keys.meeting)
        assert wait_until(lambda: run.num_posted == 2, 60)
        assert run.scheduler.status().alive == (0, 1)
        run.scheduler.client.expire(posted, 5)
        assert wait_until(lambda: run.scheduler.client.ttl(posted) > 5), "every lease renews it"
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert wait_until(lambda: ranks.exit_statuses == {0: -signal.SIGKILL, 1: 1}, 30)
        assert "rank 0 (draft) stopped answering" in str(run.scheduler.failure())
    finally:
        ranks.kill()


@pytest.fixture
def gpu_run(run: Run) -> Run:
    """Whose requests could use all memory there is."""
    run.spec = replace(run.spec, num_gpus=2).replaced(device="auto", max_num_seqs=65_536)
    return run


def slots_of(spec: PipelineSpec, gpu: Gpu, *ranks: int) -> int:
    return tokens_beside(GpuMemory(gpu.free, 4 * GB).usable(0.9), [rank_needs(spec, rank) for rank in ranks]) // 256 * 256


def test_ranks_agree_on_what_the_scarcest_gpu_holds(gpu_run: Run, no_interface: None) -> None:
    """Rank 0 shares one with stage 2, in whichever order they come; the other GPU is used by somebody else, too."""
    shared, other = Gpu("GPU-a", 3_900_000_000), Gpu("GPU-b", 1_500_000_000)
    met = [future.result(30) for future in [gpu_run.meet(0, gpu=shared), gpu_run.meet(1, gpu=other), gpu_run.meet(2, gpu=shared)]]
    expected = min(slots_of(gpu_run.spec, shared, 0, 2), slots_of(gpu_run.spec, other, 1))
    assert {one.kv_slots for one in met} == {expected} and expected == slots_of(gpu_run.spec, other, 1)
    other.free = 3_900_000_000
    gpu_run.scheduler.close_answer(gpu_run.scheduler.keys.meeting)
    met = [future.result(30) for future in [gpu_run.meet(2, gpu=shared), gpu_run.meet(1, gpu=other), gpu_run.meet(0, gpu=shared)]]
    assert {one.kv_slots for one in met} == {slots_of(gpu_run.spec, shared, 0, 2)}


def test_a_gpu_without_memory_is_told_by_its_rank_before_it_loads(gpu_run: Run, no_interface: None) -> None:
    free = Gpu("GPU-a", 4 * GB)
    refused = gpu_run.meet(2, gpu=Gpu("GPU-b", GB // 2))
    waiting = [gpu_run.meet(rank, gpu=free) for rank in (0, 1)]
    with pytest.raises(UserError, match=r"^rank 2 \(stage 2\) on here cannot load: .* other processes hold 3\.1 GB,"):
        refused.result(30)
    gpu_run.scheduler.abort(2, "rank 2 has no memory")
    for future in waiting:
        with pytest.raises(PipedecError, match=r"^rank 2 has no memory$"):
            future.result(30)


def test_a_replaced_rank_takes_the_slots_of_the_run(gpu_run: Run, no_interface: None) -> None:
    """Its own GPU now has room for more; those that are left have pools of that size."""
    run, gpu = gpu_run, Gpu("GPU-a", 4 * GB)
    run.scheduler.open(run_description(replace(run.spec, agreed_slots=512)), recovers=True)
    assert run.scheduler.recover([1], "rank 1 was killed") == 1
    met = [future.result(30) for future in [run.meet(0, epoch=1), run.meet(1, epoch=1, gpu=gpu), run.meet(2, epoch=1)]]
    assert {one.kv_slots for one in met} == {512} and gpu.asked == 1
    run.scheduler.enter(1)
    assert run.scheduler.recover([0, 1, 2], "all are started again, as with NCCL") == 2
    met = run.meet_all(epoch=2, gpu=gpu)
    assert {one.kv_slots for one in met} == {512}


def test_a_replaced_rank_that_has_less_room_says_so(gpu_run: Run, no_interface: None) -> None:
    run = gpu_run
    run.scheduler.open(run_description(replace(run.spec, agreed_slots=5_120_000)), recovers=True)
    run.scheduler.recover([1], "rank 1 was killed")
    refused = run.meet(1, epoch=1, gpu=Gpu("GPU-a", 2_000_000_000))
    waiting = [run.meet(rank, epoch=1) for rank in (0, 2)]
    with pytest.raises(UserError, match=r"^rank 1 \(stage 1\) on here cannot load: .* keys and values of 5,120,000 tokens need "):
        refused.result(30)
    run.scheduler.enter(1)
    run.scheduler.abort(1, "rank 1 has no memory")
    for future in waiting:
        with pytest.raises(PipedecError, match=r"^rank 1 has no memory$"):
            future.result(30)


def test_a_given_size_is_not_measured_but_must_be_free(gpu_run: Run, no_interface: None) -> None:
    gpu_run.spec = gpu_run.spec.replaced(kv_cache_memory="1MiB")
    gpu = Gpu("GPU-a", 3_900_000_000)
    met = gpu_run.meet_all(gpu=gpu)
    assert {one.kv_slots for one in met} == {None} and gpu.asked == 3


REQUEST = PromptRequest(SENTENCES[0], True, "pp", SamplingParams(max_tokens=12, ignore_eos=True))
ROOM = 8_000_000  # bytes for keys and values of the rank with the largest weights


@pytest.mark.usefixtures("leaves_nothing")
def test_the_slots_of_the_first_epoch_are_those_of_a_replaced_rank(pair: Pair, tmp_path: Path) -> None:
    """Though its GPU could hold more by then."""
    spec = replace(pair.spec(2), num_gpus=2).replaced(device="auto", max_num_seqs=65_536)
    spec = spec.replaced(transport=PreparedRanks("gloo", pretend_gpus, tmp_path), max_restarts=3)
    largest = max(rank_needs(spec, rank).fixed_bytes for rank in range(3))
    free_file(tmp_path).write_text(str(GPU_BYTES // 10 + largest + ROOM))
    with LocalCluster(spec) as cluster:
        slots = cluster.description().kv_slots
        assert slots == ROOM // 512 // 256 * 256 and len(list(tmp_path.glob("*.asked"))) == 3
        first = client_of(cluster).ask(REQUEST).token_ids
        free_file(tmp_path).write_text(str(GPU_BYTES))
        pids = cluster.pids
        os.kill(pids[1], signal.SIGKILL)
        assert wait_until(lambda: cluster.pids[1] != pids[1], 60)
        assert client_of(cluster).ask(REQUEST).token_ids == first
        assert cluster.description().kv_slots == slots
        assert wait_until(lambda: (stats := status_of(cluster).stats) is not None and stats.kv.capacity == slots)
        asked = {int(file.stem) for file in tmp_path.glob("*.asked")}
        assert asked == {*pids.values(), cluster.pids[1]}, "those that are left have loaded, and do not ask again"
