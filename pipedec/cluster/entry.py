"""The main function of a rank's process: prepares its pipeline, serves, and reports a failure to all others.

Loads torch and the models' code as late as possible, so that mistakes in its place or files are reported within a second or two.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pipedec import __version__
from pipedec.cluster.logs import run_log
from pipedec.cluster.place import RankPlace, Report, RunAddress
from pipedec.cluster.processes import FAILED, LOST_ANOTHER
from pipedec.config.environment import set_rank_environment
from pipedec.core.errors import PipedecError, RankLost
from pipedec.scheduler import RankScheduler
from pipedec.topology import Topology, of_rank, rank_name

if TYPE_CHECKING:
    from pipedec.messages.run import RankDescription
    from pipedec.plan.spec import PipelineSpec

logger = logging.getLogger(__name__)


def run_rank(
    place: RankPlace, topology: Topology, make_spec: Callable[[], PipelineSpec], address: RunAddress, report: Report,
    describe: Callable[[RankDescription], None] = lambda description: None,
) -> int:  # fmt: skip
    """Serve as one rank until the run is stopped; returns the exit status.

    A failure is reported to the other ranks and to clients that wait for an answer, then printed in one line; if another rank has
    reported one before, only one rank of each host prints it. The caller should end the process by ``os._exit``: a process group
    that has lost a peer can hang in its own clean-up.

    Args:
        make_spec: resolves the pipeline; may raise any error.
        describe: called with the description of this rank, once its weights are loaded.
    """
    set_rank_environment()
    scheduler: RankScheduler | None = None
    status = FAILED
    try:
        scheduler = run_scheduler = address.scheduler(RankScheduler, topology)
        spec = make_spec()
        with run_log(address.run_id, f"rank-{place.rank}", spec.settings.cluster.log_level, lambda: run_scheduler.epoch):
            logger.info(
                "pipedec %s, process %d, started as %s of %d ranks",
                __version__, os.getpid(), rank_name(place.rank), place.world_size,
            )  # fmt: skip
            try:
                gc.disable()  # collections take a tenth of the time to load torch
                from pipedec.cluster.rank import Rank

                gc.enable()
                Rank(place, spec, scheduler, report, describe).serve()
            except Exception as error:
                if isinstance(error, PipedecError):
                    logger.warning("ends: %s", error)
                else:
                    logger.exception("ends because of an internal error")
                raise
            logger.info("the run was stopped")
        return 0
    except RankLost as error:
        message, status = str(error), LOST_ANOTHER
    except PipedecError as error:
        message = str(error)
    except Exception as error:
        traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
    if place.recovers and scheduler is not None:
        with suppress(PipedecError):  # this rank is replaced, unless the run is not up (yet), or has failed
            if scheduler.failure() is None and scheduler.current_epoch() is not None:
                if status != LOST_ANOTHER:
                    scheduler.note_end(place.rank, message)
                return status
    try:
        is_first = scheduler is None or scheduler.abort(place.rank, message)
    except PipedecError:
        print(f"pipedec rank {place.rank}: could not notify the other ranks", file=sys.stderr, flush=True)
        is_first = True
    if is_first or place.local_rank == 0:
        print(f"pipedec: {of_rank(place.rank, message)}", file=sys.stderr, flush=True)
    return status
