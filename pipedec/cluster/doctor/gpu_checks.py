"""From the facts about GPUs to findings: driver, memory, power, clocks, modes. Measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from pipedec.cluster.doctor.findings import Finding, gib, note, ok, problem
from pipedec.cluster.doctor.gpus import HELD_DOWN, TOO_HOT, TOO_LITTLE_POWER, Gpu, GpuFacts, GpuState, usual_state
from pipedec.cluster.doctor.needs import GpuNeed

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # by the major version of CUDA
TORCH_INDEX = "https://download.pytorch.org/whl"
MOSTLY_FREE = 0.9  # of the memory: what a desktop takes does not matter
WATTS = 1.0  # by which power limits may be rounded

Numbered = Sequence[tuple[int, GpuState]]


def gpu_findings(gpus: GpuFacts, needs: Sequence[GpuNeed] = ()) -> list[Finding]:
    """Rows about GPUs: those that say that all is well, and one for everything that is worth knowing.

    Args:
        needs: what the ranks of this host take of them.
    """
    found = [_usable(gpus), _driver(gpus)]
    every = gpus.usable or gpus.installed
    if gpus.cuda is not None and every:
        found.append(ok("NCCL", gpus.nccl) if gpus.nccl else note("NCCL", "none in this build of torch"))
    by_index = {need.index: need for need in needs}
    states = [(index, gpu.state) for index, gpu in enumerate(every)]
    more = (
        _memory(every, by_index),
        _power(every, states),
        _clocks(states),
        _persistence(states),
        _compute_mode(states, by_index),
    )
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
    """Free memory against what the plan needs there, or against nearly all of it."""
    known = [(index, gpu, free) for index, gpu in enumerate(gpus) if (free := gpu.state.free_bytes) is not None]
    short = [(index, gpu, free) for index, gpu, free in known if index in needs and free < needs[index].least_bytes]
    held = [(index, gpu, free) for index, gpu, free in known if not needs or index in needs]
    held = [(index, gpu, free) for index, gpu, free in held if free < _wanted(gpu, needs.get(index))]
    if not known:
        return None
    if not (short or held):
        return ok("GPU memory", f"at least {gib(min(free for *_, free in known))} free")
    value = "; ".join(_shortage(index, gpu, free, needs.get(index)) for index, gpu, free in short or held)
    pids = sorted({holder.pid for _, gpu, _ in short or held for holder in gpu.state.holders})
    end = f"end what uses it: kill {' '.join(map(str, pids))}" if pids else "end what uses it: `nvidia-smi` may name it"
    if short:
        return problem("GPU memory", value, f"{end}; or choose a partition with fewer layers there")
    return note("GPU memory", value, f"{end}; what is held is missing for keys and values" if needs else end)


def _wanted(gpu: Gpu, need: GpuNeed | None) -> float:
    """Free memory with which there is nothing to say."""
    usual = MOSTLY_FREE * gpu.memory_bytes
    return usual if need is None else max(need.least_bytes, min(need.planned_bytes, usual))


def _shortage(index: int, gpu: Gpu, free: int, need: GpuNeed | None) -> str:
    text = f"GPU {index}: {gib(free)} of {gib(gpu.memory_bytes)} free"
    if need is not None:
        who = f"rank {need.ranks[0]} needs" if len(need.ranks) == 1 else f"ranks {', '.join(map(str, need.ranks))} need"
        text += f", {who} {gib(need.least_bytes if free < need.least_bytes else need.planned_bytes)}"
    for holder in gpu.state.holders:
        text += f", {holder.program} (pid {holder.pid}) holds {gib(holder.num_bytes) if holder.num_bytes is not None else 'some'}"
    return text


def _power(gpus: Sequence[Gpu], states: Numbered) -> Finding | None:
    limited = [
        (index, state.power_watts, state.default_power_watts) for index, state in states
        if state.power_watts is not None and state.default_power_watts is not None
        and state.power_watts < state.default_power_watts - WATTS
    ]  # fmt: skip
    if not limited:
        return ok("GPU power", value) if (value := usual_state(gpus)) else None
    value = ", ".join(f"GPU {index} {watts:.0f} of {usual:.0f} W" for index, watts, usual in limited)
    by_default: dict[float, list[int]] = {}
    for index, _, usual in limited:
        by_default.setdefault(usual, []).append(index)
    commands = "; ".join(f"sudo nvidia-smi -i {_numbers(indices)} -pl {usual:.0f}" for usual, indices in by_default.items())
    return note("GPU power", f"limited: {value}", f"{commands}, unless the limit is meant: it slows down prompts most")


def _clocks(states: Numbered) -> Finding | None:
    name, values, mends = "GPU clocks", [], []
    for bits, value, mend in _SLOWDOWNS:
        slow = [(index, state) for index, state in states if state.slowdown & bits]
        if slow:
            values.append(f"{value}: {', '.join(map(_clock, slow))}")
            mends.append(mend.format(_numbers(index for index, _ in slow)))
    return note(name, "; ".join(values), "; ".join(mends)) if values else None


_SLOWDOWNS = (
    (TOO_HOT, "slowed down by heat", "cool them: see their fans, dust and the air around them"),
    (TOO_LITTLE_POWER, "slowed down by hardware", "see the power supply, its cables to the GPU, and the temperature"),
    (HELD_DOWN, "set for applications", "sudo nvidia-smi -i {} -rac"),
)


def _clock(numbered: tuple[int, GpuState]) -> str:
    index, state = numbered
    return f"GPU {index}" + (f" at {state.sm_mhz} of {state.max_sm_mhz} MHz" if state.sm_mhz is not None else "")


def _persistence(states: Numbered) -> Finding | None:
    if not (without := _those(states, lambda state: state.is_persistent is False)):
        return None
    value = f"off for GPU {_numbers(without)}: the driver starts again for every first process"
    return note("GPU persistence", value, "sudo nvidia-smi -pm 1")


def _compute_mode(states: Numbered, needs: Mapping[int, GpuNeed]) -> Finding | None:
    name, used = "GPU compute mode", [(index, state) for index, state in states if not needs or index in needs]
    prohibited = _those(used, lambda state: state.compute_mode == "Prohibited")
    exclusive = _those(used, lambda state: (state.compute_mode or "").startswith("Exclusive"))
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


def _those(states: Numbered, condition: Callable[[GpuState], bool]) -> list[int]:
    return [index for index, state in states if condition(state)]


def _numbers(indices: Iterable[int]) -> str:
    """As nvidia-smi takes them."""
    return ",".join(map(str, indices))


def _major(version: str | None) -> int:
    number = (version or "").partition(".")[0]
    return int(number) if number.isdecimal() else 0
