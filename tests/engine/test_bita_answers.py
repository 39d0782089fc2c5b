"""BiTA through LocalPipeline: the target's own tokens whatever the masks say, and as many at once as the masks get right.

Its options are among those of ``test_local_pipeline``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.zoo import LAYERS, save_model
from msgspec.structs import replace
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny
from support.naive_bita import NaiveBita
from support.specs import bare_spec
from support.stage_chain import BOTH_IMPLS
from support.timesteps import check_timesteps
from test_local_pipeline import OPTIONS, PROMPT, expected
from transformers import AutoModelForCausalLM

from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import RequestUpdate, StageMessage
from pipedec.core.verdict import Verdict
from pipedec.engine.local import LocalPipeline
from pipedec.families import ModelImpl, model_config
from pipedec.methods import BitaOptions
from pipedec.model import BitaWeights, checked_bita
from pipedec.stage import FinalStageWorker

MASKS, VOCAB = 3, 64
NUM_TOKENS = 8
TREES = OPTIONS["bita"]
DRAWN = SamplingParams(0.9, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets, each with a BiTA that has learned nothing; with a sliding window, or of modules of transformers with caps."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny("llama", folder / "llama", layers=LAYERS, max_position_embeddings=1200)
    save_tiny("mistral", folder / "mistral", layers=LAYERS, sliding_window=4)
    save_model("gemma2", folder / "gemma2")
    for name in ("llama", "mistral", "gemma2"):
        save_random_bita(folder / f"{name}-bita", folder / name, MASKS)
    return folder


def make_pipeline(
    models: Path, shape: tuple[int, int] = (2, 2), target: str = "llama", bita: Path | None = None, **settings: Any
) -> LocalPipeline:
    return LocalPipeline.load(bare_spec(models / target, LAYERS, shape, None, bita or models / f"{target}-bita", **settings))


def request(
    tree: Any = TREES[0], sampling: SamplingParams = DRAWN, prompt: tuple[int, ...] = PROMPT, method: str = "bita", **changes: Any
) -> TokenizedRequest:
    wishes = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}
    return TokenizedRequest(0, prompt, replace(sampling, **wishes), method, tree)


def tokens_of(verdicts: Sequence[Verdict]) -> tuple[int, ...]:
    return tuple(token for verdict in verdicts for token in verdict.tokens)


def answer(pipeline: LocalPipeline, asked: TokenizedRequest) -> tuple[int, ...]:
    return tokens_of(list(pipeline.run(asked)))


def check_counts(pipeline: LocalPipeline, num_tokens: int) -> None:
    """In two groups."""
    metrics = pipeline.last.metrics
    assert metrics.hits + metrics.misses == num_tokens - 1
    check_timesteps(metrics, 2, "bita")


@pytest.mark.parametrize("target", ["mistral", "gemma2"])
def test_other_families(models: Path, target: str) -> None:
    pipeline = make_pipeline(models, (3, 1), target)
    greedy, drawn = expected(models / target, PROMPT, NUM_TOKENS), answer(pipeline, request(method="pp"))
    assert greedy != drawn
    for tree in TREES[::2]:
        assert answer(pipeline, request(tree, SamplingParams())) == greedy
        assert answer(pipeline, request(tree)) == drawn


def test_latents_cannot_hold_a_learned_prompt(tmp_path: Path) -> None:
    save_model("youtu", tmp_path / "target")
    save_random_bita(tmp_path / "bita", tmp_path / "target", MASKS)
    with pytest.raises(UserError, match="layers all cache keys and values of one shape: use --bita none"):
        checked_bita(tmp_path / "bita", tmp_path / "target")


@pytest.mark.parametrize(("num_masks", "num_prompt_tokens"), [(1, 0), (9, 1)])
def test_other_bitas(models: Path, tmp_path: Path, num_masks: int, num_prompt_tokens: int) -> None:
    save_random_bita(tmp_path, models / "llama", num_masks, num_prompt_tokens)
    pipeline = make_pipeline(models, bita=tmp_path)
    drawn = answer(pipeline, request(method="pp"))
    for tree in (BitaOptions(), BitaOptions(children=2, depth=1), BitaOptions(shape="straightforward")):
        assert answer(pipeline, request(tree)) == drawn
        check_counts(pipeline, NUM_TOKENS)


def test_even_nan_does_not_change_the_answer(models: Path, tmp_path: Path) -> None:
    save_random_bita(tmp_path, models / "llama", std=float("nan"))
    pipeline = make_pipeline(models, bita=tmp_path)
    for tree in TREES:
        assert answer(pipeline, request(tree, SamplingParams())) == expected(models / "llama", PROMPT, NUM_TOKENS)


def test_masks_are_no_tokens_that_penalties_count(models: Path) -> None:
    """Neither those behind the prompt, of two chunks, nor those of the tree: no token is held for said before it is."""
    edges = (0, 1, 2, VOCAB - 3, VOCAB - 2, VOCAB - 1)
    sampling = SamplingParams(repetition_penalty=2.0, logit_bias=dict.fromkeys(edges, 12.0))
    pipeline = make_pipeline(models)
    for repeated in (1, 9):
        prompt = tuple(token for token in PROMPT * repeated if token not in edges)
        plain = answer(pipeline, request(sampling=sampling, prompt=prompt, method="pp", max_tokens=12))
        assert {VOCAB - 1, VOCAB - 2} & set(plain)
        for tree in TREES[::repeated]:
            assert answer(pipeline, request(tree, sampling, prompt, max_tokens=12)) == plain


def test_a_vocabulary_smaller_than_the_names_asked_for(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "llama", layers=LAYERS, vocab=20)
    save_random_bita(tmp_path / "llama-bita", tmp_path / "llama", MASKS)
    pipeline = make_pipeline(tmp_path)
    prompt = tuple(token % 20 for token in PROMPT)
    drawn = answer(pipeline, request(prompt=prompt, method="pp"))
    for tree in (BitaOptions(children=21), BitaOptions(children=64, depth=1)):
        assert answer(pipeline, request(tree, prompt=prompt)) == drawn
        check_counts(pipeline, NUM_TOKENS)
    assert pipeline.last.metrics.misses == NUM_TOKENS // 2, "every pass but the last gives two: all tokens are named"


def test_no_bita_no_answer(models: Path) -> None:
    pipeline = LocalPipeline.load(bare_spec(models / "llama", LAYERS, (2, 2)))
    with pytest.raises(UserError, match="method bita needs what pipedec train bita has learned"):
        answer(pipeline, request())


# Masks that know the answer.

Teacher = Callable[[int], Sequence[int]]


class Oracle:
    """Makes forecasts name what ``teacher`` says of a token's number in the answer; the first name is the best.

    ``asked`` lists the numbers of the tokens in each forecast.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, teacher: Teacher) -> None:
        self.asked: list[list[int]] = []
        self._teacher = teacher
        self._num_tokens = 0
        advance = FinalStageWorker.advance

        def taught(worker: FinalStageWorker, message: StageMessage, *span: Any) -> StageMessage:
            if any(update.opening is not None for update in message.updates):
                self._num_tokens = 0
            reply = advance(worker, message, *span)
            return dataclasses.replace(reply, updates=tuple(map(self._taught_update, reply.updates)))

        monkeypatch.setattr(FinalStageWorker, "advance", taught)

    def _taught_update(self, update: RequestUpdate) -> RequestUpdate:
        if update.verdict is None or not update.verdict.tokens:  # a lane is closed
            return update
        return replace(update, verdict=self._taught(update.verdict))

    def _taught(self, verdict: Verdict) -> Verdict:
        self._num_tokens += len(verdict.tokens)
        forecast = forecast_of(verdict)
        numbers = list(range(self._num_tokens, self._num_tokens + len(forecast)))
        self.asked.append(numbers)
        named = zip(numbers, forecast, strict=True)
        taught = tuple(tuple(self._teacher(number))[: len(names)] for number, names in named)
        return Verdict.of(*verdict.tokens, finished=verdict.finished, forecast=taught)


