"""The resources benchmark on a toy cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.checkpoints import save_tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipedec.config import Settings
from pipedec.core import PipedecError, UserError
from pipedec.engine.build import resolve
from soak.resources import ResourcesConfig, TimedAnswer, latencies, resources


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 4 layers and a draft of 1 with the same byte tokenizer."""
    root = tmp_path_factory.mktemp("pair")
    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, layers in (("target", 4), ("draft", 1)):
        save_tiny_llama(root / name, layers=layers, vocab=len(symbols), seed=layers)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(root / name)
    return root


@pytest.mark.numbers
@pytest.mark.slow
def test_toy_cluster(pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    flags = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--stages", "2", "--device", "cpu"]
    flags += ["--idle-seconds", "0.3", "--requests", "2", "--max-tokens", "5", "--out", str(out)]
    done = CliRunner().invoke(resources, flags)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "Memory by rank" in done.stdout and "idle CPU" in done.stdout
    row: dict[str, Any] = json.loads(out.read_text())
    assert row["benchmark"] == "resources" and row["config"]["pipeline"]["layers"] == [[0, 2], [2, 4]]
    assert [rank["rank"] for rank in row["ranks"]] == [0, 1, 2]
    spec = resolve(Settings.of(target=pair / "target", draft=pair / "draft", stages=2, device="cpu"))
    for rank in row["ranks"]:
        assert rank["peak_bytes"] > rank["weight_bytes"] > 0
        capacity = None if rank["rank"] == 0 else spec.kv_slots
        assert rank["cache_slots"] == {"before": capacity, "after": capacity}
    latency = row["second_request_ms"]
    assert latency["first_decoded"] > latency["first_token"] >= latency["prefill"] > 0
    assert row["redis_keys"]["after"] == row["redis_keys"]["before"] > 0
    assert row["idle_cpu_percent"]["total"] == pytest.approx(row["idle_cpu_percent"]["ranks"] + row["idle_cpu_percent"]["redis"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"idle_seconds": 0}, "--idle-seconds"), ({"requests": 0}, "--requests"), ({"max_tokens": 1}, "--max-tokens")],
)
def test_impossible_sizes_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ResourcesConfig(**flags)


def test_an_answer_of_one_token_has_no_decoded_token() -> None:
    with pytest.raises(PipedecError, match="no decoding was timed"):
        latencies(TimedAnswer(token_seconds=[0.1]))
