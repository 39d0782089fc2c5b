"""Questions that the Python standard library answers with lists and paragraphs: its docstrings, comments and help topics.

Owns which parts of the library questions are about, and where such text begins and ends. Their wording is in ``list_questions``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics as pydoc_topics

from recipes.reference_models import corpus, list_questions
from recipes.reference_models.list_questions import Entry, explanations, listings
from recipes.thread_models.records import Question, read_questions
from recipes.thread_models.structure import MIN_DETAIL_CHARACTERS, MIN_POINTS, ambiguity, is_prose, sentences

# Written in C, so that their docstrings are in no source file.
_BUILTIN_TYPES = (
    str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, complex, range, slice, memoryview, property, type,
)  # fmt: skip
_BUILTIN_MODULES = (
    "builtins", "math", "cmath", "itertools", "functools", "collections", "time", "sys", "os", "operator", "array", "zlib",
    "select", "unicodedata", "binascii", "gc", "marshal", "signal", "struct", "socket", "decimal", "datetime", "io", "random",
    "re", "json", "statistics", "threading", "asyncio",
)  # fmt: skip

_CORPUS_KINDS = {"questions": "docstrings", "functions": "code"}  # by family
_COMMENT = re.compile(r"^\s*# ?(\S.*)$")
_NO_COMMENT = re.compile(r"\b(?:XXX|TODO|FIXME|NOTE|BUG|noqa|pragma|type:|pylint|mypy|bpo|gh-\d|Issue|issue)\b|[#=\-_]{4,}|#\d")
_NOUN = re.compile(
    r"\b(?:an?|the|of|from|for|in|with|into|to|all|new) ([a-z]{4,})"
    r"(?=[.,;)]|$| (?:of|in|to|from|for|with|and|or|is|as|by|on|at|that|using|given)\b)"
)
_NO_SUBJECTS = frozenset(
    ("given", "same", "other", "first", "last", "above", "next", "result", "value", "number", "such", "them")
)
_MAX_SHARING = 40  # a word that occurs in more descriptions is not a subject
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_STATEMENTS: dict[type[ast.stmt], str] = {
    ast.If: "Check", ast.For: "Loop", ast.AsyncFor: "Loop", ast.While: "Repeat", ast.Return: "Return", ast.Try: "Try",
    ast.With: "Within", ast.AsyncWith: "Within", ast.Raise: "Raise", ast.Import: "Import", ast.ImportFrom: "Import",
    ast.Delete: "Delete", ast.Assert: "Make sure",
}  # fmt: skip


def library_questions(seed: int) -> Iterator[Question]:
    """Questions about every module of the standard library, the builtins and the help topics; ``seed`` chooses the wordings."""
    modules: list[Entry] = []
    functions: list[Entry] = []
    classes: list[Entry] = []
    for name, source, tree in corpus.library_modules():
        module = _ModuleQuestions(name, source, tree, random.Random(f"{seed} {name}"))
        yield from module.all()
        modules.append(Entry(name, gloss(module.docstring)))
        functions += [Entry(f"{name}.{function}", gloss(doc)) for function, doc in module.functions.items()]
        classes += [Entry(f"{name}.{kind}", gloss(doc)) for kind, doc in module.classes.items()]
    rng = random.Random(f"{seed} packages")
    for package in sorted({entry.name.rpartition(".")[0] for entry in modules} - {""}):
        inside = [entry for entry in modules if entry.name.rpartition(".")[0] == package]
        yield from listings("modules", f"the package `{package}`", inside, rng)
    for noun, entries in (("modules", modules), ("functions", functions), ("classes", classes)):
        yield from _suggestion_questions(noun, entries, random.Random(f"{seed} {noun}"))
    yield from _builtin_questions(random.Random(f"{seed} builtins"))
    yield from _topic_questions(random.Random(f"{seed} topics"))


def write_questions(path: Path, problems: Path | None, seed: int) -> int:
    """Write all questions to a file for ``recipes.thread_models annotate --in``; returns their number.

    Word problems, if there are ``problems``, are asked two or three at a time.
    """
    several = list_questions.several_problems(list(read_questions([], problems)), random.Random(f"{seed} problems"))
    rows = [asdict(question) for question in (*library_questions(seed), *corpus_questions(), *several)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def corpus_questions() -> Iterator[Question]:
    """The conversations among the corpus's documents of the library."""
    for document in corpus.library_documents():
        turn, separator, answer = document.text.partition(corpus.END + corpus.ASSISTANT)
        if separator:
            prompt = turn.removeprefix(corpus.BEGIN + corpus.USER).strip()
            yield Question(prompt, answer.removesuffix(corpus.END).strip(), "library", _CORPUS_KINDS[document.family], prompt)


