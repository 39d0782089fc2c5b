"""The state of running pipelines that is drawn, built from frames of the live feed.

Knows the frames (docs/live.md), but neither their source nor how they are drawn. Its memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pipedec.core.errors import UserError

VERSION = 1  # of the frames
_TIMESTEPS = 400  # that are kept, besides as many as a row needs through all stages
_TEXT = 50_000  # characters of each answer
_ENDED = 8  # requests that are kept after their end
_NO_PARENT = -1

Frame = dict[str, Any]


@dataclass
class RowView:
    id: int
    parent: int  # id of the row before it; -1 for a root
    text: str
    chance: float | None  # that it is accepted, at the time of its entry; None if that is unknown
    voided: int | None = None  # the timestep whose verdict has pruned it; None while it may be accepted


class Share(NamedTuple):
    """Rows of one request in one stage group at one timestep."""

    prompt: int
    live: int
    voided: int


@dataclass
class Column:
    """The rows that entered the first stage at a timestep, and the verdicts of that timestep, by request."""

    prompt: dict[int, int] = field(default_factory=dict)  # numbers of prompt rows
    rows: dict[int, list[RowView]] = field(default_factory=dict)
    hits: dict[int, bool] = field(default_factory=dict)  # whether the token of the verdict was in the tree


class AnswerSpan(NamedTuple):
    """A piece of an answer; ``was_in_flight`` if its tokens were in the pipeline before they were accepted."""

    text: str
    was_in_flight: bool


@dataclass
class RequestView:
    number: int
    method: str = ""
    prompt: str = ""
    spans: list[AnswerSpan] = field(default_factory=list)  # the last part of the answer
    tokens: int = 0  # of the answer, since viewing began
    hits: int = 0  # those that were in flight before they were accepted
    judged: int = 0  # those for which that is known
    root: int | None = None  # id of the row of the last accepted token; None while unknown
    rows: dict[int, RowView] = field(default_factory=dict)  # of the stored timesteps, by id
    reason: str | None = None  # why it has ended; None while it runs
    metrics: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)

    def likely(self) -> list[RowView]:
        """The rows in flight after the last accepted token that are most likely to be accepted: a path of the tree."""
        children: dict[int, RowView] = {}
        for row in self.rows.values():
            rival = children.get(row.parent)
            if row.voided is None and (rival is None or (row.chance or 0.0) > (rival.chance or 0.0)):
                children[row.parent] = row
        path: list[RowView] = []
        last = self.root
        while last is not None and last in children:
            path.append(children[last])
            last = path[-1].id
        return path

    def add(self, text: str, was_in_flight: bool) -> None:
        if not text:
            return
        if self.spans and self.spans[-1].was_in_flight == was_in_flight:
            text = self.spans.pop().text + text
        self.spans.append(AnswerSpan(text, was_in_flight))
        surplus = sum(len(span.text) for span in self.spans) - _TEXT
        while surplus > 0:
            first = self.spans.pop(0)
            if len(first.text) > surplus:
                self.spans.insert(0, AnswerSpan(first.text[surplus:], first.was_in_flight))
            surplus -= len(first.text)

    def void(self, timestep: int, ids: Iterable[int] | None = None) -> None:
        """Mark rows as pruned by a verdict; None for all."""
        for row in list(self.rows.values()) if ids is None else [self.rows[id] for id in ids if id in self.rows]:
            row.voided = timestep if row.voided is None else row.voided


@dataclass(frozen=True)
class LiveStats:
    """The figures of a run over about the last second."""

    running: int = 0
    waiting: int = 0
    kv: float = 0.0  # share of the KV memory in use, 0 to 1
    tokens_per_s: float = 0.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    acceptance: tuple[float, ...] = ()  # rate at which tokens are accepted, by their position below the root, from 1
    hit_rate: float | None = None
    recovering: bool = False
    recoveries: tuple[Mapping[str, Any], ...] = ()


class RunView:
    """One source of frames."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.about: Frame = {}  # its ``run`` frame
        self.stats: LiveStats | None = None
        self.columns: dict[int, Column] = {}  # of the latest known timesteps, by timestep, ascending
        self.requests: dict[int, RequestView] = {}  # running ones and the latest ended ones, by number, ascending
        self.dropped = 0  # frames that did not arrive

    @property
    def groups(self) -> int:
        """Stage groups; 0 until they are known."""
        return int(self.about.get("groups", 0))

    @property
    def timestep(self) -> int:
        """The latest known one; 0 if none is."""
        return next(reversed(self.columns), 0)

    def running(self) -> list[RequestView]:
        return [request for request in self.requests.values() if request.reason is None]

    def cell(self, timestep: int, group: int) -> dict[int, Share]:
        """The rows that a stage group, counted from 0, computes at a timestep, by request.

        Rows are void from the timestep after that of the verdict that prunes them.
        """
        column = self.columns.get(timestep - group)
        if column is None:
            return {}
        shares = {}
        for number in sorted({*column.prompt, *column.rows}):
            rows = column.rows.get(number, [])
            voided = sum(row.voided is not None and row.voided < timestep for row in rows)
            shares[number] = Share(column.prompt.get(number, 0), len(rows) - voided, voided)
        return shares

    def take(self, frame: Frame) -> None:
        """Take the next frame; those of an unknown kind are ignored."""
        taken = getattr(self, f"_take_{frame.get('k')}", None)
        if taken is not None:
            taken(frame)

    def _take_run(self, frame: Frame) -> None:
        if frame.get("v") != VERSION:
            version = f"frames of version {frame.get('v')}"
            raise UserError(f"run {self.name}: {version}, but this pipedec reads {VERSION}: install another")
        self.about = frame
        self._forget_rows()

    def _take_open(self, frame: Frame) -> None:
        number, answer = frame["r"], frame.get("said", "")
        known = self.requests.get(number)
        about = {name: frame[name] for name in ("method", "prompt") if name in frame}
        request = self.requests[number] = RequestView(number, **about)
        if known is not None and known.text == answer[-_TEXT:]:
            request.spans, request.tokens, request.hits, request.judged = known.spans, known.tokens, known.hits, known.judged
        else:
            request.add(answer, False)
        self.requests = dict(sorted(self.requests.items()))

    def _take_step(self, frame: Frame) -> None:
        timestep = frame["t"]
        column = self.columns[timestep] = Column()
        for entered in frame.get("in", ()):
            request = self._request(entered["r"])
            if entered.get("chunk"):
                column.prompt[request.number] = entered["chunk"]
            rows = [RowView(id, parent, text, chance) for id, parent, _, text, chance, *_ in entered.get("rows", ())]
            if rows:
                column.rows[request.number] = rows
            request.rows.update({row.id: row for row in rows})
            roots = [row.id for row in rows if row.parent == _NO_PARENT]
            if len(roots) == 1:  # of several, the rows above them are not known
                request.root = roots[0]
        for verdict in frame.get("out", ()):
            self._judge(column, timestep, verdict)
        while (oldest := next(iter(self.columns))) <= timestep - _TIMESTEPS - self.groups:
            for number, old in self.columns.pop(oldest).rows.items():
                if number in self.requests:
                    for row in old:
                        self.requests[number].rows.pop(row.id, None)

    def _judge(self, column: Column, timestep: int, verdict: Frame) -> None:
        request, tokens = self._request(verdict["r"]), verdict.get("tokens", ())
        request.void(timestep, None if verdict.get("end") is not None else verdict.get("pruned", ()))
        text, has_begun = verdict.get("text", ""), bool(request.spans)
        hits = sum(row is not None for _, _, row in tokens)
        if "".join(piece for _, piece, _ in tokens) == text:  # each token is marked separately
            for _, piece, row in tokens:
                request.add(piece, row is not None)
        else:
            request.add(text, hits > 0)
        if not tokens:
            return
        is_known = hits > 0 or not verdict.get("hit")  # a new watcher does not know the rows in flight
        if is_known and has_begun:  # the first token of an answer is neither hit nor miss
            column.hits[request.number] = bool(verdict.get("hit"))
            request.judged += len(tokens)
        request.hits += hits
        request.root = tokens[-1][2]
        request.tokens += len(tokens)

    def _take_stats(self, frame: Frame) -> None:
        """Fields that the frame lacks keep their defaults."""
        given: dict[str, Any] = {known.name: frame[known.name] for known in fields(LiveStats) if known.name in frame}
        for name in ("acceptance", "recoveries"):
            given[name] = tuple(given.get(name, ()))
        self.stats = LiveStats(**given)

    def _take_close(self, frame: Frame) -> None:
        request = self._request(frame["r"])
        request.reason, request.metrics = frame.get("reason", ""), frame.get("metrics")
        request.void(self.timestep)
        for ended in [number for number, other in self.requests.items() if other.reason is not None][:-_ENDED]:
            del self.requests[ended]

    def _take_gap(self, frame: Frame) -> None:
        self.dropped += frame.get("dropped", 0)
        self._forget_rows()
        self.requests = {number: request for number, request in self.requests.items() if request.reason is not None}

    def _request(self, number: int) -> RequestView:
        """A running request; its ``open`` frame may not have been seen."""
        if number not in self.requests:
            self._take_open({"r": number})
        return self.requests[number]

    def _forget_rows(self) -> None:
        """The rows in flight are unknown from now on."""
        self.columns.clear()
        for request in self.requests.values():
            request.rows.clear()
            request.root = None


@dataclass
class ShownRun:
    run: RunView
    state: str = ""  # ``up``, ``recovering``, ``stopping``, ``ended``, ``recording``, or empty while that is unknown
    note: str = ""  # more about the state: why the run has ended
    ranks: tuple[int, int] | None = None  # how many are alive, and how many there are; None if that is unknown
    chosen: int | None = None  # number of the request that is shown in full; None for the first that runs

    def request(self) -> RequestView | None:
        """The request that is shown in full: the chosen one, else the first that runs, else the last that has run."""
        requests = self.run.requests
        if self.chosen in requests:
            return requests[self.chosen]
        return next(iter(self.run.running()), next(reversed(requests.values()), None))
