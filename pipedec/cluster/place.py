"""Compares where a rank runs with the plan: the host, and the kind and memory of its GPU. Loads nothing and asks nobody."""

from __future__ import annotations

import socket
from itertools import groupby

import torch

from pipedec.cluster.address import RankPlace
from pipedec.cluster.network import is_this_host
from pipedec.core import UserError
from pipedec.engine.spec import PipelineSpec
from pipedec.hardware import DEVICES
from pipedec.topology import rank_name


def checked_host(place: RankPlace, spec: PipelineSpec) -> str:
    """The name of this host: in the plan, else what the machine calls itself.

    Raises:
        UserError: the plan puts the rank on another host, or nothing tells that it is this one.
    """
    own = socket.gethostname()
    if spec.places is None:
        return own
    planned = spec.places[place.rank].host
    server = next(server for server in spec.servers if server.host == planned)
    known = is_this_host(server)
    if known or (known is None and place.host == planned):
        return planned
    raise UserError(
        f"{rank_name(place.rank)} was started on {own}, but the plan puts it on {planned}: start the hosts in the order "
        f"{_order_of_hosts(spec)} (or, if {own} is {planned}, set its hostname in cluster.yaml)"
    )


def _order_of_hosts(spec: PipelineSpec) -> str:
    assert spec.places is not None
    return ", ".join(host for host, _ in groupby(place.host for place in spec.places))


def check_device(place: RankPlace, spec: PipelineSpec, device: torch.device) -> None:
    """Raises UserError if the GPU of this rank is of another kind than the plan's, or smaller."""
    if spec.places is None or device.type != "cuda":
        return
    found = torch.cuda.get_device_properties(device)
    planned = spec.places[place.rank]
    if difference := DEVICES[planned.device].difference(found.name, found.total_memory):
        raise UserError(f"{rank_name(place.rank)} on {planned.host}: GPU #{planned.index} is {difference}: correct its devices")
