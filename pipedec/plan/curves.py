"""Two fitted curves: a draft's accuracy by its size, and the timesteps of a token by that accuracy."""

from __future__ import annotations

# Greedy agreement of smaller models with a large one (Leviathan et al. 2023, arXiv:2211.17192, tables 2 and 3): with 0.7 to 7.3%
# of T5-XXL's parameters 75 to 82% (translation) and 65 to 74% (summaries), with 0.07 to 5.8% of LaMDA's 61 to 75%. For each
# of the three the errors fall with an exponent of 0.10 to 0.14; the scale is 0.13 to 0.19.
_ERROR_SCALE, _ERROR_EXPONENT = 0.165, 0.12
# Of replays with the default method (docs/results/drafts.md, "How large a draft").
_MISSES, _STARTS, _LEVELS = 0.28, 0.062, 0.37
_NARROWNESS = -0.46  # exponent of rows: a chain loses all of a passage, a tree of 16 rows per timestep as much as a larger one


def expected_top1(share: float) -> float:
    """Top-1 agreement of a draft with its target, by its share of the target's parameters: the errors are a power of it.

    It holds for drafts that were trained as long as their targets. Of the shipped ones, that of the reference pair lies on it
    (9% of the parameters, 79% of the tokens), those that were trained for an hour lie below (SmolLM2's: 5.5%, 52%).
    """
    return 1 - min(_ERROR_SCALE * share**-_ERROR_EXPONENT, 1.0)


def timesteps_per_token(top1: float, forwards: int, passage: int, rows: int | None = None) -> float:
    """Timesteps of a token with the default method, with so many draft forwards in each.

    A chain of guesses loses a ``passage`` of timesteps with every wrong first choice, a tree about a quarter of it. Some
    are lost at the start of an answer and while a level of the tree is drafted; each level is a forward of its own. ``rows`` per
    timestep: as many as the method likes if None, else the fewer, the more like a chain.
    """
    misses = _MISSES if rows is None else max(_MISSES, rows**_NARROWNESS)
    lost = passage * (_STARTS + misses * (1 - top1))
    return max(lost + _LEVELS / forwards, 1 / forwards)
