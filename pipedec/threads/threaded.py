"""One answer in several decode threads: how accepted tokens open, close and join them (APAR Algorithm 1, PASTA §3).

Every rank replays the accepted tokens through a sequence, as through its ``PredictionTree``. Document, positions and
visibility depend only on the tokens of each thread, not on how the decoding of threads interleaves; only thread numbers depend
on that. Knows token ids and texts, no model, no rows and no process. Broken structure never ends an answer: it is counted in
``anomalies`` and resolved by fixed rules (docs/threads.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pipedec.threads import anomalies
from pipedec.threads.bound import BoundDialect, OpenerTag
from pipedec.threads.document import DocumentToken, next_indices
from pipedec.threads.events import Event, Finished, Joined, ThreadEnded, ThreadOpened, Waiting
from pipedec.threads.grammar import DialectGrammar, Role
from pipedec.threads.sequence import Sequence
from pipedec.threads.thread import DecodeThread, Join, State


class ThreadedSequence(Sequence):
    """An answer whose tokens may open further threads.

    Args:
        bound: the dialect and its token ids.
        prompt_length, end_token_ids, max_tokens: see ``Sequence``.
        max_positions: number of positions of the model. Predicted lengths are clamped so that ``max_tokens`` tokens always fit;
            None for no limit.
    """

    can_fork = True

    def __init__(
        self,
        bound: BoundDialect,
        prompt_length: int,
        end_token_ids: Iterable[int],
        max_tokens: int,
        max_positions: int | None = None,
    ) -> None:
        super().__init__(prompt_length, end_token_ids, max_tokens)
        self.leaves_gaps = bound.dialect.after_opening == "predicted"
        self._bound = bound
        self._max_positions = max_positions
        self._dialect = bound.dialect
        self._roles = DialectGrammar(bound, self._end_token_ids)
        self._anomalies: Counter[str] = Counter()

    @property
    def anomalies(self) -> dict[str, int]:
        return dict(self._anomalies)

    def banned(self, number: int, after: Iterable[int] = ()) -> frozenset[int]:
        return self._roles.banned(self.threads[number], list(after))

    def ends_walk(self, number: int, token: int, after: Iterable[int] = ()) -> bool:
        thread, lookahead = self.threads[number], list(after)
        if self._roles.role(thread, token, lookahead) in (Role.JOIN, Role.CLOSE, Role.END):
            return True
        if thread.parent is not None and thread.num_tokens + len(lookahead) + 1 >= self._dialect.max_child_tokens:
            return True
        entering = len(lookahead) + 1 + self._roles.opened(thread, [*lookahead, token])  # forced tokens count
        return next_indices(self.threads)[number] + entering >= self.max_tokens

    def following(self, number: int, path: list[int]) -> tuple[int, frozenset[int]]:
        thread = self.threads[number]
        position = thread.next_position
        for count, token in enumerate(path):
            position += 1 + self._length_predicted_by(thread, token, path[:count], position + 1)
        return position, self._roles.banned(thread, path)

    def gap(self, number: int, path: list[int]) -> int:
        position, _ = self.following(number, path[:-1])
        return self._length_predicted_by(self.threads[number], path[-1], path[:-1], position + 1)

    def _length_predicted_by(self, thread: DecodeThread, token: int, lookahead: list[int], position: int) -> int:
        """The predicted length of the child that ``token`` would open at ``position``; 0 if it opens none."""
        if not self.may_leave_gap(token) or self._roles.role(thread, token, lookahead) is not Role.OPEN:
            return 0
        tag = self._roles.tag_after(thread, lookahead)
        return self._predict_length(None if tag is None else self._bound.extended(tag, token), position)[0]

    def may_leave_gap(self, token: int) -> bool:
        return self.leaves_gaps and self._bound.may_open(token)

    def accept(self, number: int, token: int) -> list[Event]:
        thread = self.threads[number]
        if thread.is_cut:
            return []
        if thread.state is not State.RUNNING:
            raise ValueError(f"token {token} for thread {number}, which is {thread.state.value}")
        role = self._roles.role(thread, token)
        self._anomalies.update(self._roles.anomalies_of(thread, token, role))
        events = [*self._act(thread, token, role), *self._settle()]
        return [*events, *self.end_all(anomalies.CACHE_FULL)] if self._is_full() else events

    def end_all(self, reason: str) -> list[Event]:
        if self.finished is None and reason in anomalies.ANOMALIES:
            self._anomalies[reason] += 1
        return super().end_all(reason)

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

    def is_control(self, token: int) -> bool:
        return self._roles.is_control(token)

    def is_shown(self, token: DocumentToken) -> bool:
        return self._dialect.show_control or not token.is_control

    def _act(self, thread: DecodeThread, token: int, role: Role) -> Iterator[Event]:
        if role is Role.JOIN:
            self._break_tag(thread, thread.num_tokens)
            thread.pending, thread.state = token, State.WAITING
            yield from self._waiting(thread)
        elif role in (Role.CLOSE, Role.END):
            yield from self._close(thread, "stop" if role is Role.END else "close", token)
        elif role is Role.OPEN:
            tag = None if thread.tag is None else self._bound.extended(thread.tag, token)
            self._enter(thread, token)
            yield self._open(thread, tag)
        else:
            tag = self._roles.tag_after(thread, [token])
            if tag is None or thread.tag is None or tag.start != thread.tag.start:
                self._break_tag(thread, thread.num_tokens)
            thread.tag = tag
            self._enter(thread, token)

    def _is_full(self) -> bool:
        """Whether more tokens must be cached than the dialect allows."""
        limit = self._dialect.max_cached_tokens
        if self.prompt_length + sum(thread.num_tokens for thread in self.threads) <= limit:
            return False
        return self.prompt_length + sum(self.needed()) > limit

    def _break_tag(self, thread: DecodeThread, known_at: int) -> None:
        """Turn the tokens of an incomplete tag into text; the thread's token ``known_at`` is the one that broke the tag."""
        if thread.tag is not None:
            inside = range(thread.tag.start, thread.num_tokens)
            thread.reverted |= {index: known_at for index in inside if not self._roles.is_control(thread.token_ids[index])}
            thread.tag = None

    def _enter(self, thread: DecodeThread, token: int) -> None:
        thread.enter(token, thread.tag is not None or self._roles.is_control(token))
        if thread.predicted_length is not None and thread.num_tokens == thread.predicted_length + 1:
            self._anomalies[anomalies.LENGTH_EXCEEDED] += 1

    def _open(self, thread: DecodeThread, tag: OpenerTag | None) -> ThreadOpened:
        """Open a child after the token that completes ``tag``, or after the opener if there is no tag."""
        if tag is not None:
            self._finish_tag(thread, tag)
        is_predicted = self._dialect.after_opening == "predicted"
        predicted, names = self._predict_length(tag, thread.next_position)
        self._anomalies.update(names)
        child = DecodeThread(
            number=len(self.threads),
            path=(*thread.path, len(thread.children)),
            parent=thread.number,
            opened_at=thread.num_tokens,
            inherited=(*thread.context(), (thread.number, thread.num_tokens)),
            next_position=thread.next_position,
            predicted_length=predicted if is_predicted else None,
        )
        self.threads.append(child)
        thread.children.append(child.number)
        thread.unjoined.append(child.number)
        thread.next_position += predicted
        self._enter(child, self._bound.child_start)
        return ThreadOpened(thread.number, child.number, child.token_ids[0], child.positions[0])

    def _finish_tag(self, thread: DecodeThread, tag: OpenerTag) -> None:
        """Keep the text after the end of a complete tag, which is not part of it."""
        thread.tag = None
        tail = tag.text[self._bound.end_of(tag) :]
        if tail:
            thread.tails[thread.num_tokens - 1] = tail

    def _predict_length(self, tag: OpenerTag | None, position: int) -> tuple[int, list[str]]:
        """The predicted length of a child at ``position`` (0 if the dialect predicts none), and anomalies of the prediction."""
        dialect = self._dialect
        if dialect.after_opening != "predicted":
            return 0, []
        names = []
        stated: int | None = dialect.default_length
        if tag is not None and dialect.length_pattern is not None:
            stated = self._bound.stated_length(tag.text[: self._bound.end_of(tag)])
        if stated is None:
            stated, names = dialect.default_length, [anomalies.LENGTH_MISSING]
        most = dialect.max_length
        if self._max_positions is not None:
            most = min(most, self._max_positions - self.max_tokens - position)
        clamped = max(min(stated, most), 1)
        return clamped, names + ([anomalies.LENGTH_CLAMPED] if clamped != stated else [])

    def _close(self, thread: DecodeThread, reason: str, token: int | None = None) -> Iterator[Event]:
        """Stop a thread. If the dialect has joins, it ends only when its children have (an implicit join)."""
        self._break_tag(thread, thread.num_tokens - (token is None))
        thread.ended_by, thread.state = reason, State.WAITING
        thread.pending = token
        if self._bound.join is None:
            yield self._end(thread)
        else:
            yield from self._waiting(thread)

    def _waiting(self, thread: DecodeThread) -> Iterator[Event]:
        if self._open_children(thread):
            yield Waiting(thread.number)

    def _open_children(self, thread: DecodeThread) -> bool:
        return any(self.threads[number].state is not State.ENDED for number in thread.unjoined)

    def _settle(self) -> Iterator[Event]:
        """Join, close and end threads that are due after a token, children before their parents."""
        for thread in reversed(self.threads):
            if thread.state is State.WAITING and thread.ended_by is None and not self._open_children(thread):
                yield self._join(thread)
            if thread.state is State.RUNNING and thread.parent is not None:
                yield from self._limit(thread)
            if thread.is_closing and not self._open_children(thread):
                yield self._end(thread)
        yield from self._cut()
        if self.finished is None and all(thread.state is State.ENDED for thread in self.threads):
            self.finished = self._finish_reason()
            yield Finished(self.finished)

    def _join(self, thread: DecodeThread) -> Joined:
        """Append the pending join token; from there on the thread attends to its children and all their descendants."""
        assert thread.pending is not None
        joined = tuple(number for child in thread.unjoined for number in self._family(child))
        thread.joins.append(Join(thread.num_tokens, tuple((number, self.threads[number].num_tokens) for number in joined)))
        thread.next_position = self._position_after_join(thread, joined)
        token, thread.pending = thread.pending, None
        thread.unjoined.clear()
        thread.state = State.RUNNING
        self._enter(thread, token)
        return Joined(thread.number, joined, token, thread.positions[-1])

    def _family(self, number: int) -> Iterator[int]:
        """A thread and its descendants, in document order."""
        yield number
        for child in self.threads[number].children:
            yield from self._family(child)

    def _position_after_join(self, thread: DecodeThread, joined: tuple[int, ...]) -> int:
        if self._dialect.after_join == "longest":
            return max(thread.next_position, *(self.threads[number].next_position for number in joined))
        if self._dialect.after_join == "flat":
            return self.prompt_length + sum(count for _, count in thread.context()) + thread.num_tokens
        return thread.next_position

    def _limit(self, thread: DecodeThread) -> Iterator[Event]:
        """Close a child that has reached the dialect's ``max_child_tokens``."""
        if thread.num_tokens >= self._dialect.max_child_tokens:
            names = [anomalies.UNCLOSED_CHILD, *([anomalies.OPENER_NOT_COMPLETED] if thread.tag else [])]
            self._anomalies.update(names)
            yield from self._close(thread, "limit")

    def _end(self, thread: DecodeThread) -> ThreadEnded:
        assert thread.ended_by is not None
        if thread.pending is not None:
            self._enter(thread, thread.pending)
        thread.end(thread.ended_by)
        return ThreadEnded(thread.number, thread.ended_by)

    def _cut(self) -> Iterator[Event]:
        """End threads whose next token would come after the first ``max_tokens`` of the document."""
        if sum(thread.num_tokens for thread in self.threads) < self.max_tokens:
            return
        for thread, index in zip(self.threads, next_indices(self.threads), strict=True):
            if thread.state is not State.ENDED and index >= self.max_tokens:
                thread.end("length", is_cut=True)
                yield ThreadEnded(thread.number, "length")

    def _finish_reason(self) -> str:
        is_complete = sum(thread.num_tokens for thread in self.threads) <= self.max_tokens
        return "length" if any(thread.is_cut for thread in self.threads) or not is_complete else "stop"
