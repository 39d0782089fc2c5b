"""A running request on rank 0: the text generated so far, its stop strings and its metrics.

An answer in one thread is a document of one thread. Knows no decoding method: it replays the verdicts into a sequence of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace

from pipedec.core import Completion, Request, Verdict
from pipedec.decoding import Method
from pipedec.engine.counters import Counters
from pipedec.messages import CompletionEvent, ThreadNews, TokensEvent
from pipedec.text.prompt import Prompter
from pipedec.text.stream import StopStrings, TextStream
from pipedec.threads import DecodeThread, DocumentToken, Sequence, measure

NOT_SAMPLED = -1


class Answer:
    """A running request.

    Args:
        sequence: a new one, which only this object advances.
        show_threads: also send the client the text of each thread as it is generated.
    """

    def __init__(
        self, request: Request, sequence: Sequence, prompter: Prompter, num_stages: int, show_threads: bool = False
    ) -> None:
        self.request = request
        self.completion = Completion(request.method, num_stages, len(request.prompt_token_ids), seed=request.sampling.seed)
        self._sequence = sequence
        self._reader = sequence.reader()
        self._prompter = prompter
        self._text = prompter.stream()
        self._stops = StopStrings(self._text, request.sampling.stop) if request.sampling.stop else None
        self._sampled: dict[tuple[int, int], int] = {}  # (thread, ordinal in the thread) → ordinal among all accepted tokens
        self._streams: dict[int, TextStream] | None = defaultdict(prompter.stream) if show_threads else None
        self._shown: dict[int, int] = defaultdict(int)  # number of tokens of each thread that the client has received
        self.counters = Counters(self.completion.metrics)

    def take(self, verdict: Verdict) -> tuple[Verdict, TokensEvent]:
        """Add the accepted tokens.

        Returns:
            the verdict, cut and finished if a stop string ends the answer; and the event for the client.
        """
        self._accept(verdict)
        tokens = self._reader.take()
        text, count = self._read(tokens)
        if count is not None:
            del tokens[count:]
            verdict = self._stopped(verdict, count)
        elif verdict.finished is not None:
            text += self._release(tokens, verdict.finished)
        token_ids = [token.token_id for token in tokens]
        self.completion.token_ids += token_ids
        self.completion.text += text
        self.completion.finish_reason = verdict.finished
        return verdict, TokensEvent(token_ids, text, None if self._streams is None else self._news(self._streams))

    def completed(self, method: Method) -> CompletionEvent:
        """The last event for the client: the completion, with the counters of ``method``."""
        self.counters.ended(method)
        return CompletionEvent(self.completion, self._describe_threads() if self._sequence.can_fork else None)

    def _accept(self, verdict: Verdict) -> None:
        sequence = self._sequence
        for number, tokens, _ in verdict.accepted:
            for token in tokens:
                if not sequence.threads[number].is_cut:
                    self._sampled[number, sequence.threads[number].num_tokens] = len(self._sampled)
                    sequence.accept(number, token)

    def _read(self, tokens: list[DocumentToken]) -> tuple[str, int | None]:
        """The text of tokens that has become final, and the number of them up to a stop string, if there is one."""
        pieces = [self._text_of(token) for token in tokens]
        return ("".join(pieces), None) if self._stops is None else self._stops.add_pieces(pieces)

    def _stopped(self, verdict: Verdict, count: int) -> Verdict:
        """The verdict of which ``count`` tokens end the answer. With several threads all accepted tokens are replayed."""
        self._sequence.end_all("stop")
        if self._sequence.can_fork:
            return replace(verdict, finished="stop")
        return Verdict.of(*verdict.tokens[:count], finished="stop")

    def _release(self, tokens: list[DocumentToken], reason: str) -> str:
        """The answer has ended: add the tokens that were held back to ``tokens``, and return the rest of the text."""
        self._sequence.end_all(reason)
        rest = self._reader.take()
        text, count = self._read(rest)
        tokens += rest[:count]
        return text if count is not None else text + (self._stops or self._text).finish()

    def _describe_threads(self) -> list[int]:
        """Add the threads to the completion. Returns, for each of its tokens, its ordinal among all sampled ones."""
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
        return [self._sampled.get((token.thread, token.ordinal), NOT_SAMPLED) for token in written]

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

    def _news(self, streams: dict[int, TextStream]) -> list[ThreadNews]:
        """The new text of each thread since the last event."""
        news = []
        for thread in self._sequence.threads:
            first, self._shown[thread.number] = self._shown[thread.number], thread.num_tokens
            if first == thread.num_tokens and first > 0:
                continue
            added = zip(thread.token_ids[first:], thread.is_control[first:], strict=True)
            text = streams[thread.number].add([token for token, is_control in added if not is_control])
            news.append(ThreadNews(thread.path, text, thread.state.value, thread.num_tokens))
        return news
