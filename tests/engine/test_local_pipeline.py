"""LocalPipeline against transformers: the table that every other way to run the pipeline is compared with."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny, save_tiny_llama
from support.pairwise import pairwise
from support.specs import bare_spec
from support.stage_chain import ROPES
from support.timesteps import check_timesteps
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from benchmarks.methods import applicable_options
from pipedec.core.completion import Metrics
from pipedec.core.errors import UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.verdict import Verdict
from pipedec.decoding import Experience, Resources, Scheduler
from pipedec.engine.build import DTYPES, load_stage
from pipedec.engine.local import LocalPipeline
from pipedec.methods import METHODS, PROPOSERS, BestFirstOptions, BitaOptions, PipeDecOptions, PlainOptions, StaticTreeOptions
from pipedec.verify.reference import Reference

LAYERS = 8
EOS = 2
PROMPT = (1, 9, 30, 4, 51, 17, 8, 22, 40, 3)
TREE = {"width": 6, "children": 4}
NUM_TOKENS = 12
SHAPES = [(1, 1), (2, 2), (4, 4), (8, 8), (8, 4), (4, 1)]  # stages, groups
DTYPES_COMPARED = ["float32", "float64"]
DRAFTS = ["same", "near", "random"]
# Best-first injection: limits found while decoding or set by hand, either proposer, any width.
OPTIONS = {
    "pp": [PlainOptions()],
    "pipedec": [PipeDecOptions(**TREE)],
    "stpp": [
        StaticTreeOptions(**TREE), StaticTreeOptions(3, 2, depth=1), StaticTreeOptions(1, 8, depth=2, rows=1),
        StaticTreeOptions(1, 5, depth=5, rows=12),
        StaticTreeOptions(children=4, depth=3, rows=12, proposers=PROPOSERS),
    ],
    "pipedec-bestfirst": [
        BestFirstOptions(), BestFirstOptions(width=1, forwards=2), BestFirstOptions(width=5, children=3, forwards=3),
        BestFirstOptions(width=124, forwards=8, proposers=("draft",)), BestFirstOptions(width=4, proposers=("ngrams",)),
    ],
    "bita": [
        BitaOptions(), BitaOptions(children=16, depth=2), BitaOptions(rows=1), BitaOptions(shape="straightforward"),
        BitaOptions(children=2, shape="full"),
    ],
}  # fmt: skip
METHODS_AND_OPTIONS = [(method, options) for method, choices in OPTIONS.items() for options in choices]
ON_LINKS = [0, 1, 6]  # timesteps
CASES = pairwise(SHAPES, METHODS_AND_OPTIONS, DRAFTS, DTYPES_COMPARED, ON_LINKS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and its BiTA; a draft of the same weights, one that is often right, one that has nothing to do with it."""
    folder = tmp_path_factory.mktemp("models")
    target = save_tiny_llama(folder / "target", layers=LAYERS, max_position_embeddings=1024, eos_token_id=EOS)
    target.save_pretrained(folder / "same")
    save_random_bita(folder / "bita", folder / "target")
    save_tiny_llama(folder / "random", layers=2, seed=7, max_position_embeddings=1024)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    target.save_pretrained(folder / "near")
    return folder


@cache
def expected(
    model: Path, prompt: tuple[int, ...], num_tokens: int, dtype: str = "float32", ignore_eos: bool = True
) -> tuple[int, ...]:
    """The greedy answer of transformers."""
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    ids = torch.tensor([prompt])
    eos = None if ignore_eos else target.generation_config.eos_token_id
    with torch.inference_mode():
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
        )
    return tuple(output[0, len(prompt) :].tolist())


def make_pipeline(
    models: Path, shape: tuple[int, int], draft: str | None, dtype: str = "float32", target: str = "target", on_links: int = 0,
    **loading: Any,
) -> LocalPipeline:  # fmt: skip
    drafts = models / draft if draft else None
    spec = bare_spec(models / target, LAYERS, shape, drafts, models / "bita", dtype=dtype, draft_dtype=dtype)
    return LocalPipeline.load(spec.replaced(passage=shape[1] + on_links), **loading)


