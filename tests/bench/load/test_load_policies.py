"""Methods with options as a command line gives them."""

from __future__ import annotations

import pytest

from pipedec.bench.load.policy import Policy, parse_policies
from pipedec.core import MethodOptions, UserError
from pipedec.methods import BestFirstOptions, PlainOptions, StaticTreeOptions


@pytest.mark.parametrize(
    ("text", "method", "options"),
    [
        ("pp", "pp", PlainOptions()),
        ("stpp:width=8,children=2,depth=3,rows=9", "stpp", StaticTreeOptions(8, 2, 3, 9)),
        (
            "pipedec-bestfirst:forwards=3,proposers=ngrams",
            "pipedec-bestfirst",
            BestFirstOptions(forwards=3, proposers=("ngrams",)),
        ),
        ("pipedec-bestfirst:proposers=draft+ngrams", "pipedec-bestfirst", BestFirstOptions(proposers=("draft", "ngrams"))),
    ],
)
def test_policies_as_text(text: str, method: str, options: MethodOptions) -> None:
    assert Policy.parse(text) == Policy(text, method, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warp", "--policy warp: unknown method 'warp'; choose one of pp, "),
        (":width=3", "--policy :width=3: unknown method ''"),
        ("pp:width=3", "--policy pp:width=3: pp has no limit 'width'; it has none"),
        ("pipedec:forwards=2", "pipedec has no limit 'forwards'; it has width, children"),
        ("pipedec:width=wide", "width must be a whole number, not 'wide'"),
        ("pipedec:width", "width must be a whole number, not ''"),
        ("pipedec:width=0", "--policy pipedec:width=0: width: must be between 1 and 4096, not 0"),
        ("pipedec-bestfirst:proposers=oracle", "proposers: must be one or more of draft, ngrams, not oracle"),
    ],
)
def test_refuses_policies_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Policy.parse(text)


def test_a_flag_names_several_policies() -> None:
    found = parse_policies(["pp,stpp", "pipedec:width=4,children=2"], "--method")
    assert [one.name for one in found] == ["pp", "stpp", "pipedec:width=4,children=2"]
    with pytest.raises(UserError, match="--method pp,pp: one of them is given twice"):
        parse_policies(["pp", "pp"], "--method")
