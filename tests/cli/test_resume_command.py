"""``--resume``: an answer goes on where a completion that ``--json`` has printed ends; and what users see of KV memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.processes import wait_until
from support.programs import Calls as Pipedec

from pipedec.cluster.local import LocalCluster

ASKED = ["--raw-prompt", "--method", "pp", "--ignore-eos", "--prompt", "Natalia sold clips to all of her friends"]
DRAWN = ["--temperature", "0.9", "--logprobs", "1"]


def answered(pipedec: Pipedec, *flags: str | Path) -> dict[str, Any]:
    ended = pipedec("submit", *ASKED, "--json", *flags)
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
    shown = pipedec("submit", *ASKED, "--temperature", "0.9", "--max-tokens", "14", "--resume", file)
    assert shown.status == 0 and whole["text"].endswith(shown.out.removesuffix("\n")) and shown.out != whole["text"] + "\n"


def test_what_cannot_be_resumed(known_resident: LocalCluster, pipedec: Pipedec, tmp_path: Path) -> None:
    file = tmp_path / "begun.json"
    assert "cannot read" in pipedec("submit", *ASKED, "--resume", file).refused()
    for text, flags, message in (
        ("no JSON", (), "give one completion as --json prints it"),
        ('{"token_ids": [5]}', ("--prompt", "another one"), "2 prompts: --resume goes with one"),
        ('{"token_ids": [5]}', ("--temperature", "1"), "give its seed"),
    ):
        file.write_text(text)
        assert message in pipedec("submit", *ASKED, "--resume", file, *flags).refused()


def test_the_status_says_how_much_kv_memory_is_used(known_resident: LocalCluster, pipedec: Pipedec) -> None:
    answered(pipedec, "--max-tokens", "2")
    scheduler = known_resident.scheduler
    assert scheduler is not None and wait_until(lambda: (stats := scheduler.status().stats) is not None and stats.kv.used == 0)
    line = pipedec("status").err
    assert "KV cache: 0 of " in line and "slots in use" in line and "pauses." in line
