"""Turns bodies of requests for responses into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from serve_app.apis.responses.items import (
    AnyItem,
    ConfigurationItem,
    ConversationItems,
    Items,
    LaterToolsItem,
    ReasoningConfig,
    TextConfig,
    reference_ids,
    turns,
)
from serve_app.apis.responses.serving import ResponseAnswer
from serve_app.apis.responses.store import StoredRequest, StoredResponse, merge, unpack_events
from serve_app.apis.responses.tools import (
    AnyTool,
    CustomTextTool,
    FunctionTool,
    NamespaceTool,
    Tools,
    functions,
)
from serve_app.base.errors import (
    InvalidRequestError,
    ItemNotFoundError,
    ModelNotFoundError,
    PreviousResponseError,
    ResponseNotFoundError,
)
from serve_app.base.sampling import Api, SamplingParams
from serve_app.config import sampling_fields
from serve_app.config.sampling_fields import read_params, takes_sampling
from serve_app.prompt.conversation import Turn
from serve_app.server.answering import preparation
from serve_app.server.answering.openai_tools import plain_choice
from serve_app.server.answering.preparation import Chat, PromptLength
from serve_app.server.answering.requests import (
    MOST_TOKENS,
    AnswerParams,
    ObfuscationOptions,
    PromptCacheOptions,
    RequestMetadata,
    StreamOptions,
    ToolChoice,
    TranslatedChat,
)
from serve_app.server.answering.tools import LaterTools
from serve_app.server.http.request_model import name_ignored, parse_body
from serve_app.server.http.sse import encode_json
from serve_app.server.model_registry import M, ModelInfo, Models, find


@takes_sampling(Api.RESPONSES)
class ResponsesRequest(AnswerParams):
    """POST /v1/responses."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context_management": (None, []),
        "conversation": (None,),
        "moderation": (None,),
        "personality": (None,),
        "prompt": (None,),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
        # SGLang's router adds these to each request.
        "priority": (None, 0),
        "top_k": (None, -1),
        "min_p": (None, 0),
        "repetition_penalty": (None, 1),
    }
    REFUSED: ClassVar[frozenset[str]] = frozenset(
        {"conversation", "moderation", "prompt", "top_logprobs"}
    )
    INERT: ClassVar[frozenset[str]] = frozenset(
        {
            *("client_metadata", "prompt_cache_key", "prompt_cache_retention"),
            *("access_programs", "background_options", "image"),
            "max_tool_calls",  # of tools that OpenAI's servers run
        }
    )

    input: Items
    """A text, or a list of items."""
    include: list[str] | None = None
    """The additions that the answer shall have. Reasoning always has `encrypted_content`; all else is
    ignored, and the answer names it."""
    instructions: str | None = None
    """The system's message, before everything else."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    tools: Tools = Field(default=[])
    """Functions and tools that the client runs; all others are left out, and the answer names them."""
    tool_choice: Any = None
    """`auto`, `none`, `required`, or an object that names a tool, or those that are allowed."""
    parallel_tool_calls: bool | None = None
    text: TextConfig = Field(default=TextConfig())
    user: str | None = None
    """The user whose request this is. Slots are shared fairly among users."""
    safety_identifier: str | None = None
    """OpenAI's newer name of `user`, which counts before it."""
    return_progress: bool = False
    """llama-server's: whether a stream tells how far its prompt is computed, in `prompt_progress`."""
    timings_per_token: bool = False
    """llama-server's: whether a stream's events tell `timings`."""
    metadata: RequestMetadata | None = None
    """Given back with the answer."""
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A response that is kept: its conversation comes before `input`."""
    store: bool = True
    """Whether the response is kept for some minutes, to go on from and to be asked for again."""
    background: bool = False
    """Whether it is made however soon the client leaves. That needs `store`."""
    stream_options: ObfuscationOptions | None = None
    reasoning: ReasoningConfig | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _format_of_chats(cls, data: Any) -> Any:
        """Some clients send the format of the answer as chats have it."""
        if not isinstance(data, dict) or not isinstance(data.get("response_format"), dict):
            return data
        form, text = dict(data["response_format"]), data.get("text") or {}
        schema = form.pop("json_schema", None) or {}
        if not isinstance(schema, dict) or not isinstance(text, dict):
            name = "text" if isinstance(schema, dict) else "response_format.json_schema"
            raise InvalidRequestError(f"'{name}' must be an object.", name)
        text = {"format": form | schema, **text}
        return {name: v for name, v in data.items() if name != "response_format"} | {"text": text}

    @field_validator("tool_choice")
    @classmethod
    def _must_be_a_choice(cls, value: object) -> object:
        try:
            _CHOICES.validate_python(plain_choice(value))
        except ValidationError:
            raise ValueError(
                "Input should be 'auto', 'none', 'required', or an object that names a tool"
            ) from None
        return value

    @field_validator("include")
    @classmethod
    def _name_what_is_not_included(cls, value: list[str] | None) -> list[str] | None:
        names = value or ()
        name_ignored(f"include.{name}" for name in names if name != "reasoning.encrypted_content")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.background and not self.store:
            raise InvalidRequestError("'background' needs 'store'.", "background")
        return self

    def as_chat(self, items: Sequence[AnyItem]) -> TranslatedChat:
        """Translate the request, with the items that it answers, to OpenAI's chat. Raises
        InvalidRequestError."""
        later = LaterTools(functions(self.tools))
        conversation = turns(items, later)
        updates = [item for item in items if isinstance(item, ConfigurationItem)]
        texts = [self.text, *(item.text for item in updates if item.text)]
        efforts = [self.reasoning, *(item.reasoning for item in updates)]
        if self.instructions:
            conversation.insert(0, Turn("system", (self.instructions,)))
        return TranslatedChat(
            turns=conversation,
            stream_options=StreamOptions(**dict(self.stream_options or ())),
            max_tokens=self.max_output_tokens,
            json_schema=texts[-1].schema_of_answer(),
            tools=list(functions(self.tools, deferred=False)),
            later_tools=[*later.known.values()],
            tool_choice=plain_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            user=self.user,
            safety_identifier=self.safety_identifier,
            return_progress=self.return_progress,
            timings_per_token=self.timings_per_token,
            reasoning_effort=next(
                (one.effort for one in reversed(efforts) if one and one.effort), None
            ),
            verbosity=self.text.verbosity,
            **self.common_fields(),
            **read_params(self, Api.RESPONSES),
        )


_CHOICES: TypeAdapter[ToolChoice] = TypeAdapter(ToolChoice)


class PreparedResponse(msgspec.Struct, frozen=True, tag=True):
    """The prepared request for a response."""

    chat: Chat
    asked: dict[str, Any]
    """The fields that the response repeats of its request."""
    items: bytes
    """The conversation that it answers."""
    item_ids: list[str]
    later_tools: list[dict[str, Any]]
    """The tools that the conversation makes known, in the form of the response's own."""


