"""The shipped pair is real: complete, small, loadable anywhere, agreeing, and decoded exactly at many stages."""

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from pipedec.config import Settings
from pipedec.core import Request, SamplingParams
from pipedec.directories import reference_pair
from pipedec.engine.build import resolve
from pipedec.engine.local import LocalPipeline
from pipedec.text.prompt import Prompter
from pipedec.train.continuations import Continuation
from pipedec.train.measuring import MeasuredDraft, on_policy_agreement
from pipedec.train.run import CARDS, card
from pipedec.verify.reference import Reference
from recipes.reference_models.pair import CARD

SLOW = pytest.mark.slow
PROMPTS = [
    "A farmer has 15 cows and buys 7 more. Then he sells 4. How many cows does he have now?",
    'def count_vowels(text: str) -> int:\n    """Return the number of vowels in text."""',
    "List the methods of `collections.OrderedDict`.",
]


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
            request = Request(number, token_ids, SamplingParams(max_tokens=32), method)
            found = [token for verdict in pipeline.run(request) for token in verdict.tokens]
            assert shipped.compare(token_ids, answer, found) is None
            metrics = pipeline.last.metrics
            assert metrics.timesteps == metrics.hits + groups * metrics.misses


@pytest.mark.slow
def test_prompts_in_company_are_answered_as_transformers_does(shipped: Reference, expected: Expected) -> None:
    pipeline = LocalPipeline.load(resolve(Settings.of(stages=4, device="cpu")))
    methods = ("pipedec-bestfirst", "pp", "pipedec")
    asked = [expected(PROMPTS[number % 3], 24 + number) for number in range(9)]
    requests = [
        Request(number, asked[number][0], SamplingParams(max_tokens=24 + number), methods[number // 3]) for number in range(9)
    ]
    found: dict[int, list[int]] = {request.number: [] for request in requests}
    for number, verdict in pipeline.run_all({1: requests[:4], 7: requests[4:]}):
        found[number] += verdict.tokens
    for number, (token_ids, answer) in enumerate(asked):
        assert shipped.compare(token_ids, answer, found[number]) is None
