"""Defaults and bounds that settings, plans and the engine share."""

from __future__ import annotations

KNEE_ROWS = 64  # rows that most GPUs compute in about the time of one, if the plan has no better value (see ``hardware``)
DRAFTED_ROWS = 32  # maximum rows of one request in one draft forward: more make no answer faster
MAX_FORWARDS = 8  # maximum draft forwards per timestep
MAX_PASSAGE = 128  # timesteps from a row's entry to its verdict
SLOW_SECONDS = 0.005  # from which the links around the ring of ranks, taken together, count as slow
MAX_NUM_SEQS = 64  # requests in the pipeline at the same time
MAX_WAITING = 1000  # requests that wait for a place among them
