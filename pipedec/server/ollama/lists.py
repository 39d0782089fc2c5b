"""``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``: what is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from pipedec.server.front import LATEST, Front
from pipedec.server.ollama.protocol import (
    ERRORS,
    ListedModel,
    ModelDetails,
    OllamaVersion,
    RunningModel,
    RunningResponse,
    ShowBody,
    ShowResponse,
    TagsResponse,
)
from pipedec.server.ollama.writers import moment
from pipedec.server.served_model import ServedModel, served_model

API_VERSION = "0.12.11"  # of the Ollama whose API this is: clients refuse older ones
_NEVER = moment(253402300799)  # the last second that RFC 3339 can write


def lists_routes(app: FastAPI, front: Front) -> None:
    """Also while the model is loading, except ``/api/show``."""

    def fields(name: str, model: ServedModel) -> dict[str, Any]:
        tagged = name if ":" in name else name + LATEST
        return {
            "name": tagged, "model": tagged, "modified_at": moment(front.created), "size": model.size, "digest": model.digest,
            "details": details_of(model),
        }  # fmt: skip

    @app.get("/api/tags", responses=ERRORS, tags=["ollama"])
    async def list_tags() -> TagsResponse:
        """All names by which the model can be asked for, each with a tag."""
        model = served_model(front)
        return TagsResponse(models=[ListedModel(**fields(name, model)) for name in front.settings.served_model_names])

    @app.get("/api/ps", responses=ERRORS, tags=["ollama"])
    async def list_running() -> RunningResponse:
        """The same, once the model is loaded."""
        model, names = served_model(front), front.settings.served_model_names if front.served is not None else ()
        more: dict[str, Any] = {"size_vram": model.size, "expires_at": _NEVER, "context_length": model.context}
        return RunningResponse(models=[RunningModel(**fields(name, model), **more) for name in names])

    @app.post("/api/show", responses=ERRORS, tags=["ollama"])
    async def show(body: ShowBody) -> ShowResponse:
        """The model's details."""
        served, name = front.require(), front.settings.check_model(body.model or body.name)
        return _shown(name, served_model(front), served.defaults.values, moment(front.created))

    @app.get("/api/version", responses=ERRORS, tags=["ollama"])
    async def show_version() -> OllamaVersion:
        """The version of Ollama that has this API."""
        return OllamaVersion(version=API_VERSION)

    @app.head("/", include_in_schema=False)
    async def is_running() -> Response:
        """By which Ollama's clients find out whether there is a server."""
        return Response()


def _shown(name: str, model: ServedModel, defaults: Mapping[str, Any], modified_at: str) -> ShowResponse:
    names, family = {"repetition_penalty": "repeat_penalty"}, model.family or "unknown"
    return ShowResponse(
        modelfile=f"FROM {name}",
        parameters="\n".join(f"{names.get(one, one)} {value}" for one, value in defaults.items()),
        template=model.template,
        details=details_of(model),
        model_info={"general.architecture": family, f"{family}.context_length": model.context},
        capabilities=["completion", *(["tools"] if model.calls_tools else ()), *(["thinking"] if model.thinks else ())],
        modified_at=modified_at,
    )


def details_of(model: ServedModel) -> ModelDetails:
    return ModelDetails(
        parent_model="", format=model.format, family=model.family, families=[model.family] if model.family else [],
        parameter_size="", quantization_level=model.quantization,
    )  # fmt: skip
