"""The API's description: what FastAPI cannot know of the routes, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import TaggedUnionSchema

from serve_app.ingress.anthropic.preparation import (
    AnthropicErrorResponse,
    CountTokensRequest,
    MessagesRequest,
)
from serve_app.ingress.batch.objects import (
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from serve_app.ingress.embeddings.preparation import (
    EmbeddingsRequest,
    LlamaEmbeddingRequest,
    RerankRequest,
)
from serve_app.ingress.llama_server.protocol import (
    AdapterChange,
    DetokenizeRequest,
    InfillRequest,
    LlamaCompletionRequest,
    LoraAdapter,
    ModelRequest,
    SlotRequest,
    TokenizeRequest,
)
from serve_app.ingress.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaErrorResponse,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from serve_app.ingress.openai.answers import ErrorResponse, InputTokens, ModelCard, ModelList
from serve_app.ingress.openai.preparation import ChatCompletionRequest, CompletionRequest
from serve_app.ingress.openapi import response_schemas as d
from serve_app.ingress.responses.preparation import ResponsesRequest
from serve_app.ingress.versions.preparation import RollbackRequest, VersionList, WeightsRequest

Json = dict[str, Any]


@dataclass(frozen=True)
class Route:
    """The answers of one route's function."""

    answer: Any
    """The type of the answer; `str` is plain text, and None nothing but events."""
    body: Any = None
    """The type of its body, if it has one. Workers read it, so FastAPI knows nothing of it."""
    example: Json | None = None
    """A body that the built-in model answers."""
    streams: bool = False
    """Whether `stream` asks for server-sent events."""
    line: Any = None
    """The type of a line, if the answer comes as newline-delimited JSON unless `stream` is false."""
    asks_engine: bool = True
    """Whether it fails without one."""
    form: Json | None = None
    """The schema of its body, if that is a form."""


_ASKED = {"role": "user", "content": "What is the capital of Portugal?"}
_CHAT = {"messages": [_ASKED], "max_tokens": 32}

