"""The shipped models are real: complete, small, loadable anywhere, agreeing, decoded exactly, forking where they are asked to."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pipedec.config import Settings
from pipedec.config.settings import Models
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.directories import reference_pair, reference_threads
from pipedec.engine.build import checked_models, resolve
from pipedec.engine.local import LocalPipeline
from pipedec.gguf import model_files
from pipedec.text.prompt import Prompter, load_tokenizer, same_tokenizer
from pipedec.threads import load_dialect
from pipedec.train.continuations import Continuation
from pipedec.train.measuring import MeasuredDraft, on_policy_agreement
from pipedec.train.run import CARDS, card
from pipedec.verify.reference import Reference
from recipes.reference_models.pair import CARD
from recipes.thread_models.answers import ModelAnswers, SeededPrompt
from recipes.thread_models.figures import agreement, text_of
from recipes.thread_models.report import THREADS_CARD, thread_card
from recipes.thread_models.rows import RowWriter

SLOW = pytest.mark.slow
PROMPTS = [
    "A farmer has 15 cows and buys 7 more. Then he sells 4. How many cows does he have now?",
    'def count_vowels(text: str) -> int:\n    """Return the number of vowels in text."""',
    "List the methods of `collections.OrderedDict`.",
]


def test_it_has_a_name_with_which_come_its_draft_and_bita() -> None:
    target, *others = checked_models(Models("reference-pair"))
    assert (model_files(target), *others) == checked_models(Models())
    assert checked_models(Models("reference-pair", "none", "none")) == (Path("reference-pair"), None, None)


def test_it_is_small_and_complete_and_talks_in_plain_transformers() -> None:
    assert sum(path.stat().st_size for path in reference_pair().rglob("*") if path.is_file()) < 30_000_000
    for name in ("target", "draft"):
        files = {path.name for path in (reference_pair() / name).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    tokenizer = AutoTokenizer.from_pretrained(reference_pair() / "target")
    model = LlamaForCausalLM.from_pretrained(reference_pair() / "target")
    assert model.config.num_hidden_layers == 24
    message = [{"role": "user", "content": PROMPTS[0]}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert "cows" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_report_tells_how_the_draft_came_to_agree() -> None:
    report = json.loads((reference_pair() / "training.json").read_text())
    for family, row in report["held_out"].items():
        assert row["target_loss"] < row["draft_loss"], f"the target must be better than its draft on {family}"
        assert row["top16"] > 0.85
    first, last = (report["continuations"][number]["before"] for number in (0, -1))
    for kind in ("held_out", "on_policy"):
        assert report[kind].keys() == last[kind].keys() >= first[kind].keys()
        assert all(report[kind][family]["top1"] > row["top1"] for family, row in first[kind].items())
    gains = [row["top1"] - last["on_policy"][family]["top1"] for family, row in report["on_policy"].items()]
    assert min(gains) > -0.01 and sum(gains) / len(gains) > 0.03
    bita = json.loads((reference_pair() / "bita" / "training.json").read_text())
    licence = "---\nlicense: apache-2.0\n---\n\n"  # of the shipped weights, not of all that users train
    assert (reference_pair() / "bita" / "README.md").read_text() == licence + card(CARDS / "bita.md.jinja", bita)
    assert (reference_pair() / "README.md").read_text() == card(CARD, report)


def test_the_card_of_a_draft_that_is_continued_once_more() -> None:
    report = json.loads((reference_pair() / "training.json").read_text())
    report["continuations"].append(report["continuations"][-1] | {"new": None})
    text = card(CARD, report)
    assert "--hidden-size 192 --layers 3" in text and "The draft was continued once more" in text
    assert "| 192, 3, 3 |" in text and text.count("% → ") == 3 * len(report["on_policy"])


Expected = Callable[[str, int], tuple[tuple[int, ...], list[int]]]


@pytest.fixture(scope="module")
def shipped() -> Reference:
    torch.set_num_threads(1)
    return Reference(resolve(Settings.of(stages=1, device="cpu")))


@pytest.fixture(scope="module")
def expected(shipped: Reference) -> Expected:
    """A prompt, and what transformers answers to it."""
    prompter = Prompter(reference_pair() / "target", 2048)

    @cache
    def answer(text: str, max_tokens: int) -> tuple[tuple[int, ...], list[int]]:
        token_ids = tuple(prompter.token_ids(text, raw=False, max_tokens=max_tokens))
        return token_ids, shipped.generate(token_ids, max_tokens)

    return answer


def test_the_draft_agrees_with_the_targets_own_words(expected: Expected) -> None:
    draft = LlamaForCausalLM.from_pretrained(reference_pair() / "draft", dtype=torch.float32)
    assert draft.num_parameters() <= 2_200_000
    answered = []
    for token_ids, answer in (expected(text, 32) for text in PROMPTS):
        answered.append(Continuation([*token_ids, *answer], len(token_ids)))
    agreement = on_policy_agreement(MeasuredDraft(draft), {"prompts": answered})["prompts"]
    assert agreement["top4"] > 0.8 and agreement["top16"] > 0.9


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases
@pytest.mark.parametrize(
    ("stages", "groups"),
    [(1, 1), pytest.param(14, 7, marks=SLOW), pytest.param(24, 24, marks=SLOW)],
)
def test_the_pipeline_says_what_transformers_says(stages: int, groups: int, shipped: Reference, expected: Expected) -> None:
    pipeline = LocalPipeline.load(resolve(Settings.of(stages=stages, groups=groups, device="cpu")))
    for number, text in enumerate(PROMPTS):
        token_ids, answer = expected(text, 32)
        for method in ("pp", "pipedec"):
            request = TokenizedRequest(number, token_ids, SamplingParams(max_tokens=16), method)
            found = [token for verdict in pipeline.run(request) for token in verdict.tokens]
            assert shipped.compare(token_ids, answer[:16], found) is None
            metrics = pipeline.last.metrics
            assert metrics.timesteps == metrics.hits + groups * metrics.misses


SHIPPED = reference_threads()
TARGET, DRAFT = SHIPPED / "target", SHIPPED / "draft"
# What each dialect forks: lists, and only parts that are long.
FORKED = {
    "apar": (
        "List the methods of `collections.OrderedDict`.",
        "What is in the module `socket`?",
        "List the functions of the module `os`.",
    ),
    "pasta": (
        "Explain `copytree()`, `move()` and `rmtree()` of the module `shutil` in detail.",
        "Tell me about `asyncio.protocols.Protocol`.",
        "Explain `urllib.request.urlopen()` in four paragraphs.",
    ),
}
ONE_PIECE = "A farmer has 15 cows and buys 7 more. Then he sells 4. How many cows does he have now?"


@pytest.fixture(scope="module")
def writer() -> RowWriter:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return RowWriter(tokenizer, ["apar", "pasta"], tokenizer.eos_token_id)


def answers(path: Path, writer: RowWriter, dialect: str, max_tokens: int = 160) -> ModelAnswers:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return ModelAnswers(model, writer.bound[dialect], (writer.end_token_id,), max_tokens)


def test_they_are_small_complete_and_of_one_family() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 30_000_000
    for path in (TARGET, DRAFT):
        names = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "training.json", "README.md"}
        assert names <= {found.name for found in path.iterdir()}
    same_tokenizer(DRAFT, TARGET)
    known, own = (load_tokenizer(path).vocabulary for path in (reference_pair() / "target", TARGET))
    assert known.items() <= own.items() and own.keys() - known.keys() == set(load_dialect("pasta").opener_tokens)


def test_their_cards_say_what_was_measured() -> None:
    for path in (TARGET, DRAFT):
        report = json.loads((path / "training.json").read_text())
        assert (path / "README.md").read_text() == thread_card(THREADS_CARD, report)
    held_out = json.loads((TARGET / "training.json").read_text())["held_out"]
    for by_rule in (held_out["apar"], held_out["pasta"]):
        assert by_rule["list"]["forked"] > 0.5 > by_rule["none"]["forked"]
    assert held_out["plain"]["all"]["circles"] < 0.1


def test_a_prompt_without_a_dialect_is_the_reference_pairs(writer: RowWriter) -> None:
    before, after = (
        Prompter(path, 2048).token_ids(ONE_PIECE, raw=False, max_tokens=1) for path in (reference_pair() / "target", TARGET)
    )
    assert before == after == writer.prompt(ONE_PIECE, None)
    assert writer.prompt(ONE_PIECE, "apar") != after


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dialect", ["apar", "pasta"])
def test_long_parts_are_answered_in_threads(writer: RowWriter, dialect: str) -> None:
    target = answers(TARGET, writer, dialect)
    said = target.answer([SeededPrompt(writer.prompt(prompt, dialect)) for prompt in (*FORKED[dialect], ONE_PIECE)])
    assert sum(len(sequence.threads) >= 2 for sequence in said[:-1]) >= 2
    assert len(said[-1].threads) == 1 and "cows" in text_of(said[-1], writer.decode)
    (plain,) = target.answer([SeededPrompt(writer.prompt(FORKED[dialect][0], None))])
    assert len(plain.threads) == 1
    assert not {token.token_id for token in plain.document()} & writer.bound[dialect].control


@pytest.mark.fast_cases
@pytest.mark.parametrize("dialect", ["apar", "pasta"])
def test_the_draft_foresees_the_targets_answers(writer: RowWriter, dialect: str) -> None:
    target = answers(TARGET, writer, dialect, max_tokens=80)
    asked = [SeededPrompt(writer.prompt(prompt, dialect)) for prompt in FORKED[dialect][:2]]
    answered = list(zip((one.prompt_ids for one in asked), target.answer(asked), strict=True))
    figures = agreement(answers(DRAFT, writer, dialect).model, answered)
    assert figures["top1"] > 0.45 and figures["top16"] > 0.85
