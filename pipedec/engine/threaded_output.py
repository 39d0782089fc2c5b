"""The output of an answer in several threads: its text in document order, and news of each thread.

Tokens of different threads are accepted in any order; they become text once nothing can precede them. After a pause such an
answer is decoded again from its first token, with the same tokens but in another order; nothing is published twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from msgspec.structs import replace

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import TokenLogprobs
from pipedec.core.verdict import Verdict
from pipedec.engine.output import Answer
from pipedec.messages.events import CompletionEvent, Event, LogprobsEvent, ThreadNews, TokensEvent
from pipedec.text.answer_text import AnswerText
from pipedec.text.prompt import Prompter
from pipedec.text.stream import TextStream
from pipedec.threads import DocumentToken, NewSequence, Sequence, measure

NOT_SAMPLED = -1

_Path = tuple[int, ...]  # of a thread
Place = tuple[_Path, int]  # of an accepted token, however it was decoded: path of its thread, ordinal there


class Transcript:
    """The part of an answer that cannot change any more, as text in document order. Replays verdicts into its ``sequence``."""

    def __init__(self, sequence: Sequence, text: AnswerText) -> None:
        self.sequence = sequence
        self.token_ids: list[int] = []  # in document order
        self.text = ""  # without characters that may yet be part of a stop string
        self.finished: str | None = None  # why the answer has ended; None while it goes on
        self._reader = sequence.reader()
        self._text = text
        self._read(sequence.finished)

    def read(self, verdict: Verdict) -> tuple[Verdict, list[Place | None]]:
        """Add accepted tokens. Returns the verdict, which a stop string may end, and each token's place; None in a cut thread."""
        places: list[Place | None] = []
        for number, tokens, *_ in verdict.accepted:
            thread = self.sequence.threads[number]
            for token in tokens:
                places.append(None if thread.is_cut else (thread.path, thread.num_tokens))
                if not thread.is_cut:
                    self.sequence.accept_token(number, token)
        count = self._read(verdict.finished)
        return verdict if count is None else replace(verdict, finished="stop"), places

    def _read(self, finished: str | None) -> int | None:
        """Read the tokens that have become final. Returns how many were read if a stop string ends the answer with them."""
        tokens = self._reader.pop_ready()
        text, count = self._text_of(tokens)
        if count is not None:
            del tokens[count:]
            finished = "stop"
            self.sequence.end_all("stop")
        elif finished is not None:
            self.sequence.end_all(finished)
            held_back = self._reader.pop_ready()
            rest, num_rest = self._text_of(held_back)
            tokens += held_back[:num_rest]
            text += rest if num_rest is not None else rest + self._text.finish()
        self.token_ids += [token.token_id for token in tokens]
        self.text += text
        self.finished = finished
        return count

    def _text_of(self, tokens: list[DocumentToken]) -> tuple[str, int | None]:
        """The final text of tokens, and the number of them up to a stop string, if there is one."""
        return self._text.add_pieces([(token.token_id, self._piece(token)) for token in tokens])

    def _piece(self, token: DocumentToken) -> str:
        if self.sequence.is_last(token):
            return self._text.piece(token.token_id, is_end=True)
        return self._text.piece(token.token_id) if self.sequence.is_shown(token) else token.tail

    @property
    def stop_reason(self) -> str | int | None:
        """See ``Completion``."""
        return self._text.stop_reason if self.finished == "stop" else None


@dataclass
class _ThreadText:
    """The text of one thread, of which ``num_tokens`` tokens have been read."""

    stream: TextStream
    text: str = ""
    num_tokens: int = 0


class News:
    """New tokens and text of each decode thread, for clients that watch the threads grow; each piece once, even if the answer is
    generated again.
    """

    def __init__(self, prompter: Prompter, sampling: SamplingParams) -> None:
        self._new_stream = partial(prompter.stream, sampling)
        self._texts: dict[_Path, _ThreadText] = {}
        self._published: dict[_Path, tuple[int, int]] = {}  # by thread: tokens and characters reported so far

    def restart(self) -> None:
        """Read the answer, which is generated again, from its first token."""
        self._texts.clear()

    def read(self, sequence: Sequence) -> list[ThreadNews]:
        """New pieces since the last call."""
        news: list[ThreadNews] = []
        for thread in sequence.threads:
            read = self._texts.setdefault(thread.path, _ThreadText(self._new_stream()))
            added = zip(thread.token_ids[read.num_tokens :], thread.is_control[read.num_tokens :], strict=True)
            read.text += "".join(read.stream.add([token]) for token, is_control in added if not is_control)
            read.num_tokens = thread.num_tokens
            tokens, characters = self._published.get(thread.path, (0, 0))
            if tokens == 0 or thread.num_tokens > tokens:
                self._published[thread.path] = thread.num_tokens, max(characters, len(read.text))
                news.append(ThreadNews(thread.path, read.text[characters:], thread.state.value, thread.num_tokens, characters))
        return news


