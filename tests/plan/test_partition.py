"""Splitting layers over stages, and the arithmetic of a plan."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console
from support.clusters import clustered

from pipedec.cli.launch import plan as command
from pipedec.config import ClusterConfig, DeviceConfig, ServerConfig, load_cluster
from pipedec.core.errors import UserError
from pipedec.core.limits import CAPTURED_ROWS, KNEE_ROWS
from pipedec.core.stage_message import ROW_ID_BYTES, Load
from pipedec.families import KNOWN_MODELS
from pipedec.formats import WIDENED_VALUES, WeightFormat
from pipedec.hardware import DEVICES
from pipedec.plan.costs import CONTEXT_BYTES, CUBLAS_BYTES, NCCL_BYTES, ModelCosts
from pipedec.plan.held import HeldWeights
from pipedec.plan.partition import Measured, Plan, delay_by_sharing_ms, plan, room_of
from pipedec.plan.placement import Placement, balance, even_layers, explicit_layers, rank_places, spare_places
from pipedec.plan.roofline import pass_time
from pipedec.plan.table import plan_table
from pipedec.transport.wire import RowFormat

PAPER = Path(__file__).resolve().parents[2] / "cluster.yaml"


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.delenv("PIPEDEC_REDIS_URL", raising=False)
    return load_cluster(PAPER)


def small(stages: int, model: str = "llama-3.2-1b", **partition: object) -> ClusterConfig:
    servers = (ServerConfig("a", {"rtx3090": 3}), ServerConfig("b", {"l40": 2}))
    return clustered(servers, {"only": {"stages": stages, **partition}}, target=model, dtype="float32")


def shown(planned: Plan) -> str:
    output = io.StringIO()
    Console(width=100, file=output).print(plan_table(planned))
    return output.getvalue()


@pytest.mark.parametrize("name", ["paper-7", "paper-14", "auto-21"])
def test_paper_partitions_fit(paper: ClusterConfig, name: str) -> None:
    planned = plan(paper, name)
    assert planned.problems == ()
    assert [stage.rank for stage in planned.stages] == list(range(1, len(planned.stages) + 1))
    assert [layer for stage in planned.stages for layer in stage.layers] == list(range(80))
    assert planned.draft is not None
    assert (planned.draft.placement.host, planned.draft.placement.index) == ("server-4", 3)
    assert len({stage.placement for stage in (planned.draft, *planned.stages)}) == len(planned.stages) + 1


def test_six_layers_of_the_paper(paper: ClusterConfig) -> None:
    """Paper §4.1: about 20 GB of parameters; at 936 GB/s that takes 22 ms."""
    planned = plan(paper, "paper-14")
    stage = planned.stages[1]
    assert stage.layers == range(4, 10)
    assert stage.weight_bytes / 1e9 == pytest.approx(20.5, abs=0.1)
    assert stage.compute_ms == pytest.approx(22, abs=0.1)  # launches included
    # A draft pass takes about a quarter of a stage's.
    assert planned.draft is not None
    assert planned.draft.compute_ms == pytest.approx(stage.compute_ms / 4, rel=0.1)


def test_first_and_last_stage_hold_embedding_and_head(paper: ClusterConfig) -> None:
    first, *_, last = plan(paper, "paper-14").stages
    layers, embedding = 4 * 855_654_400, 128256 * 8192
    assert first.weight_bytes == 4 * (layers + embedding)
    assert last.weight_bytes == 4 * (layers + embedding + 8192)
    assert last.compute_ms > first.compute_ms, "the head is read at every pass, the embedding is not"
    one, two = plan(small(1)), plan(small(2))
    twice = sum(stage.weight_bytes for stage in two.stages) - one.stages[0].weight_bytes
    assert twice == 4 * 128256 * 2048, "an embedding that is the head, too"


def test_timestep_of_groups(paper: ClusterConfig) -> None:
    single, paired = plan(paper, "paper-14"), plan(paper, "paper-7")
    assert [stage.group for stage in paired.stages] == [group for group in range(1, 8) for _ in range(2)]
    # The slowest pair is the one whose own transfer crosses the servers; every other boundary is inside a server.
    crossing = paired.stages[6]
    assert paired.timestep_ms == pytest.approx(2 * crossing.compute_ms + crossing.transfer_ms + paired.stages[1].transfer_ms)
    before = single.stages[5].transfer_ms  # half duplex: the stage that sends to the other server receives first
    assert single.timestep_ms == pytest.approx(crossing.compute_ms + before + crossing.transfer_ms)
    full = plan(replace(paper, network=replace(paper.network, duplex="full")), "paper-14")
    assert full.timestep_ms == pytest.approx(crossing.compute_ms + crossing.transfer_ms)
    assert f"{14 * single.timestep_ms:.1f} ms   per miss" in shown(single)
    assert single.tpot_ms == paired.tpot_ms
    slow = plan(paper.for_partition("paper-14", {"draft": "llama-3.1-8b"}))
    assert slow.draft is not None and slow.timestep_ms > slow.draft.compute_ms > slow.stages[1].compute_ms


def over_links(latency_ms: float, gbps: float = 1.0, duplex: str = "full", **partition: object) -> ClusterConfig:
    """An 8B in 16 bits on three hosts of a card each, with rank 0 and its draft on a fourth."""
    servers = [ServerConfig(host, {"rtx3090": 1}) for host in "abcd"]
    given = {"stages": 3, "draft_device": DeviceConfig("d", "rtx3090"), **partition}
    network = {"latency_us": 1000 * latency_ms, "bandwidth_gbps": gbps, "duplex": duplex}
    models = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "dtype": "bfloat16", "draft_dtype": "bfloat16"}
    return clustered(servers, {"only": given}, network=network, **models)


def token_ms(planned: Plan) -> float:
    found = planned.default_method_ms()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "passage"),
    [
        (over_links(0.02, 10), 3),
        (over_links(40, duplex="half"), 3),
        (over_links(40, dispatch="tasks"), 3),
        (over_links(40, passage=20), 20),
        (over_links(40, passage=20, duplex="half"), 20),
    ],
)
def test_a_passage_is_the_groups_where_links_are_short_or_do_not_overlap_or_as_given(config: ClusterConfig, passage: int) -> None:
    planned = plan(config)
    assert (planned.passage, planned.kv.passage) == (passage, passage)
    assert ("timesteps in flight" in shown(planned)) == (passage > 3)


@pytest.mark.parametrize(("latency_ms", "gbps"), [(1, 0.1), (10, 1), (40, 1), (300, 10)])
def test_a_passage_on_long_links_makes_tokens_fastest(latency_ms: float, gbps: float) -> None:
    planned = plan(over_links(latency_ms, gbps))
    every = {passage: plan(over_links(latency_ms, gbps, passage=passage)) for passage in (3, 4, 8, 16, 40, 80, 128)}
    assert planned.passage > 3
    assert token_ms(planned) <= min(map(token_ms, every.values())) and token_ms(planned) < 0.95 * token_ms(every[3])
    assert all(one.tpot_ms == planned.tpot_ms for one in every.values()), "one token is in one place, however many are"
    text = shown(planned)
    assert f"{planned.passage} timesteps in flight, of which {planned.passage - 3} are on links" in text
    assert f"{4 * latency_ms:.1f} ms   around the ring" in text and f"{planned.tpot_ms:.1f} ms   per token, without" in text
    assert f"{token_ms(planned):.1f} ms   per token, estimated" in text
    assert f"{planned.passage * planned.timestep_ms:.1f} ms   per miss" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_links_in_flight_overlap_with_all_else() -> None:
    """Of computing, drafting, bytes on a link and the way around the ring by its timesteps, the longest counts."""
    row_bytes, latency_ms = ROW_ID_BYTES + 2 * 4096, 40
    planned = plan(over_links(latency_ms, passage=10))
    computing = [stage.timing.compute_ms(Load(32)) for stage in planned.stages]
    ring_ms = 4 * latency_ms + sum(computing) + 32 * (2 * row_bytes + ROW_ID_BYTES) * 8e-6
    assert planned.timestep_ms == pytest.approx(ring_ms / 10)
    full, slow = plan(over_links(latency_ms, passage=128)), plan(over_links(latency_ms, 0.1, passage=128))
    assert full.timestep_ms == pytest.approx(max(computing)) and full.timestep_drafting(50) == 50
    assert slow.timestep_ms == pytest.approx(32 * row_bytes * 8e-5)
    groups, far = plan(over_links(10, 0.1, passage=3)), plan(over_links(latency_ms, passage=3))
    assert groups.timestep_ms == pytest.approx(max(computing) + 10 + 32 * row_bytes * 8e-5), "without overlap, their sum"
    assert far.timestep_ms == pytest.approx(ring_ms / 3), "there are four links, one of them to rank 0"
    half = plan(over_links(latency_ms, passage=10, duplex="half"))
    assert half.timestep_ms == plan(over_links(latency_ms, duplex="half")).timestep_ms > 2 * latency_ms, "and then all take turns"
    paired = plan(over_links(latency_ms, passage=10, groups=2))
    assert paired.timestep_ms == planned.timestep_ms and paired.passage - paired.num_groups == 8


def test_a_prompt_fills_a_passage() -> None:
    planned = plan(over_links(40))
    assert planned.ttft_ms(50) == pytest.approx(planned.tpot_ms, rel=0.3)
    assert plan(over_links(40, passage=3)).ttft_ms(1000) > 1.5 * planned.ttft_ms(1000), "chunks follow without waiting for a link"


def test_measured_times_take_the_place_of_data_sheets() -> None:
    by_sheets, measured = plan(over_links(40)), plan(over_links(40), measured=Measured(2400.0, 1300.0))
    computing = [sum(stage.timing.compute_ms(Load(1)) for stage in one.stages) for one in (by_sheets, measured)]
    assert computing[1] == pytest.approx(2400)
    assert measured.tpot_ms - by_sheets.tpot_ms == pytest.approx(2400 - computing[0])
    assert measured.knee == by_sheets.knee and measured.passage < by_sheets.passage
    assert measured.timestep_drafting(0) >= 1300 > measured.timestep_with(measured.room)
    given = ["--pass-ms", "1000", "--timestep-ms", "4000", "--timesteps", "1.25"]
    text = CliRunner().invoke(command, [str(PAPER), "--partition", "paper-14", *given]).output
    assert re.search(r"100\d\.\d ms   per token, without speculation", text)
    assert re.search(r"default method +5\d{3}\.\d ms", text), "1.25 timesteps of four seconds and their links"


def test_more_timesteps_in_flight_take_more_of_them_by_a_token_than_were_measured() -> None:
    """Twice as many in flight, nearly twice as many by a token: most are lost with misses."""
    plans = [plan(over_links(40, passage=passage), measured=Measured(24.0, 13.0, 0.5)) for passage in (3, 6, 12)]
    timesteps = [planned.speculating_ms(0.8, 1.5) / planned.timestep_drafting(0.0) for planned in plans]
    assert timesteps == pytest.approx([0.5, 0.95, 1.85], rel=0.05)


def test_rows_are_counted_as_the_transport_sends_them(paper: ClusterConfig) -> None:
    planned = plan(paper, "paper-14")
    assert planned.draft is not None
    assert planned.draft.timing.row_bytes == RowFormat(0, torch.float32).row_bytes
    assert planned.stages[0].timing.row_bytes == RowFormat(8192, torch.float32).row_bytes
    assert planned.stages[-1].timing.row_bytes == 0
    rounded = plan(paper.for_partition("paper-14", {"wire_dtype": "int8"}))
    assert rounded.stages[0].timing.row_bytes == RowFormat(8192, torch.float32, torch.int8).row_bytes
    assert planned.stages[6].transfer_ms == pytest.approx(0.05 + 32 * (3 * 8 + 8192 * 4) * 8 / 10e9 * 1000)


@pytest.mark.failure_case("M6")
def test_what_does_not_fit_is_said(paper: ClusterConfig) -> None:
    half: dict[str, object] = {"stages": 7, "groups": None, "layers": (9, 12, 12, 12, 12, 12, 11)}
    planned = plan(paper.for_partition("paper-14", half))
    assert planned.problems[1] == "stage 2 on server-1 rtx3090 needs 42.8 GB of 24.2 GB: use more stages, bfloat16 or quantize"
    assert len(planned.problems) == 7
    assert "Problem: stage 7 on server-1 rtx3090 needs" in shown(planned)
    half["layers"] = "auto"
    planned = plan(paper.for_partition("paper-14", half | {"dtype": "float32"}))
    assert planned.problems[0] == "the 7 stages have room for 40 layers, the target has 80"
    assert plan(paper.for_partition("paper-14", half | {"dtype": "bfloat16", "max_model_len": 1024})).problems == ()
    (problem,) = plan(paper.for_partition("paper-14", {"draft": "llama-3.1-70b"})).problems
    assert problem.startswith("the draft on server-4 l40 needs ")


def test_table_is_readable_at_100_columns(paper: ClusterConfig) -> None:
    text = shown(plan(paper, "paper-21"))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    for words in ("21 stages in 21 groups", "rtx3090 #6", "78-79", "server-4", "draft", "plain pipeline (pp)"):
        assert words in text


def test_a_prompt_passes_in_chunks_at_the_knee(paper: ClusterConfig) -> None:
    planned = plan(paper, "paper-14")
    assert planned.knee == 76
    at_knee = planned.ttft_ms(76) / 14
    assert planned.ttft_ms(1000) == pytest.approx((14 + 13) * at_knee, rel=0.002), "14 chunks of 76 rows, and what is cached"
    assert planned.timestep_ms < at_knee < 1.1 * planned.timestep_ms, "more rows are sent, but none takes longer to compute"
    assert planned.ttft_ms(1000) < 700


@pytest.mark.parametrize(
    ("device", "numbers", "knee", "room"),
    [
        ("rtx3090", {"dtype": "float32"}, 76, 64),
        ("rtx3090", {"dtype": "bfloat16", "quantize": "int4"}, 23, 16),
        ("h100", {"dtype": "bfloat16"}, 347, 256),
        ("l40s", {"dtype": "bfloat16"}, 418, 256),
        ("cpu", {"dtype": "float32"}, 49, KNEE_ROWS),
    ],
)
def test_what_enters_at_a_timestep_fills_a_captured_forward_below_the_knee(
    device: str, numbers: dict[str, str], knee: int, room: int
) -> None:
    partition = {"stages": 2, "draft_device": DeviceConfig("a", "cpu")}
    planned = plan(clustered((ServerConfig("a", {device: 3, "cpu": 3}),), {"only": partition}, target="llama-3.1-8b", **numbers))
    assert (planned.knee, planned.room) == (knee, room)
    assert room <= CAPTURED_ROWS, "it is captured"


def test_the_slowest_device_limits_what_enters() -> None:
    times = {name: pass_time(DEVICES[name], HeldWeights(10**9, 2 * 10**9), "bfloat16", 4) for name in ("rtx3090", "h100", "cpu")}
    assert room_of([(DEVICES["h100"], times["h100"]), (DEVICES["rtx3090"], times["rtx3090"])]) == 64
    assert room_of([(DEVICES["h100"], times["h100"]), (DEVICES["cpu"], times["cpu"])]) == KNEE_ROWS


def test_the_table_shows_the_transfers_of_as_many_rows_as_the_default_method_sends(paper: ClusterConfig) -> None:
    """8192 float32 values and three ids per row, over 10 Gbit/s to the next server and over PCIe in it, one after the other."""
    planned = plan(paper, "paper-14")
    hop_ms = 0.05 + 64 * (8192 * 4 + ROW_ID_BYTES) / 1.25e6
    more_ms = 32 * (8192 * 4 + ROW_ID_BYTES) * (1 / 1.25e6 + 1 / 12e6)
    assert planned.timestep_with(64) == pytest.approx(planned.timestep_ms + more_ms), "64 rows are computed in the time of 32"
    assert f"timestep, 64 rows {planned.timestep_with(64):10.1f} ms" in shown(planned) and f"a hop in {hop_ms:.1f} ms" in shown(
        planned
    )


def test_plain_decoding_takes_a_pass_per_token(paper: ClusterConfig) -> None:
    planned = plan(paper, "paper-14")
    assert f"{planned.tpot_ms:.1f} ms   per token, without speculation" in shown(planned)
    in_turn_ms = sum(stage.compute_ms + stage.timing.send_ms(1) for stage in planned.stages)
    assert planned.tpot_ms == pytest.approx(in_turn_ms, rel=1e-3), "§2.4: the sum over all stages"
    assert planned.pass_ms(Load(76)) < 1.5 * planned.tpot_ms, "more rows are sent"
    assert planned.pass_ms(Load(2 * 76)) > 1.9 * planned.tpot_ms
    read_ms = planned.pass_ms(Load(2, 2 * 4000)) - planned.pass_ms(Load(2))
    assert read_ms == pytest.approx(2 * 4000 * 80 * 2 * 8 * 128 * 4 / 936e9 * 1000, rel=0.01), "keys and values are read"


def test_the_capacity_is_that_of_the_rank_with_the_least_room(paper: ClusterConfig) -> None:
    planned = plan(paper, "paper-14")
    stage = planned.stages[1]
    assert stage.kv_token_bytes == 6 * 2 * 8 * 128 * 4
    assert stage.memory_bytes == round(0.95 * 23.69 * 2**30)
    assert stage.kv_room == stage.memory_bytes - stage.weight_bytes - stage.workspace_bytes
    assert planned.kv.tokens == stage.kv_room // stage.kv_token_bytes // 256 * 256, "in whole blocks, of a GPU's size"
    assert stage.kv_bytes == planned.kv.tokens * stage.kv_token_bytes
    assert f"{planned.kv.tokens:,} tokens of all running requests" in shown(planned)


def test_placements_and_their_mistakes() -> None:
    with pytest.raises(UserError, match=r"^partitions\.only\.stages: 6 stages need as many devices, but 5 are free$"):
        plan(small(6))
    with pytest.raises(UserError, match=r"^partitions\.only\.devices: no free l40 is left on b$"):
        plan(small(3, devices=(DeviceConfig("b", "l40", 3),)))
    with pytest.raises(UserError, match=r"^partitions\.only\.draft_device: missing"):
        plan(small(2).for_partition(given={"draft": "llama-3.2-1b"}))
    planned = plan(small(3, devices=(DeviceConfig("b", "l40"), DeviceConfig("a", "rtx3090", 2))))
    places = [(stage.placement.host, stage.placement.index) for stage in planned.stages]
    assert places == [("b", 0), ("a", 0), ("a", 1)] and planned.draft is None, "in the order given"


@pytest.mark.failure_case("M5")
def test_explicit_layers() -> None:
    assert explicit_layers([2, 1, 3], 6) == [range(0, 2), range(2, 3), range(3, 6)]
    with pytest.raises(UserError, match=r"^layers sum to 79, the target has 80$"):
        explicit_layers([40, 39], 80)
    with pytest.raises(UserError, match=r"^every stage needs at least 1 layer$"):
        explicit_layers([7, 0], 7)
    with pytest.raises(UserError, match=r"^layers sum to 17, the target has 16$"):
        plan(small(2, layers=(8, 9)))


@pytest.mark.failure_case("M5")
def test_more_stages_than_layers() -> None:
    with pytest.raises(UserError, match=r"^32 stages, but the target has 24 layers: use at most 24$"):
        even_layers(24, 32)
    with pytest.raises(UserError, match=r"^3 stages, but the target has 2 layers: use at most 2$"):
        balance([[1.0] * 2] * 3, [0.0] * 3, [1] * 2, [9] * 3)
    with pytest.raises(UserError, match=r"^stage 2 has no room for a single layer$"):
        balance([[1.0] * 4] * 2, [0.0, 0.0], [1] * 4, [4, 0])
    config = small(17)
    crowd = (ServerConfig("a", {"h100": 17}),)
    with pytest.raises(UserError, match=r"^17 stages, but the target has 16 layers: use at most 16$"):
        plan(replace(config, servers=crowd))
    with pytest.raises(UserError, match=r"^stages must be at least 1, not 0$"):
        even_layers(24, 0)


@given(st.integers(1, 130), st.integers(1, 130))
def test_even_split(layers: int, stages: int) -> None:
    assume(stages <= layers)
    split = even_layers(layers, stages)
    sizes = [len(part) for part in split]
    assert [layer for part in split for layer in part] == list(range(layers))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_captured_graphs_take_memory_on_gpus_alone(paper: ClusterConfig) -> None:
    """256 rows with activations and, for 64 heads, 8 splits of 128 sums and 2 scores in float32; 262,144 numbers of tables. The
    512 rows of a chunk have splits of their own.
    """
    costs = ModelCosts(KNOWN_MODELS["llama-3.1-70b"], WeightFormat("bfloat16"), rows=32, max_model_len=4096, passage=14)
    row = 4 * 8192 + 3 * 28672
    splits = 4 * 64 * 8 * (128 + 2)
    assert costs.graph_bytes == 256 * (2 * row + splits) + 4 * 262144
    more = costs.workspace_bytes("rtx3090") - costs.workspace_bytes("cpu")
    assert more == costs.graph_bytes + 512 * splits + NCCL_BYTES + CUBLAS_BYTES


def test_a_quantized_model_is_widened_slice_by_slice_on_a_gpu() -> None:
    """Without kernels: the layers, in the memory of the graphs, and the head, which takes 8 bits."""
    model = KNOWN_MODELS["llama-3.1-70b"]

    def gpu_bytes(quantize: str | None, kernels: bool) -> int:
        return ModelCosts(model, WeightFormat("bfloat16", quantize, kernels), 32, 4096, 2).gpu_bytes

    assert gpu_bytes("int4", True) == gpu_bytes("int8", True) == gpu_bytes(None, False)
    assert gpu_bytes("int8", False) - gpu_bytes(None, False) == (2 + 2) * WIDENED_VALUES
    assert gpu_bytes("int4", False) - gpu_bytes(None, False) == (3 + 2) * WIDENED_VALUES


@pytest.mark.parametrize("partition", ["home-2x3090", "mixed-3090-4090"])
def test_a_70b_in_4_bits_fits_the_cards_of_a_home(paper: ClusterConfig, partition: str) -> None:
    planned = plan(paper, partition)
    assert planned.problems == () and planned.kv.tokens >= planned.max_model_len
    for stage in planned.stages:
        unused = DEVICES[stage.placement.device].memory_bytes - stage.total_bytes
        assert unused > 1.2e9, "for the allocator's fragments, and for what the plan does not know"


def test_less_of_a_gpu_leaves_fewer_tokens_and_a_larger_reserve(paper: ClusterConfig) -> None:
    all_of_it, most = (plan(paper.for_partition("paper-14", {"gpu_memory_utilization": share})) for share in (1.0, 0.9))
    less = (all_of_it.kv.tokens - most.kv.tokens) * all_of_it.stages[1].kv_token_bytes
    assert less == pytest.approx(0.1 * 23.69 * 2**30, rel=0.01)
    assert "GPU memory reserve   4.8 GB of each l40, 2.5 GB of each rtx3090" in shown(most)
    draft = most.draft
    assert draft is not None and draft.memory_bytes == round(0.9 * 44.4 * 2**30)
    assert plan(paper.for_partition("paper-14", {"gpu_memory_utilization": 0.8})).problems


LAYER_MS = 2 * 855_654_400 / 936e9 * 1000 + 0.015  # of a 70B in 16 bits on an RTX 3090
HEAD_MS = 2 * (128256 + 1) * 8192 / 936e9 * 1000
DRAFT_PARAMETERS = 16 * (2048 * (2 * 2048 + 2 * 512 + 3 * 8192) + 2 * 2048) + (128256 + 1) * 2048
DRAFT_MS = 2 * DRAFT_PARAMETERS / 936e9 * 1000 + 16 * 0.015
BETWEEN_MS, WITHIN_MS = (0.05 + 32 * (24 + 2 * 8192) / 1.25e9 * 1000), (0.02 + 32 * (24 + 2 * 8192) / 12e9 * 1000)


def sharing(**partition: object) -> ClusterConfig:
    """Llama 3.2 1B for its own draft, which shares the last device of host a with a stage."""
    shared = DeviceConfig("a", "rtx3090", shared=True)
    servers = (ServerConfig("a", {"rtx3090": 3}), ServerConfig("b", {"l40": 2}))
    keys = {"target": "llama-3.2-1b", "draft": "llama-3.2-1b", "dtype": "bfloat16", "draft_dtype": "bfloat16"}
    return clustered(servers, {"only": {"stages": 3, "draft_device": shared, **partition}}, **keys)


def test_rank_0_takes_the_device_of_the_last_stage_of_its_kind_on_its_host(paper: ClusterConfig) -> None:
    places = rank_places(paper, "7x2-3090")
    assert places[0] == places[14] == Placement("node-7", "rtx3090", 1) and len(set(places)) == 14
    assert not set(places) & set(spare_places(paper.for_partition("7x2-3090"), 20))
    assert rank_places(sharing())[0] == rank_places(sharing())[3] == Placement("a", "rtx3090", 2)
    assert rank_places(sharing(stages=2))[0] == Placement("a", "rtx3090", 1), "stages come first"
    without = paper.for_partition("7x2-3090", {"draft": "none"})
    assert rank_places(without)[0] == Placement("node-7", "cpu", 0) and plan(without).shared_stage is None
    own = rank_places(paper, "7x2-3090-own-draft")
    assert own[0] == Placement("node-7", "rtx3090", 1) and own[1:] == places[1:14]
    with pytest.raises(UserError, match=r"^partitions\.only\.draft_device: no stage takes a l40 on b: name a stage's device, or"):
        plan(sharing(draft_device=DeviceConfig("b", "l40", shared=True)))


def test_a_stage_gives_the_draft_some_of_its_time_and_gets_fewer_layers(paper: ClusterConfig) -> None:
    """80 layers, the head and one forward of the draft, on 14 cards: no cut has a slowest card with less than six layers."""
    assert plan(paper, "7x2-3090").problems == ()
    planned = plan(paper.for_partition("7x2-3090", {"layers": "auto"}))
    assert planned.problems == () and planned.shared_stage == 14
    assert [len(stage.layers) for stage in planned.stages] == [6] * 12 + [5, 3]
    *others, last = planned.stages
    assert planned.draft is not None and planned.draft.compute_ms == pytest.approx(DRAFT_MS, rel=1e-3)
    assert last.compute_ms == pytest.approx(len(last.layers) * LAYER_MS + HEAD_MS)
    assert last.compute_ms + planned.draft.compute_ms < 6 * LAYER_MS == pytest.approx(max(one.compute_ms for one in others))
    assert planned.timestep_ms == pytest.approx(6 * LAYER_MS + BETWEEN_MS + WITHIN_MS, rel=1e-3)
    own = plan(paper, "7x2-3090-own-draft")
    assert own.problems == () and own.shared_stage is None
    assert own.timestep_ms == pytest.approx(7 * LAYER_MS + BETWEEN_MS + WITHIN_MS, rel=1e-3)


def test_a_timestep_counts_the_passes_of_both_ranks_on_a_shared_device() -> None:
    alone, shared = (plan(sharing(layers=(5, 5, 6), **more)) for more in ({"draft_device": DeviceConfig("b", "l40")}, {}))
    assert alone.draft is not None and shared.draft is not None
    last = shared.stages[-1]
    assert last.compute_ms == alone.stages[-1].compute_ms
    assert shared.timestep_ms == pytest.approx(
        last.compute_ms + shared.draft.compute_ms + (0.02 + 32 * (24 + 2 * 2048) / 12e9 * 1000)
    )
    assert last.transfer_ms < alone.stages[-1].transfer_ms, "rank 0 is on its host"
    auto = plan(sharing())
    assert [len(stage.layers) for stage in auto.stages] == [8, 7, 1], "the draft alone takes more than the 16 layers and the head"


def test_two_ranks_on_a_device_delay_each_other_while_both_compute() -> None:
    for drafting, before, stage, delay in ((3, 0, 10, 3), (3, 2, 10, 1), (20, 0, 10, 10), (3, 5, 10, 0), (0, 0, 10, 0)):
        assert delay_by_sharing_ms(drafting, before, stage) == delay


def test_the_memory_of_a_shared_device_holds_the_same_tokens_of_both_ranks(paper: ClusterConfig) -> None:
    planned = plan(paper, "7x2-3090")
    draft, last = planned.draft, planned.stages[-1]
    usable = planned.stages[0].memory_bytes
    assert draft is not None and draft.memory_bytes + last.memory_bytes == usable
    assert draft.kv_token_bytes == 16 * 2 * 8 * 64 * 2 and last.kv_token_bytes == len(last.layers) * 2 * 8 * 128 * 2
    assert min(draft.workspace_bytes, last.workspace_bytes) > CONTEXT_BYTES, "a process each"
    left = usable - sum(rank.weight_bytes + rank.workspace_bytes for rank in (draft, last))
    tokens = left // (draft.kv_token_bytes + last.kv_token_bytes)
    assert {rank.kv_room // rank.kv_token_bytes for rank in (draft, last)} <= {tokens - 1, tokens}
    assert planned.kv.tokens <= tokens and draft.total_bytes + last.total_bytes <= usable
    text = shown(planned)
    assert "* Rank 0 and stage 14 share this device" in text and text.count("rtx3090 #1 *") == 2
    assert "GPU memory reserve   1.3 GB of each rtx3090" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_draft_that_fits_no_more_beside_a_stage(paper: ClusterConfig) -> None:
    full = plan(paper.for_partition("7x2-3090", {"layers": (5,) * 10 + (6, 6, 6, 12), "max_model_len": 1024}))
    assert len(full.problems) == 2
    assert re.fullmatch(r"stage 14 on node-7 rtx3090 needs [\d.]+ GB of its part, [\d.]+ GB: .*", full.problems[0])
    assert re.fullmatch(r"the draft on node-7 rtx3090 needs [\d.]+ GB of its part, [\d.]+ GB: .*", full.problems[1])
    assert plan(paper.for_partition("7x2-3090", {"layers": (6,) * 13 + (2,)})).problems == ()
    costs = ModelCosts(KNOWN_MODELS["llama-3.1-70b"], WeightFormat("bfloat16"), rows=32, max_model_len=4096, passage=14)
    assert costs.room("rtx3090", False, True, 2 * 10**9) == costs.room("rtx3090", False, True) - 2 * 10**9
