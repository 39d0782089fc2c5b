"""A running request on rank 0: the answer so far, and how much of it has been published to the client.

Knows no decoding method. Nothing is published twice: neither the tokens that a resumed request brings along, nor those that an
answer in threads repeats after a pause. A rank 0 that takes over an answer from another process publishes its text once more; the
client drops what it already has.
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
class EarlierOutput:
    """The part of an answer that was generated earlier.

    Attributes:
        new_sequence: makes a sequence that includes it. After an opener it has one token more: the forced one of the new thread.
        num_tokens: the number of tokens generated earlier.
    """

    new_sequence: NewSequence
    num_tokens: int


class RunningAnswer:
    """A running request.

    Args:
        new_sequence: makes a new sequence for the request's method.
        brought: the earlier tokens that the request contains; None if there are none.
        known: the tokens that the client has, perhaps from another process; None if there are none.
        show_threads: also publish the text of each thread as it is generated.

    Raises:
        UserError: no answer contains the client's tokens.
    """

    def __init__(
        self,
        request: Request,
        new_sequence: NewSequence,
        prompter: Prompter,
        num_stages: int,
        show_threads: bool = False,
        brought: EarlierOutput | None = None,
        known: EarlierOutput | None = None,
    ) -> None:
        self.request = request
        self.completion = Completion(request.method, num_stages, len(request.prompt_token_ids), seed=request.sampling.seed)
        self.completion.metrics.resumed_tokens = len(request.output_token_ids)
        self.completion.prompt_logprobs = None if request.sampling.prompt_logprobs is None else [None]  # the client adds the rest
        self._new_sequence = new_sequence
        self._prompter = prompter
        self._news = News(prompter) if show_threads else None
        self._sampled: dict[Place, int] = {}  # ordinals among all accepted tokens
        self._num_sampled = len(request.output_token_ids)
        self._has_opened = False
        self._again: Transcript | None = None  # of an answer in threads that is repeated, until it reaches what was published
        self._begin(brought, known or brought)

    def _begin(self, brought: EarlierOutput | None, known: EarlierOutput | None) -> None:
        before = self._transcript_of(brought)
        self._brought = (min(brought.num_tokens, len(before.token_ids)), len(before.text)) if brought is not None else (0, 0)
        self._transcript = self._transcript_of(known)
        self._published = self._brought  # published tokens and characters
        self._new_output(self._transcript)
        self._published = (0 if known is None else min(known.num_tokens, self._published[0])), self._brought[1]
        if known is not None and not self.is_complete:
            self._start_over()

    def _transcript_of(self, transcript: EarlierOutput | None) -> Transcript:
        return self._new_transcript(self._new_sequence if transcript is None else transcript.new_sequence)

    @property
    def is_complete(self) -> bool:
        return self._transcript.finished is not None

    def opened(self) -> None:
        """Note that the request begins, or continues after a pause."""
        if self._has_opened:
            self._start_over()
        self._has_opened = True

    def take(self, verdict: Verdict, logprobs: TokenLogprobs = ()) -> tuple[Verdict, list[Event]]:
        """Add the accepted tokens.

        Args:
            logprobs: theirs.

        Returns:
            the verdict, cut and finished if a stop string ends the answer; and the events for the client.
        """
        transcript = self._again or self._transcript
        verdict, places = transcript.take(verdict)
        if self._again is not None:
            self._catch_up(self._again)
        first, new = self._num_sampled, self._note_sampled(places)
        rows = [list(row) for row, is_new in zip(logprobs, new, strict=False) if is_new]
        tokens = self._new_output(transcript)
        return verdict, [LogprobsEvent(rows, first), tokens] if rows else [tokens]

    def completed(self) -> CompletionEvent:
        """The last event for the client."""
        return CompletionEvent(self.completion, self._describe_threads() if self._transcript.sequence.can_fork else None)

    def _note_sampled(self, places: list[Place | None]) -> list[bool]:
        """Number the places of new tokens in order. Returns for each place whether it is new."""
        new = [place is not None and place not in self._sampled for place in places]
        for place in places:
            if place is not None and place not in self._sampled:
                self._sampled[place] = self._num_sampled
                self._num_sampled += 1
        return new

    def _new_transcript(self, new_sequence: NewSequence) -> Transcript:
        return Transcript(new_sequence(), self._prompter, self.request.sampling.stop)

    def _start_over(self) -> None:
        """Start over with an answer in threads: its tokens are the same, but come in another order."""
        if self._transcript.sequence.can_fork:
            self._again = self._new_transcript(self._new_sequence)
        if self._news is not None:
            self._news.restart()

    def _catch_up(self, again: Transcript) -> None:
        if again.finished == "cancelled" and len(again.token_ids) < self._published[0]:
            self._transcript.take(Verdict((), "cancelled"))  # published tokens count
            self._again = None
        elif again.finished is not None or len(again.token_ids) >= self._published[0]:
            self._transcript, self._again = again, None

    def _new_output(self, transcript: Transcript) -> TokensEvent:
        """The tokens and text that the client has not received yet."""
        (tokens, characters), told, completion = self._published, self._transcript, self.completion
        index, offset = tokens - self._brought[0], characters - self._brought[1]
        self._published = len(told.token_ids), len(told.text)
        completion.token_ids, completion.text, completion.finish_reason = told.token_ids, told.text, told.finished
        news = None if self._news is None else self._news.take(transcript.sequence)
        return TokensEvent(told.token_ids[tokens:], told.text[characters:], news, index, offset)

    def _describe_threads(self) -> list[int]:
        """Add the threads to the completion. Returns the ordinal of each of its tokens among all sampled ones."""
        sequence = self._transcript.sequence
        sequence.max_tokens = len(self.completion.token_ids)  # nothing past the end of the answer is reported or counted
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
        """A thread as the completion reports it, without tokens decoded past its end (these depend on the order of
        decoding).
        """
        text = self._prompter.text([token.token_id for token in written if not token.is_control])
        return {"path": list(thread.path), "tokens": len(written), "text": text, "ended_by": thread.ended_by}