ROUTES = {
    "completions": Route(
        d.Completion,
        CompletionRequest,
        {"prompt": "The capital of Portugal is", "max_tokens": 8},
        streams=True,
    ),
    "chat_completions": Route(d.ChatCompletion, ChatCompletionRequest, _CHAT, streams=True),
    "input_tokens": Route(InputTokens, ChatCompletionRequest, _CHAT),
    "responses": Route(
        d.Response,
        ResponsesRequest,
        {"input": "Tell me a story.", "max_output_tokens": 32},
        streams=True,
    ),
    "response_input_tokens": Route(InputTokens, ResponsesRequest, {"input": "Tell me a story."}),
    "get_response": Route(d.Response, streams=True),
    "delete_response": Route(d.DeletedResponse, asks_engine=False),
    "cancel_response": Route(d.Response, asks_engine=False),
    "response_input_items": Route(d.ResponseItems, asks_engine=False),
    "messages": Route(d.AnthropicMessage, MessagesRequest, _CHAT, streams=True),
    "count_tokens": Route(
        dict[Literal["input_tokens"], int],
        CountTokensRequest,
        {"messages": [_ASKED]},
    ),
    "embeddings": Route(d.Embeddings, EmbeddingsRequest, {"input": ["A fox.", "A brave fox."]}),
    "embedding": Route(list[d.LlamaEmbedding], LlamaEmbeddingRequest, {"content": "A fox."}),
    "rerank": Route(
        d.Ranking,
        RerankRequest,
        {"query": "Where is Lisbon?", "documents": ["In Portugal.", "A fox."]},
    ),
    "completion": Route(
        d.LlamaCompletion | list[d.LlamaCompletion],
        LlamaCompletionRequest,
        {"prompt": "The capital of Portugal is", "n_predict": 8},
        streams=True,
    ),
    "infill": Route(
        d.LlamaCompletion,
        InfillRequest,
        {
            "input_prefix": "def one():\n",
            "input_suffix": "\n",
            "input_extra": [{"filename": "two.py", "text": "def two():\n    return 2\n"}],
            "n_predict": 8,
        },
        streams=True,
    ),
    "tokenize": Route(
        d.TokenList, TokenizeRequest, {"content": "A fox.", "with_pieces": True}, asks_engine=False
    ),
    "detokenize": Route(d.Content, DetokenizeRequest, {"tokens": [65, 66]}, asks_engine=False),
    "apply_template": Route(
        d.Prompt, ChatCompletionRequest, {"messages": [_ASKED]}, asks_engine=False
    ),
    "ollama_chat": Route(
        d.OllamaChat,
        OllamaChatRequest,
        {"messages": [_ASKED], "stream": False},
        line=d.OllamaChat,
    ),
    "ollama_generate": Route(
        d.OllamaCompletion,
        OllamaGenerateRequest,
        {"prompt": "Tell me a story.", "stream": False},
        line=d.OllamaCompletion,
    ),
    "ollama_embed": Route(d.OllamaVectors, OllamaEmbedRequest, {"input": ["A fox."]}),
    "ollama_embeddings": Route(d.OllamaVector, OllamaEmbeddingsRequest, {"prompt": "A fox."}),
    "ollama_show": Route(d.OllamaModelInfo, OllamaShowRequest, {}, asks_engine=False),
    "ollama_tags": Route(d.OllamaModels, asks_engine=False),
    "ollama_ps": Route(d.OllamaModels, asks_engine=False),
    "ollama_version": Route(dict[Literal["version"], str], asks_engine=False),
    "create_file": Route(
        FileObject,
        asks_engine=False,
        form={
            "type": "object",
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"const": "batch"},
                "expires_after[seconds]": {"type": "integer", "minimum": 3600},
            },
            "required": ["file", "purpose"],
        },
    ),
    "list_files": Route(FileList, asks_engine=False),
    "get_file": Route(FileObject, asks_engine=False),
    "get_file_content": Route(bytes, asks_engine=False),
    "delete_file": Route(DeletedFile, asks_engine=False),
    "create_batch": Route(BatchObject, BatchRequest, asks_engine=False),
    "list_batches": Route(BatchList, asks_engine=False),
    "get_batch": Route(BatchObject, asks_engine=False),
    "cancel_batch": Route(BatchObject, asks_engine=False),
    "list_models": Route(ModelList, asks_engine=False),
    "get_model": Route(ModelCard, asks_engine=False),
    "stats": Route(Json, asks_engine=False),
    "explain": Route(Json, asks_engine=False),
    "live": Route(None, asks_engine=False),
    "health": Route(dict[Literal["status"], Literal["ok"]], asks_engine=False),
    "props": Route(Json, asks_engine=False),
    "metrics": Route(str, asks_engine=False),
    "slots": Route(list[Json]),
    "act_on_slot": Route(Json, SlotRequest),
    "load_model": Route(dict[Literal["success"], bool], ModelRequest),
    "unload_model": Route(dict[Literal["success"], bool], ModelRequest, asks_engine=False),
    "change_weights": Route(VersionList, WeightsRequest, asks_engine=False),
    "roll_back": Route(VersionList, RollbackRequest, asks_engine=False),
    "lora_adapters": Route(list[Json], asks_engine=False),
    "change_lora_adapters": Route(
        dict[Literal["success"], bool], AdapterChange | list[LoraAdapter], asks_engine=False
    ),
}
"""The routes by the names of the functions that answer them."""

_OF_KEPT = ("get_response", "cancel_response", "response_input_items")

