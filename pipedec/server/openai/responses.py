"""``/v1/responses``: conversations as items, kept here if the client wants it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import FastAPI, Path, Query
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from pipedec.server.bodies import BODY_ERRORS, error_responses, streamed
from pipedec.server.conversation import chat_of
from pipedec.server.delivery import ResponseHead, respond, tenant_of
from pipedec.server.errors import bad_request, renamed_fields
from pipedec.server.front import Front
from pipedec.server.openai.response_store import ResponseStore
from pipedec.server.openai.responses_input import Tools, chat_of_responses, own_names
from pipedec.server.openai.responses_protocol import (
    DeletedResponse,
    InputItem,
    ItemList,
    Items,
    ResponseObject,
    ResponsesBody,
)
from pipedec.server.openai.responses_writer import Document, ItemsWriter

_EVENTS = streamed("Events, each with its name.")
_ERRORS = error_responses(400, 401, 404)
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(Items)
_MOST_ITEMS = 100  # of one page
ResponseId = Annotated[str, Path(description="The id of a response that is kept.")]


def conversation_of(body: ResponsesBody, store: ResponseStore, tenant: str | None) -> list[InputItem]:
    """The items that a response answers: those of the response before it, and the body's own, without references.

    Raises ApiError for a response or an item that is not kept, and if there is nothing at all.
    """
    if body.input is None and body.previous_response_id is None:
        raise bad_request("input is missing", "input")
    earlier: list[InputItem] = []
    if body.previous_response_id is not None:
        stored = store.get(tenant, body.previous_response_id, "previous_response_id")
        earlier = _ITEMS.validate_python(stored.items())
    given: Sequence[InputItem] = body.input if isinstance(body.input, list) else _user(body.input)
    return earlier + [
        InputItem.model_validate(store.item(tenant, str(item.id))) if item.kind == "item_reference" else item for item in given
    ]


def _user(text: str | None) -> list[InputItem]:
    return [] if text is None else [InputItem(type="message", role="user", content=text)]


def _documents(items: Iterable[InputItem]) -> list[Document]:
    """The items as they are shown, each with an id."""
    known = set(InputItem.model_fields)
    return [
        {"id": f"{_PREFIXES.get(item.kind, 'item')}_{uuid.uuid4().hex}", "type": item.kind}
        | item.model_dump(include=known, exclude_none=True)
        for item in items
    ]


def responses_routes(app: FastAPI, front: Front) -> None:
    """``/v1/responses``, and what is below it."""
    store = ResponseStore(front.settings.max_stored_responses)

    @app.post("/v1/responses", response_model=ResponseObject, responses={**_EVENTS, **BODY_ERRORS}, tags=["responses"])
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation, or go on with one that is kept."""
        served, head = front.require(), ResponseHead("resp_", front.settings.check_model(body.model))
        tenant, is_streamed = tenant_of(request), bool(body.stream)
        items, tools = conversation_of(body, store, tenant), Tools.of(body)
        with renamed_fields(partial(own_names, tools)):
            chat = await chat_of(front, request, chat_of_responses(body, items, tools), head, is_streamed)
        is_kept = body.store is not False and store.most > 0
        keep = partial(store.put, tenant, items=_documents(items)) if is_kept else None
        writer = ItemsWriter(head, body, tools, served, chat.readers[0], keep)
        return await respond(request, chat.answers, writer, chat.usage, is_streamed)

    stored_routes(app, store)


def stored_routes(app: FastAPI, store: ResponseStore) -> None:
    """The routes of a response that is kept."""

    @app.get("/v1/responses/{response_id}", response_model=ResponseObject, responses=_ERRORS, tags=["responses"])
    async def retrieve_response(
        response_id: ResponseId, request: Request, stream: Annotated[bool, Query(description="Must be false.")] = False
    ) -> Response:
        """A response that is kept."""
        if stream:
            raise bad_request("stream is not supported for a response that is complete: leave it out", "stream")
        return Response(store.get(tenant_of(request), response_id).document, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", responses=_ERRORS, tags=["responses"])
    async def delete_response(response_id: ResponseId, request: Request) -> DeletedResponse:
        """Forget a response, with its conversation."""
        store.delete(tenant_of(request), response_id)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    @app.post("/v1/responses/{response_id}/cancel", responses=_ERRORS, tags=["responses"])
    async def cancel_response(response_id: ResponseId, request: Request) -> ResponseObject:
        """Refused: only responses in the background can be cancelled, and there are none here."""
        store.get(tenant_of(request), response_id)
        raise bad_request("only a response in the background can be cancelled: close the connection of one that is generated")

    @app.get("/v1/responses/{response_id}/input_items", response_model=ItemList, responses=_ERRORS, tags=["responses"])
    async def list_input_items(
        response_id: ResponseId,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=_MOST_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(description="The id of the item before the first one.")] = None,
    ) -> Response:
        """The items that a response answers, those of earlier responses among them."""
        stored = store.get(tenant_of(request), response_id)
        items = stored.items()[: stored.num_input]
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise bad_request("after is not the id of an item of this response", "after")
        first = 0 if after is None else ids.index(after) + 1
        page, page_ids = items[first : first + limit], ids[first : first + limit]
        ends = {"first_id": page_ids[0] if page else None, "last_id": page_ids[-1] if page else None}
        document = {"object": "list", "data": page, **ends, "has_more": first + limit < len(items)}
        return Response(json.dumps(document), media_type="application/json")
