"""Files are heard by a process of its own, with a library that only measures how long they are."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.config.schema import IngressConfig, WhisperConfig
from tests.doubles.api import build_api
from tests.unit.apis.audio.test_transcriptions import KEY, LONG, ask
from tests.unit.server.harness import events
from tests.unit.server.media.test_sounds import wav

pytest.importorskip("miniaudio")

LIBRARY = """
from types import SimpleNamespace

class WhisperModel:
    supported_languages = ["en"]

    def __init__(self, name, device, compute_type, cpu_threads):
        if name == "nowhere":
            raise RuntimeError("there is no such model")

    def transcribe(self, samples, language, task, initial_prompt, word_timestamps, **_):
        seconds = len(samples) / 16000
        if initial_prompt == "die":
            import os
            os._exit(1)
        def segment(start, end, text):
            words = [SimpleNamespace(word=f" {text}", start=start, end=end)]
            return SimpleNamespace(
                start=start, end=end, text=f" {text}", tokens=[1, 2], avg_logprob=-0.5,
                compression_ratio=1.0, no_speech_prob=0.25, words=words if word_timestamps else None,
            )
        segments = (segment(0.0, 0.5, task), segment(0.5, seconds, f"{seconds:.0f}s"))
        return segments, SimpleNamespace(language=language or "en")
"""


@asynccontextmanager
async def api(model: str = "tiny", **access: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = build_api({}, IngressConfig(whisper=WhisperConfig(model=model, keep_alive=60), **access))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=60, headers=headers
        ) as client,
    ):
        yield client


@pytest.fixture
async def client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "faster_whisper.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with api() as client:
        yield client


async def test_windows_have_segments_of_their_own(client: httpx.AsyncClient) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    heard: dict[str, Any] = (await ask(client, LONG, model="whisper-1", **fields)).json()
    assert heard["language"] == "en"
    segments = heard["segments"]
    assert [one["text"] for one in segments][::2] == ["transcribe"] * 3
    starts = [one["start"] for one in segments]
    assert starts == sorted(starts)
    assert starts[2] > 20
    assert segments[-1]["end"] == pytest.approx(60, abs=0.1)
    assert (segments[0]["avg_logprob"], segments[0]["no_speech_prob"]) == (-0.5, 0.25)
    assert [one["start"] for one in heard["words"]] == pytest.approx(starts, abs=0.01)


async def test_it_is_streamed_and_translated(client: httpx.AsyncClient) -> None:
    answer = await ask(client, wav(2), stream="true")
    deltas = [event for event in events(answer)[:-1] if event["type"].endswith("delta")]
    assert [delta["delta"] for delta in deltas] == ["transcribe", " 2s"]
    answer = await ask(client, wav(2), "/v1/audio/translations", response_format="srt")
    assert "00:00:00,500 --> 00:00:02,000\n2s\n" in answer.text
    assert "translate" in answer.text


async def test_what_is_wrong_is_said(client: httpx.AsyncClient) -> None:
    answer = await ask(client, wav(2), language="tlh")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "language")
    assert (await ask(client, b"no sound")).status_code == 400
    assert (await ask(client, wav(2), model="other")).status_code == 404


async def test_a_process_that_is_lost_is_started_again(client: httpx.AsyncClient) -> None:
    assert (await ask(client, wav(2), prompt="die")).status_code == 503
    assert (await ask(client, wav(2))).json()["text"] == "transcribe 2s"


async def test_a_model_that_cannot_be_had_is_an_error(client: httpx.AsyncClient) -> None:
    async with api("nowhere") as other:
        answer = await ask(other, wav(2))
    assert (answer.status_code, "no such model" in answer.text) == (500, True)


async def test_budgets_of_keys_hold(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """A window has four tokens, and the long file three windows."""
    keys, entry = tmp_path / "keys.yaml", {"name": "a", "key": KEY, "tokens_per_day": 40}
    keys.write_text(yaml.safe_dump({"keys": [entry]}))
    async with api(api_key_file=keys) as limited:
        answers = [await ask(limited, sound) for sound in (wav(2), LONG, LONG, LONG, wav(2))]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429]
    assert answers[-1].headers["x-should-retry"] == "false"
