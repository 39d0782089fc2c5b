"""Skeleton-of-Thought: its prompts, how points are read, answers equal to transformers', and models that write no points."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from silent_progress import Silent
from tiny_pair import Pair
from transformers import AutoModelForCausalLM

from pipedec.bench.record import key_of
from pipedec.bench.sweep.pipelines import Pair as Models
from pipedec.bench.threads.benchmark import ThreadsConfig, bench_threads
from pipedec.bench.threads.rows import read_frame
from pipedec.bench.threads.skeleton import SKELETON_TOKENS, Point, SkeletonPrompts, points_of
from pipedec.bench.threads.summary import markdown
from pipedec.config import paper_cluster
from pipedec.core import SamplingParams, UserError
from pipedec.data.prompts import PromptSet
from pipedec.engine.spec import REFERENCE_THREADS
from pipedec.text.prompt import Prompter

QUESTION = "Give me 3 methods of `pydoc.TextDoc`."
TARGET = REFERENCE_THREADS / "target"


@pytest.fixture(scope="module")
def prompts() -> SkeletonPrompts:
    return SkeletonPrompts(Prompter(TARGET, 2048))


@pytest.mark.parametrize(
    ("skeleton", "points"),
    [
        ("1. Set goals\n2. Sleep well\n", [(1, "Set goals"), (2, "Sleep well")]),
        ("It has:\n\n 1. `read()`: It reads.\n2.Go on", [(1, "`read()`: It reads."), (2, "Go on")]),
        ("1. One\n1. Again\nno point\n3. Six", [(1, "One"), (3, "Six")]),
        ("1.\n2. \nno list", []),
        ("\n".join(f"{number}. point" for number in range(1, 15)), [(number, "point") for number in range(1, 11)]),
    ],
)
def test_points_are_the_numbered_lines(skeleton: str, points: list[tuple[int, str]]) -> None:
    assert [(point.number, point.title) for point in points_of(skeleton)] == points


def test_prompts_are_a_users_turn_and_a_begun_answer(prompts: SkeletonPrompts) -> None:
    text = prompts.prompter.tokenizer.decode
    asked = text(list(prompts.skeleton(QUESTION, False, 8)))
    assert asked.endswith("1.") and f"following question.\n{QUESTION}\nSkeleton:" in asked
    asked = text(list(prompts.expansion(QUESTION, "1. One\n2. Two", Point(2, "Two"), False, 8)))
    assert asked.endswith("2. Two") and "1. One\n2. Two\n\nContinue and only continue the writing of point 2." in asked
    with pytest.raises(UserError, match="context"):
        prompts.skeleton(QUESTION, False, 2000)


def greedy(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    how = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 5}
    with torch.no_grad():
        found: list[int] = model.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
    return found


def test_every_request_says_what_transformers_says(prompts: SkeletonPrompts, tmp_path: Path) -> None:
    config = ThreadsConfig(
        paper_cluster(), "paper-14", (1, 3), ("none", "sot"), samples=1, sampling=SamplingParams(max_tokens=40), own_work=False,
        pair=Models(TARGET, str(REFERENCE_THREADS / "draft")),
    )  # fmt: skip
    rows = bench_threads(
        replace(config, sampling=SamplingParams(max_tokens=40)), [PromptSet("one", (QUESTION,))], tmp_path, Silent()
    )
    skeletons = [row for row in rows if row["dialect"] == "sot"]
    assert len(skeletons) == 4 and len({row["document"] for row in skeletons}) == 1

    first = greedy(prompts.skeleton(QUESTION, False, 40), min(SKELETON_TOKENS, 40))
    skeleton = prompts.written([token for token in first if token not in prompts.prompter.tokenizer.all_special_ids])
    points = points_of(skeleton)
    asked = (
        [prompts.expansion(QUESTION, skeleton, point, False, 40) for point in points]
        if len(points) > 1
        else [prompts.prompter.token_ids(QUESTION, False, 40)]
    )
    answers = [first, *(greedy(prompt, 40) for prompt in asked)]
    row = skeletons[0]
    assert row["document"] == key_of([[number, token] for number, answer in enumerate(answers) for token in answer])
    metrics = row["metrics"]
    assert metrics["tokens"] == sum(map(len, answers))
    assert metrics["longest_chain"] == len(first) + max(map(len, answers[1:]))
    assert metrics["threads"] == (len(points) + 1 if len(points) > 1 else 1)
    for pp in (one for one in skeletons if one["method"] == "pp" and one["cluster"]["stages"] == 3):
        assert len(pp["fill"]) == pp["timesteps"] >= 3 * (metrics["longest_chain"] - 2)
    assert "| sot" in markdown(read_frame(rows))


def test_a_model_without_points_answers_as_usual_afterwards(pair: Pair, tmp_path: Path) -> None:
    config = ThreadsConfig(
        paper_cluster(), "paper-14", (1,), ("none", "sot"), ("pp",), samples=1, sampling=SamplingParams(max_tokens=6),
        own_work=False, pair=Models(pair.target, str(pair.draft)),
    )  # fmt: skip
    plain, sot = bench_threads(config, [PromptSet("one", ("Tell me a story.",))], tmp_path, Silent())
    assert sot["anomalies"] == {"no_skeleton": 1} and sot["metrics"]["threads"] == 1
    assert sot["metrics"]["text_tokens"] == plain["metrics"]["text_tokens"], "nobody reads the skeleton"
    assert sot["decode_ms"] > plain["decode_ms"], "but it costs"
