"""An answer as it was written, in whatever style, and the metrics of one in a single thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pipedec.bench.record import Row, key_of
from pipedec.threads import ThreadMetrics


@dataclass(frozen=True)
class Written:
    """What does not depend on methods and pipelines: an answer's tokens and what is said of them.

    Attributes:
        document: every token that was decoded or forced, each with the thread or the request that it belongs to. Answers are
            equal if their documents are.
        finish_reason: of the answer, as in ``Verdict``; ``length`` if any part of it ended at ``max_tokens``.
        decoded_text: text tokens that were decoded after the answer's first token.
        metrics: what was decoded in parallel, and what it attended to.
        anomalies: what went wrong, a count by name.
    """

    document: list[tuple[object, int]]
    finish_reason: str
    decoded_text: int
    metrics: ThreadMetrics
    anomalies: Mapping[str, int] = field(default_factory=dict)

    def to_row(self) -> Row:
        """As fields of a row."""
        return {
            "document": key_of(self.document), "finish_reason": self.finish_reason, "decoded_text": self.decoded_text,
            "metrics": asdict(self.metrics), "anomalies": dict(self.anomalies),
        }  # fmt: skip


def sequential_metrics(prompt_tokens: int, tokens: int, text_tokens: int) -> ThreadMetrics:
    """The metrics of an answer in one thread."""
    attended, cached = (prompt_tokens + (text_tokens - 1) / 2 if text_tokens else 0.0), prompt_tokens + text_tokens
    return ThreadMetrics(
        1, tokens, text_tokens, tokens, text_tokens / tokens if tokens else 0.0, attended, attended, cached, cached
    )  # fmt: skip
