"""Emulated devices: how long things should last, ranks that sleep until then, and the same times added up."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.tiny_pair import Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.config import paper_cluster
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Load
from pipedec.decoding.events import TimestepLoad
from pipedec.device import GpuDevice
from pipedec.engine.devices import chosen_device
from pipedec.engine.emulation import EmulatedClock, Pacer, Turn
from pipedec.engine.local import LocalPipeline
from pipedec.engine.recorder import Recorder
from pipedec.hardware import LinkSpec
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.plan.costs import RankTiming
from pipedec.plan.emulation import Emulation, with_stages
from pipedec.plan.partition import plan
from pipedec.plan.roofline import PassTime
from pipedec.plan.spec import run_description
from pipedec.topology import Topology
from pipedec.validation import parse_json, to_json

SLOW_LINK = LinkSpec("slow", 1000, 1, "test")  # 1 ms + 1 ms per MB


def emulation(stages: int = 3, slow_motion: float = 1.0) -> Emulation:
    """Stages of 10 ms up to 5 rows, 2 ms per row from there; a draft of 4 ms; rows of 1 MB."""
    stage = RankTiming(PassTime(10, 2, 0), SLOW_LINK, 1_000_000)
    draft = RankTiming(PassTime(4, 0.1, 0), SLOW_LINK, 0)
    return Emulation("test", slow_motion, draft, (stage,) * stages, counts_own_work=False)


def test_the_paper_s_stage_is_22_ms_up_to_the_roofline_s_knee() -> None:
    made = Emulation.of_plan(plan(paper_cluster(), "paper-14"))
    stage = made.stages[1].compute
    assert stage.ms(1) == pytest.approx(22, abs=0.1)
    assert 70 < stage.knee_rows < 80
    assert stage.ms(128) == pytest.approx(2 * 128 * 6 * 855_654_400 / 35.6e12 * 1000, rel=0.01)
    assert made.stages[6].send_ms(32) > 8 * made.stages[5].send_ms(32), "stage 7 sends to the other server"
    assert made.draft is not None
    assert made.draft.compute_ms(Load(32)) == pytest.approx(6, abs=0.1)


@pytest.mark.parametrize("factor", [0.0, float("nan"), 1e9])
def test_slow_motion_has_bounds(factor: float) -> None:
    with pytest.raises(UserError, match="slow motion must be a factor"):
        emulation(slow_motion=factor)


def test_a_timestep_lasts_as_long_as_the_slowest_rank_s_in_slow_motion() -> None:
    made = emulation(slow_motion=10.0)
    load = Load(made.room)
    assert made.timestep_ms == pytest.approx(10 * (made.stages[0].compute_ms(load) + made.stages[0].send_ms(load.rows)))
    assert made.draft is not None
    slow = replace(made, draft=replace(made.draft, compute=PassTime(1000, 0.1, 0)))
    assert slow.timestep_ms == pytest.approx(10_000, rel=0.1)


def test_another_stage_count_takes_the_same_devices() -> None:
    cut = plan(with_stages(paper_cluster(), "paper-14", 8), "paper-14")
    assert [stage.placement.device for stage in cut.stages] == ["rtx3090"] * 8
    assert [stage.placement.host for stage in cut.stages] == ["server-1"] * 7 + ["server-2"]
    assert sum(len(stage.layers) for stage in cut.stages) == 80
    assert cut.num_groups == 8
    assert cut.problems, "10 layers of a 70B in float32 do not fit into 24 GB"
    assert cut.draft is not None and cut.draft.placement.device == "l40"
    assert Emulation.of_plan(plan(paper_cluster(), "7x2-3090")).shared_stage == 14
    cut = plan(with_stages(paper_cluster(), "7x2-3090", 8), "7x2-3090")
    assert cut.shared_stage == 8 and cut.draft is not None and cut.draft.placement == cut.stages[7].placement


def test_clock_takes_the_slowest_rank_and_the_busiest_link() -> None:
    clock = EmulatedClock(emulation(), Topology.even(3, 3))
    clock.add(TimestepLoad([Load(8)], {1: Load(1), 2: Load(10), 3: Load(5)}, sent={0: 1, 1: 1, 2: 3}))
    # Stage 2 multiplies 10 rows in 20 ms; then it receives 1 row (2 ms) and sends 3 (4 ms).
    assert clock.total_ms == pytest.approx(20 + 2 + 4)
    clock.add(TimestepLoad([Load(1), Load(8), Load(8), Load(8)], {1: Load(1)}))
    assert clock.total_ms == pytest.approx(26 + 16), "the draft's forwards add up"


@pytest.mark.parametrize("passage", [4, 9, 128])
def test_with_timesteps_on_links_their_latency_is_paid_once_per_passage(passage: int) -> None:
    """One row takes a stage 10 ms and a link 1 ms and its latency; the verdict takes the latency alone."""
    made = emulation()
    link = replace(made.stages[0].link, latency_us=20_000)
    slow = replace(made, duplex="full", stages=tuple(replace(stage, link=link) for stage in made.stages))
    assert slow.draft is not None
    compute_ms, send_ms = slow.stages[0].compute_ms(Load(1)), slow.stages[0].send_ms(1)
    ring_ms = slow.draft.send_ms(0) + 3 * compute_ms + 2 * send_ms + 20
    full, alone = (EmulatedClock(slow, Topology.even(3, 3)) for _ in range(2))
    for timestep in range(4 * passage):
        everywhere = TimestepLoad(computed=dict.fromkeys((1, 2, 3), Load(1)), sent={0: 1, 1: 1, 2: 1})
        full.add(everywhere, int(timestep >= passage - 3))
    assert full.total_ms == pytest.approx(max(4 * ring_ms, 4 * passage * compute_ms), rel=0.25)
    for answer in (1, 2):  # one row, which enters again when it is back
        for timestep in range(4 * passage):
            stage = timestep % passage + 1
            here = {stage: Load(1)} if stage <= 3 else {}
            alone.add(TimestepLoad(computed=here, sent={stage - 1: 1} if here else {}), int(timestep >= passage - 3))
        assert alone.total_ms == pytest.approx(4 * ring_ms * answer)
        alone.restart()


def test_full_duplex_links_send_and_receive_at_the_same_time() -> None:
    half, full = (EmulatedClock(replace(emulation(), duplex=duplex), Topology.even(3, 3)) for duplex in ("half", "full"))
    load = TimestepLoad(computed={1: Load(1), 2: Load(1)}, sent={1: 1, 2: 1})
    for clock in (half, full):
        clock.add(load)
    sent_ms = emulation().stages[0].send_ms(1)
    assert half.total_ms - full.total_ms == pytest.approx(sent_ms), "stage 2 receives, then sends"
    config = paper_cluster()
    both = replace(config, network=replace(config.network, duplex="full"))
    assert [Emulation.of_plan(plan(one, "paper-14")).duplex for one in (config, both)] == ["half", "full"]


def test_clock_adds_up_the_work_of_both_ranks_on_a_shared_device() -> None:
    shared = replace(emulation(), shared_stage=3)
    drafted, rows = [Load(1), Load(1)], {1: Load(10), 2: Load(1), 3: Load(1)}
    apart, clock = EmulatedClock(emulation(), Topology.even(3, 3)), EmulatedClock(shared, Topology.even(3, 3))
    apart.add(TimestepLoad(drafted, rows))
    timing = clock.add(TimestepLoad(drafted, rows))
    assert (apart.total_ms, clock.total_ms) == pytest.approx((20, 20)), "8 ms + 10 ms are less than the 20 ms of stage 1"
    assert timing.forward_seconds == pytest.approx((0.008, 0.008)), "a forward takes twice as long while the stage computes"
    assert timing.waiting_seconds == pytest.approx(0.020 - 0.016)
    assert clock.add(TimestepLoad(drafted, {3: Load(1)})).seconds == pytest.approx(0.018)
    assert clock.add(TimestepLoad([Load(1)] * 5, {3: Load(1)})).seconds == pytest.approx(0.030)
    assert clock.add(TimestepLoad(drafted, {1: Load(1)})).seconds == pytest.approx(0.010), "stage 3 has nothing to do"


def test_clock_lets_a_draft_end_before_a_later_stage_of_the_group_begins() -> None:
    """Stage 2 of a group begins when stage 1 has computed (10 ms) and sent (2 ms)."""
    clock = EmulatedClock(replace(emulation(4), shared_stage=2), Topology.even(4, 2))
    loads = {1: Load(1), 2: Load(1)}
    assert clock.add(TimestepLoad([Load(1)] * 3, loads, sent={1: 1})).seconds == pytest.approx(0.022)
    timing = clock.add(TimestepLoad([Load(1)] * 4, loads, sent={1: 1}))
    assert timing.seconds == pytest.approx(0.022 + 0.004), "4 of the draft's 16 ms are left then"
    assert timing.forward_seconds == pytest.approx((0.005,) * 4)


def test_clock_runs_the_stages_of_a_group_one_after_another() -> None:
    clock = EmulatedClock(emulation(4), Topology.even(4, 2))
    clock.add(TimestepLoad(computed=dict.fromkeys(range(1, 5), Load(1)), sent={0: 1, 1: 1, 2: 1, 3: 1}))
    # Two stages and the transfer between them; then stage 2 to stage 3. Rank 0's transfer is as long as its latency.
    assert clock.total_ms == pytest.approx(10 + 2 + 10 + 2)


def test_keys_and_values_are_read_beside_the_weights() -> None:
    stage = RankTiming(PassTime(10, 2, 1, past_ms=0.01), SLOW_LINK, 0)
    assert stage.compute_ms(Load(1, 100)) == pytest.approx(10 + 1 + 1)
    assert stage.compute_ms(Load(10, 100)) == pytest.approx(20 + 1), "ten rows take longer to multiply than all is to read"
    made = Emulation.of_plan(plan(paper_cluster(), "paper-14"))
    read_ms = made.stages[1].compute_ms(Load(1, 50_000)) - made.stages[1].compute_ms(Load(1))
    assert read_ms == pytest.approx(50_000 * 6 * 2 * 8 * 128 * 4 / 936e9 * 1000), "six layers, eight key-value heads, float32"


def test_rank_0_s_own_work_counts_before_and_beside_the_stages() -> None:
    own = replace(emulation(), counts_own_work=True)
    clock = EmulatedClock(own, Topology.even(3, 3))
    short = TimestepLoad([Load(1)], {1: Load(1)}, deciding_seconds=0.001, beside_seconds=0.002)
    timing = clock.add(short)
    assert clock.total_ms == pytest.approx(1 + 10)
    assert (timing.seconds, timing.waiting_seconds) == pytest.approx((0.011, 0.004))
    clock.add(replace(short, beside_seconds=0.020))
    assert clock.total_ms == pytest.approx(11 + 1 + 4 + 20)


def test_the_knee_is_that_of_the_stage_that_computes_first() -> None:
    stages = (RankTiming(PassTime(10, 2, 0), SLOW_LINK, 0), RankTiming(PassTime(9, 1, 0), SLOW_LINK, 0))
    assert Emulation("test", 1.0, None, stages).room == 5
    assert Emulation.of_plan(plan(paper_cluster(), "paper-14")).room == plan(paper_cluster(), "paper-14").knee == 76


def test_pacer_sleeps_the_rest_and_reports_overruns() -> None:
    pacer = Pacer(emulation(slow_motion=2.0), 1, "run")
    start = time.perf_counter()
    with pacer.computing(Load(1)):
        pass
    assert time.perf_counter() - start >= 0.020
    assert not pacer.take_overran()
    with pacer.computing(Load(1)):
        time.sleep(0.025)
    assert pacer.take_overran()
    assert not pacer.take_overran(), "an overrun is told once"
    sender = Pacer(emulation(slow_motion=2.0), 0, "run")
    start = time.perf_counter()
    sender.delay_sending(7)
    assert time.perf_counter() - start >= 0.002
    assert not sender.take_overran()


def test_pacer_waits_until_the_device_has_done_the_real_work() -> None:
    cuda = FakeCuda()
    pacer, began = Pacer(emulation(slow_motion=2.0), 1, "run", GpuDevice(cuda=cuda, now=lambda: cuda.now)), cuda.now
    with pacer.computing(Load(1)):
        cuda.give(0.5)
    assert cuda.now >= began + 0.5


def test_two_processes_that_share_a_device_compute_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(tmp_path))
    shared = replace(emulation(slow_motion=20.0), shared_stage=2)
    processes = multiprocessing.get_context("fork")
    ours, theirs = processes.Pipe()

    def draft() -> None:
        with Turn("other"):
            theirs.send("another run has a device of its own")
        with Pacer(shared, 0, "run").computing(Load(1)):
            theirs.send(time.perf_counter())

    drafting = processes.Process(target=draft)
    began = time.perf_counter()
    with Pacer(shared, 2, "run").computing(Load(1)):
        drafting.start()
        assert ours.recv().startswith("another run") and not ours.poll()
    assert ours.recv() >= began + 0.2, "after the stage's 10 ms in slow motion"
    drafting.join()


def test_the_recorder_paces_work_with_rows_alone() -> None:
    pacer = Pacer(emulation(slow_motion=2.0), 1, "run")
    recorder, began = Recorder(pace=pacer.computing), time.perf_counter()
    with recorder.span("1S1", "sync"):
        pass
    assert time.perf_counter() - began < 0.020
    with recorder.span("1F1", "dec", Load(1)):
        pass
    assert time.perf_counter() - began >= 0.020


@pytest.mark.fast_cases("pipedec")
@pytest.mark.parametrize("method", ["pp", "pipedec"])
def test_local_pipeline_computes_what_it_would_last(pair: Pair, method: str) -> None:
    spec = replace(pair.spec(3), emulation=emulation())
    pipeline = LocalPipeline.load(spec)
    request = TokenizedRequest(0, (1, 5, 9, 20), SamplingParams(max_tokens=12, ignore_eos=True), method)
    plain = LocalPipeline.load(pair.spec(3))
    expected = [verdict.tokens for verdict in plain.run(request)]
    assert [verdict.tokens for verdict in pipeline.run(request)] == expected
    assert plain.emulated_ms is None
    metrics = pipeline.last.metrics
    # 10 ms; then what enters, or the rows that are sent on: 1 ms of latency, 1 ms for the bytes of each.
    assert metrics.prefill_seconds == pytest.approx(0.011 + 0.015 + 0.015), "the prompt's four rows are one chunk"
    if method == "pp":
        assert metrics.decode_seconds == pytest.approx(11 * 0.035)
    else:
        assert metrics.decode_seconds > 0.010 * (metrics.timesteps - metrics.misses)
    assert pipeline.emulated_ms == pytest.approx(1000 * (metrics.prefill_seconds + metrics.decode_seconds))


@pytest.mark.slow
def test_processes_last_as_long_as_the_emulated_devices(pair: Pair, leaves_nothing: None) -> None:
    slow = replace(pair.spec(2), emulation=replace(emulation(2), slow_motion=2.0))
    impossible = RankTiming(PassTime(1e-6, 1e-9, 0), SLOW_LINK, 0)
    request = PromptRequest("The pipeline", method="pipedec", sampling=SamplingParams(max_tokens=8, ignore_eos=True))
    with LocalCluster(slow) as cluster:
        assert cluster.scheduler is not None
        completion = Client(cluster.scheduler).ask(request)
        assert completion.metrics.decode_seconds >= 2 * 0.010 * completion.metrics.timesteps
    with LocalCluster(replace(slow, emulation=Emulation("test", 1.0, impossible, (impossible,) * 2))) as cluster:
        assert cluster.scheduler is not None
        reply = Client(cluster.scheduler).follow(request)
        assert reply.completed().token_ids == completion.token_ids
        decoding = range(3, 3 + reply.completed().metrics.timesteps)
        assert reply.overran == {1, *decoding}, "the prompt entered in timestep 1 and has passed two stages after the second"


@pytest.mark.slow
def test_processes_that_share_an_emulated_device_last_as_long_as_computed(pair: Pair, leaves_nothing: None) -> None:
    """One stage and its draft on one device. Nothing but the two computes, so no real timestep is shorter than a computed one."""
    rank = RankTiming(PassTime(30, 0.01, 0), LinkSpec("fast", 0, 1e6, "test"), 0)
    alone = Emulation("test", 1.0, rank, (rank,), counts_own_work=False)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    seconds = []
    for emulated in (alone, replace(alone, shared_stage=1)):
        pipeline = LocalPipeline.load(replace(pair.spec(1), emulation=emulated))
        for _ in pipeline.run(TokenizedRequest(0, (1, 5, 9, 20), sampling, "pipedec")):
            pass
        seconds.append(pipeline.last.metrics.decode_seconds)
    assert seconds[1] > 1.3 * seconds[0]
    spec = replace(pair.spec(1), emulation=replace(alone, shared_stage=1))
    with LocalCluster(spec) as cluster:
        assert cluster.scheduler is not None
        completion = Client(cluster.scheduler).ask(PromptRequest((1, 5, 9, 20), method="pipedec", sampling=sampling))
    assert completion.metrics.decode_seconds >= 0.95 * seconds[1]


def test_clients_are_told_the_name_of_the_emulation(pair: Pair) -> None:
    spec = replace(pair.spec(2), emulation=emulation(2))
    assert run_description(spec).emulation == spec.emulation.preset
    assert parse_json(RunDescription, to_json(run_description(spec))) == run_description(spec)
    assert torch.device("cpu") == chosen_device(spec.settings.cut.device)
