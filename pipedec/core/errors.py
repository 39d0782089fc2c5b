"""The errors that every layer may raise."""

from __future__ import annotations


class PipedecError(Exception):
    """An error that ends a command with one line and a non-zero exit, never with a traceback."""


class UserError(PipedecError):
    """A mistake of the user. The message names the mistake and its remedy in one line."""


class BadValue(UserError, ValueError):
    """A value that is not allowed, as ``KEY: must be …``.

    Also a ValueError, so that msgspec catches it and the path of a nested key can be put in front.
    """


class RequestFailed(PipedecError):
    """A rank cannot answer a request, which has ended; the message names the rank. The run and its other requests go on."""


class QueueFull(UserError):
    """The run has as many unfinished requests as it allows: the same request may be accepted later."""


class RankLost(PipedecError):
    """A rank died or stopped answering; the message names it."""


class SchedulerLost(PipedecError):
    """Redis refused the connection, refused the password, or died."""


class SchedulerBusy(SchedulerLost):
    """Redis executes no commands at present: its memory is full, it is loading its data, or it is busy."""


class OutOfDescriptors(SchedulerBusy):
    """This process may open no further connection to Redis: nothing is wrong with the run."""


class SchedulerInterrupted(SchedulerLost):
    """The connection to Redis broke during a command, which may have been executed: the run continues in its next epoch."""


class EpochEnded(PipedecError):
    """The run has left the caller's epoch: a rank or Redis was lost, and all ranks have to meet again."""
