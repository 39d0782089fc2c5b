"""The GPUs of a host: facts from ``nvidia-smi`` and torch, and findings about them in view of the ranks' needs."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipedec.cluster.doctor.findings import Finding, first_line, gib, note, ok, problem
from pipedec.cluster.doctor.needs import GpuNeed

NVIDIA_SMI_SECONDS = 20.0
MIB = 1 << 20
# Bits of NVML's reasons for lower clocks:
HELD_DOWN = 0x2  # application clocks that were set
TOO_HOT = 0x20 | 0x40  # software's and hardware's slowdown by temperature
TOO_LITTLE_POWER = 0x8 | 0x80  # hardware's slowdown, which has other causes too, and its power brake
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # by the major version of CUDA
TORCH_INDEX = "https://download.pytorch.org/whl"
MOSTLY_FREE = 0.9  # of the memory; a desktop may use the rest
WATTS = 1.0  # rounding of power limits

_STATE = (
    "memory.free", "power.limit", "power.default_limit", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "persistence_mode",
    "compute_mode",
)  # fmt: skip
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the name in newer drivers, and in older ones
_SLOWDOWNS = (
    (TOO_HOT, "slowed down by heat", "cool them: see their fans, dust and the air around them"),
    (TOO_LITTLE_POWER, "slowed down by hardware", "see the power supply, its cables to the GPU, and the temperature"),
    (HELD_DOWN, "set for applications", "sudo nvidia-smi -i {} -rac"),
)


@dataclass(frozen=True)
class Holder:
    """A process that computes on a GPU; ``num_bytes`` is None where the driver does not report it."""

    pid: int
    program: str
    num_bytes: int | None


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU, which may change; None where the driver does not report it."""

    free_bytes: int | None = None
    power_watts: float | None = None  # the present limit
    default_power_watts: float | None = None  # the manufacturer's limit
    sm_mhz: int | None = None  # clock of the multiprocessors now
    max_sm_mhz: int | None = None  # their highest clock
    max_memory_mhz: int | None = None  # highest clock of the memory
    is_persistent: bool | None = None
    compute_mode: str | None = None  # ``Default``, ``Exclusive_Process`` or ``Prohibited``
    slowdown: int = 0  # NVML's reasons for lower clocks, as bits
    holders: tuple[Holder, ...] = ()  # processes that compute on it, as far as they are visible here


@dataclass(frozen=True)
class Gpu:
    """A GPU with its driver's name for it."""

    name: str
    memory_bytes: int
    state: GpuState = GpuState()


@dataclass(frozen=True)
class GpuFacts:
    """GPUs in the order of their PCI bus."""

    driver: str | None  # version of the NVIDIA driver; None without one
    installed: tuple[Gpu, ...]  # as the driver lists them
    usable: tuple[Gpu, ...]  # by torch
    cuda: str | None  # version of CUDA that torch was built for; None for a build without CUDA
    error: str | None = None  # why torch cannot use the GPUs; None if it can
    nccl: str | None = None  # version of NCCL in torch; None without it
    driver_error: str | None = None  # why ``nvidia-smi`` lists no GPUs, if it is installed


def gpu_facts() -> GpuFacts:
    """The facts from the driver and torch, without using a GPU. Takes as long as importing torch."""
    driver, listed, driver_error = _listed()
    installed, usable, cuda, nccl = tuple(listed.values()), list[Gpu](), None, None
    try:
        import torch

        if (cuda := torch.version.cuda) is not None:
            with suppress(AttributeError):  # a build without NCCL
                nccl = ".".join(map(str, torch.cuda.nccl.version()))
        if cuda and (installed or torch.cuda.is_available()):
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            torch.cuda.init()
            found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            places = installed if len(installed) == len(found) else [None] * len(found)
            for one, place in zip(found, places, strict=True):
                same = listed.get(f"GPU-{getattr(one, 'uuid', None)}", place)
                usable.append(Gpu(one.name, one.total_memory, same.state if same else GpuState()))
        return GpuFacts(driver, installed or tuple(usable), tuple(usable), cuda, None, nccl, driver_error)
    except Exception as error:  # a torch that cannot be imported, a driver that is too old
        return GpuFacts(driver, installed, (), cuda, first_line(error), nccl, driver_error)


def _listed() -> tuple[str | None, dict[str, Gpu], str | None]:
    """The version of the driver, the GPUs by UUID (or position), and the error if there are none."""
    try:
        rows = _asked("gpu", "driver_version", "name", "memory.total")
        gpus = [Gpu(name, int(float(memory)) * MIB) for _, name, memory in rows]
        driver = rows[0][0]
    except subprocess.CalledProcessError as error:
        lines = f"{error.stdout}\n{error.stderr}".strip().splitlines()
        return None, {}, lines[0][:200] if lines else f"nvidia-smi ended with exit status {error.returncode}"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, {}, None
    states = _states(len(gpus)) or [(str(index), GpuState()) for index in range(len(gpus))]
    return driver, {uuid: replace(gpu, state=state) for gpu, (uuid, state) in zip(gpus, states, strict=True)}, None


