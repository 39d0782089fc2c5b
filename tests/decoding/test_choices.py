"""What several draft sources propose, put together, and what each of them proposes, against a naive search."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from pipedec.decoding.acceptance import NO_TOKEN, AcceptanceModel, Line
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.proposers import (
    DRAFT_PRIOR,
    LENGTHS,
    MAX_PROPOSED,
    MAX_SEEN,
    PIECE,
    Match,
    MatchRates,
    NgramProposer,
    Occurrences,
    Proposals,
    SeenTokens,
    score,
)
from pipedec.tree import Candidates

DRAFT = len(DRAFT_PRIOR)
COUNT = len(LENGTHS)


class Scored(InjectionTree):
    """Keeps the lines that were added."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def add(self, rows: object, lines: object) -> None:
        assert isinstance(rows, range) and isinstance(lines, list)
        assert len(rows) == len(lines)
        self.lines += lines


def candidates(*children: dict[int, float]) -> Candidates:
    """The draft model's children of rows, with their probabilities."""
    token_ids, chances = torch.tensor([list(each) for each in children]), torch.tensor([list(each.values()) for each in children])
    return Candidates(torch.arange(len(children)), token_ids.long(), chances.log())


def scored(
    drafted: Candidates | None,
    found: list[Occurrences] | None,
    acceptance: AcceptanceModel | None = None,
    seen: SeenTokens | None = None,
    proposes_seen: bool = False,
) -> list[Line]:
    """The lines of the rows of one tree."""
    prior = {
        **({"draft": DRAFT_PRIOR} if drafted else {}),
        **({"ngrams": NgramProposer.prior} if found else {}),
        **({"seen": SeenTokens.prior} if seen else {}),
    }
    tree = Scored()
    rows = range(len(found or ()) if drafted is None else len(drafted.rows))
    texts = [] if found is None else [found]
    score([Proposals(acceptance or AcceptanceModel(prior), tree, rows, drafted, texts, seen, proposes_seen)])
    return tree.lines


def matches(found: dict[int, int]) -> Occurrences:
    """One occurrence of each token, after an n-gram of this length."""
    return {token: Match(length, 1) for token, length in found.items()}


def features_of(line: Line) -> dict[int, list[float]]:
    """The features of each token, and of "none of them" as NO_TOKEN."""
    assert line.choices is not None
    token_ids = line.choices.token_ids[line.place].tolist()
    features = line.choices.features[line.place].tolist()
    used = {token: row for token, row in zip(token_ids, features, strict=False) if token != NO_TOKEN}
    assert len(used) == sum(token != NO_TOKEN for token in token_ids), "a token is there once"
    return used | {NO_TOKEN: features[-1]}


def test_features_of_all_sources_stand_beside_their_tokens() -> None:
    """Also for a token that another source proposes. One that the draft does not propose counts as likely as its last one, and is
    marked; all that is left has the rest.
    """
    (line,) = scored(candidates({8: 0.6, 5: 0.3}), [{5: Match(32, 4), 9: Match(2, 1)}])
    features = features_of(line)
    expected = {8: (0.6, 0), 5: (0.3, 0), 9: (0.3, 1), NO_TOKEN: (0.1, 0)}
    assert features.keys() == expected.keys()
    for token, (chance, is_other) in expected.items():
        assert math.exp(features[token][0]) == pytest.approx(chance) and features[token][1] == is_other
    lengths = {token: [place for place, value in enumerate(row[DRAFT:-1]) if value] for token, row in features.items()}
    assert lengths == {8: [], 5: [COUNT - 1, 2 * COUNT - 1], 9: [1], NO_TOKEN: []}
    counts = {token: row[-1] for token, row in features.items()}
    assert counts == pytest.approx({8: 0, 5: math.log(5), 9: math.log(2), NO_TOKEN: 0})


def test_a_draft_that_is_certain_leaves_something_for_others() -> None:
    (line,) = scored(candidates({8: 1.0}), None)
    assert line.token_ids == [8] and math.isfinite(features_of(line)[NO_TOKEN][0])


