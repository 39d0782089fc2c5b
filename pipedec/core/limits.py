"""Defaults and bounds that settings, plans and the engine share."""

from __future__ import annotations

KNEE_ROWS = 64  # rows that most GPUs compute in about the time of one, if the plan has no better value (see ``plan.roofline``)
# Rows that a kernel for quantized weights multiplies at once: for each further tile of so many it reads and widens them again.
KERNEL_ROWS = 64
DRAFT_KNEE = 64  # maximum rows of all requests in one draft forward
DRAFTED_ROWS = 32  # maximum rows of one request in one draft forward: more make no answer faster
MAX_FORWARDS = 8  # maximum draft forwards per timestep
MAX_PASSAGE = 128  # timesteps from a row's entry to its verdict
SLOW_SECONDS = 0.005  # from which the links around the ring of ranks, taken together, count as slow
MAX_NUM_SEQS = 64  # requests in the pipeline at the same time
MAX_WAITING = 1000  # requests that wait for a place among them
# The largest forward that is captured as a CUDA graph, whose buffers a plan counts:
CAPTURED_ROWS = 256  # with more of them computing takes longer than launching kernels
CAPTURED_NUMBERS = 1 << 18  # of block tables, masks and positions
