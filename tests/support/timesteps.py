"""How many timesteps an answer may take, by its hits and misses."""

from __future__ import annotations

from pipedec.core.completion import Metrics


def check_timesteps(metrics: Metrics, groups: int, method: str) -> None:
    """Paper §3.3.4: a hit yields its token one timestep later, a miss after the whole pipeline.

    A static tree crosses the whole pipeline for each of its roots, which are its misses, after a timestep of the draft alone.
    A tree of ``bita`` does the same without that timestep: what its last verdict brought is all it needs.
    With best-first injection a hit may come with the token before it, or as a late sibling, before a whole passage is over.
    """
    drained = groups * metrics.misses
    if method == "pipedec-bestfirst":
        assert drained <= metrics.timesteps <= drained + (groups - 1) * metrics.hits
    else:
        assert metrics.timesteps == drained + {"stpp": metrics.misses, "bita": 0}.get(method, metrics.hits)
