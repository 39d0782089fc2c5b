"""Events already published for running requests, merged into few, to restore a Redis that has lost its data.

Knows no Redis. Readers drop known events by index, so events may be published again.
"""

from __future__ import annotations

from msgspec.structs import replace

from pipedec.messages import Event, LogprobsEvent, PromptLogprobsEvent, ThreadNews, TokensEvent
from pipedec.scheduler.protocol import RankMessage, Remembered

_Rows = list[list[tuple[int, float]]]


class PublishedOutput:
    """Events published for one request."""

    def __init__(self, message: RankMessage) -> None:
        self._message = message
        self._token_ids: list[int] = list(message.told)
        self._text: list[str] = []
        self._first, self._length = 0, 0  # where the text begins, and its length, in characters
        self._threads: dict[tuple[int, ...], ThreadNews] = {}
        self._logprobs: _Rows = []
        self._first_logprob: int | None = None
        self._prompt_logprobs: _Rows = []

    def note(self, *events: Event) -> None:
        """Record events that are published, perhaps for the second time."""
        for event in events:
            self._note(event)

    def _note(self, event: Event) -> None:
        match event:
            case TokensEvent():
                self._token_ids[event.index :] = event.token_ids
                self._add_text(event.text, event.offset)
                for news in event.threads or ():
                    self._add_news(news)
            case LogprobsEvent(logprobs, index):
                self._first_logprob = index if self._first_logprob is None else self._first_logprob
                self._logprobs[index - self._first_logprob :] = logprobs
            case PromptLogprobsEvent(logprobs, index):
                self._prompt_logprobs[index:] = logprobs
            case _:
                pass  # readers need no other event for the rest

    def remembered(self) -> Remembered:
        """The request and its merged events."""
        tokens = TokensEvent(list(self._token_ids), "".join(self._text), list(self._threads.values()) or None, 0, self._first)
        logprobs = [LogprobsEvent(self._logprobs, self._first_logprob)] if self._first_logprob is not None else []
        prompt = [PromptLogprobsEvent(self._prompt_logprobs)] if self._prompt_logprobs else []
        said = [tokens] if self._token_ids or tokens.threads else []
        return Remembered(self._message.number, self._message.text, (*prompt, *logprobs, *said))

    def _add_text(self, text: str, offset: int) -> None:
        if not self._text:
            self._first = offset
        elif offset < self._first + self._length:
            self._text = ["".join(self._text)[: max(offset - self._first, 0)]]
        self._text.append(text)
        self._length = offset + len(text) - self._first

    def _add_news(self, news: ThreadNews) -> None:
        known = self._threads.get(news.path)
        first = news.offset if known is None else known.offset
        text = news.text if known is None else known.text[: news.offset - first] + news.text
        self._threads[news.path] = replace(news, text=text, offset=first)
