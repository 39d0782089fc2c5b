"""An answer in decode threads is that of the naive reference, by every method and shape, greedy and sampled."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.pairwise import pairwise
from support.thread_differences import written
from support.thread_models import DEPTHS, END, SETTINGS, THREAD_DIALECTS, Case, ThreadModels, naive_answer

from benchmarks.methods import applicable_options
from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.engine.local import LocalPipeline
from pipedec.methods import METHODS, PROPOSERS, StaticTreeOptions
from pipedec.threads import Sequence

SHAPES = [(1, 1), (2, 2), (4, 4), (4, 2), (14, 14)]  # stages, groups
TREE = {"width": 6, "children": 4}
CASES = [
    pytest.param(
        method, shape, Case(dialect, setting, depth=DEPTHS[shape[0] > DEPTHS[0]]),
        id=f"{method}-{shape[0]}in{shape[1]}-{dialect}-{setting.replace(' ', '-')}",
        marks=[] if shape == (4, 2) else [pytest.mark.slow],  # one of each method
    )
    for method, shape, dialect, setting in pairwise(METHODS, SHAPES, THREAD_DIALECTS, SETTINGS)
]  # fmt: skip


def threaded_answer(
    models: ThreadModels, pipeline: LocalPipeline, case: Case, method: str, options: MethodOptions | None = None
) -> Sequence:
    """The threads of the pipeline's answer."""
    dialect = THREAD_DIALECTS[case.dialect].to_json()
    options = options or applicable_options(method, TREE)
    request = TokenizedRequest(0, models.prompt_ids(case.prompt), models.sampling(case), method, options, threads=dialect)
    verdicts = list(pipeline.run(request))
    assert all(verdict.finished is None for verdict in verdicts[:-1])
    assert pipeline.last.sequence is not None and verdicts[-1].finished == pipeline.last.sequence.finished
    return pipeline.last.sequence


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("method", "shape", "case"), CASES)
def test_threads_equal_the_references(thread_models: ThreadModels, method: str, shape: tuple[int, int], case: Case) -> None:
    """Every pair of method, shape, dialect and sampling settings; with penalties, which count what a thread sees."""
    pipeline = LocalPipeline.load(thread_models.spec(case.depth, *shape))
    answer = threaded_answer(thread_models, pipeline, case, method)
    assert written(answer) == written(thread_models.known_answer(case))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", ["greedy", "drawn"])
def test_the_main_thread_ends_after_min_tokens(thread_models: ThreadModels, method: str, setting: str) -> None:
    """Other threads end before, as an end token is likely."""
    case = Case("apar", setting)
    prompt, bound, usual = thread_models.prompt_ids(case.prompt), thread_models.bound("apar"), thread_models.sampling(case)
    sampling = structs.replace(usual, min_tokens=16, logit_bias={**(usual.logit_bias or {}), END: 42.0})
    wanted, early = (
        naive_answer(thread_models.target(), bound, prompt, params, (END,))
        for params in (sampling, structs.replace(sampling, min_tokens=0))
    )
    assert early.main.num_tokens < 16 < wanted.main.num_tokens and wanted.finished == "stop"
    assert any(thread.num_tokens < 16 for thread in wanted.threads[1:])
    request = TokenizedRequest(
        0, prompt, sampling, method, applicable_options(method, TREE), threads=THREAD_DIALECTS["apar"].to_json()
    )
    pipeline = LocalPipeline.load(thread_models.spec(case.depth, 2))
    list(pipeline.run(request))
    assert pipeline.last.sequence is not None and written(pipeline.last.sequence) == written(wanted)


def test_threads_share_static_trees_with_ngrams(thread_models: ThreadModels) -> None:
    """The n-grams' text is that of all threads."""
    case = Case("apar", "greedy", depth=DEPTHS[0])
    options = StaticTreeOptions(children=4, depth=3, rows=12, proposers=PROPOSERS)
    pipeline = LocalPipeline.load(thread_models.spec(case.depth, 2, 2))
    answer = threaded_answer(thread_models, pipeline, case, "stpp", options)
    assert written(answer) == written(thread_models.known_answer(case))
