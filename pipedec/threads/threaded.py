"""One answer in several decode threads: how accepted tokens open, close and join them (APAR Algorithm 1, PASTA §3).

Every rank replays the accepted tokens through a sequence, as through its ``PredictionTree``. Document, positions and
visibility depend only on the tokens of each thread, not on how the decoding of threads interleaves; only thread numbers depend
on that. Knows token ids and texts, no model, no rows and no process. Broken structure never ends an answer: it is counted in
``anomalies`` and resolved by fixed rules (docs/threads.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pipedec.threads.dialect import BoundDialect, OpenerTag
from pipedec.threads.grammar import DialectGrammar, Role
from pipedec.threads.sequence import DocumentToken, Sequence, next_indices
from pipedec.threads.thread import Anomaly, DecodeThread, Join, Start, State


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
        self._grammar = DialectGrammar(bound, self._end_token_ids)
        self._anomalies: Counter[Anomaly] = Counter()

    @property
    def anomalies(self) -> dict[str, int]:
        return {anomaly.value: count for anomaly, count in self._anomalies.items()}

    def banned(self, number: int, after: Iterable[int] = ()) -> frozenset[int]:
        return self._grammar.banned(self.threads[number], list(after))

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
            position += predicted + 1
            predicted = self._length_predicted_by(thread, token, path[:count], position)
        return predicted

    def _length_predicted_by(self, thread: DecodeThread, token: int, lookahead: list[int], position: int) -> int:
        """The predicted length of the child that ``token`` would open at ``position``; 0 if it opens none."""
        if not self.may_leave_gap(token) or self._grammar.role(thread, token, lookahead) is not Role.OPEN:
            return 0
        tag = self._grammar.ahead(thread, lookahead).tag
        return self._predict_length(None if tag is None else self._bound.extended(tag, token), position)[0]

    def may_leave_gap(self, token: int) -> bool:
        return self.leaves_gaps and self._bound.may_open(token)

    def accept(self, number: int, token: int) -> list[Start]:
        thread = self.threads[number]
        if thread.is_cut:
            return []
        if thread.state is not State.RUNNING:
            raise ValueError(f"token {token} for thread {number}, which is {thread.state.value}")
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

    def is_control(self, token: int) -> bool:
        return self._grammar.is_control(token)

    def is_shown(self, token: DocumentToken) -> bool:
        return self._dialect.show_control or not token.is_control

    def _act(self, thread: DecodeThread, token: int, role: Role) -> list[Start]:
        """Apply an accepted token to its own thread."""
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
        predicted, names = self._predict_length(tag, thread.next_position)
        self._anomalies.update(names)
        child = DecodeThread(
            number=len(self.threads),
            path=(*thread.path, len(thread.children)),
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
            if thread.state is State.RUNNING and thread.parent is not None:
                self._limit(thread)
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

    def _limit(self, thread: DecodeThread) -> None:
        """Close a child that has reached the dialect's ``max_child_tokens``."""
        if thread.num_tokens >= self._dialect.max_child_tokens:
            names = [Anomaly.UNCLOSED_CHILD, *([Anomaly.OPENER_NOT_COMPLETED] if thread.tag else [])]
            self._anomalies.update(names)
            self._close(thread, "limit")

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