@dataclass(frozen=True)
class EarlierOutput:
    """The part of an answer that was generated earlier."""

    new_sequence: NewSequence
    num_tokens: int  # of this part; after an opener, the sequence has one token more, which is forced


class ThreadedAnswer(Answer):
    """The answer of a request in several threads. Raises UserError if no answer contains its earlier tokens.

    Args:
        brought: the earlier output that the request contains; None if there is none.
        known: all output that the client has, perhaps from another process; None if there is none.
        show_threads: also publish the text of each thread as it is generated.
    """

    def __init__(
        self, asked: TokenizedRequest, prompter: Prompter, num_stages: int, new_sequence: NewSequence,
        brought: EarlierOutput | None = None, known: EarlierOutput | None = None, show_threads: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(asked, prompter, num_stages)
        self._new_sequence = new_sequence
        self._prompter = prompter
        self._news = News(prompter, asked.sampling) if show_threads else None
        self._sampled: dict[Place, int] = {}  # ordinals among all accepted tokens
        self._is_new: list[bool] = []  # of each token of the last verdict, whether it had not been accepted before
        self._has_opened = False
        self._again: Transcript | None = None  # of an answer that is repeated, until it reaches what was published
        known = known or brought
        before = self._new_transcript(brought)
        if brought is not None:
            self._brought = min(brought.num_tokens, len(before.token_ids)), len(before.text)
        self._transcript = self._reading = self._new_transcript(known)
        self._complete()
        self._published = (0 if known is None else min(known.num_tokens, len(self._transcript.token_ids))), self._brought[1]
        if known is not None and not self.is_complete:
            self._start_over()

    def _new_transcript(self, earlier: EarlierOutput | None = None) -> Transcript:
        new_sequence = self._new_sequence if earlier is None else earlier.new_sequence
        return Transcript(new_sequence(), self._prompter.answer_text(self.asked.sampling))

    def _complete(self) -> None:
        written = self._transcript
        self.completion.token_ids, self.completion.text = written.token_ids, written.text
        self.completion.finish_reason, self.completion.stop_reason = written.finished, written.stop_reason

    def lane_opened(self) -> None:
        if self._has_opened:
            self._start_over()
        self._has_opened = True

    def _start_over(self) -> None:
        """Repeat the answer: its tokens will be the same, but come in another order."""
        self._again = self._new_transcript()
        if self._news is not None:
            self._news.restart()

    def cut(self, verdict: Verdict) -> Verdict:
        transcript = self._reading = self._again or self._transcript
        verdict, places = transcript.read(verdict)
        if (again := self._again) is not None:
            if again.finished == "cancelled" and len(again.token_ids) < self._published[0]:
                self._transcript.read(Verdict((), "cancelled"))  # published tokens count
                self._again = None
            elif again.finished is not None or len(again.token_ids) >= self._published[0]:
                self._transcript, self._again = again, None
        self._is_new = [place is not None and place not in self._sampled for place in places]
        for place in places:
            if place is not None:
                self._sampled.setdefault(place, len(self._sampled))
        self._complete()
        return verdict

    def news(self, logprobs: TokenLogprobs = ()) -> list[Event]:
        rows = [list(row) for row, is_new in zip(logprobs, self._is_new, strict=False) if is_new]
        scored: list[Event] = [LogprobsEvent(rows, len(self._sampled) - sum(self._is_new))] if rows else []
        *_, tokens = super().news()
        assert isinstance(tokens, TokensEvent)
        return [*scored, replace(tokens, threads=None if self._news is None else self._news.read(self._reading.sequence))]

    def completed(self) -> CompletionEvent:
        return CompletionEvent(self.completion, self._describe_threads())

    def _describe_threads(self) -> list[int]:
        """Add the threads to the completion. Returns the ordinal of each of its tokens among the sampled ones, or NOT_SAMPLED."""
        sequence = self._transcript.sequence
        sequence.max_tokens = len(self.completion.token_ids)  # nothing past the end of the answer is reported or counted
        written = sequence.document()
        of_threads: dict[int, list[DocumentToken]] = {0: []}
        for token in written:
            of_threads.setdefault(token.thread, []).append(token)
        threads: list[dict[str, object]] = []
        for thread in sorted(sequence.threads, key=lambda thread: thread.path):  # numbers depend on the order of opening
            if (tokens := of_threads.get(thread.number)) is not None:
                shown = [token.token_id for token in tokens if not token.is_control]
                text = self._prompter.text(shown, self.asked.sampling)
                threads.append({"path": list(thread.path), "tokens": len(tokens), "text": text, "ended_by": thread.ended_by})
        self.completion.threads = {"threads": threads, "metrics": asdict(measure(sequence)), "anomalies": sequence.anomalies}
        places = [(sequence.threads[token.thread].path, token.ordinal) for token in written]
        return [self._sampled.get(place, NOT_SAMPLED) for place in places]
