"""An answer in decode threads is that of the naive reference, by every method and shape, greedy and sampled."""

from __future__ import annotations

import pytest
from support.pairwise import pairwise
from support.thread_differences import written
from support.thread_models import DEPTHS, SETTINGS, THREAD_DIALECTS, Case, ThreadModels

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


def test_threads_share_static_trees_with_ngrams(thread_models: ThreadModels) -> None:
    """The n-grams' text is that of all threads."""
    case = Case("apar", "greedy", depth=DEPTHS[0])
    options = StaticTreeOptions(children=4, depth=3, rows=12, proposers=PROPOSERS)
    pipeline = LocalPipeline.load(thread_models.spec(case.depth, 2, 2))
    answer = threaded_answer(thread_models, pipeline, case, "stpp", options)
    assert written(answer) == written(thread_models.known_answer(case))
