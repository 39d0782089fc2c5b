"""An answer in decode threads is that of the naive reference, by every method and shape, greedy and drawn."""

from __future__ import annotations

import pytest
from threads_support import DEPTHS, THREAD_DIALECTS, Case, ThreadModels

from pipedec.core import Request
from pipedec.engine.local import LocalPipeline
from pipedec.methods import METHODS, applicable_options
from pipedec.threads import Sequence
from pipedec.verify.threads import first_thread_difference

SHAPES = [(1, 1), (2, 2), (4, 4), (4, 2), (14, 14)]  # stages, groups
TREE = {"width": 6, "children": 4}
SETTINGS = ("greedy", "drawn")


def threaded_answer(models: ThreadModels, pipeline: LocalPipeline, case: Case, method: str) -> Sequence:
    """The threads of the pipeline's answer."""
    dialect = THREAD_DIALECTS[case.dialect].to_json()
    options = applicable_options(method, TREE)
    request = Request(0, models.prompt_ids(case.prompt), models.sampling(case), method, options, threads=dialect)
    verdicts = list(pipeline.run(request))
    assert all(verdict.finished is None for verdict in verdicts[:-1])
    assert pipeline.sequence is not None and verdicts[-1].finished == pipeline.sequence.finished
    return pipeline.sequence


@pytest.mark.parametrize("dialect", THREAD_DIALECTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}in{shape[1]}")
@pytest.mark.parametrize("method", METHODS)
def test_threads_say_what_the_reference_says(
    thread_models: ThreadModels, method: str, shape: tuple[int, int], dialect: str
) -> None:
    depth = next(depth for depth in DEPTHS if depth >= shape[0])
    pipeline = LocalPipeline.load(thread_models.spec(depth, *shape))
    for setting in SETTINGS:
        case = Case(dialect, setting, depth=depth)
        answer = threaded_answer(thread_models, pipeline, case, method)
        assert first_thread_difference(thread_models.known_answer(case), answer) is None, setting


@pytest.mark.parametrize("dialect", THREAD_DIALECTS)
@pytest.mark.parametrize("setting", ["greedy penalised", "filtered"])
def test_penalties_count_what_a_thread_sees(thread_models: ThreadModels, dialect: str, setting: str) -> None:
    pipeline = LocalPipeline.load(thread_models.spec(DEPTHS[0], 2))
    case = Case(dialect, setting)
    for method in METHODS:
        answer = threaded_answer(thread_models, pipeline, case, method)
        assert first_thread_difference(thread_models.known_answer(case), answer) is None, method
