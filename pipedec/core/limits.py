"""Defaults and bounds that settings, plans and the engine share."""

from __future__ import annotations

KNEE_ROWS = 64  # rows that most GPUs compute in about the time of one, if the plan has no better value (see ``plan.roofline``)
DRAFTED_ROWS = 32  # maximum rows of one request in one draft forward: more make no answer faster
MAX_FORWARDS = 8  # maximum draft forwards per timestep
MAX_PASSAGE = 128  # timesteps from a row's entry to its verdict
SLOW_SECONDS = 0.005  # from which the links around the ring of ranks, taken together, count as slow
MAX_NUM_SEQS = 64  # requests in the pipeline at the same time
MAX_WAITING = 1000  # requests that wait for a place among them
# The largest forward that is captured as a CUDA graph, whose buffers a plan counts:
CAPTURED_ROWS = 256  # with more of them computing takes longer than launching kernels
CAPTURED_SLOTS = 1 << 15  # slots of all requests; each layer copies their keys and values
CAPTURED_CELLS = 1 << 21  # cells in the rectangles of rows and slots
