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

from serve_app.config.keys import ApiKey
from serve_app.ingress.anthropic.preparation import AnthropicErrorResponse
from serve_app.ingress.audio.preparation import TranscriptionRequest
from serve_app.ingress.http.dependencies import preparations
from serve_app.ingress.http.request_model import body_type
from serve_app.ingress.llama_server.protocol import AdapterChange, LoraAdapter, SlotRequest
from serve_app.ingress.model_control import PullProgress
from serve_app.ingress.ollama.protocol import OllamaErrorResponse
from serve_app.ingress.openai.answers import ErrorResponse
from serve_app.ingress.openapi import response_schemas as d
from serve_app.ingress.responses.preparation import ResponsesRequest

Json = dict[str, Any]


@dataclass(frozen=True)
class Route:
    """The description of one route, as far as its function's types do not tell it."""

    answer: Any = None
    """The type of the answer, if the function returns a finished response; `bytes` is a file."""
    example: Json | None = None
    """A body that the built-in model answers."""
    body: Any = None
    """The type of its body, if it is not in the types of the function that prepares it. FastAPI knows no
    bodies, as workers read them."""
    streams: bool = False
    """Whether `stream` asks for server-sent events."""
    line: Any = None
    """The type of a line, if the answer comes as newline-delimited JSON unless `stream` is false."""
    form: Json | None = None
    """The schema of its body, if that is a form."""
    texts: tuple[str, ...] = ()
    """The media types of answers that are texts, which a field or parameter asks for."""


_ASKED = {"role": "user", "content": "What is the capital of Portugal?"}
_CHAT = {"messages": [_ASKED], "max_tokens": 32}
_SPEECH = TranscriptionRequest.model_json_schema()
_SPEECH["properties"]["file"] = {"type": "string", "format": "binary"}
_SPEECH["required"] = ["file"]
_SUBTITLES = ("text/plain", "text/vtt")

ROUTES = {
    "completions": Route(
        d.Completion, {"prompt": "The capital of Portugal is", "max_tokens": 8}, streams=True
    ),
    "chat_completions": Route(d.ChatCompletion, _CHAT, streams=True),
    "input_tokens": Route(example=_CHAT),
    "responses": Route(
        d.Response,
        {"input": "Tell me a story.", "max_output_tokens": 32},
        ResponsesRequest,
        streams=True,
    ),
    "response_input_tokens": Route(body=ResponsesRequest, example={"input": "Tell me a story."}),
    "get_response": Route(d.Response, streams=True),
    "delete_response": Route(d.DeletedResponse),
    "cancel_response": Route(d.Response),
    "response_input_items": Route(d.ResponseItems),
    "messages": Route(d.AnthropicMessage, _CHAT, streams=True),
    "count_tokens": Route(example={"messages": [_ASKED]}),
    "embeddings": Route(d.Embeddings, {"input": ["A fox.", "A brave fox."]}),
    "embedding": Route(list[d.LlamaEmbedding], {"input": "A fox."}),
    "rerank": Route(
        d.Ranking, {"query": "Where is Lisbon?", "documents": ["In Portugal.", "A fox."]}
    ),
    "tei_embed": Route(list[list[float]], {"inputs": ["A fox."]}),
    "score": Route(d.Scores, {"queries": "Where is Lisbon?", "documents": ["In Portugal."]}),
    "classify": Route(d.Classes, {"input": ["A fox.", "A brave fox."]}),
    "completion": Route(
        d.LlamaCompletion | list[d.LlamaCompletion],
        {"prompt": "The capital of Portugal is", "n_predict": 8},
        streams=True,
    ),
    "infill": Route(
        d.LlamaCompletion,
        {
            "input_prefix": "def one():\n",
            "input_suffix": "\n",
            "input_extra": [{"filename": "two.py", "text": "def two():\n    return 2\n"}],
            "n_predict": 8,
        },
        streams=True,
    ),
    "tokenize": Route(d.TokenList, {"content": "A fox.", "with_pieces": True}),
    "detokenize": Route(d.Content, {"tokens": [65, 66]}),
    "apply_template": Route(d.Prompt, {"messages": [_ASKED]}),
    "ollama_chat": Route(d.OllamaChat, {"messages": [_ASKED], "stream": False}, line=d.OllamaChat),
    "ollama_generate": Route(
        d.OllamaCompletion, {"prompt": "Tell me a story.", "stream": False}, line=d.OllamaCompletion
    ),
    "ollama_embed": Route(d.OllamaVectors, {"input": ["A fox."]}),
    "ollama_embeddings": Route(d.OllamaVector, {"prompt": "A fox."}),
    "ollama_show": Route(d.OllamaModelInfo, {}),
    "ollama_pull": Route(PullProgress, line=PullProgress),
    "ollama_create": Route(PullProgress, line=PullProgress),
    "usage": Route(d.UsagePage, texts=("text/csv",)),
    "create_key": Route(body=ApiKey),
    "create_file": Route(
        form={
            "type": "object",
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"const": "batch"},
                "expires_after[seconds]": {"type": "integer", "minimum": 3600},
            },
            "required": ["file", "purpose"],
        }
    ),
    "transcribe": Route(d.Transcription, form=_SPEECH, streams=True, texts=_SUBTITLES),
    "translate": Route(d.Transcription, form=_SPEECH, streams=True, texts=_SUBTITLES),
    "get_file_content": Route(bytes),
    "live": Route(streams=True),
    "act_on_slot": Route(body=SlotRequest),
    "change_lora_adapters": Route(body=AdapterChange | list[LoraAdapter]),
}
"""The routes by the names of the functions that answer them. FastAPI knows the others."""

