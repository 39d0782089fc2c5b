"""Bodies of requests and responses with Ollama's fields; FastAPI makes the OpenAPI document of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from pipedec.core.sampling import MAX_LOGPROBS
from pipedec.server.bodies import ASKS_NOTHING, Extensible, Texts, body_errors
from pipedec.server.protocol import EngineFields, Messages, Tools


class Options(Extensible):
    """Others are about loading a model, and are ignored."""

    unsupported: ClassVar[Mapping[str, Collection[Any]]] = {
        "mirostat": ASKS_NOTHING, **dict.fromkeys(("tfs_z", "typical_p"), (1,)),
    }  # fmt: skip

    num_predict: int | None = Field(None, description="Maximum number of tokens to generate; 0 and below: no limit.")
    temperature: float | None = Field(None, description="0 is greedy. Default: the checkpoint's, else 1.")
    top_k: int | None = Field(None, description="0 and -1 consider all tokens.")
    top_p: float | None = Field(None, description="Above 0 and at most 1.")
    min_p: float | None = Field(None, description="Between 0 and 1.")
    seed: int | None = Field(None, description="The same seed gives the same answer; -1 is none.")
    stop: str | Texts | None = Field(None, description="Strings that end the answer.")
    repeat_penalty: float | None = Field(None, description="Above 0; 1 is none.")
    presence_penalty: float | None = Field(None, description="Between -2 and 2.")
    frequency_penalty: float | None = Field(None, description="Between -2 and 2.")


class OllamaBody(EngineFields):
    """Fields of both kinds of requests for an answer."""

    unsupported: ClassVar[Mapping[str, Collection[Any]]] = dict.fromkeys(("images", "suffix", "template"), ASKS_NOTHING)

    model: str | None = Field(None, description="A served name, also with the tag :latest; null for the only model.")
    stream: bool | None = Field(None, description="Send the answer line by line while it is generated. Default: true.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON schema.")
    options: Options | None = None
    think: bool | str | None = Field(None, description="false for no thoughts; or low, medium or high.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="With logprobs: most probable tokens.")
    keep_alive: float | str | None = Field(None, description="Taken and not used: the model stays loaded.")

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class OllamaChatBody(OllamaBody):
    """The body of ``/api/chat``. Without messages it asks whether the model is loaded."""

    messages: Messages | None = Field(None, description="As in OpenAI's API; results name their tool as tool_name.")
    tools: Tools | None = None


class OllamaGenerateBody(OllamaBody):
    """The body of ``/api/generate``. Without a prompt it asks whether the model is loaded."""

    prompt: str | None = None
    system: str | None = Field(None, description="The system message before the prompt.")
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template.")


class ShowBody(Extensible):
    """The body of ``/api/show``."""

    model: str | None = None
    name: str | None = Field(None, description="Older name of model.")


class OllamaError(BaseModel):
    error: str


class OllamaResponse(BaseModel):
    """Further fields of the last line of an answer. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = Field(None, description="Time in the queue.")
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(BaseModel):
    id: str
    function: OllamaFunction


class OllamaMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaChatResponse(OllamaResponse):
    message: OllamaMessage


class OllamaGenerateResponse(OllamaResponse):
    response: str
    thinking: str | None = None


class ModelDetails(BaseModel):
    """Empty texts for what is not known."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int = Field(description="Bytes of the checkpoint; 0 if it is on other machines.")
    digest: str
    details: ModelDetails


class TagsResponse(BaseModel):
    models: list[ListedModel]


class RunningModel(ListedModel):
    size_vram: int
    expires_at: str
    context_length: int


class RunningResponse(BaseModel):
    models: list[RunningModel]


class ShowResponse(BaseModel):
    modelfile: str
    parameters: str = Field(description="Default sampling parameters, one on each line.")
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    version: str


ERRORS = body_errors(OllamaError)
LINE_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/x-ndjson": {"schema": {"type": "string", "description": "A JSON object on each line."}}}}
}
