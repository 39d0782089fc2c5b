"""A running request on rank 0: the answer so far, and what of it its client has been told.

Knows no decoding method. Nothing is told twice: neither what a resumed request brings with it, nor what an answer in threads says
again after a pause. Whoever takes over the answer of another process tells its text once more; its client drops what it knows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pipedec.core import Completion, Request, TokenLogprobs, Verdict
from pipedec.engine.news import News
from pipedec.engine.transcript import Place, Transcript
from pipedec.messages import CompletionEvent, Event, LogprobsEvent, TokensEvent
from pipedec.text.prompt import Prompter
from pipedec.threads import DecodeThread, DocumentToken, NewSequence, measure

NOT_SAMPLED = -1


@dataclass(frozen=True)
class Said:
    """A part of an answer that has been said already.

    Attributes:
        new_sequence: makes a sequence that is as far. Behind an opener it has one token more: the forced one of the new thread.
        num_tokens: how many tokens were said.
    """

    new_sequence: NewSequence
    num_tokens: int


class Answer:
    """A running request.

    Args:
        new_sequence: makes a sequence as the request's method gets one.
        brought: what the request has brought with it; None if it has brought nothing.
        known: what the client has heard, also from another process; None if it has heard nothing.
        show_threads: also send the client the text of each thread as it is generated.

    Raises:
        UserError: no answer says what the client knows.
    """

    def __init__(
        self,
        request: Request,
        new_sequence: NewSequence,
        prompter: Prompter,
        num_stages: int,
        show_threads: bool = False,
        brought: Said | None = None,
        known: Said | None = None,
    ) -> None:
        self.request = request
        self.completion = Completion(request.method, num_stages, len(request.prompt_token_ids), seed=request.sampling.seed)
        self.completion.metrics.resumed_tokens = len(request.said)
        self.completion.prompt_logprobs = None if request.sampling.prompt_logprobs is None else [None]  # its client adds the rest
        self._new_sequence = new_sequence
        self._prompter = prompter
        self._news = News(prompter) if show_threads else None
        self._sampled: dict[Place, int] = {}  # ordinals among all accepted tokens
        self._num_sampled = len(request.said)
        self._has_opened = False
        self._again: Transcript | None = None  # of an answer in threads that is said again, until it has said what was told
        self._begin(brought, known or brought)

    def _begin(self, brought: Said | None, known: Said | None) -> None:
        before = self._transcript_of(brought)
        self._brought = (min(brought.num_tokens, len(before.token_ids)), len(before.text)) if brought is not None else (0, 0)
        self._transcript = self._transcript_of(known)
        self._told = self._brought  # tokens and characters
        self._tell(self._transcript)
        self._told = (0 if known is None else min(known.num_tokens, self._told[0])), self._brought[1]
        if known is not None and not self.is_complete:
            self._say_again()

    def _transcript_of(self, said: Said | None) -> Transcript:
        return self._new_transcript(self._new_sequence if said is None else said.new_sequence)

    @property
    def is_complete(self) -> bool:
        return self._transcript.finished is not None

    def opened(self) -> None:
        """The request begins, or goes on after a pause."""
        if self._has_opened:
            self._say_again()
        self._has_opened = True

    def take(self, verdict: Verdict, logprobs: TokenLogprobs = ()) -> tuple[Verdict, list[Event]]:
        """Add the accepted tokens.

        Args:
            logprobs: theirs.

        Returns:
            the verdict, cut and finished if a stop string ends the answer; and the events for the client.
        """
        said = self._again or self._transcript
        verdict, places = said.take(verdict)
        if self._again is not None:
            self._catch_up(self._again)
        first, new = self._num_sampled, self._note_sampled(places)
        rows = [list(row) for row, is_new in zip(logprobs, new, strict=False) if is_new]
        tokens = self._tell(said)
        return verdict, [LogprobsEvent(rows, first), tokens] if rows else [tokens]

    def completed(self) -> CompletionEvent:
        """The last event for the client."""
        return CompletionEvent(self.completion, self._describe_threads() if self._transcript.sequence.can_fork else None)

    def _note_sampled(self, places: list[Place | None]) -> list[bool]:
        """Number the places of new tokens in order. Returns which ones are new."""
        new = [place is not None and place not in self._sampled for place in places]
        for place in places:
            if place is not None and place not in self._sampled:
                self._sampled[place] = self._num_sampled
                self._num_sampled += 1
        return new

    def _new_transcript(self, new_sequence: NewSequence) -> Transcript:
        return Transcript(new_sequence(), self._prompter, self.request.sampling.stop)

    def _say_again(self) -> None:
        """An answer in threads begins anew: its tokens are the same, but they come in another order."""
        if self._transcript.sequence.can_fork:
            self._again = self._new_transcript(self._new_sequence)
        if self._news is not None:
            self._news.restart()

    def _catch_up(self, again: Transcript) -> None:
        if again.finished == "cancelled" and len(again.token_ids) < self._told[0]:
            self._transcript.take(Verdict((), "cancelled"))  # what was told counts
            self._again = None
        elif again.finished is not None or len(again.token_ids) >= self._told[0]:
            self._transcript, self._again = again, None

    def _tell(self, said: Transcript) -> TokensEvent:
        """What the client has not been told yet."""
        (tokens, characters), told, completion = self._told, self._transcript, self.completion
        index, offset = tokens - self._brought[0], characters - self._brought[1]
        self._told = len(told.token_ids), len(told.text)
        completion.token_ids, completion.text, completion.finish_reason = told.token_ids, told.text, told.finished
        news = None if self._news is None else self._news.take(said.sequence)
        return TokensEvent(told.token_ids[tokens:], told.text[characters:], news, index, offset)

    def _describe_threads(self) -> list[int]:
        """Add the threads to the completion. Returns, for each of its tokens, its ordinal among all sampled ones."""
        sequence = self._transcript.sequence
        sequence.max_tokens = len(self.completion.token_ids)  # nothing behind the end of the answer is reported or counted
        written = sequence.document()
        of_threads: dict[int, list[DocumentToken]] = {0: []}
        for token in written:
            of_threads.setdefault(token.thread, []).append(token)
        by_path = sorted(sequence.threads, key=lambda thread: thread.path)  # numbers depend on the order of opening
        self.completion.threads = {
            "threads": [self._thread(thread, of_threads[thread.number]) for thread in by_path if thread.number in of_threads],
            "metrics": asdict(measure(sequence)),
            "anomalies": sequence.anomalies,
        }
        places = [(sequence.threads[token.thread].path, token.ordinal) for token in written]
        return [self._sampled.get(place, NOT_SAMPLED) for place in places]

    def _thread(self, thread: DecodeThread, written: list[DocumentToken]) -> dict[str, object]:
        """A thread as the completion reports it, without tokens decoded behind its end (these depend on the order of
        decoding).
        """
        text = self._prompter.text([token.token_id for token in written if not token.is_control])
        return {"path": list(thread.path), "tokens": len(written), "text": text, "ended_by": thread.ended_by}
