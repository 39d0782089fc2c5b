"""The structure of one answer: which tokens, a set with one bit each, may follow its tokens so far and any path after them.

The allowed tokens are a pure function of these. Owns the parser's state and cached results; knows no trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from llguidance import LLMatcher

MAX_FORCED = 64  # tokens of a chain
MAX_STATES = 1024  # that are kept: of each its mask, an eighth of a byte per token of the vocabulary


@dataclass(frozen=True)
class Bitmask:
    """A set of token ids: id t is bit t % 8 of byte t // 8 of ``bits``. Ids beyond the bits are not in it."""

    bits: bytes = b""

    @classmethod
    def of(cls, *token_ids: int) -> Bitmask:
        return cls(sum(1 << token for token in set(token_ids)).to_bytes(max(token_ids, default=-1) // 8 + 1, "little"))

    def __contains__(self, token: int) -> bool:
        return 0 <= token < 8 * len(self.bits) and bool(self.bits[token // 8] >> token % 8 & 1)

    def __iter__(self) -> Iterator[int]:
        """Token ids, the lowest first."""
        for index, byte in enumerate(self.bits):
            if byte:
                yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)


NOTHING = Bitmask()


@dataclass
class _State:
    """The state after a path. ``forced``: the only token that may follow, if there is one and it is known without a mask."""

    forced: int | None = None
    is_possible: bool = True
    allowed: Bitmask | None = None
    children: dict[int, _State] = field(default_factory=dict)


_IMPOSSIBLE = _State(is_possible=False, allowed=NOTHING)


class Grammar:
    """Begins before the answer's first token. Parses only on request.

    Where the structure turns out to be too complex to be parsed any further, an end token is forced.

    Args:
        new_matcher: makes a matcher at the grammar's start. May raise UserError, from ``allowed`` and ``forced``.
        end_token_ids: the model's. One of them ends the answer; nothing is allowed after it.
        max_states: when about as many are kept, all are dropped.
    """

    def __init__(
        self, new_matcher: Callable[[], LLMatcher], end_token_ids: tuple[int, ...], max_states: int = MAX_STATES
    ) -> None:
        self.num_states = 0  # kept now, at most
        self._max_states = max_states
        self._new_matcher = new_matcher
        self._end_token_ids = end_token_ids
        self._matcher: LLMatcher | None = None
        self._accepted: list[int] = []
        self._num_consumed = 0  # of the accepted tokens, by the matcher
        self._ahead: list[int] = []  # tokens that it has consumed after these
        self._root: _State | None = None  # None until the tokens allowed after the accepted ones are asked for

    def advance(self, token_ids: Iterable[int]) -> None:
        """Accept the next tokens of the answer. Tokens that are not allowed lead to a state in which nothing is."""
        for token in token_ids:
            self._accepted.append(token)
            known = None if self._root is None else self._root.children.get(token)
            self._root = known if known is not None and known.is_possible else None

    @property
    def is_possible(self) -> bool:
        """Whether the accepted tokens are the beginning of an answer, or all of it."""
        return self._state(()).is_possible

    def allowed(self, path: Sequence[int] = ()) -> Bitmask:
        """The tokens that may follow the accepted ones and then ``path``: a forced one is the only one. None if a token of
        ``path`` is not allowed where it stands, or has ended the answer.
        """
        state = self._state(path)
        if state.allowed is None:
            state.allowed = Bitmask(self._moved(path)[0].compute_bitmask()) if state.forced is None else Bitmask.of(state.forced)
        return state.allowed

    def forced(self, path: Sequence[int] = (), most: int = MAX_FORCED) -> tuple[int, ...]:
        """The chain of tokens that must follow the accepted ones and then ``path``, one after the other, at most ``most``.

        Empty if there is a choice, or nothing is allowed. An end token is forced where nothing else may follow.
        """
        chain: list[int] = []
        state = self._state(path)
        while state.forced is not None and len(chain) < most:
            chain.append(state.forced)
            state = self._child(state, [*path, *chain])
        return tuple(chain)

    def _state(self, path: Sequence[int]) -> _State:
        if self._root is None or self.num_states > self._max_states:
            self.num_states = 0
            self._root = self._parsed(())
        state = self._root
        for index, token in enumerate(path):
            state = state.children.get(token) or self._child(state, path[: index + 1])
        return state

    def _child(self, state: _State, path: Sequence[int]) -> _State:
        """The state after ``path``, whose last token follows ``state``."""
        token = path[-1]
        if state.forced not in (None, token) or (state.allowed is not None and token not in state.allowed):
            return _IMPOSSIBLE
        if token not in state.children:
            state.children[token] = self._parsed(path)
        return state.children[token]

    def _parsed(self, path: Sequence[int]) -> _State:
        self.num_states += 1
        matcher, is_possible = self._moved(path)
        has_failed = matcher.is_error()
        if self._is_end(path or self._accepted):
            return _State(allowed=NOTHING) if has_failed or (is_possible and matcher.is_accepting()) else _IMPOSSIBLE
        if has_failed:
            return _State(self._end_token_ids[0])
        if not is_possible:
            return _IMPOSSIBLE
        forced = next(iter(matcher.compute_ff_tokens()), None)
        if forced is not None or not matcher.is_accepting():
            return _State(forced)
        allowed = Bitmask(matcher.compute_bitmask())
        may_go_on = any(token not in self._end_token_ids for token in islice(allowed, len(self._end_token_ids) + 1))
        return _State(None, allowed=allowed) if may_go_on else _State(self._end_token_ids[0])

    def _is_end(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids) and token_ids[-1] in self._end_token_ids

    def _moved(self, path: Sequence[int]) -> tuple[LLMatcher, bool]:
        """The matcher after the accepted tokens and ``path``, except for an end token; and whether these are possible."""
        if self._matcher is None or self._matcher.is_error():
            self._matcher, self._num_consumed, self._ahead = self._new_matcher(), 0, []
        pending = self._accepted[self._num_consumed :]
        wanted = [*pending, *path]
        if self._is_end(wanted):
            wanted.pop()
        if not set(self._end_token_ids).isdisjoint(wanted):
            return self._matcher, False
        pairs = enumerate(zip(self._ahead, wanted, strict=False))
        shorter = min(len(self._ahead), len(wanted))
        common = next((index for index, (ahead, token) in pairs if ahead != token), shorter)  # length of the common prefix
        self._matcher.rollback(len(self._ahead) - common)
        count = common + self._matcher.try_consume_tokens(wanted[common:])
        self._ahead = wanted[:count]
        if count < len(wanted):
            return self._matcher, False
        num_accepted = min(len(pending), count)
        self._num_consumed += num_accepted
        del self._ahead[:num_accepted]
        return self._matcher, True
