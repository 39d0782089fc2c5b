"""Codex against a scripted model: it reads a file with a command, edits it, and ends."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients.conftest import agent_program
from support.scripted_agents import MODEL, AgentSite, call, scripted_agent

pytestmark = pytest.mark.slow

RUN_SECONDS = 120
CONFIG = """
model = "{model}"
model_provider = "pipedec"

[model_providers.pipedec]
name = "pipedec"
base_url = "{url}/v1"
env_key = "PIPEDEC_API_KEY"
wire_api = "responses"
"""


PATCH = """*** Begin Patch
*** Update File: greeting.txt
@@
-Hello, world.
+Hello, Köln.
*** End Patch
"""
EDITS = {  # by the name of the model, which decides on the tools: a command, and a custom tool
    MODEL: call("exec_command", cmd="sed -i s/world/Köln/ greeting.txt"),
    "gpt-5.5": call("apply_patch", input=PATCH),
}


def codex(site: AgentSite, model: str, folder: Path, task: str) -> list[dict[str, Any]]:
    """The events of a session in ``folder`` that ends with status 0."""
    home = folder.parent / "codex"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=model, url=site.url))
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "PIPEDEC_API_KEY": "any"}
    flags = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    ended = subprocess.run(
        [str(agent_program("codex")), "exec", *flags, task],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}\n{site.exchanges}"
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("model", EDITS)
def test_codex_reads_and_edits_a_file(tokenizer_files: Path, tmp_path: Path, model: str) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    file = folder / "greeting.txt"
    file.write_text("Hello, world.\n")
    reads = f"I read the file.\n{call('exec_command', cmd='cat greeting.txt')}"
    answers = [reads, EDITS[model], "The greeting is for Köln now."]
    with scripted_agent(tokenizer_files, tmp_path / "tokenizer", answers, "gpt-5.5") as site:
        events = codex(site, model, folder, "Greet Köln instead.")
    assert file.read_text() == "Hello, Köln.\n"
    assert set(site.answered) == {("POST", "/v1/responses", 200)}
    said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    assert said == ["I read the file.", answers[-1]]
    asked, read, edited = site.prompts
    assert "Greet Köln instead." in asked and "Hello, world." not in asked
    assert all("I read the file." in prompt and "Hello, world." in prompt for prompt in (read, edited))
