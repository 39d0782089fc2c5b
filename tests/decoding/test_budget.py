"""How rows are shared: the cases that matter one by one."""

from __future__ import annotations

from pipedec.decoding.budget import Budget, Claim, Demand

KNEE = 16


def always(rows: int, share: float) -> bool:
    return True


def share(*claims: Claim, knee: int = KNEE) -> dict[int, int]:
    return Budget(knee).share(claims, always)


def test_certain_rows_come_first_then_candidates_by_chance() -> None:
    claims = [Claim(number, demand=Demand(1, chances=[0.9 / (number + 1), 0.1])) for number in range(4)]
    assert share(*claims, knee=4) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert share(*claims, knee=5) == {0: 2, 1: 1, 2: 1, 3: 1}
    assert share(*claims, knee=6) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_part_of_the_room_is_shared_evenly() -> None:
    """A request whose candidates are all more probable gets more of them, but not all."""
    sure, unsure = Claim(0, demand=Demand(chances=[0.9] * 50)), Claim(1, demand=Demand(chances=[0.2] * 50))
    granted = share(sure, unsure)
    assert granted[1] >= KNEE // 4 and granted[0] >= KNEE // 2 and sum(granted.values()) == KNEE


def test_prompts_get_half_of_what_is_free_and_all_that_nobody_wants() -> None:
    eager, certain = Demand(2, chances=[0.5] * 50), Demand(2)
    assert share(Claim(0, demand=eager), Claim(1, prompt=100)) == {0: 9, 1: 7}
    assert share(Claim(0, demand=certain), Claim(1, prompt=100)) == {0: 2, 1: 14}
    assert share(Claim(0, demand=eager), Claim(1, prompt=3)) == {0: 13, 1: 3}
    assert share(Claim(0, prompt=100)) == {0: KNEE}


def test_prompts_are_served_by_priority_and_then_in_order_of_arrival() -> None:
    assert share(Claim(0, prompt=10), Claim(1, prompt=10), Claim(2, prompt=10)) == {0: 10, 1: 6}
    assert share(Claim(0, 5, prompt=10), Claim(1, 1, prompt=10), Claim(2, prompt=3)) == {2: 3, 1: 10, 0: 3}


def test_the_end_of_a_prompt_enters_together() -> None:
    """The masks behind a prompt enter with its last token."""
    assert share(Claim(0, prompt=KNEE + 2, tail=4)) == {0: KNEE - 2}
    assert share(Claim(0, prompt=KNEE, tail=4)) == {0: KNEE}


def test_a_width_that_certain_rows_exceed_leaves_no_candidates() -> None:
    wide = Demand(5, chances=[0.9] * 50, most=3)  # the last tokens of ended threads are certain rows besides the width
    assert share(Claim(0, demand=wide), Claim(1, demand=Demand(1))) == {0: 5, 1: 1}


def test_a_whole_waits_until_it_has_waited_longest() -> None:
    budget, tree = Budget(KNEE), Claim(99, demand=Demand(whole=KNEE))
    busy = [Claim(number, demand=Demand(1)) for number in range(3)]
    assert 99 not in budget.share([*busy, tree], always)
    assert budget.share([*busy, tree], always) == {99: KNEE}
    assert 99 not in budget.share([*busy, tree], always)


def test_a_whole_that_never_fits_enters_alone() -> None:
    budget, tree = Budget(KNEE), Claim(99, demand=Demand(whole=3 * KNEE))
    busy = [Claim(number, demand=Demand(1)) for number in range(3)]
    assert budget.share([*busy, tree], always) == {0: 1, 1: 1, 2: 1}
    assert budget.share([*busy, tree], always) == {99: 3 * KNEE}


def test_a_lower_priority_is_served_first() -> None:
    claims = [Claim(number, -number, Demand(1, chances=[0.5, 0.4])) for number in range(4)]
    assert share(*claims, knee=2) == {3: 1, 2: 1}
    assert share(*claims, knee=6) == {3: 3, 2: 1, 1: 1, 0: 1}


def test_nothing_but_certain_rows_enters_where_rows_cost_as_much_as_they_bring() -> None:
    """Every row makes the timestep longer by as much as one of 8 requests advances by a certain row."""
    claims = [Claim(number, demand=Demand(1, chances=[0.95, 0.9])) for number in range(8)]
    budget = Budget(64)
    assert budget.share(claims, lambda rows, share: share >= 1 / 8) == {number: 1 for number in range(8)}
    assert budget.refused == 0.95


def test_what_was_refused_is_told() -> None:
    budget = Budget(KNEE)
    claims = [Claim(number, demand=Demand(1, chances=[0.5**place for place in range(1, 40)])) for number in range(8)]
    granted = budget.share(claims, always)
    assert budget.refused == max(0.5 ** granted[number] for number in granted)
    budget.share(claims[:1], lambda rows, share: share > 0.3)
    assert budget.refused == 0.25
