"""What the doctor reads from ``nvidia-smi``: a script stands in for it, which answers as drivers of several ages do."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipedec.cluster.doctor.gpus import MIB, GpuState, Holder, gpu_facts

BASE = "580.65.06, NVIDIA GeForce RTX 3090, 24576\n580.65.06, NVIDIA GeForce RTX 3090, 24576\n"
STATES = (
    "GPU-aaaa, 24100, 350.00, 350.00, 210, 2100, 9751, Enabled, Default\n"
    "GPU-bbbb, 4000, 280.00, 350.00, 1200, 2100, 9751, Disabled, Exclusive_Process\n"
)
PROCESSES = "GPU-bbbb, 4242, /opt/my, own/python3, 20000\nGPU-bbbb, 4243, [Not Found], [N/A]\n"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Answers by what a question begins with, to be filled; any other question is refused as nvidia-smi refuses it."""

    class Script(dict[str, str]):
        def __setitem__(self, question: str, answer: str) -> None:
            super().__setitem__(question, answer)
            cases = "".join(f"*{question}*) printf '{answer}' ;;\n" for question, answer in self.items())
            program.write_text(
                f'#!/bin/sh\ncase "$1" in\n{cases}*) echo "Field is not a valid field to query."; exit 2 ;;\nesac\n'
            )

    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver.'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Script()


def test_the_state_of_every_gpu_is_read(answers: dict[str, str]) -> None:
    answers["driver_version"], answers["uuid,memory.free"], answers["clocks_event"] = BASE, STATES, "0x1\n0x0000000000000021\n"
    answers["compute-apps"] = PROCESSES
    facts = gpu_facts()
    assert facts.driver == "580.65.06" and [gpu.memory_bytes for gpu in facts.installed] == [24576 * MIB] * 2
    assert facts.installed[0].state == GpuState(24100 * MIB, 350.0, 350.0, 210, 2100, 9751, True, "Default", 1)
    state = facts.installed[1].state
    assert (state.is_persistent, state.compute_mode, state.slowdown) == (False, "Exclusive_Process", 0x21)
    assert state.holders == (Holder(4242, "python3", 20000 * MIB), Holder(4243, "[Not Found]", None))


def test_gpus_of_torch_have_the_state_that_the_driver_tells(answers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers["driver_version"], answers["uuid,memory.free"] = BASE, STATES
    seen = [SimpleNamespace(name="NVIDIA GeForce RTX 3090", total_memory=24 * 2**30, uuid=uuid) for uuid in ("bbbb", "aaaa")]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 3))
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(seen))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: seen[index])
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    facts = gpu_facts()
    assert facts.error is None and facts.nccl == "2.29.3"
    assert [gpu.state.free_bytes for gpu in facts.usable] == [4000 * MIB, 24100 * MIB]
    del seen[0]
    assert [gpu.state.free_bytes for gpu in gpu_facts().usable] == [24100 * MIB]


def test_older_drivers_call_the_reasons_otherwise(answers: dict[str, str]) -> None:
    answers["driver_version"], answers["uuid,memory.free"], answers["clocks_throttle"] = BASE, STATES, "0x0\n0x2\n"
    assert [gpu.state.slowdown for gpu in gpu_facts().installed] == [0, 2]


def test_a_driver_that_does_not_know_a_field_still_lists_its_gpus(answers: dict[str, str]) -> None:
    answers["driver_version"] = BASE
    assert [gpu.state for gpu in gpu_facts().installed] == [GpuState(), GpuState()]


def test_what_is_not_available_is_none(answers: dict[str, str]) -> None:
    answers["driver_version"] = "580.65.06, NVIDIA GB10, [N/A]\n"
    assert gpu_facts().installed == ()
    answers["driver_version"] = "580.65.06, NVIDIA L4, 23034\n"
    answers["uuid,memory.free"] = "GPU-aaaa" + ", [N/A]" * 8 + "\n"
    assert gpu_facts().installed[0].state == GpuState()


def test_a_driver_that_does_not_answer_says_why(answers: dict[str, str]) -> None:
    facts = gpu_facts()
    assert answers == {} and facts.installed == ()
    assert facts.driver_error == "NVIDIA-SMI has failed because it could not communicate with the driver."
