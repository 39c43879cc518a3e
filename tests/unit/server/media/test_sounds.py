"""Sounds in requests: where they stand in prompts, what is decoded, and which are refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import time
import wave
from typing import Any

import numpy as np
import pytest

from serve_app.apis.llama_server import preparation as llama_server
from serve_app.apis.openai import preparation as openai
from serve_app.apis.responses import preparation as responses
from serve_app.base.errors import CorralError, InvalidRequestError, MediaError
from serve_app.base.values.media import MEDIUM, SAMPLE_RATE, Sound
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.answering.preparation import Generation
from serve_app.server.media import decoder
from serve_app.server.media.decoder import MediaDecoder
from serve_app.server.model_registry import ModelInfo
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.doubles.api import prepared

pytest.importorskip("miniaudio")

TOKENIZER = Tokenizer(BUILTIN_MODEL)
HEARING = {"m": ModelInfo("m", 512, TOKENIZER, media=MediaDecoder(hears=True))}
BOTH = {"m": ModelInfo("m", 512, TOKENIZER, media=MediaDecoder(sees=True, hears=True))}
DEAF = {"m": ModelInfo("m", 512, TOKENIZER, media=MediaDecoder(sees=True))}
MP3_FRAME = b"\xff\xfb\x90\x00" + bytes(413)
"""1152 samples of silence, at 44,100 a second and 128 kbit/s."""


def wav(seconds: float = 0.5, rate: int = SAMPLE_RATE, channels: int = 1) -> bytes:
    """A tone."""
    tone = 9000 * np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * 440 / rate)
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(tone.astype("<i2").repeat(channels).tobytes())
    return made.getvalue()


def part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    """Of a message."""
    text = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": kind}}


def asked(*parts: dict[str, Any]) -> bytes:
    """A chat."""
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def of_openai(models: Any, *files: bytes) -> Generation:
    return prepared(openai.chat, models, asked(*map(part, files))).generation


def of_responses(models: Any, *files: bytes) -> Generation:
    content = [*map(part, files), {"type": "input_text", "text": "What is it?"}]
    body = {"input": [{"role": "user", "content": content}]}
    made = prepared(responses.response, models, json.dumps(body).encode())
    assert isinstance(made, responses.PreparedResponse)
    return made.chat.generation


def of_llama_server(models: Any, *files: bytes) -> Generation:
    data = [base64.b64encode(file).decode() for file in files]
    text = "<__media__>" * len(files) + "What is it?"
    body = {"prompt": {"prompt_string": text, "multimodal_data": data}}
    return prepared(llama_server.llama_completion, models, json.dumps(body).encode()).generation


ASKS = [of_openai, of_responses, of_llama_server]


@pytest.mark.parametrize("ask", ASKS)
def test_sounds_stand_in_the_prompt_in_their_order(ask: Any) -> None:
    found = ask(HEARING, wav(0.5), wav(0.25))
    prompt = found.prompt
    assert prompt.count(MEDIUM) == 2
    assert [one.size for one in found.request.media] == [(SAMPLE_RATE // 2,), (SAMPLE_RATE // 4,)]
    assert len({one.key for one in found.request.media}) == 2


def test_a_tone_is_the_same_at_any_rate_and_in_stereo() -> None:
    for data in (wav(1), wav(1, channels=2), wav(1, 48_000), wav(1, 44_100, 2)):
        (sound,) = of_openai(HEARING, data).request.media
        assert isinstance(sound, Sound)
        samples = np.frombuffer(sound.samples, np.float32)
        assert len(samples) == pytest.approx(SAMPLE_RATE, abs=2)
        spectrum = np.abs(np.fft.rfft(samples, SAMPLE_RATE)) / (SAMPLE_RATE / 2)
        assert spectrum.argmax() == 440
        assert spectrum[440] == pytest.approx(9000 / 32768, rel=0.01)


def test_mp3_is_heard() -> None:
    (sound,) = of_openai(HEARING, MP3_FRAME * 20).request.media
    assert sound.size[0] == pytest.approx(20 * 1152 * SAMPLE_RATE / 44_100, rel=0.1)


def test_the_file_tells_what_it_is_and_data_urls_are_taken() -> None:
    data = base64.b64encode(wav()).decode()
    one = {"type": "input_audio", "input_audio": {"data": f"data:audio/x-wav;base64,{data}"}}
    made = prepared(openai.chat, HEARING, asked(one, part(wav(), "mp3")))
    first, second = made.generation.request.media
    assert first == second


def of_rate(rate: int) -> bytes:
    """A file whose header has another rate."""
    data = wav()
    return data[:24] + struct.pack("<I", rate) + data[28:]


BAD = {
    "cut off": (wav()[:30], "it cannot be read"),
    "no file": (b"hello, this is nothing", "none of WAV, MP3, FLAC"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(40), "none of WAV, MP3, FLAC"),
    "empty": (wav(0), "shorter than 0.1"),
    "short": (wav(0.05), "shorter than 0.1"),
    "no rate": (of_rate(0), "shorter than 0.1|cannot be read"),
    "bomb": (of_rate(1), "more than the 600"),
    "long": (wav(601, 8000), "more than the 600"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_ones_are_refused_by_name(name: str) -> None:
    data, told = BAD[name]
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=f"Sound 2 of 2: .*({told})"):
        of_openai(BOTH, wav(), data)
    assert time.monotonic() - began < 20  # a bomb would take minutes


def test_their_seconds_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MAX_S", 1.0)
    assert len(of_openai(HEARING, wav(0.4), wav(0.4)).request.media) == 2
    with pytest.raises(InvalidRequestError, match=r"Sound 3 of 3: .* left"):
        of_openai(HEARING, *[wav(0.4)] * 3)


def test_what_is_no_base64_or_on_the_web_is_refused() -> None:
    for data, told in (("%%%", "not base64"), ("http://a.example/b.wav", "not base64")):
        one = {"type": "input_audio", "input_audio": {"data": data}}
        with pytest.raises(InvalidRequestError, match=told):
            prepared(openai.chat, HEARING, asked(one))


@pytest.mark.parametrize("ask", ASKS)
def test_a_model_that_does_not_hear_refuses_them(ask: Any) -> None:
    with pytest.raises(MediaError, match="Audio input is not supported"):
        ask(DEAF, wav())


def test_a_model_that_only_hears_refuses_pictures() -> None:
    one = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    with pytest.raises(CorralError, match="this model hears, and does not see"):
        prepared(openai.chat, HEARING, asked(one))
