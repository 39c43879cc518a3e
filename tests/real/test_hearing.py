"""Whisper hears what espeak-ng says. Debian has that: apt-get install espeak-ng."""

from __future__ import annotations

import re
import subprocess
from difflib import SequenceMatcher
from pathlib import Path

import httpx
import pytest

from serve_app.config.schema import IngressConfig, WhisperConfig
from tests.doubles.api import build_api
from tests.real.models import FOLDER, TEXT, WHISPER

N_CHARS = 1500


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


@pytest.fixture
def speech(tmp_path: Path) -> bytes:
    path = tmp_path / "said.wav"
    voice = ("-v", "en-us", "-s", "150")
    subprocess.run(("espeak-ng", *voice, "-w", path, TEXT[:N_CHARS]), check=True)
    return path.read_bytes()


async def test_whisper_hears_english(speech: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute and a half, in several windows: at most one word of six is another one than was said."""
    said = TEXT[:N_CHARS]
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    app = build_api({}, IngressConfig(whisper=WhisperConfig(model=str(WHISPER), threads=2)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=300) as client,
    ):
        answer = await client.post(
            "/v1/audio/transcriptions",
            files={"file": speech},
            data={"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        )
    heard = answer.json()
    assert answer.status_code == 200, answer.text
    same = SequenceMatcher(None, words(said), words(heard["text"]), autojunk=False)
    n_same = sum(block.size for block in same.get_matching_blocks())
    assert n_same / len(words(said)) > 5 / 6, heard["text"]
    starts = [segment["start"] for segment in heard["segments"]]
    assert starts == sorted(starts)
    assert len(heard["words"]) == pytest.approx(len(words(heard["text"])), rel=0.1)
    assert heard["words"][-1]["end"] <= heard["duration"]
