"""The steps of ``make gpu-day``: what each runs, for how long at most, and how its figures are read.

A step has a second form at toy size, which CI runs on the CPU: the same commands with less to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import day_figures as figures

Command = tuple[str, ...]

PROMPT = "What does shutil.copytree() do?"
THREADS_PROMPT = "Give me 5 methods of `pydoc.TextDoc`."
THREADS = "verify --threads pasta --device {device} --dtype float32"
METHODS = "pp,stpp,pipedec,pipedec-bestfirst,bita"

# As many of the card as the pipeline has ranks, each with one of its own: what the computed clock counts with.
CLUSTER = """\
target: {models}/target
draft: {models}/draft
servers:
- host: localhost
  devices:
    {card}: {ranks}
partitions:
  all:
    stages: {stages}
    draft_device:
      host: localhost
      device: {card}
"""


@dataclass(frozen=True)
class Step:
    """One step: commands that run one after the other until one fails.

    Placeholders in commands and files are filled in: ``{python}``, ``{pipedec}``, ``{device}``, ``{card}``, ``{models}``, and
    ``{folder}``, the step's own.
    """

    name: str
    limit_seconds: float  # of all its commands together; what still runs then is ended, and the step has failed
    commands: tuple[Command, ...]
    toy: tuple[Command, ...]  # empty if another step has the same
    if_fails: str  # what to look at
    cleanup: tuple[Command, ...] = ()  # commands that run after the others, even if those fail
    files: Mapping[str, str] = field(default_factory=dict)  # by name, written to the step's folder before it begins
    toy_files: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Path], figures.Reading] = figures.printed  # once its commands have ended


def pipedec(line: str, *more: str) -> Command:
    return ("{pipedec}", *line.split(), *more)


def kernels(line: str) -> Command:
    return ("{python}", "-m", "benchmarks.kernels", *line.split())


def tests(name: str, limit_seconds: float, path: str, toy: str, if_fails: str) -> Step:
    """The tests of a file that need a GPU; at toy size those of its checks on the CPU that ``toy`` chooses, as pytest's -k."""
    options = "-n 0 -rs --hypothesis-profile=fast -o junit_family=xunit1 --junitxml={folder}/tests.xml"
    run = "{python}", "-m", "pytest", path, *options.split()
    return Step(name, limit_seconds, ((*run, "-m", "gpu"),), ((*run, "-m", "not gpu", "-k", toy),), if_fails, read=figures.tests)


def stages(count: int, toy_count: int | None = None) -> Step:
    """A cluster of ``count`` stages on one card over gloo: wall time beside the computed time of as many cards.

    Args:
        toy_count: stages at toy size; None for nothing, since another step shows the same.
    """

    def commands(stages: int, methods: str, tokens: int, timesteps: int) -> tuple[Command, ...]:
        asked = "--methods", methods, "--prompt", PROMPT, "--max-tokens", str(tokens)
        overhead = "--running --repeats 1 --out {folder}/overhead.jsonl --timesteps"
        computed = "bench sweep --cluster {folder}/cluster.yaml --preset all --clock computed --out {folder}/computed"
        return (
            pipedec("up --detach --transport gloo --device {device} --stages", str(stages)),
            pipedec("bench sweep --running --out {folder}/wall", *asked),
            ("{python}", "-m", "benchmarks.overhead", *overhead.split(), str(timesteps)),
            pipedec("down"),
            pipedec(computed, *asked),
        )

    def files(stages: int) -> dict[str, str]:
        return {"cluster.yaml": CLUSTER.replace("{stages}", str(stages)).replace("{ranks}", str(stages + 1))}

    return Step(
        f"stages-{count}", 150, commands(count, METHODS, 64, 100), commands(toy_count, "pp,pipedec", 4, 4) if toy_count else (),
        "`pipedec status`, and the table's column *left*: what a timestep takes beside the slowest stage's forward",
        cleanup=(pipedec("down"),), files=files(count), toy_files=files(toy_count or count), read=figures.stages,
    )  # fmt: skip


