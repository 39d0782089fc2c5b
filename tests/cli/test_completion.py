"""Completion of the command line: as a shell asks for it, and in a real bash."""

from __future__ import annotations

import os
import subprocess

import pytest
from click.shell_completion import BashComplete
from support.programs import PROGRAM, Calls

from pipedec.cli.completion import SHELLS
from pipedec.cli.main import COMMANDS, MOVED, program

pytestmark = pytest.mark.usefixtures("leaves_nothing")

IN_BASH = """
eval "$(pipedec completion bash)"
for last in se "completion f" "serve --dtype fl"; do
    COMP_WORDS=(pipedec $last) COMPREPLY=()
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _pipedec_completion pipedec
    echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.parametrize("typed, offered", [
    ("", [f"plain,{name}" for name in COMMANDS]),
    ("bench po", []),
    ("train b", ["plain,bita"]),
    ("--v", ["plain,--version"]),
    ("doctor --", ["plain,--cluster", "plain,--partition", "plain,--json", "plain,--help"]),
    ("generate --dtype fl", ["plain,float32", "plain,float64", "plain,float16"]),
    ("generate --shared-suffixes o", ["plain,on", "plain,off"]),
    ("generate --target ", ["file,"]),
    ("generate --target smo", ["plain,smollm2"]),
    ("generate --target ./smo", ["file,./smo"]),
    ("generate --bita ", ["dir,"]),
    ("submit --proposers draft,n", ["plain,draft,ngrams"]),
    ("submit --redis r", []),
    ("plan ", ["file,"]),
])  # fmt: skip
def test_commands_options_values_and_paths_are_offered(typed: str, offered: list[str]) -> None:
    bash = BashComplete(program, {}, "pipedec", "_PIPEDEC_COMPLETE")
    *before, last = typed.split(" ")
    assert [bash.format_completion(item) for item in bash.get_completions(before, last)] == offered
    assert {name.split()[-1] for name in MOVED}.isdisjoint(offered)


def test_a_bash_completes_and_loads_no_torch() -> None:
    environment = {**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "PYTHONPROFILEIMPORTTIME": "1"}
    ran = subprocess.run(["bash", "--norc", "-c", IN_BASH], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["serve", "fish", "float32 float64 float16"]
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")}
    assert "pipedec.config.settings" in imported and imported.isdisjoint({"torch", "transformers", "numpy"})


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_its_script(pipedec: Calls, shell: str) -> None:
    printed = pipedec("completion", shell)
    assert printed.status == 0 and f"_PIPEDEC_COMPLETE={shell}_complete" in printed.out and printed.err == ""


def test_another_shell_is_refused(pipedec: Calls) -> None:
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in pipedec("completion", "csh").refused()
