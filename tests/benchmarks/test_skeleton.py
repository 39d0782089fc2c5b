"""Skeleton-of-Thought in the bench of threads: its prompts, how a skeleton is read, exact answers, what is counted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec import structs
from support.silent_progress import Silent
from support.thread_models import END, PROMPTS, ThreadModels, naive_answer, teach
from support.tiny_pair import Pair as TinyPair
from transformers import LlamaForCausalLM

from benchmarks.skeleton import (
    ABOUT,
    SKELETON,
    Costs,
    DecodedReply,
    DecodeRounds,
    Point,
    SkeletonConfig,
    SkeletonOfThought,
    begun_prompt,
    read_skeleton,
    skeleton,
)
from benchmarks.threads.benchmark import bench_threads
from benchmarks.threads.summary import anomalies, markdown, read_frame, speeds
from pipedec.bench.sweep.pipelines import ModelPair as Models
from pipedec.bench.sweep.pipelines import emulated
from pipedec.config import paper_cluster
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet
from pipedec.directories import reference_threads
from pipedec.engine.build import load_prompter
from pipedec.engine.local import LocalPipeline
from pipedec.messages.request import PromptRequest
from pipedec.plan.spec import PipelineSpec
from pipedec.text.prompt import Prompter
from recipes.thread_models.one_thread import NO_DIALECT

pytestmark = pytest.mark.slow

LIST = (("Ċ",), ("2", "3", "4"), (".",), tuple("abcdef"))  # what the tiny models have learned of lists
BIASES = {"Ċ": 1.0, "2": -6.0, "3": -6.0, "4": -6.0, ".": -6.0, "<|end|>": -0.5} | dict.fromkeys("abcdef", 0.0)
QUESTIONS = [PromptSet("first", PROMPTS)]
ANSWERED = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def list_writers(thread_models: ThreadModels, tmp_path_factory: pytest.TempPathFactory) -> PipelineSpec:
    """A tiny pair that likes to write numbered lines."""
    folder, spec = tmp_path_factory.mktemp("lists"), thread_models.spec(4, 1)
    assert spec.draft is not None
    for name, directory in (("target", spec.target), ("draft", spec.draft)):
        model = LlamaForCausalLM.from_pretrained(directory)
        with torch.no_grad():
            teach(model, thread_models.tokenizer, LIST)
        shutil.copytree(directory, folder / name)
        model.save_pretrained(folder / name)
    return spec.replaced(target=folder / "target", draft=folder / "draft", bita=None)


@pytest.fixture(scope="module")
def sampling(thread_models: ThreadModels) -> SamplingParams:
    bias = {thread_models.tokenizer.token_to_id(text): 40.0 + value for text, value in BIASES.items()}
    return structs.replace(ANSWERED, logit_bias=bias)


@pytest.fixture(scope="module")
def config(list_writers: PipelineSpec, sampling: SamplingParams) -> SkeletonConfig:
    return SkeletonConfig(
        paper_cluster(), "paper-14", (1, 2), ("none", SKELETON), ("pp", "pipedec-bestfirst"), samples=2, sampling=sampling,
        own_work=False, pair=Models(list_writers.target, str(list_writers.draft)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows(config: SkeletonConfig, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of a whole run: it ends only if all methods gave the same answers on all pipelines."""
    return bench_threads(config, QUESTIONS, tmp_path_factory.mktemp("whole"), Silent())


class Recorded(DecodeRounds):
    """Keeps every prompt with its reply."""

    def begin(self, prompt: tuple[int, ...]) -> DecodedReply:
        reply = super().begin(prompt)
        self.asked = [(prompt, reply)]
        return reply

    def follow(self, prompts: Sequence[tuple[int, ...]]) -> list[DecodedReply]:
        replies = super().follow(prompts)
        self.asked += zip(prompts, replies, strict=True)
        return replies


