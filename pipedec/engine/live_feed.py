"""What happens in the pipeline, as frames for those who watch (docs/live.md): openings, rows, verdicts, text.

Built on rank 0 from the records of the decode loop, and only while somebody watches. Where the frames go, and who watches, is
the caller's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipedec.core import DEFAULT_METHOD, Step, Verdict
from pipedec.engine.live_trees import Entered, LiveTrees
from pipedec.engine.records import Advanced, Closed, Drained, Ended, Interrupted, Opened, Record, Timestep, Waits
from pipedec.engine.request_pool import RequestPool

VERSION = 1
_PROMPT = 400  # characters of a prompt that are shown

Frame = dict[str, Any]
Text = Callable[[Sequence[int]], str]


class LiveFeed:
    """The frames of one source.

    Args:
        about: of the source, for its first frame: ``run`` (its name), ``epoch``, ``stages``, ``groups``, ``target``, …
        text: of token ids.
        said: returns the text of an answer so far, by the number of its request.
        send: is given frames, in order. It must not wait.
        now_us: the time in microseconds.

    Attributes:
        watcher: names who has begun last to watch; empty if nobody watches.
    """

    def __init__(
        self, about: Mapping[str, Any], text: Text, said: Callable[[int], str], send: Callable[[list[Frame]], None],
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:  # fmt: skip
        self.watcher = ""
        self._about = dict(about)
        self._text = text
        self._said = said
        self._send = send
        self._now_us = now_us
        self._texts: dict[int, str] = {}  # of single tokens
        self._timestep = 0
        self._requests: dict[int, _Watched] = {}
        self._frames: list[Frame] = []  # after the one of the present timestep
        self._present: Frame | None = None  # the step that is not complete yet

    def follow(self, watcher: str, pool: RequestPool, timestep: int) -> None:
        """``watcher`` has begun to watch, or nobody watches any more. To be called between two timesteps.

        Frames begin with what runs. Of the rows in flight nothing is known then.

        Args:
            timestep: the number of those so far.
        """
        if self.watcher:
            self._complete()
            pool.listeners.remove(self.note)
        self.watcher = watcher
        if not watcher:
            self._requests.clear()
            return
        pool.listeners.append(self.note)
        self._timestep = timestep
        running = pool.opened()
        for opened in running:
            self._requests.setdefault(opened.number, _Watched()).open(opened, is_seen=False)
        self._send([self._run_frame(), *(self._open_frame(opened) for opened in running)])

    def begin_epoch(self, epoch: int) -> None:
        """All rows in flight are lost."""
        self._about["epoch"] = epoch
        if self.watcher:
            self._complete()
            self._frames.append(self._run_frame())
            self._complete()

    def note(self, record: Record) -> None:
        match record:
            case Timestep():
                self._begin(record)
            case Opened():
                self._requests.setdefault(record.number, _Watched()).open(record)
                self._frames.append(self._open_frame(record))
            case Advanced():
                self._advance(record.number, record.verdict)
            case Waits():
                self._leave(record.number, "paused")
            case Interrupted():
                self._leave(record.number, "interrupted")
            case Ended():
                self._leave(record.number, record.reason, {"hits": record.hits, "misses": record.misses})
            case Closed():
                self._requests.pop(record.number, None)
            case Drained():
                self._complete()

    def _begin(self, timestep: Timestep) -> None:
        """Rows have entered in this timestep; its verdicts follow."""
        steps = [(update.number, update.step) for update in timestep.entered.updates if update.step is not None]
        entered = [self._entered(number, step) for number, step in steps]
        self._complete()
        self._timestep += 1
        seconds = None if timestep.timing is None else round(1000 * timestep.timing.seconds, 3)
        self._present = self._frame("step", ms=seconds) | {"in": entered, "out": []}

    def _entered(self, number: int, step: Step) -> Frame:
        one = self._requests[number]
        if one.is_prefilling:
            return {"r": number, "chunk": step.num_rows, "rows": []}
        return {"r": number, "chunk": 0, "rows": [self._described(row, one) for row in one.enter(step)]}

    def _described(self, row: Entered, one: _Watched) -> list[Any]:
        chance = None if row.chance is None else round(row.chance, 4)
        described = [row.id, row.parent, row.token, self._token_text(row.token), chance]
        return [*described, row.thread] if one.has_threads else described

    def _advance(self, number: int, verdict: Verdict) -> None:
        one = self._requests[number]
        one.is_prefilling = False
        if not verdict.tokens:
            return
        assert self._present is not None
        rows, pruned, is_hit = one.accept(verdict)
        text = self._said(number)
        news, one.num_said = text[one.num_said :], len(text)
        one.latest = {
            "r": number,
            "tokens": [[token, self._token_text(token), row] for token, row in zip(verdict.tokens, rows, strict=True)],
            "text": news, "hit": is_hit, "late": 0, "pruned": pruned, "end": verdict.finished,
        }  # fmt: skip
        self._present["out"].append(one.latest)

    def _leave(self, number: int, reason: str, metrics: Mapping[str, Any] | None = None) -> None:
        """A request has ended, or waits."""
        one = self._requests.get(number)
        if one is not None and one.has_lane:
            one.has_lane = False
            self._frames.append(self._frame("close", r=number, reason=reason, metrics=metrics))

    def _complete(self) -> None:
        """The present timestep has ended: pass on its frames."""
        frames, self._frames = self._frames, []
        if self._present is not None:
            frames.insert(0, self._present)
            self._present = None
        if frames:
            self._send(frames)

    def _run_frame(self) -> Frame:
        return {"k": "run", "v": VERSION, **self._about, "us": self._now_us()}

    def _open_frame(self, opened: Opened) -> Frame:
        request, opening, said = opened.request, opened.opening, self._said(opened.number)
        self._requests[opened.number].num_said = len(said)
        prompt = self._text(request.prompt_token_ids[:_PROMPT])[:_PROMPT]
        length, cached = opening.prompt_length, opening.cached
        about = {"r": request.number, "method": request.method, "prompt": prompt, "prompt_tokens": length, "cached": cached}
        return self._frame("open", **about, said=said)

    def _frame(self, kind: str, **values: Any) -> Frame:
        return {"k": kind, "run": self._about["run"], "t": self._timestep, "us": self._now_us(), **values}

    def _token_text(self, token: int) -> str:
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = "▢" if token < 0 else self._text((token,))
        return known


class _Watched:
    """The rows of a request in flight, from when it is watched.

    Attributes:
        is_prefilling: no verdict has come since it was opened, so that all its rows are of its prompt.
        latest: the frame of its last verdict, until rows follow.
        num_said: characters of the answer that are in frames.
    """

    def __init__(self) -> None:
        self.has_lane = False
        self.is_prefilling = True
        self.latest: Frame | None = None
        self.num_said = 0
        self._num_rows = 0  # that are in frames
        self._trees: LiveTrees | None = None  # None while the rows in flight are not known

    def open(self, opened: Opened, is_seen: bool = True) -> None:
        """It has a lane; ``is_seen`` if none of its rows have entered unseen."""
        self.has_lane, self.is_prefilling = True, opened.is_prefilling
        self._opened = opened
        self._trees = self._new_trees() if is_seen else None

    @property
    def has_threads(self) -> bool:
        return self._opened.request.threads is not None

    def _new_trees(self) -> LiveTrees:
        return LiveTrees(self._opened.new_sequence() if self.has_threads else None, self._num_rows)

    def enter(self, step: Step) -> list[Entered]:
        """Rows enter."""
        token_ids, parents = step.token_ids.tolist(), step.parents.tolist()
        threads = [0] * len(token_ids) if step.threads is None else step.threads.tolist()
        log_probs = None if step.log_probs is None else list(map(float, step.log_probs))
        if self._trees is None and parents[0] < 0 and not self.has_threads:
            self._trees = self._new_trees()  # nothing else is in flight
        if self._trees is None:
            entered = [Entered(self._num_rows + at, -1, token, None, threads[at]) for at, token in enumerate(token_ids)]
        else:
            entered = self._trees.enter(token_ids, parents, threads, log_probs)
        self._num_rows += len(entered)
        self._note_late(entered)
        return entered

    def _note_late(self, entered: Sequence[Entered]) -> None:
        """A token that was accepted enters together with guesses below it: it had been proposed, but had not entered in time."""
        latest, self.latest = self.latest, None
        is_default = self._opened.request.method == DEFAULT_METHOD
        if latest is not None and not latest["hit"] and is_default and entered[0].parent < 0:
            latest["late"] = int(any(row.chance is not None and row.chance < 1 for row in entered[1:]))

    def accept(self, verdict: Verdict) -> tuple[list[int | None], list[int], bool]:
        """Follow a verdict. Returns for each token the id of the row that carried it, the ids of the rows that are void now, and
        whether the last token was in flight; it counts as such while that is not known.
        """
        rows: list[int | None] = [None] * len(verdict.tokens)
        if self._trees is None:
            return rows, [], True
        carried = self._trees.accept(verdict)
        rows[: len(carried.rows)] = carried.rows[: len(rows)]
        return rows, carried.pruned, rows[-1] is not None
