"""Build the wheels and source distributions of pipedec and its models, check them, and try them as a user installs them.

    python tests/support/release.py DIST PYTHONS REQUIREMENT...

Each of PYTHONS, like ``"3.11 3.12"``, gets an environment with nothing in it, by ``uv tool install`` with constraints.txt and the
requirements, and answers a prompt there, outside the checkout. uv, twine and check-wheel-contents are those of this interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {"pipedec": ROOT, "pipedec_models": ROOT / "models"}
DEMO = ("generate", "--prompt", "Name three colors.", "--stages", "2", "--max-tokens", "8")


def build(dist: Path) -> list[Path]:
    """Make both source distributions in ``dist``, a wheel from each, and return the wheels. Exits if a wheel made from the
    checkout differs.
    """
    wheels = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, project in PROJECTS.items():
            run("uv", "build", "--quiet", "--out-dir", dist, project)  # the wheel from the source distribution
            run("uv", "build", "--quiet", "--wheel", "--out-dir", scratch, project)
            (direct,) = Path(scratch).glob(f"{name}-*.whl")
            wheels.append(dist / direct.name)
            if differing := sorted(name for name, _ in contents(direct) ^ contents(wheels[-1])):
                sys.exit(f"{direct.name}: from the source distribution it differs in {', '.join(dict.fromkeys(differing))}")
    return wheels


def contents(wheel: Path) -> set[tuple[str, int]]:
    """The files in a wheel, each with its checksum."""
    with ZipFile(wheel) as archive:
        return {(entry.filename, entry.CRC) for entry in archive.infolist()}


def check(dist: Path, wheels: Sequence[Path]) -> None:
    """Exits if a package index would refuse a file, or a wheel has what it should not have."""
    run("twine", "--no-color", "check", "--strict", *sorted(dist.glob("*-*")))
    for wheel, project in zip(wheels, PROJECTS.values(), strict=True):
        run("check-wheel-contents", "--config", project / "pyproject.toml", wheel)
        required = tomllib.loads((project / "pyproject.toml").read_text())["project"]["requires-python"]
        print(f"{wheel.name}: Python {required}, {wheel.stat().st_size / 1e6:.1f} MB")


def why_not(python: str, wheels: Sequence[Path], requirements: Sequence[str]) -> str | None:
    """Install and run the program with this version of Python. None if it has answered, else why it was not tried; exits if the
    answer fails.
    """
    interpreter = interpreter_of(python)
    if interpreter is None:
        return "no such interpreter here"
    with tempfile.TemporaryDirectory() as scratch:
        places = {"UV_TOOL_DIR": f"{scratch}/tools", "UV_TOOL_BIN_DIR": f"{scratch}/bin", "PIPEDEC_STATE_DIR": f"{scratch}/state"}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | places
        extras = [f"--with={one}" for one in [str(wheels[1]), *requirements]]
        installing = ("tool", "install", "--quiet", "--python", interpreter, "--constraints", "constraints.txt")
        installed = call("uv", *installing, *extras, wheels[0], environment=environment)
        if installed.returncode != 0:
            reasons = [line.partition("Because ")[2] for line in installed.stderr.splitlines() if "Because " in line]
            return reasons[0] if reasons else installed.stderr.strip()
        os.mkdir(f"{scratch}/elsewhere")
        tried: tuple[tuple[str, ...], ...] = (("--version",), DEMO)
        for arguments in tried:
            answered = call(f"{scratch}/bin/pipedec", *arguments, environment=environment, directory=f"{scratch}/elsewhere")
            if answered.returncode != 0 or not answered.stdout.strip():
                sys.exit(f"Python {python}: pipedec {arguments[0]}: {answered.stdout}{answered.stderr}")
            print(f"Python {python}: {answered.stdout.strip()}")
    return None


def interpreter_of(python: str) -> str | None:
    """The path of the interpreter with this version, on the PATH or of pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = (
        call("uv", "python", "find", "--no-python-downloads", "--no-project", one)
        for one in [python, *map(str, pyenv.glob(f"{python}.*/bin/python"))]
    )
    return next((ended.stdout.strip() for ended in found if ended.returncode == 0), None)


def run(program: str, *arguments: str | Path) -> None:
    """Exits with what a tool has printed if it fails."""
    ended = call(program, *arguments)
    if ended.returncode != 0:
        sys.exit(f"{program} {arguments[0]}: {ended.stdout}{ended.stderr}")


def call(
    program: str, *arguments: str | Path, environment: dict[str, str] | None = None, directory: str | Path = ROOT
) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).parent / program  # an absolute path stays what it is
    return subprocess.run(
        [tool, *arguments], env=environment, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def main(dist: str, pythons: str, *requirements: str) -> None:
    directory = Path(dist).absolute()
    wheels = build(directory)
    check(directory, wheels)
    reasons = {python: why_not(python, wheels, requirements) for python in pythons.split()}
    untried = [f"Python {python} was not tried: {reason}" for python, reason in reasons.items() if reason is not None]
    if untried:
        sys.exit("\n".join(untried))


if __name__ == "__main__":
    main(*sys.argv[1:])
