"""Prompts that no answer was written to: invented from the prose of documents, or questions with other names and numbers.

A model remembers the answers that it was trained on, so what it says to their questions is not what it says to new ones. Invented
prompts are short requests, and long passages with a question or an instruction; held-out ones are made of held-out prose.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from pipedec.core.errors import UserError
from recipes.reference_models.corpus import ASSISTANT, BEGIN, END, USER, Document
from recipes.thread_models.records import Question, read_questions

_PASSAGE_CHARACTERS = (900, 5600)
_INVENTED_SHARES = (0.0, 0.0, 0.1, 0.2, 0.4)  # of a passage's words
_LANGUAGES = ("English", "French", "German", "Spanish", "Italian", "Latin", "Dutch", "Polish")
_ACCENTS = {"a": "ä", "o": "ö", "u": "ü", "e": "é", "s": "ß", "i": "í"}
_REQUESTS = (
    "What is {name}?", "What does {phrase} mean?", "Who {phrase}?", "Who is {name}?", "Who was the first {name} in {phrase}?",
    "When did {phrase}?", "When was {phrase} made?", "Where is the {name} of {phrase}?", "Where does {phrase} come from?",
    "Why {phrase}?", "How many {name} are in {phrase}?", "How does {phrase} work?", "Which {name} is {phrase}?",
    "What kind of {name} is in {phrase}?", "What is the name of {phrase}?", "Is it true that {phrase}?",
    "Translate {language} to {language}: {foreign}", "Translate from {language} to {language}:\n{foreign}",
    "Translate to {language}: {foreign}", "Say in {language}: {phrase}", "Correct this sentence: {foreign}",
    "List {number} {name} of {phrase}.", "List the {name} in {phrase}.", "Name {number} things that {phrase}.",
    "Write a short story about {phrase}.", "Write a {name} for {phrase}, with {name} and {phrase}.",
    "Write a letter to {name} that says: {sentence}", "Describe {phrase} to a child.", "Compare {phrase} and {phrase}.",
    "Explain why {phrase}.", "Explain {phrase} in {number} sentences.", "Give me advice: {sentence}",
    "Imagine that {phrase}. What happens to {name}?", "You are {name}. {sentence} What do you say?",
    "Rewrite as a list: {sentence}", "{sentence}", "{sentence} What is {phrase}?", "{sentence} Do you agree?",
)  # fmt: skip
_INSTRUCTIONS = (
    "Summarize: {passage}", "Summarize in {number} sentences:\n\n{passage}", "{passage}\n\nSummarize the text above.",
    "{passage}\nWhat is {name}?", "{passage}\nWho {phrase}?", "{passage}\n\nQuestion: when did {phrase}?",
    "Answer the question from the text: what is {phrase}?\n\n{passage}", "{passage}\nWhere is the {name} of {phrase}?",
    "{passage}\nHow many {name} are in {phrase}?", "{passage}\nDescribe {phrase}.", "Explain: {passage}",
    "Text: {passage}\n\nQuestion: why {phrase}?\nAnswer:", "List the main points of this text.\n{passage}",
    "Translate to {language}: {passage}", "Give this text a title: {passage}", "{passage}\nWhich {name} is {phrase}?",
)  # fmt: skip


def prose(documents: list[Document]) -> list[str]:
    """The prose of these documents: docstrings that answer questions, word problems, help topics."""
    texts = [
        document.text.removeprefix(BEGIN + USER).split(END + ASSISTANT)[document.family == "questions"].removesuffix(END)
        for document in documents
        if document.family in ("questions", "problems", "topics")
    ]
    return [text for text in texts if len(text.split()) > 8]


def requests(texts: list[str], rng: random.Random) -> Iterator[str]:
    """An endless stream of short requests in the words of ``texts``."""
    words = _Words(texts, rng)
    while True:
        yield words.fill(rng.choice(_REQUESTS))


def passages(texts: list[str], rng: random.Random) -> Iterator[str]:
    """An endless stream of passages of ``texts`` (900 to 5,600 characters), each with a question or an instruction."""
    words = _Words(texts, rng)
    while True:
        yield words.fill(rng.choice(_INSTRUCTIONS))


class _Words:
    """Fills the braces of a wording. Some words are invented: users' names and languages do not occur in the library."""

    def __init__(self, texts: list[str], rng: random.Random) -> None:
        self._texts, self._rng = texts, rng
        self._draw = {
            "name": self._name, "phrase": self._phrase, "sentence": self._sentence, "passage": self._passage,
            "foreign": lambda: self._with_invented(self._some_words(4, 30), 0.8), "language": lambda: rng.choice(_LANGUAGES),
            "number": lambda: str(rng.randint(2, 12)),
        }  # fmt: skip

    def fill(self, wording: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: self._draw[found[1]](), wording)

    def _some_words(self, fewest: int, most: int) -> str:
        words = self._rng.choice(self._texts).split()
        count = self._rng.randint(fewest, most)
        first = self._rng.randrange(max(1, len(words) - count))
        return " ".join(words[first : first + count])

    def _name(self) -> str:
        word = self._some_words(1, 1).strip(".,:;?!()`'\"") or "it"
        return self._invented(word) if self._rng.random() < 0.5 else word

    def _phrase(self) -> str:
        share = self._rng.choice((0.0, 0.0, 0.3))
        return self._with_invented(self._some_words(1, 8), share).strip(".,:;?!").lower()

    def _sentence(self) -> str:
        sentences = re.split(r"(?<=[.?!])\s+", " ".join(self._rng.choice(self._texts).split()))
        return self._rng.choice(sentences)[:300]

    def _passage(self) -> str:
        characters = self._rng.randint(*_PASSAGE_CHARACTERS)
        separator = self._rng.choice((" ", " ", "\n", "\n\n"))
        flat = self._rng.random() < 0.8
        pieces: list[str] = []
        while sum(map(len, pieces)) < characters:
            text = self._rng.choice(self._texts)
            pieces.append(" ".join(text.split()) if flat else text)
        return self._with_invented(separator.join(pieces)[:characters], self._rng.choice(_INVENTED_SHARES))

    def _with_invented(self, text: str, share: float) -> str:
        return re.sub(r"[A-Za-z]{3,}", lambda found: self._invented(found[0]) if self._rng.random() < share else found[0], text)

    def _invented(self, word: str) -> str:
        """A word that begins like this one and ends like others; half of them are capitalised like names."""
        others = re.findall("[a-z]{3,}", self._rng.choice(self._texts)) or [word]
        ends = [end[len(end) // 2 :] for end in self._rng.choices(others, k=self._rng.choice((1, 1, 2)))]
        letters = word[: len(word) // 2 + 1].lower() + "".join(ends)
        accented = "".join(_ACCENTS.get(letter, letter) if self._rng.random() < 0.06 else letter for letter in letters)
        return accented.capitalize() if self._rng.random() < 0.5 else accented


_NAME = re.compile(r"`[^`\n]+`")
_NUMBER = re.compile(r"(?<![\w.,:/\n])\d+(?![\w:/]|[.,]\d)")  # not those that number a list
_LONGEST = 1200  # characters of a prompt
_MAX_TRIES = 20  # for a prompt


def write_prompts(files: tuple[Path, ...], count: int, out: Path, seed: int = 0) -> int:
    """Write ``count`` different prompts to ``out`` as JSONL; returns their number, which is less if questions are few.

    Held-out questions give neither wordings nor names. Raises UserError if a file is unsound, or no question has a name or a
    number.
    """
    questions = list(read_questions(files))
    known = {question.prompt for question in questions}
    found: dict[str, None] = {}
    invented = exchanged([question for question in questions if not question.held_out], random.Random(seed))
    for _, prompt in zip(range(_MAX_TRIES * count), invented, strict=False):
        if prompt not in known and len(found) < count:
            found[prompt] = None
    out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in found), encoding="utf-8")
    return len(found)


def exchanged(questions: list[Question], rng: random.Random) -> Iterator[str]:
    """An endless stream of the questions with other names and numbers. Raises UserError if none has either."""
    names: dict[object, list[str]] = {}
    for question in questions:
        for name in _NAME.findall(question.prompt):
            names.setdefault(_shape(name), []).append(name)
    prompts = [question.prompt for question in questions if len(question.prompt) <= _LONGEST]
    asked = [prompt for prompt in prompts if _NAME.search(prompt) or _NUMBER.search(prompt)]
    if not asked:
        raise UserError("no question has a name in backquotes or a number: there is nothing to exchange")
    while True:
        prompt = _NAME.sub(lambda found: rng.choice(names[_shape(found[0])]), rng.choice(asked))
        yield _NUMBER.sub(lambda found: _other_number(found[0], rng), prompt)


def _shape(name: str) -> tuple[bool, bool]:
    """The kind of a name, which its replacement must share: whether it is dotted, and whether it is called."""
    return "." in name, name.endswith("()`")


def _other_number(number: str, rng: random.Random) -> str:
    """A number of as many digits. Those of one digit stay half of the time: many of them count what is asked for."""
    if len(number) == 1 and rng.random() < 0.5:
        return number
    return str(rng.randint(max(2, 10 ** (len(number) - 1)), 10 ** len(number) - 1))
