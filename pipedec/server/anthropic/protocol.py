"""Bodies of requests and responses of Anthropic's Messages API; FastAPI makes the OpenAPI document of them.

Knows nothing of prompts and answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from pipedec.core.values import shortened
from pipedec.server.bodies import ASKS_NOTHING, Extensible, FirstMistake, unsupported
from pipedec.server.protocol import (
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOOLS,
    TOOL_NAME,
    EngineFields,
    GenerationBody,
    bounded,
)

_BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class TextBlock(Extensible):
    type: Literal["text"]
    text: str


class ThinkingBlock(Extensible):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Taken and not used.")


class RedactedThinkingBlock(Extensible):
    """It is left out of the prompt."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Extensible):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ResultPart(Extensible):
    """A part of a result. Of one that is no text, such as an image, the model reads the type."""

    type: str
    text: str | None = None

    @property
    def shown(self) -> str:
        return f"[{self.type}: this model reads only text]" if self.text is None else self.text


class ToolResultBlock(Extensible):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultPart], FirstMistake()] | None = None
    is_error: bool | None = Field(None, description="Reaches the chat template.")


def _known(block: Any) -> Any:
    """The block itself. Raises PydanticCustomError for one of a type that is known elsewhere and not here."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and not any(kind in kinds for kinds in _BLOCKS_OF.values()):
        raise unsupported(f"a block of the type {shortened(kind)}", "send text")
    return block


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Block = Annotated[AnyBlock, BeforeValidator(_known)]
TextBlocks = Annotated[list[Annotated[TextBlock, BeforeValidator(_known)]], FirstMistake(), Field(max_length=MAX_MESSAGES)]


class Message(Extensible):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FirstMistake()]

    @model_validator(mode="after")
    def _has_its_blocks(self) -> Self:
        for block in () if isinstance(self.content, str) else self.content:
            if block.type not in _BLOCKS_OF[self.role]:
                raise unsupported(f"a block of the type {block.type} in a message of the role {self.role}")
        return self


class Tool(Extensible):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Taken and not used: calls follow their schema where tool_choice forces them.")

    @model_validator(mode="before")
    @classmethod
    def _is_the_clients(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise unsupported(f"a tool of the type {shortened(kind)}", "leave it out, or give it an input_schema and no type")
        return tool


class ToolChoice(Extensible):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With the type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call in an answer. Default: false.")

    @model_validator(mode="after")
    def _names_its_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("give a name with the type tool, and only with it")
        return self


class Thinking(Extensible):
    """Changes nothing where the model is not known to think."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=0, description="With the type enabled: tokens after which a thought is ended.")
    display: str | None = Field(None, description="With omitted, thoughts are not sent.")


class OutputFormat(Extensible):
    type: Literal["json_schema"]
    document: dict[str, Any] = Field(alias="schema")


class OutputConfig(Extensible):
    effort: str | None = Field(None, description="The variable reasoning_effort of the chat template, if the model thinks.")
    format: OutputFormat | None = Field(None, description="The form of the answer.")


class ConversationBody(Extensible):
    """Fields of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

    unsupported: ClassVar[Mapping[str, Collection[Any]]] = dict.fromkeys(("container", "mcp_servers"), ASKS_NOTHING)

    model: str = Field(description="One of the names in /v1/models.")
    messages: Annotated[list[Message], FirstMistake(), BeforeValidator(bounded)] = Field(
        description="If the last one is the assistant's, the answer goes on with it."
    )
    system: str | TextBlocks | None = None
    tools: Annotated[list[Tool], FirstMistake(), Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="Default: auto.")
    thinking: Thinking | None = Field(None, description="Default: as the model does without being asked.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="Older name of output_config.format.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")

    @property
    def form(self) -> OutputFormat | None:
        """The form of the answer that is asked for."""
        return self.output_format if self.output_config is None or not self.output_config.format else self.output_config.format


class MessagesBody(ConversationBody, EngineFields):
    """The body of ``/v1/messages``. Parameters of OpenAI's and vLLM's APIs that it does not have are refused."""

    unsupported: ClassVar[Mapping[str, Collection[Any]]] = {
        **ConversationBody.unsupported,
        **dict.fromkeys(GenerationBody.model_fields.keys() - {"user", "stream_options"}, ASKS_NOTHING),
        "n": (1,),
    }

    max_tokens: int = Field(ge=1, description="Maximum number of tokens to generate; fewer where the context has no room.")
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], FirstMistake(), Field(max_length=MAX_STOPS)
        ]
        | None
    ) = Field(None, description="Strings that end the answer.")
    temperature: float | None = Field(None, description="0 is greedy. Default: the checkpoint's, else 1.")
    top_p: float | None = Field(None, description="Above 0 and at most 1. Default: the checkpoint's, else 1.")
    top_k: int | None = Field(None, description="0 and -1 consider all tokens. Default: the checkpoint's, else 0.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")


class ResponseTextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ResponseThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ResponseToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="Arguments that are no JSON object are text in the field arguments.")


class ThinkingTokens(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="Tokens of the prompt that were computed.")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = Field(None, description="For a model that thinks.")


class MessageResponse(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[ResponseTextBlock | ResponseThinkingBlock | ResponseToolUseBlock, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokensCount(BaseModel):
    input_tokens: int


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesErrorResponse(BaseModel):
    type: Literal["error"]
    error: MessagesErrorDetail


class ModelInfo(BaseModel):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"]
    max_input_tokens: int | None = Field(description="Tokens of a prompt and its answer; null while it is loading.")


class ModelInfos(BaseModel):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