class After(msgspec.Struct, frozen=True, tag=True):
    """The request must be read with what is kept: it goes on from a response, or refers to items."""

    response_id: str | None
    item_ids: list[str]


def response(models: Models, body: bytes) -> PreparedResponse | After:
    """POST /v1/responses, maybe behind a record. Raises CorralError."""
    read = _read_request(models, body)
    if isinstance(read, After):
        return read
    request, items, chat, model = read
    later = [
        _tool_fields(tool)
        for item in items.read
        if isinstance(item, LaterToolsItem)
        for tool in item.tools
    ]
    prepared = preparation.prepare_chat(model, chat, 1, "input")
    asked = _request_fields(request, prepared.generation.sampling)
    return PreparedResponse(
        prepared, asked, items.pack(), [item["id"] for item in items.as_json], later
    )


def count_input_tokens(models: Models, body: bytes) -> PromptLength | After:
    """POST /v1/responses/input_tokens, maybe behind a record: the prompt's length. Raises CorralError."""
    read = _read_request(models, body)
    if isinstance(read, After):
        return read
    _, _, chat, model = read
    return preparation.length(model, chat, "input")


def render(models: Models, body: bytes) -> bytes | After:
    """POST /v1/responses/render, maybe behind a record: the tokens, as JSON. Raises CorralError."""
    read = _read_request(models, body)
    if isinstance(read, After):
        return read
    _, _, chat, model = read
    return encode_json(
        preparation.describe_prompt(preparation.rendered_tokens(model, chat, "input"))
    )


def _read_request(
    models: Models, body: bytes
) -> tuple[ResponsesRequest, ConversationItems, TranslatedChat, ModelInfo] | After:
    """The request, the items that it answers, and both as a chat with a model."""
    has_records = body.startswith(RECORD)
    stored, body = _records(body) if has_records else ([], body)
    request = parse_body(ResponsesRequest, body)
    ids, before = reference_ids(request.input), list[Any]()
    if not has_records and (request.previous_response_id is not None or ids):
        return After(request.previous_response_id, ids)
    if request.previous_response_id is not None:
        before = _conversation(models, *stored.pop(0))
    known = {item["id"]: item for one in stored for item in _complete_items(models, *one)}
    # Those before the last missing one were not looked for.
    missing = next((name for name in reversed(ids) if name not in known), None)
    if missing is not None:
        raise ItemNotFoundError(missing, is_kept=request.store)
    items = ConversationItems.of(before, request.input, {name: known[name] for name in ids})
    if not items.read:
        raise InvalidRequestError("'input' is empty. Send at least one item.", "input")
    model = find(models, request.model)
    return request, items, request.as_chat(items.read), model


