"""A running request whose answer is decoded in several threads. The client receives its text in document order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace

from pipedec.core import Request, Verdict
from pipedec.decoding import Method
from pipedec.engine.answer import Answer
from pipedec.messages import completion_to_event
from pipedec.scheduler.protocol import Event
from pipedec.text.prompt import Prompter
from pipedec.text.stream import TextStream
from pipedec.threads import DecodeThread, DocumentToken, Sequence, measure

NOT_SAMPLED = -1


class ThreadedAnswer(Answer):
    """Replays the verdicts ahead of the method, because a stop string in the document's certain text ends the answer.

    Args:
        sequence: a new one, which only this object advances.
        show_threads: also send the client the text of each thread as it is generated.
    """

    def __init__(
        self, request: Request, method: Method, prompter: Prompter, num_stages: int, sequence: Sequence, show_threads: bool
    ) -> None:
        super().__init__(request, method, prompter, num_stages)
        self._prompter = prompter
        self._sequence = sequence
        self._reader = sequence.reader()
        self._sampled: dict[tuple[int, int], int] = {}  # (thread, ordinal in the thread) → ordinal among all accepted tokens
        self._certain: list[DocumentToken] = []  # tokens that became certain with the verdict last passed to ``until_stop``
        self._piece = ""  # their text
        self._streams: dict[int, TextStream] | None = defaultdict(prompter.stream) if show_threads else None
        self._shown: dict[int, int] = defaultdict(int)  # number of tokens of each thread that the client has received

    def until_stop(self, verdict: Verdict) -> Verdict:
        sequence = self._sequence
        for number, tokens, _ in verdict.parts():
            for token in tokens:
                if not sequence.threads[number].is_cut:
                    self._sampled[number, sequence.threads[number].num_tokens] = len(self._sampled)
                    sequence.accept(number, token)
        self._certain = self._reader.take()
        pieces = [self._text_of(token) for token in self._certain]
        if self._stops is None:
            self._piece = "".join(pieces)
            return verdict
        self._piece, count = self._stops.add_pieces(pieces)
        if count is None:
            return verdict
        del self._certain[count:]
        sequence.end_all("stop")
        return replace(verdict, finished="stop")

    def add(self, verdict: Verdict, timestep: int) -> Event:
        self._count(verdict, timestep)
        if verdict.finished is not None:
            self._end(verdict.finished)
        token_ids = [token.token_id for token in self._certain]
        self.completion.token_ids += token_ids
        self.completion.text += self._piece
        event: Event = {"token_ids": token_ids, "text": self._piece}
        if self._streams is not None:
            event["threads"] = self._news(self._streams)
        self._certain, self._piece = [], ""
        return event

    def _end(self, reason: str) -> None:
        """Release the text that was held back, unless a stop string has ended the answer."""
        is_stopped = self._stops is not None and self._sequence.finished == "stop" and reason == "stop"
        if self._sequence.finished is None:
            self._sequence.end_all(reason)
        if is_stopped:
            return
        rest = self._reader.take()
        self._certain += rest
        pieces = [self._text_of(token) for token in rest]
        if self._stops is not None:
            text, count = self._stops.add_pieces(pieces)
            self._piece += text + (self._stops.finish() if count is None else "")
            return
        self._piece += "".join(pieces) + self._text.finish()

    def completed(self) -> Event:
        sequence = self._sequence
        sequence.max_tokens = len(self.completion.token_ids)  # nothing behind the end of the answer is reported or counted
        written = sequence.document()
        of_threads: dict[int, list[DocumentToken]] = {0: []}
        for token in written:
            of_threads.setdefault(token.thread, []).append(token)
        self.completion.threads = {
            "threads": [
                self._thread(thread, of_threads[thread.number]) for thread in self._by_path() if thread.number in of_threads
            ],
            "metrics": asdict(measure(sequence)),
            "anomalies": sequence.anomalies,
        }
        sampled = [self._sampled.get((token.thread, token.ordinal), NOT_SAMPLED) for token in written]
        return {**completion_to_event(self.completion), "sampled": sampled}

    def _by_path(self) -> list[DecodeThread]:
        """All threads by path: their numbers depend on the order in which they opened."""
        return sorted(self._sequence.threads, key=lambda thread: thread.path)

    def _text_of(self, token: DocumentToken) -> str:
        return self._text.add([token.token_id]) if self._sequence.is_shown(token) else token.tail

    def _thread(self, thread: DecodeThread, written: list[DocumentToken]) -> dict[str, object]:
        """A thread as the completion reports it, without tokens decoded behind its end (these depend on the order of
        decoding).
        """
        text = self._prompter.text([token.token_id for token in written if not token.is_control])
        return {"path": list(thread.path), "tokens": len(written), "text": text, "ended_by": thread.ended_by}

    def _news(self, streams: dict[int, TextStream]) -> list[dict[str, object]]:
        """The new text of each thread since the last event."""
        news = []
        for thread in self._sequence.threads:
            first, self._shown[thread.number] = self._shown[thread.number], thread.num_tokens
            if first == thread.num_tokens and first > 0:
                continue
            said = zip(thread.token_ids[first:], thread.is_control[first:], strict=True)
            text = streams[thread.number].add([token for token, is_control in said if not is_control])
            news.append({"path": list(thread.path), "text": text, "state": thread.state.value, "tokens": thread.num_tokens})
        return news
