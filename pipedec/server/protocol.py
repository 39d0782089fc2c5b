"""Bodies of requests and responses, with OpenAI's and vLLM's fields; FastAPI makes the OpenAPI document of them.

Unknown fields of messages reach the chat template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from pipedec.core.sampling import MAX_LOGPROBS
from pipedec.core.values import shortened
from pipedec.methods import option_limits
from pipedec.server.bodies import ASKS_NOTHING, Closed, Extensible, FirstMistake, Texts, TokenIds, unsupported
from pipedec.text.chat_template import text_of
from pipedec.text.parsers import parser

MAX_CHOICES = 8
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOOLS = 128
MAX_STRUCTURE_CHARACTERS = 200_000
MAX_CHOICE_TEXTS = 5_000
_LISTS = ("content", "tool_calls", "output", "summary")  # fields of messages and items that are lists
TOOL_NAME = f"^{parser.TOOL_NAME}$"
Prompts = str | Texts | TokenIds | Annotated[list[TokenIds], FirstMistake()]


class Body(Extensible):
    """The body of a request."""

    unsupported: ClassVar[Mapping[str, Collection[Any]]] = {
        **dict.fromkeys((
            "allowed_token_ids", "audio", "bad_words", "chat_template", "documents", "dry_multiplier", "dynatemp_range",
            "functions", "guided_whitespace_pattern", "kv_transfer_params", "logits_processors", "lora", "lora_path", "mirostat",
            "mirostat_mode", "mm_processor_kwargs", "prediction", "prompt_embeds", "repetition_detection", "stop_regex",
            "structural_tag", "suffix", "tools", "top_a", "use_beam_search", "web_search_options", "xtc_probability",
        ), ASKS_NOTHING),
        **dict.fromkeys(("length_penalty", "tfs_z", "typical_p"), (1,)),
        "function_call": ("none",),
        "modalities": (["text"],),
        "prompt_logprobs": (),
        "tool_choice": ("none", "auto"),
        "top_n_sigma": (-1, 0),
        "verbosity": ("medium",),
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


class EngineFields(Extensible):
    """Fields of every API that change the speed of an answer, and not the answer."""

    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Requests of a lower one are served first.")
    method: str | None = Field(None, description="Decoding method: it changes the speed and not the answer.")
    method_options: dict[str, Any] | None = Field(
        None, description=f"Options of the method, by name. Ranges of numbers: {option_limits()}."
    )


class SamplingFields(Body, EngineFields):
    """Fields of every body that asks for an answer. Ranges are those of ``SamplingParams``."""

    temperature: float | None = Field(None, description="0 is greedy. Default: the checkpoint's, else 1.")
    top_p: float | None = Field(None, description="Above 0 and at most 1. Default: the checkpoint's, else 1.")
    top_k: int | None = Field(None, description="0 and -1 consider all tokens. Default: the checkpoint's, else 0.")
    min_p: float | None = Field(None, description="Between 0 and 1. Default: the checkpoint's, else 0.")
    seed: int | None = Field(None, description="The same seed gives the same answer; -1 is none. Choice i has the seed + i.")
    stop: str | Texts | None = Field(None, description=f"At most {MAX_STOPS} strings that end the answer.")
    stop_token_ids: TokenIds | None = None
    presence_penalty: float | None = Field(None, description="Between -2 and 2.")
    frequency_penalty: float | None = Field(None, description="Between -2 and 2.")
    repetition_penalty: float | None = Field(None, description="Above 0; 1 is none. Default: the checkpoint's, else 1.")
    repeat_penalty: float | None = Field(None, description="llama.cpp's name of the same.")
    logit_bias: dict[int, float] | None = Field(None, description="From token id to a value between -100 and 100.")
    ignore_eos: bool | None = Field(None, description="Continue after the model's end tokens.")
    min_tokens: int | None = Field(None, description="Tokens before which nothing ends the answer.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default: true.")
    include_stop_str_in_output: bool | None = Field(None, description="The text ends with the stop string that ended it.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Show tokens of log-probabilities as token_id:ID.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")
    user: str | None = Field(None, description="Taken and not used.")


class GenerationBody(SamplingFields):
    """Fields of both kinds of completions."""

    max_tokens: int | None = Field(None, description="Maximum number of tokens to generate.")
    max_completion_tokens: int | None = Field(None, description="The same; it is used if both are given.")
    n_predict: int | None = Field(None, description="llama.cpp's name of the same; -1 and -2: no limit.")
    return_token_ids: bool | None = Field(None, description="Return the token ids of prompt and answer.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only so many tokens at the end of the prompt; -1: as many as fit."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices per prompt. Default: 1.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = Field(None, description="vLLM's: one of its fields.")
    guided_json: str | dict[str, Any] | None = Field(None, description="Older names of the same.")
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = Field(None, description="llama.cpp's and SGLang's names of the same.")
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    stream_options: StreamOptions | None = None
    threads: str | None = Field(None, description="Dialect in which the model may open decode threads.")

    @property
    def max_tokens_asked(self) -> int | None:
        """None for no limit."""
        limit = self.n_predict if self.n_predict not in (-1, -2) else None
        return next((given for given in (self.max_completion_tokens, self.max_tokens) if given is not None), limit)


class CompletionBody(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: Prompts = Field(description="A text, texts, token ids, or lists of token ids.")
    best_of: int | None = Field(None, description="As n, or null: nothing else is supported.")
    echo: bool | None = Field(None, description="Return the prompt before the answer, with its log-probabilities if asked for.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Most probable tokens shown per token.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Most probable tokens per token of the prompt, in a field of each choice."
    )
    add_special_tokens: bool | None = Field(None, description="Begin text as the model expects it. Default: true.")


class ContentPart(Extensible):
    texts: ClassVar[Collection[str]] = ("text",)  # types of parts that are text

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type not in self.texts or self.text is None:
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

    unsupported = dict.fromkeys(("audio", "function_call", "images", "refusal", "videos"), ASKS_NOTHING)

    role: str
    content: str | Annotated[list[ContentPart], FirstMistake()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[GivenCall], FirstMistake()] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = Field(None, description="The answer goes on with this message, as DeepSeek has it.")
    partial: bool | None = Field(None, description="The same, as Moonshot has it.")

    @property
    def text(self) -> str:
        """The text of the content."""
        return text_of([dict(part) for part in self.content] if isinstance(self.content, list) else self.content)

    @model_validator(mode="after")
    def _has_role(self) -> Self:
        if self.role == "function":
            raise unsupported("the role function", "use tool_calls and the role tool")
        return self


class Function(Extensible):
    name: str = Field(pattern=TOOL_NAME)
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


def _lists(objects: list[Any], *names: str) -> list[list[Any]]:
    """The lists that are fields of objects."""
    values = (one.get(name) for one in objects if isinstance(one, dict) for name in names)
    return [value for value in values if isinstance(value, list)]


def bounded(messages: Any) -> Any:
    """The messages themselves. Raises PydanticCustomError if they are so many that merely to read them would take long."""
    if isinstance(messages, list):
        parts = _lists(messages, *_LISTS)
        results = [content for one in parts for content in _lists(one, "content")]  # of tools, in Anthropic's API
        size = sum(map(len, [messages, *parts, *results]))
        if size > MAX_MESSAGES:
            found = {"max_length": MAX_MESSAGES, "actual_length": size}
            raise PydanticCustomError(
                "too_long", "{actual_length} messages, parts and calls; at most {max_length} are taken", found
            )
    return messages


Messages = Annotated[list[ConversationMessage], FirstMistake(), BeforeValidator(bounded)]


class ChatBody(GenerationBody):
    """The body of ``/v1/chat/completions``."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="End with the beginning of an answer. Default: true.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message, without add_generation_prompt.")
    add_special_tokens: bool | None = Field(None, description="Put the tokenizer's own around the prompt. Default: false.")
    echo: bool | None = Field(None, description="Return the last message before the answer, if it is the assistant's.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="With logprobs: most probable tokens.")
    documents: list[dict[str, Any]] | None = Field(None, description="A variable of the chat template.")
    reasoning_effort: str | None = Field(None, description="A variable of the chat template; with none, no thoughts.")
    thinking_token_budget: int | None = Field(None, ge=0, description="Tokens after which a thought is ended.")
    include_reasoning: bool | None = Field(None, description="Send thoughts. Default: true.")
    tools: Tools | None = Field(None, description=f"What the model may call, at most {MAX_TOOLS}.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(None, description="Default: auto.")
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer. Default: true.")


class TokenizeBody(Body):
    """The body of ``/tokenize``: either a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    add_generation_prompt: bool | None = Field(None, description="Default: true.")
    continue_final_message: bool | None = Field(None, description="End with the last message, without add_generation_prompt.")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of ``/detokenize``."""

    tokens: TokenIds


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="For a model that thinks.")


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None = Field(description="Null if it is not one of the most probable tokens.")
    decoded_token: str


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = Field(None, description="The stop string or token that ended the answer.")
    threads: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(None, description="From token id.")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


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
    reasoning_content: str | None = Field(None, description="The model's thoughts. Missing if there are none.")
    reasoning: str | None = Field(None, description="The same.")
    tool_calls: list[ToolCall] | None = Field(None, description="Missing if there are none.")


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = Field(None, description="The stop string or token that ended the answer.")
    threads: dict[str, Any] | None = None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = Field(None, description="Directory of the checkpoint; null while it is loading.")
    parent: str | None = None
    max_model_len: int | None = Field(None, description="Tokens of a prompt and its answer; null while it is loading.")
    context_length: int | None = Field(None, description="The same.")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class LoadedModel(BaseModel):
    """LM Studio's; empty texts for what is not known."""

    id: str
    object: Literal["model"]
    type: Literal["llm"]
    publisher: str
    arch: str
    compatibility_type: str
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int | None
    loaded_context_length: int | None
    capabilities: list[str]


class LoadedModelList(BaseModel):
    object: Literal["list"]
    data: list[LoadedModel]


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
