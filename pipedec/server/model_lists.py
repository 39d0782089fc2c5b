"""``/v1/models`` and ``/api/v0/models``: the served model, as OpenAI's, Anthropic's and LM Studio's clients read it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import FastAPI, Path
from starlette.requests import Request

from pipedec.server.anthropic.protocol import ModelInfo, ModelInfos
from pipedec.server.bodies import error_responses
from pipedec.server.front import Front
from pipedec.server.ollama.protocol import OllamaError
from pipedec.server.protocol import LoadedModel, LoadedModelList, ModelCard, ModelList
from pipedec.server.served_model import ServedModel, served_model


def models_routes(app: FastAPI, front: Front) -> None:
    """``/v1/models``: what is served, also while it is loading."""

    def card(name: str) -> ModelCard:
        served = front.served
        root, context = (None, None) if served is None else (served.description.target, served.max_model_len)
        return ModelCard(
            id=name, object="model", created=front.created, owned_by="pipedec", root=root, max_model_len=context,
            context_length=context,
        )  # fmt: skip

    def info(name: str) -> ModelInfo:
        context = None if front.served is None else front.served.max_model_len
        created = datetime.fromtimestamp(front.created, UTC)
        return ModelInfo(
            type="model", id=name, display_name=name, created_at=created, lifecycle="active", max_input_tokens=context
        )

    def is_anthropic(request: Request) -> bool:
        return "anthropic-version" in request.headers

    @app.get("/v1/models", responses=error_responses(401), tags=["models"])
    async def list_models(request: Request) -> ModelList | ModelInfos:
        """All names by which the model can be asked for; as Anthropic has them if there is a header anthropic-version."""
        names = front.settings.served_model_names
        if is_anthropic(request):
            return ModelInfos(data=list(map(info, names)), has_more=False, first_id=names[0], last_id=names[-1])
        return ModelList(object="list", data=list(map(card, names)))

    @app.get("/v1/models/{model:path}", responses=error_responses(400, 401, 404), tags=["models"])
    async def retrieve_model(
        model: Annotated[str, Path(description="A served name.")], request: Request
    ) -> ModelCard | ModelInfo:
        """One of them."""
        name = front.settings.check_model(model)
        return info(name) if is_anthropic(request) else card(name)


def lm_studio_routes(app: FastAPI, front: Front) -> None:
    """``/api/v0/models``: LM Studio's list, from which its clients learn the length of the context."""

    def entry(name: str, model: ServedModel) -> LoadedModel:
        return LoadedModel(
            id=name, object="model", type="llm", publisher="pipedec", arch=model.family, compatibility_type=model.format,
            quantization=model.quantization, state="not-loaded" if front.served is None else "loaded",
            max_context_length=model.context, loaded_context_length=model.context,
            capabilities=["tool_use"] if model.calls_tools else [],
        )  # fmt: skip

    @app.get("/api/v0/models", responses=error_responses(401, model=OllamaError), tags=["models"])
    async def list_loaded() -> LoadedModelList:
        """All names by which the model can be asked for."""
        model = served_model(front)
        return LoadedModelList(object="list", data=[entry(name, model) for name in front.settings.served_model_names])

    @app.get("/api/v0/models/{model:path}", responses=error_responses(400, 401, 404, model=OllamaError), tags=["models"])
    async def retrieve_loaded(model: Annotated[str, Path(description="A served name.")]) -> LoadedModel:
        """One of them."""
        return entry(front.settings.check_model(model), served_model(front))
