"""What happens in the pipeline, as frames for those who watch (docs/live.md): openings, rows, verdicts, text.

Built on rank 0 from what the decode loop tells the readers of answers and its listeners, and only while somebody watches. Where
the frames go, and who watches, is the caller's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipedec.core import DEFAULT_METHOD, Opening, Request, Step, TokenLogprobs, Update, Verdict
from pipedec.decoding import RequestState
from pipedec.engine.live_trees import Carried, Entered, LiveTrees
from pipedec.engine.pool import Reader
from pipedec.engine.recorder import Timestep
from pipedec.threads import NewSequence

VERSION = 1
_PROMPT = 400  # characters of a prompt that are shown

Frame = dict[str, Any]
Text = Callable[[Sequence[int]], str]


class LiveFeed:
    """The frames of one source.

    Args:
        about: of the source, for its first frame: ``run`` (its name), ``epoch``, ``stages``, ``groups``, ``target``, …
        text: of token ids.
        send: takes frames, in order. It must not wait.
        now_us: the time in microseconds.

    Attributes:
        text: of token ids.
        watcher: names who has begun last to watch; empty if nobody watches. Has effect with the next rows that enter. Who begins
            is told what runs; of the rows in flight nothing is known then.
    """

    def __init__(
        self, about: Mapping[str, Any], text: Text, send: Callable[[list[Frame]], None],
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:  # fmt: skip
        self.watcher = ""
        self._about = dict(about)
        self.text = text
        self._send = send
        self._now_us = now_us
        self._known = ""  # the watcher who was told what runs
        self._texts: dict[int, str] = {}  # of single tokens
        self._timestep = 0
        self._readers: dict[int, WatchedReader] = {}
        self._frames: list[Frame] = []  # behind the one of the present timestep
        self._entering: list[Frame] = []  # what enters at the next timestep
        self._present: Frame | None = None  # the step that is not complete yet

    @property
    def is_on(self) -> bool:
        """Whether frames are built."""
        return bool(self._known)

    def watched(self, reader: Reader, request: Request, new_sequence: NewSequence, text_of: Callable[[], str]) -> Reader:
        """A reader that passes everything on to ``reader``, and lets this feed know.

        Args:
            new_sequence: makes the sequence of the answer.
            text_of: what the answer has said so far.
        """
        return WatchedReader(self, reader, request, new_sequence, text_of)

    def note(self, timestep: Timestep) -> None:
        """Listens to the timesteps: this one's rows have entered; its verdicts follow."""
        self._follow_watcher()
        self._timestep += 1
        if self._known:
            self._complete()
            seconds = None if timestep.timing is None else round(1000 * timestep.timing.seconds, 3)
            step = self._frame("step", ms=seconds)
            self._present = step | {"in": self._entering, "out": []}
        self._entering = []

    def begin_epoch(self, epoch: int) -> None:
        """All rows in flight are lost."""
        self._about["epoch"] = epoch
        if self._known:
            self._complete()
            self._frames.append(self._run_frame())
            self.flush()

    def flush(self) -> None:
        """Pass on all frames that are complete; nothing else happens for a while."""
        if self._known:
            self._complete()
        frames, self._frames = self._frames, []
        if frames:
            self._send(frames)

    def _complete(self) -> None:
        """The present timestep has ended."""
        if self._present is not None:
            self._frames.insert(0, self._present)
            self._present = None
        if self._frames:
            frames, self._frames = self._frames, []
            self._send(frames)

    def _follow_watcher(self) -> None:
        """Somebody may have begun to watch, or nobody watches any more."""
        if self.watcher == self._known:
            return
        if self._known:
            self._complete()
        self._known = self.watcher
        if self._known:
            self._send([self._run_frame(), *(reader.open_frame() for reader in self._readers.values())])

    def _run_frame(self) -> Frame:
        return {"k": "run", "v": VERSION, **self._about, "us": self._now_us()}

    def _frame(self, kind: str, **values: Any) -> Frame:
        return {"k": kind, "run": self._about["run"], "t": self._timestep, "us": self._now_us(), **values}

    def opened(self, reader: WatchedReader) -> None:
        """A request has a lane: its first rows enter at the next timestep."""
        self._follow_watcher()
        self._readers[reader.number] = reader
        if self._known:
            self._frames.append(reader.open_frame())

    def entering(self) -> bool:
        """Whether it is to be told that rows enter at the next timestep."""
        self._follow_watcher()
        return bool(self._known)

    def entered(self, update: Frame) -> None:
        """Rows of a request enter at the next timestep."""
        self._entering.append(update)

    def accepted(self, verdict: Frame) -> None:
        """A verdict of the present timestep."""
        if self._present is not None:
            self._present["out"].append(verdict)

    def left(self, number: int, reason: str, metrics: Mapping[str, Any] | None = None) -> None:
        """A request has ended, or waits."""
        if self._readers.pop(number, None) is not None and self._known:
            self._frames.append(self._frame("close", r=number, reason=reason, metrics=metrics))

    def open_frame(self, request: Request, opening: Opening, said: str) -> Frame:
        prompt = self.text(request.prompt_token_ids[:_PROMPT])[:_PROMPT]
        length, cached = opening.prompt_length, opening.cached
        about = {"r": request.number, "method": request.method, "prompt": prompt, "prompt_tokens": length, "cached": cached}
        return self._frame("open", **about, said=said)

    def token_text(self, token: int) -> str:
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = "▢" if token < 0 else self.text((token,))
        return known


