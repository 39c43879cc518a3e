"""The same sounds and words to llama-server and to Corral: the same tokens, as likely to rounding."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from serve_app.prompt.tokenizer import Tokenizer
from tests.peers.answers import Pair
from tests.peers.test_pictures import assert_alike, both, user, words
from tools.random_models.model import SHAPES as MODELS
from tools.random_models.model import write_random_gguf
from tools.random_models.projector import SHAPES, write_random_projector

RESAMPLED = 0.01
"""Of a log-probability: versions of one library differ in the last samples of other rates."""
CONTROL = ("<|audio_bos|>", "<|audio_eos|>")
"""Control tokens that Qwen2-Audio's sounds stand between."""


@pytest.fixture(scope="module", params=["tiny", "tiny-qwen2vl"])
def hearing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Both servers; one model has positions of several dimensions, as Qwen2.5-Omni's."""
    folder = tmp_path_factory.mktemp("hearing")
    model, projector = folder / "model.gguf", folder / "projector.gguf"
    write_random_gguf(model, MODELS[request.param], "f32", more_control=CONTROL)
    write_random_projector(projector, SHAPES["tiny-qwen2audio"], Tokenizer(model).model.n_embd)
    with both(model, projector) as pair:
        yield pair


def sound(seed: int, seconds: float, rate: int = 16_000, channels: int = 1) -> dict[str, Any]:
    """A tone that rises, in noise, as a part of a message."""
    rng = np.random.default_rng(seed)
    at = np.arange(int(seconds * rate)) / rate
    tone = np.sin(2 * np.pi * (200 + 100 * seed + 50 * at) * at) + rng.normal(0, 0.1, len(at))
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((8000 * tone).astype("<i2").repeat(channels).tobytes())
    data = base64.b64encode(made.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [user(sound(1, 2), words("What is it?"))],
    "cd": [user(sound(2, 1, 44_100, 2), words("What is it?"))],
    "two": [user(words("First:"), sound(3, 0.5), words("second:"), sound(4, 3, 8000), words("?"))],
    "long": [user(sound(5, 31), words("What is it?"))],
    "earlier": [
        user(sound(6, 2), words("What is it?")),
        {"role": "assistant", "content": "A tone."},
        user(words("How high?")),
    ],
}


@pytest.mark.parametrize("name", CHATS)
def test_sounds_are_heard_alike(hearing: Pair, name: str) -> None:
    assert_alike(hearing, CHATS[name], RESAMPLED)


@pytest.mark.parametrize("seed", [7, 8])
def test_a_file_is_transcribed_alike(hearing: Pair, seed: int) -> None:
    data = base64.b64decode(sound(seed, 3)["input_audio"]["data"])
    fields = {"temperature": "0", "max_tokens": "8", "language": "de"}
    theirs, ours = (
        client.post("/v1/audio/transcriptions", files={"file": ("a.wav", data)}, data=fields).json()
        for client in (hearing.theirs, hearing.ours)
    )
    assert ours["usage"]["input_tokens"] == theirs["usage"]["input_tokens"] > 700
    assert ours["text"].split()[:3] == theirs["text"].split()[:3]
