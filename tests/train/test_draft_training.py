"""Continuing a draft at toy size: it runs, it resumes exactly, its rows are the target's own words, mistakes are one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tiny_pair import Pair
from toy_training import TOY, small_library
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from pipedec.cli.train import train as command
from pipedec.core import UserError
from pipedec.train import continuations, corpus, reference
from pipedec.train.continuations import Continuation, continue_greedily, pack_whole, passage_prompts, prompts, request_prompts
from pipedec.train.corpus import Document
from pipedec.train.draft import DraftRecipe, RememberedTarget, continue_draft, mean_loss, on_policy_agreement
from pipedec.train.trainer import Trainer

RECIPE = DraftRecipe(
    steps=5, batch=3, length=64, long_batch=1, long_length=2048, warmup_steps=2, text_rows=8, num_held_out_prompts=3,
    new_tokens=6, num_prompts={"questions": 12, "source": 12, "requests": 4, "passages": 4},
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "library_documents", small_library)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair as ``train reference`` writes it."""
    out = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "library_documents", small_library)
        reference.train(None, out, out / "work", TOY, compiled=False, threads=1)
    return out


def proceed(trained: Path, out: Path, work: Path, recipe: DraftRecipe = RECIPE) -> dict:
    return continue_draft(trained / "target", trained / "draft", None, out, work, recipe, compiled=False, threads=1)


