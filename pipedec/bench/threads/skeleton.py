"""Skeleton-of-Thought (SoT, Ning et al. 2023): any model's answer in parallel, by prompts alone.

The model first writes the points of its answer in a few words each, and then expands every point in a request of its own, all at
the same time. Owns the paper's prompts (its prompts 1 and 2, without a demonstration) and how points are read; runs no model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipedec.text.prompt import Prompter

SKELETON_TOKENS = 128  # maximum of all points together
MOST_POINTS = 10
NO_SKELETON = "no_skeleton"  # the anomaly that the model did not write two points
_POINT = re.compile(r"^\s*(\d+)\.[ \t]?(\S[^\n]*)$", re.MULTILINE)
_SKELETON = (
    "You're an organizer responsible for only giving the skeleton (not the full content) for answering the question. Provide the "
    "skeleton in a list of points (numbered 1., 2., 3., etc.) to answer the question. Instead of writing a full sentence, each "
    "skeleton point should be very short with only 3~5 words. Generally, the skeleton should have 3~10 points. Now, please "
    "provide the skeleton for the following question.\n{question}\nSkeleton:"
)
_EXPANSION = (
    "You're responsible for continuing the writing of one and only one point in the overall answer to the following question.\n\n"
    "{question}\n\nThe skeleton of the answer is\n\n{skeleton}\n\nContinue and only continue the writing of point {number}. "
    "Write it **very shortly** in 1~2 sentence and do not continue with other points!"
)
_FIRST = "1."  # the begun answer to the first prompt


@dataclass(frozen=True)
class Point:
    """A point of a skeleton: its number and its few words."""

    number: int
    title: str

    @property
    def begun(self) -> str:
        """How the answer to its prompt begins."""
        return f"{self.number}. {self.title}"


@dataclass(frozen=True)
class SkeletonPrompts:
    """The prompts as token ids: a user's turn, and an answer that has begun."""

    prompter: Prompter

    def skeleton(self, question: str, raw: bool, max_tokens: int) -> tuple[int, ...]:
        """Asks for the points. Raises UserError like ``Prompter.token_ids``."""
        return self._begun(_SKELETON.format(question=question), _FIRST, raw, max_tokens)

    def expansion(self, question: str, skeleton: str, point: Point, raw: bool, max_tokens: int) -> tuple[int, ...]:
        """Asks for the text of one point. Raises UserError like ``Prompter.token_ids``."""
        asked = _EXPANSION.format(question=question, skeleton=skeleton, number=point.number)
        return self._begun(asked, point.begun, raw, max_tokens)

    def written(self, token_ids: list[int]) -> str:
        """The skeleton as text, with its begun first point."""
        return _FIRST + self.prompter.text(token_ids)

    def _begun(self, asked: str, answer: str, raw: bool, max_tokens: int) -> tuple[int, ...]:
        begun = tuple(self.prompter.tokenizer.encode(answer, add_special_tokens=False))
        return self.prompter.token_ids(asked, raw, max_tokens + len(begun)) + begun


def points_of(skeleton: str) -> list[Point]:
    """The first ten points of a skeleton, each number once; other lines are left out."""
    points = {int(number): Point(int(number), title.strip()) for number, title in reversed(_POINT.findall(skeleton))}
    return [points[number] for number in sorted(points)][:MOST_POINTS]
