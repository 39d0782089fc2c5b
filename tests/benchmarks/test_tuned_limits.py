"""Limits that are tuned, against the best of those that are set: answers of the shipped models, by the replay's computed times.

No time is measured: it is arithmetic with the emulated devices' figures, and each set of questions begins with nothing learned.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.silent_progress import Silent

from benchmarks.load.offered import Policy
from benchmarks.policy.study import PolicyConfig, PolicyFigures, Study
from pipedec.config import paper_cluster
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet

QUESTIONS = {
    "modules": (
        "What does shutil.copytree() do?", "How do I parse a date with the datetime module?",
        "Which functions does the module bisect have?", "What is the difference between a list and a tuple?",
    ),
    "sums": (
        "A baker makes 24 rolls every morning and sells each for $2. How much does he earn in 5 days?",
        "Tom has 3 boxes with 12 pencils each. He gives away 10 pencils. How many are left?",
        "A train travels 60 miles per hour for 3 hours and then 40 miles. How far does it go?",
        "Anna reads 20 pages a day. How long does she need for a book of 300 pages?",
    ),
    "advice": (
        "Write a short letter that thanks a colleague for help.", "How can I learn to sleep better?",
        "Name three advantages of public transport.", "Explain to a child why the sky is blue.",
    ),
}  # fmt: skip
GRIDS = {  # width and forwards of the best ones
    ("paper-14", None): [(32, 3), (64, 2), (64, 3)],
    ("home-4x3090", None): [(16, 4), (16, 5), (16, 6)],
}
LARGEST_RATIO = {"paper-14": 1.03, "home-4x3090": 1.04}
MAX_TOKENS = 96  # with 48, an answer takes 16 timesteps on 4 cards, and a single one makes 6 %
METHOD = "pipedec-bestfirst"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers are recorded once for all pipelines."""
    return tmp_path_factory.mktemp("recordings")


@pytest.mark.slow
@pytest.mark.in_turn(6)
@pytest.mark.numbers
@pytest.mark.parametrize("questions", QUESTIONS)
@pytest.mark.parametrize(("preset", "stages"), GRIDS)
def test_tuned_limits_are_about_as_good_as_the_best_fixed_ones(
    recordings: Path, preset: str, stages: int | None, questions: str
) -> None:
    fixed = [f"{METHOD}:width={width},forwards={forwards}" for width, forwards in GRIDS[preset, stages]]
    config = PolicyConfig(
        paper_cluster(), preset, tuple(map(Policy.parse, (METHOD, *fixed))), stages, samples=len(QUESTIONS[questions]),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True), own_work=False,
    )  # fmt: skip
    study = Study(config, [PromptSet(questions, QUESTIONS[questions])], recordings / questions)
    times = PolicyFigures.of(study.run(Silent())).means["ms_per_token"].to_dict()
    best = min(fixed, key=times.__getitem__)
    ratio = times[METHOD] / times[best]
    assert ratio <= LARGEST_RATIO[preset], f"{times[METHOD]:.2f} ms per token; {times[best]:.2f} with {best}"