def _states(count: int) -> list[tuple[str, GpuState]]:
    """UUID and state of every GPU; empty if the driver does not know a field."""
    if not (rows := _table("gpu", count, "uuid", *_STATE)):
        return []
    reasons = next((found for name in _REASONS if (found := _table("gpu", count, name))), None)
    holders = []
    try:
        for uuid, pid, *program, used in _asked("compute-apps", "gpu_uuid", "pid", "process_name", "used_memory"):
            holders.append((uuid, Holder(int(pid), os.path.basename(", ".join(program)), _whole(used, MIB))))
    except (OSError, subprocess.SubprocessError, ValueError):
        holders = []
    states = []
    for index, (uuid, free, power, default_power, sm, max_sm, max_memory, persistence, mode) in enumerate(rows):
        bits = reasons[index][0] if reasons else ""
        state = GpuState(
            _whole(free, MIB), _number(power), _number(default_power), _whole(sm), _whole(max_sm), _whole(max_memory),
            {"Enabled": True, "Disabled": False}.get(persistence), None if mode.startswith("[") else mode,
            int(bits, 16) if bits.startswith("0x") else 0, tuple(holder for gpu, holder in holders if gpu == uuid),
        )  # fmt: skip
        states.append((uuid, state))
    return states


def _table(kind: str, count: int, *columns: str) -> list[list[str]] | None:
    """The rows of ``_asked`` if rows and columns are as many as expected, else None."""
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


def _whole(text: str, unit: int = 1) -> int | None:
    return None if (number := _number(text)) is None else round(number) * unit


def gpu_findings(gpus: GpuFacts, needs: Sequence[GpuNeed] = ()) -> list[Finding]:
    """The rows about GPUs, in view of what the ranks need."""
    found = [_usable(gpus), _driver(gpus)]
    every = gpus.usable or gpus.installed
    if gpus.cuda is not None and every:
        found.append(ok("NCCL", gpus.nccl) if gpus.nccl else note("NCCL", "none in this build of torch"))
    by_index = {need.index: need for need in needs}
    states = [(index, gpu.state) for index, gpu in enumerate(every)]
    persistence = None
    if without := [index for index, state in states if state.is_persistent is False]:
        value = f"off for GPU {_numbers(without)}: the driver starts again for every first process"
        persistence = note("GPU persistence", value, "sudo nvidia-smi -pm 1")
    more = (_memory(every, by_index), _power(every), _clocks(states), persistence, _compute_mode(states, by_index))
    return found + [finding for finding in more if finding is not None]


def gpu_list(gpus: Iterable[Gpu]) -> str:
    """Like ``7 × NVIDIA GeForce RTX 3090, 24.0 GiB``."""
    counts = Counter((gpu.name, gib(gpu.memory_bytes)) for gpu in gpus)
    return "; ".join(f"{count} × {name}, {memory}" for (name, memory), count in counts.items()) or "none"


def _usable(gpus: GpuFacts) -> Finding:
    name, installed, usable = "GPUs", gpus.installed, gpus.usable
    if gpus.error and not gpus.installed:
        return problem(name, gpus.error, "install torch again: `python -c 'import torch'` must work")
    if gpus.driver_error and not installed:
        mend = "see that `nvidia-smi` works by itself: after an update of the driver, restart the host"
        return note(name, f"none that the driver lists: {gpus.driver_error}", mend)
    if not installed:
        return note(name, "none: ranks compute on the CPU")
    if gpus.cuda is None and gpus.error is None:
        return problem(name, f"{gpu_list(installed)}; torch has no CUDA", "install a build of torch with CUDA: see pytorch.org")
    if gpus.error is not None:
        mend = f"update the driver to one for CUDA {gpus.cuda}, or install torch for an older CUDA"
        return problem(name, f"{gpu_list(installed)}; torch: {gpus.error}", mend)
    if len(usable) < len(installed):
        value = f"torch sees {len(usable)} of {len(installed)}: {gpu_list(usable)}"
        return note(name, value, "unset CUDA_VISIBLE_DEVICES if pipedec may use all of them")
    return ok(name, gpu_list(usable))


def _driver(gpus: GpuFacts) -> Finding:
    name = "NVIDIA driver"
    if not gpus.driver:
        return ok(name, "none")
    value = f"{gpus.driver}, torch for CUDA {gpus.cuda or 'none'}"
    oldest = OLDEST_DRIVERS.get(_major(gpus.cuda), 0)
    if _major(gpus.driver) < oldest:
        older = ", ".join(f"{version} (CUDA {cuda})" for cuda, version in OLDEST_DRIVERS.items() if version < oldest)
        mend = f"update the driver to {oldest} or newer, or install torch for an older CUDA from {TORCH_INDEX}: {older}"
        return problem(name, f"{value}, which needs {oldest} or newer", mend)
    return ok(name, value)


