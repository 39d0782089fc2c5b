"""BiTA's method with forecasts that the test wants: what it proposes, counts and refuses."""

from __future__ import annotations

import pytest
from support.drafters import PROMPT, Alone, begun, rows

from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import MaskParams
from pipedec.core.verdict import Verdict
from pipedec.methods import MAX_CHILDREN, MAX_ROWS, BitaOptions
from pipedec.model.bita import MAX_MASKS

FORECAST = ((11, 12), (13, 14), (15, 16))


def bita(trained_masks: int = 3, **limits: int | str) -> Alone:
    options = BitaOptions(**limits)  # type: ignore[arg-type]
    return begun(TokenizedRequest(0, PROMPT, method="bita", options=options), trained_masks=trained_masks)


def test_a_group_hangs_behind_every_row_of_the_efficient_tree() -> None:
    method = bita(2, children=2, shape="efficient")
    assert method.masks == MaskParams(2, 2)
    method.apply(Verdict.of(10, forecast=FORECAST[:2]))
    step = method.propose()
    candidates = [(10, -1), (11, 0), (12, 0), (13, 1), (14, 1)]
    groups = [pair for row in range(5) for pair in ((-1, row), (-2, 5 + 2 * row))]
    assert rows(step) == candidates + groups
    assert method.propose() is None
    method.draft()
    assert method.propose() is None
    method.apply(Verdict.of(11, 14, 40, forecast=((1, 2), (3, 4))))
    assert rows(method.propose())[:5] == [(40, -1), (1, 0), (2, 0), (3, 1), (4, 1)]
    assert (method.hits, method.misses) == (2, 2)


def test_straightforward_masks_stand_behind_the_root_alone() -> None:
    method = bita(2, shape="straightforward", children=7)
    assert method.masks == MaskParams(2, 1)
    method.apply(Verdict.of(10, forecast=((11,), (13,))))
    assert rows(method.propose()) == [(10, -1), (11, 0), (13, 1), (-1, 0), (-2, 3)]
    method.apply(Verdict.of(11, 13, 20))  # all masks are used up
    assert rows(method.propose()) == [(20, -1), (-1, 0), (-2, 1)]


@pytest.mark.parametrize(
    ("limits", "masks", "num_rows"),
    [
        ({}, MaskParams(3, 16), 64),
        ({"rows": 1}, MaskParams(3, 16), 4),  # what is always there: the root and its masks
        ({"shape": "efficient"}, MaskParams(3, 5), 64),
        ({"shape": "efficient", "depth": 2, "children": 1}, MaskParams(2, 1), 9),
        ({"children": 2, "shape": "full"}, MaskParams(3, 2), 60),
        ({"shape": "straightforward", "depth": 2}, MaskParams(2, 1), 5),
    ],
)
def test_limits_of_the_tree(limits: dict[str, int | str], masks: MaskParams, num_rows: int) -> None:
    """Masks in a group, names of each, and the rows of a whole step."""
    method = bita(**limits)
    assert method.masks == masks
    named = tuple(tuple(range(20 * place, 20 * place + masks.named)) for place in range(masks.count))
    method.apply(Verdict.of(10, forecast=named))
    step = method.propose()
    assert step is not None and step.num_rows == num_rows


@pytest.mark.parametrize(
    ("trained", "limits", "message"),
    [
        (3, {"depth": 4}, "depth 4, but this BiTA was trained with 3 masks: lower --depth"),
        (5, {"children": 103}, f"a forecast of 515 tokens is more than {MAX_ROWS}: lower --depth or --children"),
        (4, {"children": 30, "shape": "efficient"}, f"a tree of 605 rows is more than {MAX_ROWS}: lower --depth or --children"),
        (4, {"children": 6, "shape": "full"}, f"a tree of 7775 rows is more than {MAX_ROWS}: lower --depth or --children"),
    ],
)
def test_what_cannot_work_is_refused(trained: int, limits: dict[str, int | str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        bita(trained, **limits)
    assert str(refused.value) == message


def test_the_largest_trees_are_not_refused() -> None:
    assert bita(1, children=MAX_CHILDREN).masks == MaskParams(1, MAX_CHILDREN)
    assert bita(MAX_MASKS).masks == bita(MAX_MASKS, children=4).masks == MaskParams(MAX_MASKS, 4)
    assert bita(MAX_MASKS, children=MAX_ROWS // MAX_MASKS).masks == MaskParams(MAX_MASKS, MAX_ROWS // MAX_MASKS)
    assert bita(MAX_MASKS, shape="straightforward", children=MAX_CHILDREN).masks == MaskParams(MAX_MASKS, 1)


def test_no_draft_is_needed() -> None:
    request = TokenizedRequest(0, PROMPT, method="bita")
    assert begun(request, None, trained_masks=3).masks == MaskParams(3, 16)
    with pytest.raises(UserError, match="needs what pipedec train bita has learned"):
        begun(request, None)
