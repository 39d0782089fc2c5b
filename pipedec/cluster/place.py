"""Compares where a rank runs with the plan: the host, and the kind and memory of its GPU. Loads nothing and sends nothing."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pipedec.cluster.address import RankPlace
from pipedec.cluster.network import is_this_host
from pipedec.config import ServerConfig
from pipedec.core import UserError
from pipedec.hardware import DEVICES
from pipedec.plan.placement import Placement
from pipedec.topology import rank_name

if TYPE_CHECKING:
    import torch

    from pipedec.plan.spec import PipelineSpec


def checked_host(place: RankPlace, places: Sequence[Placement] | None, servers: Sequence[ServerConfig]) -> str:
    """The name of this host: in the plan, else what the machine calls itself.

    Args:
        places: the planned place of every rank; None without a plan.
        servers: the hosts of the plan.

    Raises:
        UserError: the plan puts the rank on another host, or this host cannot be identified.
    """
    own = socket.gethostname()
    if places is None:
        return own
    planned = places[place.rank].host
    known = is_this_host(next(server for server in servers if server.host == planned))
    if known or (known is None and place.host == planned):
        return planned
    order = ", ".join(host for host, _ in groupby(one.host for one in places))
    mend = "correct its ssh destination" if place.host else f"start the hosts in the order {order}"
    raise UserError(
        f"{rank_name(place.rank)} was started on {own}, but the plan puts it on {planned}: {mend} (or, if {own} is {planned}, "
        "set its hostname in cluster.yaml)"
    )


def check_device(place: RankPlace, spec: PipelineSpec, device: torch.device) -> None:
    """Raises UserError if the GPU of this rank is of another kind than the plan's, or smaller."""
    if spec.places is None or device.type != "cuda":
        return
    import torch

    found = torch.cuda.get_device_properties(device)
    planned = spec.places[place.rank]
    if difference := DEVICES[planned.device].difference(found.name, found.total_memory):
        raise UserError(f"{rank_name(place.rank)} on {planned.host}: GPU #{planned.index} is {difference}: correct its devices")
