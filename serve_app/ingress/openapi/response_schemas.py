"""The schemas of answers, for the API's description only.

Nothing is checked against these at run time; tests compare them with real answers.

Sources: OpenAI's and Anthropic's API references; llama.cpp, tools/server/README.md; ollama,
api/types.go.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Json = dict[str, Any]


class CompletionUsage(BaseModel):
    """Tokens of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class TextChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: Json | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """OpenAI's completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: CompletionUsage
    timings: Json = {}


class CalledFunction(BaseModel):
    """The called function."""

    name: str
    arguments: str


class Call(BaseModel):
    """One of `tool_calls`."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[Call] = []


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: Json | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """OpenAI's chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    timings: Json = {}


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(BaseModel):
    """OpenAI's response; the request's own fields are given back, too."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[Json]
    incomplete_details: Json | None
    error: Json | None
    metadata: dict[str, str]
    usage: ResponseUsage | None


class DeletedResponse(BaseModel):
    """A response that is kept no more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItems(BaseModel):
    """Items of the conversation that a response answers."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicUsage(BaseModel):
    """Tokens of a message; `input_tokens` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class Embedding(BaseModel):
    """One text's vector: numbers, or base64 of little-endian 32-bit floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    """OpenAI's embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: dict[str, int]


class LlamaEmbedding(BaseModel):
    """llama-server's embedding: a list of one vector."""

    index: int
    embedding: list[list[float]]


class Rank(BaseModel):
    """How relevant a document is."""

    index: int
    relevance_score: float


class Ranking(BaseModel):
    """Documents by their relevance."""

    object: Literal["list"]
    model: str
    results: list[Rank]
    usage: dict[str, int]


class LlamaCompletion(BaseModel):
    """llama-server's completion, or the `response_fields` of it."""

    index: int = 0
    content: str = ""
    tokens: list[int] = []
    stop: bool = True
    model: str = ""
    stop_type: Literal["eos", "limit", "word"] = "eos"
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    timings: Json = {}


class TokenPiece(BaseModel):
    """A token and its text, or its bytes if they are none."""

    id: int
    piece: str | list[int]


class TokenList(BaseModel):
    """A text's tokens."""

    tokens: list[int] | list[TokenPiece]


class Content(BaseModel):
    """A text."""

    content: str


class Prompt(BaseModel):
    """A chat as text."""

    prompt: str


class OllamaEnd(BaseModel):
    """The fields of an answer's last line; durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] = "stop"
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_cached_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    logprobs: list[Json] = []


class OllamaSaid(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[Json] = []


class OllamaChat(OllamaEnd):
    """Ollama's answer to a chat, or a line of it."""

    message: OllamaSaid


class OllamaCompletion(OllamaEnd):
    """Ollama's answer to a prompt, or a line of it."""

    response: str
    thinking: str = ""
    context: list[int] = []


class OllamaVectors(BaseModel):
    """Ollama's embeddings."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaVector(BaseModel):
    """Ollama's embedding of one text."""

    embedding: list[float]


class OllamaModelInfo(BaseModel):
    """The details and capabilities of a model."""

    modelfile: str
    parameters: str
    template: str
    license: str
    details: Json
    model_info: Json
    capabilities: list[str]
    modified_at: str


class OllamaModels(BaseModel):
    """Models, as Ollama lists them."""

    models: list[Json]
