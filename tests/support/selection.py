"""A pytest plugin that chooses tests for a change: those that reach what it touches, and a quarter of the others.

``--quarter K`` runs the test files of a quarter, by a hash of their paths. ``--changed-since REVISION`` runs the tests that reach
a file changed since then, by the imports of packages (grimp), test files and the files of fixtures. Both together run the union,
but leave out of the quarter what ``make test-isa`` runs of it: tests marked ``numbers``, but not properties, of which it tries
fewer examples.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

QUARTERS = 4
PACKAGES = ("pipedec", "benchmarks", "recipes")
# What a test marked ``processes`` reaches although nothing imports it there: ranks, and the commands of the program.
IN_PROCESSES = ("pipedec.cluster.fork_server", "pipedec.cli")
# What can change the meaning of every test.
EVERYTHING = ("pyproject.toml", "constraints.txt", "models/", "tests/conftest.py")
# Scripts that run in Redis, for which ranks wait.
SCRIPTS = "lua/"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quarter", type=int, choices=range(QUARTERS), help="only the tests of a quarter of the files")
    parser.addoption("--changed-since", metavar="REVISION", help="only the tests that reach what has changed since a revision")
    parser.addoption("--architecture-rows", help="try all of them, and write what is found to this folder")


@pytest.hookimpl(trylast=True)  # when all tests have their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quarter, revision = config.getoption("quarter"), config.getoption("changed_since")
    if quarter is None and revision is None:
        return
    reaches = reach(config.rootpath, revision) if revision is not None else None

    def is_chosen(item: pytest.Item) -> bool:
        is_in_quarter = quarter == quarter_of(item.path.relative_to(config.rootpath).as_posix())
        if reaches is None:
            return is_in_quarter
        runs_elsewhere = item.get_closest_marker("numbers") and not item.get_closest_marker("hypothesis")
        return (is_in_quarter and not runs_elsewhere) or reaches(item)

    chosen = {item: is_chosen(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not chosen[item]])
    items[:] = [item for item in items if chosen[item]]


def quarter_of(path: str) -> int:
    """The quarter that a file is in, by its path relative to the root."""
    return zlib.crc32(path.encode()) % QUARTERS


def changed_files(root: Path, revision: str) -> frozenset[str] | None:
    """Paths relative to ``root`` that differ from a revision in the working tree; None if that revision is not known."""
    done = subprocess.run(
        ["git", "-C", root, "diff", "--name-only", "--no-renames", revision], capture_output=True, text=True, check=False
    )
    return frozenset(done.stdout.splitlines()) if done.returncode == 0 else None


def reach(root: Path, revision: str) -> Callable[[pytest.Item], bool]:
    """Whether a test reaches what has changed since a revision; every test does if it is not known."""
    files = changed_files(root, revision)
    if files is None or any(path.startswith(EVERYTHING) for path in files):
        return lambda item: True
    return Reach(root, files)


class Reach:
    """Which tests reach one of these files.

    Args:
        root: the checkout.
        files: paths relative to ``root``.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self._tests = root / "tests"
        self._graph = grimp.build_graph(*PACKAGES, cache_dir=None)
        changed = [root / path for path in files]
        self._changed_tests = {path for path in changed if self._tests in path.parents}
        self._changed_modules = set(self._modules_that_changed(root, changed))
        # Documents, settings, records and scripts are reached by the test files that name them.
        scripts = root / "launch"
        self._named = {path.name for path in changed if path.suffix != ".py" or path.parent == scripts}
        self._is_script_changed = any(path.startswith(SCRIPTS) for path in files)
        # A module is found again by every module that imports it, however indirectly.
        found = (self._graph.find_downstream_modules(module) for module in self._changed_modules)
        self._reaching = self._changed_modules.union(*found)

    def __call__(self, item: pytest.Item) -> bool:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
        places = {Path(inspect.getfile(definition.func)) for definitions in fixtures for definition in definitions}
        return self.is_reached({item.path, *places}, is_process=item.get_closest_marker("processes") is not None)

    def is_reached(self, files: Iterable[Path], is_process: bool = False) -> bool:
        """Whether a test does whose code and fixtures are in these files, and which starts processes or does not."""
        if is_process and (self._is_script_changed or any(map(self._is_reaching, IN_PROCESSES))):
            return True
        return any(
            self._is_file_reached(file) for file in files if self._tests in file.parent.parents or file.parent == self._tests
        )

    def _modules_that_changed(self, root: Path, changed: Iterable[Path]) -> Iterator[str]:
        for path in changed:
            folders = path.relative_to(root).with_suffix("").parts
            if folders[0] not in PACKAGES:
                continue
            name = ".".join(folders).removesuffix(".__init__")
            if path.suffix == ".py" and name in self._graph.modules:
                yield name
                if path.name == "__init__.py":  # runs before each module of its package
                    yield from self._graph.find_descendants(name)
            else:  # a page or a table of the package, or a module that is gone
                package = ".".join(folders[:-1])
                yield from (module for module in self._graph.modules if f"{module}.".startswith(f"{package}."))

    def _is_reaching(self, name: str) -> bool:
        """Whether a module, or one in a package of this name, is among those that reach a changed one."""
        return any(f"{module}.".startswith(f"{name}.") for module in self._reaching)

    def _is_file_reached(self, file: Path) -> bool:
        """Whether a test file, a helper of tests that it imports, or a conftest.py above it reaches one of the files."""
        above = (folder / "conftest.py" for folder in file.parents if self._tests in folder.parents)
        return any(self._is_reached_by(path) for start in (file, *above) for path in self._with_helpers(start))

    @cache  # noqa: B019 (as long as the run)
    def _is_reached_by(self, file: Path) -> bool:
        if file in self._changed_tests:
            return True
        imported = self._imports(file)
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return not self._reaching.isdisjoint(imported) or any(name in text for name in self._named)

    @cache  # noqa: B019
    def _with_helpers(self, file: Path) -> frozenset[Path]:
        """A file in tests, and those that it imports there, however indirectly."""
        found, waiting = set(), [file]
        while waiting:
            path = waiting.pop()
            if path not in found and path.exists():
                found.add(path)
                waiting += [self._tests.joinpath(*name.split(".")).with_suffix(".py") for name in self._imports(path)]
        return frozenset(found)

    @cache  # noqa: B019
    def _imports(self, file: Path) -> frozenset[str]:
        """Names of modules that a file imports anywhere in it, and of what it imports from them."""
        names: set[str] = set()
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        return frozenset(names)