def test_trees_of_one_kind_are_scored_together_and_get_their_own_lines() -> None:
    """As each of them alone; what another request has learned stays its own."""
    prior = {"draft": DRAFT_PRIOR, "ngrams": NgramProposer.prior}
    halved = {source: {name: 0.5 * weight for name, weight in features.items()} for source, features in prior.items()}
    shared, other = AcceptanceModel(prior), AcceptanceModel(halved)
    asked = [
        (shared, candidates({7: 0.5, 3: 0.2}), [matches({3: 4})]),
        (other, candidates({7: 0.5, 3: 0.2}), [matches({3: 4})]),
        (shared, candidates({1: 0.9}, {2: 0.4}), [matches({9: 2}), {}]),
        (shared, candidates({4: 0.6, 5: 0.1}, {6: 0.3, 8: 0.2}), [matches({4: 8}), matches({1: 2})]),
    ]
    trees = [Scored() for _ in asked]
    score(
        [
            Proposals(one, tree, range(len(found)), drafted, [found])
            for tree, (one, drafted, found) in zip(trees, asked, strict=True)
        ]
    )
    for tree, (acceptance, drafted, found) in zip(trees, asked, strict=True):
        alone = scored(drafted, found, acceptance)
        assert [line.token_ids for line in tree.lines] == [line.token_ids for line in alone]
        for line, expected in zip(tree.lines, alone, strict=True):
            count = len(line.token_ids)
            assert line.log_chances[:count] == pytest.approx(expected.log_chances[:count], abs=1e-6)
            assert features_of(line) == features_of(expected)
    assert trees[0].lines[0].choices is trees[3].lines[0].choices is not trees[1].lines[0].choices


class NaiveSearch:
    """Every place of the text, one after the other, compared with a row's path token by token."""

    def __init__(self, text: list[int], below_root: list[int]) -> None:
        context = [*text, *below_root]
        places = []
        for place in range(len(text) - 1):
            length = 0
            while length < min(LENGTHS[-1], place + 1) and text[place - length] == context[-1 - length]:
                length += 1
            places.append((max([each for each in LENGTHS if each <= length], default=0), place))
        self.best = [(length, text[place + 1]) for length, place in sorted(places, reverse=True) if length][:8]

    def named(self) -> list[int]:
        return list(dict.fromkeys(token for _, token in self.best))[:MAX_PROPOSED]

    def length(self, token: int) -> int:
        return max((length for length, named in self.best if named == token), default=0)

    def count(self, token: int) -> int:
        return sum(named == token for _, named in self.best)

    def is_best(self, token: int) -> bool:
        return bool(self.best) and self.best[0][1] == token


def check_row(line: Line, children: list[int], naive: NaiveSearch) -> None:
    """Every token is a child, or one that n-grams name; its features are those of a naive search."""
    features = features_of(line)
    assert [token for token in features if token not in (*children, NO_TOKEN)] == [
        token for token in naive.named() if token not in children
    ]
    assert set(children) <= features.keys()
    for token, row in features.items():
        expected = [0.0] * (2 * COUNT + 1)
        length = 0 if token == NO_TOKEN else naive.length(token)
        if length:
            feature = LENGTHS.index(length)
            expected[feature] = 1.0
            expected[COUNT + feature] = float(naive.is_best(token))
            expected[-1] = math.log(1 + naive.count(token))
        assert row[DRAFT if children else 0 :] == pytest.approx(expected)


