"""Bodies of requests and responses, with OpenAI's and vLLM's fields; FastAPI makes the OpenAPI document of them.

Null means that a field is not given. A field that is unknown here is refused, at any depth, if the answer would be another one
with it (``unsupported`` of its object), and else ignored; unknown fields of messages reach the chat template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from pipedec.core.sampling import MAX_LOGPROBS
from pipedec.core.values import shortened
from pipedec.methods import option_limits
from pipedec.server.errors import UNSUPPORTED

MAX_CHOICES = 8
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOOLS = 128
MAX_STRUCTURE_CHARACTERS = 200_000
MAX_CHOICE_TEXTS = 5_000


class FirstMistake(FailFast):
    """Validates a list up to its first mistake. Unlike pydantic's own it may stand in a union."""

    def __hash__(self) -> int:
        return hash(type(self))


Texts = Annotated[list[str], FirstMistake()]
TokenIds = Annotated[list[int], FirstMistake()]
Prompts = str | Texts | TokenIds | Annotated[list[TokenIds], FirstMistake()]
_CHANGE_NOTHING = ("name", "description", "strict", "disable_any_whitespace", "disable_fallback")
_NOTHING: Collection[Any] = (False, 0, "", [], {})  # values that ask for nothing, besides null


class Extensible(BaseModel):
    """Accepts unknown fields but those that are ``unsupported``, each with the values that ask for nothing."""

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[Mapping[str, Collection[Any]]] = {}

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            accepted = self._accepted(name)
            if accepted is not None and value is not None and value not in accepted:
                raise unsupported(shortened(name))
        return self

    @classmethod
    def _accepted(cls, name: str) -> Collection[Any] | None:
        """The values of an unknown field that ask for nothing; None if all do."""
        return cls.unsupported.get(name)


class Closed(Extensible):
    """Accepts no unknown fields that ask for something, but those that change nothing."""

    @classmethod
    def _accepted(cls, name: str) -> Collection[Any] | None:
        return None if name in _CHANGE_NOTHING else _NOTHING


def unsupported(what: str, remedy: str = "leave it out") -> PydanticCustomError:
    """The error for what is known elsewhere and not here."""
    return PydanticCustomError(UNSUPPORTED, "{what} is not supported by this server: {remedy}", {"what": what, "remedy": remedy})


class Body(Extensible):
    """The body of a request."""

    unsupported = {
        **dict.fromkeys((
            "allowed_token_ids", "audio", "bad_words", "chat_template", "continue_final_message", "documents", "dry_multiplier",
            "dynatemp_range", "ebnf", "functions", "grammar", "guided_decoding_backend", "guided_whitespace_pattern",
            "include_stop_str_in_output", "json_schema", "kv_transfer_params", "logits_processors", "lora", "lora_path",
            "mirostat", "mirostat_mode", "mm_processor_kwargs", "prediction", "prompt_embeds", "regex", "repetition_detection",
            "stop_regex", "structural_tag", "suffix", "thinking_token_budget", "tools", "top_a", "truncate_prompt_tokens",
            "use_beam_search", "verbosity", "web_search_options", "xtc_probability",
        ), _NOTHING),
        **dict.fromkeys(("length_penalty", "repeat_penalty", "tfs_z", "typical_p"), (1,)),
        "function_call": ("none",),
        "modalities": (["text"],),
        "n_predict": (-1,),
        "prompt_logprobs": (),
        "skip_special_tokens": (True,),
        "tool_choice": ("none", "auto"),
        "top_n_sigma": (-1, 0),
    }  # fmt: skip

    model: str | None = Field(None, description="One of the names in /v1/models; null for the only model.")


class StreamOptions(Extensible):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage and without choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk.")


class JsonSchema(Closed):
    """``strict`` changes nothing: every answer follows its schema."""

    document: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Closed):
    """With ``schema`` as in llama.cpp, or ``value`` as in TGI, which mean the same as ``json_schema.schema``."""

    type: Literal["text", "json_object", "json_schema", "json"]
    json_schema: JsonSchema | None = Field(None, description="With the type json_schema.")
    document: dict[str, Any] | None = Field(None, alias="schema", description="Beside the type json_object or json_schema.")
    value: dict[str, Any] | None = Field(None, description="With the type json.")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """All that are given."""
        inner = None if self.json_schema is None else self.json_schema.document
        return [schema for schema in (inner, self.document, self.value) if schema is not None]


