"""The GPUs of this host: what the driver's own program and torch tell of them. Judges nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

NVIDIA_SMI_SECONDS = 20.0
MIB = 1 << 20
HELD_DOWN = 0x2  # by application clocks that were set; bits of NVML's reasons for lower clocks
TOO_HOT = 0x20 | 0x40  # software's and hardware's slowdown by temperature
TOO_LITTLE_POWER = 0x8 | 0x80  # hardware's slowdown, which has other causes too, and its power brake

_STATE = (
    "memory.free", "power.limit", "power.default_limit", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "persistence_mode",
    "compute_mode",
)  # fmt: skip
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the name in newer drivers, and in older ones


@dataclass(frozen=True)
class Holder:
    """A process that computes on a GPU; ``num_bytes`` is None where the driver does not tell."""

    pid: int
    program: str
    num_bytes: int | None


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU that may differ from one day to the next; None where the driver does not report it.

    Attributes:
        power_watts, default_power_watts: the limit that is set, and the one that it left the factory with.
        sm_mhz, max_sm_mhz, max_memory_mhz: clock of the multiprocessors now, its maximum and that of the memory.
        compute_mode: ``Default``, ``Exclusive_Process`` or ``Prohibited``.
        slowdown: bits of NVML that say why clocks are low.
        holders: processes that compute on it, as far as this host sees them.
    """

    free_bytes: int | None = None
    power_watts: float | None = None
    default_power_watts: float | None = None
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    max_memory_mhz: int | None = None
    is_persistent: bool | None = None
    compute_mode: str | None = None
    slowdown: int = 0
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """As its driver names it."""

    name: str
    memory_bytes: int
    state: GpuState = GpuState()


@dataclass(frozen=True)
class GpuFacts:
    """GPUs in the order of their PCI bus.

    Attributes:
        driver: version of the NVIDIA driver; None without one.
        installed: those the driver lists.
        usable: those torch can use.
        cuda: version of CUDA that torch was built for; None for a build without CUDA.
        error: why torch could not say.
        nccl: version of NCCL in torch; None without it.
        driver_error: why the driver's program is there, but lists nothing.
    """

    driver: str | None
    installed: tuple[Gpu, ...]
    usable: tuple[Gpu, ...]
    cuda: str | None
    error: str | None = None
    nccl: str | None = None
    driver_error: str | None = None


def gpu_facts() -> GpuFacts:
    """Ask the driver and torch. Takes as long as importing torch; no GPU is used for that."""
    driver, listed, driver_error = _listed()
    installed, cuda, nccl = tuple(listed.values()), None, None
    try:
        import torch

        cuda = torch.version.cuda
        nccl = _nccl_version() if cuda else None
        usable = _usable(listed) if cuda and (installed or torch.cuda.is_available()) else ()
        return GpuFacts(driver, installed or usable, usable, cuda, None, nccl, driver_error)
    except Exception as error:  # a torch that cannot be imported, a driver that is too old
        return GpuFacts(driver, installed, (), cuda, first_line(error), nccl, driver_error)


def first_line(error: Exception) -> str:
    """An error's message, in one line of 200 characters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _usable(listed: dict[str, Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that torch can use. Passes on torch's exceptions when the driver does not suit it.

    Args:
        listed: those of the driver, by their UUID.
    """
    import torch

    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    torch.cuda.init()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    places = list(listed.values()) if len(listed) == len(found) else [None] * len(found)
    known = [listed.get(f"GPU-{getattr(one, 'uuid', None)}", place) for one, place in zip(found, places, strict=True)]
    return tuple(
        Gpu(one.name, one.total_memory, same.state if same else GpuState()) for one, same in zip(found, known, strict=True)
    )


def _nccl_version() -> str | None:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except AttributeError:  # a build without NCCL
        return None


def _listed() -> tuple[str | None, dict[str, Gpu], str | None]:
    """The version of the driver, the GPUs that it lists by UUID (or position), and why it lists none."""
    try:
        rows = _asked("gpu", "driver_version", "name", "memory.total")
        gpus = [Gpu(name, int(float(memory)) * MIB) for _, name, memory in rows]
        driver = rows[0][0]
    except subprocess.CalledProcessError as error:
        said = f"{error.stdout}\n{error.stderr}".strip().splitlines()
        return None, {}, said[0][:200] if said else f"nvidia-smi ended with exit status {error.returncode}"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, {}, None
    names, states = _states(len(gpus))
    return driver, {name: replace(gpu, state=state) for name, gpu, state in zip(names, gpus, states, strict=True)}, None


def _states(count: int) -> tuple[list[str], list[GpuState]]:
    """UUID and state of every GPU. Fields that a driver does not know leave others as they are."""
    rows = _table("gpu", count, "uuid", *_STATE)
    reasons = next((found for name in _REASONS if (found := _table("gpu", count, name))), None)
    if rows is None:
        return [str(index) for index in range(count)], [GpuState()] * count
    states, holders = [], _holders()
    for index, (uuid, free, power, default_power, sm, max_sm, max_memory, persistence, mode) in enumerate(rows):
        states.append(
            GpuState(
                _bytes(free), _number(power), _number(default_power), _whole(sm), _whole(max_sm), _whole(max_memory),
                {"Enabled": True, "Disabled": False}.get(persistence), None if mode.startswith("[") else mode,
                _bits(reasons[index][0]) if reasons else 0, tuple(holder for gpu, holder in holders if gpu == uuid),
            )
        )  # fmt: skip
    return [row[0] for row in rows], states


def _holders() -> list[tuple[str, Holder]]:
    """The UUID of a GPU and a process on it, for every such process."""
    found = []
    try:
        for uuid, pid, *program, used in _asked("compute-apps", "gpu_uuid", "pid", "process_name", "used_memory"):
            found.append((uuid, Holder(int(pid), os.path.basename(", ".join(program)), _bytes(used))))
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return found


def _table(kind: str, count: int, *columns: str) -> list[list[str]] | None:
    """The answer to a question if it has the right number of rows and columns, else None."""
    try:
        rows = _asked(kind, *columns)
    except (OSError, subprocess.SubprocessError):
        return None
    return rows if len(rows) == count and all(len(row) == len(columns) for row in rows) else None


def _asked(kind: str, *columns: str) -> list[list[str]]:
    """The rows that nvidia-smi prints about GPUs or processes."""
    query = ["nvidia-smi", f"--query-{kind}={','.join(columns)}", "--format=csv,noheader,nounits"]
    ended = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True)
    return [[part.strip() for part in line.split(",")] for line in ended.stdout.splitlines() if line.strip()]


def _number(text: str) -> float | None:
    """None for what nvidia-smi writes in brackets: not available, not supported."""
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    return None if (number := _number(text)) is None else round(number)


def _bytes(text: str) -> int | None:
    return None if (number := _number(text)) is None else round(number) * MIB


def _bits(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def usual_state(gpus: Sequence[Gpu]) -> str:
    """Power limits and highest clocks, as far as they are known: ``350 W, SM to 2100 MHz, memory to 9751 MHz``."""
    wanted = (("{:.0f} W", "power_watts"), ("SM to {} MHz", "max_sm_mhz"), ("memory to {} MHz", "max_memory_mhz"))
    parts = []
    for text, name in wanted:
        values = {value for gpu in gpus if (value := getattr(gpu.state, name)) is not None}
        parts += [text.format(value) for value in sorted(values)]
    return ", ".join(parts)
