"""docs/serving.md: the tests that its table names exist, and so do the flags that it speaks of."""

from __future__ import annotations

import re
from pathlib import Path

from pipedec.cli.serve import serve
from pipedec.cli.submit import submit

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "serving.md").read_text()


def test_every_case_has_a_test() -> None:
    cases = [line for line in GUIDE.splitlines() if re.match(r"\| (H\d|K\d|  *\|).*`test_", line)]
    numbers = re.findall(r"\b[HK]\d+\b", " ".join(line.split("|")[1] for line in cases))
    assert numbers == [f"H{number}" for number in range(1, 23)] + [f"K{number}" for number in range(1, 8)]
    named = set(re.findall(r"`(test_\w+)`", GUIDE))
    defined = {name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    assert named <= defined, named - defined


def test_every_flag_exists() -> None:
    flags = {name for command in (serve, submit) for parameter in command.params for name in parameter.opts} | {"--help"}
    spoken = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"```(nginx|ini).*?```", "", GUIDE, flags=re.DOTALL)))
    assert spoken - {"--config"} <= flags, spoken - flags  # --config.file is Prometheus'
