"""``pipedec verify`` on a cluster that is running: it needs no checkpoint here, and a near tie is no difference."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.programs import Calls as Pipedec

from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.cluster.local import LocalCluster
from pipedec.core.completion import Completion
from pipedec.messages.request import PromptRequest
from pipedec.verify.divergence import TIE_BOUNDS

ASKED = ("--raw-prompt", "--prompt", "Natalia sold 12 clips in April.", "--max-tokens", "6")


def of(cluster: LocalCluster) -> tuple[str, ...]:
    return "--redis", cluster.address.redis_url, "--run", cluster.run_id


def test_all_methods_are_compared_with_pp(pipedec: Pipedec, resident: LocalCluster) -> None:
    compared = pipedec("verify", *of(resident), *ASKED, "--prompt", "The pipeline")
    assert compared.status == 0, compared.err
    found = set(re.findall(r"2 stages in 2 groups, ([\w-]+): 2/2 equal", compared.err))
    assert found == {"stpp", "pipedec", "pipedec-bestfirst", "bita"}
    assert f"2 prompts against pp on run {resident.run_id}, float32" in compared.out


def test_the_cluster_that_up_started_is_found(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    compared = pipedec("verify", "--running", "--methods", "pp,bita", *ASKED)
    assert compared.status == 0 and "bita: 1/1 equal" in compared.err and "stpp" not in compared.err


def test_the_process_loads_neither_torch_nor_transformers(resident: LocalCluster) -> None:
    program = (
        "import sys\nfrom pipedec.cli import main\ntry:\n    main()\nexcept SystemExit as left:\n"
        "    print(left.code, [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, "verify", *of(resident), "--methods", "pipedec", *ASKED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "0 []", ended.stderr


def test_a_prompt_that_is_too_long_is_left_out_with_one_line(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    long = "word " * 3000
    compared = pipedec("verify", "--running", "--methods", "stpp", "--prompt", long, *ASKED)
    assert compared.status == 0 and "stpp: 1/1 equal" in compared.err
    assert re.search(r"Prompt 0 is left out: the prompt has \d+ tokens", compared.err)
    assert "the model's context is 2048" in pipedec("verify", "--running", "--prompt", long).refused()


def test_flags_that_make_no_sense_there_are_refused(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    for flags, words in (
        (("--target", "x", "--stages", "4", "--local"), "--target, --stages, --local: a running cluster has its own models"),
        (("--shapes", "1,2"), "--shapes: a running cluster has its own"),
        (("--methods", "pp"), "name another method, which will be compared with pp"),
        (("--methods", "warp"), "unknown method 'warp'"),
        (("--threads", "apar"), "apar"),  # of which the tiny target has no control tokens
    ):
        assert words in pipedec("verify", "--running", *flags, *ASKED).refused()


def test_without_a_running_cluster_there_is_one_line(pipedec: Pipedec) -> None:
    assert "no cluster is running here" in pipedec("verify", "--running", *ASKED).refused()


class Diverging:
    """A client whose answers by ``stpp`` differ in the third token, whose logit is ``margin`` below the best one."""

    def __init__(self, ask: Callable[..., Completion], margin: float) -> None:
        self._ask = ask
        self._margin = margin

    def __call__(self, client: Client, request: PromptRequest, **callbacks: Any) -> Completion:
        return self.changed(request, self._ask(client, request, **callbacks))

    def changed(self, request: PromptRequest, completion: Completion) -> Completion:
        other = (completion.token_ids[2] + 1) % 290
        if request.method == "stpp":
            completion.token_ids[2] = other
        elif completion.logprobs is not None:
            completion.logprobs[2] = {completion.token_ids[2]: -1.0, other: -1.0 - self._margin}
        return completion


@pytest.fixture(params=[0.0005, 0.25])
def margin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setitem(TIE_BOUNDS, "float32", 1e-3)
    diverging = Diverging(Client.ask, request.param)
    monkeypatch.setattr(Client, "ask", lambda client, *asked, **callbacks: diverging(client, *asked, **callbacks))
    ask_all = Client.ask_all

    def ask_all_diverging(client: Client, requests: list[PromptRequest]) -> list[Reply]:
        replies = ask_all(client, requests)
        for asked, reply in zip(requests, replies, strict=True):
            diverging.changed(asked, reply.completed())
        return replies

    monkeypatch.setattr(Client, "ask_all", ask_all_diverging)
    return float(request.param)


def test_a_near_tie_is_reported_and_a_difference_fails(pipedec: Pipedec, known_resident: LocalCluster, margin: float) -> None:
    compared = pipedec("verify", "--running", "--methods", "stpp,pipedec", *ASKED)
    assert "stpp: 0/1 equal" in compared.err and "pipedec: 1/1 equal" in compared.err
    line = re.search(r"2 stages, stpp, prompt 0: output token 2 is .*", compared.err.replace("\n", " "))
    assert line is not None and f"{margin:.2g} apart" in line[0]
    assert (compared.status, "near tie in float32" in line[0]) == ((0, True) if margin < 1e-3 else (1, False))
    assert compared.err.count("pipedec: 2 stages, stpp") == (margin > 1e-3), "one line in the end"
