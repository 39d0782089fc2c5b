"""Captured forwards: one graph per bucket, at addresses that stay, with the results of forwards that are computed as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bita_files import save_random_bita
from support.captures import Compiled, Frozen, Repeated
from support.checkpoints import HYBRID, save_tiny
from support.examples import examples
from support.kv_caches import read_cache, tree
from support.random_requests import Requests
from torch import Tensor, _dynamo
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from pipedec.config.environment import captures_graphs
from pipedec.core.errors import UserError
from pipedec.core.limits import CAPTURED_ROWS
from pipedec.families import model_config
from pipedec.model import BitaWeights, KVCache, KVPool, LaneRows, StageModel, described_attention, device_capture
from pipedec.model.captured_graphs import CaptureError, Run, bucket_of
from pipedec.model.kernels import language
from pipedec.model.row_tables import MOST_REQUESTS, RowTables
from pipedec.tree import Visibility

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "window": ("mistral", {"sliding_window": 5}),
    "some-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qk-norm": ("qwen3", {"head_dim": 16}),
    "longrope": ("llama", {"max_position_embeddings": 16, "rope_parameters": {
        "rope_theta": 1000.0, "rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16}}),
}  # fmt: skip
FIRST, MIDDLE, LAST, WHOLE = range(0, 1), range(1, 3), range(3, 4), range(0, 4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        save_tiny(family, folder / name, **changes)
        save_random_bita(folder / f"{name}-bita", folder / name, 2)
    save_tiny("qwen3_5_text", folder / "hybrid", **HYBRID)
    mixture = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, 
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(mixture).save_pretrained(folder / "mixture")
    return folder


def load(directory: Path, name: str, layers: range = MIDDLE, dtype: torch.dtype = torch.float64) -> StageModel:
    """``name`` may begin with ``transformers:``."""
    impl, _, name = name.rpartition(":")
    path = directory / name
    return StageModel.load(path, layers, dtype, "cpu", model_config(path, "transformers" if impl else "pipedec"))


def with_bita(stage: StageModel, directory: Path, name: str) -> StageModel:
    files = directory / f"{name.rpartition(':')[2]}-bita"
    stage.attach(BitaWeights.load(files, stage.config, stage.layers, stage.dtype, stage.device))
    return stage


def new_cache(pool: KVPool, first: int = 0, slots: int = 512) -> KVCache:
    return KVCache(pool, ((first, slots),))


def inputs_of(stage: StageModel, rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if stage.is_first:
        return torch.randint(0, stage.config.vocab_size, (rows,), generator=generator)
    return torch.randn(rows, stage.config.hidden_size, generator=generator, dtype=torch.float64).to(stage.dtype)


def chunk(cache: KVCache, rows: int) -> LaneRows:
    """The next tokens of a prompt."""
    return LaneRows(torch.arange(cache.past_length, cache.past_length + rows), cache, None, cache.past_length + rows)


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases
@pytest.mark.parametrize("name", MODELS)
@examples(30)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 6), block=st.sampled_from([2, 5, 16]))
def test_padded_forwards_of_many_requests_equal_those_without_padding(
    directory: Path, name: str, seed: int, count: int, block: int
) -> None:
    """Chunks, trees, masks of BiTA, and slots in any order."""
    plain, captured = (with_bita(load(directory, name), directory, name) for _ in range(2))
    captured.capture = Repeated()
    alone, padded = Requests(plain, seed, count, block, False), Requests(captured, seed, count, block, True)
    for _ in range(6):
        torch.testing.assert_close(padded.forward(), alone.forward(), atol=1e-11, rtol=0)
        alone.advance()
        padded.advance()
    assert captured.capture.replays == 6


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", ["hybrid", "mixture"])
@examples(20)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 3))
def test_padded_forwards_of_transformers_modules_equal_those_without_padding(
    directory: Path, name: str, seed: int, count: int
) -> None:
    """With recurrent layers, of which chunks of prompts are not captured, and with experts, which padding does not reach."""
    plain, captured = (load(directory, f"transformers:{name}") for _ in range(2))
    captured.capture = capture = Frozen()
    alone, padded = Requests(plain, seed, count, 2, False), Requests(captured, seed, count, 2, True)
    for _ in range(4):
        torch.testing.assert_close(padded.forward(), alone.forward(), atol=1e-4, rtol=1e-4)  # decays are in float32
        assert captured.stack.experts_read == plain.stack.experts_read
        alone.advance()
        padded.advance()
    assert capture.captures <= capture.replays


@pytest.mark.slow
@pytest.mark.parametrize("name", ["some-windows", "transformers:some-windows"])
def test_replays_of_frozen_graphs_equal_forwards_without_them(directory: Path, name: str) -> None:
    plain, captured = (with_bita(load(directory, name), directory, name) for _ in range(2))
    captured.capture = frozen = Frozen()
    alone, padded = Requests(plain, 7, 4, 16, False), Requests(captured, 7, 4, 16, True)
    for _ in range(25):
        torch.testing.assert_close(padded.forward(), alone.forward(), atol=1e-11, rtol=0)
        alone.advance()
        padded.advance()
    assert frozen.replays == 25 and frozen.captures < 15, "most forwards are replays of other steps' graphs"


def test_what_the_last_forward_left_in_the_buffers_changes_nothing(directory: Path) -> None:
    """Seven rows of one request, then five of another in the same bucket, whose filling would be the others' rows and slots."""
    plain, captured = load(directory, "llama"), load(directory, "llama")
    captured.capture = frozen = Frozen()
    found, expected = [], []
    for stage, results in ((captured, found), (plain, expected)):
        pool = stage.make_pool(1024)
        one, other = new_cache(pool), new_cache(pool, 512)
        for cache, rows in ((one, 7), (other, 5), (one, 6), (other, 8)):
            results.append(stage.forward(inputs_of(stage, rows, seed=rows), [chunk(cache, rows)]))
            results += [part.clone() for held in (one, other) for part in read_cache(held, 1)]
    assert frozen.captures == 1 and frozen.replays == 4
    for seen, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(seen, wanted, atol=1e-12, rtol=0)


