"""The latest responses of ``/v1/responses``, with their conversations, so that a client need not send those again.

They are in the memory of this front-end: another front-end of the same cluster has its own, and none outlives its process. Each
belongs to a tenant, and does not exist for another one. Knows no shape of an item, but that it has an id.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipedec.core.values import shortened
from pipedec.server.errors import ApiError

MOST_CHARACTERS = 64 << 20  # of all that is kept, as JSON
_Key = tuple[str | None, str]  # a tenant and an id
Item = Mapping[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response and its conversation as JSON, which takes far less memory than what it is read into."""

    document: str
    conversation: str  # items: those before the response, and its own
    num_input: int  # items before the response
    output_ids: tuple[str, ...]

    @property
    def size(self) -> int:
        """In characters."""
        return len(self.document) + len(self.conversation)

    def items(self) -> list[dict[str, Any]]:
        """Those of the conversation."""
        found: list[dict[str, Any]] = json.loads(self.conversation)
        return found


class ResponseStore:
    """Forgets what was not used for longest when there are more than ``most`` responses, or than ``most_characters`` in all."""

    def __init__(self, most: int, most_characters: int = MOST_CHARACTERS) -> None:
        self.most = most
        self._most_characters = most_characters
        self._size = 0
        self._responses: OrderedDict[_Key, StoredResponse] = OrderedDict()  # the latest used is the last one
        self._items: dict[_Key, str] = {}  # those of all outputs

    def put(self, tenant: str | None, document: Mapping[str, Any], items: Sequence[Item]) -> None:
        """Keep a response and the items that it answers, unless it alone is larger than all may be."""
        output: Sequence[Item] = document["output"]
        conversation, ids = json.dumps([*items, *output]), tuple(item["id"] for item in output)
        stored = StoredResponse(json.dumps(document), conversation, len(items), ids)
        if stored.size > self._most_characters:
            return
        self._responses[tenant, document["id"]] = stored
        self._items |= {(tenant, item["id"]): json.dumps(item) for item in output}
        self._size += stored.size
        while len(self._responses) > self.most or self._size > self._most_characters:
            self._forget(next(iter(self._responses)))

    def get(self, tenant: str | None, response_id: str, field: str = "response_id") -> StoredResponse:
        """Raises ApiError (404) if it is not there; ``field`` is the one that names it."""
        stored = self._responses.get((tenant, response_id))
        if stored is None:
            raise self._missing("response", response_id, field)
        self._responses.move_to_end((tenant, response_id))
        return stored

    def item(self, tenant: str | None, item_id: str) -> dict[str, Any]:
        """An item of an output that is kept. Raises ApiError (404) if there is none."""
        if (item := self._items.get((tenant, item_id))) is None:
            raise self._missing("item", item_id, "input")
        found: dict[str, Any] = json.loads(item)
        return found

    def delete(self, tenant: str | None, response_id: str) -> None:
        """Raises ApiError (404) if it is not there."""
        self.get(tenant, response_id)
        self._forget((tenant, response_id))

    def _forget(self, key: _Key) -> None:
        stored = self._responses.pop(key)
        self._size -= stored.size
        for item_id in stored.output_ids:
            del self._items[key[0], item_id]

    def _missing(self, kind: str, given: str, field: str) -> ApiError:
        kept = f"the latest {self.most} responses are kept" if self.most else "no responses are kept"
        remedy = "it may be forgotten; send the whole conversation as input"
        return ApiError(404, f"there is no {kind} {shortened(given)!r}: {kept} (--max-stored-responses), and {remedy}", field)
