"""The training of the shipped pair at toy size: it runs, it resumes exactly, growth changes nothing."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.refusals import refusal
from support.toy_training import TOY, killed_in_step, small_library
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipedec.train.run import Run, TrainingLoop
from recipes.reference_models import corpus
from recipes.reference_models.__main__ import reference_models
from recipes.reference_models.pair import Recipe, deepen, train_pair


@pytest.fixture(autouse=True)
def small_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "library_documents", small_library)


def train(out: Path, work: Path) -> dict:
    return train_pair(None, TOY, Run(out, work, threads=1), compiled=False)


def test_training_writes_a_pair_that_transformers_loads(tmp_path: Path) -> None:
    report = train(tmp_path / "out", tmp_path / "work")
    assert set(report["held_out"]) == {"source", "questions"}
    assert json.loads((tmp_path / "out" / "training.json").read_text())["recipe"]["phases"] == [[1, 3], [2, 3]]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1 layers for 3 steps, 2 layers for 3 steps" in card and card.count("| questions |") == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "target")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi "}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|begin|><|user|>Hi<|end|><|assistant|>"
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    for name, layers in (("target", 2), ("draft", 1)):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "out" / name)
        assert model.config.num_hidden_layers == layers
        ids = torch.tensor([tokenizer("def")["input_ids"]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert output.shape[1] > ids.shape[1]


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 2)
    train(tmp_path / "straight", tmp_path / "work1")
    for phase in range(4):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(TrainingLoop, "run", killed_in_step(2, phase))
            train(tmp_path / "resumed", tmp_path / "work2")
    train(tmp_path / "resumed", tmp_path / "work2")
    for name in ("target", "draft"):
        straight, resumed = (load_file(tmp_path / out / name / "model.safetensors") for out in ("straight", "resumed"))
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_growing_does_not_change_the_function() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config).eval()
    deeper = deepen(model, 4).eval()
    ids = torch.randint(0, 50, (1, 9))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, deeper(ids).logits, atol=1e-5)
    assert deeper.config.num_hidden_layers == 4
    with pytest.raises(ValueError, match="double"):
        deepen(model, 5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["pair", "--problems", "nowhere.jsonl"], "--problems nowhere.jsonl: there is no such file"),
        (["pair", "--steps-scale", "0"], "'--steps-scale': 0.0 is not in the range"),
        (["draft", "--problems", "nowhere.jsonl"], "--problems nowhere.jsonl: there is no such file"),
        (["draft", "--draft", "none"], "to continue"),
        (["bita", "--problems", "nowhere.jsonl"], "--problems nowhere.jsonl: there is no such file"),
        (["bita", "--target", "nowhere"], "nowhere is not a directory"),
        (["bita", "--max-prompts", "0"], "'--max-prompts': 0 is not in the range"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(reference_models, [*flags, "--out", str(tmp_path / "out"), "--work", str(tmp_path)])
    assert message in refusal(result) and not (tmp_path / "out").exists()


def test_the_recipe_is_plain_data() -> None:
    assert json.loads(json.dumps(dataclasses.asdict(Recipe())))["target"]["hidden"] == 192
