"""The GPUs of a host: facts from NVML and torch, and findings about them in view of the ranks' needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pynvml

from pipedec.cluster.doctor.findings import Finding, first_line, gib, note, ok, problem
from pipedec.cluster.doctor.needs import GpuNeed
from pipedec.cluster.processes import describe_exit

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # oldest driver by the major version of CUDA
TORCH_INDEX = "https://download.pytorch.org/whl"
ANSWER_SECONDS = 60.0  # for torch to be imported and the driver to answer
MOSTLY_FREE = 0.9  # share of the memory; a desktop may use the rest


@dataclass(frozen=True)
class Gpu:
    """A GPU with its driver's name for it, and its present state: None where the driver does not report it."""

    name: str
    memory_bytes: int
    free_bytes: int | None = None
    milliwatts: int | None = None  # the present limit
    default_milliwatts: int | None = None  # the manufacturer's limit
    is_persistent: bool | None = None
    compute_mode: int | None = None  # as NVML counts them
    slowdown: int = 0  # NVML's reasons for lower clocks
    holders: tuple[tuple[int, int | None], ...] = ()  # process ids of those that compute on it, and the bytes that they hold


@dataclass(frozen=True)
class GpuFacts:
    """GPUs in the order of their PCI bus."""

    driver: str | None = None  # version of the NVIDIA driver; None without one
    installed: tuple[Gpu, ...] = ()  # as the driver lists them
    usable: tuple[Gpu, ...] = ()  # as torch can use them
    cuda: str | None = None  # version of CUDA that torch was built for; None for a build without CUDA
    error: str | None = None  # why torch cannot use the GPUs; None if it can
    nccl: str | None = None  # version of NCCL in torch; None without it
    driver_error: str | None = None  # why the driver lists no GPUs, if it is installed
    cpu_capability: str | None = None  # the instructions with which torch computes on the CPU; None if it cannot be imported


def _is_limited(gpu: Gpu) -> bool:
    return gpu.milliwatts is not None and gpu.default_milliwatts is not None and gpu.milliwatts < gpu.default_milliwatts - 1000


# What slows GPUs down: row, condition, text, mend. Numbers are NVML's reasons for lower clocks, as bits.
_AILMENTS: tuple[tuple[str, Callable[[Gpu], object], str, str], ...] = (
    ("GPU power", _is_limited, "limited below the manufacturer's power",
     "sudo nvidia-smi -i {} -pl WATTS, as `nvidia-smi -q -d POWER` names them, unless the limit is meant"),
    ("GPU heat", lambda gpu: gpu.slowdown & (0x20 | 0x40), "slowed down by heat", "see fans, dust and the air around them"),
    ("GPU supply", lambda gpu: gpu.slowdown & (0x8 | 0x80), "slowed down by hardware",
     "see the power supply, its cables to the GPU, and the temperature"),
    ("GPU clocks", lambda gpu: gpu.slowdown & 0x2, "held down by clocks set for applications", "sudo nvidia-smi -i {} -rac"),
    ("GPU persistence", lambda gpu: gpu.is_persistent is False, "off, so the driver starts again for every first process",
     "sudo nvidia-smi -pm 1"),
)  # fmt: skip


def gpu_facts() -> GpuFacts:
    """The facts from the driver and torch, without using a GPU. Takes as long as importing torch."""
    driver, driver_error, listed = None, None, dict[str, Gpu]()
    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        listed = {pynvml.nvmlDeviceGetUUID(handle): _listed(handle) for handle in handles}
    except pynvml.NVMLError_LibraryNotFound:
        pass
    except pynvml.NVMLError as error:
        driver_error = first_line(error)
    cuda, nccl, torch_error, cpu_capability, usable = None, None, None, None, tuple[Gpu, ...]()
    try:
        import torch

        cuda, cpu_capability = torch.version.cuda, torch.backends.cpu.get_cpu_capability()
        if cuda is not None:
            with suppress(AttributeError):  # a build without NCCL
                nccl = ".".join(map(str, torch.cuda.nccl.version()))
        if cuda is not None and (listed or torch.cuda.is_available()):
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            torch.cuda.init()
            seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            usable = tuple(
                replace(listed.get(f"GPU-{one.uuid}", Gpu("", 0)), name=one.name, memory_bytes=one.total_memory) for one in seen
            )
    except Exception as error:  # a torch that cannot be imported, a driver that is too old
        torch_error = first_line(error)
    return GpuFacts(driver, tuple(listed.values()) or usable, usable, cuda, torch_error, nccl, driver_error, cpu_capability)


