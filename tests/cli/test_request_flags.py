"""Flags of a request: what becomes of them, what a running cluster answers to some, and how an answer is resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.processes import wait_until
from support.programs import Calls
from support.programs import Calls as Pipedec

from pipedec.cli.options import RequestFlags, request_options
from pipedec.cluster.local import LocalCluster
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import LOCAL_TENANT, PromptRequest

pytestmark = pytest.mark.usefixtures("leaves_nothing")

ASKED = ("submit", "--raw-prompt", "--prompt", "Twelve crows counted", "--ignore-eos", "--json")


def requests(*flags: str) -> list[PromptRequest]:
    """Of a command with these flags."""
    found: list[PromptRequest] = []

    @click.command()
    @request_options
    def command(asked: RequestFlags) -> None:
        found.extend(asked.requests())

    CliRunner().invoke(command, flags, catch_exceptions=False)
    return found


def test_every_sampling_flag_sets_its_parameter() -> None:
    (request,) = requests(
        "--prompt", "a", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7",
        "--max-tokens", "5", "--stop", "x", "--stop", "y", "--repetition-penalty", "1.5", "--presence-penalty", "0.5",
        "--frequency-penalty", "-0.5", "--logit-bias", "70=100", "--logit-bias", "71=99.5", "--ignore-eos", "--logprobs", "2",
        "--priority", "3", "--raw-prompt", "--method", "pp",
    )  # fmt: skip
    assert request.sampling == SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7, max_tokens=5, stop=("x", "y"), repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={70: 100, 71: 99.5}, ignore_eos=True, logprobs=2,
    )  # fmt: skip
    assert (request.priority, request.raw, request.method) == (3, True, "pp")


def test_requests_of_the_command_line_have_one_tenant() -> None:
    assert {request.tenant for request in requests("--prompt", "one", "--prompt", "two")} == {LOCAL_TENANT}


def test_a_drawn_answer_comes_again_with_its_seed(pipedec: Calls, known_resident: LocalCluster) -> None:
    flags = ("--temperature", "0.9", "--top-k", "40", "--max-tokens", "16")
    drawn = json.loads(pipedec(*ASKED, *flags, "--logprobs", "2").out)
    assert [len(found) in (2, 3) for found in drawn["logprobs"]] == [True] * 16
    assert [int(next(iter(found))) for found in drawn["logprobs"]] == drawn["token_ids"]
    again = json.loads(pipedec(*ASKED, *flags, "--method", "pp", "--seed", str(drawn["seed"])).out)
    assert again["token_ids"] == drawn["token_ids"] and "logprobs" not in again
    bias = ("--logit-bias", "70=100", "--logit-bias", "71=99.5", "--max-tokens", "6")
    biased = json.loads(pipedec(*ASKED, *bias).out)
    assert biased["seed"] is None and set(biased["token_ids"]) == {70, 71}
    stop = biased["text"][1:3]
    stopped = json.loads(pipedec(*ASKED, *bias, "--stop", "x", "--stop", stop).out)
    assert (stopped["text"], stopped["finish_reason"]) == (biased["text"][: biased["text"].index(stop)], "stop")
    shown = pipedec(*ASKED[:-1], "--temperature", "1", "--seed", "123456789", "--max-tokens", "2")
    assert re.search(r"seed +│ +123456789", shown.err)


def test_two_methods_are_compared_on_one_prompt(pipedec: Calls, known_resident: LocalCluster) -> None:
    shown = pipedec(*ASKED[:-1], "--max-tokens", "8", "--compare", "pp").err
    table = {name: float(count) for name, count in re.findall(r"│ +(p[\w /-]+?) │ +[\d.]+×? │ +([\d.]+)×? │", shown)}
    stages = known_resident.topology.num_stages
    assert table["pp"] == stages >= table["pipedec-bestfirst"]  # by a draft that is seldom right
    assert table["pp / pipedec-bestfirst"] == pytest.approx(stages / table["pipedec-bestfirst"], rel=0.02)
    assert "where every stage has a GPU of its own" in shown
    for flags in (("--json",), ("--prompt", "Another")):
        refused = pipedec(*ASKED[:-1], "--compare", "pp", *flags)
        assert refused.status == 2 and "--compare goes with one prompt" in refused.err


def test_a_repeated_answer_takes_fewer_timesteps_unless_it_is_off(pipedec: Calls, known_resident: LocalCluster) -> None:
    """A request with ``off`` neither uses earlier answers nor is kept for later ones."""

    def timesteps(shared: str) -> int:
        """Of an answer without a draft model."""
        flags = ("--proposers", "ngrams", "--width", "8", "--max-tokens", "24", "--temperature", "1.5", "--seed", "5")
        return int(json.loads(pipedec(*ASKED, *flags, "--shared-suffixes", shared).out)["timesteps"])

    without, first, second, again = (timesteps(shared) for shared in ("off", "on", "on", "off"))
    assert second < min(without, first, again) / 1.5
    for command in ("submit", "generate", "serve", "up"):
        refused = pipedec(command, "--shared-suffixes", "maybe").refused()
        assert "'--shared-suffixes': 'maybe' is not one of 'on', 'off'" in refused


def test_answers_have_the_form_that_is_asked_for(pipedec: Calls, known_resident: LocalCluster, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    form = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    schema.write_text(json.dumps(form))
    grammar.write_text('start: "<" ("a" | "b"){2} ">"')
    for flags, possible in (
        (["--json-schema", json.dumps(form)], {'{"a": 1}', '{"a": 2}'}),
        (["--json-schema", schema], {'{"a": 1}', '{"a": 2}'}),
        (["--regex", "[xy]{1,2}"], {"x", "y", "xx", "xy", "yx", "yy"}),
        (["--choice", "first", "--choice", "last"], {"first", "last"}),
        (["--grammar", grammar], {"<aa>", "<ab>", "<ba>", "<bb>"}),
    ):
        answered = pipedec("submit", "--prompt", "Hello", "--temperature", "1", *flags)
        assert answered.status == 0 and answered.out.rstrip("\n") in possible
    address = known_resident.address
    chat = ("chat", "--redis", address.redis_url, "--run", address.run_id, "--choice", "yes", "--choice", "no")
    chatted = pipedec(*chat, stdin=b"Hello\n")
    assert chatted.status == 0 and chatted.out.strip() in ("yes", "no")


RESUMED = ["--raw-prompt", "--method", "pp", "--ignore-eos", "--prompt", "Natalia sold clips to all of her friends"]
DRAWN = ["--temperature", "0.9", "--logprobs", "1"]


def answered(pipedec: Pipedec, *flags: str | Path) -> dict[str, Any]:
    ended = pipedec("submit", *RESUMED, "--json", *flags)
    assert ended.status == 0, ended.err
    document: dict[str, Any] = json.loads(ended.out)
    return document


def test_an_answer_goes_on_where_its_file_ends(known_resident: LocalCluster, pipedec: Pipedec, tmp_path: Path) -> None:
    begun = answered(pipedec, *DRAWN, "--max-tokens", "6", "--seed", "5")
    file = tmp_path / "begun.json"
    file.write_text(json.dumps(begun))
    whole = answered(pipedec, *DRAWN, "--max-tokens", "14", "--seed", "5")
    resumed = answered(pipedec, *DRAWN, "--max-tokens", "14", "--resume", file)
    assert [resumed[name] for name in ("token_ids", "text", "seed")] == [whole[name] for name in ("token_ids", "text", "seed")]
    assert resumed["logprobs"][:6] == begun["logprobs"] and len(resumed["logprobs"]) == 14
    shown = pipedec("submit", *RESUMED, "--temperature", "0.9", "--max-tokens", "14", "--resume", file)
    assert shown.status == 0 and whole["text"].endswith(shown.out.removesuffix("\n")) and shown.out != whole["text"] + "\n"


def test_what_cannot_be_resumed(known_resident: LocalCluster, pipedec: Pipedec, tmp_path: Path) -> None:
    file = tmp_path / "begun.json"
    assert "cannot read" in pipedec("submit", *RESUMED, "--resume", file).refused()
    for text, flags, message in (
        ("no JSON", (), "give one completion as --json prints it"),
        ('{"token_ids": [5]}', ("--prompt", "another one"), "2 prompts: --resume goes with one"),
        ('{"token_ids": [5]}', ("--temperature", "1"), "give its seed"),
    ):
        file.write_text(text)
        assert message in pipedec("submit", *RESUMED, "--resume", file, *flags).refused()


def test_the_status_says_how_much_kv_memory_is_used(known_resident: LocalCluster, pipedec: Pipedec) -> None:
    answered(pipedec, "--max-tokens", "2")
    scheduler = known_resident.scheduler
    assert scheduler is not None and wait_until(lambda: (stats := scheduler.status().stats) is not None and stats.kv.used == 0)
    line = pipedec("status").err
    assert "KV cache: 0 of " in line and "slots in use" in line and "pauses." in line