def forecast_of(verdict: Verdict) -> tuple[tuple[int, ...], ...]:
    [accepted] = verdict.accepted
    return accepted.forecast


def lengths(pipeline: LocalPipeline, asked: TokenizedRequest) -> tuple[list[int], tuple[int, ...]]:
    """How many tokens every pass gave, and the answer."""
    verdicts = list(pipeline.run(asked))
    return [len(verdict.tokens) for verdict in verdicts], tokens_of(verdicts)


def wrong(token: int, by: int = 1) -> int:
    return (token + by) % VOCAB


LONG = 60  # tokens that the oracle knows


@pytest.fixture(scope="module")
def said(models: Path) -> tuple[int, ...]:
    """What ``pp`` draws."""
    return answer(make_pipeline(models, (1, 1)), request(method="pp", max_tokens=LONG))


@pytest.mark.parametrize(("children", "tree_shape", "depth"), [(1, "efficient", 1), (4, "efficient", 3), (3, "full", 2)])
def test_masks_that_are_always_right_fill_every_pass(
    models: Path, said: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, children: int, tree_shape: str, depth: int
) -> None:
    oracle = Oracle(monkeypatch, lambda number: [wrong(said[number], by) for by in range(children)])
    pipeline, num_tokens = make_pipeline(models, (4, 2)), 1 + 4 * (depth + 1)
    tree = BitaOptions(children=children, depth=depth, shape=tree_shape)
    counts, found = lengths(pipeline, request(tree, max_tokens=num_tokens))
    assert (counts, found) == ([1] + 4 * [depth + 1], said[:num_tokens])
    metrics = pipeline.last.metrics
    assert (metrics.hits, metrics.misses, metrics.timesteps) == (4 * depth, 4, 4 * 2)
    assert oracle.asked[0] == list(range(1, depth + 1))  # the masks behind the prompt, of which the last token's own is known


