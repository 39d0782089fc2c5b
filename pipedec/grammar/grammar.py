"""The structure of one answer: which tokens, a set with one bit each, may follow its tokens so far and any path after them.

The allowed tokens are a pure function of these. Owns the parser's state and cached results; knows no trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from llguidance import LLMatcher

from pipedec.core.errors import UserError

MAX_FORCED = 64  # tokens of a chain
MAX_STATES = 1024  # that are kept: of each its mask, an eighth of a byte per token of the vocabulary


@dataclass(frozen=True)
class Bitmask:
    """A set of token ids: id t is bit t % 8 of byte t // 8 of ``bits``. Ids beyond the bits are not in it."""

    bits: bytes = b""

    @classmethod
    def of(cls, *token_ids: int) -> Bitmask:
        bits = bytearray(max(token_ids, default=-1) // 8 + 1)
        for token in token_ids:
            bits[token // 8] |= 1 << token % 8
        return cls(bytes(bits))

    def __contains__(self, token: int) -> bool:
        return 0 <= token < 8 * len(self.bits) and bool(self.bits[token // 8] >> token % 8 & 1)

    def __or__(self, other: Bitmask) -> Bitmask:
        if not (self.bits and other.bits):
            return self if self.bits else other
        union = int.from_bytes(self.bits, "little") | int.from_bytes(other.bits, "little")
        return Bitmask(union.to_bytes(max(len(self.bits), len(other.bits)), "little"))

    def __sub__(self, other: Bitmask) -> Bitmask:
        left = int.from_bytes(self.bits, "little") & ~int.from_bytes(other.bits, "little")
        return Bitmask(left.to_bytes(len(self.bits), "little"))

    def __bool__(self) -> bool:
        return any(self.bits)

    def __iter__(self) -> Iterator[int]:
        """Token ids, the lowest first."""
        for index, byte in enumerate(self.bits):
            if byte:
                yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)


NOTHING = Bitmask()


@dataclass
class _State:
    """The state after a path. From the index ``at`` on, the tokens of ``chain`` must follow. Otherwise ``allowed`` has to be
    asked for, and where the structure may end (``may_end``) the end token may turn out to be forced, too.
    """

    chain: Sequence[int] = ()
    at: int = 0
    may_end: bool = False
    fault: str = ""  # why nothing follows, although the answer has not ended
    allowed: Bitmask | None = None
    children: dict[int, _State] = field(default_factory=dict)

    def excludes(self, token: int) -> bool:
        """Whether it is known that ``token`` may not follow."""
        if self.chain:
            return token != self.chain[self.at]
        return self.allowed is not None and token not in self.allowed


STRAYED = "it does not follow its structured_outputs"
_IMPOSSIBLE = _State(fault=STRAYED, allowed=NOTHING)


class Grammar:
    """Begins before the answer's first token. Parses only on request.

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
        self._accepted: list[int] = []  # those before the root
        self._num_consumed = 0  # accepted tokens that the matcher has consumed
        self._ahead: list[int] = []  # tokens that it has consumed after these
        self._root: _State | None = None  # None until it is asked for
        self._after: list[int] = []  # tokens that are accepted, too, after the root

    def consume(self, token_ids: Iterable[int]) -> None:
        """Accept the next tokens of the answer. Raises UserError for one that is known not to be allowed."""
        for token in token_ids:
            self._after.append(token)
            if self._root is None or len(self._after) > 1:
                continue
            if self._root.excludes(token):
                raise impossible(self._root.fault or STRAYED)
            if (known := self._root.children.get(token)) is not None:
                self._enter(known)

    @property
    def is_possible(self) -> bool:
        """Whether the accepted tokens are the beginning of an answer, or all of it."""
        return not self._entered().fault

    def allowed(self, path: Sequence[int] = ()) -> Bitmask:
        """The tokens that may follow the accepted ones and then ``path``: a forced one is the only one. None if a token of
        ``path`` is not allowed where it stands, or has ended the answer, or the structure is too complex to be followed further.

        Raises UserError if that is so without a path, and the answer has not ended.
        """
        return self._allowed(self._state(path), path)

    def forced(self, path: Sequence[int] = (), most: int = MAX_FORCED) -> tuple[int, ...]:
        """The chain of tokens that must follow the accepted ones and then ``path``, one after the other, at most ``most``.

        Empty if there is a choice, or nothing is allowed. An end token is forced where nothing else may follow. Raises as
        ``allowed``.
        """
        chain: list[int] = []
        state = self._state(path)
        while len(chain) < most:
            if state.may_end:
                self._allowed(state, [*path, *chain])
            following = state.chain[state.at : state.at + most - len(chain)]
            if not following:
                break
            for token in following:
                chain.append(token)
                state = self._child(state, [*path, *chain])
        return tuple(chain)

    def _allowed(self, state: _State, path: Sequence[int]) -> Bitmask:
        if state.allowed is None and state.chain:
            state.allowed = Bitmask.of(state.chain[state.at])
        elif state.allowed is None:
            matcher, _ = self._moved(path)
            allowed = Bitmask(matcher.compute_bitmask())
            may_go_on = any(token not in self._end_token_ids for token in islice(allowed, len(self._end_token_ids) + 1))
            if matcher.is_error():  # its mask has the end tokens then
                state.fault, allowed = _fault(matcher), NOTHING
            elif not may_go_on and state.may_end:
                state.chain, allowed = self._end_token_ids[:1], Bitmask.of(self._end_token_ids[0])
            elif not may_go_on:
                state.fault, allowed = "no token of the model continues it", NOTHING
            state.allowed, state.may_end = allowed, False
        if state.fault and state is self._root:
            raise impossible(state.fault)
        return state.allowed

    def _state(self, path: Sequence[int]) -> _State:
        """Raises UserError if nothing follows the accepted tokens."""
        state = self._entered()
        if state.fault:
            raise impossible(state.fault)
        for index, token in enumerate(path):
            state = state.children.get(token) or self._child(state, path[: index + 1])
        return state

    def _entered(self) -> _State:
        """The root after all accepted tokens, which are parsed one by one: what is forced depends on where its chain began."""
        if self._root is None:
            self._root = self._parsed(())
        elif self.num_states > self._max_states:
            self.num_states, self._root = 0, replace(self._root, children={})
        while self._after:
            self._enter(self._child(self._root, self._after[:1]))
        return self._root

    def _enter(self, state: _State) -> None:
        self._root = state
        self._accepted.append(self._after.pop(0))

    def _child(self, state: _State, path: Sequence[int]) -> _State:
        """The state after ``path``, whose last token follows ``state``."""
        token = path[-1]
        if state.excludes(token):
            return _IMPOSSIBLE
        if token not in state.children:
            self.num_states += 1
            is_inside = state.at + 1 < len(state.chain)
            state.children[token] = _State(state.chain, state.at + 1) if is_inside else self._parsed(path)
        return state.children[token]

    def _parsed(self, path: Sequence[int]) -> _State:
        matcher, is_possible = self._moved(path)
        if matcher.is_error():
            return _State(fault=_fault(matcher), allowed=NOTHING)
        if self._is_end(path or self._accepted):
            return _State(allowed=NOTHING) if is_possible and matcher.is_accepting() else _IMPOSSIBLE
        if not is_possible:
            return _IMPOSSIBLE
        chain = matcher.compute_ff_tokens()
        chain = chain[: matcher.validate_tokens(chain)]
        return _State(chain, may_end=not chain and matcher.is_accepting())

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


def _fault(matcher: LLMatcher) -> str:
    return f"its structured_outputs are too complex to be followed further: {matcher.get_error().splitlines()[0][:200]}"


def impossible(fault: str) -> UserError:
    """The error of an answer that nothing may follow."""
    return UserError(f"the answer cannot go on, as {fault}")
