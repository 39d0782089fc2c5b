"""Claude Code against a scripted model: it reads a file, edits it, and ends."""

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


def claude(site: AgentSite, folder: Path, task: str) -> dict[str, Any]:
    """The result of a session in ``folder`` that ends with status 0."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder.parent),
        "ANTHROPIC_BASE_URL": site.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = [str(agent_program("claude")), "-p", task, "--output-format", "json", "--allowedTools", "Read,Edit"]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}\n{site.exchanges}"
    return json.loads(ended.stdout)


def test_claude_code_reads_and_edits_a_file(tokenizer_files: Path, tmp_path: Path) -> None:
    """It also goes on after a call with wrong arguments, and sends thoughts back."""
    folder = tmp_path / "project"
    folder.mkdir()
    file = folder / "greeting.txt"
    file.write_text("Hello, world.\n")
    answers = [
        f"<think>I must read it.</think>I read the file.\n{call('Read', file_path=str(file))}",
        call("Edit", file_path=str(file)).replace('"}', "}"),
        call("Edit", file_path=str(file), old_string="world", new_string="Köln"),
        "The greeting is for Köln now.",
    ]
    with scripted_agent(tokenizer_files, tmp_path / "tokenizer", answers) as site:
        result = claude(site, folder, "Greet Köln instead.")
    assert file.read_text() == "Hello, Köln.\n"
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, answers[-1])
    sent = [request for request in site.answered if request[0] != "HEAD"]  # with which it connects early
    assert sent == [("POST", "/v1/messages", 200)] * len(answers)
    assert result["usage"]["output_tokens"] == sum(map(len, map(site.site.engine.tokenizer.encode, answers)))
    assert "I must read it.</think>I read the file.<tool_call>" in site.prompts[1]
    assert "InputValidationError" in site.prompts[2] and '"arguments": {"arguments": ' in site.prompts[2]