_STATUSES = {
    400: "The request is wrong: the same request will never work.",
    401: "No API key, or none that is valid here.",
    403: "Known, and not allowed: see the code.",
    404: "No such model, request, file or batch.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "The API key has used up what it may, or the queue is full.",
    500: "The server failed to handle this request.",
    501: "The model, or the configuration, has not what the request needs.",
    503: "No engine is up, or one does not answer.",
    507: "The folder for slots has no room.",
}
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
_EVENTS = {
    "schema": {
        "type": "object",
        "description": "One server-sent event; of routes that take it, with `stream`.",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["data"],
    }
}
_SECURITY: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "OpenAI's way to send a key."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The ways to send a key. Nobody needs one if there is no API key file."""


def install(app: FastAPI) -> None:
    def describe() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _described(app: FastAPI) -> Json:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = found["components"]
    components["securitySchemes"] = _SECURITY
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which are never given
        components["schemas"].pop(name, None)
    for route in app.routes:
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        method = min(route.methods or ())
        operation = found["paths"][route.path_format][method.lower()]
        about = ROUTES[route.name]
        if about.body is not None:
            operation["requestBody"] = _request_body(about, components["schemas"])
        elif about.form is not None:
            content = {"multipart/form-data": {"schema": about.form}}
            operation["requestBody"] = {"content": content, "required": True}
        if route.name != "health":
            operation["security"] = [{name: []} for name in _SECURITY] + [{}]
        operation["responses"] = {
            "200": {"description": "Success.", "content": _content(about, components["schemas"])},
            **_errors(route, operation, components["schemas"]),
        }
    return found


def _request_body(about: Route, schemas: Json) -> Json:
    schema = _schema(about.body, schemas, "validation")
    example = {} if about.example is None else {"example": about.example}
    optional = about.body is SlotRequest
    return {
        "content": {"application/json": {"schema": schema, **example}},
        **({} if optional else {"required": True}),
    }


def _content(about: Route, schemas: Json) -> Json:
    if about.answer is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    if about.answer is bytes:
        schema = {"type": "string", "format": "binary"}
        return {"application/octet-stream": {"schema": schema}}
    if about.answer is None:
        return {"text/event-stream": _EVENTS}
    content = {"application/json": {"schema": _schema(about.answer, schemas)}}
    if about.line is not None:
        content["application/x-ndjson"] = {"schema": _schema(about.line, schemas)}
    return content | {"text/event-stream": _EVENTS} if about.streams else content


def _errors(route: APIRoute, operation: Json, schemas: Json) -> Json:
    """The errors that the route can give, by status."""
    statuses = {500}
    if route.name != "health":
        statuses |= {401, 403, 429, 501}
    if "requestBody" in operation:
        statuses |= {408, 413}
    if route.name == "act_on_slot":
        statuses |= {507}
    acting = ("cancel_batch", "delete_file", *_OF_KEPT)
    asks = any(one["in"] == "query" for one in operation.get("parameters", ()))
    if "requestBody" in operation or asks or route.name in acting:
        statuses |= {400}
    if "requestBody" in operation or operation.get("parameters"):
        statuses |= {404}
    if ROUTES[route.name].asks_engine:
        statuses |= {503}
    shapes = {"/v1/messages": AnthropicErrorResponse, "/api/": OllamaErrorResponse}
    of_path = (shape for path, shape in shapes.items() if route.path.startswith(path))
    schema = _schema(next(of_path, ErrorResponse), schemas)
    return {
        str(status): {
            "description": _STATUSES[status],
            "content": {"application/json": {"schema": schema}},
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in sorted(statuses)
    }


class _Schemas(GenerateJsonSchema):
    """Writes a union with a member for all other kinds as what it is: more than one member may match."""

    def tagged_union_schema(self, schema: TaggedUnionSchema) -> Json:
        written = super().tagged_union_schema(schema)
        if "discriminator" not in written and "oneOf" in written:
            written["anyOf"] = written.pop("oneOf")
        return written


def _schema(
    kind: Any, schemas: Json, mode: Literal["validation", "serialization"] = "serialization"
) -> Json:
    """The JSON schema of a type, whose parts are put among the others."""
    reference = "#/components/schemas/{model}"
    schema = TypeAdapter(kind).json_schema(
        mode=mode, ref_template=reference, schema_generator=_Schemas
    )
    schemas.update(schema.pop("$defs", {}))
    title = schema.get("title")
    if isinstance(kind, type) and title is not None:
        schemas[title] = schema
        return {"$ref": reference.format(model=title)}
    return schema
