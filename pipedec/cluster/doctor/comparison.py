"""Findings that need more than one host or the cluster.yaml: differences between hosts, and from the file.

Judges collected answers; sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import mode

from pipedec.cluster.doctor.checks import DISTRIBUTE, LARGEST_OFFSET_US, NAMED, HostReport
from pipedec.cluster.doctor.findings import Finding, gb, note, ok, problem
from pipedec.cluster.doctor.gpus import TORCH_INDEX, gpu_list
from pipedec.cluster.doctor.links import MeasuredLink, link_findings
from pipedec.config import ClusterConfig, ServerConfig
from pipedec.hardware import DEVICES

MUST_AGREE = ("pipedec", "torch")
SHOULD_AGREE = ("python", "transformers")


@dataclass(frozen=True)
class HostAnswer:
    """The answers of one host."""

    report: HostReport | None = None  # None if the host did not answer
    failure: Finding | None = None  # why it did not; else None
    clock_offset_us: int = 0  # the host's clock minus this machine's, plus the delay of ssh
    unreachable: Mapping[str, str] = field(default_factory=dict)  # why it cannot connect to other hosts, by their names
    links: Mapping[str, MeasuredLink] | None = None  # to the hosts to which its ranks send, as measured; None if it has no ranks


def compare(
    config: ClusterConfig, answers: Mapping[str, HostAnswer], unplanned: Finding | None = None
) -> dict[str, dict[str, Finding]]:
    """All findings of every host by name, in the order of the table. A finding from the comparison replaces the host's own of the
    same name, unless that is a problem already. ``unplanned`` (see ``Survey``) goes to the first host's column.
    """
    reports = {host: answer.report for host, answer in answers.items() if answer.report is not None}
    table = {}
    for host, answer in answers.items():
        own = [ok("ssh", "answers"), *answer.report.findings] if answer.report is not None else [answer.failure]
        table[host] = {finding.name: finding for finding in own if finding is not None}
    for host, report in reports.items():
        offset_us = answers[host].clock_offset_us
        clock = ok("clock", f"{round(offset_us / 1e6, 1) + 0.0:+.1f} s")
        if abs(offset_us) > LARGEST_OFFSET_US:
            clock = note("clock", clock.value, "set the clocks of all hosts by NTP")
        others = [ok("other hosts", f"{len(reports) - 1} can be connected to")] if len(reports) > 1 else []
        if unreachable := answers[host].unreachable:
            reasons = "; ".join(f"{other}: {reason}" for other, reason in unreachable.items())
            mend = f"open all TCP ports of {', '.join(unreachable)} to this host, or set interface: to a network that joins them"
            others = [problem("other hosts", reasons, mend)]
        planned = {target: config.network.link(host, target) for target in answers[host].links or ()}
        for finding in (
            *_versions(report, reports),
            *_checkpoints(report, reports),
            clock,
            _devices(config.server(host), report),
            *others,
            *link_findings(planned, report.facts.network, answers[host].links),
            *_cuda(report, reports),
        ):
            if (known := table[host].get(finding.name)) is None or known.level != "problem":
                table[host][finding.name] = finding
    if unplanned is not None:
        next(iter(table.values()))[unplanned.name] = unplanned
    return table


def _versions(report: HostReport, reports: Mapping[str, HostReport]) -> list[Finding]:
    found = []
    for name in (*MUST_AGREE, *SHOULD_AGREE):
        version = report.facts.versions.get(name)
        usual = _usual(_public(one.facts.versions.get(name)) for one in reports.values())
        if version is None or usual is None or _public(version) == usual:
            continue
        value = f"{version}, but {usual} elsewhere"
        mend = f"{report.facts.python} -m pip install {name}=={usual}"
        found.append(problem(name, value, mend) if name in MUST_AGREE else note(name, value, mend))
    return found


def _cuda(report: HostReport, reports: Mapping[str, HostReport]) -> list[Finding]:
    """Builds of torch for different CUDA, and different versions of NCCL, cannot communicate."""
    gpus, all_gpus = report.facts.gpus, [one.facts.gpus for one in reports.values() if one.facts.gpus.usable]
    if not gpus.usable:
        return []
    found = []
    cuda, nccl = _usual(one.cuda for one in all_gpus), _usual(one.nccl for one in all_gpus)
    if gpus.cuda != cuda:
        torch, index = _public(report.facts.versions.get("torch")), f"{TORCH_INDEX}/cu{(cuda or '').replace('.', '')}"
        mend = f"{report.facts.python} -m pip install --force-reinstall torch=={torch} --index-url {index}"
        found.append(problem("NCCL", f"{gpus.nccl} for CUDA {gpus.cuda}, but CUDA {cuda} elsewhere", mend))
    elif gpus.nccl != nccl:
        mend = f"install torch and its packages as on the other hosts, whose NCCL is {nccl}"
        found.append(problem("NCCL", f"{gpus.nccl}, but {nccl} elsewhere", mend))
    if gpus.driver != (driver := _usual(one.driver for one in all_gpus)):
        found.append(note("NVIDIA driver", f"{gpus.driver}, but {driver} elsewhere"))
    return found


def _checkpoints(report: HostReport, reports: Mapping[str, HostReport]) -> list[Finding]:
    """Configuration and tokenizer must be the same everywhere, and so must every file of weights that several hosts have."""
    found = []
    for model, own in report.facts.checkpoints.items():
        if own.error is not None:
            continue
        everywhere = [one.facts.checkpoints[model] for one in reports.values() if model in one.facts.checkpoints]
        differ = [name for name, file in own.files.items() if file != _usual(one.files.get(name) for one in everywhere)]
        if own.config_digest != _usual(one.config_digest for one in everywhere if one.error is None):
            differ.insert(0, "configuration or tokenizer")
        if differ:
            value = f"another model than elsewhere ({gb(own.weight_bytes)}): {', '.join(differ[:NAMED])} differ"
            found.append(problem(model, value, f"remove these files from {model} on this host, then {DISTRIBUTE}"))
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
    usable, expected = report.facts.gpus.usable, ", ".join(f"{count} {kind}" for kind, count in server.devices.items())
    mend = f"correct devices: of {server.host} in the file"
    if len(usable) < len(kinds):
        value = f"{expected} in the file, but torch can use {gpu_list(usable)}"
        return problem("devices", value, f"see GPUs above, or {mend}")
    for index, (kind, gpu) in enumerate(zip(kinds, usable, strict=False)):
        if difference := DEVICES[kind].difference(gpu.name, gpu.memory_bytes):
            return problem("devices", f"GPU #{index} is {difference}", f"{mend}: GPUs count in the order of their PCI bus")
    return ok("devices", expected)
