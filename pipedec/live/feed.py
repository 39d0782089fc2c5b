"""The live feed (docs/live.md): what happens in the pipeline, as frames of openings, rows, verdicts and text.

Made on rank 0 from the records of the decode loop, and only while there is a watcher. It does not know where the frames go. The
rows in flight are copied from the trees that every stage keeps, but with numbers that stay: stages renumber the rows of a tree
after every verdict.

Frames, version 1. Every frame has ``k``, its kind, and ``run``, the name of its source. All but ``gap`` have ``us``, the time
in microseconds. Viewers skip kinds and fields that they do not know. ``t`` is a timestep of the run and ``r`` the number of a
request, whose rows are numbered from 0.

- ``run``: ``v``, ``epoch``, ``stages``, ``groups``, ``target``, ``draft``, ``method``, ``emulated``. The first frame of a
  source, sent again with every epoch, when all rows in flight are void.
- ``open``: ``t``, ``r``, ``method``, ``prompt``, ``prompt_tokens``, ``cached``, ``said``. A request begins, or was already
  running when the viewer came; ``said`` is its answer so far.
- ``step``: ``t``, ``ms``, ``in``, ``out``. One timestep. ``in`` is what enters the first stage, for each request: ``r``,
  ``chunk`` (number of rows of the prompt) and ``rows``, each ``[id, id of the parent or -1, token id, text, chance or null]``,
  followed by the thread in answers with decode threads. What enters at timestep T is computed by stage group g at T + g.
  ``out`` is the verdicts: ``r``, ``tokens`` (each ``[token id, text, id of its row or null]``), ``text``, ``hit``, ``late``
  (accepted tokens that had been proposed but had not entered), ``pruned`` (ids of rows in flight that are void now) and ``end``
  (why the answer ended, or null).
- ``close``: ``t``, ``r``, ``reason``, ``metrics``. A request has ended, or is paused.

Two kinds come from readers (``pipedec.live``). ``stats``, about once a second: ``running``, ``waiting``, ``kv``,
``tokens_per_s``, ``ttft_ms``, ``tpot_ms``, ``acceptance``, ``hit_rate``, ``epoch``, ``recovering``, ``recoveries``. ``gap``:
``dropped``, how many frames or batches are missing. Rows in flight are unknown after it, and ``open`` frames of what runs
follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipedec.core.request import DEFAULT_METHOD
from pipedec.core.stage_message import Step
from pipedec.core.verdict import Verdict
from pipedec.decoding import Request, Scheduler, events
from pipedec.live.reading import VERSION, Frame
from pipedec.plan.spec import PipelineSpec
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Remaining, ThreadChanges, apply_verdict

_PROMPT = 400  # characters of a prompt that are shown

Text = Callable[[Sequence[int]], str]


def about(spec: PipelineSpec, run_id: str) -> Frame:
    """The fields of the first frame of a run with this pipeline."""
    return {
        "epoch": 0,
        "run": run_id,
        "target": spec.target.name,
        "draft": None if spec.draft is None else spec.draft.name,
        "method": None,
        "emulated": None if spec.emulation is None else spec.emulation.preset,
        "stages": spec.topology.num_stages,
        "groups": spec.topology.num_groups,
    }


class LiveFeed:
    """The frames of one source.

    Args:
        about: describes the source, for its first frame: ``run`` (its name), ``epoch``, ``stages``, ``groups``, ``target``, …
        text: the text of token ids.
        answer_text: returns the text of an answer so far.
        send: receives frames, in order. It must not wait.
        now_us: returns the time in microseconds.
    """

    def __init__(
        self, about: Mapping[str, Any], text: Text, answer_text: Callable[[Request], str], send: Callable[[list[Frame]], None],
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:  # fmt: skip
        self.watcher = ""  # names the latest one; empty if there is none
        self._about = dict(about)
        self._text = text
        self._answer_text = answer_text
        self._send = send
        self._now_us = now_us
        self._texts: dict[int, str] = {}  # texts of single tokens
        self._timestep = 0
        self._requests: dict[int, _WatchedRequest] = {}
        self._frames: list[Frame] = []  # after the one of the present timestep
        self._present: Frame | None = None  # the step that is not complete yet

    def follow(self, watcher: str, scheduler: Scheduler, timestep: int) -> None:
        """``watcher`` begins to watch, or there is none any more. To be called between two timesteps, of which there were
        ``timestep`` so far.

        Frames begin with what runs. The rows in flight are not known then.
        """
        if self.watcher:
            self._complete()
            scheduler.listeners.remove(self.on_record)
        self.watcher = watcher
        if not watcher:
            self._requests.clear()
            return
        scheduler.listeners.append(self.on_record)
        self._timestep = timestep
        running = scheduler.opened()
        for opened in running:
            self._requests.setdefault(opened.request.number, _WatchedRequest()).open(opened, is_seen=False)
        self._send([self._run_frame(), *(self._open_frame(opened) for opened in running)])

    def begin_epoch(self, epoch: int) -> None:
        self._about["epoch"] = epoch
        if self.watcher:
            self._complete()
            self._frames.append(self._run_frame())
            self._complete()

    def on_record(self, record: events.Record) -> None:
        match record:
            case events.Timestep():
                self._begin(record)
            case events.RequestOpened():
                self._requests.setdefault(record.request.number, _WatchedRequest()).open(record)
                self._frames.append(self._open_frame(record))
            case events.Advanced():
                self._advance(record.request, record.verdict)
            case events.Waits():
                self._leave(record.request.number, "paused")
            case events.Interrupted():
                self._leave(record.request.number, "interrupted")
            case events.RequestEnded():
                metrics = record.request.metrics
                self._leave(record.request.number, record.reason, {"hits": metrics.hits, "misses": metrics.misses})
            case events.RequestClosed():
                self._requests.pop(record.request.number, None)
            case events.Drained():
                self._complete()

    def _begin(self, timestep: events.Timestep) -> None:
        """Begin a timestep whose rows have entered; its verdicts follow."""
        entered: list[Frame] = []
        for update in timestep.entered.updates:
            if update.step is not None:
                request = self._requests[update.number]
                chunk = update.step.num_rows if request.is_prefilling else 0
                rows = [] if request.is_prefilling else request.enter(update.step)
                described: list[list[Any]] = []
                for row in rows:
                    chance = None if row.chance is None else round(row.chance, 4)
                    described.append([row.id, row.parent, row.token, self._token_text(row.token), chance])
                    if request.has_threads:
                        described[-1].append(row.thread)
                entered.append({"r": update.number, "chunk": chunk, "rows": described})
        self._complete()
        self._timestep += 1
        seconds = None if timestep.timing is None else round(1000 * timestep.timing.seconds, 3)
        self._present = self._frame("step", ms=seconds) | {"in": entered, "out": []}

    def _advance(self, of: Request, verdict: Verdict) -> None:
        request = self._requests[of.number]
        request.is_prefilling = False
        if not verdict.tokens:
            return
        assert self._present is not None
        rows, pruned, is_hit = request.follow_verdict(verdict)
        text = self._answer_text(of)
        news, request.num_shown = text[request.num_shown :], len(text)
        request.latest = {
            "r": of.number,
            "tokens": [[token, self._token_text(token), row] for token, row in zip(verdict.tokens, rows, strict=True)],
            "text": news, "hit": is_hit, "late": 0, "pruned": pruned, "end": verdict.finished,
        }  # fmt: skip
        self._present["out"].append(request.latest)

    def _leave(self, number: int, reason: str, metrics: Mapping[str, Any] | None = None) -> None:
        one = self._requests.get(number)
        if one is not None and one.has_lane:
            one.has_lane = False
            self._frames.append(self._frame("close", r=number, reason=reason, metrics=metrics))

    def _complete(self) -> None:
        """Complete the present timestep: pass on its frames."""
        frames, self._frames = self._frames, []
        if self._present is not None:
            frames.insert(0, self._present)
            self._present = None
        if frames:
            self._send(frames)

    def _run_frame(self) -> Frame:
        return {"k": "run", "v": VERSION, **self._about, "us": self._now_us()}

    def _open_frame(self, opened: events.RequestOpened) -> Frame:
        request, opening, answer = opened.request.asked, opened.opening, self._answer_text(opened.request)
        self._requests[opened.request.number].num_shown = len(answer)
        prompt = self._text(request.prompt_token_ids[:_PROMPT])[:_PROMPT]
        length, cached = opening.prompt_length, opening.cached
        about = {"r": request.number, "method": request.method, "prompt": prompt, "prompt_tokens": length, "cached": cached}
        return self._frame("open", **about, said=answer)

    def _frame(self, kind: str, **values: Any) -> Frame:
        return {"k": kind, "run": self._about["run"], "t": self._timestep, "us": self._now_us(), **values}

    def _token_text(self, token: int) -> str:
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = "▢" if token < 0 else self._text((token,))
        return known


class _WatchedRequest:
    def __init__(self) -> None:
        self.has_lane = False
        self.is_prefilling = True  # no verdict since it was opened, so all its rows are of its prompt
        self.has_threads = False
        self.latest: Frame | None = None  # the frame of its last verdict, until rows follow
        self.num_shown = 0  # characters of the answer that are in frames
        self._is_default = False  # decoded by the default method
        self._num_rows = 0  # rows that are in frames
        self._trees: dict[int, _Tree] | None = None  # by thread; None while the rows in flight are not known
        self._sequence: ThreadSequence | None = None  # the threads of ``_trees``

    def open(self, opened: events.RequestOpened, is_seen: bool = True) -> None:
        """Note a new lane; ``is_seen`` if none of its rows have entered before."""
        self.has_lane, self.is_prefilling = True, not opened.request.has_advanced
        self.has_threads = opened.request.asked.threads is not None
        self._is_default = opened.request.asked.method == DEFAULT_METHOD
        self._trees = {} if is_seen else None
        self._sequence = opened.request.new_sequence() if is_seen and self.has_threads else None

    def enter(self, step: Step) -> list[_EnteredRow]:
        token_ids, parents = step.token_ids.tolist(), step.parents.tolist()
        threads = [0] * len(token_ids) if step.threads is None else step.threads.tolist()
        log_probs = [None] * len(token_ids) if step.log_probs is None else list(map(float, step.log_probs))
        if self._trees is None and parents[0] < 0 and not self.has_threads:
            self._trees = {}  # nothing else is in flight
        entered = []
        for token, parent, thread, log_prob in zip(token_ids, parents, threads, log_probs, strict=True):
            row = _EnteredRow(self._num_rows, token, thread)
            self._num_rows += 1
            if self._trees is not None:
                self._trees.setdefault(thread, _Tree()).enter(row, parent, log_prob)
            entered.append(row)
        latest, self.latest = self.latest, None
        if latest is not None and not latest["hit"] and self._is_default and entered[0].parent < 0:
            # guesses enter below an accepted token: it was proposed, but had not entered in time
            latest["late"] = int(any(row.chance is not None and row.chance < 1 for row in entered[1:]))
        return entered

    def follow_verdict(self, verdict: Verdict) -> tuple[list[int | None], list[int], bool]:
        """Follow a verdict. Returns for each token the id of the row that carried it, the ids of the rows that are void now, and
        whether the last token was in flight; True while that is unknown.
        """
        count = len(verdict.tokens)
        if self._trees is None:
            return [None] * count, [], True
        changes = ThreadChanges(accepted={part.thread: part.tokens for part in verdict.accepted})
        if self._sequence is not None:
            changes = apply_verdict(self._sequence, verdict)
        carried, pruned = list[int | None](), list[int]()
        for thread, tokens in changes.accepted.items():
            rows, voided = self._trees.setdefault(thread, _Tree()).advance_to(tokens)
            carried += rows
            pruned += voided
        for thread, remaining in changes.remaining.items():
            if remaining is not Remaining.SUBTREE and (tree := self._trees.get(thread)) is not None:
                pruned += tree.keep(1 if remaining is Remaining.ROOT else 0)
        if verdict.finished is not None:
            pruned += [id for tree in self._trees.values() for id in tree.keep(0) if id not in carried[-1:]]
        carried = [*carried, *[None] * count][:count]
        return carried, pruned, carried[-1] is not None


@dataclass(slots=True)
class _EnteredRow:
    id: int
    token: int
    thread: int
    parent: int = -1  # id of the row above; −1 for a root, or where it is not known
    chance: float | None = None  # that it is accepted, given its root; None if that is not known


class _Tree:
    """The rows of one thread that are in flight, in the order in which they have entered. The first one is the root."""

    def __init__(self) -> None:
        self.rows: list[_EnteredRow] = []

    def enter(self, row: _EnteredRow, parent: int, log_prob: float | None) -> None:
        """``parent`` is an index as stages count rows, negative for a root, which begins a new tree."""
        if parent < 0:
            self.rows.clear()
        if 0 <= parent < len(self.rows):
            above = self.rows[parent]
            row.parent = above.id
            row.chance = None if above.chance is None or log_prob is None else above.chance * math.exp(log_prob)
        else:
            row.chance = 1.0
        self.rows.append(row)

    def advance_to(self, tokens: Sequence[int]) -> tuple[list[int | None], list[int]]:
        """Follow accepted tokens: the last one's row becomes the root, which is certain. Returns the ids of the rows that carried
        them, None for those that no row did, and of the rows that are void now.
        """
        place = self.rows[0] if self.rows else None
        carried: list[int | None] = []
        path = set[int]()
        for token in tokens:
            if place is not None:
                path.add(place.id)
                place = next((row for row in self.rows if row.parent == place.id and row.token == token), None)
            carried.append(None if place is None else place.id)
        kept = set() if place is None else {place.id}
        subtree = []
        for row in self.rows:
            if row.id in kept or row.parent in kept:
                kept.add(row.id)
                subtree.append(row)
        pruned = [row.id for row in self.rows if row.id not in kept and row.id not in path]
        self.rows = subtree
        if place is not None:
            place.parent, certain = -1, place.chance
            for row in subtree:
                row.chance = None if row.chance is None or not certain else min(row.chance / certain, 1.0)
        return carried, pruned

    def keep(self, count: int) -> list[int]:
        """Keep the first ``count`` rows. Returns the ids of the others."""
        dropped, self.rows = self.rows[count:], self.rows[:count]
        return [row.id for row in dropped]