class Scripted(DecodeRounds):
    """Replies with these texts, each with the end token."""

    def __init__(self, prompter: Prompter, texts: Sequence[str], request: PromptRequest) -> None:
        self.request, self.prompter, self.costs = request, prompter, Costs()
        self.asked: list[tuple[int, ...]] = []
        self._texts = list(texts)

    def begin(self, prompt: tuple[int, ...]) -> DecodedReply:
        self.asked.append(prompt)
        token_ids = (*self.prompter.tokenizer.encode(self._texts.pop(0), add_special_tokens=False), END)
        return DecodedReply(len(prompt), token_ids, "stop")

    def follow(self, prompts: Sequence[tuple[int, ...]]) -> list[DecodedReply]:
        return [self.begin(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    """Of the shipped model, which has a chat template."""
    return Prompter(reference_threads() / "target", 2048)


def scripted(prompter: Prompter, *texts: str) -> tuple[Any, Scripted]:
    exchange = Scripted(prompter, texts, PromptRequest("What is it?", False, "pp", SamplingParams(max_tokens=64)))
    return SkeletonOfThought().write(exchange), exchange


def count(prompter: Prompter, text: str) -> int:
    return len(prompter.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("text", "points", "left_out"),
    [
        ("1. One\n2. Two words. \n3.Three", (("1", "One"), ("2", "Two words."), ("3", "Three")), {}),
        ("1.\n\nNo list, but 3. is here", (), {}),
        ("1. One\n2. Two\n2. Again\n1. One", (("1", "One"), ("2", "Two")), {"repeated_point": 2}),
        ("1. One\n  10. Ten of 3.11\nand 4. none", (("1", "One"), ("10", "Ten of 3.11")), {}),
        ("\n".join(f"{number}. p" for number in range(1, 7)), tuple((str(n), "p") for n in range(1, 5)), {"too_many_points": 2}),
    ],
)
def test_reads_the_points_of_a_skeleton(text: str, points: tuple[tuple[str, str], ...], left_out: dict[str, int]) -> None:
    found, counts = read_skeleton(text, max_points=4)
    assert found == tuple(Point(*point) for point in points) and dict(counts) == left_out


def test_asks_for_a_skeleton_and_then_for_each_point(prompter: Prompter) -> None:
    written, exchange = scripted(prompter, " One\n2. Two", ": a b", " c d e f")
    first, *points = (prompter.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in exchange.asked)
    assert first.startswith("<|begin|><|user|>You're an organizer responsible for only giving the skeleton")
    assert first.endswith("following question.\nWhat is it?\nSkeleton:<|end|><|assistant|>1.")
    for prompt, number, begun in zip(points, "12", ("1. One", "2. Two"), strict=True):
        assert "question.\n\nWhat is it?\n\nThe skeleton of the answer is\n\n1. One\n2. Two\n\nContinue" in prompt
        assert f"the writing of point {number}. Write it **very shortly**" in prompt
        assert prompt.endswith(f"other points!<|end|><|assistant|>{begun}")
    assert written.finish_reason == "stop" and not written.anomalies
    skeleton, texts = count(prompter, " One\n2. Two"), [count(prompter, ": a b"), count(prompter, " c d e f")]
    metrics = written.metrics
    assert metrics.threads == 2 and metrics.tokens == len(written.document) == skeleton + sum(texts) + 3
    assert metrics.text_tokens == count(prompter, "1. One") + count(prompter, "2. Two") + sum(texts)
    assert metrics.longest_chain == skeleton + 1 + max(texts) + 1
    assert metrics.parallelism == metrics.text_tokens / metrics.longest_chain


def test_an_answer_that_has_begun_follows_the_template_or_is_a_line_of_its_own(prompter: Prompter) -> None:
    asked, encode = PromptRequest(""), prompter.tokenizer.encode
    chat = prompter.token_ids("How many?", raw=False, max_tokens=1)
    assert begun_prompt(prompter, asked, "How many?", "1. One") == (*chat, *encode("1. One", add_special_tokens=False))
    raw = begun_prompt(prompter, structs.replace(asked, raw=True), "How many?", "1. One")
    assert list(raw) == encode("How many?\n1. One")


def test_every_request_gets_the_targets_answer(list_writers: PipelineSpec, sampling: SamplingParams) -> None:
    """As a naive forward pass over the whole text gives it, token by token, with a seed of its own."""
    asked = structs.replace(sampling, temperature=1.0, seed=1)
    model = LlamaForCausalLM.from_pretrained(list_writers.target).eval()
    request = PromptRequest(PROMPTS[0], False, "pipedec-bestfirst", asked)
    spec = emulated(paper_cluster(), "paper-14", 2, Models(list_writers.target, str(list_writers.draft)), own_work=False).spec
    exchange = Recorded(LocalPipeline.load(spec), load_prompter(spec), request)
    written = SkeletonOfThought().write(exchange)
    assert written.metrics.threads == len(exchange.asked) - 1 >= 2, "it has several points"
    for number, (prompt, reply) in enumerate(exchange.asked):
        expected = naive_answer(model, NO_DIALECT, prompt, structs.replace(asked, seed=1 + number), (END,))
        assert list(reply.token_ids) == expected.main.token_ids and reply.finish_reason == expected.finished


def test_costs_are_those_of_all_requests(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        is_skeleton = row["dialect"] == SKELETON
        assert len(row["fill"]) == row["timesteps"] and 0 <= row["cached_tokens"] < row["prompt_tokens"]
        assert row["requests"] == (1 + row["metrics"]["threads"] if is_skeleton else 1)
        assert (0 < row["prompts_ms"] < row["decode_ms"]) if is_skeleton else row["prompts_ms"] == 0
        assert row["hits"] + row["misses"] == row["metrics"]["tokens"] - row["requests"]
    several = [row for row in rows if row["metrics"]["threads"] > 1]
    assert several and all(row["cached_tokens"] > 50 for row in several), "points share the skeleton"
    assert all(row["cached_tokens"] == 0 for row in rows if row["dialect"] == "none"), "answers find nothing of each other's"


def test_the_summary_tells_what_later_prompts_cost(rows: list[dict[str, Any]]) -> None:
    frame = read_frame(rows)
    found = speeds(frame).set_index(["stages", "dialect", "method", "answers"])
    of_rows = {key: [row for row in rows if (row["cluster"]["stages"], row["dialect"], row["method"]) == key]
               for key in ((2, "none", "pp"), (2, SKELETON, "pp"))}  # fmt: skip
    one = found.loc[(2, SKELETON, "pp", "all")]
    ours, plain = of_rows[2, SKELETON, "pp"], of_rows[2, "none", "pp"]
    assert one["ms_of_prompts"] == pytest.approx(sum(row["prompts_ms"] for row in ours) / 2)
    assert one["ms_before"] == pytest.approx(sum(row["prefill_ms"] for row in ours) / 2)
    ratios = [base["decode_ms"] / (row["decode_ms"] - row["prompts_ms"]) for base, row in zip(plain, ours, strict=True)]
    assert one["over_pp_tokens"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5) and one["over_pp_tokens"] > one["over_pp"]
    base = found.loc[(2, "none", "pipedec-bestfirst", "all")]
    assert base["over_pp_tokens"] == base["over_pp"] and base["ms_of_prompts"] == 0
    assert anomalies(frame)[SKELETON]["skeleton_cut"] == sum(row["anomalies"].get("skeleton_cut", 0) for row in ours) > 0
    text = markdown(frame, ABOUT)
    assert "sot is Skeleton-of-Thought" in text and "skeleton_cut" in text


def test_the_command_asks_any_model_for_skeletons(pair: TinyPair, tmp_path: Path) -> None:
    """The tiny pair has no control tokens."""
    flags = ["--preset", "paper-14", "--stages", "1", "--dialects", "none,sot", "--prompt", "Who?"]
    flags += ["--target", str(pair.target), "--draft", str(pair.draft), "--max-tokens", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(skeleton, flags)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "sot is Skeleton-of-Thought" in done.stdout and (tmp_path / "summary.md").read_text() in done.stdout
