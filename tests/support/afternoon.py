"""The afternoon's reading list of docs/architecture.md with its sizes: ``python tests/support/afternoon.py`` prints a table.

Lines and functions per file, the median and the greatest length of a function in lines, and totals.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"^\d+\. `(?P<path>[\w/]+\.(?:py|lua))`[^:\n]*: (?P<sentence>.+)$", re.MULTILINE)


def listed() -> list[tuple[Path, str]]:
    """The files of the list, in order, each with its sentence."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return [(_file(entry["path"]), entry["sentence"]) for entry in ENTRY.finditer(text)]


def function_lengths(source: str) -> list[int]:
    """The length of each function and method of a Python source, in lines without decorators."""
    nodes = ast.walk(ast.parse(source))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [len(source.splitlines()[node.lineno - 1 : node.end_lineno]) for node in functions]


def main() -> int:
    """Print the table. Returns 1 if a file does not exist, else 0."""
    files = listed()
    if missing := [str(path) for path, _ in files if not path.is_file()]:
        print(f"docs/architecture.md lists files that do not exist: {', '.join(missing)}", file=sys.stderr)
        return 1
    all_lengths: list[int] = []
    total = 0
    print("| file | lines | functions | median | longest | |\n|---|---|---|---|---|---|")
    for path, sentence in files:
        source = path.read_text(encoding="utf-8")
        lengths = function_lengths(source) if path.suffix == ".py" else []
        total, all_lengths = total + source.count("\n"), all_lengths + lengths
        print(f"| `{path.relative_to(ROOT)}` | {source.count(chr(10))} | {_figures(lengths)} | {sentence} |")
    print(f"| {len(files)} files | {total} | {_figures(all_lengths)} | |")
    return 0


def _file(name: str) -> Path:
    return ROOT / name if name.startswith("lua/") else ROOT / "pipedec" / name


def _figures(lengths: list[int]) -> str:
    return f"{len(lengths)} | {sorted(lengths)[len(lengths) // 2]} | {max(lengths)}" if lengths else "0 | - | -"


if __name__ == "__main__":
    sys.exit(main())