class WatchedReader:
    """The ``Reader`` of a request of which a feed tells."""

    def __init__(
        self, feed: LiveFeed, reader: Reader, request: Request, new_sequence: NewSequence, text_of: Callable[[], str]
    ) -> None:
        self.number = request.number
        self._feed = feed
        self._reader = reader
        self._request = request
        self._new_sequence = new_sequence
        self._text_of = text_of
        self._opening: Opening | None = None
        self._missing = 0  # tokens of the prompt, and of what was said, that have yet to enter
        self._trees: LiveTrees | None = None  # None while the rows in flight are not known
        self._num_rows = 0  # that were told of
        self._told: Frame | None = None  # the last verdict, until rows follow
        self._said = 0  # characters of the answer that were told

    def waits(self) -> None:
        self._feed.left(self.number, "paused")
        self._reader.waits()

    def interrupted(self) -> None:
        self._feed.left(self.number, "interrupted")
        self._reader.interrupted()

    def opened(self, opening: Opening) -> None:
        self._opening = opening
        self._missing = opening.prompt_length + len(opening.said) - opening.cached
        self._feed.opened(self)
        self._trees = self._new_trees() if self._feed.is_on else None
        self._reader.opened(opening)

    def open_frame(self) -> Frame:
        """What a watcher must know of this request first. Rows in flight are not known."""
        assert self._opening is not None
        self._trees = None
        text = self._text_of()
        self._said = len(text)
        return self._feed.open_frame(self._request, self._opening, text)

    def entered(self, step: Step) -> None:
        self._reader.entered(step)
        chunk = min(step.num_rows, self._missing)
        self._missing -= chunk
        if self._feed.entering():
            rows = [] if chunk else self._rows(step)
            self._feed.entered({"r": self.number, "chunk": step.num_rows if chunk else 0, "rows": rows})

    def _new_trees(self) -> LiveTrees:
        return LiveTrees(self._new_sequence() if self._request.threads is not None else None, self._num_rows)

    def _rows(self, step: Step) -> list[list[Any]]:
        token_ids, parents = step.token_ids.tolist(), step.parents.tolist()
        threads = [0] * len(token_ids) if step.threads is None else step.threads.tolist()
        log_probs = None if step.log_probs is None else list(map(float, step.log_probs))
        if self._trees is None and parents[0] < 0 and self._request.threads is None:
            self._trees = self._new_trees()  # nothing else is in flight
        if self._trees is None:
            entered = [Entered(self._num_rows + at, -1, token, None, threads[at]) for at, token in enumerate(token_ids)]
        else:
            entered = self._trees.enter(token_ids, parents, threads, log_probs)
        self._num_rows += len(entered)
        self._note_late(entered)
        return [self._described(row) for row in entered]

    def _note_late(self, entered: Sequence[Entered]) -> None:
        """A token that was accepted enters together with guesses below it: it had been proposed, but had not entered in time."""
        told, self._told = self._told, None
        if told is not None and not told["hit"] and self._request.method == DEFAULT_METHOD and entered[0].parent < 0:
            told["late"] = int(any(row.chance is not None and row.chance < 1 for row in entered[1:]))

    def _described(self, row: Entered) -> list[Any]:
        chance = None if row.chance is None else round(row.chance, 4)
        described = [row.id, row.parent, row.token, self._feed.token_text(row.token), chance]
        return described if self._request.threads is None else [*described, row.thread]

    def take(self, result: Update, timestep: int) -> Verdict:
        verdict = self._reader.take(result, timestep)
        if self._feed.is_on and verdict.tokens:
            self._accept(verdict)
        return verdict

    def _accept(self, verdict: Verdict) -> None:
        tokens, is_known = verdict.tokens, self._trees is not None
        carried = Carried([None] * len(tokens), []) if self._trees is None else self._trees.accept(verdict)
        rows = [*carried.rows, *[None] * len(tokens)]
        text = self._text_of()
        news, self._said = text[self._said :], len(text)
        self._told = {
            "r": self.number,
            "tokens": [[token, self._feed.token_text(token), row] for token, row in zip(tokens, rows, strict=False)],
            "text": news, "hit": rows[len(tokens) - 1] is not None or not is_known, "late": 0, "pruned": carried.pruned,
            "end": verdict.finished,
        }  # fmt: skip
        self._feed.accepted(self._told)

    def scored(self, logprobs: TokenLogprobs) -> None:
        self._reader.scored(logprobs)

    def corrupted(self, stage: int) -> None:
        self._reader.corrupted(stage)

    def ended(self, reason: str, method: RequestState) -> None:
        self._reader.ended(reason, method)
        self._feed.left(self.number, reason, {"hits": method.hits, "misses": method.misses})

    def closed(self) -> None:
        self._reader.closed()
