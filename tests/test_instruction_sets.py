"""The tests to run under another instruction set are those that compute, and its variables reach what computes."""

from __future__ import annotations

import platform
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from support.instruction_sets import EXPECTED, VARIABLES, kernels
from support.numbers import TESTS, computes
from support.selection import QUARTERS, quarter_of
from support.tiny_pair import Pair


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has these instruction sets")
@pytest.mark.fast_cases
@pytest.mark.parametrize("instruction_set", list(VARIABLES))
def test_libraries_take_the_kernels_of_the_instruction_set(instruction_set: str) -> None:
    assert re.fullmatch(EXPECTED[instruction_set], kernels(instruction_set))


@pytest.mark.parametrize(
    ("package", "name", "is_computing"),
    [
        ("pipedec.model", "StageModel", True),
        ("pipedec.families", "ModelConfig", False),
        ("pipedec.engine.local", "LocalPipeline", True),
        ("pipedec.scheduler", "RankScheduler", False),
        ("transformers", "LlamaForCausalLM", True),
        ("transformers", "PreTrainedTokenizerFast", False),
        ("support.stage_chain", "StageChain", True),
        ("support.checkpoints", "save_tiny", False),
        ("support.tiny_pair", "Pair", False),
    ],
)
def test_a_module_computes_if_it_names_what_does(package: str, name: str, is_computing: bool) -> None:
    module = ModuleType("test_something")
    vars(module)[name] = getattr(import_module(package), name)
    assert computes(module) == is_computing


def test_a_test_with_models_is_marked(pair: Pair, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("numbers") is not None


def test_a_test_with_a_tokenizer_is_not_marked(tokenizer_files: Path, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("numbers") is None


def test_every_quarter_has_its_share_of_the_files() -> None:
    files = [path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")]
    counts = [sum(quarter_of(path) == quarter for path in files) for quarter in range(QUARTERS)]
    assert sum(counts) == len(files) and min(counts) > len(files) / 6