def test_a_request_of_nan_spoils_no_other_and_nothing_afterwards(directory: Path) -> None:
    stage = load(directory, "llama")
    stage.capture = Frozen()
    pool = stage.make_pool(2048)
    caches = [new_cache(pool, 512 * index) for index in range(4)]
    inputs = inputs_of(stage, 3)
    inputs[0] = torch.nan
    spoilt = stage.forward(inputs, [chunk(cache, 1) for cache in caches[:3]])
    assert spoilt[0].isnan().all() and spoilt[1:].isfinite().all()
    assert stage.forward(inputs_of(stage, 3), [chunk(cache, 1) for cache in caches[1:]]).isfinite().all()


def test_all_graphs_use_the_same_memory(directory: Path) -> None:
    stage = load(directory, "window", FIRST)
    stage.capture = frozen = Frozen()
    cache = new_cache(stage.make_pool(512))
    for rows in (3, 1, 4, 2, 3):
        stage.forward(inputs_of(stage, rows), [chunk(cache, rows)])
    assert (frozen.captures, frozen.replays) == (3, 5), "one of 1, 2 and 4 rows each"
    assert len(set(map(frozenset, frozen.memory))) == 1, "all buckets share the buffers"


@pytest.fixture
def graph_counts() -> Iterator[dict[str, Any]]:
    """What torch.compile counts, from nothing, with room for a graph per bucket."""
    _dynamo.reset()
    counters.clear()
    with _dynamo.config.patch(recompile_limit=64):
        yield counters
    _dynamo.reset()


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases
@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", FIRST), ("biases", WHOLE), ("some-windows", MIDDLE), ("qk-norm", LAST)],
)
def test_a_forward_is_one_graph_without_breaks(directory: Path, graph_counts: dict[str, Any], name: str, layers: range) -> None:
    """Of a prompt's chunk and two trees: the whole model is what a draft is."""
    plain, captured = load(directory, name, layers), load(directory, name, layers)
    captured.capture = compiler = Compiled()
    results = []
    for stage in (plain, captured):
        pool = stage.make_pool(2048)
        caches = [new_cache(pool, 512 * index) for index in range(3)]
        stage.forward(inputs_of(stage, 9), [chunk(caches[0], 5), chunk(caches[1], 4)])
        lanes = [tree(caches[0], 3), tree(caches[1], 2), chunk(caches[2], 2)]
        results.append(stage.forward(inputs_of(stage, 7, seed=1), lanes))
    torch.testing.assert_close(results[1], results[0], atol=1e-11, rtol=0)
    assert graph_counts["stats"]["unique_graphs"] == compiler.captures == 2 and not graph_counts["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_stages_are_one_graph(tmp_path: Path, graph_counts: dict[str, Any], quantize: str) -> None:
    save_tiny("llama", tmp_path, hidden=64)
    results = []
    for capture in (None, Compiled()):
        stage = StageModel.load(tmp_path, WHOLE, torch.float32, "cpu", quantize=quantize)
        stage.capture = capture
        results.append(stage.forward(inputs_of(stage, 3), [chunk(new_cache(stage.make_pool(512)), 3)]))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=0)
    assert graph_counts["stats"]["unique_graphs"] == 1 and not graph_counts["graph_break"]


