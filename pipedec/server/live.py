"""The routes of the live page and of the feed that it reads (docs/live.md)."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from pipedec.live.page import POLICY, Hub, Viewer, page
from pipedec.server.front import Front
from pipedec.server.sse import EventStream


def live_router(front: Front) -> APIRouter:
    router, hub = APIRouter(tags=["live"]), Hub(lambda: front.is_ending)

    @router.get("/live", include_in_schema=False)
    async def show_page() -> Response:
        """The page, which needs no key; the feed that it reads does."""
        return HTMLResponse(page(), headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})

    @router.get("/live/feed", include_in_schema=False)  # it never ends, which OpenAPI cannot say
    async def follow() -> EventStream:
        """The live feed as server-sent events."""
        engine, viewer = front.require().engine, Viewer(hub.going_on)
        return EventStream(hub.events(engine.live, viewer), front.settings, lambda: hub.leave(viewer))

    return router
