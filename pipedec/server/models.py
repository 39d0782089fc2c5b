"""``/v1/models`` and ``/version``: what is served, also while it is loading."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

import pipedec
from pipedec.server.asking import check_model
from pipedec.server.front import Front
from pipedec.server.protocol import ModelCard, ModelList, VersionResponse, error_responses


def models_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses=error_responses(401))
    async def list_models() -> ModelList:
        """All names by which the model can be asked for."""
        return ModelList(object="list", data=[_card(front, name) for name in front.settings.served_model_names])

    @router.get("/v1/models/{model:path}", responses=error_responses(400, 401, 404))
    async def retrieve_model(model: Annotated[str, Path(description="A served name.")]) -> ModelCard:
        """One of them."""
        return _card(front, check_model(model, front.settings))

    @router.get("/version")
    async def show_version() -> VersionResponse:
        """The version of pipedec."""
        return VersionResponse(version=pipedec.__version__)

    return router


def _card(front: Front, name: str) -> ModelCard:
    served = front.served
    root, context = (None, None) if served is None else (served.description.target, served.max_model_len)
    return ModelCard(id=name, object="model", created=front.created, owned_by="pipedec", root=root, max_model_len=context)
