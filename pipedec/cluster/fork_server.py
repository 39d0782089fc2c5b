"""Imports of the fork server, before it serves: torch and everything else that a rank needs, which takes seconds.

Until then it cannot notice that the supervisor has ended (Ctrl-C while a cluster starts), so the kernel kills it in that case.
"""

import atexit
import os

from pipedec.cluster.processes import die_with_parent

die_with_parent()
if os.getsid(os.getppid()) != os.getsid(0):  # the supervisor ended before the line above: this process has another parent
    os._exit(1)

from pipedec.config.environment import set_rank_environment  # noqa: E402

set_rank_environment()

import pipedec.cluster.rank  # noqa: E402, F401

# From here on it reads the end of a pipe; the kernel would kill it as soon as the thread that started the cluster ends.
die_with_parent(False)

atexit.register(os._exit, 0)  # taking torch apart would take as long as importing it
