"""Who is to blame when a pipeline stands still."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pipedec.cluster.stalls import Stall, find_stall, stall_limit
from pipedec.messages.stats import ActivityReport


def computing(seconds: float, longest: float = 0.0) -> ActivityReport:
    return ActivityReport("computing", None, seconds, longest)


def waiting(peer: int, seconds: float, longest: float = 0.0) -> ActivityReport:
    return ActivityReport("waiting", peer, seconds, longest)


def idle(seconds: float = 100.0) -> ActivityReport:
    return ActivityReport("idle", None, seconds)


RING = {
    "nothing to do": {0: idle(), 1: idle(), 2: idle()},
    "all is well": {0: waiting(2, 0.1), 1: waiting(0, 0.3), 2: computing(0.1)},
    "waiting for one that computes": {0: waiting(2, 9.0), 1: waiting(0, 8.0), 2: computing(3.0)},
    "waiting for one that waits": {0: waiting(3, 9.0), 1: computing(3.0), 2: waiting(1, 8.0), 3: waiting(2, 8.5)},
    "a long timestep is usual": {0: waiting(2, 9.0), 1: waiting(0, 8.0), 2: computing(9.0, 2.0)},
    "long timesteps are usual": {0: waiting(2, 9.0, 2.0), 1: waiting(0, 9.0, 2.0), 2: waiting(1, 9.0, 1.0)},
    "a replacement loads": {0: waiting(2, 9.0), 1: waiting(0, 8.0), 2: ActivityReport("loading", None, 60.0)},
    "the ranks meet": {0: ActivityReport("meeting", None, 60.0), 1: ActivityReport("meeting", 0, 50.0)},
    "nobody has told": {},
}  # fmt: skip


@pytest.mark.parametrize("activities", RING.values(), ids=RING)
def test_nobody_is_blamed(activities: dict[int, ActivityReport]) -> None:
    assert find_stall(activities, 4.0) is None


def test_a_rank_that_computes_for_too_long_is_blamed() -> None:
    activities = {0: waiting(3, 5.2), 1: waiting(0, 5.1), 2: computing(5.0), 3: waiting(2, 5.3)}
    stall = find_stall(activities, 4.0)
    assert stall == Stall(2, None, 5.0) and stall.suspect == 2
    assert stall.reason == "computed one timestep for more than 5 s (--stall-timeout)"


@pytest.mark.failure_case("S16")
def test_a_rank_may_be_five_times_as_slow_as_it_was() -> None:
    assert find_stall({1: computing(9.9, 2.0)}, 4.0) is None
    assert find_stall({1: computing(10.1, 2.0)}, 4.0) == Stall(1, None, 10.1)


@pytest.mark.failure_case("S11")
def test_of_those_that_wait_in_a_circle_the_first_to_starve_shows_the_silent_link() -> None:
    """A message from 1 to 2 was lost: 2 starves, then 3, which gets nothing from it, and so on."""
    activities = {0: waiting(3, 4.4), 1: waiting(0, 4.3), 2: waiting(1, 4.6), 3: waiting(2, 4.5)}
    stall = find_stall(activities, 4.0)
    assert stall == Stall(2, 1, 4.6) and stall.suspect == 1
    assert stall.reason == "kept rank 2 (stage 2) waiting for more than 5 s (--stall-timeout)"


@pytest.mark.parametrize("last_told", [waiting(1, 0.02), idle(0.5), None], ids=["waiting", "idle", "nothing"])
def test_one_that_has_stopped_is_blamed_whatever_it_said_last(last_told: ActivityReport | None) -> None:
    activities = {0: waiting(3, 4.4), 1: waiting(0, 4.3), 2: last_told, 3: waiting(2, 4.5)}
    stall = find_stall({rank: told for rank, told in activities.items() if told is not None}, 4.0)
    assert stall is not None and stall.suspect == 2


@pytest.mark.parametrize("told", [waiting(1, 0.4), waiting(1, 0.02), idle(0.3)], ids=["waiting", "just begun", "idle"])
def test_nobody_is_blamed_for_what_it_told_before_it_could_have_waited_for_long(told: ActivityReport) -> None:
    """Rank 1 computes something for the first time; rank 2 waits for it, and last told so in the beginning."""
    activities = {0: waiting(2, 1.1), 1: warming(1.2), 2: replace(told, age_seconds=0.7)}
    assert find_stall(activities, 1.0) is None
    stall = find_stall(activities | {2: replace(told, age_seconds=0.05)}, 1.0)
    assert stall is not None and stall.suspect == 2, "it has just told that it does something else"


def test_whoever_waits_longest_for_one_that_waits_itself_is_followed() -> None:
    """Between groups: 4 has waited for 3 since before 3 began to wait for 2, which stands still."""
    activities = {0: waiting(4, 4.8), 1: waiting(0, 4.7), 2: waiting(1, 0.1), 3: waiting(2, 4.5), 4: waiting(3, 5.5)}
    stall = find_stall(activities, 4.0)
    assert stall is not None and (stall.rank, stall.suspect) == (3, 2)


def test_the_circle_is_followed_by_what_lasts_longest_now_and_not_when_it_was_told() -> None:
    """Rank 0 has told a second later than the others."""
    activities = {rank: replace(waiting((rank or 4) - 1, 4.6 - rank / 10), age_seconds=1.0) for rank in range(1, 4)}
    activities[0] = waiting(3, 5.2)
    assert find_stall(activities, 4.0) == Stall(1, 0, 4.5)


@pytest.mark.failure_case("S10")
def test_ranks_on_several_hosts_wait_longer_by_six_seconds_and_five_times_what_their_links_take() -> None:
    def waiting_for(seconds: float) -> dict[int, ActivityReport]:
        waits = {0: waiting(2, seconds - 0.2), 1: waiting(0, seconds - 0.1), 2: waiting(1, seconds)}
        return {rank: replace(told, link_seconds=0.1) for rank, told in waits.items()}

    assert find_stall(waiting_for(11.4), 4.0) is None
    assert find_stall(waiting_for(11.6), 4.0) == Stall(2, 1, 11.6)
    stuck = waiting_for(5.0) | {1: replace(computing(5.1), link_seconds=0.1)}
    assert find_stall(stuck, 4.0) == Stall(1, None, 5.1), "whoever computes needs no link for it"


def test_hosts_that_cannot_reach_each_other_are_told_and_no_process_is_blamed() -> None:
    meeting = ActivityReport("meeting", None, 3.6)
    activities = {0: meeting, 1: ActivityReport("connecting", 2, 3.4), 2: ActivityReport("connecting", 1, 3.5), 3: meeting}
    stall = find_stall(activities, 4.0)
    assert stall == Stall(2, 1, 3.5, is_apart=True)
    assert stall.reason == "cannot be reached by rank 2 (stage 2)"
    assert find_stall({1: ActivityReport("connecting", 2, 2.9), 0: meeting}, 4.0) is None


def warming(seconds: float) -> ActivityReport:
    return ActivityReport("warming", None, seconds)


def test_what_is_computed_for_the_first_time_may_take_two_minutes_and_no_more() -> None:
    assert find_stall({0: waiting(2, 119.0), 1: waiting(0, 119.0), 2: warming(119.0)}, 4.0) is None
    stall = find_stall({0: waiting(2, 121.0), 1: waiting(0, 121.0), 2: warming(121.0)}, 4.0)
    assert stall is not None and stall.suspect == 2
    assert stall.reason == "took more than 121 s to compute something for the first time"
    assert find_stall({2: warming(299.0)}, 300.0) is None, "unless a timestep may take longer"
    ended = {0: waiting(2, 9.0), 1: replace(warming(8.9), age_seconds=0.9), 2: waiting(1, 0.1)}
    assert find_stall(ended, 4.0) is None, "what stage 1 computed has ended, which stage 2 has told before it"


def test_who_has_waited_for_a_first_time_has_not_waited_before() -> None:
    """Rank 2 has just ended what took it 20 s; the others have told that they wait before they heard of it."""
    late = replace(waiting(1, 0.1), warmed_seconds=0.1)
    activities = {0: waiting(3, 20.1), 1: waiting(0, 20.2), 2: late, 3: waiting(2, 20.3)}
    assert find_stall(activities, 4.0) is None
    later = {rank: replace(told, seconds=told.seconds + 5.0) for rank, told in activities.items()}
    stall = find_stall(later | {2: replace(late, seconds=5.1, warmed_seconds=5.1)}, 4.0)
    assert stall is not None and stall.suspect in range(4), "but it has since"
    assert find_stall(later | {2: replace(late, age_seconds=1.0)}, 4.0) is None


@pytest.mark.parametrize(
    ("given", "timestep_ms", "limit"), [(None, 0.0, 4.0), (None, 13.4, 4.0), (None, 1500.0, 30.0), (1.5, 1500.0, 1.5)]
)
def test_a_timestep_may_take_twenty_times_as_long_as_planned_unless_the_user_says_otherwise(
    given: float | None, timestep_ms: float, limit: float
) -> None:
    assert stall_limit(given, timestep_ms) == limit