def request(
    prompt: tuple[int, ...] = PROMPT,
    num_tokens: int = NUM_TOKENS,
    method: str = "pipedec",
    options: MethodOptions | None = None,
    **sampling: object,
) -> TokenizedRequest:
    chosen = options or applicable_options(method, TREE)
    return TokenizedRequest(0, prompt, SamplingParams(max_tokens=num_tokens, **sampling), method, chosen)  # type: ignore[arg-type]


def answer(pipeline: LocalPipeline, asked: TokenizedRequest) -> tuple[tuple[int, ...], str | None]:
    """Token ids and the reason of the end, which only the last verdict gives."""
    verdicts: list[Verdict] = list(pipeline.run(asked))
    assert all(verdict.finished is None for verdict in verdicts[:-1])
    return tuple(token for verdict in verdicts for token in verdict.tokens), verdicts[-1].finished


def check_metrics(metrics: Metrics, groups: int, num_tokens: int, method: str = "pipedec") -> None:
    assert metrics.hits + metrics.misses == num_tokens - 1
    check_timesteps(metrics, groups, method)


@pytest.mark.failure_case("M17")
@pytest.mark.parametrize("rope", [None, "linear", "dynamic", "yarn"])
def test_answers_beyond_the_trained_length_are_those_of_transformers(models: Path, tmp_path: Path, rope: str | None) -> None:
    """With a draft that was trained for far fewer positions than the answer has."""
    scaling = {} if rope is None else {"max_position_embeddings": 16, "rope_parameters": {"rope_theta": 1000.0, **ROPES[rope]}}
    save_tiny_llama(tmp_path / "target", layers=LAYERS, **scaling)
    save_tiny_llama(tmp_path / "draft", layers=2, seed=7, max_position_embeddings=8)
    spec = bare_spec(tmp_path / "target", LAYERS, (2, 2), tmp_path / "draft")
    assert spec.max_context >= (length := len(PROMPT) + 20)
    assert rope is None or spec.max_context >= length > 16
    found, _ = answer(LocalPipeline.load(spec), request(num_tokens=20, ignore_eos=True))
    assert found == expected(tmp_path / "target", PROMPT, 20)


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("1in1-float32", "4in4-float32")
@pytest.mark.parametrize("dtype", DTYPES_COMPARED)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}in{shape[1]}")
def test_every_method_says_what_transformers_says(models: Path, shape: tuple[int, int], dtype: str) -> None:
    """Every pair of shape, method with its options, draft, data type and number of timesteps on links."""
    assert set(OPTIONS) == set(METHODS)
    wanted = expected(models / "target", PROMPT, NUM_TOKENS, dtype)
    for _, (method, options), draft, _, on_links in [case for case in CASES if case[0] == shape and case[3] == dtype]:
        pipeline = make_pipeline(models, shape, draft, dtype, on_links=on_links)
        verdicts = list(pipeline.run(request(method=method, options=options, ignore_eos=True)))
        assert tuple(token for verdict in verdicts for token in verdict.tokens) == wanted, (method, options, draft)
        assert [verdict.finished for verdict in verdicts if verdict.finished] == [verdicts[-1].finished] == ["length"]
        passage = shape[1] + on_links
        check_metrics(pipeline.last.metrics, passage, NUM_TOKENS, method)
        if method == "pp" or (method == "pipedec" and passage == 1):
            assert pipeline.last.metrics.hits == 0, "a layer enters when the one before it has been verified"
        if method == "stpp":
            assert pipeline.last.metrics.misses == len(verdicts) - 1  # the rounds


