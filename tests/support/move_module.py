"""Move a module or package and rewrite what names it, across the repository.

    python tests/support/move_module.py pipedec/engine/loop.py pipedec/engine/decode.py [OLD NEW ...]

Rewritten are imports in every form, dotted names in strings and settings, and paths in documents. A module's name follows
from its path: it begins with the topmost folder that has an ``__init__.py``. What git does not track is left alone.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

TEXT_SUFFIXES = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".lua", ".sh", ".cfg", ".luacheckrc", ""}


def module_name(path: Path) -> str:
    """The dotted name under which the file or package at ``path`` is imported."""
    parts = [path.stem if path.suffix == ".py" else path.name]
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(part for part in parts if part != "__init__")


def rewrite_imports(source: str, old: str, new: str) -> str:
    """Python source in which imports of module ``old`` from its package name ``new``. Dotted names are for ``rewrite_names``."""
    parent, _, leaf = old.rpartition(".")
    new_parent, _, new_leaf = new.rpartition(".")
    lines = source.splitlines(keepends=True)
    for node in sorted(ast.walk(ast.parse(source)), key=lambda node: -getattr(node, "lineno", 0)):
        if not isinstance(node, ast.ImportFrom) or node.module != parent or node.level:
            continue
        moved = {alias.name: alias.asname or alias.name for alias in node.names}
        if leaf not in moved:
            continue
        name = moved.pop(leaf)
        kept = ", ".join(alias if alias == shown else f"{alias} as {shown}" for alias, shown in moved.items())
        statements = [f"from {parent} import {kept}"] if kept else []
        statements.append(f"from {new_parent} import {new_leaf}" + ("" if name == new_leaf else f" as {name}"))
        comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()  # type: ignore[operator]
        text = "".join(f"{' ' * node.col_offset}{statement}\n" for statement in statements)
        lines[node.lineno - 1 : node.end_lineno] = [text[:-1] + f"  {comment}\n" if comment else text]
    return "".join(lines)


def rewrite_names(text: str, old: str, new: str) -> str:
    """Text in which the dotted name ``old``, alone or as the beginning of a longer one, is ``new``."""
    return re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w])", new, text) if "." in old else text


def rewrite_paths(text: str, old: Path, new: Path) -> str:
    """Text in which the path ``old`` is ``new``; documents name paths from the top, or from inside the package."""
    text = re.sub(rf"(?<![\w/.]){re.escape(str(old))}(?![\w])", str(new), text)
    if old.parts[0] != new.parts[0] or len(old.parts) < 3:
        return text
    inside_old, inside_new = Path(*old.parts[1:]), Path(*new.parts[1:])
    return re.sub(rf"(?<![\w/.]){re.escape(str(inside_old))}(?![\w])", str(inside_new), text)


def tracked_texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for path in map(Path, listed) if path.suffix in TEXT_SUFFIXES and path.exists()]


def move(old: Path, new: Path) -> None:
    """Move the file or package with git, and rewrite every tracked text."""
    old_name = module_name(old)
    new.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", str(old), str(new)], check=True)
    new_name = module_name(new)
    for path in tracked_texts():
        try:
            before = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if old.stem not in before:
            continue
        after = rewrite_imports(before, old_name, new_name) if path.suffix == ".py" else before
        after = rewrite_paths(rewrite_names(after, old_name, new_name), old, new)
        if after != before:
            path.write_text(after, encoding="utf-8")


def main(arguments: list[str]) -> None:
    if not arguments or len(arguments) % 2:
        raise SystemExit("give pairs of paths: OLD NEW [OLD NEW ...], from the top of the repository")
    for old, new in zip(arguments[::2], arguments[1::2], strict=True):
        if not Path(old).exists():
            raise SystemExit(f"{old} does not exist")
        if Path(new).exists():
            raise SystemExit(f"{new} exists already")
        move(Path(old), Path(new))
    changed = subprocess.run(["git", "diff", "--name-only", "HEAD", "--", "*.py"], check=True, capture_output=True, text=True)
    files = [name for name in changed.stdout.splitlines() if Path(name).exists()]
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--quiet", "--fix", "--select", "I", *files], check=True)  # imports in their new order
    subprocess.run([*ruff, "format", "--quiet", *files], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