def gpu_facts_apart(seconds: float = ANSWER_SECONDS) -> GpuFacts:
    """As ``gpu_facts``, by a process of its own. If that crashes, or has no answer in time, ``error`` says so."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=seconds)
        return msgspec.json.decode(out.splitlines()[-1], type=GpuFacts)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: in the driver it may be beyond reach
        return GpuFacts(error=f"torch and the driver have not answered within {seconds:g} s")
    except (IndexError, msgspec.MsgspecError):
        reason = "".join(f": {line}" for line in err.decode(errors="replace").strip().splitlines()[-1:])
        return GpuFacts(error=f"a process that imports torch {describe_exit(process.returncode)}{reason}")


def _listed(handle: Any) -> Gpu:
    def asked(question: Callable[[Any], Any]) -> Any:
        with suppress(pynvml.NVMLError):  # this GPU, or this driver, does not know
            return question(handle)
        return None

    memory = asked(pynvml.nvmlDeviceGetMemoryInfo)
    persistence, holders = asked(pynvml.nvmlDeviceGetPersistenceMode), asked(pynvml.nvmlDeviceGetComputeRunningProcesses) or ()
    return Gpu(
        pynvml.nvmlDeviceGetName(handle), memory.total if memory else 0, memory.free if memory else None,
        asked(pynvml.nvmlDeviceGetPowerManagementLimit), asked(pynvml.nvmlDeviceGetPowerManagementDefaultLimit),
        None if persistence is None else bool(persistence), asked(pynvml.nvmlDeviceGetComputeMode),
        asked(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0, tuple((one.pid, one.usedGpuMemory) for one in holders),
    )  # fmt: skip


def gpu_findings(gpus: GpuFacts, needs: Sequence[GpuNeed] = ()) -> list[Finding]:
    """The rows about GPUs, in view of what the ranks need."""
    every, by_index = gpus.usable or gpus.installed, {need.index: need for need in needs}
    found = [_usable(gpus), _driver(gpus)]
    if gpus.cuda is not None and every:
        found.append(ok("NCCL", gpus.nccl) if gpus.nccl else note("NCCL", "none in this build of torch"))
    for name, ails, value, mend in _AILMENTS:
        if ill := ",".join(str(index) for index, gpu in enumerate(every) if ails(gpu)):
            found.append(note(name, f"GPU {ill}: {value}", mend.format(ill)))
    return [*found, *_memory(every, by_index), *_compute_mode(every, by_index)]


def gpu_list(gpus: Iterable[Gpu]) -> str:
    """Like ``7 × NVIDIA GeForce RTX 3090, 24.0 GiB``."""
    counts = Counter((gpu.name, gib(gpu.memory_bytes)) for gpu in gpus)
    return "; ".join(f"{count} × {name}, {memory}" for (name, memory), count in counts.items()) or "none"


def _usable(gpus: GpuFacts) -> Finding:
    name, installed, usable = "GPUs", gpus.installed, gpus.usable
    if gpus.error and not installed:
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


def _memory(gpus: Sequence[Gpu], needs: Mapping[int, GpuNeed]) -> list[Finding]:
    """Compares free memory with what the plan needs on each GPU, or without a plan with nearly all of it."""
    known = [(index, gpu, gpu.free_bytes) for index, gpu in enumerate(gpus) if gpu.free_bytes is not None]
    texts, is_short = [], False
    for index, gpu, free in known:
        mostly, need = round(MOSTLY_FREE * gpu.memory_bytes), needs.get(index)
        wanted = mostly if not needs else 0 if need is None else max(need.least_bytes, min(need.planned_bytes, mostly))
        if free < wanted:
            ranks = f"rank {', '.join(map(str, need.ranks))} wants {gib(wanted)}" if need else "some is in use"
            used = (f", process {pid} holds {gib(size) if size is not None else 'some'}" for pid, size in gpu.holders)
            texts.append(f"GPU {index}: {gib(free)} of {gib(gpu.memory_bytes)} free, {ranks}{''.join(used)}")
            is_short |= need is not None and free < need.least_bytes
    if is_short:
        return [problem("GPU memory", "; ".join(texts), "end what uses it, or choose a partition with fewer layers there")]
    if texts:
        return [note("GPU memory", "; ".join(texts), "end what uses it: it is missing for keys and values")]
    return [ok("GPU memory", f"at least {gib(min(free for *_, free in known))} free")] if known else []


def _compute_mode(gpus: Sequence[Gpu], needs: Mapping[int, GpuNeed]) -> list[Finding]:
    modes = {index: gpu.compute_mode for index, gpu in enumerate(gpus) if not needs or index in needs}
    closed = [index for index, mode in modes.items() if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED]
    single = [index for index, mode in modes.items() if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS]
    too_few = [index for index in single if gpus[index].holders or (index in needs and len(needs[index].ranks) > 1)]
    if not (ill := closed or too_few or ([] if needs else single)):
        return []
    numbers = ",".join(map(str, ill))
    value = f"GPU {numbers} takes " + ("no process" if closed else "one process only, and has one or is to have several")
    finding = problem if closed or too_few else note
    return [finding("GPU compute mode", value, f"sudo nvidia-smi -i {numbers} -c DEFAULT")]


def _major(version: str | None) -> int:
    number = (version or "").partition(".")[0]
    return int(number) if number.isdecimal() else 0


if __name__ == "__main__":
    print(msgspec.json.encode(gpu_facts()).decode())