class _ModuleQuestions:
    """The questions about one source file; ``functions``, ``classes`` and ``exceptions`` are docstrings of public members."""

    def __init__(self, module: str, source: str, tree: ast.Module, rng: random.Random) -> None:
        self._module, self._tree, self._rng = module, tree, rng
        self._lines = source.splitlines()
        self.docstring = ast.get_docstring(tree) or ""
        self.functions = _documentation(node for node in tree.body if isinstance(node, _Function))
        classes = _documentation(node for node in tree.body if isinstance(node, ast.ClassDef))
        self.exceptions = {name: doc for name, doc in classes.items() if name.endswith(("Error", "Exception", "Warning"))}
        self.classes = {name: doc for name, doc in classes.items() if name not in self.exceptions}

    def all(self) -> Iterator[Question]:
        subject = f"the module `{self._module}`"
        yield from _documented(subject, self.docstring, self._rng)
        yield from _members("functions", subject, self.functions, self._rng)
        yield from _members("classes", subject, self.classes, self._rng)
        yield from _members("exceptions", subject, self.exceptions, self._rng)
        for node in self._tree.body:
            if isinstance(node, _Function):
                yield from self._function(node, f"`{self._module}.{node.name}()`")
            if isinstance(node, ast.ClassDef):
                subject = f"`{self._module}.{node.name}`"
                yield from _documented(subject, ast.get_docstring(node), self._rng)
                methods = [child for child in node.body if isinstance(child, _Function)]
                yield from _members("methods", subject, _documentation(methods), self._rng)
                for method in methods:
                    yield from self._function(method, f"`{node.name}.{method.name}()`")

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, subject: str) -> Iterator[Question]:
        yield from _documented(subject, ast.get_docstring(node), self._rng)
        yield from list_questions.steps(subject, list(self._steps(node)), self._rng)

    def _steps(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Entry]:
        """The comments before statements of a function's body, each named after its statement."""
        numbers = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        comments = {number: found[1] for number in numbers if (found := _COMMENT.match(self._lines[number - 1]))}
        if len(comments) < MIN_POINTS:
            return
        statements: dict[int, ast.stmt] = {}
        for child in ast.walk(node):
            if isinstance(child, ast.stmt):
                statements.setdefault(child.lineno, child)
        comment: list[str] = []
        for number in numbers:
            if number in comments:
                comment.append(comments[number])
                continue
            text = gloss(" ".join(comment)) if comment and number in statements else ""
            if text and text[0].isupper() and not _NO_COMMENT.search(text):
                yield Entry(_deed(statements[number]), text)
            comment = []