@pytest.mark.fast_cases
@pytest.mark.parametrize(
    ("method", "options"),
    [("pipedec", OPTIONS["pipedec"][0]), ("stpp", OPTIONS["stpp"][0]), ("pipedec-bestfirst", OPTIONS["pipedec-bestfirst"][2])],
)
def test_a_better_draft_gives_more_hits(models: Path, method: str, options: MethodOptions) -> None:
    hits = []
    for draft in ("random", "near", "same"):
        pipeline = make_pipeline(models, (2, 2), draft)
        answer(pipeline, request(method=method, options=options, ignore_eos=True))
        hits.append(pipeline.last.metrics.hits)
    assert hits[0] < hits[1] < hits[2]
    if method == "stpp":
        answer(pipeline, request(method=method, options=OPTIONS["stpp"][1], ignore_eos=True))
        assert pipeline.last.metrics.hits < hits[2], "a tree of one layer"


def test_best_first_injection_needs_no_draft(models: Path) -> None:
    pipeline = make_pipeline(models, (4, 4), draft=None)
    prompt = PROMPT + expected(models / "target", PROMPT, NUM_TOKENS)[:-1] + PROMPT
    wanted = expected(models / "target", prompt, NUM_TOKENS)
    assert answer(pipeline, request(prompt, method="pipedec-bestfirst", ignore_eos=True)) == (wanted, "length")
    with pytest.raises(UserError, match="has no proposer"):
        answer(pipeline, request(method="pipedec-bestfirst", options=BestFirstOptions(proposers=("draft",))))
    with pytest.raises(UserError, match="needs a draft model"):
        answer(pipeline, request(method="pipedec"))


@pytest.mark.parametrize(
    ("draft", "proposers", "sampling"),
    [(None, ("ngrams",), {}), ("near", ("draft", "ngrams"), {"temperature": 1.0, "seed": 3})],
)
def test_earlier_answers_change_no_text_and_save_timesteps(
    models: Path, draft: str | None, proposers: tuple[str, ...], sampling: dict[str, Any]
) -> None:
    """A prompt that is repeated, and one that comes in between. Earlier answers are a source of n-grams."""
    pipeline, timesteps = make_pipeline(models, (4, 4), draft), []
    plain = request(PROMPT, 16, "pp", ignore_eos=True, **sampling)
    other = replace(plain, prompt_token_ids=PROMPT[::-1])
    wanted = {one: answer(pipeline, one) for one in (plain, other)}
    for one in (plain, other, plain):
        asked = replace(one, method="pipedec-bestfirst", options=BestFirstOptions(16, 4, 2, proposers), tenant="a")
        assert answer(pipeline, asked) == wanted[one]
        timesteps.append(pipeline.last.metrics.timesteps)
    assert timesteps[2] < timesteps[0] / 2


@pytest.mark.fast_cases
@pytest.mark.parametrize(("width", "children", "depth"), [(32, 2, 2), (1, 3, 5)])
def test_a_draft_that_is_always_right_fills_every_round(models: Path, width: int, children: int, depth: int) -> None:
    """A round then gives the depth of the tree and one token more. It ends at a leaf, which the draft never computed."""
    pipeline = make_pipeline(models, (2, 2), "same", "float64")
    num_tokens = 1 + 4 * (depth + 1)
    tree = StaticTreeOptions(width, children, depth)  # a chain, or all there is
    verdicts = list(pipeline.run(request(num_tokens=num_tokens, method="stpp", options=tree, ignore_eos=True)))
    assert [len(verdict.tokens) for verdict in verdicts] == [1] + 4 * [depth + 1]
    wanted = expected(models / "target", PROMPT, num_tokens, "float64")
    assert tuple(token for verdict in verdicts for token in verdict.tokens) == wanted
    assert (pipeline.last.metrics.hits, pipeline.last.metrics.misses, pipeline.last.metrics.timesteps) == (4 * depth, 4, 4 * 3)


@pytest.mark.fast_cases("pipedec-bestfirst", "bita")
@pytest.mark.parametrize("method", METHODS)
def test_prompts_of_one_token_and_of_several_chunks(models: Path, method: str) -> None:
    pipeline = make_pipeline(models, (4, 2), "near")
    for length in (1, KNEE_ROWS, KNEE_ROWS + 1, 600 if method == "pipedec-bestfirst" else 2 * KNEE_ROWS + 30):
        prompt = tuple(torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(5)).tolist())
        asked = request(prompt, method=method, ignore_eos=True)
        assert answer(pipeline, asked) == (expected(models / "target", prompt, NUM_TOKENS), "length"), length


