"""``python -m benchmarks.agent_prompts --out FILE``: prompts of an agent that does the same few tasks again and again.

Five tasks with 20 variations each. All prompts begin with the same instructions, and variations of a task differ in names and
numbers. Everything is drawn from one seed, so that the file is always the same.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import click

from pipedec.bench.record import check_writable
from pipedec.flags import Help, own_options, run_command

VARIATIONS = 20
_SEED = 20
_INSTRUCTIONS = (
    "You are the agent of a small software company. Tools: read_file, write_file, run, deploy, send_mail. Answer in English.\n\n"
)
TASKS = {
    "fix": (
        "In {module}.py, the function total_{noun} should add all values of a list, but it returns only the last value. Explain "
        "the mistake and how to fix it, and show the corrected Python function."
    ),
    "settings": (
        "The service {service} needs a configuration file. Write it in JSON, with name {service}, port {port}, {count} replicas, "
        "memory limits, logging and a health check. Then explain what each setting does."
    ),
    "log": (
        "The log of host-{host} says: database connection timed out after {seconds} seconds. Explain what this error means, name "
        "three possible causes, and recommend what to do about each."
    ),
    "test": (
        "Write unit tests in Python for the function sort_{noun} in {module}.py, which sorts a list of numbers. Explain what "
        "each test checks."
    ),
    "mail": (
        "Write an e-mail to the customers: the service {service} will be unavailable on {day} for {seconds} minutes because of "
        "maintenance. Apologize, and say whom to contact."
    ),
}
_SERVICES = ("billing", "search", "orders", "catalog", "payments", "shipping", "accounts", "inventory", "reviews", "mailer")
_MODULES = ("shop", "store", "report", "stats", "tools")
_NOUNS = ("prices", "scores", "weights", "ratings", "lengths", "delays", "amounts", "sizes", "levels", "counts")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _values(draw: random.Random) -> dict[str, object]:
    """The names and numbers of one variation."""
    return {
        "service": draw.choice(_SERVICES),
        "module": draw.choice(_MODULES),
        "noun": draw.choice(_NOUNS),
        "day": draw.choice(_DAYS),
        "port": draw.randint(8000, 8999),
        "count": draw.randint(2, 9),
        "host": draw.randint(1, 40),
        "seconds": draw.randint(5, 60),
    }


def agent_prompts() -> list[dict[str, str]]:
    """The records of all prompts, ``{"task": …, "prompt": …}``, task after task; no two prompts are equal."""
    draw, records = random.Random(_SEED), []
    for name, task in TASKS.items():
        prompts = dict[str, None]()
        while len(prompts) < VARIATIONS:
            prompts[_INSTRUCTIONS + task.format(**_values(draw))] = None
        records += [{"task": name, "prompt": prompt} for prompt in prompts]
    return records


@click.command()
@own_options
def prompts(file: Annotated[Path, Help("Write the prompts to this file.", "FILE", "--out")]) -> None:
    """Write the prompts of a repetitive agent as JSONL, with the fields task and prompt."""
    check_writable(file, "--out")
    file.write_text("".join(json.dumps(record) + "\n" for record in agent_prompts()), encoding="utf-8")


if __name__ == "__main__":
    run_command(prompts)
