"""One answer in several decode threads: how accepted tokens open, close and join them (APAR Algorithm 1, PASTA §3).

Every rank replays the accepted tokens through a sequence, as through its ``PredictionTree``. Document, positions and visibility
depend only on the tokens of each thread, not on how the decoding of threads interleaves; only thread numbers depend on that.
Broken structure never ends an answer: it is counted in ``anomalies`` and resolved by fixed rules (docs/threads.md). Knows token
ids and texts, no model, no rows and no process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

from pipedec.threads.dialect import BoundDialect, OpenerTag
from pipedec.threads.sequence import Anomaly, DecodeThread, DocumentToken, Join, Sequence, Start, State, next_indices


class Role(Enum):
    """The effect of a token on its thread."""

    TEXT = "text"
    OPEN = "open"
    CLOSE = "close"
    JOIN = "join"
    END = "end"


@dataclass(frozen=True)
class Lookahead:
    """The state of a thread after a lookahead."""

    tag: OpenerTag | None  # incomplete
    children: int
    last: int | None  # token


class DialectGrammar:
    """The rules of a bound dialect and the model's end tokens: the effect of a token on its thread, and which tokens are banned
    next. Stateless. ``lookahead`` is always text and openers that follow the thread's own tokens and are not accepted yet.
    """

    def __init__(self, bound: BoundDialect, end_token_ids: frozenset[int]) -> None:
        self._bound = bound
        self._end_token_ids = end_token_ids
        self._breaks_tag = end_token_ids | {bound.opener, bound.child_end, bound.join}

    def is_control(self, token: int) -> bool:
        """Whether the token is control rather than text in every context."""
        return token in self._bound.control or token in self._end_token_ids

    def role(self, thread: DecodeThread, token: int, lookahead: list[int] | None = None) -> Role:
        """The effect of ``token`` if it is the thread's next token after ``lookahead``."""
        ahead = self.ahead(thread, lookahead or [])
        if token in self._end_token_ids:
            return Role.END
        if token == self._bound.child_end and thread.parent is not None:
            return Role.CLOSE
        if token == self._bound.join and (thread.unjoined or ahead.children > len(thread.children)):
            return Role.JOIN
        return Role.OPEN if self._opens(thread, token, ahead) else Role.TEXT

    def banned(self, thread: DecodeThread, lookahead: list[int]) -> frozenset[int]:
        """Tokens that may not be sampled after ``lookahead``."""
        ahead = self.ahead(thread, lookahead)
        if ahead.tag is not None or self._refusal(thread, ahead) is not None:
            return self._bound.never_sampled | {self._bound.opener}
        return self._bound.never_sampled

    def ahead(self, thread: DecodeThread, lookahead: list[int]) -> Lookahead:
        """The state of the thread after ``lookahead``."""
        last = thread.token_ids[-1] if thread.token_ids else None
        ahead = Lookahead(thread.tag, len(thread.children), last)
        for count, token in enumerate(lookahead):
            tag, bound = ahead.tag, self._bound
            opens = self._opens(thread, token, ahead)
            if token == bound.opener and bound.has_tags and not self._refusal(thread, ahead):
                tag = OpenerTag(start=thread.num_tokens + count)
            elif tag is not None:
                tag = bound.extended(tag, token) if self._stays_open(tag, token) else None
            ahead = Lookahead(tag, ahead.children + opens, token)
        return ahead

    def anomalies_of(self, thread: DecodeThread, token: int, role: Role) -> Iterator[Anomaly]:
        """The anomalies that arise if ``token``, whose effect is ``role``, is the thread's next token."""
        bound = self._bound
        if thread.tag is not None and role is not Role.OPEN and not self._stays_open(thread.tag, token):
            yield Anomaly.OPENER_NOT_COMPLETED
        if token == bound.opener and (refusal := self._refusal(thread, self.ahead(thread, []))):
            yield refusal
        if token == bound.child_end and role is Role.TEXT:
            yield Anomaly.CLOSE_OUTSIDE_CHILD
        if token == bound.join and role is Role.TEXT:
            yield Anomaly.JOIN_WITHOUT_CHILDREN
        if token in bound.never_sampled:
            yield Anomaly.FORCED_TOKEN_SAMPLED
        if role is Role.END and thread.parent is not None and bound.child_end is not None:
            yield Anomaly.END_TOKEN_IN_CHILD
        if role in (Role.END, Role.CLOSE) and bound.join is not None and thread.unjoined:
            yield Anomaly.END_WITHOUT_JOIN

    def _refusal(self, thread: DecodeThread, ahead: Lookahead) -> Anomaly | None:
        """The anomaly that an opener would be as the next token; None if it is allowed."""
        if len(thread.path) >= self._bound.dialect.max_depth:
            return Anomaly.OPENER_TOO_DEEP
        if ahead.children >= self._bound.dialect.max_children:
            return Anomaly.TOO_MANY_CHILDREN
        return Anomaly.OPENER_OUT_OF_PLACE if ahead.last in self._bound.no_opening_after else None

    def _opens(self, thread: DecodeThread, token: int, ahead: Lookahead) -> bool:
        if token == self._bound.opener:
            return not self._bound.has_tags and self._refusal(thread, ahead) is None
        if ahead.tag is None or token in self._breaks_tag:
            return False
        return self._bound.end_of(self._bound.extended(ahead.tag, token)) is not None

    def _stays_open(self, tag: OpenerTag, token: int) -> bool:
        """Whether the tag is not complete after ``token`` and further tokens may complete it."""
        if token in self._breaks_tag or tag.num_tokens + 1 >= self._bound.dialect.max_opener_tokens:
            return False
        return self._bound.end_of(self._bound.extended(tag, token)) is None


