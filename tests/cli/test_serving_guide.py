"""docs/serving.md: the flags that it speaks of exist. Its cases and their tests are on the page about failures."""

from __future__ import annotations

import re
from pathlib import Path

from pipedec.cli.answers import submit
from pipedec.cli.serve import serve

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()


def test_every_flag_exists() -> None:
    flags = {name for command in (serve, submit) for parameter in command.params for name in parameter.opts} | {"--help"}
    spoken = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"```(nginx|ini).*?```", "", GUIDE, flags=re.DOTALL)))
    assert spoken <= flags, spoken - flags
