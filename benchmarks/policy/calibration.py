"""Calibration of the default policy: the predicted chances of proposed tokens, and the share of them that was accepted.

An observation is a token that draft sources proposed below a drafted row. Its ``chance``, given that the row is accepted, is what
is learned; the ``path_chance`` from the root at that time is what the policy ranks tokens by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import exp, pi, sqrt
from typing import ClassVar, NamedTuple

from pandas import DataFrame, Series, qcut

from benchmarks.policy.study import PolicyAnswer
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.verdict import Accepted
from pipedec.decoding.acceptance import Line
from pipedec.decoding.best_first import BestFirst
from pipedec.decoding.method import DraftRoom, Resources
from pipedec.decoding.proposers import DRAFT_PRIOR, NgramProposer, Proposals
from pipedec.methods import METHODS
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates

_MIN_CHANCE = 0.02  # rarer tokens hardly ever enter
_MAX_DEPTH, _MAX_RANK = 16, 6  # greater ones count as these
_BINS = 10  # of equal numbers of observations
# By whether the draft model and n-grams propose a token.
_SOURCES = {(True, False): "draft", (True, True): "draft and n-grams", (False, True): "n-grams", (False, False): "seen tokens"}


class Observation(NamedTuple):
    """A proposed token."""

    chance: float
    path_chance: float
    is_row_accepted: bool  # the row above it
    is_accepted: bool
    depth: int  # 1 below the root
    rank: int  # among the tokens below its row, 1 for the most probable
    source: str


class Drafted(NamedTuple):
    """A row when it was drafted."""

    start: int  # the number of tokens of the answer up to the root
    path: list[int]  # the tokens below the root
    log_chance: float
    line: Line


@dataclass
class Observed:
    """The rows that one answer's method drafted, and the answer."""

    token_ids: list[int] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)

    def observations(self) -> Iterator[Observation]:
        """All proposed tokens whose place in the answer is known."""
        for start, path, log_chance, line in self.drafted:
            end = start + len(path)
            if end >= len(self.token_ids):
                continue
            is_row_accepted, depth = self.token_ids[start:end] == path, len(path) + 1
            proposed = zip(line.token_ids, line.log_chances, _sources(line), strict=False)
            for rank, (token, below, source) in enumerate(proposed, start=1):
                is_accepted = is_row_accepted and token == self.token_ids[end]
                yield Observation(exp(below), exp(log_chance + below), is_row_accepted, is_accepted, depth, rank, source)


def _sources(line: Line) -> list[str]:
    """The draft sources of each token of a line."""
    assert line.choices is not None
    features = dict(zip(line.choices.token_ids[line.place].tolist(), line.choices.features[line.place].tolist(), strict=False))
    draft, ngrams = len(DRAFT_PRIOR), len(NgramProposer.prior)
    return [
        _SOURCES[not of_token[draft - 1], any(of_token[draft : draft + ngrams])]
        for of_token in map(features.__getitem__, line.token_ids)
    ]


class ObservedBestFirst(BestFirst):
    """The default method in one thread, observed."""

    answers: ClassVar[list[Observed]] = []

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        self._observed = Observed()
        self._drafted: list[int] = []  # rows of the last round
        self.answers.append(self._observed)

    def draft(self, room: DraftRoom) -> Sequence[int]:
        for row in self._drafted:
            line, log_chance = self.tree.proposed(row)
            if line is not None and line.choices is not None and exp(log_chance) >= _MIN_CHANCE:
                start = len(self._observed.token_ids)
                self._observed.drafted.append(Drafted(start, self.tree.path(row), log_chance, line))
        self._drafted = []
        return super().draft(room)

    def drafted(self, rows: Sequence[int], candidates: Candidates | None) -> Proposals | None:
        self._drafted += rows
        return super().drafted(rows, candidates)

    def accept(self, accepted: Accepted) -> None:
        super().accept(accepted)
        self._observed.token_ids += accepted.tokens


@contextmanager
def observing() -> Iterator[list[Observed]]:
    """Observe all answers that the default method decodes meanwhile, in their order."""
    entry = METHODS[DEFAULT_METHOD]
    METHODS[DEFAULT_METHOD] = replace(entry, implementation=f"{__name__}:{ObservedBestFirst.__name__}")
    ObservedBestFirst.answers = []
    try:
        yield ObservedBestFirst.answers
    finally:
        METHODS[DEFAULT_METHOD] = entry


def observations(answers: Iterable[PolicyAnswer], observed: Iterable[Observed]) -> DataFrame:
    """All observations of the default method's answers. Columns: policy, prompt_set, and those of ``Observation``."""
    decoded = [one for one in observed if one.token_ids]  # a check opens methods without decoding
    asked = [one for one in answers if one.policy.method == DEFAULT_METHOD]
    rows = [
        (answer.policy.name, answer.prompt.prompt_set, *one)
        for answer, of_answer in zip(asked, decoded, strict=True)
        for one in of_answer.observations()
        if one.chance >= _MIN_CHANCE
    ]
    return DataFrame(rows, columns=["policy", "prompt_set", *Observation._fields])


def shares(frame: DataFrame, by: Series | str, chance: str = "chance") -> DataFrame:
    """Number, mean predicted chance and accepted share of observations by ``by``."""
    groups = frame.groupby(by, observed=True)
    return DataFrame(
        {"observations": groups.size(), "predicted": groups[chance].mean(), "accepted": groups["is_accepted"].mean()}
    )


def differences(frame: DataFrame) -> DataFrame:
    """The mean absolute difference of predicted and accepted share over bins of equal numbers of observations, by policy and
    prompt set; and the difference that chance alone would give if all predictions were right.
    """
    found = []
    for key, group in _given_rows(frame).groupby(["policy", "prompt_set"], sort=False):
        bins = qcut(group["chance"], _BINS, duplicates="drop")
        table = shares(group, bins)
        variances = (group["chance"] * (1 - group["chance"])).groupby(bins, observed=True).sum()
        by_chance = variances.map(sqrt) * sqrt(2 / pi) / table["observations"]  # E|x| of a normal deviation
        difference = (table["predicted"] - table["accepted"]).abs()
        found.append((*key, len(group), difference.mean(), by_chance.mean()))
    return DataFrame(found, columns=["policy", "prompt_set", "observations", "difference", "by_chance"])


def by_kind(frame: DataFrame) -> dict[str, DataFrame]:
    """``shares`` by bins of chance, depth, rank and source, given the row above; and by bins of the path's chance."""
    given = _given_rows(frame)
    paths = frame[frame["path_chance"] >= _MIN_CHANCE]
    return {
        "chance": shares(given, _binned(given["chance"])),
        "depth": shares(given, given["depth"].clip(upper=_MAX_DEPTH)),
        "rank": shares(given, given["rank"].clip(upper=_MAX_RANK)),
        "source": shares(given, "source"),
        "chance of the path": shares(paths, _binned(paths["path_chance"]), "path_chance"),
    }


def _given_rows(frame: DataFrame) -> DataFrame:
    """The observations below rows that were accepted."""
    return frame[frame["is_row_accepted"]]


def _binned(chances: Series) -> Series:
    """The lower edge of each chance's bin, in tenths."""
    return (chances * 10).clip(upper=9).astype(int) / 10