class ThreadedSequence(Sequence):
    """An answer whose tokens may open further threads.

    Predicted lengths are clamped so that ``max_tokens`` tokens always fit into ``max_positions``, the model's limit, if any. In
    an answer that is replayed, ``known_lengths`` of children, by their paths, take the place of predicted ones.
    """

    can_fork = True

    def __init__(
        self, bound: BoundDialect, prompt_length: int, end_token_ids: Iterable[int], max_tokens: int,
        max_positions: int | None = None, min_tokens: int = 0, known_lengths: Mapping[tuple[int, ...], int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(prompt_length, end_token_ids, max_tokens, min_tokens=min_tokens)
        self.leaves_gaps = bound.dialect.after_opening == "predicted"
        self._bound, self._dialect, self._max_positions = bound, bound.dialect, max_positions
        self._grammar = DialectGrammar(bound, self._end_token_ids)
        self._and_ends = cache(self._end_token_ids.union)  # there may be many stop tokens
        self._anomalies: Counter[Anomaly] = Counter()
        self._known_lengths = known_lengths or {}

    @property
    def anomalies(self) -> dict[str, int]:
        return {anomaly.value: count for anomaly, count in self._anomalies.items()}

    def banned(self, number: int, after: Iterable[int] = ()) -> frozenset[int]:
        lookahead = list(after)
        banned = self._grammar.banned(self.threads[number], lookahead)
        return self._and_ends(banned) if super().banned(number, lookahead) else banned

    def ends_walk(self, number: int, token: int, after: Iterable[int] = ()) -> bool:
        thread, lookahead = self.threads[number], list(after)
        if self._grammar.role(thread, token, lookahead) in (Role.JOIN, Role.CLOSE, Role.END):
            return True
        if thread.parent is not None and thread.num_tokens + len(lookahead) + 1 >= self._dialect.max_child_tokens:
            return True
        opened = self._grammar.ahead(thread, [*lookahead, token]).children - len(thread.children)
        return next_indices(self.threads)[number] + len(lookahead) + 1 + opened >= self.max_tokens  # forced tokens count

    def gap(self, number: int, path: list[int]) -> int:
        thread = self.threads[number]
        position, predicted = thread.next_position, 0
        for count, token in enumerate(path):
            position, lookahead = position + predicted + 1, path[:count]
            predicted = 0
            if self.may_leave_gap(token) and self._grammar.role(thread, token, lookahead) is Role.OPEN:
                tag = self._grammar.ahead(thread, lookahead).tag
                predicted, _ = self._predict_length(None if tag is None else self._bound.extended(tag, token), position)
        return predicted

    def may_leave_gap(self, token: int) -> bool:
        return self.leaves_gaps and self._bound.may_open(token)

    def _accept(self, thread: DecodeThread, token: int) -> list[Start]:
        role = self._grammar.role(thread, token)
        self._anomalies.update(self._grammar.anomalies_of(thread, token, role))
        starts = [*self._act(thread, token, role), *self._settle()]
        limit, cached = self._dialect.max_cached_tokens, self.prompt_length + sum(thread.num_tokens for thread in self.threads)
        if cached > limit and self.prompt_length + sum(self.needed()) > limit:
            self.end_all(Anomaly.CACHE_FULL.value)
        return starts

    def end_all(self, reason: str) -> None:
        if self.finished is None and reason == Anomaly.CACHE_FULL:
            self._anomalies[Anomaly.CACHE_FULL] += 1
        super().end_all(reason)

    def needed(self) -> list[int]:
        needed = [0] * len(self.threads)
        may_be_joined = [False] * len(self.threads)
        for thread in self.threads:
            if thread.parent is not None and self._bound.join is not None:
                parent = self.threads[thread.parent]
                continues = parent.state is not State.ENDED and not parent.is_closing
                may_be_joined[thread.number] = continues or may_be_joined[thread.parent]
            if thread.state is not State.ENDED or may_be_joined[thread.number]:
                needed[thread.number] = thread.num_tokens
            if thread.state is not State.ENDED:
                for other, count in thread.context():
                    needed[other] = max(needed[other], count)
        return needed

    @property
    def num_past(self) -> int:
        pending = sum(thread.pending is not None for thread in self.threads)
        return self.prompt_length + sum(self.needed()) + pending

    def is_control(self, token: int) -> bool:
        return self._grammar.is_control(token)

    def is_shown(self, token: DocumentToken) -> bool:
        return self._dialect.show_control or not token.is_control

    def _act(self, thread: DecodeThread, token: int, role: Role) -> list[Start]:
        if role is Role.JOIN:
            self._break_tag(thread, thread.num_tokens)
            thread.pending, thread.state = token, State.WAITING
        elif role in (Role.CLOSE, Role.END):
            self._close(thread, "stop" if role is Role.END else "close", token)
        elif role is Role.OPEN:
            tag = None if thread.tag is None else self._bound.extended(thread.tag, token)
            self._enter(thread, token)
            return [self._open(thread, tag)]
        else:
            tag = self._grammar.ahead(thread, [token]).tag
            if tag is None or thread.tag is None or tag.start != thread.tag.start:
                self._break_tag(thread, thread.num_tokens)
            thread.tag = tag
            self._enter(thread, token)
        return []

    def _break_tag(self, thread: DecodeThread, known_at: int) -> None:
        """Turn the tokens of an incomplete tag into text; the thread's token ``known_at`` is the one that broke the tag."""
        if thread.tag is not None:
            inside = range(thread.tag.start, thread.num_tokens)
            thread.reverted |= {index: known_at for index in inside if not self._grammar.is_control(thread.token_ids[index])}
            thread.tag = None

    def _enter(self, thread: DecodeThread, token: int) -> None:
        thread.enter(token, thread.tag is not None or self._grammar.is_control(token))
        if thread.predicted_length is not None and thread.num_tokens == thread.predicted_length + 1:
            self._anomalies[Anomaly.LENGTH_EXCEEDED] += 1

    def _open(self, thread: DecodeThread, tag: OpenerTag | None) -> Start:
        """Open a child after the token that completes ``tag``, or after the opener if there is no tag."""
        if tag is not None:
            thread.tag = None
            if tail := tag.text[self._bound.end_of(tag) :]:  # text after the end of the tag is not part of it
                thread.tails[thread.num_tokens - 1] = tail
        path = (*thread.path, len(thread.children))
        predicted, names = self._predict_length(tag, thread.next_position)
        self._anomalies.update(names)
        predicted = self._known_lengths.get(path, predicted)
        child = DecodeThread(
            number=len(self.threads),
            path=path,
            parent=thread.number,
            opened_at=thread.num_tokens,
            inherited=(*thread.context(), (thread.number, thread.num_tokens)),
            next_position=thread.next_position,
            predicted_length=predicted if self.leaves_gaps else None,
        )
        self.threads.append(child)
        thread.children.append(child.number)
        thread.unjoined.append(child.number)
        thread.next_position += predicted
        self._enter(child, self._bound.child_start)
        return Start(child.number, self._bound.child_start)

    def _predict_length(self, tag: OpenerTag | None, position: int) -> tuple[int, list[Anomaly]]:
        """The predicted length of a child at ``position`` (0 if the dialect predicts none), and anomalies of the prediction."""
        if not self.leaves_gaps:
            return 0, []
        dialect, names = self._dialect, list[Anomaly]()
        stated: int | None = dialect.default_length
        if tag is not None and dialect.length_pattern is not None:
            stated = self._bound.stated_length(tag.text[: self._bound.end_of(tag)])
        if stated is None:
            stated = dialect.default_length
            names.append(Anomaly.LENGTH_MISSING)
        most = dialect.max_length
        if self._max_positions is not None:
            most = min(most, self._max_positions - self.max_tokens - position)
        clamped = max(min(stated, most), 1)
        if clamped != stated:
            names.append(Anomaly.LENGTH_CLAMPED)
        return clamped, names

    def _close(self, thread: DecodeThread, reason: str, token: int | None = None) -> None:
        """Stop a thread. If the dialect has joins, it ends only when its children have (an implicit join)."""
        self._break_tag(thread, thread.num_tokens - (token is None))
        thread.ended_by, thread.state, thread.pending = reason, State.WAITING, token
        if self._bound.join is None:
            self._end(thread)

    def _settle(self) -> Iterator[Start]:
        """Join, close and end threads that are due after a token, children before their parents."""
        for thread in reversed(self.threads):
            if thread.state is State.WAITING and thread.ended_by is None and not self._has_open_children(thread):
                yield self._join(thread)
            is_child = thread.state is State.RUNNING and thread.parent is not None
            if is_child and thread.num_tokens >= self._dialect.max_child_tokens:
                self._anomalies.update([Anomaly.UNCLOSED_CHILD, *([Anomaly.OPENER_NOT_COMPLETED] if thread.tag else [])])
                self._close(thread, "limit")
            if thread.is_closing and not self._has_open_children(thread):
                self._end(thread)
        self._cut()
        if self.finished is None and all(thread.state is State.ENDED for thread in self.threads):
            is_complete = sum(thread.num_tokens for thread in self.threads) <= self.max_tokens
            is_cut = any(thread.is_cut for thread in self.threads)
            self.finished = "stop" if is_complete and not is_cut else "length"

    def _has_open_children(self, thread: DecodeThread) -> bool:
        return any(self.threads[number].state is not State.ENDED for number in thread.unjoined)

    def _join(self, thread: DecodeThread) -> Start:
        """Append the pending join token; from there on the thread attends to its children and all their descendants."""
        assert thread.pending is not None
        joined = [number for child in thread.unjoined for number in self._family(child)]
        thread.joins.append(Join(thread.num_tokens, tuple((number, self.threads[number].num_tokens) for number in joined)))
        if self._dialect.after_join == "longest":
            thread.next_position = max(thread.next_position, *(self.threads[number].next_position for number in joined))
        elif self._dialect.after_join == "flat":
            thread.next_position = self.prompt_length + sum(count for _, count in thread.context()) + thread.num_tokens
        token, thread.pending = thread.pending, None
        thread.unjoined.clear()
        thread.state = State.RUNNING
        self._enter(thread, token)
        return Start(thread.number, token)

    def _family(self, number: int) -> Iterator[int]:
        """A thread and its descendants, in document order."""
        yield number
        for child in self.threads[number].children:
            yield from self._family(child)

    def _end(self, thread: DecodeThread) -> None:
        assert thread.ended_by is not None
        if thread.pending is not None:
            self._enter(thread, thread.pending)
        thread.end(thread.ended_by)

    def _cut(self) -> None:
        """End threads whose next token would come after the first ``max_tokens`` of the document."""
        if sum(thread.num_tokens for thread in self.threads) < self.max_tokens:
            return
        for thread, index in zip(self.threads, next_indices(self.threads), strict=True):
            if thread.state is not State.ENDED and index >= self.max_tokens:
                thread.end("length", is_cut=True)
