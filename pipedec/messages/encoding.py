"""Messages as JSON: the fields of a struct, and of an event its ``kind`` beside them."""

from __future__ import annotations

import msgspec

from pipedec.core import Record

_encoder = msgspec.json.Encoder()


class EventRecord(Record, frozen=True, tag_field="kind"):
    """An event, whose ``kind`` is the tag of its class."""


def to_json(message: msgspec.Struct) -> str:
    """Raises UnicodeEncodeError for a text that is not UTF-8."""
    return _encoder.encode(message).decode()
