"""Topologies, task names, and the cases of Algorithm 4 one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedec.core.errors import UserError
from pipedec.core.stage_message import RequestUpdate
from pipedec.core.verdict import Accepted, Verdict
from pipedec.scheduler.paper import Facts, initial_tasks, post_process, results_of
from pipedec.scheduler.workflow import Planned, Task, after_window, initial_windows
from pipedec.topology import Topology

PAIRS = Topology(((1, 2), (3, 4), (5,)))
TWO, ALONE = Topology.even(2, 2), Topology.even(3, 3)
RESULTS = (
    RequestUpdate(3, verdict=Verdict.of(7, finished="stop"), logprobs=(((7, -0.5),),)),
    RequestUpdate(4, verdict=Verdict((), "paused")),
    RequestUpdate(5, prompt_logprobs=(((1, -1.0), (2, -2.0)),)),
)
ACCEPTED = (RequestUpdate(3, verdict=Verdict((Accepted(0, (7,)),))),)


def strings(planned: list[Planned]) -> dict[str, list[str]]:
    return {plan.task.id: [task.id for task in plan.after] for plan in planned}


def test_topology_names_entries_and_exits() -> None:
    assert PAIRS.entry_ranks == (1, 3, 5)
    assert PAIRS.exit_ranks == (2, 4, 5)
    assert (PAIRS.num_stages, PAIRS.num_groups, PAIRS.final_rank) == (5, 3, 5)
    assert [PAIRS.group_of(rank) for rank in range(1, 6)] == [0, 0, 1, 1, 2]
    assert [rank for rank in PAIRS.ranks if PAIRS.feeds_next_group(rank)] == [0, 2, 4]
    assert PAIRS.active_ranks((3,)) == (0, 3, 4)


@given(st.integers(1, 20), st.integers(1, 20))
def test_even_topology_covers_all_stages(stages: int, groups: int) -> None:
    if groups > stages:
        with pytest.raises(UserError, match="groups"):
            Topology.even(stages, groups)
        return
    sizes = [len(group) for group in Topology.even(stages, groups).groups]
    assert sum(sizes) == stages and len(sizes) == groups and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("groups", [(), ((),), ((1,), ()), ((2,),), ((1, 3),), ((1,), (1,)), ((2, 1),)])
def test_bad_groups_raise_user_error(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UserError):
        Topology(groups)


@pytest.mark.parametrize(
    ("task", "identifier", "label"),
    [
        (Task.compute("pre", 2, 0), "C:pre:2:0", "2P0"),
        (Task.compute("dec", 2, 17), "C:dec:2:17", "2F17"),
        (Task.compute("sync", 0, 17), "C:sync:0:17", "0S17"),
        (Task.compute("end", 0, 17), "C:end:0:17", "0E17"),
        (Task.compute("window", 3, 17), "C:window:3:17", "3W17"),
        (Task.transfer(2, 3, 17), "T:2:3:17", "2>3@17"),
        (Task.finish(4, 17), "V:finish:4:17", "4V17"),
        (Task.finish_all(17), "V:finish:all:17", "allV17"),
    ],
)
def test_task_names(task: Task, identifier: str, label: str) -> None:
    assert (task.id, task.label) == (identifier, label)
    assert Task.parse(identifier) == task


@pytest.mark.parametrize("identifier", ["C:jump:1:1", "V:begin:1:1", "X:1:2:3", "C:dec:1", "T:a:b:c"])
def test_other_strings_are_refused(identifier: str) -> None:
    with pytest.raises(ValueError):
        Task.parse(identifier)


def test_cases_1_2_prefill_passes_all_stages() -> None:
    """Deviation: all of it is scheduled at once, and rank 0 sends the prompts."""
    assert strings(initial_tasks(Topology.even(3, 2))) == {
        "C:pre:0:0": [],
        "T:0:1:-1": [],
        "C:pre:1:0": ["T:0:1:-1"],
        "T:1:2:0": ["C:pre:1:0"],
        "C:pre:2:0": ["T:1:2:0"],
        "T:2:3:0": ["C:pre:2:0"],
        "C:pre:3:0": ["T:2:3:0"],
    }
    for rank in range(3):
        assert post_process(Task.compute("pre", rank, 0), Topology.even(3, 2), Facts(has_output=True)) == []


def test_case_3_first_tokens_reach_the_ranks_by_sync() -> None:
    planned = post_process(Task.compute("pre", 5, 0), PAIRS, Facts(results=RESULTS))
    assert strings(planned) == {f"C:sync:{rank}:0": [f"C:pre:{rank}:0"] for rank in range(6)}
    assert results_of(planned[0].payload) == RESULTS
    assert all(results_of(plan.payload) == ACCEPTED for plan in planned[1:])


def test_cases_4_8_12_a_group_is_scheduled_with_its_first_stage() -> None:
    for planned in (
        post_process(Task.compute("dec", 2, 9), PAIRS, Facts(has_output=True, active=(1,)))[:-1],
        post_process(Task.compute("sync", 2, 9), PAIRS, Facts(has_output=True))[:-1],
    ):
        assert strings(planned) == {
            "T:2:3:9": ["V:finish:all:9"],
            "C:dec:3:10": ["T:2:3:9", "V:finish:all:9"],
            "T:3:4:10": ["C:dec:3:10"],
            "C:dec:4:10": ["T:3:4:10"],
        }
    assert strings(post_process(Task.compute("dec", 1, 9), PAIRS, Facts(True, active=(1, 3)))) == {"V:finish:1:9": []}


def test_cases_5_6_8_10_rank_0_without_sync() -> None:
    planned = post_process(Task.compute("dec", 0, 9), ALONE, Facts(has_output=True, active=(1,)))
    assert strings(planned) == {
        "V:finish:all:9": ["V:finish:0:9", "V:finish:1:9"],
        "C:dec:0:10": ["V:finish:all:9"],
        "T:0:1:9": ["V:finish:all:9"],
        "C:dec:1:10": ["T:0:1:9", "V:finish:all:9"],
        "V:finish:0:9": [],
    }


def test_cases_5_7_rank_0_with_sync_waits_for_all() -> None:
    planned = post_process(Task.compute("dec", 0, 9), PAIRS, Facts(has_output=True, active=(1, 5)))
    assert strings(planned) == {"V:finish:all:9": [f"V:finish:{rank}:9" for rank in range(6)]}


@pytest.mark.parametrize("name", ["dec", "sync"])
def test_cases_8_12_no_output_activates_nothing(name: str) -> None:
    assert set(strings(post_process(Task.compute(name, 2, 9), PAIRS, Facts(active=(1,))))) == {"V:finish:2:9"}


def test_case_9_every_rank_that_has_computed_syncs_after_it() -> None:
    planned = post_process(Task.compute("dec", 5, 9), PAIRS, Facts(results=RESULTS, active=(1, 5)))
    assert strings(planned) == {
        "C:sync:0:9": ["C:dec:0:9"],
        "C:sync:1:9": ["C:dec:1:9"],
        "C:sync:2:9": ["C:dec:2:9"],
        "C:sync:3:9": [],
        "C:sync:4:9": [],
        "C:sync:5:9": ["C:dec:5:9"],
    }
    assert results_of(planned[0].payload) == RESULTS
    assert all(results_of(plan.payload) == ACCEPTED for plan in planned[1:])


def test_cases_11_12_after_a_sync() -> None:
    assert strings(post_process(Task.compute("sync", 0, 9), ALONE, Facts(has_output=True))) == {
        "T:0:1:9": ["V:finish:all:9"],
        "C:dec:1:10": ["T:0:1:9", "V:finish:all:9"],
        "C:dec:0:10": ["V:finish:all:9"],
        "V:finish:0:9": [],
    }
    for rank in (1, 3, 5):
        assert strings(post_process(Task.compute("sync", rank, 9), PAIRS, Facts(has_output=True))) == {f"V:finish:{rank}:9": []}


def test_the_sync_of_prefill_also_schedules_the_barrier() -> None:
    planned = strings(post_process(Task.compute("sync", 0, 0), PAIRS, Facts(has_output=True)))
    assert planned["V:finish:all:0"] == [f"V:finish:{rank}:0" for rank in range(6)]
    assert planned["C:dec:0:1"] == ["V:finish:all:0"]


def test_a_session_ends_when_the_pipeline_is_empty() -> None:
    assert strings(post_process(Task.compute("dec", 0, 9), PAIRS, Facts(finished=True))) == {
        "V:finish:all:9": ["V:finish:0:9"],
        "C:end:0:9": ["V:finish:all:9"],
        "V:finish:0:9": [],
    }
    assert post_process(Task.compute("end", 0, 9), PAIRS, Facts()) == []
    assert post_process(Task.transfer(0, 1, 9), PAIRS, Facts()) == []


def test_a_session_begins_with_a_window_of_every_rank() -> None:
    windows = initial_windows(TWO, 8)
    assert [plan.task for plan in windows] == [Task.compute("window", rank, 1) for rank in TWO.ranks]
    assert all(plan.after == () and plan.payload == {"timesteps": 8} for plan in windows)


def test_after_a_window_rank_0_schedules_the_next_one_of_every_rank() -> None:
    planned = {plan.task: plan for plan in after_window(Task.compute("window", 0, 1), TWO, 8)}
    for rank in TWO.ranks:
        assert planned[Task.compute("window", rank, 9)].after == (Task.compute("window", rank, 1),)
    assert planned[Task.finish_all(1)].after == tuple(Task.compute("window", rank, 1) for rank in TWO.ranks)


def test_a_window_in_which_the_session_ends_is_the_last() -> None:
    planned = {plan.task: plan for plan in after_window(Task.compute("window", 0, 9), TWO, 0)}
    assert set(planned) == {Task.finish_all(9), Task.compute("end", 0, 9)}
    assert planned[Task.compute("end", 0, 9)].after == (Task.finish_all(9),)