def test_one_token_takes_no_timestep(models: Path) -> None:
    pipeline = make_pipeline(models, (4, 4), "near")
    for method in METHODS:
        assert answer(pipeline, request(num_tokens=1, method=method)) == (expected(models / "target", PROMPT, 1), "length")
        assert (pipeline.last.metrics.timesteps, pipeline.last.metrics.hits, pipeline.last.metrics.misses) == (0, 0, 0)


@pytest.mark.fast_cases("pipedec-bestfirst")
@pytest.mark.parametrize("method", METHODS)
def test_the_models_end_token_ends_the_answer(models: Path, method: str, tmp_path: Path) -> None:
    spoken = expected(models / "target", PROMPT, NUM_TOKENS)
    end = next(token for index, token in enumerate(spoken) if index >= 4 and token not in spoken[:index])
    target = LlamaForCausalLM.from_pretrained(models / "target")
    target.config.eos_token_id = target.generation_config.eos_token_id = end
    target.save_pretrained(tmp_path / "target")
    for name in ("near", "bita"):
        (tmp_path / name).symlink_to(models / name)
    pipeline = make_pipeline(tmp_path, (4, 4), "near")
    wanted = expected(tmp_path / "target", PROMPT, NUM_TOKENS, ignore_eos=False)
    assert wanted == spoken[: spoken.index(end) + 1]
    assert answer(pipeline, request(method=method)) == (wanted, "stop")
    check_metrics(pipeline.last.metrics, 4, len(wanted), method)
    # The next request finds nothing of the rows that were in flight.
    assert answer(pipeline, request(method=method, ignore_eos=True)) == (spoken, "length")
    assert answer(pipeline, request(method=method, ignore_eos=True, stop_token_ids=(end,))) == (wanted, "stop")


def test_stages_must_fill_the_topology(models: Path) -> None:
    spec = bare_spec(models / "target", LAYERS, (2, 2))
    stages = [load_stage(spec, rank, torch.device("cpu")) for rank in (1, 2)]
    with pytest.raises(ValueError, match="2 stages do not fill a topology of 3"):
        LocalPipeline(bare_spec(models / "target", LAYERS, (3, 3)), stages, Scheduler(Resources(Experience(3))))
    with pytest.raises(ValueError, match="the last stage must be a FinalStageWorker"):
        LocalPipeline(spec, stages[::-1], Scheduler(Resources(Experience(2))))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "draft_quantize"), [((1, 1), None), ((4, 2), "int8")])
def test_every_method_says_what_transformers_says_with_rounded_weights(
    tmp_path: Path, shape: tuple[int, int], draft_quantize: str | None
) -> None:
    """Greedy and drawn."""
    save_tiny("qwen3", tmp_path / "target", hidden=64, head_dim=16)
    save_tiny("llama", tmp_path / "draft", layers=1, hidden=64, seed=5)
    formats = {"quantize": "int8", "draft_dtype": "bfloat16", "draft_quantize": draft_quantize}
    spec = bare_spec(tmp_path / "target", 4, shape, tmp_path / "draft", **formats)
    pipeline, greedy = LocalPipeline.load(spec), tuple(Reference(spec).generate(PROMPT, NUM_TOKENS, ignore_eos=True))
    drawn = answer(pipeline, request(method="pp", ignore_eos=True, temperature=0.8, seed=3))[0]
    assert drawn != greedy
    for method in ("pp", "stpp", "pipedec", "pipedec-bestfirst"):
        assert answer(pipeline, request(method=method, ignore_eos=True))[0] == greedy
        assert answer(pipeline, request(method=method, ignore_eos=True, temperature=0.8, seed=3))[0] == drawn
