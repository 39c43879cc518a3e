"""Has the windows of a file heard, a few at a time, and writes their text in OpenAI's forms."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import uuid
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response
from starlette.datastructures import Headers

from serve_app.apis.audio import preparation
from serve_app.apis.audio.hearing import HeardSegment, HearingOrder, Recognizer
from serve_app.apis.audio.preparation import MAX_FILE_BYTES, PreparedWindows, WindowOrder
from serve_app.base.errors import InvalidRequestError, KeyLimitError, RateLimitError
from serve_app.base.values.answers import TokenDelta
from serve_app.server.access.bodies import BodyLimits, BodyReader
from serve_app.server.answering import streaming
from serve_app.server.answering.answers import EventAnswer
from serve_app.server.answering.preparation import Chat
from serve_app.server.answering.streaming import Deltas
from serve_app.server.http import request_context, sse
from serve_app.server.http.dependencies import Bodies
from serve_app.server.http.request_context import Caller
from serve_app.server.http.sse import Json
from serve_app.server.model_registry import ServedModel, find
from serve_app.server.workers.fair_semaphore import FairSemaphore

N_LARGE, N_LARGE_EACH = 4, 1
"""The files that are heard at once, each of which is in memory, and those of one client."""
N_SMALL, N_SMALL_EACH, SMALL_BYTES = 16, 4, 2 * 2**20
"""The small files heard at once, and those of one client: dictations do not wait for long files."""
N_WINDOWS = 4
"""The windows of a file that are heard at once."""
UPLOAD_S, UPLOAD_RATE = 300.0, 16_000
"""The longest time that a file may take to arrive, and its bytes a second: meanwhile it has a place."""
MOST_WAITS = 60
"""How often a file that is being heard waits, where its next windows are refused for now."""
MAX_BODY_BYTES = MAX_FILE_BYTES + 2**16
"""The largest file, and the form around it."""


class Transcriber:
    """Hears files. Event loop only."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        bodies: Bodies,
        recognizer: Recognizer | None = None,
    ) -> None:
        self._models, self._bodies, self._recognizer = models, bodies, recognizer
        self._large = FairSemaphore(N_LARGE, N_LARGE_EACH)
        self._small = FairSemaphore(N_SMALL, N_SMALL_EACH)
        self._uploads = BodyReader(
            BodyLimits(
                N_LARGE + N_SMALL,
                N_LARGE * MAX_BODY_BYTES + N_SMALL * SMALL_BYTES,
                UPLOAD_RATE,
                max_bytes=MAX_BODY_BYTES,
                timeout_s=UPLOAD_S,
            )
        )

    def places(self, headers: Headers) -> FairSemaphore:
        """The places for a request with these headers. It has one from before its body is read until its
        answer is sent."""
        declared = headers.get("content-length", "")
        # A body that is too large is refused before it is read: it need not wait for that.
        is_large = not declared.isdecimal() or SMALL_BYTES < int(declared) <= MAX_BODY_BYTES
        return self._large if is_large else self._small

    async def respond(self, request: Request, *, translates: bool) -> Response:
        """The answer to a form with a file. Raises CorralError."""
        caller = request_context.current()
        form = await self._uploads.read(caller.holder, request.headers, request.receive)
        if form is None:
            raise InvalidRequestError("The form ends too early.")
        n = await _room_of(caller)
        whisper = None if self._recognizer is None else self._recognizer.id
        content_type = request.headers.get("content-type", "")
        order = WindowOrder(content_type, translates, n, whisper=whisper)
        transcript = Transcript(self._models, self._bodies, form, order, self._recognizer)
        await transcript.begin()
        if transcript.group.request.stream:
            events = transcript.stream(transcript.texts(), transcript.events)
            return sse.EventStream(events, transcript)
        async with aclosing(transcript.texts()) as texts:
            async for _ in texts:
                pass
        return transcript.whole()


async def _room_of(caller: Caller) -> int:
    """The windows that the caller's key has room for at once, which count as running from now on."""
    for n in range(N_WINDOWS, 1, -1):
        with suppress(KeyLimitError, RateLimitError):
            await caller.ask_for(n)
            return n
    return 1