class StructuredFields(Closed):
    document: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: Texts | None = Field(None, description="The answer is one of these.")
    grammar: str | None = Field(None, description="In Lark's notation, or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class GenerationBody(Body):
    """Fields of both kinds of completions. Ranges are those of ``SamplingParams``."""

    max_tokens: int | None = Field(None, description="Maximum number of tokens to generate.")
    max_completion_tokens: int | None = Field(None, description="The same; it is used if both are given.")
    temperature: float | None = Field(None, description="0 is greedy. Default: the checkpoint's, else 1.")
    top_p: float | None = Field(None, description="Above 0 and at most 1. Default: the checkpoint's, else 1.")
    top_k: int | None = Field(None, description="0 and -1 consider all tokens. Default: the checkpoint's, else 0.")
    min_p: float | None = Field(None, description="Between 0 and 1. Default: the checkpoint's, else 0.")
    seed: int | None = Field(None, description="The same seed gives the same answer; -1 is none. Choice i has the seed + i.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices per prompt. Default: 1.")
    stop: str | Texts | None = Field(None, description=f"At most {MAX_STOPS} strings that end the answer.")
    stop_token_ids: TokenIds | None = None
    presence_penalty: float | None = Field(None, description="Between -2 and 2.")
    frequency_penalty: float | None = Field(None, description="Between -2 and 2.")
    repetition_penalty: float | None = Field(None, description="Above 0; 1 is none. Default: the checkpoint's, else 1.")
    logit_bias: dict[int, float] | None = Field(None, description="From token id to a value between -100 and 100.")
    ignore_eos: bool | None = Field(None, description="Continue after the model's end tokens.")
    min_tokens: int | None = Field(None, description="Only with ignore_eos and without stop, which imply it.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Show tokens of log-probabilities as token_id:ID.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = Field(None, description="vLLM's: one of its fields.")
    guided_json: str | dict[str, Any] | None = Field(None, description="Older names of the same.")
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Requests of a lower one are served first.")
    user: str | None = Field(None, description="Taken and not used.")
    method: str | None = Field(None, description="Decoding method: it changes the speed and not the answer.")
    method_options: dict[str, Any] | None = Field(
        None, description=f"Options of the method, by name. Ranges of numbers: {option_limits()}."
    )
    threads: str | None = Field(None, description="Dialect in which the model may open decode threads.")

    @property
    def max_tokens_asked(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: Prompts = Field(description="A text, texts, token ids, or lists of token ids.")
    best_of: int | None = Field(None, description="As n, or null: nothing else is supported.")
    echo: bool | None = Field(None, description="Return the prompt before the answer, with its log-probabilities if asked for.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Most probable tokens shown per token.")
    add_special_tokens: bool | None = Field(None, description="Begin text as the model expects it. Default: true.")


class ContentPart(Extensible):
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type != "text" or self.text is None:
            raise unsupported(f"a part of the type {shortened(self.type)} without text", "send text")
        return self


class GivenFunction(Extensible):
    name: str
    arguments: str | dict[str, Any] = "{}"


class GivenCall(Extensible):
    """A call in a message that the client sends back."""

    type: Literal["function"] = "function"
    function: GivenFunction


class ConversationMessage(Extensible):
    """One message of a conversation; further fields reach the chat template."""

    unsupported = dict.fromkeys(("audio", "function_call", "images", "partial", "prefix", "refusal", "videos"), _NOTHING)

    role: str
    content: str | Annotated[list[ContentPart], FirstMistake()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[GivenCall], FirstMistake()] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_role(self) -> Self:
        if self.role == "function":
            raise unsupported("the role function", "use tool_calls and the role tool")
        return self


class Function(Extensible):
    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments. Default: there are none.")
    strict: bool | None = Field(None, description="Arguments follow their schema wherever tool_choice makes the model call.")


class Tool(Extensible):
    type: Literal["function"]
    function: Function


class FunctionName(Closed):
    name: str


class NamedTool(Closed):
    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], FirstMistake()]


def _bounded(messages: Any) -> Any:
    """The messages themselves. Raises PydanticCustomError if they are so many that merely to read them would take long."""
    if isinstance(messages, list):
        lists = (message.get(name) for message in messages if isinstance(message, dict) for name in ("content", "tool_calls"))
        size = len(messages) + sum(len(one) for one in lists if isinstance(one, list))
        if size > MAX_MESSAGES:
            found = {"max_length": MAX_MESSAGES, "actual_length": size}
            raise PydanticCustomError(
                "too_long", "{actual_length} messages, parts and calls; at most {max_length} are taken", found
            )
    return messages


Messages = Annotated[list[ConversationMessage], FirstMistake(), BeforeValidator(_bounded)]


class ChatBody(GenerationBody):
    """The body of ``/v1/chat/completions``."""

    unsupported = {**Body.unsupported, **dict.fromkeys(("add_special_tokens", "echo"), _NOTHING)}

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="End with the beginning of an answer. Default: true.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="With logprobs: most probable tokens.")
    reasoning_effort: str | None = Field(None, description="A variable of the chat template.")
    tools: Tools | None = Field(None, description=f"What the model may call, at most {MAX_TOOLS}.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(None, description="Default: auto.")
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer. Default: true.")


class TokenizeBody(Body):
    """The body of ``/tokenize``: either a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt.")
    add_generation_prompt: bool | None = Field(None, description="Default: true.")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of ``/detokenize``."""

    tokens: TokenIds


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    threads: dict[str, Any] | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob] | None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="Missing if there are none.")


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    threads: dict[str, Any] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = Field(None, description="Directory of the checkpoint; null while it is loading.")
    parent: str | None = None
    max_model_len: int | None = Field(None, description="Tokens of a prompt and its answer; null while it is loading.")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


class VersionResponse(BaseModel):
    version: str


class HealthResponse(BaseModel):
    """``recovering``: something was lost, and answers wait until it is replaced."""

    status: Literal["ok", "recovering"]
    epoch: int = 0


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document."""
    return {status: {"model": ErrorResponse} for status in statuses}


BODY_ERRORS = error_responses(400, 401, 404, 408, 413, 500, 503)
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string", "description": "Chunks, and at last [DONE]."}}}}
}
