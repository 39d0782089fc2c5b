"""What documents and docstrings name in backticks exists: paths, modules, classes, functions, attributes, settings and flags.

A path is relative to the top, to ``pipedec/`` or to the page's own folder. Of a dotted name, each part is a member of the module
or class before it. On a page, names directly after a file are defined there. ``NAME`` and a few other words in capitals stand for
anything.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pipedec"
FOLDERS = (ROOT, PACKAGE, ROOT / "tests")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
OURS = ("py", "lua", "md", "toml", "yaml", "sbatch")  # suffixes of files
USERS = ("json", "jsonl", "gz", "log", "part", "safetensors", "jinja", "model")
OTHERS = {
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "TMPDIR", "LimitNOFILE", "TimeoutStopSec", "taskset",
    "proc", "XREAD", "BLPOP", "PIPEDEC", "everysec", "cudaStreamSynchronize", "Default", "Exclusive_Process",
    "--nnodes", "--node-rank",
    "--hypothesis-profile=random --hypothesis-seed=7",
    "gpu-day/REVISION-cuda/report.md", "STATE/logs/RUN/", "learned/", "summary.md",  # what users get
    "HF_HOME", "ORG/MODEL",
    "_bytes", "_ms", "readme", "--max-seqs N",  # parts of names, and examples
}  # fmt: skip
IN_A_FILE = re.compile(r"(`[\w/]+\.(?:py|lua)`) (`[\w.]+`(?:, `[\w.]+`)*)")
ANYTHING = re.compile(r"(?<![A-Za-z0-9_])(?:NAME|GROUP|OLD|NEW|RUN|EPOCH|OUT)(?![A-Za-z0-9_])")


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_exists(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert missing(re.findall(r"`([^`\n]+)`", IN_A_FILE.sub(r"\1", prose)), page) == []
    in_files = [(path.strip("`"), name) for path, names in IN_A_FILE.findall(prose) for name in re.findall(r"[\w.]+", names)]
    assert [(path, name) for path, name in in_files if not is_in_file(name, path, page)] == []


def test_docstrings_name_what_exists() -> None:
    found = {
        str(file.relative_to(ROOT)): missing(re.findall(r"``([^`\n]+)``", file.read_text(encoding="utf-8")), file)
        for file in PACKAGE.rglob("*.py")
    }
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "named",
    ["engine/loops.py", "lua/grants.lua", "tests/test_core.py::test_none", "ThreadsManager", "Batch.proposes", "plan.plan",
     "core.request.NewPrompt", "max_num_requests", "--max-num-requests", "pipedec:epochs", "python -m benchmarks.policies",
     "make tests", "spec.settings.GROUP.NAME_OF", "advances()"],
)  # fmt: skip
def test_a_name_that_has_gone_is_found(named: str) -> None:
    assert missing([named], ROOT / "README.md") == [named]


@pytest.mark.parametrize(
    ("path", "name"),
    [("pipedec/tree/prediction_tree.py", "grow"), ("pipedec/tree/prediction_tree.py", "PredictionTree.shrink"),
     ("pipedec/tree/masks.py", "PredictionTree.grow"), ("lua/graph.lua", "grant_windows"), ("pipedec/tree/gone.py", "grow")],
)  # fmt: skip
def test_a_name_that_is_not_in_its_file_is_found(path: str, name: str) -> None:
    assert not is_in_file(name, path, ROOT / "README.md")
    assert is_in_file("PredictionTree.grow", "tree/prediction_tree.py", PAGES[0])
    assert is_in_file("complete", "lua/graph.lua", PAGES[0])


def missing(named: Iterable[str], page: Path) -> list[str]:
    return [one for one in named if one not in OTHERS and not exists(one, page)]


def exists(named: str, page: Path) -> bool:
    """Whether it does; True for what is neither a name nor a path of ours."""
    words = named.split()
    if run := re.search(r"python -m ([\w.]+)", named):
        return module_file(run[1].split("."), page) is not None
    if words[0] == "make" and len(words) > 1:
        return re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if flag := re.match(r"--(?:no-)?([a-z][a-z-]*)", named):
        return not all_definitions().names.isdisjoint((flag[1].replace("-", "_"), flag[1]))
    if metric := re.fullmatch(r"(?:pipedec|vllm):(\w+?)(?:_total)?", named):
        return metric[1] in re.findall(r"\w+", (PACKAGE / "server" / "metrics.py").read_text())
    path, _, test = named.partition("::")
    if re.fullmatch(r"\.?[\w-]+(/[\w.*-]+)*/|\.?[\w-]+(/[\w.*-]+)+", path) or re.fullmatch(rf"[\w-]+\.({'|'.join(OURS)})", path):
        pattern = ANYTHING.sub("*", path.rstrip("/"))
        file = first(pattern, page) or next(PACKAGE.rglob(pattern), None) or next((ROOT / "lua").glob(pattern), None)
        return file is not None and (not test or f"def {test}(" in file.read_text(encoding="utf-8"))
    name = re.fullmatch(r"@?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\(.*\))?", named)
    return name is None or name[1].rpartition(".")[2] in USERS or is_defined(name[1].split("."), page)


def is_in_file(named: str, path: str, page: Path) -> bool:
    """Whether the file has this function, class or constant, or this class with a member."""
    if (file := first(path, page)) is None:
        return False
    name, _, member = named.partition(".")
    if member:
        return name in definitions(file).members and member in all_definitions().members_of(name)
    openings = r"(?:(?:async )?def |class |(?:local )?function (?:\w+\.)?)?"
    return re.search(rf"^{openings}{name}\b", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def first(pattern: str, page: Path) -> Path | None:
    return next((found for folder in (*FOLDERS, page.parent) for found in folder.glob(pattern)), None)


def module_file(parts: list[str], page: Path) -> Path | None:
    place = ANYTHING.sub("*", "/".join(parts))
    return first(f"{place}.py", page) or first(f"{place}/__init__.py", page)


def is_defined(parts: list[str], page: Path) -> bool:
    known = all_definitions()
    if parts[0] in known.members:
        return len(parts) == 1 or parts[1] in known.members_of(parts[0])
    for count in range(len(parts), 0, -1):
        if (file := module_file(parts[:count], page)) is not None:
            return count == len(parts) or parts[count] in definitions(file).names
    if parts[0] in ("pytest", "torch", *sys.stdlib_module_names):
        return True
    if page.suffix == ".py" and parts[0] in definitions(page).foreign:
        return True
    return all(part in known.names or ANYTHING.fullmatch(part) for part in parts)


class Definitions(ast.NodeVisitor):
    """Names that modules define, or have as keys and choices; those of each class; and those from packages that are not ours."""

    def __init__(self, *files: Path) -> None:
        self.names = set(dir(builtins))
        self.members: dict[str, set[str]] = {}
        self.foreign = set[str]()
        self._bases: dict[str, set[str]] = {}
        self._classes: list[str] = []
        for file in files:
            self.visit(ast.parse(file.read_text(encoding="utf-8")))

    def members_of(self, name: str) -> set[str]:
        return self.members.get(name, set()).union(*map(self.members_of, self._bases.get(name, ())))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node.name)
        self.members.setdefault(node.name, set())
        self._bases.setdefault(node.name, set()).update(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._define(node.name)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node: ast.arg) -> None:
        self._define(node.arg)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.attr)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.foreign.update((one.asname or one.name).split(".")[0] for one in node.names if not is_ours(one.name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not is_ours(node.module or ""):
            self.foreign.update(one.asname or one.name for one in node.names)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and (word := re.fullmatch(r"(?:pipedec:|vllm:|--)?([A-Za-z_][\w-]*)", node.value)):
            self.names.add(word[1])

    def _define(self, name: str) -> None:
        self.names.add(name)
        if self._classes:
            self.members[self._classes[-1]].add(name)


def is_ours(name: str) -> bool:
    return name.split(".")[0] in ("pipedec", "benchmarks", "recipes")


@cache
def definitions(file: Path) -> Definitions:
    return Definitions(file)


@cache
def all_definitions() -> Definitions:
    """With the names of modules and Lua scripts, and of what tests define."""
    folders = ("pipedec", "benchmarks", "recipes", "launch")
    known = Definitions(*(file for name in folders for file in (ROOT / name).rglob("*.py")))
    known.names.update(file.stem for folder in FOLDERS[1:] for file in folder.rglob("*.py"))
    known.names.update(file.stem for file in (ROOT / "lua").glob("*.lua"))
    for file in (ROOT / "tests").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        known.names.update(re.findall(r"^ *(?:async def |def |class |(?=\w+(?:: .*)? = ))(\w+)", text, re.MULTILINE))
    return known