def losses(work: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def test_a_continued_draft_loads_and_its_report_goes_on(trained: Path, tmp_path: Path) -> None:
    report = proceed(trained, tmp_path / "once", tmp_path / "work")
    assert set(report["on_policy"]) == {"questions", "source", "requests", "passages"}
    assert "questions" in report["held_out"] and "topics" not in report["held_out"]
    assert report["continuations"][0]["seen_tokens"] == 5 * (2 * 64 + 2048)
    assert report["continuations"][0]["row_tokens"]["passages"] % 2048 == 0
    assert report["recipe"] == json.loads((trained / "training.json").read_text())["recipe"]
    draft = LlamaForCausalLM.from_pretrained(tmp_path / "once" / "draft")
    assert draft.dtype == torch.bfloat16 and draft.generation_config.use_cache
    old, new = (load_file(path / "draft" / "model.safetensors") for path in (trained, tmp_path / "once"))
    assert old.keys() == new.keys() and not all(torch.equal(old[key], new[key]) for key in old)
    tokenizers = [AutoTokenizer.from_pretrained(path / "draft") for path in (trained, tmp_path / "once")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    shutil.copytree(trained / "target", tmp_path / "once" / "target")
    again = proceed(tmp_path / "once", tmp_path / "twice", tmp_path / "work2")
    assert again["continuations"][1]["before"]["on_policy"] == report["on_policy"]
    card = (tmp_path / "twice" / "README.md").read_text()
    assert card.count("2 × 64 and 1 × 2,048 tokens; 5 steps") == 2 and card.count("% → ") == 12


def test_a_killed_run_resumes_to_the_same_weights(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "SAVE_EVERY", 2)
    proceed(trained, tmp_path / "straight", tmp_path / "work1")
    save = Trainer._save

    def save_then_die(self: Trainer, *arguments: object) -> None:
        save(self, *arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Trainer, "_save", save_then_die)
            proceed(trained, tmp_path / "resumed", tmp_path / "work2")
    proceed(trained, tmp_path / "resumed", tmp_path / "work2")
    assert [step for step, _ in losses(tmp_path / "work1")] == [2, 4, 5]
    assert losses(tmp_path / "work1") == losses(tmp_path / "work2")
    straight, resumed = (load_file(tmp_path / out / "draft" / "model.safetensors") for out in ("straight", "resumed"))
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_continuations_are_the_targets_greedy_words_and_are_kept(trained: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained / "target")
    target = LlamaForCausalLM.from_pretrained(trained / "target", dtype=torch.float64).eval()
    documents = [document for document in small_library() if document.family == "questions"]
    asked = [*prompts(documents, tokenizer, 3, seed=0), tokenizer.encode("<|begin|>def f(value):", add_special_tokens=False)]
    assert all(
        ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>") for ids in asked[:3]
    )
    said = continue_greedily(target, asked, 6, tmp_path / "store")
    assert sorted(asked, key=len) == [continuation.ids[: continuation.prompt_length] for continuation in said]
    for continuation in said:  # token by token, without a cache, without padding
        ids = continuation.ids[: continuation.prompt_length]
        while len(ids) < len(continuation.ids):
            ids = [*ids, int(target(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        assert ids == continuation.ids
        assert len(ids) == continuation.prompt_length + 6 or ids[-1] == tokenizer.eos_token_id
    assert continue_greedily(None, asked, 6, tmp_path / "store") == said  # type: ignore[arg-type]
    assert on_policy_agreement(target, {"all": said})["all"]["top1"] == 1.0
    with pytest.raises(UserError, match="other prompts"):
        continue_greedily(target, asked[:2], 6, tmp_path / "store")


def test_source_text_is_cut_and_long_prompts_are_left_out(trained: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained / "target")
    source = Document("source", "<|begin|>" + "".join(f"line_{number} = {number}\n" for number in range(100)) + "<|end|>")
    cut = prompts([source], tokenizer, 5, seed=0)
    assert len(cut) == 5 and len({tuple(ids) for ids in cut}) > 1 and all(len(ids) <= 160 for ids in cut)
    assert prompts([Document("problems", corpus.conversation("How many? " * 300, "9"))], tokenizer, 5, seed=0) == []


def test_rows_begin_with_a_prompt() -> None:
    spoken = [Continuation([number] * length, 1) for number, length in enumerate((3, 4, 5, 2, 4, 4), start=1)]
    rows = pack_whole(spoken, length=6, seed=0).ids.tolist()
    assert len(rows) == 4 and all(len(row) == 6 for row in rows)
    whole = {row[0]: row.count(row[0]) for row in rows}
    assert all(len(spoken[number - 1].ids) == length for number, length in whole.items())
    cut = [row.count(row[-1]) < len(spoken[row[-1] - 1].ids) for row in rows]
    assert any(cut)
    assert all(following[0] == row[-1] for row, following, was_cut in zip(rows, rows[1:], cut, strict=False) if was_cut)
    assert len(pack_whole([], length=6, seed=0).ids) == 0


def test_rows_tell_where_the_target_speaks_next() -> None:
    rows = pack_whole([Continuation([1, 2, 3, 4, 5], 3)] * 3, length=7, seed=0)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 1, 2]] * 2
    assert rows.before_own.tolist() == [[False, False, True, True, False, False, False]] * 2


def test_made_prompts_are_turns_of_the_documents_prose_within_their_lengths(trained: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained / "target")
    documents = [
        Document("questions", corpus.conversation("What is it?", f"It is the {word} of all the others in this long row."))
        for word in ("first", "second", "third")
    ]
    asked = request_prompts(documents, tokenizer, 40, seed=3)
    long = passage_prompts(documents, tokenizer, 5, max_tokens=2000, seed=3)
    for ids in [*asked, *long]:
        text = tokenizer.decode(ids)
        assert text.startswith("<|begin|><|user|>") and text.endswith("<|end|><|assistant|>") and "{" not in text
    assert len(asked) == 40 and len({tuple(ids) for ids in asked}) > 30 and all(len(ids) <= 224 for ids in asked)
    assert len(long) == 5 and all(256 <= len(ids) <= 2000 for ids in long)
    assert any("of all the others in this long row" in tokenizer.decode(ids) for ids in long)
    assert asked == request_prompts(documents, tokenizer, 40, seed=3) != request_prompts(documents, tokenizer, 40, seed=4)
    source = [Document("source", "<|begin|>value = 1\n<|end|>")]
    assert request_prompts(source, tokenizer, 3, seed=0) == passage_prompts(source, tokenizer, 3, 2000, seed=0) == []


def test_long_prompts_are_generated_in_smaller_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: Path) -> None:
    monkeypatch.setattr(continuations, "_BATCH", 3)
    monkeypatch.setattr(continuations, "_BATCH_TOKENS", 16)
    target = LlamaForCausalLM.from_pretrained(trained / "target", dtype=torch.float32).eval()
    asked = [[2] * length for length in (1, 2, 3, 4, 7, 8, 20)]
    continue_greedily(target, asked, 1, tmp_path)
    sizes = [len(load_file(path)["lengths"]) for path in sorted(tmp_path.iterdir())]
    assert sizes == [3, 2, 1, 1]


def test_the_loss_is_least_at_the_wanted_distribution() -> None:
    torch.manual_seed(0)
    ids, hidden, head = torch.randint(0, 7, (2, 3)), torch.randn(2, 3, 4), torch.randn(7, 4)
    remembered = RememberedTarget(ids, torch.full((2, 3), 2.0), hidden, head)
    wanted = (hidden @ head.T).softmax(-1)
    greedy = torch.nn.functional.one_hot(wanted.argmax(-1), 7)

    def loss(share: float) -> float:
        said = Said(0.8 * wanted + 0.2 * greedy if share == 0.2 else wanted)
        return mean_loss(lambda input_ids: said, torch.arange(2), remembered, remembered, 0, 0.2).item()

    entropy = torch.distributions.Categorical(0.8 * wanted + 0.2 * greedy).entropy().mean().item()
    assert loss(0.2) == pytest.approx(entropy, abs=1e-5)
    assert loss(0.0) > loss(0.2)


def test_a_step_weighs_short_and_long_rows_by_their_tokens() -> None:
    head = torch.eye(3)
    short = RememberedTarget(torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2), torch.zeros(4, 2, 3), head)
    long_weights = torch.tensor([[0.0] * 5, [1, 1, 1, 3, 0]])
    long = RememberedTarget(torch.ones(2, 5, dtype=torch.int64), long_weights, torch.zeros(2, 5, 3), head)

    def model(input_ids: torch.Tensor) -> Said:
        if input_ids.shape == (3, 2):
            return Said(torch.full((3, 2, 3), 1 / 3))
        assert input_ids.shape == (1, 5) and bool((input_ids == 1).all())
        return Said(torch.tensor([0.25, 0.25, 0.5]).expand(1, 5, 3))

    on_short, on_long = torch.tensor(3.0).log(), -torch.tensor([0.25, 0.25, 0.5]).log().mean()
    found = mean_loss(model, torch.tensor([3, 0, 2, 1]), short, long, num_long=1, greedy_share=0.0)
    assert found.item() == pytest.approx(((6 * on_short + 6 * on_long) / 12).item(), abs=1e-5)


class Said:
    """What a model returns when it gives these probabilities."""

    def __init__(self, probabilities: torch.Tensor) -> None:
        self.logits = probabilities.log()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--problems", "nowhere.jsonl"], "no such file"),
        (["--steps", "0"], "at least 1"),
        (["--target", "nowhere", "--draft", "nowhere"], "nowhere"),
        (["--draft", "none"], "to continue"),
    ],
)
def test_mistakes_are_told(flags: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["draft", "--out", str(tmp_path), "--work", str(tmp_path), *flags])
    assert isinstance(result.exception, UserError) and message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_draft_with_another_tokenizer_is_refused(pair: Pair, tmp_path: Path) -> None:
    flags = ["--target", str(pair.target), "--draft", str(pair.foreign_draft)]
    result = CliRunner().invoke(command, ["draft", "--out", str(tmp_path), "--work", str(tmp_path), *flags])
    assert isinstance(result.exception, UserError) and "different tokenizer" in str(result.exception)
