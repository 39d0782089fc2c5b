"""Structures of token ids, as rules in Python: what a structure allows and forces, without a parser."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from pipedec.grammar import MAX_FORCED, Bitmask

Rule = Callable[[tuple[int, ...]], frozenset[int]]  # what may follow the answer's tokens


class ToyStructure:
    """A ``Grammar`` in which a token is forced where the rule leaves only one."""

    def __init__(self, rule: Rule) -> None:
        self._rule = cache(rule)
        self.said: tuple[int, ...] = ()

    def consume(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            assert token in self._rule(self.said), "the answer follows its structure"
            self.said += (token,)

    def allowed(self, path: Sequence[int] = ()) -> Bitmask:
        return Bitmask.of(*self._following(path))

    def forced(self, path: Sequence[int] = (), most: int = MAX_FORCED) -> tuple[int, ...]:
        chain: list[int] = []
        while len(chain) < most and len(following := self._following([*path, *chain])) == 1:
            chain += following
        return tuple(chain)

    def _following(self, path: Sequence[int]) -> frozenset[int]:
        said = self.said
        for token in path:
            if token not in self._rule(said):
                return frozenset()
            said += (token,)
        return self._rule(said)


def rule_of(answer: Sequence[int], vocabulary: Iterable[int], seed: int) -> Rule:
    """A rule by which ``answer`` can be said: half of its tokens are forced, and so are half of those that stray from it."""
    tokens = sorted(vocabulary)

    def rule(said: tuple[int, ...]) -> frozenset[int]:
        chooser = random.Random(hash((seed, said)))
        follows = len(said) < len(answer) and said == tuple(answer[: len(said)])
        wanted = answer[len(said)] if follows else chooser.choice(tokens)
        return frozenset({wanted, *([] if chooser.random() < 0.5 else chooser.sample(tokens, len(tokens) // 2))})

    return rule
