"""The forms of transcriptions, and how workers turn them into windows of sound and a prompt.

Source: OpenAI's API reference, "Audio".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from serve_app.base.errors import InvalidRequestError, NotSupportedError
from serve_app.base.sampling import Seed
from serve_app.base.values.media import MEDIUM
from serve_app.prompt.conversation import Attachment, Turn
from serve_app.server.answering import preparation
from serve_app.server.answering.preparation import Chat
from serve_app.server.answering.requests import MOST_TOKENS, Text, TranslatedChat
from serve_app.server.http import request_context
from serve_app.server.http.request_model import RequestModel, parse_body
from serve_app.server.http.upload_form import UploadForm
from serve_app.server.media.windows import Window, group
from serve_app.server.model_registry import ModelInfo, Models, find
from serve_app.server.workers.worker import more_memory

MAX_FILE_BYTES = 25 * 2**20
"""OpenAI's bound of a file."""
WINDOW_TOKENS = 448
"""The most tokens of a window's text, as Whisper's: a model that repeats itself ends there."""

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]
_STREAMED_FORMATS = ("json", "text")


class TranscriptionRequest(RequestModel):
    """POST /v1/audio/transcriptions and /v1/audio/translations: the fields beside the file."""

    INERT: ClassVar[frozenset[str]] = frozenset({"chunking_strategy"})

    model: str | None = None
    """A name from /v1/models; the first model that hears if it is missing."""
    language: Annotated[str, Field(max_length=64)] | None = None
    """The language that is spoken, which the model is told."""
    prompt: Text | None = None
    """Words that the model is told before: names, spelling, what was said earlier."""
    response_format: Format = "json"
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = WINDOW_TOKENS
    """The most tokens of the text of each half minute."""
    seed: Seed | None = None
    stream: bool = False
    """Whether the text comes as server-sent events while the file is heard."""
    timestamp_granularities: str = Field(default="segment", alias="timestamp_granularities[]")
    """`word` has Whisper tell when each word is said."""
    user: str | None = None
    """The user whose file this is, without API keys."""

    @property
    def wants_words(self) -> bool:
        return self.timestamp_granularities == "word"

    def check(self, *, by_whisper: bool) -> TranscriptionRequest:
        """The request. Raises InvalidRequestError for combinations that there are not."""
        if self.timestamp_granularities != "segment" and not (by_whisper and self.wants_words):
            raise InvalidRequestError(
                "Only segments have times, and words have none.", "timestamp_granularities[]"
            )
        if self.stream and self.response_format not in _STREAMED_FORMATS:
            raise InvalidRequestError(
                f"A stream has the response format {' or '.join(_STREAMED_FORMATS)}.",
                "response_format",
            )
        return self


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """The part of a file that is wanted next."""

    content_type: str
    translates: bool
    """Whether the text is to be English, whatever is spoken."""
    n: int
    """The most windows."""
    start: int = 0
    """The sample that the first window begins with."""
    whisper: str | None = None
    """The name of the model that hears in a process of its own, if there is one."""

    def pieces(self, form: list[bytes]) -> list[bytes]:
        """The body for a worker: the order as a line of JSON, and the form."""
        return [msgspec.json.encode(self) + b"\n", *form]


_LFM2 = "<|tool_list_start|>"
"""A text in the chat templates of LFM2, whose models that hear find their task in the system prompt."""
_ORDERS = msgspec.json.Decoder(WindowOrder)


@dataclass(frozen=True, slots=True)
class PreparedWindows:
    """Some windows of a file, with a prompt for each of them unless Whisper hears them."""

    request: TranscriptionRequest
    model: str
    chat: Chat | None
    windows: tuple[Window, ...]
    next_start: int | None
    """The sample that the next window begins with; None behind the last window."""
    seconds: float


def windows(models: Models, body: bytes) -> PreparedWindows:
    """The next windows of a transcription. The body is of `WindowOrder.pieces`. Raises CorralError."""
    head = body.index(b"\n") + 1
    order, file = _ORDERS.decode(body[:head]), bytearray()
    with more_memory(2 * len(body)):
        form = UploadForm(order.content_type, file.extend, MAX_FILE_BYTES)
        form.feed(body[head:])
        if not form.complete:
            raise InvalidRequestError("The form ends too early.")
        if form.filename is None:
            raise InvalidRequestError("Field required: the form has no file.", "file")
        request = parse_body(TranscriptionRequest, msgspec.json.encode(form.fields))
        by_whisper = order.whisper is not None and request.model in (None, order.whisper)
        if by_whisper:
            request_context.current().check_model(str(order.whisper), request.model)
        request = request.check(by_whisper=by_whisper)
        model = None if by_whisper else _hearing(models, request.model)
        part = group(bytes(file), order.start, order.n)
    n = len(part.windows)
    chat = None if model is None else _chat(model, request, n, order.translates)
    name = str(order.whisper) if model is None else model.id
    return PreparedWindows(request, name, chat, part.windows, part.next_start, part.seconds)


def _hearing(models: Models, name: str | None) -> ModelInfo:
    hearing = {} if name else {model.id: model for model in models.values() if model.hears}
    model = find(hearing or models, name)
    if not model.hears:
        message = f"The model {model.id!r} does not hear: it has no projector for sound."
        raise NotSupportedError(message, "model")
    return model


def _chat(model: ModelInfo, request: TranscriptionRequest, n: int, translates: bool) -> Chat:
    """A chat that asks for the text of each of `n` windows, in llama-server's words. Source: llama.cpp,
    `common_chat_get_asr_prompt` in common/chat.cpp."""
    sound = Attachment("", is_sound=True)
    task = "Translate audio to English text" if translates else "Transcribe audio to text"
    task += "" if request.language is None else f" (language: {request.language})"
    task += "" if request.prompt is None else f"\nContext: {request.prompt}\n"
    turns = [Turn("user", (task, sound))]
    if _LFM2 in model.tokenizer.chat_template and not translates:
        turns = [Turn("system", ("Perform ASR.",)), Turn("user", (sound,))]
    sampled: Any = {"temperature": request.temperature, "seed": request.seed}
    body = TranslatedChat(
        model=model.id,
        turns=turns,
        max_tokens=request.max_tokens,
        stream=request.stream,
        logprobs=request.response_format == "verbose_json",
        reasoning_effort="none",
        user=request.user,
        **sampled,
    )
    template = preparation.chat_prompt(model, body)
    prompt = tuple(MEDIUM if token < 0 else token for token in template)
    if prompt.count(MEDIUM) != 1:
        raise InvalidRequestError("The model's chat template does not keep sounds.", "file")
    sampling = preparation.chat_sampling(model, body, prompt)
    made = preparation.make_generation(model, body, [prompt] * n, 1, sampling, "prompt")
    return Chat(made, [], thinks=True)
