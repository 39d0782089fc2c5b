"""Compares where a rank runs with the plan: the host, and the kind and memory of its GPU. Loads nothing and asks nobody."""

from __future__ import annotations

import re
import socket
from itertools import groupby

import torch

from pipedec.cluster.address import RankPlace
from pipedec.cluster.network import is_this_host
from pipedec.core import UserError
from pipedec.engine.spec import PipelineSpec
from pipedec.hardware import DEVICES, GIGA
from pipedec.topology import rank_name

_SMALLEST_SHARE = 0.95  # of the planned memory: drivers keep some of it


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
    if difference := device_difference(planned.device, found.name, found.total_memory):
        raise UserError(f"{rank_name(place.rank)} on {planned.host}: GPU #{planned.index} is {difference}: correct its devices")


def device_difference(planned: str, name: str, memory_bytes: int) -> str | None:
    """How a GPU differs from the planned kind, as the end of a sentence; None if it does not.

    Args:
        planned: of ``DEVICES``.
        name, memory_bytes: of the GPU, as its driver reports them.
    """
    kind = DEVICES[planned]
    if re.search(kind.reported, name) is None:
        return f"a {name}, but the plan has a {planned} there"
    if memory_bytes < _SMALLEST_SHARE * kind.memory_bytes:
        return f"a {name} with {memory_bytes / GIGA:.1f} GB, but the plan counts on {kind.memory_gb:g} GB"
    return None
