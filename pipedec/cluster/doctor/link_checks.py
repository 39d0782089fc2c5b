"""Compares measured links with ``network:`` of the cluster.yaml. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping

from pipedec.cluster.doctor.facts import NetworkFacts
from pipedec.cluster.doctor.findings import Finding, note, ok
from pipedec.cluster.doctor.links import MeasuredLink
from pipedec.config import NetworkConfig

NAME = "links"
SLOWEST_SHARE = 0.8  # of the given bandwidth: headers and pauses take some
SLOWEST_TIMES = 2.0  # the given latency, plus
SPARE_US = 100.0  # what the interpreter adds to it on a busy host


def link_findings(network: NetworkConfig, facts: NetworkFacts, links: Mapping[str, MeasuredLink] | None) -> list[Finding]:
    """The row about the links of a host; empty without ranks.

    Args:
        facts: of the host from which it was measured.
        links: by the host to which; None without ranks.
    """
    if not links:
        return [] if links is None else [ok(NAME, "not measured: no rank here sends to another host")]
    value = "; ".join(f"to {host}: {_shown(link)}" for host, link in links.items())
    done = [link for link in links.values() if link.error is None]
    mends = []
    if len(done) < len(links):
        mends.append("run the doctor again, and see that nothing between the hosts limits connections")
    if done and (slowest := min(link.gbps for link in done)) < SLOWEST_SHARE * network.bandwidth_gbps:
        mends.append(_bandwidth_mend(network, facts, slowest))
    if done and (latest := max(link.latency_us for link in done)) > SLOWEST_TIMES * network.latency_us + SPARE_US:
        mends.append(
            f"the latency is given as {network.latency_us:g} µs: see what lies between the hosts, or set network: "
            f"latency_us: {_rounded(latest)} in the file, so that the plan is right"
        )
    return [note(NAME, value, "; ".join(mends)) if mends else ok(NAME, value)]


def _shown(link: MeasuredLink) -> str:
    return link.error or f"{_rounded(link.gbps)} Gbit/s, {link.latency_us:.0f} µs"


def _bandwidth_mend(network: NetworkConfig, facts: NetworkFacts, measured: float) -> str:
    speeds = {name: mbps / 1000 for name, mbps in facts.speeds_mbps.items() if name in facts.interfaces}
    own, fastest = speeds.get(facts.interface or "", 0), max(speeds, key=lambda name: speeds[name], default="")
    given = f"bandwidth is given as {network.bandwidth_gbps:g} Gbit/s"
    correct = f"set network: bandwidth_gbps: {_rounded(measured)} in the file, so that the plan is right"
    if 0 < own < network.bandwidth_gbps:
        given += f", and {facts.interface} has negotiated {own:g}"
        if speeds[fastest] > own:
            return f"{given}: set interface: {fastest} of this host in the file ({speeds[fastest]:g} Gbit/s)"
        return f"{given}: see cable and switch, or {correct}"
    return f"{given}: see what else uses the link, on both hosts, or {correct}"


def _rounded(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"
