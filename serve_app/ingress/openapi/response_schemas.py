"""The schemas of answers, for the API's description only.

Nothing is checked against these at run time; tests compare them with real answers.

Sources: OpenAI's and Anthropic's API references; llama.cpp, tools/server/README.md; ollama,
api/types.go.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import create_model

Json = dict[str, Any]


def _schema(name: str, base: Any = None, /, *, about: str | None = None, **fields: Any) -> Any:
    """The schema of an object: fields that are always there by their types, and others by pairs of a type
    and the value that they have when they are missing."""
    required = {field: (kind, ...) for field, kind in fields.items() if not isinstance(kind, tuple)}
    return create_model(name, __base__=base, __doc__=about, **fields | required)


def _many(kind: Any) -> Any:
    return list[kind]


_NOTE, _COUNT = (str, ""), (int, 0)
_JSONS: Any = (list[Json], [])

CompletionUsage = _schema(
    "CompletionUsage",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=dict[str, int],
    completion_tokens_details=dict[str, int],
)
_COMPLETION = _schema(
    "OpenAICompletion",
    id=str,
    created=int,
    model=str,
    system_fingerprint=str,
    usage=CompletionUsage,
    timings=(Json, {}),
)
_FINISHED = Literal["stop", "length"]
TextChoice = _schema(
    "TextChoice", index=int, text=str, logprobs=Json | None, finish_reason=_FINISHED
)
Completion = _schema(
    "Completion", _COMPLETION, object=Literal["text_completion"], choices=_many(TextChoice)
)
CalledFunction = _schema("CalledFunction", name=str, arguments=str)
Call = _schema("Call", id=str, type=Literal["function"], function=CalledFunction)
AssistantMessage = _schema(
    "AssistantMessage",
    role=Literal["assistant"],
    content=str | None,
    reasoning_content=_NOTE,
    tool_calls=(_many(Call), []),
)
ChatChoice = _schema(
    "ChatChoice",
    index=int,
    message=AssistantMessage,
    logprobs=Json | None,
    finish_reason=Literal["stop", "length", "tool_calls"],
)
ChatCompletion = _schema(
    "ChatCompletion", _COMPLETION, object=Literal["chat.completion"], choices=_many(ChatChoice)
)
ResponseUsage = _schema(
    "ResponseUsage",
    input_tokens=int,
    input_tokens_details=dict[str, int],
    output_tokens=int,
    output_tokens_details=dict[str, int],
    total_tokens=int,
)
Response = _schema(
    "Response",
    about="OpenAI's response; the request's own fields are given back, too.",
    id=str,
    object=Literal["response"],
    created_at=int,
    completed_at=int | None,
    status=Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"],
    model=str,
    output=list[Json],
    incomplete_details=Json | None,
    error=Json | None,
    metadata=dict[str, str],
    usage=ResponseUsage | None,
)
DeletedResponse = _schema(
    "DeletedResponse", id=str, object=Literal["response"], deleted=Literal[True]
)
ResponseItems = _schema(
    "ResponseItems",
    object=Literal["list"],
    data=list[Json],
    first_id=str | None,
    last_id=str | None,
    has_more=bool,
)
AnthropicUsage = _schema(
    "AnthropicUsage",
    about="Tokens of a message; `input_tokens` are those that were not cached.",
    input_tokens=int,
    cache_creation_input_tokens=int,
    cache_read_input_tokens=int,
    output_tokens=int,
)
AnthropicMessage = _schema(
    "AnthropicMessage",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=list[Json],
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
    stop_sequence=str | None,
    usage=AnthropicUsage,
)
Embedding = _schema(
    "Embedding",
    about="One text's vector: numbers, or base64 of little-endian 32-bit floats.",
    object=Literal["embedding"],
    index=int,
    embedding=list[float] | str,
)
_LIST = _schema("OpenAIList", object=Literal["list"], model=str, usage=dict[str, int])
Embeddings = _schema("Embeddings", _LIST, data=_many(Embedding))
LlamaEmbedding = _schema("LlamaEmbedding", index=int, embedding=list[list[float]])
Rank = _schema("Rank", index=int, relevance_score=float, document=(Json, {}))
Score = _schema("Score", index=int, object=Literal["score"], score=float)
Scores = _schema("Scores", _LIST, data=_many(Score))
Ranking = _schema("Ranking", _LIST, results=_many(Rank))
Transcription = _schema(
    "Transcription",
    about="By `response_format`: `text`, `srt` and `vtt` are no JSON, and `verbose_json` has more.",
    text=str,
    usage=Json,
    task=_NOTE,
    language=_NOTE,
    duration=(float, 0.0),
    segments=_JSONS,
)
LlamaCompletion = _schema(
    "LlamaCompletion",
    about="llama-server's completion, or the `response_fields` of it.",
    index=_COUNT,
    content=_NOTE,
    tokens=(list[int], []),
    stop=(bool, True),
    model=_NOTE,
    stop_type=(Literal["eos", "limit", "word"], "eos"),
    tokens_predicted=_COUNT,
    tokens_evaluated=_COUNT,
    timings=(Json, {}),
)
TokenPiece = _schema(
    "TokenPiece",
    about="A token and its text, or its bytes if they are none.",
    id=int,
    piece=str | list[int],
)
TokenList = _schema("TokenList", tokens=list[int] | _many(TokenPiece))
Content = _schema("Content", content=str)
Prompt = _schema("Prompt", prompt=str)
OllamaEnd = _schema(
    "OllamaEnd",
    about="The fields of an answer's last line; durations are in nanoseconds.",
    model=str,
    created_at=str,
    done=bool,
    done_reason=(Literal["stop", "length", "load", "unload"], "stop"),
    total_duration=_COUNT,
    load_duration=_COUNT,
    prompt_eval_count=_COUNT,
    prompt_eval_cached_count=_COUNT,
    prompt_eval_duration=_COUNT,
    eval_count=_COUNT,
    eval_duration=_COUNT,
    logprobs=_JSONS,
)
OllamaSaid = _schema(
    "OllamaSaid", role=Literal["assistant"], content=str, thinking=_NOTE, tool_calls=_JSONS
)
OllamaChat = _schema("OllamaChat", OllamaEnd, message=OllamaSaid)
OllamaCompletion = _schema(
    "OllamaCompletion", OllamaEnd, response=str, thinking=_NOTE, context=(list[int], [])
)
OllamaVectors = _schema(
    "OllamaVectors",
    model=str,
    embeddings=list[list[float]],
    total_duration=_COUNT,
    load_duration=_COUNT,
    prompt_eval_count=_COUNT,
)
OllamaVector = _schema("OllamaVector", embedding=list[float])
OllamaModelInfo = _schema(
    "OllamaModelInfo",
    modelfile=str,
    parameters=str,
    template=str,
    license=str,
    details=Json,
    model_info=Json,
    capabilities=list[str],
    modified_at=str,
)
UsageResult = _schema(
    "UsageResult",
    about="Sums of a bucket of time, of one value of each dimension that is asked for.",
    object=Literal["organization.usage.completions.result"],
    input_tokens=int,
    output_tokens=int,
    input_cached_tokens=int,
    num_model_requests=int,
    api_key_id=str | None,
    model=str | None,
    endpoint=str | None,
    batch=bool | None,
)
UsageBucket = _schema(
    "UsageBucket",
    object=Literal["bucket"],
    start_time=int,
    end_time=int,
    results=_many(UsageResult),
)
UsagePage = _schema(
    "UsagePage",
    object=Literal["page"],
    data=_many(UsageBucket),
    has_more=bool,
    next_page=str | None,
)