def test_a_stage_with_room_for_64_rows_has_7_graphs(directory: Path) -> None:
    """One of 1, 2, 4, … 64 rows, however long the pasts are and however many requests; up to the most, 256 rows, they are 9."""
    pool = load(directory, "llama").make_pool(1 << 13)
    short, long = new_cache(pool), new_cache(pool, 512)
    long.append(300, to_past=True)
    buckets = {rows: {bucket_of([tree(short, rows)]), bucket_of([tree(long, rows)])} for rows in range(1, CAPTURED_ROWS + 1)}
    for rows in range(2, CAPTURED_ROWS + 1):
        buckets[rows].add(bucket_of([tree(short, rows - 1), tree(long, 1)]))
    graphs = {rows: set[int | None]().union(*(buckets[count] for count in range(1, rows + 1))) for rows in (64, CAPTURED_ROWS)}
    assert graphs == {64: {1, 2, 4, 8, 16, 32, 64}, 256: {1, 2, 4, 8, 16, 32, 64, 128, 256}}


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_parts_of_tables_are_aligned_for_any_rows(rows: int, has_states: bool) -> None:
    """By 16 bytes, and one after the other: a kernel is compiled once."""
    table = torch.empty(4096, dtype=torch.int32)
    tables = RowTables(table, rows, 3, [8, 5], has_states)
    parts = [tables.num_rows, tables.requests_of_rows, tables.slots, tables.requests]
    parts += [*([tables.states, tables.flights] if has_states else []), *tables.tiles.values()]
    begins = [part.data_ptr() - table.data_ptr() for part in parts]
    assert all(begin % 16 == 0 for begin in begins) and begins == sorted(begins)
    ends = [begin + 4 * part.numel() for begin, part in zip(begins, parts, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)) and ends[-1] == 4 * tables.header


def test_large_forwards_are_computed_as_they_are(directory: Path) -> None:
    stage = load(directory, "llama")
    stage.capture = repeated = Repeated()
    pool = stage.make_pool(1 << 15)
    caches = [new_cache(pool, 512 * index) for index in range(MOST_REQUESTS + 1)]
    assert bucket_of([tree(caches[0], CAPTURED_ROWS)]) == CAPTURED_ROWS
    assert bucket_of([tree(caches[0], CAPTURED_ROWS + 1)]) is None
    assert bucket_of([tree(caches[0], 60), *(tree(cache, 1) for cache in caches[1:5])]) == 64
    assert bucket_of([tree(cache, 1) for cache in caches[:MOST_REQUESTS]]) == MOST_REQUESTS
    assert bucket_of([tree(cache, 1) for cache in caches]) is None
    long = new_cache(pool, 1 << 14, 1 << 14)
    long.append((1 << 14) - 1, to_past=True)
    assert bucket_of([tree(long, 1)]) == 1
    in_threads = LaneRows(torch.zeros(256, dtype=torch.int64), new_cache(pool, 1 << 14, 1 << 14), Visibility(
        torch.ones(256, 256, dtype=torch.bool), 0, lambda: torch.zeros(256, dtype=torch.int64)))  # fmt: skip
    assert bucket_of([in_threads]) == 256
    rows = CAPTURED_ROWS + 1
    found = stage.forward(inputs_of(stage, rows), [chunk(caches[0], rows)])
    stage.capture = None
    assert repeated.captures == 0
    torch.testing.assert_close(found, stage.forward(inputs_of(stage, rows), [chunk(caches[1], rows)]))


def test_another_pool_has_graphs_of_its_own(directory: Path) -> None:
    stage = load(directory, "llama", FIRST)
    stage.capture = frozen = Frozen()
    caches = [new_cache(stage.make_pool(512)) for _ in range(2)]
    outputs = [stage.forward(inputs_of(stage, 3), [chunk(cache, 3)]) for cache in (*caches, *caches)]
    assert frozen.captures == 4
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(read_cache(caches[1], 0), read_cache(caches[0], 0))


def test_a_cpu_captures_nothing_and_the_switch_takes_two_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_capture(torch.device("cpu")) is None and captures_graphs()
    monkeypatch.setenv("PIPEDEC_GRAPHS", "off")
    assert not captures_graphs()
    monkeypatch.setenv("PIPEDEC_GRAPHS", "no")
    with pytest.raises(UserError, match=r"^PIPEDEC_GRAPHS must be on or off, not 'no'$"):
        captures_graphs()


def test_a_stage_that_cannot_be_captured_computes_without_graphs(directory: Path) -> None:
    def refuse(run: Run) -> Run:
        raise CaptureError("the layers cannot be captured (a test)")

    stage, plain = (load(directory, "llama", FIRST) for _ in range(2))
    stage.capture = refuse
    caches = [new_cache(one.make_pool(512)) for one in (stage, plain)]
    for rows in (3, 2):
        inputs = inputs_of(stage, rows)
        found, expected = (one.forward(inputs, [chunk(cache, rows)]) for one, cache in zip((stage, plain), caches, strict=True))
        assert torch.equal(found, expected)
    assert stage.capture is None


def test_users_read_how_attention_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert described_attention(torch.float32, cpu, "kernels need CUDA") == ("SDPA", "kernels need CUDA")
    monkeypatch.setattr(language, "devices", set())
    assert described_attention(torch.float32, cuda, "as given") == ("SDPA", "as given; flash-attention needs 16 bits")
    assert device_capture(cuda) is None
    monkeypatch.setattr(language, "devices", {"cuda"})
    assert described_attention(torch.float32, cuda, "why") == ("Triton", "why; flash-attention needs 16 bits")