@examples(200)
@given(st.integers(0, 2**32), st.integers(1, 120), st.integers(0, 6))
def test_ngrams_equal_a_naive_search(seed: int, length: int, below: int) -> None:
    """From a text of two tokens on: few different tokens, so that there are long matches; rows anywhere in a small tree."""
    chooser = random.Random(seed)
    text = [chooser.choice((0, 0, 1, 2)) for _ in range(length)]
    text += text[-chooser.randint(1, 60) :]  # so that there are matches of any length
    accepted = [chooser.choice((0, 1, 2)) for _ in range(chooser.randint(1, 3))]
    proposer = NgramProposer(tuple(text))
    proposer.append(tuple(accepted))
    text += accepted
    paths: list[list[int]] = [[]]
    for _ in range(below):
        paths.append([*chooser.choice(paths), chooser.choice((0, 1, 2))])
    found, children = [proposer.find(path) for path in paths], [0, 1, 99]
    for path, occurrences in zip(paths, found, strict=True):
        best = proposer.find_after(proposer.ending(path), most=1)
        assert [(token, match.length) for token, match in best.items()] == [
            (token, match.length) for token, match in list(occurrences.items())[:1]
        ]
    for drafted in (None, candidates(*({token: 0.3 for token in children} for _ in paths))):
        for line, path in zip(scored(drafted, found), paths, strict=True):
            check_row(line, [] if drafted is None else children, NaiveSearch(text, path))


def test_a_long_text_is_indexed_in_pieces_and_then_found_as_any_other() -> None:
    text = [random.Random(3).randrange(9) for _ in range(3 * PIECE)]
    whole, pieces = NgramProposer(text), NgramProposer(text)
    whole.index(len(text))
    assert whole.find([]) and pieces.find([]) == {}, "an index of a part would find other places"
    while pieces.num_unindexed > PIECE:
        pieces.index(PIECE // 3)
    assert pieces.find([]) == whole.find([])


@examples(50)
@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 12), max_size=30))
def test_seen_tokens_do_not_depend_on_how_they_came(text: list[int], accepted: list[int]) -> None:
    seen = SeenTokens(text)
    for token in accepted:
        seen.append((token,))
    for column, expected in zip(seen.table(), SeenTokens([*text, *accepted]).table(), strict=True):
        assert column.tolist() == expected.tolist()


def test_tokens_seen_anywhere_have_features_and_may_be_proposed() -> None:
    """The most frequent first; one that another source proposes is not repeated."""
    seen = SeenTokens((4, 5, 5, 6, 6, 6))
    seen.append((8,))
    (line,) = scored(candidates({6: 0.6, 7: 0.3}), [matches({5: 1})], seen=seen)
    features = {token: row[-4:] for token, row in features_of(line).items()}
    assert features == {
        6: pytest.approx([1, math.log(4), math.log(2), 0]), 7: [0, 0, 0, 0],
        5: pytest.approx([1, math.log(3), math.log(5), 0]), NO_TOKEN: [0, 0, 0, 0],
    }  # fmt: skip
    (line,) = scored(candidates({6: 0.6, 7: 0.3}), [matches({5: 1})], seen=seen, proposes_seen=True)
    features = {token: row[-4:] for token, row in features_of(line).items()}
    assert features.keys() == {6, 7, 5, 8, 4, NO_TOKEN}
    assert features[4] == pytest.approx([1, math.log(2), math.log(7), 1]) and features[6][-1] == 0


def test_of_many_seen_tokens_the_most_frequent_are_proposed() -> None:
    seen = SeenTokens([token for token in range(100) for _ in range(1 + token % 7)])
    (line,) = scored(candidates({200: 0.5}), [{}], seen=seen, proposes_seen=True)
    proposed = set(line.token_ids) - {200}
    least = min(1 + token % 7 for token in proposed)
    assert len(proposed) == MAX_SEEN and proposed >= {token for token in range(100) if 1 + token % 7 > least}


def test_the_rate_of_a_match_is_that_of_its_length() -> None:
    rates = MatchRates()
    before = [rates.rate("ngrams", length) for length in (2, 8, 12, 16)]
    assert before == sorted(before), "longer n-grams are more reliable, until there is evidence"
    for _ in range(30):
        rates.observe("ngrams", matches({5: 12, 7: 2}), 7)
    assert [rates.rate("ngrams", length) < 0.1 for length in (2, 8, 12, 16)] == [False, False, True, False], (
        "only the first token counts"
    )
    for _ in range(30):
        rates.observe("ngrams", matches({7: 2}), 7)
    assert rates.rate("ngrams", 2) > 0.9
    assert rates.rate("suffixes", 12) == MatchRates().rate("suffixes", 12), "every source has rates of its own"