STEPS = (
    Step("doctor", 60, (pipedec("doctor"),), (pipedec("doctor"),), "each line with a cross says what to mend"),
    tests(
        "kernel-tests", 120, "tests/gpu/test_gpu_kernels.py", "captured and float32 and llama and 0 or without_flash",
        "`PIPEDEC_GRAPHS=off`, then without `flash-attn`: which kernels are to blame",
    ),
    tests(
        "answers", 240, "tests/gpu/test_gpu_answers.py", "middle_stage",
        "the message names method and token; `PIPEDEC_GRAPHS=off` tells whether graphs are to blame",
    ),
    tests(
        "transport", 240, "tests/gpu/test_gpu_transport.py", "one_rank or (neighbours and cpu-2)",
        "`NCCL_DEBUG=INFO`; `--transport gloo` does without NCCL",
    ),
    tests(
        "clusters", 300, "tests/gpu/test_gpu_clusters.py", "methods and windows",
        "`PIPEDEC_GRAPHS=off`; `--transport gloo`; the log of each rank",
    ),
    tests(
        "memory", 90, "tests/gpu/test_gpu_memory.py", "stage_takes",
        "the figures say which part of the plan is too small: weights, KV cache or workspace",
    ),
    tests(
        "cold-start", 90, "tests/gpu/test_gpu_cold_start.py", "cold",
        "a longer `--stall-timeout`; what took so long is in the figures",
    ),
    tests(
        "readme", 120, "tests/test_readme.py", "flag_exists and device",
        "the line that failed, by itself",
    ),
    Step(
        "verify", 260, (pipedec("verify --device {device} --shapes 1,4 --max-tokens 64 --prompt", PROMPT),),
        (pipedec("verify --device {device} --shapes 1,3x2 --max-tokens 16 --prompt", PROMPT),),
        "`--dtype float32`: there no token may differ; the message names method and token",
    ),
    Step(
        "verify-float32", 200, (pipedec("verify --device {device} --dtype float32 --shapes 4 --max-tokens 64 --prompt", PROMPT),),
        (pipedec("verify --device {device} --dtype float32 --shapes 1 --local --methods pp --max-tokens 4 --prompt", PROMPT),),
        "`PIPEDEC_GRAPHS=off`; `--local` does without processes and transfers",
    ),
    Step(
        "threads", 200,
        (pipedec(f"{THREADS} --shapes 4 --max-tokens 120 --prompt", THREADS_PROMPT),),
        (pipedec(f"{THREADS} --shapes 3x2 --methods pipedec-bestfirst --max-tokens 40 --prompt", THREADS_PROMPT),),
        "`--local` does without processes and transfers",
    ),
    Step(
        "layers", 200,
        (kernels("layers --device {device} --rows 1,16 --past 512,4096,16384 --tree-rows 32 --out {folder}/layers.jsonl"),),
        (
            kernels(
                "layers --device {device} --model llama-3.2-1b --layers 1 --rows 1,8 --past 64 --lanes 4 --runs 2 "
                "--out {folder}/layers.jsonl --write {folder}/speeds.json"
            ),
        ),
        "`torch.profiler` of one step; clocks and power limit of the card",
        read=figures.layers,
    ),
    Step(
        "kernels", 250, (kernels("compare --device {device} --out {folder}/kernels.jsonl"),),
        (kernels("compare --device {device} --model llama-3.2-1b --rows 1,4 --past 9 --repeats 2 --out {folder}/kernels.jsonl"),),
        "which kernel is slow, and at which size; `tests/kernels` compiles each for three kinds of GPU",
        read=figures.kernels,
    ),
    Step(
        "draft", 110, (kernels("draft --device {device} --out {folder}/draft.jsonl"),),
        (
            kernels(
                "draft --device {device} --draft {models}/draft --model llama-3.2-1b --layers 1 --rows 1,4 --past 64 --repeats 2 "
                "--out {folder}/draft.jsonl"
            ),
        ),
        "`PIPEDEC_GRAPHS=off`: what launches cost; `layers` and `kernels` say which part is slow",
        read=figures.draft,
    ),
    Step(
        "operations", 60, (kernels("operations --device {device} --out {folder}/operations.jsonl"),),
        (kernels("operations --device {device} --sizes 32,64 --past 64 --repeats 2 --out {folder}/operations.jsonl"),),
        "which operation is slow, and with how many rows",
        read=figures.operations,
    ),
    stages(4, 2),
    stages(8),
    stages(16),
)  # fmt: skip
