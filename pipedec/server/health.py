"""``/health`` and ``/ready``, for load balancers: neither needs a key."""

from __future__ import annotations

from fastapi import APIRouter

from pipedec.client.watch import is_away
from pipedec.server.front import Front
from pipedec.server.protocol import HealthResponse, error_responses


def health_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health", responses=error_responses(503))
    async def check_health() -> HealthResponse:
        """Whether the cluster lives: 503 while it is loading, and when it was lost for good."""
        return _answer(front, is_ready=False)

    @router.get("/ready", responses=error_responses(503))
    async def check_ready() -> HealthResponse:
        """Whether requests are taken: as /health, and 503 while the server shuts down."""
        return _answer(front, is_ready=True)

    return router


def _answer(front: Front, is_ready: bool) -> HealthResponse:
    problem = front.problem(is_ready)
    if problem is not None:
        raise problem
    status = front.last_status()
    if status is None:
        return HealthResponse(status="ok")
    return HealthResponse(status="recovering" if is_away(status) else "ok", epoch=status.epoch)
