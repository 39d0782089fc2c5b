"""Training text: the Python standard library, and word problems from a JSONL file.

Owns how that text becomes documents (raw source, conversations) and which of them are held out. It does not know
tokenizers, models or optimisers.
"""

import ast
import inspect
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics as pydoc_topics

from recipes.thread_models.records import is_held_out, without_calculator_notes

BEGIN, USER, ASSISTANT, END = "<|begin|>", "<|user|>", "<|assistant|>", "<|end|>"

# Tables, vendored grammars and generated files are no use as training text.
_EXCLUDED_PARTS = {"site-packages", "test", "tests", "encodings", "__pycache__", "lib2to3", "idle_test", "ensurepip"}
_MAX_CODE_CHARACTERS = 1600
_MAX_ANSWER_CHARACTERS = 1200
_TOPIC_PARAGRAPHS = 4


@dataclass(frozen=True)
class Document:
    """One training document: its family (for mixing), its text with turn tokens, and its split."""

    family: str
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.text)


def conversation(question: str, answer: str) -> str:
    """One user turn and one assistant turn, exactly as the chat template renders them."""
    return f"{BEGIN}{USER}{question.strip()}{END}{ASSISTANT}{answer.rstrip()}{END}"


def standard_library_files() -> list[Path]:
    """The library's own Python sources (no tests, no tables), in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in root.rglob("*.py") if not _EXCLUDED_PARTS & set(path.relative_to(root).parts))


def library_modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Name, source and syntax tree of the standard library's modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in standard_library_files():
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), source, tree


def library_documents() -> Iterator[Document]:
    """Raw source, function completions and docstring questions from the standard library."""
    for module, source, tree in library_modules():
        if len(source) >= 200:
            yield Document("source", f"{BEGIN}{source}{END}")
            yield from _functions(source, tree)
            yield from _questions(module, tree)


def word_problem_documents(path: Path) -> Iterator[Document]:
    """Conversations from a JSONL file with the fields ``question`` and ``answer`` (the GSM8K layout)."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield Document("problems", conversation(row["question"], without_calculator_notes(row["answer"])))


def topic_documents() -> Iterator[Document]:
    """The help texts of the Python language, a few paragraphs each."""
    for topic in pydoc_topics.values():
        paragraphs = topic.split("\n\n")
        for first in range(0, len(paragraphs), _TOPIC_PARAGRAPHS):
            yield Document("topics", "\n\n".join(paragraphs[first : first + _TOPIC_PARAGRAPHS]))


def mix(documents: list[Document], weights: dict[str, float], characters: int, seed: int) -> Iterator[Document]:
    """Yield documents of ``characters`` in total, each family with its share; every epoch is shuffled anew.

    Families without a weight are left out; the shares of families without documents go to the others.
    """
    families = {name: [doc for doc in documents if doc.family == name] for name in weights}
    families = {name: docs for name, docs in families.items() if docs}
    rng = random.Random(seed)
    queues: dict[str, list[Document]] = {name: [] for name in families}
    spent = dict.fromkeys(families, 0.0)
    while sum(spent.values()) < characters:
        name = min(families, key=lambda family: spent[family] / weights[family])
        if not queues[name]:
            queues[name] = rng.sample(families[name], len(families[name]))
        document = queues[name].pop()
        spent[name] += len(document.text)
        yield document


def _functions(source: str, tree: ast.Module) -> Iterator[Document]:
    """A function's head and docstring as the question, its body as the answer (the HumanEval shape)."""
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        indent = len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip())
        head = [line[indent:] for line in lines[node.lineno - 1 : node.body[0].end_lineno]]
        body = [line[indent:] for line in lines[node.body[0].end_lineno or 0 : node.end_lineno]]
        text = "\n".join(body).strip("\n")
        if text and len(text) < _MAX_CODE_CHARACTERS and len("\n".join(head)) < _MAX_CODE_CHARACTERS:
            yield Document("functions", conversation("\n".join(head), text))


def _questions(module: str, tree: ast.Module) -> Iterator[Document]:
    """Questions whose answers are docstrings, and questions whose answers are numbered lists."""
    yield from _explanation(f"What is the module `{module}` for?", ast.get_docstring(tree))
    public: list[tuple[str, str]] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _explanation(f"What is `{module}.{node.name}`?", ast.get_docstring(node))
            methods = [(f"{child.name}()", _summary(child)) for child in node.body if isinstance(child, ast.FunctionDef)]
            yield from _numbered(f"List the methods of `{module}.{node.name}`.", "methods", methods)
            for child in node.body:
                if isinstance(child, ast.FunctionDef):
                    question = f"What does `{node.name}.{child.name}()` do?"
                    yield from _explanation(question, ast.get_docstring(child))
        elif isinstance(node, ast.FunctionDef):
            yield from _explanation(f"What does `{module}.{node.name}()` do?", ast.get_docstring(node))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            public.append((node.name, _summary(node)))
    yield from _numbered(f"What is in the module `{module}`?", "parts", public)


def _explanation(question: str, docstring: str | None) -> Iterator[Document]:
    if docstring and 40 < len(docstring) < _MAX_ANSWER_CHARACTERS:
        yield Document("questions", conversation(question, inspect.cleandoc(docstring)))


def _numbered(question: str, noun: str, entries: list[tuple[str, str]]) -> Iterator[Document]:
    entries = [(name, summary) for name, summary in entries if summary and not name.startswith("_")][:8]
    if len(entries) >= 2:
        lines = [f"{number}. `{name}`: {summary}" for number, (name, summary) in enumerate(entries, start=1)]
        yield Document("questions", conversation(question, f"It has these {noun}:\n\n" + "\n".join(lines)))


def _summary(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The docstring's first sentence on one line, or an empty string."""
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
    sentence = " ".join(paragraph.split()).split(". ")[0]
    return sentence[:160].rstrip()
