"""Findings that need more than one host or the cluster.yaml: differences between hosts, and from the file.

Judges collected answers; sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import mode

from pipedec.cluster.doctor.findings import Finding, Level, note, ok, problem
from pipedec.cluster.doctor.gpus import TORCH_INDEX, gpu_list
from pipedec.cluster.doctor.host import DISTRIBUTE, LARGEST_OFFSET_US, NAMED, HostReport
from pipedec.cluster.doctor.links import Measured, link_findings
from pipedec.cluster.doctor.pairs import GpuPair, pair_findings
from pipedec.config import ClusterConfig, ServerConfig
from pipedec.hardware import DEVICES

# Versions that should be equal on all hosts, how bad it is if they are not, and what to do.
_PIP = "{python} -m pip install {name}=={usual}"
_SAME_TORCH = f"install torch and its packages as on the other hosts, from {TORCH_INDEX}: other builds cannot communicate"
AGREE: Mapping[str, tuple[Level, str | None]] = {
    "pipedec": ("problem", _PIP), "torch": ("problem", _PIP), "CUDA": ("problem", _SAME_TORCH), "NCCL": ("problem", _SAME_TORCH),
    "python": ("note", _PIP), "transformers": ("note", _PIP), "NVIDIA driver": ("note", None),
}  # fmt: skip


@dataclass(frozen=True)
class HostAnswer:
    """The answers of one host."""

    report: HostReport
    clock_offset_us: int = 0  # the host's clock minus this machine's, plus the delay of ssh
    unreachable: Mapping[str, str] = field(default_factory=dict)  # why it cannot connect to other hosts, by their names
    links: Mapping[str, Measured] | None = None  # measured, to the hosts to which its ranks send; None without ranks
    pairs: Mapping[GpuPair, str | None] = field(default_factory=dict)  # see ``pair_findings``


def compare(
    config: ClusterConfig, answers: Mapping[str, HostAnswer | Finding], unplanned: Finding | None = None
) -> dict[str, dict[str, Finding]]:
    """All findings of every host by name, in the order of the table; a host without an answer has the finding why. A finding from
    the comparison replaces the host's own of the same name, unless that is a problem already. ``unplanned`` (see ``Survey``) goes
    to the first host's column.
    """
    answered = {host: answer for host, answer in answers.items() if isinstance(answer, HostAnswer)}
    reports = {host: answer.report for host, answer in answered.items()}
    table = {}
    for host, answer in answers.items():
        own = [answer] if isinstance(answer, Finding) else [ok("ssh", "answers"), *answer.report.findings]
        table[host] = {finding.name: finding for finding in own}
    for host, answer in answered.items():
        report = answer.report
        offset_us = answer.clock_offset_us
        clock = ok("clock", f"{round(offset_us / 1e6, 1) + 0.0:+.1f} s")
        if abs(offset_us) > LARGEST_OFFSET_US:
            clock = note("clock", clock.value, "set the clocks of all hosts by NTP")
        others = [ok("other hosts", f"{len(reports) - 1} can be connected to")] if len(reports) > 1 else []
        if unreachable := answer.unreachable:
            reasons = "; ".join(f"{other}: {reason}" for other, reason in unreachable.items())
            mend = f"open all TCP ports of {', '.join(unreachable)} to this host, or set interface: to a network that joins them"
            others = [problem("other hosts", reasons, mend)]
        planned = {target: config.network.link(host, target) for target in answer.links or ()}
        for finding in (
            *_versions(report, reports),
            *_checkpoints(report, reports),
            clock,
            _devices(config.server(host), report),
            *others,
            *pair_findings(answer.pairs),
            *link_findings(planned, answer.links, report.negotiated, report.starts_slowly),
        ):
            if (known := table[host].get(finding.name)) is None or known.level != "problem":
                table[host][finding.name] = finding
    if unplanned is not None:
        next(iter(table.values()))[unplanned.name] = unplanned
    return table


def _versions(report: HostReport, reports: Mapping[str, HostReport]) -> list[Finding]:
    found = []
    for name, (level, mend) in AGREE.items():
        version = report.versions.get(name)
        usual = _usual(_public(one.versions.get(name)) for one in reports.values())
        if version is not None and _public(version) != usual:
            done = mend and mend.format(python=report.python, name=name, usual=usual)
            found.append(Finding(name, level, f"{version}, but {usual} elsewhere", done))
    return found


def _checkpoints(report: HostReport, reports: Mapping[str, HostReport]) -> list[Finding]:
    """Configuration and tokenizer must be the same everywhere, and so must every file of weights that several hosts have."""
    found = []
    for model, own in report.checkpoints.items():
        everywhere = [one.checkpoints[model] for one in reports.values() if model in one.checkpoints]
        if differ := [name for name, digest in own.items() if digest != _usual(one.get(name) for one in everywhere)]:
            value = f"another model than elsewhere: {', '.join(differ[:NAMED])} differ"
            found.append(problem(model, value, f"{DISTRIBUTE[:-1]} --checksum` replaces these files"))
    return found


def _usual(values: Iterable[str | None]) -> str | None:
    """The value that most hosts have; that of the first host if none is more frequent."""
    known = [value for value in values if value is not None]
    return mode(known) if known else None


def _public(version: str | None) -> str | None:
    """Without the build's suffix: 2.13.0+cpu and 2.13.0+cu128 can communicate."""
    return version.partition("+")[0] if version else None


def _devices(server: ServerConfig, report: HostReport) -> Finding:
    kinds = [kind for kind, count in server.devices.items() for _ in range(count) if DEVICES[kind].is_gpu]
    usable, expected = report.gpus, ", ".join(f"{count} {kind}" for kind, count in server.devices.items())
    mend = f"correct devices: of {server.host} in the file"
    if len(usable) < len(kinds):
        value = f"{expected} in the file, but torch can use {gpu_list(usable)}"
        return problem("devices", value, f"see GPUs above, or {mend}")
    for index, (kind, gpu) in enumerate(zip(kinds, usable, strict=False)):
        if difference := DEVICES[kind].difference(gpu.name, gpu.memory_bytes):
            return problem("devices", f"GPU #{index} is {difference}", f"{mend}: GPUs count in the order of their PCI bus")
    return ok("devices", expected)