_RETRY_AFTER = {
    "Retry-After": {
        "schema": {"type": "integer"},
        "description": "Seconds to wait, if the same request may be answered then.",
    }
}
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
        operation = found["paths"][route.path_format][min(route.methods or ()).lower()]
        about = ROUTES.get(route.name, Route())
        bodies = [about.body] if about.body is not None else map(body_type, preparations(route))
        for body in bodies:
            operation["requestBody"] = _request_body(body, about.example, components["schemas"])
        if about.form is not None:
            content = {"multipart/form-data": {"schema": about.form}}
            operation["requestBody"] = {"content": content, "required": True}
        if route.name != "health":
            operation["security"] = [{name: []} for name in _SECURITY] + [{}]
        success = operation["responses"]["200"] | {"description": "Success."}
        if about.answer is not None or about.streams:
            success["content"] = _content(about, components["schemas"])
        operation["responses"] = {"200": success, **_errors(route.path, components["schemas"])}
    return found


def _request_body(kind: Any, example: Json | None, schemas: Json) -> Json:
    content: Json = {"schema": _schema(kind, schemas, "validation")}
    if example is not None:
        content["example"] = example
    required = {} if kind is SlotRequest else {"required": True}
    return {"content": {"application/json": content}, **required}


def _content(about: Route, schemas: Json) -> Json:
    if about.answer is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    content = {}
    if about.answer is not None:
        content["application/json"] = {"schema": _schema(about.answer, schemas)}
    if about.line is not None:
        content["application/x-ndjson"] = {"schema": _schema(about.line, schemas)}
    content |= {media_type: {"schema": {"type": "string"}} for media_type in about.texts}
    return content | ({"text/event-stream": _EVENTS} if about.streams else {})


def _errors(path: str, schemas: Json) -> Json:
    """The errors, whose shape depends on the path. Their codes say what is wrong."""
    shapes = {"/v1/messages": AnthropicErrorResponse, "/api/": OllamaErrorResponse}
    of_path = (shape for prefix, shape in shapes.items() if path.startswith(prefix))
    schema = _schema(next(of_path, ErrorResponse), schemas)
    content = {"headers": _RETRY_AFTER, "content": {"application/json": {"schema": schema}}}
    return {
        "4XX": {"description": "The request is wrong, or not allowed now.", **content},
        "5XX": {"description": "The server cannot do what is asked for, or failed.", **content},
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
