"""``LLM`` in scripts as people write them: without a guard of the main part, from a file or from standard input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_pair import Pair

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.mark.slow
@pytest.mark.parametrize("source", [pytest.param("file", marks=pytest.mark.slow), "standard input"])
def test_a_script_needs_no_guard(pair: Pair, tmp_path: Path, source: str) -> None:
    script = f"""
from pipedec import LLM, SamplingParams

with LLM({str(pair.target)!r}, {str(pair.draft)!r}, stages=1) as llm:
    print(len(llm.generate("Natalia sold", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path)] if source == "file" else [sys.executable, "-"]
    stdin = script if source == "standard input" else ""
    ended = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3\n", "")
