"""Flags of the commands that can measure a cluster that is running, instead of starting one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import click
from click.core import ParameterSource

from pipedec.cli.options import ClusterFlags
from pipedec.client.running import Running
from pipedec.cluster.state import find_run
from pipedec.core import UserError
from pipedec.flags import Help, options_of


@dataclass(frozen=True)
class RunningFlags(ClusterFlags):
    """Which running cluster to use, if any."""

    running: Annotated[
        bool,
        Help("Use the running cluster that --redis and --run name, or the one that pipedec up started here; either implies it."),
    ] = False

    @property
    def are_given(self) -> bool:
        return self.running or self.redis is not None or self.run is not None

    def connect(self) -> Running:
        """Raises UserError if no such cluster is running."""
        found = find_run(self.redis, self.run)
        return Running.of(found.connect(), found.run_id)


running_options = options_of(RunningFlags, "place")


def refuse_flags(names: Iterable[str], reason: str) -> None:
    """Raise UserError if the current command was called with one of these parameters; ``reason`` says why and what to do."""
    context, wanted = click.get_current_context(), set(names)
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in wanted and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise UserError(f"{', '.join(given)}: {reason}")
