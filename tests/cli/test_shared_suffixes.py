"""``--shared-suffixes``: answers to what was submitted before are a draft source, unless the user turns it off."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pipedec.cli.options import RequestFlags
from pipedec.cluster.local import LocalCluster
from pipedec.messages import LOCAL_TENANT

Pipedec = Callable[..., Any]
ASKED = [
    "--raw-prompt",
    "--proposers",
    "ngrams",
    "--width",
    "8",
    "--ignore-eos",
    "--max-tokens",
    "40",
    "--prompt",
    "Twelve crows counted",
]


def timesteps(pipedec: Pipedec, *flags: str) -> int:
    """The timesteps of an answer of a running cluster, without a draft model."""
    ended = pipedec("submit", *ASKED, "--json", "--temperature", "1.5", "--seed", "5", *flags)
    assert ended.status == 0, ended.err
    return int(json.loads(ended.out)["timesteps"])


def test_a_repeated_answer_takes_fewer_timesteps_unless_it_is_off(known_resident: LocalCluster, pipedec: Pipedec) -> None:
    """A request with ``off`` neither uses earlier answers nor is kept for later ones."""
    without = [timesteps(pipedec, "--shared-suffixes", "off") for _ in range(2)]
    first, second = timesteps(pipedec), timesteps(pipedec, "--shared-suffixes", "on")
    assert second < first / 1.5 and second < min(without) / 1.5
    assert timesteps(pipedec, "--shared-suffixes", "off") > 1.5 * second


def test_anything_else_is_refused(pipedec: Pipedec) -> None:
    for command in ("submit", "generate", "serve", "up"):
        refused = pipedec(command, "--shared-suffixes", "maybe").refused()
        assert "'--shared-suffixes': 'maybe' is neither on nor off" in refused


@pytest.mark.parametrize("prompts", [("one",), ("one", "two")])
def test_requests_of_the_command_line_have_one_tenant(prompts: tuple[str, ...]) -> None:
    assert {request.tenant for request in RequestFlags(prompt=prompts).requests()} == {LOCAL_TENANT}