RECORD = b"\0"
"""The first byte of records, which no JSON begins with, and which no client may send."""


def record(*stored: StoredResponse) -> list[bytes]:
    """The pieces of a body with the records of responses, which only workers read: they may be long."""
    pieces = [[one.stored_request, *one.chunks] for one in stored]
    sizes = b";".join(b" ".join(b"%d" % len(piece) for piece in of_one) for of_one in pieces)
    return [RECORD + sizes + b"\n", *chain.from_iterable(pieces)]


_Record = tuple[StoredRequest, list[memoryview]]


def _records(body: bytes) -> tuple[list[_Record], bytes]:
    """The inputs of responses, the chunks of their logs, and the body behind them."""
    start, stored = body.index(b"\n") + 1, list[_Record]()
    for sizes in filter(None, body[len(RECORD) : start - 1].split(b";")):
        pieces = list[memoryview]()
        for size in map(int, sizes.split()):
            pieces.append(memoryview(body)[start : start + size])
            start += size
        stored.append((StoredRequest.unpack(pieces[0]), pieces[1:]))
    return stored, body[start:]


def _record(body: bytes) -> _Record:
    """The one response whose record a body has."""
    return _records(body)[0][0]


def answer_to(models: Mapping[str, M], request: StoredRequest, **options: Any) -> ResponseAnswer:
    """The answer to a kept request, before any output. Raises ResponseNotFoundError without its model."""
    try:
        return ResponseAnswer(request, find(models, request.model), **options)
    except ModelNotFoundError:
        raise ResponseNotFoundError(request.id) from None


def _replay(models: Models, request: StoredRequest, chunks: Sequence[memoryview]) -> ResponseAnswer:
    answer = answer_to(models, request)
    for event in chain.from_iterable(merge(unpack_events(chunk)) for chunk in chunks):
        answer.take(event)
    return answer


def response_json(models: Models, body: bytes) -> bytes:
    """GET /v1/responses/{id}: the response whose record this is, as far as it is, as JSON."""
    request, chunks = _record(body)
    return encode_json(_replay(models, request, chunks).whole())


def _conversation(
    models: Models, request: StoredRequest, chunks: Sequence[memoryview]
) -> list[Any]:
    """The items of a response's conversation, its output too."""
    try:
        answer = _replay(models, request, chunks)
    except ResponseNotFoundError:
        raise PreviousResponseError(request.id) from None
    if answer.status in ("queued", "in_progress"):
        message = f"The response {request.id!r} is still being made."
        raise InvalidRequestError(message, "previous_response_id")
    return [*msgspec.json.decode(request.items), *answer.whole()["output"]]


def _complete_items(
    models: Models, request: StoredRequest, chunks: Sequence[memoryview]
) -> Iterator[Any]:
    """The items that a response answers, and those of its own that are not being made."""
    yield from msgspec.json.decode(request.items)
    with suppress(ResponseNotFoundError):
        for item in _replay(models, request, chunks).whole()["output"]:
            if item["status"] != "in_progress":
                yield item


def page(models: Models, body: bytes) -> bytes:
    """GET /v1/responses/{id}/input_items: the query, and the record of the response."""
    query, _, rest = body.partition(b"\n")
    order, limit, after = msgspec.json.decode(query)
    listed = msgspec.json.decode(_record(rest)[0].items)
    if order == "desc":
        listed.reverse()
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        listed = listed[places[0] + 1 :] if places else []
    shown = listed[:limit]
    return encode_json(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(listed) > len(shown),
        }
    )


def _request_fields(request: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    return {
        "background": request.background,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": request.reasoning
            and (request.reasoning.summary or request.reasoning.generate_summary),
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "flex" if request.service_tier == "flex" else "default",
        "store": request.store,
        "text": request.text.model_dump(
            by_alias=True, include={"format", "verbosity"}, exclude_none=True
        ),
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool_fields(tool) for tool in request.tools],
        "user": request.user,
        **sampling_fields.write_params(sampling, Api.RESPONSES),
    }


def _tool_fields(tool: AnyTool) -> dict[str, Any]:
    """The tool as the response repeats it."""
    if isinstance(tool, FunctionTool):
        deferred = set() if tool.defer_loading else {"defer_loading"}
        return tool.model_dump(exclude=deferred) | {"strict": bool(tool.strict)}
    body = tool.model_dump(exclude_none=True)
    if isinstance(tool, NamespaceTool):
        body["tools"] = [_tool_fields(inner) for inner in tool.tools]
    if isinstance(tool, CustomTextTool):
        body["format"] |= body["format"].pop("grammar", {})
    return body
