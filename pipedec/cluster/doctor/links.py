"""The speed of the network between two hosts, measured as ranks measure it when they meet, and its finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipedec.cluster.doctor.findings import Finding, note, ok
from pipedec.hardware import LinkSpec
from pipedec.messages.run import LinkSpeed

if TYPE_CHECKING:
    from pipedec.transport.rendezvous import Store

MEASURE_SECONDS = 20.0  # longest wait for the other host to join, and for each of its messages
TRIES = 3  # the best counts: a busy host disturbs some
SLOWEST_SHARE = 0.8  # share of the configured bandwidth; headers and pauses take the rest
SLOWEST_TIMES = 2.0  # multiple of the configured latency
SPARE_US = 100.0  # more latency than that, for the interpreter on a busy host
LONG_US = 2000.0  # from this latency on a link is no longer within a site
_IN_FILE = "in the file, or in its links: for this pair of hosts, so that the plan is right"


Measured = LinkSpeed | str  # or why a link could not be measured


def measure(store: Store, rank: int, interface: str) -> LinkSpeed:
    """Measure the link to the other host, which calls this at the same time with the same ``store`` and the other ``rank``, 0 or
    1. Takes less than a second, and some seconds over a long link. Raises RankLost.
    """
    import torch

    from pipedec.transport.rendezvous import Rendezvous
    from pipedec.transport.torch_distributed import TorchTransport

    transport = TorchTransport("gloo", rank, 1, torch.float32, torch.device("cpu"))
    try:
        transport.join(Rendezvous(rank, 2, store, MEASURE_SECONDS, interface))
        speeds = [transport.measured_link() for _ in range(TRIES)]
    finally:
        transport.close()
    return LinkSpeed(min(one.latency_seconds for one in speeds), max(one.bytes_per_second for one in speeds))


def link_findings(
    given: Mapping[str, LinkSpec], links: Mapping[str, Measured] | None, negotiated: str = "", starts_slowly: bool = False
) -> list[Finding]:
    """The row about the ``links`` from a host by target, as they are ``given``; empty if it has no ranks (None).

    Args:
        negotiated: the host's interface and its speed, like ``eth0 has negotiated 1 Gbit/s``, if known.
        starts_slowly: whether TCP starts slowly again after every pause.
    """
    if not links:
        return [] if links is None else [ok("links", "not measured: no rank here sends to another host")]
    gbps = {host: 8e-9 * link.bytes_per_second for host, link in links.items() if isinstance(link, LinkSpeed)}
    latency_us = {host: 1e6 * link.latency_seconds for host, link in links.items() if isinstance(link, LinkSpeed)}
    speeds = {host: f"{_rounded(rate)} Gbit/s, {_duration(latency_us[host])}" for host, rate in gbps.items()}
    value = "; ".join(f"to {host}: {speeds.get(host, link)}" for host, link in links.items())
    mends = []
    if len(gbps) < len(links):
        mends.append("run the doctor again, and see that nothing between the hosts limits connections")
    rates = [(measured, 8 * given[host].gb_per_s) for host, measured in gbps.items()]
    if slow := [(measured, wanted) for measured, wanted in rates if measured < SLOWEST_SHARE * wanted]:
        slowest, wanted = min(slow)
        mends.append(
            f"bandwidth is given as {wanted:g} Gbit/s{negotiated and f', and {negotiated}'}: see cable, switch and what else "
            f"uses the link, choose another interface:, or set network: bandwidth_gbps: {_rounded(slowest)} {_IN_FILE}"
        )
    if any(latency > LONG_US for latency in latency_us.values()):
        value += "; several timesteps will be in flight"
        if starts_slowly:
            mends.append("sysctl -w net.ipv4.tcp_slow_start_after_idle=0, so that TCP does not start slowly after every pause")
    latencies = [(measured, given[host].latency_us) for host, measured in latency_us.items()]
    if late := [(measured, wanted) for measured, wanted in latencies if measured > SLOWEST_TIMES * wanted + SPARE_US]:
        latest, wanted = max(late)
        mends.append(
            f"the latency is given as {wanted:g} µs: see what lies between the hosts, or set network: "
            f"latency_us: {_rounded(latest)} {_IN_FILE}"
        )
    return [note("links", value, "; ".join(mends)) if mends else ok("links", value)]


def _duration(microseconds: float) -> str:
    return f"{microseconds:.0f} µs" if microseconds < 1000 else f"{microseconds / 1000:.3g} ms"


def _rounded(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"
