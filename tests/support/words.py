"""Find words and openings in the prose of the package and its documentation that read as translated.

``python tests/support/words.py [PATH ...]`` prints ``file:line: sentence`` for each and exits with status 1 if there are any.
Without paths it reads the package and its documentation. In Python files it reads docstrings, comments and other strings with a
space (help texts, errors, log lines). Names in backticks, names of arguments, code blocks, and lines with the comment
``words: ok`` are left out.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

READ = ("pipedec", "benchmarks", "recipes", "docs", "lua", "launch", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")

WORDS = re.compile(r"\b(behind|told|said|tells|nobody|somebody|whoever|whatever)\b", re.IGNORECASE)
IDIOMS = re.compile(
    r"behind (a |the |another )?(reverse )?(proxy|firewall|NAT|nginx)\b|(leav|left).{,20} behind|behind the scenes", re.IGNORECASE
)
OPENINGS = re.compile(r"(Of|What)\b(?!.*\?$)")  # a docstring or help text that begins so is a fragment, unless it is a question
EXEMPT = "# words: ok"

Finding = tuple[int, str]  # a line, counted from 1, and the sentence


def main(arguments: list[str]) -> int:
    """Print the findings in the files ``arguments``, by default ``READ``. Returns the exit status."""
    num_found = 0
    for path in files(arguments or READ):
        text = path.read_text(encoding="utf-8")
        for line, sentence in in_python(text) if path.suffix == ".py" else in_markdown(text):
            print(f"{path}:{line}: {sentence}")
            num_found += 1
    return int(num_found > 0)


def files(paths: tuple[str, ...] | list[str]) -> Iterator[Path]:
    """The Python and Markdown files at and below ``paths``, sorted."""
    for path in map(Path, paths):
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in below:
            if file.suffix in (".py", ".md"):
                yield file


def in_python(source: str) -> list[Finding]:
    """Findings in docstrings, help texts, other strings with a space, and comments."""
    lines = source.split("\n")
    found: set[Finding] = set()
    for first, text, is_opening in [*_strings(ast.parse(source)), *_comments(source)]:
        found.update((first + offset, sentence) for offset, sentence in _in_text(text, is_opening))
    return sorted((line, sentence) for line, sentence in found if not lines[line - 1].endswith(EXEMPT))


def in_markdown(text: str) -> list[Finding]:
    """Findings in the text outside fenced and indented code."""
    prose = re.sub(r"^```.*?^```|^    .*?$", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return [(1 + offset, sentence) for offset, sentence in _in_text(prose, is_opening=False)]


def _in_text(text: str, is_opening: bool) -> Iterator[Finding]:
    prose = re.sub(r"``.+?``|`[^`\n]+`|^ +[a-z_, ]+(?=: )", lambda name: re.sub(r"\w", "_", name[0]), text, flags=re.MULTILINE)
    if is_opening and OPENINGS.match(prose.strip().partition("\n\n")[0]):
        yield 0, _sentence_at(text, len(text) - len(text.lstrip()))
    for match in WORDS.finditer(prose):
        if not any(idiom.start() <= match.start() < idiom.end() for idiom in IDIOMS.finditer(prose)):
            yield text.count("\n", 0, match.start()), _sentence_at(text, match.start())


def _sentence_at(text: str, position: int) -> str:
    ends = [end.end() for end in re.finditer(r"[.!?]\s+|\n\s*\n", text)]
    first = max((end for end in ends if end <= position), default=0)
    last = min((end for end in ends if end > position), default=len(text))
    return " ".join(text[first:last].split())


def _strings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it opens a description, of each string that may hold a sentence."""
    opening: set[int] = set()
    part_of_another: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            if isinstance(node.body[0], ast.Expr):
                opening.add(id(node.body[0].value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Help" and node.args:
            opening.add(id(node.args[0]))
        elif isinstance(node, ast.JoinedStr):
            part_of_another.update(map(id, node.values))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_text_of(part) or "…" for part in node.values), False
        elif isinstance(node, ast.Constant) and (text := _text_of(node)) and id(node) not in part_of_another and " " in text:
            yield node.lineno, text, id(node) in opening


def _text_of(node: ast.AST) -> str | None:
    """What a constant says; None for anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _comments(source: str) -> Iterator[tuple[int, str, bool]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
