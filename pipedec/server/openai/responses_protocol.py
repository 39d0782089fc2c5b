"""Bodies of ``/v1/responses``, with OpenAI's fields; FastAPI makes the OpenAPI document of them.

Knows the fields of items and tools, not how a conversation or an output is made of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from pipedec.core.sampling import MAX_LOGPROBS
from pipedec.core.values import shortened
from pipedec.server.bodies import ASKS_NOTHING, Closed, Extensible, FirstMistake, Texts, unsupported
from pipedec.server.protocol import Body, ContentPart, GenerationBody, SamplingFields, bounded

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"  # values of ``include``
CLIENT_TOOLS = ("function", "custom", "namespace")  # types of tools that the client runs, or that hold such
_NEEDED = {  # fields of an item, by its type
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "local_shell_call": ("call_id", "action"),
    "local_shell_call_output": ("id", "output"),
    "item_reference": ("id",),
}
_CHOICES = "none, auto, required, a function or custom tool, or allowed_tools"


class ItemPart(ContentPart):
    texts = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


Parts = Annotated[list[ItemPart], FirstMistake()]


class InputItem(Extensible):
    """An item of a conversation. It is a message if it has a role and no type, and a reference if it has only an id."""

    id: str | None = None
    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | Parts | None = None
    status: str | None = None

    @property
    def kind(self) -> str:
        return self.type or ("item_reference" if self.role is None else "message")

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.kind not in _NEEDED:
            raise unsupported(f"an item of the type {shortened(self.kind)}", f"send items of the types {', '.join(_NEEDED)}")
        if missing := [name for name in _NEEDED[self.kind] if getattr(self, name) is None]:
            raise unsupported(f"an item of the type {self.kind} without {missing[0]}", f"give its {missing[0]}")
        return self


Items = Annotated[list[InputItem], FirstMistake()]


class CustomFormat(Extensible):
    """Shown to the model, which may write something else."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class InnerTool(Extensible):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments. Default: there are none.")
    strict: bool | None = None
    format: CustomFormat | None = Field(None, description="Of the text that a custom tool takes.")

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type in CLIENT_TOOLS and self.name is None:
            raise unsupported(f"a tool of the type {self.type} without name", "give its name")
        return self


class ResponsesTool(InnerTool):
    """A function, a custom tool, or a namespace with such; the model is not offered other ones, which OpenAI would run itself."""

    tools: Annotated[list[InnerTool], FirstMistake()] | None = None


class ToolChoice(Extensible):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[InnerTool], FirstMistake()] | None = Field(None, description="With the type allowed_tools.")

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        has_names = self.tools is not None if self.type == "allowed_tools" else self.name is not None
        if self.type not in ("function", "custom", "allowed_tools") or not has_names:
            raise unsupported(f"a tool_choice of the type {shortened(self.type)} without names", f"give {_CHOICES}")
        return self


class TextFormat(Closed):
    """``strict`` changes nothing: every answer follows its schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    document: dict[str, Any] | None = Field(None, alias="schema", description="With the type json_schema.")
    strict: bool | None = None


class TextOptions(Extensible):
    format: TextFormat | None = None


class ReasoningOptions(Extensible):
    effort: str | None = Field(None, description="A variable of the chat template; with none, no thoughts.")
    summary: str | None = Field(None, description="Taken and not used: thoughts are returned as they are.")


_ELSEWHERE = (  # fields of the other routes, which have another name here or none
    *GenerationBody.model_fields.keys() - SamplingFields.model_fields.keys() - {"stream_options"},
    "context_management", "conversation", "logprobs", "messages", "prompt",
)  # fmt: skip


class ResponsesBody(SamplingFields):
    """The body of ``/v1/responses``."""

    unsupported: ClassVar[Mapping[str, Collection[Any]]] = {
        **{name: values for name, values in Body.unsupported.items() if name not in ("tools", "tool_choice")},
        **dict.fromkeys(_ELSEWHERE, ASKS_NOTHING),
        "n": (1,),
    }

    input: Annotated[str | Items, BeforeValidator(bounded)] | None = Field(
        None, description="A text or items. It may be missing with previous_response_id only."
    )
    instructions: str | None = Field(None, description="A system message before the input; the next response forgets it.")
    previous_response_id: str | None = Field(None, description="The response that the input goes on with, if it is kept.")
    store: bool | None = Field(None, description="Keep the response for previous_response_id. Default: true.")
    background: Literal[False] | None = None
    include: Texts | None = Field(None, description=f"Used: {LOGPROBS}, {ENCRYPTED}.")
    max_output_tokens: int | None = Field(None, description="Maximum number of tokens to generate, thoughts among them.")
    metadata: dict[str, str] | None = Field(None, description="Returned as it is.")
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer. Default: true.")
    prompt_cache_key: str | None = Field(None, description="Taken and not used.")
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = Field(None, description="Taken and not used.")
    service_tier: str | None = Field(None, description="Taken and not used.")
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], FirstMistake()] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(None, description="Default: auto.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Most probable tokens for each token of the text.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Taken and not used: input that does not fit is refused."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    thinking_token_budget: int | None = Field(None, ge=0, description="Tokens after which a thought is ended.")


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: str


class ResponseObject(BaseModel):
    """Beside these fields it returns those of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
