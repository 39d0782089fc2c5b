"""BiTA's experiments: their tables beside the paper's figures, what is trained and asked, and self-speculative decoding."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from support.synthetic_sweep import Line, bita, line, write
from support.tiny_pair import SENTENCES, Pair

from benchmarks.alternatives import TransformersContender
from benchmarks.papers.__main__ import EXPERIMENTS
from benchmarks.papers.experiment import Place
from benchmarks.self_speculation import expected_gain, search_skipped, without_layers
from pipedec.bench.record import ROWS_FILE
from pipedec.text.prompt import Prompter
from pipedec.train.bita import BitaRecipe
from pipedec.train.options import bita_options
from pipedec.verify.reference import load_transformers


def cells(place: Place, name: str, directory: str, lines: list[Line]) -> list[list[str]]:
    """The rows of the last table of an experiment, from these answers."""
    place.directory(directory).mkdir(parents=True, exist_ok=True)
    write(place.directory(directory) / ROWS_FILE, lines)
    return EXPERIMENTS[name].tables(place)[-1].rows


def test_each_of_our_lines_stands_above_the_papers(tmp_path: Path) -> None:
    place, base = Place(tmp_path), [line("pp", name, ms=300.0, misses=10, groups=1) for name in ("cip", "mt-bench")]
    lines = [*base, bita("cip", groups=1, ms=100.0, misses=5), bita("mt-bench", groups=1, ms=150.0, misses=5)]
    lines += [bita(name, groups=1, name="none", prompting="none", prompt_tokens=0, ms=200.0) for name in ("cip", "mt-bench")]
    assert cells(place, "bita-table3", "bita-prompts", lines) == [
        ["none", "ours", "1.50×", "–", "1.50×", "5.00"],
        ["none", "paper", "1.94×", "2.12×", "2.03×", "–"],
        ["deep", "ours", "3.00×", "–", "3.00×", "2.00"],
        ["deep", "paper", "2.29×", "2.73×", "2.50×", "–"],
    ]
    library = [one | {"prompt_set": "lists"} for one in lines if one["prompt_set"] == "cip"]
    assert cells(place, "bita-table8", "bita-prompts", library)[2] == ["deep", "ours", "3.00×", "–", "–", "3.00×", "2.00"]
    first, *others = cells(place, "bita-table7", "bita-table7", [one | {"prompt_set": "math"} for one in lines[:1] + lines[2:3]])
    assert first[:3] == ["shipped, efficient, k = 5", "ours", "3.00×"]
    assert others[0][0] == "LLaMA-2-7B" and others[0][-2:] == ["2.38×", "–"], "the paper's own mean"


def test_speed_ups_are_over_the_same_runtime_and_passes_become_tokens(tmp_path: Path) -> None:
    place = Place(tmp_path)
    rates = {
        "transformers greedy": (50, 1.0), "transformers assisted": (75, 0.25), "transformers, 3 layers skipped": (60, 0.5),
        "pipedec pp, 1 stage": (100, 1.0), "pipedec stpp, 1 stage": (150, 0.5), "pipedec bita, 1 stage": (200, 0.4),
    }  # fmt: skip
    rows = [{"contender": name, "tokens_per_second": rate, "passes_per_token": passes} for name, (rate, passes) in rates.items()]
    place.directory("bita-rivals").mkdir(parents=True)
    (place.directory("bita-rivals") / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert EXPERIMENTS["bita-table2"].tables(place)[0].rows == [
        ["HF AssistGen", "–", "1.53×", "1.50×", "1.50×", "4.00"],
        ["SpecDec", "–", "1.79×", "3.00×", "1.50×", "2.00"],
        ["Self-SpecDec", "1.11×", "1.15×", "1.20×", "1.20×", "2.00"],
        ["Lookahead", "1.70×", "1.22×", "–", "–", "–"],
        ["BiTA", "2.38×", "2.72×", "4.00×", "2.00×", "2.50"],
    ]
    assert EXPERIMENTS["bita-fig7"].tables(place)[0].rows[0] == ["shipped", "ours", "2.00×", "2.50"]
    assert len(EXPERIMENTS["bita-fig1"].tables(place)[0].rows) == len(rates)


def test_every_bita_that_is_asked_was_trained_before(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    for name in ("lists", "texts", "code-to-train", "docstrings-to-train", "lists-to-train"):
        (tmp_path / "prompts" / f"{name}.jsonl").write_text('{"prompt": "Why?"}\n')
    for experiment in EXPERIMENTS.values():
        if experiment.trains and experiment.name.startswith("bita-"):
            trained: set[str] = set()
            for words in experiment.commands(Place(tmp_path)):
                if words[1] == "train":
                    trained.add(words[words.index("--out") + 1])
                else:
                    assert words[words.index("--bita") + 1] in trained
            assert trained


def test_the_papers_recipe_gives_defaults() -> None:
    found: list[BitaRecipe] = []

    @click.command()
    @bita_options
    def command(recipe: BitaRecipe, **_others: object) -> None:
        found.append(recipe)

    for flags in ("", "--recipe paper", "--recipe paper --batch 4 --prompting none", "--prompting none"):
        assert CliRunner().invoke(command, ["--out", "o", "--work", "w", *flags.split()]).exit_code == 0
    assert found[0] == BitaRecipe()
    assert (found[1].batch, found[1].groups, found[1].learning_rate, found[1].start_std) == (128, 1, 0.03, 0.02)
    assert (found[2].batch, found[2].groups, found[2].prompt_tokens) == (4, 1, 0)
    assert found[3] == BitaRecipe(prompting="none", prompt_tokens=0)


def test_the_target_without_some_layers_drafts_the_targets_own_answer(pair: Pair) -> None:
    target = load_transformers(pair.target, torch.float32, attn_implementation="sdpa")
    draft = without_layers(target, (1, 2, 5))
    assert {tensor.data_ptr() for tensor in draft.parameters()} < {tensor.data_ptr() for tensor in target.parameters()}
    assert (len(draft.model.layers), draft.config.num_hidden_layers, target.config.num_hidden_layers) == (5, 5, 8)
    prompt = Prompter(pair.target, 2048).token_ids(SENTENCES[0], False, 12)
    greedy = TransformersContender("greedy", target)
    own = TransformersContender("self-speculation", target, draft, assistant_model=draft)
    apart = TransformersContender("a draft of its own", target, assistant_model=draft)
    assert own.answer(prompt, 12) == apart.answer(prompt, 12) == greedy.answer(prompt, 12)
    assert own.count.passes > apart.count.passes, "the target's layers count for drafts, too"


def test_the_search_skips_what_does_nothing(pair: Pair) -> None:
    target = load_transformers(pair.target, torch.float32)
    for layer in target.model.layers[1:]:
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(matrix.weight)
    assert len(search_skipped(target, [torch.arange(5, 25)[None]])) == 7
    assert expected_gain(1.0, 0.125) == pytest.approx(9 / 2)
    assert expected_gain(0.5, 0.5) == pytest.approx(1)