def _suggestion_questions(noun: str, entries: list[Entry], rng: random.Random) -> Iterator[Question]:
    """Lists of entries whose descriptions share a word."""
    by_word: dict[str, list[Entry]] = {}
    for entry in entries:
        if not re.search(r"(?:^|\.)(?:_|idlelib|distutils)", entry.name):
            for word in dict.fromkeys(_NOUN.findall(entry.text)):
                by_word.setdefault(word, []).append(entry)
    for word, some in by_word.items():
        if len(some) <= _MAX_SHARING and word not in _NO_SUBJECTS:
            for _ in range(1 + len(some) // 4):
                yield from list_questions.suggestions(noun, word, some, rng)


def _builtin_questions(rng: random.Random) -> Iterator[Question]:
    for kind in _BUILTIN_TYPES:
        docs = {f"{kind.__name__}.{name}()": inspect.getdoc(member) for name, member in vars(kind).items() if callable(member)}
        yield from _members("methods", f"`{kind.__name__}`", _public(docs), rng)
    for name in _BUILTIN_MODULES:
        members = vars(importlib.import_module(name)).items()
        functions = {f"{name}.{member}()": inspect.getdoc(value) for member, value in members if inspect.isbuiltin(value)}
        yield from _members("functions", f"the module `{name}`", _public(functions), rng)


def _public(docs: dict[str, str | None]) -> dict[str, str]:
    """Public members, without the signatures at the start of docstrings of C functions."""
    cleaned = {name: re.sub(r"^\w+\(.*\)(?: *->.*)?\n+", "", doc or "") for name, doc in docs.items()}
    return {name: doc for name, doc in cleaned.items() if doc and "._" not in name}


def _topic_questions(rng: random.Random) -> Iterator[Question]:
    """Runs of prose paragraphs of the language's help topics."""
    for name, text in pydoc_topics.items():
        run: list[str] = []
        for paragraph in [*text.split("\n\n"), ""]:
            if is_good_paragraph(paragraph):
                run.append(" ".join(paragraph.split()))
            elif run:
                yield from explanations("topics", f"{name.replace('-', ' ')} in Python", run, rng)
                run = []


def _documented(subject: str, docstring: str | None, rng: random.Random) -> Iterator[Question]:
    """Questions that one docstring answers: its sections of names with descriptions, and its prose."""
    if docstring is None:
        return
    for noun, entries in sections(docstring):
        yield from listings(noun, subject, entries, rng)
    paragraphs = [" ".join(paragraph.split()) for paragraph in docstring.split("\n\n") if is_good_paragraph(paragraph)]
    yield from explanations("explanations", subject, paragraphs, rng)


def _members(noun: str, subject: str, docs: dict[str, str], rng: random.Random) -> Iterator[Question]:
    """Lists of members, and a paragraph each about some of them."""
    yield from listings(noun, subject, [Entry(name, gloss(doc)) for name, doc in docs.items()], rng)
    texts = {name: prose(doc) for name, doc in docs.items()}
    several = {name: text for name, text in texts.items() if len(list(sentences(text))) > 1}
    yield from list_questions.descriptions(subject, several, rng)
    yield from list_questions.details(noun, subject, texts, rng)


def _documentation(nodes: Iterable[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]) -> dict[str, str]:
    """Names and docstrings of the nodes that are public and documented."""
    docs = {}
    for node in nodes:
        docstring = ast.get_docstring(node)
        if docstring and not node.name.startswith("_"):
            docs[node.name if isinstance(node, ast.ClassDef) else f"{node.name}()"] = docstring
    return docs


def _deed(statement: ast.stmt) -> str:
    """A statement's action in a word or two."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        target = ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
        return f"Set `{target}`" if len(target) <= 30 else "Assign"
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = ast.unparse(statement.value.func)
        return f"Call `{called}()`" if len(called) <= 30 else "Call"
    return _STATEMENTS.get(type(statement), "Go on")


_MAX_GLOSS_CHARACTERS = 320
_MAX_PROSE_CHARACTERS = 700
_HEADERS = {
    "arguments": re.compile(r"\b(?:arg(?:ument)?s?|param(?:eter)?s?)\b", re.IGNORECASE),
    "options": re.compile(r"\b(?:options?|keywords?|flags?|settings?)\b", re.IGNORECASE),
    "attributes": re.compile(r"\b(?:attributes?|variables?|fields?|members?|properties)\b", re.IGNORECASE),
    "methods": re.compile(r"\bmethods?\b", re.IGNORECASE),
    "functions": re.compile(r"\bfunctions?\b", re.IGNORECASE),
    "exceptions": re.compile(r"\bexceptions?\b", re.IGNORECASE),
    "classes": re.compile(r"\bclass(?:es)?\b", re.IGNORECASE),
}
_ENTRY = re.compile(
    r"^ *(?:[-*] +)?(?::param +)?(?P<name>[`'\"]*[*\w][\w.*-]*(?:\([\w=, .*\[\]'\"]*\))?[`'\"]*)"
    r"(?: +--? +| *: +| +--$)(?P<text>\S.*)$"
)
_SIGNATURE = re.compile(r"[\w.]+\(.*\)(?: *->.*)?$")
_NO_NAMES = frozenset(
    ("note", "notes", "warning", "example", "examples", "returns", "raises", "args", "see", "todo", "xxx", "usage", "default")
)


def sections(docstring: str) -> Iterator[tuple[str, list[Entry]]]:
    """Lists of three or more ``name -- description`` in a docstring, each with the noun that the line before it suggests."""
    header = ""
    entries: list[Entry] = []
    entries_depth = 0
    for line in [*inspect.cleandoc(docstring).splitlines(), "end"]:
        depth = len(line) - len(line.lstrip())
        if entries and (not line.strip() or depth > entries_depth):
            entries[-1] = Entry(entries[-1].name, f"{entries[-1].text} {line.strip()}")
            continue
        entry = _entry(line)
        if entry is None or depth != entries_depth:
            if len(entries) >= MIN_POINTS:
                noun = next((noun for noun, pattern in _HEADERS.items() if pattern.search(header)), "parts")
                yield noun, [Entry(each.name, gloss(each.text)) for each in entries]
            entries = []
        if entry is not None:
            entries.append(entry)
            entries_depth = depth
        elif line.strip():
            header = line


def _entry(line: str) -> Entry | None:
    found = _ENTRY.match(line)
    name = found["name"].strip("`'\"*") if found else ""
    return Entry(name, found["text"]) if found and name.lower() not in _NO_NAMES else None


def prose(docstring: str) -> str:
    """The first paragraphs on one line, up to 700 characters."""
    text = ""
    for paragraph in docstring.split("\n\n"):
        line = " ".join(paragraph.split())
        if not is_good_paragraph(paragraph) or len(text) + len(line) > _MAX_PROSE_CHARACTERS:
            break
        text = f"{text} {line}".strip()
    return text


def gloss(text: str) -> str:
    """The first paragraph's whole sentences on one line, up to 320 characters; empty if they are too short or ambiguous."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    short = ""
    for sentence in sentences(paragraph):
        if len(short) + len(sentence) > _MAX_GLOSS_CHARACTERS:
            break
        short += sentence
    short = short.rstrip(" :;,")
    is_useful = len(short) >= MIN_DETAIL_CHARACTERS and " " in short and not _SIGNATURE.match(short)
    return short if is_useful and not ambiguity(short) else ""


def is_good_paragraph(paragraph: str) -> bool:
    return is_prose(paragraph) and ambiguity(paragraph) is None and paragraph.rstrip()[-1] in ".!?)"
