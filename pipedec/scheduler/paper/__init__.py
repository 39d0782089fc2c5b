"""The paper's dispatcher (PipeDec, Appendices A and B), in which Redis grants every task and every transfer.

A step of all running requests is the unit of its tasks. Algorithm 2 is ``lua/graph.lua``, Algorithm 3 ``engine/stage_loop.py``.
"""

from pipedec.scheduler.paper.post_processing import Facts as Facts
from pipedec.scheduler.paper.post_processing import initial_tasks as initial_tasks
from pipedec.scheduler.paper.post_processing import post_process as post_process
from pipedec.scheduler.paper.post_processing import results_of as results_of
