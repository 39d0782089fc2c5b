"""The shipped pair and its draft at toy size: training runs, resumes exactly and reports; prompts are made of the library."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.refusals import refusal
from support.tiny_pair import Pair
from support.toy_training import TOY, TOY_MIXTURE, killed_in_step, small_library
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from pipedec.core.errors import UserError
from pipedec.train.continuations import continued
from pipedec.train.draft import DraftRecipe
from pipedec.train.measuring import MeasuredDraft, on_policy_agreement
from pipedec.train.run import Run, TrainingLoop
from pipedec.train.targets import LoadedTarget
from recipes.reference_models import corpus
from recipes.reference_models.__main__ import reference_models
from recipes.reference_models.draft import LibraryRecipe, bita_prompts, prompts, train_library_draft
from recipes.reference_models.pair import Mixture, deepen, train_mixture, train_pair

RECIPE = DraftRecipe(steps=5, batch=3, length=64, long_batch=1, warmup_steps=2, new_tokens=6, long_sets=("passages",))
LIBRARY = LibraryRecipe(
    text_rows=8, num_held_out_prompts=3, num_prompts={"questions": 12, "source": 12, "requests": 4, "passages": 4}
)


TOPICS = list(islice(corpus.topic_documents(), 60))


@pytest.fixture(autouse=True)
def small_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "library_documents", small_library)
    monkeypatch.setattr(corpus, "topic_documents", lambda: iter(TOPICS))


def train(out: Path, work: Path) -> dict:
    return train_pair(None, TOY, Run(out, work, threads=1), compiled=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "library_documents", small_library)
        train(out, out / "work")
    return out


def test_training_writes_a_pair_that_transformers_loads(trained: Path) -> None:
    report = json.loads((trained / "training.json").read_text())
    assert set(report["held_out"]) == {"source", "questions"} and report["recipe"]["phases"] == [[1, 3], [2, 3]]
    card = (trained / "README.md").read_text()
    assert "1 layers for 3 steps, 2 layers for 3 steps" in card and card.count("| questions |") == 1
    tokenizer = AutoTokenizer.from_pretrained(trained / "target")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi "}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|begin|><|user|>Hi<|end|><|assistant|>"
    ids = torch.tensor([tokenizer("def")["input_ids"]])
    assert ids[0, 0] == tokenizer.bos_token_id
    for name, layers in (("target", 2), ("draft", 1)):
        model = LlamaForCausalLM.from_pretrained(trained / name)
        assert model.config.num_hidden_layers == layers
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert output.shape[1] > ids.shape[1]


@pytest.mark.parametrize("phase", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_training_of_the_pair_resumes_to_the_same_weights(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingLoop, "run", killed_in_step(2, phase))
        train(tmp_path / "resumed", tmp_path / "work")
    train(tmp_path / "resumed", tmp_path / "work")
    for name in ("target", "draft"):
        straight, resumed = (load_file(out / name / "model.safetensors") for out in (trained, tmp_path / "resumed"))
        assert straight.keys() == resumed.keys() and all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_growing_does_not_change_the_function() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config).eval()
    deeper = deepen(model, 4).eval()
    ids = torch.randint(0, 50, (1, 9))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, deeper(ids).logits, atol=1e-5)
    assert deeper.config.num_hidden_layers == 4


@pytest.mark.parametrize("parts", [2, 3])
def test_a_mixture_begins_as_the_dense_target(trained: Path, parts: int) -> None:
    torch.manual_seed(0)
    dense = LlamaForCausalLM.from_pretrained(trained / "target", dtype=torch.float32).eval()
    ids = torch.randint(0, 50, (3, 40))
    for noise, share, error in ((0.0, 1.0, 1e-4), (Mixture.router_noise, 0.9, 0.1)):
        made = Mixture(experts=12, active_experts=parts, router_noise=noise).model(dense).eval()
        with torch.no_grad():
            wanted, output = dense(ids).logits, made(ids, output_router_logits=True)
        assert (output.logits - wanted).std() < error * wanted.std()
        for logits in output.router_logits:
            chosen = logits.topk(parts).indices
            whole = (chosen % parts).sort(-1).values == torch.arange(parts)
            assert len(chosen.unique()) > parts and whole.all(-1).float().mean() >= share


def test_a_killed_training_of_a_mixture_resumes_to_the_same_weights(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_it(out: Path, work: Path) -> dict:
        return train_mixture(None, trained, TOY_MIXTURE, Run(out, work, threads=1), compiled=False)

    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 2)
    report = train_it(tmp_path / "straight", tmp_path / "work")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingLoop, "run", killed_in_step(3))
        train_it(tmp_path / "resumed", tmp_path / "killed")
    train_it(tmp_path / "resumed", tmp_path / "killed")
    straight, resumed = (load_file(tmp_path / name / "target" / "model.safetensors") for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys() and all(torch.equal(straight[key], resumed[key]) for key in straight)
    assert json.loads((tmp_path / "straight" / "training.json").read_text()) == json.loads(json.dumps(report))
    assert set(report["held_out"]) == {"source", "questions"}
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "target")
    assert isinstance(target, MixtralForCausalLM) and target.config.num_local_experts == 4
    dense = load_file(trained / "target" / "model.safetensors")
    assert not torch.equal(straight["model.embed_tokens.weight"], dense["model.embed_tokens.weight"])
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (trained / "target", tmp_path / "straight" / "target")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def test_each_layer_of_a_mixture_is_to_be_balanced() -> None:
    class Routed:
        """The logits of two layers; the same experts have all tokens of a layer, in the sum each expert has as many."""

        def __init__(self, favoured: tuple[slice, slice]) -> None:
            self.logits = torch.zeros(1, 8, 5)
            self.router_logits = tuple(torch.zeros(8, 4).index_fill(1, torch.arange(4)[one], 9.0) for one in favoured)

        def __call__(self, input_ids: Tensor, output_router_logits: bool) -> Routed:
            assert output_router_logits
            return self

    sizes, ids = Mixture(experts=4, balance=1.0), torch.zeros(1, 8, dtype=torch.int64)
    first, last = slice(0, 2), slice(2, 4)
    sum_of_layers = sizes.loss(Routed((first, last)), ids)
    text = torch.tensor(5.0).log()  # of five equal logits
    assert torch.isclose(sum_of_layers - text, torch.tensor(2 * 4.0), atol=0.01), "the worst that can be: twice the best, 2 each"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["pair", "--problems", "nowhere.jsonl"], "--problems nowhere.jsonl: there is no such file"),
        (["pair", "--steps-scale", "0"], "'--steps-scale': must be a number (above 0), not 0.0"),
        (["draft", "--draft", "none"], "to continue"),
        (["bita", "--target", "nowhere"], "nowhere is not a directory"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(reference_models, [*flags, "--out", str(tmp_path / "out"), "--work", str(tmp_path)])
    assert message in refusal(result) and not (tmp_path / "out").exists()


def proceed(trained: Path, out: Path, work: Path) -> dict:
    run = Run(out, work, threads=1)
    return train_library_draft(trained / "target", trained / "draft", None, RECIPE, run, LIBRARY, compiled=False)


@pytest.mark.slow
def test_a_continued_draft_loads_and_its_report_goes_on(trained: Path, tmp_path: Path) -> None:
    report = proceed(trained, tmp_path / "once", tmp_path / "work")
    assert set(report["on_policy"]) == {"questions", "source", "requests", "passages"}
    assert "questions" in report["held_out"] and "topics" not in report["held_out"]
    assert report["continuations"][0]["seen_tokens"] == 5 * (2 * 64 + 2048)
    assert report["recipe"] == json.loads((trained / "training.json").read_text())["recipe"]
    old, new = (load_file(path / "draft" / "model.safetensors") for path in (trained, tmp_path / "once"))
    assert old.keys() == new.keys() and not all(torch.equal(old[key], new[key]) for key in old)
    tokenizers = [AutoTokenizer.from_pretrained(path / "draft") for path in (trained, tmp_path / "once")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    shutil.copytree(trained / "target", tmp_path / "once" / "target")
    again = proceed(tmp_path / "once", tmp_path / "twice", tmp_path / "work2")
    assert again["continuations"][1]["before"]["on_policy"] == report["on_policy"]
    card = (tmp_path / "twice" / "README.md").read_text()
    assert card.count("2 × 64 and 1 × 2,048 tokens; 5 steps") == 2 and card.count("% → ") == 12


def test_continuations_are_the_targets_greedy_words_and_are_kept(trained: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained / "target")
    target = LlamaForCausalLM.from_pretrained(trained / "target", dtype=torch.float64).eval()
    documents = [document for document in small_library() if document.family == "questions"]
    asked = prompts(documents, tokenizer, 3, seed=0)
    assert {(ids[0], ids[-1]) for ids in asked} == {(tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("<|assistant|>"))}
    said = continued(LoadedTarget(lambda _: target), asked, 6, tmp_path / "store")
    assert sorted(asked, key=len) == [continuation.ids[: continuation.prompt_length] for continuation in said]
    for continuation in said:  # token by token, without a cache, without padding
        ids = continuation.ids[: continuation.prompt_length]
        while len(ids) < len(continuation.ids):
            ids = [*ids, int(target(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        assert ids == continuation.ids
        assert len(ids) == continuation.prompt_length + 6 or ids[-1] == tokenizer.eos_token_id
    assert continued(None, asked, 6, tmp_path / "store") == said
    assert on_policy_agreement(MeasuredDraft(target), {"all": said})["all"]["top1"] == 1.0
    with pytest.raises(UserError, match="other prompts"):
        continued(LoadedTarget(lambda _: target), asked[:2], 6, tmp_path / "store")


def test_bita_learns_from_the_drafts_prompts(pair: Pair, tmp_path: Path) -> None:
    found = bita_prompts(pair.target, None, new_tokens=4, max_prompts=3)
    assert set(found) == {"questions", "source", "requests", "passages"}
    assert all(len(part.training) <= 3 and len(part.held_out) <= 3 for part in found.values())
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    renamed = (target / "tokenizer.json").read_text().replace(corpus.ASSISTANT, "<|somebody|>")
    (target / "tokenizer.json").write_text(renamed)
    with pytest.raises(UserError, match="prompts are for tokenizers that know") as raised:
        bita_prompts(target, None, new_tokens=4, max_prompts=3)
    assert "\n" not in str(raised.value)
