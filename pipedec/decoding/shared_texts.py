"""Earlier answers as a draft source (*shared suffixes*): for each tenant an index of the answers to its own requests.

An agent repeats itself: what followed the same tokens in an earlier answer is likely to follow again. A request finds only texts
of its own tenant. Texts are only in memory (about 280 bytes per token), and those of all tenants together are limited. Knows no
request and no tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipedec.decoding.proposers import LENGTHS, MAX_OCCURRENCES, PIECE, SEPARATOR, NgramProposer, Occurrences

MAX_TOKENS = 100_000  # of each of the two generations
_SHORTEST = 3  # n-gram that is looked up: shorter ones occur everywhere


class SharedTexts:
    """Two generations of texts, each of at most ``most`` tokens. When the younger one is full, the older one is dropped."""

    def __init__(self, most: int = MAX_TOKENS) -> None:
        self._most = most
        self._young: dict[str, NgramProposer] = {}  # by tenant
        self._old: dict[str, NgramProposer] = {}
        self._size = 0  # tokens of the young ones
        self._long: list[NgramProposer] = []  # to which a long text was added that may not be indexed yet

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts, with a separator after each."""
        return sum(len(index) for generation in (self._young, self._old) for index in generation.values())

    def add(self, tenant: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add an answer, and the end of the prompt or text before it as the context of its first tokens."""
        text = [*prompt[-LENGTHS[-1] :], *answer][-self._most + 1 :]
        if self._size + len(text) + 1 > self._most:
            self._young, self._old, self._size = {}, self._young, 0
        index = self._young.setdefault(tenant, NgramProposer(shortest=_SHORTEST))
        index.append((*text, SEPARATOR))
        if index.num_unindexed > PIECE:
            self._long.append(index)
        self._size += len(text) + 1

    def index(self, most: int) -> None:
        """Index up to ``most`` tokens of long texts."""
        if self._long:
            self._long[0].index(most)
            if self._long[0].num_unindexed <= PIECE:
                del self._long[0]

    def find(self, tenant: str, context: list[int], most: int = MAX_OCCURRENCES) -> Occurrences:
        """The best occurrences in texts of ``tenant``, after tokens as ``NgramProposer.ending`` returns them."""
        found = [generation[tenant].find_after(context, most) for generation in (self._young, self._old) if tenant in generation]
        best, *others = sorted(found, key=_longest, reverse=True) or [{}]
        return best | {token: match for other in others for token, match in other.items() if token not in best}


def _longest(found: Occurrences) -> int:
    """The length of the longest n-gram; 0 without one."""
    return next((match.length for match in found.values()), 0)