@pytest.mark.parametrize(("tree_shape", "wanted"), [("efficient", [1, 2, 2, 2, 2]), ("full", [1, 4, 4])])
def test_only_the_best_candidate_has_children_in_the_efficient_tree(
    models: Path, said: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tree_shape: str, wanted: list[int]
) -> None:
    """The right token is named second each time."""
    Oracle(monkeypatch, lambda number: [wrong(said[number]), said[number]])
    tree = BitaOptions(children=2, shape=tree_shape)
    asked = request(tree, max_tokens=sum(wanted))
    assert lengths(make_pipeline(models), asked) == (wanted, said[: sum(wanted)])


@pytest.mark.parametrize("tree_shape", ["efficient", "full", "straightforward"])
def test_a_rejection_stops_the_walk_also_with_one_candidate(
    models: Path, said: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tree_shape: str
) -> None:
    """What is right behind a wrong candidate counts for nothing (Algorithm 1 in the paper goes on where k is 1)."""
    Oracle(monkeypatch, lambda number: [wrong(said[number]) if number % 3 == 1 else said[number]])
    tree = BitaOptions(children=1, shape=tree_shape)
    # Token 0 comes with the prompt, and 1 is missed. Then 2 and 3 are right and 4 is wrong, and so on.
    wanted = {"efficient": [1, 1, 3, 3, 3], "full": [1, 1, 3, 3, 3], "straightforward": [1, 1, 3, 2, 1, 3]}[tree_shape]
    asked = request(tree, max_tokens=11)
    assert lengths(make_pipeline(models), asked) == (wanted, said[:11])


def test_figure_4_of_the_paper(models: Path, said: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three masks behind the last token alone, of which those are used up whose tokens are accepted: 1, 4, 1 and 3 tokens."""
    Oracle(monkeypatch, lambda number: [wrong(said[number]) if number == 8 else said[number]])
    pipeline = make_pipeline(models)
    asked = request(BitaOptions(shape="straightforward"), max_tokens=11)
    verdicts = list(pipeline.run(asked))
    assert [len(verdict.tokens) for verdict in verdicts] == [1, 4, 1, 3, 2]
    assert [len(forecast_of(verdict)) for verdict in verdicts] == [3, 0, 3, 1, 0]
    assert forecast_of(verdicts[0]) == tuple((token,) for token in said[1:4])
    assert tokens_of(verdicts) == said[:11]


@pytest.mark.parametrize("num_tokens", [1, 3, 6])
def test_an_answer_may_end_inside_a_tree(
    models: Path, said: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """By its length or by a stop token; the next request finds nothing of what was left."""
    Oracle(monkeypatch, lambda number: [said[number], wrong(said[number])])
    pipeline, tree, stop = make_pipeline(models, (4, 2)), BitaOptions(children=2), said[num_tokens - 1]
    for wishes, kept, reason in (
        ({"max_tokens": num_tokens}, said[:num_tokens], "length"),
        ({"stop_token_ids": (stop,)}, said[: said.index(stop) + 1], "stop"),
    ):
        verdicts = list(pipeline.run(request(tree, **wishes)))
        assert (tokens_of(verdicts), verdicts[-1].finished, forecast_of(verdicts[-1])) == (kept, reason, ())
        check_counts(pipeline, len(kept))
    assert lengths(pipeline, request(tree, max_tokens=9)) == ([1, 4, 4], said[:9])


@BOTH_IMPLS
def test_forecasts_are_those_of_transformers_after_the_accepted_text(models: Path, impl: ModelImpl) -> None:
    """After the prompt and after each pass, the tokens that the masks behind the last judged token find likeliest."""
    pipeline = make_pipeline(models, (4, 2), dtype="float64", model_impl=impl)
    config = model_config(models / "llama")
    weights = BitaWeights.load(models / "llama-bita", config, range(LAYERS), torch.float64, torch.device("cpu"))
    naive = NaiveBita(AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float64).eval(), weights)
    for prompt in (PROMPT, PROMPT * 52):  # one chunk, and one that begins a second
        for tree in (BitaOptions(children=4), BitaOptions(children=4, depth=2, shape="full")):
            text = list(prompt)
            verdicts = list(pipeline.run(request(tree, SamplingParams(), prompt=prompt, max_tokens=5)))
            for verdict in verdicts[:-1]:
                text += verdict.tokens
                depth, forecast = tree.depth or MASKS, forecast_of(verdict)
                num_later = depth - len(forecast)  # accepted rows below the last one that has masks
                likeliest = naive.logits(text[: -1 - num_later], depth)[num_later:].topk(4).indices
                assert num_later < depth and forecast == tuple(map(tuple, likeliest.tolist()))
