"""What a request may say: OpenAI's fields that mean something here, and those that can be ignored.

A field that would change the answer and is not implemented is refused unless it asks for nothing. Unknown fields are
refused. Top-level nulls, and those of messages, count as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from safe_llm.types import MAX_STOP_CHARS, MAX_STOP_STRINGS

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "GenerationBody",
    "JsonSchemaFormat",
]

MAX_MESSAGES = 2048
MAX_TOOLS = 128
INT64 = 2**63


def _only(*neutral: object) -> AfterValidator:
    """Let only the values through that ask for nothing."""

    def check(value: Any) -> Any:
        if value not in neutral:
            raise PydanticCustomError("unsupported_parameter", "is not supported here; leave it out")
        return value

    return AfterValidator(check)


class Body(BaseModel):
    """Base of all that a request consists of: exact JSON types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Count = Annotated[int, Field(ge=1, lt=INT64)]


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body):
    """Fields of both kinds of requests.

    Attributes:
        model: A name that `/v1/models` lists.
        n: How many answers.
        max_tokens: Most tokens of an answer.
        min_tokens: No end before this many tokens. Not OpenAI's.
        temperature: 0 is greedy.
        top_p: Nucleus mass; 0 is greedy.
        seed: Makes sampling reproducible; the answers of one request count on from it.
        stop: Strings that end an answer.
        stream: Send the answer as it comes.
        stream_options: How.
    """

    model: str
    n: Count | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, _only(0)] | None = None
    presence_penalty: Annotated[float, _only(0)] | None = None
    logit_bias: Annotated[dict[str, float], _only({})] | None = None
    user: str | None = None


# ---------------------------------------------------------------------- chat


class TextPart(Body):
    """A part of a message; members read text only."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """What an assistant called."""

    name: str
    arguments: str


class CalledTool(Body):
    """A call in an earlier message of the assistant."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message; fields of an assistant's answer may be sent back as they came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None


class Function(Body):
    """A tool's name and the JSON Schema of its arguments, which are always enforced."""

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Which tool."""

    name: str


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """The JSON Schema of an answer, which is always enforced."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[str], _only(["text"])] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


# ---------------------------------------------------------------------- completions


class CompletionRequest(GenerationBody):
    """Body of `/v1/completions`: texts, continued without a template."""

    prompt: str | Annotated[list[str], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, _only(1)] | None = None
    echo: Annotated[bool, _only(False)] | None = None
    suffix: Annotated[str, _only("")] | None = None
