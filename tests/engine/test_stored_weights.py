"""Answers of targets and drafts whose weights stay as they are stored: those of transformers with the values of the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny
from support.gguf_files import save_gguf
from support.quantized_files import WRITERS, write_quantized_checkpoint
from support.specs import bare_spec

from benchmarks.methods import applicable_options
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine import devices
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.gguf.index import BLOCKS
from pipedec.methods import METHODS
from pipedec.verify.reference import Reference

LAYERS, NUM_TOKENS = 5, 12
TREE = {"width": 6, "children": 4}
SAMPLED = {"temperature": 0.8, "seed": 3}
PROMPT = (1, 9, 30, 4, 51, 17, 8, 22, 40, 3)
FORMATS, SHAPES = [*WRITERS, *BLOCKS], [(1, 1), (3, 3), (5, 5)]
ONE_OF_EACH_KIND = ("awq", "fp8-blocks", "mxfp4", "nf4", "Q4_K")


def stored(folder: Path, format: str) -> tuple[Path, Path]:
    """A target and a draft in this format: one of ``WRITERS``, or a type of GGUF files."""
    made = []
    for name, layers, seed in (("target", LAYERS, 0), ("draft", 1, 5)):
        save_tiny("llama", folder / "plain" / name, layers=layers, hidden=256, kv_heads=2, seed=seed)
        if format in BLOCKS:
            made.append(save_gguf(folder / f"{name}.gguf", folder / "plain" / name, format))
        else:
            write_quantized_checkpoint(folder / "plain" / name, folder / name, format)
            made.append(folder / name)
    return made[0], made[1]


def answer(pipeline: LocalPipeline, method: str, **sampling: float) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
    asked = TokenizedRequest(0, PROMPT, params, method, applicable_options(method, TREE))
    return [token for verdict in pipeline.run(asked) for token in verdict.tokens]


def check_answers(folder: Path, format: str, shape: tuple[int, int], impl: str, dequantize: str = "never") -> None:
    """By every method, greedy and drawn; target and draft are stored in the format."""
    target, draft = stored(folder, format)
    save_random_bita(folder / "bita", target)
    models = {"model_impl": impl, "dequantize": dequantize}
    spec = bare_spec(target, LAYERS, shape, draft, folder / "bita", **models)
    pipeline = LocalPipeline.load(spec)
    expected = Reference(spec).generate(PROMPT, NUM_TOKENS, ignore_eos=True)
    drawn = answer(pipeline, "pp", **SAMPLED)
    assert drawn != expected
    for method in METHODS:
        assert answer(pipeline, method) == expected, method
        assert answer(pipeline, method, **SAMPLED) == drawn, method


@pytest.mark.parametrize("format", ONE_OF_EACH_KIND)
def test_every_method_says_what_transformers_says_with_the_values_of_the_format(tmp_path: Path, format: str) -> None:
    check_answers(tmp_path, format, (3, 3), "pipedec")


@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_so_it_is_with_every_format_at_every_stage_count(tmp_path: Path, format: str, shape: tuple[int, int]) -> None:
    check_answers(tmp_path, format, shape, "transformers" if shape == (3, 3) else "pipedec")


@pytest.mark.parametrize("format", ["gptq", "Q6_K"])
def test_widened_weights_give_the_same_answers(tmp_path: Path, format: str) -> None:
    check_answers(tmp_path, format, (2, 2), "pipedec", dequantize="always")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four bits, for which torch has a kernel, and eight bits in groups, for which it has none."""
    folder = tmp_path_factory.mktemp("mixed")
    save_tiny("llama", folder / "plain", layers=1, hidden=64)
    override = {"dynamic": {r".*down_proj": {"bits": 8}}}
    write_quantized_checkpoint(
        folder / "plain", folder / "stored", "gptq", others={"down_proj": "gptq-8bit"}, quantization=override
    )
    return folder / "stored"


GIGABYTE = 10**9


@pytest.mark.parametrize(
    ("given", "dtype", "device", "capability", "memory", "widened", "words"),
    [
        ("never", "float32", "cpu", "AVX2", GIGABYTE, "", "as stored (as given)"),
        ("always", "bfloat16", "cuda", "AVX2", GIGABYTE, "48", "widened (as given)"),
        ("auto", "bfloat16", "cuda", "AVX2", GIGABYTE, "", "as stored (on a GPU)"),
        ("auto", "float32", "cpu", "AVX2", GIGABYTE, "48", "widened where torch has no kernel (that is faster, and fits"),
        ("auto", "bfloat16", "cpu", "AVX2", GIGABYTE, "8", "widened where torch has no kernel (that is faster, and fits"),
        ("auto", "bfloat16", "cpu", "DEFAULT", GIGABYTE, "48", "widened where torch has no kernel (that is faster, and fits"),
        ("auto", "float32", "cpu", "AVX2", 1000, "", "as stored (widened they take 0.0 GB, more than half of 0.0 GB here)"),
    ],
)
def test_a_processor_widens_what_is_faster_so_and_fits(
    monkeypatch: pytest.MonkeyPatch, mixed: Path, given: str, dtype: str, device: str, capability: str, memory: int,
    widened: str, words: str,
) -> None:  # fmt: skip
    """``widened``: the bits of the matrices that are."""
    monkeypatch.setattr(devices, "usable_memory", lambda: memory)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    config = model_config(mixed)
    widens, choice = devices.widened_weights(config, dtype, torch.device(device), given)
    found = {config.formats.of(f"model.layers.0.mlp.{own}_proj.weight", (64, 64)) for own in ("up", "down")}
    assert "".join(sorted(str(one.bits) for one in found if widens(one))) == widened
    assert choice is not None and f"{choice.name} ({choice.why})".startswith(f"GPTQ, 4 bits in groups of 32, {words}")


def test_plain_weights_need_no_words(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, layers=1)
    widens, choice = devices.widened_weights(model_config(tmp_path), "float32", torch.device("cpu"), "auto")
    assert choice is None and widens is devices.as_stored
