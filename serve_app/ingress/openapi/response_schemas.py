"""The schemas of answers, for the API's description only.

Nothing is checked against these at run time; tests compare them with real answers.

Sources: OpenAI's and Anthropic's API references; llama.cpp, tools/server/README.md; ollama, api/types.go.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import create_model

Json = dict[str, Any]


def _schema(
    name: str,
    base: Any = None,
    /,
    *,
    about: str | None = None,
    texts: str = "",
    counts: str = "",
    **fields: Any,
) -> Any:
    """The schema of an object: the names of its `texts` and `counts`, with a question mark where one may be
    missing, and other fields by their types, or by pairs of a type and a default."""
    plain: dict[str, Any] = {}
    for kind, names, default in ((str, texts, ""), (int, counts, 0)):
        for field in names.split():
            plain[field.rstrip("?")] = (kind, default if field.endswith("?") else ...)
    typed = {
        field: kind if isinstance(kind, tuple) else (kind, ...) for field, kind in fields.items()
    }
    return create_model(name, __base__=base, __doc__=about, **plain | typed)


def _many(kind: Any) -> Any:
    return list[kind]


_JSONS: Any = (list[Json], [])
_JSON: Any = (Json, {})
_TOKENS: Any = (list[int], [])
_DETAILS = dict[str, int]

CompletionUsage = _schema(
    "CompletionUsage",
    counts="prompt_tokens completion_tokens total_tokens",
    prompt_tokens_details=_DETAILS,
    completion_tokens_details=_DETAILS,
)
_COMPLETION = _schema(
    "OpenAICompletion",
    texts="id model system_fingerprint",
    counts="created",
    usage=CompletionUsage,
    timings=_JSON,
)
_CHOICE = _schema("Choice", counts="index", logprobs=Json | None)
_FINISHED = Literal["stop", "length"]
TextChoice = _schema("TextChoice", _CHOICE, texts="text", finish_reason=_FINISHED)
Completion = _schema(
    "Completion", _COMPLETION, object=Literal["text_completion"], choices=_many(TextChoice)
)
CalledFunction = _schema("CalledFunction", texts="name arguments")
Call = _schema("Call", texts="id", type=Literal["function"], function=CalledFunction)
AssistantMessage = _schema(
    "AssistantMessage",
    texts="reasoning_content?",
    role=Literal["assistant"],
    content=str | None,
    tool_calls=(_many(Call), []),
)
ChatChoice = _schema(
    "ChatChoice",
    _CHOICE,
    message=AssistantMessage,
    finish_reason=Literal["stop", "length", "tool_calls"],
)
ChatCompletion = _schema(
    "ChatCompletion", _COMPLETION, object=Literal["chat.completion"], choices=_many(ChatChoice)
)
ResponseUsage = _schema(
    "ResponseUsage",
    counts="input_tokens output_tokens total_tokens",
    input_tokens_details=_DETAILS,
    output_tokens_details=_DETAILS,
)
Response = _schema(
    "Response",
    about="OpenAI's response; the request's own fields are given back, too.",
    texts="id model",
    counts="created_at",
    object=Literal["response"],
    completed_at=int | None,
    status=Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"],
    output=list[Json],
    incomplete_details=Json | None,
    error=Json | None,
    metadata=dict[str, str],
    usage=ResponseUsage | None,
)
DeletedResponse = _schema(
    "DeletedResponse", texts="id", object=Literal["response"], deleted=Literal[True]
)
_PAGE = _schema("ResultPage", has_more=bool)
ResponseItems = _schema(
    "ResponseItems",
    _PAGE,
    object=Literal["list"],
    data=list[Json],
    first_id=str | None,
    last_id=str | None,
)
AnthropicUsage = _schema(
    "AnthropicUsage",
    about="Tokens of a message; `input_tokens` are those that were not cached.",
    counts="input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens",
)
AnthropicMessage = _schema(
    "AnthropicMessage",
    texts="id model",
    type=Literal["message"],
    role=Literal["assistant"],
    content=list[Json],
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
    stop_sequence=str | None,
    usage=AnthropicUsage,
)
Embedding = _schema(
    "Embedding",
    about="One text's vector: numbers, or base64 of little-endian 32-bit floats.",
    counts="index",
    object=Literal["embedding"],
    embedding=list[float] | str,
)
_LIST = _schema("OpenAIList", texts="model", object=Literal["list"], usage=_DETAILS)
Embeddings = _schema("Embeddings", _LIST, data=_many(Embedding))
LlamaEmbedding = _schema("LlamaEmbedding", counts="index", embedding=list[list[float]])
Rank = _schema("Rank", counts="index", relevance_score=float, document=_JSON)
Score = _schema("Score", counts="index", object=Literal["score"], score=float)
Scores = _schema("Scores", _LIST, data=_many(Score))
Class = _schema("Class", texts="label", counts="index num_classes", probs=list[float])
Classes = _schema("Classes", _LIST, texts="id", counts="created", data=_many(Class))
Ranking = _schema("Ranking", _LIST, results=_many(Rank))
Transcription = _schema(
    "Transcription",
    about="By `response_format`: `text`, `srt` and `vtt` are no JSON, and `verbose_json` has more.",
    texts="text task? language?",
    usage=Json,
    duration=(float, 0.0),
    segments=_JSONS,
)
LlamaCompletion = _schema(
    "LlamaCompletion",
    about="llama-server's completion, or the `response_fields` of it.",
    texts="content? model?",
    counts="index? tokens_predicted? tokens_evaluated?",
    tokens=_TOKENS,
    stop=(bool, True),
    stop_type=(Literal["eos", "limit", "word"], "eos"),
    timings=_JSON,
)
TokenPiece = _schema(
    "TokenPiece",
    about="A token and its text, or its bytes if they are none.",
    counts="id",
    piece=str | list[int],
)
TokenList = _schema("TokenList", tokens=list[int] | _many(TokenPiece))
Content = _schema("Content", texts="content")
Prompt = _schema("Prompt", texts="prompt")
OllamaEnd = _schema(
    "OllamaEnd",
    about="The fields of an answer's last line; durations are in nanoseconds.",
    texts="model created_at",
    counts="total_duration? load_duration? prompt_eval_count? prompt_eval_cached_count? "
    "prompt_eval_duration? eval_count? eval_duration?",
    done=bool,
    done_reason=(Literal["stop", "length", "load", "unload"], "stop"),
    logprobs=_JSONS,
)
OllamaSaid = _schema(
    "OllamaSaid", texts="content thinking?", role=Literal["assistant"], tool_calls=_JSONS
)
OllamaChat = _schema("OllamaChat", OllamaEnd, message=OllamaSaid)
OllamaCompletion = _schema(
    "OllamaCompletion", OllamaEnd, texts="response thinking?", context=_TOKENS
)
OllamaVectors = _schema(
    "OllamaVectors",
    texts="model",
    counts="total_duration? load_duration? prompt_eval_count?",
    embeddings=list[list[float]],
)
OllamaVector = _schema("OllamaVector", embedding=list[float])
OllamaModelInfo = _schema(
    "OllamaModelInfo",
    texts="modelfile parameters template license modified_at",
    details=Json,
    model_info=Json,
    capabilities=list[str],
)
UsageResult = _schema(
    "UsageResult",
    about="Sums of a bucket of time, of one value of each dimension that is asked for.",
    counts="input_tokens output_tokens input_cached_tokens num_model_requests",
    object=Literal["organization.usage.completions.result"],
    api_key_id=str | None,
    model=str | None,
    endpoint=str | None,
    batch=bool | None,
)
UsageBucket = _schema(
    "UsageBucket",
    counts="start_time end_time",
    object=Literal["bucket"],
    results=_many(UsageResult),
)
UsagePage = _schema(
    "UsagePage", _PAGE, object=Literal["page"], data=_many(UsageBucket), next_page=str | None
)
