"""Package, changelog and classifiers name the same versions, of pipedec and of Python. `make release` tries the wheels."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from pipedec import __version__

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_changelog_ends_with_this_version_or_what_comes_after_it() -> None:
    headings = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [re.fullmatch(r"(\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d", heading) for heading in headings if heading != "Unreleased"]
    versions = [match[1] for match in released if match is not None]
    assert len(versions) == len(released) and "Unreleased" not in headings[1:], headings
    assert headings[0] == "Unreleased" or versions[0] == __version__
    assert __version__ in versions or not versions, "a version without a section"
    assert versions == sorted(versions, key=lambda version: [int(part) for part in version.split(".")], reverse=True)


def test_versions_of_python_are_those_that_a_release_tries() -> None:
    tried = re.findall(r"^PYTHONS \?= (.+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: \d\.\d+$", name)]
    assert named == tried and PROJECT["requires-python"] == f">={tried[0]}"


def test_the_models_have_the_licence_of_the_program() -> None:
    licence = ROOT / "models" / "LICENSE"
    assert not licence.is_symlink(), "a link leads nowhere in a source distribution"
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
