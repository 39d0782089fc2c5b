"""Training BiTA at toy size: rows are what decoding will see, runs resume exactly, files are sound, mistakes are one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.zoo import save_model
from click.testing import CliRunner
from safetensors.torch import load_file
from support.checkpoints import save_tiny
from support.refusals import refusal
from support.tiny_pair import Pair
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from pipedec.cli.main import train as command
from pipedec.core.errors import UserError
from pipedec.data import PromptSource
from pipedec.families import model_config
from pipedec.model.bita import BitaWeights, checked_bita
from pipedec.text.prompt import Prompter
from pipedec.train.bita import BitaRecipe, MaskSteps, evaluate, guess_figures, train_bita
from pipedec.train.continuations import Continuation, Continuations, SplitPrompts, continued, file_prompts, split
from pipedec.train.mask_rows import (
    NO_LABEL,
    Learned,
    MaskRows,
    draw_places,
    folded,
    mask_pass,
    mask_rows,
    places_of,
    prompt_shape,
    token_pass,
)
from pipedec.train.run import Figures, Run, TrainingLoop, epoch_batch

CPU = torch.device("cpu")
RECIPE = BitaRecipe(
    masks=2, prompt_tokens=3, groups=4, steps=6, batch=3, warmup_steps=2, new_tokens=12, markov_rank=4, markov_steps=4
)
SAMPLES = [Continuation([5, 9, 3, 17, 8, 11, 30, 4], 3), Continuation([7, 21, 6, 40, 13], 2)]
PLACES = [torch.tensor([2, 3, 5]), torch.tensor([1, 2])]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"How many clips did {name} sell?"}) + "\n" for name in range(60)))
    return path


def train(pair: Pair, prompts: Path, out: Path, work: Path, recipe: BitaRecipe = RECIPE) -> dict:
    return train_bita(pair.target, asked_in(prompts, pair.target), recipe, Run(out, work, threads=1))


def asked_in(prompts: Path, target: Path) -> dict[str, SplitPrompts]:
    return file_prompts(Prompter(target, 2048), (PromptSource("asked", prompts),), new_tokens=12)


def log_of(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "bita.jsonl").read_text().splitlines()]


def random_learned(target: Any, num_masks: int, num_prompt_tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randn(prompt_shape(target, num_prompt_tokens), generator=generator)
    return prompt, torch.randn(num_masks, target.config.hidden_size, generator=generator)


def logits_of_groups(target: Any, prompt: Tensor, masks: Tensor, rows: MaskRows) -> Tensor:
    return mask_pass(target, prompt, masks, rows, token_pass(target, rows.tokens))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("num_prompt_tokens", [0, 4])
def test_mask_rows_compute_what_each_group_computes_alone(family: str, num_prompt_tokens: int, tmp_path: Path) -> None:
    target = save_tiny(family, tmp_path, dtype=torch.float64)
    prompt, masks = (tensor.double() for tensor in random_learned(target, 3, num_prompt_tokens))
    rows = mask_rows(SAMPLES, PLACES, 3, num_prompt_tokens)
    found = logits_of_groups(target, prompt, masks, rows)
    expected, labels = [], []
    for sample, places in zip(SAMPLES, PLACES, strict=True):
        for place in places.tolist():
            cache = DynamicCache()
            target(input_ids=torch.tensor([sample.ids[: place + 1]]), past_key_values=cache)
            known = [(layer.keys, layer.values) for layer in cache.layers]
            with_prompt = [
                tuple(torch.cat((learned[None], own), 2) for learned, own in zip(layer, pair, strict=True))
                for layer, pair in zip(prompt, known, strict=True)
            ]
            logits = target(
                inputs_embeds=masks[None],
                position_ids=torch.arange(place + 1, place + 4)[None],
                past_key_values=DynamicCache(with_prompt),
            ).logits[0]
            following = sample.ids[place + 2 : place + 5]
            expected.append(logits[: len(following)])
            labels += following
    torch.testing.assert_close(found.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert rows.labels[rows.labelled].tolist() == labels


def test_a_folded_prompt_is_what_its_rows_would_be(tmp_path: Path) -> None:
    """Embeddings, tokens and one group of masks in a single forward, each seeing what it may."""
    target = save_tiny("llama", tmp_path, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    embeddings, masks = (torch.randn(count, 32, generator=generator).double() for count in (3, 2))
    sample, place = SAMPLES[0], 4
    known = target.get_input_embeddings()(torch.tensor(sample.ids[: place + 1]))
    sequence = torch.cat((embeddings, known, masks))
    visible = torch.ones(len(sequence), len(sequence), dtype=torch.bool).tril()
    visible[3 : 3 + len(known), :3] = False
    positions = torch.cat((torch.zeros(3, dtype=torch.int64), torch.arange(len(known) + 2)))
    expected = target(inputs_embeds=sequence[None], position_ids=positions[None], attention_mask=visible[None, None]).logits[
        0, -2:
    ]
    rows = mask_rows([sample], [torch.tensor([place])], 2, 3)
    found = logits_of_groups(target, folded(target, embeddings), masks, rows)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_groups_hang_behind_places_that_have_a_label() -> None:
    assert places_of(Continuation(list(range(8)), 3)).tolist() == [2, 3, 4, 5]
    assert places_of(Continuation([1, 2, 3, 4], 3)).tolist() == []
    drawn = [draw_places(Continuation(list(range(40)), 3), 5, torch.Generator().manual_seed(seed)).tolist() for seed in (0, 1)]
    assert all(len(places) == 5 and places == sorted(set(places)) for places in drawn) and drawn[0] != drawn[1]
    rows = mask_rows(SAMPLES, PLACES, 3, 0)
    assert rows.labels[1, 6:].tolist() == [NO_LABEL] * 3 and rows.masks[0].tolist() == [0, 1, 2] * 3


def test_the_loss_is_that_of_equation_1(tmp_path: Path) -> None:
    """BiTA §3.1: −log P of each token that a group has to predict, by a forward of that group alone; their mean in a step."""
    target = save_tiny("llama", tmp_path, dtype=torch.float64).requires_grad_(False)
    recipe = replace(RECIPE, groups=3, batch=len(SAMPLES))
    learned = Learned(target, recipe.masks, recipe.prompt_tokens, "deep", 0.5, seed=0).double()
    found = MaskSteps(target, learned, Continuations({"all": SAMPLES}, {}), recipe)(0)["loss"]
    prompt, generator = learned.prompt_of(target), torch.Generator().manual_seed(recipe.seed * 1_000_003)
    losses = []
    for sample in [SAMPLES[number] for number in epoch_batch(0, len(SAMPLES), recipe.batch, recipe.seed)]:
        for place in draw_places(sample, recipe.groups, generator).tolist():
            alone = mask_rows([sample], [torch.tensor([place])], recipe.masks, recipe.prompt_tokens)
            log_probs = logits_of_groups(target, prompt, learned.masks, alone).detach().log_softmax(-1)
            following = sample.ids[place + 2 : place + 2 + recipe.masks]
            losses += [-float(log_probs[mask, token]) for mask, token in enumerate(following)]
    assert len(losses) > recipe.masks and found == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_figures_count_guesses_and_tokens_a_pass() -> None:
    nothing = torch.nan
    ranks = torch.tensor([[0, 0, 7], [0, 3, 0], [6, 0, 0], [0, nothing, nothing]])
    figures = guess_figures(ranks, torch.tensor([[1.0, 2, 3], [1, 4, 3], [4, 3, 3], [2, nothing, nothing]]))
    assert figures["top1"] == [0.75, 0.6667, 0.6667] and figures["top5"] == [0.75, 1.0, 0.6667]
    assert figures["loss"] == [2.0, 3.0, 3.0] and figures["groups"] == 4
    assert figures["chain_tokens"] == pytest.approx(1 + (2 + 1 + 0) / 3, abs=1e-4)
    assert figures["tree_tokens"] == pytest.approx(1 + (2 + 2 + 0) / 3, abs=1e-4)


def test_figures_do_not_depend_on_how_samples_are_batched(pair: Pair) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair.target).eval()
    weights = Learned(target, 3, 2, "deep", 0.5, seed=0).rounded(target)
    weights = BitaWeights(weights.prompt.float(), weights.masks.float())
    together = evaluate(target, weights, {"all": SAMPLES})
    assert evaluate(target, weights, {"all": SAMPLES}, most=1) == together
    assert together["all"]["groups"] == sum(len(places_of(sample)) for sample in SAMPLES)


@pytest.mark.fast_cases
@pytest.mark.parametrize("prompting", ["deep", "shallow", "none"])
def test_masks_learn_to_guess(tmp_path: Path, prompting: str) -> None:
    target = save_tiny("llama", tmp_path).requires_grad_(False)
    recipe = replace(RECIPE, prompting=prompting, prompt_tokens=0 if prompting == "none" else 3, steps=80, learning_rate=0.1)
    learned = Learned(target, 2, recipe.prompt_tokens, prompting, 0.02, seed=0)
    optimizer = torch.optim.AdamW(learned.parameters(), weight_decay=0.0)
    steps = MaskSteps(target, learned, Continuations({"all": SAMPLES}, {}), recipe)
    TrainingLoop("bita", learned, [optimizer], tmp_path, {}, max_norm=None).run(recipe.steps, recipe.rate, steps)
    log = log_of(tmp_path)
    first, last = (sum(row["loss"] for row in rows) / 5 for rows in (log[:5], log[-5:]))
    assert last < 0.7 * first
    assert sum(log[-1]["top1"]) > sum(log[0]["top1"])
    figures = evaluate(target, learned.rounded(target), {"all": SAMPLES})["all"]
    assert sum(figures["loss"]) / 2 < 0.7 * first


@pytest.mark.parametrize("prompting", ["deep", "shallow", "none"])
def test_a_trained_bita_loads(pair: Pair, prompts: Path, tmp_path: Path, prompting: str) -> None:
    num_prompt_tokens = 0 if prompting == "none" else 3
    recipe = replace(RECIPE, steps=2, prompting=prompting, prompt_tokens=num_prompt_tokens)
    before = load_file(pair.target / "model.safetensors")
    report = train(pair, prompts, tmp_path / "out", tmp_path / "work", recipe)
    assert report["samples"]["asked"] == 57 and report["held_out"]["asked"]["groups"] > 0
    assert report == json.loads((tmp_path / "out" / "training.json").read_text())
    described = checked_bita(tmp_path / "out", pair.target)
    assert (described.num_masks, described.num_prompt_tokens, described.prompting) == (2, num_prompt_tokens, prompting)
    config = model_config(pair.target)
    cached = config.layers[0].cached
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["prompt"].dtype == stored["masks"].dtype == torch.bfloat16
    assert stored["prompt"].shape == (len(config.layers), 2, cached.num_heads, num_prompt_tokens, cached.key_dim)
    after = load_file(pair.target / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{report['held_out']['asked']['chain_tokens']:.2f}" in card and "{" not in card


def test_an_interrupted_run_goes_on_exactly(pair: Pair, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 2)
    train(pair, prompts, tmp_path / "straight", tmp_path / "work1")
    step = MaskSteps.__call__

    def step_then_die(self: MaskSteps, number: int) -> Figures:
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MaskSteps, "__call__", step_then_die)
        train(pair, prompts, tmp_path / "resumed", tmp_path / "work2")
    assert len(log_of(tmp_path / "work2")) == 3
    train(pair, prompts, tmp_path / "resumed", tmp_path / "work2")
    assert log_of(tmp_path / "work1") == log_of(tmp_path / "work2")
    assert [row["step"] for row in log_of(tmp_path / "work1")] == [1, 2, 3, 4, 5, 6]
    straight, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    with pytest.raises(UserError, match=r"another run \(learning_rate 0\.2\): give another --work"):
        train(pair, prompts, tmp_path / "resumed", tmp_path / "work2", replace(RECIPE, learning_rate=0.01))


def test_prompts_to_measure_on_are_always_the_same() -> None:
    prompts = [[number, 7] for number in range(400)]
    parts = split(prompts)
    assert sorted(parts.training + parts.held_out) == prompts and len(parts.held_out) == 20 and parts.held_out != prompts[:20]
    assert split(prompts[::-1]) == parts
    assert len(split(prompts[:2]).held_out) == 1 and split(prompts[:1]) == SplitPrompts(prompts[:1], [])


def test_an_answer_is_greedy_whatever_the_checkpoint_recommends_and_ends_at_any_end_token(pair: Pair, tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair.target).eval()
    target.generation_config.eos_token_id = None
    endless = continued(target, [[1, 9, 30]], 24, tmp_path / "endless")[0].ids
    assert len(endless) == 27
    target.generation_config.repetition_penalty = 50.0
    penalised = target.generate(torch.tensor([[1, 9, 30]]), max_new_tokens=24, do_sample=False, pad_token_id=0)[0].tolist()
    assert continued(target, [[1, 9, 30]], 24, tmp_path / "penalised")[0].ids == endless != penalised
    target.generation_config.eos_token_id = [299, endless[5]]
    ended = continued(target, [[1, 9, 30]], 24, tmp_path / "ended")[0].ids
    assert ended == endless[: endless.index(endless[5], 3) + 1] and len(ended) < 27


def test_answers_of_another_target_are_not_taken(pair: Pair, prompts: Path, tmp_path: Path) -> None:
    recipe, other = replace(RECIPE, steps=1), replace(pair, target=pair.draft)
    train(pair, prompts, tmp_path / "out", tmp_path / "work", recipe)
    for checkpoint in ("bita", "markov"):
        (tmp_path / "work" / f"{checkpoint}.safetensors").unlink()
    train(other, prompts, tmp_path / "out", tmp_path / "work", recipe)
    train(other, prompts, tmp_path / "fresh", tmp_path / "work2", recipe)
    assert log_of(tmp_path / "work") == log_of(tmp_path / "work2")


def test_a_trained_bita_gets_a_new_table(pair: Pair, prompts: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    plain = train(pair, prompts, first, tmp_path / "work", replace(RECIPE, steps=2, markov_rank=0))
    asked, run = asked_in(prompts, pair.target), Run(second, tmp_path / "work2", threads=1)
    report = train_bita(pair.target, asked, replace(RECIPE, steps=9, markov_rank=4, markov_steps=2), run, first)
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert not any(name.startswith("markov") for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["markov_gates"].shape == (RECIPE.masks, 4) and report["recipe"]["steps"] == plain["recipe"]["steps"] == 2
    (first / "training.json").unlink()
    with pytest.raises(UserError, match="has no sound training"):
        train_bita(pair.target, asked, RECIPE, run, first)


def test_the_command_prints_what_it_measured(pair: Pair, prompts: Path, tmp_path: Path) -> None:
    flags = ["bita", "--target", str(pair.target), "--prompts", f"clips={prompts}", "--out", str(tmp_path / "out")]
    flags += ["--work", str(tmp_path / "work"), "--threads", "1", "--steps", "2", "--masks", "2", "--prompting", "none"]
    flags += ["--max-prompts", "40", "--new-tokens", "6", "--batch", "2", "--groups", "2", "--markov-steps", "2"]
    result = CliRunner().invoke(command, flags, env={"COLUMNS": "160"}, catch_exceptions=False)
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    assert report["recipe"]["prompt_tokens"] == 0 and report["samples"]["clips"] == 38
    figures = report["held_out"]["clips"]
    assert (
        f"{figures['top1'][0]:.1%} {figures['top1'][1]:.1%}" in result.output and f"{figures['tree_tokens']:.2f}" in result.output
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no prompts to learn from: give --prompts FILE"),
        (["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--prompts", "x.jsonl", "--problems", "x.jsonl"], "use python -m recipes.reference_models bita"),
        (["--prompts", "x.jsonl", "--target", "nowhere"], "nowhere is not a directory"),
        (["--prompts", "x.jsonl", "--steps", "0"], "'--steps': must be an integer (at least 1), not 0"),
        (["--prompts", "x.jsonl", "--masks", "17"], "must be an integer (1 to 16), not 17"),
        (["--prompts", "x.jsonl", "--prompting", "wide"], "must be one of deep, shallow, none, not 'wide'"),
        (["--prompts", "x.jsonl", "--prompting", "none", "--prompt-tokens", "4"], "or 0 with --prompting none"),
        (["--prompts", "x.jsonl", "--prompt-tokens", "0"], "at least 1"),
        (["--prompts", "x.jsonl", "--learning-rate", "0"], "'--learning-rate': must be a number (above 0), not 0.0"),
        (["--prompts", "x.jsonl", "--learning-rate", "nan"], "must be a number (above 0), not nan"),
        (["--prompts", "x.jsonl", "--new-tokens", "1"], "'--new-tokens': must be an integer (at least 2), not 1"),
    ],
)
def test_mistakes_are_told(flags: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["bita", "--out", str(tmp_path / "out"), "--work", str(tmp_path), *flags])
    assert message in refusal(result)
    assert "\n" not in str(result.exception) and not (tmp_path / "out").exists()


def test_unfit_prompts_and_targets_are_told(pair: Pair, tokenizer: Any, prompts: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "clips " * 5000}))
    prompter = Prompter(pair.target, 2048)
    with pytest.raises(UserError, match="no prompt of long fits"):
        file_prompts(prompter, (PromptSource("long", long),), 12)
    with pytest.raises(UserError, match="two sets of prompts are called asked"):
        file_prompts(prompter, (PromptSource("asked", prompts), PromptSource("asked", prompts)), 12)
    with pytest.raises(UserError, match="every sample is too long"):
        train(pair, prompts, tmp_path, tmp_path / "w", replace(RECIPE, max_length=4))
    save_tiny("mistral", tmp_path / "windowed", vocab=300, sliding_window=8)
    tokenizer.save_pretrained(tmp_path / "windowed")
    windowed = replace(pair, target=tmp_path / "windowed")
    with pytest.raises(UserError, match="window has 8 tokens"):
        train(windowed, prompts, tmp_path, tmp_path / "w2")


def test_a_target_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    save_model("qwen3_5_text", tmp_path / "target")
    with pytest.raises(UserError, match=r"^a BiTA needs attention in all layers: [^\n]*: choose another target$"):
        train_bita(tmp_path / "target", {}, RECIPE, Run(tmp_path / "out", tmp_path / "work", threads=1))
