"""How rank processes of this machine are born: forked from one process that has imported torch once.

Fifteen ranks then start in the time of one. Knows processes and signals; what they run is the caller's business.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

# What the common ancestor imports. Reading a checkpoint's config.json makes transformers import the second.
_PRELOAD = ["pipedec.cluster.rank", "transformers.models.llama.configuration_llama"]


def rank_context() -> ForkServerContext:
    """The context to start ranks with; their ancestor is deaf to Ctrl-C, which is for the supervisor alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    resource_tracker.ensure_running()  # forkserver would start it, and it would lift the block
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    return context


def begin_rank_process() -> None:
    """The first thing a rank's process does: leave Ctrl-C to the supervisor, end when it ends, meet over loopback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    supervisor = multiprocessing.parent_process()
    if supervisor is not None and not supervisor.is_alive():  # it died before the line above
        os._exit(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
