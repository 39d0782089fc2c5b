"""Methods with options as a command line gives them."""

from __future__ import annotations

import pytest

from pipedec.bench.policy import Policy, parse_policies
from pipedec.core.errors import UserError
from pipedec.methods import BestFirstOptions, PlainOptions, StaticTreeOptions


def test_policies_as_text() -> None:
    for text, method, options in (
        ("pp", "pp", PlainOptions()),
        ("stpp:width=8,children=2,depth=3,rows=9", "stpp", StaticTreeOptions(8, 2, 3, 9)),
        ("pipedec-bestfirst:proposers=draft+ngrams", "pipedec-bestfirst", BestFirstOptions(proposers=("draft", "ngrams"))),
    ):
        assert Policy.parse(text) == Policy(text, method, options)  # type: ignore[arg-type]
    found = parse_policies(["pp,stpp", "pipedec:width=4,children=2"], "--method")
    assert [one.name for one in found] == ["pp", "stpp", "pipedec:width=4,children=2"]
    with pytest.raises(UserError, match="--method pp,pp: one of them is given twice"):
        parse_policies(["pp", "pp"], "--method")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warp", "--policy warp: unknown method 'warp': choose one of pp, "),
        ("pp:width=3", "--policy pp:width=3: method pp has no option 'width': it is an option of"),
        ("pipedec:forwards=2", "method pipedec has no option 'forwards': it is an option of pipedec-bestfirst"),
        ("pipedec:width", "width: must be an integer"),
        ("pipedec:width=0", "--policy pipedec:width=0: width: must be an integer"),
        ("pipedec-bestfirst:proposers=oracle", "must be one of draft, ngrams, not 'oracle'"),
    ],
)
def test_refuses_policies_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Policy.parse(text)