@dataclass
class Segment:
    """The text of a window, on its way. The window's sound is not kept."""

    start_s: float
    end_s: float
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    heard: HeardSegment | None = None
    """Whisper's figures of it."""

    def as_json(self, number: int, temperature: float) -> Json:
        """The segment in OpenAI's form. Only Whisper tells whether there was speech."""
        heard = self.heard
        encoded, n = self.text.encode(), max(1, len(self.logprobs))
        return {
            "id": number,
            "seek": round(self.start_s * 100),
            "start": round(self.start_s, 2),
            "end": round(self.end_s, 2),
            "text": self.text,
            "tokens": self.tokens,
            "temperature": temperature,
            "avg_logprob": sum(self.logprobs) / n if heard is None else heard.avg_logprob,
            "compression_ratio": len(encoded) / len(zlib.compress(encoded)),
            "no_speech_prob": 0.0 if heard is None else heard.no_speech_prob,
        }


class Transcript(EventAnswer):
    """A file's text, on its way. Event loop only."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        bodies: Bodies,
        form: list[bytes],
        order: WindowOrder,
        recognizer: Recognizer | None,
    ) -> None:
        self._models, self._bodies, self._recognizer = models, bodies, recognizer
        self._caller, self._language = request_context.current(), ""
        self._form, self._order = form, order
        self._id, self._numbers = f"transcript-{uuid.uuid4().hex}", itertools.count()
        self.group: PreparedWindows
        """The windows that are heard now."""
        self._deltas: Deltas
        self._segments: list[Segment] = []
        self._n_input = self._n_output = 0

    async def begin(self, start: int = 0) -> None:
        """Have the windows from that sample on heard, and wait until they are accepted. Raises
        CorralError."""
        order = dataclasses.replace(self._order, start=start)
        group = await self._bodies.work(preparation.windows, *order.pieces(self._form))
        if group.chat is None:
            self._caller.check_model(group.model)
            await self._caller.admit([], len(group.windows))
        else:
            plan = group.chat.generation
            model, answer_id = find(self._models, plan.model), f"{self._id}-{next(self._numbers)}"
            requests = await streaming.requests(model, answer_id, plan) if group.windows else []
            pairs = zip(requests, group.windows, strict=True)
            heard = [dataclasses.replace(one, media=(window.sound,)) for one, window in pairs]
            self._deltas = await streaming.start(model, heard)
        self.group = group

    async def texts(self) -> AsyncGenerator[str]:
        """The pieces of the file's text, in their order. Raises CorralError."""
        while True:
            chat = self.group.chat
            texts = self._texts_by_whisper() if chat is None else self._texts_by_model(chat)
            async with aclosing(texts):
                async for text in texts:
                    yield text
            if self.group.next_start is None:
                return
            await self._begin_next(self.group.next_start)

    async def _begin_next(self, start: int) -> None:
        """The file has had its turn: where there is no room now for its next windows, it waits."""
        for n_left in reversed(range(MOST_WAITS)):
            try:
                await self.begin(start)
                break
            except RateLimitError as error:
                if not n_left or error.asks_patience:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def _texts_by_whisper(self) -> AsyncGenerator[str]:
        """Windows are heard one after the other, each with segments of its own."""
        recognizer, request, caller = self._recognizer, self.group.request, self._caller
        assert recognizer is not None  # or the worker would have found another model
        for window in self.group.windows:
            order = HearingOrder(
                len(window.sound.samples),
                request.language,
                self._order.translates,
                request.prompt,
                request.temperature,
                request.wants_words,
            )
            heard = await recognizer.hear(caller.holder, order, window.sound)
            caller.keep_charge()
            self._language = self._language or heard.language
            n_tokens = sum(len(one.tokens) for one in heard.segments)
            caller.charge(n_tokens)
            caller.count(self.group.model, {"completion_tokens": n_tokens})
            for spoken in heard.segments:
                begin, end = (window.start_s + at for at in (spoken.start, spoken.end))
                segment = Segment(begin, end, tokens=spoken.tokens, heard=spoken)
                self._segments.append(segment)
                self._n_output += len(spoken.tokens)
                if text := self._add(segment, [spoken.text]):
                    yield text
        caller.settle()
        if self.group.next_start is None:
            caller.count(self.group.model, {"requests": 1, "completed": 1})

    async def _texts_by_model(self, chat: Chat) -> AsyncGenerator[str]:
        """Windows are heard side by side: what a later one says is held until its turn."""
        segments = [Segment(window.start_s, window.end_s) for window in self.group.windows]
        self._segments += segments
        model = find(self._models, chat.generation.model)
        parsers = [streaming.output_parser(model, chat) for _ in segments]
        waiting, current = [deque[TokenDelta]() for _ in segments], 0
        async with aclosing(self._deltas):
            async for index, delta in self._deltas:
                waiting[index].append(delta)
                while current < len(waiting) and waiting[current]:
                    delta, segment = waiting[current].popleft(), segments[current]
                    parts = streaming.parts(parsers[current], delta)
                    texts = [part for part in parts if isinstance(part, str)]
                    if text := self._add(segment, texts):
                        yield text
                    segment.tokens += delta.token_ids
                    segment.logprobs += (one.logprob for one in delta.logprobs)
                    if delta.end is not None:
                        self._n_input += delta.end.usage.prompt_tokens
                        self._n_output += delta.end.usage.completion_tokens
                        current += 1

    def _add(self, segment: Segment, parts: Sequence[str]) -> str:
        """The piece of the file's text that these parts of a segment's text make."""
        text = "".join(parts)
        if segment.text:
            segment.text += text
            return text
        segment.text = text.lstrip()
        is_first = all(one is segment or not one.text for one in self._segments)
        return segment.text if is_first or not segment.text else f" {segment.text}"

    @property
    def text(self) -> str:
        return " ".join(segment.text for segment in self._segments if segment.text)

    @property
    def _usage(self) -> Json:
        n_input, n_output = self._n_input, self._n_output
        usage = {"input_tokens": n_input, "output_tokens": n_output}
        return {"type": "tokens", **usage, "total_tokens": n_input + n_output}

    def waiting(self) -> Iterable[Json]:
        return self.events("")

    def events(self, text: str) -> Iterable[Json]:
        yield {"type": "transcript.text.delta", "delta": text}

    def closing(self) -> Iterable[bytes]:
        done = {"type": "transcript.text.done", "text": self.text, "usage": self._usage}
        return sse.data(done), b"data: [DONE]\n\n"

    def whole(self) -> Response:
        """The answer in the form that the request asks for."""
        request = self.group.request
        match request.response_format:
            case "text":
                return PlainTextResponse(f"{self.text}\n")
            case "srt":
                return PlainTextResponse(self._subtitles(",", numbered=True))
            case "vtt":
                cues = self._subtitles(".", numbered=False)
                return Response(f"WEBVTT\n\n{cues}", media_type="text/vtt")
            case "json":
                return sse.json_response({"text": self.text, "usage": self._usage})
        translates = self._order.translates
        segments = [one.as_json(i, request.temperature) for i, one in enumerate(self._segments)]
        words = [
            {"word": word.word, "start": offset + word.start, "end": offset + word.end}
            for segment in self._segments
            if segment.heard is not None
            for offset in [segment.start_s - segment.heard.start]
            for word in segment.heard.words
        ]
        return sse.json_response(
            {
                "task": "translate" if translates else "transcribe",
                "language": "english" if translates else request.language or self._language,
                "duration": self.group.seconds,
                "text": self.text,
                "segments": segments,
                **({"words": words} if request.wants_words else {}),
                "usage": {"type": "duration", "seconds": round(self.group.seconds)},
            }
        )

    def _subtitles(self, point: str, *, numbered: bool) -> str:
        """The segments as cues. Source: W3C, "WebVTT", and the form of SubRip's files."""
        cues = []
        for number, one in enumerate((one for one in self._segments if one.text.strip()), 1):
            begin, end = (_clock(at, point) for at in (one.start_s, one.end_s))
            text = " ".join(one.text.split())  # an empty line would end the cue
            head = f"{number}\n" if numbered else ""
            cues.append(f"{head}{begin} --> {end}\n{text.replace('-->', '->')}\n\n")
        return "".join(cues)


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
