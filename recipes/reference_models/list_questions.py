"""Questions whose answers are lists or paragraphs: the wording of both.

Owns ordered lists (``1. `name`: text``, with an opening and sometimes a closing) and runs of paragraphs about a subject. It does
not know where entries and paragraphs come from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipes.thread_models.records import Question
from recipes.thread_models.structure import MIN_POINTS, paragraph_tree

_MAX_ITEMS = 8
_MAX_PARAGRAPHS = 4
_MAX_DESCRIBED = 3
_NUM_PARTIAL_LISTS = 3
_MIN_DETAIL_CHARACTERS = 130
_MAX_DETAILED = 5
_MAX_SEVERAL_CHARACTERS = 1500  # of the problems and their solutions
_LIST_WORDINGS = (
    "List {the} {noun} of {subject}.", "List {the} {noun} of {subject} and explain each.", "What are {the} {noun} of {subject}?",
    "What {noun} does {subject} have?", "Which {noun} does {subject} have, and what are they for?",
    "Tell me about {the} {noun} of {subject}.", "Describe {the} {noun} of {subject}.", "Explain {the} {noun} of {subject}.",
    "I would like an overview of {the} {noun} of {subject}.", "What are {the} {noun} of {subject}, in short?",
    "Please list {the} {noun} of {subject}.", "Can you list {the} {noun} of {subject}?", "{Noun} of {subject}?",
)  # fmt: skip
_COUNT_WORDINGS = (
    "Give {count} {noun} of {subject}.", "Give me {count} {noun} of {subject}.", "Name {count} {noun} of {subject}.",
    "List {count} {noun} of {subject}.", "What are {count} {noun} of {subject}?", "Give {count} examples of {noun} of {subject}.",
    "Tell me {count} {noun} of {subject} that I should know.", "Describe {count} {noun} of {subject}.",
    "Suggest {count} {noun} of {subject} and say what they are for.", "Explain {count} important {noun} of {subject}.",
)  # fmt: skip
_STEP_WORDINGS = (
    "What are the steps of {subject}?", "List the steps of {subject}.", "How does {subject} work, step by step?",
    "Explain step by step what {subject} does.", "What does {subject} do first, and what then?",
    "Give me the steps that {subject} takes.", "Outline how {subject} works.", "Describe {count} steps of {subject}.",
)  # fmt: skip
_EXPLAIN_WORDINGS = (
    "Explain {subject}.", "Describe {subject}.", "Tell me about {subject}.", "What should I know about {subject}?",
    "Write {count} paragraphs about {subject}.", "Explain {subject} in {count} paragraphs.",
    "Give me an introduction to {subject}.",
    "How would you describe {subject} to a colleague?", "Write a short text about {subject}.",
)  # fmt: skip
_COMPARE_WORDINGS = (
    "What are {subject} for?", "Describe {subject}.", "Explain {subject}.", "Compare {subject}.", "What do {subject} do?",
    "Write a paragraph about each of {subject}.", "Tell me about {subject}.",
)  # fmt: skip
_DETAIL_WORDINGS = (
    "Explain {names} of {subject} in detail.", "What do {names} of {subject} do, in detail?",
    "Describe {names} of {subject} in a few sentences each.", "Explain at length what {names} of {subject} are for.",
    "Give me the details of {names} of {subject}.", "How do {names} of {subject} work?",
)  # fmt: skip
_SEVERAL_WORDINGS = (
    "Solve these {count} problems.\n\n{problems}", "{problems}\n\nSolve all of them, step by step.",
    "Please solve:\n\n{problems}", "Answer these questions and show your steps.\n\n{problems}",
)  # fmt: skip
_OPENINGS = (
    "It has these {noun}:", "Here are {count} {noun} of {subject}:", "These are {the} {noun} of {subject}:",
    "{subject} has these {noun}:", "Here they are:", "There are {count} to name:",
)  # fmt: skip
_CLOSINGS = (
    "There {are} also {others}.", "Beyond these there {are} {others}.", "It also has {others}.", "See also {others}.",
)  # fmt: skip
_PLAIN_CLOSINGS = (
    "These are all {count} of them.", "All {count} belong to {subject}.", "That is all that {subject} documents.",
)  # fmt: skip
_STEP_OPENINGS = ("It takes these steps:", "{subject} works like this:", "In this order:")
_SUGGESTION_WORDINGS = (
    "Give {count} {noun} of the Python library that have to do with {word}.", "Which {noun} deal with {word}? Name {count}.",
    "I am working with {word}. Suggest {count} {noun}.", "What are {count} {noun} for {word}?",
    "Name {count} {noun} about {word}.",
    "What can I use for {word} in Python? Give {count} {noun}.", "List {count} {noun} that concern {word}.",
    "Give me {count} ideas for {word}.", "What are {count} ways to deal with {word} in Python?",
    "Suggest {count} tools for {word}.",
    "I need help with {word}. Which {count} {noun} should I look at?", "Recommend {count} {noun} for {word} and say why.",
)  # fmt: skip
_SUGGESTION_OPENINGS = (
    "Here are {count} {noun} that have to do with {word}:", "You may look at these {noun}:", "These {noun} deal with {word}:",
    "Here are {count}:", "I suggest these {noun}:",
)  # fmt: skip
_MARKS = ("`{}`", "`{}`", "`{}`", "**{}**", "{}")
_CLOSING_SHARE = 0.4
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass(frozen=True)
class Entry:
    """One member, argument or step: its name and description."""

    name: str
    text: str


def explanations(kind: str, subject: str, paragraphs: list[str], rng: random.Random) -> Iterator[Question]:
    """A question for every four paragraphs, if they have a parallel structure."""
    for first in range(0, len(paragraphs), _MAX_PARAGRAPHS):
        part = paragraphs[first : first + _MAX_PARAGRAPHS]
        answer = "\n\n".join(part)
        if len(part) >= 2 and paragraph_tree(answer):
            prompt = rng.choice(_EXPLAIN_WORDINGS).format(subject=subject, count=_counted(len(part), rng))
            yield _question(kind, subject, prompt, answer)


def descriptions(subject: str, texts: Mapping[str, str], rng: random.Random) -> Iterator[Question]:
    """A question for every two or three members, if the paragraphs about them have a parallel structure."""
    names = list(texts)
    for first in range(0, len(names) - 1, _MAX_DESCRIBED):
        some = names[first : first + _MAX_DESCRIBED]
        answer = "\n\n".join(f"`{name}`: {texts[name]}" for name in some)
        if len(some) >= 2 and paragraph_tree(answer):
            prompt = rng.choice(_COMPARE_WORDINGS).format(subject=f"{_joined(some)} of {subject}")
            yield _question("descriptions", subject, prompt, answer)


def details(noun: str, subject: str, texts: Mapping[str, str], rng: random.Random) -> Iterator[Question]:
    """Questions for lists of two to five members with several sentences each: as many as there are such members."""
    long = [Entry(name, text) for name, text in texts.items() if len(text) >= _MIN_DETAIL_CHARACTERS]
    for _ in range(len(long) if len(long) > 1 else 0):
        some = rng.sample(long, rng.randint(2, min(_MAX_DETAILED, len(long))))
        words = {"noun": noun, "the": "the", "subject": subject, "count": _counted(len(some), rng)}
        prompt = rng.choice(_DETAIL_WORDINGS).format(names=_joined([entry.name for entry in some]), **words)
        opening = rng.choice(_OPENINGS).format(**words)
        yield _question("details", subject, prompt, _list_answer(opening, _marked(some, rng)))


def several_problems(problems: Sequence[Question], rng: random.Random) -> Iterator[Question]:
    """Two or three word problems in one question, each problem in one; held-out ones stay among themselves."""
    for held_out in (False, True):
        order = [problem for problem in problems if problem.held_out == held_out]
        rng.shuffle(order)
        while len(order) >= 2:
            chosen = [order.pop() for _ in range(min(rng.choice((2, 3, 3)), len(order)))]
            asked = "\n".join(f"{number}. {problem.prompt}" for number, problem in enumerate(chosen, start=1))
            solved = "\n".join(f"{number}. Problem {number}: {problem.answer}" for number, problem in enumerate(chosen, start=1))
            if len(asked) + len(solved) <= _MAX_SEVERAL_CHARACTERS:
                prompt = rng.choice(_SEVERAL_WORDINGS).format(count=_counted(len(chosen), rng), problems=asked)
                yield Question(prompt, solved, "problems", "several problems", chosen[0].subject)


def listings(noun: str, subject: str, entries: list[Entry], rng: random.Random) -> Iterator[Question]:
    """A question for all entries that have a text (up to eight), and questions for some of them."""
    entries = [entry for entry in entries if entry.text]
    if len(entries) < MIN_POINTS:
        return
    yield _listing(noun, subject, entries[:_MAX_ITEMS], entries[_MAX_ITEMS:], rng.choice(_LIST_WORDINGS), rng)
    sizes = [size for size in range(MIN_POINTS, _MAX_ITEMS + 1) if size < len(entries)]
    for size in rng.sample(sizes, min(_NUM_PARTIAL_LISTS, len(sizes))):
        places = set(rng.sample(range(len(entries)), size))
        some = [entry for place, entry in enumerate(entries) if place in places]
        others = [entry for place, entry in enumerate(entries) if place not in places]
        yield _listing(noun, subject, some, others, rng.choice(_COUNT_WORDINGS), rng)


def suggestions(noun: str, word: str, entries: list[Entry], rng: random.Random) -> Iterator[Question]:
    """A question for three or more random entries that have to do with a word."""
    if len(entries) < MIN_POINTS:
        return
    some = rng.sample(entries, rng.randint(MIN_POINTS, min(_MAX_ITEMS, len(entries))))
    words = {"noun": noun, "word": word, "count": _counted(len(some), rng)}
    opening = rng.choice(_SUGGESTION_OPENINGS).format(**words)
    yield _question(
        "suggestions", word, rng.choice(_SUGGESTION_WORDINGS).format(**words), _list_answer(opening, _marked(some, rng))
    )


def steps(subject: str, entries: list[Entry], rng: random.Random) -> Iterator[Question]:
    """A question for three or more steps; the answer has the first eight."""
    if len(entries) >= MIN_POINTS:
        prompt = rng.choice(_STEP_WORDINGS).format(subject=subject, count=_counted(min(len(entries), _MAX_ITEMS), rng))
        opening = rng.choice(_STEP_OPENINGS).format(subject=subject)
        yield _question("steps", subject, prompt, _list_answer(opening, entries[:_MAX_ITEMS]))


def _listing(noun: str, subject: str, some: list[Entry], others: list[Entry], wording: str, rng: random.Random) -> Question:
    words = {"noun": noun, "Noun": noun.capitalize(), "the": rng.choice(("the", "the", "some of the" if others else "all the"))}
    words |= {"subject": subject, "count": _counted(len(some), rng)}
    opening = rng.choice(_OPENINGS).format(**words)
    closing = ""
    if rng.random() < _CLOSING_SHARE:
        names = [entry.name for entry in others[: rng.randint(1, 4)]]
        are = "is" if len(names) == 1 else "are"
        closing = rng.choice(_CLOSINGS if names else _PLAIN_CLOSINGS).format(others=_joined(names), are=are, **words)
    return _question(noun, subject, wording.format(**words), _list_answer(opening, _marked(some, rng), closing))


def _marked(entries: list[Entry], rng: random.Random) -> list[Entry]:
    """The entries with their names formatted as code, in bold or plain."""
    mark = rng.choice(_MARKS)
    return [Entry(mark.format(entry.name), entry.text) for entry in entries]


def _list_answer(opening: str, items: list[Entry], closing: str = "") -> str:
    lines = "\n".join(f"{number}. {item.name}: {item.text}" for number, item in enumerate(items, start=1))
    return "\n\n".join(part for part in (_capitalized(opening), lines, _capitalized(closing)) if part)


def _question(kind: str, subject: str, prompt: str, answer: str) -> Question:
    return Question(_capitalized(prompt), answer, "library", kind, subject)


def _counted(count: int, rng: random.Random) -> str:
    return _NUMBERS[count] if rng.random() < 0.5 else str(count)


def _joined(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return " and ".join(part for part in (", ".join(quoted[:-1]), quoted[-1] if quoted else "") if part)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
