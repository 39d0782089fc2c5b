"""Facts about this host for a report of a fault: versions, machine, directories and variables. Judges nothing."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from huggingface_hub import constants

from pipedec import __version__
from pipedec.cluster.doctor.findings import gib
from pipedec.cluster.doctor.gpus import gpu_facts_apart, gpu_findings
from pipedec.cluster.doctor.host import redis_server
from pipedec.cluster.network import installed_version
from pipedec.config.environment import (
    container,
    default_target,
    instruction_sets,
    processor_name,
    relevant_variables,
    usable_cpus,
    usable_memory,
)
from pipedec.core.errors import PipedecError
from pipedec.directories import cache_directory, state_directory
from pipedec.gguf import located

PACKAGES = (
    "pipedec-models", "torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "numpy", "llguidance",
    "flash-attn", "click",
)  # fmt: skip


def environment() -> dict[str, Mapping[str, str]]:
    """The facts by section and name. Takes some seconds, as a process of its own imports torch, and a minute if that hangs."""
    gpus = gpu_facts_apart()
    memory = psutil.virtual_memory()
    target = default_target()[0]
    return {
        "versions": {
            "pipedec": __version__,
            "python": f"{platform.python_version()} ({sys.executable})",
            **{name: installed_version(name) or "not installed" for name in PACKAGES},
            "CUDA": f"{gpus.cuda or 'none'} (of torch)",
            "Redis server": redis_server(is_needed=True).value,
        },
        "machine": {
            "system": f"{_distribution()}, {platform.platform()}",
            "container": container() or "none",
            "user": f"{os.getuid()}, group {os.getgid()}",
            "processor": processor_name(),
            "instructions": instruction_sets() or "not listed",
            "torch computes with": gpus.cpu_capability or gpus.error or "unknown",
            "CPUs": f"{usable_cpus()} usable of {os.cpu_count()}",
            "memory": f"{gib(usable_memory())} usable of {gib(memory.total)}, {gib(memory.available)} available",
            **{finding.name: finding.value for finding in gpu_findings(gpus)},
        },
        "directories": {
            "state": _or_reason(state_directory),
            "cache": _or_reason(cache_directory),
            "Hugging Face": constants.HF_HOME,
            "temporary files": tempfile.gettempdir(),
        },
        "models": {"default target": f"{target} ({_or_reason(lambda: located(target))})"},
        "variables": relevant_variables(),
    }


def _or_reason(found: Callable[[], Path]) -> str:
    """The path, or why there is none."""
    try:
        return str(found())
    except PipedecError as error:
        return str(error)


def _distribution() -> str:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown system")
    return "unknown system"
