"""The dialect of answers in one thread."""

from __future__ import annotations

from pipedec.threads import BoundDialect, Dialect

_NEVER = -(2**62)  # no vocabulary has this token

# Nothing opens another thread, and every token is text.
NO_DIALECT = BoundDialect(
    Dialect(name="none", opener="none", child_start="never", max_cached_tokens=2**62, show_control=True),
    opener=_NEVER, child_start=_NEVER, child_end=None, join=None, control=frozenset(), never_sampled=frozenset(),
    no_opening_after=frozenset(), text_of=str,
)  # fmt: skip