def _memory(gpus: Sequence[Gpu], needs: Mapping[int, GpuNeed]) -> Finding | None:
    """Compares free memory with what the plan needs on each GPU, or without a plan with nearly all of it."""
    known = [(index, gpu, free) for index, gpu in enumerate(gpus) if (free := gpu.state.free_bytes) is not None]
    short, held = [], []
    for index, gpu, free in known:
        usual, need = MOSTLY_FREE * gpu.memory_bytes, needs.get(index)
        if need is not None and free < need.least_bytes:
            short.append((index, gpu, free))
        elif free < (min(need.planned_bytes, usual) if need else usual) and (need or not needs):
            held.append((index, gpu, free))
    if not known:
        return None
    if not (short or held):
        return ok("GPU memory", f"at least {gib(min(free for *_, free in known))} free")
    texts = []
    for index, gpu, free in short or held:
        text = f"GPU {index}: {gib(free)} of {gib(gpu.memory_bytes)} free"
        if (need := needs.get(index)) is not None:
            who = f"rank {need.ranks[0]} needs" if len(need.ranks) == 1 else f"ranks {', '.join(map(str, need.ranks))} need"
            text += f", {who} {gib(need.least_bytes if free < need.least_bytes else need.planned_bytes)}"
        for holder in gpu.state.holders:
            size = gib(holder.num_bytes) if holder.num_bytes is not None else "some"
            text += f", {holder.program} (pid {holder.pid}) holds {size}"
        texts.append(text)
    pids = sorted({holder.pid for _, gpu, _ in short or held for holder in gpu.state.holders})
    end = f"end what uses it: kill {' '.join(map(str, pids))}" if pids else "end what uses it: `nvidia-smi` may name it"
    if short:
        return problem("GPU memory", "; ".join(texts), f"{end}; or choose a partition with fewer layers there")
    return note("GPU memory", "; ".join(texts), f"{end}; what is held is missing for keys and values" if needs else end)


def _power(gpus: Sequence[Gpu]) -> Finding | None:
    """Limits that are below the default, else limits and highest clocks: ``350 W, SM to 2100 MHz, memory to 9751 MHz``."""
    limited: dict[float, list[int]] = {}  # GPUs with a lower limit, by the default one
    for index, gpu in enumerate(gpus):
        watts, usual = gpu.state.power_watts, gpu.state.default_power_watts
        if watts is not None and usual is not None and watts < usual - WATTS:
            limited.setdefault(usual, []).append(index)
    if limited:
        pairs = sorted((index, usual) for usual, indices in limited.items() for index in indices)
        value = ", ".join(f"GPU {index} {gpus[index].state.power_watts:.0f} of {usual:.0f} W" for index, usual in pairs)
        commands = "; ".join(f"sudo nvidia-smi -i {_numbers(indices)} -pl {usual:.0f}" for usual, indices in limited.items())
        return note("GPU power", f"limited: {value}", f"{commands}, unless the limit is meant: it slows down prompts most")
    parts: list[str] = []
    for text, name in (("{:.0f} W", "power_watts"), ("SM to {} MHz", "max_sm_mhz"), ("memory to {} MHz", "max_memory_mhz")):
        values = {value for gpu in gpus if (value := getattr(gpu.state, name)) is not None}
        parts += [text.format(value) for value in sorted(values)]
    return ok("GPU power", ", ".join(parts)) if parts else None


def _clocks(states: Sequence[tuple[int, GpuState]]) -> Finding | None:
    values, mends = [], []
    for bits, value, mend in _SLOWDOWNS:
        if slow := [(index, state) for index, state in states if state.slowdown & bits]:
            clocks = [f" at {one.sm_mhz} of {one.max_sm_mhz} MHz" if one.sm_mhz is not None else "" for _, one in slow]
            gpus = (f"GPU {index}{clock}" for (index, _), clock in zip(slow, clocks, strict=True))
            values.append(f"{value}: {', '.join(gpus)}")
            mends.append(mend.format(_numbers(index for index, _ in slow)))
    return note("GPU clocks", "; ".join(values), "; ".join(mends)) if values else None


def _compute_mode(states: Sequence[tuple[int, GpuState]], needs: Mapping[int, GpuNeed]) -> Finding | None:
    name, used = "GPU compute mode", [(index, state) for index, state in states if not needs or index in needs]
    prohibited = [index for index, state in used if state.compute_mode == "Prohibited"]
    exclusive = [index for index, state in used if (state.compute_mode or "").startswith("Exclusive")]
    taken = [index for index, state in used if index in exclusive and state.holders]
    shared = [index for index in exclusive if index in needs and len(needs[index].ranks) > 1]
    mend = f"sudo nvidia-smi -i {_numbers(prohibited or exclusive)} -c DEFAULT"
    if prohibited:
        return problem(name, f"GPU {_numbers(prohibited)} takes no process", mend)
    if shared:
        return problem(name, f"GPU {_numbers(shared)} takes one process only, but several ranks are to share it", mend)
    if taken:
        return problem(name, f"GPU {_numbers(taken)} takes one process only, and has one", mend)
    if exclusive and not needs:
        return note(name, f"GPU {_numbers(exclusive)} takes one process only: ranks cannot share it", mend)
    return None


def _numbers(indices: Iterable[int]) -> str:
    """In the form of nvidia-smi's arguments."""
    return ",".join(map(str, indices))


def _major(version: str | None) -> int:
    number = (version or "").partition(".")[0]
    return int(number) if number.isdecimal() else 0
