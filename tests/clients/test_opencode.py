"""opencode against a scripted model: it reads a file, edits it, and ends."""

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


def opencode(site: AgentSite, folder: Path, task: str) -> list[dict[str, Any]]:
    """The events of a session in ``folder`` that ends with status 0."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "pipedec",
        "options": {"baseURL": f"{site.url}/v1", "apiKey": "any"},
        "models": {MODEL: {"name": MODEL}},
    }
    config = {"model": f"pipedec/{MODEL}", "provider": {"pipedec": provider}, "autoupdate": False, "share": "disabled"}
    (folder / "opencode.json").write_text(json.dumps(config))
    home = folder.parent / "home"
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    ended = subprocess.run(
        [str(agent_program("opencode")), "run", "--auto", "--format", "json", task],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}\n{site.exchanges}"
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_opencode_reads_and_edits_a_file(tokenizer_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    file = folder / "greeting.txt"
    file.write_text("Hello, world.\n")
    answers = [
        f"I read the file.\n{call('read', filePath=str(file))}",
        call("edit", filePath=str(file), oldString="world", newString="Köln"),
        "The greeting is for Köln now.",
    ]
    with scripted_agent(tokenizer_files, tmp_path / "tokenizer", answers) as site:
        events = opencode(site, folder, "Greet Köln instead.")
    assert file.read_text() == "Hello, Köln.\n"
    assert set(site.answered) == {("POST", "/v1/chat/completions", 200)}
    assert [event["part"]["text"] for event in events if event["type"] == "text"] == ["I read the file.", answers[-1]]
    used = [event["part"]["state"]["status"] for event in events if event["type"] == "tool_use"]
    assert used == ["completed", "completed"]
