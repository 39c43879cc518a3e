"""Transcriptions over HTTP, of a scripted engine: forms, formats, order, and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.apis.audio.preparation import WindowOrder, windows
from serve_app.base.errors import EngineFailedError, QueueFullError
from serve_app.base.values.answers import TokenDelta, TokenLogprobs
from serve_app.base.values.media import MEDIUM, SAMPLE_RATE
from serve_app.config.schema import IngressConfig
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.media.decoder import MediaDecoder
from serve_app.server.model_registry import ModelInfo, ServedModel
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.doubles.api import build_api
from tests.unit.server.harness import END, HELLO, Script, ScriptedEngine, events
from tests.unit.server.media.test_sounds import wav
from tests.unit.server.media.test_windows import speech

pytest.importorskip("miniaudio")

URL = "/v1/audio/transcriptions"
TOKENIZER = Tokenizer(BUILTIN_MODEL)
LONG = speech((24.0, 0.1), (1.0, 0.003), (21.0, 0.1), (1.0, 0.003), (13.0, 0.1))
"""A minute, which has three windows."""
KEY = "sk-0123456789abcdef"


def api(engine: ScriptedEngine, access: IngressConfig = IngressConfig()) -> httpx.AsyncClient:  # noqa: B008
    models = {
        name: ServedModel(name, 512, TOKENIZER, media=MediaDecoder(hears=hears), engine=engine)
        for name, hears in (("deaf", False), ("hearing", True))
    }
    transport = httpx.ASGITransport(build_api(models, access), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


@pytest.fixture
async def hearing(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with api(engine) as client:
        yield client


async def ask(
    client: httpx.AsyncClient, data: bytes, url: str = URL, **fields: Any
) -> httpx.Response:
    return await client.post(url, files={"file": ("a.wav", data)}, data=fields)


def says(*texts: str) -> list[Script]:
    """Scripts of an engine: a text for each window."""
    return [[TokenDelta(text, (5,)), TokenDelta("", (), END)] for text in texts]


async def test_a_short_file_is_one_request(
    hearing: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    answer = await ask(hearing, wav(2), language="de", prompt="Corral", seed="7")
    usage = {"type": "tokens", "input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    assert answer.json() == {"text": "Hello", "usage": usage}
    (request,) = engine.requests
    prompt = TOKENIZER.decode([token for token in request.prompt if token != MEDIUM])
    assert "Transcribe audio to text (language: de)\nContext: Corral\n" in prompt
    assert request.prompt.count(MEDIUM) == 1
    assert [one.size for one in request.media] == [(2 * SAMPLE_RATE,)]
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 7)
    assert request.sampling.max_tokens == 448


def test_lfm2_is_asked_in_its_own_words() -> None:
    template = (
        "{# <|tool_list_start|> #}{% for m in messages %}{{ m.role + m.content }};{% endfor %}"
    )
    hears = MediaDecoder(hears=True)
    model = ModelInfo("m", 512, Tokenizer(BUILTIN_MODEL, template), media=hears)
    form = httpx.Request("POST", "http://x", files={"file": ("a.wav", wav(1))})
    order = WindowOrder(form.headers["content-type"], translates=False, n=1)
    found = windows({"m": model}, b"".join(order.pieces([form.read()])))
    assert found.chat is not None
    prompt = [token for token in found.chat.prompt if token != MEDIUM]
    assert TOKENIZER.decode(prompt) == "systemPerform ASR.;user;"


async def test_translations_ask_for_english(
    hearing: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    answer = await ask(hearing, wav(2), "/v1/audio/translations", response_format="verbose_json")
    assert (answer.json()["task"], answer.json()["language"]) == ("translate", "english")
    assert "Translate audio to English text" in TOKENIZER.decode(
        [token for token in engine.requests[0].prompt if token != MEDIUM]
    )


async def test_windows_are_in_order_whoever_ends_first(
    hearing: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    first = [TokenDelta(" One", (1,)), *[TokenDelta("", (1,))] * 5, TokenDelta(".", (1,), END)]
    engine.scripts = [first, *says(" Two.", " Three.")]
    answer = await ask(hearing, LONG)
    assert answer.json()["text"] == "One. Two. Three."
    assert answer.json()["usage"]["input_tokens"] == 15
    assert len({one.id for one in engine.requests}) == 3


async def test_formats(hearing: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    answers = {}
    for name in ("text", "srt", "vtt"):
        engine.scripts = says("One.", "Two\n\n--> three.", " ")
        answers[name] = await ask(hearing, LONG, response_format=name)
    assert answers["text"].text == "One. Two\n\n--> three.\n"
    first, second = (line.split(" --> ") for line in answers["srt"].text.split("\n")[1:6:4])
    assert answers["srt"].text.split("\n")[0::4] == ["1", "2", ""]
    assert first[0] == "00:00:00,000"
    assert first[1] == second[0]
    assert first[1].startswith("00:00:24,")
    assert "Two -> three." in answers["srt"].text.split("\n")
    assert answers["vtt"].text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:24.")
    assert answers["vtt"].headers["content-type"].startswith("text/vtt")
    assert answers["srt"].headers["content-type"].startswith("text/plain")


async def test_verbose_json_has_segments(
    hearing: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    logprobs = tuple(TokenLogprobs(one, ()) for one in (-0.5, -1.5))
    engine.scripts = [[TokenDelta("Hi.", (1, 2), END, logprobs)], *says("", "Bye.")]
    answer = (await ask(hearing, LONG, response_format="verbose_json", temperature="0.5")).json()
    assert (answer["text"], answer["duration"], answer["task"]) == ("Hi. Bye.", 60.0, "transcribe")
    first, _, last = answer["segments"]
    assert (first["start"], last["end"], last["id"]) == (0.0, 60.0, 2)
    assert (first["avg_logprob"], first["tokens"], first["temperature"]) == (-1.0, [1, 2], 0.5)


async def test_a_stream_that_cannot_go_on_ends_with_the_error(
    hearing: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.scripts = [[TokenDelta("Hel", (5,)), EngineFailedError("It is lost.")]]
    delta, failed = events(await ask(hearing, wav(2), stream="true"))
    assert delta == {"type": "transcript.text.delta", "delta": "Hel"}
    assert failed["error"]["message"] == "It is lost."


async def test_a_stream_has_deltas_and_the_whole_text(
    hearing: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.scripts = says("One.", "", "Three.")
    *deltas, done, last = events(await ask(hearing, LONG, stream="true"))
    assert [one["delta"] for one in deltas] == ["One.", " Three."]
    assert {one["type"] for one in deltas} == {"transcript.text.delta"}
    assert (done["type"], done["text"], last) == ("transcript.text.done", "One. Three.", "[DONE]")


async def test_silence_has_no_text_and_asks_no_engine(
    hearing: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    answer = await ask(hearing, speech((130.0, 0.0)))
    assert (answer.json()["text"], engine.requests) == ("", [])


async def test_a_file_that_was_begun_waits_for_room(engine: ScriptedEngine, tmp_path: Path) -> None:
    """A key with one request at a time has one window at a time."""
    keys = tmp_path / "keys.yaml"
    entry = {"name": "a", "key": KEY, "max_concurrent_requests": 1}
    keys.write_text(yaml.safe_dump({"keys": [entry]}))
    one, two, three = says("One.", "Two.", "Three.")
    engine.scripts = [one, [QueueFullError("No room.", 0)], two, three]
    async with api(engine, IngressConfig(api_key_file=keys)) as client:
        answer = await ask(client, LONG)
        assert answer.json()["text"] == "One. Two. Three."
        engine.scripts = [[QueueFullError("No room.", 3)]]
        refused = await ask(client, LONG)
    async with api(engine, IngressConfig(api_key_file=keys)) as client:
        engine.scripts = [one, [QueueFullError("No room for long.", 61)]]
        late = await ask(client, LONG)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
    assert (late.status_code, late.headers["retry-after"]) == (429, "61"), "nobody waits so long"


async def test_dictations_and_files_that_are_too_large_do_not_wait_for_a_long_file(
    hearing: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """The second long file of a client waits for the first, before it is sent."""
    enough, long = asyncio.Event(), speech((70.0, 0.1))
    engine.scripts = [[enough, *HELLO]]
    first = asyncio.create_task(ask(hearing, long))
    async with asyncio.timeout(20):
        while not engine.requests:  # noqa: ASYNC110  # a scripted engine has no event for it
            await asyncio.sleep(0.01)
    second = asyncio.create_task(ask(hearing, long))
    assert (await ask(hearing, wav(1))).json()["text"] == "Hello"
    huge = {"content-length": str(2**30), "content-type": "multipart/form-data; boundary=a"}
    assert (await hearing.post(URL, headers=huge, content=b"")).status_code == 413
    n_asked = len(engine.requests)
    assert not second.done()
    enough.set()
    for answer in await asyncio.gather(first, second):
        assert answer.status_code == 200
    assert len(engine.requests) == n_asked + 3


@pytest.mark.parametrize(
    ("data", "fields", "status", "message"),
    [
        (b"no sound at all", {}, 400, "none of WAV, MP3, FLAC"),
        (wav(601, 8000)[:-9], {}, 400, "cut off"),
        (wav(1), {"model": "deaf"}, 501, "does not hear"),
        (wav(1), {"model": "whisper-1"}, 404, "whisper-1"),
        (wav(1), {"response_format": "xml"}, 400, "response_format"),
        (wav(1), {"temperature": "hot"}, 400, "temperature"),
        (wav(1), {"seed": str(2**63)}, 400, "seed"),
        (wav(1), {"stream": "true", "response_format": "srt"}, 400, "json or text"),
        (wav(1), {"timestamp_granularities[]": ["word", "segment"]}, 400, "words have none"),
    ],
)
async def test_what_is_refused(
    hearing: httpx.AsyncClient,
    engine: ScriptedEngine,
    data: bytes,
    fields: dict[str, Any],
    status: int,
    message: str,
) -> None:
    answer = await ask(hearing, data, **fields)
    assert (answer.status_code, engine.requests) == (status, [])
    assert message in answer.json()["error"]["message"]


async def test_a_file_must_be_there(hearing: httpx.AsyncClient) -> None:
    empty = await hearing.post(URL, data={"model": "hearing"}, files={"other": ("a.wav", b"x")})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "file")
    other = await hearing.post(URL, json={"file": "a.wav"})
    assert "multipart/form-data" in other.json()["error"]["message"]


async def test_what_is_not_known_is_named(hearing: httpx.AsyncClient) -> None:
    answer = await ask(hearing, wav(1), beam_size="5", chunking_strategy="auto")
    assert answer.headers["x-corral-ignored"] == "beam_size"
    assert json.loads(answer.text)["text"] == "Hello"
