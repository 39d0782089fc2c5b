"""What verdicts do to threads and their trees."""

from __future__ import annotations

from typing import Any

import pytest
from support.toy_dialects import IDS, at, ids, say, sequence_of, toy

from pipedec.core.verdict import Accepted, Verdict
from pipedec.threads import Sequence, Start
from pipedec.tree import Remaining, ThreadChanges, apply_verdict

FORK, CHILD, ASYNC, SYNC, CLOSE = (IDS[text] for text in ("[Fork]", "[Child]", "<async>", "<sync/>", "</async>"))
SUBTREE, ROOT, NOTHING = Remaining.SUBTREE, Remaining.ROOT, Remaining.NOTHING
PROMISE = '<promise : 2 "/>'
APAR, PASTA = {"dialect": "apar"}, {"dialect": "pasta"}
#: a main thread with one child, which has said "x"
FORKED = {"dialect": "apar", "said": "a [Fork] b", "of_child": "x"}
PROMISED = {"dialect": "pasta", "said": f"a {PROMISE} b", "of_child": "x"}


def begun(dialect: str, said: str = "", of_child: str = "", then: str = "", max_tokens: int = 1000, **changes: Any) -> Sequence:
    sequence = sequence_of(toy(dialect, **changes), max_tokens=max_tokens)
    for path, text in (((), said), ((0,), of_child), ((), then)):
        if text:
            say(sequence, path, text)
    return sequence


def told(sequence: Sequence, finished: str | None = None, **texts: str) -> ThreadChanges:
    """Follow a verdict that says ``t0="a b"`` of thread 0, and so on."""
    accepted = tuple(Accepted(int(name[1:]), tuple(ids(text))) for name, text in texts.items())
    return apply_verdict(sequence, Verdict(accepted, finished))


@pytest.mark.parametrize(
    ("before", "verdict", "remaining", "last", "starts"),
    [
        (APAR, {"t0": "a b"}, {0: SUBTREE}, {}, []),
        (APAR, {"t0": "a [Fork] b"}, {0: SUBTREE, 1: NOTHING}, {}, [Start(1, CHILD)]),
        (PASTA, {"t0": "<promise : 2"}, {0: SUBTREE}, {}, []),
        (PASTA | {"said": "<promise : 2"}, {"t0": '"/> a'}, {0: SUBTREE, 1: NOTHING}, {}, [Start(1, ASYNC)]),
        (PASTA, {"t0": "a <sync/> b"}, {0: SUBTREE}, {}, []),
        # those who join a closed child see its last token, and so does a child of it
        (PROMISED, {"t1": "y </async>"}, {1: ROOT}, {1: CLOSE}, []),
        (FORKED, {"t1": "y <|end|>"}, {1: NOTHING}, {}, []),
        (PROMISED | {"then": "<|end|>"}, {"t1": "y </async>"}, {1: NOTHING}, {}, []),
        (FORKED | {"max_child_tokens": 4}, {"t1": "y [Fork]"}, {1: ROOT, 2: NOTHING}, {1: FORK}, [Start(2, CHILD)]),
        # a join waits without rows and then begins anew
        (PROMISED, {"t0": "c <sync/>"}, {0: NOTHING}, {}, []),
        (PROMISED | {"max_depth": 2}, {"t1": PROMISE + " <sync/>"}, {1: NOTHING, 2: NOTHING}, {}, [Start(2, ASYNC)]),
        (PROMISED | {"then": "<sync/>"}, {"t1": "</async>"}, {1: ROOT, 0: NOTHING}, {1: CLOSE}, [Start(0, SYNC)]),
        (PROMISED, {"t0": "<sync/>", "t1": "</async>"}, {1: ROOT, 0: NOTHING}, {1: CLOSE}, [Start(0, SYNC)]),
        (PROMISED, {"t1": "</async>", "t0": "<sync/>"}, {1: ROOT, 0: NOTHING}, {1: CLOSE}, [Start(0, SYNC)]),
        # the end of an answer, also from outside, leaves nothing
        (FORKED, {"t0": "<|end|>"}, {0: NOTHING}, {}, []),
        (FORKED | {"then": "<|end|>"}, {"finished": "stop", "t1": "<|end|>"}, {1: NOTHING}, {}, []),
        (FORKED, {"finished": "stop", "t0": "c [Fork]"}, {0: NOTHING, 1: NOTHING}, {}, []),
        (FORKED, {"finished": "cancelled"}, {0: NOTHING, 1: NOTHING}, {}, []),
        # what is cut, by the same verdict, as soon as it is opened, or while it waits
        (APAR | {"said": "a [Fork]", "max_tokens": 6}, {"t1": "x y z", "t0": "b"}, {1: NOTHING, 0: NOTHING}, {}, []),
        (APAR | {"max_tokens": 3}, {"t0": "a [Fork]"}, {0: NOTHING}, {}, []),
        (PROMISED | {"then": "<|end|>", "max_tokens": 9}, {"t1": "y"}, {1: SUBTREE, 0: NOTHING}, {}, []),
    ],
)  # fmt: skip
def test_what_a_verdict_does(
    before: dict[str, Any], verdict: dict[str, Any], remaining: dict[int, Remaining], last: dict[int, int], starts: list[Start]
) -> None:
    changes = told(begun(**before), **verdict)
    assert (changes.remaining, changes.last, changes.starts) == (remaining, last, starts)
    assert changes.affects_threads == (bool(last or starts) or NOTHING in remaining.values())


def test_tokens_of_a_thread_that_the_same_verdict_has_cut_are_void() -> None:
    sequence = begun("apar", "a [Fork]", max_tokens=6)
    changes = told(sequence, t1="x y z", t0="b")
    assert changes.accepted.keys() == {1} and sequence.main.token_ids == ids("a [Fork]") and sequence.finished == "length"


def test_nothing_stays_of_a_closed_thread_that_is_cut_while_it_waits() -> None:
    """It has reached its most tokens, and no pending token tells of it."""
    sequence = sequence_of(toy("parallel", max_depth=2, max_child_tokens=5, no_opening_after=()))
    say(sequence, (), "a <Parallel> b")
    say(sequence, (0,), "x <Parallel>")
    changes, closed = told(sequence, t1="y z"), at(sequence, (0,))
    assert closed.is_closing and closed.pending is None and changes.remaining[1] is Remaining.ROOT
    sequence.max_tokens = closed.opened_at + closed.num_tokens + at(sequence, (0, 0)).num_tokens + 1
    changes = told(sequence, t2="v")
    assert closed.is_cut and sequence.finished is None
    assert changes.remaining[1] is Remaining.NOTHING and changes.affects_threads


def test_tokens_of_a_verdict_are_those_of_all_its_threads() -> None:
    assert Verdict((Accepted(3, (1, 2), ((7, 8),)), Accepted(0, (5,))), "stop").tokens == (1, 2, 5)
    assert Verdict.of(4, 5, forecast=((7,),)) == Verdict((Accepted(0, (4, 5), ((7,),)),))
    assert Verdict.of() == Verdict() and Verdict().tokens == ()
